"""Random calls of attention: any scheme and variant, and everything else that a call may contain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np

import relpos_np as rp
from relpos_np._contract import check
from relpos_np.errors import RelposError
from relpos_np.testing import Example, example
from relpos_np.testing._sizes import Size
from relpos_np.testing.arguments import rebuilt
from relpos_np.testing.compare import ratio
from relpos_np.testing.example import build
from tests.every import ATTENTION
from tests.layouts import LAYOUTS
from tests.sizes import BLOCK_KEYS, EDGES

DTYPES = ("float16", "bfloat16", "float32", "float32", "float32", "float64")
# Numba's kernels are what is to be found out about; the others compute the same in other ways.
BACKENDS = ("numba",) * 6 + ("terms", "numpy")
# Beside vectors, panels and blocks; few keys, which windows have; more than a block of keys; decoding.
SHORT = (1, 2, 3, 5, 7, 8, 11, 15, 16, 17, 24, 31, 33, 48, 49, 63, 64, 65)
LONG = (*EDGES[2:], 127, 130, 255, 257, 300, 2 * BLOCK_KEYS - 1, 400)
DIMS = (1, 2, 3, 4, 7, 8, 12, 16, 20, 32, 33, 40, 64, 65, 80, 128)


def pick(rng: np.random.Generator, values: Any) -> Any:
    """One of some values."""
    return values[int(rng.integers(len(values)))]


def size(rng: np.random.Generator) -> Size:
    """Lengths and depths of one of the shapes that have kernels of their own, or borders."""
    shape = pick(rng, ("short", "short", "short", "mixed", "long", "decode", "window"))
    if shape == "decode":
        q_len, k_len = int(rng.integers(1, 5)), pick(rng, (*LONG, 700, 1023))
    else:
        of_q = {"long": LONG, "mixed": SHORT + LONG}.get(shape, SHORT)
        of_k = {"long": LONG, "mixed": SHORT + LONG}.get(shape, SHORT)
        q_len, k_len = pick(rng, of_q), pick(rng, of_k)
    grid = int(rng.integers(1, 12)), int(rng.integers(1, 12))
    if shape == "window":
        grid = pick(rng, ((7, 7), (8, 8), (4, 4), (3, 5), (12, 12), (14, 14)))
    frames = pick(rng, ((3, 2), (1, 1), (2, 2), (7, 4), (4, 7)))
    return Size(q_len, k_len, pick(rng, DIMS), pick(rng, DIMS), grid, frames)


def plain_example(rng: np.random.Generator, pairs: Any = ATTENTION, dtypes: Any = DTYPES) -> Example:
    """An example of any scheme with any lengths that it takes."""
    name, variant = pick(rng, pairs)
    dtype, seed = pick(rng, dtypes), int(rng.integers(1 << 30))
    for _ in range(8):
        try:
            found = build(name, size(rng), dtype=dtype, seed=seed, variant=variant)
        except RelposError:
            continue
        if is_valid(found):
            return found
    return example(name, dtype=dtype, seed=seed, variant=variant)


def is_valid(one: Example) -> bool:
    """Whether the library takes the call."""
    if one.encoding is not None:
        return True
    try:
        problem, _, _ = check.problem(one.q, one.k, one.v, **one.kwargs)
        if one.position is not None:
            one.position.check(problem.site)
    except RelposError:
        return False
    return True


def _mask(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Full, by row, by key or for all heads; bool, or added with -inf; at times it excludes all."""
    axes = int(rng.integers(1, len(shape) + 1))
    kept = tuple(n if rng.random() < 0.7 else 1 for n in shape[len(shape) - axes :])
    if len(shape) == 4 and kept == (shape[0], shape[-1]):
        kept = (1, *kept)  # where it may be a row for each item of the batch, two axes are refused
    seen = rng.random(kept) < pick(rng, (0.0, 0.3, 0.7, 0.95, 1.0))
    if rng.random() < 0.5:
        return seen
    return np.where(seen, rng.standard_normal(kept), -np.inf).astype(dtype)


