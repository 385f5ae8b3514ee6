"""Any two options in one call of each CPU kernel: which kernel does a call depends on most of them.

Cases of `strategies.py` have any options too, but are rarely of the shape that one of the kernels is for.
"""

from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls.dense_bias import DenseBias
from relpos_np._contract.options import DEFAULTS
from relpos_np._contract.problem import Rule
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS

BATCH, HEADS, KV_HEADS = 2, 4, 2
# Queries, keys, head size and value channels for each of the kernels. Values are whole vectors where windows are meant;
# more keys than a block where they are not, and fewer in the last one than a vector has lanes.
SIZES = {
    "streaming": (23, BLOCK_KEYS + 3, 5, 3),
    "windows": (25, 33, 5, 16),
    "decoding": (3, BLOCK_KEYS + 3, 5, 3),
}
# What chooses who computes the call, makes several of it, or belongs to another option.
OTHERS = {"backend", "precision", "segments", "cap_order", "rng"}
# Sums of a few hundred numbers of about 1, in float64.
ROOM = 1e-12


def rules(k_len):
    """One of each kind; the prefix of one item covers blocks of which the other's has no key."""
    return rp.Chunked(7, 2, 1), rp.Prefix([k_len - 2, 1]), rp.Dilated(3)


def values(sizes, rng):
    """Values of every option, each with those that belong to it."""
    q_len, k_len, depth, v_dim = sizes
    rows = BATCH, HEADS, q_len
    hidden = np.where(np.arange(k_len) % 5 == 2, -np.inf, rng.standard_normal((HEADS, q_len, k_len)))
    table = rng.standard_normal((9, HEADS))
    return {
        "mask": (
            {"mask": rng.random((*rows, k_len)) < 0.7},
            {"mask": rng.random((BATCH, 1, 1, k_len)) < 0.7},
            {"mask": rng.random((q_len, 1)) < 0.7},
            {"mask": hidden[0]},
        ),
        "key_lengths": ({"key_lengths": [2, k_len - 3]},),
        "causal": ({"causal": True},),
        "window": ({"window": 4}, {"window": (k_len // 2, None)}, {"window": (None, 2)}),
        "rule": [{"rule": rule} for rule in rules(k_len)],
        "selected": ({"selected": rng.integers(-1, k_len, (BATCH, q_len, 4))},),
        "scale": ({"scale": 0.3},),
        "offset": ({"offset": 4}, {"offset": -2}),
        "query_scale": ({"query_scale": rng.random(rows)},),
        "softcap": ({"softcap": 1.5}, {"softcap": 1.5, "cap_order": "content"}),
        "sinks": ({"sinks": rng.standard_normal(HEADS)},),
        "dropout": ({"dropout": 0.4},),
        "position": (
            {"position": rp.T5(rng.standard_normal((32, HEADS)))},
            {"position": rp.GraphLabels(rng.integers(0, 9, (q_len, k_len)), table)},
            {"position": rp.GraphLabels(rng.integers(0, 9, (BATCH, q_len, k_len)), table)},
            {"position": rp.Shaw(rng.standard_normal((5, depth)), rng.standard_normal((5, v_dim)))},
            {"position": rp.ALiBi(form="key")},
            {"position": DenseBias(hidden)},
        ),
    }


def drawn(options):
    """The options, with the same dropout each time."""
    return options | ({"rng": np.random.default_rng(7)} if "dropout" in options else {})


def unseen(q, k, options):
    """Keys that no query of their item attends: (batch, keys)."""
    shaping = {name: x for name, x in options.items() if name == "position" or name in rp.logits.options}
    return np.isneginf(rp.logits(q, k, **shaping, backend="numpy")).all(axis=(1, 2))


def test_every_option_and_rule_is_here(rng):
    assert set(values(SIZES["windows"], rng)) - {"position"} | OTHERS == set(DEFAULTS)
    known = {kind for kind in Rule.__subclasses__() if kind.__module__.startswith("relpos_np.")}
    assert {type(rule) for rule in rules(9)} == known


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_two_options(sizes, rng):
    """Kernels agree with the reference, and nothing of a key that nobody attends has a share."""
    q_len, k_len, depth, v_dim = sizes
    q = rng.standard_normal((BATCH, HEADS, q_len, depth))
    k, v = (rng.standard_normal((BATCH, KV_HEADS, k_len, width)) for width in (depth, v_dim))
    given = values(sizes, rng)
    for options in (one | other for a, b in combinations(given, 2) for one in given[a] for other in given[b]):
        try:
            expected = rp.attention(q, k, v, **drawn(options), return_lse=True, backend="numpy")
        except rp.RelposError:
            continue  # the two cannot be combined
        nowhere = unseen(q, k, options)[:, None, :, None]
        own_k, own_v = (np.where(nowhere, np.nan, x) for x in (k, v))
        found = rp.attention(q, own_k, own_v, **drawn(options), return_lse=True, backend="numba")
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=ROOM, atol=ROOM, err_msg=str(options.keys()))


def terms(sizes, rng):
    """Schemes with a term of each kind that kernels tell apart, for the sizes of a call."""
    q_len, k_len, depth, v_dim = sizes
    labels, table = rng.integers(0, 9, (q_len, k_len)), rng.standard_normal((9, HEADS))
    every = 2 * max(q_len, k_len) - 1
    return {
        "a table by distance": rp.T5(rng.standard_normal((32, HEADS))),
        "a table by pair": rp.GraphLabels(labels, table),
        "a table by pair of each item": rp.GraphLabels(np.stack([labels, labels[::-1]]), table),
        "vectors of queries by distance": rp.Shaw(rng.standard_normal((5, depth))),
        "vectors of queries for every distance": rp.Shaw(rng.standard_normal((every, depth))),
        "vectors of queries by pair": rp.GraphLabels(labels, key_table=rng.standard_normal((9, depth))),
        "vectors of keys": rp.ALiBi(form="key"),
        "vectors of values": rp.Shaw(value_table=rng.standard_normal((5, v_dim))),
        "a bias": DenseBias(rng.standard_normal((HEADS, q_len, k_len))),
        "turned operands": rp.Rotary(depth // 2 * 2),
    }


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_two_terms(sizes, rng):
    """Also twice the same, forward and back."""
    q_len, k_len, depth, v_dim = sizes
    q, g = (rng.standard_normal((BATCH, HEADS, q_len, width)) for width in (depth, v_dim))
    k, v = (rng.standard_normal((BATCH, KV_HEADS, k_len, width)) for width in (depth, v_dim))
    given = terms(sizes, rng)
    for names in combinations_with_replacement(given, 2):
        position = tuple(given[name] for name in names)
        if sum(scheme.content for scheme in position) > 1:
            continue
        found, expected = (
            rp.attention(q, k, v, position=position, return_lse=True, backend=b) for b in ("numba", "numpy")
        )
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=ROOM, atol=ROOM, err_msg=str(names))
        back, wanted_back = (
            rp.attention_vjp(q, k, v, position=position, grad_out=g, backend=b) for b in ("numba", "numpy")
        )
        arrays, wanted_arrays = (
            [x.q, x.k, x.v, *(y for own in x.position for y in own.values())] for x in (back, wanted_back)
        )
        for x, wanted in zip(arrays, wanted_arrays, strict=True):
            room = ROOM * max(np.abs(wanted).max(), 1)
            np.testing.assert_allclose(x, wanted, rtol=0, atol=room, err_msg=str(names))


# Keys that a mask leaves: as a range of keys says it, and as none can.
LEFT = {
    "all": lambda n: np.ones(n, bool),
    "none": lambda n: np.zeros(n, bool),
    "the first": lambda n: np.arange(n) < n // 2,
    "the last": lambda n: np.arange(n) >= n // 3,
    "one": lambda n: np.arange(n) == n - 2,
    "all but one": lambda n: np.arange(n) != n // 2,
    "every other": lambda n: np.arange(n) % 2 == 1,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_masks_of_keys_of_any_two_kinds(sizes, rng):
    """Items of one batch, of which each has a kind of its own, with as many keys as there are or fewer."""
    q_len, k_len, depth, v_dim = sizes
    q = rng.standard_normal((BATCH, HEADS, q_len, depth))
    k, v = (rng.standard_normal((BATCH, KV_HEADS, k_len, width)) for width in (depth, v_dim))
    for kinds in product(LEFT, repeat=BATCH):
        mask = np.stack([LEFT[kind](k_len) for kind in kinds])[:, None, None]
        for lengths in (None, [k_len - 1, 2]):
            options = {"mask": mask, "key_lengths": lengths, "return_lse": True}
            expected = rp.attention(q, k, v, **options, backend="numpy")
            for x, wanted in zip(rp.attention(q, k, v, **options, backend="numba"), expected, strict=True):
                np.testing.assert_allclose(x, wanted, rtol=ROOM, atol=ROOM, err_msg=f"{kinds}, {lengths}")
