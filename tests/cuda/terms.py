"""Random terms of every kind, for calls that no scheme would make."""

import numpy as np

from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm


def index_map(rng, kind, q_len, k_len, rows, batch):
    """A random map with some rows missing: by distance, by pair, or by pair and batch item."""
    if kind == "distances":
        return Toeplitz(rng.integers(-1, rows, q_len + k_len - 1, dtype=np.int32), rows)
    lead = batch if kind == "per batch item" else ()
    return Dense(rng.integers(-1, rows, (*lead, q_len, k_len), dtype=np.int32), rows)


def every_kind(rng, batch, heads, kv_heads, q_len, k_len, dims, kind, dtype):
    """Operands, gradients and two terms of each kind, some of them shared by heads or batch items."""
    dim, v_dim = dims

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    def maps(rows):
        return index_map(rng, kind, q_len, k_len, rows, batch)

    terms = Terms(
        tables=(TableTerm(draw(heads, 5), maps(5)), TableTerm(draw(1, 2), maps(2))),
        queries=(
            QueryTerm(draw(*batch, heads, q_len, 4), draw(1, 6, 4), maps(6)),
            QueryTerm(draw(*batch, heads, q_len, 2), draw(heads, 3, 2), maps(3)),
        ),
        keys=(
            KeyTerm(draw(*batch, kv_heads, k_len, 3), draw(heads, 4, 3), maps(4)),
            KeyTerm(draw(*batch, kv_heads, k_len, 2), draw(1, 2, 2), maps(2)),
        ),
        values=(ValueTerm(draw(heads, 5, v_dim), maps(5)), ValueTerm(draw(1, 2, v_dim), maps(2))),
        biases=(draw(1, q_len, k_len), draw(heads, 1, k_len), draw(*batch, 1, q_len, 1)),
    )
    operands = draw(*batch, heads, q_len, dim), draw(*batch, kv_heads, k_len, dim), draw(*batch, kv_heads, k_len, v_dim)
    return operands, terms, (draw(*batch, heads, q_len, v_dim), draw(*batch, heads, q_len))


def in_float64(terms):
    """The same terms in double precision."""
    parts = {
        slot: tuple(
            type(term)(*(np.float64(x) if isinstance(x, np.ndarray) else x for x in values(term)))
            for term in getattr(terms, slot)
        )
        for slot in ("tables", "queries", "keys", "values")
    }
    return Terms(**parts, biases=tuple(np.float64(x) for x in terms.biases))


def values(term):
    return [getattr(term, name) for name in term.__slots__]
