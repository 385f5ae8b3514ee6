"""Sizes of blocks and tiles that do not fit together are refused when kernels are imported: numbers would be wrong."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from relpos_np.errors import RelposValueError
from relpos_np.kernels._numba.plan import backward_job
from relpos_np.kernels._numba.simd import target

TARGETS = {one.name: one for one in (target.AVX512, target.AVX2, target.NEON, target.SIMD128)}
TILED = {"row_quantum": 48, "pair_rows": 16, "pair_steps": 16}


@pytest.mark.parametrize("name", TARGETS)
def test_sizes_fit_every_processor(name):
    target.check_sizes(TARGETS[name], row_quantum=24, pair_rows=TARGETS[name].score_rows, pair_steps=1)


def test_sizes_fit_matrix_tiles():
    target.check_sizes(target.AVX512, **TILED)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_keys": 128}, "BLOCK_KEYS is 128, which is not a multiple of 6, the number of keys of a register tile"),
        ({"block_keys": 216}, "BLOCK_KEYS is 216, which is not a multiple of 64, the number of keys of a panel"),
        ({"block_keys": 0}, "BLOCK_KEYS is 0"),
        ({"row_quantum": 32}, "ROW_QUANTUM is 32, which is not a multiple of 6, the number of rows of a register tile"),
        ({"pair_rows": 16}, "ROW_QUANTUM is 24, which is not a multiple of 16"),
        ({"pair_steps": 20}, "BLOCK_KEYS is 192, which is not a multiple of 40"),
        ({"most_queries": 360}, "MOST_QUERIES is 360, which is not a multiple of 96"),
        ({"sum_vectors": 2}, "SUM_VECTORS is 2"),
        ({"target": replace(target.AVX512, score_rows=5)}, "ROW_QUANTUM is 24, which is not a multiple of 5"),
        ({"target": replace(target.AVX512, score_vectors=5)}, "BLOCK_KEYS is 192, which is not a multiple of 80"),
        ({"target": replace(target.AVX512, score_vectors=2)}, "score_vectors of avx512 is 2"),
        ({"target": replace(target.AVX512, value_vectors=3)}, "value_vectors of avx512 is 3"),
    ],
)
def test_sizes_that_break_a_rule(sizes, message):
    given = {"target": target.AVX512, "row_quantum": 24, "pair_rows": 6, "pair_steps": 1} | sizes
    with pytest.raises(RelposValueError, match=message):
        target.check_sizes(**given)


@pytest.mark.parametrize(
    ("module", "size", "wrong"),
    [(target, "BLOCK_KEYS = 192", "BLOCK_KEYS = 100"), (backward_job, "BLOCK_QUERIES = 96", "BLOCK_QUERIES = 64")],
)
def test_import_fails(module, size, wrong):
    """With one size changed in the source, that is."""
    source = inspect.getsource(module)
    assert source.count(f"\n{size}\n") == 1
    with pytest.raises(RelposValueError, match=f"{wrong.replace(' =', ' is')}, which is not a multiple"):
        exec(compile(source.replace(size, wrong), module.__file__, "exec"), {"__name__": module.__name__})  # noqa: S102
