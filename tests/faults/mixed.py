"""Calls of every kind for tests of threads and processes, each as a function without arguments that returns bytes."""

from functools import cache

import numpy as np

import relpos_np as rp
import relpos_np.testing

# What a child process does first: all kinds of calls, and a comparison of what other threads found with this one's.
CHILD = "from tests.faults.mixed import calls, from_threads\nmixed = calls()\n"


def _bytes(result):
    """Of an array, of several, or of gradients."""
    if isinstance(result, tuple):
        return b"".join(map(_bytes, result))
    if isinstance(result, rp.AttentionGradient):
        return _bytes((result.q, result.k, result.v, *result.position.values()))
    return result.tobytes()


@cache
def calls():
    """Forward and backward, windows, decoding, rel_shift and products, in several dtypes and schemes.

    All but the examples are large enough for several threads.
    """
    rng = np.random.default_rng(38)

    def operands(*shape, k_len=None, dtype=np.float32):
        *lead, length, depth = shape
        return [
            rng.standard_normal((*lead, n, depth)).astype(dtype) for n in (length, k_len or length, k_len or length)
        ]

    def table(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def call(function, *args, **options):
        return lambda: _bytes(function(*args, **options))

    found = {}
    t5 = rp.T5(table(32, 4))
    for dtype in (np.float32, np.float64, np.float16):
        q, k, v = operands(4, 300, 32, dtype=dtype)
        found[f"T5 {dtype.__name__}"] = call(rp.attention, q, k, v, position=t5, causal=True, return_lse=True)
        found[f"plain {dtype.__name__}"] = call(rp.attention, q, k, v, window=100)
        q, k, v = operands(8, 1, 64, k_len=4000, dtype=dtype)
        found[f"decode {dtype.__name__}"] = call(rp.attention, q, k, v)
    for dtype in (np.float32, np.float64):
        q, k, v = operands(64, 3, 49, 32, dtype=dtype)
        found[f"windows {dtype.__name__}"] = call(rp.attention, q, k, v)
        q, k, v = operands(4, 200, 32, dtype=dtype)
        found[f"backward {dtype.__name__}"] = call(rp.attention_vjp, q, k, v, grad_out=v, position=t5)
        x = rng.standard_normal((4, 400, 799)).astype(dtype)
        found[f"rel_shift {dtype.__name__}"] = call(rp.rel_shift, x, variant="conformer")
    q, k, v = operands(4, 256, 32)
    found["Shaw"] = call(rp.attention, q, k, v, position=rp.Shaw(table(33, 32), table(33, 32)))
    found["rotary"] = call(rp.attention, q, k, v, position=rp.Rotary(32))
    found["mask"] = call(rp.attention, q, k, v, mask=rng.random((256, 256)) < 0.5)
    found["numpy"] = call(rp.attention, q[:, :20], k, v, position=t5, backend="numpy")
    for name in ("transformer_xl", "deberta", "window", "cope", "neighborhood"):
        one = rp.testing.example(name, dtype=np.float32)
        found[name] = call(rp.attention, one.q, one.k, one.v, position=one.position, **one.kwargs)
    return found


def from_threads(mixed, threads, repeats):
    """Make every thread start at once, each with another call; returns the names of calls that gave several answers.

    Nothing has run before: first calls, which load or compile kernels, are among them. Other answers than the calling
    thread's own, afterwards, count as well.
    """
    import threading

    names, barrier = list(mixed), threading.Barrier(threads)
    answers, errors = {name: set() for name in names}, []

    def work(n):
        barrier.wait()
        try:
            for m in range(repeats):
                name = names[(5 * n + m) % len(names)]
                answers[name].add(mixed[name]())
        except BaseException as error:
            errors.append(repr(error))
            raise

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for name in names:
        if answers[name]:
            answers[name].add(mixed[name]())
    return sorted(name for name in names if len(answers[name]) > 1) + errors
