"""Rows 33 to 35: shapes that do not fit, indices that lie outside their tables, buckets that are none.

Bad calls whose message is what matters are in tests/test_bad_input.py; here each fault meets every backend, and the
indices of a new scheme have to be listed.
"""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract.terms import Dense, Toeplitz
from relpos_np.testing.arguments import arguments
from tests.compare import assert_same
from tests.faults.arrays import PLACES, Called
from tests.faults.operands import make
from tests.strategies import KINDS, Case, Position


def refused(call, kind=ValueError, match="."):
    """The error of a call, of this library and of the kind that Python callers expect."""
    with pytest.raises(rp.RelposError, match=match) as caught:
        call()
    assert isinstance(caught.value, kind), caught.value
    return str(caught.value)


# Row 33 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 5), (4, 6), (2, 5, 7), (3, 1, 1, 6), (1, 2, 2, 5, 6), (0,), (5, 0)])
def test_row_33_masks_that_do_not_broadcast(shape, backend, rng):
    q, k, v = make(rng)
    out = np.full((2, 2, 5, 3), 7.0)
    for mask in (np.ones(shape, bool), np.zeros(shape)):
        for call in (
            lambda mask=mask: rp.attention(q, k, v, mask=mask, backend=backend, out=out),
            lambda mask=mask: rp.logits(q, k, mask=mask, backend=backend),
            lambda mask=mask: rp.attention_vjp(q, k, v, grad_out=out, mask=mask, backend=backend),
        ):
            message = refused(call, match="^mask: ")
            assert str(shape) in message
            assert "(2, 2, 5, 6)" in message
    assert (out == 7).all()


BASE = {"kv_heads": 2, "group": 1, "q_len": 9, "k_len": 12, "depth": 6, "v_dim": 4}
OTHER = {"kv_heads": 3, "q_len": 6, "k_len": 15, "depth": 8, "v_dim": 5}


