"""Rules against the loops that say what they are, for every small number and wherever the queries stand."""

from itertools import product

import numpy as np
import pytest

import relpos_np as rp
from tests.naive.seeds import ruled_out

# The usual places, before the first key, beyond the last one, and so far away that nothing is near.
OFFSETS = (*range(-14, 15), -(1 << 40), 1 << 40)
CHUNKS = (None, 0, 1, 2, 1 << 50)


def assert_rule(rule, made, q_len, k_len):
    """Scores are finite exactly where loops let a query attend."""
    q, k = np.zeros((1, q_len, 1)), np.zeros((1, k_len, 1))
    for offset in OFFSETS:
        found = np.isfinite(rp.logits(q, k, rule=made, offset=offset, backend="numpy")[0])
        wanted = [[not ruled_out(rule, 0, i + offset, j) for j in range(k_len)] for i in range(q_len)]
        np.testing.assert_array_equal(found, wanted, err_msg=f"{made!r} at {offset}")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 1 << 45])
def test_chunks(size):
    for left, right in product(CHUNKS, repeat=2):
        assert_rule(("chunked", size, left, right), rp.Chunked(size, left, right), 3, 11)


def test_prefixes():
    for length in (0, 1, 5, 11, 12, 1 << 50):
        assert_rule(("prefix", length), rp.Prefix(length), 3, 11)


def test_steps():
    for step in (1, 2, 3, 10, 11, 12, 1 << 45):
        assert_rule(("dilated", step), rp.Dilated(step), 3, 11)


def test_lengths_of_items_are_those_of_the_last_axes():
    """Where the batch has more axes than lengths have."""
    items = slice(0, 1), slice(1, 3)
    assert rp.Prefix([2, 3, 4]).of_items(items).lengths.tolist() == [3, 4]
