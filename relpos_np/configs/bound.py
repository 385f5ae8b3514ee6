"""The attention of one layer with its weights: what the configuration says as arguments of `relpos_np.attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from relpos_np import api
from relpos_np._calls.packed import segment_bounds
from relpos_np._contract import check
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array, Int64


class BoundAttention:
    """Attention of one layer of a model: a call on queries, keys and values as they come from their projections.

    Parameters
    ----------
    layer : LayerAttention
        What the configuration says.
    arrays : sequence of mapping
        The arrays of each scheme.
    sinks : ndarray or None
        One score per head.

    Notes
    -----
    Calls follow the arrays: what is written into them counts from the next call on, whichever dtype the call has.

    Examples
    --------
    The arguments of the call are those of its gradients, too; gradients of weights have the names that the schemes
    give to their arrays:

    >>> import numpy as np, relpos_np as rp
    >>> config = {"model_type": "mpnet", "hidden_size": 16, "num_attention_heads": 2}
    >>> layer = rp.from_config(config, layer=0)
    >>> f = layer.bind({layer.weights[0]: np.ones((32, 2))})
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))
    >>> out = f(q, k, v)
    >>> grads = rp.attention_vjp(q, k, v, grad_out=out, **f.arguments(q, k, v))
    >>> grads.q.shape, grads.position[0]["table"].shape
    ((2, 5, 8), (32, 2))
    """

    def __init__(self, layer: LayerAttention, arrays: Sequence[Mapping[str, Array]], sinks: Array | None) -> None:
        self.layer = layer
        self._arrays = arrays
        self._sinks = sinks
        # Schemes that were made, with copies of the arrays as they were then.
        self._made: dict[tuple[int, np.dtype[Any]], tuple[Mapping[str, Array], Scheme]] = {}

    def arguments(self, q: Array, k: Array, v: Array, **options: Any) -> dict[str, Any]:
        """Everything that a call takes besides its operands, for `relpos_np.attention` and `relpos_np.attention_vjp`.

        Parameters
        ----------
        q, k, v : ndarray, shapes (..., H, L_q, D), (..., H_kv, L_k, D) and (..., H_kv, L_k, D_v)
            From their projections, and after what `before` of the layer names.
        **options
            What `inputs`, `optional` and `needs` of the layer name, and options that the configuration says nothing
            of: mask, key_lengths, offset, segments, backend, precision ...

        Returns
        -------
        dict
            ``position``, ``scale``, ``causal``, ``window``, ``rule``, ``softcap``, ``cap_order``, ``sinks`` and
            ``query_scale``, where the layer has them, and the options that were given.

        Raises
        ------
        RelposError
            If shapes are not those of the configuration, an option is given that it decides, or an input is missing.
        """
        layer = self.layer
        for name, x, heads, size in (
            ("q", q, layer.heads, layer.head_dim),
            ("k", k, layer.kv_heads, layer.head_dim),
            ("v", v, layer.kv_heads, layer.value_dim),
        ):
            shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
            if len(shape) < 3 or (shape[-3], shape[-1]) != (heads, size):
                raise RelposValueError(f"{name}: expected shape (..., {heads}, L, {size}), found {shape}")
        given = {name: options.pop(name) for name in (*layer.inputs, *layer.optional) if name in options}
        places = {name: options.get(name) for name in ("offset", "segments")}
        if check.at_end(places["offset"]):
            lengths = k.shape[-2] if options.get("key_lengths") is None else options["key_lengths"]
            places["offset"] = check.integers("key_lengths", lengths) - q.shape[-2]
        decided = self.options(q, k, **places, **given)
        for name in ("position", "scale", "causal", "window", *decided):
            if name in options:
                raise RelposTypeError(f"{name}: the configuration decides it, {self._name()}")
        for name in layer.needs:
            if options.get(name) is None:
                raise RelposTypeError(f"{name}: {self._name()} needs it in every call")
        position = self.position(q, k, **places, **given)
        return {"position": position or None, **decided, **options}

    def position(
        self, q: Array, k: Array, *, offset: Any = None, segments: Any = None, **inputs: Any
    ) -> tuple[Scheme, ...]:
        """The schemes of a call.

        Parameters
        ----------
        q, k : ndarray, shapes (..., H, L_q, D) and (..., H_kv, L_k, D)
            Queries and keys.
        offset, segments
            See `relpos_np.attention`.
        **inputs
            What `inputs` and `optional` of the layer name.

        Returns
        -------
        tuple of schemes
            For ``position=``.

        Raises
        ------
        RelposError
            If an input is missing or unknown.
        """
        self._check(inputs)
        found = []
        for n, (plan, arrays) in enumerate(zip(self.layer.schemes, self._arrays, strict=True)):
            made = None if plan.varies else self._kept(n, q.dtype)
            if made is None:
                cast = {name: x.astype(q.dtype) for name, x in arrays.items()}
                q_len, k_len, dim = q.shape[-2], k.shape[-2], q.shape[-1]
                places = _positions(q_len, k_len, offset, segments)
                reach = max(_longest(q_len, k_len, segments), int(places.max(initial=-1)) + 1)
                made = plan.build(Given(plan.options, cast, q_len, k_len, places, reach, dim, q.dtype, inputs))
                if not plan.varies:
                    self._made[n, q.dtype] = {name: x.copy() for name, x in arrays.items()}, made
            found.append(made)
        return tuple(found)

    def _kept(self, n: int, dtype: np.dtype[Any]) -> Scheme | None:
        """The scheme that was made of the numbers which its arrays hold now."""
        before, made = self._made.get((n, dtype), ({}, None))
        same = all(np.array_equal(x, self._arrays[n][name]) for name, x in before.items())
        return made if same else None

    def options(self, q: Array, k: Array, *, offset: Any = None, segments: Any = None, **inputs: Any) -> dict[str, Any]:
        """What the layer says besides its schemes, for `relpos_np.attention`.

        Parameters
        ----------
        q, k, offset, segments, **inputs
            See `position`.

        Returns
        -------
        dict
            Options that are not at their defaults.

        Raises
        ------
        RelposError
            If an input is missing or unknown.
        """
        self._check(inputs)
        layer = self.layer
        found: dict[str, Any] = {}
        if not math.isnan(layer.scale):
            found["scale"] = layer.scale
        if layer.causal:
            found["causal"] = True
        if layer.window is not None:
            found["window"] = layer.window
        if layer.rule is not None:
            found["rule"] = layer.rule.build(inputs)
        if layer.softcap is not None:
            found |= {"softcap": layer.softcap, "cap_order": layer.cap_order}
        if self._sinks is not None:
            found["sinks"] = self._sinks.astype(q.dtype)
        if layer.query_scale is not None:
            at = _positions(q.shape[-2], k.shape[-2], offset, segments)
            found["query_scale"] = layer.query_scale.factors(at).astype(q.dtype)
        return found

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """Attention of the layer.

        Parameters
        ----------
        q, k, v, **options
            See `arguments`; also ``return_lse`` and ``out`` of `relpos_np.attention`.

        Returns
        -------
        ndarray, or tuple of ndarray
            As `relpos_np.attention`.

        Raises
        ------
        RelposError
            As `arguments` and `relpos_np.attention`.
        """
        return api.attention(q, k, v, **self.arguments(q, k, v, **options))

    def _check(self, inputs: Mapping[str, Any]) -> None:
        expected = self.layer.inputs
        for name in expected:
            if name not in inputs:
                raise RelposTypeError(f"{name}: {self._name()} needs it in every call")
        for name in inputs:
            if name not in (*expected, *self.layer.optional):
                raise RelposTypeError(f"{name}: {self._name()} takes no such input; expected {expected or 'none'}")

    def _name(self) -> str:
        return f"layer {self.layer.layer} of {self.layer.model_type}"

    def __repr__(self) -> str:
        return f"BoundAttention({self.layer.model_type}, layer={self.layer.layer}, part={self.layer.part!r})"


def _positions(q_len: int, k_len: int, offset: Any, segments: Any) -> Int64:
    """Positions of queries among their keys: (L_q,), or (..., 1, L_q) where batch items have offsets of their own."""
    if segments is not None:
        queries, keys = segment_bounds(segments, q_len, k_len)
        runs = zip(pairwise(queries), pairwise(keys), strict=True)
        return np.concatenate(
            [np.zeros(0, np.int64), *(_positions(b - a, d - c, offset, None) for (a, b), (c, d) in runs)]
        )
    start = check.integers("offset", k_len - q_len if offset is None else offset).astype(np.int64)
    steps = np.arange(q_len)
    return start + steps if start.ndim == 0 else start[..., None, None] + steps


def _longest(q_len: int, k_len: int, segments: Any) -> int:
    """Keys of the longest of several sequences."""
    return k_len if segments is None else int(np.diff(segment_bounds(segments, q_len, k_len)[1]).max(initial=0))
