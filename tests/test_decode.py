"""Few queries against many keys: the kernel that reads keys and values as they lie, alone and in parts."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np._calls.dense_bias import DenseBias
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.plan import division, job
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS

# (batch, heads, key heads, queries, keys, head_dim, value_dim); the long ones are attended in several parts.
SHAPES = [
    (2, 4, 2, 1, 700, 64, 64),
    (1, 8, 1, 1, 5000, 33, 17),
    (1, 2, 2, 7, 1000, 16, 128),
    (1, 4, 2, 2, 1, 8, 8),
    (2, 1, 1, 3, 63, 5, 3),
    (1, 1, 1, 1, 2000, 128, 130),
    (1, 2, 1, 4, 1537, 1, 1),
    # One key more than two parts of whole blocks hold.
    (1, 2, 1, 2, 2 * division.PART_BLOCKS * BLOCK_KEYS + 1, 8, 4),
]


def options(rng, shape):
    """One set of arguments for each way of excluding keys, and for each kind of term."""
    b, h, _, l_q, l_k, d, _ = shape
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (50, 3), "offset": l_k // 2},
        "key_lengths": {"key_lengths": np.arange(b) * l_k // 2},
        "bool_mask": {"mask": rng.random((b, 1, l_q, l_k)) < 0.5},
        "left_padding": {"mask": np.arange(l_k) >= l_k // 3},
        "float_mask": {"mask": np.where(rng.random((h, 1, l_k)) < 0.8, rng.standard_normal((h, 1, l_k)), -np.inf)},
        "row_mask": {"mask": rng.random((l_q, 1)) < 0.5},
        "t5": {"position": rp.T5(rng.standard_normal((32, h)))},
        "alibi_key": {"position": rp.ALiBi(rng.random(h) / 100, form="key"), "offset": 3},
        "shaw_keys": {"position": rp.Shaw(rng.standard_normal((9, d)))},
        "empty": {"mask": np.zeros((1, 1), bool)},
        "bias": {"position": DenseBias(rng.standard_normal((h, l_q, l_k)))},
        "capped_bias": {"position": DenseBias(rng.standard_normal((h, l_q, l_k))), "softcap": 1.5},
        "capped_products": {"position": rp.T5(rng.standard_normal((32, h))), "softcap": 1.5, "cap_order": "content"},
        "dilated": {"rule": rp.Dilated(3)},
        "chunks": {"rule": rp.Chunked(97, left=2), "offset": l_k // 2},
        "prefixes": {"rule": rp.Prefix(np.arange(b) * l_k // 2), "offset": l_k // 3},
    }


def operands(rng, shape):
    b, h, kv, l_q, l_k, d, d_v = shape
    return (rng.standard_normal(s) for s in ((b, h, l_q, d), (b, kv, l_k, d), (b, kv, l_k, d_v)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape):
    rng = np.random.default_rng(1)
    q, k, v = operands(rng, shape)
    for name, kwargs in options(rng, shape).items():
        expected, expected_lse = rp.attention(q, k, v, backend="numpy", return_lse=True, **kwargs)
        out, lse = rp.attention(q, k, v, backend="numba", return_lse=True, **kwargs)
        # A logit is a sum of up to 128 products of size 1, an output one of up to 5000.
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_read_as_it_lies(dtype, shape):
    """The same bits as from the same numbers in float32, rounded once at the end, unless products may be rounded."""
    rng = np.random.default_rng(5)
    narrow = [x.astype(dtype) for x in operands(rng, shape)]
    for name, kwargs in options(rng, shape).items():
        if name == "float_mask":
            kwargs["mask"] = kwargs["mask"].astype(np.float32)
        out, lse = rp.attention(*narrow, return_lse=True, precision="highest", **kwargs)
        wide, wide_lse = rp.attention(*(x.astype(np.float32) for x in narrow), return_lse=True, **kwargs)
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, wide.astype(dtype), err_msg=name)
        np.testing.assert_array_equal(lse, wide_lse, err_msg=name)


@pytest.mark.parametrize(
    "position", [None, rp.ALiBi(), rp.T5(np.ones((32, 8), np.float32))], ids=["none", "alibi", "t5"]
)
def test_keys_of_half_precision_are_not_copied(position):
    q, k = np.ones((1, 8, 1, 64), ml_dtypes.bfloat16), np.ones((1, 8, 20_000, 64), ml_dtypes.bfloat16)
    rp.attention(q, k, k, position=position)
    tracemalloc.start()
    try:
        rp.attention(q, k, k, position=position)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < k.nbytes / 2


def test_a_value_at_the_edge_of_a_window_reaches_only_who_sees_it():
    q, k, v = operands(np.random.default_rng(5), (1, 2, 1, 3, 2000, 8, 4))
    window = {"window": (700, 300), "offset": 1000}
    for key, seen in ((300, [True, False, False]), (301, [True, True, False]), (1301, [False, True, True])):
        poisoned = v.copy()
        poisoned[0, 0, key] = np.nan
        out = rp.attention(q, k, poisoned, **window)
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(np.array(seen)[:, None], out.shape))


def test_a_long_call_in_several(rng, monkeypatch):
    """Between them signals are looked at."""
    q, k, v = (rng.standard_normal((30, 2, n, 8)) for n in (1, 40, 40))
    expected = rp.attention(q, k, v, backend="numba")
    monkeypatch.setattr(repeated, "form", lambda *_, **__: None)
    monkeypatch.setattr(division, "CALL_DECODE_SHARE", 1e-12)
    np.testing.assert_array_equal(rp.attention(q, k, v, backend="numba"), expected)


def test_this_kernel_is_what_runs(monkeypatch):
    ran = []
    right = job.decoding
    monkeypatch.setattr(repeated, "form", lambda *_, **__: None)
    monkeypatch.setattr(job, "decoding", lambda *args: ran.append(args) or right(*args))
    x = np.ones((1, 4, 300, 8))
    rp.attention(x[:, :, :2], x[:, :2], x[:, :2])
    assert len(ran) == 1
    rp.attention(x, x, x)
    rp.attention(x[:, :, :1], x, x, position=rp.Shaw(None, np.ones((3, 8))))
    assert len(ran) == 1


class HeadTurns(rp.Scheme):
    """Turns the queries of each head by an angle of its own, as no scheme of the package does."""

    content = True

    def __init__(self, angles):
        self.angles = angles

    def transform(self, q, k, site):
        turned = (q[..., 0::2] + 1j * q[..., 1::2]) * np.exp(1j * self.angles)[:, None, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(q.shape).astype(site.dtype), k

    def lower(self, q, k, site):
        terms = self.lower_rotated(q, k, site)
        return rp.terms.Terms(terms.query.made(), terms.key.made())

    def lower_rotated(self, q, k, site):
        angles = np.broadcast_to(self.angles[:, None, None], (site.heads, site.q_len, site.head_dim // 2))
        none = np.zeros((1, site.k_len, site.head_dim // 2), site.dtype)
        cos, sin = np.cos(angles).astype(site.dtype), np.sin(angles).astype(site.dtype)
        return rp.terms.Terms(Turned(q, cos, sin, "interleaved"), Turned(k, none + 1, none, "interleaved"))


@pytest.mark.parametrize("q_len", [1, 3])
def test_heads_of_a_group_turn_by_angles_of_their_own(q_len, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 6, q_len, 8), (2, 2, 90, 8), (2, 2, 90, 8)))
    scheme = HeadTurns(rng.standard_normal(6))
    found, expected = (rp.attention(q, k, v, position=scheme, backend=backend) for backend in ("numba", "numpy"))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
