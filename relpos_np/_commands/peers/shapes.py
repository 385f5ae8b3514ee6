"""The shapes that every figure refers to: seeded inputs, scheme, counts, and float64 answers to check a result.

asv runs this file against the package of other commits: what is not in all of them is imported late. What only the
benchmarks need of a case, its gradients above all, is in ``asv_bench/benchmarks/shapes.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.types import Array

# The scheme of each kind, from its arrays.
SCHEMES: dict[str, Callable[[dict[str, Array]], Any]] = {
    "t5": lambda a: rp.T5(a["table"]),
    "window": lambda a: rp.WindowBias(a["table"], (7, 7)),
    "rstt": lambda a: rp.WindowBias.rstt(a["table"], 7, 4, (4, 4)),
    "transformer_xl": lambda a: rp.TransformerXL(a["content_bias"], a["position_bias"], a["rows"]),
    "shaw": lambda a: rp.Shaw(a["key_table"], a["value_table"]),
    "alibi": lambda a: rp.ALiBi(a["slopes"]),
    "plain": lambda a: None,
    "rotary": lambda a: rp.Rotary(),
}
# Those whose table holds a number for each head.
TABLES = ("t5", "window", "rstt")


@dataclass(frozen=True)
class Shape:
    """Sizes, which scheme, and the dtype that queries, keys and values are stored in: arithmetic is in float32."""

    kind: str
    batch: int
    heads: int
    q_len: int
    k_len: int
    head_dim: int
    words: str
    causal: bool = False
    storage: str = "float32"
    # Of sequences that have this many tokens up to q_len: whoever takes no packed ones gets padding up to q_len.
    shortest: int | None = None


SHAPES = {
    "A": Shape("t5", 1, 8, 512, 512, 64, "T5 bias"),
    "B": Shape("t5", 1, 8, 2048, 2048, 64, "T5 bias"),
    "C": Shape("t5", 1, 2, 8192, 8192, 64, "T5 bias"),
    "D": Shape("window", 2048, 3, 49, 49, 32, "windows of 7 × 7"),
    "E": Shape("rstt", 256, 8, 112, 64, 32, "RSTT windows, 7 query and 4 key frames of 4 × 4"),
    "F": Shape("transformer_xl", 1, 8, 512, 1024, 64, "Transformer-XL, causal, 512 keys of memory", causal=True),
    "G": Shape("shaw", 1, 8, 512, 512, 64, "Shaw, k = 16, on keys and values"),
    "H": Shape("alibi", 1, 32, 1, 4096, 128, "ALiBi, one query"),
    "I": Shape("plain", 16, 12, 32, 32, 64, "no positions"),
    "J": Shape("plain", 8, 12, 64, 64, 64, "no positions"),
    "K": Shape("plain", 32, 12, 128, 128, 64, "no positions"),
    "L": Shape("plain", 1, 8, 16, 16, 64, "no positions"),
    "M": Shape("t5", 256, 8, 32, 32, 64, "T5 bias, different lengths", shortest=8),
    "N": Shape("t5", 64, 8, 64, 64, 64, "T5 bias, different lengths", shortest=16),
    "O": Shape("t5", 16, 8, 512, 512, 64, "T5 bias, different lengths", shortest=128),
}
SHAPES |= {name + "b": replace(s, words=f"{s.words}, in bfloat16", storage="bfloat16") for name, s in SHAPES.items()}
# One of each kind, small enough to try a program or a peer with.
SMALL = {
    "a": Shape("t5", 1, 2, 48, 48, 16, "T5 bias"),
    "d": Shape("window", 3, 3, 49, 49, 16, "windows of 7 × 7"),
    "e": Shape("rstt", 2, 2, 112, 64, 16, "RSTT windows, 7 query and 4 key frames of 4 × 4"),
    "f": Shape("transformer_xl", 1, 2, 24, 56, 16, "Transformer-XL, causal, 32 keys of memory", causal=True),
    "g": Shape("shaw", 1, 2, 40, 40, 16, "Shaw, k = 16, on keys and values"),
    "h": Shape("alibi", 1, 4, 1, 96, 16, "ALiBi, one query"),
    "i": Shape("plain", 2, 2, 24, 24, 16, "no positions"),
    "m": Shape("t5", 5, 2, 24, 24, 16, "T5 bias, different lengths", shortest=3),
}
SMALL |= {name + "b": replace(s, words=f"{s.words}, in bfloat16", storage="bfloat16") for name, s in SMALL.items()}
# Of long sequences so many runs of so many queries are compared with float64.
RUNS, RUN = 4, 16


@dataclass(frozen=True, eq=False)
class Case:
    """A shape with its inputs: q, k and v in the shape's storage, all else in float32."""

    shape: Shape
    q: Array
    k: Array
    v: Array
    arrays: dict[str, Array]

    @cached_property
    def scheme(self) -> Any:
        """The position of a call."""
        return SCHEMES[self.shape.kind](self.arrays)

    @property
    def kwargs(self) -> dict[str, Any]:
        """What a call of attention gets beside q, k and v."""
        options: dict[str, Any] = {"causal": True} if self.shape.causal else {}
        if self.lengths is not None:
            options["segments"] = np.concatenate([[0], np.cumsum(self.lengths)])
        return {"position": self.scheme} | options

    @cached_property
    def lengths(self) -> Array | None:
        """Tokens of each sequence, where they differ."""
        s = self.shape
        return None if s.shortest is None else np.random.default_rng(3).integers(s.shortest, s.q_len + 1, s.batch)

    def packed(self, x: Array) -> Array:
        """Of padded sequences (B, H, L, D) the tokens of all in one, (1, H, L_1 + L_2 + ..., D); of others x."""
        if self.lengths is None or len(x) < len(self.lengths):
            return x
        return np.concatenate([one[:, :length] for one, length in zip(x, self.lengths, strict=True)], axis=1)[None]

    @cached_property
    def operands(self) -> tuple[Array, Array, Array]:
        """What this library's call takes as q, k and v."""
        return self.packed(self.q), self.packed(self.k), self.packed(self.v)

    def attention(self, **options: Any) -> Array:
        """The call."""
        q, k, v = self.operands
        return np.asarray(rp.attention(q, k, v, **self.kwargs, **options))

    @cached_property
    def kept(self) -> Array:
        """Room for the result: in all shapes D_v is D. An entry that is never written stays NaN."""
        return np.full_like(self.operands[0], np.nan)

    def into_kept(self) -> Array:
        """The call as a server makes it, without the page faults of a new array."""
        return self.attention(out=self.kept)

    # What peers need beside its inputs: indices, biases and masks written out.

    @property
    def apart(self) -> Array:
        """Key's less query's position, (L_q, L_k); queries are the last positions."""
        s = self.shape
        return np.arange(s.k_len) - (np.arange(s.q_len)[:, None] + s.k_len - s.q_len)

    @property
    def per_pair(self) -> Array:
        """What positions need of every pair, (L_q, L_k): its row of a table or, for ALiBi, its distance; or nothing."""
        s = self.shape
        if s.kind in ("plain", "rotary"):
            return np.zeros(0, np.int64)
        d = self.apart
        if s.kind == "transformer_xl":
            return d > 0  # who is hidden
        if s.kind == "alibi":
            return np.abs(d).astype(np.float32)
        if s.kind == "shaw":
            reach = len(self.arrays["key_table"]) // 2
            return np.clip(d, -reach, reach) + reach
        if s.kind == "t5":
            distances = np.arange(1 - s.q_len, s.k_len)
            buckets = rp.reference.t5_bucket(distances, num_buckets=32, max_distance=128, bidirectional=True)
            return np.asarray(buckets[d + s.q_len - 1])
        grid = [np.arange(7)] * 2 if s.kind == "window" else [np.arange(7), np.arange(4), np.arange(4)]
        keys = grid if s.kind == "window" else [rp.reference.rstt_frames(7, 4), *grid[1:]]
        return rp.reference.window_index(grid, keys, tuple(map(len, grid)))

    @property
    def padding(self) -> Array | None:
        """0 at each sequence's tokens, and -inf at what pads them, (B, 1, 1, L_k); None where nothing does."""
        if self.lengths is None:
            return None
        there = np.arange(self.shape.k_len) < self.lengths[:, None, None, None]
        return np.where(there, np.float32(0), np.float32(-np.inf))

    @property
    def bias(self) -> Array:
        """Bias of every pair, (H, L_q, L_k), where that is what positions are."""
        if self.shape.kind == "alibi":
            return np.asarray(-self.arrays["slopes"][:, None, None] * self.per_pair)
        return np.ascontiguousarray(np.moveaxis(self.arrays["table"][self.per_pair], -1, 0))

    @property
    def pairs(self) -> int:
        """Pairs of query and key that may attend each other, of one head."""
        # Imported late: commits without it still run the benchmarks that need no count.
        from relpos_np.complexity import attention_operations

        s = self.shape
        return attention_operations(1, 1, s.q_len, s.k_len, 1, 1, causal=s.causal) // 4

    def _position_products(self) -> tuple[int, int]:
        """Operations of one head's products with tables of vectors: (those on keys' side, those on values')."""
        s = self.shape
        if s.kind == "transformer_xl":
            # Each product of a query with a row serves one pair at most: those that serve none are not needed.
            return 2 * self.pairs * s.head_dim, 0
        if s.kind == "shaw":
            on_keys, on_values = (len(self.arrays[name]) for name in ("key_table", "value_table"))
            return 2 * s.q_len * on_keys * s.head_dim, 2 * s.q_len * on_values * s.head_dim
        return 0, 0

    @property
    def operations(self) -> int:
        """Floating-point operations of the matrix products that the call needs; no biases, no exponentials."""
        s = self.shape
        if self.lengths is not None:
            return int(s.heads * 4 * (self.lengths**2).sum() * s.head_dim)
        return s.batch * s.heads * (4 * self.pairs * s.head_dim + sum(self._position_products()))

    @property
    def _runs(self) -> list[slice] | None:
        """Slices of the queries whose results are compared, or None for all."""
        if self.shape.kind not in ("t5", "plain") or self.shape.q_len <= 1024:
            return None
        starts = np.random.default_rng(1).integers(0, self.shape.q_len - RUN + 1, RUNS)
        return [slice(int(start), int(start) + RUN) for start in starts]

    @property
    def _items(self) -> Array:
        """The batch items whose results are compared."""
        count = min(self.shape.batch, 8)
        return np.random.default_rng(1).choice(self.shape.batch, count, replace=False)

    def sample(self, result: Any) -> Array:
        """The part of a result that is compared."""
        if self.lengths is not None:
            return wide(self.packed(np.asarray(result)))
        part = wide(np.asarray(result)[self._items])
        return part if self._runs is None else np.concatenate([part[:, :, run] for run in self._runs], axis=2)

    def exact(self) -> Array:
        """The same part, by the reference in float64."""
        items = slice(None) if self.lengths is not None else self._items
        q, k, v = (wide(x[items]).astype(np.float64) for x in self.operands)
        if self._runs is None:
            return np.asarray(rp.attention(q, k, v, backend="numpy", **self.kwargs))
        parts = [
            rp.attention(q[:, :, run], k, v, offset=run.start, backend="numpy", **self.kwargs) for run in self._runs
        ]
        return np.concatenate(parts, axis=2)

    def error(self, result: Array, exact: Array | None = None) -> float:
        """Largest deviation from float64."""
        return float(np.abs(self.sample(result) - (self.exact() if exact is None else exact)).max())


