"""Choices for a block: when it ends, in whatever way, all is as it was before."""

import contextvars
from contextlib import nullcontext

import pytest

import relpos_np as rp
from relpos_np._runtime import memory, precision

# For each, how it is entered, two values, and what says which one holds.
BLOCKS = {
    "backend": (rp.use_backend, ("numpy", "terms"), rp.backend.current),
    "precision": (rp.use_precision, ("medium", "high"), lambda: precision.chosen(None)),
    "memory": (rp.memory_limit, (1 << 40, None), memory.limit),
    "threads": (rp.threads, (1, 2), rp.get_num_threads),
}


def leave(error):
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, rp.RelposError, KeyError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_held_before_holds_after(name, error):
    """Nested, twice, left by an error or by its end; also by the wrong arguments of the inner one."""
    enter, values, current = BLOCKS[name]
    before = current()

    def left():
        return nullcontext() if error is None else pytest.raises(error)

    for first, second in (values, values[::-1]):
        with left(), enter(first):
            assert current() == first
            with left(), enter(second):
                assert current() == second
                leave(error)
            assert current() == first
            with pytest.raises(rp.RelposError), enter("none"):
                pass
            assert current() == first
            leave(error)
        assert current() == before


@pytest.mark.parametrize("name", sorted({*BLOCKS} - {"threads"}))  # Numba's own number belongs to the thread
def test_a_context_that_is_copied_keeps_its_own(name):
    enter, values, current = BLOCKS[name]
    before = current()
    with enter(values[0]):
        inside = contextvars.copy_context()
    assert inside.run(current) == values[0]
    assert current() == before
