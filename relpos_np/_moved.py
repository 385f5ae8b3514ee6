"""Modules that users imported under another name: the old names still lead there, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

_MOVED = {
    "axes": "formulas.rotary_axes",
    "bucket": "formulas.buckets",
    "diagrams": "plot.diagrams",
    "frequencies": "formulas.frequencies",
    "pictures": "plot.gallery",
    "problem": "_contract.problem",
    "registry": "schemes.registry",
    "resize": "formulas.resize_tables",
    "rotations": "formulas.rotations",
    "sweep": "testing.sweep",
}


class _Moved(ModuleType):
    """A module that hands on what its successor has."""

    def __init__(self, name: str, successor: str) -> None:
        super().__init__(name, f"Deprecated: see `{successor}`.")
        self.__dict__["_successor"] = successor

    def __getattr__(self, name: str) -> Any:
        successor = self.__dict__["_successor"]
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(importlib.import_module(successor), name)
        warnings.warn(f"{self.__name__} has moved to {successor}", DeprecationWarning, stacklevel=2)
        return found


def install(package: str) -> None:
    """Make the old names of modules importable from a package."""
    for old, new in _MOVED.items():
        module = _Moved(f"{package}.{old}", f"{package}.{new}")
        sys.modules.setdefault(module.__name__, module)
        setattr(sys.modules[package], old, module)
