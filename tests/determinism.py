"""Calls of each kernel, and for each property the two results whose bits it compares.

Whether they are equal is stated in docs/determinism.md (`docs/reliability.py` holds the table); `test_determinism.py`
and `cuda/test_cuda_determinism.py` hold each cell to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import relpos_np as rp
from tests.layouts import LAYOUTS

PAD = 37
Results = tuple[Any, ...]
Pair = tuple[Results, Results]


@dataclass(frozen=True)
class Kernel:
    """A call whose operands are q, k, v of shapes (B, H, L, D)."""

    backend: str
    shape: tuple[int, int, int, int, int, int, int]  # B, H, H_kv, L_q, L_k, D, D_v
    backward: bool = False
    relative: bool = False  # Transformer-XL's positions: products with rows of distances
    table: bool = False  # T5's positions, and the gradient of their table in place of those of q, k and v
    window: tuple[int, int] | None = None

    def operands(self, dtype: Any) -> list[Any]:
        b, h, h_kv, q_len, k_len, d, d_v = self.shape
        rng = np.random.default_rng(5)
        return [
            rng.standard_normal(s).astype(dtype) for s in ((b, h, q_len, d), (b, h_kv, k_len, d), (b, h_kv, k_len, d_v))
        ]

    def position(self, heads: slice, dtype: Any) -> Any:
        if self.table:
            return rp.T5(np.random.default_rng(6).standard_normal((32, self.shape[1])).astype(dtype))
        if not self.relative:
            return None
        _, h, _, q_len, k_len, d, _ = self.shape
        rng = np.random.default_rng(6)
        u, v = rng.standard_normal((2, h, d)).astype(dtype)[:, heads]
        rows = rng.standard_normal((q_len + k_len - 1, h, d)).astype(dtype)[:, heads]
        return rp.TransformerXL(content_bias=u, position_bias=v, rows=rows, variant="conformer")

    def run(self, q: Any, k: Any, v: Any, heads: slice = slice(None), **options: Any) -> Results:
        dtype = np.float64 if q.dtype.itemsize == 8 else np.float32
        options |= {"position": self.position(heads, dtype), "backend": self.backend, "window": self.window}
        if not self.backward:
            return rp.attention(q, k, v, return_lse=True, **options)
        # Every head and batch item has the same gradient of its output.
        row = np.random.default_rng(7).standard_normal((q.shape[2], v.shape[3])).astype(dtype)
        grad = np.broadcast_to(row, (*q.shape[:-1], v.shape[3])).astype(q.dtype.newbyteorder("="))
        found = rp.attention_vjp(q, k, v, grad_out=grad, **options)
        return (found.position["table"],) if self.table else (found.q, found.k, found.v)


def again(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """Called again, and by several threads at once."""
    operands = kernel.operands(dtype)
    first = kernel.run(*operands)
    yield first, kernel.run(*operands)
    if kernel.backend != "cuda":
        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda _: kernel.run(*operands), range(4)):
                yield first, found


def threads(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """With one thread, and with as many as there are."""
    import numba

    operands, found = kernel.operands(dtype), []
    for count in (1, numba.config.NUMBA_NUM_THREADS):
        with rp.threads(count, blas=False):
            found.append(kernel.run(*operands))
    yield tuple(found)


def batch(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """A batch item alone."""
    operands = kernel.operands(dtype)
    whole = kernel.run(*operands)
    for b in range(kernel.shape[0]):
        yield tuple(x[b : b + 1] for x in whole), kernel.run(*(x[b : b + 1] for x in operands))


def heads(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """A key head alone, with the query heads that use it."""
    q, k, v = kernel.operands(dtype)
    whole, group = kernel.run(q, k, v), q.shape[1] // k.shape[1]
    for h in range(k.shape[1]):
        own, its = slice(h, h + 1), slice(h * group, (h + 1) * group)
        expected = tuple(x[:, its] if n == 0 or not kernel.backward else x[:, own] for n, x in enumerate(whole))
        yield expected, kernel.run(q[:, its], k[:, own], v[:, own], heads=its)


def padding(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """With NaN behind the keys, which key_lengths leaves out: some, and several times as many as there are."""
    q, k, v = kernel.operands(dtype)
    k_len, offset = k.shape[2], k.shape[2] - q.shape[2]
    whole = kernel.run(q, k, v)
    for more in (PAD, 4 * k_len):
        longer = [np.concatenate([x, np.full((*x.shape[:2], more, x.shape[3]), np.nan, dtype)], axis=2) for x in (k, v)]
        found = kernel.run(q, *longer, key_lengths=k_len, offset=offset)
        yield whole, (found[0], *(x[:, :, :k_len] for x in found[1:])) if kernel.backward else found


def layout(kernel: Kernel, dtype: Any) -> Iterator[Pair]:
    """Views of every kind."""
    operands = kernel.operands(dtype)
    whole = kernel.run(*operands)
    for change in LAYOUTS.values():
        yield whole, kernel.run(*(change(x) for x in operands))


PROPERTIES: Mapping[str, Callable[[Kernel, Any], Iterator[Pair]]] = {
    "again": again,
    "threads": threads,
    "batch": batch,
    "heads": heads,
    "padding": padding,
    "layout": layout,
}


def equal(pair: Pair) -> bool:
    """Bit by bit; NaN is never right here."""
    return all(np.array_equal(a, b) for a, b in zip(*pair, strict=True))


def close(pair: Pair, dtype: Any) -> bool:
    """Up to some roundings of sums of a few hundred numbers of about 1."""
    eps = np.finfo(dtype).eps
    return all(np.allclose(a, b, rtol=0, atol=1000 * eps) for a, b in zip(*pair, strict=True))
