"""Loops from the papers == the formulas == terms evaluated densely == kernels, over everything a call may contain."""

import numpy as np
import pytest
from hypothesis import given, settings

import relpos_np as rp
from tests.compare import assert_backends, assert_close, assert_float32_promise
from tests.layouts import LAYOUTS
from tests.strategies import cases, float64_tolerance


@given(cases(small=True))
@settings(max_examples=2 * settings().max_examples)
def test_loops_agree_with_every_backend(case):
    expected = case.naive()
    assert_backends(case, expected, rp.backend.HOST_BACKENDS)


@given(cases(small=True))
def test_loops_agree_with_logits(case):
    expected = case.naive_logits()
    q, k, _ = case.operands(np.float64)
    batch = np.broadcast_shapes(*case.leads[:2])
    if batch != case.batch:
        return
    for backend in rp.backend.HOST_BACKENDS:
        s = rp.logits(q, k, **case.score_options(np.float64), backend=backend)
        _, tolerance = float64_tolerance(case)
        assert_close(s, expected, tolerance[..., None], f"logits of {backend} for {case}: ")


@given(cases(small=False))
def test_backends_agree_on_awkward_lengths(case):
    expected = case.attention(np.float64, "numpy")
    assert_backends(case, expected, ("terms", "numba"))


@given(cases(small=False))
@settings(max_examples=2 * settings().max_examples)
def test_float32_kernel_keeps_its_promise(case):
    assert_float32_promise(case)


@given(cases(small=True))
def test_float32_kernel_keeps_its_promise_on_small_shapes(case):
    assert_float32_promise(case)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 3, 65, 70), (1, 3, 65, 70), (65, 70), (2, 1, 1, 70), (3, 65, 1)])
def test_memory_layout_of_masks(shape, kind, rng):
    """Masks of any layout, also against the oracle, with keys and queries that nothing is left of."""
    q, k, v = (rng.standard_normal((2, 3, n, 16)) for n in (65, 70, 70))
    there = rng.random(shape) < 0.6
    there[..., :3] &= shape[-1] == 1
    mask = there if kind == "bool" else np.where(there, rng.standard_normal(shape), -np.inf)
    expected = rp.attention(q, k, v, mask=mask, backend="numpy", return_lse=True)
    contiguous = rp.attention(q, k, v, mask=mask, backend="numba", return_lse=True)
    for b, c in zip(contiguous, expected, strict=True):
        np.testing.assert_allclose(b, c, rtol=0, atol=1e-13)
    for layout in LAYOUTS:
        bits = kind == "bool" and layout == "every other"
        viewed = np.repeat(mask, 2, -1)[..., ::2] if bits else LAYOUTS[layout](mask)
        found = rp.attention(q, k, v, mask=viewed, backend="numba", return_lse=True)
        for a, b in zip(found, contiguous, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=layout)


def test_broadcast_operands_are_read_in_place(rng):
    """Faults row 36: keys and values of 3 GiB that own two rows, with offsets beyond 2^31."""
    k, v = rng.standard_normal((2, 1, 1, 64)).astype(np.float32)
    v = np.sign(v)  # its float32 sums are exact below 2^24
    q = np.zeros((1, 1, 64), np.float32)
    length = 12 << 20
    wide = [np.broadcast_to(x, (1, length, 64)) for x in (k, v)]
    out, lse = rp.attention(q, *wide, causal=True, key_lengths=length - 1, offset="end", return_lse=True)
    np.testing.assert_allclose(out, v, rtol=1e-6, atol=0)
    np.testing.assert_allclose(lse, np.log(length - 1), rtol=1e-6)


@pytest.mark.parametrize("lengths", [[[1], [5]], [[2, 0, 6]], [[1, 2, 3], [4, 5, 6]], [6, 0, 2], 4])
def test_key_lengths_broadcast_to_the_batch_axes(lengths, backend, rng):
    q, k, v = rng.standard_normal((3, 2, 3, 2, 6, 4))
    out = rp.attention(q, k, v, key_lengths=lengths, backend=backend)
    full = np.broadcast_to(lengths, (2, 3))
    for b in np.ndindex(2, 3):
        expected = rp.attention(q[b], k[b][:, : full[b]], v[b][:, : full[b]], backend="terms", offset=0)
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout_is_the_same_everywhere(dtype, rate, rng):
    q, k, v = rng.standard_normal((3, 2, 3, 70, 16)).astype(dtype)
    position = rp.Shaw(*rng.standard_normal((2, 9, 16)).astype(dtype))
    outs = []
    for backend in rp.backend.HOST_BACKENDS:
        out, lse = rp.attention(
            q, k, v, position=position, dropout=rate, rng=np.random.default_rng(5), backend=backend, return_lse=True
        )
        outs.append(out)
        _, whole = rp.attention(q, k, v, position=position, backend=backend, return_lse=True)
        np.testing.assert_array_equal(lse, whole)  # dropping comes after the softmax
    tolerance = 200 * np.finfo(dtype).eps / (1 - rate)
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("how", ["argument", "block", "process", "environment"])
def test_backends_can_be_chosen_in_four_ways(how, monkeypatch, rng):
    q, k, v = rng.standard_normal((3, 1, 40, 8)).astype(np.float32)
    expected = {name: rp.attention(q, k, v, backend=name) for name in ("numpy", "numba")}
    assert not np.array_equal(expected["numpy"], expected["numba"])  # else this test could not tell
    np.testing.assert_array_equal(rp.attention(q, k, v), expected["numba"])
    monkeypatch.setenv("RELPOS_BACKEND", "numpy" if how == "environment" else "nonsense")
    if how == "argument":
        actual = rp.attention(q, k, v, backend="numpy")
    elif how == "block":
        with rp.use_backend("numba"), rp.use_backend("numpy"):
            actual = rp.attention(q, k, v)
    elif how == "process":
        rp.set_backend("numpy")
        actual = rp.attention(q, k, v)
    else:
        actual = rp.attention(q, k, v)
    np.testing.assert_array_equal(actual, expected["numpy"])
