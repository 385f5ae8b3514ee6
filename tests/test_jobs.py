"""What the CPU kernels keep of a call for later ones of the same sizes: no bit of a result depends on it."""

import ml_dtypes
import numba
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.kernels._numba.launch import arrays, launcher
from relpos_np.kernels._numba.plan import biases, job

# Queries, keys, head size and value channels of a call for each of the three kernels.
SIZES = {"streaming": (40, 300, 8, 5), "windows": (16, 16, 8, 16), "decoding": (2, 300, 8, 5)}


def random(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def operands(rng, sizes, batch=(2,), heads=4, kv_heads=4, dtype=np.float32):
    q_len, k_len, depth, v_dim = sizes
    shapes = ((heads, q_len, depth), (kv_heads, k_len, depth), (kv_heads, k_len, v_dim))
    return tuple(random(rng, *batch, *shape, dtype=dtype) for shape in shapes)


def turned(x):
    """The same numbers, heads behind lengths."""
    return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def spread(x):
    """The same numbers, with others between them."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


# Ways in which two calls may differ and nearly nothing else: operands, then options.
CALLS = {
    "plain": lambda rng, sizes: (operands(rng, sizes), {}),
    "float64": lambda rng, sizes: (operands(rng, sizes, dtype=np.float64), {}),
    "half precision": lambda rng, sizes: (operands(rng, sizes, dtype=ml_dtypes.bfloat16), {}),
    "one batch item": lambda rng, sizes: (operands(rng, sizes, batch=(1,)), {}),
    "batch axes": lambda rng, sizes: (operands(rng, sizes, batch=(2, 1)), {}),
    "grouped": lambda rng, sizes: (operands(rng, sizes, kv_heads=2), {}),
    "one head": lambda rng, sizes: (operands(rng, sizes, kv_heads=1), {}),
    "q turned": lambda rng, sizes: ((turned((x := operands(rng, sizes))[0]), *x[1:]), {}),
    "k turned": lambda rng, sizes: (((x := operands(rng, sizes))[0], turned(x[1]), x[2]), {}),
    "v turned": lambda rng, sizes: ((*(x := operands(rng, sizes))[:2], turned(x[2])), {}),
    "spread": lambda rng, sizes: (tuple(map(spread, operands(rng, sizes))), {}),
    "shared by the batch": lambda rng, sizes: (((x := operands(rng, sizes))[0], x[1][:1], x[2][:1]), {}),
    "offset": lambda rng, sizes: (operands(rng, sizes), {"offset": 1}),
    "scale": lambda rng, sizes: (operands(rng, sizes), {"scale": 0.3}),
    "causal": lambda rng, sizes: (operands(rng, sizes), {"causal": True}),
    "window": lambda rng, sizes: (operands(rng, sizes), {"window": (9, None)}),
    "a window on the right": lambda rng, sizes: (operands(rng, sizes), {"window": (None, 9)}),
    "t5": lambda rng, sizes: (operands(rng, sizes), {"position": rp.T5(random(rng, 32, 4))}),
    "two tables": lambda rng, sizes: (operands(rng, sizes), {"position": (rp.T5(random(rng, 32, 4)), rp.ALiBi())}),
    "pairs": lambda rng, sizes: (
        operands(rng, sizes),
        {"position": rp.GraphLabels(rng.integers(0, 9, sizes[:2]), random(rng, 9, 4))},
    ),
    "pairs of each batch item": lambda rng, sizes: (
        operands(rng, sizes),
        {"position": rp.GraphLabels(rng.integers(0, 9, (2, *sizes[:2])), random(rng, 9, 4))},
    ),
    "rotary": lambda rng, sizes: (operands(rng, sizes), {"position": rp.Rotary()}),
    "rotary, and half precision": lambda rng, sizes: (
        operands(rng, sizes, dtype=ml_dtypes.bfloat16),
        {"position": rp.Rotary()},
    ),
    # With sinks, what kernels write is not in the dtype of the operands yet.
    **{
        f"{name}, and sinks": lambda rng, sizes, dtype=dtype: (
            operands(rng, sizes, dtype=dtype),
            {"sinks": random(rng, 4)},
        )
        for name, dtype in {
            "plain": np.float32,
            "half precision": ml_dtypes.bfloat16,
            "the other half precision": np.float16,
        }.items()
    },
    "the other half precision": lambda rng, sizes: (operands(rng, sizes, dtype=np.float16), {}),
    "key lengths": lambda rng, sizes: (operands(rng, sizes), {"key_lengths": np.array([7, sizes[1]])}),
    "mask": lambda rng, sizes: (operands(rng, sizes), {"mask": rng.random((1, *sizes[:2])) < 0.8}),
    "shaw": lambda rng, sizes: (
        operands(rng, sizes),
        {"position": rp.Shaw(random(rng, 9, 8), random(rng, 9, sizes[3]))},
    ),
}
NOT_KEPT = {"pairs of each batch item", "key lengths", "mask", "shaw"}


def results(name, sizes, seed):
    """The bits of a call with and without what may be asked for beside."""
    x, options = CALLS[name](np.random.default_rng(seed), sizes)
    out, lse = rp.attention(*x, **options, return_lse=True, backend="numba")
    room = np.full_like(out, np.nan)
    rp.attention(*x, **options, out=room, backend="numba")
    return out, lse, room


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def known(monkeypatch):
    """The plans that are kept, none at first, and used by every call."""
    plans = {}
    monkeypatch.setattr(job, "_known", plans)
    monkeypatch.setattr(repeated, "form", lambda *_: None)
    return plans


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_calls_after_others_have_the_bits_of_first_calls(sizes, known, rng):
    expected = {}
    for name in CALLS:
        for seed in (1, 2):
            known.clear()
            expected[name, seed] = results(name, sizes, seed)
    order = [list(expected)[n] for n in rng.permutation(len(expected))]
    for calls in (order, order[::-1]):
        known.clear()
        for name, seed in calls:
            same(results(name, sizes, seed), expected[name, seed])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nothing_is_planned_twice(sizes, known, monkeypatch):
    planned = []
    fill = job.fill
    monkeypatch.setattr(
        job, "fill", lambda call, *args, **options: planned.append(call) or fill(call, *args, **options)
    )
    for name in CALLS:
        known.clear()
        for seed in (1, 2):
            planned.clear()
            results(name, sizes, seed)
            # Sinks need the log-sum-exp in any case.
            first = 1 if name.endswith("sinks") else 2
            assert len(planned) == (2 if name in NOT_KEPT else first if seed == 1 else 0), name


def test_each_number_of_threads_has_its_own(known):
    sizes = (260, 400, 8, 5)
    expected = results("t5", sizes, 1)
    before = numba.get_num_threads()
    try:
        for threads in (1, before, 1, before):
            numba.set_num_threads(threads)
            same(results("t5", sizes, 1), expected)
    finally:
        numba.set_num_threads(before)
    assert {kept.division.threads for kept in known.values()} == {1, before}


def test_few_are_kept_and_none_of_large_calls(known, monkeypatch):
    monkeypatch.setattr(job, "MOST_PLANS", 3)
    for length in range(1, 12):
        x = np.ones((1, length, 8))
        rp.attention(x, x, x)
        assert 1 <= len(known) <= 3
    known.clear()
    x = np.ones((job.MOST_ITEMS + 1, 1, 9, 8))
    rp.attention(x, x, x)
    assert not known
    rp.attention(x[1:], x[1:], x[1:])
    assert len(known) == 1


def test_no_operand_is_kept(known):
    """Neither operands nor results, nor what copies of them were made."""
    for name in CALLS:
        results(name, SIZES["streaming"], 1)
    assert known
    for kept in known.values():
        for x in kept.lasting:
            assert x.base is None
            assert x.nbytes <= 48 * job.MOST_ITEMS
        assert all(isinstance(x, int | float) for x in kept.fields.values())


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_addresses(shape, rng):
    """They are read from the head of an array; NumPy says where its data is."""
    x = rng.standard_normal((4, *shape, 3))
    for y in (x, x[1:], x[..., 1:], x[::-1], np.broadcast_to(x, (2, *x.shape)), x.astype(np.uint8)):
        assert arrays.address_of(y) == y.__array_interface__["data"][0]


def test_a_workspace_holds_what_was_asked_for(monkeypatch):
    """Whatever was lent before, down to a cache line more or less: it is kept only if there is room."""
    monkeypatch.setattr(launcher, "_local", type(launcher._local)())
    for size in range(64, 64 * 200, 64):
        for wanted, threads in ((size, 1), (size + 64, 1), (size - 63, 2)):
            memory, begin, stride = launcher.lend(wanted, threads)
            assert begin % 64 == 0
            assert stride >= wanted
            assert arrays.address_of(memory) <= begin
            assert begin + threads * stride <= arrays.address_of(memory) + memory.nbytes


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_plan_keeps_the_arrays_that_it_names(sizes, rng, monkeypatch):
    """Nobody else needs to: memory that other caches gave back would be read."""
    monkeypatch.setattr(job, "_known", {})
    monkeypatch.setattr(repeated, "form", lambda *_: None)
    q, k, v = operands(rng, sizes)
    expected = rp.attention(q, k, v, return_lse=True)
    biases._no_bias.cache_clear()
    (plan,) = job._known.values()
    named = [plan.fields[name] for name in ("batches", "bias")]
    assert all(any(arrays.address_of(x) == address for x in plan.lasting) for address in named)
    garbage = [np.full(size, np.nan) for size in range(1, 400) for _ in range(4)]
    for found, wanted in zip(rp.attention(q, k, v, return_lse=True), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    del garbage
