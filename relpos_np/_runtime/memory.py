"""How many bytes a call may ask for: the limit, for whom it holds, and the refusal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any

from relpos_np.errors import RelposMemoryError, RelposTypeError, RelposValueError, shown

VARIABLE = "RELPOS_MEMORY_LIMIT"
# More than any address space holds, and than the integers that NumPy counts bytes with.
_MOST = (1 << 63) - 1


class _Unset:
    """No limit was chosen, which differs from None: the choice of no limit."""


_UNSET = _Unset()
_default: int | _Unset | None = _UNSET
# Whether there may be a limit at all, which is quicker to ask.
_used = VARIABLE in os.environ
_scoped: ContextVar[int | _Unset | None] = ContextVar("relpos_np_memory", default=_UNSET)


def _checked(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RelposTypeError(f"{name}: expected bytes as an integer or None, found {shown(value)}")
    if value < 0:
        raise RelposValueError(f"{name}: expected 0 or more bytes, found {shown(value)}")
    return int(value)


def _of_environment() -> int | None:
    global _default
    text = os.environ.get(VARIABLE, "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise RelposValueError(f"{VARIABLE}: expected bytes as an integer, found {text!r}")
    _default = int(text) if text else None
    return _default


def limit() -> int | None:
    """Bytes that a call may ask for: the innermost `memory_limit`, `set_memory_limit`, RELPOS_MEMORY_LIMIT, None.

    The variable is read once it is needed, and a RelposValueError says that it holds no number.
    """
    if not _used:
        return None
    chosen = _scoped.get()
    if chosen is _UNSET:
        chosen = _default
        if chosen is _UNSET:
            chosen = _of_environment()
    return chosen  # type: ignore[return-value]  # mypy does not narrow by identity


def set_memory_limit(limit: int | None) -> None:
    """Refuse all later calls in this process that would need more memory than so many bytes.

    `relpos_np.attention`, `relpos_np.attention_vjp`, `relpos_np.logits` and `relpos_np.rel_shift` add up what they
    would allocate on the host: their results, dense matrices of scores, the mask of dropout, copies in another dtype
    or layout, what schemes and kernels hold. They raise `RelposMemoryError` before they allocate any of it if that is
    more than the limit. Memory that the caller holds already is not counted, nor is that of a CUDA device.

    Parameters
    ----------
    limit : int or None
        Bytes; None for no limit. Before this is called the environment variable RELPOS_MEMORY_LIMIT decides, if
        it was there when the package was imported; without it there is no limit.

    Raises
    ------
    RelposTypeError
        If it is neither an integer nor None.
    RelposValueError
        If it is negative.

    See Also
    --------
    relpos_np.memory_limit : For a ``with`` block.

    Notes
    -----
    The sum is one of upper bounds, each for a part of the call: what is really allocated at once is at most that, and
    for large calls at least a quarter of it. Each call is judged alone, whatever other threads do.

    The machine's memory is no limit by default: results may be written to a file that is mapped into memory, pages
    that are never touched cost nothing, and how much is free cannot be known beforehand. Where the system itself
    refuses an allocation, its MemoryError becomes a `RelposMemoryError` that names the bytes as well.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.zeros((1, 4096, 64), np.float32)
    >>> with rp.memory_limit(16 * 2**20):
    ...     rp.attention(q, q, q, backend="numpy")
    Traceback (most recent call last):
    ...
    relpos_np.errors.RelposMemoryError: attention: ... bytes, ... limit of 16777216 bytes ...
    """
    global _default, _used
    _default = _checked("limit", limit)
    _used = True


@contextmanager
def memory_limit(limit: int | None) -> Iterator[None]:
    """Refuse calls inside a ``with`` block that would need more memory, for the current thread or task only.

    Parameters
    ----------
    limit : int or None
        Bytes, see `relpos_np.set_memory_limit`; None for no limit.

    Raises
    ------
    RelposError
        As `relpos_np.set_memory_limit`.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.ones((1, 2**14, 64), np.float32)
    >>> with rp.memory_limit(2**24):
    ...     rp.attention(q, q, q, backend="numpy")
    Traceback (most recent call last):
    ...
    relpos_np.errors.RelposMemoryError: attention: ... bytes, ... limit of 16777216 bytes ...
    """
    global _used
    token = _scoped.set(_checked("limit", limit))
    _used = True
    try:
        yield
    finally:
        _scoped.reset(token)


def require(function: str, parts: Mapping[str, int]) -> None:
    """Refuse more bytes than the limit; `parts` says what they are for."""
    most, total = limit(), sum(parts.values())
    if most is not None and total > most:
        largest = max(parts, key=lambda name: parts[name])
        raise RelposMemoryError(
            f"{function}: asks for {total} bytes, {parts[largest]} of them for {largest}, which is more than the limit "
            f"of {most} bytes (see relpos_np.set_memory_limit)"
        )


class Named:
    """A ``with`` block in which NumPy's MemoryError becomes one of this library, in the name of a function."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __enter__(self) -> None:
        """Nothing is prepared."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """NumPy says how many bytes it was refused."""
        if kind is not None and issubclass(kind, MemoryError) and not issubclass(kind, RelposMemoryError):
            raise RelposMemoryError(
                f"{self.function}: the system has no memory for what the call needs ({error or 'MemoryError'})"
            ) from error


def countable(function: str, shape: tuple[int, ...]) -> None:
    """Refuse dense matrices of more bytes than can be counted, for which NumPy has several errors of its own."""
    size = 8 * math.prod(shape)
    if size > _MOST:
        raise RelposMemoryError(f"{function}: asks for {size} bytes for dense scores of shape {shape}, more than exist")
