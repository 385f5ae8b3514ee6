"""Arguments and attributes that had other names: the old ones work on, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from relpos_np.errors import RelposTypeError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def renamed(**names: str) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorate a function, or a constructor, whose arguments had other names: ``old="new"``."""

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            if not names.keys().isdisjoint(kwargs):
                # A formula that users call one by one is called by what checks its arguments.
                kwargs = by_new_names(call, kwargs, stacklevel=3 + getattr(call, "within", 0))  # type: ignore[assignment]
            return function(*args, **kwargs)

        call.renamed = names  # type: ignore[attr-defined]
        return call

    return decorate


def _old_names(function: Any) -> Mapping[str, str]:
    """Old names of the arguments of a function or a class, and their new ones."""
    made_by = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    names: Mapping[str, str] = getattr(made_by, "renamed", {})
    return names


def by_new_names(function: Any, given: Mapping[str, Any], *, stacklevel: int = 2) -> dict[str, Any]:
    """Arguments of a function or a class by their new names; those with old ones are warned of."""
    names, found = _old_names(function), {}
    for name, value in given.items():
        new = names.get(name, name)
        if new in found or (new != name and new in given):
            raise RelposTypeError(f"{new}: found twice, also by its old name {name}")
        if new != name:
            _warn(name, new, stacklevel)
        found[new] = value
    return found


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=stacklevel + 1)


class OldName:
    """An attribute that is now called otherwise."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, thing: Any, owner: type | None = None) -> Any:
        if thing is None:
            return self
        _warn(self._old, self._new, 2)
        return getattr(thing, self._new)


class Renamed(dict[str, Any]):
    """Entries by the names of a class's arguments, found by old names too."""

    def __init__(self, entries: Mapping[str, Any], cls: type) -> None:
        super().__init__(entries)
        self._names = _old_names(cls)

    def __missing__(self, name: str) -> Any:
        if self._names.get(name) not in self:
            raise KeyError(name)
        _warn(name, self._names[name], 2)
        return self[self._names[name]]


def entries(found: dict[str, Any], cls: type) -> dict[str, Any]:
    """A dictionary by the names of a class's arguments, which knows old ones if there are any."""
    return Renamed(found, cls) if _old_names(cls) else found
