"""Layout bias and WavLM's gated bias: distances by hand, the gate against loops, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import index_maps
from tests import naive
from tests.compare import close


def operands(rng, q_len, k_len, heads=4, kv_heads=2, batch=2):
    return (
        rng.standard_normal((batch, heads, q_len, 6)),
        rng.standard_normal((batch, kv_heads, k_len, 6)),
        rng.standard_normal((batch, kv_heads, k_len, 5)),
    )


# ---------------------------------------------------------------------------------------------- layout


def page(rng, length, batch=(2,)):
    """Boxes of words on a page of 1000 units."""
    corner = rng.integers(0, 900, (*batch, length, 2))
    return np.concatenate([corner, corner + rng.integers(0, 101, (*batch, length, 2))], axis=-1)


def layout(rng, length, variant, heads=4, batch=(2,), **options):
    tables = rng.standard_normal((3, 32, heads))
    boxes = page(rng, length, batch)
    if variant == "udop":
        boxes = boxes / 1000
    return rp.LayoutBias(*tables, boxes, variant=variant, **options)


def test_layout_truncates_towards_zero(backend):
    """UDOP: less than a hundredth to either side is no distance; the middle of a box counts."""
    boxes = np.array([[0.5, 0.5, 0.5, 0.5], [0.5, 0.2, 0.518, 0.2], [0.484, 0.8, 0.5, 0.8], [0.5, 0.0, 0.53, 0.0]])
    x_table = np.arange(8.0)[:, None]
    zero = np.zeros((8, 1))
    scheme = rp.LayoutBias(None, x_table, zero, boxes, variant="udop")
    q = np.zeros((1, 4, 2))
    found = rp.logits(q, q, position=scheme, backend=backend)[0, 0]
    np.testing.assert_array_equal(found, [0, 0, 0, 5])
    # Half of it: 1.5 hundredths are less than one of 2 hundredths.
    half = rp.LayoutBias(None, x_table, zero, boxes, variant="udop", factor=50)
    np.testing.assert_array_equal(rp.logits(q, q, position=half, backend=backend)[0, 0], 0)


def test_layout_maps_follow_the_call(rng):
    """One scheme, calls of different queries: the map that is kept is not taken for another."""
    q, k, _ = operands(rng, 6, 9)
    scheme = layout(rng, 9, "layoutlmv2")
    for part, offset in ((slice(0, 6), 3), (slice(0, 2), 3), (slice(0, 6), 0), (slice(0, 6), 3)):
        found = rp.logits(q[:, :, part], k, position=scheme, backend="terms", offset=offset)
        close(found, rp.logits(q[:, :, part], k, position=scheme, backend="numpy", offset=offset))


@pytest.mark.parametrize("rounding", ["exact", "float32"])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (64, 256), (320, 800), (4, 2), (28, 882), (40, 10**9)])
def test_buckets_given_pair_by_pair(buckets, furthest, rounding):
    """The map for distances in any order is that of the formula."""
    d = np.concatenate([np.arange(-1000, 1001), 10 ** np.arange(4, 13), -(10 ** np.arange(4, 13))]).reshape(1, -1)
    found = index_maps.bucket_rows(d, buckets, furthest, rounding)
    expected = rp.reference.t5_bucket(d, num_buckets=buckets, max_distance=furthest, rounding=rounding)
    np.testing.assert_array_equal(found.index, expected)
    assert found.rows == buckets
    # With few pairs each is decided on its own, with many by a table of all distances.
    few = index_maps.bucket_rows(d[:, 990:1010], buckets, furthest, rounding)
    np.testing.assert_array_equal(few.index, expected[:, 990:1010])


# ---------------------------------------------------------------------------------------------- WavLM


@pytest.mark.parametrize("length", [1, 7, 63])
def test_wavlm_gate_against_loops(length, rng):
    hidden, weight, bias = rng.standard_normal((2, length, 12)), rng.standard_normal((8, 4)), rng.standard_normal(8)
    const = rng.standard_normal(3)
    expected = naive.wavlm_gate(hidden, weight, bias, const)
    close(rp.reference.wavlm_gate(hidden, weight, bias, const), expected)
    close(rp.reference.wavlm_gate(hidden[0], weight, bias, const.reshape(1, 3, 1, 1)), expected[0])


def test_wavlm_gate_in_half_and_single_precision(rng):
    """Sums too large for an exponential close or open a gate, and gradients have the dtype of what they belong to."""
    hidden, weight = rng.standard_normal((5, 6)).astype(np.float16), (90 * np.ones((8, 3))).astype(np.float32)
    parts = hidden, weight, np.zeros(8), np.array([2.0, 1.0], np.float32)
    gate = rp.reference.wavlm_gate(*parts)
    close(gate, rp.reference.wavlm_gate(*(x.astype(np.float64) for x in parts)), 1e-6)
    assert gate.min() < 2 < gate.max()
    found = rp.reference.wavlm_gate_vjp(*parts, gate)
    assert [found[name].dtype for name in ("hidden", "weight", "bias", "const")] == [x.dtype for x in parts]


def test_wavlm_gate_gradient(rng):
    """Against central differences, for each argument."""
    x = {
        "hidden": rng.standard_normal((2, 5, 12)),
        "weight": rng.standard_normal((8, 4)),
        "bias": rng.standard_normal(8),
        "const": rng.standard_normal((1, 3, 1, 1)),
    }
    grad = rng.standard_normal((2, 3, 5))
    found = rp.reference.wavlm_gate_vjp(**x, grad=grad)
    assert set(found) == set(x)
    for name, array in x.items():
        assert found[name].shape == array.shape
        direction = rng.standard_normal(array.shape)
        there, back = (rp.reference.wavlm_gate(**{**x, name: array + t * direction}) for t in (1e-5, -1e-5))
        slope = ((there - back) * grad).sum() / 2e-5
        assert abs((found[name] * direction).sum() - slope) < 1e-8 * (1 + abs(slope))


def test_the_largest_distance_on_the_page_is_the_variants_own():
    """The function has the defaults of the class: 100 for "udop", 256 for the others."""
    rng = np.random.default_rng(4)
    table, x_table, y_table = rng.standard_normal((3, 32, 2))
    q = np.zeros((2, 6, 4))
    for variant, furthest in (("udop", 100), ("layoutlmv2", 256), ("layoutlmv3", 256)):
        boxes = rng.random((6, 4)) * 4 if variant == "udop" else rng.integers(0, 1000, (6, 4))
        bias = rp.reference.layout_bias(table, x_table, y_table, boxes, variant=variant)
        given = rp.reference.layout_bias(table, x_table, y_table, boxes, variant=variant, max_box_distance=furthest)
        np.testing.assert_array_equal(bias, given)
        scheme = rp.LayoutBias(table, x_table, y_table, boxes, variant=variant)
        np.testing.assert_allclose(rp.logits(q, q, position=scheme, scale=1.0, backend="terms"), bias, rtol=1e-13)
