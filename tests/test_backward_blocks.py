"""Gradients where blocks of queries and of keys begin and end: bands at their edges, and heads that are divided."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.plan import backward_job as backjob
from relpos_np.kernels._numba.plan.backward_job import BLOCK_QUERIES
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS
from tests.strategies import KINDS, Case

Q_LENGTHS = (7, BLOCK_QUERIES + 1, 2 * BLOCK_QUERIES + 1)
K_LENGTHS = (BLOCK_KEYS - 1, BLOCK_KEYS + 1, 2 * BLOCK_KEYS + 1)
# The narrowest bands reach into one more tile with one query and one key.
BANDS = (None, (0, 0), (1, 0), (0, 1), (2, None), (None, 1))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_every_pair_has_its_share(parts, monkeypatch, rng):
    """However many ranges of queries and of keys a head is divided into, and whichever there are more of."""
    monkeypatch.setattr(backjob, "part_count", lambda heads, threads: parts)
    for q_len, k_len, band in product(Q_LENGTHS, K_LENGTHS, BANDS):
        q, k, v, g = (rng.standard_normal((1, n, 3)) for n in (q_len, k_len, k_len, q_len))
        for offset in (0, 1, k_len - q_len):
            call = {"grad_out": g, "window": band, "offset": offset}
            found, expected = (rp.attention_vjp(q, k, v, **call, backend=b) for b in ("numba", "numpy"))
            for name in "qkv":
                # Sums of at most 2 * BLOCK_KEYS products of numbers of about 1.
                a, b = getattr(found, name), getattr(expected, name)
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=f"{name} {q_len} {k_len} {band} {offset}")


def every_gradient(grads):
    schemes = grads.position if isinstance(grads.position, tuple) else (grads.position,)
    return [grads.q, grads.k, grads.v, *(x for arrays in schemes for x in (arrays or {}).values())]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["plain", "t5", "shaw", "rotary", "transformer_xl conformer", "transformer_xl xlnet"])
def test_all_that_is_summed_waits_where_pieces_are_cut(name, parts, monkeypatch, rng):
    """Cut by up to as many tiles of keys as there are, sums of every kind go on: the bits are those of one call."""
    monkeypatch.setattr(backjob, "part_count", lambda heads, threads: parts)
    runs, run_cuts = [], backjob.BackwardJob.run_cuts
    monkeypatch.setattr(backjob.BackwardJob, "run_cuts", lambda job, *rest: runs.append(1) or run_cuts(job, *rest))
    for q_len, k_len in product((7, BLOCK_QUERIES + 1), (BLOCK_KEYS - 1, BLOCK_KEYS + 1, 3 * BLOCK_KEYS + 1)):
        case = Case(3, ((), (), ()), (), 1, 2, q_len, k_len, 5, 3, positions=(KINDS[name],), causal=True)
        (q, k, v), options = case.operands(np.float64), case.options(np.float64)
        call = {"grad_out": rng.standard_normal((2, q_len, 3)), **options, "backend": "numba"}
        whole = every_gradient(rp.attention_vjp(q, k, v, **call))
        assert not runs
        for flops in (1e6, 1e3):  # two cuts, and one for each tile
            with monkeypatch.context() as patch:
                patch.setattr(launcher, "CALL_FLOPS", flops)
                cut = every_gradient(rp.attention_vjp(q, k, v, **call))
            for a, b in zip(cut, whole, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{q_len} {k_len} {flops}")
        assert runs
        runs.clear()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "rotary", "shaw", "transformer_xl conformer", "transformer_xl wenet"])
def test_heads_that_share_keys_in_one_piece_or_several(name, dtype, monkeypatch, rng):
    """As there are threads: the same bits, also where pieces are cut, and the formula's gradient."""
    for heads, kv_heads, (q_len, k_len) in product((6,), (1, 2, 3), ((7, 9), (BLOCK_QUERIES + 1, BLOCK_KEYS + 1))):
        case = Case(3, ((), (), ()), (), kv_heads, heads // kv_heads, q_len, k_len, 6, 5, positions=(KINDS[name],))
        options = case.options(np.float32 if dtype == "bfloat16" else dtype)
        stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        q, k, v, g = (x.astype(stored) for x in (*case.operands(np.float64), rng.standard_normal((heads, q_len, 5))))
        call = {"grad_out": g, **options}
        found = []
        for threads, flops in product((1, 3, 16), (None, 1e3)):
            with monkeypatch.context() as patch:
                patch.setattr(launcher, "available_threads", lambda threads=threads: threads)
                if flops:
                    patch.setattr(launcher, "CALL_FLOPS", flops)
                found.append(rp.attention_vjp(q, k, v, **call, backend="numba"))
        for other in found[1:]:
            for x in "qkv":
                assert getattr(found[0], x).tobytes() == getattr(other, x).tobytes()
        if dtype == "float64":
            expected = rp.attention_vjp(q, k, v, **call, backend="numpy")
            for x in "qkv":
                np.testing.assert_allclose(getattr(found[0], x), getattr(expected, x), rtol=0, atol=1e-12)
