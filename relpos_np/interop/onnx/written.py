"""Schemes that compute more with queries and keys than is recorded: their terms, written out as nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relpos_np._contract.problem import Site
from relpos_np._contract.terms import Terms
from relpos_np.interop.onnx.graph import Graph
from relpos_np.interop.onnx.operand import Traced
from relpos_np.interop.onnx.package import package
from relpos_np.schemes.cope import CoPE
from relpos_np.schemes.liere import LieRE
from relpos_np.schemes.pope import PoPE
from relpos_np.types import Array

Written = Callable[[Any, Traced, Traced, Site], Terms]


def _double(graph: Graph, x: Array) -> str:
    return graph.constant(np.asarray(x, np.float64), "table")


def _as(like: Traced, name: str, shape: tuple[int, ...], dtype: Any) -> Traced:
    """A result of nodes in float64, rounded once to the dtype of the call."""
    return Traced(like.places, name, shape, np.float64, like.side).astype(dtype)


def _beside(*parts: Traced) -> Traced:
    """Channels of all, one after the other."""
    joined: Any = np.concatenate
    found: Traced = joined(parts, axis=-1)
    return found


def _cope(scheme: CoPE, q: Traced, k: Traced, site: Site) -> Terms:
    """Gates, positions as sums of later gates, and products with the vectors that these lie between."""
    graph, wide = q.graph, q.astype(np.float64)
    if scheme.gate_key is None:
        keys = graph.repeated(k.astype(np.float64).name, site.heads // site.kv_heads, site.heads)
    else:
        keys = _double(graph, np.repeat(scheme.gate_key, site.heads // site.kv_heads, axis=-3))
    axes = range(4 if scheme.gate_key is None else scheme.gate_key.ndim)
    turned = graph.transposed(keys, *axes[:-2], axes[-1], axes[-2])
    x = graph.add("Mul", graph.add("MatMul", wide.name, turned), _double(graph, np.array(site.scale)))
    one = _double(graph, np.ones(()))
    gates = graph.add("Div", one, graph.add("Add", one, graph.add("Exp", graph.add("Neg", x))))
    last = np.arange(site.q_len)[:, None] + site.offset + site.right
    counted = np.arange(site.k_len) <= last
    if scheme.counted is not None:
        counted = counted & scheme.counted
    gates = graph.add("Mul", gates, _double(graph, counted))
    most = scheme.table.shape[-2] - 1
    summed = graph.add("CumSum", gates, graph.constant(np.array(3), "axis"), reverse=1)
    positions = graph.add("Min", summed, _double(graph, np.array(most)))
    below = graph.add("Floor", positions)
    part = graph.add("Sub", positions, below)
    row = graph.add("Cast", below, to=package().TensorProto.INT64)
    after = graph.add("Min", graph.add("Add", row, graph.constant(np.array(1), "one")), graph.constant(np.array(most)))
    vectors = scheme.table.reshape(-1, *scheme.table.shape[-2:])
    whole = graph.add("MatMul", wide.name, _double(graph, np.swapaxes(vectors, -1, -2)))
    low, high = (graph.add("GatherElements", whole, at, axis=3) for at in (row, after))
    bias = graph.add("Add", low, graph.add("Mul", part, graph.add("Sub", high, low)))
    if scheme.variant == "ram":
        bias = graph.add("Mul", bias, _double(graph, np.array(site.scale)))
    return Terms(biases=(_as(q, bias, (*q.shape[:-1], site.k_len), site.dtype),))


def _pope(scheme: PoPE, q: Traced, k: Traced, site: Site) -> Terms:
    """Magnitudes, the softplus of a channel, times cosine and sine."""
    turns = scheme._turns(site)
    query, key = (_polar(x, turn, site) for x, (turn, _) in zip((q, k), turns, strict=True))
    return Terms(query=query, key=key)


def _polar(x: Traced, turn: Array, site: Site) -> Traced:
    graph, count = x.graph, turn.shape[-1]
    given = x[..., :count].astype(np.float64).name
    decay = graph.add("Exp", graph.add("Neg", graph.add("Abs", given)))
    small = graph.add("Log", graph.add("Add", _double(graph, np.ones(())), decay))
    size = graph.add("Add", graph.add("Relu", given), small)
    halves = [
        _as(x, graph.add("Mul", size, _double(graph, table)), (*x.shape[:-1], count), site.dtype)
        for table in (turn.real, turn.imag)
    ]
    rest = [x[..., count:]] if count < x.shape[-1] else []
    return _beside(*halves, *rest)


def _liere(scheme: LieRE, q: Traced, k: Traced, site: Site) -> Terms:
    """Blocks of channels times the rotation of their position."""
    query, key = (_blocks(x, turn) for x, turn in zip((q, k), scheme._rotations(site), strict=True))
    return Terms(query=query, key=key)


def _blocks(x: Traced, rotations: Array) -> Traced:
    """(B, H, L, D) times (..., H_kv or 1, L, blocks, S, S)."""
    graph = x.graph
    sets, blocks, size = rotations.shape[-5], rotations.shape[-3], rotations.shape[-1]
    heads, length, count = x.shape[1], x.shape[2], blocks * size
    parts = graph.add("Reshape", x[..., :count].name, graph.integers(0, sets, heads // sets, length, blocks, size, 1))
    turned = graph.add("MatMul", graph.constant(rotations[..., None, :, :, :, :], "rotations"), parts)
    first = Traced(
        x.places,
        graph.add("Reshape", turned, graph.integers(0, heads, length, count)),
        (*x.shape[:-1], count),
        x.dtype,
        x.side,
    )
    return _beside(first, x[..., count:]) if count < x.shape[-1] else first


WRITTEN: Mapping[type, Written] = {CoPE: _cope, LieRE: _liere, PoPE: _pope}