def sizes(value):
    """What an argument tells of a call: the shapes of arrays, and numbers."""
    if isinstance(value, dict):
        return {name: sizes(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(sizes, value))
    return value.shape if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("kind", KINDS)
def test_row_33_schemes_that_do_not_fit_the_call(kind, what, backend):
    """A scheme that was made for other heads, lengths or channels is refused, or is right for these as well."""
    alone = {"seed": 1, "leads": ((2,),) * 3, "batch": (2,)}
    own, other = (Case(**alone, **(BASE | more), positions=(KINDS[kind],)) for more in ({}, {what: OTHER[what]}))
    scheme = other.schemes(np.float64)[0]
    if sizes(arguments(scheme)) == sizes(arguments(own.schemes(np.float64)[0])):
        return  # it knows nothing of them
    case = Case(
        **{**alone, **BASE, "q_len": own.q_len, "k_len": own.k_len},
        positions=(Position(KINDS[kind].name, make=lambda _: scheme),),
    )
    if case.legal():
        assert_same(case.attention(np.float64, backend), case.naive(), case)
        return
    q, k, v = case.operands(np.float64)
    out = np.full((*q.shape[:-1], v.shape[-1]), 7.0)
    message = refused(lambda: rp.attention(q, k, v, position=scheme, backend=backend, out=out))
    assert any(character.isdigit() for character in message)
    refused(lambda: rp.attention_vjp(q, k, v, grad_out=out, position=scheme, backend=backend))
    assert (out == 7).all()


# Row 34 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Toeplitz, Dense])
@pytest.mark.parametrize("entry", [-2, 3, 1 << 20, -(1 << 31)])
def test_row_34_index_outside_its_table(kind, entry):
    """The record that kernels read refuses it, whichever scheme made it."""
    good = np.array([[-1, 0], [1, 2]], np.int32)
    good = good.ravel() if kind is Toeplitz else good
    assert kind(good, 3).gaps
    assert not kind(np.abs(good), 3).gaps
    bad = good.copy()
    bad[-1] = entry
    refused(lambda: kind(bad, 3), IndexError, r"rows 0 \.\.\. 2")


FARTHEST = np.iinfo(np.int64).max


def labels(entry):
    x = np.zeros((5, 6), np.int64)
    x[2, 3] = entry
    return x


def distances(entry):
    x = np.zeros((4, 4), np.int64)
    x[1, 2] = entry
    return x


def boxes(entry, dtype=np.int64):
    x = np.zeros((6, 4), dtype)
    x[3, 1] = entry
    return x


def layout(boxes, **options):
    return rp.LayoutBias(*np.ones((3, 32, 2)), boxes, **options)


def swin(frames):
    return rp.WindowBias.rstt(np.ones((9 * 9, 2)), 5, 3, (2, 2), frames=frames)


def attend(rng=None, **options):
    q, k, v = make(np.random.default_rng(0))
    return rp.attention(q, k, v, **options)


LEARNED = rp.LearnedAbsolute(np.ones((6, 8)))
FORMULAS = rp.reference
# Every place where users pass positions, labels, coordinates or lengths that pick something.
INDICES = {
    "labels: -2": lambda: rp.GraphLabels(labels(-2), np.ones((3, 2))),
    "labels: 3": lambda: rp.GraphLabels(labels(3), np.ones((3, 2))),
    "labels: 2**32": lambda: rp.GraphLabels(labels(1 << 32), np.ones((3, 2))),
    "labels: far": lambda: rp.GraphLabels(labels(FARTHEST), key_table=np.ones((3, 4))),
    "labels: unsigned": lambda: rp.GraphLabels(labels(0).astype(np.uint64) - np.uint64(1), np.ones((3, 2))),
    "distances: -2": lambda: rp.GraphLabels.graphormer(distances(-2), np.ones((3, 2)), np.ones(2)),
    # The row after the last is that of the virtual node, which no distance may pick.
    "distances: 3": lambda: rp.GraphLabels.graphormer(distances(3), np.ones((3, 2)), np.ones(2)),
    "labels: formula -2": lambda: FORMULAS.label_bias(np.ones((3, 2)), labels(-2)),
    "labels: formula 3": lambda: FORMULAS.label_vectors(np.ones((3, 4)), labels(3)),
    "positions: -1": lambda: LEARNED.encode(np.array([-1])),
    "positions: 6": lambda: LEARNED.encode([0, 6]),
    "positions: length": lambda: LEARNED.encode(7),
    "positions: called beyond": lambda: LEARNED(np.ones((4, 8)), start=3),
    "positions: formula -1": lambda: FORMULAS.learned_encoding(np.ones((6, 8)), np.array([-1])),
    "positions: formula 6": lambda: FORMULAS.learned_encoding(np.ones((6, 8)), np.array([6])),
    "positions: counted": lambda: FORMULAS.cope_scores(np.ones((1, 2, 4)), np.ones((3, 4)), np.full((1, 2, 5), 2.5)),
    "positions: nan": lambda: FORMULAS.cope_scores(np.ones((1, 2, 4)), np.ones((3, 4)), np.full((1, 2, 5), np.nan)),
    "positions: negative": lambda: FORMULAS.cope_scores(np.ones((1, 2, 4)), np.ones((3, 4)), np.full((1, 2, 5), -0.5)),
    "key_coords: beyond": lambda: rp.WindowBias(np.ones((9, 2)), (5,), key_coords=([0, 1, 2, 3, 5],)),
    "key_coords: negative": lambda: rp.WindowBias(np.ones((9, 2)), (5,), key_coords=([-1, 0],)),
    "key_coords: far": lambda: rp.WindowBias(np.ones((9, 2)), (5,), key_coords=([FARTHEST, 0],)),
    "key_coords: unsigned": lambda: rp.WindowBias(
        np.ones((9, 2)), (5,), key_coords=(np.array([2**64 - 1, 0], np.uint64),)
    ),
    "key_coords: frames beyond": lambda: swin([0, 1, 5]),
    "key_coords: frames before": lambda: swin([-1, 1, 2]),
    "query, key: formula": lambda: FORMULAS.window_index([np.arange(3)], [np.array([0, 9])], (3,)),
    "boxes: 2**40": lambda: layout(boxes(1 << 40)),
    "boxes: lowest": lambda: layout(boxes(-FARTHEST - 1)),
    "boxes: nan": lambda: layout(boxes(np.nan, float), variant="udop"),
    "boxes: inf": lambda: layout(boxes(np.inf, float), variant="udop"),
    "boxes: 1e30": lambda: layout(boxes(1e30, float), variant="udop"),
    "positions: page": lambda: layout(boxes(0), positions=np.full(6, 1 << 40)),
    "key_lengths: 7": lambda: attend(key_lengths=7),
    "key_lengths: -1": lambda: attend(key_lengths=[6, -1]),
    "key_lengths: far": lambda: attend(key_lengths=np.array([FARTHEST, 1])),
    "key_lengths: unsigned": lambda: attend(key_lengths=np.array([2**64 - 1, 1], np.uint64)),
    "positions: rotary nan": lambda: rp.Rotary(4, positions=np.array([0, np.nan, 2, 3, 4, 5])),
    "key_positions: nan": lambda: rp.Rotary(4, positions=np.arange(5), key_positions=np.full(6, np.nan)),
    "axes: 2": lambda: FORMULAS.axis_frequencies(np.ones(3), np.array([0, 1, 2]), 2),
    "axes: -1": lambda: FORMULAS.axis_frequencies(np.ones(3), np.array([0, 1, -1])),
    "left: beyond": lambda: rp.Shaw(np.ones((5, 4)), left=5),
    "left: negative": lambda: rp.Shaw(np.ones((5, 4)), left=-1),
    "offset: far": lambda: attend(offset=FARTHEST),
    "window: negative": lambda: attend(window=(-1, 3)),
}


@pytest.mark.parametrize("name", INDICES)
def test_row_34_indices_that_users_pass(name):
    """Nothing is read with them, by a kernel or by NumPy, for which -1 is the last row."""
    argument = name.partition(":")[0]
    message = refused(INDICES[name], (IndexError, ValueError))
    assert any(word in message for word in argument.split(", ")), message


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "relative_position": lambda: FORMULAS.t5_bucket(np.array([0.5, np.nan])),
        "distance": lambda: FORMULAS.deberta_bucket(np.array([0.5]), span=4),
        "x": lambda: FORMULAS.piecewise_index(np.array([0.5])),
        "labels": lambda: FORMULAS.label_bias(np.ones((3, 2)), labels(0) * 0.5),
        "positions": lambda: FORMULAS.learned_encoding(np.ones((6, 8)), np.array([np.nan])),
        "key_coords": lambda: rp.WindowBias(np.ones((9, 2)), (5,), key_coords=([0.0, np.nan],)),
        "key_lengths": lambda: attend(key_lengths=[1.0, np.nan]),
        "frames": lambda: swin([0.0, 1.0, np.nan]),
    }.items(),
)
def test_row_34_indices_are_integers(name, call):
    message = refused(call, TypeError)
    assert name in message or "key_coords" in message


