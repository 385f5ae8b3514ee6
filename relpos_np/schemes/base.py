"""What a scheme must offer: its formula on dense arrays, and the same formula as terms."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Never, Self, TypeAlias

import numpy as np

# With `as`, what a scheme's file takes from here.
from relpos_np._contract.problem import Part as Part
from relpos_np._contract.problem import Site as Site
from relpos_np._contract.terms import Change
from relpos_np._contract.terms import Terms as Terms
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.printing import printed
from relpos_np.schemes.registry import register as register
from relpos_np.schemes.sample import Sample as Sample
from relpos_np.types import Array


@dataclass(slots=True, eq=False)
class SchemeGradient:
    """What `Scheme.lift` returns.

    Attributes
    ----------
    q, k : ndarray or None
        What the scheme contributes to the gradients of q and k, in their shapes (..., H, L_q, D) and
        (..., H_kv, L_k, D).
    arrays : dict of ndarray
        Gradients of the scheme's arrays, by the name of the attribute; those of a scheme within the scheme have names
        with a dot, such as "bias.slopes".
    """

    q: Array | None = None
    k: Array | None = None
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Bytes that a scheme holds at once beside its own arrays, at most, for all batch items and heads of a call.

    Only what grows with the number of pairs of query and key need be counted.

    Attributes
    ----------
    formula : int
        In `Scheme.transform`, `Scheme.scores`, `Scheme.outputs` and where values turn, results included.
    lower : int
        In `Scheme.lower`, and of what it returns.
    lift : int
        In `Scheme.lift`.
    """

    formula: int
    lower: int = 0
    lift: int = 0

    def with_maps(self, site: Site, count: int = 1) -> MemoryBound:
        """The same where `lower` makes index maps with a row for every pair: five integers each while it is made.

        Parameters
        ----------
        site : Site
            Sizes of the call.
        count : int
            How many maps there are.

        Returns
        -------
        MemoryBound
            With their bytes as `lower`.
        """
        return replace(self, lower=40 * count * site.q_len * site.k_len)


# What a class says of itself by the methods that it defines: parts of the formula, and other forms of `lower`.
_FLAGS_OF_FORMULAS = {"content": "transform", "turns_values": "turn_values"}
_FLAGS_OF_TERMS = {
    "rotates_operands": "lower_rotated",
    "makes_vectors": "lower_vectors",
    "by_rows": "lower_by_rows",
}


