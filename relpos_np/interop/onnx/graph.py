"""A graph that grows node by node."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from relpos_np.errors import RelposValueError
from relpos_np.interop.onnx.package import package

# A protocol buffer ends at 2 GiB; the rest is for nodes.
_LARGEST = (1 << 31) - (1 << 24)


class Graph:
    """Nodes in the order in which they were added, and the arrays that they read.

    Attributes
    ----------
    nodes, initializers, inputs : list
        Records of ONNX.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self._constants: dict[tuple[Any, ...], str] = {}
        self._named: dict[str, int] = {}
        self._bytes = 0

    def _name(self, wanted: str) -> str:
        """The name, with a number behind it from the second time on."""
        count = self._named[wanted] = self._named.get(wanted, 0) + 1
        return wanted if count == 1 else f"{wanted}_{count}"

    def input(self, name: str, dtype: Any, shape: tuple[int | str, ...]) -> str:
        """Declare an input.

        Parameters
        ----------
        name : str
            Its name, which nothing else may have.
        dtype : dtype
            Of its elements.
        shape : tuple
            Sizes; those with a name instead may be any.

        Returns
        -------
        str
            The name.

        Raises
        ------
        RelposValueError
            If the name is taken.
        """
        if self._name(name) != name:
            raise RelposValueError(f"inputs: {name!r} is the name of another array of the model")
        self.inputs.append(described(name, dtype, shape))
        return name

    def constant(self, x: Any, name: str = "constant") -> str:
        """Store an array; the same one is stored once.

        Parameters
        ----------
        x : array_like
            The array.
        name : str
            What to call it.

        Returns
        -------
        str
            Its name in the graph.

        Raises
        ------
        RelposValueError
            If all arrays together are more than a file of ONNX can hold.
        """
        array = np.ascontiguousarray(x).reshape(np.shape(x))
        key = (array.dtype.str, array.shape, sha256(array.data).digest())
        if key not in self._constants:
            self._bytes += array.nbytes
            if self._bytes > _LARGEST:
                raise RelposValueError(
                    f"to_onnx: the arrays of the model have {self._bytes} bytes, at most {_LARGEST} fit"
                )
            self._constants[key] = self._name(name)
            self.initializers.append(package().numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def integers(self, *values: int) -> str:
        """Store a list of int64.

        Parameters
        ----------
        *values : int
            The integers.

        Returns
        -------
        str
            Its name in the graph.
        """
        return self.constant(np.array(values, np.int64), "integers")

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one result.

        Parameters
        ----------
        operator : str
            Of ONNX's own.
        *inputs : str
            What it reads; "" leaves an optional one out.
        name : str
            Of the result; by default that of the operator.
        **attributes
            Of the node.

        Returns
        -------
        str
            Name of the result.
        """
        result = self._name(name or operator.lower())
        self.nodes.append(package().helper.make_node(operator, inputs, [result], name=result, **attributes))
        return result

    def transposed(self, x: str, *axes: int) -> str:
        """Exchange axes.

        Parameters
        ----------
        x : str
            What to transpose.
        *axes : int
            The old axis for each new one.

        Returns
        -------
        str
            Name of the result.
        """
        return self.add("Transpose", x, perm=axes)

    def repeated(self, x: str, times: int, heads: int) -> str:
        """Repeat each head for the heads of queries that share it.

        Parameters
        ----------
        x : str
            What to repeat, (B, H / times, L, E).
        times : int
            How often.
        heads : int
            Heads that there are then, H.

        Returns
        -------
        str
            Name of the result, (B, H, L, E).
        """
        if times == 1:
            return x
        apart = self.add("Unsqueeze", x, self.integers(2))
        repeated = self.add("Expand", apart, self.integers(1, 1, times, 1, 1))
        # 0 stands for the size that is there.
        shape = self.add("Concat", self.integers(0, heads), self.add("Shape", x, start=2), axis=0)
        return self.add("Reshape", repeated, shape)

    def sliced(self, x: str, axis: int, start: int, stop: int | None = None, step: int = 1) -> str:
        """Cut along an axis.

        Parameters
        ----------
        x : str
            What to cut.
        axis, start, stop, step : int
            As in NumPy; without `stop` to the end.

        Returns
        -------
        str
            Name of the result.
        """
        end = np.iinfo(np.int64).max if stop is None else stop
        return self.add("Slice", x, *map(self.integers, (start, int(end), axis, step)))


def described(name: str, dtype: Any, shape: tuple[int | str, ...]) -> Any:
    """What ONNX says of an input or an output.

    Parameters
    ----------
    name : str
        Its name.
    dtype : dtype
        Of its elements.
    shape : tuple
        Sizes, or names of sizes.

    Returns
    -------
    ValueInfoProto
        The record.
    """
    helper = package().helper
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
