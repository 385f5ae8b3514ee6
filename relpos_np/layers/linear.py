"""What attention modules share: projections, heads, a cache of keys and values, and the call of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from relpos_np import api
from relpos_np._calls.packed import is_packed
from relpos_np._calls.sinks import sink
from relpos_np._contract import check
from relpos_np._contract.options import Options
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import softmax
from relpos_np.layers.state import State
from relpos_np.schemes.base import Position
from relpos_np.types import Array

# The most operations in one product: a few tenths of a second on one processor.
CALL_FLOPS = 1e10
# Rows of one product: elements of them at most, unless those are fewer rows than pay for a product.
PART, LEAST_ROWS = 1 << 18, 512
Weights: TypeAlias = "Linear | Array | tuple[Array, Array | None]"
# States that are attended, or what `Projected.project` made of them.
Context: TypeAlias = "Array | Cache | None"


class StateOptions(Options, total=False):
    """What a call takes beside the states that ask and those that are attended."""

    values: Array | None
    memory: Array | None
    cache: Cache | None


class Linear:
    r"""A projection with its weight laid out as published.

    .. math::

        y = x W^\top + b

    Parameters
    ----------
    weight : ndarray, shape (out, in)
        The matrix W; half precision is widened to float32.
    bias : ndarray, shape (out,), optional
        The vector b.
    name : str
        What to call it in errors.

    Raises
    ------
    RelposValueError
        If a shape does not fit.
    RelposTypeError
        If a dtype is no floating one.
    """

    def __init__(self, weight: Any, bias: Any = None, *, name: str = "linear") -> None:
        self.weight = check.table(f"{name}.weight", weight, "out in")
        self.bias = None if bias is None else check.table(f"{name}.bias", bias, "out")
        if self.bias is not None and len(self.bias) != len(self.weight):
            raise RelposValueError(
                f"{name}.bias: expected ({len(self.weight)},) as the weight {self.weight.shape} has outputs, "
                f"found {self.bias.shape}"
            )

    @classmethod
    def of(cls, value: Weights, name: str) -> Linear:
        """A projection from a projection, a weight, or a pair of weight and bias.

        Parameters
        ----------
        value : Linear, ndarray or tuple of ndarray
            What a module's constructor was given.
        name : str
            What to call it in errors.

        Returns
        -------
        Linear
            The projection.
        """
        if isinstance(value, Linear):
            return value
        if isinstance(value, tuple):
            if len(value) != 2:
                raise RelposValueError(f"{name}: expected (weight, bias), found {len(value)} entries")
            return cls(*value, name=name)
        return cls(value, name=name)

    @classmethod
    def read(cls, state: State, name: str) -> Linear:
        """The projection of a name: ``name.weight`` and, where it exists, ``name.bias``.

        Parameters
        ----------
        state : State
            Where to look.
        name : str
            Without the prefix.

        Returns
        -------
        Linear
            The projection.
        """
        return cls(state.take(f"{name}.weight"), state.get(f"{name}.bias"), name=state.prefix + name)

    @property
    def inputs(self) -> int:
        """Number of dimensions it takes: columns of the weight."""
        return int(self.weight.shape[1])

    @property
    def outputs(self) -> int:
        """Number of dimensions it gives: rows of the weight."""
        return int(self.weight.shape[0])

    @np.errstate(all="ignore")
    def __call__(self, x: Array, dtype: np.dtype[Any] | None = None) -> Array:
        """Project the last axis, in the dtype of x; half precision is widened to float32, some rows at a time.

        Parameters
        ----------
        x : ndarray, shape (..., in)
            float16, bfloat16, float32 or float64.
        dtype : dtype, optional
            To which the projections are rounded; default that in which they are computed.

        Returns
        -------
        ndarray, shape (..., out)
            The projections.
        """
        x = check.stored("x", x)
        if x.ndim < 1 or x.shape[-1] != self.inputs:
            raise RelposValueError(f"x: expected shape (..., {self.inputs}), found {x.shape}")
        own = computed(x)
        # One product of matrices instead of one per batch item. NaN or infinity stays in its own row.
        weight = self.weight.T.astype(own, copy=False)
        bias = None if self.bias is None else self.bias.astype(own, copy=False)
        y = _product(x.reshape(-1, self.inputs), weight, bias, own if dtype is None else dtype)
        return np.asarray(y.reshape(*x.shape[:-1], self.outputs))

    def __repr__(self) -> str:
        return f"Linear({self.inputs} -> {self.outputs}, bias={self.bias is not None})"


def computed(x: Array) -> np.dtype[Any]:
    """The dtype in which states are projected."""
    return np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype


def _product(rows: Array, weight: Array, bias: Array | None, dtype: np.dtype[Any]) -> Array:
    """A product of matrices, in the dtype of `weight`, plus a bias.

    A large one is computed in parts, because Ctrl-C waits for the end of a product, and so that no whole matrix is
    widened or waits to be rounded. They are the same for every dtype: a BLAS adds in an order that depends on sizes.
    """
    step = min(max(PART // max(*weight.shape, 1), LEAST_ROWS), max(int(CALL_FLOPS / (2 * max(weight.size, 1))), 1))

    def some(part: slice, out: Array | None = None) -> Array:
        y = np.asarray(np.matmul(rows[part].astype(weight.dtype, copy=False), weight, out=out))
        if bias is not None:
            y += bias
        return y

    if len(rows) <= step:
        return some(slice(None)).astype(dtype, copy=False)
    y = np.empty((len(rows), weight.shape[1]), dtype)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        if dtype == weight.dtype:
            some(part, y[part])
        else:
            y[part] = some(part)
    return y


def thirds(state: State, name: str) -> list[Array]:
    """Three equal parts of a tensor, in which projections for queries, keys and values are stacked.

    A RelposValueError says that the tensor is missing or its length is no multiple of three.
    """
    stacked = state.take(name)
    if not stacked.ndim or len(stacked) % 3:
        raise RelposValueError(f"{state.prefix}{name}: expected three stacked parts, found shape {stacked.shape}")
    return list(stacked.reshape(3, len(stacked) // 3, *stacked.shape[1:]))


def split_heads(x: Array, heads: int) -> Array:
    """Cut (..., L, H * D) into heads (..., H, L, D), a view."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-3, -2)


