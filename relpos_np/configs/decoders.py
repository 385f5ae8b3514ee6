"""Rotary models of one stack: what their readers have in common, from the traits of each model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.keys import Keys, OtherLayerError
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Rule, Temperature
from relpos_np.configs.steps import Clip, Finish, Norm, Times, Turned
from relpos_np.errors import RelposValueError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
PATTERN = "sliding_window_pattern"
LINEAR, CONV = "linear_attention", "conv"
# Names of early files.
_OLD = {"attention": FULL, "mamba": LINEAR}


@dataclass(frozen=True)
class At:
    """Where a reader is: the keys of the model, a layer's number and its type, and what is known of it already."""

    keys: Keys
    layer: int
    layers: int
    kind: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)


Pattern = Callable[[At], str]
_Step = TypeVar("_Step")


@dataclass(frozen=True)
class Rotating:
    """What sets one model type of rotary decoders or encoders apart.

    Attributes
    ----------
    theta, share : float
        Defaults of the base, which may be given per type of layer, and of the share of channels that turn; the latter
        is None where the model's class reads none but in rules other than the default one.
    theta_keys, share_key : str
        Where they are stored in older configurations.
    thetas : str
        Key of a list of bases, one for each layer, 0 for layers without positions.
    plain : tuple of str
        Types of layers to which `rope_scaling` does not apply.
    layout : {"half", "interleaved"}
        Which pairs turn.
    causal : bool
        Whether the model is a decoder.
    window : {"none", "all", "types"}
        No window; `sliding_window` for all layers; for those whose type says so.
    pattern : callable, optional
        Types of layers where `layer_types` are not stored.
    switch : bool
        Whether `sliding_window` needs `use_sliding_window`.
    others : tuple of str
        Types of layers of a hybrid that have no softmax: such a layer is refused by its type.
    kinds : tuple of str
        Types of layers with a softmax that the model's class knows; () for layers with and without a window, or those
        without beside `others`.
    magnitude : bool or str
        Whether the attention factor counts: a norm after turning takes it out. A key, where such a norm is a choice.
    still : callable, optional
        Whether a layer has no positions.
    early : bool
        Whether queries and keys turn before their norms.
    backwards : bool
        Whether pairs turn the other way.
    turning : str
        Key of the number of channels that turn, where it may stand in place of their share.
    norm : tuple of Norm
        Of queries and keys, with the configuration's number in place of eps.
    normed : str
        The key that asks for norms, where they are a choice.
    after : tuple of Finish
        What is done to the output.
    mrope : tuple, optional
        Default sections and their order.
    elsewhere : tuple of str
        Parameters among the rotary ones that have another meaning, or none.
    ignored : tuple of str
        Keys that have no effect in this model.
    sized : callable, optional
        To the numbers of heads and channels that differ.
    finish : callable, optional
        To the fields of the layer that differ.
    notes : tuple of str
        What to mind.
    """

    theta: float | Mapping[str, float] = 10000.0
    share: float | None = None
    theta_keys: str | Mapping[str, str] = "rope_theta"
    share_key: str = "partial_rotary_factor"
    thetas: str = ""
    plain: tuple[str, ...] = ()
    layout: str = "half"
    causal: bool = True
    window: str = "none"
    pattern: Pattern | None = None
    switch: bool = False
    others: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    magnitude: bool | str = True
    still: Callable[[At], bool] | None = None
    early: bool = False
    backwards: bool = False
    turning: str = ""
    norm: tuple[Norm, ...] = ()
    normed: str = ""
    after: tuple[Finish, ...] = ()
    mrope: tuple[tuple[int, ...], Literal["chunks", "cyclic"]] | None = None
    elsewhere: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    sized: Callable[[At], Mapping[str, Any]] | None = None
    finish: Callable[[At], Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()

    def read(self, keys: Keys, layer: int, part: str) -> LayerAttention:
        """The layer of a configuration."""
        keys.ignore(*self.ignored)
        found = sizes(keys) | {"notes": self.notes}
        layers = found["layers"]
        keys.only("is_decoder", False, None, self.causal)
        keys.only("add_cross_attention", False, None)
        at = At(keys, layer, layers)
        kind = self._type(at)
        at = replace(at, kind=kind)
        if self.sized is not None:
            found |= self.sized(replace(at, found=found))
        still = self.still is not None and self.still(at)
        sections, order = self.mrope or (None, "chunks")
        ropes = rope.parameters(
            keys,
            kind,
            theta=self.theta,
            share=self._share(keys, found["head_dim"]),
            theta_keys=self.theta_keys,
            share_key=self.share_key,
            elsewhere=self.elsewhere,
            plain=self.plain,
            sections=sections,
            order=order,
        )
        found["before"] = with_eps(keys, self.norm) if not self.normed or keys.flag(self.normed) else ()
        if self.thetas and (base := self._base(at)) is not None:
            still, ropes = not base, replace(ropes, stored={**ropes.stored, "rope_theta": base})
        if not still:
            counts = not keys.flag(self.magnitude) if isinstance(self.magnitude, str) else self.magnitude
            plan = rope.plan(
                ropes,
                found["head_dim"],
                layout=self.layout,
                backwards=self.backwards,
                magnitude=None if counts else 1.0,
            )
            if not counts:
                # The norm takes it out, but for what it adds to the mean of the squares.
                factor = ropes.frequencies(found["head_dim"])[1]
                found["before"] = tuple(replace(norm, eps=norm.eps / factor**2) for norm in found["before"])
            found |= {"schemes": (plan,), "notes": (*found["notes"], *ropes.notes)}
            if self.early:
                found |= {"schemes": (), "before": (Turned(plan), *found["before"])}
        found["window"] = self._window(keys, kind)
        found["causal"] = self.causal
        found["after"] = with_eps(keys, self.after)
        if self.finish is not None:
            found |= self.finish(replace(at, found=found))
        return LayerAttention(keys.model_type, part, layer, **found)

    def _base(self, at: At) -> float | None:
        listed = at.keys.listed(self.thetas, at.layers, None)
        if listed is None:
            return None
        return check.real(self.thetas, listed[at.layer]) and check.positive(self.thetas, listed[at.layer])

    def _share(self, keys: Keys, head_dim: int) -> float | None:
        number = keys.get(self.turning, None) if self.turning else None
        return self.share if number is None else check.integer(self.turning, number, 2) / head_dim

    def _type(self, at: At) -> str:
        found = self._named(at)
        if found in self.others:
            why = f", which is not understood, expected {FULL}"
            raise OtherLayerError(at.layer, at.layers, found, why)
        return found

    def _named(self, at: At) -> str:
        keys, layer, layers = at.keys, at.layer, at.layers
        if self.window != "types" and self.pattern is None:
            return FULL
        types = keys.listed("layer_types", layers, None)
        if types is None:
            if self.pattern is None:
                raise RelposValueError(f"layer_types: the configuration of {keys.model_type} has none, and no default")
            return self.pattern(at)
        for name in (
            "max_window_layers",
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "global_attn_every_n_layers",
            "full_attention_interval",
            "full_attn_idxs",
            "block_types",
            "sparse_attention_config",
        ):
            keys.ignore(name)
        found = types[layer]
        found = _OLD.get(found, found) if isinstance(found, str) else found
        kinds = self.kinds or ((FULL,) if self.others else (FULL, SLIDING))
        if found not in (*kinds, *self.others):
            raise RelposValueError(f"layer_types: {found!r} is not understood")
        return str(found)

    def _window(self, keys: Keys, kind: str) -> tuple[int | None, int | None] | None:
        if self.window == "none":
            return None
        size = keys.get("sliding_window", None)
        if self.switch and not keys.flag("use_sliding_window", False):
            size = None
        if self.window == "types":
            if kind != SLIDING:
                return None
            if not size:
                raise RelposValueError(f"sliding_window: {size!r}, though layer_types have {SLIDING}")
        return (
            None if size is None else (check.integer("sliding_window", size, 1) - 1, None if self.causal else size - 1)
        )


def sizes(keys: Keys, width: str = "hidden_size") -> dict[str, Any]:
    """Numbers of layers, heads and channels, and the usual scale; `width` is the key of all heads' channels."""
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.get("num_key_value_heads", None)
    head_dim = keys.get("head_dim", None)
    if head_dim is None:
        hidden = keys.integer(width)
        if hidden % heads:
            raise RelposValueError(f"{width}: {hidden} is no multiple of {heads} heads, and there is no head_dim")
        head_dim = hidden // heads
    found = equal_heads(keys.integer("num_hidden_layers"), heads, check.integer("head_dim", head_dim, 1))
    return found if kv_heads is None else found | {"kv_heads": check.integer("num_key_value_heads", kv_heads, 1)}


def count(keys: Keys) -> int:
    """How many layers there are."""
    return keys.integer("num_hidden_layers")


def equal_heads(layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Numbers of a layer whose queries, keys and values have the same heads, and the usual scale."""
    return {
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "scale": head_dim**-0.5,
    }


def divided(keys: Keys, width: str, heads: int) -> int:
    """Channels of one of several heads, where a key has those of all."""
    total = keys.integer(width)
    if total % heads:
        raise RelposValueError(f"{width}: {total} is no multiple of {heads} heads")
    return total // heads


def with_eps(keys: Keys, steps: tuple[_Step, ...]) -> tuple[_Step, ...]:
    """Steps of which the norms have the configuration's eps, under whichever name its class has."""
    names = [name for name in ("rms_norm_eps", "norm_eps", "layer_norm_eps") if name in keys.family.defaults]

    def one(step: Any) -> Any:
        return replace(step, eps=check.positive(names[0], keys.get(names[0]))) if isinstance(step, Norm) else step

    return tuple(map(one, steps))


def alternating(every: int, key: str = "", *, first: bool = False, other: str = SLIDING) -> Pattern:
    """One full layer in `every`: the last of each group, or the first; `key` may store another number."""

    def pattern(at: At) -> str:
        n = at.keys.integer(key, every) if key else every
        if key == "sliding_window_pattern":
            # As an object keeps it, which no class reads back.
            at.keys.only("_sliding_window_pattern", n, None)
        return other if (at.layer + (not first)) % n else FULL

    return pattern


def cycled(*kinds: str) -> Pattern:
    """Types of layers over and over."""
    return lambda at: kinds[at.layer % len(kinds)]


def late_windows(at: At) -> str:
    """Qwen2: windows from layer `max_window_layers` on, if they are switched on at all."""
    used = at.keys.flag("use_sliding_window", False) and at.keys.get("sliding_window", None) is not None
    start = at.keys.integer("max_window_layers", at.layers, 0)
    return SLIDING if used and at.layer >= start else FULL


def early_windows(at: At) -> str:
    """Qwen2-MoE: every other layer before `max_window_layers`."""
    used = at.keys.flag("use_sliding_window", False)
    start = at.keys.integer("max_window_layers", at.layers, 0)
    return SLIDING if used and (at.layer + 1) % 2 and at.layer < start else FULL


def windows_after(at: At) -> str:
    """dots1: windows from layer `max_window_layers` on, if there is one."""
    used, start = at.keys.get("sliding_window", None) is not None, at.keys.integer("max_window_layers", least=0)
    return SLIDING if used and at.layer >= start else FULL


def windows_if_any(at: At) -> str:
    """Ministral: all layers have the window, if there is one."""
    return FULL if at.keys.get("sliding_window", None) is None else SLIDING


def _turning(at: At) -> bool:
    """`no_rope_layers`: 1 for layers that turn, in spite of the name."""
    every = at.keys.integer("no_rope_layer_interval", 4)
    listed = at.keys.get("no_rope_layers", None)
    if not listed:
        return (at.layer + 1) % every != 0
    if not isinstance(listed, list | tuple) or at.layer >= len(listed) or listed[at.layer] not in (0, 1):
        raise RelposValueError(f"no_rope_layers: expected 0 or 1 for each layer, found {listed!r}")
    return bool(listed[at.layer])


def listed_still(at: At) -> bool:
    """SmolLM3, Llama 4: the layers that `no_rope_layers` has a 0 for."""
    return not _turning(at)


def full_still(at: At) -> bool:
    """Cohere 2: layers without a window have no positions."""
    return at.kind != SLIDING


def _first_dense(at: At) -> int:
    return at.keys.integer("first_k_dense_replace", 0, 0)


def cohere2_moe_pattern(at: At) -> str:
    """Cohere 2 MoE: layers without experts, which come first, have a pattern of their own."""
    dense = _first_dense(at)
    at.keys.ignore(PATTERN, "prefix_dense_sliding_window_pattern")
    key, n = ("prefix_dense_sliding_window_pattern", at.layer) if at.layer < dense else (PATTERN, at.layer - dense)
    return SLIDING if (n + 1) % at.keys.integer(key) else FULL


def cohere2_moe_still(at: At) -> bool:
    """Layers without a window have no positions, but those without experts if none of them has one."""
    at.keys.ignore("prefix_dense_sliding_window_pattern", "first_k_dense_replace")
    kinds = at.keys.listed("mlp_layer_types", at.layers, None)
    dense = at.layer < _first_dense(at) if kinds is None else kinds[at.layer] == "dense"
    return full_still(at) and not (dense and at.keys.integer("prefix_dense_sliding_window_pattern") == 1)


def exaone_still(at: At) -> bool:
    """EXAONE 4: the same, unless no layer has a window."""
    return at.keys.get("sliding_window", None) is not None and at.kind != SLIDING


def exaone_pattern(at: At) -> str:
    """EXAONE 4: a number as usual, or one letter per layer, L for local and G for global."""
    value = at.keys.get("sliding_window_pattern", 4)
    if at.keys.get("sliding_window", None) is None:
        return FULL
    if isinstance(value, str):
        raise RelposValueError(f"sliding_window_pattern: {value!r} is understood with layer_types only")
    return SLIDING if (at.layer + 1) % check.integer("sliding_window_pattern", value, 1) else FULL


def smollm_pattern(at: At) -> str:
    """SmolLM3: windows where nothing turns, if they are switched on."""
    used = at.keys.flag("use_sliding_window", False) and at.keys.get("sliding_window", None) is not None
    return SLIDING if used and not _turning(at) else FULL


def llama4_pattern(at: At) -> str:
    """Llama 4: chunks where queries and keys turn."""
    return CHUNKED if _turning(at) else FULL


def llama4(at: At) -> dict[str, Any]:
    """Chunks, the norm of turned queries and keys, and the temperature of layers without positions."""
    new: dict[str, Any] = {}
    turning = _turning(at)
    size = at.keys.get("attention_chunk_size", None)
    if at.kind == CHUNKED:
        new["rule"] = Rule("Chunked", {"size": check.integer("attention_chunk_size", size, 1)})
    if not turning:
        new["before"] = ()
    if at.kind == CHUNKED:
        new["notes"] = ("chunks count from the first token that is no padding: without padding at the left only",)
    tuned = at.keys.get("attn_temperature_tuning", None)
    # An early name, which the class does not read.
    at.keys.only("nope_layer_interval", at.keys.get("no_rope_layer_interval"), None)
    scale, floor = at.keys.real("attn_scale"), at.keys.integer("floor_scale")
    if tuned and not turning:
        new["query_scale"] = Temperature("llama4", floor, scale)
    return new


def ministral3(at: At) -> dict[str, Any]:
    """The temperature by `llama_4_scaling_beta`, counted from position 0."""
    raw = rope.stored(at.keys)
    beta = raw.get("llama_4_scaling_beta")
    if beta is None:
        return {}
    beside = at.keys.get("original_max_position_embeddings", None)
    length = raw.get("original_max_position_embeddings") if beside is None else beside
    length = check.integer("original_max_position_embeddings", length, 1)
    return {"query_scale": Temperature("ministral3", length, check.real("llama_4_scaling_beta", beta))}


def phimoe(at: At) -> dict[str, Any]:
    """Phi-3.5-MoE: published codes differ in what they take for long texts."""
    raw = rope.stored(at.keys)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind != "default":
        raise RelposValueError(f"rope_type: {kind!r} is read in several ways by published codes of phimoe")
    return {}


def phi3(at: At) -> dict[str, Any]:
    """Phi-3: an early name of its rule is now that of another one."""
    raw = rope.stored(at.keys)
    if "yarn" in (raw.get("rope_type"), raw.get("type")):
        raise RelposValueError("rope_type: 'yarn' in a configuration of phi3 stands for longrope; write longrope")
    return {}


def scaled_by(at: At) -> dict[str, Any]:
    """Granite: the factor itself is stored; HyperCLOVA X has the usual one without."""
    factor = at.keys.get("attention_multiplier")
    return {} if factor is None else {"scale": check.real("attention_multiplier", factor)}


def gemma(at: At) -> dict[str, Any]:
    """Gemma: both ways in a prefix, within PaliGemma; a decoder elsewhere."""
    if at.keys.within != "paligemma":
        at.keys.only("use_bidirectional_attention", False, None)
        return {}
    at.keys.only("use_bidirectional_attention", True, None)
    # Of a longer prefix, the model's mask sees more than the window.
    window = at.found["window"]
    rule = Rule("Prefix", inputs={"lengths": "prefix_lengths"}, most=None if window is None else window[0] + 1)
    note = "prefix_lengths: how many tokens of each batch item are seen both ways, those of the image and the prompt"
    return {"causal": False, "rule": rule, "notes": (note,)}


def _own_scale(at: At) -> dict[str, Any]:
    return {"scale": check.positive("query_pre_attn_scalar", at.keys.get("query_pre_attn_scalar")) ** -0.5}


def capped(at: At) -> dict[str, Any]:
    """VaultGemma: a scale of its own, and a soft cap."""
    cap = at.keys.get("attn_logit_softcapping")
    return _own_scale(at) | ({} if cap is None else {"softcap": check.positive("attn_logit_softcapping", cap)})


def gemma2(at: At) -> dict[str, Any]:
    """Gemma 2: the same, both ways in a prefix. Early files store the window twice."""
    at.keys.only("sliding_window_size", at.keys.get("sliding_window"), None)
    return capped(at) | gemma(at)


def gemma3(at: At) -> dict[str, Any]:
    """Gemma 3: a scale of its own; both ways in embedding models, whose windows are half as wide."""
    at.keys.only("attn_logit_softcapping", None)
    at.keys.only("is_causal", True, None)
    new = _own_scale(at)
    if at.keys.flag("use_bidirectional_attention"):
        half = at.keys.integer("sliding_window") // 2
        new |= {"causal": False, "window": (half, half) if at.kind == SLIDING else None}
    return new


def unread(**values: Any) -> Callable[[At], Mapping[str, Any]]:
    """Keys that files may have and the class does not read: each must be missing, or this value."""

    def finish(at: At) -> dict[str, Any]:
        for name, value in values.items():
            at.keys.only(name, value, None)
        return {}

    return finish


def sinks(at: At) -> dict[str, Any]:
    """Sinks, one per head."""
    return {"sinks": f"layers.{at.layer}.self_attn.sinks"}


def modernbert_decoder(at: At) -> dict[str, Any]:
    """Half of `local_attention`, unless the window itself is stored."""
    at.keys.ignore("local_attention")
    size = at.keys.get("sliding_window", None)
    size = at.keys.integer("local_attention") // 2 if size is None else check.integer("sliding_window", size, 1)
    return {"window": (size - 1, None) if at.kind == SLIDING else None}


def minimax_m2(at: At) -> dict[str, Any]:
    """Early files say of each layer that it has softmax, and that queries and keys are normed over all heads."""
    at.keys.only("use_qk_norm", True, default=True)
    at.keys.only("qk_norm_type", "per_layer", None)
    at.keys.only("attn_type_list", [1] * at.layers, None)
    at.keys.ignore("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    return {}


def hy_v3(at: At) -> dict[str, Any]:
    """Early files say that queries and keys are normed."""
    at.keys.only("qk_norm", True, default=True)
    return {}


def mimo_pattern(at: At) -> str:
    """MiMo V2 Flash: windows but for the first layer and every sixth one."""
    return SLIDING if at.layer and (at.layer + 1) % 6 else FULL


def mimo(at: At) -> dict[str, Any]:
    """Values of their own width, and with a factor; with a window twice the key heads, and sinks."""
    keys, kv_heads = at.keys, at.found["kv_heads"]
    types = keys.listed("layer_types", at.layers, None) or [
        mimo_pattern(replace(at, layer=n)) for n in range(at.layers)
    ]
    # The class does not read them; other published code does.
    keys.only("hybrid_layer_pattern", [int(kind == SLIDING) for kind in types[: at.layers]], None)
    keys.only("rope_theta", 5e6, None)
    keys.only("swa_rope_theta", 1e4, None)
    keys.only("partial_rotary_factor", 0.334, None)
    for name, value in (
        ("swa_num_attention_heads", at.found["heads"]),
        ("swa_num_key_value_heads", 2 * kv_heads),
        ("swa_head_dim", at.found["head_dim"]),
        ("swa_v_head_dim", keys.get("v_head_dim")),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
    ):
        keys.only(name, value, None)
    before, size = keys.get("sliding_window_size", None), keys.get("sliding_window")
    size = (
        check.integer("sliding_window", size, 1)
        if before is None
        else check.integer("sliding_window_size", before, 0) + 1
    )
    keys.only("attention_chunk_size", before, size, None)
    factor = keys.get("attention_value_scale")
    new: dict[str, Any] = {"value_dim": keys.integer("v_head_dim")}
    if factor is not None and check.real("attention_value_scale", factor) != 1:
        new["before"] = (Times("v", factor, "attention_value_scale"),)
    if at.kind == SLIDING:
        new |= {"kv_heads": 2 * kv_heads, "window": (size - 1, None), "sinks": f"layers.{at.layer}.self_attn.sinks"}
    return new


def modernbert(at: At) -> dict[str, Any]:
    """Windows of half of `local_attention` on both sides."""
    half = at.keys.integer("local_attention") // 2
    return {"window": (half, half) if at.kind == SLIDING else None}


def clipped(at: At) -> dict[str, Any]:
    """OLMo: queries, keys and values may be clipped."""
    clip = at.keys.get("clip_qkv", None)
    return {} if clip is None else {"before": (*at.found.get("before", ()), Clip(check.positive("clip_qkv", clip)))}
