"""Whole modules: against loops written here, decoded token by token, with published names, and with bad input."""

import math

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests import compare, naive

TOLERANCE = 1e-12
WIDTH, HEADS, DIM = 12, 3, 4


# ---------------------------------------------------------------------------------------------- loops


def loops(parts, x, context, heads, terms=lambda q, k: {}, *, kv_heads=None, **limits):
    """One batch item: parts are (weight, bias) of q, k, v and out; terms(q, k) are what `naive.attention` takes."""
    kv_heads = kv_heads or heads
    operands = zip((x, context, context), parts[:3], (heads, kv_heads, kv_heads), strict=True)
    q, k, v = (naive.projected(rows, *part, count) for rows, part, count in operands)
    allowed = naive.allowed(len(x), len(context), **limits)
    z = naive.attention(q, k, v, **terms(q, k), allowed=allowed)[0]
    return naive.projected(np.concatenate(list(z[0]), axis=-1), *parts[3])[0, 0]


def parts_of(rng, *, width=WIDTH, context=WIDTH, heads=HEADS, kv_heads=HEADS, dim=DIM, v_dim=DIM, out=WIDTH):
    shapes = ((heads * dim, width), (kv_heads * dim, context), (kv_heads * v_dim, context), (out, heads * v_dim))
    return [(rng.standard_normal(s) / math.sqrt(s[1]), rng.standard_normal(s[0])) for s in shapes]


def close(got, expected, tolerance=TOLERANCE):
    compare.close(got, expected, tolerance)


# ---------------------------------------------------------------------------------------------- multi-head


def test_self_attention_with_the_positions_of_several_schemes(backend, rng):
    parts, x = parts_of(rng), rng.standard_normal((2, 6, WIDTH))
    key_table, value_table = rng.standard_normal((2, 5, DIM))
    slopes = np.array([0.5, 0.25, 0.125])
    layer = layers.MultiHeadAttention(*parts, heads=HEADS, position=(rp.Shaw(key_table), rp.ALiBi(slopes)), scale=0.7)

    def terms(q, k):
        vectors, _ = naive.shaw(q, 6, key_table, None, scale=0.7)
        return {"scale": 0.7, "logit": naive.add(vectors, naive.alibi(6, 6, HEADS, slopes=slopes))}

    close(layer(x, backend=backend), [loops(parts, item, item, HEADS, terms) for item in x])

    # Value vectors, one item at a time without a batch axis, and only what is not later.
    layer = layers.MultiHeadAttention(*parts, heads=HEADS, position=rp.Shaw(None, value_table))
    expected = loops(
        parts, x[0], x[0], HEADS, lambda q, k: {"value": naive.shaw(q, 6, None, value_table)[1]}, causal=True
    )
    close(layer(x[0], causal=True, backend=backend), expected)


def test_cross_attention_with_grouped_heads_and_other_widths(backend, rng):
    parts = parts_of(rng, context=7, heads=4, kv_heads=2, v_dim=5, out=9)
    x, context = rng.standard_normal((2, 3, WIDTH)), rng.standard_normal((2, 5, 7))
    layer = layers.MultiHeadAttention(*parts, heads=4)
    assert layer.kv_heads == 2
    mask = rng.random((2, 1, 3, 5)) < 0.6
    mask[..., 0] = True
    expected = [loops(parts, a, c, 4, kv_heads=2, mask=m) for a, c, m in zip(x, context, mask, strict=True)]
    close(layer(x, context, mask=mask, backend=backend), expected)
    close(layer(x, layer.project(context), mask=mask, backend=backend), expected)
    # What was projected in another precision is attended in that of the queries.
    half = layer.project(context.astype(np.float16))
    assert layer(x, half, backend=backend).dtype == x.dtype
    widened = layers.Cache()
    widened.key, widened.value = half.key.astype(x.dtype), half.value.astype(x.dtype)
    close(layer(x, half, backend=backend), layer(x, widened, backend=backend), 0)
    # Values of other states.
    others = rng.standard_normal((2, 5, 7))
    got = layer(x, context, values=others, backend=backend)
    again = layers.MultiHeadAttention(parts[0], parts[1], parts[2], parts[3], heads=4)
    mixed = layers.Cache()
    mixed.key, mixed.value = again.project(context).key, again.project(others).value
    close(got, layer(x, mixed, backend=backend), 0)
    assert np.abs(got - layer(x, context, backend=backend)).max() > 0.01