def merge_heads(x: Array) -> Array:
    """Put heads (..., H, L, D) side by side again, as (..., L, H * D)."""
    y = x.swapaxes(-3, -2)
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])


class Cache:
    """Projected keys and values of positions that a module has seen; a call adds its own.

    An empty cache, given to every call of one layer's self-attention, makes decoding token by token equal to the
    whole pass, if that is causal. Not so variant "espnet_legacy", which encodes one distance by other rows when there
    are more keys. `MultiHeadAttention.project` fills one from the states that cross-attention attends.
    """

    def __init__(self) -> None:
        self.key: Array | None = None
        self.value: Array | None = None

    def __len__(self) -> int:
        return 0 if self.key is None else int(self.key.shape[-2])

    def joined(self, key: Array, value: Array) -> tuple[Array, Array]:
        """What the cache would hold with further positions; it stays as it is.

        Parameters
        ----------
        key : ndarray, shape (..., H_kv, L, D)
            Projected keys.
        value : ndarray, shape (..., H_kv, L, D_v)
            Projected values.

        Returns
        -------
        key, value : ndarray
            Those of all positions so far.

        Raises
        ------
        RelposValueError
            If they belong to another module or another batch than the ones before.
        """
        if self.key is None or self.value is None:
            return key, value
        for name, old, new in (("key", self.key, key), ("value", self.value, value)):
            if (*old.shape[:-2], old.shape[-1]) != (*new.shape[:-2], new.shape[-1]) or old.dtype != new.dtype:
                raise RelposValueError(
                    f"cache: holds a {name} of shape {old.shape} in {old.dtype}; the call adds {new.shape} in "
                    f"{new.dtype}, which must differ in the length only"
                )
        return np.concatenate([self.key, key], axis=-2), np.concatenate([self.value, value], axis=-2)

    def __repr__(self) -> str:
        return f"Cache({len(self)} positions)"


def sequence(name: str, value: Any, width: int) -> Array:
    """Vectors (..., L, width), as the weights take them; a RelposValueError says that the shape is another."""
    x = check.stored(name, value)
    if x.ndim < 2 or x.shape[-1] != width:
        raise RelposValueError(f"{name}: expected shape (..., L, {width}), as the weights take, found {x.shape}")
    return x


def _beside(x: Array, states: Array) -> Array:
    """States that are projected in the same dtype as x."""
    return states if computed(states) == computed(x) else states.astype(computed(x))


