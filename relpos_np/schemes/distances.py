"""Schemes that add a number for each relative position and head: a table with a row for each of them."""

from __future__ import annotations

from relpos_np._contract.index_maps import difference_map
from relpos_np._contract.terms import TableTerm, Terms
from relpos_np.schemes.base import Scheme, SchemeGradient, Site
from relpos_np.types import Array, Int64


class DistanceBias(Scheme):
    """A scheme whose bias is a function of j - i - offset and the head."""

    relative = True
    reads_operand_values = False

    def _table(self, d: Int64, site: Site) -> Array:
        """The bias of each relative position (rows,): (H, rows)."""
        raise NotImplementedError

    def _gradients(self, d: Int64, grad: Array) -> dict[str, Array]:
        """Gradients of the scheme's arrays from that of the table; by default nothing is trained."""
        return {}

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One table term with a row per relative position."""
        table = self._table(site.relative_positions(), site).astype(site.dtype, copy=False)
        return Terms(tables=(TableTerm(table, difference_map(site.q_len, site.k_len)),))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """From the table to what it was made of."""
        return SchemeGradient(arrays=self._gradients(site.relative_positions(), grad.tables[0].table))
