"""The rows of the table: tasks, shapes, what they are compared with, and goals that were set before any was timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from benchmarks.shapes import RUN, RUNS, SHAPES, Case, Shape, make

# Kinds of which runs of queries are compared with float64.
SHIFTABLE = ("t5", "plain", "rotary", "alibi", "shaw")


@dataclass(frozen=True)
class Goal:
    """What a row should reach: a ratio to a baseline in the same run, or a figure on some devices."""

    words: str
    at_least: float
    against: str = ""
    figure: str = ""
    device: str = ""


@dataclass(frozen=True)
class Row:
    """One line: a task at a shape, beside its baselines."""

    name: str
    task: str
    shape: Shape
    tiny: Shape
    baselines: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    # What multiplies: RELPOS_CUDA_UNIT.
    unit: str = "fma"


@dataclass(frozen=True)
class Shifted:
    """Products with distances for rel_shift: heads, L_q, columns."""

    heads: int
    q_len: int
    columns: int
    variant: str
    words: str
    storage: str = "float32"


class GpuCase(Case):
    """A case of which only a sample is compared where all of it would take the host long."""

    @property
    def _is_long(self):
        return self.shape.kind in SHIFTABLE and self.shape.q_len > RUN * RUNS

    @property
    def _items(self):
        most = 1 if self.shape.kind == "transformer_xl" else 4
        return np.random.default_rng(1).choice(self.shape.batch, min(self.shape.batch, most), replace=False)

    def _few_heads(self):
        # Only where no array is shared by heads.
        if self.shape.kind not in ("t5", "plain", "rotary") or self.shape.q_len <= 512:
            return slice(None), self
        heads = slice(0, 1)
        arrays = {name: x[:, heads] for name, x in self.arrays.items()}
        return heads, Case(self.shape, self.q[:, heads], self.k[:, heads], self.v[:, heads], arrays)


def gpu_case(shape):
    """A shape's seeded inputs; places of queries count from the end of the keys."""
    if shape.kind in SHIFTABLE and shape.q_len > 1 and shape.q_len != shape.k_len:
        raise ValueError(f"{shape}: a sample of queries is only right where there are as many keys")
    made = make(shape)
    return GpuCase(made.shape, made.q, made.k, made.v, made.arrays)


def products(shifted):
    """Seeded products of queries with distances."""
    sizes = shifted.heads, shifted.q_len, shifted.columns
    return np.random.default_rng(0).standard_normal(sizes, dtype=np.float32)


def _t5(batch, heads, length, storage="float32"):
    return Shape("t5", batch, heads, length, length, 64, "T5 bias", storage=storage)


SDPA, FLEX, INSIDE, EAGER = "torch sdpa", "torch flex", "torch sdpa, bias inside", "torch eager"
ROTATED = "torch sdpa, turned inside"
AUTOGRAD, STRIDED, PAD, COPY = "torch autograd", "torch as_strided", "torch pad and reshape", "copy"
FMA = "ours, fma"
# What a baseline is; its flags are recorded when it runs.
WORDS = {
    SDPA: "scaled_dot_product_attention, bias built before the call",
    INSIDE: "scaled_dot_product_attention, bias built inside the call",
    ROTATED: "queries and keys turned by products with cosines and sines, then scaled_dot_product_attention",
    FLEX: "flex_attention, compiled, score_mod gathers from the table, full float32 precision",
    EAGER: "products, softmax and products as models write them",
    AUTOGRAD: "bias gathered from the table, scaled_dot_product_attention, backward by autograd, gradient of the table",
    STRIDED: "torch.as_strided, made contiguous",
    PAD: "a copy with a column more, viewed, made contiguous",
    FMA: "this library's kernel without matrix units",
    COPY: "as many bytes as the result has, copied from device to device",
}
_FORWARD = (
    Goal("forward, float32: as fast as SDPA with a materialised bias", 1.0, against=SDPA),
    Goal("forward, float32: three times as fast as flex_attention at full precision", 3.0, against=FLEX),
    Goal("forward, float32: 30 TFLOP/s on an H100", 30.0, figure="tflops", device="H100"),
)
_BACKWARD = (Goal("forward and backward with the table's gradient: three times as fast as torch", 3.0, AUTOGRAD),)
_SHIFT = (Goal("rel_shift: 85 % of the copy bandwidth measured in turn", 0.85, against=COPY),)
_PLANES = (Goal("forward, float32 by planes on matrix units: 1.2 times as fast as on FMA units", 1.2, against=FMA),)
_MATRIX = (Goal("forward, bfloat16 on matrix units: 150 TFLOP/s on an H100", 150.0, figure="tflops", device="H100"),)
_SMALL = Shape("t5", 1, 1, 9, 9, 4, "T5 bias")


def _decode(storage, keys):
    words = "ALiBi, one query" + ("" if storage == "float32" else f", in {storage}")
    full = Shape("alibi", 1, 32, 1, keys, 128, words, storage=storage)
    return full, replace(full, heads=2, k_len=37, head_dim=4)


def _windows(letter, batch):
    full = replace(SHAPES[letter], batch=batch)
    return full, replace(full, batch=1, heads=1, head_dim=4)


