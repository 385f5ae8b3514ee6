"""The backward kernel interpreted: gradients of every kind of term, divided into parts or not, with checked memory."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, TILED
from tests.interpreted.agreement import assert_gradients_agree, gradients, shut_keys
from tests.interpreted.machine import KINDS_OF_ORDER, interpreted
from tests.interpreted.test_interpreted_attention import DTYPES, STRESS, case_of
from tests.strategies import KINDS, SHAW_PER_HEAD, T5_CAUSAL, Position, cases, grid

CASES = {
    "plain": ((), {"q_len": 25}),
    "open tiles": ((), {"q_len": 24, "k_len": BLOCK_KEYS, "depth": 20, "v_dim": 16}),
    "t5, causal": ((T5_CAUSAL,), {"causal": True, "q_len": 97}),
    "band and lengths": ((KINDS["t5"],), {"window": (20, 3), "batch": True, "key_lengths": (150, 190), "q_len": 99}),
    "shaw, both sides": ((SHAW_PER_HEAD, KINDS["alibi key"]), {"causal": True, "q_len": 13, "k_len": 31}),
    "more ranges of keys": ((KINDS["deberta"], SHAW_PER_HEAD), {"q_len": 20, "k_len": BLOCK_KEYS + 9, "depth": 3}),
    "several ranges of queries": ((KINDS["deberta"], SHAW_PER_HEAD), {"q_len": 99, "k_len": 20, "depth": 3}),
    "transformer_xl": ((KINDS["transformer_xl"],), {"causal": True, "q_len": 99, "k_len": 210}),
    "conformer and a bias": ((KINDS["transformer_xl conformer"], KINDS["t5"]), {"q_len": 25, "k_len": 40}),
    "grid": ((grid(20, 37),), {"q_len": 20, "k_len": 37}),
    "no key for some": ((KINDS["t5"],), {"q_len": 30, "k_len": 20, "causal": True}),
    "turned": ((Position("rotary", choices=(1,)),), {"q_len": 9, "k_len": 9}),
}


def call_of(name, dtype):
    positions, options = CASES[name]
    case = case_of(*positions, **options)
    return case, case.operands(dtype), case.options(dtype)


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_call(name):
    """On three threads a head is divided into ranges of queries and of keys."""
    dtype, threads = DTYPES[sum(map(ord, name)) % 2], (None, 3)[len(name) % 2]
    case, operands, options = call_of(name, dtype)
    given = {"excluded": shut_keys(case), "threads": threads}
    machine, _ = assert_gradients_agree(*operands, options, dtype=dtype, **given)
    assert machine.launches[f"backward_{np.dtype(dtype)}"] == 1


@STRESS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_order_of_pieces_changes_nothing(name, dtype):
    case, operands, options = call_of(name, dtype)
    ways = [{"order": order, "poison": poison} for order in KINDS_OF_ORDER for poison in (0xFF, 0x4B)]
    first, *others = (
        assert_gradients_agree(*operands, options, dtype=dtype, threads=3, excluded=shut_keys(case), **way)[1]
        for way in ways
    )
    for other in others:
        for name_, x in first.items():
            np.testing.assert_array_equal(other[name_], x)


SCHEMES = ("graph", "irpe", "cope", "deberta", "decomposed")


@pytest.mark.parametrize(
    ("name", "threads"),
    [pytest.param(n, t, marks=() if (n, t) == ("deberta", 2) else STRESS) for n in SCHEMES for t in (None, 2)],
)
def test_terms_of_examples(name, threads):
    """Whole schemes: maps of each batch item, products with keys by a map of pairs, biases of every pair."""
    variants = rp.SCHEMES[name].variants or (None,)
    for variant in variants[:1] if name == "deberta" else variants:
        e = testing.example(name, variant=variant, dtype="float64")
        assert_gradients_agree(e.q, e.k, e.v, {**e.kwargs, "position": e.position}, threads=threads)


@pytest.mark.parametrize("kind", ["dropout", "bool", "float", "row"])
def test_masks(kind, rng):
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (13, 21, 21))
    masks = {"bool": rng.random((13, 21)) < 0.5, "row": rng.random((13, 1)) < 0.5}
    masks["float"] = np.where(masks["bool"], 0.5, -np.inf)
    options = {"dropout": 0.4, "state": 2} if kind == "dropout" else {"mask": masks[kind]}
    position = rp.Shaw(rng.standard_normal((5, 5)), rng.standard_normal((5, 5)))
    assert_gradients_agree(q, k, v, {**options, "position": position})


@pytest.mark.parametrize("unit", ["emulated tiles" if TILED else "emulated", "none"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision(name, dtype, unit, monkeypatch):
    """Read and written as it lies, with and without products of pairs, on any processor."""
    monkeypatch.setattr(job, "UNIT", unit)
    case, operands, options = call_of(name, np.float32)
    half = [x.astype(dtype) for x in operands]
    shape = (*np.broadcast_shapes(*(x.shape[:-3] for x in half)), *half[0].shape[-3:-1], half[2].shape[-1])
    grad = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    with interpreted(threads=(None, 3)[len(name) % 2], excluded=shut_keys(case)) as machine:
        found = gradients(rp.attention_vjp(*half, grad_out=grad, **options, backend="numba"))
    # Queries that a scheme has changed are not rounded again.
    made = name in {"turned", "transformer_xl", "conformer and a bias"}
    paired = unit != "none" and dtype == ml_dtypes.bfloat16 and not made
    assert machine.launches["backward_bfloat16" if paired else "backward_float32"] == 1
    expected = gradients(rp.attention_vjp(*half, grad_out=grad, **options, backend="terms"))
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        assert found[key].dtype == x.dtype
        wide, given = x.astype(np.float64), found[key].astype(np.float64)
        assert np.abs(given - wide).max(initial=0) <= 0.02 * max(np.abs(wide).max(initial=0), 1.0), key


@pytest.mark.parametrize("unit", ["emulated tiles" if TILED else "emulated", "none"])
def test_a_key_that_is_not_finite(unit, monkeypatch, rng):
    """Only queries that may attend it have no gradient, also where keys are multiplied in pairs."""
    monkeypatch.setattr(job, "UNIT", unit)
    q, k, v, grad = rng.standard_normal((4, 2, 25, 6)).astype(ml_dtypes.bfloat16)
    k[:, 20, 1], q[..., 1] = np.inf, np.abs(q[..., 1])
    with interpreted() as machine:
        found = rp.attention_vjp(q, k, v, grad_out=grad, causal=True, backend="numba").q
    assert machine.launches["backward_float32" if unit == "none" else "backward_bfloat16"] == 1
    before = slice(0, 20)
    operands = (x[:, before] for x in (q, k, v))
    expected = rp.attention_vjp(*operands, grad_out=grad[:, before], causal=True, backend="terms").q
    np.testing.assert_allclose(found[:, before].astype(float), expected.astype(float), rtol=0.02, atol=0.02)
    assert np.isnan(found[:, 20:].astype(float)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shared", ["", "q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_operands_that_batch_items_share(shared, dtype, rng):
    """Only gradients of the others are stored in half precision, each in rows of its own size."""
    sizes = {"q": (5, 6), "k": (7, 6), "v": (7, 3)}
    operands = [rng.standard_normal((1 if x in shared else 3, 2, *sizes[x])).astype(dtype) for x in "qkv"]
    batch = max(len(x) for x in operands)
    given = {"grad_out": rng.standard_normal((batch, 2, 5, 3)).astype(dtype)}
    with interpreted():
        found = rp.attention_vjp(*operands, **given, backend="numba")
    wide = [x.astype(np.float64) for x in operands]
    expected = rp.attention_vjp(*wide, grad_out=given["grad_out"].astype(np.float64), backend="numpy")
    for name, x in zip("qkv", operands, strict=True):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (x.dtype, x.shape)
        # Operands are exact; what is multiplied in pairs and the result are rounded.
        room = 0.02 if np.dtype(dtype).itemsize == 2 else 1e-5
        assert np.abs(a.astype(np.float64) - b).max() <= room * np.abs(b).max(), name


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_queries_and_keys_that_turn_as_they_are_read(layout, dtype, monkeypatch, rng):
    """With trained frequencies, channels that do not turn, grouped heads and positions; in pairs if that is allowed."""
    monkeypatch.setattr(job, "UNIT", "emulated tiles" if TILED else "emulated")
    q, (k, v) = rng.standard_normal((2, 4, 30, 11)), rng.standard_normal((2, 2, 2, 210, 11))
    position = rp.Rotary(
        frequencies=rng.uniform(0.001, 1, (1, 2, 5)), layout=layout, positions=rng.integers(0, 900, (2, 1, 210))
    )
    q, k, v, grad = (x.astype(dtype) for x in (q, k, v, rng.standard_normal(q.shape)))
    lengths = np.array([210, 201])
    options = {"position": position, "key_lengths": lengths, "offset": 180, "causal": True, "precision": "medium"}
    options["grad_out"] = grad
    with interpreted(threads=2, excluded=np.arange(210) >= lengths[:, None]) as machine:
        found = gradients(rp.attention_vjp(q, k, v, **options, backend="numba"))
    kernel = "float64" if dtype == np.float64 else "bfloat16"
    assert machine.launches[f"backward_{kernel}"] == 1
    expected = gradients(rp.attention_vjp(q, k, v, **options, backend="terms"))
    for name, x in expected.items():
        wide, given = x.astype(np.float64), found[name].astype(np.float64)
        rounding = 1e-12 if dtype == np.float64 else 0.03
        assert np.abs(given - wide).max() <= rounding * max(np.abs(wide).max(), 1.0), name


@pytest.mark.parametrize("threads", [None, 3])
def test_numbers_that_are_not_finite(rng, threads):
    """What is excluded from some queries only reaches the gradients of the others alone."""
    n = 12
    q, k, v = rng.standard_normal((3, 1, n, 5))
    k[0, 8, 2] = np.inf
    q[0, 3, 1] = np.nan
    g = rng.standard_normal((1, n, 5))
    g[0, 5, 0] = np.nan
    options = {"causal": True, "grad_out": g}
    with interpreted(threads=threads):
        found = gradients(rp.attention_vjp(q, k, v, **options, backend="numba"))
    expected = gradients(rp.attention_vjp(q, k, v, **options, backend="numpy"))
    for name, x in expected.items():
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(x), err_msg=name)
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12)
    assert np.isfinite(found["q"][0, :3]).all()
    assert np.isnan(found["q"]).any()


@STRESS
@given(cases(small=True), st.sampled_from(KINDS_OF_ORDER), st.sampled_from((None, 3)))
@settings(max_examples=60)
def test_any_small_call(case, order, threads):
    options = {"threads": threads, "order": order, "excluded": shut_keys(case)}
    assert_gradients_agree(*case.operands(np.float64), case.options(np.float64), **options)
