"""Ctrl-C in the longest calls: seen within a second, nothing goes on running, and the next call is right."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.backward_pass import kernel as backward
from relpos_np.kernels._numba.launch import launcher as launch
from tests.processes import ROOT, child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals to itself")

# Interrupts `call` after a while, and reports: seconds until the exception, processor time of each thread until then,
# processor time of the calling thread in the longest call of a kernel, and processor time used when all is over.
CODE = """
import json, signal, threading, time
from relpos_np.kernels import _numba
from relpos_np.kernels._numba.launch import launcher as launch

# A shell that runs this in the background has it ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
longest, run = [0.0], launch.run

def timed(kernel, record, threads):
    kernel.address  # compiled or loaded before
    started = time.thread_time()
    try:
        run(kernel, record, threads)
    finally:
        longest[0] = max(longest[0], time.thread_time() - started)

launch.run = timed

def numbers(*shape, dtype=np.float32):
    return rng.standard_normal(shape, dtype=dtype)

def wide(x, count):
    return np.broadcast_to(x, (count, *x.shape[1:]))

def interrupted(call, after):
    call_small()
    longest[0], sent = 0.0, []
    def send():
        time.sleep(after)
        sent.append((time.perf_counter(), time.process_time()))
        signal.raise_signal(signal.SIGINT)
    sender = threading.Thread(target=send, daemon=True)
    try:
        sender.start()
        stop = time.perf_counter() + 60
        while time.perf_counter() < stop: call()
        raise SystemExit("never interrupted")
    except KeyboardInterrupt:
        now = time.perf_counter(), time.process_time()
    sender.join()
    time.sleep(0.2)
    quiet = time.process_time()
    time.sleep(0.2)
    quiet = time.process_time() - quiet
    chunk = longest[0]
    call_small()
    return now[0] - sent[0][0], (now[1] - sent[0][1]) / launch.available_threads(), chunk, quiet

a, b, c = numbers(3, 2, 70, 8)
table = numbers(32, 2)
small = {name: rp.attention(a, b, c, position=rp.T5(table), backend=name) for name in ("numpy", "numba")}
assert np.abs(small["numpy"] - small["numba"]).max() < 1e-5

def call_small():
    assert (rp.attention(a, b, c, position=rp.T5(table), backend="numba") == small["numba"]).all()

found = {}
"""


def reports(setup, cases, after=0.3):
    """Interrupt each of the calls, in one process that has made the arrays before."""
    lines = [f"found[{name!r}] = interrupted(lambda: {call}, {after})\n" for name, call in cases.items()]
    code = CODE + setup + "".join(lines)
    status, out, log = child(code + "print(json.dumps(found))", timeout=500)
    assert status == 0, log
    return json.loads(out)


def assert_prompt(found):
    """On a busy machine processor time counts: of that a long call takes as much as of other time."""
    for name, (seconds, cpu, chunk, quiet) in found.items():
        assert seconds < 1.0 or cpu < 0.5, (name, seconds, cpu, chunk)
        # A core that is shared with another thread takes longer for the same.
        assert chunk < 0.5 or cpu < 0.25, (name, chunk, cpu)
        assert quiet < 0.1, f"{name}: something goes on running"


LENGTH = """
q, k, v = numbers(3, 2, 65536, 64)
"""
FORWARD = {
    "plain": "rp.attention(q, k, v)",
    "T5, causal": "rp.attention(q, k, v, position=rp.T5(table), causal=True)",
}
COPE = """
q, k, v = numbers(3, 4, 16384, 64)
# Positions that no query reaches, so that each meets all of its keys.
cope = rp.CoPE(numbers(16385, 64) / 64)
cope_short = rp.CoPE(numbers(64, 64) / 8)
few, far, (many, more) = numbers(4, 40, 16), numbers(4, 40, 16), numbers(2, 4, 900_000, 16)
"""
COPE_CALLS = {
    "CoPE": "rp.attention(q, k, v, position=cope, causal=True)",
    "CoPE of few positions": "rp.attention(q, k, v, position=cope_short, causal=True)",
    "gradients of few queries": "rp.attention_vjp(few, many, more, grad_out=far)",
    "gradients of CoPE": "rp.attention_vjp(q, k, v, grad_out=v, position=cope, causal=True)",
}
MORE = """
one = q[..., :1].copy()
short = rp.Shaw(numbers(9, 1), numbers(9, 1))
shaw = rp.Shaw(numbers(65, 64), numbers(65, 64))
xl = rp.TransformerXL(numbers(2, 64), numbers(2, 64), numbers(32768, 2, 64))
window, room = numbers(2, 64, 49, 32), np.empty((1000, 64, 49, 32), np.float32)
wide_windows = [np.broadcast_to(window[:1], room.shape)] * 3
few, cache = numbers(2048, 1, 64), [np.broadcast_to(x[:1], (256, 65536, 64)) for x in (k, v)]
long = [np.broadcast_to(x.reshape(1, 1, -1, 64), (1, 1, 131072, 64)) for x in (k, v)]
keys = [np.concatenate([x] * 8, axis=2) for x in long]
"""
MORE_CALLS = {
    "float64": "rp.attention(*(x.astype(np.float64) for x in (q, k, v)))",
    "heads of one dimension, Shaw": "rp.attention(one, one, one, position=short)",
    "Shaw": "rp.attention(q, k, v, position=shaw)",
    "Transformer-XL": "rp.attention(q[:, :32768], k[:, :32768], v[:, :32768], causal=True, position=xl)",
    "windows": "rp.attention(*wide_windows, out=room)",
    "decoding": "rp.attention(few, *cache)",
    "a million keys": "rp.attention(q[None, :1, :2000], *keys)",
}
BACKWARD = """
forward = _numba.attention
def attention(problem, terms, out, lse, *unit):
    if problem.site.q_len < 1000:
        return forward(problem, terms, out, lse, *unit)
    # Not what is interrupted here, and it takes a minute.
    out.fill(0)
    lse.fill(9.0)
