"""The compiled kernels: block edges, bits, threads, processes, other vector units, memory, and their cache."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.forward_pass.product import multiply
from relpos_np.kernels._numba.simd.target import TARGET
from tests.compare import assert_backends, assert_close, assert_float32_promise
from tests.processes import child
from tests.sizes import BLOCK_KEYS, EDGES, ROW_QUANTUM
from tests.strategies import KINDS, Case, grid

numba = pytest.importorskip("numba")
ROOT = Path(rp.__file__).parent.parent
FITTING = {
    "plain": KINDS["plain"],
    "shaw": KINDS["shaw"],
    "t5": KINDS["t5"],
    "conformer": KINDS["transformer_xl conformer"],
    "xlnet": KINDS["transformer_xl xlnet"],
}


def case_of(position, q_len, k_len, **options):
    options = {"depth": 17, "v_dim": 9, "kv_heads": 1, "group": 2} | options
    return Case(5, ((), (), ()), (), q_len=q_len, k_len=k_len, positions=(position,), **options)


@pytest.mark.parametrize("k_len", EDGES)
@pytest.mark.parametrize("q_len", [1, ROW_QUANTUM + 1, 2 * ROW_QUANTUM, 2 * ROW_QUANTUM + 1, BLOCK_KEYS + 1])
def test_lengths_around_block_edges(q_len, k_len):
    """Every scheme, float32 and float64, with queries around the same edges."""
    for n, position in enumerate([*FITTING.values(), grid(q_len, k_len)], q_len % 6):
        case = case_of(position, q_len, k_len, causal=n % 2 == 0, window=(None, None) if q_len % 2 else (30, 100))
        assert_float32_promise(case)
        if n % 3 == 0:
            assert_backends(case, case.attention(np.float64, "numpy"), ("numba",))


@pytest.mark.parametrize("k_len", [48, 50, 192, 200, 250])
@pytest.mark.parametrize("begin", [1, 17, 47, 48])
def test_keys_that_begin_inside_a_panel(k_len, begin):
    """The first keys are excluded for all queries, by a window or a mask, and the rest is no whole number of panels."""
    for q_len in (1, 3, 49):
        for position in (grid(q_len, k_len), KINDS["t5"], KINDS["plain"], KINDS["shaw"]):
            base = case_of(position, q_len, k_len, depth=8, v_dim=4)
            q, k, v = base.operands(np.float64)
            for options in (
                {"mask": np.arange(k_len) >= begin},
                {"window": (k_len - q_len - begin, None), "offset": k_len - q_len} if q_len + begin <= k_len else {},
            ):
                arguments = base.options(np.float64) | options
                expected = rp.attention(q, k, v, **arguments, backend="numpy", return_lse=True)
                found = rp.attention(q, k, v, **arguments, backend="numba", return_lse=True)
                for a, b in zip(found, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("depth", [1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("v_dim", [1, 15, 17, 33, 63, 65, 129])
def test_tails_of_head_dimensions(depth, v_dim):
    case = case_of(FITTING["shaw"], 50, 51, depth=depth, v_dim=v_dim)
    assert_float32_promise(case)


# Queries, keys, D, D_v: around vectors, register tiles and blocks of every target, several blocks, several panels.
WINDOWS = [
    (6, 16, 64, 64),
    (7, 33, 9, 128),
    (16, 16, 5, 64),
    (17, 1, 8, 16),
    (23, 48, 8, 48),
    (25, 7, 7, 16),
    (49, 49, 32, 32),
    (63, 65, 33, 64),
    (112, 64, 32, 48),
    (BLOCK_KEYS + 1, BLOCK_KEYS - 1, 17, 80),
    (400, BLOCK_KEYS, 5, 128),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("q_len", "k_len", "depth", "v_dim"), WINDOWS)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "not finite"])
def test_windows(q_len, k_len, depth, v_dim, kind, dtype, rng):
    """Few keys have a kernel of their own, which writes into the result and reads nothing beside the operands."""
    case = case_of(grid(q_len, k_len), q_len, k_len, depth=depth, v_dim=v_dim, kv_heads=2)
    # Views that are followed by NaN, as is each row of the mask.
    q, k, v = (
        np.concatenate([x, np.full((2, *x.shape[1:]), np.nan)])[:2].astype(dtype)
        for x in (
            rng.standard_normal((2, heads, n, d))
            for heads, n, d in ((4, q_len, depth), (2, k_len, depth), (2, k_len, v_dim))
        )
    )
    seen = rng.random((2, 1, q_len, k_len)) < 0.7
    seen[0, 0, q_len // 2] = False
    mask = {"none": None, "float": np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(dtype)}.get(
        kind, seen
    )
    if kind == "not finite":
        v[1, 1, k_len // 2, 3], v[0, 0, k_len // 3, 0] = np.nan, -np.inf
        seen[:, :, :, k_len // 2] = seen[:, :, 1::3, k_len // 3] = False
    for position in (case.options(dtype)["position"], None):
        exact = [x.astype(np.float64) for x in (q, k, v)]
        expected, lse = rp.attention(*exact, position=position, mask=mask, backend="numpy", return_lse=True)
        room = np.full(expected.size + 128, 1234, dtype)
        out = room[64:-64].reshape(expected.shape)
        out[...] = np.nan
        result = rp.attention(q, k, v, position=position, mask=mask, backend="numba", return_lse=True, out=out)
        assert result[0] is out
        tolerance = 4 * (depth + k_len) * np.finfo(dtype).eps
        np.testing.assert_allclose(result[0], expected, rtol=0, atol=tolerance * np.abs(v[np.isfinite(v)]).max())
        np.testing.assert_allclose(result[1], lse, rtol=0, atol=tolerance * 4)
        assert (room[:64] == 1234).all()
        assert (room[-64:] == 1234).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("also", [False, True])
def test_maps_per_batch_item_with_the_shape_of_a_window(also, dtype, rng):
    """Whole panels of keys and whole vectors of values: what the kernel for windows takes, but it has one bias."""
    labels = rng.integers(0, 9, (2, 64, 64))
    table = rng.standard_normal((9, 4)).astype(dtype)
    position = rp.GraphLabels(labels, table)
    position = (position, rp.ALiBi(heads=4)) if also else position
    q, k, v = (rng.standard_normal((2, 4, 64, 64)).astype(dtype) for _ in range(3))
    exact = [x.astype(np.float64) for x in (q, k, v)]
    expected = rp.attention(*exact, position=position, backend="numpy")
    found = rp.attention(q, k, v, position=position, backend="numba")
    np.testing.assert_allclose(found, expected, rtol=0, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("left", [62, 63, 64, 93, 94, None])
@pytest.mark.parametrize("right", [32, 33, 34, 62, 63, None])
@pytest.mark.parametrize("offset", [-30, 0, 31])
def test_bands_that_leave_out_some_keys_or_none(left, right, offset, rng):
    """Of 64 keys and 64 queries, on both sides of what the kernel for windows does and does not do."""
    q, k, v = rng.standard_normal((3, 2, 64, 16))
    band = {"window": (left, right), "offset": offset}
    found = rp.attention(q, k, v, **band, backend="numba")
    np.testing.assert_allclose(found, rp.attention(q, k, v, **band, backend="numpy"), rtol=0, atol=1e-13)


@pytest.mark.parametrize("flops", [1e10, 1.0])
def test_windows_in_runs(flops, rng, monkeypatch):
    """Each thread takes runs of windows, of which the last is shorter: the windows' bits are those they have alone.

    So they are if a call of the kernel may do little, and several are needed.
    """
    monkeypatch.setattr("relpos_np._calls.repeated.form", lambda *_, **__: None)
    monkeypatch.setattr("relpos_np.kernels._numba.launch.launcher.CALL_FLOPS", flops)
    q, k, v = (rng.standard_normal((71, 2, n, d)) for n, d in ((24, 4), (8, 4), (8, 16)))
    room = np.full((142, 2, 24, 16), np.nan)
    rp.attention(q, k, v, backend="numba", out=room[:71])
    assert np.isnan(room[71:]).all()
    for b in (0, 35, 70):
        np.testing.assert_array_equal(room[b], rp.attention(q[b], k[b], v[b], backend="numba"))


def test_wide_heads():
    for depth, v_dim in ((512, 256), (1024, 1)):
        assert_float32_promise(case_of(FITTING["t5"], 100, 200, depth=depth, v_dim=v_dim))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponential_over_its_whole_range(dtype):
    """Two keys with logits 0 and -x: the second one's weight is e^-x / (1 + e^-x)."""
    info = np.finfo(dtype)
    end = -float(np.log(np.longdouble(info.tiny)))
    x = np.concatenate([np.linspace(0, end, 20001), np.arange(0, 2 * end, 0.5)]).astype(dtype)
    k = np.stack([np.zeros_like(x), -x], axis=-1)[:, None, :, None]
    v = np.broadcast_to(np.array([0, 1], dtype)[:, None], k.shape)
    out = rp.attention(np.ones((len(x), 1, 1, 1), dtype), k, v, scale=1.0, backend="numba").ravel()
    with np.errstate(under="ignore"):
        weight = np.exp(-x.astype(np.longdouble))
    expected = (weight / (1 + weight)).astype(np.float64)
    assert out[0] == 0.5
    with np.errstate(under="ignore"):
        tolerance = 4 * float(info.eps) * (1 + x) * expected
    assert_close(out, expected, np.maximum(tolerance, float(info.tiny)))
    beyond = -float(np.log(np.longdouble(info.smallest_subnormal))) + 1
    assert (out[x > beyond] == 0).all()
    assert (x > beyond).any()
    assert (out >= 0).all()


