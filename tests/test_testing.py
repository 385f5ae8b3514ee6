"""Seeded examples, tolerances and the assertion that other packages use."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.testing.arguments import rebuilt

ALL = [(name, variant) for name, info in rp.SCHEMES.items() for variant in info.variants or (None,)]


@pytest.fixture(params=rp.backend.HOST_BACKENDS)
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


def test_an_example_says_what_it_is():
    one = testing.example("t5", dtype="float64", variant="float32")
    assert one.where == "t5 float32, float64, own: L_q=37, L_k=53, H=4, H_kv=2, D=20, D_v=12"
    assert testing.example("plain").where.startswith("plain, float32, own: ")
    assert not one.long


# ---------------------------------------------------------------------------------------------- cases

# What some schemes cannot have, whatever their other arguments: no odd number of channels turns in pairs.
NO_ODD_DIM = {"rotary", "xpos"}
# Nor is a neighbourhood larger than the whole map.
NO_SMALL_MAP = {"neighborhood"}


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_cases_have_the_edges(name, variant):
    found = {one.edge: one for one in testing.cases(name, variant=variant, long=False)}
    assert all(one.name == name for one in found.values())
    assert all(one.variant == variant for one in found.values())
    assert not any(one.long for one in found.values())
    wanted = {"own", "blocks"} | (set() if name in NO_SMALL_MAP else {"length_7"})
    if rp.SCHEMES[name].kind == "attention":
        wanted |= {"bool_mask", "float_mask", "key_lengths", "no_keys", "causal", "window", "nan_excluded"}
        wanted |= {"large_logits"}
        assert min(one.k.shape[1] for one in found.values()) == 1
        assert len({one.q.shape[-2] for one in found.values()}) >= (2 if name in NO_SMALL_MAP else 3)
    if name not in NO_ODD_DIM | {"sinusoidal"}:
        wanted |= {"dim_7"}
    assert wanted <= set(found), wanted - set(found)


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_every_case_is_right_on_terms(name, variant):
    """The float32 sweep of `relpos check`, on the backend that needs no compiler."""
    for one in testing.cases(name, variant=variant, long=False):
        if one.edge == "blocks":
            continue
        assert one.backend_error("numpy" if one.encoding is not None else "terms") <= 1, one.where


def test_what_the_edges_mean():
    found = {one.edge: one for one in testing.cases("plain")}
    shapes = {edge: (one.q.shape[-2], one.k.shape[-2]) for edge, one in found.items()}
    assert shapes["length_1"] == (1, 1)
    assert shapes["length_7"] == (7, 7)
    assert shapes["length_63"] == (63, 65)
    assert shapes["length_65"] == (65, 63)
    assert shapes["length_1023"] == (1023, 1023)
    assert shapes["one_query"] == (1, 53)
    assert shapes["one_key"] == (37, 1)
    assert [edge for edge, one in found.items() if one.long] == ["length_1023"]
    assert found["dim_1"].q.shape[-1] == 1
    assert found["own"].v.shape[-1] != found["own"].q.shape[-1]
    assert found["own"].k.shape[1] < found["own"].q.shape[1]
    assert found["one_key_head"].k.shape[1] == 1
    # A query without keys, in a mask and for a whole batch item.
    for edge in ("bool_mask", "no_keys"):
        empty = found[edge].expected_lse == -np.inf
        assert empty.any()
        assert not empty.all()
        assert (found[edge].expected[empty] == 0).all()
    assert found["float_mask"].kwargs["mask"].dtype == np.float32
    assert (found["float_mask"].kwargs["mask"] == -np.inf).any()
    assert found["causal"].kwargs == {"causal": True}
    assert found["window"].kwargs == {"window": (11, 6)}
    assert found["large_logits"].logit_bound > 89  # beyond it, exp is infinite in float32
    nan = found["nan_excluded"]
    assert np.isnan(nan.k).any()
    assert np.isnan(nan.v).any()
    assert np.isfinite(nan.expected).all()
    assert np.isfinite(nan.tolerated()[0]).all()
    with pytest.raises(rp.RelposValueError, match="variant"):
        list(testing.cases("t5", variant="wrap"))
    with pytest.raises(rp.RelposValueError, match="scheme"):
        list(testing.cases("rope"))


def test_an_edge_leaves_a_scheme_its_scale():
    cases = testing.cases("layout", variant="udop", long=False)
    found = {one.edge: one.kwargs["scale"] for one in cases if one.family is None}
    assert found.pop("large_logits") == 64 * 0.25
    assert found == dict.fromkeys(found, 0.25)
    assert {"own", "causal", "key_lengths", "one_key_head"} <= set(found)


def test_cases_are_seeded():
    for first, same, other in zip(*(testing.cases("alibi", seed=seed, long=False) for seed in (3, 3, 4)), strict=True):
        assert first.where == same.where == other.where
        np.testing.assert_array_equal(first.q, same.q)
        np.testing.assert_array_equal(first.expected, same.expected)
        assert not np.array_equal(first.q, other.q)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cases_of_a_dtype(dtype):
    for one in testing.cases("shaw", dtype=dtype, long=False):
        assert one.q.dtype == one.k.dtype == one.v.dtype == dtype
        assert one.expected.dtype == np.float64


# ---------------------------------------------------------------------------------------------- gradients


def test_expected_gradient_by_differences(rng):
    """Of a scalar of table, q and log-sum-exp, by central differences of the float64 reference."""
    one = testing.example("t5", dtype="float16", size="tiny")
    grad_out = rng.standard_normal(one.expected.shape)
    grad_lse = rng.standard_normal(one.expected_lse.shape)
    found = one.expected_gradient(grad_out, grad_lse)
    assert found.q.dtype == found.position["table"].dtype == np.float64

    def loss(q, table):
        out, lse = rp.attention(
            q,
            one.k.astype(np.float64),
            one.v.astype(np.float64),
            position=rp.T5(table, max_distance=128, rounding=one.variant),
            backend="numpy",
            return_lse=True,
            **one.kwargs,
        )
        return np.sum(out * grad_out) + np.sum(lse * grad_lse)

    q, table = one.q.astype(np.float64), one.position.table.astype(np.float64)
    step = 1e-6
    for at in ((0, 1, 2, 3), (1, 3, 10, 0)):
        move = np.zeros_like(q)
        move[at] = step
        assert (loss(q + move, table) - loss(q - move, table)) / (2 * step) == pytest.approx(found.q[at], abs=1e-8)
    for at in ((0, 0), (9, 2)):
        move = np.zeros_like(table)
        move[at] = step
        slope = (loss(q, table + move) - loss(q, table - move)) / (2 * step)
        assert slope == pytest.approx(found.position["table"][at], abs=1e-8)


def test_gradients_of_every_array():
    one = testing.example("shaw")
    found = one.expected_gradient(np.ones(one.expected.shape))
    assert set(found.position) == {"key_table", "value_table"}
    with pytest.raises(rp.RelposValueError, match="grad_out"):
        one.expected_gradient(np.ones((2, 2)))


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_every_scheme_keeps_its_arguments(name, variant):
    """So that a copy can be made in another precision, and a file can hold it."""
    one = testing.example(name, variant=variant, dtype="float64")
    scheme = one.position if one.encoding is None else one.encoding
    again = type(scheme)(**testing.arguments(scheme))
    if one.encoding is not None:
        np.testing.assert_array_equal(again(one.x), scheme(one.x))
        return
    out = rp.attention(one.q, one.k, one.v, position=again, backend="numpy", **one.kwargs)
    np.testing.assert_array_equal(out, one.run("numpy")[0])


def test_schemes_in_another_precision(rng):
    table = rng.standard_normal((32, 4))
    first, second = rebuilt((rp.T5(table, max_distance=64), rp.Plain()), np.float32)
    assert first.table.dtype == np.float32
    assert first.max_distance == 64
    np.testing.assert_array_equal(first.table, table.astype(np.float32))
    assert type(second) is rp.Plain
    assert rebuilt(None, np.float32) is None


def test_a_scheme_that_forgets_an_argument():
    class Forgetful:
        def __init__(self, table):
            self.rows = table

    with pytest.raises(rp.RelposTypeError, match="Forgetful: the argument table"):
        testing.arguments(Forgetful(np.ones(3)))


# ---------------------------------------------------------------------------------------------- comparing


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


def test_assert_no_worse_than():
    exact = np.linspace(-1, 1, 11)
    other = exact + 1e-3
    testing.assert_no_worse_than((exact - 1.9e-3).astype("float32"), other.astype("float32"), exact)
    with pytest.raises(AssertionError, match=r"the error 0\.0021 is 2\.1 times that of the other"):
        testing.assert_no_worse_than((exact - 2.1e-3).astype("float32"), other.astype("float32"), exact)
    testing.assert_no_worse_than(exact - 2.9e-3, other, exact, factor=3)
    with pytest.raises(AssertionError):
        testing.assert_no_worse_than(exact - 3.1e-3, other, exact, factor=3)


def test_assert_no_worse_than_an_exact_one():
    """The floor: one rounding of the largest number."""
    exact = np.linspace(-4, 4, 9)
    eps = np.finfo(np.float32).eps
    near = exact.astype("float32")
    near[0] = np.float32(-4 + 3.9 * eps)
    testing.assert_no_worse_than(near, exact, exact)
    near[0] = np.float32(-4 + 8 * eps)
    with pytest.raises(AssertionError, match="inf times"):
        testing.assert_no_worse_than(near, exact, exact)
    testing.assert_no_worse_than(near, exact, exact, floor=8 * eps)
    testing.assert_no_worse_than(np.arange(3), np.arange(3), np.arange(3.0), floor=0)
    infinite = np.array([-np.inf, 1.0])
    testing.assert_no_worse_than(infinite, infinite, infinite)


def test_assert_no_worse_than_refuses():
    one = np.ones((2, 3))
    for wrong in (np.ones((1, 3)), np.full((2, 3), np.nan), np.full((2, 3), np.inf)):
        for pair in ((wrong, one), (one, wrong)):
            with pytest.raises(AssertionError):
                testing.assert_no_worse_than(*pair, one)
    with pytest.raises(rp.RelposValueError, match="factor"):
        testing.assert_no_worse_than(one, one, one, factor=0.5)
    with pytest.raises(rp.RelposValueError, match="floor"):
        testing.assert_no_worse_than(one, one, one, floor=-1.0)
    with pytest.raises(rp.RelposTypeError, match="int64"):
        testing.assert_no_worse_than(np.ones(3, int), np.ones(3), np.ones(3))


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


def test_parts_of_scores_are_counted_without_signs_and_with_all_products():
    ones, dim = np.ones((1, 1, 1, 4), np.float32), 4
    opposite = rp.T5(np.full((32, 1), -2.0, np.float32))  # 4 products of 1, times 1/2
    cancelling = testing.Example("t5", None, ones, ones, ones, opposite)
    assert rp.logits(ones, ones, position=opposite).item() == 0.0
    assert cancelling.logit_bound == 4.0
    assert cancelling.products == dim
    masked = testing.Example("t5", None, ones, ones, ones, opposite, {"mask": np.full((1, 1), 0.5, np.float32)})
    assert masked.logit_bound == 4.5
    for name, variant, more in (("plain", None, 0), ("shaw", "clip", 1), ("transformer_xl", "wenet", 1)):
        one = testing.example(name, variant=variant)
        assert one.products == (1 + more) * one.q.shape[-1], name


def test_either_length_makes_an_example_long():
    one = testing.example("plain", dtype="float32")
    far = np.zeros((*one.k.shape[:2], 1000, one.k.shape[-1]), np.float32)
    assert not one.long
    assert replace(one, k=far, v=far).long
    assert replace(one, q=far).long


@pytest.mark.parametrize("dtype", ["float16", pytest.param(ml_dtypes.bfloat16, id="bfloat16")])
def test_log_sum_exps_of_half_precision_are_tolerated_as_float32(dtype):
    one = testing.example("t5", dtype="float64")
    assert one.tolerated(dtype)[1] == one.tolerated("float32")[1] > one.tolerated("float64")[1]
