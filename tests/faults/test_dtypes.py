"""Rows 26 to 32: what arrays may hold, and what is refused because NumPy would read something else in it."""

import inspect

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.faults.arrays import PLACES, Called, unknown_parameters
from tests.faults.operands import make

# Where any numbers are moved and nothing is computed.
MOVED = {"rel_shift(x)", "window_partition(x)", "window_reverse(windows)", "cyclic_shift(x)"}
# Whatever is no array of NumPy, and arrays of what is no number that this library computes with.
ODD = (
    "masked",
    "matrix",
    "list",
    "ragged",
    "object",
    "called",
    "calls inside",
    "longdouble",
    "complex",
    "str",
    "bytes",
)


def odd(good, kind):
    """The same numbers as something that no function takes for an array."""
    if kind == "masked":
        return np.ma.masked_array(good)
    if kind == "matrix":
        return good.view(np.matrix)
    if kind == "list":
        return good.tolist()
    if kind == "ragged":
        return [[1.0], [1.0, 2.0]]
    if kind == "called":
        return Called()
    if kind == "calls inside":
        found = np.empty(good.shape, object)
        found.fill(Called())
        return found
    dtype = {"object": object, "longdouble": np.longdouble, "complex": complex, "str": "U3", "bytes": "S3"}[kind]
    return good.astype(dtype)


CASES = [
    (label, kind)
    for label, place in PLACES.items()
    for kind in ODD
    if (kind != "matrix" or place.good.ndim == 2) and (kind != "list" or place.good.ndim)
]


@pytest.mark.parametrize(("label", "kind"), CASES)
def test_row_27_to_31_what_is_no_array_of_numbers(label, kind):
    """Of every argument of functions, schemes, encodings and layers: masked, matrix, lists, objects, rare dtypes."""
    place = PLACES[label]
    value = odd(place.good, kind)
    place.call(place.good)
    if (
        label in MOVED
        and (kind in ("longdouble", "complex") or (label != "rel_shift(x)" and isinstance(value, np.ndarray)))
        and type(value) is np.ndarray
    ):
        assert place.call(value).dtype == value.dtype
        return
    with pytest.raises(rp.RelposTypeError, match=rf"\b{place.name}\b"):
        place.call(value)


@pytest.mark.parametrize("label", [label for label, place in PLACES.items() if place.good.dtype.kind == "f"])
@pytest.mark.parametrize("dtype", [int, bool, np.uint8])
def test_row_28_integers_where_numbers_are_wanted(label, dtype):
    place = PLACES[label]
    value = place.good.astype(dtype)
    bools = dtype is bool and ("positions" in label or label == "rel_shift(x)")
    if (label in MOVED or "positions" in label) and not bools:
        place.call(value)
        return
    if place.name == "mask" and dtype is bool:
        return  # row 32
    with pytest.raises(rp.RelposTypeError, match=rf"\b{place.name}\b"):
        place.call(value)


@pytest.mark.parametrize("label", [label for label, place in PLACES.items() if place.good.dtype.kind in "ib"])
@pytest.mark.parametrize("dtype", [float, bool, int])
def test_row_28_numbers_where_integers_or_bools_are_wanted(label, dtype):
    place = PLACES[label]
    if np.dtype(dtype).kind == place.good.dtype.kind or (label, dtype) == ("LayoutBias(boxes: int64)", float):
        return
    if dtype is float and label.endswith("positions: int64)") and not label.startswith("LayoutBias"):
        return  # of rotary positions, which may be either
    with pytest.raises(rp.RelposTypeError, match=rf"\b{place.name}\b"):
        place.call(place.good.astype(dtype))


def test_row_30_places_are_found_by_inspection():
    """A new array of a scheme, or a new keyword of a function, has to be listed or is found."""
    # Numbers, or lists of coordinates: see test_arguments.
    assert unknown_parameters() == {("DeBERTa", "max_position"), ("Shaw", "left"), ("WindowBias", "key_coords")}
    for function in (rp.attention, rp.logits, rp.attention_vjp, rp.rel_shift):
        for name, parameter in inspect.signature(function).parameters.items():
            if "Array" in str(parameter.annotation):
                assert f"{function.__name__}({name})" in PLACES, (function, name)


class Tagged(np.ndarray):
    pass


