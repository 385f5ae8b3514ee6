"""Positions that count by content: what hidden keys do, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.terms import Terms
from tests.compare import assert_memory_below, close
from tests.test_schemes import make


def test_cope_padding_behind_a_causal_call_is_not_counted(backend, rng):
    """Nor is NaN anywhere: an excluded key of NaN changes nothing for others."""
    q, k, v = make(rng)
    scheme = rp.CoPE(rng.standard_normal((4, 6)))
    out = rp.attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], position=scheme, causal=True, backend=backend)
    k[:, :, 6:], v[:, :, 6:] = np.nan, np.nan
    padded = rp.attention(q, k, v, position=scheme, causal=True, key_lengths=np.array([6, 6]), backend=backend)
    close(padded[:, :, :6], out)
    k[:, :, 2], v[:, :, 2] = np.nan, np.nan
    hidden = np.arange(9) != 2
    counted = rp.CoPE(scheme.table, counted=hidden[None])
    for one in (scheme, counted):
        found = rp.attention(q[:, :, :6], k, v, position=one, causal=True, offset=0, mask=hidden, backend=backend)
        assert np.isfinite(found).all()
    keep = [0, 1, 3, 4, 5]
    mask = np.array(keep) <= np.arange(6)[:, None]
    shorter = rp.attention(
        q[:, :, :6], k[:, :, keep], v[:, :, keep], position=rp.CoPE(scheme.table, counted=mask), mask=mask
    )
    close(found, shorter)


# Heads of queries and of keys, queries, keys, channels, positions, options: as few as there may be, beside blocks of
# queries and panels of keys, positions that all keys reach and that none does.
CALLS = [
    (2, 1, 1, 7, 3, 5, {}),
    (1, 1, 7, 1, 4, 1, {}),
    (4, 2, 63, 65, 8, 6, {"causal": True}),
    (2, 2, 65, 63, 16, 70, {"causal": True, "offset": -3}),
    (2, 1, 200, 130, 5, 9, {"offset": 10, "window": (20, 5)}),
    (3, 3, 130, 200, 4, 300, {"softcap": 2.0}),
    (2, 1, 70, 65, 3, 7, {"causal": True, "rule": rp.Chunked(20, left=1)}),
    (1, 1, 66, 64, 3, 7, {"rule": rp.Prefix(np.array([5, 40]))}),
    (1, 1, 65, 67, 3, 7, {"rule": rp.Dilated(3)}),
    (4, 2, 66, 63, 3, 7, {"dropout": 0.4}),
    (2, 1, 121, 65, 3, 7, {"dropout": 0.2, "causal": True, "softcap": 2.0}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[2]}x{call[3]}")
def test_cope_in_parts(call, given, dtype, monkeypatch):
    """The CPU kernels make the bias for some queries at a time, beside all other kinds of terms and options."""
    by_rows = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    heads, kv_heads, q_len, k_len, depth, npos, options = call
    rng = np.random.default_rng(0)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q, k, v = numbers(2, heads, q_len, depth), numbers(1, kv_heads, k_len, depth), numbers(2, kv_heads, k_len, 5)
    own = {"gate_key": numbers(kv_heads, k_len, depth), "counted": rng.random((heads, 1, k_len)) < 0.6} if given else {}
    cope = rp.CoPE(numbers(*((heads,) if given else ()), npos, depth) / 8, variant=("paper", "ram")[given], **own)
    position = (cope, rp.T5(numbers(32, heads)), rp.Shaw(numbers(5, depth), numbers(5, 5)))
    mask = np.where(rng.random((q_len, k_len)) < 0.8, numbers(q_len, k_len), -np.inf).astype(dtype)
    options = {**options, "position": position, "mask": mask}
    if given:
        options |= {"key_lengths": np.array([k_len, k_len // 2]), "offset": k_len - q_len}
    grads = {"grad_out": numbers(2, heads, q_len, 5), "grad_lse": numbers(2, heads, q_len)}

    def found(backend):
        if "dropout" in options:
            options["rng"] = np.random.default_rng(9)
        out, lse = rp.attention(q, k, v, **options, return_lse=True, backend=backend)
        if "dropout" in options:
            options["rng"] = np.random.default_rng(9)
        grad = rp.attention_vjp(q, k, v, **options, **grads, mask_gradient="softcap" not in options, backend=backend)
        arrays = [x for own in grad.position for x in own.values()]
        return [out, lse, grad.q, grad.k, grad.v, *arrays, *(() if grad.mask is None else (grad.mask,))]

    expected, whole = found("numpy"), found("numba")
    monkeypatch.setattr(by_rows, "BIAS_ROWS", 24)
    # Each number is a sum over pairs, of products of D numbers of about 1.
    error = 16 * np.sqrt(2 * heads * q_len + k_len + depth) * np.finfo(dtype).eps
    for a, b, c in zip(expected, whole, found("numba"), strict=True):
        assert a.shape == b.shape == c.shape
        assert a.dtype == b.dtype == c.dtype
        room = error * (1 + np.abs(np.where(np.isfinite(a), a, 0)).max(initial=0))
        np.testing.assert_allclose(b, a, rtol=0, atol=room)
        np.testing.assert_allclose(c, a, rtol=0, atol=room)


def test_cope_gradients_of_many_parts_have_the_error_of_one(monkeypatch):
    """Equal numbers are rounded the same way each time: of 400 parts, sums in float32 were off by 28 units."""
    by_rows = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    monkeypatch.setattr(by_rows, "BIAS_ROWS", 24)
    n = 400 * 24
    q, k, v = (np.zeros((1, length, 1), np.float32) for length in (n, 2, 2))
    grad_out = np.full((1, n, 1), 0.7, np.float32)
    cope = rp.CoPE(np.zeros((2, 1), np.float32))
    found = rp.attention_vjp(q, k, v, position=cope, grad_out=grad_out, offset=0, backend="numba")
    # Both keys have half of each query's probability.
    np.testing.assert_allclose(found.v, np.float64(grad_out[0, 0, 0]) * n / 2, rtol=8 * np.finfo(np.float32).eps)


def test_cope_of_an_item_or_a_head_alone_has_the_same_bits():
    """And so has a call with keys that `key_lengths` leaves out: nothing of that decides what parts there are."""
    pytest.importorskip("relpos_np.kernels._numba")
    rng = np.random.default_rng(3)
    q, g = rng.standard_normal((2, 2, 4, 420, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, 900, 16), dtype=np.float32)
    position, every = rp.CoPE(rng.standard_normal((32, 16), dtype=np.float32)), slice(None)

    def found(items, heads, keys, k_len):
        call = {"position": position, "causal": True, "offset": 0, "backend": "numba"}
        if k_len > 420:
            call["key_lengths"] = np.full(len(q[items]), 420)
        operands = q[items, heads], k[items, keys, :k_len], v[items, keys, :k_len]
        grads = rp.attention_vjp(*operands, grad_out=g[items, heads], **call)
        return rp.attention(*operands, **call), grads.q, grads.k[..., :420, :], grads.v[..., :420, :]

    whole = found(every, every, every, 420)
    for one, own in zip(whole, found(slice(1, 2), every, every, 420), strict=True):
        np.testing.assert_array_equal(one[1:2], own)
    for one, own, heads in zip(
        whole, found(every, slice(2, 4), slice(1, 2), 420), [slice(2, 4)] * 2 + [slice(1, 2)] * 2, strict=True
    ):
        np.testing.assert_array_equal(one[:, heads], own)
    for one, own in zip(whole, found(every, every, every, 900), strict=True):
        np.testing.assert_array_equal(one, own)


def test_cope_gradient_of_the_last_position():
    """Nearly all of 200,000 keys have it, and add as much each: a sum in float32 was off by hundreds of units."""
    n = 200_000
    q, k, v = np.ones((1, 1, 1)), np.ones((1, n, 1)), np.ones((1, n, 1))
    v[:, -1] = 0
    mask = np.zeros(n)
    mask[-1] = np.log(n - 1)

    def found(dtype):
        own = (x.astype(dtype) for x in (q, k, v))
        cope = rp.CoPE(np.zeros((3, 1), dtype))
        grads = rp.attention_vjp(
            *own, position=cope, grad_out=q.astype(dtype), mask=mask.astype(dtype), backend="numba"
        )
        return grads.position["table"]

    expected = found(np.float64)
    assert abs(expected[-1, 0]) > 0.2
    np.testing.assert_allclose(found(np.float32)[-1], expected[-1], rtol=(4 + np.log(n)) * np.finfo(np.float32).eps)


@pytest.mark.slow
def test_cope_holds_no_number_per_pair_on_the_cpu():
    """Forward and back in less than half of what one matrix of scores takes."""
    pytest.importorskip("relpos_np.kernels._numba")
    q = np.random.default_rng(0).standard_normal((8, 4096, 8), dtype=np.float32)
    position, most = rp.CoPE(q[0, :16]), 8 * 4096 * 4096 * 4 // 2
    for call in (
        lambda: rp.attention(q, q, q, position=position, causal=True, backend="numba"),
        lambda: rp.attention_vjp(q, q, q, grad_out=q, position=position, causal=True, backend="numba"),
    ):
        assert_memory_below(call, most)


def test_cope_gates_of_large_products():
    """Products of any size, also infinite ones, count a key wholly or not at all; NaN does not count it."""
    q = np.ones((1, 4, 1))
    k = np.array([3e200, -3e200, np.inf, -np.inf, np.nan, 0.0, 710.0, -710.0])[None, :, None]
    table = np.arange(9.0)[:, None]
    allowed = np.isfinite(k[0, :, 0]) & (np.abs(k[0, :, 0]) < 800)
    found = [
        rp.attention(
            q, np.where(np.abs(k) < 800, 0, k), np.arange(8.0).reshape(1, 8, 1), position=rp.CoPE(table, gate_key=k),
            mask=allowed, backend=backend,
        )
        for backend in ("numpy", "numba")
    ]  # fmt: skip
    assert np.isfinite(found[0]).all()
    close(found[1], found[0])


def test_a_subclass_with_terms_of_its_own(rng):
    """Kernels take them, not what the class above makes some queries at a time."""

    class Silent(rp.CoPE):
        def lower(self, q, k, site):
            return Terms()

    q, k, v = rng.standard_normal((3, 2, 5, 4))
    found = rp.attention(q, k, v, position=Silent(rng.standard_normal((3, 4))), backend="numba")
    close(found, rp.attention(q, k, v, backend="numpy"))
