"""Inkling: profiles over the distance that each query mixes, in windows and over the whole text."""

from __future__ import annotations

from functools import partial

from relpos_np._contract import check
from relpos_np.configs.decoders import with_eps
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, SchemePlan, Temperature
from relpos_np.configs.steps import Norm, Told
from relpos_np.errors import RelposValueError
from relpos_np.schemes.inkling import Inkling


def _scheme(given: Given, *, heads: int, temperature: Temperature | None) -> Inkling:
    """What the layer's input says of each query, times the factor that the query has."""
    hidden = check.floating("hidden", given.inputs["hidden"]).astype(given.dtype, copy=False)
    weight = given.arrays["weight"]
    if hidden.ndim < 2 or hidden.shape[-2:] != (given.q_len, weight.shape[-1]):
        raise RelposValueError(f"hidden: expected shape (..., {given.q_len}, {weight.shape[-1]}), found {hidden.shape}")
    mixed = hidden @ weight.T
    mixed = mixed.reshape(*mixed.shape[:-1], heads, -1).swapaxes(-2, -3)
    if temperature is not None:
        mixed = mixed * temperature.factors(given.places)[..., None].astype(given.dtype)
    return Inkling(mixed, given.arrays["proj"])


def _layer(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Five layers of six have a window, and heads of their own."""
    layers = keys.integer("num_hidden_layers")
    types = keys.listed("layer_types", layers, None)
    if types is not None:
        keys.ignore("local_layer_ids")
        if types[layer] not in ("hybrid", _LOCAL):
            raise RelposValueError(f"layer_types: expected hybrid or {_LOCAL} for each layer, found {types!r}")
        local = types[layer] == _LOCAL
    elif keys.get("local_layer_ids", None) is not None:
        local = layer in keys.numbers("local_layer_ids")
    else:
        local = (layer + 1) % 6 != 0
    both = [[keys.integer(f"{kind}{name}") for name in _NUMBERS] for kind in ("", "swa_")]
    heads, kv_heads, dim = both[local]
    window, floor = keys.integer("sliding_window_size"), keys.get("log_scaling_n_floor")
    strength = keys.real("log_scaling_alpha")
    temperature = None
    if floor is not None and not local:
        temperature = Temperature("inkling", check.integer("log_scaling_n_floor", floor, 1), strength)
    own = f"layers.{layer}.self_attn"
    plan = SchemePlan(
        "Inkling",
        weights={"weight": f"{own}.r_proj.weight", "proj": f"{own}.rel_logits_proj.proj"},
        inputs=("hidden",),
        remark="relative_states: what r_proj makes of hidden, the input of the layer's projections",
        make=partial(_scheme, heads=heads, temperature=temperature),
        varies=True,
    )
    return LayerAttention(
        keys.model_type,
        part,
        layer,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=dim,
        scale=1 / dim,
        causal=True,
        schemes=(plan,),
        window=(window - 1, None) if local else None,
        query_scale=temperature,
        before=(Told("short convolutions of k and v (k_sconv, v_sconv)"), *with_eps(keys, (Norm(),))),
    )


_LOCAL = "hybrid_sliding"
_NUMBERS = ("num_attention_heads", "num_key_value_heads", "head_dim")
register(_layer, "inkling_text", kind="Text")
