"""Buffers of keys and values that are filled step by step: where queries stand, and what is never read."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from tests.every import RESTARTING

CAPACITY, LENGTHS = 40, np.array([3, 40, 17])
PLACES = {
    "a causal mask": {"causal": True},
    "a window": {"window": (5, 2)},
    "a rule": {"rule": rp.Dilated(2)},
    "a scheme": {"position": rp.ALiBi()},
}


@pytest.fixture
def cache(rng):
    """Three queries of three items, in buffers whose unused rows hold NaN."""
    q, (k, v) = rng.standard_normal((3, 4, 3, 8)), rng.standard_normal((2, 3, 2, CAPACITY, 8))
    for b, n in enumerate(LENGTHS):
        k[b, :, n:] = v[b, :, n:] = np.nan
    return q, k, v


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
@pytest.mark.parametrize("lengths", [7, LENGTHS], ids=["of all", "of each"])
@pytest.mark.parametrize("place", PLACES)
def test_where_queries_stand_is_not_guessed(place, lengths, backend, cache):
    """Both remedies are named, by every function that takes lengths."""
    q, k, v = cache
    options = {**PLACES[place], "backend": backend}
    ready = rp.prepare(q, k, v, **options)
    calls = [rp.attention, lambda *x, **more: rp.attention_vjp(*x, grad_out=q, **more)]
    for call in (*calls, lambda q, k, _, **more: rp.logits(q, k, **{**more, "backend": None})):
        with pytest.raises(rp.RelposValueError, match=r'offset="end" if .* or offset=37 if'):
            call(q, k, v, key_lengths=lengths, **options)
    with pytest.raises(rp.RelposValueError, match='offset="end"'):
        ready(q, k, v, key_lengths=lengths)


@pytest.mark.parametrize(
    ("q_len", "options"), [(3, {}), (CAPACITY, {"causal": True}), (3, {"causal": True, "offset": 37})]
)
def test_calls_that_say_enough(q_len, options, rng):
    """Without positions, with as many queries as keys, or with a number, there is nothing to guess."""
    q, k = rng.standard_normal((3, 4, q_len, 8)), rng.standard_normal((3, 2, CAPACITY, 8))
    rp.attention(q, k, k, key_lengths=LENGTHS, **options)


@pytest.mark.parametrize(("name", "variant"), RESTARTING, ids=lambda x: x or "")
def test_the_end_of_the_keys_that_exist(name, variant, rng):
    """As if the buffers ended there, for every scheme that counts from a first key, gradients too."""
    e = testing.example(name, variant=variant, size="tiny", dtype="float64")
    q, k = (rng.standard_normal((3, x.shape[-3], n, x.shape[-1])) for x, n in ((e.q, 3), (e.k, CAPACITY)))
    v = rng.standard_normal((*k.shape[:-1], e.v.shape[-1]))
    for b, n in enumerate(LENGTHS):
        k[b, :, n:] = v[b, :, n:] = np.nan
    call = {"position": e.position, "causal": True}
    found = rp.attention(q, k, v, key_lengths=LENGTHS, offset="end", return_lse=True, **call)
    grads = rp.attention_vjp(q, k, v, grad_out=np.ones_like(found[0]), key_lengths=LENGTHS, offset="end", **call)
    for b, n in enumerate(LENGTHS):
        own = q[b], k[b, :, :n], v[b, :, :n]
        expected = rp.attention(*own, backend="numpy", return_lse=True, **call)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[b], y, rtol=1e-11, atol=1e-12)
        slopes = rp.attention_vjp(*own, grad_out=np.ones_like(expected[0]), backend="numpy", **call)
        for x, y in ((grads.q[b], slopes.q), (grads.k[b, :, :n], slopes.k), (grads.v[b, :, :n], slopes.v)):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)
        assert not grads.k[b, :, n:].any()


@pytest.mark.parametrize("place", PLACES)
def test_steps_of_decoding(place, cache):
    """A prepared call, one length for all items, and calls without lengths: the queries are the last that exist."""
    q, k, v = cache
    options = PLACES[place]
    ready = rp.prepare(q, k, v, offset="end", **options)
    np.testing.assert_array_equal(ready(q, k, v, key_lengths=3), rp.attention(q, k[:, :, :3], v[:, :, :3], **options))
    np.testing.assert_array_equal(ready(q, v, v), rp.attention(q, v, v, **options))
    if place != "a rule":
        found = ready(q, k, v, key_lengths=LENGTHS)
        np.testing.assert_array_equal(found, rp.attention(q, k, v, key_lengths=LENGTHS, offset="end", **options))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k: rp.attention(q, k, k, offset="start"), "expected an integer, integers or \"end\", found 'start'"),
        (lambda q, k: rp.logits(q, k, key_lengths=[1, 2, 3], offset="end"), "make a call for each batch item"),
        (lambda q, k: rp.attention(q, k, k, key_lengths=[[1], [2, 3]], offset="end"), "key_lengths"),
        (lambda q, k: rp.distributed.partial(q, k, k, offset="end"), "first query of the whole call"),
    ],
)
def test_what_is_refused(call, words, cache):
    import relpos_np.distributed  # noqa: F401

    with pytest.raises(rp.RelposError, match=words):
        call(*cache[:2])
