r"""KERPLE: a penalty that grows with the distance like a logarithm or a power, with two learned numbers per head."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Sample, Site, evaluated, register
from relpos_np.schemes.distances import DistanceBias
from relpos_np.types import Array, Int64

Form: TypeAlias = Literal["log", "power"]
FORMS = get_args(Form)


def kerple_bias(a: Array, b: Array, q_len: int, k_len: int, *, offset: int = 0, form: Form = "log") -> Array:
    r"""The bias of every pair, written out.

    With the relative position d = j - (i + offset) it is

    .. math::

        -a_h \ln(1 + b_h |d|) \;\text{(log)}, \qquad -a_h |d|^{b_h} \;\text{(power)}.

    Parameters
    ----------
    a, b : ndarray, shape (H,)
        The paper's r1 and r2 of each head.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position of the first query among the keys.
    form : {"log", "power"}
        Which of the two.

    Returns
    -------
    ndarray of float64, shape (H, L_q, L_k)
        To be added to the scores.
    """
    distance = np.abs(np.arange(k_len)[None, :] - np.arange(q_len)[:, None] - offset)
    r1, r2 = (np.asarray(r, dtype=np.float64)[:, None, None] for r in (a, b))
    return np.asarray(-r1 * (np.log1p(r2 * distance) if form == "log" else distance**r2))


class KERPLE(DistanceBias):
    r"""Kernelized relative positions.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j - a_h \ln(1 + b_h |d|), \qquad
        s_{ij} = \sigma\, q_i \cdot k_j - a_h |d|^{b_h}

    in the log and the power form, with d = j - i - M and the call's offset M. The bias is not multiplied by
    the scale: for a model that divides the sum of product and bias by the root of head_dim, pass
    a / sqrt(D). The power form with b = 1 is `ALiBi` with learned slopes.

    Parameters
    ----------
    a : ndarray, shape (H,)
        The paper's r1 > 0 of each head; `bias_p` in its code.
    b : ndarray, shape (H,)
        The paper's r2 of each head, with b > 0, and b <= 2 in the power form, where the bias would otherwise
        come from no kernel; `bias_a` in its code.
    form : {"log", "power"}
        Which of the two.

    Raises
    ------
    RelposValueError
        If a parameter lies outside its range, or the number of heads differs between the two or from the
        call's.

    References
    ----------
    Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
    NeurIPS 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> a, b = rng.random((2, 8))  # two trained numbers for each head
    >>> rp.attention(q, k, v, position=rp.KERPLE(a, b), causal=True).shape
    (2, 8, 10, 64)
    """

    def __init__(self, a: Any, b: Any, *, form: Form = "log") -> None:
        self.a = check.table("a", a, "heads")
        self.b = check.table("b", b, "heads")
        self.form = check.choice("form", form, FORMS)
        if self.a.shape != self.b.shape:
            raise RelposValueError(f"b: shape {self.b.shape} differs from {self.a.shape}, that of a")
        for name, r, most in (("a", self.a, np.inf), ("b", self.b, 2.0 if form == "power" else np.inf)):
            wrong = r[~((r > 0) & (r <= most) & np.isfinite(r))]
            if wrong.size:
                limit = f" up to {most:g}" if most < np.inf else ""
                raise RelposValueError(f"{name}: expected positive numbers{limit}, found {wrong[0]}")

    def check(self, site: Site) -> None:
        """There must be one pair of numbers per head."""
        check.heads("a, b", self.a, 0, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(kerple_bias, self, site), site.dtype)

    def _numbers(self, d: Int64) -> tuple[Array, Array, Array]:
        """Distances (rows,), and both numbers of each head (H, 1), in float64."""
        a, b = (np.expand_dims(r.astype(np.float64), 1) for r in (self.a, self.b))
        return np.maximum(d, -d).astype(np.float64), a, b

    def _table(self, d: Int64, site: Site) -> Array:
        n, a, b = self._numbers(d)
        return np.negative(a) * (np.log1p(n * b) if self.form == "log" else np.power(n, b))

    def _gradients(self, d: Int64, grad: Array) -> dict[str, Array]:
        """Both numbers of a head collect each row times the bias's slope in them."""
        n, a, b = self._numbers(d)
        if self.form == "log":
            by_a, by_b = -np.log1p(n * b), -a * n / (1 + n * b)
        else:
            power = np.power(n, b)
            # At distance 0 the power is 0 whatever b is.
            by_a, by_b = -power, -a * power * np.log(np.maximum(n, 1))
        return {"a": (grad * by_a).sum(axis=1), "b": (grad * by_b).sum(axis=1)}


@register(
    "kerple",
    KERPLE,
    adds="a penalty by a logarithm or a power of the distance",
    paper="Chi et al., NeurIPS 2022",
    doi="10.48550/arXiv.2205.09921",
    variants=FORMS,
    models="GPT-NeoX with KERPLE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    # Powers up to 1 keep the scores of a few hundred keys small.
    a, b = (np.exp(-np.abs(at.normal(parts["q"].shape[-3]))).astype(parts["q"].dtype) for _ in "ab")
    b = b * b.dtype.type(at.pick(1, 2))
    return {**parts, "position": KERPLE(a, b, form=at.variant or "log"), "kwargs": {"causal": True}}
