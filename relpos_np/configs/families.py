"""The register of families: which reader understands the configurations of which model types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    parts: tuple[str, ...]
    kind: str
    package: str
    count: Callable[[Keys], int] | None = field(default=None, repr=False)


_registered: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_registered)


def register(
    read: Callable[[Keys, int, str], LayerAttention],
    types: Mapping[str, Mapping[str, Any]],
    *,
    kind: str,
    aliases: Mapping[str, str] | None = None,
    parts: tuple[str, ...] = ("",),
    package: str = "transformers",
    count: Callable[[Keys], int] | None = None,
) -> None:
    """Add model types that one reader understands, each with its defaults."""
    for name, defaults in types.items():
        assert name not in _registered, name
        _registered[name] = Family(name, read, defaults, aliases or {}, parts, kind, package, count)
