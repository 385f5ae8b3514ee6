"""Named arithmetics: what a kernel rounds on the way, chosen by who tests it or found out from its errors, and said.

An arithmetic is what it would compute. `conform` allows what the format's own one costs; a coarser one that is not
chosen is a mistake with a name, and a finer one that is chosen is held to its own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.quantized import quantize
from relpos_np.conform.altered import Answer, out_of, plain_outputs, scale_of, scores_of, values_of
from relpos_np.conform.formats import Format
from relpos_np.errors import RelposError
from relpos_np.testing.arguments import changed, rebuilt
from relpos_np.testing.compare import largest, typical
from relpos_np.testing.example import Example
from relpos_np.testing.frozen import coarse
from relpos_np.types import Array

# Bits of a mantissa, the first one not stored.
_BITS = {"TF32": 10, "bfloat16": 7, "float16": 10}
# Keys and values that are stored in eight bits, each token with a scale, in words.
_STORED = {
    "int8_cache": "keys and values stored in int8, with a scale for each token",
    "float8_cache": "keys and values stored in float8_e4m3fn, with a scale for each token",
}
# An arithmetic explains errors that are no more than this times its own, in all of some cases.
_ALIKE = 1.2
# What is computed with, and what is wrong, where an implementation casts to float32.
IN_FLOAT32 = "float32 on the way"
# Its largest errors in units of those of casting everything: of sums in another order, and of casting little.
_OF_FLOAT32 = (1 / 256, 4.0)
# How like errors are to those of a mistake that rounds: of both, up to 1.
Likeness = Callable[[Array, Array], float]


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded, in words, and the output that this leads to: None for the format's own, which is measured."""

    words: str
    answer: Answer | None = None


def arithmetics(kept: Format) -> Mapping[str, Arithmetic]:
    """Those that a format may be computed with, the finest first."""
    if kept.name == "float64":
        return {
            "float64": Arithmetic("float64 throughout"),
            "float32": Arithmetic(IN_FLOAT32, _in_float32),
        }
    if kept.name == "float32":
        return {
            "float32": Arithmetic("float32 throughout"),
            "tf32": Arithmetic("products in TF32, sums in float32", partial(_with_rounded, "tf32")),
            "half_products": Arithmetic(
                "products in bfloat16, sums in float32", partial(_with_rounded, "half_products")
            ),
            **{name: Arithmetic(words, partial(_with_rounded, name)) for name, words in _STORED.items()},
        }
    products = partial(_weights, _BITS[kept.name], False)
    return {
        "float32": Arithmetic("float32 on the way, and one rounding of the output", out_of),
        "half_products": Arithmetic(f"products in {kept.name}, sums in float32", products),
        "stored": Arithmetic(f"every intermediate result is stored in {kept.name}"),
        "half_sums": Arithmetic(f"sums over keys in {kept.name}", partial(_summed, kept, False)),
    }


def chosen(name: str | None, kept: Format) -> str | None:
    """The name of an arithmetic of the format; a RelposError says which there are."""
    return None if name is None else check.choice("arithmetic", name, tuple(arithmetics(kept)))


def coarser(name: str, kept: Format) -> bool:
    """Whether an arithmetic comes after the format's own one."""
    listed = list(arithmetics(kept))
    return listed.index(name) > [one.answer for one in arithmetics(kept).values()].index(None)


def output(name: str, kept: Format, one: Example) -> Array | None:
    """What an arithmetic returns for a case, or None where it is not simulated."""
    answer = arithmetics(kept)[name].answer
    try:
        found = None if answer is None else answer(one)
    except RelposError:
        return None
    return None if found is None else kept.rounded(found)


def found_out(answers: Iterable[tuple[Example, Array, Array, float]], kept: Format, *, right: bool) -> str:
    """The finest arithmetic whose errors are as large as those of all answers: examples, outputs, truths, own errors.

    Empty if none is; the errors of the format's own arithmetic come with each answer, and none is coarser where all
    answers are right.
    """
    listed = list(answers)

    def costs(name: str, example: Example, expected: Array, usual: float) -> float:
        if arithmetics(kept)[name].answer is None:
            return usual
        made = output(name, kept, example)
        return 0.0 if made is None else typical(made - expected)

    for name in arithmetics(kept) if listed else ():
        own = arithmetics(kept)[name].answer is None
        if own and right:
            return name
        if all(typical(out - true) <= _ALIKE * costs(name, one, true, usual) for one, out, true, usual in listed):
            return name
    return ""


def coarser_than(kept: Format) -> list[tuple[str, int]]:
    """Formats with fewer bits than a format has."""
    known = {**_BITS, "float32": 23}
    return [(name, bits) for name, bits in known.items() if name != "TF32" and 2.0**-bits > kept.eps]


