"""Vision models with relative positions: Swin, Swin V2, BEiT and SAM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from relpos_np._contract import check
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan
from relpos_np.errors import RelposValueError

_SHIFTED = "windows shifted by {shift}: pass the mask of the shift, see layers"
_WINDOWS = "a call takes windows side by side: (batch * windows, H, {tokens}, D)"


def _pair(keys: Keys, name: str) -> tuple[int, int]:
    value = keys.get(name)
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(both) != 2:
        raise RelposValueError(f"{name}: expected one number or two, found {value!r}")
    return check.integer(name, both[0], 1), check.integer(name, both[1], 1)


def _grid(keys: Keys) -> tuple[int, int]:
    (height, width), (rows, columns) = _pair(keys, "image_size"), _pair(keys, "patch_size")
    return height // rows, width // columns


def _stage(keys: Keys, layer: int) -> tuple[int, int, dict[str, Any]]:
    """The stage of a layer and its number there, and the numbers of its heads."""
    depths, heads = keys.numbers("depths"), keys.numbers("num_heads")
    if len(depths) != len(heads):
        raise RelposValueError(f"num_heads: expected one for each of {len(depths)} stages, found {heads}")
    keys.ignore("num_attention_heads", "num_hidden_layers", "num_layers", "hidden_size", "use_absolute_embeddings")
    block, stage = layer, 0
    while stage < len(depths) - 1 and block >= depths[stage]:
        block -= depths[stage]
        stage += 1
    width = keys.integer("embed_dim") << stage
    if width % heads[stage]:
        raise RelposValueError(f"embed_dim: {width} channels of stage {stage} are no multiple of {heads[stage]} heads")
    found = equal_heads(sum(depths), heads[stage], width // heads[stage]) | {"causal": False}
    if keys.flag("use_absolute_embeddings"):
        found["added"] = learned("embeddings.position_embeddings")
    return stage, block, found


def _notes(shift: int, tokens: int) -> tuple[str, ...]:
    return (_WINDOWS.format(tokens=tokens), *((_SHIFTED.format(shift=shift),) if shift else ()))


def _swin(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A table per layer; every other layer is shifted by half a window, unless the window is the whole image."""
    stage, block, found = _stage(keys, layer)
    size = keys.integer("window_size")
    sides = [n >> stage for n in _grid(keys)]
    if min(sides) < size:
        raise RelposValueError(f"window_size: {size} is more than the {min(sides)} rows or columns of stage {stage}")
    shift = size // 2 if block % 2 and min(sides) > size else 0
    own = f"encoder.layers.{stage}.blocks.{block}.attention"
    names = (f"{own}.relative_position_bias.{_TABLE}", f"{own}.self.{_TABLE}", f"{own}.{_TABLE}")
    plan = SchemePlan("WindowBias", {"grid": (size, size)}, {"table": names})
    return LayerAttention(
        keys.model_type,
        part,
        layer,
        schemes=(plan,),
        address=(stage, block),
        notes=_notes(shift, size * size),
        **found,
    )


def _swin_v2(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Cosines, and a bias that a small network makes of the coordinates."""
    stage, block, found = _stage(keys, layer)
    size = keys.integer("window_size")
    sides = [n >> stage for n in _grid(keys)]
    window = (min(size, sides[0]), min(size, sides[1]))
    shift = size // 2 if block % 2 and min(sides) > size else 0
    sizes_then = keys.numbers("pretrained_window_sizes")
    if len(sizes_then) <= stage:
        raise RelposValueError(f"pretrained_window_sizes: expected one for each stage, found {sizes_then}")
    trained = sizes_then[stage]
    own = f"encoder.layers.{stage}.blocks.{block}.attention.self"
    weights = {
        "hidden_weight": f"{own}.continuous_position_bias_mlp.0.weight",
        "hidden_bias": f"{own}.continuous_position_bias_mlp.0.bias",
        "output_weight": f"{own}.continuous_position_bias_mlp.2.weight",
        "logit_scale": f"{own}.logit_scale",
    }
    pretrained = (trained, trained) if trained else None
    options = {"grid": window, "pretrained_grid": pretrained, "variant": "transformers"}
    plan = SchemePlan("SwinV2", options, weights)
    return LayerAttention(
        keys.model_type,
        part,
        layer,
        schemes=(plan,),
        address=(stage, block),
        notes=_notes(shift, window[0] * window[1]),
        **{**found, "scale": math.nan},
    )


def _beit(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A table per layer, or one for all, with rows for the class token; or positions added to the inputs."""
    found = sizes(keys)
    grid = _grid(keys)
    own, shared = keys.flag("use_relative_position_bias"), keys.flag("use_shared_relative_position_bias")
    if own and shared:
        raise RelposValueError("use_shared_relative_position_bias: expected False besides use_relative_position_bias")
    if own or shared:
        name = f"relative_position_bias.{_TABLE}"
        paths = (
            (f"encoder.{name}", name)
            if shared
            else tuple(
                f"{stem}.{layer}.{middle}{name}"
                for stem in ("encoder.layer", "encoder.layers", "layers", "layer")
                for middle in ("attention.attention.", "")
            )
        )
        found["schemes"] = (SchemePlan("BEiT", {"grid": grid}, {"table": paths}),)
    if keys.flag("use_absolute_position_embeddings"):
        found["added"] = learned("embeddings.position_embeddings")
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


def _sam(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A vector per row and per column difference, in windows or over the whole image."""
    found = sizes(keys)
    size, everywhere = keys.integer("window_size", least=0), keys.numbers("global_attn_indexes")
    whole = layer in everywhere or not size
    grid = _grid(keys) if whole else (size, size)
    keys.ignore("scale")
    if keys.flag("use_rel_pos"):
        weights = {name: f"layers.{layer}.attn.{path}" for name, path in _SAM_TABLES.items()}
        found["schemes"] = (SchemePlan("DecomposedBias", {"grid": grid}, weights),)
    if keys.flag("use_abs_pos"):
        found["added"] = learned("pos_embed")
    notes = () if whole else _notes(0, size * size)
    return LayerAttention(keys.model_type, part, layer, causal=False, notes=notes, **found)


_TABLE = "relative_position_bias_table"
_SAM_TABLES = {"height_table": "rel_pos_h", "width_table": "rel_pos_w"}


_KIND = "Images and video"
register(_swin, "swin", kind=_KIND)
register(_swin_v2, "swinv2", kind=_KIND)
register(_beit, "beit", kind=_KIND)
register(_sam, "sam_vision_model", kind=_KIND)
