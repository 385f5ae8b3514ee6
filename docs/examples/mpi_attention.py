"""Attention over MPI: each process holds a range of keys and values, and pairs (out, lse) travel along a tree.

Run with ``mpiexec -n 4 python docs/examples/mpi_attention.py``; needs mpi4py and an MPI library.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.distributed import merge, partial


def own_range(length: int, rank: int, size: int) -> slice:
    """Which of `length` keys a process holds: consecutive ones, as many as the others or one more."""
    return slice(length * rank // size, length * (rank + 1) // size)


def reduced(comm: Any, pair: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Merge the pairs of all processes in the order of their keys; only process 0 gets the result."""
    step = 1
    while step < comm.size:
        if comm.rank % (2 * step):
            comm.send(pair, dest=comm.rank - step)
            return None
        if comm.rank + step < comm.size:
            pair = merge(pair, comm.recv(source=comm.rank + step))
        step *= 2
    return pair


def attention(comm: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, k_len: int, **options: Any) -> Any:
    """Attention of queries that all processes hold over the keys and values of all of them, at process 0."""
    first = own_range(k_len, comm.rank, comm.size).start
    return reduced(comm, partial(q, k, v, keys=(first, k_len), **options))


def main() -> int:
    """Compare with one process, on random numbers that all processes draw alike."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 1000, 32))
    options: dict[str, Any] = {"position": rp.T5(rng.standard_normal((32, 4))), "causal": True}
    mine = own_range(1000, comm.rank, comm.size)
    found = attention(comm, q, k[:, mine], v[:, mine], 1000, **options)
    if found is None:
        return 0
    error = float(np.abs(found[0] - rp.attention(q, k, v, **options)).max())
    print(f"{comm.size} processes, largest difference from one: {error:.1e}")
    return int(error > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