def in_order(x: Any) -> Any:
    """An operand whose channels add up in the same order, and so to the same bits, however it was stored."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x


class Scheme:
    """A way for positions to enter attention; subclasses override what applies.

    `transform`, `scores`, `outputs`, `turn_values` and `turn_output` are the reference, which ``backend="numpy"``
    evaluates. `lower` states the same formula for all other backends and shares no code with them, so that each can be
    checked against the other. `lift` is the way back, for gradients. `relpos_np.terms` has the records that these
    methods take and return.

    A subclass needs no registration: its objects are passed as ``position=`` at once.

    Of its attributes a class states three, where they are true of it: `relative`, `token_independent`, and that it does
    not read the numbers in its operands. The others follow from the methods that it defines.

    Attributes
    ----------
    relative : bool
        Whether nothing but j - i - offset and the head decides what is added, so that lengths and offsets have no
        effect.
    token_independent : bool
        Whether a shorter call may use the scheme as it is: positions then count from its own first key, and nothing is
        held for the tokens or the batch items of one call. So may all that are `relative`.
    reads_operand_values : bool
        Whether `lower` computes with the numbers in q or k. A scheme that only hands these arrays on in its terms, or
        leaves them out, says False: its terms can then be made without operands, or from operands of half precision,
        and cut to a part of a call.
    covers : bool
        Whether the terms of a call hold, bit for bit, those of every call with some of its positions; by default those
        of a scheme that is `relative` and does not compute with operands do.
    covers_gradients : bool
        Whether that holds for `lift` as well, which gets the operands of all of these calls; by default where it
        `covers` them.
    content : bool
        Whether the scheme changes the content product q . k itself, as one with `transform` does; of several schemes
        only one may. A class whose terms alone do so states it.
    turns_values : bool
        Whether values turn before they are summed, and the output back, as with `turn_values`; of several schemes only
        one may, and the others may not override `outputs`.
    rotates_operands : bool
        Whether all that `lower` does with q and k is to turn them, which the CPU kernels can do as they read: the class
        defines `lower_rotated`.
    makes_vectors : bool
        Whether `lower` makes nothing of the numbers in q and k but vectors: the class defines `lower_vectors`.
    by_rows : bool
        Whether the CPU kernels make the bias of every pair some queries at a time: the class defines `lower_by_rows`.
    """

    content = False
    relative = False
    token_independent = False
    reads_operand_values = True
    rotates_operands = False
    makes_vectors = False
    by_rows = False
    turns_values = False
    # Why no part of a call can be computed alone, for a scheme of which that is true.
    _whole = ""

    @property
    def covers(self) -> bool:
        """See the class."""
        return self.relative and not self.reads_operand_values

    @property
    def covers_gradients(self) -> bool:
        """See the class."""
        return self.covers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        for flag, method in _FLAGS_OF_FORMULAS.items():
            if method in own and flag not in own:
                setattr(cls, flag, True)
        for flag, method in _FLAGS_OF_TERMS.items():
            # A class with terms of its own has no other form of those of the class above.
            if "lower" in own or method in own:
                setattr(cls, flag, method in own)

    def check(self, site: Site) -> None:
        """Raise a `RelposError` if the tables do not fit the call.

        Parameters
        ----------
        site : Site
            The call.
        """

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """The operands of the content product, by default as they are.

        Parameters
        ----------
        q, k : ndarray, shapes (..., H, L_q, D) and (..., H, L_k, D)
            Queries and keys, those of grouped heads repeated.
        site : Site
            The call.

        Returns
        -------
        tuple of ndarray
            Both in the shapes that they have, or with another last axis.
        """
        return q, k

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """What is added to the scaled scores; by default nothing.

        Parameters
        ----------
        q, k, site
            See `transform`; q and k as they were given.

        Returns
        -------
        ndarray, broadcast to (..., H, L_q, L_k), or None
            In the dtype of the call, ``site.dtype``.
        """
        return None

    def turn_values(self, v: Array, site: Site) -> Array:
        """Values before they are summed, by default as they are.

        Parameters
        ----------
        v : ndarray, shape (..., H, L_k, D_v)
            Values, those of grouped heads repeated. A key that is excluded may hold anything, and so may what becomes
            of its value alone.
        site : Site
            The call.

        Returns
        -------
        ndarray, shape (..., H, L_k, D_v)
            In the dtype of the call.
        """
        return v

    def turn_output(self, out: Array, site: Site) -> Array:
        """The output after all sums, by default as it is.

        Parameters
        ----------
        out : ndarray, shape (..., H, L_q, D_v)
            Sums of what `turn_values` returned, and of what `outputs` adds.
        site : Site
            The call.

        Returns
        -------
        ndarray, shape (..., H, L_q, D_v)
            In the dtype of the call.
        """
        return out

    def outputs(self, p: Array, site: Site) -> Array | None:
        """What is added to the output; by default nothing.

        Parameters
        ----------
        p : ndarray, shape (..., H, L_q, L_k)
            Probabilities.
        site : Site
            The call.

        Returns
        -------
        ndarray, shape (..., H, L_q, D_v), or None
            In the dtype of the call.
        """
        return None

    def change(self, site: Site) -> Change | None:
        """What is made of the scores when all schemes have added theirs, for what no sum can say.

        Only dense evaluations hold the scores: `lower` hands the change on in its terms, and kernels refuse it.

        Parameters
        ----------
        site : Site
            The call.

        Returns
        -------
        Change or None
            By default none.
        """
        return None

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same as terms.

        Parameters
        ----------
        q, k : ndarray, shapes (..., H, L_q, D) and (..., H_kv, L_k, D)
            Queries, and keys that still have their grouped heads. Both may be on a device. They can be handed on, added
            to and multiplied there; everything else that NumPy does with them works on a copy on the host.
        site : Site
            The call.

        Returns
        -------
        Terms
            With arrays in the dtype of the call.
        """
        raise_missing_method(self, "lower")

    def lower_vectors(self, q: Array, k: Array, site: Site) -> tuple[Array, ...]:
        """All that `lower` makes of the numbers in q and k, where that is nothing but vectors of its terms.

        Repeated calls of a class that has it make these anew, and keep all else in the terms.

        Parameters
        ----------
        q, k, site
            See `lower`; q and k are on the host.

        Returns
        -------
        tuple of ndarray
            What `Terms.vectors` says of the terms that `lower` makes.
        """
        raise NotImplementedError

    def lower_rotated(self, q: Array, k: Array, site: Site) -> Terms:
        """As `lower`, where that does nothing but turn q and k: these as records of what they are turned by.

        Parameters
        ----------
        q, k, site
            See `lower`; q and k are on the host and may be of half precision.

        Returns
        -------
        Terms
            Of which `query` and `key` are still to be turned.
        """
        raise NotImplementedError

    def lower_by_rows(self, q: Array, k: Array, site: Site) -> Terms:
        """As `lower`, for CPU kernels that make some rows at a time: biases as records of what they are made of.

        Parameters
        ----------
        q, k, site
            See `lower`; q and k are on the host.

        Returns
        -------
        Terms
            Gradients come in records of the same form.
        """
        raise NotImplementedError

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """What lowers a part of a call.

        The call that is returned may be anything between the part and all of `site`. If it is more than the part,
        `lower` gets stand-ins for q and k, and its terms are cut to the part: this is refused for a scheme that
        reads the numbers in them. The scheme that is returned travels to where the part is computed, so it should hold
        little more than the part needs. It is used for nothing but `lower`.

        Parameters
        ----------
        site : Site
            The whole call.
        part : Part
            What of it is wanted.

        Returns
        -------
        tuple of Scheme, Site and Part
            A scheme, the call it is to be lowered for, and the part as that call sees it.
        """
        if self._whole:
            raise RelposValueError(f"position: {self!r} cannot be computed for a part of a call, since {self._whole}")
        return (self, *part.nearby(site)) if self.relative else (self, site, part)

    def memory_bound(self, site: Site) -> MemoryBound:
        """A bound on the memory that a call needs for the scheme; this one suits a scheme that looks numbers up.

        The formula then holds for every pair two integers, a number of float64 and half of one per head, and two of
        the call's dtype per head and batch item.

        Parameters
        ----------
        site : Site
            The call.

        Returns
        -------
        MemoryBound
            Bytes.
        """
        pairs = site.q_len * site.k_len
        per_item = 2 * math.prod(site.batch) * site.heads * site.dtype.itemsize
        return MemoryBound(pairs * (16 + 12 * site.heads + per_item))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """The backward pass of `lower`: from gradients of the terms to those of its arguments.

        Parameters
        ----------
        q, k, site
            See `lower`.
        grad : Terms
            Gradients, in a record like that which `lower` returned. `grad.query` and `grad.key` are set only where the
            scheme changes the content product.

        Returns
        -------
        SchemeGradient
            Of q and k, and of the scheme's arrays.
        """
        raise_missing_method(self, "lift")

    def _with(self, **changed: Any) -> Self:
        """A copy with other attributes, for a part of a call."""
        cut = copy.copy(self)
        vars(cut).update(changed)
        return cut

    def __repr__(self) -> str:
        return printed(self)


