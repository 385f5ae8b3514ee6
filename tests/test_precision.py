"""Which precision a call gets: the first that was chosen, wherever and whenever the call is made."""

import contextvars
from functools import partial
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np._contract import check
from relpos_np._contract.terms import Terms
from relpos_np._runtime import precision
from relpos_np._runtime.precision import PRECISIONS
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.simd import target


@pytest.fixture
def found(monkeypatch):
    """What calls have found, in their order."""
    seen = []
    chosen = precision.chosen

    def record(*arguments):
        seen.append(chosen(*arguments))
        return seen[-1]

    monkeypatch.delenv("RELPOS_PRECISION", raising=False)
    monkeypatch.setattr(precision, "chosen", record)
    return seen


def test_the_first_that_says_something_counts(monkeypatch):
    """The call, the block, the process, the environment, the other package; last of all nobody."""
    monkeypatch.delenv("RELPOS_PRECISION", raising=False)
    assert precision.chosen() is None
    assert precision.chosen(None, "high") == "high"
    monkeypatch.setenv("RELPOS_PRECISION", "medium")
    assert precision.chosen(None, "high") == "medium"
    try:
        rp.set_precision("highest")
        assert precision.chosen(None, "high") == "highest"
        with rp.use_precision("medium"):
            assert precision.chosen(None, "high") == "medium"
            assert precision.chosen("high", "highest") == "high"
        rp.set_precision(None)
        assert precision.chosen(None, "high") == "medium"
    finally:
        rp.set_precision(None)


def test_an_error_ends_a_block(monkeypatch):
    monkeypatch.delenv("RELPOS_PRECISION", raising=False)
    with pytest.raises(ZeroDivisionError), rp.use_precision("medium"):
        _ = 1 / 0
    assert precision.chosen() is None


@pytest.mark.parametrize("before", ["high", None])
def test_what_was_found_is_held_elsewhere(monkeypatch, before):
    """Also that nobody had chosen: only the call's own word and a block further in count more."""
    monkeypatch.setenv("RELPOS_PRECISION", "medium")

    def run():
        found = [precision.chosen()]
        with precision.held(before):
            found += [precision.chosen(), precision.chosen(None, "highest"), precision.chosen("highest")]
            with rp.use_precision("medium"):
                found.append(precision.chosen())
            found.append(precision.chosen())
        return [*found, precision.chosen()]

    inside = [before, before, "highest", "medium", before]
    with rp.use_precision("highest"):
        assert run() == ["highest", *inside, "highest"]
        assert contextvars.Context().run(run) == ["medium", *inside, "medium"]


@pytest.mark.parametrize("asked", [False, True], ids=["", "asked"])
@pytest.mark.parametrize("unit", target.UNITS)
def test_what_each_unit_multiplies(monkeypatch, unit, asked):
    """Pairs of bfloat16, planes of float32, or float32 itself: as the table of precisions and that of units say."""
    monkeypatch.delenv("RELPOS_PRECISION", raising=False)
    monkeypatch.setattr(job, "UNIT", unit)
    monkeypatch.setattr(job, "ASKED", asked)
    scheme = rp.Rotary(8)
    for dtype, chosen in product((np.float64, np.float32, np.float16, ml_dtypes.bfloat16), (None, *PRECISIONS)):
        problem, _, _ = check.problem(*np.ones((3, 2, 4, 8), dtype), precision=chosen)
        narrow = dtype is not np.float64 and unit != "none"
        for terms in (Terms(), scheme.lower(problem.q, problem.k, problem.site)):
            rounded = chosen == "medium" or (chosen is None and dtype is ml_dtypes.bfloat16 and terms.query is None)
            pairs = narrow and rounded
            planes = 0
            if narrow and not pairs and unit in target.TILES:
                exact = 3 if asked or unit == "emulated tiles" else 0
                planes = 2 if chosen == "high" else exact
            found = job.in_pairs(problem, terms), job.planes_of(problem, terms)
            assert found == (pairs, planes), (dtype, chosen, terms.query is None)


def multihead(draw):
    return layers.MultiHeadAttention(*draw(4, 16, 16), heads=2), draw(2, 40, 16)


def relative(draw):
    biases = {"content_bias": draw(2, 8), "position_bias": draw(2, 8)}
    weights = draw(5, 16, 16)
    module = layers.RelativeMultiHeadAttention(*weights[:4], pos=weights[4], **biases, variant="conformer")
    return module, draw(2, 40, 16)


def window(draw):
    module = layers.WindowAttention(16, 2, 2, (4, 4), 2, rng=np.random.default_rng(0))
    return partial(module, return_attention=False), draw(3, 32, 16)


def swin(draw):
    return layers.SwinAttention(16, (8, 8), 2, shift_size=(2, 2), rng=np.random.default_rng(0)), draw(1, 14, 15, 16)


def video_swin(draw):
    return layers.VideoSwinAttention(16, (2, 4, 4), 2, rng=np.random.default_rng(0)), draw(1, 2, 8, 8, 16)


@pytest.mark.parametrize("make", [multihead, relative, window, swin, video_swin])
def test_modules_follow_what_was_chosen(found, rng, make):
    """As an argument and in a block, to the same bits."""
    module, *inputs = make(lambda *shape: rng.standard_normal(shape).astype(np.float32))
    results = {}
    for one in ("medium", "highest"):
        results[one] = module(*inputs, precision=one)
        with rp.use_precision("high"):
            np.testing.assert_array_equal(module(*inputs, precision=one), results[one])
        with rp.use_precision(one):
            np.testing.assert_array_equal(module(*inputs), results[one])
        assert set(found) == {one}
        found.clear()
    rounded, exact = results["medium"], results["highest"]
    np.testing.assert_allclose(rounded, exact, rtol=0, atol=0.05 * np.abs(exact).max())
    assert target.UNIT != "none" or np.array_equal(rounded, exact)
    with pytest.raises(rp.RelposValueError, match="precision: expected one of"):
        module(*inputs, precision="low")
