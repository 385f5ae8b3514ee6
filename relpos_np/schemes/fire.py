r"""FIRE: a small network of the distance, which is measured against how far the query has come."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import difference_map, relative_positions
from relpos_np._contract.terms import TableTerm, Terms
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, evaluated, register
from relpos_np.types import Array

# Hidden activations that are held at a time while the bias of every pair is computed.
_BLOCK = 1 << 21


def fire_bias(
    w1: Array,
    b1: Array,
    w2: Array,
    b2: Array,
    c: Any,
    threshold: Any,
    q_len: int,
    k_len: int,
    *,
    offset: int = 0,
    eps: float = 0.0,
) -> Array:
    r"""The bias of every pair, written out.

    .. math::

        x_{ij} = \frac{\psi(|t_i - j|)}{\psi(\max(L, t_i)) + \epsilon}, \qquad \psi(n) = \ln(c n + 1), \qquad
        B_{ij} = W_2 \max(0, W_1 x_{ij} + b_1) + b_2

    with the query's position :math:`t_i = i + M`.

    Parameters
    ----------
    w1, b1 : ndarray, shape (E,)
        The hidden layer; w1 also (E, 1).
    w2, b2 : ndarray, shapes (H, E) and (H,)
        The output layer.
    c, threshold : float
        c and L.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position M of the first query among the keys.
    eps : float
        Added to the denominator.

    Returns
    -------
    ndarray of float64, shape (H, L_q, L_k)
        To be added to the scores. The computation holds E times as much.
    """
    w1, b1, w2, b2 = (np.asarray(x, np.float64) for x in (w1, b1, w2, b2))
    t, j = np.arange(q_len)[:, None] + offset, np.arange(k_len)[None, :]
    x = np.log1p(c * np.abs(t - j)) / (np.log1p(c * np.maximum(threshold, t)) + eps)
    hidden = np.maximum(0.0, x[..., None] * w1.reshape(-1) + b1)
    return np.asarray(np.moveaxis(hidden @ w2.T + b2, -1, 0))


def _scalar(name: str, value: Any) -> Array:
    """A positive number as an array of its shape, so that it has a dtype and a gradient of that shape."""
    x = check.floating(name, value) if isinstance(value, np.ndarray) else np.asarray(check.real(name, value))
    if x.size != 1:
        raise RelposValueError(f"{name}: expected one number, found shape {x.shape}")
    if not (np.isfinite(x.item()) and x.item() > 0):
        raise RelposValueError(f"{name}: expected a positive number, found {x.item()}")
    x = x.copy()
    x.flags.writeable = False
    return x


class FIRE(Scheme):
    r"""Functional interpolation of relative positions.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j
                 + f_h\!\left(\frac{\psi(|t_i - j|)}{\psi(\max(L, t_i)) + \epsilon}\right), \qquad
        \psi(n) = \ln(c n + 1)

    where f is a network with one hidden layer of ReLU and an output per head, and the query's position
    :math:`t_i = i + M` counts from 0. The bias is not multiplied by the scale.

    The paper defines it for keys up to the query's, j <= t; later keys get the bias of their distance's
    size, as in the code of its appendix, and :math:`\epsilon = 0`. That code has ``eps=1e-6``, and takes
    the sizes of its parameters: pass \|c\|, and as `threshold` the size of its ``init_L * L_multiplier``
    (the gradient of the multiplier is ``init_L`` times this one's). Its random positions while training
    are not here.

    If no query stands beyond L, the bias depends on the distance alone and takes memory of L_q + L_k;
    otherwise of L_q L_k per head.

    Parameters
    ----------
    w1 : ndarray, shape (E,) or (E, 1)
        Weights of the hidden layer; 32 units in the paper.
    b1 : ndarray, shape (E,)
        Its biases.
    w2 : ndarray, shape (H, E)
        Weights of the output layer.
    b2 : ndarray, shape (H,)
        Its biases.
    c : float or ndarray of one element
        The paper's c > 0; initially 0.1.
    threshold : float or ndarray of one element
        The paper's L > 0, in positions; initially 512. At :math:`t_i = L` the gradient goes to L.
    eps : float
        :math:`\epsilon \ge 0`, see above.

    Raises
    ------
    RelposError
        If shapes do not fit, c, threshold or eps lies outside its range, or the call has another number of heads.

    References
    ----------
    Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers", ICLR 2024.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> w1, b1, w2, b2 = (rng.standard_normal(n) for n in (32, 32, (8, 32), 8))
    >>> position = rp.FIRE(w1, b1, w2, b2, c=np.array(0.1), threshold=np.array(512.0))
    >>> rp.attention(q, k, v, position=position, causal=True).shape
    (2, 8, 10, 64)
    """

    reads_operand_values = False
    token_independent = True

    def __init__(self, w1: Any, b1: Any, w2: Any, b2: Any, c: Any, threshold: Any, *, eps: float = 0.0) -> None:
        self.w1 = check.table("w1", w1, "hidden | hidden one")
        self.b1 = check.table("b1", b1, "hidden")
        self.w2 = check.table("w2", w2, "heads hidden")
        self.b2 = check.table("b2", b2, "heads")
        self.c, self.threshold = _scalar("c", c), _scalar("threshold", threshold)
        self.eps = check.real("eps", eps)
        # Where the first key stands, in a part of a call.
        self._first_key = 0
        if self.eps < 0:
            raise RelposValueError(f"eps: expected 0 or more, found {eps}")
        heads, hidden = self.w2.shape
        if self.w1.shape not in ((hidden,), (hidden, 1)) or self.b1.shape != (hidden,) or self.b2.shape != (heads,):
            raise RelposValueError(
                f"w1, b1, w2, b2: shapes {self.w1.shape}, {self.b1.shape}, {self.w2.shape} and {self.b2.shape} "
                "are not those of a network: expected (E,), (E,), (H, E) and (H,)"
            )

    def check(self, site: Site) -> None:
        """There must be one output per head."""
        check.heads("w2", self.w2, 0, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        numbers = {"c": self.c.item(), "threshold": self.threshold.item()}
        return np.asarray(evaluated(fire_bias, self, site, **numbers), site.dtype)

    def _blocks(self, site: Site) -> tuple[bool, list[tuple[slice, Array, Array]]]:
        """Whether distances decide alone, and blocks of rows with their distances n and the m that n is held against.

        n has the shape (rows of the Toeplitz lookup,) or (queries, L_k), and m broadcasts to it.
        """
        level, first_key = self.threshold.item(), self._first_key
        if site.offset + first_key + site.q_len - 1 <= level:
            d = relative_positions(site.q_len, site.k_len, site.offset)
            return True, [(slice(None), np.abs(d).astype(np.float64), np.full(1, level))]
        step = max(1, _BLOCK // max(1, site.k_len * self.w1.size))
        blocks = []
        for first in range(0, site.q_len, step):
            at = np.arange(first, min(first + step, site.q_len), dtype=np.float64) + site.offset
            n = np.abs(np.subtract.outer(at, np.arange(site.k_len, dtype=np.float64)))
            blocks.append((slice(first, first + step), n, np.maximum(at + first_key, level)[:, None]))
        return False, blocks

    def _hidden(self, n: Array, m: Array) -> tuple[Array, Array, Array]:
        """Numerator and denominator of the network's input, and the hidden layer before its ReLU: (..., E)."""
        c = self.c.item()
        above, below = np.log1p(c * n), np.log1p(c * m) + self.eps
        w1, b1 = self.w1.reshape(-1).astype(np.float64), self.b1.astype(np.float64)
        return above, below, np.add(np.multiply.outer(above / below, w1), b1)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A table term with a row per relative position, or a bias for every pair."""
        alone, blocks = self._blocks(site)
        shape = (site.heads, site.q_len, site.k_len)
        bias = np.empty((site.heads, len(blocks[0][1])) if alone else shape, site.dtype)
        w2 = self.w2.astype(np.float64)
        for rows, n, m in blocks:
            active = np.maximum(self._hidden(n, m)[2], 0)
            out = np.tensordot(w2, active, axes=(1, -1))
            bias[:, rows] = out + self.b2.astype(np.float64).reshape(-1, *(1,) * n.ndim)
        if alone:
            return Terms(tables=(TableTerm(bias, difference_map(site.q_len, site.k_len)),))
        return Terms(biases=(bias,))

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Places of queries count from the first key of all."""
        return (self._with(_first_key=part.keys.start), *part.nearby(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula has all hidden units of every pair at once, the kernels' side of a block of queries."""
        pairs, hidden = site.q_len * site.k_len, self.w1.size
        blocked = min(pairs, site.k_len + _BLOCK // hidden) * (24 * hidden + 24 * site.heads)
        own = 2 * pairs * site.heads * site.dtype.itemsize
        return MemoryBound(super().memory_bound(site).formula + 16 * hidden * pairs, own + blocked, own + blocked)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Through the network, to its input, to c and L; block by block as in `lower`."""
        alone, blocks = self._blocks(site)
        rows_grad = grad.tables[0].table if alone else grad.biases[0]
        c, level = self.c.item(), self.threshold.item()
        w1, w2 = self.w1.reshape(-1).astype(np.float64), self.w2.astype(np.float64)
        names = ("w1", "b1", "w2", "b2", "c", "threshold")
        total = {name: np.zeros(getattr(self, name).shape) for name in names}
        for rows, n, m in blocks:
            g = rows_grad[:, rows].astype(np.float64)
            above, below, hidden = self._hidden(n, m)
            pairs = tuple(range(n.ndim))
            by_hidden = np.tensordot(g, w2, axes=(0, 0)) * (hidden > 0)
            by_input = by_hidden @ w1
            total["w2"] += np.tensordot(g, np.maximum(hidden, 0), axes=(tuple(a + 1 for a in pairs), pairs))
            total["b2"] += g.sum(axis=tuple(a + 1 for a in pairs))
            total["w1"] += np.tensordot(above / below, by_hidden, axes=(pairs, pairs)).reshape(self.w1.shape)
            total["b1"] += by_hidden.sum(axis=pairs)
            by_below = -by_input * above / below**2
            total["c"] += (by_input / below * n / (1 + c * n)).sum() + (by_below * m / (1 + c * m)).sum()
            total["threshold"] += (by_below * c / (1 + c * m) * (m == level)).sum()
        return SchemeGradient(arrays=total)


@register(
    "fire",
    FIRE,
    adds="a small network of the normalised distance",
    paper="Li et al., ICLR 2024",
    doi="10.48550/arXiv.2310.04418",
    models="FIRE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads = parts["q"].shape[-3]
    # Every hidden unit is active nearby, and some are not farther away.
    w1, b1, w2, b2 = at.normal(8) * 2, np.abs(at.normal(8)), at.normal(heads, 8), at.normal(heads)
    # Some queries stand before the threshold and some beyond it; none on it, where there is no slope.
    far = at.pick(max(at.k_len - at.q_len / 2 - 0.25, 0.75), 0.5, at.k_len + 200.5)
    position = FIRE(w1, b1, w2, b2, *(np.asarray(x, w1.dtype) for x in (0.25, far)), eps=at.pick(0.0, 1e-6, 0.5))
    return {**parts, "position": position, "kwargs": {"causal": True}}
