"""Row 45: a device without memory, at every step of a call, after which everything goes on.

What is said without a device, of arrays on another one and of kernels that fail is in tests/test_cuda.py and
tests/cuda/test_cuda_errors.py.
"""

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.conftest import BACKENDS
from tests.faults.operands import make

pytestmark = pytest.mark.skipif(
    "cuda" not in BACKENDS, reason="runs on a GPU or in the simulator (NUMBA_ENABLE_CUDASIM=1)"
)


def calls():
    """Each function on the device, with small operands."""
    rng = np.random.default_rng(0)
    q, k, v = make(rng, np.float32, batch=(1,))
    position = rp.T5(rng.standard_normal((32, 2)).astype(np.float32))
    out = np.full((1, 2, 5, 3), 7, np.float32)
    mask = np.ones((5, 6), bool)

    def forward():
        return [rp.attention(q, k, v, position=position, mask=mask, backend="cuda", out=out).copy()]

    def backward():
        found = rp.attention_vjp(q, k, v, grad_out=np.ones_like(out), position=position, backend="cuda")
        return [found.q, found.k, found.v, found.position["table"]]

    def shift():
        return [rp.rel_shift(np.asarray(q @ k.swapaxes(-1, -2)), backend="cuda")]

    return {"attention": forward, "attention_vjp": backward, "rel_shift": shift}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("attention", "OUT_OF_MEMORY"),
        ("attention", "INVALID_VALUE"),
        ("attention_vjp", "OUT_OF_MEMORY"),
        ("rel_shift", "OUT_OF_MEMORY"),
    ],
)
def test_row_45_a_device_that_fails_at_any_step(name, word, monkeypatch):
    """Uploads, allocations, launches and downloads in turn: an error with its cause, and the next call is right."""
    from relpos_np.kernels._cuda.launch import device
    from tests.cuda.doubles import FAILURE

    call, attempt = calls()[name], device.attempt
    expected, steps, fails = call(), [], set()

    def failing(*args, **options):
        raise FAILURE(f"[2] Call to something results in CUDA_ERROR_{word}")

    def counted(what, action, *args, **options):
        steps.append(what)
        return attempt(what, failing if len(steps) in fails else action, *args, **options)

    monkeypatch.setattr(device, "attempt", counted)
    call()
    count = len(steps)
    assert count >= 3
    kind = rp.RelposMemoryError if word == "OUT_OF_MEMORY" else rp.RelposError
    for step in range(1, count + 1):
        steps.clear()
        fails.add(step)
        with pytest.raises(kind, match=word) as caught:
            call()
        assert isinstance(caught.value.__cause__, FAILURE)
        fails.clear()
        # In the simulator a call takes long.
        if step % 4 == 1 or step == count:
            for a, b in zip(call(), expected, strict=True):
                np.testing.assert_array_equal(a, b)
