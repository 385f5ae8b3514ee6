"""Rotary positions: angles far away, rules for frequencies, inputs that are turned, and what is refused."""

import inspect

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.schemes import rotary
from tests import naive
from tests.compare import assert_error_names, close

RULES = (
    "linear_frequencies",
    "ntk_frequencies",
    "ntk_alpha_frequencies",
    "yarn_frequencies",
    "llama3_frequencies",
    "longrope_frequencies",
    "proportional_frequencies",
    "rotary_frequencies",
)


def make(rng, q_len=7, k_len=9, depth=8, kv_heads=1):
    shapes = ((4, q_len, depth), (kv_heads, k_len, depth), (kv_heads, k_len, 5))
    return tuple(rng.standard_normal((2, *shape)) for shape in shapes)


# ---------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_pairs_are_turned_where_they_are(layout, rng):
    """Scores do not show channels that change places in queries and keys alike."""
    x = rng.standard_normal((1, 2, 7, 10))
    matrices = rp.reference.rotary_matrices(np.arange(7), rp.reference.rotary_frequencies(6))
    expected, _ = naive.rotary(x, x, dim=6, layout=layout)
    close(rp.reference.rotate_pairs(x, matrices, layout=layout), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_blocks_of_one_pair_each(blocks, dtype, backend, rng):
    """In every dtype: sines of one pair lie apart, where a function of NumPy 2.4 writes wrong numbers."""
    q, k, v = (rng.standard_normal((2, 1, n, 32)).astype(dtype) for n in (9, 63, 63))
    split = rp.Rotary(2 * blocks, blocks=blocks)
    expected = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), position=split, backend="numpy")
    found = rp.attention(q, k, v, position=split, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=50 * np.finfo(dtype).eps)


def test_channels_may_be_said_with_their_number():
    for scheme in (rp.Rotary(channels=(2, 6)), rp.Rotary(4, channels=[2, 6]), rp.Rotary(channels=np.array([2, 6]))):
        assert (scheme.dim, scheme.channels) == (4, (2, 6))
        assert repr(scheme) == "Rotary(dim=4, channels=(2, 6))"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_angles_are_exact_far_away(dtype, backend, rng):
    """Single precision would be off by 0.01 at position 100000."""
    q, k, _ = (x.astype(dtype) for x in make(rng, 3, 3))
    for scheme in (rp.Rotary(), rp.Rotary(layout="interleaved")):
        s = rp.logits(q, k, position=scheme, offset=100_003, backend=backend)
        wide = rp.logits(q.astype(np.float64), k.astype(np.float64), position=scheme, offset=100_003, backend="numpy")
        assert s.dtype == np.float32
        close(s, wide, 3e-6)


# ---------------------------------------------------------------------------------------------- with others


@pytest.mark.parametrize("second", ["rotary", "transformer_xl"])
def test_two_that_change_the_content_are_refused(second, backend, rng):
    q, k, v = make(rng)
    other = rp.Rotary(4)
    if second == "transformer_xl":
        other = rp.TransformerXL(np.ones((4, 8)), np.ones((4, 8)), np.ones((9, 4, 8)))
    for pair in ((rp.Rotary(), other), (other, rp.Rotary())):
        with pytest.raises(rp.RelposValueError, match="position"):
            rp.attention(q, k, v, position=pair, backend=backend)
        with pytest.raises(rp.RelposValueError, match="position"):
            rp.logits(q, k, position=pair, backend=backend)


# ---------------------------------------------------------------------------------------------- frequencies


def test_linear_is_positions_divided(backend, rng):
    q, k, _ = make(rng, 9)
    q2, k2 = (np.repeat(x, 2, axis=-2) for x in (q, k))
    slow = rp.Rotary(frequencies=rp.reference.linear_frequencies(8, factor=2.0))
    close(
        rp.logits(q2, k2, position=slow, backend=backend)[..., ::2, ::2],
        rp.logits(q, k, position=rp.Rotary(), backend=backend),
    )


