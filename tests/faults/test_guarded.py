"""Kernels read and write nothing outside of any array, operand or not, nor what nobody has written, nor what is freed.

`test_bounds.py` protects the ends of operands and results; here those of all arrays that a call makes are, such as
workspaces, gradients, sums, gathered biases and records.
"""

import sys

import numpy as np
import pytest

from tests.every import ATTENTION
from tests.processes import child

pytest.importorskip("numba")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are protected through mprotect"),
    pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy's C API lies elsewhere"),
]

PRELUDE = """
import relpos_np.kernels._numba
from tests.faults.guarded import Guarded

def done(guarded, *said):
    # Before the interpreter takes the allocator down.
    print(*said, guarded.made, guarded.damaged, flush=True)
    os._exit(0)
"""
CALLS = (
    PRELUDE
    + """
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build

LENGTHS = (1, 2, 7, 8, 16, 17, 31, 48, 63, 64, 65, 97, 191, 193)
DIMS = (2, 4, 6, 8, 12, 16, 20, 34, 64, 66)

def close(found, expected, dtype, what):
    assert found.shape == expected.shape, what
    room = {"float32": 2e-3, "float64": 1e-9}[dtype] * (1 + np.abs(expected).max(initial=0))
    assert (np.abs(found - expected) <= room).all(), (what, np.abs(found - expected).max())

def draw(name, variant, rng):
    size = lengths(int(rng.choice(LENGTHS)), int(rng.choice(LENGTHS)), int(rng.choice(DIMS)), int(rng.choice(DIMS)))
    dtype = str(rng.choice(["float32", "float64"]))
    try:
        return build(name, size, dtype=dtype, seed=0, variant=variant), dtype
    except rp.RelposError:
        return None, dtype  # such lengths are none of this scheme's

def one(name, variant, rng):
    example, dtype = draw(name, variant, rng)
    if example is None:
        return 0
    options = {"position": example.position, **example.kwargs}
    if rng.random() < 0.3:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 80)), int(rng.integers(0, 80)))
    operands = example.q, example.k, example.v
    try:
        expected = rp.attention(*operands, **options, return_lse=True, backend="numpy")
        found = rp.attention(*operands, **options, return_lse=True, backend="numba")
    except rp.RelposError:
        return 0
    finite = np.isfinite(expected[1])
    assert (np.isfinite(found[1]) == finite).all(), (name, variant)
    close(found[0], expected[0], dtype, (name, variant, options))
    close(found[1][finite], expected[1][finite], dtype, (name, variant))
    grad_out = np.ones(expected[0].shape, dtype)
    try:
        options["grad_out"] = grad_out
        first, second = (rp.attention_vjp(*operands, **options, backend=b) for b in ("numba", "numpy"))
    except rp.RelposError:
        return 1
    for x in "qkv":
        close(getattr(first, x), getattr(second, x), dtype, (name, variant, x))
    assert all(np.isfinite(x).all() for x in first.position.values()), (name, variant)
    return 1

def others(rng):
    dtype = str(rng.choice(["f4", "f8"]))
    new = lambda *shape: rng.standard_normal(shape).astype(dtype)
    for variant in ("conformer", "xlnet", "transformer_xl"):
        x = new(2, int(rng.choice(LENGTHS)), 2 * int(rng.choice(LENGTHS)) + 400)
        a, b = (rp.rel_shift(x, variant=variant, backend=b) for b in ("numba", "numpy"))
        assert (a == b).all()
    q, (k, v) = new(2, 2, 1, 24), new(2, 2, 2, int(rng.choice((1, 65, 1537, 3000))), 24)
    a, b = (rp.attention(q, k, v, backend=b) for b in ("numba", "numpy"))
    assert np.abs(a - b).max() < 1e-3
    w = new(7, 2, int(rng.choice((1, 7, 16, 49))), 32)
    a, b = (rp.attention(w, w, w, backend=b) for b in ("numba", "numpy"))
    assert np.abs(a - b).max() < 1e-3

# What is compiled and kept for the process is made before.
others(np.random.default_rng(1))
guarded, count = Guarded(AT_END).install(), 0
for n, (name, variant) in enumerate(PAIRS):
    for round in range(ROUNDS):
        rng = np.random.default_rng([SEED, n, round])
        count += one(name, variant, rng)
        if n % 8 == 0:
            others(rng)
done(guarded, "done", count)
"""
)


def run(code, **options):
    """Run code; the number of calls and of arrays."""
    status, said, errors = child(code, "-X", "faulthandler", RELPOS_RESULT_POOL="0", **options)
    assert status == 0, f"status {status}\n{said[-2000:]}\n{errors[-4000:]}"
    word, calls, arrays, damaged = said.strip().split(maxsplit=3)
    assert (word, damaged) == ("done", "[]")
    return int(calls), int(arrays)


def setup(pairs, *, at_end, rounds, seed):
    return f"PAIRS, AT_END, ROUNDS, SEED = {pairs!r}, {at_end}, {rounds}, {seed}\n" + CALLS


@pytest.mark.parametrize(
    ("touch", "at_end"),
    [
        ("np.lib.stride_tricks.as_strided(np.ones(5), (6,))[5]", True),
        ("np.lib.stride_tricks.as_strided(np.ones(5)[::-1], (6,))[5]", False),
        ("(launch := relpos_np.kernels._numba.launch).lend(640, 2)[0][-1:].ctypes.data_as(bytes_)[1]", True),
        (
            "x = np.ones(5); old = x.ctypes.data; del x; ctypes.string_at(old, 8)",
            True,
        ),
    ],
    ids=["behind", "before", "workspace", "freed"],
)
def test_guarded_memory_kills_who_touches_what_is_not_its_own(touch, at_end):
    """That the other tests can fail."""
    code = f"import ctypes\nbytes_ = ctypes.POINTER(ctypes.c_uint8)\nguarded = Guarded({at_end}).install()\n"
    status, said, _ = child(PRELUDE + code + touch + "\ndone(guarded)")
    assert status < 0, said


def test_guarded_memory_is_poisoned_and_its_margins_are_looked_at():
    code = (
        "guarded = Guarded(True).install()\n"
        "assert np.isnan(np.empty(9)).all() and np.isnan(np.empty(9, 'f2')).all() and not np.zeros(9).any()\n"
        "x = np.ones(5)\n"
        "np.lib.stride_tricks.as_strided(x[::-1], (6,))[5] = 3\n"
        "del x\n"
        "done(guarded)\n"
    )
    assert "beside an array of 40 bytes" in child(PRELUDE + code)[1]


@pytest.mark.parametrize("at_end", [True, pytest.param(False, marks=pytest.mark.stress)], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array(at_end):
    """Some schemes, forwards and backwards, at lengths beside and far from those of tiles."""
    pairs = ATTENTION[::5]
    calls, arrays = run(setup(pairs, at_end=at_end, rounds=1, seed=0))
    assert calls > len(pairs) // 2
    assert arrays > 50 * calls


@pytest.mark.stress
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array_at_length(at_end, threads):
    code = setup(ATTENTION, at_end=at_end, rounds=5, seed=1)
    run(code, timeout=900, NUMBA_NUM_THREADS=str(threads))
