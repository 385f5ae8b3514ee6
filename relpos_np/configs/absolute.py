"""Models whose positions are added to the inputs: their layers have plain attention, with some masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relpos_np._contract import check
from relpos_np.configs.decoders import divided, equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.errors import RelposValueError
from relpos_np.schemes.learned import LearnedAbsolute


def learned(table: str, skip: int = 0, remark: str = "") -> SchemePlan:
    """A trained table, of which the first rows may belong to no position."""

    def make(given: Given) -> Any:
        return LearnedAbsolute(given.arrays["table"].reshape(-1, given.arrays["table"].shape[-1])[skip:])

    words = f"without the first {skip} rows" if skip else ""
    return SchemePlan(
        "LearnedAbsolute", weights={"table": table}, remark="; ".join(filter(None, (words, remark))), make=make
    )


def sinusoidal(dim: int, layout: str, first: int = 0) -> SchemePlan:
    """Sines and cosines, perhaps from another position on."""
    remark = f"positions count from {first}" if first else ""
    return SchemePlan("Sinusoidal", {"dim": dim, "layout": layout}, remark=remark)


@dataclass(frozen=True)
class Plain:
    """What sets one model type apart.

    Attributes
    ----------
    causal : bool or None
        None where `is_decoder` says it.
    table : str
        Name of the trained table of positions, if there is one.
    skip : int
        Rows of it in front that belong to no position.
    remark : str
        What to mind about it.
    sinusoids : tuple, optional
        Layout of the sinusoids in place of a table, and where positions begin.
    finish : callable, optional
        From the keys and the layer's number to fields that differ.
    ignored : tuple of str
        Keys that touch nothing in this model.
    notes : tuple of str
        What to mind.
    """

    causal: bool | None = False
    table: str = ""
    skip: int = 0
    remark: str = ""
    sinusoids: tuple[str, int] | None = None
    finish: Callable[[Keys, int], Mapping[str, Any]] | None = None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def read(self, keys: Keys, layer: int, part: str) -> LayerAttention:
        """The layer of a configuration."""
        found = sizes(keys) | {"notes": self.notes}
        keys.only("add_cross_attention", False, None)
        keys.only("position_embedding_type", "absolute", None)
        keys.ignore(*self.ignored)
        decoding = keys.flag("is_decoder", False)
        found["causal"] = decoding if self.causal is None else self.causal
        if self.table:
            found["added"] = learned(self.table, self.skip, self.remark)
        elif self.sinusoids is not None:
            found["added"] = sinusoidal(keys.integer("hidden_size"), *self.sinusoids)
        if self.finish is not None:
            found |= self.finish(keys, layer)
        return LayerAttention(keys.model_type, part, layer, **found)


@dataclass(frozen=True)
class Pair:
    """An encoder and a decoder, as BART has them.

    Attributes
    ----------
    skip : int
        Rows of the trained table that belong to no position.
    sinusoids : tuple, optional
        Layout of the sinusoids in place of a table, and where positions begin.
    only : tuple, optional
        A key, and its only value that is understood.
    ignored : tuple of str
        Keys that touch nothing in this model.
    """

    skip: int = 0
    sinusoids: tuple[str, int] | None = None
    only: tuple[str, Any] | None = None
    ignored: tuple[str, ...] = ()

    def read(self, keys: Keys, layer: int, part: str) -> LayerAttention:
        """The layer of a configuration."""
        # Of a decoder within another model: the class has cross-attention in any case.
        keys.ignore("is_decoder", "add_cross_attention", *self.ignored)
        if self.only is not None:
            keys.only(*self.only, default=self.only[1])
        counted = {side: self._counted(keys, side) for side in ("encoder", "decoder")}
        side = "encoder" if part == "encoder" else "decoder"
        heads, layers = counted[side]
        dim = divided(keys, "d_model", heads)
        table, width = f"{side}.embed_positions.weight", heads * dim
        added = learned(table, self.skip) if self.sinusoids is None else sinusoidal(width, *self.sinusoids)
        found = equal_heads(layers, heads, dim) | {"causal": part == "decoder"}
        return LayerAttention(keys.model_type, part, layer, added=None if part == "cross" else added, **found)

    @staticmethod
    def _counted(keys: Keys, side: str) -> tuple[int, int]:
        return keys.integer(f"{side}_attention_heads"), keys.integer(f"{side}_layers")


def _gpt2(keys: Keys, layer: int) -> dict[str, Any]:
    """Scores may be left as they are, or divided by the number of the layer too."""
    dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    scale = dim**-0.5 if keys.flag("scale_attn_weights") else 1.0
    return {"scale": scale / (layer + 1) if keys.flag("scale_attn_by_inverse_layer_idx") else scale}


def _gpt_bigcode(keys: Keys, _layer: int) -> dict[str, Any]:
    """One head of keys for all queries, unless there is one for each; scores may be left as they are."""
    heads = keys.integer("num_attention_heads")
    keys.only("num_key_value_heads", kv_heads := 1 if keys.flag("multi_query") else heads, None)
    dim = keys.integer("hidden_size") // heads
    return {"kv_heads": kv_heads, "scale": dim**-0.5 if keys.flag("scale_attn_weights") else 1.0}


def _ibert(keys: Keys, _layer: int) -> dict[str, Any]:
    """I-BERT with floating point."""
    keys.only("quant_mode", False, default=False)
    return {}


def _albert(keys: Keys, layer: int) -> dict[str, Any]:
    """Every layer has attention once, with the weights of its group."""
    keys.only("inner_group_num", 1, default=1)
    groups = keys.integer("num_hidden_groups", 1)
    return {"address": (layer * groups // keys.integer("num_hidden_layers"), 0)}


def _xlm(keys: Keys, _layer: int) -> dict[str, Any]:
    """XLM: a decoder if the key says so."""
    keys.only("asm", False, None)
    remark = "sinusoids, as stored" if keys.flag("sinusoidal_embeddings") else ""
    return {"causal": keys.flag("causal"), "added": learned("position_embeddings.weight", remark=remark)}


def _trocr(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A decoder as BART has it; some add sinusoids."""
    heads = keys.integer("num_attention_heads")
    found = equal_heads(keys.integer("num_hidden_layers"), heads, divided(keys, "hidden_size", heads))
    keys.only("is_decoder", False, None, True)
    keys.ignore("cross_attention_hidden_size")
    table = learned("embed_positions.weight", 2)
    if not keys.flag("use_learned_position_embeddings"):
        table = sinusoidal(keys.integer("hidden_size"), "tensor2tensor", 2)
    return LayerAttention(
        keys.model_type, part, layer, causal=part != "cross", added=None if part == "cross" else table, **found
    )