def test_ntk_interpolates_the_slowest_pair_by_the_growth():
    """That is what the exponent d / (d - 2) is for; the fastest pair keeps its frequency."""
    plain = rp.reference.rotary_frequencies(16)
    found = rp.reference.ntk_frequencies(16, length=96, trained_length=32, factor=2.0)
    assert found[0] == 1
    np.testing.assert_allclose(found[-1] * (2 * 3 - 1), plain[-1], rtol=1e-14)
    np.testing.assert_array_equal(rp.reference.ntk_frequencies(16, length=5, trained_length=32, factor=2.0), plain)
    fixed = rp.reference.ntk_alpha_frequencies(16, alpha=5.0)
    np.testing.assert_allclose(fixed * 5.0 ** (np.arange(8) / 7), plain, rtol=1e-14)


@pytest.mark.parametrize("rule", ["yarn", "llama3"])
def test_bands(rule):
    """Fast pairs are kept, slow ones divided, those between lie between."""
    plain = rp.reference.rotary_frequencies(64)
    turns = 4096 * plain / (2 * np.pi)
    if rule == "yarn":
        found, magnitude = rp.reference.yarn_frequencies(64, factor=8.0, trained_length=4096)
        assert magnitude == pytest.approx(0.1 * np.log(8) + 1, rel=1e-15)
        fast, slow = 32, 1
    else:
        found = rp.reference.llama3_frequencies(64, factor=8.0, trained_length=4096)
        fast, slow = 4, 1
    # The published YaRN rounds to whole pairs, outwards.
    slack = 10000 ** (2 / 64) if rule == "yarn" else 1
    close(found[turns > fast * slack], plain[turns > fast * slack], 1e-16)
    close(found[turns < slow / slack], plain[turns < slow / slack] / 8, 1e-16)
    between = (turns < fast) & (turns > slow)
    assert between.any()
    assert (found[between] < plain[between]).all()
    assert (found[between] > plain[between] / 8).all()
    assert (np.diff(found) < 0).all()


def test_yarn_without_truncation_has_ends_at_exact_turns():
    plain = rp.reference.rotary_frequencies(64)
    found, _ = rp.reference.yarn_frequencies(64, factor=8.0, trained_length=4096, truncate=False)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_array_equal(found == plain, turns >= 32)
    close(found[turns <= 1], plain[turns <= 1] / 8, 1e-18)


def longrope(**changes):
    options = {"short_factors": np.array([1.0, 1.5, 2.0, 4.0]), "long_factors": np.array([1.0, 2.0, 8.0, 32.0])}
    return rp.reference.longrope_frequencies(
        8, **(options | {"length": 100, "trained_length": 64, "factor": 32.0} | changes)
    )


def test_longrope_divides_each_pair_by_its_own_factor():
    plain = rp.reference.rotary_frequencies(8)
    for length, factors in ((64, [1, 1.5, 2, 4]), (65, [1, 2, 8, 32])):
        found, magnitude = longrope(length=length)
        close(found * factors, plain, 1e-16)
        # ln 32 / ln 64 is 5 / 6, for short texts too.
        assert magnitude == pytest.approx((1 + 5 / 6) ** 0.5, rel=1e-15)
    assert longrope(factor=1.0)[1] == 1
    np.testing.assert_array_equal(longrope(short_factors=[1, 1.5, 2, 4], length=9)[0], longrope(length=9)[0])


@pytest.mark.parametrize(("share", "turning"), [(0.0, 0), (0.25, 1), (0.49, 1), (0.5, 2), (1.0, 4)])
def test_proportional_stops_the_slow_pairs(share, turning):
    plain = rp.reference.rotary_frequencies(8)
    found = rp.reference.proportional_frequencies(8, share=share, factor=3.0)
    np.testing.assert_array_equal(found, np.where(np.arange(4) < turning, plain / 3, 0))


