"""Every formula for positions in attention: a NumPy reference with fast kernels."""

from relpos_np import _moved, backend, reference
from relpos_np._contract.gradient import AttentionGradient
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
from relpos_np.schemes.registry import SCHEMES, SchemeInfo
from relpos_np.versions import show_versions

__version__ = "0.1.0"

# Classes of schemes are public by being registered; `__init__.pyi` names them for type checkers.
_CLASSES = {info.cls.__name__: info.cls for info in SCHEMES.values()}
globals().update(_CLASSES)
__all__ = [
    "SCHEMES",
    "AttentionGradient",
    "RelposError",
    "RelposImportError",
    "RelposIndexError",
    "RelposMemoryError",
    "RelposTypeError",
    "RelposValueError",
    "SchemeInfo",
    "attention",
    "attention_vjp",
    "backend",
    "get_num_threads",
    "logits",
    "memory_limit",
    "prepare",
    "reference",
    "rel_shift",
    "set_backend",
    "set_memory_limit",
    "set_num_threads",
    "set_precision",
    "show_versions",
    "threads",
    "use_backend",
    "use_precision",
]
__all__ += list(_CLASSES)

_moved.install(__name__)
