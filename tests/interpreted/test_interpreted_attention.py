"""The streaming kernel interpreted: every kind of term, mask and band, on awkward lengths, with checked memory."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, TILED
from relpos_np.testing.cases import edges
from tests.interpreted.agreement import assert_agrees
from tests.interpreted.machine import KINDS_OF_ORDER, interpreted
from tests.strategies import KINDS, SHAW_PER_HEAD, T5_CAUSAL, Case, Mask, Position, cases, grid

DTYPES = (np.float64, np.float32)
BATCH = ((2,), (1,), (2,))
ALONE = ((), (), ())
STRESS = pytest.mark.stress


def case_of(*positions, q_len=49, k_len=BLOCK_KEYS + 9, batch=False, **options):
    """Grouped heads, lengths beyond a block, and dimensions that are no multiple of anything."""
    options = {"kv_heads": 1, "group": 2, "depth": 7, "v_dim": 5} | options
    lead = (BATCH, (2,)) if batch else (ALONE, ())
    return Case(5, *lead, q_len=q_len, k_len=k_len, positions=positions, **options)


CASES = {
    "plain": case_of(depth=33),
    "two panels, one query more": case_of(q_len=25, k_len=97, v_dim=33),
    "no key for the first queries": case_of(causal=True, offset=-5, q_len=30, k_len=31),
    "t5, causal": case_of(T5_CAUSAL, causal=True),
    "t5 and lengths": case_of(KINDS["t5"], batch=True, key_lengths=(3, 150), q_len=17),
    "band": case_of(KINDS["t5"], window=(30, 5), q_len=97),
    "shaw, both sides": case_of(SHAW_PER_HEAD, causal=True, q_len=26),
    "shaw, far": case_of(KINDS["shaw"], window=(None, 60)),
    "transformer_xl": case_of(KINDS["transformer_xl"], causal=True, q_len=97),
    "conformer, no causality": case_of(KINDS["transformer_xl conformer"], depth=16),
    "conformer and a bias": case_of(KINDS["transformer_xl conformer"], KINDS["alibi key"], q_len=31, k_len=65),
    "grid": case_of(grid(20, 70), q_len=20, k_len=70, causal=True, kv_heads=2),
    "bool mask": case_of(batch=True, mask=Mask("bool", (2, 2, 27, 201), 0.5), q_len=27),
    "float mask": case_of(mask=Mask("float", (27, 201), 0.5), q_len=27),
    "mask of queries, bool": case_of(mask=Mask("bool", (27, 1), 0.5), q_len=27, k_len=20),
    "mask of queries, float": case_of(mask=Mask("float", (27, 1), 0.5), q_len=27, k_len=20),
    "mask of keys with holes": case_of(mask=Mask("bool", (201,), 0.5), q_len=27),
    "mask of keys, float": case_of(mask=Mask("float", (1, 201), 0.5), q_len=27),
    "nothing allowed": case_of(mask=Mask("bool", (27, 201), 0.0), q_len=27),
    "turned": case_of(Position("rotary", choices=(1,)), causal=True, q_len=33),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_call(name, monkeypatch):
    """Without planes, on any processor; `test_float32_by_planes` has them."""
    monkeypatch.setattr(job, "UNIT", "none")
    dtype = DTYPES[sum(map(ord, name)) % 2]
    machine = assert_agrees(CASES[name], dtype)
    assert machine.launches[f"attend_{np.dtype(dtype)}"] == 1


@STRESS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_call_on_three_threads(name, dtype):
    assert_agrees(CASES[name], dtype, threads=3, order="backwards")


@pytest.mark.parametrize("name", ["plain", "shaw, both sides", "conformer and a bias", "bool mask"])
def test_neither_order_nor_old_memory_matters(name):
    """Any thread may take any piece of work at any time, and what the workspace and the result held is not used."""
    ways = [{"order": "in turn"}, {"order": "backwards", "poison": 0x4B}]
    found = []
    for way in ways:
        with interpreted(threads=3, **way):
            found.append(CASES[name].attention(np.float32, "numba"))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------------------------------------- what strategies lack


def compare(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(rng, causal):
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (13, 21, 21))
    position = rp.Shaw(rng.standard_normal((5, 5)), rng.standard_normal((5, 5)))

    def call(backend):
        source = np.random.default_rng(1)
        options = {"dropout": 0.4, "rng": source, "causal": causal, "position": position}
        return rp.attention(q, k, v, **options, backend=backend, return_lse=True)

    with interpreted():
        found = call("numba")
    compare(found, call("numpy"))


@pytest.mark.parametrize("name", ["deberta", *(pytest.param(n, marks=STRESS) for n in ("cope", "graph", "irpe"))])
def test_terms_of_examples(name):
    """Whole schemes: maps of each batch item, products with keys by a map of pairs, biases of every pair."""
    for variant in rp.SCHEMES[name].variants[:2] or (None,):
        e = testing.example(name, variant=variant, dtype="float64")
        with interpreted():
            found = rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs, backend="numba", return_lse=True)
        expected = rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs, backend="numpy", return_lse=True)
        compare(found, expected)


@STRESS
@pytest.mark.parametrize("name", [name for name, info in rp.SCHEMES.items() if info.kind == "attention"])
def test_every_scheme(name):
    """Where key lengths exclude the last keys, no kernel reads them."""
    for variant in rp.SCHEMES[name].variants or (None,):
        base = testing.example(name, variant=variant, dtype="float64", size="tiny")
        for e in (base, *(e for e in edges(base) if e.edge in ("nan_excluded", "window"))):
            lengths = e.kwargs.get("key_lengths")
            shut = None if lengths is None else np.arange(e.k.shape[-2]) >= lengths[:, None]
            with interpreted(excluded=shut):
                found = rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs, backend="numba", return_lse=True)
            expected = rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs, backend="numpy", return_lse=True)
            compare(found, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_numbers_that_are_not_finite(rng, masked):
    """Row 7 and 8 of the faults: what no query may attend is not read; what some may reaches them alone."""
    q, k, v = (rng.standard_normal((1, n, 5)) for n in (12, 40, 40))
    v[0, 3, 2], v[0, 36, 4] = np.nan, np.inf
    options = {"causal": True}
    if masked:
        options["mask"] = np.ones((12, 40), bool)
        options["mask"][::2, 3] = options["mask"][0] = False
    with interpreted():
        found = rp.attention(q, k, v, **options, backend="numba")
    expected = rp.attention(q, k, v, **options, backend="numpy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.isnan(found).any()
    assert np.isfinite(found[:, :, :2]).all()


@pytest.mark.parametrize("stored", ["contiguous", "packed", "heads inside", "reversed"])
def test_layouts(stored, rng):
    """Operands that are parts of one array: nothing between their rows is touched."""
    shape = {"packed": (2, 20, 3, 3, 6), "heads inside": (3, 2, 20, 3, 6), "reversed": (3, 2, 3, 20, 6)}
    x = rng.standard_normal(shape.get(stored, (3, 2, 3, 20, 6)))
    if stored == "packed":
        q, k, v = (x[:, :, n].swapaxes(1, 2) for n in range(3))
    elif stored == "heads inside":
        q, k, v = x.swapaxes(2, 3)
    else:
        q, k, v = x[..., ::-1, :] if stored == "reversed" else x
    with interpreted():
        found = rp.attention(q, k, v, causal=True, backend="numba", return_lse=True)
    compare(found, rp.attention(q, k, v, causal=True, backend="numpy", return_lse=True))


def test_no_output_but_the_log_sum_exp(rng):
    q, k = rng.standard_normal((2, 2, 12, 5))
    v = np.zeros((2, 12, 0))
    with interpreted() as machine:
        found = rp.attention(q, k, v, causal=True, backend="numba", return_lse=True)
    assert machine.launches["attend_float64"] == 1
    compare(found, rp.attention(q, k, v, causal=True, backend="numpy", return_lse=True))


HALVES = {
    **{
        name: CASES[name]
        for name in ("plain", "two panels, one query more", "t5, causal", "band", "bool mask", "float mask")
    },
    "value terms": CASES["shaw, both sides"],
    "a window": case_of(KINDS["t5"], q_len=49, k_len=49, depth=33, v_dim=32),
    "a window with a mask": case_of(mask=Mask("bool", (30, 63), 0.5), q_len=30, k_len=63, v_dim=16),
}


@pytest.mark.parametrize("unit", ["emulated tiles" if TILED else "emulated", "none"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_of_many_queries(name, dtype, unit, monkeypatch):
    """Read and written as it lies, with and without products of pairs, on any processor."""
    monkeypatch.setattr(job, "UNIT", unit)
    case = HALVES[name]
    q, k, v = (x.astype(dtype) for x in case.operands(np.float32))
    v[..., 3, 0], v[..., 5, 1], v[..., 6, 2] = np.inf, -np.inf, np.nan
    with interpreted() as machine:
        found = rp.attention(q, k, v, **case.options(np.float32), backend="numba")
    kind = "bfloat16" if unit != "none" and dtype == ml_dtypes.bfloat16 else "float32"
    tiled = "planes" if unit == "emulated tiles" and kind == "float32" else kind
    assert set(machine.launches) <= {f"attend_{tiled}", f"windows_{kind}", "product_float32"}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    with np.errstate(invalid="ignore"):
        expected = rp.attention(*wide, **case.options(np.float64), backend="numpy")
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("precision", "kind"), [("highest", "float32"), ("high", "float32"), ("medium", "bfloat16")])
def test_products_that_a_precision_allows(precision, kind, monkeypatch, rng):
    """Only "medium", or none that was chosen, multiplies what is stored as bfloat16 in pairs."""
    monkeypatch.setattr(job, "UNIT", "emulated")
    q, k, v = rng.standard_normal((3, 1, 25, 8)).astype(ml_dtypes.bfloat16)
    with interpreted() as machine:
        rp.attention(q, k, v, precision=precision, backend="numba")
    assert set(machine.launches) <= {f"attend_{kind}", f"windows_{kind}"}


@pytest.fixture
def tiles(monkeypatch):
    """A host that plans for matrix tiles, whose products the interpreter makes on any processor."""
    monkeypatch.setattr(job, "UNIT", "emulated tiles")


@pytest.mark.parametrize("name", CASES)
def test_float32_by_planes(name, tiles):
    """Within the promise of float32, whatever is added to scores and values."""
    machine = assert_agrees(CASES[name], np.float32)
    assert set(machine.launches) - {"product_float32"} == {"attend_planes"}


@pytest.mark.parametrize("name", ["plain", "shaw, both sides", "bool mask"])
def test_two_planes(name, tiles):
    case = CASES[name]
    with interpreted(threads=2) as machine, rp.use_precision("high"):
        found = case.attention(np.float32, "numba")
    assert machine.launches["attend_planes"]
    expected = case.attention(np.float64, "numpy")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
    # Two planes are not three.
    assert np.abs(found[0] - expected[0]).max() > 1e-6


def test_what_planes_do_not_stand_for(monkeypatch, rng):
    """NaN, infinity, the largest and the smallest numbers, some of them excluded: as without planes."""
    q, k, v = (rng.standard_normal((2, n, 9)).astype(np.float32) for n in (30, 250, 250))
    # Key 150 stands in another panel than the first, in which no key that is odd has its column.
    q[0, 7, 2], k[:, 3, 1], k[:, 200, 0], k[:, [9, 150], 8] = np.inf, np.nan, -np.inf, 3.4e38
    v[:, 8, 4], v[:, 30, 3], v[:, 31, :3], v[:, 201, 2] = np.nan, 3.4e38, 1e-41, 1e-20
    mask = rng.random((30, 250)) < 0.5
    mask[:, 8] = mask[::2, 3] = mask[1::3, 9] = mask[::3, 150] = False
    mask[5:20, 30], mask[:, 0] = False, True
    # Scores of -inf alone leave nothing to attend; planes of infinity make NaN of them.
    q[1, 22, 2], mask[22] = np.inf, k[1, :, 2] < 0
    mask[22, [3, 9, 150, 200]] = False
    answers = []
    for unit, kernel in (("emulated tiles", "attend_planes"), ("none", "attend_float32")):
        monkeypatch.setattr(job, "UNIT", unit)
        with interpreted(threads=2) as machine:
            answers.append(rp.attention(q, k, v, mask=mask, return_lse=True))
        assert machine.launches[kernel]
    for found, exact in zip(*answers, strict=True):
        np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-6)
        assert np.isnan(exact).any()
        assert np.isfinite(exact).any()
    assert answers[1][1][1, 22] == -np.inf


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_queries_and_keys_that_turn_as_they_are_read(layout, dtype, rng):
    """Channels that do not turn, grouped heads, positions and frequencies of their own; excluded keys are not read."""
    q, (k, v) = rng.standard_normal((2, 4, 60, 43)), rng.standard_normal((2, 2, 2, 250, 43))
    position = rp.Rotary(
        frequencies=rng.uniform(0.001, 1, (1, 2, 17)), layout=layout, positions=rng.integers(0, 900, (2, 1, 250))
    )
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    lengths = np.array([250, 201])
    options = {"position": position, "key_lengths": lengths, "offset": 190, "causal": True}
    with interpreted(threads=2, excluded=np.arange(250) >= lengths[:, None]) as machine:
        found = rp.attention(q, k, v, **options, backend="numba")
    assert {name.split("_")[0] for name in machine.launches} == {"attend"}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = rp.attention(*wide, **options, backend="numpy")
    tolerance = {"float64": 1e-12, "float32": 5e-6}.get(np.dtype(dtype).name, 0.02)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@STRESS
@given(cases(small=False), st.sampled_from(KINDS_OF_ORDER), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_any_call(case, order, dtype):
    assert_agrees(case, dtype, threads=2, order=order)
    with interpreted(threads=2):
        expected = case.attention(dtype, "numba")
    with interpreted(threads=2, order=order, poison=0x4B):
        found = case.attention(dtype, "numba")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@given(cases(small=True), st.sampled_from(KINDS_OF_ORDER), st.sampled_from(DTYPES))
@settings(max_examples=20)
def test_any_small_call(case, order, dtype):
    assert_agrees(case, dtype, threads=2, order=order)