# ---------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory")
@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_and_not_its_square(causal):
    """Scores of (1, 2, 4096, 4096) would take 128 MiB; extra bytes <= 1.2 x output + packed keys + 8 MiB."""
    code = (
        "def memory(key):\n"
        "    return next(int(x.split()[1]) * 1024 for x in open('/proc/self/status') if x.startswith(key))\n"
        "q, k, v = (rng.standard_normal((1, 2, 4096, 64), dtype=np.float32) for _ in range(3))\n"
        "t5 = rp.T5(rng.standard_normal((32, 2)).astype(np.float32))\n"
        "rp.attention(q[:, :, :200], k[:, :, :200], v[:, :, :200], position=t5)\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "before = memory('VmRSS')\n"
        f"out = rp.attention(q, k, v, position=t5, causal={causal})\n"
        "print(memory('VmHWM') - before, out.nbytes)\n"
    )
    x = np.ones((1, 5, 4), np.float32)
    rp.attention(x, x, x)  # the kernel is compiled here, so that the child only loads it
    status, out, log = child(code)
    if "PermissionError" in log:
        pytest.skip("the peak cannot be reset")
    assert status == 0, log
    extra, size = map(int, out.split())
    assert extra <= 1.2 * size + size + 8 * 2**20, f"{extra / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------- other vector units


