"""Which keys a query may attend, as nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem
from relpos_np.interop.onnx.places import Places
from relpos_np.types import Array

# Inputs that a model may have beside q, k and v and arrays of schemes.
INPUTS = ("bool_mask", "float_mask", "key_lengths", "offset")


@dataclass(eq=False)
class Masks:
    """The masks of a call.

    Attributes
    ----------
    allowed : list of str
        Names of bools, each broadcast to (B, H, L_q, L_k).
    added : str or None
        Name of a float mask.
    causal : bool
        Whether the only rule is that of the operator: key j for queries i >= j. It is then not in `allowed`.
    """

    allowed: list[str]
    added: str | None
    causal: bool


def masks(places: Places, problem: Problem, batch: int | str, inputs: Collection[str], pairs: list[Array]) -> Masks:
    """The masks of a call.

    Parameters
    ----------
    places : Places
        The graph, and where queries and keys stand.
    problem : Problem
        The call that was lowered.
    batch : int or str
        Batch items, or their name.
    inputs : collection of str
        Which of `INPUTS` the model has.
    pairs : list of ndarray
        Pairs that schemes do not exclude.

    Returns
    -------
    Masks
        As nodes.
    """
    graph = places.graph
    allowed = [graph.constant(one, "allowed") for one in pairs]
    band = problem.left < UNBOUNDED or problem.right < UNBOUNDED
    at_end = places.offset is None and not places.by_item
    zero = places.offset == 0 or (at_end and places.q_len == places.k_len)
    causal = band and problem.left >= UNBOUNDED and problem.right == 0 and zero
    if band and not causal:
        for operator, bound in (("GreaterOrEqual", -problem.left), ("LessOrEqual", problem.right)):
            if abs(bound) < UNBOUNDED:
                limit = graph.constant(np.int64(bound), "limit")
                allowed.append(graph.add(operator, places.distance, limit, name="allowed"))
    if problem.step > 1:
        rest = graph.add("Mod", places.distance, graph.constant(np.int64(problem.step), "number"))
        allowed.append(graph.add("Equal", rest, graph.constant(np.int64(0), "number"), name="allowed"))
    if problem.ranges is not None:
        first, stop = (np.expand_dims(problem.ranges[..., n, None].astype(np.int64), -3) for n in (0, 1))
        # One for all heads.
        allowed.append(graph.add("GreaterOrEqual", places.of_keys, graph.constant(first, "first"), name="allowed"))
        allowed.append(graph.add("Less", places.of_keys, graph.constant(stop, "stop"), name="allowed"))
    if "key_lengths" in inputs:
        lengths = graph.input("key_lengths", np.int64, (batch,))
        lengths = graph.add("Reshape", lengths, graph.integers(-1, 1, 1, 1), name="lengths")
        allowed.append(graph.add("Less", places.of_keys, lengths, name="allowed"))
    elif problem.key_lengths is not None:
        lengths = graph.constant(problem.key_lengths.astype(np.int64)[..., None, None, None], "key_lengths")
        allowed.append(graph.add("Less", places.of_keys, lengths, name="allowed"))
    added = None
    if problem.mask is not None:
        mask = _stored(problem.mask)
        if mask.dtype == np.bool_:
            allowed.append(graph.constant(mask, "mask"))
        else:
            added = graph.constant(mask, "mask")
    pairs_of_all = (batch, 1, places.q_len, places.k_len)
    if "bool_mask" in inputs:
        allowed.append(graph.input("bool_mask", np.bool_, pairs_of_all))
    if "float_mask" in inputs:
        mask_input = graph.input("float_mask", problem.site.dtype, pairs_of_all)
        added = mask_input if added is None else graph.add("Add", added, mask_input, name="mask")
    if causal and allowed:
        # Several runtimes disagree on what a causal call adds to a mask of bool.
        limit = graph.constant(np.int64(0), "limit")
        allowed.append(graph.add("LessOrEqual", places.distance, limit, name="allowed"))
        causal = False
    return Masks(allowed, added, causal)


def _stored(x: Array) -> Array:
    """A mask without what is broadcast."""
    return x[tuple(slice(None, None if step else 1) for step in x.strides)]
