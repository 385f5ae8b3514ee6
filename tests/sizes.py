"""Lengths beside the edges of vectors, panels and blocks, taken from the kernels' own constants."""

from relpos_np.kernels._numba.plan.backward_job import BLOCK_QUERIES
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM


def around(*edges):
    """Each edge, one less and one more."""
    return tuple(sorted({n for edge in edges for n in (edge - 1, edge, edge + 1)}))


# One row, rows beside one and two groups of them, keys beside a block and in a third one, queries beside a block.
ROWS = around(ROW_QUANTUM, 2 * ROW_QUANTUM)
KEYS = (*around(BLOCK_KEYS), 2 * BLOCK_KEYS + 1)
EDGES = tuple(sorted({1, 11, 13, *ROWS, BLOCK_QUERIES - 1, BLOCK_QUERIES + 1, *KEYS}))
