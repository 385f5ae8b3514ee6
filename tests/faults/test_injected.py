"""Row 41: calls that end half way, at a thousand places, leave no memory behind and nothing that the next call sees."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np._runtime import memory
from tests.faults.operands import make

HOST = rp.backend.HOST_BACKENDS
# With forms of calls that were met before, for which fewer functions are entered, and without.
WAYS = [*((backend, False) for backend in HOST), ("numba", True)]
PACKAGE = str(Path(rp.__file__).parent)
PAGES = Path("/proc/self/statm")
FAULTS = 340  # of each backend: a thousand and a few


def resident():
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(PAGES.read_text().split()[1]) * 4096


class Fault:
    """Raises at the n-th time that a function of the library is entered."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise self.error
        # no line of it is traced


def calls_of(backend):
    """One call of each function, with everything that can be held half way: out, dropout, tables, several schemes."""
    rng = np.random.default_rng(5)
    q, k, v = make(rng, np.float32, q_len=70, k_len=70, depth=8, v_dim=8)
    tables = rng.standard_normal((32, 2)).astype(np.float32), rng.standard_normal((9, 8)).astype(np.float32)
    position = rp.T5(tables[0]), rp.Shaw(tables[1], tables[1])
    out = np.empty_like(q)

    def forward():
        found, lse = rp.attention(q, k, v, position=position, backend=backend, out=out, return_lse=True)
        return [found.copy(), lse]

    def dropped():
        kept = np.random.default_rng(1)
        return [rp.attention(q, k, v, position=position, backend=backend, dropout=0.5, rng=kept)]

    def backward():
        found = rp.attention_vjp(q, k, v, grad_out=v, position=position, backend=backend)
        return [found.q, found.k, found.v, *found.position[0].values(), *found.position[1].values()]

    def others():
        return [rp.rel_shift(q @ np.ones((8, 139), np.float32), variant="conformer", backend=backend),
                rp.logits(q, k, position=position, backend=backend)]  # fmt: skip

    return forward, dropped, backward, others


def traced(call, tracer):
    """Call under a tracer, and return what it raises; whoever traced before goes on after."""
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except (KeyboardInterrupt, MemoryError, RuntimeError) as error:
        return error
    finally:
        sys.settrace(before)
    return None


def entries(call):
    """How often functions of the library are entered."""
    count = Fault(1 << 40, None)
    assert traced(call, count) is None
    return (1 << 40) - count.left


@pytest.mark.skipif(not PAGES.exists(), reason="needs Linux's size of resident memory")
@pytest.mark.parametrize(("backend", "met"), WAYS)
def test_row_41_a_thousand_faults_half_way(backend, met, monkeypatch):
    """Interrupts, lack of memory and any other error at random places; sizes stay, and results keep their bits."""
    rng = np.random.default_rng(41)
    calls = calls_of(backend)
    if not met:
        monkeypatch.setattr(repeated, "form", lambda *_, **__: None)
    expected = [[call() for _ in range(3)][-1] for call in calls]
    places = [entries(call) for call in calls]
    assert min(places) > 5
    before, hit = 0, 0
    for n in range(FAULTS):
        which = int(rng.integers(len(calls)))
        error = (KeyboardInterrupt, MemoryError, RuntimeError)[n % 3]("injected")
        found = traced(calls[which], Fault(int(rng.integers(places[which])), error))
        if found is not None:
            hit += 1
            assert "injected" in str(found)
            assert isinstance(found, rp.RelposMemoryError | type(error))
        del found, error
        if n % 20 == 0:
            again = calls[which]()
            for a, b in zip(again, expected[which], strict=True):
                np.testing.assert_array_equal(a, b)
        if n == 100:
            before = resident()
    assert hit > FAULTS * 0.9
    assert resident() - before < 4 << 20
    for call, numbers in zip(calls, expected, strict=True):
        for a, b in zip(call(), numbers, strict=True):
            np.testing.assert_array_equal(a, b)
    assert memory.limit() is None


@pytest.mark.parametrize("backend", HOST)
def test_row_41_allocations_that_fail(backend, monkeypatch):
    """Whichever of NumPy's own functions finds no memory, the error is this library's, and the next call is right."""
    calls = calls_of(backend)
    expected = [call() for call in calls]
    failed = 0
    for name in ("empty", "zeros", "where", "ones", "take_along_axis", "concatenate"):
        for after in range(4):
            for call, numbers in zip(calls, expected, strict=True):
                left, real = [after], getattr(np, name)

                def failing(*args, left=left, real=real, **options):
                    left[0] -= 1
                    if left[0] < 0 and sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
                        raise np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.float32))
                    return real(*args, **options)

                with monkeypatch.context() as patch:
                    patch.setattr(np, name, failing)
                    error = traced(call, None)
                if error is not None:
                    failed += 1
                    assert isinstance(error, rp.RelposMemoryError)
                    assert "4.00 TiB" in str(error)
                for a, b in zip(call(), numbers, strict=True):
                    np.testing.assert_array_equal(a, b)
    assert failed > 5


@pytest.mark.parametrize(("backend", "met"), WAYS)
def test_row_41_out_is_not_touched_by_what_is_refused_and_may_be_by_what_is_not(backend, met, monkeypatch):
    """Its content after a fault is undefined, but it stays an array that the next call fills."""
    q, k, v = make(np.random.default_rng(0), np.float32, q_len=70, k_len=70)
    if not met:
        monkeypatch.setattr(repeated, "form", lambda *_, **__: None)
    expected = [rp.attention(q, k, v, backend=backend) for _ in range(3)][-1]
    out = np.full(expected.shape, 7, np.float32)

    def call():
        rp.attention(q, k, v, backend=backend, out=out)

    for n in range(entries(call)):
        assert traced(call, Fault(n, RuntimeError("injected"))) is not None
        rp.attention(q, k, v, backend=backend, out=out)
        np.testing.assert_array_equal(out, expected)
