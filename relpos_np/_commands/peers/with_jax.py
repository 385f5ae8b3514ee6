"""JAX: products and softmax in one compiled function."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from relpos_np._commands.peers import Prepared, arrays
from relpos_np._commands.peers.shapes import Case


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape; threads follow from the processors that this process may use."""
    s, a = case.shape, {name: jnp.asarray(x) for name, x in case.arrays.items()}
    scale = 1 / math.sqrt(s.head_dim)
    q, k, v = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    if s.kind in ("transformer_xl", "shaw"):
        a = {name: x.astype(q.dtype) for name, x in a.items()}

    def products(x: Any, y: Any) -> Any:
        # Sums and scores are float32 whatever is multiplied.
        return jnp.einsum("bhid,bhjd->bhij", x, y, preferred_element_type=jnp.float32)

    if s.kind == "transformer_xl":

        def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
            x = jnp.einsum("bhid,rhd->bhir", q + a["position_bias"][:, None], a["rows"])
            *lead, rows, columns = x.shape
            padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)]).reshape(*lead, columns + 1, rows)
            position = padded[..., 1:, :].reshape(*lead, rows, columns)
            scores = jnp.where(given, -jnp.inf, (products(q + a["content_bias"][:, None], k) + position) * scale)
            return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

        extra = jnp.asarray(arrays.apart(case) > 0)
    elif s.kind == "shaw":

        def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
            scores = products(q, k) + jnp.einsum("bhid,ijd->bhij", q, a["key_table"][given])
            p = jax.nn.softmax(scores * scale, axis=-1).astype(v.dtype)
            return jnp.einsum("bhij,bhjd->bhid", p, v) + jnp.einsum("bhij,ijd->bhid", p, a["value_table"][given])

        extra = jnp.asarray(arrays.shaw_rows(case).astype(np.int32))
    elif s.kind == "alibi":

        def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
            scores = products(q, k) * scale - a["slopes"][:, None, None] * given
            return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

        extra = jnp.asarray(np.abs(arrays.apart(case)).astype(np.float32))
    elif s.kind == "plain":

        def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
            p = jax.nn.softmax(products(q, k) * scale, axis=-1)
            return jnp.einsum("bhij,bhjd->bhid", p.astype(v.dtype), v)

        extra = None
    else:

        def run(q: Any, k: Any, v: Any, a: Any, given: Any) -> Any:
            bias = jnp.moveaxis(a["table"][given], -1, 0)
            p = jax.nn.softmax(products(q, k) * scale + bias, axis=-1)
            return jnp.einsum("bhij,bhjd->bhid", p.astype(v.dtype), v)

        extra = jnp.asarray(arrays.index(case).astype(np.int32))
    compiled = jax.jit(run)
    return Prepared(lambda: compiled(q, k, v, a, extra).block_until_ready(), np.asarray)
