"""Vectors per relative position or label: published procedures and numbers, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.compare import assert_refused, close
from tests.test_schemes import make

# ---------------------------------------------------------------------------------------------- Transformer-XL options


def test_clamped_distances():
    rows = rp.reference.row_distances
    assert rows(3, 5, "xlnet", clamp=2).tolist() == [2, 2, 2, 2, 1, 0, -1, -2]
    assert rows(4, 5, "conformer", clamp=2).tolist() == [2, 2, 2, 1, 0, -1, -2, -2]
    assert rows(2, 4, clamp=1).tolist() == [1, 1, 1, 0]
    assert rows(2, 4, "wenet", clamp=2).tolist() == [0, 1, 2, 2]
    assert rows(2, 4, clamp=0).tolist() == [0] * 4
    assert rows(4, 9, "xlnet_uni").tolist() == list(range(9, -1, -1))
    np.testing.assert_array_equal(rows(3, 5, clamp=100), rows(3, 5))
    with pytest.raises(rp.RelposValueError, match="clamp: expected at least 0, found -1"):
        rows(3, 5, clamp=-1)


def test_transformer_xl_options_refuse():
    one = np.ones((2, 3))
    assert_refused(
        (lambda: rp.TransformerXL(one, one, np.ones((4, 2, 3)), variant="wenet", zero_triu=True), "zero_triu: .*wenet"),
        (lambda: rp.rel_shift(one[:, :2], variant="xlnet_uni"), "x: variant 'xlnet_uni' needs more columns"),
        (
            lambda: rp.attention(
                *np.ones((3, 2, 4, 3)), position=rp.TransformerXL(one, one, np.ones((4, 2, 3)), variant="xlnet_uni")
            ),
            "rows: variant 'xlnet_uni' needs 5 rows",
        ),
        (
            lambda: rp.attention(
                np.ones((2, 4, 3)),
                *np.ones((2, 2, 3, 3)),
                position=rp.TransformerXL(one, one, np.ones((4, 2, 3)), variant="xlnet_uni"),
            ),
            "k: variant 'xlnet_uni' needs L_k >= L_q",
        ),
    )
    assert repr(rp.TransformerXL(one, one, np.ones((4, 2, 3)), zero_triu=True)).endswith(", zero_triu=True)")


# ---------------------------------------------------------------------------------------------- DeBERTa


@pytest.mark.parametrize(
    ("span", "max_position"), [(4, 7), (5, 11), (8, 30), (9, 6), (32, 128), (128, 513), (256, 512)]
)
def test_deberta_buckets(span, max_position):
    """Integers against fractions; odd, monotone, every bucket used, the last from max_position on."""
    d = np.arange(-700, 701) if span > 100 else np.arange(-150, 151)
    found = rp.reference.deberta_bucket(d, span=span, max_position=max_position)
    np.testing.assert_array_equal(found, -found[::-1])
    assert (np.diff(found) >= 0).all()
    assert set(found.tolist()) >= set(range(-(span // 2), span // 2 + 1))
    assert found[d == max_position - 1] < span
    assert (found[d >= max_position] == span).all() or span % 2
    few = np.unique(np.r_[d[::37], d[np.r_[np.diff(found) > 0, False]]])
    expected = [naive.deberta_bucket(int(n), span, max_position) for n in few]
    np.testing.assert_array_equal(rp.reference.deberta_bucket(few, span=span, max_position=max_position), expected)
    np.testing.assert_array_equal(rp.reference.deberta_bucket(d, span=span), d)


def test_deberta_buckets_that_are_clamped():
    """From P on, a key behind a query has row 1 of a table and not row 0; nothing else differs."""
    d = np.arange(-700, 701)
    found = [rp.reference.deberta_bucket(d, span=256, max_position=512, clamped=clamped) for clamped in (False, True)]
    np.testing.assert_array_equal(found[1], np.clip(found[0], -255, 255))
    assert d[found[0] != found[1]].tolist() == d[np.abs(d) >= 512].tolist()
    with pytest.raises(rp.RelposValueError, match="clamped: expected max_position"):
        rp.DeBERTa(np.ones((2, 8, 4)), clamped=True)


@pytest.mark.parametrize(("span", "max_position"), [(4, 7), (5, 11), (9, 6), (128, 513), (256, 512)])
def test_deberta_map_is_the_bucket(span, max_position, backend):
    """A table that holds its own row numbers shows the rows, far beyond the last."""
    table = np.arange(2.0 * span)[None, :, None]
    q, k = np.ones((1, 1, 1)), np.ones((1, 4001, 1))
    d = 2000 - np.arange(4001)
    toward_keys = rp.DeBERTa(table, max_position=max_position)
    toward_queries = rp.DeBERTa(pos_query=table, max_position=max_position, p2c="paper")
    for way, scheme in ((1, toward_keys), (-1, toward_queries)):
        s = rp.logits(q, k, position=scheme, offset=2000, scale=1.0, backend=backend)[0, 0] - 1
        bucket = rp.reference.deberta_bucket(way * d, span=span, max_position=max_position)
        np.testing.assert_array_equal(s, np.clip(bucket + span, 0, 2 * span - 1))


# ---------------------------------------------------------------------------------------------- labels of a graph


def test_graphormer_is_its_dense_bias(backend, rng):
    """The "graphormer" of two graphs with a virtual node, against loops."""
    q, k, v = make(rng, 8, 8, 3, 5, 3)
    distances, table, virtual = rng.integers(0, 6, (2, 7, 7)), rng.standard_normal((6, 3)), rng.standard_normal((1, 3))
    bias = np.stack([naive.graphormer(one, table, virtual[0]) for one in distances])
    for t in (virtual, virtual[0]):
        scheme = rp.GraphLabels.graphormer(distances, table, t)
        s = rp.logits(q, k, position=scheme, backend=backend)
        close(s - rp.logits(q, k, backend=backend), bias)
    masked = rp.attention(q, k, v, mask=bias, backend=backend)
    close(rp.attention(q, k, v, position=scheme, backend=backend), masked)


@pytest.mark.parametrize("offsets", ["entity", "chain"])
def test_labels_of_alphafold_by_loops(offsets, rng):
    residue, chain, entity, symmetry, token = rng.integers(0, 4, (5, 2, 30))
    found = rp.reference.alphafold_labels(
        residue, chain, entity, symmetry, token, residue_bins=2, chain_bins=1, offsets=offsets
    )

    def bin_of(a, m, known):
        return min(max(a + m, 0), 2 * m) if known else 2 * m + 1

    for b, i, j in np.ndindex(2, 30, 30):
        of = [int(x[b, i] - x[b, j]) for x in (residue, chain, entity, symmetry, token)]
        copies = of[2] == 0 if offsets == "entity" else of[1] != 0
        expected = (
            bin_of(of[0], 2, of[1] == 0),
            bin_of(of[4], 2, of[1] == of[0] == 0),
            0 if of[2] == 0 else -1,
            bin_of(of[3], 1, copies),
        )
        assert tuple(int(x[b, i, j]) for x in found) == expected
    assert all(x.dtype == np.int32 for x in found)


def test_labels_of_alphafold_refuse():
    index, labels = np.arange(3), rp.reference.alphafold_labels
    assert_refused(
        (lambda: labels(index, index, index, index[:2], index), r"symmetry: expected shape .*found \(2,\)"),
        (lambda: labels(index, index * 1.0, index, index, index), "chain: expected integers, found dtype float64"),
        (lambda: labels(index, index, index, index, index, residue_bins=-1), "residue_bins: .*-1"),
        (lambda: labels(index, index, index, index, index, offsets="sym"), "offsets: .*'sym'"),
        (lambda: labels(index + 2**62, index, index, index, index), "residue: expected numbers of at most"),
    )


def test_labels_are_kept_as_they_were(rng):
    labels = np.zeros((3, 3), int)
    scheme = rp.GraphLabels(labels, np.ones((2, 1)))
    labels[:] = 99
    assert not scheme.labels.any()
    with pytest.raises(ValueError, match="read-only"):
        scheme.labels[0, 0] = 1
    assert repr(scheme) == "GraphLabels(labels=(3, 3), table=(2, 1))"
