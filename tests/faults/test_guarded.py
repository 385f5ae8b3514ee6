"""Kernels read and write nothing outside of any array, operand or not, nor what nobody has written, nor what is freed.

Of each array, operand or made by a call, the end or the beginning lies beside a page that may not be touched.
"""

import sys

import numpy as np
import pytest

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
from tests.soaking import kinds

kinds.BACKENDS = ("numba",)

def some(kind, number):
    report = kinds.Report()
    kind(np.random.default_rng([SEED, number]), report)
    if report.problems:
        raise SystemExit(f"{report.where}: {report.problems}")
    return report.calls

# What is compiled and kept for the process is made before.
KINDS = kinds.forward, kinds.gradient, kinds.shift
for kind in KINDS:
    some(kind, 0)
guarded = Guarded(AT_END).install()
done(guarded, "done", sum(some(kind, number) for number in range(COUNT) for kind in KINDS))
"""
)


def run(code, **options):
    """Run code; the number of calls and of arrays."""
    status, said, errors = child(code, "-X", "faulthandler", RELPOS_RESULT_POOL="0", **options)
    assert status == 0, f"status {status}\n{said[-2000:]}\n{errors[-4000:]}"
    word, calls, arrays, damaged = said.strip().split(maxsplit=3)
    assert (word, damaged) == ("done", "[]")
    return int(calls), int(arrays)


def random_calls(at_end, count, seed):
    """Code that makes so many random calls, with gradients and shifts, in any dtype and layout."""
    return f"AT_END, COUNT, SEED = {at_end}, {count}, {seed}\n" + CALLS


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array(at_end):
    """Operands, masks, lengths, tables, results, workspaces and gradients, at lengths beside and far from tiles."""
    calls, arrays = run(random_calls(at_end, 16, 0))
    assert calls > 60
    assert arrays > 20 * calls


@pytest.mark.stress
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array_at_length(at_end, threads):
    run(random_calls(at_end, 300, 1), timeout=900, NUMBA_NUM_THREADS=str(threads))


# Keys in pages that may not be touched: a guarded array is legal as a whole.
HIDDEN = """
def call(q_len, k_len, dtype, depth, options, position):
    new = lambda heads, n: rng.standard_normal((2, heads, n, depth)).astype(dtype)
    q, k, v, grad_out = new(2, q_len), new(1, k_len), new(1, k_len), new(2, q_len)
    seen = (rp.logits(q, k, **options, backend="numpy") != -np.inf).any(axis=(1, 2))
    assert not seen.all()
    hidden = hide(k, seen), hide(v, seen)
    options = {**options, "position": position, "backend": "numba"}
    for a, b in zip(*(rp.attention(q, *x, return_lse=True, **options) for x in ((k, v), hidden))):
        assert (a == b).all(), (q_len, k_len, dtype, options, np.abs(a - b).max())
    if dtype == "f2":
        return
    first, second = (rp.attention_vjp(q, *x, grad_out=grad_out, **options) for x in ((k, v), hidden))
    assert all((getattr(first, x) == getattr(second, x)).all() for x in "qkv")

count = 0
# Rows of a whole page each. Half precision is read as it lies by the kernel for few queries.
for dtype, depth in (("f4", 1024), ("f8", 512), ("f2", 2048)):
    table = lambda *shape: rng.standard_normal(shape).astype(dtype)
    for q_len, k_len in ((4, 300), (1, 40)) if dtype == "f2" else ((1, 300), (50, 220)):
        usual = {"key_lengths": np.array([k_len // 3, k_len - 1]), "offset": k_len - q_len}
        for options in (
            usual,
            {"key_lengths": np.array([0, 5])},
            {"causal": True, "offset": 20 - q_len},
            {"causal": True, "offset": -1000},
            {"window": (5, 7), "offset": 12 - q_len},
            {"window": (6, None), "offset": k_len - 20},
            {"window": 3, **usual, "offset": 25 - q_len},
        ):
            call(q_len, k_len, dtype, depth, options, None)
            count += 1
        for position in (rp.T5(table(32, 2)), rp.Shaw(table(9, depth), table(9, depth))):
            if dtype != "f2" or isinstance(position, rp.T5):
                call(q_len, k_len, dtype, depth, usual, position)
                call(q_len, k_len, dtype, depth, {"window": (5, 7), "offset": 15 - q_len}, position)
                count += 2
        if dtype != "f2":
            rows = table(q_len + k_len - 1, 2, depth)
            position = rp.TransformerXL(table(2, depth), table(2, depth), rows, variant="conformer")
            call(q_len, k_len, dtype, depth, usual, position)
            count += 1
print("all", count)
"""


def test_row_07_keys_that_lengths_or_a_band_exclude_are_never_read():
    """By no CPU kernel, forwards or backwards; and whoever reads one is killed."""
    head = "from tests.faults.pages import hide\n"
    touch = "x = hide(np.ones((1, 1, 2, 512)), np.array([[True, False]])); print(x[0, 0, 0].sum()); x[0, 0, 1].sum()"
    assert child(head + touch)[0] < 0
    status, said, errors = child(head + HIDDEN, "-X", "faulthandler")
    assert status == 0, f"{said[-2000:]}\n{errors[-4000:]}"
    assert "all" in said
