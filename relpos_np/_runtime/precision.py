"""How exactly products are made: the setting of a call, of a block, of the process, of the environment, of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from relpos_np.errors import RelposValueError, shown
from relpos_np.types import Precision

PRECISIONS = ("highest", "high", "medium")
_default: Precision | None = None
# Of the innermost block; a tuple, since what a block holds may be that nobody has chosen.
_scoped: ContextVar[tuple[Precision | None] | None] = ContextVar("relpos_np_precision", default=None)


def _checked(name: Any) -> Precision:
    if not isinstance(name, str) or name not in PRECISIONS:
        raise RelposValueError(f"precision: expected one of {', '.join(map(repr, PRECISIONS))}; found {shown(name)}")
    return name  # type: ignore[return-value]


def chosen(name: Any = None, setting: Precision | None = None) -> Precision | None:
    """What a call that asks for `name` uses now; None if nothing was chosen, so that the dtype decides.

    `setting`: what the package that the operands come from was told, which counts if nothing of this library was.
    """
    if name is not None:
        return _checked(name)
    scoped = _scoped.get()
    if scoped is not None:
        return scoped[0]
    found = _default or os.environ.get("RELPOS_PRECISION")
    return _checked(found) if found else setting


@contextmanager
def held(found: Precision | None) -> Iterator[None]:
    """Inside, calls that ask for nothing use what `chosen` has found before, maybe elsewhere; that may be nothing."""
    token = _scoped.set((found,))
    try:
        yield
    finally:
        _scoped.reset(token)


def set_precision(name: Precision | None) -> None:
    """Choose how exactly all later calls in this process make products.

    Parameters
    ----------
    name : {"highest", "high", "medium"} or None
        The words of ``torch.set_float32_matmul_precision``. In each of them the softmax and all sums are in float32.

        - "highest": products of float32 numbers, or as exact as those. Operands of half precision are widened.
        - "high": products with an error of 3 * 2^-16 at most, where matrix tiles make them (``RELPOS_MATRIX_UNIT``);
          elsewhere, and for gradients, as "highest".
        - "medium": products of operands rounded to bfloat16, and of probabilities and (for gradients) slopes of scores
          rounded to bfloat16, with an error of 2^-8 each; where the processor multiplies bfloat16 no faster than
          float32, as "highest".

        None returns to the environment variable RELPOS_PRECISION. Without one, the dtype of the operands decides:
        "medium" for bfloat16, unless a scheme computes other queries or keys from them, as rotary does; "highest" for
        all others.

    Raises
    ------
    RelposValueError
        If there is no such precision.

    Notes
    -----
    The innermost of these that says something counts: the argument of a call, `use_precision`, this function, the
    environment variable, and for tensors of float32 the setting of the package they come from (`relpos_np.interop`).

    A precision is a permission, which the CPU kernels make use of, with gradients or for more than a few queries, and
    the forward kernels of CUDA where ``RELPOS_CUDA_UNIT=mma`` asks for matrix units; all else computes with "highest".
    float64 is never rounded.

    Examples
    --------
    >>> import relpos_np as rp
    >>> rp.set_precision("medium")
    >>> rp.set_precision(None)  # the default
    """
    global _default
    _default = None if name is None else _checked(name)


@contextmanager
def use_precision(name: Precision) -> Iterator[None]:
    """Choose how exactly products are made inside a ``with`` block, for the current thread or task only.

    Parameters
    ----------
    name : {"highest", "high", "medium"}
        See `set_precision`.

    Raises
    ------
    RelposValueError
        If there is no such precision.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.ones((1, 8, 16), np.float32)
    >>> with rp.use_precision("high"):
    ...     rp.attention(q, q, q).dtype
    dtype('float32')
    """
    with held(_checked(name)):
        yield
