"""The records of the golden vectors: inputs, arguments and exact answers of every scheme, variant and divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._files import safetensors as tensorfile
from relpos_np.errors import RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing._sizes import SIZES, Size, lengths
from relpos_np.testing.arguments import changed, encode, rebuilt
from relpos_np.testing.cases import edges, sized
from relpos_np.testing.compare import EPS, largest, tolerance
from relpos_np.testing.example import Example, build
from relpos_np.testing.frozen import Numbers, UndecidedError, answer, coarse, last_bit, nearest, upper
from relpos_np.testing.functions import Call, Divergence, divergences
from relpos_np.types import Array

DTYPES = ("float64", "float32", "float16")
# With other lengths than the rest, in float32.
_SIZES: Mapping[str, Size] = {
    "length_1": lengths(1, 1, 12, 10),
    "one_query": lengths(1, 17, 12, 10),
    "one_key": lengths(11, 1, 12, 10),
}
# What came after set v1, which is never to change: schemes by their names, and variants of schemes behind a dot. They
# are written where the scheme is asked for.
LATER = ("t5.flaxformer",)
# Sizes of tiles and one key more, of a single item and two query heads for a key head.
_TILES: Mapping[str, Size] = {
    "length_33": lengths(33, 33, 64, 64),
    "length_65": lengths(65, 65, 32, 32),
    "decoding_129": lengths(1, 129, 64, 64),
}
_OF_TILES: Mapping[str, Any] = {"heads": (2, 1), "batch": (1,)}
# Bits of inputs, of which each dtype keeps as many as it has, and of answers.
_INPUT_BITS, _SCALE_BITS, _ARGUMENT_BITS = 15, 24, 6
BITS: Mapping[str, int] = {"float64": 26, "float32": 22, "float16": 22, "bfloat16": 22}
# Of a function's result what is smaller keeps fewer bits.
_SMALL = 2.0**-14
# A gradient is a sum of products that cancel in part, and goes through the softmax twice.
_GRADIENT = 8.0


@dataclass(frozen=True)
class Record:
    """One record: what its JSON says, and its arrays."""

    name: str
    about: dict[str, Any]
    arrays: dict[str, Array]


class _Writer:
    """Collects a record's outputs with their tolerances."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.arrays: dict[str, Array] = {}
        self.outputs: dict[str, Any] = {}

    def add(self, name: str, value: Array, tolerated: float) -> None:
        reference, bits = f"expected.{name}", BITS[self.dtype]
        value = np.asarray(value, np.float64)
        unit = float(last_bit(largest(value), bits, 1.0))
        # So few bits go into float32.
        self.arrays[reference] = answer(value, unit).astype(np.float32 if bits < BITS["float64"] else np.float64)
        self.outputs[name] = {"array": reference, "atol": upper(tolerated + unit / 2)}

    def record(self, one: Example, about: dict[str, Any]) -> Record:
        """The record of an example, with more that its JSON says."""
        info = SCHEMES[one.name]
        of = {"scheme": one.name, "variant": one.variant, "edge": one.edge, "dtype": self.dtype}
        of |= {"doi": info.doi, "equation": info.equation}
        return Record(name_of(one), about | of | {"outputs": self.outputs}, self.arrays)


def name_of(one: Example) -> str:
    """Scheme, variant, edge and dtype of an example."""
    return ".".join(part for part in (one.name, one.variant, one.edge, str(one.q.dtype)) if part)


def _attention(one: Example, seed: int) -> Record:
    writer = _Writer(str(one.q.dtype))
    writer.arrays |= {"q": one.q, "k": one.k, "v": one.v}
    position = encode(one.position, "position", writer.arrays)
    call = {key: encode(one.kwargs[key], key, writer.arrays) for key in sorted(one.kwargs)}
    grad_out = Numbers(seed).standard_normal(one.expected.shape).astype(one.q.dtype)
    writer.arrays["grad_out"] = grad_out
    out, lse = one.tolerated()
    writer.add("out", one.expected, float(np.max(out, initial=0.0)))
    writer.add("lse", one.expected_lse, lse)
    for key, value in gradients(one.expected_gradient(grad_out)).items():
        writer.add(key, value, _gradient_tolerance(one, value))
    return writer.record(one, {"kind": "attention", "where": one.where, "position": position, "call": call})


def gradients(found: Any) -> dict[str, Array]:
    """By the names of outputs."""
    arrays = {f"gradient.{key}": getattr(found, key) for key in "qkv"}
    return arrays | {f"gradient.position.{key}": value for key, value in sorted(found.position.items())}