def test_without_biases_and_without_an_output_projection(backend, rng):
    parts, x = parts_of(rng), rng.standard_normal((5, WIDTH))
    weights = [weight for weight, _ in parts[:3]]
    layer = layers.MultiHeadAttention(*weights, heads=HEADS)
    zero = [(weight, np.zeros(len(weight))) for weight in weights]
    expected = loops([*zero, (np.eye(WIDTH), np.zeros(WIDTH))], x, x, HEADS)
    close(layer(x, backend=backend), expected)


SCHEMES = {
    "plain": lambda rng: None,
    "t5": lambda rng: rp.T5(rng.standard_normal((8, HEADS)), bidirectional=False, max_distance=10),
    "shaw": lambda rng: rp.Shaw(*rng.standard_normal((2, 7, DIM))),
    "rotary": lambda rng: rp.Rotary(),
    "alibi": lambda rng: rp.ALiBi(form="key"),
}


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_decoding_in_steps_is_the_whole_pass(backend, rng, name):
    layer = layers.MultiHeadAttention(*parts_of(rng), heads=HEADS, position=SCHEMES[name](rng))
    x = rng.standard_normal((2, 11, WIDTH))
    whole = layer(x, causal=True, backend=backend)
    for cuts in ([1] * 11, [4, 1, 6]):
        cache, at, steps = layers.Cache(), 0, []
        for length in cuts:
            steps.append(layer(x[:, at : at + length], cache=cache, causal=True, backend=backend))
            at += length
            assert len(cache) == at
        close(np.concatenate(steps, axis=1), whole)
    # Hidden states instead of projections, and a mask that counts them.
    mask = np.tril(np.ones((4, 11), bool), 7)
    close(layer(x[:, 7:], memory=x[:, :7], mask=mask, backend=backend), whole[:, 7:])


def test_probabilities_are_those_of_the_output(backend, rng):
    parts, x = parts_of(rng), rng.standard_normal((2, 6, WIDTH))
    layer = layers.MultiHeadAttention(*parts, heads=HEADS, position=rp.T5(rng.standard_normal((32, HEADS))))
    out, p = layer(x, key_lengths=np.array([6, 4]), backend=backend, return_probabilities=True)
    assert p.shape == (2, HEADS, 6, 6)
    close(p.sum(axis=-1), np.ones((2, HEADS, 6)))
    assert not p[1, ..., 4:].any()
    v = (x @ parts[2][0].T + parts[2][1]).reshape(2, 6, HEADS, DIM).swapaxes(1, 2)
    close(out, (p @ v).swapaxes(1, 2).reshape(2, 6, WIDTH) @ parts[3][0].T + parts[3][1])


def test_dropout_is_repeatable_and_drops_probabilities(rng):
    parts, x = parts_of(rng), rng.standard_normal((1, 40, WIDTH))
    weights = [weight for weight, _ in parts]
    layer = layers.MultiHeadAttention(*weights[:3], heads=HEADS)
    made = [layer(x, dropout=0.4, rng=np.random.default_rng(5), backend=name) for name in rp.backend.HOST_BACKENDS]
    for other in made[1:]:
        close(other, made[0])
    keep = np.random.default_rng(5).random((1, HEADS, 40, 40)) >= 0.4
    p = layer(x, backend="numpy", return_probabilities=True)[1]
    v = (x @ weights[2].T).reshape(1, 40, HEADS, DIM).swapaxes(1, 2)
    close(made[0], (np.where(keep, p / 0.6, 0) @ v).swapaxes(1, 2).reshape(1, 40, WIDTH))
    # The probabilities returned are those before dropout.
    again = layer(x, dropout=0.4, rng=np.random.default_rng(5), backend="numpy", return_probabilities=True)
    close(again[0], made[0], 0)
    close(again[1], p, 0)


