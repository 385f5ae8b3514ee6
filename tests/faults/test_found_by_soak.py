"""What tests/soak.py found, each as small as it could be made."""

import numpy as np
import pytest

import relpos_np as rp

SHAPES = {
    "no queries": ((2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 3)),
    "no keys": ((2, 4, 6, 8), (2, 4, 0, 8), (2, 4, 0, 3)),
    "no batch items": ((0, 4, 6, 8), (0, 4, 5, 8), (0, 4, 5, 3)),
    "no channels": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 0)),
}


@pytest.fixture(params=SHAPES)
def operands(request):
    return [np.ones(shape) for shape in SHAPES[request.param]]


def test_row_12_out_without_elements(operands, backend):
    """NumPy gives new arrays without elements strides of 0, as of arrays whose elements share memory."""
    q, _, v = operands
    out = np.full((*q.shape[:-1], v.shape[-1]), 7.0)
    assert rp.attention(*operands, out=out, backend=backend) is out
    assert (out == 0).all()


def test_row_37_a_limit_on_a_call_without_elements(operands, backend):
    """How much the kernels take was divided by the number of blocks, of which there are none."""
    q, _, v = operands
    table = rp.T5(np.zeros((32, 4)))
    with rp.memory_limit(1 << 30):
        out, lse = rp.attention(*operands, position=table, backend=backend, return_lse=True)
        rp.attention_vjp(*operands, grad_out=np.ones(out.shape), position=table, backend=backend)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == q.shape[:-1]