def _host_has(*features):
    import llvmlite.binding as llvm

    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return False
    host = dict(llvm.get_host_cpu_features())
    return all(host.get(feature) for feature in features)


UNITS = {
    "avx2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
    "simd128": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
}


# Schemes, dtypes, block edges, the exponential and values that are not finite; one dtype for the rarer unit.
SELECTED = {
    "avx2": "at_most_twice or keeps_its_promise or tails or exponential or block_edges or begin_inside"
    " or (row_07 and numba) or (row_08 and numba) or equals_the_reference or backward_kernel or windows",
    "simd128": "at_most_twice or keeps_its_promise or tails or windows"
    " or (float32 and exponential and numba) or (row_07_excluded and numba)",
}


@pytest.fixture(scope="module")
def other_units(tmp_path_factory):
    """A run of chosen tests for each other unit, all at once: most of their time is the compiler's, on one core."""
    files = [f"tests/test_{name}.py" for name in ("equivalence", "kernels", "decode", "terms")]
    files += [f"tests/faults/test_{name}.py" for name in ("excluded_keys", "not_finite")]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *files]
    runs = {}
    for unit, environment in UNITS.items():
        log = tmp_path_factory.mktemp("units") / unit
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "-k", SELECTED[unit]], stdout=file, stderr=file, cwd=ROOT, env=os.environ | environment
            )
        runs[unit] = process, log
    yield runs
    for process, _ in runs.values():
        process.kill()
        process.wait()