def test_dtypes(backend, rng):
    parts, x = parts_of(rng), rng.standard_normal((2, 6, WIDTH))
    layer = layers.MultiHeadAttention(*parts, heads=HEADS, position=rp.ALiBi())
    exact = layer(x, backend="numpy")
    single = layer(x.astype(np.float32), backend=backend)
    assert single.dtype == np.float32
    close(single, exact, 100 * np.finfo(np.float32).eps)
    half = x.astype(np.float16)
    for given in (half, half.astype(ml_dtypes_bfloat16())):
        got = layer(given, backend=backend)
        assert got.dtype == given.dtype
        wide = layer(given.astype(np.float32), backend=backend)
        np.testing.assert_array_equal(got, wide.astype(given.dtype))  # rounded once, at the end
    # Weights of half precision are widened, not rounded further.
    rounded = [tuple(part.astype(np.float16) for part in pair) for pair in parts]
    widened = [tuple(part.astype(np.float64) for part in pair) for pair in rounded]
    close(
        layers.MultiHeadAttention(*rounded, heads=HEADS)(x, backend=backend),
        layers.MultiHeadAttention(*widened, heads=HEADS)(x, backend=backend),
    )


def ml_dtypes_bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def test_excluded_states_may_hold_nan(backend, rng):
    parts, x = parts_of(rng), rng.standard_normal((2, 6, WIDTH))
    layer = layers.MultiHeadAttention(*parts, heads=HEADS)
    context = x.copy()
    context[1, 4:] = np.nan
    context[0, 5] = np.inf
    lengths = np.array([5, 4])
    got = layer(x, context, key_lengths=lengths, backend=backend)
    close(got, layer(x, x, key_lengths=lengths, backend=backend), 0)


def test_no_state_is_attended_or_asks(backend, rng):
    layer = layers.MultiHeadAttention(*parts_of(rng), heads=HEADS)
    x = rng.standard_normal((2, 3, WIDTH))
    bias = layer.out.bias
    close(layer(x, x[:, :0], backend=backend), np.broadcast_to(bias, (2, 3, WIDTH)), 0)
    assert layer(x[:, :0], x, backend=backend).shape == (2, 0, WIDTH)
    assert layer(x[:0], backend=backend).shape == (0, 3, WIDTH)


# ---------------------------------------------------------------------------------------------- relative sinusoids


def relative_parts(rng):
    pos = rng.standard_normal((HEADS * DIM, WIDTH)) / math.sqrt(WIDTH)
    u, v = rng.standard_normal((2, HEADS, DIM))
    return parts_of(rng), pos, u, v


def relative_layer(given, *, variant="transformer_xl", zero_triu=False, **encoding):
    """The module with the options of its encoding."""
    parts, pos, u, v = given
    encoding = layers.RelativePositionalEncoding(WIDTH, variant=variant, **encoding)
    options = {"variant": variant, "encoding": encoding, "zero_triu": zero_triu}
    return layers.RelativeMultiHeadAttention(*parts, pos=pos, content_bias=u, position_bias=v, **options)


def relative_loops(given, x, context, variant, *, causal=False, clamp=10**9, max_len=0, triu=False):
    """The rows of distances that each variant has, and the papers' shift of their products."""
    parts, pos, u, v = given
    queries, keys = len(x), len(context)
    # ESPnet's first rows are those of the longest text so far, whatever the length of this one.
    last = (max(max_len, keys) if variant == "espnet_legacy" else keys) - 1
    distances = {
        "conformer": range(last, -queries, -1),
        "xlnet": range(last + 1, -queries, -1),
        "xlnet_uni": range(last + 1, -1, -1),
        "wenet": range(keys),
    }.get(variant, range(last, last - keys, -1))
    layout = "concatenated" if variant in ("transformer_xl", "xlnet", "xlnet_uni") else "interleaved"
    encoded = naive.sinusoidal([max(-clamp, min(clamp, d)) for d in distances], WIDTH, layout=layout)
    rows = naive.projected(encoded, pos, heads=HEADS)[0].swapaxes(0, 1)

    def terms(q, k):
        found = naive.transformer_xl(q, k, u, v, rows, variant=variant, zero_triu=triu)
        return {"logit": found.logit, "product": found.product}

    return loops(parts, x, context, HEADS, terms, causal=causal)


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("variant", ["transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet"])
def test_relative_attention(backend, rng, variant, memory):
    given = relative_parts(rng)
    layer = relative_layer(given, variant=variant, max_len=9)
    x = rng.standard_normal((2, 5 + memory, WIDTH))
    causal = variant == "transformer_xl"
    expected = [relative_loops(given, item[memory:], item, variant, causal=causal, max_len=9) for item in x]
    before = x[:, :memory] if memory else None
    got = layer(x[:, memory:], memory=before, causal=causal, backend=backend)
    close(got, expected)
    close(layer(x[:, memory:], x, causal=causal, backend=backend), expected)
    # Encodings that are given are used.
    pos_emb = layer.encoding.encode(5, 5 + memory)
    close(layer(x[:, memory:], x, pos_emb=pos_emb[None], causal=causal, backend=backend), got, 0)
    other = layer(x[:, memory:], x, pos_emb=pos_emb[::-1], causal=causal, backend=backend)
    assert np.abs(other - got).max() > 1e-3


