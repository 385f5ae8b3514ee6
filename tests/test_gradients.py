"""Gradients == central differences of the formulas, for operands and for every trained array of every scheme."""

from operator import attrgetter

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract.terms import Terms
from relpos_np.kernels._numba.plan import gradients
from relpos_np.schemes.base import SchemeGradient
from tests.compare import assert_is_slope
from tests.every import remade

BACKENDS = ("numpy", "terms", "numba")


def check_gradient(q, k, v, position, kwargs, backend, seed=0):
    """Compare attention_vjp with differences in each operand and each array of the scheme or schemes."""
    rng = np.random.default_rng(seed)
    state = kwargs.pop("state", None)

    def call(function, *operands, **more):
        source = {} if state is None else {"rng": np.random.default_rng(state)}
        return function(*operands, **kwargs, **source, **more)

    out, lse = call(rp.attention, q, k, v, position=position, backend="numpy", return_lse=True)
    to_out = rng.standard_normal(out.shape)
    to_lse = np.where(np.isneginf(lse), 0.0, rng.standard_normal(lse.shape))

    def loss(q, k, v, position):
        out, lse = call(rp.attention, q, k, v, position=position, backend="numpy", return_lse=True)
        return float((out * to_out).sum() + (np.where(np.isneginf(lse), 0.0, lse) * to_lse).sum())

    grads = call(rp.attention_vjp, q, k, v, position=position, grad_out=to_out, grad_lse=to_lse, backend=backend)
    operands = {"q": q, "k": k, "v": v}
    for name, x in operands.items():
        grad = getattr(grads, name)
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype
        direction = rng.standard_normal(x.shape)
        assert_is_slope(
            grad,
            direction,
            lambda t, n=name, d=direction: loss(**{**operands, n: operands[n] + t * d}, position=position),
        )
    schemes = position if isinstance(position, tuple) else (position,)
    arrays = grads.position if isinstance(position, tuple) else (grads.position,)
    assert len(arrays) == len([s for s in schemes if s is not None]) or position is None
    for at, (scheme, found) in enumerate(zip(schemes, arrays, strict=True)):
        for name, grad in found.items():
            x = attrgetter(name)(scheme)
            assert grad.shape == x.shape, name
            assert grad.dtype == x.dtype
            direction = rng.standard_normal(x.shape)

            def moved(t, at=at, name=name, direction=direction):
                other = remade(schemes[at], lambda n, array: array + t * direction if n == name else array)
                return loss(**operands, position=(*schemes[:at], other, *schemes[at + 1 :]))

            assert_is_slope(grad, direction, moved)
    return grads


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scheme_that_passes_no_gradient_on(backend, rng):
    """Of content without a slope the operands' gradients are 0, and the values' are not."""

    class Constant(rp.Plain):
        def transform(self, q, k, site):
            return np.ones_like(q), np.ones_like(k)

        def lower(self, q, k, site):
            return Terms(np.ones_like(q), np.ones_like(k))

        def lift(self, q, k, site, grad):
            return SchemeGradient()

    q, k, v = rng.standard_normal((3, 2, 2, 6, 4))
    grads = check_gradient(q, k, v, Constant(), {}, backend)
    assert not grads.q.any()
    assert not grads.k.any()
    assert grads.v.any()


