"""FIRE: in blocks, without a square of memory, and gradients of the shapes it was given."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import close
from tests.test_schemes_tables import operands

# ---------------------------------------------------------------------------------------------- FIRE


def network(rng, heads=4, hidden=6):
    """Hidden units that are active at distance 0, of which some are switched off farther away."""
    return (
        2 * rng.standard_normal(hidden),
        np.abs(rng.standard_normal(hidden)),
        rng.standard_normal((heads, hidden)),
        rng.standard_normal(heads),
    )


def test_fire_in_blocks(monkeypatch, rng):
    """Few rows at a time give what all at once give, gradients too."""
    q, k, v = operands(rng, 7, 9)
    scheme = rp.FIRE(*network(rng), 0.1, 4.0)

    def both():
        return (
            rp.logits(q, k, position=scheme, backend="terms"),
            rp.attention_vjp(q, k, v, position=scheme, grad_out=np.ones((2, 4, 7, 5)) * v[:, :1, :7]).position,
        )

    scores, grads = both()
    monkeypatch.setattr("relpos_np.schemes.fire._BLOCK", 120)
    few, few_grads = both()
    np.testing.assert_array_equal(few, scores)
    for name, grad in grads.items():
        close(few_grads[name], grad)


def test_fire_needs_no_square_of_memory_before_the_threshold(rng):
    site = rp.api.check.problem(np.zeros((4, 3000, 1)), np.zeros((4, 5000, 1)), None)[0].site
    scheme = rp.FIRE(*network(rng), 0.1, 6000.0)
    terms = scheme.lower(np.zeros((4, 3000, 1)), np.zeros((4, 5000, 1)), site)
    assert not terms.biases
    assert terms.tables[0].table.size <= 4 * 8000


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fire_gives_gradients_of_the_shapes_it_was_given(rng, shape):
    q, k, v = operands(rng, 7, 9)
    scheme = rp.FIRE(*network(rng), np.full(shape, 0.1), np.full(shape, 4.0))
    found = rp.attention_vjp(q, k, v, position=scheme, grad_out=np.ones((2, 4, 7, 5))).position
    assert found["c"].shape == found["threshold"].shape == shape