@pytest.mark.parametrize("variant", ["conformer", "espnet_legacy"])
def test_relative_attention_without_terms_above_the_diagonal(backend, rng, variant):
    given = relative_parts(rng)
    layer = relative_layer(given, variant=variant, max_len=7, zero_triu=True)
    x = rng.standard_normal((7, WIDTH))
    expected = relative_loops(given, x[2:], x, variant, max_len=7, triu=True)
    close(layer(x[2:], memory=x[:2], backend=backend), expected)


@pytest.mark.parametrize("variant", ["transformer_xl", "xlnet", "xlnet_uni"])
def test_clamped_distances(backend, rng, variant):
    given = relative_parts(rng)
    layer = relative_layer(given, variant=variant, clamp_len=2)
    x = rng.standard_normal((6, WIDTH))
    expected = relative_loops(given, x, x, variant, causal=True, clamp=2)
    close(layer(x, causal=True, backend=backend), expected)
    if variant == "xlnet":
        close(layer(x, backend=backend), relative_loops(given, x, x, variant, clamp=2))


@pytest.mark.parametrize("variant", ["transformer_xl", "conformer", "xlnet", "xlnet_uni", "wenet"])
def test_relative_decoding_in_steps_is_the_whole_pass(backend, rng, variant):
    parts, pos, u, v = relative_parts(rng)
    layer = layers.RelativeMultiHeadAttention(*parts, pos=pos, content_bias=u, position_bias=v, variant=variant)
    x = rng.standard_normal((2, 9, WIDTH))
    whole = layer(x, causal=True, backend=backend)
    cache = layers.Cache()
    steps = [layer(x[:, t : t + 1], cache=cache, causal=True, backend=backend) for t in range(9)]
    close(np.concatenate(steps, axis=1), whole)
    close(layer(x[:, 4:], memory=x[:, :4], causal=True, backend=backend), whole[:, 4:])
    p = layer(x, causal=True, backend=backend, return_probabilities=True)[1]
    assert not np.triu(p, 1).any()


# ---------------------------------------------------------------------------------------------- encodings


def test_positional_encoding(rng):
    x = rng.standard_normal((2, 5, 8))
    expected = [naive.sinusoidal(range(3, 8), 8)]
    close(layers.PositionalEncoding(8)(x, 3), x + expected)
    close(layers.PositionalEncoding(8, scaled=True)(x, 3), x * math.sqrt(8) + expected)
    close(layers.PositionalEncoding(8, alpha=np.array([0.5]))(x, 3), x + 0.5 * np.array(expected))
    table = rng.standard_normal((8, 8))
    learned = layers.PositionalEncoding(rp.LearnedAbsolute(table), scaled=True)
    close(learned(x, 3), x * math.sqrt(8) + table[3:])
    half = learned(x.astype(np.float16), 3)
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, learned(x.astype(np.float16).astype(np.float32), 3).astype(np.float16))
    dropped = learned(x, 3, dropout=0.5, rng=np.random.default_rng(1))
    keep = np.random.default_rng(1).random(x.shape) >= 0.5
    close(dropped, np.where(keep, 2 * learned(x, 3), 0))
    with pytest.raises(rp.RelposIndexError):
        learned(x, 4)


def test_relative_positional_encoding(rng):
    x = rng.standard_normal((2, 3, 8))
    encoding = layers.RelativePositionalEncoding(8, scaled=True)
    scaled, pos_emb = encoding(x, 2)
    close(scaled, x * math.sqrt(8))
    close(pos_emb, [naive.sinusoidal(range(4, -3, -1), 8)])
    dropped, pos_dropped = encoding(x, 2, dropout=0.25, rng=np.random.default_rng(1))
    generator = np.random.default_rng(1)
    close(dropped, np.where(generator.random(x.shape) >= 0.25, scaled / 0.75, 0))
    close(pos_dropped, np.where(generator.random(pos_emb.shape) >= 0.25, pos_emb / 0.75, 0))
    single, _ = layers.RelativePositionalEncoding(8)(x)
    close(single, x, 0)
    assert single is not x
    assert single.base is not x


