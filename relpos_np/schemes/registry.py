"""The register of schemes: documentation, tests, golden vectors and benchmarks are made from what it says of each."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from relpos_np._contract.backends import BACKENDS
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.sample import Builder
from relpos_np.types import Backend


@dataclass(frozen=True, eq=False)
class SchemeInfo:
    """What is registered of a scheme.

    Attributes
    ----------
    name : str
        Key in `SCHEMES`, and the name of its loops in the tests.
    cls : type
        Constructor.
    kind : {"attention", "absolute"}
        Passed as ``position=``, or added to the inputs.
    adds : str
        What positions contribute, in a few words.
    paper : str
        Where the formula was published.
    doi, equation : str
        Of the paper that has the formula, and the number of its equation, or a section where it has none.
    variants : tuple of str
        Named divergences.
    options : str
        What else can be chosen, in words.
    models : tuple of str
        Where it is found, among others.
    backends : tuple of str
        Where it runs.
    docs : str
        Page of the documentation.
    far : bool
        Whether positions are only looked up, so that no digits are lost however far away they are.
    build : callable
        Makes seeded calls, for examples and for tests.
    """

    name: str
    cls: type
    kind: str
    adds: str
    paper: str
    doi: str
    equation: str
    variants: tuple[str, ...]
    options: str
    models: tuple[str, ...]
    backends: tuple[Backend, ...]
    docs: str
    far: bool
    build: Builder = field(repr=False)

    @property
    def formulas(self) -> dict[str, Callable[..., Any]]:
        """The formulas of the scheme by name: the public functions of its file."""
        module = sys.modules[self.cls.__module__]
        return {
            name: found
            for name, found in vars(module).items()
            if inspect.isfunction(found) and found.__module__ == module.__name__ and not name.startswith("_")
        }


class _Schemes(Mapping[str, SchemeInfo]):
    """What is registered by name, old before new; the files of schemes are imported when it is first read."""

    def __init__(self) -> None:
        self.found: dict[str, SchemeInfo] = {}
        self._sorted: dict[str, SchemeInfo] = {}
        self._complete = False

    def _all(self) -> dict[str, SchemeInfo]:
        if not self._complete:
            import pkgutil  # with what it imports, a tenth of what importing the package costs

            package = __name__.rpartition(".")[0]
            for module in pkgutil.iter_modules(sys.modules[package].__path__):
                importlib.import_module(f"{package}.{module.name}")
            self._complete = True
        if len(self._sorted) < len(self.found):
            self._sorted = dict(sorted(self.found.items(), key=lambda item: _place(item[1])))
        return self._sorted

    def __getitem__(self, name: str) -> SchemeInfo:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"SCHEMES({list(self)})"


_schemes = _Schemes()
SCHEMES: Mapping[str, SchemeInfo] = _schemes
_classes: set[type] = set()


def is_registered(cls: type) -> bool:
    """Whether a class is a scheme of this package, whose terms its tests check: one that has an instance has been."""
    return cls in _classes


def register(
    name: str,
    cls: type,
    *,
    adds: str,
    paper: str,
    doi: str = "",
    equation: str = "",
    variants: tuple[str, ...] = (),
    options: str = "",
    models: str = "",
    far: bool = False,
) -> Callable[[Builder], Builder]:
    """Add a scheme to `SCHEMES`, which is sorted by the year of the paper; the attributes of `SchemeInfo` say more.

    It decorates the function that makes a seeded call: from a `Sample` to the fields of an `Example`.

    Parameters
    ----------
    name : str
        Key.
    cls : type
        Of attention, or an `AbsoluteEncoding`.
    adds, paper, doi, equation, variants, options, far
        See `SchemeInfo`.
    models : str
        Where it is found, between commas.

    Returns
    -------
    callable
        The decorator.
    """
    absolute = issubclass(cls, AbsoluteEncoding)
    kind, backends = ("absolute", ("numpy",)) if absolute else ("attention", BACKENDS)
    found_in = tuple(models.split(", ")) if models else ()
    page = f"schemes/{name}.md"

    def add(build: Builder) -> Builder:
        _classes.add(cls)
        _schemes.found[name] = SchemeInfo(
            name, cls, kind, adds, paper, doi, equation, variants, options, found_in, backends, page, far, build
        )
        return build

    return add


def _place(info: SchemeInfo) -> tuple[bool, int, str]:
    """Schemes of attention before absolute ones, old before new."""
    year = re.search(r"\b(?:19|20)\d\d\b", info.paper)
    return info.kind == "absolute", int(year[0]) if year else 0, info.name
