"""Row 48: no number in a scheme's arguments decides what a call takes; its operands and arrays do."""

import inspect
import time
import tracemalloc
from fractions import Fraction
from math import inf, nan

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.testing.arguments import arguments
from tests.every import ATTENTION

HOSTILE = (0, -1, 4_000_000, 2**31 - 1, 2**31, 2**40, 2**61 - 1, 2**61, 10**30)
HOSTILE += (0.0, 1e-320, 1e-300, 1e18, 1e300, nan, inf, -inf, True, "4")
# Beyond the largest float, and more digits than Python prints.
HOSTILE += (10**400, -(10**400), 10**5000, Fraction(10**400))
# Of calls of 17 tokens; a number that bounds nothing asks for thousands of times as much.
SECONDS, BYTES = 2.0, 16 << 20


def changed(scheme):
    """The scheme's arguments with one number, or each or the last of several, replaced by a hostile one."""
    given = arguments(scheme)
    for name, parameter in inspect.signature(type(scheme)).parameters.items():
        now = given.get(name, parameter.default)
        if isinstance(now, np.ndarray | str | bool | rp.Scheme):
            continue
        for value in HOSTILE:
            yield given | {name: value}
            if isinstance(now, tuple):
                yield given | {name: (value,) * len(now)}
                yield given | {name: (*now[:-1], value)}


def bounded(call):
    """Run a call that works or is refused; how long it took, and its memory at most."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        call()
    except rp.RelposError:
        pass
    finally:
        taken, most = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return taken, most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers may overflow, as the formula does
@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_48_numbers_of_schemes(name, variant, backend):
    """Forward and back, whatever stands in the call."""
    e = testing.example(name, variant=variant, size="tiny", dtype="float64")
    if e.position is None:
        return
    grad = np.ones((*e.q.shape[:-1], e.v.shape[-1]))

    def call(kwargs):
        options = {"position": type(e.position)(**kwargs), **e.kwargs, "backend": backend}
        rp.attention(e.q, e.k, e.v, **options)
        rp.attention_vjp(e.q, e.k, e.v, grad_out=grad, **options)

    call(arguments(e.position))  # what is compiled or kept once
    for kwargs in changed(e.position):
        taken, most = bounded(lambda kwargs=kwargs: call(kwargs))
        if taken > SECONDS:  # once more, since others use the machine
            taken, most = bounded(lambda kwargs=kwargs: call(kwargs))
        assert taken <= SECONDS, kwargs
        assert most <= BYTES, kwargs


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_row_48_borders_of_large_tables(backend, rng):
    """Tables of 20,000 buckets up to the distance 10^18: numbers that tell its borders would have 100,000 digits."""
    q, k, v = (rng.standard_normal((1, 1, 600, 4)) for _ in range(3))
    rows = rng.standard_normal((1, 400, 4))
    for position in (
        rp.T5(rng.standard_normal((400, 1)), max_distance=10**18),
        rp.T5(rng.standard_normal((400, 1)), max_distance=10**18, rounding="float32"),
        rp.T5(rng.standard_normal((20_000, 1)), max_distance=10**18, bidirectional=False),
        rp.DeBERTa(rows, rows, max_position=10**18),
    ):
        taken, most = bounded(lambda position=position: rp.attention(q, k, v, position=position, backend=backend))
        assert taken <= SECONDS
        assert most <= 4 * BYTES


class Unprintable:
    """Whose representation fails."""

    def __repr__(self):
        raise RuntimeError


# What no option takes.
WORDS = {
    "many digits": 10**5000,
    "negative": -(10**5000),
    "unprintable": Unprintable(),
    "of unprintable ones": [Unprintable()],
    "empty": np.empty(0),
    "masked": np.ma.masked,
    "long": "x" * 10**6,
}
OPTIONS = ("window", "offset", "scale", "softcap", "key_lengths", "causal", "segments", "dropout", "rule")
OPTIONS += ("precision", "backend", "cap_order")
SETTINGS = (rp.set_num_threads, rp.set_memory_limit, rp.set_precision, rp.set_backend)
BLOCKS = (rp.threads, rp.memory_limit, rp.use_precision, rp.use_backend)
RULES = (rp.Chunked, rp.Dilated)


@pytest.mark.parametrize("word", WORDS)
def test_row_48_numbers_of_calls(word, rng):
    """A message shows the start of what was found, or its type if it cannot be printed."""
    value = WORDS[word]
    q = rng.standard_normal((2, 5, 4))

    def enter(block):
        with block(value):
            pass

    calls = {name: lambda name=name: rp.attention(q, q, q, **{name: value}) for name in OPTIONS}
    calls |= {f.__name__: lambda f=f: f(value) for f in (*SETTINGS, *RULES)}
    calls |= {f.__name__: lambda f=f: enter(f) for f in BLOCKS}
    if word == "many digits":
        del calls["set_memory_limit"], calls["memory_limit"]  # as good as none
    for name, call in calls.items():
        with pytest.raises(rp.RelposError) as caught:
            call()
        assert len(str(caught.value)) < 1000, name