# ---------------------------------------------------------------------------------------------- published names


def test_tables_of_learned_positions(rng):
    """Some tables begin with two rows that belong to no position."""
    table, x = rng.standard_normal((9, 8)), rng.standard_normal((3, 8))
    names = {"bert": "embeddings.position_embeddings", "gpt2": "wpe", "bart": "embed_positions"}
    names["roberta"] = names["bert"]
    for publisher, name in names.items():
        encoding = layers.PositionalEncoding.from_state_dict(
            {f"model.{name}.weight": table}, prefix="model", format=publisher
        )
        first = 2 if publisher in ("roberta", "bart") else 0
        close(encoding(x, 1), x + table[first + 1 : first + 4], 0)


def test_authors_transformer_xl_names(backend, rng):
    """qkv_net holds q, k and v; the biases are the layer's own, or shared by all in the model."""
    parts, pos, u, v = relative_parts(rng)
    zero = [(weight, np.zeros(len(weight))) for weight, _ in parts]
    state = {
        "layers.1.dec_attn.qkv_net.weight": np.concatenate([weight for weight, _ in parts[:3]]),
        "layers.1.dec_attn.o_net.weight": parts[3][0],
        "layers.1.dec_attn.r_net.weight": pos,
        "r_w_bias": u,
        "r_r_bias": v,
    }
    x = rng.standard_normal((6, WIDTH))
    expected = relative_loops((zero, pos, u, v), x[2:], x, "transformer_xl", causal=True)
    read = layers.RelativeMultiHeadAttention.from_state_dict
    options = {"prefix": "layers.1.dec_attn", "format": "transformer_xl"}
    close(read(state, **options)(x[2:], memory=x[:2], causal=True, backend=backend), expected)
    state["layers.1.dec_attn.r_w_bias"] = u + 1.0
    state["layers.1.dec_attn.r_r_bias"] = v - 1.0
    expected = relative_loops((zero, pos, u + 1.0, v - 1.0), x[2:], x, "transformer_xl", causal=True)
    close(read(state, **options)(x[2:], memory=x[:2], causal=True, backend=backend), expected)


def test_espnet_names(backend, rng):
    """Rows that count down from `max_len`, which no tensor shows."""
    parts, pos, u, v = relative_parts(rng)
    names = [f"linear_{part}" for part in ("q", "k", "v", "out")]
    state = {f"{name}.weight": part[0] for name, part in zip(names, parts, strict=True)}
    state |= {f"{name}.bias": part[1] for name, part in zip(names, parts, strict=True)}
    state |= {"linear_pos.weight": pos, "pos_bias_u": u, "pos_bias_v": v}
    x = rng.standard_normal((5, WIDTH))
    for most in (5, 9):
        layer = layers.RelativeMultiHeadAttention.from_state_dict(state, format="espnet_legacy", max_len=most)
        expected = relative_loops((parts, pos, u, v), x, x, "espnet_legacy", max_len=most)
        close(layer(x, backend=backend), expected)


def test_xlnet_names(backend, rng):
    """Tensors (d_model, heads, dim): axis 0 is the input of q, k, v, r and the output of o."""
    parts, pos, u, v = relative_parts(rng)
    state = {
        name: weight.T.reshape(WIDTH, HEADS, DIM)
        for name, weight in zip("qkvr", [weight for weight, _ in parts[:3]] + [pos], strict=True)
    }
    state |= {"o": parts[3][0].reshape(WIDTH, HEADS, DIM), "r_w_bias": u, "r_r_bias": v}
    layer = layers.RelativeMultiHeadAttention.from_state_dict(state, format="xlnet")
    zero = [(weight, np.zeros(len(weight))) for weight, _ in parts]
    x = rng.standard_normal((5, WIDTH))
    close(layer(x, backend=backend), relative_loops((zero, pos, u, v), x, x, "xlnet"))
    state["o"] = parts[3][0]
    with pytest.raises(rp.RelposValueError, match=r"o: expected \(d_model, heads, head_dim\), found shape \(12, 12\)"):
        layers.RelativeMultiHeadAttention.from_state_dict(state, format="xlnet")


def t5_state(rng, *names, heads=2):
    state = {f"{name}.{part}.weight": rng.standard_normal((8, 8)) for name in names for part in "qkvo"}
    return state | {f"{names[0]}.relative_attention_bias.weight": rng.standard_normal((32, heads))}


