"""Metadata of GGUF files, as llama.cpp reads them, in the words of transformers' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relpos_np._contract import check
from relpos_np.errors import RelposImportError, RelposValueError

INSTALL = "install it with `pip install relpos-np[gguf]`"
# Pairs of channels as llama.cpp turns them. Where transformers has halves and llama.cpp neighbours, converters permute
# the rows of the projections.
_NORM, _NEOX = "interleaved", "half"


class _Architecture(NamedTuple):
    """The model type of transformers, which pairs turn, and what else differs.

    `names` are other names of keys, `given` what metadata leave to the architecture, `normed` the key that says
    whether queries and keys are normed, and `deepest` the number of layers whose scale is that of the width.
    """

    model_type: str
    pairs: str = ""
    names: Mapping[str, str] = {}
    given: Mapping[str, Any] = {}
    normed: str = ""
    partial: bool = False
    deepest: int | None = None


# Those with one name here and there.
_SAME = {
    _NORM: "llama arcee cohere2 granite internlm2 olmo smollm3 xverse",
    _NEOX: "exaone falcon gemma olmo2 olmoe qwen2 qwen3 seed_oss starcoder2",
    "": "bloom gpt2 mpt",
}
_ARCHITECTURES: Mapping[str, _Architecture] = {
    **{name: _Architecture(name, pairs) for pairs, names in _SAME.items() for name in names.split()},
    "command-r": _Architecture("cohere", _NORM, normed="use_qk_norm"),
    "gemma2": _Architecture("gemma2", _NEOX, deepest=46),
    "gemma3": _Architecture(
        "gemma3_text", _NEOX, {"rope.freq_base_swa": "rope_local_base_freq"}, {"rope_local_base_freq": 1e4}, deepest=62
    ),
    "gptneox": _Architecture(
        "gpt_neox", _NEOX, {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}, partial=True
    ),
    "nemotron": _Architecture("nemotron", _NEOX, partial=True),
    "phi2": _Architecture("phi", _NEOX, given={"qk_layernorm": False}, partial=True),
    "phi3": _Architecture("phi3", _NEOX, partial=True),
    "qwen2moe": _Architecture("qwen2_moe", _NEOX),
    "qwen3moe": _Architecture("qwen3_moe", _NEOX),
    "stablelm": _Architecture("stablelm", _NEOX, normed="qk_layernorm", partial=True),
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
# What is read apart, and what is not about attention.
_TAKEN = (
    *("attention.value_length", "attention.causal", "attention.max_alibi_bias", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.finetuned", "vocab_size", "logit_scale", "residual_scale", "embedding_scale", "tensor_data_layout"),
    *("final_logit_softcapping", "use_parallel_residual"),
)
_FAILS = (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


def config(path: Path) -> dict[str, Any]:
    """The configuration of a GGUF file; ``_rope_pairs`` of it says which channels turn together."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RelposImportError(f"config: {path} needs the package gguf; {INSTALL}") from error
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = {
            name: tensors[f"rope_{name}.weight"].data.tolist() for name in _FACTORS if f"rope_{name}.weight" in tensors
        }
    except _FAILS as error:
        raise RelposValueError(f"config: {path} cannot be read: {error}") from None
    return _translated(fields, frozenset(tensors), factors)


_FACTORS = ("freqs", "factors_long", "factors_short")


def _translated(
    fields: Mapping[str, Any], tensors: frozenset[str], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    name = fields.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise RelposValueError(
            f"general.architecture: {name!r} is not understood, expected one of {', '.join(_ARCHITECTURES)}"
        )
    of = _ARCHITECTURES[str(name)]
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    names = {**_KEYS, **of.names}
    unknown = [key for key in own if key not in (*names, *_TAKEN) and not key.startswith(("feed_forward", "expert_"))]
    if unknown:
        raise RelposValueError(f"{', '.join(unknown)}: not understood in a GGUF file of {name}")
    if own.get("attention.causal", True) is not True:
        raise RelposValueError(f"attention.causal: {own['attention.causal']!r} is not understood in {name}")
    # The window of a class is none of a file that has none.
    found: dict[str, Any] = {"model_type": of.model_type, "sliding_window": None, **of.given}
    found |= {names.get(word, word): own[key] for key, word in names.items() if key in own}
    heads = check.integer("attention.head_count", own.get("attention.head_count"), 1)
    width = check.integer("embedding_length", own.get("embedding_length"), 1)
    check.integer("block_count", own.get("block_count"), 1)
    dim = check.integer("attention.key_length", own.get("attention.key_length", width // heads), 1)
    if own.get("attention.value_length", dim) != dim:
        raise RelposValueError(f"attention.value_length: {own['attention.value_length']!r}, expected {dim}")
    found |= {"num_key_value_heads": own.get("attention.head_count_kv", heads), "head_dim": dim}
    if of.deepest is not None:
        found["query_pre_attn_scalar"] = width // heads if own["block_count"] == of.deepest else dim
    if of.normed:
        found[of.normed] = "blk.0.attn_q_norm.weight" in tensors
    if of.model_type == "falcon":
        found |= _falcon(found.pop("num_key_value_heads"), heads)
    if of.model_type == "mpt":
        clip = found.pop("clip_qkv", None)
        found["attn_config"] = {"alibi_bias_max": own.get("attention.max_alibi_bias", 0), "clip_qkv": clip}
    return found | (_rotary(of, own, dim, factors) if of.pairs else {})


def _falcon(kv_heads: Any, heads: int) -> dict[str, Any]:
    """Generations differ in their key heads."""
    if kv_heads in (1, heads):
        return {"multi_query": kv_heads == 1}
    return {"new_decoder_architecture": True, "num_kv_heads": kv_heads}


def _rotary(of: _Architecture, own: Mapping[str, Any], dim: int, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Pairs, base, share and scaling; factors on frequencies are tensors."""
    found: dict[str, Any] = {"_rope_pairs": of.pairs, of.names.get("rope_theta", "rope_theta"): 1e4}
    if "rope.freq_base" in own:
        found[of.names.get("rope_theta", "rope_theta")] = own["rope.freq_base"]
    turning = check.integer("rope.dimension_count", own.get("rope.dimension_count", dim), 2)
    if of.partial:
        found[of.names.get("partial_rotary_factor", "partial_rotary_factor")] = turning / dim
    elif turning != dim:
        raise RelposValueError(f"rope.dimension_count: {turning}, expected {dim} in {of.model_type}")
    # Other types have their scaling in tensors.
    kind = own.get("rope.scaling.type", "none")
    factor, original = own.get("rope.scaling.factor"), own.get("rope.scaling.original_context_length")
    magnitude = own.get("rope.scaling.attn_factor", 1.0)
    if factors:
        long = factors.get("factors_long", factors.get("freqs"))
        short = factors.get("factors_short", factors.get("freqs"))
        if long is None or short is None or kind not in ("none", "longrope"):
            raise RelposValueError(f"rope.scaling.type: {kind!r} beside the tensors {', '.join(factors)}")
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": magnitude}
        return found | {
            "rope_scaling": scaling | {"factor": 1.0},
            "original_max_position_embeddings": original or own.get("context_length"),
        }
    if magnitude != 1 or kind not in ("none", "linear", "yarn"):
        raise RelposValueError(
            f"rope.scaling.type: {kind!r} with attn_factor {magnitude} is not understood without tensors"
        )
    if kind != "none":
        known = {"factor": factor, "original_max_position_embeddings": original if kind == "yarn" else None}
        found["rope_scaling"] = {"rope_type": kind} | {key: value for key, value in known.items() if value is not None}
    return found
