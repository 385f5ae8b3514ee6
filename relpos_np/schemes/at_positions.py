r"""Positions that are given, for any scheme of distances: tokens that do not stand one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.placed import Placed
from relpos_np._contract.problem import UNBOUNDED
from relpos_np._contract.terms import IndexMap, Terms, with_maps
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.formulas.softmax import weighted_vectors
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, register
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.positioned import Positioned
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.t5 import T5
from relpos_np.types import Array, Int64

# Distances between the smallest and the largest: rows that a table of all of them has.
_LARGEST_SPAN = 1 << 24
# Pairs of one distance that the formula is evaluated for at once.
_PAIRS = 1 << 12


def given_distances(positions: Array, key_positions: Array) -> Int64:
    r"""The distance of every pair.

    .. math::

        d_{ij} = t_j - s_i

    Parameters
    ----------
    positions : ndarray of int, shape (..., L_q)
        Positions s of the queries.
    key_positions : ndarray of int, shape (..., L_k)
        Positions t of the keys.

    Returns
    -------
    ndarray of int64, shape (..., L_q, L_k)
        Negative for keys that stand before the query.
    """
    return np.asarray(key_positions, np.int64)[..., None, :] - np.asarray(positions, np.int64)[..., :, None]


class AtPositions(Positioned):
    r"""A scheme of distances, for queries and keys whose positions are given.

    With positions :math:`s_i` of queries and :math:`t_j` of keys, what the scheme adds for a distance
    :math:`j - i - M` it adds for

    .. math::

        d_{ij} = t_j - s_i .

    Positions may repeat, leave gaps and run in any order, and differ between batch items: trees of tokens in
    speculative decoding, sequences that are packed with position ids of their own, keys that were evicted from a cache,
    left padding. Masks still go by where tokens lie: `causal`, `window` and rules count rows, not positions.

    Schemes that turn vectors take `positions` themselves: `Rotary`, `XPos`, `PoPE`, `LieRE`; so does `LayoutBias`.

    Parameters
    ----------
    scheme : ALiBi, DeBERTa, KERPLE, Sandwich, Shaw, T5, TISA or a relative scheme of one's own
        What is added for a distance. Of `ALiBi` the symmetric and the causal form.
    positions : ndarray of int, shape (..., L_k), or (..., L_q) with `key_positions`
        Positions s, in each batch item or in all of them. Alone they are those of the keys, of which the queries are
        some, as `offset` says.
    key_positions : ndarray of int, shape (..., L_k), optional
        Positions t.

    Raises
    ------
    RelposError
        If the scheme does not go by distances alone, positions are no integers or do not fit the call, or distances
        differ by more than 2**24.

    Notes
    -----
    Where positions rise by 1 from token to token, the call is as fast as one without them, and takes no more memory.
    Otherwise an index map says which distance each pair of query and key has, for all heads at once. The CPU kernels
    make it for some queries at a time, so that nothing they hold grows with the number of pairs; all other backends
    make all of it, 4 bytes for each pair.

    References
    ----------
    Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
    Verification", ASPLOS 2024, doi:10.1145/3620666.3651335, where the tokens of a tree stand as deep as they grow.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 6, 64))
    >>> depth = np.array([0, 1, 2, 2, 3, 3])  # a tree: tokens 2 and 3 follow token 1
    >>> sees = np.tri(6, dtype=bool)
    >>> sees[3, 2] = sees[4, 3] = sees[5, 2] = sees[5, 4] = False
    >>> rp.attention(q, k, v, position=rp.AtPositions(rp.ALiBi(), depth), mask=sees).shape
    (2, 8, 6, 64)
    """

    reads_operand_values = False

    def __init__(self, scheme: Scheme, positions: Any, key_positions: Any = None) -> None:
        given: Any = scheme
        if not isinstance(given, Scheme) or not (given.relative and given.covers):
            raise RelposTypeError(
                f"scheme: expected one that goes by distances alone, such as ALiBi or T5, found {shown(scheme)}"
            )
        self.scheme = scheme
        self._place(positions, key_positions)
        if self.positions is None:
            raise RelposTypeError("positions: expected an array of integers, found None")
        self.positions = _integers("positions", self.positions)
        if self.key_positions is not None:
            self.key_positions = _integers("key_positions", self.key_positions)

    def check(self, site: Site) -> None:
        """There must be a position for each token, and what the scheme needs."""
        self._check_places(site)
        line = self._line(site)
        if line.k_len > _LARGEST_SPAN:
            raise RelposValueError(f"positions: distances differ by {line.k_len - 1}, more than {_LARGEST_SPAN}")
        self.scheme.check(line)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """What the scheme adds for each distance, pairs of one distance at a time."""
        out = np.zeros((*site.batch, site.heads, site.q_len, site.k_len), site.dtype)
        for item, d in self._distances_of_items(site):
            for distance, i, j in _pairs_by_distance(d):
                pair = replace(site, q_len=1, k_len=1, offset=-distance, right=UNBOUNDED, batch=(len(i),))
                queries, keys = (np.moveaxis(x[item][:, at], 1, 0)[:, :, None] for x, at in ((q, i), (k, j)))
                added = self.scheme.scores(queries, keys, pair)
                if added is not None:
                    out[item][:, i, j] = np.broadcast_to(added, (len(i), site.heads, 1, 1))[..., 0, 0].T
        return out

    def outputs(self, p: Array, site: Site) -> Array | None:
        """The vectors that belong to distances, weighted."""
        alone = replace(site, q_len=1, k_len=1, right=UNBOUNDED, batch=())
        certain = np.ones((site.heads, 1, 1), site.dtype)
        if self.scheme.outputs(certain, alone) is None:
            return None
        out = np.zeros((*site.batch, site.heads, site.q_len, site.v_dim), site.dtype)
        for item, d in self._distances_of_items(site):
            each, row = np.unique(d, return_inverse=True)
            vectors = np.zeros((site.heads, len(each), site.v_dim), site.dtype)
            for n, distance in enumerate(each):
                vectors[:, n] = self.scheme.outputs(certain, replace(alone, offset=-int(distance)))[:, 0]  # type: ignore[index]
            out[item] = weighted_vectors(p[item], vectors[:, row.reshape(d.shape)])
        return out

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The terms of all distances, and which of them each pair has."""
        shifted = self._shifted(site)
        if shifted is not None:
            return self.scheme.lower(q, k, shifted)
        line = self._line(site)
        terms = self.scheme.lower(q, k, line)
        if terms.biases or terms.changes:
            raise RelposTypeError(f"position: the terms of {shown(self.scheme)} are no tables, which AtPositions needs")
        at_query, at_key = (np.asarray(x, np.int64) for x in self._stand(site))
        at_query = at_query - line.offset

        def placed(index: IndexMap) -> Placed:
            return Placed(index.dense(1, line.k_len)[0], index.rows, at_query, at_key)

        return with_maps(terms, placed)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """That of the scheme: its tables have the same rows whatever the map."""
        found = self.scheme.lift(q, k, self._shifted(site) or self._line(site), grad)
        return replace(found, arrays={f"scheme.{name}": x for name, x in found.arrays.items()})

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Positions of the queries and of the keys."""
        return (self._with(**self._cut_places(site, part)), *part.nearby(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The scheme's terms of all distances, and in the formula distances and pairs of one of them."""
        line, pairs, itemsize = self._line(site), site.q_len * site.k_len, site.dtype.itemsize
        group = min(_PAIRS, pairs) * site.heads * (2 * site.head_dim + 8) * itemsize
        vectors = 0 if site.scores_only else 2 * site.heads * (pairs + line.k_len) * site.v_dim * itemsize
        results = math.prod(site.batch) * site.heads * (site.q_len * site.v_dim + 2 * pairs) * itemsize
        shifted = self._shifted(site)
        counted = self.scheme.memory_bound(shifted or site)
        formula = counted.formula + 64 * pairs + group + vectors + results
        if shifted is not None:
            return replace(counted, formula=formula)
        of_line, rows = self.scheme.memory_bound(line), line.k_len * (64 + 24 * site.heads)
        places = 8 * sum(x.size for x in self._stand(site))
        return MemoryBound(formula, of_line.lower + rows + 3 * places, of_line.lift + rows)

    def _line(self, site: Site) -> Site:
        """One query, and a key at each distance from the smallest to the largest."""
        at_query, at_key = self._stand(site)
        if not at_query.size or not at_key.size:
            return replace(site, q_len=1, k_len=0, offset=0, right=UNBOUNDED)
        first = int((at_key.min(axis=-1) - at_query.max(axis=-1)).min())
        last = int((at_key.max(axis=-1) - at_query.min(axis=-1)).max())
        return replace(site, q_len=1, k_len=last - first + 1, offset=-first, right=UNBOUNDED)

    def _shifted(self, site: Site) -> Site | None:
        """The call with another offset, if that is all that positions change."""
        at_query, at_key = self._stand(site)
        if not at_query.size or not at_key.size:
            return site
        starts = np.asarray(at_query[..., 0] - at_key[..., 0])
        counted = [x - x[..., :1] == np.arange(x.shape[-1]) for x in (at_query, at_key)]
        if not all(x.all() for x in counted) or (starts != starts.flat[0]).any():
            return None
        return replace(site, offset=int(starts.flat[0]), right=UNBOUNDED)

    def _distances_of_items(self, site: Site) -> Iterator[tuple[tuple[int, ...], Int64]]:
        """The index of each batch item, and its distances (L_q, L_k)."""
        at_query, at_key = (np.broadcast_to(x, (*site.batch, x.shape[-1])) for x in self._stand(site))
        for item in np.ndindex(site.batch):
            yield item, given_distances(at_query[item], at_key[item])


