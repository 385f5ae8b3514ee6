"""Twenty small cases as a C header, for kernels that no Python is near: the same bytes on every machine.

Inputs are multiples of 1/64, of which every format has those that are drawn, made from the raw numbers of PCG64, whose
stream never changes. Answers in float64 are rounded to multiples of 2^-24; none lies near a border between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.testing import files
from relpos_np.testing.compare import largest, tolerance
from relpos_np.testing.frozen import answer
from relpos_np.types import Array

HEADER, DRIVER = "relpos_vectors.h", "relpos_driver.c"
VERSION, _BITS = 1, 24
_WIDTH = 12


@dataclass(frozen=True)
class _Case:
    """Sizes B, H, H_kv, L_q, L_k, D and D_v, the scheme, and options of the call."""

    name: str
    sizes: tuple[int, int, int, int, int, int, int]
    scheme: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)


_CASES = (
    _Case("plain", (1, 2, 2, 5, 5, 4, 4)),
    _Case("two items", (2, 2, 2, 3, 3, 4, 4)),
    _Case("more channels of values", (1, 1, 1, 4, 4, 3, 5)),
    _Case("cross-attention", (1, 2, 2, 3, 7, 4, 4)),
    _Case("causal", (1, 1, 1, 6, 6, 4, 4), options={"causal": True}),
    _Case("decoding: one query at the last key", (1, 2, 2, 1, 6, 4, 4), options={"causal": True}),
    _Case("decoding: three queries at the last keys", (1, 1, 1, 3, 8, 4, 4), options={"causal": True}),
    _Case("a window of 2 keys before and 1 after", (1, 1, 1, 7, 7, 4, 4), options={"window": (2, 1)}),
    _Case("a causal window of 2 keys before", (1, 1, 1, 7, 7, 4, 4), options={"window": (2, 0), "causal": True}),
    _Case("two query heads for a key head", (1, 4, 2, 5, 5, 4, 4), options={"causal": True}),
    _Case("all query heads for one key head", (1, 3, 1, 2, 6, 4, 4)),
    _Case("a scale of its own", (1, 1, 1, 5, 5, 4, 4), options={"scale": 0.25}),
    _Case("alibi, symmetric", (1, 4, 4, 5, 5, 4, 4), "alibi"),
    _Case("alibi, decoding", (1, 3, 3, 2, 9, 4, 4), "alibi", {"causal": True}),
    _Case("t5, both directions", (1, 2, 2, 9, 9, 4, 4), "t5"),
    _Case("t5, fewer queries than keys", (1, 2, 2, 3, 12, 4, 4), "t5"),
    _Case("t5, a decoder", (1, 2, 2, 9, 9, 4, 4), "t5_decoder", {"causal": True}),
    _Case("rotary, halves", (1, 2, 2, 6, 6, 8, 4), "rotary"),
    _Case("rotary, decoding", (1, 2, 1, 2, 9, 8, 4), "rotary", {"causal": True}),
    _Case("rotary, neighbouring channels", (1, 1, 1, 6, 6, 8, 4), "rotary_neighbours", {"causal": True}),
)
_ABOUT = """\
/* Twenty small cases of attention with their exact answers: relpos-np vectors for C, version {version}. Generated; the
 * same bytes on every machine.
 *
 * Arrays are in row-major order: q (B, H, L_q, D), k (B, H_kv, L_k, D), v (B, H_kv, L_k, D_v), out (B, H, L_q, D_v).
 * Query head h reads key head h / (H / H_kv). Query i stands at position i + L_k - L_q among the keys, and d is the
 * position of a key less that of a query. A score is scale q . k + what the scheme adds:
 *
 *   "plain"              nothing
 *   "alibi"              -array[h] |d|
 *   "t5", "t5_decoder"   array[row H + h], of rows by T5's buckets of d up to max_distance, in both directions or of
 *                        keys before the query alone
 *   "rotary"             channels p and p + D / 2 of q and of k are turned by position * 10000^(-2 p / D)
 *   "rotary_neighbours"  channels 2 p and 2 p + 1 are
 *
 * causal: keys with d > 0 are excluded. left, right: keys with d < -left or d > right are, where these are not -1.
 * An answer is right if it is no further than atol from out times RELPOS_UNIT.
 */
"""


def _drawn(seed: int, shape: tuple[int, ...]) -> Array:
    """Sums of four bytes of PCG64's stream, around 0 with a deviation near 1, as multiples of 1/64."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))).astype(np.uint64)
    total = sum(((raw >> np.uint64(8 * n)) & np.uint64(255)).astype(np.int64) for n in range(4))
    return np.asarray(np.rint((total - 510) / 2) / 64.0).reshape(shape)


