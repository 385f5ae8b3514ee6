"""Calls of interpreted kernels, compared with the formulas, and what is excluded from them."""

import numpy as np

import relpos_np as rp
from tests.compare import assert_close, assert_float32_promise
from tests.interpreted.machine import interpreted
from tests.strategies import float64_tolerance


def shut_keys(case):
    """Keys that no query of a batch item may attend, because of the lengths or the band: (items, L_k)."""
    options = case.options(np.float64)
    offset = case.k_len - case.q_len if case.offset is None else case.offset
    window = options["window"]
    left, right = window if isinstance(window, tuple) else (window, window)
    d = np.arange(case.k_len) - (np.arange(case.q_len)[:, None] + offset)
    open_ = np.ones(d.shape, bool)
    if left is not None:
        open_ &= d >= -left
    if right is not None:
        open_ &= d <= right
    if case.causal:
        open_ &= d <= 0
    shut = np.broadcast_to(~open_.any(axis=0), (*case.batch, case.k_len)).copy()
    if options["key_lengths"] is not None:
        lengths = np.broadcast_to(options["key_lengths"], case.batch)
        shut |= np.arange(case.k_len) >= lengths[..., None]
    return shut.reshape(-1, case.k_len)


def assert_agrees(case, dtype, **options):
    """An interpreted call gives the formula's result within the bounds of compiled ones; returns the machine."""
    with interpreted(excluded=shut_keys(case), **options) as machine:
        if dtype == np.float32:
            assert_float32_promise(case)
        else:
            out, lse = case.attention(np.float64, "numba")
    if dtype == np.float64:
        tolerances = float64_tolerance(case)
        expected = case.attention(np.float64, "numpy")
        for found, wanted, tolerance in zip((out, lse), expected, tolerances, strict=True):
            assert_close(found, wanted, tolerance)
    assert machine.launches
    return machine


def gradients(grads):
    """All gradients of a call by name."""
    schemes = grads.position if isinstance(grads.position, tuple) else (grads.position,)
    found = {"q": grads.q, "k": grads.k, "v": grads.v}
    for at, arrays in enumerate(schemes):
        found |= {f"{name} {at}": x for name, x in (arrays or {}).items()}
    return found


def assert_gradients_agree(q, k, v, kwargs, *, dtype=np.float64, **options):
    """Interpreted gradients are those of the formulas."""
    rng = np.random.default_rng(3)
    shape = (*np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]), *q.shape[-3:-1])
    given = {"grad_out": rng.standard_normal((*shape, v.shape[-1])), "grad_lse": rng.standard_normal(shape)}
    given = {name: x.astype(dtype) for name, x in given.items()}
    state = kwargs.pop("state", None)

    def call(backend):
        source = {} if state is None else {"rng": np.random.default_rng(state)}
        return gradients(rp.attention_vjp(q, k, v, **given, **kwargs, **source, backend=backend))

    with interpreted(**options) as machine:
        found = call("numba")
    assert_same_arrays(found, call("numpy"), dtype)
    return machine, found


def assert_same_arrays(found, expected, dtype):
    """Equal but for rounding, relative to each array's largest element."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape
        assert not np.isnan(found[name]).any(), name
        bound = (5e-5 if dtype == np.float32 else 1e-12) * max(np.abs(x).max(initial=0.0), 1.0)
        assert np.abs(found[name] - x).max(initial=0.0) <= bound, name