# ---------------------------------------------------------------------------------------------- what a call may contain


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def shaw(rng, dim, v_dim):
    return rp.Shaw(rng.standard_normal((7, dim)), rng.standard_normal((5, v_dim)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["added", "turned"])
def test_gradients_of_what_dropout_leaves(name, backend, rng):
    """Grouped heads, batch axes that broadcast, D_v other than D, and several schemes, or values that turn."""
    q = rng.standard_normal((3, 1, 4, 6, 5))
    k, v = rng.standard_normal((2, 2, 9, 5)), rng.standard_normal((3, 2, 2, 9, 3))
    position = {
        "added": (shaw(rng, 5, 3), rp.T5(rng.standard_normal((8, 4)), max_distance=16), rp.Rotary(4)),
        "turned": rp.Rotary(frequencies=rng.standard_normal(1), values=True, magnitude=1.25),
    }[name]
    check_gradient(q, k, v, position, {"dropout": 0.3, "state": 11}, backend)


# Forms that no example's choices lead to, of 2 items, 4 heads, 2 key heads, 6 channels and 5 of values.
FORMS = {
    "wavlm, one gate for all items": lambda x: (rp.WavLM(x(16, 4), x(4, 9), max_distance=11), (9, 13), {}),
    "fire, weights as a matrix": lambda x: (
        rp.FIRE(2 * x(8, 1), np.abs(x(8)), x(4, 8), x(4), np.array(0.25), np.array(8.5), eps=0.1),
        (9, 13),
        {"causal": True},
    ),
    "swin_v2, scales as published": lambda x: (rp.SwinV2(x(7, 2), x(7), x(4, 7), x(4, 1, 1), (2, 3)), (6, 6), {}),
    "neighborhood on a line": lambda x: (rp.NeighborhoodBias(x(4, 5), (11,), 3, 3), (11, 11), {}),
    "neighborhood in space": lambda x: (
        rp.NeighborhoodBias(x(4, 1, 5, 5), (2, 3, 6), (1, 3, 3), (2, 1, 2)),
        (36, 36),
        {},
    ),
    "cope, keys and counts for all items": lambda x: (
        rp.CoPE(x(9, 6) / 4, gate_key=x(2, 13, 6), counted=x(2, 1, 1, 13) < 0.5, variant="ram"),
        (9, 13),
        {"causal": True, "mask": x(2, 1, 1, 13) < 0.5},
    ),
    "decomposed, other grids of keys": lambda x: (rp.DecomposedBias(x(7, 6), x(9, 6), (2, 3), (4, 5)), (6, 20), {}),
    "shaw, keys before alone": lambda x: (rp.Shaw(x(13, 6), left=12, outside="zero"), (9, 13), {"causal": True}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_forms_beside_the_examples(form, backend, rng):
    position, (q_len, k_len), kwargs = FORMS[form](lambda *shape: rng.standard_normal(shape))
    q, k, v = (rng.standard_normal((2, *shape)) for shape in ((4, q_len, 6), (2, k_len, 6), (2, k_len, 5)))
    check_gradient(q, k, v, position, kwargs, backend)


def test_two_dimensional_operands_are_one_head(rng):
    q, k, v = rng.standard_normal((3, 6, 4))
    grads = check_gradient(q, k, v, rp.T5(rng.standard_normal((8, 1)), max_distance=9), {}, "numpy")
    assert grads.q.shape == (6, 4)
    assert check_gradient(q, k, v, None, {}, "numpy").position == {}
    assert check_gradient(q, k, v, (), {}, "numpy").position == ()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [1, 6])
def test_rows_that_are_not_numbers_leave_excluded_keys_alone(backend, q_len, rng):
    """A query's NaN reaches the gradients of the keys that it attends, and of no other."""
    q, (k, v) = rng.standard_normal((2, q_len, 4)), rng.standard_normal((2, 2, 9, 4))
    q[0, q_len // 2, 1] = np.nan
    grads = rp.attention_vjp(q, k, v, window=(2, 1), offset=2, grad_out=np.ones_like(q), backend=backend)
    seen = np.zeros((2, 9), bool)
    seen[0, q_len // 2 : q_len // 2 + 4] = True
    for grad in (grads.k, grads.v):
        np.testing.assert_array_equal(np.isnan(grad).any(axis=-1), seen)
    np.testing.assert_array_equal(np.isnan(grads.q).any(axis=-1), np.isnan(q).any(axis=-1))


def test_float32_and_half_are_close_to_float64(rng):
    q, k, v = rng.standard_normal((3, 2, 3, 40, 8))
    table = rng.standard_normal((32, 3))
    truth = rp.attention_vjp(q, k, v, position=rp.T5(table), grad_out=v)
    for dtype, unit in (("float32", 2.0**-23), ("float16", 2.0**-10)):
        x = [a.astype(dtype) for a in (q, k, v)]
        found = rp.attention_vjp(*x, position=rp.T5(table.astype(dtype)), grad_out=x[2])
        for name in "qkv":
            grad = getattr(found, name)
            assert grad.dtype == dtype
            # Inputs are rounded, and each gradient is a sum of 40 products of rounded numbers.
            assert np.abs(grad - getattr(truth, name)).max() <= 40 * unit * np.abs(getattr(truth, name)).max()


KINDS_OF_SUMS = {
    "distances": lambda draw: rp.T5(draw(4, 2), max_distance=4),
    "pairs": lambda draw: rp.WindowBias(draw(9, 2), (2, 2)),
    "rows of distances": lambda draw: rp.TransformerXL(draw(2, 5), draw(2, 5), draw(7, 2, 5), variant="conformer"),
    "gathered rows": lambda draw: rp.Shaw(draw(3, 5), draw(3, 4)),
}


@pytest.mark.parametrize("name", [*KINDS_OF_SUMS, "q", "k", "v"])
def test_sums_over_a_batch_have_the_error_of_one_rounding(name, rng):
    """In float32 the sum over n times the same item would be wrong in its last bits, the more the larger n is."""

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    n, position = 3001, KINDS_OF_SUMS[name](draw) if name in KINDS_OF_SUMS else None
    item = {"q": draw(1, 2, 4, 5), "k": draw(1, 2, 4, 5), "v": draw(1, 2, 4, 4), "grad_out": draw(1, 2, 4, 4)}

    def found(count):
        """Gradients of what all items share: arrays of a scheme, or an operand."""
        call = {key: x if key == name else np.repeat(x, count, axis=0) for key, x in item.items()}
        grads = rp.attention_vjp(**call, position=position, backend="numba")
        return {name: getattr(grads, name)} if position is None else grads.position

    one, all_ = found(1), found(n)
    for key, x in one.items():
        expected = n * x.astype(np.float64)
        # An item's own sum is rounded once where it is alone, and the total once more.
        bound = np.finfo(np.float32).eps * np.abs(expected).max()
        assert np.abs(all_[key] - expected).max() <= bound, key


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grad_out": np.ones((3, 6, 4))}, rp.RelposValueError, "grad_out: expected shape"),
        ({"grad_out": [1.0]}, rp.RelposTypeError, "grad_out"),
        ({"grad_lse": np.ones((2, 6, 1))}, rp.RelposValueError, "grad_lse: expected shape"),
        ({"backend": "torch"}, rp.RelposValueError, "backend"),
        ({"position": 3}, rp.RelposTypeError, "position"),
        ({"dropout": 0.5}, rp.RelposTypeError, "rng"),
    ],
)
def test_bad_input(change, error, words):
    q = np.ones((2, 6, 4))
    with pytest.raises(error, match=words):
        rp.attention_vjp(q, q, q, **{"grad_out": q, **change})


# ---------------------------------------------------------------------------------------------- absolute encodings


def test_learned_rows_collect_their_positions(rng):
    table, grad = rng.standard_normal((6, 3)), rng.standard_normal((2, 4, 3))
    positions = np.array([0, 5, 5, 2])
    found = rp.LearnedAbsolute(table).gradient(positions, grad)["table"]
    expected = np.zeros((6, 3))
    for item in grad:
        for t, row in zip(positions, item, strict=True):
            expected[t] += row
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert rp.Sinusoidal(4).gradient(positions, grad) == {}


def test_tables_whose_products_are_made_in_parts(monkeypatch, rng):
    """Every vector has its share, the last of a part and the first of the next included."""
    q, k, v, g = rng.standard_normal((4, 2, 130, 5))
    scheme = rp.Shaw(*rng.standard_normal((2, 9, 5)))
    monkeypatch.setattr(gradients, "BLAS_ALONE", 1)  # parts of 64
    found, expected = (
        rp.attention_vjp(q, k, v, grad_out=g, position=scheme, backend=backend).position
        for backend in ("numba", "numpy")
    )
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12)


def test_gradients_of_sums_alone(backend, rng):
    """Values have no channels, and scores of any size have a log-sum-exp."""
    q, k = 8 * rng.standard_normal((2, 2, 3, 40, 16))
    v, grad_lse = np.zeros((2, 3, 40, 0)), rng.standard_normal((2, 3, 40))
    found = rp.attention_vjp(q, k, v, grad_out=v, grad_lse=grad_lse, backend=backend)
    scores = q @ k.swapaxes(-1, -2) / 4
    slopes = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)) * grad_lse[..., None] / 4
    np.testing.assert_allclose(found.q, slopes @ k, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.k, slopes.swapaxes(-1, -2) @ q, rtol=0, atol=1e-12)
