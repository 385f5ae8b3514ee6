"""Reading a call of attention from an .npz archive, as `relpos attend FILE` does."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relpos_np._files import npz, untrusted
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.types import Array

# What a compressed archive may unpack to: so many bytes, or so many times its own size.
_UNPACKED = 1 << 28
_TIMES = 16


class UnusableError(RelposError):
    """A file or an option that cannot be used."""


def attention_schemes() -> list[str]:
    """Names of the schemes that attention takes."""
    return [name for name, info in SCHEMES.items() if info.kind == "attention"]


def read(path: Path) -> dict[str, Array]:
    """All arrays of an .npz archive by name; nothing in it is unpickled.

    Arrays of a compressed archive may have 16 times its size, or 256 MiB: a small file can then not use up the memory.
    Without compression there is no limit but the size of the file.
    """
    try:
        with untrusted.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            single = file.read(6) == b"\x93NUMPY"
            if not single:
                file.seek(0)
                return npz.read(file, size, max(_UNPACKED, _TIMES * size))
    except FileNotFoundError as error:
        raise UnusableError(f"{path}: no such file; relpos attend --help shows how one is made") from error
    except (OSError, RelposError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UnusableError(f"{path}: not a readable .npz archive: {why}") from error
    raise UnusableError(f"{path}: not a readable .npz archive: it is a single array; write q, k and v with numpy.savez")


_OPTIONS = ("mask", "key_lengths", "scale", "causal", "window", "offset")
_PREFIX = "position."


def call_arguments(arrays: Mapping[str, Array], scheme: str | None, source: str) -> dict[str, Any]:
    """Keyword arguments of `relpos_np.attention`, ``position`` among them, from the arrays of a file.

    The scheme is the one named, or else in the array ``scheme``. An error names the `source` if something is missing,
    or a name means nothing.
    """
    missing = [name for name in "qkv" if name not in arrays]
    if missing:
        raise UnusableError(f"{source}: missing {', '.join(missing)}; found {', '.join(sorted(arrays)) or 'no arrays'}")
    known = ("q", "k", "v", "scheme", *_OPTIONS)
    unknown = [name for name in arrays if name not in known and not name.startswith(_PREFIX)]
    if unknown:
        raise UnusableError(
            f"{source}: unknown {', '.join(sorted(unknown))}; expected q, k, v, {', '.join(_OPTIONS)}, scheme "
            f"and {_PREFIX}NAME for parameters of the scheme"
        )
    call: dict[str, Any] = {}
    for name, value in arrays.items():
        if name in ("q", "k", "v", "mask", "key_lengths"):
            call[name] = value
        elif name in ("scale", "causal", "offset"):
            call[name] = _scalar(name, value)
        elif name == "window":
            sides = [None if w < 0 else w for w in _integers(name, value)]
            call[name] = tuple(sides) if value.ndim else sides[0]
    named = _scalar("scheme", arrays["scheme"]) if "scheme" in arrays else None
    parameters = {name.removeprefix(_PREFIX): value for name, value in arrays.items() if name.startswith(_PREFIX)}
    call["position"] = _scheme(scheme or named, parameters, source)
    return call


def _scheme(name: str | None, parameters: Mapping[str, Array], source: str) -> Any:
    """A scheme from its name and the arrays of its constructor's parameters."""
    if name is None:
        if parameters:
            given = ", ".join(_PREFIX + parameter for parameter in parameters)
            raise UnusableError(f"{source}: {given} without a scheme; add an array `scheme`, or --scheme")
        return None
    if name not in SCHEMES:
        raise UnusableError(f"scheme: expected one of {', '.join(attention_schemes())}; found {name!r}")
    if SCHEMES[name].kind != "attention":
        raise UnusableError(
            f"scheme: {name} is added to the inputs before q, k and v are made of them, not to attention"
        )
    constructor: Callable[..., Any] = SCHEMES[name].cls
    known = {n: p for n, p in inspect.signature(constructor).parameters.items() if n != "self"}
    # Without a constructor of its own a class reports (*args, **kwargs).
    known = {n: p for n, p in known.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    values: dict[str, Any] = {}
    axes: dict[int, Any] = {}
    for parameter, value in parameters.items():
        base, _, axis = parameter.partition(".")
        if base == "key_coords" in known and axis.isdecimal():
            axes[int(axis)] = value
        elif parameter not in known or parameter == "key_coords":
            expected = ", ".join(_PREFIX + n + (".0" if n == "key_coords" else "") for n in known) or "none"
            raise UnusableError(f"{source}: {name} has no parameter {_PREFIX}{parameter}; expected {expected}")
        else:
            values[parameter] = _parameter(parameter, value, str(known[parameter].annotation))
    missing = [_PREFIX + n for n, p in known.items() if p.default is p.empty and n not in values]
    if missing:
        raise UnusableError(f"{source}: {name} needs {', '.join(missing)}")
    if axes:
        count = len(values["query_grid"]) if isinstance(values["query_grid"], tuple) else 1
        if max(axes) >= count:
            raise UnusableError(
                f"{source}: {_PREFIX}key_coords.{max(axes)}: query_grid has {count} axes, counted from 0"
            )
        values["key_coords"] = tuple(axes.get(n) for n in range(count))
    return constructor(**values)


def _parameter(name: str, value: Array, kind: str) -> Any:
    """Single values and, where the constructor wants a sequence, lengths as Python's own; tables as arrays."""
    if not value.ndim:
        return _scalar(_PREFIX + name, value)
    if value.ndim == 1 and value.dtype.kind in "iu" and "Sequence" in kind:
        return tuple(value.tolist())
    return value


def _scalar(name: str, value: Array) -> Any:
    if value.size != 1:
        raise RelposValueError(f"{name}: expected a single value, found shape {value.shape}")
    return value.item()


def _integers(name: str, value: Array) -> list[int]:
    if value.dtype.kind not in "iu" or value.ndim > 1:
        raise RelposTypeError(f"{name}: expected one or two integers, found {value.dtype} of shape {value.shape}")
    return [int(w) for w in value.ravel()]
