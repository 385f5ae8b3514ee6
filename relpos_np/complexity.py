r"""What layers cost: orders of growth from the literature, and exact counts for this library's attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Terms
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme

__all__ = ["Complexity", "attention_operations", "complexity"]

LAYERS = ("convolution", "recurrent", "self_attention")


class Complexity(NamedTuple):
    """Leading terms without their constant factors; see `complexity`.

    Attributes
    ----------
    operations, sequential, path : int
        The term inside each O(...), with n / k rounded up.
    """

    operations: int
    sequential: int
    path: int


def complexity(layer: str, *, n: int, d: int, k: int | None = None) -> Complexity:
    r"""How a layer that maps n vectors of d dimensions to as many grows.

    ==============  ==================  ====================  ====================
    layer           operations          sequential            longest path
    ==============  ==================  ====================  ====================
    convolution     :math:`O(k n d^2)`  :math:`O(1)`          :math:`O(n / k)`
    recurrent       :math:`O(n d^2)`    :math:`O(n)`          :math:`O(n)`
    self_attention  :math:`O(n^2 d)`    :math:`O(1)`          :math:`O(1)`
    ==============  ==================  ====================  ====================

    "Sequential" counts operations that must wait for each other, and the path is the number of layers or steps
    between the two positions farthest apart. A stack of dilated convolutions has a path of
    :math:`O(\log_k n)`, which is not what is returned here.

    Parameters
    ----------
    layer : {"convolution", "recurrent", "self_attention"}
        Kind of layer.
    n : int
        Length of the sequence.
    d : int
        Dimensions of each vector, the same for inputs and outputs.
    k : int, optional
        Width of the convolution's kernel; for "convolution" only.

    Returns
    -------
    Complexity
        The three terms.

    Raises
    ------
    RelposValueError
        If `layer` is unknown, a size is below 1, or `k` is missing or has no meaning.
    RelposTypeError
        If a size is no integer.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, table 1.
    """
    check.choice("layer", layer, LAYERS)
    n, d = check.integer("n", n, 1), check.integer("d", d, 1)
    if layer == "convolution":
        if k is None:
            raise RelposValueError("k: a convolution needs the width of its kernel")
        k = check.integer("k", k, 1)
        return Complexity(k * n * d * d, 1, -(-n // k))
    if k is not None:
        raise RelposValueError(f"k: {layer!r} has no kernel, found {k}")
    return Complexity(n * d * d, n, n) if layer == "recurrent" else Complexity(n * n * d, 1, 1)


def attention_operations(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    head_dim: int,
    v_dim: int,
    *,
    scheme: Scheme | tuple[Scheme, ...] | None = None,
    causal: bool = False,
) -> int:
    r"""Floating-point operations of one call of `relpos_np.attention`.

    With P the pairs of query and key that may attend each other, :math:`L_q L_k` unless causal, and E the length
    of the vectors in the content product (D, unless the scheme makes them longer),

    .. math::

        B H \Big[ 2 P (E + D_v) + \sum_{\text{tables}} P
        + \sum_{\text{query}} (2 L_q R E_t + P) + \sum_{\text{key}} (2 L_k R E_t + P)
        + \sum_{\text{value}} (2 L_q R D_v + P) \Big]

    where the sums run over the terms to which the scheme is lowered, each with a table of R rows of length
    :math:`E_t`. A multiplication and the addition after it count 2, and a number picked from a table
    and added counts 1 per pair. Exponentials, divisions, masks and what prepares the terms are not counted; nor
    is it subtracted that a kernel may leave out rows of a table that no pair of a block needs.

    Parameters
    ----------
    batch, heads : int
        Number of batch items B and of heads H.
    q_len, k_len : int
        Number of queries L_q and of keys L_k; the queries are the last positions.
    head_dim, v_dim : int
        Dimensions D of queries and keys and D_v of values.
    scheme : scheme or tuple of schemes, optional
        As in ``position=``.
    causal : bool
        Whether keys after the query are left out.

    Returns
    -------
    int
        Number of operations.

    Raises
    ------
    RelposValueError
        If a size is negative, `heads` or `head_dim` is 0, or the scheme does not fit them.
    RelposTypeError
        If a size is no integer, or `scheme` no scheme.
    """
    sizes = {"batch": batch, "q_len": q_len, "k_len": k_len, "v_dim": v_dim}
    batch, q_len, k_len, v_dim = (check.integer(name, size, 0) for name, size in sizes.items())
    heads, head_dim = check.integer("heads", heads, 1), check.integer("head_dim", head_dim, 1)
    pairs = q_len * k_len
    if check.flag("causal", causal):
        pairs = int(np.clip(np.arange(q_len) + (k_len - q_len) + 1, 0, k_len).sum())
    schemes = () if scheme is None else scheme if isinstance(scheme, tuple) else (scheme,)
    terms = Terms()
    if schemes:
        # One number seen at every place: the scheme's shapes are wanted, not its values.
        zero = np.zeros((), np.float32)
        q, k, v = (
            np.broadcast_to(zero, (heads, *shape)) for shape in ((q_len, head_dim), (k_len, head_dim), (k_len, v_dim))
        )
        site = check.problem(q, k, v, causal=causal)[0].site
        for one in schemes:
            if not isinstance(one, Scheme):
                raise RelposTypeError(f"scheme: expected a scheme such as relpos_np.T5, found {type(one).__name__}")
            one.check(site)
            with np.errstate(all="ignore"):
                terms = terms + one.lower(q, k, site)
    content = head_dim if terms.query is None else terms.query.shape[-1]
    total = 2 * pairs * (content + v_dim) + pairs * len(terms.tables)
    for length, added in ((q_len, terms.queries), (k_len, terms.keys), (q_len, terms.values)):
        for term in added:
            rows, depth = term.weights.shape[-2:]
            total += 2 * length * rows * depth + pairs
    return batch * heads * total