def bfloat16() -> Any:
    """ml_dtypes' type, or None where that package is missing."""
    try:
        # Every import anew, so that a test can take the package away.
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError:
        return None


def lacking(shape: Shape) -> str:
    """Why this library cannot compute a shape in this environment, with the remedy; empty if it can."""
    if shape.storage == "bfloat16" and bfloat16() is None:
        return "bfloat16 arrays need ml_dtypes: pip install ml_dtypes"
    return ""


def narrow(x: Array, storage: str) -> Array:
    """Float32 numbers in a storage; bfloat16 without ml_dtypes is its bits in uint16."""
    if storage != "bfloat16":
        return x.astype(storage, copy=False)
    # To the nearest, of two the even one. Written here so that inputs are the same with ml_dtypes and without it;
    # numbers next to infinity, which would overflow, do not occur.
    bits = x.view(np.uint32)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    named = bfloat16()
    return bits if named is None else bits.view(named)


def bits(x: Array) -> Array:
    """Half precision as its bits in uint16; other arrays as they are."""
    return x.view(np.uint16) if x.dtype.name in ("bfloat16", "float16") else x


def wide(x: Array) -> Array:
    """Half precision as float32, which holds each of its numbers; bfloat16 may come as its bits in uint16."""
    if x.dtype == np.uint16 or x.dtype.name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def make(shape: Shape) -> Case:
    """A shape's case: the same numbers every time."""
    rng = np.random.default_rng(0)

    def normal(*sizes: int) -> Array:
        return rng.standard_normal(sizes, dtype=np.float32)

    s = shape
    q = normal(s.batch, s.heads, s.q_len, s.head_dim)
    k, v = (normal(s.batch, s.heads, s.k_len, s.head_dim) for _ in range(2))
    if s.kind == "transformer_xl":
        arrays = {name: normal(s.heads, s.head_dim) for name in ("content_bias", "position_bias")}
        arrays["rows"] = normal(s.k_len, s.heads, s.head_dim)
    elif s.kind == "shaw":
        arrays = {name: normal(33, s.head_dim) for name in ("key_table", "value_table")}
    elif s.kind == "alibi":
        arrays = {"slopes": rp.reference.alibi_slopes(s.heads).astype(np.float32)}
    elif s.kind in ("plain", "rotary"):
        arrays = {}
    else:
        rows = {"t5": 32, "window": 13 * 13, "rstt": 13 * 7 * 7}[s.kind]
        arrays = {"table": normal(rows, s.heads)}
    q, k, v = (narrow(x, s.storage) for x in (q, k, v))
    return Case(shape, q, k, v, arrays)


def case(name: str) -> Case:
    """The case of a shape's name."""
    return make((SHAPES | SMALL)[name])