def _aimv2(keys: Keys, _layer: int) -> dict[str, Any]:
    """A table, unless images keep their size."""
    if keys.flag("is_native", False):
        return {"notes": ("sines and cosines of columns and rows are added to the inputs",)}
    return {"added": learned("embeddings.position_embedding.weight")}


def _gpt_neo(keys: Keys, layer: int) -> dict[str, Any]:
    """Not scaled; every other layer has a window, as `attention_types` repeat."""
    repeats = keys.get("attention_types")
    repeats = [[["global", "local"], 12]] if repeats is None else repeats
    try:
        pattern = [
            kind for kinds, times in repeats for kind in list(kinds) * check.integer("attention_types", times, 1)
        ]
    except (TypeError, ValueError):
        raise RelposValueError(f"attention_types: expected [[kinds, times], ...], found {repeats!r}") from None
    layers = keys.integer("num_hidden_layers")
    if len(pattern) != layers or any(kind not in ("global", "local") for kind in pattern):
        raise RelposValueError(f"attention_types: expected global or local for {layers} layers, found {pattern}")
    # Where both are stored, the class takes this one.
    keys.only("attention_layers", pattern, None)
    size = keys.integer("window_size")
    return {"scale": 1.0, "window": (size - 1, None) if pattern[layer] == "local" else None}


def _distilbert(keys: Keys, _layer: int) -> dict[str, Any]:
    remark = "sinusoids, as stored" if keys.flag("sinusoidal_pos_embds", False) else ""
    return {"added": learned(_BERT, remark=remark)}


_BERT = "embeddings.position_embeddings.weight"
_ROBERTA = Plain(None, _BERT, 2, "positions count tokens that are no padding")
_GRID = "rows of another size are interpolated"