@pytest.mark.parametrize("label", [x for x in PLACES if not x.endswith("(out)")])
def test_row_31_other_subclasses_are_read_as_arrays(label):
    """Their methods and operators are never used."""
    place = PLACES[label]
    expected, found = place.call(place.good), place.call(place.good.view(Tagged))
    if isinstance(expected, np.ndarray):
        assert type(found) is np.ndarray or label in MOVED
        np.testing.assert_array_equal(np.asarray(found), expected)
    else:
        assert type(found) is type(expected)


class Liar(np.ndarray):
    """An array whose methods and attributes say what is not so."""

    shape = strides = property(lambda self: (1 << 40,) * 4)
    dtype, ndim, size, nbytes = (property(lambda self, x=x: x) for x in (np.dtype(np.int8), 1, 0, 0))

    def view(self, *args):
        return np.zeros(1)

    astype = copy = reshape = transpose = __getitem__ = __array_ufunc__ = __array_function__ = view


def test_row_31_what_a_subclass_says_of_itself_is_not_believed(backend, rng):
    q, k, v = make(rng)
    table, mask = rng.standard_normal((9, 3)), rng.random((5, 6)) < 0.8

    def lying(x):
        return np.ndarray.view(x, Liar)

    expected = rp.attention(q, k, v, position=rp.Shaw(value_table=table), mask=mask, backend=backend)
    found = rp.attention(
        lying(q), lying(k), lying(v), position=rp.Shaw(value_table=lying(table)), mask=lying(mask), backend=backend
    )
    np.testing.assert_array_equal(found, expected)


# Row 26 ----------------------------------------------------------------------------------------------


def test_row_26_float16_tables_and_masks(backend, rng):
    q, k, v = make(rng, np.float16)
    table = rng.standard_normal((32, 2)).astype(np.float16)
    mask = rng.standard_normal((5, 6)).astype(np.float16)
    out = rp.attention(q, k, v, position=rp.T5(table), mask=mask, backend=backend)
    wide = rp.attention(
        *(x.astype(np.float32) for x in (q, k, v)),
        position=rp.T5(table.astype(np.float32)),
        mask=mask.astype(np.float32),
        backend=backend,
    )
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, wide.astype(np.float16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_26_half_precision_is_computed_in_float32(dtype, backend, rng):
    """Forward and backward, the result rounded once; the log-sum-exp stays in float32."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = make(rng, dtype)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    out, lse = rp.attention(q, k, v, backend=backend, return_lse=True)
    expected, expected_lse = rp.attention(*wide, backend=backend, return_lse=True)
    assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.float32)
    # Kernels that read half precision as it is stored add in another order.
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)
    eps = 2.0**-8 if out.dtype.name == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=eps, atol=1e-5)
    grad = rng.standard_normal(out.shape).astype(dtype)
    found = rp.attention_vjp(q, k, v, grad_out=grad, backend=backend, precision="highest")
    exact = rp.attention_vjp(*wide, grad_out=grad.astype(np.float32), backend=backend)
    for name in "qkv":
        assert getattr(found, name).dtype == np.dtype(dtype)
        np.testing.assert_array_equal(getattr(found, name), getattr(exact, name).astype(dtype))


# Row 32 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [int, np.uint8, complex, "U1"])
def test_row_32_a_mask_of_other_numbers_is_refused(dtype, backend, rng):
    q, k, v = make(rng)
    for call in (
        lambda mask: rp.attention(q, k, v, mask=mask, backend=backend),
        lambda mask: rp.logits(q, k, mask=mask, backend=backend),
        lambda mask: rp.attention_vjp(q, k, v, grad_out=np.ones((2, 2, 5, 3)), mask=mask, backend=backend),
    ):
        with pytest.raises(rp.RelposTypeError, match=r"^mask: "):
            call(np.ones((5, 6)).astype(dtype))


def test_row_32_a_float_mask_of_ones_and_zeros_is_added(backend, rng):
    q, k, v = make(rng)
    ones = (rng.random((5, 6)) < 0.5).astype(np.float64)
    expected, _ = naive.attention(q, k, v, allowed=naive.allowed(5, 6, mask=ones))
    np.testing.assert_allclose(rp.attention(q, k, v, mask=ones, backend=backend), expected, rtol=0, atol=1e-14)
