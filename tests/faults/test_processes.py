"""Forked and spawned children, pools of processes, and forks in the midst of other threads' calls, on every layer."""

import os

import pytest

from tests.faults.layers import LAYERS, on_layer
from tests.faults.mixed import CHILD
from tests.processes import ROOT

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

# `fork` calls a function in a child and returns the exit status.
FORK = CHILD + (
    "import warnings; warnings.simplefilter('ignore')\n"  # Python 3.12 warns of forks of several threads
    "def fork(function):\n"
    "    child = os.fork()\n"
    "    if not child:\n"
    "        status = 70\n"
    "        try:\n"
    "            status = 0 if function() else 3\n"
    "        finally:\n"
    "            os._exit(status)\n"
    "    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
)
# The parent has run on all its threads.
WARM = FORK + (
    "names = ('T5 float32', 'backward float32', 'windows float32', 'decode float16', 'rel_shift float64')\n"
    "expected = {name: mixed[name]() for name in names}\n"
    "def right():\n"
    "    return all(mixed[name]() == expected[name] for name in names)\n"
)


def test_row_39_a_forked_child_computes():
    """And so do its own child, and the parent afterwards."""
    code = WARM + "print(fork(right), fork(lambda: right() and fork(right) == 0), right())\n"
    assert on_layer("default", code) == "0 0 True\n"


@pytest.mark.stress
@pytest.mark.parametrize("layer", LAYERS)
def test_row_39_on_every_layer(layer):
    code = WARM + "print(fork(right), fork(lambda: right() and fork(right) == 0), right())\n"
    assert on_layer(layer, code) == "0 0 True\n"


@pytest.mark.stress
@pytest.mark.parametrize("layer", LAYERS)
def test_row_39_forks_while_other_threads_call(layer):
    """From the main thread and from a thread of a pool, again and again, and from several threads at once."""
    code = WARM + (
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "stop, wrong = threading.Event(), []\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        if not right(): wrong.append(1)\n"
        "others = [threading.Thread(target=work) for _ in range(3)]\n"
        "for other in others: other.start()\n"
        "found = {fork(right) for _ in range(10)}\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    found |= set(pool.map(lambda _: fork(right), range(12)))\n"
        "stop.set()\n"
        "for other in others: other.join()\n"
        "print(found, wrong)\n"
    )
    # On TBB Numba prints what it thinks of such forks.
    assert on_layer(layer, code).splitlines()[-1] == "{0} []"


@pytest.mark.slow
def test_row_39_forks_while_numpy_computes_on_one_thread_of_blas():
    """With more threads OpenBLAS 0.3.31 hangs, in the parent too, as NumPy alone does: docs/processes.md says so."""
    code = WARM + (
        "import threading\n"
        "q, k, v = rng.standard_normal((3, 4, 300, 64)).astype(np.float32)\n"
        "def product(): return rp.attention(q, k, v, backend='numpy').tobytes()\n"
        "first, stop, wrong = product(), threading.Event(), []\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        if product() != first: wrong.append(1)\n"
        "others = [threading.Thread(target=work) for _ in range(3)]\n"
        "for other in others: other.start()\n"
        "found = {fork(lambda: product() == first and right()) for _ in range(5)}\n"
        "stop.set()\n"
        "for other in others: other.join()\n"
        "print(found, wrong)\n"
    )
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    assert on_layer("default", code, timeout=100, **one) == "{0} []\n"


@pytest.mark.stress
@pytest.mark.parametrize("layer", LAYERS)
def test_row_39_a_fork_while_another_thread_compiles(layer, tmp_path):
    """The child would find the compiler's locks closed for ever: the fork waits."""
    code = FORK + (
        "import threading, time\n"
        "names = ('rel_shift float32', 'rel_shift float64')\n"
        "first = threading.Thread(target=mixed[names[0]])\n"
        "first.start()\n"
        "time.sleep(0.7)\n"
        "print([fork(mixed[name]) for name in names])\n"
        "first.join()\n"
    )
    assert on_layer(layer, code, RELPOS_CACHE_DIR=str(tmp_path)) == "[0, 0]\n"


POOL = (
    "import multiprocessing, sys\n"
    "from concurrent.futures import ProcessPoolExecutor\n"
    "import numpy as np, relpos_np as rp\n"
    "def call(seed):\n"
    "    q, k, v = np.random.default_rng(seed).standard_normal((3, 4, 300, 32)).astype(np.float32)\n"
    "    return rp.attention(q, k, v).tobytes()\n"
    "if __name__ == '__main__':\n"
    "    expected = [call(seed) for seed in range(8)]\n"
    "    import warnings; warnings.simplefilter('ignore')\n"
    "    context = multiprocessing.get_context(sys.argv[1])\n"
    "    with context.Pool(2) as pool:\n"
    "        first = pool.map_async(call, range(8)).get(200)\n"
    "    with ProcessPoolExecutor(2, context) as pool:\n"
    "        second = list(pool.map(call, range(8), timeout=200))\n"
    "    print(first == expected, second == expected)\n"
)


def pools(method, tmp_path, head=""):
    """Run the program above, as a file that children can import."""
    program = tmp_path / "program.py"
    program.write_text(head + POOL)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return on_layer(
        "default", f"os.execv(sys.executable, [sys.executable, {str(program)!r}, {method!r}])", PYTHONPATH=path
    )


@pytest.mark.slow
def test_row_39_a_pool_of_forked_processes(tmp_path):
    assert pools("fork", tmp_path) == "True True\n"


@pytest.mark.stress
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_row_39_pools_of_new_processes(method, tmp_path):
    assert pools(method, tmp_path) == "True True\n"


@pytest.mark.slow
def test_row_39_a_child_inherits_the_number_of_threads():
    """And blocks of the thread that forked, but not those of others."""
    pytest.importorskip("threadpoolctl")
    code = WARM + (
        "import threading, threadpoolctl\n"
        "def blas(): return {x['num_threads'] for x in threadpoolctl.threadpool_info() if x['user_api'] == 'blas'}\n"
        "opened, close = threading.Event(), threading.Event()\n"
        "def other():\n"
        "    with rp.threads(1): opened.set(); close.wait()\n"
        "thread = threading.Thread(target=other); thread.start(); opened.wait()\n"
        "def inside():\n"
        "    with rp.threads(2): return rp.get_num_threads() == 2 and blas() == {2} and right()\n"
        "def outside(): return inside() and blas() != {1} and rp.get_num_threads() == most\n"
        "most = rp.get_num_threads()\n"
        "statuses = [fork(outside)]\n"
        "with rp.threads(1): statuses.append(fork(lambda: rp.get_num_threads() == 1 and blas() == {1} and right()))\n"
        "rp.set_num_threads(1)\n"
        "close.set(); thread.join()\n"
        "statuses.append(fork(lambda: rp.get_num_threads() == 1 and blas() == {1}))\n"
        "print(statuses)\n"
    )
    # Whatever the surroundings say: one thread of BLAS would look like a choice.
    two = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    assert on_layer("default", code, **two) == "[0, 0, 0]\n"
