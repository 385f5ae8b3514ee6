"""Positions that count by content: what hidden keys do, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests.test_schemes import close, make


def test_cope_padding_behind_a_causal_call_is_not_counted(backend, rng):
    """Nor is NaN anywhere: an excluded key of NaN changes nothing for others."""
    q, k, v = make(rng)
    scheme = rp.CoPE(rng.standard_normal((4, 6)))
    out = rp.attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], position=scheme, causal=True, backend=backend)
    k[:, :, 6:], v[:, :, 6:] = np.nan, np.nan
    padded = rp.attention(q, k, v, position=scheme, causal=True, key_lengths=np.array([6, 6]), backend=backend)
    close(padded[:, :, :6], out)
    k[:, :, 2], v[:, :, 2] = np.nan, np.nan
    hidden = np.arange(9) != 2
    counted = rp.CoPE(scheme.table, counted=hidden[None])
    for one in (scheme, counted):
        found = rp.attention(q[:, :, :6], k, v, position=one, causal=True, offset=0, mask=hidden, backend=backend)
        assert np.isfinite(found).all()
    keep = [0, 1, 3, 4, 5]
    mask = np.array(keep) <= np.arange(6)[:, None]
    shorter = rp.attention(
        q[:, :, :6], k[:, :, keep], v[:, :, keep], position=rp.CoPE(scheme.table, counted=mask), mask=mask
    )
    close(found, shorter)


def test_cope_refuses():
    table, q = np.ones((4, 3)), np.ones((2, 2, 5, 3))
    for call, words in (
        (lambda: rp.CoPE(table[0]), "table: expected shape"),
        (lambda: rp.CoPE(table, variant="code"), "variant: .*'code'"),
        (lambda: rp.CoPE(table, gate_key=table), r"gate_key: expected shape \(\.\.\., H_kv, L_k, D\), found \(4, 3\)"),
        (lambda: rp.CoPE(table, counted=np.ones((2, 2))), "counted: expected bool, .* float64"),
        (lambda: rp.attention(q, q, q, position=rp.CoPE(table[:, :2])), "table: .* vectors of 2, the call needs 3"),
        (lambda: rp.attention(q, q, q, position=rp.CoPE(np.ones((3, 4, 3)))), "3 heads, the call has 2"),
        (
            lambda: rp.attention(q, q, q, position=rp.CoPE(table, gate_key=q[:, :1])),
            r"gate_key: expected .* = \(2, 5, 3\)",
        ),
        (lambda: rp.attention(q, q, q, position=rp.CoPE(table, counted=np.ones(4, bool))), "counted: .*broadcast"),
        (
            lambda: rp.attention(q, q, q, position=rp.CoPE(table, gate_key=np.ones((3, 2, 5, 3)))),
            r"gate_key: batch axes \(3,\)",
        ),
    ):
        with pytest.raises(rp.RelposError, match=words):
            call()
    assert repr(rp.CoPE(table)) == "CoPE(table=(4, 3), variant='paper')"
