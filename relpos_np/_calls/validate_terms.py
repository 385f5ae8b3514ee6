"""Checks of what the classes of users state: kernels read terms unchecked, so that nothing wrong may reach them."""

from __future__ import annotations

from typing import Any, Never

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.backends import WITH_KERNELS
from relpos_np._contract.problem import Site
from relpos_np._contract.terms import Dense, Terms, Toeplitz, ValueTurn
from relpos_np._contract.turned import Turned
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme, SchemeGradient, raise_missing_method
from relpos_np.schemes.registry import is_registered


def able(schemes: tuple[Scheme, ...], site: Site, backend: str | None, backward: bool) -> None:
    """Raise a `RelposError` if a scheme cannot do what a call asks of it; backend is None for formulas alone."""
    for scheme in schemes:
        if not is_registered(type(scheme)):
            _able(scheme, site, backend, backward)


def _able(scheme: Scheme, site: Site, backend: str | None, backward: bool) -> None:
    cls = type(scheme)
    if cls.lower is Scheme.lower and (backward or backend not in (None, "numpy")):
        raise_missing_method(scheme, "lower")
    if backward and cls.lift is Scheme.lift:
        raise_missing_method(scheme, "lift")
    if cls.change is not Scheme.change and backend in WITH_KERNELS:
        raise RelposTypeError(
            f"position: {cls.__name__} changes scores as a whole, which kernels never hold; expected backend 'numpy' "
            f"or 'terms', found {backend!r}"
        )
    if backward and (change := scheme.change(site)) is not None and change.slope is None:
        raise RelposTypeError(f"position: {cls.__name__} has no derivative of what it makes of the scores: give it one")


def checked(scheme: Scheme, terms: Terms, site: Site) -> Terms:
    """The terms that a scheme was lowered to, once they fit the call."""
    if not is_registered(type(scheme)):
        _Checked(scheme, site).terms(terms)
    return terms


