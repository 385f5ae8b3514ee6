"""Gemma 3n and Gemma 4: the last layers take keys and values of earlier ones; the scale is 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relpos_np._contract import check
from relpos_np.configs.decoders import FULL, SLIDING, At, Rotating, alternating, with_eps
from relpos_np.configs.families import register
from relpos_np.configs.steps import KeysAsValues, KeysOf, Norm, Step
from relpos_np.errors import RelposValueError

_NORMS = (Norm(), Norm((), "v"))


def _types(at: At) -> list[str]:
    """Of all layers, as stored, else by the pattern."""
    types = at.keys.listed("layer_types", at.layers, None)
    if types is None:
        pattern = alternating(5 if at.keys.model_type == "gemma3n_text" else 6)
        types = [pattern(At(at.keys, layer, at.layers)) for layer in range(at.layers)]
    return [str(kind) for kind in types]


def _shared(at: At) -> tuple[Step, ...]:
    """Where the keys of a layer come from, if they are not its own; and the norms."""
    norms: tuple[Step, ...] = at.found["before"]
    number = at.keys.integer("num_kv_shared_layers", least=0)
    first = at.layers - number
    if not number or at.layer < first:
        return norms
    of_type = [layer for layer, kind in enumerate(_types(at)[: max(first, 0)]) if kind == at.kind]
    if not of_type:
        raise RelposValueError(f"num_kv_shared_layers: {number} leaves no layer whose keys layer {at.layer} can take")
    return (*with_eps(at.keys, (Norm(("q_norm",), "q"),)), KeysOf(of_type[-1]))


def _gemma3n(at: At) -> dict[str, Any]:
    """Not scaled; keys may be those of another layer."""
    return {"scale": 1.0, "before": _shared(at)}


def _of_layer(listed: Mapping[Any, Any], layer: int) -> Any:
    """What is stored of a layer: numbers are numbers, however they are spelled (05)."""
    numbered = {}
    for key, value in listed.items():
        if not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal())):
            raise RelposValueError(f"per_layer_config: expected numbers of layers, found {key!r}")
        numbered[int(key)] = value
    return numbered.get(layer, {})


def _sized(at: At) -> dict[str, Any]:
    """Gemma 4: layers without a window have heads of their own."""
    keys = at.keys
    own, same = keys.get("per_layer_config", None), keys.flag("attention_k_eq_v")
    wide, few = keys.get("global_head_dim"), keys.get("num_global_key_value_heads")
    if own is None:
        own = {} if at.kind != FULL else {"head_dim": wide} | ({"num_key_value_heads": few} if same and few else {})
    else:
        own = _of_layer(own, at.layer) if isinstance(own, Mapping) else own
        if not isinstance(own, Mapping) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise RelposValueError(f"per_layer_config: {own!r} of layer {at.layer} is not understood")
    found: dict[str, Any] = {}
    if "head_dim" in own:
        found["head_dim"] = found["value_dim"] = check.integer("head_dim", own["head_dim"], 1)
    if "num_key_value_heads" in own:
        found["kv_heads"] = check.integer("num_key_value_heads", own["num_key_value_heads"], 1)
    return found


def _gemma4(at: At) -> dict[str, Any]:
    """Not scaled; published code differs in the windows of embedding models, which attend both ways."""
    keys, before, notes = at.keys, _shared(at), []
    both = keys.only("use_bidirectional_attention", None, "vision")
    keys.only("is_causal", True, None)
    # Of early files; the class has it among the parameters of each type of layer.
    keys.only("rope_local_base_freq", _THETAS[SLIDING], None)
    if both and at.kind == SLIDING:
        notes.append("tokens of one image see each other, too: pass mask for a text with images")
    if keys.flag("attention_k_eq_v") and at.kind == FULL:
        before = (KeysAsValues(), *before)
    keys.ignore("enable_moe_block")
    return {"scale": 1.0, "before": before, "notes": tuple(notes)}


def _gemma4_pattern(at: At) -> str:
    return FULL if at.layer == at.layers - 1 else alternating(6)(at)


def _last_is_full(at: At) -> dict[str, Any]:
    """Gemma 4: what its class does not allow."""
    if at.layer == at.layers - 1 and at.kind != FULL:
        raise RelposValueError(f"layer_types: expected {FULL} for the last layer, found {at.kind}")
    return _sized(at)


_THETAS = {FULL: 1e6, SLIDING: 1e4}
register(
    Rotating(
        theta=_THETAS,
        theta_keys={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        plain=(SLIDING,),
        window="types",
        pattern=alternating(5),
        norm=_NORMS,
        finish=_gemma3n,
    ).read,
    "gemma3n_text",
    kind="Text",
)
register(
    Rotating(
        theta=_THETAS,
        window="types",
        pattern=_gemma4_pattern,
        sized=_last_is_full,
        norm=_NORMS,
        finish=_gemma4,
    ).read,
    "gemma4_text gemma4_unified_text",
    kind="Text",
    defaults={"global_head_dim": 512, "num_global_key_value_heads": None},
)
