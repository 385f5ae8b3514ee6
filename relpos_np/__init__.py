"""Every formula for positions in attention: a NumPy reference with fast kernels.

PYTEST_DONT_REWRITE: pytest rewrites the packages of its plugins, and warns of those that were imported before it. There
is nothing to rewrite here, and where warnings are errors, importing this package first must not end a run.
"""

import importlib as _importlib

from relpos_np import backend
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.rules import Chunked, Dilated, Prefix
from relpos_np._runtime.memory import memory_limit, set_memory_limit
from relpos_np._runtime.precision import set_precision, use_precision
from relpos_np._runtime.threadcount import get_num_threads, set_num_threads, threads
from relpos_np.api import attention, attention_vjp, logits, prepare, rel_shift
from relpos_np.backend import set_backend, use_backend
from relpos_np.errors import (
    RelposError,
    RelposImportError,
    RelposIndexError,
    RelposMemoryError,
    RelposTypeError,
    RelposValueError,
)
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.registry import SCHEMES, SchemeInfo
from relpos_np.versions import show_versions

__version__ = "0.1.0"

# What a first call can do without is imported when it is first asked for.
_LATER = {
    "Quantized": "_contract.quantized",
    "ScoreMod": "schemes.score_mod",
    "from_config": "configs",
    "load_npz": "_files.npz",
    "paged_attention": "paged",
    "quantize": "_contract.quantized",
    "reference": "",
    "terms": "",
    "to_onnx": "interop.onnx",
    "write_pages": "paged",
}
_PUBLIC = [
    "SCHEMES",
    "AttentionGradient",
    "Chunked",
    "Dilated",
    "Prefix",
    "Quantized",
    "RelposError",
    "RelposImportError",
    "RelposIndexError",
    "RelposMemoryError",
    "RelposTypeError",
    "RelposValueError",
    "Scheme",
    "SchemeInfo",
    "ScoreMod",
    "attention",
    "attention_vjp",
    "backend",
    "from_config",
    "get_num_threads",
    "load_npz",
    "logits",
    "memory_limit",
    "paged_attention",
    "prepare",
    "quantize",
    "reference",
    "rel_shift",
    "set_backend",
    "set_memory_limit",
    "set_num_threads",
    "set_precision",
    "show_versions",
    "terms",
    "threads",
    "to_onnx",
    "use_backend",
    "use_precision",
    "write_pages",
]


def __getattr__(name: str) -> object:
    """A module or function of `_LATER`, or the class of a scheme, all of which are public by being registered."""
    found: object
    if name in _LATER:
        home = _LATER[name]
        found = _importlib.import_module(f"{__name__}.{home or name}")
        found = getattr(found, name) if home else found
    elif name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        # `__init__.pyi` names the classes for type checkers.
        classes = {info.cls.__name__: info.cls for info in SCHEMES.values()}
        found = [*_PUBLIC, *classes] if name == "__all__" else classes.get(name)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *(info.cls.__name__ for info in SCHEMES.values())})