class Projected:
    r"""Four projections around attention, without positions: what the public modules have in common.

    Parameters
    ----------
    query, key, value : Linear, ndarray or (weight, bias)
        Projections :math:`W^Q`, :math:`W^K` and :math:`W^V`, as (out, in).
    out : Linear, ndarray or (weight, bias), optional
        Projection :math:`W^O` of the concatenated heads; without it they are returned as they are.
    heads : int
        Number of heads of the queries; those of keys and values follow from the shapes.
    """

    def __init__(self, query: Weights, key: Weights, value: Weights, out: Weights | None, heads: int) -> None:
        self.query, self.key, self.value = (
            Linear.of(given, name) for name, given in (("query", query), ("key", key), ("value", value))
        )
        self.out = None if out is None else Linear.of(out, "out")
        self.heads = check.integer("heads", heads, 1)
        if self.query.outputs % self.heads:
            raise RelposValueError(
                f"heads: {self.heads} do not divide the {self.query.outputs} outputs of query.weight "
                f"{self.query.weight.shape}"
            )
        self.head_dim = self.query.outputs // self.heads
        self.kv_heads = self.key.outputs // self.head_dim
        if self.key.outputs % self.head_dim or not self.kv_heads or self.heads % self.kv_heads:
            raise RelposValueError(
                f"key.weight: expected {self.head_dim} outputs for each of {self.heads} heads, or of a divisor of "
                f"them, found shape {self.key.weight.shape}"
            )
        if self.value.outputs % self.kv_heads:
            raise RelposValueError(
                f"value.weight: expected as many outputs for each of {self.kv_heads} heads, found shape "
                f"{self.value.weight.shape}"
            )
        merged = self.heads * (self.value.outputs // self.kv_heads)
        if self.out is not None and self.out.inputs != merged:
            raise RelposValueError(
                f"out.weight: expected {merged} inputs, the heads side by side, found shape {self.out.weight.shape}"
            )

    def project(self, context: Array, *, values: Array | None = None) -> Cache:
        """Keys and values of states that many calls attend, to be passed as their ``context``.

        Parameters
        ----------
        context : ndarray, shape (..., L_k, d_k)
            States, such as an encoder's output.
        values : ndarray, shape (..., L_k, d_v), optional
            States of which the values are made, if others.

        Returns
        -------
        Cache
            Projected once.
        """
        cache = Cache()
        states = sequence("context", context, self.key.inputs)
        others = states if values is None else sequence("values", values, self.value.inputs)
        if values is None and self.value.inputs != self.key.inputs:
            raise RelposValueError(f"values: value.weight {self.value.weight.shape} takes others than key.weight")
        if others.shape[:-1] != states.shape[:-1]:
            raise RelposValueError(f"values: expected {states.shape[:-1]} before the last axis, found {others.shape}")
        cache.key = split_heads(self.key(states), self.kv_heads)
        cache.value = split_heads(self.value(others), self.kv_heads)
        return cache

    def _keys_values(
        self, x: Array, context: Context, values: Array | None, memory: Array | None, cache: Cache | None
    ) -> tuple[Array, Array]:
        """What x attends, in heads."""
        if isinstance(context, Cache):
            if context.key is None or context.value is None:
                raise RelposValueError("context: the cache is empty; fill it with project()")
            if values is not None or memory is not None or cache is not None:
                raise RelposValueError("context: with a cache neither values, memory nor cache can be given")
            return context.key.astype(computed(x), copy=False), context.value.astype(computed(x), copy=False)
        if cache is not None:
            if not isinstance(cache, Cache):
                raise RelposTypeError(f"cache: expected a relpos_np.layers.Cache, found {type(cache).__name__}")
            if context is not None or memory is not None:
                raise RelposValueError(
                    "cache: it is for self-attention without memory; for cross-attention pass context=project(...)"
                )
        states = x if context is None else _beside(x, sequence("context", context, self.key.inputs))
        if memory is not None:
            before = _beside(x, sequence("memory", memory, self.key.inputs))
            if before.shape[:-2] != states.shape[:-2]:
                raise RelposValueError(
                    f"memory: expected batch axes {states.shape[:-2]} as in the input, found shape {before.shape}"
                )
            if values is not None:
                raise RelposValueError("memory: cannot precede values that are made of other states")
            if before.dtype != states.dtype:
                before, states = (part.astype(computed(x), copy=False) for part in (before, states))
            states = np.concatenate([before, states], axis=-2)
        if values is not None:
            values = _beside(x, check.stored("values", values))
        made = self.project(states, values=values)
        assert made.key is not None
        assert made.value is not None
        return (made.key, made.value) if cache is None else cache.joined(made.key, made.value)

    def _attend(
        self,
        given: Array,
        context: Context,
        values: Array | None,
        memory: Array | None,
        cache: Cache | None,
        position: Callable[[Array, Array], Position],
        return_probabilities: bool,
        options: Options,
    ) -> Array | tuple[Array, Array]:
        """Project, attend with the schemes that `position` makes of q and k, and project back."""
        if check.flag("return_probabilities", return_probabilities) and is_packed(options):
            raise RelposValueError("return_probabilities: not with segments or offsets of items")
        dtype = check.array("x", given).dtype
        x = sequence("x", given, self.query.inputs)
        if context is None and self.key.inputs != self.query.inputs:
            raise RelposValueError(f"context: key.weight {self.key.weight.shape} takes other states than query.weight")
        k, v = self._keys_values(x, context, values, memory, cache)
        q = split_heads(self.query(x), self.heads)
        schemes = position(q, k)
        z = merge_heads(api.attention(q, k, v, position=schemes, **options))
        if cache is not None:
            # Only now: a call that was refused leaves the cache as it was.
            cache.key, cache.value = k, v
        y = z.astype(dtype, copy=False) if self.out is None else self.out(z, dtype)
        if not return_probabilities:
            return y
        logits: Any = api.logits
        scores = {name: x for name, x in options.items() if name in logits.options}
        p, lse = softmax(logits(q, k, position=schemes, **scores))
        if options["sinks"] is not None:
            sink(p, lse, check.per_head("sinks", options["sinks"], lse.shape, lse.dtype))
        return y, p.astype(dtype, copy=False)
