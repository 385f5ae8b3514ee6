"""How schemes and encodings print: the arguments that make them, of arrays the shape."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

# Characters; what would be longer is cut.
_LONGEST = 150


def printed(made: Any) -> str:
    """The call that makes an object which keeps its arguments as attributes, without those that are their defaults."""
    words = []
    for name, parameter in inspect.signature(type(made)).parameters.items():
        value = getattr(made, name, parameter.default)
        if value is not parameter.default and (_is_array(value) or value != parameter.default):
            words.append(f"{name}={_shown(value)}")
    while len(text := f"{type(made).__name__}({', '.join(words)})") > _LONGEST:
        words[-2:] = ["..."]
    return text


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    return str(tuple(value.shape)) if _is_array(value) else repr(value)


def _is_array(value: Any) -> bool:
    """Whether a value has a shape, be it NumPy's or another package's; numbers of NumPy's are none."""
    return hasattr(value, "shape") and not isinstance(value, np.generic)
