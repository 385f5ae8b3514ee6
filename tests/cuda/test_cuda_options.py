"""Options of a call whose operands are on a device: numbers, gradients, and what is never copied to the host."""

from itertools import pairwise

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from tests.cuda.doubles import DTYPES, EPS, There, draw, expected_of, heads_last, holds, same, there

# In the simulator NumPy warns of the infinities that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

BOUNDS = [0, 3, 3, 7]


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# Of calls with 2 items, 2 heads, 5 queries and 7 keys.
OPTIONS = {
    "sinks of heads": lambda rng: {"sinks": numbers(rng, 2)},
    "sinks of queries": lambda rng: {"sinks": numbers(rng, 2, 2, 5)},
    "no sink": lambda rng: {"sinks": np.array([-np.inf, 1e4], np.float32), "key_lengths": np.array([0, 7])},
    "factors": lambda rng: {"query_scale": 1 + numbers(rng, 5) ** 2},
    "factors of heads": lambda rng: {"query_scale": 1 + numbers(rng, 2, 1) ** 2},
    "chunks": lambda rng: {"rule": rp.Chunked(3, left=1), "causal": True},
    "prefixes": lambda rng: {"rule": rp.Prefix(np.array([2, 6]))},
    "dilated": lambda rng: {"rule": rp.Dilated(2)},
    "selected": lambda rng: {"selected": rng.integers(-1, 7, (2, 5, 3))},
    "cap": lambda rng: {"softcap": 1.5, "mask": numbers(rng, 5, 7)},
    "cap of products": lambda rng: {"softcap": 1.5, "cap_order": "content", "position": rp.ALiBi()},
    "offsets": lambda rng: {"offset": np.array([2, 0]), "causal": True, "sinks": numbers(rng, 2, 1, 5)},
    "all": lambda rng: {
        "sinks": numbers(rng, 2),
        "query_scale": 1 + numbers(rng, 5) ** 2,
        "softcap": 2.0,
        "rule": rp.Chunked(4, left=1),
        "selected": rng.integers(-1, 7, (2, 2, 5, 4)),
        "position": rp.Rotary(6),
    },
}


