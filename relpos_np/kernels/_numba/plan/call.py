"""A call on its way to a kernel: what was asked for, the kernel's record, and the arrays that the record names."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem
from relpos_np._contract.terms import QueryTerm, Terms, Toeplitz
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.launch.arrays import address_of, rowwise
from relpos_np.kernels._numba.launch.records import CALL
from relpos_np.types import Array, Bools

# A record is packed from a dict in the order of its fields: much cheaper than assigning them one by one.
_EMPTY = dict.fromkeys(CALL.names or (), 0)
_PACK = struct.Struct("<" + "".join("d" if CALL[name].kind == "f" else "q" for name in _EMPTY)).pack

assert UNBOUNDED < 1 << 62  # positions are added to it in int64


# A query term whose map has at least this share of distinct runs is multiplied tile by tile.
SKEW_SHARE = 0.25


def is_skewed(term: QueryTerm) -> bool:
    """Whether a query term is multiplied tile by tile: most distances have a row of their own."""
    if not isinstance(term.index, Toeplitz):
        return False
    lookup = term.index.lookup
    changes = int(np.count_nonzero(lookup[1:] != lookup[:-1])) + 1
    return changes > SKEW_SHARE * len(lookup)


class Product(NamedTuple):
    """Vectors (..., H or H_kv, L, E) times weights (H or 1, R, E), scaled, which lie in `made`."""

    x: Array
    weights: Array
    scale: float
    made: Array


class Call:
    """The fields of a call's record, and what they are made of."""

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        threads: int,
        grad_out: Array | None = None,
        skewed: Sequence[QueryTerm] | None = None,
    ) -> None:
        self.problem, self.terms, self.threads, self.grad_out = problem, terms, threads, grad_out
        self.site, self.dtype = problem.site, problem.site.dtype
        # Query terms that are multiplied tile by tile.
        self.skewed = [term for term in terms.queries if is_skewed(term)] if skewed is None else skewed
        self.fields: dict[str, Any] = _EMPTY.copy()
        self.kept: list[Array] = []
        self.products: list[Product] = []
        # Queries, keys and values as the kernel reads them.
        self.read: tuple[Array, Array, Array] | None = None
        # What is gathered and added to scores, and to the output.
        self.adds: Array | None = None
        self.values: Array | None = None
        # A mask of keys that became ranges of keys, a row for each batch item.
        self.mask_rows: Bools | None = None

    @property
    def count(self) -> int:
        """Batch items."""
        return math.prod(self.site.batch)

    def keep(self, x: Array) -> int:
        """Keep an array alive and return its address."""
        self.kept.append(x)
        return address_of(x)

    def pack(self) -> bytearray:
        """The record's bytes."""
        return bytearray(_PACK(*self.fields.values()))

    def shape(self, length: int, width: int) -> tuple[int, ...]:
        """Of an array with a row of so many elements for each of so many queries or keys of every head."""
        return (*self.site.batch, self.site.heads, length, width)

    def operands(self, out: Array, lse: Array | None, *, stored: bool) -> tuple[Array, Array, Array]:
        """Set the addresses of operands and results; queries, keys and values as the kernel reads them.

        `stored`: in half precision, if they are stored so.
        """
        problem, terms, f = self.problem, self.terms, self.fields
        q, k, v = terms.query, terms.key, problem.stored_v if stored else problem.v
        if isinstance(q, Turned):
            self._turn(q, k)
            q = k = None
        if q is None:
            q = problem.stored_q if stored else problem.q
        if k is None:
            k = problem.stored_k if stored else problem.k
        self.read = q, k, v = rowwise(q), rowwise(k), rowwise(v)
        f["q"], f["k"], f["v"], f["out"] = self.keep(q), self.keep(k), self.keep(v), self.keep(out)
        if lse is not None:
            f["lse"] = self.keep(lse)
        return q, k, v

    def _turn(self, q: Turned, k: Turned) -> None:
        """Set the fields of queries and keys that turn as they are read."""
        f, batch = self.fields, self.site.batch
        f["turn"], f["turn_pairs"] = 1 + (q.layout != "half"), q.cos.shape[-1]
        # Neighbours are the same pairs in any number of blocks.
        f["turn_first"], f["turn_blocks"] = q.first, q.blocks if q.layout == "half" else 1
        for letter, one in (("q", q), ("k", k)):
            # In C order, whatever that of the two is.
            turns = np.ascontiguousarray(np.concatenate([one.cos, one.sin], axis=-1))
            heads, length, width = turns.shape[-3:]
            shared = math.prod(turns.shape[:-3]) == 1
            if not shared:
                turns = np.ascontiguousarray(np.broadcast_to(turns, (*batch, heads, length, width)))
            f[letter + "_turn"] = self.keep(turns)
            f[letter + "_turn_batch"] = 0 if shared else heads * length * width
            f[letter + "_turn_head"] = 0 if heads == 1 else length * width
