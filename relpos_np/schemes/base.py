"""What a scheme must offer: its formula on dense arrays, and the same formula as terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from relpos_np._contract.problem import Part, Site
from relpos_np._contract.terms import Terms
from relpos_np.types import Array


@dataclass(slots=True, eq=False)
class SchemeGradient:
    """What `lift` returns: gradients of q and k, in their shapes, and of the scheme's arrays, by attribute."""

    q: Array | None = None
    k: Array | None = None
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a scheme holds at once beside its own arrays, at most, for all batch items and heads of a call.

    `formula`: in `transform`, `scores` and `outputs`, results included. `lower`: in `lower`, and of what it returns.
    `lift`: in `lift`. Only what grows with the number of pairs of query and key need be counted.
    """

    formula: int
    lower: int = 0
    lift: int = 0


class Scheme:
    """A way for positions to enter attention; subclasses override what applies.

    `transform`, `scores` and `outputs` are the reference. `lower` states the same formula for the kernels and
    shares no code with them, so that each can be checked against the other.
    """

    # Whether the scheme changes the content product q . k itself; of several schemes only one may.
    content = False
    # Whether what it adds to the scores excludes keys, by -inf, so that they may hold anything.
    excludes = False
    # Whether nothing but j - i - offset and the head decides what is added, so that lengths and offsets have no effect.
    relative = False
    # Whether `lower` computes with the numbers in q or k. A scheme that only hands these arrays on in its terms, or
    # leaves them out, says False: its terms can then be made without operands, or from operands of half precision, and
    # cut to a part of a call.
    computes = True
    # Whether all that `lower` does with q and k is to turn them, which kernels can do as they read.
    turns = False
    # Whether `lower` makes an index map that holds a number for every pair.
    dense = False

    def check(self, site: Site) -> None:
        """Raise a `RelposError` if the tables do not fit the call."""

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """The operands of the content product: (..., H, L_q, D) and (..., H, L_k, D), by default as they are."""
        return q, k

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """Added to the scaled scores: (..., H, L_q, L_k). q (..., H, L_q, D), k (..., H, L_k, D)."""
        return None

    def outputs(self, p: Array, site: Site) -> Array | None:
        """Added to the output: (..., H, L_q, D_v), from the probabilities p (..., H, L_q, L_k)."""
        return None

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same as terms; k still has its grouped heads (..., H_kv, L_k, D).

        Both may be on a device. They can be handed on, added to and multiplied there; everything else that NumPy does
        with them works on a copy on the host.
        """
        raise NotImplementedError

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """What lowers a part of a call: a scheme, the call it is to be lowered for, and the part as that call sees it.

        The call that is returned may be anything between the part and all of `site`. If it is more than the part,
        `lower` gets stand-ins for q and k, and its terms are cut to the part: this is refused for a scheme that
        `computes`. The scheme that is returned travels to where the part is computed, so it should hold little
        more than the part needs. It is used for nothing but `lower`.
        """
        return (self, *part.nearby(site)) if self.relative else (self, site, part)

    def held(self, site: Site) -> Held:
        """A bound on the memory that a call needs for the scheme; this one suits a scheme that looks numbers up.

        The formula then holds for every pair two integers, a number of float64 and half of one per head, and two of
        the call's dtype per head and batch item; a `dense` map is five integers while it is made.
        """
        pairs = site.q_len * site.k_len
        per_item = 2 * math.prod(site.batch) * site.heads * site.dtype.itemsize
        return Held(pairs * (16 + 12 * site.heads + per_item), 40 * pairs if self.dense else 0)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """The backward pass of `lower`: from gradients of the terms, in a record like them, to those of its arguments.

        `grad.query` and `grad.key` are set only where the scheme changes the content product.
        """
        raise NotImplementedError


# What the argument `position` of a call may be.
Position: TypeAlias = Scheme | tuple[Scheme, ...] | None
