"""Rotations by exponentials: special cases that are known, relative positions, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import assert_error_names, close

Q = np.zeros((2, 4, 3, 8))
F = rp.reference


def test_planes_of_grape():
    """e^(tL) turns by t in the plane, and leaves what is across it."""
    a, b = np.eye(5)[[1, 3]]
    rotation = F.exponential_rotations(np.array([0.7]), F.plane_generators(a, b)[None])[0, 0]
    expected = np.eye(5)
    expected[1, 1] = expected[3, 3] = np.cos(0.7)
    expected[1, 3], expected[3, 1] = np.sin(0.7), -np.sin(0.7)
    close(rotation, expected, 1e-15)


def test_equal_and_zero_eigenvalues_have_gradients(backend, rng):
    """Divided differences where there is nothing to divide by: all generators 0, and two planes of one frequency."""
    q, k, v, w = rng.standard_normal((4, 1, 2, 4, 4))
    for upper in (np.zeros((1, 4, 4)), np.kron(np.eye(2), [[0, 1.0], [0, 0]])[None]):
        grad = rp.attention_vjp(q, k, v, position=rp.LieRE(upper), grad_out=w, backend=backend).position["generators"]
        for s, t in ((0, 1), (0, 2), (1, 3)):
            moved = []
            for step in (1e-5, -1e-5):
                near = upper.copy()
                near[0, s, t] += step
                moved.append((w * rp.attention(q, k, v, position=rp.LieRE(near), backend="numpy")).sum())
            assert abs((moved[0] - moved[1]) / 2e-5 - grad[0, s, t]) < 1e-8
        assert not np.tril(grad[0]).any()


BAD = {
    "channels": (lambda: rp.logits(Q, Q, position=rp.LieRE(np.ones((3, 3, 3)))), ["generators", "9", "8"]),
    "heads": (
        lambda: rp.logits(Q, Q, position=rp.LieRE(np.ones((1, 3, 1, 2, 2)), positions=np.ones((1, 3)))),
        ["generators", "4 key heads", "(1, 3, 1, 2, 2)"],
    ),
    "positions: far": (
        lambda: rp.logits(Q, Q, position=rp.LieRE(np.ones((1, 2, 2)), positions=np.array([0, 1, 1e300]))),
        ["positions", "1e+300", "generators"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    assert_error_names(*BAD[name])
