"""How arrays lie in memory changes no bit of a result, and no input is written to."""

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np.testing.arguments import arguments
from tests.faults.calls import (
    FEW_SCHEMES,
    both,
    dtypes,
    gradients,
    make,
    operands,
    same,
    scheme,
    shapes,
    simulate_only,
    small,
)
from tests.layouts import LAYOUTS as ALL_LAYOUTS
from tests.strategies import cases

BYTES = "misaligned", "big-endian"
# Strides, and bytes: buffers that begin beside a multiple of their elements' size, and those of the other byte order.
LAYOUTS = {name: ALL_LAYOUTS[name] for name in ALL_LAYOUTS if name != "contiguous"}


def all_laid_out(x, view):
    """Whatever holds arrays, with each of them in another layout."""
    if isinstance(x, np.ndarray):
        return view(x) if x.ndim else x
    if isinstance(x, tuple):
        return tuple(all_laid_out(one, view) for one in x)
    if isinstance(x, rp.Scheme):
        return type(x)(**{name: all_laid_out(one, view) for name, one in arguments(x).items()})
    return x


@pytest.mark.parametrize(
    ("name", "layout"),
    # All operands and tables are copied before they are computed with where bytes lie otherwise.
    [(n, layout) for n in (*FEW_SCHEMES, "grid", "rotary") for layout in LAYOUTS if layout not in BYTES or n == "shaw"],
)
@simulate_only(name=["none", "shaw"], layout=["transposed", "misaligned", "big-endian"])
def test_row_21_layouts_of_operands_and_tables_change_no_bits(name, layout, backend, rng):
    """Output, log-sum-exp, logits and gradients, with every array in another layout than that of its copy."""
    view = LAYOUTS[layout]
    for dtype in [np.float32] if small(backend) else [np.float16, np.float32, np.float64]:
        for q_len, k_len in shapes(backend)[-1:] if small(backend) else shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            plain = scheme(name, rng, q, k, v)
            grad_out = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(dtype)
            mask = np.where(rng.random((q_len, k_len)) < 0.8, dtype(0.5), dtype(-np.inf))
            for given in (mask,) if dtype == np.float32 else (mask > 0,) if dtype == np.float64 else (None,):
                viewed = [view(x) for x in (q, k, v, grad_out)]
                if given is not None:
                    # Bytes between those of a bool mask cannot be NaN.
                    thin = given.dtype == bool and layout == "every other"
                    viewed.append(np.repeat(given, 2, axis=-1)[:, ::2] if thin else view(given))
                before = [x.tobytes() for x in viewed]
                options = {"backend": backend, "mask": None if given is None else viewed[4]}
                position = all_laid_out(plain, view)
                kept = (
                    {n: x.tobytes() for n, x in vars(position).items() if isinstance(x, np.ndarray)} if position else {}
                )
                expected = {"position": plain, "backend": backend, "mask": given}
                same(both(*viewed[:3], position=position, **options), both(q, k, v, **expected), layout)
                same(
                    gradients(*viewed[:3], grad_out=viewed[3], position=position, **options),
                    gradients(q, k, v, grad_out=grad_out, **expected),
                    layout,
                )
                same([rp.logits(*viewed[:2], position=position, **options)], [rp.logits(q, k, **expected)], layout)
                assert [x.tobytes() for x in viewed] == before
                assert {n: getattr(position, n).tobytes() for n in kept} == kept


