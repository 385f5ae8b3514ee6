"""Configurations as dictionaries: which of their keys a reader took, and which of the others may be ignored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np._contract import check
from relpos_np._files import untrusted
from relpos_np.configs import elsewhere, gguf
from relpos_np.configs.neutral import harmless
from relpos_np.errors import RelposTypeError, RelposValueError

if TYPE_CHECKING:
    from relpos_np.configs.families import Family
    from relpos_np.configs.layer import LayerAttention

_REQUIRED = object()
# Keys that count for nothing where another one is false.
_SWITCHED = {"use_sliding_window": "sliding_window", "use_cla": "cla_share_factor"}
# Bytes of a file; configurations that name 20,000 classes have two million.
_LONGEST = 32 << 20


def loaded(config: Any) -> dict[str, Any]:
    """A configuration as a dictionary: from one, from a config.json or the folder of one, or from an object."""
    if isinstance(config, Mapping):
        found = dict(config)
    elif isinstance(config, str | os.PathLike):
        path = Path(config)
        path = elsewhere.within(path) if os.path.isdir(path) else path  # noqa: PTH112 -- as for any name
        if path.suffix == ".gguf":
            return gguf.config(path)
        try:
            found = untrusted.parsed(untrusted.whole(path, _LONGEST), infinities=True)
        except (OSError, RelposValueError) as error:
            raise RelposValueError(f"config: {path} cannot be read: {error}") from None
    elif callable(to_dict := getattr(config, "to_dict", None)):
        found = dict(to_dict())
    else:
        raise RelposTypeError(
            f"config: expected a mapping, a path or an object with to_dict, found {type(config).__name__}"
        )
    for name, value in found.items():
        if not isinstance(name, str):
            raise RelposTypeError(f"config: expected names as keys, found {name!r}")
        if isinstance(value, np.ndarray):
            raise RelposTypeError(f"{name}: expected what JSON can hold, found an array")
    return found


def named(config: Mapping[str, Any]) -> str:
    """What a configuration says it is: `model_type`, or `_class_name` as diffusers stores it."""
    return str(config.get("model_type", config.get("_class_name")))


def without(config: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """A configuration, and those within it, without some keys."""
    return {
        key: without(value, names) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in names
    }


class OtherLayerError(RelposValueError):
    """A layer of a hybrid that has no softmax attention, or one that is not understood."""

    def __init__(self, layer: int, layers: int, kind: str, why: str) -> None:
        super().__init__(f"layer_types: layer {layer} is {kind}{why}")
        self.kind, self.layers = kind, layers


class Keys:
    """The keys of one model's configuration, with the defaults of its own class, and a note of those that were taken.

    Parameters
    ----------
    config : mapping
        As it is stored.
    family : Family
        What the model's class has for keys that are missing; other names of keys, by the names that it has, which
        count where a file has both; and names of keys that are not about attention.
    within : str
        Type of the model that this one is a part of; "" for none.
    """

    def __init__(self, config: Mapping[str, Any], family: Family, within: str = "") -> None:
        self.config = config
        self.family = family
        self.within = within
        self.model_type = named(config)
        self._taken: set[str] = {"model_type"}
        self._refused: dict[str, str] = {}
        self._inner: list[Keys] = []

    def _spelled(self, name: str) -> set[str]:
        """All names of a key."""
        real = self.family.aliases.get(name, name)
        return {real, *(other for other, one in self.family.aliases.items() if one == real)}

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value: as stored, else that of the model's class, else `default`; without one the key is required."""
        if name in self.family.unread:
            return default
        real, names = self.family.aliases.get(name, name), self._spelled(name)
        self._taken |= names
        stored = [key for key in self.config if key in names]
        # The class takes its own name first, then the others in their order.
        for key in sorted(stored, key=lambda key: key != real)[-1:]:
            return self.config[key]
        for key in (name, *sorted(names)):
            if key in self.family.defaults:
                return self.family.defaults[key]
        if default is _REQUIRED:
            raise RelposValueError(f"{real}: the configuration of {self.model_type} has none, and it has no default")
        return default

    def inner(self, name: str, defaults: Mapping[str, Any]) -> Keys:
        """The keys of an object within this one, which `close` closes too."""
        stored = self.get(name, None) or {}
        if not isinstance(stored, Mapping):
            raise RelposValueError(f"{name}: expected an object, found {stored!r}")
        family = replace(self.family, defaults=defaults, aliases={}, others=frozenset())
        self._inner.append(Keys({**stored, "model_type": f"{self.model_type}: {name}"}, family))
        return self._inner[-1]

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """A whole number."""
        return check.integer(name, self.get(name, default), least)

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A number."""
        return check.real(name, self.get(name, default))

    def listed(self, name: str, count: int = 0, default: Any = _REQUIRED) -> list[Any] | None:
        """A list, of which each layer has one of so many; None where that is the default, and there is none."""
        value = self.get(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, list | tuple) or len(value) < count:
            wanted = f"one for each of {count} layers" if count else "a list"
            raise RelposValueError(f"{name}: expected {wanted}, found {value!r}")
        return list(value)

    def numbers(self, name: str, least: int = 0) -> list[int]:
        """A list of whole numbers, such as those of layers."""
        return [check.integer(name, n, least) for n in self.listed(name) or ()]

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or False; None is False."""
        value = self.get(name, default)
        return False if value is None else check.flag(name, value)

    def only(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """A value that must be one of those whose meaning is known; `close` refuses another."""
        value = self.get(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            words = " or ".join(map(repr, allowed))
            self._refused[name] = f"{name}: {value!r} is not understood in {self.model_type}, expected {words}"
            return allowed[0]
        return value

    def ignore(self, *names: str) -> None:
        """Take keys that have no effect on attention in this model."""
        self._taken.update(*map(self._spelled, names))

    def close(self, layer: LayerAttention) -> None:
        """Refuse, all at once, the values that are not understood, and every key that nothing is known of."""
        if refused := self._unknown(layer):
            names = ", ".join(repr(text.partition(":")[0]) for text in refused)
            raise RelposValueError(
                "; ".join(refused) + f"; to read the file as if it had none of them: ignore=({names},)"
            )

    def _unknown(self, layer: LayerAttention) -> list[str]:
        known = self._taken | self.family.others
        known = known | {name for switch, name in _SWITCHED.items() if self.config.get(switch) is False}
        return [
            *self._refused.values(),
            *(
                f"{name}: {value!r:.60} in a configuration of {self.model_type} may change attention, and is not "
                "understood"
                for name, value in self.config.items()
                if name not in known and not harmless(name, value, layer)
            ),
            *(text for inner in self._inner for text in inner._unknown(layer)),
        ]