def _xl(batch, heads, q_len, k_len):
    words = f"Transformer-XL, causal, {k_len - q_len} keys of memory"
    full = Shape("transformer_xl", batch, heads, q_len, k_len, 64, words, causal=True)
    return full, replace(full, heads=1, batch=1, q_len=5, k_len=9, head_dim=4)


def _shaw(batch, heads, length):
    full = Shape("shaw", batch, heads, length, length, 64, "Shaw, k = 16, on keys and values")
    return full, replace(full, batch=1, heads=1, q_len=7, k_len=7, head_dim=4)


def _plain(kind, words, causal):
    full = Shape(kind, 4, 16, 2048, 2048, 64, words, causal=causal)
    return full, replace(full, batch=1, heads=1, q_len=9, k_len=9, head_dim=4)


def _half(storage):
    return replace(_t5(4, 16, 2048, storage), words=f"T5 bias, in {storage}"), replace(_SMALL, storage=storage)


def _multiplied(storage):
    # More queries than decoding takes.
    words = f"T5 bias, in {storage}, on matrix units"
    full = replace(_t5(4, 16, 2048, storage), words=words)
    return full, replace(full, batch=1, heads=1, q_len=18, k_len=18, head_dim=4)


# The rows that carry goals first: a time limit cuts off the end.
ROWS = (
    Row("t5-2048", "attention", _t5(4, 16, 2048), _SMALL, (SDPA, FLEX), _FORWARD),
    Row("t5-2048-gradient", "backward", _t5(4, 16, 2048), _SMALL, (AUTOGRAD,), _BACKWARD),
    Row(
        "rel_shift-conformer",
        "rel_shift",
        Shifted(16, 2048, 4095, "conformer", "2048 queries and keys, general form"),
        Shifted(2, 5, 9, "conformer", "5 queries and keys, general form"),
        (COPY, STRIDED, PAD),
        _SHIFT,
    ),
    Row("t5-4096", "attention", _t5(4, 16, 4096), _SMALL, (SDPA, FLEX), _FORWARD),
    Row("t5-1024", "attention", _t5(4, 16, 1024), replace(_SMALL, heads=2), (SDPA, FLEX), _FORWARD),
    Row("t5-1024-gradient", "backward", _t5(4, 16, 1024), _SMALL, (AUTOGRAD,), _BACKWARD),
    Row("t5-4096-gradient", "backward", _t5(1, 16, 4096), _SMALL, (AUTOGRAD,), _BACKWARD),
    Row(
        "rel_shift-transformer_xl",
        "rel_shift",
        Shifted(16, 2048, 2048, "transformer_xl", "2048 queries and keys, square"),
        Shifted(2, 4, 4, "transformer_xl", "4 queries and keys, square"),
        (COPY, PAD),
        _SHIFT,
    ),
    Row("decode-16384", "attention", *_decode("float32", 16384), (SDPA,)),
    Row("decode-16384-bfloat16", "attention", *_decode("bfloat16", 16384), (SDPA,)),
    Row("decode-4096-float16", "attention", *_decode("float16", 4096), (SDPA,)),
    Row("plain-2048", "attention", *_plain("plain", "no positions", causal=False), (SDPA,)),
    Row("causal-2048", "attention", *_plain("plain", "no positions, causal", causal=True), (SDPA,)),
    Row("rotary-2048", "attention", *_plain("rotary", "rotary, causal", causal=True), (ROTATED,)),
    Row("transformer_xl", "attention", *_xl(1, 16, 1024, 2048), (INSIDE, EAGER)),
    Row("shaw", "attention", *_shaw(1, 16, 1024), (EAGER,)),
    Row("windows", "attention", *_windows("D", 2048), (SDPA,)),
    Row("windows-rstt", "attention", *_windows("E", 256), (SDPA,)),
    Row("t5-2048-bfloat16", "attention", *_half("bfloat16"), (SDPA,)),
    Row("t5-2048-float16", "attention", *_half("float16"), (SDPA,)),
    Row("t5-2048-bfloat16-mma", "attention", *_multiplied("bfloat16"), (FMA, SDPA), _MATRIX, "mma"),
    Row("t5-2048-float16-mma", "attention", *_multiplied("float16"), (FMA, SDPA), unit="mma"),
    Row("t5-2048-mma", "attention", *_multiplied("float32"), (FMA, SDPA), _PLANES, "mma"),
    Row("windows-gradient", "backward", *_windows("D", 1024), (AUTOGRAD,)),
    Row("transformer_xl-gradient", "backward", *_xl(1, 8, 512, 1024), (AUTOGRAD,)),
    Row("shaw-gradient", "backward", *_shaw(1, 8, 512), (AUTOGRAD,)),
)
NAMES = tuple(row.name for row in ROWS)


def dimensions(shape):
    """Heads, L_q and columns for rel_shift; batch, heads, L_q, L_k and head_dim otherwise."""
    if isinstance(shape, Shifted):
        return [shape.heads, shape.q_len, shape.columns]
    return [shape.batch, shape.heads, shape.q_len, shape.k_len, shape.head_dim]


def find(name):
    """A row by its name."""
    return ROWS[NAMES.index(name)]