def evaluated(formula: Callable[..., Any], scheme: Scheme, site: Site, *, cast: bool = False, **given: Any) -> Any:
    """A formula of a call: its arguments are attributes of the call or of the scheme, by their names.

    Parameters
    ----------
    formula : callable
        Takes q_len, k_len and offset of a call, and attributes of the scheme.
    scheme, site
        What has the attributes.
    cast : bool
        Whether the scheme's arrays are given in the dtype of the call, and not as they are.
    **given
        Arguments that are no attributes.

    Returns
    -------
    Any
        What the formula returns.
    """
    for name in inspect.signature(formula).parameters:
        if name not in given:
            value = getattr(site if name in ("q_len", "k_len", "offset") else scheme, name)
            given[name] = value.astype(site.dtype, copy=False) if cast and isinstance(value, np.ndarray) else value
    return formula(**given)


_WITHOUT = {
    "lower": "lower(q, k, site), which states its formula as terms: only attention and logits with backend='numpy' "
    "can do without",
    "lift": "lift(q, k, site, grad), the way back of lower, which gradients need",
}


def raise_missing_method(scheme: Any, method: str) -> Never:
    """Raise what a class without that method gets."""
    raise RelposTypeError(f"position: {type(scheme).__name__} has no {_WITHOUT[method]}")


# What the argument `position` of a call may be.
Position: TypeAlias = Scheme | tuple[Scheme, ...] | None