_TEXT: dict[str, Plain] = {
    "bert megatron-bert electra rembert roc_bert bert-generation": Plain(None, _BERT),
    "ernie": Plain(None, _BERT),
    "albert": Plain(False, _BERT, finish=_albert),
    "splinter": Plain(False, _BERT),
    "ctrl": Plain(True, sinusoids=("concatenated", 0), ignored=("is_decoder",)),
    "xlm": Plain(False, finish=_xlm, ignored=("is_decoder",)),
    "roberta xlm-roberta xmod xlm-roberta-xl camembert roberta-prelayernorm data2vec-text": _ROBERTA,
    "layoutlm": Plain(False, _BERT, remark="and tables of the page's coordinates"),
    "distilbert": Plain(False, finish=_distilbert),
    "gpt2 gpt-sw3": Plain(True, "wpe.weight", finish=_gpt2, ignored=("is_decoder",)),
    "gpt_neo": Plain(True, "wpe.weight", finish=_gpt_neo),
    "gpt_bigcode": Plain(True, "wpe.weight", finish=_gpt_bigcode, ignored=("is_decoder", "pre_allocate_kv_cache")),
    "openai-gpt": Plain(True, "positions_embed.weight"),
    "ibert": Plain(False, _BERT, 2, _ROBERTA.remark, finish=_ibert),
    "clap_text_model": replace(_ROBERTA, causal=False),
    "opt biogpt": Plain(True, "embed_positions.weight", 2),
    "xglm": Plain(True, sinusoids=("tensor2tensor", 2)),
    "clip_text_model": Plain(True, "embeddings.position_embedding.weight"),
    "siglip_text_model": Plain(False, "embeddings.position_embedding.weight"),
}
_VISION: dict[str, Plain] = {
    "vit deit vit_msn ijepa dinov2 dinov2_with_registers": Plain(False, "embeddings.position_embeddings", remark=_GRID),
    "clip_vision_model siglip_vision_model": Plain(False, "embeddings.position_embedding.weight"),
}
# The decoder of pretraining is left out.
_PRETRAINED = ("decoder_num_attention_heads", "mask_ratio", "qv_bias")
_VISION |= {
    "imagegpt": Plain(True, "wpe.weight", finish=_gpt2, ignored=("is_decoder",)),
    "vit_mae": Plain(
        False,
        "embeddings.position_embeddings",
        remark="sines and cosines of columns and rows, as stored",
        ignored=_PRETRAINED,
    ),
    "videomae": Plain(False, sinusoids=("interleaved", 0), ignored=_PRETRAINED),
    "vivit": Plain(False, "embeddings.position_embeddings", remark=_GRID),
    "aimv2_vision_model": Plain(False, finish=_aimv2),
    "siglip2_vision_model": Plain(
        False, "embeddings.position_embedding.weight", remark="a square of rows, resized to the grid"
    ),
}
_SOUND: dict[str, Plain] = {
    "audio-spectrogram-transformer": Plain(False, "embeddings.position_embeddings"),
    "hubert wav2vec2 unispeech unispeech-sat data2vec-audio": Plain(
        notes=("a convolution of the inputs, which is no position scheme, stands for positions",)
    ),
}
for _names, _traits in _TEXT.items():
    register(_traits.read, _names, kind="Text")
for _names, _traits in _VISION.items():
    register(_traits.read, _names, kind="Images and video")
for _names, _traits in _SOUND.items():
    register(_traits.read, _names, kind="Speech and music")

_PAIRS: dict[str, Pair] = {
    "bart mbart plbart": Pair(2),
    "mvp": Pair(2, only=("use_prompt", False)),
    "blenderbot blenderbot-small": Pair(),
    "pegasus marian": Pair(0, ("concatenated", 0)),
    "m2m_100 nllb-moe": Pair(0, ("tensor2tensor", 2)),
}
for _names, _pair in _PAIRS.items():
    register(_pair.read, _names, kind="Text", parts=("encoder", "decoder", "cross"))
register(_trocr, "trocr", kind="Text", parts=("", "cross"))
register(Pair().read, "whisper", kind="Speech and music", parts=("encoder", "decoder", "cross"))
