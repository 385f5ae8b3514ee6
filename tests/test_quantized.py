"""Keys and values of eight bits: read where they lie, or made numbers of first, with the results of these."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np._contract.quantized import LARGEST
from relpos_np.kernels._numba.simd.target import CONVERTS_HALF
from tests.sizes import KEYS

DTYPES = sorted(LARGEST)
HEADS = 4
EPS = np.finfo(np.float32).eps
POSITIONS = {
    "none": lambda rng, depth: None,
    "alibi": lambda rng, depth: rp.ALiBi(),
    "t5": lambda rng, depth: rp.T5(rng.standard_normal((32, HEADS)).astype(np.float32)),
    "rotary": lambda rng, depth: rp.Rotary(depth // 2 * 2, layout="interleaved"),
    "both": lambda rng, depth: (rp.ALiBi(), rp.Rotary(depth // 2)),
    "shaw": lambda rng, depth: rp.Shaw(rng.standard_normal((9, depth)).astype(np.float32)),
}
OPTIONS = {
    "plain": lambda rng, shape: {},
    "causal": lambda rng, shape: {"causal": True},
    "window": lambda rng, shape: {"window": 70, "softcap": 3.0},
    "mask": lambda rng, shape: {"mask": rng.random(shape) < 0.8},
    "added": lambda rng, shape: {"mask": rng.standard_normal(shape).astype(np.float32)},
    "lengths": lambda rng, shape: {"key_lengths": rng.integers(0, shape[3] + 1, shape[0]), "offset": "end"},
    "sinks": lambda rng, shape: {"sinks": np.arange(HEADS, dtype=np.float32)},
}


def dtype_of(name):
    return np.dtype(name if name == "int8" else getattr(ml_dtypes, name))


def quantized(x, name, by):
    """Codes, by "head" with a scale for all of a head."""
    if by != "head":
        return rp.quantize(x, name, by=by)
    return rp.quantize(
        x, name, scale=np.abs(x).max(axis=(-2, -1), keepdims=True, initial=1e-6) / np.float32(LARGEST[name])
    )


def of_keys(x, b, start, stop):
    """Some keys of an item; scales of channels are those of all."""
    by_token = x.scale.shape[-2] > 1
    return rp.Quantized(x.codes[b, :, start:stop], x.scale[b, :, start:stop] if by_token else x.scale[b])


def nothing_is_made_of_codes(monkeypatch):
    monkeypatch.setattr(rp.Quantized, "dequantized", lambda *_: pytest.fail("numbers were made of all codes"))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.tuples(*[st.sampled_from(["token", "channel", "head"])] * 2),
    st.sampled_from(sorted(POSITIONS)),
    st.sampled_from(sorted(OPTIONS)),
    st.sampled_from([1, 2, 3, 9]),
    st.sampled_from([*KEYS, 1, 7, 65]),
    st.sampled_from([1, 2, HEADS]),
    st.sampled_from([(64, 64), (128, 32), (8, 9), (33, 17)]),
    st.sampled_from(["float32", "float16", "bfloat16", "float64"]),
    st.integers(0, 2**32 - 1),
)
def test_results_are_those_of_the_numbers(name, by, position, option, q_len, k_len, kv_heads, dims, dtype, seed):
    """Against loops over matrices in float64, whoever reads the codes."""
    rng, depth = np.random.default_rng(seed), dims[0]
    q_len = min(q_len, k_len)
    q = rng.standard_normal((2, HEADS, q_len, depth)).astype(dtype)
    k, v = (rng.standard_normal((2, kv_heads, k_len, d), np.float32) for d in dims)
    k, v = quantized(k, name, by[0]), quantized(v, name, by[1])
    call = {"position": POSITIONS[position](rng, depth), **OPTIONS[option](rng, (2, HEADS, q_len, k_len))}
    out, lse = rp.attention(q, k, v, return_lse=True, **call)
    assert out.dtype == q.dtype
    wide = q.astype(np.float64), k.dequantized(np.float64), v.dequantized(np.float64)
    expected, sums = rp.attention(*wide, return_lse=True, backend="numpy", **call)
    # The sum of a product has `depth` roundings; scores, and with them errors of probabilities, are below 20.
    unit = 2.0**-53 if dtype == "float64" else EPS
    limit = 20 * (depth + 16) ** 0.5 * unit
    seen = np.isfinite(sums)
    np.testing.assert_allclose(lse[seen], sums[seen], rtol=limit, atol=limit)
    limit += {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0.0)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("by", ["token", "channel"])
def test_keys_in_several_parts(by, rng):
    """So many keys of a head that they are attended in parts, each with the scales of its head."""
    q = rng.standard_normal((2, HEADS, 1, 16), np.float32)
    k, v = (rng.standard_normal((2, 2, 5000, 16), np.float32) * np.float32([[[1]], [[5]]]) for _ in range(2))
    k, v = (rp.quantize(x, by=by) for x in (k, v))
    expected = rp.attention(q, k.dequantized(), v.dequantized(), backend="numpy")
    np.testing.assert_allclose(rp.attention(q, k, v), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_every_code_is_its_number(name, masked):
    """Of a single key the output is its value, to the last bit; not only what `quantize` writes."""
    codes = np.arange(256, dtype=np.uint8).view(dtype_of(name)).reshape(1, 1, 1, 256)
    v = rp.Quantized(codes, np.full((1, 1, 1, 1), 0.37, np.float32))
    k = rp.Quantized(codes[..., :8], np.ones((1, 1, 1, 8), np.float32))
    mask = np.ones((1, 1, 1, 1), np.bool_) if masked else None
    out = rp.attention(np.zeros((1, 1, 1, 8), np.float32), k, v, mask=mask)
    np.testing.assert_array_equal(out, codes.astype(np.float32) * np.float32(0.37))


@pytest.mark.parametrize("name", DTYPES)
def test_calls_that_were_met_before(name, rng):
    """Codes and scales are those of the call, by token or by channel; integers are no codes."""
    q = rng.standard_normal((2, HEADS, 1, 16)).astype(np.float32)
    for by in ("token", "token", "token", "channel", "head"):
        k, v = (quantized(x, name, by) for x in rng.standard_normal((2, 2, HEADS, 70, 16)).astype(np.float32))
        found = rp.attention(q, k, v, position=rp.ALiBi())
        expected = rp.attention(q, k.dequantized(), v.dequantized(), position=rp.ALiBi())
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(rp.RelposTypeError):
        rp.attention(q, k.codes, v.codes, position=rp.ALiBi())


@pytest.mark.parametrize("option", ["plain", "causal", "mask", "lengths"])
@pytest.mark.parametrize("position", ["none", "t5", "rotary", "both"])
@pytest.mark.parametrize("name", DTYPES if CONVERTS_HALF else ["int8"])
def test_decoding_reads_codes_where_they_lie(name, position, option, rng, monkeypatch):
    k = [quantized(rng.standard_normal((2, 2, 300, 16), np.float32), name, "token") for _ in range(2)]
    nothing_is_made_of_codes(monkeypatch)
    q = rng.standard_normal((2, HEADS, 2, 16), np.float32)
    rp.attention(q, *k, position=POSITIONS[position](rng, 16), **OPTIONS[option](rng, (2, HEADS, 2, 300)))


@pytest.mark.parametrize("name", DTYPES)
def test_unused_codes_are_never_read(name, rng):
    """Behind the last key of each item there may be anything, in its scales too."""
    q, lengths = rng.standard_normal((3, HEADS, 1, 64), np.float32), np.array([1, 200, 77])
    k, v = (rp.quantize(rng.standard_normal((3, 2, 400, 64), np.float32), name) for _ in range(2))
    call = {"position": rp.ALiBi(), "causal": True, "key_lengths": lengths, "offset": "end"}
    expected = rp.attention(q, k, v, **call)
    for x in (k, v):
        for b, n in enumerate(lengths):
            x.codes.view(np.uint8)[b, :, n:] = 0x7F
            x.scale[b, :, n:] = np.nan
    np.testing.assert_array_equal(rp.attention(q, k, v, **call), expected)


@pytest.mark.parametrize("by", ["token", "channel"])
def test_sequences_have_the_bits_of_separate_calls(by, rng):
    """By items with offsets, and by segments that share one row of keys."""
    q = rng.standard_normal((3, HEADS, 2, 64), np.float32)
    k, v = (rp.quantize(rng.standard_normal((3, 2, 400, 64), np.float32), by=by) for _ in range(2))
    lengths, position = np.array([3, 400, 211]), (rp.ALiBi(), rp.Rotary(64))
    call = {"position": position, "causal": True}
    out = rp.attention(q, k, v, key_lengths=lengths, offset="end", **call)
    for b, n in enumerate(lengths):
        own = (of_keys(x, b, 0, n) for x in (k, v))
        np.testing.assert_array_equal(out[b], rp.attention(q[b], *own, **call))
    ends = [0, 100, 101, 400]
    out = rp.attention(
        q[0, :, [0, 1, 0]].swapaxes(0, 1),
        *(of_keys(x, 0, 0, 400) for x in (k, v)),
        segments=([0, 1, 2, 3], ends),
        **call,
    )
    for n, (start, stop) in enumerate(itertools.pairwise(ends)):
        own = (of_keys(x, 0, start, stop) for x in (k, v))
        np.testing.assert_array_equal(out[:, n], rp.attention(q[0, :, [n % 2]].swapaxes(0, 1), *own, **call)[:, 0])


@pytest.mark.parametrize("options", [{}, {"backend": "terms"}, {"return_bound": True}, {"dropout": 0.3}, {"out": True}])
def test_other_calls_are_those_of_the_numbers(options, rng):
    """Bit for bit, and an output in half precision is rounded once."""
    q = rng.standard_normal((HEADS, 30, 16)).astype(np.float16)
    k, v = (rp.quantize(rng.standard_normal((HEADS, 30, 16))) for _ in range(2))
    own, more = dict(options), [{}, {}]
    if "dropout" in own:
        more = [{"rng": np.random.default_rng(0)} for _ in range(2)]
    out = np.empty_like(q) if own.pop("out", False) else None
    found = rp.attention(q, k, v, out=out, **own, **more[0])
    wide = (x.astype(np.float32) for x in (q, k.dequantized(), v.dequantized()))
    expected = rp.attention(*wide, **own, **more[1])
    if "return_bound" in own:
        np.testing.assert_array_equal(found[1], expected[1])
        found, expected = found[0], expected[0]
    assert out is None or found is out
    np.testing.assert_array_equal(found, expected.astype(np.float16))


@pytest.mark.parametrize("position", ["none", "both", "shaw"])
@pytest.mark.parametrize("by", ["token", "channel"])
@pytest.mark.parametrize("name", DTYPES)
def test_pages(name, by, position, rng):
    """Written token by token, and read where they lie or gathered."""
    lengths, table = [40, 7, 33], rng.permutation(9).reshape(3, 3)
    x = rng.standard_normal((2, 3, 2, 48, 16), np.float32)
    scale = np.abs(x).max(axis=(0, 1, 3))[None, None] / np.float32(LARGEST[name])
    pages = [rp.Quantized(np.zeros((9, 16, 2, 16), dtype_of(name)), scale)] * 2
    new = {"scale": scale.swapaxes(1, 2)}
    if by == "token":
        pages, new = [rp.Quantized(p.codes.copy(), np.ones((9, 16, 2, 1), np.float32)) for p in pages], {}
    else:
        pages = [rp.Quantized(p.codes.copy(), scale) for p in pages]
    codes = [rp.quantize(own, name, **new) for own in x]
    for own, target in zip(codes, pages, strict=True):
        rp.write_pages(own, target, block_table=table, positions=[0, 0, 0])
    q = rng.standard_normal((3, HEADS, 1, 16), np.float32)
    call = {"position": POSITIONS[position](rng, 16), "causal": True}
    out = rp.paged_attention(q, *pages, block_table=table, key_lengths=lengths, **call)
    wide = (q, *(own.dequantized() for own in codes))
    expected = rp.attention(*wide, key_lengths=lengths, offset="end", backend="numpy", **call)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(40, 16, 2, 1), (40, 1, 2, 1), (40, 16, 1, 1), (1, 16, 2, 1), (40, 1, 1, 1), (1, 1, 2, 1)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ">f8"])
@pytest.mark.parametrize("name", DTYPES)
def test_scales_that_pages_heads_or_keys_share(shape, dtype, name, rng):
    """And those that do not lie in the order of pages."""
    codes = rng.integers(-90, 90, (2, 40, 16, 2, 16)).astype(np.int8).astype(dtype_of(name))
    scale = ((rng.random((2, *shape)) + 0.1) / 90).astype(dtype)
    q, table = rng.standard_normal((3, HEADS, 1, 16), np.float32), rng.permutation(40)[:39].reshape(3, 13)
    call = {"block_table": table, "key_lengths": [204, 7, 33], "position": rp.ALiBi()}
    expected = rp.paged_attention(q, *(c * s.astype(np.float32) for c, s in zip(codes, scale, strict=True)), **call)
    for order in ("C", "F"):
        pages = [rp.Quantized(c, s.copy(order)) for c, s in zip(codes, scale, strict=True)]
        for _ in range(5):
            np.testing.assert_allclose(rp.paged_attention(q, *pages, **call), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("scale", "by"), [((1, 1, 1, 8), "token"), ((2, 4, 1, 1), "channel")])
def test_new_tokens_must_have_the_scales_of_pages(scale, by, rng):
    pages = rp.Quantized(np.zeros((2, 4, 1, 8), np.int8), np.ones(scale, np.float32))
    x = rp.quantize(rng.standard_normal((1, 1, 2, 8)), by=by)
    with pytest.raises(rp.RelposValueError, match="quantize new tokens with the scales of the pages"):
        rp.write_pages(x, pages, block_table=[[0]], positions=[0])
    assert not pages.codes.any()


@pytest.mark.parametrize("by", ["token", "channel"])
@pytest.mark.parametrize("name", DTYPES)
def test_rounding_to_codes(name, by, rng):
    x = rng.standard_normal((3, 50, 20)) * 10.0 ** rng.integers(-9, 9, (3, 50, 1))
    x[0, 4] = x[0, :, 3] = 0
    codes = rp.quantize(x, name, by=by)
    found = codes.dequantized(np.float64)
    scale = np.broadcast_to(codes.scale, x.shape)
    relative = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[name]
    # Half a step: of all integers, or of the smallest numbers of a format.
    step = {"int8": 1.0, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}[name]
    assert (np.abs(found - x) <= np.maximum(relative * np.abs(x), step / 2 * scale) * (1 + 4 * EPS)).all()
    again = rp.quantize(found, name, scale=codes.scale)
    np.testing.assert_array_equal(again.codes, codes.codes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: rp.Quantized(x.astype(np.int16), x), "codes: expected dtype int8"),
        (lambda x: rp.Quantized([1], x), "codes: expected a NumPy array, found list"),
        (lambda x: rp.Quantized(x.astype(np.int8), x.astype(np.int8)), "scale: expected float16, float32 or float64"),
        (lambda x: rp.Quantized(x.astype(np.int8), x[:2]), r"scale: shape \(2, 4\) does not broadcast to \(3, 4\)"),
        (lambda x: rp.quantize(x.astype(np.int8)), "x: expected an array of floating-point numbers"),
        (lambda x: rp.quantize(x / 0), "x: expected finite numbers"),
        (lambda x: rp.quantize(x, "int4"), "dtype: expected one of int8"),
        (lambda x: rp.quantize(x, by="head"), "by: expected 'token' or 'channel'"),
        (lambda x: rp.quantize(x, scale=-x), "scale: expected an array of positive numbers"),
        (lambda x: rp.quantize(x * 1e300), "x: expected numbers that float32 can hold"),
        (lambda x: rp.logits(x, rp.quantize(x)), r"k: expected an array, found codes; pass k.dequantized\(\)"),
        (lambda x: rp.attention(x, rp.quantize(x[:, :3]), x), "k: head_dim 3 differs from q's 4"),
        (lambda x: rp.attention(x, rp.quantize(x), rp.quantize(x), out=x[:2]), r"out: expected shape \(3, 4\)"),
        (
            lambda x: rp.attention(
                x.astype("float16"), rp.quantize(x), rp.quantize(x), out=np.empty((4, 4), "float16")
            ),
            r"out: expected shape \(3, 4\), found \(4, 4\)",
        ),
        (lambda x: rp.quantize(x).dequantized("int8"), "dtype: expected float32 or float64"),
    ],
)
def test_what_is_refused(make, words):
    with np.errstate(divide="ignore"), pytest.raises(rp.RelposError, match=words):
        make(np.arange(1.0, 13.0).reshape(3, 4))


def test_numbers_of_codes_count_as_memory(rng):
    x = rp.quantize(rng.standard_normal((2, 4000, 64)))
    with rp.memory_limit(1 << 20), pytest.raises(rp.RelposMemoryError, match="numbers of codes"):
        rp.attention(np.zeros((2, 1, 64), np.float32), x, x)
