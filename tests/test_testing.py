"""Seeded examples, tolerances and the assertion that other packages use."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing

ALL = [(name, variant) for name, info in rp.SCHEMES.items() for variant in info.variants or (None,)]


@pytest.fixture(params=rp.backend.BACKENDS)
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize(("name", "variant"), ALL)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_scheme_has_an_example_that_equals_the_oracle(backend, name, variant, dtype):
    one = testing.example(name, dtype=dtype, variant=variant)
    out, lse = one.run(backend)
    assert out.dtype == dtype
    assert one.error(out, lse) <= 1
    testing.assert_matches(out, one.expected, dtype="float16" if dtype == "float16" else "float32")


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_long_examples(name):
    pytest.importorskip("numba")
    one = testing.example(name, size="blocks")
    assert one.q.shape[-2] > 192
    assert one.error(*one.run("numba")) <= 1


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_examples_are_seeded(name, variant):
    first, same, other = (testing.example(name, variant=variant, seed=seed) for seed in (3, 3, 4))
    assert first.name == name
    assert first.variant == variant
    np.testing.assert_array_equal(first.q, same.q)
    np.testing.assert_array_equal(first.expected, same.expected)
    assert not np.array_equal(first.q, other.q)
    halves = testing.example(name, variant=variant, seed=3, dtype="float16")
    assert halves.q.dtype == np.float16
    np.testing.assert_allclose(halves.q, first.q, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [name for name, info in rp.SCHEMES.items() if info.kind == "absolute"])
def test_absolute_schemes_encode_their_inputs(name):
    one = testing.example(name)
    assert one.position is None
    np.testing.assert_array_equal(one.q[:, 0], one.encoding(one.x))


def test_variants_differ():
    for name, info in rp.SCHEMES.items():
        kept = [testing.example(name, variant=variant).expected for variant in info.variants]
        # T5's roundings agree for 32 buckets and distance 128, as its page says.
        if name != "t5":
            for n, a in enumerate(kept):
                assert all(a.shape != b.shape or not np.allclose(a, b) for b in kept[n + 1 :]), name


@pytest.mark.parametrize(
    "wrong", [{"name": "rope"}, {"name": "shaw", "variant": "wrap"}, {"name": "plain", "variant": "x"}]
)
def test_unknown_examples(wrong):
    with pytest.raises(rp.RelposValueError):
        testing.example(**wrong)
    with pytest.raises(rp.RelposValueError, match="size"):
        testing.example("plain", size="huge")


def test_error_notices_what_is_wrong():
    one = testing.example("shaw")
    out, lse = one.run("numpy")
    assert one.error(out) <= one.error(out, lse) <= 1
    for value in (np.nan, np.inf, out[0, 0, 0, 0] * 1.001):
        wrong = out.copy()
        wrong[0, 0, 0, 0] = value
        assert one.error(wrong) > 1
    assert one.error(out[:, :1]) == np.inf
    assert one.error(out, lse + 1e-3) > 1
    # What is right for float32 is wrong for float64.
    assert one.error(out, dtype="float64") > 1


def test_error_demands_zero_without_keys():
    one = testing.example("plain")
    empty = testing.Example(one.name, None, one.q, one.k, one.v, one.position, {"key_lengths": 0})
    out, lse = empty.run("numpy")
    assert empty.error(out, lse) == 0
    assert empty.error(out + np.float32(1e-30), lse) == np.inf


def test_tolerance():
    eps = np.finfo(np.float32).eps
    assert testing.tolerance("float32", logit_bound=0.0) == 4 * eps
    assert testing.tolerance(np.float32, logit_bound=1.0, magnitude=3.0) == 4 * eps * 2 * 3
    assert testing.tolerance("float64", logit_bound=0, depth=256) == 8 * np.finfo(np.float64).eps
    assert 2.0**-10 < testing.tolerance(np.float16, logit_bound=1.0) < 2.0**-9
    assert testing.tolerance("float32", logit_bound=1, magnitude=np.ones((2, 3))).shape == (2, 3)
    with pytest.raises(rp.RelposTypeError):
        testing.tolerance("int32", logit_bound=1.0)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [("float16", 1e-3, 1e-5), ("float32", 1.3e-6, 1e-5), ("float64", 1e-7, 1e-7)],
)
def test_assert_matches_has_the_tolerances_of_torch(dtype, rtol, atol):
    expected = np.linspace(-3, 3, 50)
    slack = atol + rtol * np.abs(expected)
    testing.assert_matches(expected + 0.99 * slack, expected, dtype=dtype)
    with pytest.raises(AssertionError):
        testing.assert_matches(expected + 1.01 * slack, expected, dtype=dtype)
    testing.assert_matches(expected.astype(dtype), expected)


def test_assert_matches_refuses():
    one = np.ones((2, 3))
    for wrong in (np.ones((1, 3)), np.full((2, 3), np.nan), np.full((2, 3), np.inf)):
        with pytest.raises(AssertionError):
            testing.assert_matches(wrong, one)
        with pytest.raises(AssertionError):
            testing.assert_matches(one, wrong)
    with pytest.raises(AssertionError):
        testing.assert_matches(np.full(3, np.nan), np.full(3, np.nan))
    testing.assert_matches(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0]))
    testing.assert_matches(np.arange(3), np.arange(3))
    with pytest.raises(AssertionError):
        testing.assert_matches(np.arange(3), np.arange(3) + 1)


def test_real_example(backend):
    real = testing.real_example()
    assert {name: (x.shape, str(x.dtype)) for name, x in real.items() if name != "tokens"} == {
        **dict.fromkeys(("q", "k", "v", "expected"), ((2, 4, 69, 64), "float32")),
        "table": ((32, 4), "float32"),
        "mask": ((2, 69), "bool"),
    }
    out = rp.attention(
        real["q"],
        real["k"],
        real["v"],
        position=rp.T5(real["table"]),
        mask=real["mask"][:, None, None, :],
        scale=0.125,
        backend=backend,
    )
    testing.assert_matches(out, real["expected"])
    assert np.abs(out - real["expected"]).max() <= 2e-6
