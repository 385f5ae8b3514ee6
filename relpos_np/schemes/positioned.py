"""Where queries and keys stand, for schemes that change each of them by its position: counted, or given."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import of_batch
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Part, Scheme, Site, in_order
from relpos_np.types import Array


class Positioned(Scheme):
    """A scheme with `positions` and `key_positions`, which are numbers or rows of coordinates."""

    positions: Array | None
    key_positions: Array | None

    @property
    def token_independent(self) -> bool:  # type: ignore[override]
        """Positions that are given belong to the tokens of one call."""
        return self.positions is None

    @property
    def _axes(self) -> int | None:
        """Coordinates of a position; None for a position that is a number."""
        return None

    def _place(self, positions: Any, key_positions: Any) -> None:
        """Keep what the constructor was given."""
        self.positions = None if positions is None else _places("positions", positions)
        self.key_positions = None if key_positions is None else _places("key_positions", key_positions)
        if self.positions is None and self.key_positions is not None:
            raise RelposValueError("positions: key_positions need those of the queries; alone, positions are the keys'")

    def _check_places(self, site: Site) -> None:
        """Every query and key needs a position."""
        if self.positions is None:
            if self._axes is not None:
                raise RelposValueError(f"positions: {self._axes} axes need positions with coordinates")
            return
        last = site.offset + site.q_len
        if self.key_positions is None and not 0 <= site.offset <= last <= site.k_len:
            raise RelposValueError(
                f"positions: queries {site.offset} ... {last - 1} are not among {site.k_len} keys; give key_positions"
            )
        lengths = {"positions": site.k_len if self.key_positions is None else site.q_len, "key_positions": site.k_len}
        for name, length in lengths.items():
            found = getattr(self, name)
            if found is None:
                continue
            wanted = (length,) if self._axes is None else (self._axes, length)
            batch = found.shape[: -len(wanted)]
            if found.shape[len(batch) :] != wanted:
                words = ", ".join(map(str, wanted))
                raise RelposValueError(f"{name}: expected shape (..., {words}), found {found.shape}")
            check.fits_batch(f"{name} of shape {found.shape}", batch, site.batch)

    def _stand(self, site: Site) -> tuple[Array, Array]:
        """For the formula: positions of queries and of keys, (..., L) or (..., A, L)."""
        if self.positions is None:
            return np.arange(site.q_len) + site.offset, np.arange(site.k_len)
        if self.key_positions is None:
            return in_order(self.positions[..., np.arange(site.q_len) + site.offset]), in_order(self.positions)
        return in_order(self.positions), in_order(self.key_positions)

    def _at(self, site: Site) -> tuple[Array, Array]:
        """For terms: positions of queries and of keys, (..., A, L)."""
        if self.positions is None:
            at_query = np.arange(site.offset, site.offset + site.q_len, dtype=np.float64)
            at_key = np.arange(site.k_len, dtype=np.float64)
        elif self.key_positions is None:
            at_query, at_key = self.positions[..., site.offset : site.offset + site.q_len], self.positions
        else:
            at_query, at_key = self.positions, self.key_positions
        if self._axes is None:
            at_query, at_key = at_query[..., None, :], at_key[..., None, :]
        return in_order(at_query), in_order(at_key)

    def _cut_places(self, site: Site, part: Part) -> dict[str, Array | None]:
        """Positions of the queries and of the keys of a part; without positions, distances decide."""
        if self.positions is None:
            return {"positions": None, "key_positions": None}
        inner = 1 if self._axes is None else 2
        columns = self.positions if self.key_positions is None else self.key_positions
        first = site.offset if self.key_positions is None else 0
        queries = slice(part.queries.start + first, part.queries.stop + first)
        return {
            "positions": of_batch(self.positions, inner, part.batch)[..., queries],
            "key_positions": of_batch(columns, inner, part.batch)[..., part.keys],
        }


def _places(name: str, value: Any) -> Array:
    """Positions as float64: finite numbers, at least one axis."""
    x = check.array(name, value)
    if (x.dtype.kind not in "iuf" and x.dtype.name != "bfloat16") or x.itemsize > 8:
        raise RelposTypeError(f"{name}: expected integers or floats of at most 64 bits, found dtype {x.dtype}")
    x = x.astype(np.float64)
    if not x.ndim or not np.isfinite(x).all():
        raise RelposValueError(f"{name}: expected finite positions (..., L), found shape {x.shape} or NaN or infinity")
    x.flags.writeable = False
    return x
