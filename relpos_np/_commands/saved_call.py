"""Reading a call of attention from an .npz archive, as `relpos attend FILE` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relpos_np._commands.common import UnusableError
from relpos_np._commands.names import attention_schemes, scheme_named
from relpos_np._contract.problem import Rule
from relpos_np._contract.rules import Chunked, Dilated, Prefix
from relpos_np._files.npz import load_npz
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.types import Array


def needed(name: str) -> list[str]:
    """Names of the parameters that a scheme cannot be made without."""
    constructor: Callable[..., Any] = SCHEMES[name].cls
    every = inspect.signature(constructor).parameters.values()
    return [p.name for p in every if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def read(path: Path) -> dict[str, Array]:
    """All arrays of an .npz archive by name, within the limits of `relpos_np.load_npz`."""
    try:
        return load_npz(path)
    except RelposError as error:
        hint = "" if path.exists() else "; relpos attend --help shows how one is made"
        raise UnusableError(str(error).removeprefix("source: ") + hint) from error


_ARRAYS = ("mask", "key_lengths", "sinks", "query_scale", "selected", "segments")
_NUMBERS = ("scale", "causal", "softcap", "cap_order")
_OPTIONS = (*_ARRAYS, *_NUMBERS, "window", "offset", "key_segments", "rule")
_PREFIX = "position."
_RULES: dict[str, type[Any]] = {"chunked": Chunked, "dilated": Dilated, "prefix": Prefix}
_RULE_PREFIX = "rule."


def call_arguments(arrays: Mapping[str, Array], scheme: str | None, source: str) -> dict[str, Any]:
    """Keyword arguments of `relpos_np.attention`, ``position`` among them, from the arrays of a file.

    The scheme is the one named, or else in the array ``scheme``. An error names the `source` if something is missing,
    or a name means nothing.
    """
    missing = [name for name in "qkv" if name not in arrays]
    if missing:
        raise UnusableError(f"{source}: missing {', '.join(missing)}; found {', '.join(sorted(arrays)) or 'no arrays'}")
    known = ("q", "k", "v", "scheme", *_OPTIONS)
    unknown = [name for name in arrays if name not in known and not name.startswith((_PREFIX, _RULE_PREFIX))]
    if unknown:
        raise UnusableError(
            f"{source}: unknown {', '.join(sorted(unknown))}; expected q, k, v, {', '.join(_OPTIONS)}, scheme, "
            f"{_PREFIX}NAME and {_RULE_PREFIX}NAME for parameters of the scheme and the rule"
        )
    call: dict[str, Any] = {}
    for name, value in arrays.items():
        if name in ("q", "k", "v"):
            call[name] = value
        elif name in (*_ARRAYS, *_NUMBERS, "window", "offset"):
            call[name] = option(name, value)
    if "key_segments" in arrays:
        if "segments" not in arrays:
            raise UnusableError(f"{source}: key_segments without segments, which are those of queries")
        call["segments"] = arrays["segments"], arrays["key_segments"]
    rule = _rule(arrays, source)
    if rule is not None:
        call["rule"] = rule
    named = _scalar("scheme", arrays["scheme"]) if "scheme" in arrays else None
    parameters = {name.removeprefix(_PREFIX): value for name, value in arrays.items() if name.startswith(_PREFIX)}
    call["position"] = _scheme(scheme or named, parameters, source, _PREFIX)
    return call


def option(name: str, value: Array) -> Any:
    """What an array says of an option of a call: a number as Python's own, and no limit where a window is negative."""
    if name in _NUMBERS or (name == "offset" and value.size == 1):
        return _scalar(name, value)
    if name == "window":
        sides = [None if w < 0 else w for w in _integers(name, value)]
        return tuple(sides) if value.ndim else sides[0]
    return value


def _scheme(name: str | None, parameters: Mapping[str, Array], source: str, prefix: str) -> Any:
    """A scheme from its name and the arrays of its constructor's parameters, whose names in the file have a prefix.

    A parameter that is a scheme has its name, and those of its own parameters stand behind a dot.
    """
    if name is None:
        if parameters:
            given = ", ".join(prefix + parameter for parameter in parameters)
            raise UnusableError(f"{source}: {given} without a scheme; add an array `scheme`, or --scheme")
        return None
    name, variant = scheme_named(name, expected=attention_schemes())
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
    # What lies within a scheme holds none itself: names in a file must not decide how deep this goes.
    inner = prefix != _PREFIX
    within: dict[str, dict[str, Array]] = {n: {} for n, p in known.items() if p.annotation == "Scheme" and not inner}
    for parameter, value in parameters.items():
        base, _, axis = parameter.partition(".")
        if base == "key_coords" in known and axis.isdecimal():
            axes[int(axis)] = value
        elif base in within and axis:
            within[base][axis] = value
        elif parameter not in known or parameter == "key_coords":
            expected = ", ".join(prefix + n + (".0" if n == "key_coords" else "") for n in known) or "none"
            raise UnusableError(f"{source}: {name} has no parameter {prefix}{parameter}; expected {expected}")
        else:
            values[parameter] = _parameter(parameter, value, str(known[parameter].annotation))
    for parameter, of_parameter in within.items():
        if parameter in values:
            chosen = _scalar(prefix + parameter, parameters[parameter])
            values[parameter] = _scheme(chosen, of_parameter, source, f"{prefix}{parameter}.")
    if variant is not None and (values.setdefault("variant", variant) != variant or "variant" not in known):
        raise UnusableError(f"scheme: {variant} is a variant of {name}; say {name}, and what it is made with")
    _require(known, values, f"{source}: {name}", prefix)
    if axes:
        count = len(values["grid"]) if isinstance(values["grid"], tuple) else 1
        if max(axes) >= count:
            raise UnusableError(f"{source}: {prefix}key_coords.{max(axes)}: grid has {count} axes, counted from 0")
        values["key_coords"] = tuple(axes.get(n) for n in range(count))
    return constructor(**values)


def _require(known: Mapping[str, inspect.Parameter], given: Mapping[str, Any], named: str, prefix: str) -> None:
    missing = [prefix + n for n, p in known.items() if p.default is p.empty and n not in given]
    if missing:
        raise UnusableError(f"{named} needs {', '.join(missing)}")


def _rule(arrays: Mapping[str, Array], source: str) -> Rule | None:
    """A rule from its name and the arrays of its parameters; negative chunks are no limit, as in a window."""
    given = {name.removeprefix(_RULE_PREFIX): x for name, x in arrays.items() if name.startswith(_RULE_PREFIX)}
    if "rule" not in arrays:
        if given:
            raise UnusableError(f"{source}: {', '.join(_RULE_PREFIX + name for name in given)} without an array `rule`")
        return None
    name = _scalar("rule", arrays["rule"])
    if name not in _RULES:
        raise UnusableError(f"{source}: rule: expected one of {', '.join(_RULES)}; found {name!r}")
    known = inspect.signature(_RULES[name]).parameters
    for parameter in given:
        if parameter not in known:
            expected = ", ".join(_RULE_PREFIX + n for n in known)
            raise UnusableError(f"{source}: {name} has no parameter {_RULE_PREFIX}{parameter}; expected {expected}")
    _require(known, given, f"{source}: {name}", _RULE_PREFIX)
    if name == "prefix":
        return Prefix(given["lengths"])
    numbers = {n: _scalar(_RULE_PREFIX + n, x) for n, x in given.items()}
    for side in {"left", "right"} & numbers.keys():
        if isinstance(numbers[side], int) and numbers[side] < 0:
            numbers[side] = None
    made: Rule = _RULES[name](**numbers)
    return made


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
