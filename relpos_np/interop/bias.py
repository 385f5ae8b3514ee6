"""A float mask with a gradient: a bias that another package has written out, as one more scheme."""

from __future__ import annotations

from typing import Any

from relpos_np._calls.dense_bias import DenseBias, cap_beside_bias
from relpos_np.interop.scheme import Trained

__all__ = ["DenseBias", "with_bias"]


def with_bias(positions: tuple[Any, ...], mask: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """A call's schemes with its mask as one of them.

    Parameters
    ----------
    positions : tuple
        The schemes.
    mask : tensor
        Of floats.
    given : dict
        All options of the call; the order of the cap becomes that which leaves the mask outside of it.

    Returns
    -------
    tuple
        The schemes and the mask.

    Raises
    ------
    RelposValueError
        If there is no such order, a scheme changes the scores before the mask is added, or the call is several.
    """
    given["cap_order"] = cap_beside_bias("mask", given, positions)  # type: ignore[arg-type]
    return (*positions, Trained(DenseBias, {"bias": mask}, {}))
