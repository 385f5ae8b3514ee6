"""What tests/soak.py found, each as small as it could be made."""

from dataclasses import replace

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing import cases
from tests.strategies import LAYOUTS

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


@pytest.mark.parametrize("layout", ["fortran", "every other"])
def test_a_limit_changes_no_bits_whatever_the_layout(layout, backend, rng):
    """Schemes were lowered for operands as they lay, and without a limit for copies in C order."""
    q, k, v = (LAYOUTS[layout](x) for x in rng.standard_normal((3, 2, 3, 65, 33)).astype(np.float32))
    position = rp.Shaw(rng.standard_normal((9, 33)).astype(np.float32))
    expected = rp.attention(q, k, v, position=position, backend=backend)
    with rp.memory_limit(1 << 30):
        found = rp.attention(q, k, v, position=position, backend=backend)
    np.testing.assert_array_equal(found, expected)


def test_subnormal_numbers_are_judged_by_the_smallest_there_are():
    one = next(one for one in cases("sinusoidal", variant="dimension_index", dtype="float16") if one.x is not None)
    x = np.full_like(one.x, 5.96e-6)
    assert replace(one, x=x).backend_error("numpy") <= 1
