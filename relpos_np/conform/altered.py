"""A case with something changed: other operands, options, arguments of the scheme or pairs that are attended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relpos_np.api import attention, logits
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import Scheme
from relpos_np.testing.arguments import arguments
from relpos_np.testing.conventions import Call, masked, reach
from relpos_np.testing.example import Example
from relpos_np.types import Array

# What an implementation with some mistake would return for a case; None where the mistake makes no sense.
Answer = Callable[[Example], Array | None]


def out_of(one: Example, **changes: Any) -> Array:
    """The exact output with another position, operands or options; an option that is None is left out."""
    given = {"q": one.q, "k": one.k, "v": one.v, "position": one.position, **one.kwargs, **changes}
    found: Array = attention(backend="numpy", **{n: x for n, x in given.items() if x is not None or n == "position"})
    return found


def remade(one: Example, **changes: Any) -> Array:
    """The exact output with other arguments of the scheme."""
    assert one.position is not None
    return out_of(one, position=type(one.position)(**(arguments(one.position) | changes)))


def call_of(one: Example) -> Call:
    """Its lengths and options, as conventions are asked of them."""
    known: dict[str, Any] = {n: one.kwargs.get(n) for n in ("scale", "offset", "window", "softcap", "cap_order")}
    sizes = {"heads": one.q.shape[1], "v_dim": one.v.shape[-1]}
    return Call(
        one.q.shape[-1], one.q.shape[2], one.k.shape[2], causal=bool(one.kwargs.get("causal")), **known, **sizes
    )


def scale_of(one: Example) -> float:
    """The factor on products."""
    return float(call_of(one).meant("scale"))


def seen(one: Example, **limits: Any) -> Array:
    """The case's mask within other limits."""
    call = call_of(one)
    return masked(one.kwargs.get("mask"), reach(slice(0, call.q_len), call.k_len, **limits)[None, None])


def hiding(one: Example, hidden: Array) -> Array:
    """The exact output without some pairs, (L_q, L_k), or some keys, (L_k,)."""
    return out_of(one, mask=masked(one.kwargs.get("mask"), ~hidden[None, None]))


def scores_of(one: Example) -> Array:
    """Scores with masks."""
    options = {name: value for name, value in one.kwargs.items() if name != "sinks"}
    found: Array = logits(one.q, one.k, position=one.position, backend="numpy", **options)
    return found


def content_of(one: Example) -> Array:
    """Scaled products without positions, cap and masks."""
    options = {name: one.kwargs[name] for name in ("scale",) if name in one.kwargs}
    found: Array = logits(one.q, np.nan_to_num(one.k), backend="numpy", **options)
    return found


def added_to(one: Example) -> Array | None:
    """What positions add to scaled products; None where the output is more than a sum of values."""
    if one.position is None or not plain_outputs(one):
        return None
    options = {name: one.kwargs[name] for name in ("offset", "scale") if name in one.kwargs}
    s = logits(one.q, np.nan_to_num(one.k), position=one.position, backend="numpy", **options)
    return np.asarray(s - content_of(one))


def from_parts(one: Example, content: Array, added: Array | float = 0.0, *, capped: bool = False) -> Array:
    """Attention with these parts of the scores, and the case's masks, and its cap where they have none yet."""
    cap, order = None if capped else one.kwargs.get("softcap"), one.kwargs.get("cap_order")
    s = content + added
    if cap is not None:
        s = cap * np.tanh(s / cap) if order != "content" else cap * np.tanh(content / cap) + added
    mask = one.kwargs.get("mask")
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == np.bool_ else s + mask
    none = {"position": None, "softcap": None, "cap_order": None, "scale": None}
    return out_of(one, q=np.zeros_like(one.q), k=np.zeros_like(one.k), mask=s, **none)


def values_of(one: Example) -> Array:
    """Values by query head, 0 where no query may attend them."""
    v = repeat_heads(one.v, one.q.shape[1])
    read = np.asarray(np.isfinite(scores_of(one)).any(axis=-2))
    return np.where(read[..., None], v, 0.0)


def plain_outputs(one: Example) -> bool:
    """Whether the output is the sum of p v and nothing else."""
    position, names = one.position, ("outputs", "turn_values", "turn_output")
    return position is None or all(getattr(type(position), name) is getattr(Scheme, name) for name in names)
