"""The options of a call of attention: the only place that spells each of them, its type and its default.

A function takes some of them as ``**options: Unpack[...]`` of one of the records below and passes them on as they are.
To add an option, add a line to a record and use it where it acts.
"""

# There is no `from __future__ import annotations` here: defaults are read from the annotations.

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Never, TypedDict, TypeVar

import numpy as np

from relpos_np._contract.problem import Rule
from relpos_np.errors import RelposTypeError
from relpos_np.types import Array, Backend, Precision

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Mask(TypedDict, total=False):
    """Which pairs are attended, or what is added to their scores."""

    mask: Annotated[Array | None, None]


class _Arrays(_Mask, total=False):
    """Arrays, which other packages pass as arrays of their own."""

    key_lengths: Annotated[Any, None]


class _Band(TypedDict, total=False):
    """Which relative positions are attended."""

    causal: Annotated[bool, False]
    window: Annotated[int | tuple[int | None, int | None] | None, None]


class _Rule(TypedDict, total=False):
    """Which pairs are attended, by a rule."""

    rule: Annotated[Rule | None, None]


class _Rules(_Rule, total=False):
    """Which pairs are attended, by a rule or by name."""

    selected: Annotated[Array | None, None]


class _Scale(TypedDict, total=False):
    """The factor on products."""

    scale: Annotated[float | None, None]


class _Fixed(_Scale, total=False):
    """Numbers that a module of `relpos_np.layers` sets itself."""

    offset: Annotated[int | Array | Literal["end"] | None, None]


class _Scaled(TypedDict, total=False):
    """Factors on queries."""

    query_scale: Annotated[Array | None, None]


class _Capped(TypedDict, total=False):
    """A bound on scores."""

    softcap: Annotated[float | None, None]
    cap_order: Annotated[Literal["scores", "content"], "scores"]


class _Packed(TypedDict, total=False):
    """Several calls in one."""

    segments: Annotated[Any, None]


class _Sunk(TypedDict, total=False):
    """What belongs to a row of scores."""

    sinks: Annotated[Array | None, None]


class _Dropout(TypedDict, total=False):
    """What changes the output and not the scores."""

    dropout: Annotated[float, 0.0]
    # Quoted, because NumPy imports `numpy.random` on first use.
    rng: Annotated["np.random.Generator | None", None]


class _Backend(TypedDict, total=False):
    """What computes the call."""

    backend: Annotated[Backend | None, None]


class _Precision(TypedDict, total=False):
    """How exactly products are made."""

    precision: Annotated[Precision | None, None]


class Options(
    _Arrays, _Band, _Rules, _Fixed, _Scaled, _Capped, _Packed, _Sunk, _Dropout, _Precision, _Backend, total=False
):
    """Every option."""


class ScoreOptions(_Arrays, _Band, _Rules, _Fixed, _Scaled, _Capped, _Backend, total=False):
    """The options that change the scores."""


class PartOptions(_Arrays, _Band, _Fixed, _Backend, total=False):
    """The options of a part of a call."""


class NumberOptions(_Band, _Fixed, _Precision, _Backend, total=False):
    """The options that are not arrays, for functions whose arrays are another package's."""


class ForeignOptions(_Band, _Rule, _Scale, _Capped, _Precision, _Backend, total=False):
    """The options that are never arrays, for functions which take all others as arrays of another package."""


class PreparedOptions(_Mask, _Band, _Rules, _Fixed, _Capped, _Precision, _Backend, total=False):
    """The options that are the same in every run of a prepared call."""


class PagedOptions(_Band, _Scale, _Scaled, _Capped, _Sunk, _Precision, _Backend, total=False):
    """The options of a call over a paged cache."""


class ModelOptions(_Arrays, _Band, _Rules, _Fixed, _Scaled, _Capped, _Sunk, total=False):
    """The options that a model of ONNX can say."""


class LayerOptions(_Arrays, _Band, _Rules, _Scaled, _Capped, _Sunk, _Dropout, _Precision, _Backend, total=False):
    """The options of a module."""


DEFAULTS: Any = {name: hint.__metadata__[0] for name, hint in Options.__annotations__.items()}


def takes(record: type) -> Callable[[_Function], _Function]:
    """Decorate a function that takes ``**options`` of a record: its signature lists them by name."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=hint.__origin__)
            for name, hint in record.__annotations__.items()
        ]
        # What is returned, and where, comes last, as in the docstrings.
        at = next((n for n, p in enumerate(own) if p.name.startswith("return_")), len(own))
        listed = [*own[:at], *options, *own[at:]]
        function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        function.options = frozenset(record.__annotations__)  # type: ignore[attr-defined]
        return function

    return decorate


def completed(function: Any, options: Mapping[str, Any]) -> Options:
    """All options, with defaults for those that are not given; refuses what the function does not take."""
    if options and not function.options.issuperset(options):
        _refuse(function, next(name for name in options if name not in function.options))
    return DEFAULTS | options  # type: ignore[no-any-return]


def _refuse(function: Any, name: str) -> Never:
    from difflib import get_close_matches

    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RelposTypeError(f"{name}: {function.__qualname__} has no such argument; {hint}expected {', '.join(known)}")
