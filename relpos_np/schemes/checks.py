"""Checks that several schemes need of their arrays, grids and calls."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.problem import Site
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.types import Array


def finite(name: str, x: Array | None) -> None:
    """Raise a `RelposValueError` if an array, where there is one, holds NaN or infinity."""
    if x is not None and not (known := np.isfinite(x)).all():
        first = x[~known].flat[0]
        raise RelposValueError(f"{name}: expected finite numbers, found {first}: neither NaN nor infinity")


def plane(name: str, value: Any, example: str = "(14, 14)") -> tuple[int, int]:
    """Height and width of a grid of tokens."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise RelposTypeError(f"{name}: expected height and width such as {example}, found {shown(value)}")
    return check.integer(name, value[0], 1), check.integer(name, value[1], 1)


def tokens(name: str, grid: tuple[int, ...], length: int, class_tokens: int = 0) -> None:
    """Raise a `RelposValueError` if a grid, with what stands before it, has another number of tokens than a call."""
    found = class_tokens + prod(grid)
    if found != length:
        more = f" and {class_tokens} class token{'s' * (class_tokens > 1)}" if class_tokens else ""
        raise RelposValueError(f"{name}: {grid}{more} has {found} tokens, the call has {length}")


def same_tokens(grid: tuple[int, ...], site: Site, class_tokens: int = 0) -> None:
    """The same for queries and for keys, which stand on one grid."""
    for length in (site.q_len, site.k_len):
        tokens("grid", grid, length, class_tokens)


def vectors(name: str, table: Array | None, dim: int, site: Site, *, per_head: bool = True) -> None:
    """Raise a `RelposValueError` if a table of vectors, where there is one, has other sizes than a call needs.

    Parameters
    ----------
    name : str
        Of the table.
    table : ndarray, shape (rows, D) or (H, rows, D), or None
        One for all heads, or one for each.
    dim : int
        How many channels the call needs.
    site : Site
        The call.
    per_head : bool
        Whether to check the first of three axes, too.
    """
    if table is None:
        return
    if table.shape[-1] != dim:
        raise RelposValueError(f"{name}: shape {table.shape} has vectors of {table.shape[-1]}, the call needs {dim}")
    if per_head and table.ndim == 3:
        check.heads(name, table, 0, site)


def vectors_per_pair(scheme: Any, site: Site) -> None:
    """The same for `key_table` and `value_table` of a scheme."""
    vectors("key_table", scheme.key_table, site.head_dim, site)
    if not site.scores_only:
        vectors("value_table", scheme.value_table, site.v_dim, site)


def among_keys(names: str, site: Site) -> None:
    """Raise a `RelposValueError` if a query does not stand at a key's position, for which alone there are numbers."""
    last = site.offset + site.q_len - 1
    if site.q_len and not 0 <= site.offset <= last < site.k_len:
        raise RelposValueError(
            f"offset: queries stand at {site.offset} ... {last}, {names} for positions 0 ... {site.k_len - 1}"
        )
