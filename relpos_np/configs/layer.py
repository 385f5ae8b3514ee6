"""What a configuration says of one attention layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np._contract import check
from relpos_np.configs.plans import Given, Rule, SchemePlan, Temperature, first
from relpos_np.configs.steps import Finish, KeysOf, Latent, Step
from relpos_np.errors import RelposValueError
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.types import Array

if TYPE_CHECKING:
    from relpos_np.configs.bound import BoundAttention
    from relpos_np.layers import State


@dataclass(frozen=True)
class LayerAttention:
    """Everything that a layer's attention is, between its projections and the projection of its output.

    Attributes
    ----------
    model_type, part, layer, layers
        Which layer: `model_type` of the configuration, "encoder", "decoder", "cross" or "" of a model that has one
        stack, the layer's number, and how many there are.
    heads, kv_heads, head_dim, value_dim : int
        H, H_kv, D and D_v.
    schemes : tuple of SchemePlan
        What positions contribute to the scores.
    added : SchemePlan or None
        What positions contribute to the inputs of the first layer; a call of the layer has nothing to do with it.
    scale : float
        The factor on q · k, or NaN where a scheme holds its own.
    causal : bool
        Whether a query attends the past only.
    window : tuple of (int or None) or None
        How far it attends, (left, right).
    rule : Rule or None
        Any other rule of what it attends.
    softcap, cap_order
        c of c·tanh(s / c), and what comes first.
    sinks : str
        Name of the weight that holds a score per head without a value; "" for none.
    query_scale : Temperature or None
        Factors on the queries.
    needs : tuple of str
        Options of `relpos_np.attention` that every call must give, as the model computes them.
    before : tuple of Step
        What is done to queries, keys and values, besides their projection, before they are passed to the call; ``str``
        of each says it.
    after : tuple of Finish
        What is done to the output before its projection.
    notes : tuple of str
        What else to mind.
    address : tuple of int
        The numbers in the names of the layer's weights; () for that of the layer.
    ignored : tuple of str
        Keys of the configuration that were read as if it had none of them, because `from_config` was told so.
    """

    model_type: str
    part: str
    layer: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    schemes: tuple[SchemePlan, ...] = ()
    added: SchemePlan | None = None
    window: tuple[int | None, int | None] | None = None
    rule: Rule | None = None
    softcap: float | None = None
    cap_order: str = "scores"
    sinks: str = ""
    query_scale: Temperature | None = None
    needs: tuple[str, ...] = ()
    before: tuple[Step, ...] = ()
    after: tuple[Finish, ...] = ()
    notes: tuple[str, ...] = ()
    address: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of all weights that `bind` reads, without the model's prefix."""
        names = [first(name) for plan in self.schemes for name in plan.weights.values()]
        return (*names, self.sinks) if self.sinks else tuple(names)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What a call must give besides q, k and v, for the schemes and the rule."""
        ruled = () if self.rule is None else self.rule.inputs.values()
        return tuple(dict.fromkeys([*(name for plan in self.schemes for name in plan.inputs), *ruled]))

    @property
    def optional(self) -> tuple[str, ...]:
        """What a call may give besides."""
        return tuple(dict.fromkeys(name for plan in self.schemes for name in plan.optional))

    def as_dict(self) -> dict[str, Any]:
        """The layer as what JSON can say, arrays as lists.

        Returns
        -------
        dict
            Names of attributes to values.
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plans = fields.pop("schemes")
        fields["schemes"] = [plan.as_dict() for plan in plans]
        fields["cached"] = self.cached
        fields["added"] = None if self.added is None else self.added.as_dict()
        fields |= {name: [str(step) for step in fields[name]] for name in ("before", "after")}
        for name in ("rule", "query_scale"):
            fields[name] = None if fields[name] is None else asdict(fields[name])
        fields["scale"] = None if math.isnan(self.scale) else self.scale
        return fields

    @property
    def cached(self) -> int:
        """Numbers that decoding keeps of each token: of keys and values, or of latent vectors; 0 for an encoder.

        A layer that takes keys and values of another one keeps none.
        """
        if self.part != "cross" and not self.causal and self.rule is None:
            return 0
        for step in self.before:
            if isinstance(step, KeysOf):
                return 0
            if isinstance(step, Latent):
                return step.rank + step.turning
        # Values that turn are the keys.
        alike = any(plan.options.get("values") for plan in self.schemes)
        return self.kv_heads * (self.head_dim + (0 if alike else self.value_dim))

    def cache_bytes(self, tokens: int = 1, *, dtype: Any = np.float16) -> int:
        """Bytes that decoding keeps for one sequence in this layer.

        Parameters
        ----------
        tokens : int
            Length of the sequence; of a layer with a window only so many count, of cross-attention those of the
            encoder.
        dtype : dtype
            Of keys and values.

        Returns
        -------
        int
            Without what a program keeps beside them.

        Examples
        --------
        >>> import relpos_np as rp
        >>> layer = rp.from_config({"model_type": "mistral"}, layer=0)
        >>> layer.cache_bytes(), layer.cache_bytes(100_000) // layer.cache_bytes()
        (4096, 4096)
        """
        count = check.integer("tokens", tokens, 0)
        left = None if self.window is None else self.window[0]
        return (count if left is None else min(count, left + 1)) * self.cached * int(np.dtype(dtype).itemsize)

    def describe(self) -> str:
        """The layer in lines of text.

        Returns
        -------
        str
            One line for each thing that the configuration decides, without those that are absent.
        """
        part = f", {self.part}" if self.part else ""
        head = f"{self.model_type}{part}, layer {self.layer} of {self.layers}"
        return "\n".join([head, *(f"  {name:<16}{text}" for name, text in self.rows())])

    def rows(self) -> list[tuple[str, str]]:
        """What `describe` says, each with its name.

        Returns
        -------
        list of tuple of str
            Names and texts; "" for what goes on with the row before.
        """
        rows = [("heads", f"{self.heads} of {self.head_dim} channels")]
        if self.kv_heads != self.heads:
            rows.append(("key heads", str(self.kv_heads)))
        if self.value_dim != self.head_dim:
            rows.append(("value channels", str(self.value_dim)))
        rows.append(("positions", " + ".join(plan.words() for plan in self.schemes) or "none"))
        rows += [("", plan.remark) for plan in self.schemes if plan.remark]
        if self.added is not None:
            rows.append(("added to inputs", self.added.words()))
        rows.append(("scale", "of the scheme" if math.isnan(self.scale) else f"{self.scale:.8g}"))
        rows.append(("attends", _reach(self)))
        if self.softcap is not None:
            rows.append(("soft cap", f"{self.softcap:g}, order {self.cap_order}"))
        if self.sinks:
            rows.append(("sinks", f"[{self.sinks}]"))
        if self.query_scale is not None:
            rows.append(("query times", self.query_scale.words()))
        for name in ("before", "after"):
            if steps := getattr(self, name):
                rows.append((name, ", ".join(map(str, steps))))
        if self.cached:
            rows.append(("cache", f"{self.cache_bytes()} bytes a token in 16 bits"))
        if needed := (*self.inputs, *self.needs):
            rows.append(("a call needs", ", ".join(needed)))
        if self.optional:
            rows.append(("a call may give", ", ".join(self.optional)))
        rows += [("note", note) for note in self.notes]
        if self.ignored:
            rows.append(("ignored keys", ", ".join(self.ignored)))
        return rows

    def bind(self, weights: Any = None, *, prefix: str = "", own: str | None = None) -> BoundAttention:
        """Read the weights that the layer's positions need.

        Parameters
        ----------
        weights : mapping, str or path-like, optional
            A state dict, or the path of a .safetensors file; see `relpos_np.layers.tensors`. Not needed where
            `weights` of this layer is empty.
        prefix : str
            What precedes the names of this part of the model, where more than one tensor would fit.
        own : str, optional
            What precedes the names of the layer's attention, where its tensors may stand without the model's.

        Returns
        -------
        BoundAttention
            The call.

        Raises
        ------
        RelposError
            If a weight is missing, or several tensors have its name.
        """
        from relpos_np.configs.bound import BoundAttention

        arrays = [_read(plan.weights, weights, prefix, own) for plan in self.schemes]
        sinks = _read({"sinks": self.sinks}, weights, prefix, own)["sinks"].reshape(-1) if self.sinks else None
        return BoundAttention(self, arrays, sinks)

    def run(self, x: Array, weights: Any, *, context: Array | None = None, prefix: str = "", **options: Any) -> Array:
        """The whole attention of the layer, from its input to the projection of its output.

        Projections, norms of queries and keys, latent vectors, attention with positions and masks, gates: what the
        attention module of the published model computes, without the residual connection and the norms around it.

        Parameters
        ----------
        x : ndarray, shape (..., L, width)
            Input of the layer's projections.
        weights : mapping, str or path-like
            A state dict with the names as published, of the whole model or of this attention alone, or the path of a
            .safetensors file: see `relpos_np.layers.tensors`. `relpos_np.layers.PublishedAttention` reads it once for
            many calls.
        context : ndarray, shape (..., L_k, width), optional
            What cross-attention attends.
        prefix : str
            What precedes the names, where more than one attention would fit.
        **options
            What `inputs`, `optional` and `needs` of the layer name, but for ``hidden``, which is x; and options of
            `relpos_np.attention` that the configuration says nothing of.

        Returns
        -------
        ndarray, shape (..., L, width)
            In the dtype of x.

        Raises
        ------
        RelposError
            If a weight is missing, one beside those of the layer is not understood, or the layer does something that
            is not computed here: each by its name.

        Examples
        --------
        >>> import numpy as np, relpos_np as rp
        >>> config = {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
        >>> layer = rp.from_config(config | {"num_key_value_heads": 1}, layer=3)
        >>> rng = np.random.default_rng(0)
        >>> sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
        >>> sizes |= {"q_norm": 16, "k_norm": 16}
        >>> names = {name: f"model.layers.3.self_attn.{name}.weight" for name in sizes}
        >>> weights = {names[name]: rng.standard_normal(size) for name, size in sizes.items()}
        >>> layer.run(rng.standard_normal((2, 7, 32)), weights).shape
        (2, 7, 32)
        """
        from relpos_np.layers import PublishedAttention

        return PublishedAttention(self, weights, prefix=prefix)(x, context=context, **options)

    def encoding(self, weights: Any = None, *, prefix: str = "") -> AbsoluteEncoding | None:
        """What positions add to the inputs of the first layer, read from the weights.

        Parameters
        ----------
        weights, prefix
            See `bind`; not needed for sinusoids.

        Returns
        -------
        LearnedAbsolute, Sinusoidal or None
            None where nothing is added. The plan `added` says in its remark if positions do not count from 0.

        Raises
        ------
        RelposError
            As `bind`.
        """
        if self.added is None:
            return None
        arrays = _read(self.added.weights, weights, prefix)
        width = self.heads * self.head_dim
        given = Given(self.added.options, arrays, 0, 0, np.zeros(0, np.int64), 0, width, np.dtype(np.float64), {})
        encoding: AbsoluteEncoding = self.added.build(given)
        return encoding


