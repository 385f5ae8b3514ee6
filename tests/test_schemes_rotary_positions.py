"""Rotary positions on several axes, and xPos: bits, numbers by hand, the end of the range, and gradients."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import check
from tests.compare import close


def make(rng, q_len=7, k_len=9, depth=8, heads=4, kv_heads=2, batch=2):
    shapes = ((heads, q_len, depth), (kv_heads, k_len, depth), (kv_heads, k_len, 5))
    return tuple(rng.standard_normal((batch, *shape)) for shape in shapes)


# ---------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_bits_do_not_depend_on_memory_or_neighbours(dtype, layout, rng):
    """The tables are rounded once, and each product and sum is of one element: long or short, strided or not."""
    q = rng.standard_normal((2, 2, 1030, 20)).astype(dtype)  # long enough to be turned head by head
    scheme = rp.Rotary(16, layout=layout)
    problem = check.problem(q, q, None)[0]
    whole = scheme.lower(problem.q, problem.k, problem.site)
    np.testing.assert_array_equal(whole.query, whole.key)
    strided = np.zeros((2, 1030, 2, 41), dtype)[..., 1::2].transpose(0, 2, 1, 3)
    strided[...] = q
    parts = check.problem(strided[:1, 1:, 5:11], q[:1, 1:, :11], None)[0]
    part = scheme.lower(parts.q, parts.k, parts.site)
    np.testing.assert_array_equal(part.query, whole.query[:1, 1:, 5:11])
    np.testing.assert_array_equal(part.key, whole.key[:1, 1:, :11])


# ---------------------------------------------------------------------------------------------- several axes


def test_axis_maps_by_hand():
    sections = rp.reference.section_axes
    assert sections((2, 1, 3)).tolist() == [0, 0, 1, 2, 2, 2]
    assert sections((2, 2, 2), order="cyclic").tolist() == [0, 1, 2, 0, 1, 2]
    assert sections((4, 2, 1), order="cyclic").tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert sections((3, 5, 5), order="cyclic").tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert sections((1, 1, 2), order="cyclic", pairs=9).tolist() == [0, 1, 2, 0, 0, 2, 0, 0, 0]
    assert sections((9, 1, 2), order="cyclic", pairs=5).tolist() == [0, 1, 2, 0, 0]
    assert sections((2, 2, 2), order="time_last").tolist() == [1, 2, 1, 2, 0, 0]
    assert sections((1, 3, 2), order="time_last").tolist() == [1, 2, 1, 2, 1, 0]
    assert sections((3,), order="time_last").tolist() == [0, 0, 0]
    omega = np.array([4.0, 3.0, 2.0])
    np.testing.assert_array_equal(
        rp.reference.axis_frequencies(omega, np.array([1, 0, 1]), 3), [[0, 3, 0], [4, 0, 2], [0, 0, 0]]
    )
    same = rp.reference.axial_frequencies(12, 3, base=16.0)
    np.testing.assert_array_equal(same, np.kron(np.eye(3), [1.0, 0.25]))
    alternate = rp.reference.axial_frequencies(8, base=16.0, spread="alternate")
    np.testing.assert_array_equal(alternate, [[1, 0.25, 0, 0], [0, 0, 0.5, 0.125]])
    shares = rp.reference.axial_frequencies((2, 4), base=16.0)
    np.testing.assert_array_equal(shares, [[1, 0, 0], [0, 1, 0.25]])
    np.testing.assert_array_equal(rp.reference.axial_frequencies(8, 1), [rp.reference.rotary_frequencies(8)])


def test_a_video_lies_on_the_diagonal():
    found = rp.reference.diagonal_positions((2, 3, 2), start=10.0, spacing=2.0)
    assert found.T.tolist() == [
        [10 + 2 * t] + [10 + 2 * t + x for x in (h, w)] for t in (0, 1) for h in (-1, 0, 1) for w in (0, 1)
    ]


def test_randomized_positions_are_sorted_and_distinct():
    draw = rp.reference.randomized_positions
    found = draw(5, 9, rng=np.random.default_rng(1), batch=(2000,))
    assert found.shape == (2000, 5)
    assert found.dtype == np.int64
    assert (np.diff(found) > 0).all()
    assert found.min() == 0
    assert found.max() == 8
    # Each position is among 5 of 9: 1111 +- 5 times 22.
    counts = np.bincount(found.ravel())
    assert np.abs(counts - 10000 / 9).max() < 111
    np.testing.assert_array_equal(draw(4, 4, rng=np.random.default_rng(1)), np.arange(4))
    np.testing.assert_array_equal(draw(5, 9, rng=np.random.default_rng(1)), found[0])


def test_pixel_frequencies_by_hand():
    close(rp.reference.pixel_frequencies(3, resolution=10.0), np.pi * np.array([1, 3, 5]), 1e-14)
    close(rp.reference.pixel_frequencies(3, resolution=32.0, spacing="log"), np.pi * np.array([1, 4, 16]), 1e-13)
    close(rp.reference.pixel_frequencies(1), [np.pi], 0)


def test_grids_by_hand():
    grid = rp.reference.grid_positions
    np.testing.assert_array_equal(grid((2, 3)), [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    np.testing.assert_array_equal(grid((2, 1, 2)), [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])
    np.testing.assert_array_equal(grid((2, 4), coordinates="centered")[:, :4], [[-0.5] * 4, [-0.75, -0.25, 0.25, 0.75]])
    np.testing.assert_array_equal(grid((1, 3), coordinates="ends"), [[-1, -1, -1], [-1, 0, 1]])
    np.testing.assert_array_equal(grid((4,), reference=(2,)), [[0, 0.5, 1, 1.5]])


# ---------------------------------------------------------------------------------------------- xPos


def test_xpos_sees_distances_alone(backend, rng):
    """Moving all positions changes nothing, far beyond where factors around 0 would overflow."""
    q, k, v = (x.astype(np.float32) for x in make(rng, 9, 9))
    out = rp.attention(q, k, v, position=rp.XPos(), causal=True, backend=backend)
    for start in (-3, 40_000, 10_000_000):
        scheme = rp.XPos(positions=np.arange(9) + start)
        moved = rp.attention(q, k, v, position=scheme, causal=True, backend=backend)
        # Angles of positions t are exact to 1e-16 t.
        np.testing.assert_allclose(moved, out, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_xpos_at_the_end_of_its_range(dtype, backend, rng):
    """Far keys have weight 0, and nothing overflows where a causal mask is on."""
    q, k, v = (x.astype(dtype) for x in make(rng, 2, 2))
    reach = 48_000 if dtype == np.float32 else 480_000
    scheme = rp.XPos(positions=np.array([0, reach]))
    with np.errstate(all="raise", under="ignore"):
        out, lse = rp.attention(q, k, v, position=scheme, causal=True, backend=backend, return_lse=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    one = rp.attention(q[..., :1, :], k[..., :1, :], v[..., :1, :], backend=backend)
    np.testing.assert_allclose(out[..., :1, :], one, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- gradients


def test_gradients_of_frequencies_in_float32(rng):
    q, k, v = make(rng)
    omega = rng.standard_normal(4)
    w = rng.standard_normal((2, 4, 7, 5))
    wide = rp.attention_vjp(q, k, v, position=rp.Rotary(frequencies=omega), grad_out=w)
    small = [x.astype(np.float32) for x in (q, k, v, w)]
    found = rp.attention_vjp(
        *small[:3], position=rp.Rotary(frequencies=omega.astype(np.float32)), grad_out=small[3]
    ).position["frequencies"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wide.position["frequencies"], rtol=0, atol=1e-4)
