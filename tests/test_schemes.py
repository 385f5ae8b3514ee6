"""Schemes in general, Shaw, T5, windows and absolute encodings: what generated calls do not reach."""

import inspect
import sys

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.compare import close

LAYOUTS = ("interleaved", "concatenated", "tensor2tensor", "dimension_index")


def make(rng, q_len=9, k_len=9, heads=2, depth=6, v_dim=5):
    return tuple(rng.standard_normal((2, heads, *s)) for s in ((q_len, depth), (k_len, depth), (k_len, v_dim)))


# ---------------------------------------------------------------------------------------------- Shaw


def test_shaw_rows_belong_to_keys_less_queries(backend):
    """Row k-1 is the previous key, row k+1 the next: the sign j - i."""
    q, k, v = np.zeros((1, 4, 1)), np.zeros((1, 4, 1)), np.zeros((1, 4, 3))
    table = np.eye(3)  # previous and before, same, next and later
    out = rp.attention(q, k, v, position=rp.Shaw(value_table=table), backend=backend)[0]
    close(out, np.array([[0, 1, 3], [1, 1, 2], [2, 1, 1], [3, 1, 0]]) / 4)


# ---------------------------------------------------------------------------------------------- T5


@pytest.mark.parametrize(("rounding", "bucket"), [("exact", 30), ("float32", 31)])
def test_t5_rounding_reaches_the_scores(rounding, bucket, backend):
    scheme = rp.T5(np.arange(64.0)[:, None], max_distance=939, rounding=rounding)
    q, k = np.zeros((1, 2, 1)), np.zeros((1, 730, 1))
    assert rp.logits(q, k, position=scheme, backend=backend)[0, 0, 0] == bucket
    assert rp.logits(q, k, position=scheme, offset=0, backend=backend)[0, 0, 728] == 32 + bucket


@pytest.mark.parametrize("backend", ["terms", "numba"])
def test_t5_gradient_reaches_every_one_of_many_buckets(backend):
    """Scores are linear in the table: along each of its rows, a difference of logits times their gradient."""
    rng = np.random.default_rng(5)
    table, length = rng.standard_normal((64, 2)), 200
    q, k, v, grad_out = (rng.standard_normal((2, length, 4)) for _ in range(4))
    found = rp.attention_vjp(q, k, v, position=rp.T5(table), grad_out=grad_out, backend=backend).position["table"]
    for row in (0, 1, 31, 32, 33, 63):
        step = np.zeros_like(table)
        step[row] = 1e-6
        there, back = (rp.attention(q, k, v, position=rp.T5(table + x), backend="numpy") for x in (step, -step))
        np.testing.assert_allclose(found[row].sum(), ((there - back) * grad_out).sum() / 2e-6, rtol=1e-5, atol=1e-6)
    assert np.abs(found[[31, 63]]).min() > 1e-3, "no pair is so far apart"


# ---------------------------------------------------------------------------------------------- absolute


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 2, 5, 6, 64])
def test_sinusoidal_against_loops(layout, dim):
    scheme = rp.Sinusoidal(dim, layout=layout, base=500.0)
    close(scheme.encode(50), naive.sinusoidal(50, dim, base=500.0, layout=layout), 1e-12)
    positions = np.array([-3, 7, 7, 1000])
    close(scheme.encode(positions), naive.sinusoidal(positions, dim, base=500.0, layout=layout), 1e-11)


def test_sinusoidal_far_away_is_exact_in_float64():
    """Angles are taken in float64 even for float32 results."""
    far = np.array([10**7 + 1])
    close(rp.Sinusoidal(4).encode(far, np.float32), naive.sinusoidal(far, 4), 1e-7)


def test_learned_rows(rng):
    table = rng.standard_normal((6, 4))
    scheme = rp.LearnedAbsolute(table)
    np.testing.assert_array_equal(scheme.encode(6), naive.learned(table, 6))
    np.testing.assert_array_equal(scheme.encode(np.array([5, 0, 5])), table[[5, 0, 5]])
    x = rng.standard_normal((2, 3, 4))
    np.testing.assert_array_equal(scheme(x, start=3), x + table[3:6])
    assert scheme(x.astype(np.float32)).dtype == np.float32
    assert scheme.encode(0).shape == (0, 4)


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_formulas_and_classes_have_the_same_defaults(name):
    """None of a class stands for what its variant says."""
    cls = rp.SCHEMES[name].cls
    module = sys.modules[cls.__module__]
    own = {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.default is not p.empty}
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == module.__name__ and function.__name__[0] != "_":
            for one in inspect.signature(function).parameters.values():
                if one.default is not one.empty and own.get(one.name) is not None:
                    assert one.default == own[one.name], f"{function.__name__}: {one.name}"
