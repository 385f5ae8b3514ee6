"""Rotary positions over grids of patches: image encoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import divided, equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.rotary_axes import axial_frequencies, grid_positions
from relpos_np.schemes.rotary import Rotary
from relpos_np.types import Array


def on_grid(
    frequencies: Array,
    remark: str,
    *,
    layout: str = "half",
    others: str = "",
    coordinates: Literal["index", "centered", "middle"] = "index",
    blocks: tuple[int, ...] = (),
    known: tuple[int, ...] = (),
) -> SchemePlan:
    """Patches turn by their rows and columns, and frames; other tokens do not turn.

    Parameters
    ----------
    frequencies : ndarray, shape (A, P)
        Angles per step along each axis.
    remark : str
        What `grid` of a call means.
    layout : {"half", "interleaved"}
        Which pairs turn.
    others : {"", "before", "after"}
        Where tokens stand that are no patches.
    coordinates : {"index", "centered", "middle"}
        See `relpos_np.reference.grid_positions`; "middle": rows and columns count from the middle of the image, and
        other tokens go on from its end, with the same number on every axis.
    blocks : tuple of int
        Patches of each block of so many rows and columns follow one another, the largest blocks first.
    known : tuple of int
        The only sizes of the last axes whose coordinates are known; empty for any.
    """
    make = partial(_make, others=others, coordinates=coordinates, blocks=blocks, known=known)
    shown: dict[str, Any] = {"frequencies": frequencies} | ({} if layout == "half" else {"layout": layout})
    return SchemePlan("Rotary", shown, inputs=("grid",), remark=remark, make=make, varies=True)


def _make(
    given: Given,
    *,
    others: str,
    coordinates: Literal["index", "centered", "middle"],
    blocks: tuple[int, ...],
    known: tuple[int, ...],
) -> Rotary:
    axes, grid = len(given.options["frequencies"]), given.inputs["grid"]
    if not isinstance(grid, Sequence | np.ndarray):
        raise RelposTypeError(f"grid: expected {axes} numbers of patches, found {grid!r}")
    counts = [check.integer("grid", n, 1) for n in grid]
    if len(counts) != axes:
        raise RelposValueError(f"grid: expected {axes} numbers of patches, found {tuple(counts)}")
    spare = given.k_len - math.prod(counts)
    if spare < 0 or (spare and not others):
        raise RelposValueError(f"grid: {tuple(counts)} are {math.prod(counts)} patches of {given.k_len} tokens")
    if known and tuple(counts[-len(known) :]) != known:
        raise RelposValueError(
            f"grid: expected {known} as rows and columns, found {tuple(counts)}; the model scales and crops other sizes"
        )
    if blocks and any(n % blocks[-1] for n in counts):
        raise RelposValueError(f"grid: expected multiples of {blocks[-1]}, found {tuple(counts)}")
    positions = grid_positions(counts, coordinates="index" if coordinates == "middle" else coordinates)
    if blocks:
        order = [cell // size for size in (*blocks, 1) for cell in grid_positions(counts)]
        positions = positions[:, np.lexsort(order[::-1])]
    still = np.zeros((axes, spare))
    if coordinates == "middle":
        positions[1:] -= np.array([[n - n // 2] for n in counts[1:]])
        still += max(counts[1:]) // 2 + np.arange(spare)
    both = (still, positions) if others == "before" else (positions, still)
    return Rotary(positions=np.concatenate(both, axis=1), **given.options)


def _base(keys: Keys) -> float:
    """The base of an image encoder, of which rules for long texts make nothing."""
    stored = keys.get("rope_parameters", None) or {}
    if not isinstance(stored, dict):
        raise RelposValueError(f"rope_parameters: expected an object, found {stored!r}")
    kinds = {stored.get(name) for name in ("rope_type", "type")} - {None, "default", "axial"}
    unknown = stored.keys() - {"rope_type", "type", "rope_theta"}
    if kinds or unknown:
        raise RelposValueError(f"rope_parameters: {stored!r} is not understood in {keys.model_type}")
    beside = keys.get("rope_theta", None)
    base = stored.get("rope_theta", 10000.0 if beside is None else beside)
    return check.positive("rope_theta", 10000.0 if base is None else base)


_CLASS = "grid: rows and columns of patches; class and register tokens come first and do not turn"
_MERGED = "grid: rows and columns of patches, those of each block of {n} x {n} one after the other"
_FRAMES = "a call takes frames side by side, as batch items: in none of them is another one seen"


def _dinov3(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Centres of patches between -1 and 1; tokens in front of them do not turn."""
    found = sizes(keys)
    base = check.positive("rope_theta", keys.get("rope_theta"))
    omega = 2 * math.pi * axial_frequencies(found["head_dim"], base=base)
    words = f"{_CLASS}; base {base:g}, 2 pi times centres of patches between -1 and 1"
    found["schemes"] = (on_grid(omega, words, others="before", coordinates="centered"),)
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


_WINDOWED = ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder")


def _qwen(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Patches in blocks that are merged afterwards; Qwen2.5-VL looks into windows in most layers."""
    # Qwen2-VL's `hidden_size` is the width after merging.
    heads = keys.integer("num_attention_heads")
    dim = divided(keys, "embed_dim" if keys.model_type == "qwen2_vl_vision" else "hidden_size", heads)
    found = equal_heads(keys.integer("num_hidden_layers"), heads, dim)
    keys.ignore("embed_dim", "hidden_size")
    block = keys.integer("spatial_merge_size")
    base = _base(keys)
    omega = axial_frequencies(found["head_dim"], base=base)
    words, notes = _MERGED.format(n=block), [_FRAMES]
    blocks: tuple[int, ...] = (block,)
    if keys.model_type in _WINDOWED:
        size = keys.integer("window_size") // block // keys.integer("patch_size") * block
        windows = f"windows of {size} x {size} patches, smaller at the edges"
        if layer in keys.numbers("fullatt_block_indexes"):
            words, blocks = f"{words}, in {windows}", (max(size, block), block)
        else:
            words = words.replace("patches", "patches of a window", 1)
            notes = [f"{windows}: a call takes those of one size, as batch items"]
    if keys.model_type not in ("qwen2_vl_vision", *_WINDOWED):
        keys.only("apply_vit_abs_pos_embed", True, None)
        keys.ignore("deepstack_visual_indexes")
        found["added"] = learned("pos_embed.weight", remark="a square of rows, interpolated to the grid")
    found["schemes"] = (on_grid(omega, f"{words}; base {base:g}", blocks=blocks),)
    return LayerAttention(keys.model_type, part, layer, causal=False, notes=tuple(notes), **found)


def _pixtral(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Frequencies of all channels, dealt out to rows and columns in turn."""
    found = sizes(keys)
    base = _base(keys)
    omega = axial_frequencies(found["head_dim"], base=base, spread="alternate")
    words = f"grid: rows and columns of patches; base {base:g}, frequencies dealt out to them in turn"
    found["schemes"] = (on_grid(omega, words),)
    return LayerAttention(
        keys.model_type, part, layer, causal=False, notes=("a call takes images of one size, as batch items",), **found
    )


_KIND = "Images and video"


register(_dinov3, "dinov3_vit", kind=_KIND)
register(
    _qwen,
    "qwen2_vl_vision qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision qwen3_5_moe_vision "
    "qwen2_5_omni_vision_encoder qwen3_omni_moe_vision_encoder",
    kind=_KIND,
)
register(_pixtral, "pixtral", kind=_KIND)
