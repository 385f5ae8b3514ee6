"""A device without room: an error, and a context that goes on working. Alone, since it takes all memory."""

import numpy as np
import pytest

import relpos_np as rp

pytestmark = pytest.mark.gpu
ROOM = 64 << 20


def test_out_of_memory_leaves_the_context_usable(simulated, rng):
    if simulated:
        pytest.skip("the simulator has no memory that could run out")
    from numba import cuda

    small = [rng.standard_normal((2, 65, 32)).astype("float32") for _ in range(3)]
    before = rp.attention(*small, backend="cuda")
    x = np.zeros((2 * ROOM // (64 * 4), 64), np.float32)
    ballast, size = [], cuda.current_context().get_memory_info().free - ROOM
    # Less and less, because free memory need not be in one piece.
    while size > ROOM:
        try:
            ballast.append(cuda.device_array(size, np.uint8))
            size = cuda.current_context().get_memory_info().free - ROOM
        except Exception:  # noqa: BLE001 - what the driver raises has no public name
            size -= ROOM
    assert ballast
    with pytest.raises(Exception, match=r"(?i)out.of.memory"):
        rp.attention(x, x, x, backend="cuda")
    ballast.clear()
    np.testing.assert_array_equal(rp.attention(*small, backend="cuda"), before)
