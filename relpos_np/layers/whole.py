"""Whole attention of published layers: weights by their published names, around the attention of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from relpos_np._contract import check
from relpos_np.configs.layer import LayerAttention, stored
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.configs.steps import (
    Clip,
    Finish,
    Gate,
    KeysAsValues,
    KeysOf,
    Latent,
    Norm,
    Step,
    Times,
    Told,
    Turned,
    TurnedInputs,
)
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.formulas.rotations import rotary_matrices, rotate_inputs, rotate_pairs
from relpos_np.layers.linear import Linear, merge_heads, sequence, split_heads
from relpos_np.layers.state import Source, State
from relpos_np.types import Array

# Names of the projections of queries, keys and values below the attention of a layer, the longer ones first.
APART = (
    ("self.query", "self.key", "self.value"),
    ("self.query_proj", "self.key_proj", "self.value_proj"),
    ("query", "key", "value"),
    ("attention.query", "attention.key", "attention.value"),
    ("linear_q", "linear_k", "linear_v"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj.linear", "k_proj.linear", "v_proj.linear"),
    ("q_lin", "k_lin", "v_lin"),
    ("Wq", "Wk", "Wv"),
    ("q", "k", "v"),
)
# One projection for all three.
TOGETHER = ("query_key_value", "qkv_proj", "self.in_proj", "c_attn", "Wqkv", "qkv")
LATENT = "kv_a_proj_with_mqa"
OUT = (
    *("o_proj", "o_proj.linear", "out_proj", "output.dense", "dense", "c_proj", "Wo", "out_lin", "linear_out", "o"),
    "proj",
)
# How rows of one projection lie: in how many blocks, 0 for one per key head, and what each holds. Elsewhere all
# queries come first, then all keys and all values.
BLOCKS: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "persimmon", "gpt_bigcode"), (0, "qkv")),
    **dict.fromkeys(("gpt_neox_reward_model", "RefinedWeb", "RefinedWebModel"), (0, "qkv")),
    "deberta": (0, "qkv"),
    "codegen": (4, "qvk"),
}
# Below a layer's attention, and no part of it: buffers, norms before and after, a bias that is added after them, and
# indexers, whose choice a call passes.
OTHERS = re.compile(
    r"(^|\.)(rotary_emb\.|inv_freq$|masked_bias$|embed_positions|indexer\.|dense_bias$"
    r"|LayerNorm\.|self_attn_layer_norm\.|ln\.|\w+_integer$|\w+_scaling_factor$|\w+_act(ivation)?\.|x_(min|max)$)"
)
# Words in names of cross-attention.
CROSS = ("cross", "encoder_attn", "EncDec", "encoder_attention")
# Weight and bias of a norm, and operands by their letters.
Affine: TypeAlias = "tuple[Array, Array | None]"
Operands: TypeAlias = "dict[str, Array]"


class PublishedAttention:
    """The attention of one published layer, with its projections, norms and gates: see `LayerAttention.run`.

    Parameters
    ----------
    layer : LayerAttention
        From `relpos_np.from_config`.
    weights : mapping, str, path-like or State
        See `tensors`: with the names as published, of the whole model or of this attention alone.
    prefix : str
        What precedes the names, where more than one attention would fit.

    Raises
    ------
    RelposError
        If a weight is missing, or the layer does something that is not understood.
    """

    def __init__(self, layer: LayerAttention, weights: Source, *, prefix: str = "") -> None:
        for step in layer.before:
            if isinstance(step, Told | KeysOf):
                raise RelposValueError(f"{layer.model_type}: a whole layer cannot be run: {step}")
        state = State(weights)
        self.layer = layer
        self.path, self.names, self.out = _located(layer, state, prefix)
        self._own = State(state, self.path)
        self._read: set[str] = set()
        self._turned = False
        self._beside: Linear | None = None
        self._norms: dict[str, Affine] = {}
        self._latent = next((step for step in layer.before if isinstance(step, Latent)), None)
        self._parts = self._latents() if self._latent else self._projections()
        self._out = self._linear(self.out)
        self._before = [(step, self._weights(step)) for step in layer.before]
        self._after = [(step, self._weights(step)) for step in layer.after]
        self._bound = layer.bind(state, prefix=prefix, own=self.path)
        bound = [*(plan.weights for plan in layer.schemes), {"sinks": layer.sinks} if layer.sinks else {}]
        known = [full for names in bound for full in stored(names, state, prefix, self.path).values()]
        self._close({full.removeprefix(self.path) for full in known})

    def _linear(self, name: str) -> Linear:
        self._read |= {f"{name}.weight", f"{name}.bias"}
        if self._turned:
            return Linear(self._own.take(f"{name}.weight").T, self._own.get(f"{name}.bias"), name=self.path + name)
        return Linear.read(self._own, name)

    def _norm(self, name: str) -> Affine:
        """Weight and bias of a norm; several modules have one head each."""
        heads = [one for one in self._own.names() if one.startswith(f"{name}.norms.")]
        self._read |= {f"{name}.weight", f"{name}.bias", *heads}
        if heads:
            return np.stack([self._own.take(f"{name}.norms.{n}.weight") for n in range(len(heads))]), None
        return self._own.take(f"{name}.weight"), self._own.get(f"{name}.bias")

    def _weights(self, step: Step | Finish) -> list[Any]:
        """What a step reads."""
        if isinstance(step, Norm):
            return [self._norm(name) for name in step.names] or [None] * len(step.of)
        if isinstance(step, Gate):
            self._read.add(step.bias)
            gate = self._beside or self._linear(step.name)
            return [gate, self._own.take(step.bias) if step.bias else None]
        return []

    def _latents(self) -> dict[str, Linear]:
        """DeepSeek's projections; the norms between them are kept apart."""
        names = ("q_proj",) if self._own.has("q_proj.weight") else ("q_a_proj", "q_b_proj")
        self._norms = {name: self._norm(name) for name in ("kv_a_layernorm", "q_a_layernorm")[: len(names)]}
        return {name: self._linear(name) for name in (*names, LATENT, "kv_b_proj")}

    def _projections(self) -> dict[str, Linear]:
        """Those of queries, keys and values, which may be one."""
        layer = self.layer
        sizes = dict(zip("qkv", _sizes(layer), strict=True))
        if len(self.names) == 1:
            # GPT-2 stores all its weights the other way round; those of three projections are never square.
            self._turned = self._own.take(f"{self.names[0]}.weight").shape[-1] == sum(sizes.values())
            every = self._linear(self.names[0])
            blocks, order = BLOCKS.get(layer.model_type, (1, "qkv"))
            blocks = blocks or layer.kv_heads
            parts = dict(zip(order, _cut(every, blocks, [sizes[one] // blocks for one in order]), strict=True))
        else:
            query, key, value = self.names
            value = key if KeysAsValues() in layer.before else value
            parts = {one: self._linear(name) for one, name in (("q", query), ("k", key), ("v", value))}
            if any(isinstance(step, Gate) and step.name == query for step in layer.after):
                parts["q"], self._beside = _cut(parts["q"], layer.heads, (layer.head_dim, layer.value_dim))
        for one, name in (("q", "self.q_bias"), ("v", "self.v_bias")):
            if self._own.has(name):
                self._read.add(name)
                parts[one] = Linear(parts[one].weight, self._own.take(name).reshape(-1))
        for one, linear in parts.items():
            if linear.outputs != sizes[one]:
                raise RelposValueError(f"{self.path}: {linear.outputs} channels of {one}, expected {sizes[one]}")
        return parts

    def _close(self, known: set[str]) -> None:
        """Refuse tensors of this attention that nothing is known of."""
        left = [name for name in self._own.names() if name not in known | self._read and not OTHERS.search(name)]
        # Masks of early files are buffers of four axes.
        left = [name for name in left if not name.endswith("bias") or self._own.take(name).ndim < 4]
        if left:
            raise RelposValueError(f"{self.path}: not understood in {self.layer.model_type}: {', '.join(left[:8])}")

    def __call__(self, x: Array, *, context: Array | None = None, **options: Any) -> Array:
        """What the layer's attention makes of its input.

        Parameters
        ----------
        x, context, **options
            See `LayerAttention.run`.

        Returns
        -------
        ndarray
            In the shape and dtype of x.
        """
        layer = self.layer
        if (layer.part == "cross") != (context is not None):
            raise RelposTypeError(f"context: {'not taken' if context is not None else 'needed'}, part {layer.part!r}")
        dtype = check.array("x", x).dtype
        if "hidden" in layer.inputs:
            options = {"hidden": x, **options}
        operands = (
            self._expanded(x, self._latent) if self._latent else self._apart(x, x if context is None else context)
        )
        for step, weights in self._before:
            if isinstance(step, Turned) and (options.keys() & {"offset", "segments"} or context is not None):
                raise RelposTypeError("offset, segments, context: not where queries and keys turn before their norms")
            operands = _prepared(step, weights, operands)
        out = self._bound(operands["q"], operands["k"], operands["v"], **options)
        for last, weights in self._after:
            out = _finished(last, weights, out, x)
        return self._out(merge_heads(out), dtype)

    def _apart(self, x: Array, states: Array) -> Operands:
        layer = self.layer
        heads = {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads}
        given = {"q": x, "k": states, "v": states}
        for step in layer.before:
            if isinstance(step, TurnedInputs):
                given |= {one: rotate_inputs(given[one], layer.heads, base=step.base) for one in "qk"}
        return {
            one: split_heads(linear(sequence("x", given[one], linear.inputs)), heads[one])
            for one, linear in self._parts.items()
        }

    def _expanded(self, x: Array, step: Latent) -> Operands:
        """Latent vectors written out: the channels of a key that turn are the same for all heads."""
        layer, parts, norms = self.layer, self._parts, self._norms
        if "q_proj" in parts:
            q = parts["q_proj"](x)
        else:
            q = parts["q_b_proj"](_normed(step, norms["q_a_layernorm"], parts["q_a_proj"](x)))
        latent, turning = np.split(parts[LATENT](sequence("x", x, parts[LATENT].inputs)), [step.rank], axis=-1)
        latent = _normed(step, norms["kv_a_layernorm"], latent) * q.dtype.type(step.factor)
        both = split_heads(parts["kv_b_proj"](latent), layer.heads)
        still = layer.head_dim - step.turning
        shared = np.broadcast_to(turning[..., None, :, :], (*both.shape[:-1], step.turning))
        k = np.concatenate([both[..., :still], shared], axis=-1)
        return {"q": split_heads(q, layer.heads) * q.dtype.type(step.query_factor), "k": k, "v": both[..., still:]}


def _located(layer: LayerAttention, state: State, prefix: str) -> tuple[str, tuple[str, ...], str]:
    """What precedes the names of a layer's attention, and the names of its projections and of that of its output."""
    latent = any(isinstance(step, Latent) for step in layer.before)
    conventions = ((LATENT,),) if latent else (*APART, *((name,) for name in TOGETHER))
    stored, found = state.names(), {}
    for names in conventions:
        tail = f"{names[0]}.weight"
        for path in (full.removesuffix(tail) for full in stored if full == tail or full.endswith(f".{tail}")):
            outs = [out for out in OUT if state.has(f"{path}{out}.weight")]
            if path not in found and path.startswith(prefix) and _is(layer, path[len(prefix) :]) and len(outs) == 1:
                found[path] = names, outs[0]
    if len(found) > 1:
        # Several stacks: that whose projections have the right sizes.
        rows = {layer.heads * layer.head_dim, layer.heads * (layer.head_dim + layer.value_dim), sum(_sizes(layer))}
        right = {path for path, (names, _) in found.items() if rows & {*state.take(f"{path}{names[0]}.weight").shape}}
        found = {path: one for path, one in found.items() if path in right} if right else found
    if len(found) > 1:
        raise RelposValueError(f"prefix: expected that of one of {', '.join(sorted(found)[:8])}")
    for path, (names, out) in found.items():
        return path, names, out
    raise RelposValueError(
        f"weights: no attention of layer {layer.layer}{prefix and f' below {prefix}'} has one of "
        f"{', '.join(names[0] for names in conventions)}, and one of {', '.join(OUT)}"
    )


def _sizes(layer: LayerAttention) -> tuple[int, int, int]:
    """Channels of all queries, keys and values."""
    return layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.value_dim


def _is(layer: LayerAttention, path: str) -> bool:
    """Whether a path may be that of the layer: by its first numbers, and the words of its part."""
    numbers = tuple(int(word) for word in path.split(".") if word.isdecimal())
    address = layer.address or (layer.layer,)
    words = path.split(".")
    if not numbers:
        return True
    if numbers[: len(address)] != address or any(cross in path for cross in CROSS) != (layer.part == "cross"):
        return False
    sides = {"encoder", "decoder"} & {*words}
    wanted = "decoder" if layer.part == "cross" else layer.part
    return not sides or wanted not in ("encoder", "decoder") or wanted in sides


def _cut(linear: Linear, blocks: int, sizes: Sequence[int]) -> list[Linear]:
    """The parts of a projection whose outputs lie in blocks, each with so many of every part."""
    if linear.outputs != blocks * sum(sizes):
        raise RelposValueError(f"weights: {linear.outputs} outputs of one projection, expected {blocks * sum(sizes)}")
    ends = np.cumsum(sizes)

    def rows(x: Array) -> list[Array]:
        apart = x.reshape(blocks, sum(sizes), *x.shape[1:])
        return [apart[:, end - size : end].reshape(-1, *x.shape[1:]) for size, end in zip(sizes, ends, strict=True)]

    biases = [None] * len(sizes) if linear.bias is None else rows(linear.bias)
    return [Linear(weight, bias) for weight, bias in zip(rows(linear.weight), biases, strict=True)]


def _normed(step: Norm | Latent, affine: Affine | None, y: Array) -> Array:
    """A norm of the last axis; weights (H, D) are those of the heads."""
    if isinstance(step, Norm) and step.kind == "layer":
        y = y - y.mean(axis=-1, keepdims=True)
    y = y / np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + y.dtype.type(step.eps))
    if affine is None:
        return y
    weight, bias = (None if x is None else (x[:, None] if x.ndim == 2 else x).astype(y.dtype) for x in affine)
    shift = step.shift if isinstance(step, Norm) else 0.0
    y = y * (weight + y.dtype.type(shift))
    return y if bias is None else y + bias


def _of_heads(step: Norm, affine: Affine | None, y: Array) -> Array:
    return _normed(step, affine, y) if step.each else split_heads(_normed(step, affine, merge_heads(y)), y.shape[-3])


def _prepared(step: Step, weights: Sequence[Any], operands: Operands) -> Operands:
    """Operands after a step."""
    if isinstance(step, Norm):
        normed = {one: _of_heads(step, x, operands[one]) for one, x in zip(step.of, weights, strict=True)}
        return {**operands, **normed}
    if isinstance(step, Clip):
        return {one: y.clip(-step.limit, step.limit) for one, y in operands.items()}
    if isinstance(step, Turned):
        return {**operands, **{one: _turned(step.plan, operands[one]) for one in "qk"}}
    if isinstance(step, Times):
        y = operands[step.of]
        return {**operands, step.of: y * y.dtype.type(step.factor)}
    return operands


def _turned(plan: SchemePlan, y: Array) -> Array:
    """Queries or keys at positions from 0 on, turned as the scheme of a plan turns them."""
    length, dim = y.shape[-2:]
    places = np.arange(length)
    rotary = plan.build(Given(plan.options, {}, length, length, places, length, dim, y.dtype, {}))
    omega = rotary.frequencies
    if omega is None:
        omega = rotary_frequencies(rotary.dim or dim, base=rotary.base)
    matrices = rotary_matrices(places, omega, magnitude=rotary.magnitude)
    return rotate_pairs(y, matrices, layout=rotary.layout)


def _finished(step: Finish, weights: Sequence[Any], out: Array, x: Array) -> Array:
    """The output after a step."""
    if isinstance(step, Norm):
        return _of_heads(step, weights[0], out)
    gate, bias = weights
    made = split_heads(gate(x), out.shape[-3])
    made = made if bias is None else made + bias.astype(made.dtype)[:, None, None]
    factors = 1 / (1 + np.exp(-made)) if step.activation == "sigmoid" else np.logaddexp(made, made.dtype.type(0))
    return out * factors