def test_row_34_every_array_of_integers_is_here():
    """Arrays of integers are found by inspection; one that is new must be among the bad ones above."""
    given = {place.name for place in PLACES.values() if place.good.dtype.kind == "i"}
    assert given <= {part for name in INDICES for part in name.partition(":")[0].split(", ")}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: [[x], [x]]], ids=["alone", "list", "lists"])
def test_row_29_objects_in_the_place_of_integers_are_not_called(wrap):
    bad = wrap(Called())
    for call in (
        lambda: attend(key_lengths=bad),
        lambda: swin(bad),
        lambda: rp.WindowBias(np.ones((9, 2)), (5,), key_coords=(bad,)),
        lambda: LEARNED.encode(bad),
        lambda: rp.Sinusoidal(8).encode(bad),
    ):
        refused(call, TypeError)


# Row 35 ----------------------------------------------------------------------------------------------

# What one argument alone cannot show: tests/test_bad_arguments.py changes each of every scheme.
BUCKETS = {
    "T5 one": lambda: rp.T5(np.ones((1, 2)), bidirectional=False),
    "T5 two": lambda: rp.T5(np.ones((2, 2))),
    "T5 distance": lambda: rp.T5(np.ones((32, 2)), max_distance=8),
    "T5 distance one way": lambda: rp.T5(np.ones((32, 2)), max_distance=16, bidirectional=False),
    "WavLM distance": lambda: rp.WavLM(np.ones((320, 2)), np.ones((2, 2, 5)), max_distance=80),
    "LayoutBias distance": lambda: layout(boxes(0), max_distance=8),
    "LayoutBias box distance": lambda: layout(boxes(0), max_box_distance=8),
    "DeBERTa few": lambda: rp.DeBERTa(np.ones((2, 4, 4)), max_position=40),
    "DeBERTa distance": lambda: rp.DeBERTa(np.ones((2, 32, 4)), max_position=9),
    "IRPE limits": lambda: rp.IRPE((2, 2), np.ones((1, 49, 4)), alpha=4.0, beta=3.0),
    "IRPE gamma": lambda: rp.IRPE((2, 2), np.ones((1, 49, 4)), alpha=1.9, beta=3.8, gamma=1.9),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_row_35_buckets_that_are_none(name):
    """No logarithm of 1 or less is taken, and none divided by."""
    with np.errstate(all="raise"):
        refused(BUCKETS[name])
