r"""Inkling's relative logits: every query mixes trained profiles over the distance into a bias of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import clip_map
from relpos_np._contract.terms import QueryTerm, Terms, of_batch
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Part, Sample, Scheme, SchemeGradient, Site, register
from relpos_np.types import Array


@np.errstate(all="ignore")
def relative_logits(relative_states: Array, proj: Array, k_len: int, *, offset: int = 0) -> Array:
    r"""The bias of every pair.

    .. math::

        b_{hij} = \begin{cases} (r_{hi} P)_{i + M - j} & 0 \le i + M - j < E \\ 0 & \text{otherwise} \end{cases}

    Parameters
    ----------
    relative_states : ndarray, shape (..., H, L_q, R)
        Vectors r of the queries.
    proj : ndarray, shape (R, E)
        Profiles P: a column per distance.
    k_len : int
        Number of keys.
    offset : int
        Position M of the first query among the keys.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        To be added to the scores.

    References
    ----------
    Thinking Machines, "Inkling", 2026: the published model.
    """
    extent = proj.shape[-1]
    distance = np.arange(relative_states.shape[-2])[:, None] + offset - np.arange(k_len)
    profiles = relative_states @ proj
    column = np.broadcast_to(np.clip(distance, 0, extent - 1), (*profiles.shape[:-1], k_len))
    inside = (distance >= 0) & (distance < extent)
    return np.where(inside, np.take_along_axis(profiles, column, axis=-1), profiles.dtype.type(0))


class Inkling(Scheme):
    r"""Relative logits of Inkling.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + (r_{hi} P)_{i + M - j} \quad \text{for } 0 \le i + M - j < E

    and nothing is added for later keys and for those further back. The vectors r come from the layer's input by a
    projection of their own (`r_proj` of checkpoints), not from q, and the scale does not act on them.

    Where the model also scales its queries by the logarithm of their position, it scales this bias alike: give the
    factor to the call for the queries, and multiply `relative_states` with it.

    Parameters
    ----------
    relative_states : ndarray, shape (..., H, L_q, R)
        A vector r per query and head, for each batch item; published code has heads after the length.
    proj : ndarray, shape (R, E)
        Profiles P over the distances 0 ... E - 1, one set for all heads: `rel_logits_proj.proj` of checkpoints. E is
        the window in layers with one.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit.

    References
    ----------
    Thinking Machines, "Inkling", 2026: the published model, as transformers has it (`InklingRelativeLogits`).

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> states, proj = rng.standard_normal((2, 8, 10, 16)), rng.standard_normal((16, 512))
    >>> rp.attention(q, k, v, position=rp.Inkling(states, proj), causal=True).shape
    (2, 8, 10, 64)
    """

    reads_operand_values = False

    def __init__(self, relative_states: Any, proj: Any) -> None:
        self.proj = check.table("proj", proj, "channels distances")
        self.relative_states = check.ordered("relative_states", relative_states)
        if self.relative_states.ndim < 3 or self.relative_states.shape[-1] != self.proj.shape[0]:
            raise RelposValueError(
                f"relative_states: expected shape (..., H, L_q, {self.proj.shape[0]}) as proj {self.proj.shape} has "
                f"channels, found {self.relative_states.shape}"
            )

    def check(self, site: Site) -> None:
        """There must be a vector per head and query."""
        states = self.relative_states
        check.heads("relative_states", states, -3, site)
        if states.shape[-2] != site.q_len:
            raise RelposValueError(f"relative_states: shape {states.shape} is not (..., H, L_q = {site.q_len}, R)")
        check.fits_batch("relative_states", states.shape[:-3], site.batch)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        states, proj = (x.astype(site.dtype, copy=False) for x in (self.relative_states, self.proj))
        return relative_logits(states, proj, site.k_len, offset=site.offset)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A query term with a query of its own; rows by descending distance, as the map counts them."""
        last = self.proj.shape[1] - 1
        index = clip_map(site.q_len, site.k_len, site.offset, last, "zero", 0)
        states = self.relative_states.astype(site.dtype, copy=False)
        weights = self.proj.T[None, ::-1].astype(site.dtype, copy=False)
        return Terms(queries=(QueryTerm(states, weights, index),), relative_error_ulps=0.0)

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Vectors of the queries."""
        states = of_batch(self.relative_states, 3, part.batch)[..., part.queries, :]
        return (self._with(relative_states=states), *part.nearby(site))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Rows by ascending distance again."""
        term = grad.queries[0]
        return SchemeGradient(arrays={"relative_states": term.query, "proj": term.weights[0, ::-1].T})


@register(
    "inkling",
    Inkling,
    adds="profiles over the distance that each query mixes",
    paper="Thinking Machines, 2026",
    doi="",
    models="Inkling",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    channels, extent = at.pick((6, 19), (16, 1), (1, 64))
    states = at.normal(*at.pick(at.batch, ()), parts["q"].shape[-3], at.q_len, channels)
    return {**parts, "position": Inkling(states, at.normal(channels, extent)), "kwargs": {"causal": True}}
