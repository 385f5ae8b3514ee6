"""Cells of the table in docs/determinism.md that are about kernels on the device."""

import numpy as np
import pytest

import relpos_np as rp
from tests.determinism import PROPERTIES, Kernel, close, equal
from tests.layouts import LAYOUTS
from tests.test_docs import DOCS, script

if not DOCS.is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)

STATED = script("reliability").DETERMINISM
KERNELS = {
    "CUDA attention": Kernel("cuda", (2, 2, 2, 9, 11, 8, 8)),
    "CUDA decoding": Kernel("cuda", (2, 2, 2, 1, 65, 8, 8)),
    "CUDA gradients": Kernel("cuda", (2, 2, 2, 5, 7, 4, 4), backward=True),
}


CELLS = [(kernel, name) for kernel in KERNELS for name in PROPERTIES if STATED[kernel][name] != "–"]


@pytest.mark.parametrize(("kernel", "name"), CELLS)
def test_cell(kernel, name):
    stated = STATED[kernel][name]
    same = equal if stated == "yes" else lambda pair: close(pair, "float32")
    assert all(map(same, PROPERTIES[name](KERNELS[kernel], "float32")))


def test_rel_shift(rng):
    x = rng.standard_normal((2, 2, 5, 9)).astype(np.float32)
    whole = rp.rel_shift(x, variant="conformer", backend="cuda")
    np.testing.assert_array_equal(rp.rel_shift(x, variant="conformer", backend="cuda"), whole)
    np.testing.assert_array_equal(rp.rel_shift(x[1:, 1:], variant="conformer", backend="cuda"), whole[1:, 1:])
    for change in LAYOUTS.values():
        np.testing.assert_array_equal(rp.rel_shift(change(x), variant="conformer", backend="cuda"), whole)
