"""Arrays of JAX: the same numbers as formulas in JAX, also inside of its transformations."""

import numpy as np
import pytest

import relpos_np as rp

jax = pytest.importorskip("jax")
pytest.importorskip("numba")

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


OPTIONS = {
    "sinks": ({"causal": True}, {"sinks": (4,)}),
    "sinks of items": ({"softcap": 1.5}, {"sinks": (2, 1, 1)}),
    "query_scale": ({"scale": 0.3, "rule": rp.Chunked(4)}, {"query_scale": (9,)}),
    "selected": ({"causal": True}, {"sinks": (2, 4, 9), "query_scale": (4, 1)}),
    "segments": ({"segments": np.array([0, 4, 4, 9]), "causal": True}, {"sinks": (4,), "query_scale": (2, 1, 9)}),
    "offsets": ({"offset": np.array([0, 2]), "causal": True}, {"sinks": (4,)}),
    "cap and mask": ({"softcap": 2.0}, {"sinks": (4,), "mask": (9, 9)}),
}


def with_options(q, k, v, seen, *, scale=None, softcap=None, sinks=None, query_scale=None, mask=0.0, **_):
    """The formula in JAX with options, those that exclude as one mask."""
    q = q if query_scale is None else q * query_scale[..., None]
    s = jnp.einsum("...id,...jd->...ij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = (s if softcap is None else softcap * jnp.tanh(s / softcap)) + mask
    s = jnp.where(seen, s, -jnp.inf)
    if sinks is not None:
        z = sinks[:, None] if sinks.ndim == 1 else sinks
        s = jnp.concatenate([s, jnp.broadcast_to(z, s.shape[:-1])[..., None]], axis=-1)
    p = jax.nn.softmax(s, axis=-1)[..., : k.shape[-2]]
    return jnp.einsum("...ij,...jd->...id", p, v), jax.nn.logsumexp(s, axis=-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_their_gradients(rng, name, compiled):
    fixed, shapes = OPTIONS[name]
    own = {key: jnp.asarray(rng.standard_normal(shape)) for key, shape in shapes.items()}
    q, k, v = operands(rng, 2)
    selected = jnp.asarray(np.where(rng.random((2, 9, 4)) < 0.9, rng.integers(0, 9, (2, 9, 4)), -1)).at[..., 0].set(0)
    arrays = {"selected": selected} if name == "selected" else {}
    place = np.arange(9)[:, None] + fixed.get("offset", np.zeros(1, int))[:, None, None]
    seen = (np.arange(9) <= place)[:, None] if fixed.get("causal") else np.True_
    if name == "segments":
        part = np.searchsorted(fixed["segments"][1:], np.arange(9), side="right")
        seen = seen & (part == part[:, None])
    if name == "query_scale":
        seen = np.arange(9) // 4 == np.arange(9)[:, None] // 4
    if name == "selected":
        seen = seen & (np.asarray(selected)[..., None] == np.arange(9)).any(axis=-2)[:, None]

    def loss(call):
        def run(operands, own):
            out, lse = call(operands, own)
            return (out**2).sum() + (lse**2).sum(), (out, lse)

        return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)

    ours = loss(lambda x, own: attention(*x, return_lse=True, **fixed, **arrays, **own))
    theirs = loss(lambda x, own: with_options(*x, seen, **fixed, **own))
    found = (jax.jit(ours) if compiled else ours)((q, k, v), own)
    expected = theirs((q, k, v), own)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(y).max() > 1e-3
        close(x, y, atol=1e-12 * max(1, float(np.abs(y).max())))


def test_options_under_vmap(rng):
    """Sinks of a batch that are mapped over, forward and back."""
    q, k, v = operands(rng)
    many = jnp.asarray(rng.standard_normal((3, 4)))
    seen = np.tri(9, dtype=bool)

    def ours(sinks):
        return (attention(q, k, v, sinks=sinks, causal=True) ** 2).sum()

    def theirs(sinks):
        return (with_options(q, k, v, seen, sinks=sinks)[0] ** 2).sum()

    for transform in (lambda f: f, jax.grad):
        close(jax.vmap(transform(ours))(many), jax.vmap(transform(theirs))(many))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": np.zeros(3)}, "sinks: shape"),
        ({"sinks": [0.0] * 4}, "sinks: expected an array of JAX or NumPy, found list"),
        ({"query_scale": np.zeros(3)}, "query_scale: shape"),
        ({"selected": np.zeros((2, 8, 1), int)}, "selected: expected"),
        ({"selected": np.zeros((2, 9, 1))}, "selected: expected integers"),
        ({"segments": [0, 5]}, "segments: expected cumulative lengths from 0 to the 9 queries"),
        ({"segments": [0, 9], "key_lengths": 3}, "key_lengths: expected one for each of 1 segments"),
        ({"segments": [0, 9], "position": rp.Rotary(8, positions=np.arange(9))}, "position: .* belongs to the tokens"),
        ({"segments": [0, 9], "mask": np.zeros((9, 9))}, "mask: no gradient of a float mask with segments"),
        ({"offset": np.array([0, 1, 2])}, "offset: batch axes"),
        ({"softcap": 0.0}, "softcap: expected a positive number"),
        ({"softcap": 1.0, "position": rp.ALiBi(), "mask": np.zeros((9, 9))}, "mask: no gradient where a cap"),
        ({"dropout": 0.1}, "dropout: attention has no such argument"),
    ],
)
def test_options_are_checked_while_tracing(rng, options, message):
    q, k, v = operands(rng, 2)
    with pytest.raises(rp.RelposError, match=message):
        jax.eval_shape(lambda q: attention(q, k, v, **options), q)