def sent(options):
    """The options, with the arrays among them on the device."""
    return {name: There(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs(dtype, name, rng, transfers):
    q, k, v = (heads_last(x) for x in draw(rng, dtype))
    options = OPTIONS[name](rng)
    expected = expected_of(q, k, v, **options)
    for given in (options, sent(options)):
        del transfers.up[:], transfers.down[:]
        found = rp.attention(*there(q, k, v), **given, return_lse=True, backend="cuda")
        moved = {"offset": {(2,)}, "mask": {(35,)}, "key_lengths": {(2,)}, "selected": {(30,), (80,)}}
        if name == "offsets":
            # The options of several calls are cut on the host.
            moved["sinks"] = {(10,)}
        read = set().union(*(moved.get(option, set()) for option, x in given.items() if isinstance(x, There)))
        assert set(transfers.down) <= read
        assert not any(holds(transfers.up, x) for x in (q, k, v))
        same(found, expected, dtype)
        room = There(np.zeros(expected[0].shape, DTYPES[dtype]))
        assert rp.attention(*there(q, k, v), **given, out=room, backend="cuda") is room
        np.testing.assert_array_equal(room.x, found[0].copy_to_host())


# What a call may hold for each batch item, with these batch axes; of 2 heads, 3 queries and 5 keys.
HELD = {
    "key_lengths": lambda rng, axes: {"key_lengths": rng.integers(1, 6, axes)},
    "mask": lambda rng, axes: {"mask": rng.random((*axes, 1, 3, 5)) < 0.6},
    "float mask": lambda rng, axes: {"mask": numbers(rng, *axes, 2, 1, 5)},
    "selected": lambda rng, axes: {"selected": rng.integers(-1, 5, (*axes, 3, 2))},
    # All of them different, and beyond what queries see anyway.
    "prefixes": lambda rng, axes: {"rule": rp.Prefix(np.arange(np.prod(axes)).reshape(axes)), "offset": -1},
    "sinks": lambda rng, axes: {"sinks": numbers(rng, *axes, 1, 3)},
    "factors": lambda rng, axes: {"query_scale": numbers(rng, *axes, 2, 3)},
    "labels": lambda rng, axes: {"position": rp.GraphLabels(rng.integers(0, 4, (*axes, 3, 5)), numbers(rng, 4, 2))},
    "positions": lambda rng, axes: {"position": rp.Rotary(6, positions=rng.integers(0, 50, (*axes, 5)))},
}


@pytest.mark.parametrize("axes", [(2, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("name", HELD)
def test_batch_axes(name, axes, rng):
    """Of two batch axes each may be one for all: what repeats is stored once, and its steps are those of no axis."""
    q, k, v = draw(rng, "float64", q_len=3, k_len=5, batch=(2, 3))
    options = HELD[name](rng, axes)
    expected = expected_of(q, k, v, **options)
    # Dropout, of nothing here, keeps a call from the kernel for few queries.
    for operands, more in (((q, k, v), {}), (there(q, k, v), {"dropout": 1e-9})):
        given = options | ({"rng": np.random.default_rng(1), **more} if more else {})
        found = rp.attention(*operands, **given, return_lse=True, backend="cuda")
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients(dtype, name, rng):
    q, k, v = draw(rng, dtype)
    options = OPTIONS[name](rng)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    grad_out = rng.standard_normal((2, 2, 5, 3)).astype(dtype)
    lengths = options.get("key_lengths")
    grad_lse = rng.standard_normal((2, 2, 5)).astype("float64" if dtype == "float64" else "float32")
    if lengths is not None:
        grad_lse[lengths == 0, 0] = 0
    upstream = {"grad_out": grad_out.astype(np.float64), "grad_lse": grad_lse.astype(np.float64)}
    expected = rp.attention_vjp(*wide, **upstream, backend="numpy", **options)
    atol = 400 * EPS["float64" if dtype == "float64" else "float32"]
    for given in (options, sent(options)):
        found = rp.attention_vjp(
            *there(q, k, v), grad_out=There(grad_out), grad_lse=There(grad_lse), backend="cuda", **given
        )
        for letter in "qkv":
            a, b = getattr(found, letter), getattr(expected, letter)
            assert type(a) is DeviceArray
            assert a.dtype == dtype
            np.testing.assert_allclose(
                a.copy_to_host().astype(np.float64), b, rtol=EPS[dtype] / 2, atol=atol * np.abs(b).max()
            )
        for option in ("sinks", "query_scale"):
            a, b = getattr(found, option), getattr(expected, option)
            if option not in options:
                assert a is b is None
                continue
            assert type(a) is (DeviceArray if isinstance(given[option], There) else np.ndarray)
            assert (a.dtype, a.shape) == (np.float32, b.shape)
            a = np.asarray(a)
            assert a.flags.writeable
            # They are float32 in every call.
            np.testing.assert_allclose(a, b, rtol=0, atol=max(atol, 2 * EPS["float32"]) * max(np.abs(b).max(), 1))


@pytest.mark.parametrize("side", [dict, sent])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_segments_are_separate_calls(dtype, side, rng):
    """Bit for bit, forward and back, but for one sum."""
    q, k, v = draw(rng, dtype, q_len=7)
    shared = {"position": rp.ALiBi(), "causal": True, "softcap": 4.0, "backend": "cuda"}
    own = {"mask": rng.random((2, 1, 7, 7)) < 0.8, "sinks": numbers(rng, 2, 2, 7), "query_scale": numbers(rng, 7)}
    bounds = {"segments": np.array(BOUNDS)}
    room = There(np.zeros((2, 2, 7, 3), dtype))
    options = {**shared, **side({**own, **bounds})}
    out, lse = rp.attention(*there(q, k, v), out=room, return_lse=True, **options)
    assert out is room
    alone = rp.attention(*there(q, k, v), **options)
    assert type(lse) is type(alone) is DeviceArray
    np.testing.assert_array_equal(alone.copy_to_host(), room.x)
    upstream = numbers(rng, *room.x.shape).astype(dtype), np.asarray(lse) * 0 + 1
    found = rp.attention_vjp(*there(q, k, v), grad_out=There(upstream[0]), grad_lse=There(upstream[1]), **options)
    for a, b in pairwise(BOUNDS):
        if a == b:
            continue
        rows = slice(a, b)
        operands = there(*(x[..., rows, :] for x in (q, k, v)))
        part = {"mask": own["mask"][..., rows, rows], "sinks": own["sinks"][..., rows]}
        part["query_scale"] = own["query_scale"][rows]
        one_out, one_lse = rp.attention(*operands, return_lse=True, **shared, **part)
        np.testing.assert_array_equal(room.x[..., rows, :], one_out.copy_to_host())
        np.testing.assert_array_equal(lse.copy_to_host()[..., rows], one_lse.copy_to_host())
        grads = {"grad_out": There(upstream[0][..., rows, :]), "grad_lse": There(upstream[1][..., rows])}
        one = rp.attention_vjp(*operands, **grads, **shared, **part)
        for letter in "qkv":
            whole, piece = getattr(found, letter).copy_to_host(), getattr(one, letter).copy_to_host()
            np.testing.assert_array_equal(whole[..., rows, :], piece)
        np.testing.assert_array_equal(np.asarray(found.sinks)[..., rows], one.sinks)
        # Of numbers that items and heads share, the sum has another order.
        whole, piece = np.asarray(found.query_scale)[rows], one.query_scale
        np.testing.assert_allclose(whole, piece, rtol=0, atol=16 * EPS["float32"] * np.abs(piece).max())


def test_segments_of_one_head_and_of_other_lengths_of_keys(rng):
    q, k, v = (x[0, 0] for x in draw(rng))
    bounds = ([0, 2, 5], There(np.array([0, 3, 7])))
    found = rp.attention(*there(q, k, v), segments=bounds, backend="cuda", return_lse=True)
    assert found[0].shape == (5, 3)
    same(found, expected_of(q, k, v, segments=([0, 2, 5], [0, 3, 7])), "float32")


@pytest.mark.parametrize("side", [dict, sent])
def test_gradient_of_a_mask(side, rng):
    q, k, v = draw(rng)
    mask = numbers(rng, 2, 5, 7)
    mask[0, 1, 2] = -np.inf
    upstream = numbers(rng, 2, 2, 5, 3)
    call = {"position": rp.ALiBi(), "mask_gradient": True}
    expected = rp.attention_vjp(q, k, v, mask=mask, grad_out=upstream, backend="numpy", **call)
    found = rp.attention_vjp(*there(q, k, v), **side({"mask": mask}), grad_out=There(upstream), backend="cuda", **call)
    assert type(found.mask) is (DeviceArray if side is sent else np.ndarray)
    np.testing.assert_allclose(np.asarray(found.mask), expected.mask, rtol=0, atol=100 * EPS["float32"])
    assert found.position.keys() == expected.position.keys()


def test_calls_without_queries_or_keys(rng):
    for q_len, k_len in ((0, 3), (3, 0)):
        q, k, v = draw(rng, q_len=q_len, k_len=k_len)
        options = {"sinks": numbers(rng, 2), "query_scale": numbers(rng, q_len)}
        found = rp.attention(*there(q, k, v), **options, backend="cuda", return_lse=True)
        same(found, expected_of(q, k, v, **options), "float32")
        grad = rp.attention_vjp(
            *there(q, k, v), **options, grad_out=There(np.ones((2, 2, q_len, 3), np.float32)), backend="cuda"
        )
        np.testing.assert_array_equal(grad.sinks, [0, 0])
        assert grad.query_scale.shape == (q_len,)


def test_a_row_that_nobody_asks_about_has_no_gradient(rng):
    q, k, v = draw(rng)
    v[0, 0, 0, 0] = np.inf
    upstream = numbers(rng, 2, 2, 5, 3)
    upstream[0, :, :, 0] = 0
    sinks = numbers(rng, 2, 2, 5)
    found = rp.attention_vjp(*there(q, k, v), sinks=sinks, grad_out=There(upstream), backend="cuda")
    expected = rp.attention_vjp(q, k, v, sinks=sinks, grad_out=upstream, backend="numpy")
    np.testing.assert_allclose(found.sinks, expected.sinks, rtol=0, atol=100 * EPS["float32"])


@pytest.mark.parametrize("far", [True, False])
def test_what_is_refused(far, rng):
    q, k, v = draw(rng)
    side = There if far else np.asarray
    for options, message in (
        ({"sinks": side(np.zeros(3, np.float32))}, r"sinks: shape \(3, 1\) does not broadcast"),
        ({"sinks": side(np.zeros(2, np.int32))}, "sinks: expected dtype float16"),
        ({"query_scale": side(np.zeros((4,), np.float32))}, r"query_scale: shape \(4,\) does not broadcast"),
        ({"selected": side(np.full((2, 5, 1), 7))}, "selected: expected -1 ... 6, found 7"),
        ({"segments": side(np.array([0, 4]))}, "segments: expected cumulative lengths from 0 to the 5 queries"),
        ({"segments": side(np.array([0.0, 5.0]))}, "segments: expected integers"),
        ({"offset": side(np.array([1, 2, 3]))}, "offset: batch axes"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            rp.attention(*there(q, k, v), backend="cuda", **options)
        with pytest.raises(rp.RelposError, match=message):
            rp.attention_vjp(*there(q, k, v), grad_out=There(np.ones((2, 2, 5, 3), "f4")), backend="cuda", **options)
    upstream = There(np.ones((2, 2, 5, 3), np.float32))
    with pytest.raises(rp.RelposValueError, match="mask_gradient: cannot be combined with segments"):
        rp.attention_vjp(
            *there(q, k, v), segments=([0, 5], [0, 7]), mask_gradient=True, grad_out=upstream, backend="cuda"
        )
    with pytest.raises(rp.RelposValueError, match=r"grad_out: expected shape \(2, 2, 5, 3\)"):
        rp.attention_vjp(*there(q, k, v), segments=([0, 5], [0, 7]), grad_out=There(q), backend="cuda")
    with pytest.raises(rp.RelposValueError, match="q: expected shape"):
        rp.attention(*there(q[0, 0, 0], k, v), segments=([0, 5], [0, 7]), backend="cuda")
