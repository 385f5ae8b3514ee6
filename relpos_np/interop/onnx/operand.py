"""An operand that records what is computed with it as nodes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Never

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from relpos_np.interop.onnx.graph import Graph
from relpos_np.interop.onnx.places import Places
from relpos_np.types import Array

_UFUNCS = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.true_divide: "Div",
    np.negative: "Neg",
    np.sqrt: "Sqrt",
    np.exp: "Exp",
    np.maximum: "Max",
}


class UntracedError(Exception):
    """Something was computed with an operand that no nodes are known for."""


class Traced(NDArrayOperatorsMixin):
    """Stands for q, k, v, the output or an array of a scheme while the scheme is lowered.

    Parameters
    ----------
    places : Places
        The graph, and where queries and keys stand.
    name : str
        In the graph.
    shape : tuple of int
        In the call that is lowered.
    dtype : dtype
        Of its elements.
    side : {"q", "k", ""}
        Whether its second axis from the end is that of queries, of keys, or neither.
    """

    def __init__(self, places: Places, name: str, shape: tuple[int, ...], dtype: Any, side: str = "") -> None:
        self.places, self.name, self.shape, self.dtype, self.side = places, name, shape, np.dtype(dtype), side

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def graph(self) -> Graph:
        """Where nodes are added."""
        return self.places.graph

    def _like(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Traced:
        return Traced(self.places, name, shape, self.dtype if dtype is None else dtype, self.side)

    def astype(self, dtype: Any, copy: bool = True) -> Traced:  # noqa: ARG002
        """Convert.

        Parameters
        ----------
        dtype : dtype
            Of the result.
        copy : bool
            Without effect.

        Returns
        -------
        Traced
            Itself if it has that dtype.
        """
        if self.dtype == dtype:
            return self
        from relpos_np.interop.onnx.package import package

        to = package().helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._like(self.graph.add("Cast", self.name, to=to), self.shape, dtype)

    def __getitem__(self, index: Any) -> Traced:
        index = index if isinstance(index, tuple) else (index,)
        given = sum(one is not None and one is not Ellipsis for one in index)
        at = index.index(Ellipsis) if Ellipsis in index else len(index)
        index = (*index[:at], *[slice(None)] * (self.ndim - given), *index[at + 1 :])
        name, shape, axis = self.name, [], 0
        added = [n for n, one in enumerate(index) if one is None]
        for one in index:
            if one is None:
                shape.append(1)
                continue
            if not isinstance(one, slice) or (one.step or 1) < 0:
                raise UntracedError(f"an index {one!r}")
            shape.append(len(range(*one.indices(self.shape[axis]))))
            if one != slice(None):
                name = self.graph.sliced(name, axis, one.start or 0, one.stop, one.step or 1)
            axis += 1
        if added:
            name = self.graph.add("Unsqueeze", name, self.graph.integers(*added))
        return self._like(name, tuple(shape))

    def __getattr__(self, name: str) -> Never:
        # NumPy asks for protocols that are not there.
        raise AttributeError(name) if name.startswith("__") else UntracedError(f"their {name}")

    def __array__(self, *_: Any, **__: Any) -> Never:
        raise UntracedError("their numbers themselves")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Traced:
        target = options.pop("out", (None,))[0]
        if ufunc not in _UFUNCS or method != "__call__" or options:
            raise UntracedError(f"numpy.{ufunc.__name__}")
        dtype = ufunc(*(_sample(x) for x in inputs)).dtype
        shape = np.broadcast_shapes(*(np.shape(x) if not isinstance(x, Traced) else x.shape for x in inputs))
        names = [self._part(x, dtype) for x in inputs]
        found = self._like(self.graph.add(_UFUNCS[ufunc], *names), shape, dtype)
        if target is not None:
            if not isinstance(target, Traced) or target.shape != shape or target.dtype != dtype:
                raise UntracedError(f"numpy.{ufunc.__name__} into an array of another kind")
            target.name, found = found.name, target
        return found

    def _part(self, x: Any, dtype: Any) -> str:
        """An argument of a function as the name of a result or a constant."""
        if isinstance(x, Traced):
            return x.astype(dtype).name
        array = np.asarray(x, dtype)
        if self.places.symbolic and array.ndim >= 2 and array.shape[-2] > 1:
            raise UntracedError("a number for each of so many positions, where lengths are not fixed")
        return self.graph.constant(array, "factor")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            np.concatenate: self._concatenated,
            np.zeros_like: self._zeros,
            np.einsum: self._einsum,
            np.repeat: self._repeated,
        }
        if function not in known:
            raise UntracedError(f"numpy.{function.__name__}")
        return known[function](*args, **kwargs)

    def _concatenated(self, parts: list[Any], axis: int = 0) -> Traced:
        first: Any = next(x for x in parts if isinstance(x, Traced))
        shape = list(first.shape)
        shape[axis] = sum(x.shape[axis] for x in parts)
        if isinstance(self.places.batch, str) and not all(isinstance(x, Traced) for x in parts):
            raise UntracedError("vectors repeated for every batch item, whose number is not fixed")
        names = [self._part(x, first.dtype) for x in parts]
        return self._like(self.graph.add("Concat", *names, axis=axis), tuple(shape))

    def _repeated(self, x: Traced, repeats: int, axis: int) -> Traced:
        if axis != -3 or x.ndim != 4:
            raise UntracedError("numpy.repeat along another axis than that of heads")
        shape = x.shape[0], x.shape[1] * repeats, *x.shape[2:]
        return self._like(self.graph.repeated(x.name, repeats, shape[1]), shape)

    def _zeros(self, x: Traced) -> Traced:
        zero = self.graph.constant(np.zeros((), x.dtype), "zero")
        return self._like(self.graph.add("Expand", zero, self.graph.add("Shape", x.name)), x.shape)

    def _einsum(self, equation: str, *operands: Any) -> Traced:
        names = [self._part(x, self.dtype) for x in operands]
        shape = np.einsum(equation, *(np.broadcast_to(np.zeros((), self.dtype), x.shape) for x in operands)).shape
        return self._like(self.graph.add("Einsum", *names, equation=equation), shape)

    def turned(self, cos: Array, sin: Array, layout: str) -> Traced:
        """Pairs of channels times complex numbers, by the operator RotaryEmbedding where it can do that.

        Parameters
        ----------
        cos, sin : ndarray, shapes (..., H or 1, L, P)
            Real and imaginary part.
        layout : {"half", "interleaved"}
            Whether a pair are channels p and p + P, or 2p and 2p + 1; later channels stay as they are.

        Returns
        -------
        Traced
            In the shape of the operand.
        """
        for table in (cos, sin):
            if self.places.symbolic and any(n > 1 for n in table.shape[:-3]):
                raise UntracedError("positions of each batch item, where lengths are not fixed")
        alone = all(n == 1 for n in cos.shape[:-2])
        known = self.dtype == np.float32 and alone and self.shape[-1] % 2 == 0 and cos.shape[-1] > 0
        name = self._by_operator(cos, sin, layout) if known else self._by_nodes(cos, sin, layout)
        return self._like(name, self.shape)

    def turned_in_parts(self, cos: Array, sin: Array, layout: str, first: int, blocks: int) -> Traced:
        """The same from a channel on, and in blocks that are laid out each for itself.

        Parameters
        ----------
        cos, sin : ndarray, shapes (..., H or 1, L, P)
            Real and imaginary part.
        layout : {"half", "interleaved"}
            As of `turned`.
        first, blocks : int
            First channel that turns, and number of equal parts.

        Returns
        -------
        Traced
            In the shape of the operand.
        """
        graph, size, parts = self.graph, cos.shape[-1] // blocks, []
        ends = [0, *(first + 2 * size * n for n in range(blocks + 1)), self.shape[-1]]
        for n, (start, stop) in enumerate(pairwise(ends)):
            if start == stop:
                continue
            part = self._like(graph.sliced(self.name, 3, start, stop), (*self.shape[:-1], stop - start))
            if 0 < n <= blocks:
                pairs = slice(size * (n - 1), size * n)
                part = part.turned(cos[..., pairs], sin[..., pairs], layout)
            parts.append(part.name)
        return self._like(graph.add("Concat", *parts, axis=3), self.shape)

    def _by_operator(self, cos: Array, sin: Array, layout: str) -> str:
        """RotaryEmbedding with tables (L, P); which row is whose, as it asks for it, (B, L)."""
        graph, places, pairs = self.graph, self.places, cos.shape[-1]
        length = cos.shape[-2]
        if places.symbolic:
            rows = places.within(places.of_queries if self.side == "q" else places.of_keys, length)
        else:
            rows = graph.constant(np.arange(length), "rows")
        count = places.q_count if self.side == "q" else places.k_count
        shape = graph.add("Concat", places.items, count, axis=0)
        ids = graph.add("Expand", rows, shape, name="position_ids")
        tables = [graph.constant(x.reshape(length, pairs), what) for x, what in ((cos, "cos"), (sin, "sin"))]
        return graph.add(
            "RotaryEmbedding",
            self.name,
            *tables,
            ids,
            name=f"turned_{self.name}",
            interleaved=int(layout == "interleaved"),
            rotary_embedding_dim=0 if 2 * pairs == self.shape[-1] else 2 * pairs,
        )

    def _by_nodes(self, cos: Array, sin: Array, layout: str) -> str:
        graph, pairs = self.graph, cos.shape[-1]
        tables = [self._rows(graph.constant(x, what), x) for x, what in ((cos, "cos"), (sin, "sin"))]
        if layout == "half":
            halves = [graph.sliced(self.name, 3, n * pairs, (n + 1) * pairs) for n in (0, 1)]
        else:
            halves = [graph.sliced(self.name, 3, n, 2 * pairs, 2) for n in (0, 1)]

        def product(x: str, y: str) -> str:
            return graph.add("Mul", x, y)

        one = graph.add("Sub", product(halves[0], tables[0]), product(halves[1], tables[1]))
        other = graph.add("Add", product(halves[1], tables[0]), product(halves[0], tables[1]))
        if layout == "half":
            name = graph.add("Concat", one, other, axis=3)
        else:
            last = graph.integers(4)
            both = graph.add("Concat", *(graph.add("Unsqueeze", x, last) for x in (one, other)), axis=4)
            name = graph.add("Reshape", both, graph.integers(0, 0, 0, 2 * pairs))
        if 2 * pairs < self.shape[-1]:
            name = graph.add("Concat", name, graph.sliced(self.name, 3, 2 * pairs), axis=3)
        return name

    def _rows(self, table: str, x: Array) -> str:
        """A table with a row for each position of the call."""
        places = self.places
        if not places.symbolic:
            return table
        rows = places.within(places.of_queries if self.side == "q" else places.of_keys, x.shape[-2])
        if not (places.by_item and self.side == "q"):
            return self.graph.add("Gather", table, rows, axis=x.ndim - 2)
        # Of (H or 1, L, P), with positions (B, L_q).
        flat = self.graph.add("Reshape", table, self.graph.integers(-1, *x.shape[-2:]))
        return self.graph.transposed(self.graph.add("Gather", flat, rows, axis=1), 1, 0, 2, 3)


def _sample(x: Any) -> Any:
    """A number of the kind, to see what NumPy makes of it."""
    if isinstance(x, Traced):
        return np.ones((1,), x.dtype)
    return x if np.ndim(x) == 0 else np.ones((1,), x.dtype)