def of_roundings(kept: Format) -> Iterator[tuple[str, Answer, Likeness]]:
    """Mistakes of arithmetic that is coarser than a format."""
    if kept.name == "float64":
        yield IN_FLOAT32, _in_float32, _of_size
    yield from ((cause, answer, _cosine) for cause, answer in _of_few_bits(kept))


def _cosine(apart: Array, meant: Array) -> float:
    size = float(np.sqrt((apart**2).sum() * (meant**2).sum()))
    return float((apart * meant).sum()) / size if size else 0.0


def _of_size(apart: Array, meant: Array) -> float:
    """Whether errors are those of float32, somewhere: which operations it rounds decides their directions."""
    least, most = _OF_FLOAT32
    return float(least * largest(meant) <= largest(apart) <= most * largest(meant))


def _of_few_bits(kept: Format) -> Iterator[tuple[str, Answer]]:
    for name, bits in _BITS.items():
        if 2.0**-bits > kept.eps and name != "float16":
            yield f"makes products of q and k in {name}", partial(_products, bits)
            products = "tf32" if name == "TF32" else "half_products"
            yield f"makes products of q, k and v in {name}", partial(_with_rounded, products)
        if 2.0**-bits > kept.eps and name != "TF32":
            yield f"rounds probabilities to {name}", partial(_weights, bits, True)
            yield f"rounds exponentials to {name}", partial(_weights, bits, False)
    if kept.name == "float32":
        yield from ((f"has {words}", partial(_with_rounded, name)) for name, words in _STORED.items())
    if kept.name in ("float16", "bfloat16"):
        for normalised, words in ((False, "weights and values"), (True, "probabilities times values")):
            yield f"sums over keys in {kept.name}: {words}", partial(_summed, kept, normalised)


def _in_float32(one: Example) -> Array:
    q, k, v, kwargs = changed((one.q, one.k, one.v, one.kwargs), lambda x: x.astype(np.float32))
    cast = replace(one, q=q, k=k, v=v, kwargs=kwargs, position=rebuilt(one.position, np.dtype(np.float32)))
    return cast.run("numpy")[0].astype(np.float64)


def _products(bits: int, one: Example) -> Array:
    return out_of(one, q=coarse(one.q, bits), k=coarse(one.k, bits), scale=scale_of(one))


def roundings(arithmetic: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """How an arithmetic beyond float32 rounds queries and gradients, and keys and values, before it multiplies."""
    if arithmetic in _STORED:
        dtype: Any = "int8" if arithmetic == "int8_cache" else "float8_e4m3fn"
        return lambda x: x, lambda x: quantize(x, dtype).dequantized(np.float64)
    bits = _BITS["TF32" if arithmetic == "tf32" else "bfloat16"]
    return (lambda x: coarse(x, bits),) * 2


def _with_rounded(arithmetic: str, one: Example) -> Array | None:
    """The output where nothing but operands of products is rounded."""
    if not plain_outputs(one):
        return None
    of_queries, of_keys = roundings(arithmetic)
    return out_of(one, q=of_queries(one.q), k=of_keys(one.k), v=of_keys(one.v), scale=scale_of(one))


def _exponentials(one: Example) -> Array | None:
    """Relative to the largest score; None where the output is more than their sum with values."""
    if not plain_outputs(one) or one.kwargs.get("sinks") is not None:
        return None
    s = scores_of(one)
    top = s.max(axis=-1, keepdims=True)
    return np.asarray(np.exp(s - np.where(np.isfinite(top), top, 0.0)))


def _weights(bits: int, normalised: bool, one: Example) -> Array | None:
    """Probabilities, or exponentials before they are divided by their sum, with so many bits."""
    p = _exponentials(one)
    if p is None:
        return None
    total = p.sum(axis=-1, keepdims=True)
    total = np.where(total > 0, total, 1.0)
    v = values_of(one)
    return np.asarray(coarse(p / total, bits) @ v if normalised else coarse(p, bits) @ v / total)


def _summed(kept: Format, normalised: bool, one: Example) -> Array | None:
    """Sums over keys that are rounded to the format after each key."""
    p = _exponentials(one)
    if p is None:
        return None
    if normalised:
        p = p / p.sum(axis=-1, keepdims=True)
    p, v = p.astype(kept.dtype), values_of(one).astype(kept.dtype)
    total = np.zeros((*p.shape[:-1], 1), kept.dtype)
    out = np.zeros((*p.shape[:-1], v.shape[-1]), kept.dtype)
    for j in range(p.shape[-1]):
        out = out + p[..., j : j + 1] * v[..., j : j + 1, :]
        total = total + p[..., j : j + 1]
    return np.asarray(out if normalised else out / total).astype(np.float64)