def _gradient_tolerance(one: Example, value: Array) -> float:
    """So many rounding errors of a score, relative to the largest gradient; at least as large as those in sums of 1."""
    magnitude = max(1.0, float(np.abs(value).max(initial=0.0)))
    unit = tolerance(one.q.dtype, logit_bound=one.logit_bound, depth=one.products, magnitude=magnitude)
    return _GRADIENT / 4 * float(unit)


def _encoding(one: Example, seed: int) -> Record:
    """Inputs with an absolute encoding added."""
    encoding: Any = one.encoding
    x = np.asarray(one.x)
    writer = _Writer(str(x.dtype))
    writer.arrays["x"] = x
    about = {"encoding": encode(encoding, "encoding", writer.arrays)}
    exact = x.astype(np.float64)
    wanted = encoding(exact)
    magnitude = float((np.abs(exact) + np.abs(wanted - exact)).max())
    eps = EPS[str(x.dtype)]
    writer.add("out", wanted, 2 * eps * magnitude)
    writer.arrays["grad_out"] = Numbers(seed).standard_normal(x.shape).astype(x.dtype)
    for key, value in sorted(encoding_gradients(encoding, writer.arrays["grad_out"], np.float64).items()):
        writer.add(f"gradient.encoding.{key}", value, 4 * eps * float(np.abs(value).max()))
    return writer.record(one, about | {"kind": "encoding"})


def encoding_gradients(encoding: Any, grad_out: Array, dtype: Any) -> dict[str, Array]:
    """Gradients of an absolute encoding's arrays, in the precision asked for."""
    found: dict[str, Array] = rebuilt(encoding, dtype).gradient(grad_out.shape[-2], grad_out.astype(dtype))
    return found


def _function(one: Divergence) -> Record:
    arrays: dict[str, Array] = {}
    calls = []
    for n, exact in enumerate(one.calls):
        call = Call(exact.function, *(changed(x, _of_few_bits) for x in (exact.arguments, exact.then)))
        result = call.run()
        entry: dict[str, Any] = {"function": call.function}
        for key, given in (("arguments", call.arguments), ("then", call.then)):
            if given is not None:
                entry[key] = {name: encode(value, f"calls.{n}.{name}", arrays) for name, value in given.items()}
        if isinstance(result, str):
            entry["raises"] = result
        else:
            # A dtype of its own, such as intp, is int64 everywhere.
            entry["result"] = encode(_rounded(plain(result)), f"calls.{n}.result", arrays)
            entry["atol"] = _function_tolerance(call, result)
        calls.append(entry)
    return Record(one.name, {"kind": "function", "note": one.note, "calls": calls}, arrays)


def plain(result: Any) -> Any:
    """A function's result in the types of the files: integers are int64 whatever the machine."""
    if isinstance(result, tuple | list):
        return tuple(plain(entry) for entry in result)
    if isinstance(result, np.ndarray) and result.dtype.kind in "iu":
        return result.astype(np.int64)
    return result


def _of_few_bits(x: Array) -> Array:
    return coarse(x, _ARGUMENT_BITS)


def _rounded(result: Any) -> Any:
    """Each number of a function's result with as many bits as float64 answers have."""
    if isinstance(result, tuple):
        return tuple(_rounded(entry) for entry in result)
    if isinstance(result, float):
        return float(_rounded(np.array(result)))
    if not isinstance(result, np.ndarray) or result.dtype.kind != "f":
        return result
    sizes = np.abs(np.where(np.isfinite(result), result, 1.0))
    return nearest(result, last_bit(sizes, BITS["float64"], _SMALL)).astype(result.dtype)


def leaves(value: Any) -> Iterator[Any]:
    """All that is in a value and holds nothing else."""
    if isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(entry)
    else:
        yield value


def _numbers(value: Any) -> list[Array]:
    """All arrays and numbers in a value."""
    found = [x for x in leaves(value) if isinstance(x, np.ndarray | float | int) and not isinstance(x, bool)]
    return [np.asarray(x) for x in found]


def _largest(value: Any) -> float:
    """The largest finite number in a value."""
    return max((largest(x) for x in _numbers(value) if x.dtype.kind in "fiu"), default=0.0)


