"""FIRE, Sandwich and TISA: published numbers, forms by hand, and what is refused."""

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


def test_fire_by_hand(backend):
    """One hidden unit that passes its input on: the bias is the ratio of logarithms."""
    one = np.ones(1)
    scheme = rp.FIRE(one, 0 * one, np.array([[1.0], [-2.0]]), np.array([0.0, 3.0]), 1.0, 3.0)
    q = np.zeros((2, 5, 1))
    found = rp.logits(q, q, position=scheme, backend=backend)
    ratio = [np.log([i + 1 - j for j in range(i + 1)]) / np.log(max(3, i) + 1) for i in range(5)]
    for i in range(5):
        close(found[0, i, : i + 1], ratio[i])
        close(found[1, i, : i + 1], 3 - 2 * ratio[i])
    # The first key is as far away as can be for all queries beyond the threshold.
    close(found[0, 3:, 0], 1)


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


# ---------------------------------------------------------------------------------------------- Sandwich


def test_sandwich_by_hand(backend):
    """Eight heads of the paper's 128 channels: 64 over 1, 2 ... 8 at distance 0, where NeMo has 0."""
    q = np.zeros((8, 3, 1))
    paper = rp.logits(q, q, position=rp.Sandwich(), backend=backend)
    close(paper[:, [0, 1, 2], [0, 1, 2]], np.repeat(64.0 / np.arange(1, 9)[:, None], 3, axis=1), 1e-12)
    waves = 1e4 ** -(np.arange(64) / 64)
    close(paper[0, 2], [np.cos(2 * waves).sum(), np.cos(waves).sum(), 64], 1e-12)
    nemo = rp.logits(q, q, position=rp.Sandwich(variant="nemo"), backend=backend)
    close(nemo[:, 0, 0], np.zeros(8), 1e-12)
    # The fastest wave is lost, and one of 1 / base is gained.
    gained = np.cos(2 * 1e-4) - np.cos(2)
    close(nemo[0, 2, 0], paper[0, 2, 0] - 64 + gained, 1e-12)


def test_sandwich_falls_like_a_logarithm():
    """On the average over distances from n to 2n, a doubled n costs the same: 64 waves over log2(10000) octaves."""
    bias = rp.reference.sandwich_bias(8, 1, 4096)[0, 0]
    means = [bias[2**n : 2 ** (n + 1)].mean() for n in range(2, 12)]
    assert np.abs(np.diff(means) + 64 / np.log2(1e4)).max() < 0.25


# ---------------------------------------------------------------------------------------------- TISA


def curves(rng, heads=4, count=3):
    return (
        rng.standard_normal((count, heads)),
        rng.standard_normal((count, heads)),
        3 * rng.standard_normal((count, heads)),
    )


def test_tisa_by_hand(backend):
    """One narrow curve, two keys after the query; published code looks one to three before it."""
    a, b, c = np.array([[5.0]]), np.array([[-50.0]]), np.array([[2.0]])
    q = np.zeros((1, 6, 1))
    paper = rp.logits(q, q, position=rp.TISA(a, b, c), backend=backend)[0]
    close(paper, 5.0 * np.eye(6, k=2))
    published = rp.logits(q, q, position=rp.TISA(a, b, c, variant="published"), backend=backend)[0]
    close(published, 5.0 * np.eye(6, k=-3))


def test_tisa_as_published_reads_one_too_early(rng):
    """The published steps: curves at -L ... L, read by a Toeplitz matrix that starts at L - 1."""
    length = 6
    a, b, c = curves(rng)
    at = np.arange(-length, length + 1)
    values = (a[..., None] * np.exp(-np.abs(b[..., None]) * (c[..., None] - at) ** 2)).sum(axis=0)
    read = length - 1 + np.arange(length)[:, None] - np.arange(length)
    close(rp.reference.tisa_bias(a, b, c, length, length, variant="published"), values[:, read])
