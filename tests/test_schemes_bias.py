"""ALiBi and KERPLE: published slopes, memory, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.compare import assert_refused, close


def scores(scheme, q_len, k_len, heads, backend, **options):
    """What the scheme adds, of one batch item: (H, L_q, L_k)."""
    q, k = np.zeros((heads, q_len, 3)), np.zeros((heads, k_len, 3))
    return rp.logits(q, k, position=scheme, backend=backend, **options)


# ---------------------------------------------------------------------------------------------- ALiBi


def test_slopes_of_the_paper():
    """1/2, 1/4 ... 1/256 for 8 heads, and 16 heads start with 1 over the root of 2; exact powers."""
    np.testing.assert_array_equal(rp.reference.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    sixteen = rp.reference.alibi_slopes(16)
    close(sixteen[0], np.sqrt(0.5), 1e-15)
    np.testing.assert_array_equal(sixteen[1::2], rp.reference.alibi_slopes(8))
    np.testing.assert_array_equal(rp.reference.alibi_slopes(1), [2.0**-8])


def test_slopes_against_loops():
    for heads in range(1, 140):
        slopes = rp.reference.alibi_slopes(heads)
        np.testing.assert_allclose(slopes, [naive.alibi_slope(h, heads) for h in range(heads)], rtol=1e-15)
        assert len(np.unique(slopes)) == heads
        assert 2.0**-8 == slopes.min() <= slopes.max() < 1


@pytest.mark.parametrize("form", ["symmetric", "causal", "key"])
def test_alibi_needs_no_square_of_memory(form):
    """Terms of long calls hold a row per position, not one per pair."""
    site = rp.api.check.problem(np.zeros((2, 3000, 1)), np.zeros((2, 5000, 1)), None)[0].site
    terms = rp.ALiBi(form=form).lower(np.zeros((2, 3000, 1)), np.zeros((2, 5000, 1)), site)
    largest = max([t.table.size for t in terms.tables] + [t.key.size for t in terms.keys])
    assert largest <= 2 * 8000


@pytest.mark.parametrize("form", ["symmetric", "causal", "key"])
def test_slopes_of_items(form):
    """Each item has the output and the gradients of a call of its own, also in several tiles."""
    rng = np.random.default_rng(5)
    q, grad_out = rng.standard_normal((2, 2, 3, 4, 150, 16))
    k, v = rng.standard_normal((2, 2, 3, 2, 170, 16))
    slopes = rng.standard_normal((3, 4))
    options = {"causal": True, "softcap": 20.0}
    position = rp.ALiBi(slopes, form=form)
    found = rp.attention_vjp(q, k, v, position=position, grad_out=grad_out, **options)
    out = rp.attention(q, k, v, position=position, **options)
    total = np.zeros((3, 4))
    for item in np.ndindex(2, 3):
        own = rp.ALiBi(slopes[item[1]], form=form)
        alone = q[item], k[item], v[item]
        close(out[item], rp.attention(*alone, position=own, **options), 1e-13)
        expected = rp.attention_vjp(*alone, position=own, grad_out=grad_out[item], **options)
        close(found.q[item], expected.q, 1e-12)
        close(found.k[item], expected.k, 1e-12)
        total[item[1]] += expected.position["slopes"]
    close(found.position["slopes"], total, 1e-10)


def test_alibi_refuses():
    q = np.zeros((2, 4, 5, 8))
    own = rp.ALiBi(np.ones((2, 4)))
    assert_refused(
        (lambda: rp.ALiBi(np.ones((2, 0))), r"slopes: .*\(2, 0\)"),
        (lambda: rp.ALiBi(np.array(1.0)), r"slopes: .*\(\)"),
        (lambda: rp.attention(q[:1], q[:1], q[:1], position=own), "slopes: batch axes"),
        (lambda: rp.attention(q[:, :3], q[:, :3], q[:, :3], position=own), "slopes: .* heads, the call has 3"),
        (lambda: rp.attention(q, q, q, position=own, offset=[0, 1]), "position: .* belongs to the tokens"),
        (lambda: rp.AtPositions(own, np.arange(5)), "scheme: expected one that goes by distances alone"),
        (lambda: rp.ALiBi(np.ones(2), heads=2), "heads: found 2 besides slopes"),
        (lambda: rp.ALiBi(np.ones(2), bias_max=4), "bias_max: found 4 besides slopes"),
        (lambda: rp.reference.alibi_slopes(2, bias_max="8"), "bias_max: .*'8'"),
        (lambda: rp.ALiBi(np.array([1.0, np.nan])), "slopes: .*nan"),
        (lambda: rp.ALiBi(np.array([1.0, np.inf])), "slopes: .*inf"),
        (lambda: rp.reference.alibi_slopes(0), "heads: .*0"),
    )


# ---------------------------------------------------------------------------------------------- KERPLE


def test_kerple_refuses():
    one = np.ones(2)
    assert_refused(
        (lambda: rp.KERPLE(0 * one, one), "a: expected positive numbers, found 0"),
        (lambda: rp.KERPLE(one, -one), "b: expected positive numbers, found -1"),
        (lambda: rp.KERPLE(one * np.nan, one), "a: .*nan"),
        (lambda: rp.KERPLE(one * np.inf, one), "a: .*inf"),
        (lambda: rp.KERPLE(one, 2.5 * one, form="power"), "b: expected positive numbers up to 2, found 2.5"),
        kind=rp.RelposValueError,
    )
    rp.KERPLE(one, 2.5 * one)


def test_slopes_of_many_heads_are_the_same_in_terms():
    """More than 96, where the last slopes are those of twice as many heads."""
    expected = scores(rp.ALiBi(), 5, 5, 112, "numpy")
    np.testing.assert_allclose(scores(rp.ALiBi(), 5, 5, 112, "terms"), expected, rtol=1e-12, atol=0)