def _integers(name: str, x: Array) -> Int64:
    """Positions as they are counted."""
    if (x != np.floor(x)).any() or (np.abs(x) > 2**31).any():
        wrong = x[(x != np.floor(x)) | (np.abs(x) > 2**31)].flat[0]
        raise RelposValueError(f"{name}: expected integers up to 2**31, found {wrong}")
    whole: Int64 = x.astype(np.int64)
    whole.flags.writeable = False
    return whole


def _pairs_by_distance(d: Int64) -> Iterator[tuple[int, Int64, Int64]]:
    """Each distance with queries and keys that have it, not too many at once."""
    order = np.argsort(d, axis=None, kind="stable")
    of_pair = d.ravel()[order]
    for same in np.split(order, np.flatnonzero(np.diff(of_pair)) + 1):
        for first in range(0, len(same), _PAIRS):
            some = same[first : first + _PAIRS]
            yield int(d.flat[some[0]]), some // d.shape[1], some % d.shape[1]


@register(
    "at_positions",
    AtPositions,
    adds="what another scheme adds, for distances between given positions",
    paper="Miao et al., ASPLOS 2024",
    doi="10.1145/3620666.3651335",
    options="around a scheme of distances",
    models="speculative decoding, packed position ids",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads = parts["q"].shape[-3]
    kind = at.pick("shaw", "t5", "alibi", "kerple")
    if kind == "shaw":
        scheme: Scheme = Shaw(at.normal(9, at.dim), at.normal(9, at.v_dim))
    elif kind == "t5":
        scheme = T5(at.normal(8, heads), max_distance=20)
    elif kind == "kerple":
        scheme = KERPLE(np.abs(at.normal(heads)), np.abs(at.normal(heads)))
    else:
        scheme = ALiBi(np.abs(at.normal(heads)), form="causal")
    places = np.floor(at.normal(*at.batch, at.k_len).astype(np.float64) * 12).astype(np.int64)
    of = at.pick("keys", "both", "counted")
    if of == "keys":
        return {**parts, "position": AtPositions(scheme, places[(0,) * len(at.batch)])}
    first = places[(0,) * (len(at.batch) + 1)] if places.size else 0
    queries = np.arange(at.q_len) + first if of == "counted" else places[..., :1] + np.arange(at.q_len)[::-1] // 2
    return {**parts, "position": AtPositions(scheme, queries, np.arange(at.k_len) if of == "counted" else places)}