def _reach(layer: LayerAttention) -> str:
    words = "the past" if layer.causal else "both ways"
    if layer.rule is not None and layer.rule.name == "Prefix":
        words = "the past and the prefix"
    if layer.part == "cross":
        words = "all keys of the encoder"
    if layer.window is not None:
        left, right = layer.window
        sides = [
            f"{n} {way}" for n, way in ((left, "back"), (None if layer.causal else right, "ahead")) if n is not None
        ]
        words += f", at most {' and '.join(sides)}"
    return words if layer.rule is None else f"{words}, {layer.rule.words()}"


def stored(names: Mapping[str, str | tuple[str, ...]], state: State, prefix: str, own: str | None) -> dict[str, str]:
    """How the tensors of these names are called in full, behind whatever prefix the model has.

    Behind `own`, the path of the layer's attention, an end of a name is enough.
    """
    every = state.names()
    found = {}
    for argument, known in names.items():
        versions = (known,) if isinstance(known, str) else known
        fits: list[str] = []
        if own is not None:
            ends = [name.split(".", n)[-1] for name in versions for n in range(name.count(".") + 1)]
            fits = [own + end for end in ends if end not in ("weight", "bias") and state.has(own + end)][:1]
        tails = [prefix + name for name in versions]
        for tail in tails if not fits else ():
            fits = fits or [full for full in every if full == tail or full.endswith("." + tail)]
        if not fits:
            raise RelposValueError(f"{tails[0]}: no such tensor; {state.nearest(tails[0])}")
        if len(fits) > 1:
            raise RelposValueError(f"prefix: {len(fits)} tensors end in {tails[0]}: {', '.join(sorted(fits)[:5])}")
        found[argument] = fits[0]
    return found


def _read(
    names: Mapping[str, str | tuple[str, ...]], weights: Any, prefix: str, own: str | None = None
) -> dict[str, Array]:
    """The tensors of these names."""
    if not names:
        return {}
    if weights is None:
        raise RelposValueError(f"weights: needed for {', '.join(map(first, names.values()))}")
    from relpos_np.layers import State

    state = State(weights)
    return {argument: state.take(full) for argument, full in stored(names, state, prefix, own).items()}