def test_segments_must_be_known_while_tracing(rng):
    q, k, v = operands(rng)
    with pytest.raises(rp.RelposTypeError, match="segments: expected numbers that are known while the program is"):
        jax.jit(lambda n: attention(q, k, v, segments=n))(jnp.asarray([0, 9]))
    with pytest.raises(rp.RelposTypeError, match="segments: expected numbers that are known while the program is"):
        jax.jit(lambda n: attention(q, k, v, segments=(n, n)))(jnp.asarray([0, 9]))
    close(attention(q, k, v, segments=jnp.asarray([0, 9])), attention(q, k, v))


def test_errors_come_while_tracing(rng):
    q, k, v = operands(rng)
    with pytest.raises(rp.RelposValueError, match="the call has 4"):
        jax.jit(lambda q: attention(q, k, v, position=trained(rp.T5, jnp.zeros((32, 3)))))(q)
    with pytest.raises(rp.RelposValueError, match="head_dim 8 differs"):
        attention(q[..., :4], k, v)
    with pytest.raises(rp.RelposTypeError, match="q: expected an array of JAX or NumPy, found list"):
        attention([[1.0]], k, v)


def chosen(calls):
    """The precisions of all forward and backward passes."""
    return {one.precision for one in calls}


def both_passes(*operands):
    """Attention and its gradients."""
    return jax.value_and_grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))(*operands), attention(*operands)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, None),
        ("default", None),
        ("highest", "highest"),
        ("float32", "highest"),
        ("BF16_BF16_F32_X6", "highest"),
        ("high", "high"),
        ("tensorfloat32", "high"),
        ("BF16_BF16_F32_X3", "high"),
        ("bfloat16", "medium"),
        ("BF16_BF16_F32", "medium"),
        ("F16_F16_F32", None),
    ],
)
def test_float32_follows_the_setting_of_jax(rng, calls, setting, expected):
    """As it is where a program is traced, and traced again when it changes; other dtypes have none."""
    own = operands(rng, 2, dtype=np.float32)
    compiled = jax.jit(both_passes)
    jax.block_until_ready(compiled(*own))
    assert chosen(calls) == {None}
    with jax.default_matmul_precision(setting):
        calls.clear()
        answers = [compiled(*own), both_passes(*own), jax.jit(jax.vmap(attention))(*own)]
        jax.block_until_ready(answers)
        assert calls
        assert chosen(calls) == {expected}
        for dtype in (np.float64, np.float16, jnp.bfloat16):
            calls.clear()
            jax.block_until_ready(compiled(*(x.astype(dtype) for x in own)))
            assert chosen(calls) == {None}
    same = jax.jit(lambda *x: attention(*x, precision=expected or "highest"))
    np.testing.assert_array_equal(answers[0][1], same(*own))


def test_what_was_chosen_here_counts_more_than_the_setting_of_jax(rng, calls, monkeypatch):
    """And is kept in programs that were compiled with it: JAX does not know of it."""
    own = operands(rng, dtype=np.float32)
    compiled = jax.jit(both_passes)
    with jax.default_matmul_precision("high"):
        with rp.use_precision("medium"):
            jax.block_until_ready((compiled(*own), both_passes(*own)))
            assert chosen(calls) == {"medium"}
            calls.clear()
            jax.block_until_ready(attention(*own, precision="highest"))
            assert chosen(calls) == {"highest"}
        calls.clear()
        jax.block_until_ready(compiled(*own))
        assert chosen(calls) == {"medium"}
        monkeypatch.setenv("RELPOS_PRECISION", "highest")
        calls.clear()
        jax.block_until_ready(both_passes(*own))
        assert chosen(calls) == {"highest"}
    with pytest.raises(rp.RelposValueError, match="precision: expected one of"):
        jax.jit(lambda q: attention(q, q, q, precision="fastest"))(own[0])


def test_a_program_keeps_that_nobody_had_chosen(rng, calls):
    own = operands(rng, dtype=jnp.bfloat16)
    compiled = jax.jit(both_passes)
    jax.block_until_ready(compiled(*own))
    with rp.use_precision("highest"):
        jax.block_until_ready(compiled(*own))
    assert chosen(calls) == {None}
