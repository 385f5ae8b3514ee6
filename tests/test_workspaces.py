"""Where arrays and the workspaces of threads lie."""

import numpy as np
import pytest

from relpos_np.kernels._numba.launch import arrays, launcher


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_addresses(shape, rng):
    """They are read from the head of an array; NumPy says where its data is."""
    x = rng.standard_normal((4, *shape, 3))
    for y in (x, x[1:], x[..., 1:], x[::-1], np.broadcast_to(x, (2, *x.shape)), x.astype(np.uint8)):
        assert arrays.address_of(y) == y.__array_interface__["data"][0]


def test_a_workspace_holds_what_was_asked_for(monkeypatch):
    """Whatever was lent before, down to a cache line more or less: it is kept only if there is room."""
    monkeypatch.setattr(launcher, "_local", type(launcher._local)())
    for size in range(64, 64 * 200, 64):
        for wanted, threads in ((size, 1), (size + 64, 1), (size - 63, 2)):
            memory, begin, stride = launcher.lend(wanted, threads)
            assert begin % 64 == 0
            assert stride >= wanted
            assert arrays.address_of(memory) <= begin
            assert begin + threads * stride <= arrays.address_of(memory) + memory.nbytes