def test_t5_names(rng):
    first, second, cross = (
        f"decoder.block.{name}"
        for name in ("0.layer.0.SelfAttention", "1.layer.0.SelfAttention", "1.layer.1.EncDecAttention")
    )
    state = t5_state(rng, first, second, cross)
    table = state[f"{first}.relative_attention_bias.weight"]
    read = layers.MultiHeadAttention.from_state_dict
    for prefix in (first, second, second + "."):
        layer = read(state, prefix=prefix, format="t5", max_distance=64)
        assert (layer.heads, layer.scale) == (2, 1.0)
        assert not layer.position.bidirectional
        assert (layer.position.max_distance, layer.position.rounding) == (64, "float32")
        np.testing.assert_array_equal(layer.position.table, table)
        np.testing.assert_array_equal(layer.query.weight, state[prefix.rstrip(".") + ".q.weight"])
    assert read(state, prefix=second, format="t5", bidirectional=True).position.bidirectional
    # A word that only holds that one names no decoder.
    outside = {f"no{name}": x for name, x in state.items()}
    assert read(outside, prefix=f"no{second}", format="t5").position.bidirectional
    assert read(state, prefix=cross, format="t5", heads=2).position is None
    assert read(state, prefix=second, format="t5", position=(), heads=4).position == ()
    with pytest.raises(rp.RelposValueError, match=r"heads: the table of positions \(32, 2\) is for 2, found 4"):
        read(state, prefix=first, format="t5", heads=4)
    with pytest.raises(rp.RelposValueError, match="heads: nothing in the source shows their number"):
        read(state, prefix=cross, format="t5")
    del state[f"{first}.relative_attention_bias.weight"]
    with pytest.raises(rp.RelposValueError, match=r"no such tensor, here or above; pass position=.*nearest: decoder"):
        read(state, prefix=second, format="t5")


def test_mpnet_names(backend, rng):
    state = {f"{name}.weight": rng.standard_normal((8, 8)) for name in ("q", "k", "v", "o")}
    state["relative_attention_bias.weight"] = rng.standard_normal((32, 2))
    layer = layers.MultiHeadAttention.from_state_dict(state, format="mpnet")
    assert (layer.heads, layer.scale) == (2, None)
    x = rng.standard_normal((2, 5, 8))
    q, k, v = ((x @ state[f"{n}.weight"].T).reshape(2, 5, 2, 4).swapaxes(1, 2) for n in "qkv")
    z = rp.attention(q, k, v, position=rp.T5(state["relative_attention_bias.weight"]), backend="numpy")
    expected = z.swapaxes(1, 2).reshape(2, 5, 8) @ state["o.weight"].T
    np.testing.assert_allclose(layer(x, backend=backend), expected, rtol=0, atol=1e-12)


def test_wav2vec2_bert_names(rng):
    names = ("linear_q", "linear_k", "linear_v", "linear_out")
    state = {f"{name}.weight": rng.standard_normal((8, 8)) for name in names}
    state["distance_embedding.weight"] = rng.standard_normal((7, 4))
    read = layers.MultiHeadAttention.from_state_dict
    layer = read(state, format="wav2vec2_bert", left=4, right=2)
    assert layer.heads == 2
    np.testing.assert_array_equal(layer.position.key_table, state["distance_embedding.weight"])
    with pytest.raises(rp.RelposValueError, match=r"left: 64 \+ 8 \+ 1 = 73 rows expected, found \(7, 4\)"):
        read(state, format="wav2vec2_bert", left=64, right=8)


# ---------------------------------------------------------------------------------------------- bad input

