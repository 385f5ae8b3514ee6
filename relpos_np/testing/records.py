"""The records of the golden vectors: inputs, arguments and exact answers of every scheme, variant and divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np._files import safetensors as tensorfile
from relpos_np.errors import RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing._sizes import Size, lengths
from relpos_np.testing.arguments import encode, rebuilt
from relpos_np.testing.cases import edges, sized
from relpos_np.testing.compare import EPS, largest, tolerance
from relpos_np.testing.example import Example, example
from relpos_np.testing.functions import Call, Divergence, divergences
from relpos_np.types import Array

DTYPES = ("float64", "float32", "float16")
# With other lengths than the rest, in float32.
_SIZES: Mapping[str, Size] = {
    "length_1": lengths(1, 1, 12, 10),
    "one_query": lengths(1, 17, 12, 10),
    "one_key": lengths(11, 1, 12, 10),
}
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

    def add(self, name: str, value: Array, tolerated: Callable[[str], float]) -> None:
        reference = f"expected.{name}"
        self.arrays[reference] = np.asarray(value, np.float64)
        self.outputs[name] = {
            "array": reference,
            "atol": tolerated(self.dtype),
            "atol_float64": tolerated("float64"),
        }

    def record(self, one: Example, about: dict[str, Any]) -> Record:
        """The record of an example, with more that its JSON says."""
        of = {"scheme": one.name, "variant": one.variant, "edge": one.edge, "dtype": self.dtype}
        return Record(name_of(one), about | of | {"outputs": self.outputs}, self.arrays)


def name_of(one: Example) -> str:
    """Scheme, variant, edge and dtype of an example."""
    return ".".join(part for part in (one.name, one.variant, one.edge, str(one.q.dtype)) if part)


def _attention(one: Example, seed: int) -> Record:
    writer = _Writer(str(one.q.dtype))
    writer.arrays |= {"q": one.q, "k": one.k, "v": one.v}
    position = encode(one.position, "position", writer.arrays)
    call = {key: encode(one.kwargs[key], key, writer.arrays) for key in sorted(one.kwargs)}
    grad_out = np.asarray(np.random.default_rng(seed).standard_normal(one.expected.shape)).astype(one.q.dtype)
    writer.arrays["grad_out"] = grad_out
    writer.add("out", one.expected, lambda kind: float(np.max(one.tolerated(kind)[0], initial=0.0)))
    writer.add("lse", one.expected_lse, lambda kind: one.tolerated(kind)[1])
    for key, value in gradients(one.expected_gradient(grad_out)).items():
        writer.add(key, value, _gradient_tolerance(one, value))
    return writer.record(one, {"kind": "attention", "where": one.where, "position": position, "call": call})


def gradients(found: Any) -> dict[str, Array]:
    """By the names of outputs."""
    arrays = {f"gradient.{key}": getattr(found, key) for key in "qkv"}
    return arrays | {f"gradient.position.{key}": value for key, value in sorted(found.position.items())}


def _gradient_tolerance(one: Example, value: Array) -> Callable[[str], float]:
    """So many rounding errors of a score, relative to the largest gradient; at least as large as those in sums of 1."""
    magnitude = max(1.0, float(np.abs(value).max(initial=0.0)))

    def tolerated(dtype: str) -> float:
        unit = tolerance(dtype, logit_bound=one.logit_bound, depth=one.products, magnitude=magnitude)
        return _GRADIENT / 4 * float(unit)

    return tolerated


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
    writer.add("out", wanted, lambda kind: 2 * EPS[kind] * magnitude)
    writer.arrays["grad_out"] = np.random.default_rng(seed).standard_normal(x.shape).astype(x.dtype)
    for key, value in sorted(encoding_gradients(encoding, writer.arrays["grad_out"], np.float64).items()):
        size = float(np.abs(value).max())
        writer.add(f"gradient.encoding.{key}", value, lambda kind, m=size: 4 * EPS[kind] * m)  # type: ignore[misc]
    return writer.record(one, about | {"kind": "encoding"})


def encoding_gradients(encoding: Any, grad_out: Array, dtype: Any) -> dict[str, Array]:
    """Gradients of an absolute encoding's arrays, in the precision asked for."""
    found: dict[str, Array] = rebuilt(encoding, dtype).gradient(grad_out.shape[-2], grad_out.astype(dtype))
    return found


def _function(one: Divergence) -> Record:
    arrays: dict[str, Array] = {}
    calls = []
    for n, call in enumerate(one.calls):
        result = call.run()
        entry: dict[str, Any] = {"function": call.function}
        for key, given in (("arguments", call.arguments), ("then", call.then)):
            if given is not None:
                entry[key] = {name: encode(value, f"calls.{n}.{name}", arrays) for name, value in given.items()}
        if isinstance(result, str):
            entry["raises"] = result
        else:
            # A dtype of its own, such as intp, is int64 everywhere.
            entry["result"] = encode(plain(result), f"calls.{n}.result", arrays)
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
    return 16 * EPS["float64"] * max(1.0, _largest(result)) * (1.0 + _largest(given))


def _smallest(name: str, dtype: Any, seed: int, variant: str | None) -> Example:
    """A tiny example, or a small one of a scheme that needs room."""
    try:
        return example(name, dtype=dtype, seed=seed, variant=variant, size="tiny")
    except RelposValueError:
        return example(name, dtype=dtype, seed=seed, variant=variant, size="small")


def examples(name: str, *, seed: int, dtypes: Sequence[Any]) -> Iterator[Example]:
    """Every variant of a scheme in these dtypes, and its edges in float32."""
    info = SCHEMES[name]
    for variant in info.variants or (None,):
        for dtype in dtypes:
            yield _smallest(name, dtype, seed, variant)
        base = _smallest(name, "float32", seed, variant)
        for edge, size in _SIZES.items():
            found = sized(base, size, edge, "float32", seed)
            if found is not None and (info.kind == "attention" or edge == "length_1"):
                yield found
        if info.kind == "attention":
            yield from edges(base)


def records(*, seed: int = 0, bfloat16: bool = False) -> Iterator[Record]:
    """All records of a set, in its order; those in bfloat16 only if asked for."""
    kinds: list[Any] = [*DTYPES, *([tensorfile.bfloat16()] if bfloat16 else [])]
    for name, info in SCHEMES.items():
        record = _encoding if info.kind == "absolute" else _attention
        for one in examples(name, seed=seed, dtypes=kinds):
            yield record(one, seed)
    for divergence in divergences(seed):
        yield _function(divergence)