def _function_tolerance(call: Call, result: Any) -> float:
    """0 for integers; else some roundings of numbers as large as the largest, angles among the arguments included."""
    if all(x.dtype.kind in "iub" for x in _numbers(result)):
        return 0.0
    given = [value for value in (call.arguments, call.then) if value is not None]
    if call.function.endswith("frequencies"):
        given = []
    size = max(1.0, _largest(result))
    return upper(16 * EPS["float64"] * size * (1.0 + _largest(given)) + size * 2.0 ** -BITS["float64"])


def _smallest(name: str, seed: int, variant: str | None) -> Example:
    """A tiny example, or a small one of a scheme that needs room."""
    about: dict[str, Any] = {"dtype": np.float64, "seed": seed, "variant": variant, "numbers": Numbers}
    try:
        return build(name, SIZES["tiny"], **about)
    except RelposValueError:
        return build(name, SIZES["small"], **about)


def _in(one: Example, dtype: Any) -> Example:
    """The example with inputs of few bits, in this dtype."""

    def change(x: Array) -> Array:
        return coarse(x, _INPUT_BITS).astype(dtype)

    q, k, v = (change(x) for x in (one.q, one.k, one.v))
    kwargs = {
        n: float(coarse(np.array(x), _SCALE_BITS)) if isinstance(x, float) else changed(x, change)
        for n, x in one.kwargs.items()
    }
    parts = {"position": changed(one.position, change), "encoding": changed(one.encoding, change)}
    x = None if one.x is None else change(one.x)
    return replace(one, q=q, k=k, v=v, x=x, kwargs=kwargs, **parts)


def examples(
    name: str, *, seed: int, dtypes: Sequence[Any], sizes: Mapping[str, Size] | None = None, later: bool = True
) -> Iterator[Example]:
    """Every variant of a scheme in these dtypes, and its edges in the first of them; or with other sizes alone.

    `later`: also those that came after set v1.
    """
    info = SCHEMES[name]
    edges_in = "float32" if "float32" in dtypes else dtypes[0]
    for variant in variants_of(name, later=later) or (None,):
        base = _smallest(name, seed, variant)
        if sizes is not None:
            for edge, size in sizes.items():
                one = sized(base, size, edge, np.float64, seed, numbers=Numbers, **_OF_TILES)
                yield from (_in(one, each) for each in dtypes if one is not None)
            continue
        yield from (_in(base, each) for each in dtypes)
        for edge, size in {**_SIZES, **_TILES}.items():
            more = _OF_TILES if edge in _TILES else {}
            one = sized(base, size, edge, np.float64, seed, numbers=Numbers, **more)
            if one is not None and (info.kind == "attention" or edge == "length_1"):
                yield _in(one, edges_in)
        if info.kind == "attention":
            yield from (_in(one, edges_in) for one in edges(base, Numbers))


def grid(counts: Sequence[int], dims: Sequence[int]) -> Mapping[str, Size]:
    """Sizes of self-attention of each length with each head_dim, by the name of the edge."""
    return {
        f"length_{n}_dim_{dim}": lengths(check.integer("lengths", n, 1), n, check.integer("head_dim", dim, 1), dim)
        for n in counts
        for dim in dims
    }


def _decided(record: Callable[[Example, int], Record], one: Example, seed: int) -> Record:
    """The record of an example, with its queries or inputs moved until no answer lies between two roundings."""
    while True:
        try:
            return record(one, seed)
        except UndecidedError:
            one = replace(one, q=np.roll(one.q, 1), x=None if one.x is None else np.roll(one.x, 1))


def variants_of(name: str, *, later: bool) -> list[str]:
    """The variants of a scheme, or those of set v1."""
    return [variant for variant in SCHEMES[name].variants if later or f"{name}.{variant}" not in LATER]


def chosen(schemes: Sequence[str] | None) -> list[str]:
    """The schemes of a set: those that are asked for, or v1's."""
    return [name for name in SCHEMES if (name not in LATER if schemes is None else name in schemes)]


def records(
    *,
    seed: int = 0,
    schemes: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    sizes: Mapping[str, Size] | None = None,
) -> Iterator[Record]:
    """All records of a set, in its order: of these schemes, and of functions if all are wanted."""
    kinds: list[Any] = [tensorfile.bfloat16() if each == "bfloat16" else each for each in dtypes]
    for name in chosen(schemes):
        record = _encoding if SCHEMES[name].kind == "absolute" else _attention
        for one in examples(name, seed=seed, dtypes=kinds, sizes=sizes, later=schemes is not None):
            yield _decided(record, one, seed)
    if schemes is None and sizes is None:
        for divergence in divergences(seed):
            yield _function(divergence)
