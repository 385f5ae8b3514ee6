"""Products of pairs of bfloat16, by the unit of matrices as by pairs."""

import json

from tests.processes import child


def test_small_matrices_have_the_bits_of_pairs():
    """BFMMLA adds two products of pairs, one after the other; each is within what the rounding of its sum allows."""
    made = {}
    for unit in ("emulated", "emulated mmla"):
        status, out, log = child("from tests import products; products.main()", bare=True, RELPOS_MATRIX_UNIT=unit)
        assert status == 0, log
        name, made[unit], error = json.loads(out)
        assert name == unit
        assert error <= 1.0
    assert made["emulated"] == made["emulated mmla"]
