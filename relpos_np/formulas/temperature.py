"""Factors on queries that grow with their position, so that attention over many keys stays sharp."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.types import Array

TEMPERATURES = ("llama4", "ministral3", "inkling", "qwen", "ssmax")


def query_temperature(
    positions: Any,
    *,
    variant: Literal["llama4", "ministral3", "inkling", "qwen", "ssmax"],
    length: float | None = None,
    strength: float | None = None,
) -> Array:
    r"""Factors on queries by their positions n, counted from 0: what a call takes as ``query_scale``.

    With :math:`n_0` the length and :math:`\beta` the strength,

    .. math::

        \text{llama4} &: 1 + \beta \ln\left(1 + \left\lfloor \frac{n + 1}{n_0} \right\rfloor\right), \qquad
        \text{ministral3}: 1 + \beta \ln\left(1 + \left\lfloor \frac{n}{n_0} \right\rfloor\right), \\
        \text{inkling} &: 1 + \beta \ln \max\left(1, \frac{n + 1}{n_0}\right), \qquad
        \text{qwen}: \max\left(1, \frac{\ln (n + 1)}{\ln n_0}\right), \qquad
        \text{ssmax}: \beta \ln (n + 1) .

    Parameters
    ----------
    positions : int or ndarray of int, shape (L_q,) or (..., L_q)
        Positions of queries, not negative; an integer L stands for 0 ... L - 1.
    variant : {"llama4", "ministral3", "inkling", "qwen", "ssmax"}
        Whose formula.
    length : float, optional
        n_0: configurations call it `floor_scale` (Llama 4), `original_max_position_embeddings` (Ministral 3),
        `log_scaling_n_floor` (Inkling), `seq_length` (Qwen). Not for "ssmax".
    strength : float, optional
        β: `attn_scale` (Llama 4), `llama_4_scaling_beta` (Ministral 3), `log_scaling_alpha` (Inkling), the trained s
        of scalable softmax (default 1). Not for "qwen".

    Returns
    -------
    ndarray of float64
        In the shape of the positions.

    Raises
    ------
    RelposError
        If positions are negative, or a number is missing, not positive or not for the variant.

    References
    ----------
    Meta, "Llama 4", 2025, from Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025 ("ssmax": there the number
    of keys is n + 1, and s is trained for each head). The log-n factor of "qwen" is that of Su, 2021. Published code
    computes in float32: "llama4" may differ from it by its rounding where n + 1 is near 2^24.

    Examples
    --------
    >>> query_temperature(5, variant="llama4", length=2, strength=0.1).round(3).tolist()
    [1.0, 1.069, 1.069, 1.11, 1.11]
    """
    check.choice("variant", variant, TEMPERATURES)
    if isinstance(positions, int | np.integer) and not isinstance(positions, bool):
        positions = np.arange(check.integer("positions", positions, 0))
    n = check.integers("positions", positions).astype(np.float64)
    if n.size and n.min() < 0:
        raise RelposValueError(f"positions: expected at least 0, found {int(n.min())}")
    needs = {"length": variant != "ssmax", "strength": variant != "qwen"}
    for name, value in (("length", length), ("strength", strength)):
        if value is None and needs[name] and not (variant == "ssmax" and name == "strength"):
            raise RelposValueError(f"{name}: needed for variant {variant!r}")
        if value is not None and not needs[name]:
            raise RelposValueError(f"{name}: variant {variant!r} has none, found {value}")
    size = 1.0 if length is None else check.positive("length", length)
    beta = 1.0 if strength is None else check.real("strength", strength)
    if variant == "qwen":
        if size <= 1:
            raise RelposValueError(f"length: expected more than 1 for variant 'qwen', found {size}")
        return np.asarray(np.maximum(np.log(n + 1) / np.log(size), 1.0))
    if variant == "ssmax":
        return np.asarray(beta * np.log(n + 1))
    if variant == "inkling":
        return np.asarray(1 + beta * np.log(np.maximum((n + 1) / size, 1.0)))
    return np.asarray(1 + beta * np.log1p(np.floor((n + (variant == "llama4")) / size)))
