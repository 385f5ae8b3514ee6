"""The other kernels interpreted: windows, decoding, products with tables, rel_shift."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.plan import division
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, PAIR_ROWS, TARGET
from tests.interpreted.agreement import assert_agrees, assert_gradients_agree
from tests.interpreted.machine import KINDS_OF_ORDER, MODULES, interpreted
from tests.interpreted.test_interpreted_attention import ALONE, BATCH, DTYPES, STRESS, compare
from tests.processes import child
from tests.strategies import Case, Mask, grid

# ---------------------------------------------------------------------------------------------- counted positions


@pytest.mark.parametrize(("dtype", "q_len", "npos", "order"), [
    (np.float32, 35, 4, "in turn"), (np.float64, 1, 60, "backwards"), (np.float64, 33, 20, "one takes all"),
])  # fmt: skip
def test_counted_positions(dtype, q_len, npos, order, rng):
    """Grouped heads, keys of gates that all items share, keys that are not counted; a few positions end early."""
    q, k, v, g = (rng.standard_normal((2, 2, n, 3)).astype(dtype) for n in (q_len, 51, 51, q_len))
    gates, counted = rng.standard_normal((1, 51, 3)).astype(dtype), rng.random((2, 1, 51)) < 0.7
    position = rp.CoPE((rng.standard_normal((npos, 3)) / 8).astype(dtype), gate_key=gates, counted=counted)
    options = {"position": position, "causal": True}
    operands = q, k[:, :1], v[:, :1]

    def found(backend):
        out = rp.attention(*operands, **options, backend=backend)
        grads = rp.attention_vjp(*operands, **options, grad_out=g, backend=backend)
        return [out, grads.q, grads.k, grads.v, *grads.position.values()]

    with interpreted(threads=2, order=order) as machine:
        mine = found("numba")
    assert machine.launches[f"count_{np.dtype(dtype)}"] == 2
    assert machine.launches[f"recount_{np.dtype(dtype)}"] == 1
    for a, b in zip(mine, found("numpy"), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=200 * np.finfo(dtype).eps * (1 + np.abs(b).max()))


# ---------------------------------------------------------------------------------------------- windows

# Queries, keys, D, vectors of values: as few queries as there may be, beside register tiles, several blocks.
FEW = {vectors: max(TARGET.least_rows(vectors), PAIR_ROWS) for vectors in range(1, 6)}
WINDOWS = [(FEW[1], 1, 3, 1), (25, 7, 7, 2), (49, 49, 32, 3), (63, 65, 5, 1), (101, BLOCK_KEYS, 4, 5)]
WINDOWS += [(FEW[vectors], 17, 5, vectors) for vectors in (2, 3, 4, 5)]


def windows(q_len, k_len, depth, vectors, dtype, **options):
    v_dim = vectors * TARGET.lanes(np.dtype(dtype).itemsize)
    options = {"positions": (grid(q_len, k_len),)} | options
    return Case(5, BATCH, (2,), 1, 2, q_len=q_len, k_len=k_len, depth=depth, v_dim=v_dim, **options)


def masked_windows():
    """A mask of queries alone takes the other kernel."""
    for at, shape in enumerate(WINDOWS):
        for kind in (None, "bool", "float") if shape[1] > 1 else (None,):
            yield pytest.param(*shape, kind, marks=() if at < 3 or kind == "float" else STRESS)


@pytest.mark.parametrize(("q_len", "k_len", "depth", "vectors", "kind"), list(masked_windows()))
def test_windows(q_len, k_len, depth, vectors, kind):
    dtype = DTYPES[q_len % 2]
    mask = None if kind is None else Mask(kind, (2, 1, q_len, k_len), 0.7)
    machine = assert_agrees(windows(q_len, k_len, depth, vectors, dtype, mask=mask), dtype, threads=2)
    assert machine.launches == {f"windows_{np.dtype(dtype)}": 1}


@pytest.mark.parametrize("vectors", FEW)
def test_fewer_queries_than_a_window_has(vectors):
    machine = assert_agrees(windows(FEW[vectors] - 1, 17, 5, vectors, np.float32), np.float32)
    assert not machine.launches.keys() & {"windows_float32"}


def test_windows_without_a_bias_and_runs_of_pieces(monkeypatch):
    monkeypatch.setattr(division, "RUNS", 2)
    case = windows(96, 2 * TARGET.panel(8), 4, 1, np.float64, positions=())
    found = []
    for order in KINDS_OF_ORDER:
        with interpreted(threads=2, order=order) as machine:
            found.append(case.attention(np.float64, "numba"))
        assert machine.launches == {"windows_float64": 1}
    compare(found[0], case.attention(np.float64, "numpy"))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_windows_with_values_that_are_not_finite(rng):
    q, k, v = rng.standard_normal((3, 2, 49, 16))
    v[0, 5, 3], v[1, 7, 0] = np.nan, np.inf
    mask = rng.random((49, 49)) < 0.7
    mask[::2, 5] = mask[::3, 7] = mask[10] = False
    with interpreted():
        found = rp.attention(q, k, v, mask=mask, backend="numba")
    np.testing.assert_allclose(found, rp.attention(q, k, v, mask=mask, backend="numpy"), rtol=0, atol=1e-12)
    assert np.isnan(found[0, :, 3]).sum() == mask[:, 5].sum()


# ---------------------------------------------------------------------------------------------- decoding


def decoding(q_len, k_len, **options):
    options = {"kv_heads": 2, "group": 2, "depth": 33, "v_dim": 17} | options
    batch = options.pop("batch", False)
    return Case(5, *((BATCH, (2,)) if batch else (ALONE, ())), q_len=q_len, k_len=k_len, **options)


DECODING = {
    "one query": decoding(1, BLOCK_KEYS + 70),
    "many rows": decoding(3, 37, group=2, depth=7, v_dim=3),
    "eight rows": decoding(4, 130, v_dim=130, depth=8),
    "causal, before the end": decoding(2, 90, causal=True, offset=40, window=25),
    "lengths": decoding(1, 90, batch=True, key_lengths=(0, 70)),
    "bool mask": decoding(2, 90, mask=Mask("bool", (4, 2, 90), 0.4)),
    "float mask": decoding(2, 90, mask=Mask("float", (2, 90), 0.4)),
    "bias": decoding(1, 50, positions=(grid(1, 50),)),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding(name):
    dtype = DTYPES[sum(map(ord, name)) % 2]
    machine = assert_agrees(DECODING[name], dtype)
    assert machine.launches == {f"decode_{np.dtype(dtype)}": 1}


@pytest.mark.parametrize("order", KINDS_OF_ORDER)
def test_decoding_in_parts(order, monkeypatch):
    """Some parts lie beyond the keys that are left, and one holds a few."""
    monkeypatch.setattr(division, "PART_BLOCKS", 1)
    case = decoding(1, 3 * BLOCK_KEYS + 5, batch=True, key_lengths=(BLOCK_KEYS + 3, 3 * BLOCK_KEYS), depth=4, v_dim=5)
    machine = assert_agrees(case, np.float64, threads=3, order=order)
    assert machine.launches == {"decode_float64": 1}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1, 300, 33, 17), (2, 20, 3, 2), (4, 70, 16, 64)], ids=str)
def test_decoding_of_half_precision(shape, dtype, rng):
    q_len, k_len, depth, v_dim = shape
    name = f"decode_{np.dtype(dtype)}"
    if np.dtype(dtype).name not in MODULES["decode"].decode:
        pytest.skip("this processor converts no float16")
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((4, q_len, depth), (2, k_len, depth), (2, k_len, v_dim)))
    shut = np.arange(k_len)[None] >= k_len - 3
    with interpreted(excluded=shut) as machine:
        found = rp.attention(q, k, v, key_lengths=k_len - 3, backend="numba", return_lse=True)
    assert machine.launches == {name: 1}
    wide = (x.astype(np.float64) for x in (q, k, v))
    expected, lse = rp.attention(*wide, key_lengths=k_len - 3, backend="numpy", return_lse=True)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(found[0].astype(np.float64), expected, rtol=0, atol=2 * eps * np.abs(expected).max())
    np.testing.assert_allclose(found[1], lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", [None, rp.Rotary(16)], ids=["plain", "turned"])
@pytest.mark.parametrize("by", ["token", "channel"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_decoding_of_codes(dtype, by, position, rng):
    """Read where they lie, or copied beside a mask; of what is excluded neither codes nor scales are read."""
    if dtype not in MODULES["decode"].decode:
        pytest.skip("this processor converts no float16")
    q = rng.standard_normal((4, 2, 16)).astype(np.float32)
    k, v = (rp.quantize(rng.standard_normal((2, BLOCK_KEYS + 30, d)), dtype, by=by) for d in (16, 33))
    for options in ({}, {"mask": rng.random((4, 2, BLOCK_KEYS + 30)) < 0.7}):
        call = {"key_lengths": BLOCK_KEYS + 9, "offset": "end", "position": position, **options}
        with interpreted(excluded=np.arange(BLOCK_KEYS + 30)[None] >= BLOCK_KEYS + 9) as machine:
            found = rp.attention(q, k, v, backend="numba", **call)
        assert machine.launches == {f"decode_{dtype}": 1}
        wide = (q.astype(np.float64), k.dequantized(np.float64), v.dequantized(np.float64))
        np.testing.assert_allclose(found, rp.attention(*wide, backend="numpy", **call), rtol=0, atol=1e-5)


def test_decoding_of_values_that_are_not_finite(rng):
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (2, 60, 60))
    v[0, 58, 3], v[1, 59, 1], v[0, 3, 0] = np.nan, np.inf, np.nan
    mask = np.ones((2, 60), bool)
    mask[1, 3] = mask[0, 58] = False
    for options in ({"causal": True}, {"causal": True, "mask": mask}, {"mask": np.stack([mask[0], mask[0] & False])}):
        with interpreted():
            found = rp.attention(q, k, v, **options, backend="numba")
        expected = rp.attention(q, k, v, **options, backend="numpy")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- several launches


@STRESS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("q_len", "k_len"), [(26, BLOCK_KEYS + 9), (26, 64), (3, 2 * BLOCK_KEYS)], ids=["attention", "windows", "decode"]
)
def test_a_long_call_is_cut(q_len, k_len, threads, monkeypatch):
    """A call that takes long is several launches, between which Python sees signals; forwards and backwards."""
    monkeypatch.setattr(launcher, "CALL_FLOPS", 1e3)
    monkeypatch.setattr(division, "RUNS", 2)
    v_dim = TARGET.lanes(8)
    case = Case(5, ALONE, (), 9, 2, q_len, k_len, 4, v_dim, positions=(grid(q_len, k_len),))
    machine = assert_agrees(case, np.float64, threads=threads, order="backwards")
    assert sum(machine.launches.values()) > 1
    q, k, v = case.operands(np.float64)
    options = case.options(np.float64)
    machine, _ = assert_gradients_agree(q, k, v, options, threads=threads, order="backwards")
    assert machine.launches["backward_float64"] >= 1


# ---------------------------------------------------------------------------------------------- products and rel_shift


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 97, 5, 70), (2, 200, 33, 7)], ids=str)
def test_products(shape, dtype, rng):
    """Vectors of grouped heads, also views and a table that all heads share."""
    heads, length, depth, rows = shape
    multiply = MODULES["product"].multiply
    x = rng.standard_normal((3, max(heads // 2, 1), length, 2 * depth)).astype(dtype)[..., depth:]
    for table in (rng.standard_normal((heads, rows, depth)), rng.standard_normal((1, rows, depth))):
        with interpreted(threads=3, order="backwards") as machine:
            found = multiply(x, table.astype(dtype), 0.5, heads, 3)
        assert machine.launches == {f"product_{np.dtype(dtype)}": 1}
        spread = np.repeat(x, heads // x.shape[1], axis=1)
        expected = 0.5 * (spread @ table.astype(dtype).swapaxes(-1, -2))
        np.testing.assert_allclose(found, expected, rtol=0, atol=np.finfo(dtype).eps * 16 * depth)
    assert multiply(x[:, :, :0], table.astype(dtype), 0.5, heads, 3).shape == (3, heads, 0, rows)


@pytest.mark.parametrize("variant", ["transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet"])
@pytest.mark.parametrize("threads", [None, 3])
def test_rel_shift(variant, threads, rng, monkeypatch):
    """Copies of rows, also past the caches, of items of any size."""
    monkeypatch.setattr(MODULES["shift"], "PIECE_BYTES", 64)
    monkeypatch.setattr(MODULES["shift"], "STREAM_BYTES", 256)
    for q_len, k_len, dtype in ((1, 1, np.float32), (3, 8, np.float16), (7, 7, np.float64), (5, 19, np.float32)):
        columns = {"conformer": q_len + k_len - 1, "xlnet": q_len + k_len}.get(variant, k_len)
        x = rng.standard_normal((2, q_len, columns)).astype(dtype)
        expected = rp.rel_shift(x, variant=variant, backend="numpy")
        out = np.empty_like(expected)
        for given in ({}, {"out": out}):
            with interpreted(threads=threads, order="backwards") as machine:
                found = rp.rel_shift(x, variant=variant, **given, backend="numba")
            np.testing.assert_array_equal(found, expected)
            assert machine.launches == ({} if variant == "wenet" else {"shift": 1})


# ---------------------------------------------------------------------------------------------- other vector units


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("name", "features"), [("avx2", "+avx2,+fma,+f16c"), ("neon", "+neon,+bf16"), ("simd128", "+sse2")]
)
def test_other_vector_units(name, features):
    """Shorter vectors, other register tiles: nothing has to be compiled to interpret their kernels."""
    code, out, log = child(
        f"from relpos_np.kernels._numba.simd.target import TARGET; assert TARGET.name == {name!r}\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/interpreted']))",
        NUMBA_CPU_FEATURES=features,
        timeout=600,
    )
    assert code == 0, out + log
