"""Arrays of JAX: the same numbers as formulas in JAX, also inside of its transformations."""

import numpy as np
import pytest

import relpos_np as rp

jax = pytest.importorskip("jax")
pytest.importorskip("numba")
pytestmark = pytest.mark.parity

from relpos_np.interop.jax import attention, trained  # noqa: E402

jnp = jax.numpy


@pytest.fixture(autouse=True)
def in_double():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def operands(rng, *batch, length=9, dtype=np.float64):
    return [jnp.asarray(rng.standard_normal((*batch, 4, length, 8)), dtype) for _ in range(3)]


def plain(q, k, v, bias=0.0):
    """The formula in JAX."""
    s = jnp.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1]) + bias
    return jnp.einsum("...ij,...jd->...id", jax.nn.softmax(s, axis=-1), v)


def t5_bias(table, length=9):
    bucket = rp.reference.t5_bucket(np.arange(length) - np.arange(length)[:, None])
    return jnp.moveaxis(table[bucket], -1, 0)


def close(found, expected, atol=1e-12):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


def test_values_under_jit_and_vmap(rng):
    q, k, v = operands(rng, 3)
    expected = plain(q, k, v)
    close(attention(q, k, v), expected)
    close(jax.jit(attention)(q, k, v), expected)
    close(jax.vmap(attention)(q, k, v), expected)
    close(jax.jit(jax.vmap(attention, in_axes=(0, None, None)))(q, k[0], v[0]), plain(q, k[0], v[0]))
    mask = jnp.asarray(rng.random((9, 9)) < 0.7).at[:, 0].set(True)
    close(jax.jit(lambda m: attention(q, k, v, mask=m))(mask), plain(q, k, v, jnp.where(mask, 0, -jnp.inf)))
    lengths = jnp.asarray([9, 4, 1])
    bias = jnp.where(jnp.arange(9) < lengths[:, None, None, None], 0, -jnp.inf)
    close(jax.jit(lambda n: attention(q, k, v, key_lengths=n))(lengths), plain(q, k, v, bias))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_operands_and_table(rng, compiled):
    q, k, v = operands(rng, 2)
    table = jnp.asarray(rng.standard_normal((32, 4)))

    def ours(q, k, v, table):
        return (attention(q, k, v, position=(trained(rp.T5, table), rp.Plain())) ** 2).sum()

    def theirs(q, k, v, table):
        return (plain(q, k, v, t5_bias(table)) ** 2).sum()

    found = jax.grad(ours, argnums=(0, 1, 2, 3))
    found = (jax.jit(found) if compiled else found)(q, k, v, table)
    for x, y in zip(found, jax.grad(theirs, argnums=(0, 1, 2, 3))(q, k, v, table), strict=True):
        assert np.abs(y).max() > 0.01
        close(x, y)


def test_gradients_with_masks_and_log_sum_exp(rng):
    q, k, v = operands(rng)
    added = jnp.asarray(rng.standard_normal((4, 9, 9)))
    allowed = jnp.tril(jnp.ones((9, 9), bool))

    def ours(q, added):
        out, lse = attention(q, k, v, mask=added, return_lse=True)
        return (out**2).sum() + (lse**2).sum() + attention(q, k, v, mask=allowed).sum()

    def theirs(q, added):
        s = jnp.einsum("...id,...jd->...ij", q, k) / np.sqrt(8) + added
        rest = plain(q, k, v, jnp.where(allowed, 0, -jnp.inf)).sum()
        return (plain(q, k, v, added) ** 2).sum() + (jax.nn.logsumexp(s, axis=-1) ** 2).sum() + rest

    for x, y in zip(jax.grad(ours, (0, 1))(q, added), jax.grad(theirs, (0, 1))(q, added), strict=True):
        close(x, y)
    # One gradient per item of a batch.
    many = jnp.stack([q, 2 * q])
    found = jax.vmap(jax.grad(ours), in_axes=(0, None))(many, added)
    close(found, jax.vmap(jax.grad(theirs), in_axes=(0, None))(many, added))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_and_long_operands(rng, dtype):
    """Arrays of megabytes, for which a callback must not wait for JAX's own threads."""
    q, k, v = (x.astype(dtype) for x in operands(rng, 2, length=512))
    out = jax.jit(attention)(q, k, v)
    assert out.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    close(out.astype(np.float64), plain(*wide), atol=8 * eps)


def test_errors_come_while_tracing(rng):
    q, k, v = operands(rng)
    with pytest.raises(rp.RelposValueError, match="the call has 4"):
        jax.jit(lambda q: attention(q, k, v, position=trained(rp.T5, jnp.zeros((32, 3)))))(q)
    with pytest.raises(rp.RelposValueError, match="head_dim 8 differs"):
        attention(q[..., :4], k, v)
    with pytest.raises(rp.RelposTypeError, match="q: expected an array of JAX or NumPy, found list"):
        attention([[1.0]], k, v)
