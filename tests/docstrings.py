"""Validate the docstring of everything that is public: ``python tests/docstrings.py``, with the extra "dev".

Public is what a public module names in ``__all__``, in whatever folder it was written, and the public members of a
class. `numpydoc lint` goes by files and cannot know that. `[tool.numpydoc_validation]` in pyproject.toml lists checks.
"""

import importlib
import inspect
import pkgutil
import sys
import tomllib
from functools import cached_property
from pathlib import Path

from numpydoc.docscrape import ClassDoc
from numpydoc.validate import get_validation_checks, validate
from sphinx.ext.autodoc.mock import mock

import relpos_np as rp

# Packages whose absence must not hide the modules that serve them.
OTHERS = ["jax", "torch", "transformers"]
MEMBERS = (classmethod, staticmethod, property, cached_property)


def planted(depth):
    """Return the depth; found every time, or the others were not read."""
    return depth


def exported():
    """Name and object of what public modules export: functions, classes, and their members."""
    found = ["relpos_np", *(module.name for module in pkgutil.walk_packages(rp.__path__, "relpos_np."))]
    for module in (importlib.import_module(name) for name in found if "._" not in name):
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isroutine(thing):
                yield f"{module.__name__}.{name}", thing
            elif inspect.isclass(thing):
                yield f"{module.__name__}.{name}", thing
                yield from members(f"{module.__name__}.{name}", thing)


def members(prefix, cls):
    """Those that a class defines; what overrides a member is described where that is first defined."""
    for name, member in vars(cls).items():
        first = not any(name in vars(base) for base in cls.__mro__[1:])
        if first and not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, MEMBERS)):
            yield f"{prefix}.{name}", member


def described(cls):
    """What a class lists: parameters that it keeps are there once, as attributes."""
    listed = [one.name for part in ("Parameters", "Attributes") for one in ClassDoc(cls)[part]]
    return {name.strip() for names in listed for name in names.split(",")}


def errors(name, thing, checks):
    """One line per error."""
    for code, text in validate(name)["errors"]:
        if code == "PR01" and inspect.isclass(thing) and described(thing) >= set(inspect.signature(thing).parameters):
            continue
        if code == "YD01" and inspect.unwrap(thing).__annotations__.get("return") == "Iterator[None]":
            continue  # a context manager that hands nothing over
        if code in checks:
            yield f"{name}: {code} {text}"


def main():
    """Print what is wrong and return the exit code."""
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["numpydoc_validation"]
    checks = get_validation_checks(set(settings["checks"]))
    if len(list(errors(f"{__name__}.planted", planted, checks))) != 2:
        print("the planted docstring without parameters and result was not found")
        return 2
    with mock(OTHERS):
        public = dict(exported())
        wrong = [line for name, thing in public.items() for line in errors(name, thing, checks)]
    print(*wrong, f"{len(public)} docstrings, {len(wrong)} errors", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