SQUARE = np.ones((8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, r"heads: 3 do not divide the 8 outputs of query.weight \(8, 8\)"),
        ({"heads": 0}, "heads: expected at least 1, found 0"),
        ({"query": np.ones(8)}, r"query.weight: expected shape \(out, in\), found \(8,\)"),
        ({"query": (SQUARE, np.ones(7))}, r"query.bias: expected \(8,\) as the weight \(8, 8\) has outputs"),
        ({"query": (SQUARE,)}, r"query: expected \(weight, bias\), found 1 entries"),
        ({"query": SQUARE.tolist()}, "query.weight: expected a NumPy array, found list"),
        ({"query": SQUARE.astype(int)}, "query.weight: expected dtype"),
        ({"key": np.ones((6, 8))}, r"key.weight: expected 4 outputs for each of 2 heads.*\(6, 8\)"),
        ({"value": np.ones((7, 8))}, r"value.weight: expected as many outputs for each of 2 heads.*\(7, 8\)"),
        ({"out": np.ones((8, 9))}, r"out.weight: expected 8 inputs, the heads side by side, found shape \(8, 9\)"),
        ({"position": np.ones((32, 2))}, "position: expected schemes such as relpos_np.T5, found ndarray"),
        ({"position": (rp.Plain(), 3)}, "position: expected schemes such as relpos_np.T5, found Plain, int"),
        ({"scale": math.nan}, "scale: expected a finite number"),
    ],
)
def test_bad_weights(change, message):
    given = {"query": SQUARE, "key": SQUARE, "value": SQUARE, "out": SQUARE, "heads": 2} | change
    with pytest.raises(rp.RelposError, match=message):
        layers.MultiHeadAttention(**given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"content_bias": np.ones((2, 3))},
            r"content_bias: expected \(2, 4\) from content_bias and query.weight \(8, 8\), found \(2, 3\)",
        ),
        ({"position_bias": np.ones((1, 4))}, r"position_bias: expected \(2, 4\)"),
        ({"content_bias": np.ones(8)}, r"content_bias: expected shape \(heads, head_dim\), found \(8,\)"),
        ({"pos": np.ones((6, 8))}, r"pos.weight: expected 8 outputs as the queries have, found shape \(6, 8\)"),
        ({"variant": "shift"}, "variant: expected one of 'transformer_xl'"),
        ({"encoding": layers.RelativePositionalEncoding(8, variant="xlnet")}, "encoding: expected variant 'conformer'"),
        ({"encoding": layers.RelativePositionalEncoding(6)}, r"encoding: expected 8 dimensions as pos.weight \(8, 8\)"),
        ({"variant": "wenet", "zero_triu": True}, "zero_triu: variant 'wenet' has no positions"),
        ({"zero_triu": 1}, "zero_triu: expected True or False, found 1"),
    ],
)
def test_bad_relative_weights(change, message):
    given = {"query": SQUARE, "key": SQUARE, "value": SQUARE, "out": SQUARE, "pos": SQUARE}
    given |= {"content_bias": np.ones((2, 4)), "position_bias": np.ones((2, 4)), "variant": "conformer"} | change
    with pytest.raises(rp.RelposError, match=message):
        layers.RelativeMultiHeadAttention(**given)


X = np.ones((2, 3, 8))
FILLED = layers.MultiHeadAttention(SQUARE, SQUARE, SQUARE, heads=2).project(X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": np.ones((2, 3, 7))}, r"x: expected shape \(..., L, 8\), as the weights take, found \(2, 3, 7\)"),
        ({"x": np.ones(8)}, r"x: expected shape \(..., L, 8\)"),
        ({"x": X.tolist()}, "x: expected a NumPy array, found list"),
        ({"x": X, "context": np.ones((2, 3, 7))}, r"context: expected shape \(..., L, 8\)"),
        ({"x": X, "context": layers.Cache()}, "context: the cache is empty"),
        ({"x": X, "context": FILLED, "values": X}, "context: with a cache neither values, memory nor cache"),
        ({"x": X, "context": FILLED, "memory": X}, "context: with a cache neither values, memory nor cache"),
        ({"x": X, "memory": np.ones((1, 3, 8))}, r"memory: expected batch axes \(2,\)"),
        ({"x": X, "memory": X, "values": X}, "memory: cannot precede values"),
        ({"x": X, "values": np.ones((2, 4, 8))}, r"values: expected \(2, 3\) before the last axis, found \(2, 4, 8\)"),
        ({"x": X, "cache": 3}, "cache: expected a relpos_np.layers.Cache, found int"),
        ({"x": X, "cache": layers.Cache(), "memory": X}, "cache: it is for self-attention without memory"),
        ({"x": X, "cache": layers.Cache(), "context": X}, "cache: it is for self-attention without memory"),
        ({"x": X, "dropout": 0.5}, "rng: dropout needs"),
        ({"x": X, "mask": np.ones((4, 4), bool)}, "mask: shape"),
        ({"x": X, "backend": "metal"}, "backend: expected one of"),
        ({"x": X, "return_probabilities": 1}, "return_probabilities: expected True or False"),
    ],
)
def test_bad_calls(call, message):
    layer = layers.MultiHeadAttention(SQUARE, SQUARE, SQUARE, heads=2)
    with pytest.raises(rp.RelposError, match=message):
        layer(**call)