def test_yarn_magnitudes():
    long = {"factor": 8.0, "trained_length": 64}
    assert rp.reference.yarn_frequencies(16, **long, mscale=0.7, mscale_all=0.7)[1] == 1
    found = rp.reference.yarn_frequencies(16, **long, mscale=0.5, mscale_all=2.0)[1]
    assert found == pytest.approx((1 + 0.05 * np.log(8)) / (1 + 0.2 * np.log(8)), rel=1e-15)


# ---------------------------------------------------------------------------------------------- inputs turned


def test_inputs_are_turned_part_by_part(rng):
    x = rng.standard_normal((2, 7, 24))
    close(rp.reference.rotate_inputs(x, 3, base=50.0), naive.rotated_inputs(x, 3, base=50.0))
    halves = rp.reference.rotate_inputs(x.astype(np.float16), 3)
    assert halves.dtype == np.float16
    close(halves, rp.reference.rotate_inputs(x, 3), 1e-2)


# ---------------------------------------------------------------------------------------------- bad input

Q = np.zeros((2, 4, 3, 8))


def call(scheme, depth=8):
    return lambda: rp.logits(Q[..., :depth], Q[..., :depth], position=scheme)


BAD = {
    "dim: large": (call(rp.Rotary(10)), ["dim", "10", "8"]),
    "dim: head_dim odd": (call(rp.Rotary(), 7), ["dim", "7"]),
    "channels: odd": (lambda: rp.Rotary(channels=(2, 5)), ["channels", "(2, 5)"]),
    "channels: order": (lambda: rp.Rotary(channels=(6, 2)), ["channels", "(6, 2)"]),
    "channels: negative": (lambda: rp.Rotary(channels=(-4, 0)), ["channels", "(-4, 0)"]),
    "channels: dim": (lambda: rp.Rotary(6, channels=(2, 6)), ["dim", "4", "(2, 6)", "6"]),
    "channels: frequencies": (lambda: rp.Rotary(channels=(2, 6), frequencies=np.ones(3)), ["frequencies", "4", "3"]),
    "channels: large": (call(rp.Rotary(channels=(6, 10))), ["channels", "(6, 10)", "8"]),
    "blocks: three": (call(rp.Rotary(blocks=3)), ["blocks", "8", "3"]),
    "blocks: odd": (call(rp.Rotary(6, blocks=2)), ["blocks", "6", "2"]),
    "base: and frequencies": (lambda: rp.Rotary(base=5.0, frequencies=np.ones(4)), ["base", "5.0"]),
    "frequencies: heads": (
        call(rp.Rotary(frequencies=np.ones((1, 2, 4)), positions=np.ones((1, 3)))),
        ["frequencies", "(1, 2, 4)", "4 key heads"],
    ),
    "positions: none": (lambda: rp.Rotary(key_positions=np.ones(3)), ["positions", "key_positions"]),
    "positions: missing": (call(rp.Rotary(frequencies=np.ones((2, 4)))), ["positions", "2 axes"]),
    "positions: length": (call(rp.Rotary(positions=np.ones(4))), ["positions", "(4,)", "(..., 3)"]),
    "positions: axes": (
        call(rp.Rotary(frequencies=np.ones((2, 4)), positions=np.ones((3, 3)))),
        ["positions", "(3, 3)", "(..., 2, 3)"],
    ),
    "positions: one axis of several": (
        call(rp.Rotary(frequencies=np.ones((2, 4)), positions=np.ones(3))),
        ["positions", "(3,)", "(..., 2, 3)"],
    ),
    "positions: batch": (call(rp.Rotary(positions=np.ones((5, 3)))), ["positions", "(5, 3)", "(2,)"]),
    "positions: more batch axes": (call(rp.Rotary(positions=np.ones((1, 2, 3)))), ["positions", "(1, 2, 3)", "(2,)"]),
    "positions: fewer keys": (
        lambda: rp.logits(Q, Q[..., :2, :], position=rp.Rotary(positions=np.ones(2))),
        ["positions", "-1 ... 1", "2 keys", "key_positions"],
    ),
    "key_positions: length": (
        call(rp.Rotary(positions=np.ones(3), key_positions=np.ones(2))),
        ["key_positions", "(2,)", "(..., 3)"],
    ),
    "xpos: far": (
        lambda: rp.logits(*[Q.astype(np.float32)] * 2, position=rp.XPos(positions=np.array([0, 1, 50_000]))),
        ["positions", "25000", "float32", "512"],
    ),
    "inputs: heads": (lambda: rp.reference.rotate_inputs(np.ones((2, 12)), 4), ["x", "(2, 12)", "8"]),
    "inputs: rank": (lambda: rp.reference.rotate_inputs(np.ones(12), 2), ["x", "(12,)"]),
    "longrope: pairs": (lambda: longrope(long_factors=np.ones(3)), ["long_factors", "(4,)", "(3,)"]),
    "longrope: sign": (lambda: longrope(short_factors=np.array([1, 1, 1, -1.0])), ["short_factors", "-1.0"]),
    "longrope: length": (lambda: longrope(trained_length=1), ["trained_length", "1"]),
    "longrope: list": (lambda: longrope(long_factors=[1.0, "2", 3.0, 4.0]), ["long_factors", "'2'"]),
    "ntk alpha: dim": (lambda: rp.reference.ntk_alpha_frequencies(2, alpha=2.0), ["dim", "2"]),
    "ntk alpha: alpha": (lambda: rp.reference.ntk_alpha_frequencies(8, alpha=0.0), ["alpha", "0"]),
    "proportional: share": (lambda: rp.reference.proportional_frequencies(8, share=1.5), ["share", "1.5"]),
    "yarn: mscale": (
        lambda: rp.reference.yarn_frequencies(8, factor=2.0, trained_length=9, mscale=-1.0),
        ["mscale", "-1.0"],
    ),
    "axes: shape": (lambda: rp.reference.axis_frequencies(np.ones(4), np.zeros(3, int)), ["axes", "(4,)", "(3,)"]),
    "axes: floats": (lambda: rp.reference.axis_frequencies(np.ones(4), np.zeros(4)), ["axes", "float64"]),
    "axes: range": (lambda: rp.reference.axis_frequencies(np.ones(4), np.arange(4), 3), ["axes", "0 ... 3"]),
    "sections: negative": (lambda: rp.reference.section_axes((2, -1)), ["sections", "-1"]),
    "sections: none": (lambda: rp.reference.section_axes((0, 0)), ["sections", "(0, 0)"]),
    "sections: pairs": (lambda: rp.reference.section_axes((1, 2, 3), pairs=8), ["pairs", "(1, 2, 3)", "6", "8"]),
    "axial: dim": (lambda: rp.reference.axial_frequencies(6), ["dim", "6", "4"]),
    "axial: odd": (lambda: rp.reference.axial_frequencies((4, 3)), ["dim", "(4, 3)"]),
    "axial: none": (lambda: rp.reference.axial_frequencies(()), ["dim", "()"]),
    "axial: axes": (lambda: rp.reference.axial_frequencies((4, 4), 3), ["axes", "2", "3"]),
    "axial: sizes": (
        lambda: rp.reference.axial_frequencies((4, 6), spread="alternate"),
        ["dim", "'alternate'", "[4, 6]"],
    ),
    "sections: time last": (
        lambda: rp.reference.section_axes((1, 2, 3), order="time_last", pairs=8),
        ["pairs", "6", "8"],
    ),
    "randomized: longest": (
        lambda: rp.reference.randomized_positions(5, 4, rng=np.random.default_rng(0)),
        ["longest", "5", "4"],
    ),
    "randomized: rng": (lambda: rp.reference.randomized_positions(5, 9, rng=3), ["rng", "int"]),
    "diagonal: grid": (lambda: rp.reference.diagonal_positions((3, 4)), ["grid", "(3, 4)"]),
    "diagonal: spacing": (lambda: rp.reference.diagonal_positions((3, 4, 2), spacing=np.inf), ["spacing", "inf"]),
    "grid: empty": (lambda: rp.reference.grid_positions(()), ["grid"]),
    "grid: size": (lambda: rp.reference.grid_positions((3, 0)), ["grid", "0"]),
    "grid: reference": (lambda: rp.reference.grid_positions((3, 2), reference=(4,)), ["reference", "2", "1"]),
    "frequencies: none": (lambda: rp.Rotary(frequencies=np.ones(0)), ["frequencies", "(0,)"]),
    "frequencies: inf": (lambda: rp.Rotary(frequencies=np.array([np.inf])), ["frequencies"]),
    "frequencies: dim": (lambda: rp.Rotary(6, frequencies=np.ones(4)), ["frequencies", "6", "4"]),
    "frequencies: too many": (call(rp.Rotary(frequencies=np.ones(5))), ["dim", "10", "8"]),
    "factor": (lambda: rp.reference.linear_frequencies(8, factor=0.5), ["factor", "0.5"]),
    "ntk: dim": (lambda: rp.reference.ntk_frequencies(2, length=3, trained_length=2, factor=2.0), ["dim", "2"]),
    "ntk: length": (lambda: rp.reference.ntk_frequencies(8, length=0, trained_length=2, factor=2.0), ["length", "0"]),
    "yarn: betas": (
        lambda: rp.reference.yarn_frequencies(8, factor=2.0, trained_length=9, beta_fast=0.5),
        ["beta_fast", "0.5"],
    ),
    "yarn: base": (lambda: rp.reference.yarn_frequencies(8, factor=2.0, trained_length=9, base=1.0), ["base", "1.0"]),
    "yarn: truncate": (
        lambda: rp.reference.yarn_frequencies(8, factor=2.0, trained_length=9, truncate=None),
        ["truncate"],
    ),
    "llama3: factors": (
        lambda: rp.reference.llama3_frequencies(8, factor=2.0, trained_length=9, low_factor=4.5),
        ["high_factor", "4.0"],
    ),
    "llama3: length": (lambda: rp.reference.llama3_frequencies(8, factor=2.0, trained_length=0), ["trained_length"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    assert_error_names(*BAD[name])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_checks_dim_and_base(rule):
    needed = {"factor": 2.0, "trained_length": 9, "length": 20, "alpha": 2.0}
    if rule == "longrope_frequencies":
        needed |= {"short_factors": np.ones(4), "long_factors": np.ones(4)}
    function = getattr(rp.reference, rule)
    options = {n: x for n, x in needed.items() if n in inspect.signature(function).parameters}
    for wrong in ({"dim": 5}, {"dim": 8, "base": -1.0}):
        with pytest.raises(rp.RelposValueError, match="dim" if wrong["dim"] == 5 else "base"):
            function(**wrong, **options)


FREQUENCIES = {
    "shared": lambda rng: {"frequencies": rng.standard_normal(8)},
    "by head": lambda rng: {
        "frequencies": rng.standard_normal((2, 2, 8)),
        "positions": rng.standard_normal((3, 2, 1)) * 9,
        "key_positions": rng.standard_normal((3, 2, 600)) * 9,
        "channels": (3, 19),
    },
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", FREQUENCIES)
def test_decoding_turns_the_keys_of_every_block(name, dtype, rng):
    """And of heads that share a key head's frequencies."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v = (rng.standard_normal((3, heads, n, 20)).astype(dtype) for heads, n in ((6, 1), (2, 600), (2, 600)))
    scheme = rp.Rotary(**FREQUENCIES[name](rng))
    found = rp.attention(q, k, v, position=scheme, backend="numba")
    exact = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), position=scheme, backend="numpy")
    # Scores of about 10 with 20 products each; half precision is rounded once more, at the end.
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    within = 100 * eps + (2.0**-8 if dtype.itemsize == 2 else 0.0)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=0, atol=within * np.abs(exact).max())


def test_gradients_of_frequencies_are_those_of_gradients_that_nobody_has_rounded(rng):
    """Of half precision they have the bits of the same numbers in float32."""
    brain = pytest.importorskip("ml_dtypes").bfloat16
    arrays = [rng.standard_normal((2, 2, 40, 16)).astype(brain) for _ in range(4)]
    wide = [x.astype(np.float32) for x in arrays]
    scheme = rp.Rotary(frequencies=rng.standard_normal(6).astype(np.float32))
    found, exact = (
        rp.attention_vjp(*given[:3], grad_out=given[3], position=scheme, backend="numba") for given in (arrays, wide)
    )
    np.testing.assert_array_equal(found.position["frequencies"], exact.position["frequencies"])
    np.testing.assert_array_equal(found.q, exact.q.astype(brain))


def test_gradients_of_frequencies_part_by_part(monkeypatch, rng, backend):
    """However few positions are done at a time."""
    q, k, v, w = (rng.standard_normal((2, 3, 4, 9, 8)) for _ in range(4))
    positions = rng.standard_normal((3, 2, 9)) * 5
    scheme = rp.Rotary(frequencies=rng.standard_normal((2, 4, 3)), positions=positions, key_positions=positions + 1)
    whole = rp.attention_vjp(q, k, v, grad_out=w, position=scheme, backend=backend).position["frequencies"]
    for size in (1, 30, 40, 130):
        monkeypatch.setattr(rotary, "_PART", size)
        found = rp.attention_vjp(q, k, v, grad_out=w, position=scheme, backend=backend).position["frequencies"]
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-13 * np.abs(whole).max())


def test_positions_of_columns_that_lie_side_by_side(rng):
    """Angles of several heads then lie in another order than tables of cosines."""
    q, k, v = rng.standard_normal((3, 2, 30, 16)).astype(np.float32)
    positions, frequencies = rng.integers(0, 50, (2, 30)), rng.random((2, 2, 4))
    found, expected = (
        rp.attention(q, k, v, position=rp.Rotary(frequencies=frequencies, positions=x))
        for x in (np.asfortranarray(positions), positions)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_sums_over_coordinates_in_any_layout(backend, rng):
    """Angles are added up in the order of coordinates, however positions and frequencies lie in memory."""
    for _ in range(500):
        axes, pairs, length = rng.integers(1, [5, 9, 40])
        q, k = rng.standard_normal((2, 1, length, 2 * pairs))
        places, frequencies = 50 * rng.standard_normal((2, axes, length)), rng.standard_normal((axes, pairs))
        found, expected = (
            rp.logits(q, k, position=rp.Rotary(frequencies=w, positions=x, key_positions=y), backend=backend)
            for x, y, w in ((*map(np.asfortranarray, places), np.asfortranarray(frequencies)), (*places, frequencies))
        )
        np.testing.assert_array_equal(found, expected)


def test_tables_of_cosines_in_any_layout(monkeypatch, rng):
    """Kernels read them in C order, whatever a scheme's own order is."""
    q, k, v = rng.standard_normal((3, 2, 30, 16)).astype(np.float32)
    call = {"position": rp.Rotary(frequencies=rng.random((1, 2, 4)), positions=rng.random((1, 30))), "backend": "numba"}
    expected, tables = rp.attention(q, k, v, **call), rp.Rotary._tables
    in_columns = lambda *given: [[np.asfortranarray(x) for x in pair] for pair in tables(*given)]  # noqa: E731
    monkeypatch.setattr(rp.Rotary, "_tables", in_columns)
    np.testing.assert_array_equal(rp.attention(q, k, v, **call), expected)