@pytest.mark.stress
@pytest.mark.skipif(not _host_has("avx2", "fma"), reason="the host cannot run them")
@pytest.mark.parametrize("unit", UNITS)
def test_other_vector_units(unit, other_units):
    """The same code for 8 and 4 lanes, in a process that compiles for them and runs other tests again."""
    status, out, log = child(
        "from relpos_np.kernels._numba.simd.target import TARGET; print(TARGET.name)", **UNITS[unit]
    )
    assert (status, out) == (0, f"{unit}\n"), log
    process, log = other_units[unit]
    assert process.wait(timeout=500) == 0, log.read_text()[-3000:]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("q_len", [2, 12])  # few queries have a kernel of their own
def test_bias_of_the_next_query_is_not_seen_beside_the_last_key(q_len, dtype, rng):
    """Keys begin inside a panel, whose end lies in the next row of a window's bias: huge there, and excluded."""
    q, k, v = (rng.standard_normal((1, length, 8)) for length in (q_len, 48, 48))
    difference = np.arange(-47, 48)  # query less key; for the keys that are left it is below q_len - 17
    position = rp.WindowBias(np.where(difference < q_len - 17, 0.0, 1e4)[:, None], (q_len,), (48,), extent=(48,))
    options = {"position": position, "mask": np.arange(48) >= 17}
    expected = rp.attention(q, k, v, backend="numpy", **options)
    actual = rp.attention(*(x.astype(dtype) for x in (q, k, v)), backend="numba", **options)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=64 * np.finfo(dtype).eps)


@pytest.mark.slow
def test_parts_are_compiled_once_and_only_in_kernels():
    """No part becomes machine code, and every function that a kernel calls is linked into it."""
    from relpos_np.kernels._numba.forward_pass.product import product, product_layout

    library = product["float32"]._compile()._library
    assert "ret" in library.get_asm_str()
    # What is declared is looked for when the machine code is loaded in another process.
    undefined = [one.name for one in library._final_module.functions if one.is_declaration]
    assert [name for name in undefined if not name.startswith("llvm.")] == []
    parts = [cres.library for cres in product_layout.overloads.values()]
    assert parts
    assert all(part.get_pointer_to_function(name) == 0 for part in parts for name in ("", "product_layout"))


@pytest.mark.slow
def test_every_kernel_is_loaded_by_another_process():
    """All that an entry of the cache calls is found, or each process would compile it again in silence."""
    for kernel in rp.backend.kernels("numba").KERNELS.values():
        _ = kernel.address
    kernels = "rp.backend.kernels('numba').KERNELS.items()"
    status, out, log = child(f"print([name for name, kernel in {kernels} if not kernel._load()])")
    assert (status, out) == (0, "[]\n"), log


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_products_with_tables(beyond, dtype, rng):
    """Of rows beside the edge of a panel."""
    rows = 2 * TARGET.panel(np.dtype(dtype).itemsize) + beyond
    x, table = rng.standard_normal((2, 3, 17, 9)).astype(dtype), rng.standard_normal((3, rows, 9)).astype(dtype)
    found, expected = multiply(x, table, 0.5, 3, 2), 0.5 * x @ table.swapaxes(1, 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("count", [2, 3])
def test_products_by_distance_side_by_side(count, rng):
    """Several terms that are multiplied tile by tile share one product."""
    q, k, v = rng.standard_normal((3, 2, 40, 8)).astype(np.float32)
    positions = tuple(rp.Shaw(table) for table in rng.standard_normal((count, 79, 8)).astype(np.float32))
    found, expected = (rp.attention(q, k, v, position=positions, backend=name) for name in ("numba", "numpy"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("other", ["t5", "alibi", "alibi key"])
def test_a_bias_beside_products_by_distance(other):
    """Whole tiles, in which the kernel adds one of the two to the products as it makes them."""
    for q_len, k_len in ((31, 64), (64, 400)):
        positions = KINDS["transformer_xl conformer"], KINDS[other]
        case = Case(3, ((), (), ()), (), 1, 2, q_len, k_len, 16, 16, positions=positions)
        operands, options = case.operands(np.float32), case.options(np.float32)
        found, expected = (rp.attention(*operands, **options, backend=backend) for backend in ("numba", "numpy"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