_numba.attention = attention
heads = [np.broadcast_to(x[:1], (8, 65536, 64)) for x in (q, k, v)]
"""
BACKWARD_CALLS = {
    "ranges of keys": "rp.attention_vjp(q, k, v, grad_out=v, position=rp.T5(table))",
    "whole heads": "rp.attention_vjp(*heads, grad_out=heads[0], causal=True)",
}
OTHERS = """
from relpos_np import layers
x, shifted = np.ones((2, 8192, 16383), np.float32), np.empty((2, 8192, 8192), np.float32)
deep = numbers(1, 2, 65536, 16)
products = rp.Shaw(numbers(2001, 16), None)
linear = layers.linear.Linear(numbers(2048, 2048))
rows = numbers(65536, 2048)
"""
OTHERS_CALLS = {
    "rel_shift": "rp.rel_shift(x, variant='conformer', out=shifted)",
    "products with a table": "rp.attention(deep, deep, deep, position=products, window=0)",
    "projection": "linear(rows)",
}


def test_row_40_forward():
    assert_prompt(reports(LENGTH, FORWARD))


@pytest.mark.stress
@pytest.mark.parametrize(
    ("setup", "cases"),
    [(MORE, MORE_CALLS), (COPE, COPE_CALLS), (BACKWARD, BACKWARD_CALLS), (OTHERS, OTHERS_CALLS)],
    ids=["more", "cope", "backward", "others"],
)
def test_row_40_every_kind_of_long_call(setup, cases):
    assert_prompt(reports(LENGTH + "list(_numba.warm_up())\n" + setup, cases, 1.0))


@pytest.mark.parametrize(("heads", "q_len", "k_len"), [(4, 40, 9000), (1, 40, 9000), (1, 9000, 40), (16, 40, 4000)])
def test_row_40_gradients_of_few_queries_or_few_keys_are_cut(heads, q_len, k_len, rng, monkeypatch):
    """Packing keys and values takes longer than the products with few queries, and is work of a call as well."""
    calls, run = [], launch.run

    def counted(kernel, record, threads):
        calls.extend([threads] if kernel is backward.backward["float64"] else [])
        run(kernel, record, threads)

    q, k, v, grad_out = (rng.standard_normal((heads, n, 16)) for n in (q_len, k_len, k_len, q_len))
    expected = rp.attention_vjp(q, k, v, grad_out=grad_out)
    monkeypatch.setattr(launch, "CALL_FLOPS", 3e7)
    monkeypatch.setattr(launch, "run", counted)
    found = rp.attention_vjp(q, k, v, grad_out=grad_out)
    for name in "qkv":
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # Three products with vectors of keys' depth, two of values', and the softmax; 64 queries' worth of packing.
    work = heads * k_len * (q_len + 64) * (2 * 5 * 16 + 80)
    assert sum(calls) * launch.call_flops(8) >= work


@pytest.mark.slow
def test_row_40_a_signal_s_handler_may_call_as_well():
    """It runs between two calls of the kernel, in the same thread, whose workspace it shares."""
    code = CODE + (
        "q, k, v = numbers(3, 2, 4096, 64)\n"
        "launch.CALL_FLOPS = 1e7\n"
        "def both(): return rp.attention(q, k, v).tobytes(), rp.attention_vjp(q, k, v, grad_out=v).q.tobytes()\n"
        "expected, handled = both(), []\n"
        "def handler(*_):\n"
        "    call_small()\n"
        "    handled.append(rp.attention_vjp(a, b, c, grad_out=c).k.tobytes())\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
        "found = {both() for _ in range(2)}\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "print(found == {expected}, len(set(handled)), len(handled) > 3)\n"
    )
    status, out, log = child(code)
    assert (status, out) == (0, "True 1 True\n"), log


@pytest.mark.slow
@pytest.mark.parametrize("home", [True, False])
def test_row_40_many_interrupts_in_a_row(home):
    """Also while the threads of a forked child are waited for: none writes to memory that is given back."""
    code = CODE + (
        f"launch._home = launch._home if {home} else 0\n"
        "launch.run = run\n"
        "q, k, v = numbers(3, 4, 3000, 32)\n"
        "expected, count = rp.attention(q, k, v).tobytes(), 0\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "stop = time.perf_counter() + 1.5\n"
        "while True:\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.02)\n"
        "        while time.perf_counter() < stop: rp.attention(q, k, v)\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0); break\n"
        "    except KeyboardInterrupt: count += 1\n"
        "print(count > 0, rp.attention(q, k, v).tobytes() == expected, threading.active_count())\n"
    )
    status, out, log = child(code)
    assert (status, out) == (0, "True True 1\n"), log


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_row_40_threads_of_python_are_waited_for(after, monkeypatch):
    """They write to memory of the call: none may run when it has returned, wherever the interrupt came."""
    launch, main, ended = pytest.importorskip("relpos_np.kernels._numba.launch.launcher"), threading.main_thread(), []

    def function(*_):
        time.sleep(0.05 if threading.current_thread() is main else 0.4)
        ended.append(1)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        if not after:  # in the midst of a start
            start = launch._thread.start_new_thread

            def interrupted(*args):
                start(*args)
                raise KeyboardInterrupt

            monkeypatch.setattr(launch._thread, "start_new_thread", interrupted)
        else:
            signal.setitimer(signal.ITIMER_REAL, after, 0.05)
        with pytest.raises(KeyboardInterrupt):
            launch._run_on_python_threads(function, 0, 3)
        finished = len(ended)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.6)
    assert len(ended) == finished


@pytest.mark.stress
def test_row_40_while_a_kernel_is_compiled(tmp_path):
    """The compiler calls Python back, which can raise nothing there: no Ctrl-C is lost, and the next call is right."""
    code = CODE.partition("launch.run =")[0] + (
        "x, caught, times = rng.standard_normal((4, 400, 799)), 0, (0.2, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 3.0)\n"
        "for after in times:\n"
        "    timer = threading.Timer(after, signal.raise_signal, [signal.SIGINT])\n"
        "    try:\n"
        "        timer.start()\n"
        "        rp.rel_shift(x, variant='conformer')\n"
        "        timer.join()\n"
        "        time.sleep(1)\n"
        "    except KeyboardInterrupt:\n"
        "        caught += 1\n"
        "found, expected = (rp.rel_shift(x, variant='conformer', backend=b) for b in ('numba', 'numpy'))\n"
        "print(caught == len(times), np.array_equal(found, expected), signal.getsignal(signal.SIGINT) is before)\n"
    ).replace("x, caught", "before = signal.getsignal(signal.SIGINT)\nx, caught", 1)
    status, out, log = child(code, RELPOS_CACHE_DIR=str(tmp_path))
    assert (status, out) == (0, "True True True\n"), log


def from_outside(code, after):
    """Run code that prints a line, send it SIGINT some time after that, and return seconds, status and all output."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        try:
            head = process.stdout.readline()
            time.sleep(after)
            assert process.poll() is None, process.stdout.read()
            sent = time.perf_counter()
            os.kill(process.pid, signal.SIGINT)
            rest = process.communicate(timeout=60)[0]
            return time.perf_counter() - sent, process.returncode, head + rest
        finally:
            process.kill()


@pytest.mark.slow
def test_row_40_a_signal_from_outside():
    """Between the signal and the end of the process: the exception, Python's farewell, and no thread that goes on."""
    code = (
        "import numpy as np, relpos_np as rp\n"
        "q = np.ones((4, 65536, 64), np.float32)\n"
        "rp.attention(q[:, :500], q, q)\n"
        "print('begun', flush=True)\n"
        "rp.attention(q, q, q)\n"
    )
    seconds, status, out = from_outside(code, 0.3)
    assert (status, out.splitlines()[0], out.splitlines()[-1]) == (-signal.SIGINT, "begun", "KeyboardInterrupt")
    assert seconds < 4.0
