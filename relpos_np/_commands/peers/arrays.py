"""What peers need of a case beside its inputs: indices, biases and masks written out."""

from __future__ import annotations

import numpy as np

import relpos_np as rp
from relpos_np._commands.peers.shapes import Case
from relpos_np.types import Array


def index(case: Case) -> Array:
    """Table row of every pair, (L_q, L_k)."""
    s = case.shape
    if s.kind == "t5":
        distances = np.arange(1 - s.q_len, s.k_len)
        buckets = rp.reference.t5_bucket(distances, num_buckets=32, max_distance=128, bidirectional=True)
        return np.asarray(buckets[apart(case) + s.q_len - 1])
    if s.kind == "window":
        grid = [np.arange(7), np.arange(7)]
        return rp.reference.window_index(grid, grid, (7, 7))
    four = np.arange(4)
    frames = rp.reference.rstt_frames(7, 4)
    return rp.reference.window_index([np.arange(7), four, four], [frames, four, four], (7, 4, 4))


def apart(case: Case) -> Array:
    """Key's less query's position, (L_q, L_k); queries are the last positions."""
    s = case.shape
    return np.arange(s.k_len) - (np.arange(s.q_len)[:, None] + s.k_len - s.q_len)


def bias(case: Case) -> Array:
    """Bias of every pair, (H, L_q, L_k)."""
    if case.shape.kind == "plain":
        return np.zeros((1, case.shape.q_len, case.shape.k_len), np.float32)
    if case.shape.kind == "alibi":
        return -case.arrays["slopes"][:, None, None] * np.abs(apart(case)).astype(np.float32)
    return np.ascontiguousarray(np.moveaxis(case.arrays["table"][index(case)], -1, 0))


def minus_infinity(case: Case) -> Array:
    """0 where a causal query may attend, else -inf: (L_q, L_k)."""
    return np.where(apart(case) > 0, np.float32(-np.inf), np.float32(0))


def shaw_rows(case: Case) -> Array:
    """Row of Shaw's tables of every pair."""
    reach = len(case.arrays["key_table"]) // 2
    return np.clip(apart(case), -reach, reach) + reach
