"""Many threads of Python that call at once, on every threading layer, with a cold process too."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.layers import LAYERS, on_layer
from tests.faults.mixed import CHILD, calls

pytest.importorskip("numba")
# The layer is the one that was asked for, and the pool was used in parallel.
SAME = CHILD + (
    "wrong = from_threads(mixed, {threads}, {repeats})\nimport numba\nprint(wrong or numba.threading_layer())\n"
)


@pytest.mark.parametrize("name", ["T5 float32", "plain float64", "Shaw", "windows float32", "mask", "backward float32"])
def test_row_38_same_bits_again_and_from_eight_threads(name):
    call = calls()[name]
    assert {call() for _ in range(15)} == {call()}
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: call(), range(48))) == {call()}


def test_row_38_eight_threads_call_at_once():
    assert on_layer("default", SAME.format(threads=8, repeats=25)).strip() in LAYERS


@pytest.mark.stress
@pytest.mark.parametrize("layer", LAYERS)
def test_row_38_eight_threads_with_200_mixed_calls_each(layer):
    assert on_layer(layer, SAME.format(threads=8, repeats=200)) == f"{layer}\n"


@pytest.mark.stress
@pytest.mark.parametrize("layer", LAYERS)
def test_row_38_first_calls_at_once_compile_and_load(layer, tmp_path):
    """Eight threads find no kernel anywhere: each is compiled once, and nobody waits for ever."""
    code = (
        "from tests.faults.mixed import calls, from_threads\n"
        "every = calls()\n"
        "mixed = {name: every[name] for name in ('rel_shift float32', 'rel_shift float64', 'decode float32')}\n"
        "wrong = from_threads(mixed, 8, 3)\n"
        "from pathlib import Path\n"
        "print(wrong, sorted(p.name.partition('-')[0] for p in Path(os.environ['RELPOS_CACHE_DIR']).iterdir()))\n"
    )
    assert on_layer(layer, code, RELPOS_CACHE_DIR=str(tmp_path)) == "[] ['decode_float32', 'shift']\n"


def test_row_38_fewer_threads_where_the_system_gives_no_more(monkeypatch):
    """A limit on processes, or an interpreter that is closing: the calling thread does all of it."""
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 300, 32)).astype(np.float32)
    expected = rp.attention(q, k, v)
    asked = []

    def start(*args):
        asked.append(args)
        raise RuntimeError("can't start new thread")

    # Work of this size is done by one thread alone where other programs have just taken the processors.
    monkeypatch.setattr(launch, "crowd", SimpleNamespace(threads=lambda threads: threads, took=lambda *work: None))
    monkeypatch.setattr(launch, "_home", 0)  # as in a forked child
    np.testing.assert_array_equal(rp.attention(q, k, v), expected)
    monkeypatch.setattr(launch._thread, "start_new_thread", start)
    np.testing.assert_array_equal(rp.attention(q, k, v), expected)
    assert asked


@pytest.mark.slow
def test_row_38_a_call_while_the_interpreter_closes():
    code = (
        "import atexit\n"
        "from tests.faults.mixed import calls\n"
        "call = calls()['T5 float32']\n"
        "expected = call()\n"
        "atexit.register(lambda: print(call() == expected))\n"
    )
    for layer in ("default", "workqueue"):
        assert on_layer(layer, code) == "True\n"


def test_row_38_the_length_of_a_call_is_no_other_call_s():
    """Kernels read it where it lies: two threads that begin at once must not free each other's."""
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    for threads in (1, 2, 7, launch.MOST_THREADS):
        assert ctypes.c_int64.from_address(launch._length(threads)).value == threads
        assert 0 <= launch._length(threads) - launch._NUMBERS < launch._threads.nbytes
