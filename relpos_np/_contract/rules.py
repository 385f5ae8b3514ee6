"""Rules that say which keys a query may attend from their places alone, without an array of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.problem import UNBOUNDED, Rule, Site
from relpos_np.errors import RelposValueError
from relpos_np.types import Int64


def _places(site: Site) -> Int64:
    """Where each query stands among the keys."""
    return np.arange(site.q_len, dtype=np.int64) + site.offset


class Chunked(Rule):
    r"""Attention within chunks: positions are cut into chunks of equal size, counted from position 0.

    Query i at position :math:`n = i + \text{offset}` may attend key j if

    .. math::

        -\text{left} \le \lfloor j / c \rfloor - \lfloor n / c \rfloor \le \text{right}

    Parameters
    ----------
    size : int
        Positions per chunk, c.
    left, right : int or None
        How many chunks before and after its own a query may look into; None is all of them.

    Raises
    ------
    RelposError
        If a number is not an integer, or is too small.

    Notes
    -----
    With ``causal=True`` and ``left=0`` it is the chunked attention of Llama 4's local layers; with ``left=n`` and
    ``right=0`` that of streaming Conformers (WeNet's and NeMo's "chunked_limited"), which see all of their own chunk.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> s = rp.logits(np.zeros((1, 4, 2)), np.zeros((1, 4, 2)), rule=rp.Chunked(2), causal=True)
    >>> (s[0] == 0).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    def __init__(self, size: int, left: int | None = 0, right: int | None = 0) -> None:
        self.size = check.integer("size", size, 1)
        self.left = None if left is None else check.integer("left", left, 0)
        self.right = None if right is None else check.integer("right", right, 0)
        if self.size >= UNBOUNDED >> 1:
            raise RelposValueError(f"size: {self.size} is too large")

    def ranges(self, site: Site) -> Int64:
        """The chunks around each query's own."""
        own = _places(site) // self.size
        # No chunk is further away than there are positions.
        first, last = int(own.min(initial=0)), int(own.max(initial=0))
        most = max(site.k_len // self.size + 1 - min(first, 0), last + 1)
        left, right = (most if n is None else min(n, most) for n in (self.left, self.right))
        return np.stack([(own - left) * self.size, (own + right + 1) * self.size], axis=-1)

    def __repr__(self) -> str:
        return f"Chunked({self.size}, left={self.left}, right={self.right})"


class Prefix(Rule):
    r"""A prefix that all may attend, and causal attention beyond it.

    Query i at position :math:`n = i + \text{offset}` may attend key j if :math:`j < P` or :math:`j \le n`.

    Parameters
    ----------
    lengths : int or ndarray of int
        Length P of the prefix, of each batch item.

    Raises
    ------
    RelposError
        If lengths are no integers or negative; in a call, if they do not broadcast to its batch axes, or if `causal`
        is set beside the rule, which would hide the prefix again.

    Notes
    -----
    The mask of prefix language models: T5's and UL2's prefix variant, PaliGemma, GLM's first version.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> s = rp.logits(np.zeros((1, 3, 2)), np.zeros((1, 3, 2)), rule=rp.Prefix(2))
    >>> (s[0] == 0).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    causal = True

    def __init__(self, lengths: Any) -> None:
        self.lengths = check.integers("lengths", lengths).astype(np.int64)
        if self.lengths.size and self.lengths.min() < 0:
            raise RelposValueError(f"lengths: expected at least 0, found {self.lengths.min()}")

    def ranges(self, site: Site) -> Int64:
        """From the first key to the last of the prefix, or to the query's own."""
        check.fits_batch("rule", self.lengths.shape, site.batch)
        stop = np.maximum(np.minimum(self.lengths, site.k_len)[..., None], _places(site) + 1)
        return np.stack([np.zeros_like(stop), stop], axis=-1)

    def of_items(self, items: tuple[slice, ...]) -> Prefix:
        """Lengths of these items."""
        own = items[len(items) - self.lengths.ndim :]
        index = tuple(slice(None) if n == 1 else s for n, s in zip(self.lengths.shape, own, strict=True))
        return Prefix(self.lengths[index])

    def __repr__(self) -> str:
        return f"Prefix({self.lengths.tolist()})"


class Dilated(Rule):
    r"""Keys at every so many positions: query i may attend key j if :math:`j - i - \text{offset}` is a multiple of s.

    Parameters
    ----------
    step : int
        The distance s between attended keys.

    Raises
    ------
    RelposError
        If it is not a positive integer.

    Notes
    -----
    The dilated windows of Longformer (Beltagy et al., 2020) and the strided pattern of sparse Transformers (Child et
    al., 2019), with `window`. All products are computed: the rule saves memory and no time.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> s = rp.logits(np.zeros((1, 3, 2)), np.zeros((1, 3, 2)), rule=rp.Dilated(2))
    >>> (s[0] == 0).astype(int).tolist()
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """

    def __init__(self, step: int) -> None:
        self.step = check.integer("step", step, 1)
        if self.step >= UNBOUNDED >> 1:
            raise RelposValueError(f"step: {self.step} is too large")

    def __repr__(self) -> str:
        return f"Dilated({self.step})"