@pytest.mark.parametrize("name", [name for name, info in rp.SCHEMES.items() if info.kind == "attention"])
def test_row_21_layouts_of_all_that_a_call_is_given_change_no_bits(name):
    """Whatever arrays a scheme of any form has, positions and labels too, and those of all options."""

    @hypothesis.given(
        cases(small=True, name=name), st.sampled_from(sorted(LAYOUTS)), st.sampled_from([np.float32, np.float64])
    )
    def run(case, layout, dtype):
        hypothesis.assume(case.legal(dtype))
        view, operands, options = LAYOUTS[layout], case.operands(dtype), case.options(dtype)
        viewed = {name: all_laid_out(x, view) for name, x in options.items()}
        rng = np.random.default_rng(case.seed)
        grad_out = rng.standard_normal((*case.batch, case.heads, case.q_len, case.v_dim)).astype(dtype)
        other, grad_other = [view(x) for x in operands], view(grad_out)
        for backend in rp.backend.HOST_BACKENDS:
            same(both(*other, **viewed, backend=backend), both(*operands, **options, backend=backend), layout)
            same(
                gradients(*other, grad_out=grad_other, **viewed, backend=backend),
                gradients(*operands, grad_out=grad_out, **options, backend=backend),
                layout,
            )

    run()


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_row_21_stride_0_changes_no_bits(axis, backend, rng):
    """Views that repeat one batch item, head, row or column."""
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend)[-1:] if small(backend) else shapes(backend):
            arrays = operands(rng, backend, dtype, q_len, k_len)
            viewed = [np.broadcast_to(np.take(x, [0], axis=axis), x.shape) for x in arrays]
            assert any(x.strides[axis] == 0 for x in viewed)
            copies = [x.copy() for x in viewed]
            same(both(*viewed, backend=backend), both(*copies, backend=backend))
            same(gradients(*viewed, backend=backend), gradients(*copies, backend=backend))
            for x, y in zip(viewed, copies, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_row_21_stride_0_of_a_float_mask_changes_no_bits(axis, rng):
    for dtype in dtypes("numba"):
        for q_len, k_len in shapes("numba"):
            q, k, v = operands(rng, "numba", dtype, q_len, k_len)
            shape = [2, q.shape[1], q_len, k_len]
            numbers = rng.standard_normal([1 if n == axis else m for n, m in enumerate(shape)]).astype(dtype)
            view = np.broadcast_to(numbers, shape)
            for run in (both, gradients):
                found, expected = (run(q, k, v, mask=x, backend="numba") for x in (view, view.copy()))
                same(found, expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_row_24_misaligned_operands_of_bfloat16(name, backend, rng):
    """More queries than decoding takes: with units for bfloat16, products are made of it wherever an operand lies."""
    operands = make(rng, ml_dtypes.bfloat16, q_len=60, k_len=60, depth=16)
    given = dict(zip("qkv", operands, strict=True), grad_out=operands[2])

    def run(q, k, v, grad_out):
        return {
            **gradients(q, k, v, grad_out=grad_out, backend=backend),
            "out": rp.attention(q, k, v, backend=backend),
        }

    same(run(**given | {name: LAYOUTS["misaligned"](given[name])}), run(**given))


def test_row_25_operands_of_both_byte_orders_at_once(backend, rng):
    q, k, v = make(rng)
    mixed = rp.attention(q.astype(">f8"), k, v, mask=np.zeros((5, 6), ">f4"), backend=backend)
    np.testing.assert_allclose(mixed, rp.attention(q, k, v, backend=backend), rtol=0, atol=1e-15)


def read_only(x):
    """The array itself, which nobody may write to any more."""
    x.flags.writeable = False
    return x


def test_row_22_inputs_need_not_be_writeable(backend, rng):
    """Everything read-only: operands, masks, lengths, tables and the gradient; results are the caller's own."""
    for q_len, k_len in shapes(backend)[-1:] if small(backend) else shapes(backend):
        q, k, v = operands(rng, backend, np.float32, q_len, k_len)
        arrays = [
            *(q, k, v),
            rng.standard_normal((32, 2)).astype(np.float32),
            rng.random((q_len, k_len)) < 0.8,
            np.array([k_len, k_len - 1]),
            rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(np.float32),
        ]

        def run(q, k, v, table, mask, lengths, grad_out):
            options = {"position": rp.T5(table), "mask": mask, "key_lengths": lengths, "offset": 0, "backend": backend}
            found = {"out": rp.attention(q, k, v, **options)}
            return found | gradients(q, k, v, grad_out=grad_out, **options)

        expected = run(*(x.copy() for x in arrays))
        found = run(*map(read_only, arrays))
        same(found, expected)
        assert all(x.flags.writeable for x in found.values())
        if small(backend):
            continue
        # A view that its owner may write to is no reason to write to it.
        views = [x.copy().view() for x in arrays]
        same(run(*map(read_only, views)), expected)


@pytest.mark.parametrize("options", [{}, {"segments": np.array([0, 2, 5])}])
@pytest.mark.parametrize("position", [None, rp.XPos(4)])
def test_gradients_have_the_byte_order_of_their_operands(options, position, rng):
    """In one call, in one launch for all sequences, and in a call for each."""
    q = rng.standard_normal((2, 5, 4)).astype(">f4")
    grads = rp.attention_vjp(q, q, q, grad_out=q, position=position, **options)
    assert {x.dtype for x in (grads.q, grads.k, grads.v)} == {q.dtype}