def changed(rng: np.random.Generator, one: Example) -> Example:
    """The example with a mask, a band, lengths, another scale or offset, fewer heads or no elements."""
    (batch, heads, q_len, _), k_len = one.q.shape, one.k.shape[2]
    kwargs: dict[str, Any] = dict(one.kwargs)
    edge = pick(rng, ("own", "mask", "mask", "lengths", "causal", "window", "offset", "scale", "excluded", "empty"))
    arrays: dict[str, Any] = {}
    if edge == "mask":
        kwargs["mask"] = _mask(rng, (batch, heads, q_len, k_len), one.q.dtype)
    elif edge in {"lengths", "excluded"}:
        kwargs["key_lengths"] = rng.integers(0, k_len + 1, batch)
        kwargs.setdefault("offset", k_len - q_len)
        if edge == "excluded":  # what no query may attend is not read
            arrays = {"k": one.k.copy(), "v": one.v.copy()}
            for b, length in enumerate(kwargs["key_lengths"]):
                for x in arrays.values():
                    x[b, :, length:] = pick(rng, (np.nan, np.inf, -np.inf))
    elif edge == "causal":
        kwargs["causal"] = True
    elif edge == "window":
        sides = [pick(rng, (None, 0, 1, 5, 11, k_len)) for _ in range(2)]
        kwargs["window"] = tuple(sides) if rng.random() < 0.7 else int(rng.integers(0, 20))
    elif edge == "offset":
        kwargs["offset"] = k_len - q_len + int(rng.integers(-40, 41))
    elif edge == "scale":
        kwargs["scale"] = pick(rng, (0.3, -0.7, 0.0, 0.05))
    elif edge == "empty":
        axis = pick(rng, ("queries", "keys", "batch"))
        if axis == "queries":
            arrays = {"q": one.q[:, :, :0]}
        elif axis == "keys":
            arrays = {"k": one.k[:, :, :0], "v": one.v[:, :, :0]}
        else:
            arrays = {name: getattr(one, name)[:0] for name in "qkv"}
    found = replace(one, kwargs=kwargs, edge=edge, **arrays)
    if rng.random() < 0.2 and found.k.shape[1] > 1:
        grouped = replace(found, k=found.k[:, :1], v=found.v[:, :1])
        found = grouped if is_valid(grouped) else found
    return found if is_valid(found) else one


@dataclass(frozen=True)
class Call:
    """An example, how its operands lie in memory, and which probabilities are dropped."""

    example: Example
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    dropout: float = 0.0
    state: int = 0
    operands: tuple[Any, Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        given = (self.example.q, self.example.k, self.example.v)
        operands = tuple(LAYOUTS[name](x) for name, x in zip(self.layouts, given, strict=True))
        object.__setattr__(self, "operands", operands)

    @property
    def dtype(self) -> str:
        return str(self.example.q.dtype)

    @property
    def where(self) -> str:
        special = {name for name in self.layouts if name != "contiguous"}
        dropped = f", dropout {self.dropout}" if self.dropout else ""
        return self.example.where + (f", {', '.join(sorted(special))}" if special else "") + dropped

    def options(self) -> dict[str, Any]:
        """Keyword arguments, with a generator in the same state each time."""
        drawn = {"dropout": self.dropout, "rng": np.random.default_rng(self.state)} if self.dropout else {}
        return {**self.example.kwargs, **drawn, "position": self.example.position}

    def cast(self, dtype: str) -> Call:
        """The same call with every number rounded to another precision."""
        one = self.example
        arrays = {name: getattr(one, name).astype(dtype) for name in "qkv"}
        kwargs = dict(one.kwargs)
        if kwargs.get("mask") is not None and kwargs["mask"].dtype != np.bool_:
            kwargs["mask"] = kwargs["mask"].astype(dtype)
        return replace(self, example=replace(one, position=rebuilt(one.position, dtype), kwargs=kwargs, **arrays))

    def run(self, backend: str, **more: Any) -> Any:
        """Output, or output and log-sum-exp."""
        return rp.attention(*self.operands, backend=backend, **self.options(), **more)

    def error(self, out: Any, lse: Any = None) -> float:
        """The largest error in units of what is tolerated."""
        if not self.dropout:
            return self.example.error(out, lse)
        exact, exact_lse = self.cast("float64").run("numpy", return_lse=True)
        allowed, slack = self.example.tolerated()
        worst = ratio(out, exact, allowed / (1 - self.dropout))
        return worst if lse is None else max(worst, ratio(lse, exact_lse, slack))


def call(rng: np.random.Generator) -> Call:
    """Any call of attention."""
    one = changed(rng, plain_example(rng))
    names = sorted(LAYOUTS) if one.q.dtype.name != "bfloat16" else [name for name in LAYOUTS if name != "big-endian"]
    layouts = tuple(pick(rng, names) if rng.random() < 0.3 else "contiguous" for _ in range(3))
    dropout = pick(rng, (0.1, 0.5)) if rng.random() < 0.1 else 0.0
    return Call(one, layouts, dropout, int(rng.integers(1 << 30)))
