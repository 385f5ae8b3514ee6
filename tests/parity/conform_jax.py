"""Attention as authors write it in JAX: right, and wrong in ten ways. Nothing here comes from the package.

Each is compiled as a whole, as layers are: operation by operation JAX compiles every one for every shape.
"""

from functools import partial

import jax.numpy as jnp
from jax import jit, lax, nn


def distances(q, k):
    return jnp.arange(k.shape[-2]) - jnp.arange(q.shape[-2])[:, None] - (k.shape[-2] - q.shape[-2])


def products(q, k):
    return jnp.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5


def shown(s, q, k, causal=False, window=None):
    d = distances(q, k)
    if causal:
        s = jnp.where(d <= 0, s, -jnp.inf)
    return s if window is None else jnp.where((d >= -window[0]) & (d <= window[1]), s, -jnp.inf)


def weighted(s, v):
    return jnp.einsum("bhij,bhjd->bhid", nn.softmax(s.astype(jnp.float32)).astype(v.dtype), v)


def repeated(q, k, v):
    return (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))


@partial(jit, static_argnames=("causal", "window"))
def plain(q, k, v, causal=False, window=None):
    k, v = repeated(q, k, v)
    return weighted(shown(products(q, k), q, k, causal, window), v)


def buckets(d, count, most, kind):
    """T5's; float64 is not there by default, so borders are found by comparing powers of whole numbers."""
    half = count // 2
    exact = half // 2
    near = jnp.abs(d)
    if kind == "exact":
        # Step s begins at the smallest n with (n / exact)^(half - exact) >= (most / exact)^s.
        steps = [first(s, exact, half, most) for s in range(1, half - exact)]
        far = exact + sum((near >= n).astype(int) for n in steps)
    else:
        ratio = jnp.log(jnp.maximum(near, 1) / exact) / jnp.log(most / exact) * (half - exact)
        far = exact + ratio.astype(int)
    return jnp.where(near < exact, near, jnp.minimum(far, half - 1)) + half * (d > 0)


def first(step, exact, half, most):
    whole = half - exact
    return next(n for n in range(exact, most + 1) if n**whole >= most**step * exact ** (whole - step))


@partial(jit, static_argnames=("causal", "max_distance", "kind"))
def t5(q, k, v, table, max_distance=128, causal=False, *, kind="exact"):
    k, v = repeated(q, k, v)
    bias = jnp.moveaxis(table[buckets(distances(q, k), len(table), max_distance, kind)], -1, 0)
    return weighted(shown(products(q, k) + bias, q, k, causal), v)


@partial(jit, static_argnames=("zero",))
def shaw(q, k, v, key_table, value_table, *, zero=False):
    d = distances(q, k)

    def rows(table):
        half = len(table) // 2
        found = table[jnp.clip(d, -half, half) + half]
        return jnp.where((jnp.abs(d) <= half)[..., None], found, 0) if zero else found

    s = products(q, k) + jnp.einsum("bhid,ijd->bhij", q, rows(key_table)) * q.shape[-1] ** -0.5
    p = nn.softmax(s)
    return jnp.einsum("bhij,bhjd->bhid", p, v) + jnp.einsum("bhij,ijd->bhid", p, rows(value_table))


def turned(x, start, *, neighbours=False):
    half = x.shape[-1] // 2
    angle = (jnp.arange(x.shape[-2]) + start)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    one, two = a * cos - b * sin, a * sin + b * cos
    return jnp.stack([one, two], -1).reshape(x.shape) if neighbours else jnp.concatenate([one, two], -1)


@partial(jit, static_argnames=("causal", "neighbours"))
def rotary(q, k, v, causal=False, *, neighbours=False):
    k, v = repeated(q, k, v)
    start = k.shape[-2] - q.shape[-2]
    s = products(turned(q, start, neighbours=neighbours), turned(k, 0, neighbours=neighbours))
    return weighted(shown(s, q, k, causal), v)


@partial(jit, static_argnames=("left_out",))
def conformer(q, k, v, content_bias, position_bias, rows, *, left_out=True):
    content = jnp.einsum("bhid,bhjd->bhij", q + content_bias[:, None], k)
    x = jnp.einsum("bhid,rhd->bhir", q + position_bias[:, None], rows)
    *lead, q_len, count = x.shape
    flat = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(*lead, -1)
    flat = flat[..., q_len:] if left_out else flat[..., : q_len * count]
    return weighted((content + flat.reshape(x.shape)[..., : k.shape[-2]]) * q.shape[-1] ** -0.5, v)


@partial(jit, static_argnames=("causal",))
def ordinary(q, k, v, causal=False):
    """Without grouped heads, which matmul refuses."""
    return weighted(shown(products(q, k), q, k, causal, None), v)


# ---------------------------------------------------------------------------------------------- wrong in ten ways


@partial(jit, static_argnames=("max_distance",))
def buckets_in_float32(q, k, v, table, max_distance=128):
    return t5(q, k, v, table, max_distance, kind="float32")


@partial(jit, static_argnames=("causal",))
def causal_top_left(q, k, v, causal=False):
    s = products(q, k)
    return weighted(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf) if causal else s, v)


@jit
def clips(q, k, v, key_table, value_table):
    return shaw(q, k, v, key_table, value_table, zero=False)


@jit
def scale_missing(q, k, v):
    return weighted(jnp.einsum("bhid,bhjd->bhij", q, k), v)


@jit
def scale_twice(q, k, v):
    return weighted(products(q * q.shape[-1] ** -0.5, k), v)


@jit
def other_layout(q, k, v):
    return rotary(q, k, v, neighbours=True)


@partial(jit, static_argnames=("window",))
def window_off_by_one(q, k, v, window=None):
    s = products(q, k)
    return weighted(s if window is None else shown(s, q, k, window=(window[0], window[1] + 1)), v)


@jit
def swapped(q, k, v, content_bias, position_bias, rows):
    return conformer(q, k, v, position_bias, content_bias, rows)


@jit
def shift_keeps_its_first_row(q, k, v, content_bias, position_bias, rows):
    return conformer(q, k, v, content_bias, position_bias, rows, left_out=False)


@jit
def masked_late(q, k, v, mask=None):
    p = nn.softmax(products(q, k))
    if mask is not None:
        p = jnp.where(mask, p, 0) if mask.dtype == bool else p + mask
    return jnp.einsum("bhij,bhjd->bhid", p, v)


@jit
def sums_in_half(q, k, v):
    """A loop over keys that adds up in the dtype of the operands."""
    s = products(q, k)
    p = jnp.exp(s - s.max(-1, keepdims=True))

    def add(sums, one):
        weight, value = one
        return (sums[0] + weight[..., None] * value[..., None, :], sums[1] + weight), None

    start = jnp.zeros((*p.shape[:-1], v.shape[-1]), p.dtype), jnp.zeros(p.shape[:-1], p.dtype)
    (out, total), _ = lax.scan(add, start, (jnp.moveaxis(p, -1, 0), jnp.moveaxis(v, -2, 0)))
    return out / total[..., None]
