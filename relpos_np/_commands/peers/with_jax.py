"""JAX: products and softmax in one compiled function."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from relpos_np._commands.peers import Prepared
from relpos_np._commands.peers.shapes import TABLES, Case


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape; threads follow from the processors that this process may use."""
    s, a = case.shape, {name: jnp.asarray(x) for name, x in case.arrays.items()}
    q, k, v = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    if s.kind in ("transformer_xl", "shaw"):
        a = {name: x.astype(q.dtype) for name, x in a.items()}
    pairs, hidden = case.per_pair, case.padding
    given = jnp.asarray(pairs.astype(np.int32) if pairs.dtype.kind == "i" else pairs)

    def shifted(x: Any) -> Any:
        *lead, rows, columns = x.shape
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)]).reshape(*lead, columns + 1, rows)
        return padded[..., 1:, :].reshape(*lead, rows, columns)

    def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
        query = q + a["content_bias"][:, None] if s.kind == "transformer_xl" else q
        # Sums and scores are float32 whatever is multiplied.
        scores = jnp.einsum("bhid,bhjd->bhij", query, k, preferred_element_type=jnp.float32)
        if s.kind == "transformer_xl":
            scores = scores + shifted(jnp.einsum("bhid,rhd->bhir", q + a["position_bias"][:, None], a["rows"]))
        if s.kind == "shaw":
            scores = scores + jnp.einsum("bhid,ijd->bhij", q, a["key_table"][given])
        scores = scores / math.sqrt(s.head_dim)
        if s.kind == "transformer_xl":
            scores = jnp.where(given, -jnp.inf, scores)
        if s.kind == "alibi":
            scores = scores - a["slopes"][:, None, None] * given
        if s.kind in TABLES:
            scores = scores + jnp.moveaxis(a["table"][given], -1, 0)
        if hidden is not None:
            scores = scores + hidden
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhij,bhjd->bhid", p, v)
        return out + jnp.einsum("bhij,ijd->bhid", p, a["value_table"][given]) if s.kind == "shaw" else out

    compiled = jax.jit(run)
    return Prepared(lambda: compiled(q, k, v, a, given).block_until_ready(), np.asarray)
