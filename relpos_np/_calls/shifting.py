"""`rel_shift`: from products with distances to products of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import memory_bounds, on_device
from relpos_np._contract import check, outputs
from relpos_np._runtime import memory, results
from relpos_np.formulas import relshift
from relpos_np.types import Array, Backend, Shift

_REL_SHIFT = memory.Named("rel_shift")


def rel_shift(
    x: Array, *, variant: Shift = "transformer_xl", backend: Backend | None = None, out: Array | None = None
) -> Array:
    r"""Move row i of products with distances so that column j holds the one of query i and key j.

    With M = L_k - L_q and columns by descending distance, the general form is

    .. math::

        y_{ij} = x_{i,\, L_q - 1 - i + j}, \qquad \text{distance } i + M - j .

    Parameters
    ----------
    x : ndarray, shape (..., L_q, columns)
        Any float, integer or complex dtype.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        - "conformer": the general form; columns = L_q + L_k - 1, distances L_k-1 ... -(L_q-1).
        - "xlnet": columns = L_q + L_k, distances from L_k down: :math:`y_{ij} = x_{i,\, L_q - i + j}`.
        - "transformer_xl": columns = L_k, distances L_k-1 ... 0. The general form for j <= i + M, then
          0 at j = i + M + 1, then :math:`x_{i+1,\, j-i-M-2}`, which belongs to the next query and
          is normally hidden by a causal mask.
        - "espnet_legacy": the same arithmetic, used without a causal mask.
        - "wenet": no shift; columns are key positions.
        - "xlnet_uni": columns = L_k + 1, distances from L_k down to 0. As "xlnet" for j <= i + M, then
          :math:`x_{i+1,\, j-i-M-1}`, without a 0 between.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        In NumPy the general form is a read-only view without a copy; Numba copies in parallel; CUDA copies to
        the device and back, unless x is an array on the device: then the result is one too.
    out : ndarray, optional
        Where to write the result: its exact shape and dtype, not overlapping x. Allocating a large array takes
        longer than filling it.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        Shifted products, in the dtype of x.

    Raises
    ------
    RelposValueError
        If the number of columns cannot belong to the variant, or `out` does not fit.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019,
    appendix B.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> distances = np.tile([2, 1, 0, -1, -2], (3, 1))  # what stands in each column, for three queries
    >>> rp.rel_shift(distances, variant="conformer")
    array([[ 0, -1, -2],
           [ 1,  0, -1],
           [ 2,  1,  0]])
    """
    if type(x) is not np.ndarray and check.on_device(x):
        there: Array = on_device.rel_shift({"x": x}, backend, variant, out)
        return there
    x = check.array("x", x)
    shape, dtype = relshift.checked(x, variant), x.dtype.newbyteorder("=")
    if out is not None:
        outputs.check(out, shape, dtype, (x,))
    name = _backend.current(backend)
    kernels = name in _backend.WITH_KERNELS and variant not in relshift.UNMOVED
    if memory.limit() is not None:
        memory_bounds.shifted(x, shape, variant, kernels, out)
    with _REL_SHIFT:
        return _shifted(x, shape, dtype, variant, name if kernels else None, out)


def _shifted(
    x: Array, shape: tuple[int, ...], dtype: np.dtype[Any], variant: Shift, name: str | None, out: Array | None
) -> Array:
    """The shift on a backend with kernels, or in NumPy if `name` is None."""
    if name is None:
        shifted = relshift.rel_shift(x, variant)
        if out is None:
            return shifted
        out[...] = shifted
        return out
    target, used = (out, True) if out is not None and out.flags.c_contiguous else results.empty(shape, dtype)
    _backend.kernels(name).rel_shift(x, target, variant, used=used)
    if out is None or out is target:
        return target
    out[...] = target
    return out