def _position(scheme: str, heads: int, seed: int) -> tuple[Any, Array | None]:
    """The scheme, and its array."""
    if scheme == "alibi":
        slopes = rp.reference.alibi_slopes(heads)
        return rp.ALiBi(slopes), slopes
    if scheme.startswith("t5"):
        table = _drawn(seed, (8, heads))
        return rp.T5(table, max_distance=16, bidirectional=scheme == "t5"), table
    if scheme.startswith("rotary"):
        return rp.Rotary(layout="half" if scheme == "rotary" else "interleaved"), None
    return None, None


def header() -> str:
    """The text of the header; a RelposError says that this machine computes answers that could be rounded otherwise."""
    arrays: list[str] = []
    rows: list[str] = []
    for n, case in enumerate(_CASES):
        batch, heads, kv_heads, q_len, k_len, dim, v_dim = case.sizes
        shapes = {
            "q": (batch, heads, q_len, dim),
            "k": (batch, kv_heads, k_len, dim),
            "v": (batch, kv_heads, k_len, v_dim),
        }
        operands = {name: _drawn(10 * n + at, shape) for at, (name, shape) in enumerate(shapes.items())}
        position, array = _position(case.scheme, heads, 10 * n + 5)
        q, k, v = operands.values()
        out = rp.attention(q, k, v, position=position, backend="numpy", **case.options)
        units = answer(out, 2.0**-_BITS) * 2.0**_BITS
        for name, x in {**operands, "array": array}.items():
            arrays += _lines("float", f"relpos_{name}_{n}", x) if x is not None else []
        arrays += _lines("int", f"relpos_out_{n}", units.astype(np.int64))
        left, right = case.options.get("window", (-1, -1))
        s = rp.logits(q, k, position=position, backend="numpy", **case.options)
        size = {"logit_bound": largest(s), "magnitude": largest(v)}
        # A power of 2, which the last bits of a score do not change.
        atol = 2.0 ** np.ceil(np.log2(float(tolerance("float32", depth=dim, **size))))
        scale = case.options.get("scale", dim**-0.5)
        numbers = [*case.sizes, int("causal" in case.options), left, right, f"{scale:.9g}", 16]
        numbers += [0 if array is None else len(array)]
        pointers = [f"relpos_{name}_{n}" for name in "qkv"]
        pointers += ["0" if array is None else f"relpos_array_{n}", f"relpos_out_{n}"]
        row = ", ".join(map(str, [*numbers, *pointers, f"{atol:.9g}"]))
        rows.append(f'    {{"{case.name}", "{case.scheme}", {row}}},')
    return "\n".join([_ABOUT.format(version=VERSION), *_DECLARATION, *arrays, "", *_table(rows), "#endif", ""])


_DECLARATION = (
    "#ifndef RELPOS_VECTORS_H",
    "#define RELPOS_VECTORS_H",
    "",
    f"#define RELPOS_UNIT (1.0 / {1 << _BITS})",
    f"#define RELPOS_CASES {len(_CASES)}",
    "",
    "typedef struct {",
    "    const char *name, *scheme;",
    "    int B, H, H_kv, L_q, L_k, D, D_v, causal, left, right;",
    "    double scale;",
    "    int max_distance, rows;",
    "    const float *q, *k, *v, *array;",
    "    const int *out;",
    "    double atol;",
    "} relpos_case;",
    "",
)


def _lines(kind: str, name: str, x: Array) -> Iterator[str]:
    """A constant array; multiples of 1/64 and powers of 2 have few digits."""
    numbers = [str(n) if kind == "int" else f"{n:.9g}" for n in x.ravel().tolist()]
    yield f"static const {kind} {name}[] = {{"
    for first in range(0, len(numbers), _WIDTH):
        yield f"    {', '.join(numbers[first : first + _WIDTH])},"
    yield "};"


def _table(rows: list[str]) -> list[str]:
    return ["static const relpos_case relpos_cases[RELPOS_CASES] = {", *rows, "};", ""]


def writing_c(folder: Any) -> Iterator[str]:
    """Write the header and the driver to a new folder, with the name of each file once it is written."""
    driver = resources.files("relpos_np").joinpath(f"data/{DRIVER}").read_text(encoding="utf-8")
    contents = {HEADER: header(), DRIVER: driver}
    with files.new_folder(folder) as target:
        for name, text in contents.items():
            (target / name).write_text(text, encoding="utf-8", newline="\n")
            yield name
