"""What peers need of a case beside its inputs: indices, biases and masks written out."""

from __future__ import annotations

import numpy as np

import relpos_np as rp
from relpos_np._commands.peers.shapes import Case
from relpos_np.types import Array


def per_pair(case: Case) -> Array | None:
    """What positions need of every pair, (L_q, L_k): its row of a table or, for ALiBi, its distance."""
    s = case.shape
    if s.kind == "plain":
        return None
    if s.kind == "transformer_xl":
        return apart(case) > 0  # who is hidden
    if s.kind == "alibi":
        return np.abs(apart(case)).astype(np.float32)
    if s.kind == "shaw":
        reach = len(case.arrays["key_table"]) // 2
        return np.clip(apart(case), -reach, reach) + reach
    if s.kind == "t5":
        distances = np.arange(1 - s.q_len, s.k_len)
        buckets = rp.reference.t5_bucket(distances, num_buckets=32, max_distance=128, bidirectional=True)
        return np.asarray(buckets[apart(case) + s.q_len - 1])
    grid = [np.arange(7)] * 2 if s.kind == "window" else [np.arange(7), np.arange(4), np.arange(4)]
    keys = grid if s.kind == "window" else [rp.reference.rstt_frames(7, 4), *grid[1:]]
    return rp.reference.window_index(grid, keys, tuple(map(len, grid)))


def apart(case: Case) -> Array:
    """Key's less query's position, (L_q, L_k); queries are the last positions."""
    s = case.shape
    return np.arange(s.k_len) - (np.arange(s.q_len)[:, None] + s.k_len - s.q_len)


def padding(case: Case) -> Array | None:
    """0 at each sequence's tokens, and -inf at what pads them, (B, 1, 1, L_k); None where nothing does."""
    if case.lengths is None:
        return None
    there = np.arange(case.shape.k_len) < case.lengths[:, None, None, None]
    return np.where(there, np.float32(0), np.float32(-np.inf))


def bias(case: Case) -> Array:
    """Bias of every pair, (H, L_q, L_k)."""
    if case.shape.kind == "plain":
        return np.zeros((1, case.shape.q_len, case.shape.k_len), np.float32)
    if case.shape.kind == "alibi":
        return np.asarray(-case.arrays["slopes"][:, None, None] * per_pair(case))
    return np.ascontiguousarray(np.moveaxis(case.arrays["table"][per_pair(case)], -1, 0))