def test_states_of_other_widths_must_be_given():
    wide = np.ones((8, 6))
    layer = layers.MultiHeadAttention(SQUARE, wide, SQUARE, heads=2)
    with pytest.raises(rp.RelposValueError, match=r"context: key.weight \(8, 6\) takes other states than query.weight"):
        layer(X)
    with pytest.raises(rp.RelposValueError, match=r"values: value.weight \(8, 8\) takes others than key.weight"):
        layer(X, context=np.ones((2, 5, 6)))
    assert layer(X, context=np.ones((2, 5, 6)), values=np.ones((2, 5, 8))).shape == X.shape


def test_bad_calls_of_relative_attention_and_encodings():
    biases = {"content_bias": np.ones((2, 4)), "position_bias": np.ones((2, 4))}
    layer = layers.RelativeMultiHeadAttention(SQUARE, SQUARE, SQUARE, pos=SQUARE, **biases, variant="conformer")
    with pytest.raises(rp.RelposValueError, match=r"pos_emb: expected \(5, 8\) for variant 'conformer' with L_q = 3"):
        layer(X, pos_emb=np.ones((1, 6, 8)))
    with pytest.raises(rp.RelposTypeError, match="encoding: expected a number of dimensions or an encoding"):
        layers.PositionalEncoding(rp.Plain())
    with pytest.raises(rp.RelposTypeError, match="alpha: expected a real number"):
        layers.PositionalEncoding(8, alpha=np.ones(2))
    with pytest.raises(rp.RelposValueError, match="dim: variant 'xlnet' needs an even number"):
        layers.RelativePositionalEncoding(7, variant="xlnet")
    with pytest.raises(rp.RelposValueError, match="clamp_len: expected at least 1, found 0"):
        layers.RelativePositionalEncoding(8, clamp_len=0)
    with pytest.raises(rp.RelposValueError, match="clamp_len: expected None for variant 'espnet_legacy', found 3"):
        layers.RelativePositionalEncoding(8, variant="espnet_legacy", clamp_len=3)
    with pytest.raises(rp.RelposValueError, match=r"x: expected shape \(..., L, 8\), found \(2, 3, 6\)"):
        layers.RelativePositionalEncoding(8)(np.ones((2, 3, 6)))
    with pytest.raises(rp.RelposValueError, match=r"expected more than 2 rows, found \(2, 8\)"):
        layers.PositionalEncoding.from_state_dict({"embed_positions.weight": np.ones((2, 8))}, format="bart")
    for cls in (layers.MultiHeadAttention, layers.RelativeMultiHeadAttention, layers.PositionalEncoding):
        with pytest.raises(rp.RelposValueError, match="format: expected one of"):
            cls.from_state_dict({}, format="pytorch")


def test_a_refused_call_leaves_the_cache_as_it_was(rng):
    layer = layers.MultiHeadAttention(*parts_of(rng), heads=HEADS)
    cache = layers.Cache()
    x = rng.standard_normal((2, 3, WIDTH))
    with pytest.raises(rp.RelposValueError, match="mask: shape"):
        layer(x, cache=cache, mask=np.ones((9, 9), bool), backend="numpy")
    assert len(cache) == 0
    layer(x, cache=cache, backend="numpy")
    for other in (x[:1], x.astype(np.float32)):
        with pytest.raises(rp.RelposValueError, match="cache: holds a key of shape"):
            layer(other, cache=cache, backend="numpy")
    assert len(cache) == 3
    assert repr(cache) == "Cache(3 positions)"


def test_what_modules_print(rng):
    layer = layers.MultiHeadAttention(*parts_of(rng), heads=HEADS, position=rp.ALiBi())
    assert repr(layer).startswith("MultiHeadAttention(12 -> 12, heads=3, position=ALiBi(")
    assert repr(layer.query) == "Linear(12 -> 12, bias=True)"
    parts, pos, u, v = relative_parts(rng)
    layer = layers.RelativeMultiHeadAttention(*parts, pos=pos, content_bias=u, position_bias=v)
    assert repr(layer) == (
        "RelativeMultiHeadAttention(12, heads=3, variant='transformer_xl', "
        "encoding=RelativePositionalEncoding(dim=12, variant='transformer_xl', scaled=False))"
    )
    assert "alpha=1.0" in repr(layers.PositionalEncoding(8))
