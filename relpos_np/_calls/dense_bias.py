"""A bias that another package has written out, one number per pair, as a scheme with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._calls import on_device
from relpos_np._calls.lowering import schemes_of
from relpos_np._calls.packed import is_packed
from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import Options
from relpos_np._contract.problem import Site
from relpos_np._contract.terms import Terms
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Position, Scheme, SchemeGradient
from relpos_np.types import Array


class DenseBias(Scheme):
    """A float mask that has a gradient: added to the scores, and -inf excludes a key.

    Parameters
    ----------
    bias : ndarray, broadcast to (..., H, L_q, L_k)
        One number per pair; axes of length 1 are not written out.

    Raises
    ------
    RelposValueError
        If it does not broadcast to the scores of the call.
    """

    reads_operand_values = False

    def __init__(self, bias: Any) -> None:
        self.bias = check.floating("bias", bias)

    def check(self, site: Site) -> None:
        """The bias must broadcast to the scores."""
        shape = (*site.batch, site.heads, site.q_len, site.k_len)
        try:
            fits = np.broadcast_shapes(self.bias.shape, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise RelposValueError(f"mask: shape {self.bias.shape} does not broadcast to (..., H, L_q, L_k) = {shape}")

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias as it is."""
        return self.bias.astype(site.dtype, copy=False)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One dense bias."""
        return Terms(biases=(self._all_axes(site),))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """The gradient of the bias, in its shape."""
        return SchemeGradient(arrays={"bias": grad.biases[0].reshape(self.bias.shape)})

    def _all_axes(self, site: Site) -> Array:
        """The bias with all axes of the scores, some of which may have length 1."""
        missing = len(site.batch) + 3 - self.bias.ndim
        return self.bias.astype(site.dtype, copy=False).reshape((1,) * missing + self.bias.shape)


def cap_beside_bias(name: str, given: Options, schemes: Sequence[Any]) -> str:
    """The order of the cap in a call whose float mask is one more scheme, a `DenseBias`, beside others.

    Parameters
    ----------
    name : str
        The argument that asks for the gradient of the mask.
    given : mapping
        All options of the call.
    schemes : sequence
        The others, or of schemes that hold tensors what has their class as `cls`.

    Returns
    -------
    {"scores", "content"}
        The order that leaves the mask outside of the cap, as it is in the call.

    Raises
    ------
    RelposValueError
        If there is none, if a scheme changes the scores before the mask is added, or if the call is several.
    """
    for scheme in schemes:
        cls = getattr(scheme, "cls", type(scheme))
        if getattr(cls, "change", Scheme.change) is not Scheme.change:
            raise RelposValueError(
                f"{name}: no gradient of a float mask beside {cls.__name__}, which comes before masks"
            )
    if is_packed(given):
        raise RelposValueError(f"{name}: no gradient of a float mask with segments or offsets of items")
    order: str = given["cap_order"]
    if given["softcap"] is None or order != "scores":
        return order
    if schemes:
        raise RelposValueError(
            f"{name}: no gradient where a cap is for what positions add, but not for the mask; "
            'cap_order="content" has both outside'
        )
    return "content"


def with_mask_gradient(
    compute: Callable[..., AttentionGradient],
    operands: tuple[Any, Any, Any],
    grad_out: Any,
    grad_lse: Any,
    position: Position,
    given: Options,
) -> AttentionGradient:
    """`compute`, which is `attention_vjp`, of a call whose mask is one more scheme: a bias with a number per pair."""
    there = check.on_device(operands[0]) and check.on_device(given["mask"])
    mask = on_device.fetched("mask", given["mask"]) if there else check.array("mask", given["mask"])
    if mask.dtype.kind != "f" and mask.dtype.name != "bfloat16":
        raise RelposTypeError(f"mask_gradient: expected a float mask, found dtype {mask.dtype}")
    schemes = schemes_of(position)
    own: Any = {**given, "mask": None, "cap_order": cap_beside_bias("mask_gradient", given, schemes)}
    q, k, v = operands
    bias = DenseBias(mask)
    found = compute(q, k, v, grad_out=grad_out, grad_lse=grad_lse, position=(*schemes, bias), **own)
    *arrays, of_mask = found.position
    by_scheme = tuple(arrays) if isinstance(position, tuple) else arrays[0] if arrays else {}
    of_pairs = on_device.beside(found.q, of_mask["bias"]) if there else of_mask["bias"]
    return replace(found, position=by_scheme, mask=of_pairs)