class _Checked:
    """Checks of one record, with the scheme's name in what they say."""

    def __init__(self, scheme: Scheme, site: Site) -> None:
        self.scheme, self.site, self.name = scheme, site, type(scheme).__name__

    def refuse(self, what: str, wanted: str, found: Any, kind: type[Exception] = RelposValueError) -> Never:
        raise kind(f"position: {self.name}.lower: {what}: expected {wanted}, found {found}")

    def terms(self, terms: Any) -> None:
        site, lead = self.site, self.site.batch
        if not isinstance(terms, Terms):
            self.refuse("result", "relpos_np.terms.Terms", type(terms).__name__, RelposTypeError)
        operands = [x for x in (terms.query, terms.key) if x is not None]
        if bool(operands) != self.scheme.content:
            wanted = f"{'them' if self.scheme.content else 'none'}, as `content` of the class is {self.scheme.content}"
            self.refuse("query, key", wanted, f"{len(operands)} of them")
        depths = []
        for what, x, heads, length in (
            ("query", terms.query, site.heads, site.q_len),
            ("key", terms.key, site.kv_heads, site.k_len),
        ):
            if x is not None and not isinstance(x, Turned):
                self.array(what, x, 3 + len(lead))
                if x.shape[:-1] != (*lead, heads, length):
                    self.refuse(what, f"shape {(*lead, heads, length)} and a last axis", x.shape)
            depths.append(site.head_dim if x is None else x.shape[-1])
        if depths[0] != depths[1]:
            self.refuse("query, key", "one length of their vectors", f"{depths[0]} and {depths[1]}")
        for term in self.each("tables", terms.tables):
            self.array("table", term.table, 2)
            self.rows("table", term.table, term.table.shape[1], term.index)
        for what, slot, heads, length in (
            ("query", terms.queries, site.heads, site.q_len),
            ("key", terms.keys, site.kv_heads, site.k_len),
        ):
            for term in self.each("queries" if what == "query" else "keys", slot):
                self.array("weights", term.weights, 3)
                self.rows("weights", term.weights, term.weights.shape[1], term.index)
                x = getattr(term, what)
                self.array(f"{what} of a term", x)
                shape = (heads, length, term.weights.shape[2])
                if x.shape[-3:] != shape or not _broadcasts(x.shape[:-3], lead):
                    self.refuse(f"{what} of a term", f"shape {(*lead, *shape)}", x.shape)
        for term in self.each("values", terms.values):
            self.array("weights", term.weights, 3)
            self.rows("weights", term.weights, term.weights.shape[1], term.index)
            if not site.scores_only and term.weights.shape[2] != site.v_dim:
                self.refuse("weights of values", f"vectors of D_v = {site.v_dim}", term.weights.shape)
        self.turn(terms.turn)
        pairs = (*lead, site.heads, site.q_len, site.k_len)
        for bias in self.each("biases", terms.biases):
            self.array("bias", bias, len(pairs))
            if not _broadcasts(bias.shape, pairs):
                self.refuse("bias", f"each axis of {pairs} or length 1", bias.shape)
        self.each("changes", terms.changes)

    def turn(self, turn: Any) -> None:
        """Factors of values and of the output, where the scheme says that it turns them."""
        site = self.site
        if site.scores_only:
            return
        if (turn is not None) != self.scheme.turns_values:
            wanted = "a ValueTurn" if self.scheme.turns_values else "none"
            found = "none" if turn is None else "one"
            self.refuse("turn", f"{wanted}, as `turns_values` of the class is {self.scheme.turns_values}", found)
        if turn is None:
            return
        if not isinstance(turn, ValueTurn):
            self.refuse("turn", "relpos_np.terms.ValueTurn", type(turn).__name__, RelposTypeError)
        check.choice("position: layout", turn.layout, ("half", "interleaved"))
        given: tuple[tuple[str, Any], ...] = (("key of turn", turn.key), ("query of turn", turn.query))
        for what, factors in given:
            if not isinstance(factors, tuple) or len(factors) != 2:
                self.refuse(what, "two arrays, real and imaginary parts", type(factors).__name__, RelposTypeError)
            for x in factors:
                self.array(what, x)
        pairs = turn.key[0].shape[-1]
        if turn.first < 0 or turn.first + 2 * pairs > site.v_dim or turn.blocks < 1 or pairs % turn.blocks:
            found = f"{pairs} pairs in {turn.blocks} blocks from channel {turn.first} on"
            self.refuse("turn", f"pairs among D_v = {site.v_dim} channels", found)
        for what, factors, heads, length in (
            ("key of turn", turn.key, site.kv_heads, site.k_len),
            ("query of turn", turn.query, site.heads, site.q_len),
        ):
            for x in factors:
                shape = (*site.batch, heads, length, pairs)
                if x.ndim < 3 or x.shape[-2:] != shape[-2:] or not _broadcasts(x.shape, shape):
                    self.refuse(what, f"shape {shape}, or 1 for axes before the last two", x.shape)

    def each(self, what: str, slot: Any) -> Any:
        """The entries of a slot, which a forgotten comma would make one of."""
        if not isinstance(slot, tuple):
            self.refuse(what, "a tuple", type(slot).__name__, RelposTypeError)
        return slot

    def array(self, what: str, x: Any, axes: int | None = None) -> None:
        """An array in the dtype of the call; operands that were handed on may be on a device."""
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            self.refuse(what, "an array", type(x).__name__, RelposTypeError)
        if axes is not None and len(x.shape) != axes:
            self.refuse(what, f"{axes} axes", f"shape {x.shape}")
        if isinstance(x, np.ndarray) and x.dtype != self.site.dtype:
            wanted = f"dtype {self.site.dtype} of the call, as from .astype(site.dtype)"
            self.refuse(what, wanted, x.dtype, RelposTypeError)

    def rows(self, what: str, table: Any, rows: int, index: Any) -> None:
        """A table for one head or all, with an index map of the call into its rows."""
        site = self.site
        if table.shape[0] not in (1, site.heads):
            self.refuse(what, f"1 or {site.heads} heads first", f"shape {table.shape}")
        if not isinstance(index, Toeplitz | Dense):
            self.refuse("index", "relpos_np.terms.Toeplitz or Dense", type(index).__name__, RelposTypeError)
        if index.rows != rows:
            self.refuse("index", f"the {rows} rows of its table", index.rows)
        if isinstance(index, Toeplitz):
            wanted: tuple[int, ...] = (site.q_len + site.k_len - 1 if site.q_len and site.k_len else 0,)
            fits = index.lookup.shape == wanted
        else:
            wanted = (*site.batch, site.q_len, site.k_len)
            fits = index.shape[-2:] == wanted[-2:] and _broadcasts(index.shape[:-2], site.batch)
        if not fits:
            found = index.lookup.shape if isinstance(index, Toeplitz) else index.shape
            self.refuse("index", f"shape {wanted}", found)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether arrays of a shape broadcast to another one without making it larger."""
    return len(shape) <= len(target) and all(n in (1, size) for n, size in zip(shape[::-1], target[::-1], strict=False))


def checked_lift(scheme: Scheme, share: Any, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> SchemeGradient:
    """What a scheme's `lift` returned, once it fits the operands and the scheme's arrays."""
    if is_registered(type(scheme)):
        return share  # type: ignore[no-any-return]
    name = f"position: {type(scheme).__name__}.lift"
    if not isinstance(share, SchemeGradient):
        raise RelposTypeError(f"{name}: expected relpos_np.terms.SchemeGradient, found {type(share).__name__}")
    for what, x, shape in (("q", share.q, shapes[0]), ("k", share.k, shapes[1])):
        if x is not None and tuple(x.shape) != shape:
            raise RelposValueError(f"{name}: {what}: expected shape {shape}, found {x.shape}")
    for what, x in share.arrays.items():
        own = getattr(scheme, what, None)
        if not isinstance(own, np.ndarray):
            raise RelposTypeError(f"{name}: arrays: {what!r} is no array that the scheme keeps as an attribute")
        if np.shape(x) != own.shape:
            raise RelposValueError(f"{name}: arrays: {what!r}: expected shape {own.shape}, found {np.shape(x)}")
    return share
