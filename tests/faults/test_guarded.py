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


@pytest.mark.parametrize("at_end", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array(at_end):
    """Operands, masks, lengths, tables, results, workspaces and gradients, at lengths beside and far from tiles."""
    calls, arrays = run(random_calls(at_end, 4, 0))
    assert calls > 15
    assert arrays > 20 * calls


@pytest.mark.stress
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
def test_row_34_no_kernel_leaves_any_array_at_length(at_end, threads):
    run(random_calls(at_end, 300, 1), timeout=900, NUMBA_NUM_THREADS=str(threads))
