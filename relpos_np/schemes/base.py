"""What a scheme must offer: its formula on dense arrays, and the same formula as terms."""

from __future__ import annotations

from relpos_np.problem import Site
from relpos_np.terms import Terms
from relpos_np.types import Array


class Scheme:
    """A way for positions to enter attention; subclasses override what applies.

    `transform`, `scores` and `outputs` are the reference. `lower` states the same formula for the kernels and
    shares no code with them, so that each can be checked against the other.
    """

    # Whether the scheme changes the content product q . k itself; of several schemes only one may.
    content = False

    def check(self, site: Site) -> None:
        """Raise a `RelposError` if the tables do not fit the call."""

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """The operands of the content product: (..., H, L_q, D) and (..., H, L_k, D), by default as they are."""
        return q, k

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """Added to the scaled scores: (..., H, L_q, L_k). q (..., H, L_q, D), k (..., H, L_k, D)."""
        return None

    def outputs(self, p: Array, site: Site) -> Array | None:
        """Added to the output: (..., H, L_q, D_v), from the probabilities p (..., H, L_q, L_k)."""
        return None

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same as terms; k still has its grouped heads (..., H_kv, L_k, D)."""
        raise NotImplementedError
