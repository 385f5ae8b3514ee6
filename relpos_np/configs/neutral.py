"""Keys that change nothing in attention, in any model; a key that is neither read nor one of these is refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos_np.configs.layer import LayerAttention


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILE = tomllib.loads(files("relpos_np.configs").joinpath("neutral.toml").read_text(encoding="utf-8"))
# A key whose name contains one of these may change attention, whatever its other words are.
TOUCHES = _names(_FILE["touches"])
_LETTERS = _names("q k v")
# Words that say what a key is about; a key that has one, and touches nothing, is about that.
_WORDS = _names(_FILE["words"])
# What is on unless a key says false.
_ON = _names(_FILE["on"])
# Keys that are about something else though their names do not say so, in groups, each with its reason.
NEUTRAL: Mapping[str, frozenset[str]] = {why: _names(names) for why, names in _FILE["neutral"].items()}
_NEUTRAL = frozenset().union(*NEUTRAL.values())


def _norms(layer: LayerAttention) -> bool:
    return any("norm" in str(step) for step in layer.before)


def _turns(layer: LayerAttention) -> bool:
    return layer.added is None and not any(plan.scheme != "Rotary" for plan in layer.schemes)


def _base(layer: LayerAttention) -> Any:
    return next((plan.options.get("base") for plan in layer.schemes if plan.scheme == "Rotary"), None)


def _share(layer: LayerAttention) -> Any:
    plans = [plan.options for plan in layer.schemes if plan.scheme == "Rotary" and "base" in plan.options]
    return plans[0].get("dim", layer.head_dim) / layer.head_dim if plans else None


def _interleaved(layer: LayerAttention) -> Any:
    layouts = {plan.options.get("layout", "half") for plan in layer.schemes if plan.scheme == "Rotary"}
    return layouts == {"interleaved"} if layouts else None


# Keys that a class may not read, which then must say what the layer is all the same.
_SAYS: dict[tuple[str, ...], Callable[[LayerAttention], Any]] = {
    (
        "head_dim",
        "head_size",
        "attention_head_dim",
        "attention_head_size",
        "kv_channels",
        "d_kv",
        "n_embd_head",
        "qk_head_dim",
    ): lambda at: at.head_dim,
    ("v_head_dim",): lambda at: at.value_dim,
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"): lambda at: at.kv_heads,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): lambda at: at.heads,
    ("num_key_value_groups",): lambda at: at.heads // at.kv_heads,
    ("is_causal", "causal", "use_causal_mask"): lambda at: at.causal,
    ("use_qk_norm", "qk_norm", "use_qk_layernorm", "qk_layernorm", "use_qknorm"): _norms,
    (
        "use_rope",
        "rotary",
        "use_rotary",
        "use_rotary_embeddings",
        "use_rotary_position_embeddings",
        "use_rotary_pos_emb",
    ): _turns,
    ("rope_interleaved", "rope_interleave", "rotary_emb_interleaved", "use_interleaved_rope"): _interleaved,
    ("n_layer", "n_layers", "num_layers", "num_hidden_layers"): lambda at: at.layers,
    ("n_embd", "d_model", "n_embed"): lambda at: at.heads * at.head_dim,
    ("rotary_emb_base", "rope_theta"): _base,
    ("partial_rotary_factor", "rotary_pct"): _share,
    ("use_alibi", "alibi"): lambda at: any(plan.scheme == "ALiBi" for plan in at.schemes),
    ("scale_attn_weights",): lambda at: at.scale != 1,
}
_SAID = {name: said for names, said in _SAYS.items() for name in names}
# Values that are those of any model, or of the class of BERT, which later classes wrote into their files.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rotary_emb_fraction": (1, 1.0),
    "rope_ratio": (1, 1.0),
    "full_attn_mod": (1,),
    "mask_value": (-10000, -10000.0),
    "interpolate_factor": (1, 1.0),
    "use_mrope": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (1, 1.0),
    "rope_scaling_type": ("default",),
    "attention_type": ("full_attention", "original_full"),
}


def harmless(name: str, value: Any, layer: LayerAttention) -> bool:
    """Whether a key that the reader of a layer did not take changes nothing in it."""
    if value is None or name in _NEUTRAL or name.endswith("_token_id") or value in ({}, [], ""):
        return True
    if name in _USUAL and value in _USUAL[name]:
        return True
    if name == "position_embedding_type" and value in ("rope", "rotary", "rope_gptj"):
        return _turns(layer)
    if name in _SAID:
        return bool(value == _SAID[name](layer))
    lower = name.lower()
    if value is False:
        return not any(part in lower for part in _ON)
    if isinstance(value, Mapping) and name.endswith("_config") and name != "quantization_config":
        # A model within this one.
        return False
    return harmless_name(name)


def harmless_name(name: str) -> bool:
    """Whether the words of a key say that it changes nothing, in any model and whatever its value is."""
    words = set(re.split(r"[_\W\d]+", name.lower()))
    return name in _NEUTRAL or (not touches(name) and bool(words & _WORDS))


def touches(name: str) -> bool:
    """Whether a word of a key says that it may be about attention."""
    lower = name.lower()
    return any(part in lower for part in TOUCHES) or bool(set(re.split(r"[_\W\d]+", lower)) & _LETTERS)
