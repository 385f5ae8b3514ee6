"""Stand-ins for arrays of other libraries on a device, in the simulator, whose devices are the host's memory."""

import importlib

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from relpos_np.kernels._cuda.launch import device

if not device.simulated():
    pytest.skip("the doubles are memory of the host", allow_module_level=True)

FAKE = importlib.import_module("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray
KERNEL = importlib.import_module("numba.cuda.simulator.kernel").FakeCUDAKernel
FAILURE = importlib.import_module("numba.cuda.cudadrv.driver").CudaAPIError
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
EPS = {name: float(ml_dtypes.finfo(dtype).eps) for name, dtype in DTYPES.items()}
ATTENTION = [(n, v) for n, info in rp.SCHEMES.items() if info.kind == "attention" for v in info.variants or (None,)]


class There:
    """An array that another library has on a device: all that is known of it is its CUDA array interface."""

    def __init__(self, x, **entries):
        self.x, self.entries = x, entries

    @property
    def __cuda_array_interface__(self):
        x = self.x
        place = x.ctypes.data, not x.flags.writeable
        return {
            "shape": x.shape,
            "typestr": x.dtype.str,
            "data": place,
            "strides": x.strides,
            "version": 3,
        } | self.entries


class Packed(There):
    """The same with DLPack, which knows the device."""

    number = 0

    def __dlpack_device__(self):
        return 2, self.number

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


def there(*arrays, **entries):
    return [There(x, **entries) for x in arrays]


def holds(uploads, operand):
    """Whether the numbers of an operand are among what was uploaded, in whatever dtype."""
    wanted = np.unique(operand.astype(np.float64))
    kinds = [np.dtype(d) for d in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)]
    for x in uploads:
        flat = np.ascontiguousarray(x).reshape(-1)
        views = [flat.view(kind) for kind in kinds if flat.nbytes % kind.itemsize == 0]
        with np.errstate(all="ignore"):
            # A few of them may be among other bytes by chance.
            if any(np.isin(wanted, view.astype(np.float64)).mean() > 0.5 for view in views):
                return True
    return False


def draw(rng, dtype="float32", heads=2, kv_heads=1, q_len=5, k_len=7, dim=6, v_dim=3, batch=(2,)):
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    return [rng.standard_normal((*batch, *shape)).astype(DTYPES[dtype]) for shape in shapes]


def expected_of(q, k, v, **options):
    """The formulas in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    return rp.attention(q, k, v, backend="numpy", return_lse=True, **options)


def same(found, expected, dtype):
    """Output and log-sum-exp on the device, of the right kind and close to what was expected."""
    out, lse = found
    assert type(out) is type(lse) is DeviceArray
    assert (out.dtype, out.shape) == (DTYPES[dtype], expected[0].shape)
    assert (lse.dtype, lse.shape) == ("float64" if dtype == "float64" else "float32", expected[1].shape)
    # Scores below 10; results of half precision are rounded once, by half a unit at most.
    wide = 200 * EPS["float64" if dtype == "float64" else "float32"]
    np.testing.assert_allclose(out.copy_to_host().astype(np.float64), expected[0], rtol=EPS[dtype] / 2, atol=wide)
    np.testing.assert_allclose(lse.copy_to_host(), expected[1], rtol=0, atol=wide)


# Layouts in which other libraries hold an array: a function that makes one, with the same numbers.
def in_a_row(x):
    return np.ascontiguousarray(x)


def heads_last(x):
    """As (batch, length, heads, channels) in memory."""
    return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -2, -3)), -2, -3)


def with_gaps(x):
    """Every second row and every third channel of a larger one."""
    large = np.full((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1]), 99, x.dtype)
    large[..., ::2, 1::3] = x
    return large[..., ::2, 1::3]
