"""What `identify` is given: arrays, settings and options that mean something, and operands that belong together."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.testing.candidates import parameter_names, setting_names
from relpos_np.testing.compare import EPS
from relpos_np.testing.operands import Operands, axes_swapped
from relpos_np.types import Array

# Arrays of its own that a scheme may have.
_ARRAYS = 12
_MASKS = ("mask", "key_lengths")
OPTIONS = ("scale", "offset", "causal", "window", "softcap", "cap_order")


def checked_names(
    given: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Array], dict[str, Any]]:
    """Options that are stated, arrays of positions, and settings of positions."""
    for name in options:
        if name not in (*OPTIONS, *_MASKS):
            raise RelposTypeError(f"{name}: identify has no such argument; expected {', '.join((*OPTIONS, *_MASKS))}")
    stated = {name: value for name, value in options.items() if value is not None}
    if "scale" in stated:
        stated["scale"] = check.positive("scale", stated["scale"])
    if "cap_order" in stated and "softcap" not in stated:
        raise RelposValueError(f"cap_order: {stated['cap_order']!r} without softcap")
    # What a call of any lengths would say of them.
    small = np.zeros((1, 1, 1))
    check.problem(small, small, None, **{n: stated[n] for n in OPTIONS if n in stated})
    arrays: dict[str, Array] = {}
    settings: dict[str, Any] = {}
    for name, value in (given or {}).items():
        _sort(name, value, arrays, settings)
    if len(arrays) > _ARRAYS:
        raise RelposValueError(f"given: no scheme has more than {_ARRAYS} arrays; found {', '.join(arrays)}")
    return stated, arrays, settings


def _sort(name: Any, value: Any, arrays: dict[str, Array], settings: dict[str, Any]) -> None:
    """Put what was given where it belongs."""
    if not isinstance(name, str):
        raise RelposTypeError(f"given: expected names, found {name!r}")
    own = name.removeprefix("position.")
    last = own.rpartition(".")[2]
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if last in setting_names() and value.ndim <= 1 and value.dtype.kind in "iufbU":
            settings[own] = value.tolist()
        elif value.dtype.kind in "iufb" or value.dtype.name in EPS:
            arrays[name] = value.astype(np.float64) if value.dtype.kind not in "iub" else value
        else:
            raise RelposTypeError(f"{name}: expected an array of numbers, found {value.dtype}")
    elif value is None or isinstance(value, bool | int | float | str | list | tuple):
        if last not in parameter_names():
            near = difflib.get_close_matches(last, sorted(parameter_names()), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RelposTypeError(f"{name}: no scheme has a parameter of this name{hint}")
        settings[own] = list(value) if isinstance(value, tuple) else value
    else:
        raise RelposTypeError(f"{name}: expected an array or a setting, found {type(value).__name__}")


def operands_of(named: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[Operands]:
    """The operands in float64, in every order of axes that their shapes allow."""
    missing = [name for name in ("q", "k") if named[name] is None]
    if named["out"] is None and named["scores"] is None:
        missing.append("out or scores")
    if named["out"] is not None and named["v"] is None:
        missing.append("v")
    if missing:
        raise RelposValueError(f"{missing[0]}: is missing; expected q, k, v and out, or q, k and scores, or x and out")
    if named["out"] is not None and named["scores"] is not None:
        raise RelposValueError("scores: expected either out or scores, found both")
    if named["scores"] is not None and named["lse"] is not None:
        raise RelposValueError("lse: goes with out; scores say all that it does")
    found: dict[str, Any] = dict.fromkeys(named)
    for name, x in named.items():
        if x is None:
            continue
        own = check.floating(name, x)
        if own.ndim < (1 if name == "lse" else 2):
            raise RelposValueError(f"{name}: expected shape (..., H, L, D), found {own.shape}")
        if not own.size:
            raise RelposValueError(f"{name}: expected at least one entry, found shape {own.shape}")
        found[name] = own.astype(np.float64)
    if not np.isfinite(found["scores"] if found["out"] is None else found["out"]).any():
        raise RelposValueError("out: holds no finite number")
    ways = list(axes_swapped(found))
    if not ways:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in found.items() if x is not None)
        raise RelposValueError(
            f"out: shapes do not belong together: found {shapes}; expected q (..., H, L_q, D), k (..., H_kv, L_k, D), "
            "v (..., H_kv, L_k, D_v), out (..., H, L_q, D_v), scores (..., H, L_q, L_k), lse (..., H, L_q)"
        )
    masks = {name: stated[name] for name in _MASKS if name in stated}
    readable, refused = [], []
    for layout, way in ways:
        flat = way["q"].ndim == 2
        one: dict[str, Any] = {
            name: x if x is None or x.ndim > (1 if name == "lse" and flat else 2) else x[None]
            for name, x in way.items()
        }
        try:
            problem, _, _ = check.problem(one["q"], one["k"], one["v"], **masks)
        except RelposError as error:
            refused.append(error)
        else:
            readable.append(Operands(**one, mask=problem.mask, key_lengths=problem.key_lengths, layout=layout))
    if not readable:
        raise refused[0]
    yield from readable
