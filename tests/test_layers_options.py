"""Options of a call in whole modules: against loops written from the papers, and refused where they mean nothing."""

import copy
import math
import pickle
from itertools import pairwise

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests import naive
from tests.test_layers import DIM, HEADS, WIDTH, close, parts_of

LENGTH = 7


@pytest.fixture
def weights(rng):
    """(weight, bias) of q, k, v and out."""
    return parts_of(rng)


def loops(weights, x, terms=None, *, factors=None, sinks=None, softcap=None, cap_order="scores", **limits):
    """One item: the output, from rows of projections."""
    q, k, v = (naive.projected(x, *part, HEADS) for part in weights[:3])
    if factors is not None:
        q = np.array([[[[factors[i] * c for c in row] for i, row in enumerate(head)] for head in q[0]]])
    allowed = naive.allowed(len(x), len(x), **limits)
    capped = {"softcap": softcap, "cap_order": cap_order}
    own = {} if terms is None else terms(q, k)
    z = naive.attention(q, k, v, **own, allowed=allowed, sinks=sinks, **capped)[0]
    return naive.projected(np.concatenate(list(z[0]), axis=-1), *weights[3])[0, 0]


SLOPES = np.array([0.5, 0.25, 0.125])
SINKS = np.array([-0.5, 0.7, 1.2])
FACTORS = np.linspace(0.5, 2.0, LENGTH)
SELECTED = np.random.default_rng(4).integers(-1, LENGTH, (1, LENGTH, 3))
# The options of a call, and those of the loops.
CASES = {
    "sinks": ({"sinks": SINKS}, {"sinks": [[[z] * LENGTH for z in SINKS.tolist()]]}),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
    "cap_order": ({"softcap": 0.8, "cap_order": "content"}, {"softcap": 0.8, "cap_order": "content"}),
    "query_scale": ({"query_scale": FACTORS}, {"factors": FACTORS.tolist()}),
    "rule": ({"rule": rp.Chunked(3), "causal": True}, {"rule": ("chunked", 3, 0, 0), "causal": True}),
    "selected": ({"selected": SELECTED}, {"selected": [[SELECTED[0].tolist()] * HEADS]}),
    "all": (
        {"sinks": SINKS, "softcap": 0.8, "query_scale": FACTORS, "rule": rp.Dilated(2), "window": 4},
        {
            "sinks": [[[z] * LENGTH for z in SINKS.tolist()]],
            "softcap": 0.8,
            "factors": FACTORS.tolist(),
            "rule": ("dilated", 2),
            "window": 4,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_options_of_multihead_attention(backend, rng, weights, name):
    options, expected = CASES[name]
    x = rng.standard_normal((2, LENGTH, WIDTH))
    layer = layers.MultiHeadAttention(*weights, heads=HEADS, position=rp.ALiBi(SLOPES))

    def terms(q, k):
        return {"logit": naive.alibi(LENGTH, LENGTH, HEADS, slopes=SLOPES)}

    found, p = layer(x, backend=backend, return_probabilities=True, **options)
    close(found, [loops(weights, item, terms, **expected) for item in x])
    # What is returned beside it is what the values were weighted with.
    v = (x @ weights[2][0].T + weights[2][1]).reshape(2, LENGTH, HEADS, DIM).swapaxes(1, 2)
    close((p @ v).swapaxes(1, 2).reshape(2, LENGTH, WIDTH) @ weights[3][0].T + weights[3][1], found)
    assert bool((p.sum(axis=-1) < 0.99).any()) == (name in ("sinks", "all"))


@pytest.mark.parametrize("name", CASES)
def test_options_of_relative_attention(backend, rng, weights, name):
    options, expected = CASES[name]
    x = rng.standard_normal((LENGTH, WIDTH))
    pos = rng.standard_normal((HEADS * DIM, WIDTH)) / math.sqrt(WIDTH)
    biases = rng.standard_normal((2, HEADS, DIM))
    layer = layers.RelativeMultiHeadAttention(
        *weights, pos=pos, content_bias=biases[0], position_bias=biases[1], variant="conformer"
    )
    encoded = naive.sinusoidal(range(LENGTH - 1, -LENGTH, -1), WIDTH, layout="interleaved")
    rows = naive.projected(encoded, pos, heads=HEADS)[0].swapaxes(0, 1)

    def terms(q, k):
        found = naive.transformer_xl(q, k, *biases, rows, variant="conformer")
        return {"logit": found.logit, "product": found.product}

    close(layer(x, backend=backend, **options), loops(weights, x, terms, **expected))


def test_packed_sequences_and_offsets_of_items(backend, rng, weights):
    """As separate calls, with earlier states too."""
    x = rng.standard_normal((2, LENGTH, WIDTH))
    layer = layers.MultiHeadAttention(*weights, heads=HEADS, position=rp.Rotary())
    bounds = np.array([0, 2, 2, 7])
    packed = layer(x, segments=bounds, causal=True, backend=backend)
    close(packed, np.concatenate([layer(x[:, a:b], causal=True, backend=backend) for a, b in pairwise(bounds)], axis=1))
    offsets = np.array([1, 4])
    moved = layer(x[:, 4:], memory=x[:, :4], offset=offsets, causal=True, backend=backend)
    for one, item, offset in zip(moved, x, offsets.tolist(), strict=True):
        close(one, layer(item[4:], memory=item[:4], offset=offset, causal=True, backend=backend))
    cache = layers.Cache()
    layer(x[:, :3], cache=cache, causal=True, backend=backend)
    queries = np.array([0, 1, 4])
    found = layer(x[:, 3:], cache=cache, segments=(queries, np.array([0, 3, 7])), causal=True, backend=backend)
    close(found[:, :1], layer(x[:, 3:4], x[:, :3], causal=True, backend=backend))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": np.zeros(2)}, "sinks: shape"),
        ({"softcap": -1.0}, "softcap: expected a positive number"),
        ({"query_scale": np.ones(3)}, "query_scale: shape"),
        ({"segments": [0, 3]}, "segments: expected cumulative lengths"),
        ({"segments": [0, LENGTH], "return_probabilities": True}, "return_probabilities: not with segments"),
        ({"offset": np.array([0, 1]), "return_probabilities": True}, "return_probabilities: not with segments"),
        ({"scale": 1.0}, "scale: .* has no such argument"),
    ],
)
def test_what_is_refused_leaves_the_cache_as_it_was(rng, weights, options, message):
    layer, cache = layers.MultiHeadAttention(*weights, heads=HEADS), layers.Cache()
    with pytest.raises(rp.RelposError, match=message):
        layer(rng.standard_normal((2, LENGTH, WIDTH)), cache=cache, **options)
    assert len(cache) == 0


def test_relative_attention_has_no_segments(rng, weights):
    """Its rows of distances are those of one length."""
    zeros = np.zeros((HEADS, DIM))
    layer = layers.RelativeMultiHeadAttention(
        *weights, pos=weights[0][0], content_bias=zeros, position_bias=zeros, variant="conformer"
    )
    with pytest.raises(rp.RelposTypeError, match=r"segments: .* has no such argument"):
        layer(rng.standard_normal((2, LENGTH, WIDTH)), segments=[0, LENGTH])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_two_texts_that_go_on_from_one(copied, weights, rng):
    """A layer and its cache that are copied: neither text sees the other's tokens."""
    layer, cache = layers.MultiHeadAttention(*weights, heads=HEADS, position=rp.ALiBi()), layers.Cache()
    begin, first, second = (rng.standard_normal((1, n, WIDTH)) for n in (4, 3, 2))
    layer(begin, cache=cache, causal=True)
    other_layer, other_cache = copied((layer, cache))
    for decoder, kept, text in ((layer, cache, first), (other_layer, other_cache, second)):
        whole = layer(np.concatenate([begin, text], axis=1), causal=True)
        close(decoder(text, cache=kept, causal=True), whole[:, 4:])
