"""The options of a call of attention: the only place that spells each of them, its type and its default.

A function takes them as ``**options: Unpack[Options]``, says with `takes` which of them it has, and passes them on as
they are. To add an option, add a line to a record and to `ORDER`, and use it where it acts.
"""

# There is no `from __future__ import annotations` here: defaults are read from the annotations.

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Never, TypedDict, TypeVar

import numpy as np

from relpos_np._contract.problem import Rule
from relpos_np.errors import RelposTypeError
from relpos_np.types import Array, Backend, Precision

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ForeignOptions(TypedDict, total=False):
    """The options that are never arrays: whoever takes arrays of another package types the others."""

    causal: Annotated[bool, False]
    window: Annotated[int | tuple[int | None, int | None] | None, None]
    rule: Annotated[Rule | None, None]
    scale: Annotated[float | None, None]
    softcap: Annotated[float | None, None]
    cap_order: Annotated[Literal["scores", "content"], "scores"]
    precision: Annotated[Precision | None, None]
    backend: Annotated[Backend | None, None]


class PagedOptions(ForeignOptions, total=False):
    """Those, and what belongs to queries: the options where nothing else says which keys there are."""

    query_scale: Annotated[Array | None, None]
    sinks: Annotated[Array | None, None]


class Options(PagedOptions, total=False):
    """Every option."""

    mask: Annotated[Array | None, None]
    key_lengths: Annotated[Any, None]
    selected: Annotated[Array | None, None]
    offset: Annotated[int | Array | Literal["end"] | None, None]
    segments: Annotated[Any, None]
    dropout: Annotated[float, 0.0]
    # Quoted, because NumPy imports `numpy.random` on first use.
    rng: Annotated["np.random.Generator | None", None]


# As signatures and docstrings list them: first those that decide the scores.
SCORES = (
    "mask",
    "key_lengths",
    "causal",
    "window",
    "rule",
    "selected",
    "scale",
    "offset",
    "query_scale",
    "softcap",
    "cap_order",
)
ORDER = (*SCORES, "segments", "sinks", "dropout", "rng", "precision", "backend")
DEFAULTS: Any = {name: Options.__annotations__[name].__metadata__[0] for name in ORDER}


def takes(*, only: Iterable[str] = ORDER, but: Iterable[str] = ()) -> Callable[[_Function], _Function]:
    """Decorate a function that takes ``**options``: its signature lists by name those that it has."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [name for name in ORDER if name in only and name not in but]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=DEFAULTS[name],
                annotation=Options.__annotations__[name].__origin__,
            )
            for name in names
        ]
        # What is returned, and where, comes last, as in the docstrings.
        at = next((n for n, p in enumerate(own) if p.name.startswith("return_")), len(own))
        listed = [*own[:at], *options, *own[at:]]
        function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        function.options = frozenset(names)  # type: ignore[attr-defined]
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
