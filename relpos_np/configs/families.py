"""The register of families: which reader understands the configurations of which model types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes
    ----------
    model_type : str
        As configurations have it.
    read : callable
        From the keys, the number of the layer and the part to what the layer is.
    defaults : mapping
        What the model's own configuration class has for keys that are missing.
    aliases : mapping
        Names of keys as stored, by the names that the reader asks for.
    others : frozenset of str
        Other keys of the class, whose names do not say what they are about: none is about attention.
    unread : frozenset of str
        Sizes that other classes have, and this one does not read.
    parts : tuple of str
        Stacks of layers: ("",) where there is one.
    kind : str
        Heading of the family in the documentation.
    package : str
        Whose configurations they are.
    count : callable, optional
        From the keys to the number of layers, where the first one may be refused and others not.
    """

    model_type: str
    read: Callable[[Keys, int, str], LayerAttention] = field(repr=False)
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    others: frozenset[str]
    unread: frozenset[str]
    parts: tuple[str, ...]
    kind: str
    package: str
    count: Callable[[Keys], int] | None = field(default=None, repr=False)


_registered: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_registered)


@cache
def classes() -> Mapping[str, Mapping[str, Any]]:
    """What the configuration classes of transformers and diffusers have, by model type: see `classes.json`."""
    text = files("relpos_np.configs").joinpath("classes.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)["types"]
    return found


def register(
    read: Callable[[Keys, int, str], LayerAttention],
    names: str,
    *,
    kind: str,
    defaults: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    parts: tuple[str, ...] = ("",),
    package: str = "transformers",
    count: Callable[[Keys], int] | None = None,
    like: str = "",
) -> None:
    """Add model types that one reader understands, separated by spaces.

    Their classes say defaults and aliases, to which the given ones are added; `like` names another type whose class
    files without one have.
    """
    for name in names.split():
        assert name not in _registered, name
        own = classes().get(like or name, {})
        _registered[name] = Family(
            name,
            read,
            {**own.get("defaults", {}), **(defaults or {})},
            {**own.get("aliases", {}), **(aliases or {})},
            frozenset(own.get("others", ())),
            frozenset(own.get("unread", ())),
            parts,
            kind,
            package,
            count,
        )
