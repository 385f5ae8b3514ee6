"""The formulas that appear in texts rather than in models: sums written out, terms by name, rotations and costs."""

import math
import re

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import reference
from relpos_np.complexity import attention_operations, complexity
from tests import compare, naive


def close(a, b, atol=1e-12):
    compare.close(a, b, atol)


# ---------------------------------------------------------------------------------------------- self-attention


@pytest.mark.parametrize("length", [1, 2, 7])
def test_self_attention_as_sums_and_as_matrices(length, rng):
    x, (w_q, w_k), w_v = rng.standard_normal((length, 5)), rng.standard_normal((2, 5, 3)), rng.standard_normal((5, 4))
    expected = naive.self_attention(x, w_q, w_k, w_v)
    close(reference.self_attention_sums(x, w_q, w_k, w_v), expected)
    close(reference.self_attention(x, w_q, w_k, w_v), expected)
    close(rp.attention(x @ w_q, x @ w_k, x @ w_v), expected)


def test_self_attention_in_general(rng):
    """With dot products as f it is attention; f sees one query and every pair, in order."""
    x = rng.standard_normal((5, 3))
    seen = []

    def dot_product(query, pairs):
        seen.append((query, pairs))
        e = [math.exp(naive.dot(query, key) / math.sqrt(3)) for key, _ in pairs]
        return sum(weight / sum(e) * value for weight, (_, value) in zip(e, pairs, strict=True))

    y = reference.self_attention_general(x, dot_product)
    close(y, naive.self_attention(x, *np.stack([np.eye(3)] * 3)))
    assert len(seen) == 5
    for i, (query, pairs) in enumerate(seen):
        np.testing.assert_array_equal(query, x[i])
        assert len(pairs) == 5
        for j, (key, value) in enumerate(pairs):
            np.testing.assert_array_equal(key, x[j])
            np.testing.assert_array_equal(value, x[j])
    assert reference.self_attention_general(x, lambda query, pairs: [len(pairs)] * 2).tolist() == [[5, 5]] * 5
    assert reference.self_attention_general(x[:0], dot_product).shape == (0, 3)


def test_self_attention_in_general_refuses(rng):
    x = rng.standard_normal((3, 2))
    with pytest.raises(rp.RelposTypeError, match="f: expected a function"):
        reference.self_attention_general(x, 3)
    with pytest.raises(rp.RelposTypeError, match="x: expected a NumPy array"):
        reference.self_attention_general([[1.0]], max)
    with pytest.raises(rp.RelposTypeError, match="x: expected dtype"):
        reference.self_attention_general(np.ones((2, 2), int), max)
    with pytest.raises(rp.RelposValueError, match=r"x: expected shape \(L, d\), found \(2, 3, 2\)"):
        reference.self_attention_general(np.ones((2, 3, 2)), max)
    sizes = iter((1, 2, 2))
    with pytest.raises(rp.RelposValueError, match=r"f: returned vectors of different shapes \[\(1,\), \(2,\)\]"):
        reference.self_attention_general(x, lambda query, pairs: np.ones(next(sizes)))


# ---------------------------------------------------------------------------------------------- Shaw in matrices


@pytest.mark.parametrize("outside", ["clip", "zero"])
@pytest.mark.parametrize(("l_q", "l_k"), [(1, 1), (6, 6), (3, 9), (8, 5)])
@pytest.mark.parametrize("per_head", [False, True])
def test_shaw_in_matrices(l_q, l_k, outside, per_head, rng):
    q, k, v = (rng.standard_normal((2, 2, *s)) for s in ((l_q, 4), (l_k, 4), (l_k, 3)))
    lead = (2,) if per_head else ()
    tables = rng.standard_normal((*lead, 5, 4)), rng.standard_normal((*lead, 7, 3))
    for offset in (l_k - l_q, 0, -1):
        logit, value = naive.shaw(q, l_k, *tables, outside=outside, offset=offset)
        expected, _ = naive.attention(q, k, v, logit=logit, value=value)
        found = reference.shaw_attention_matrix(q, k, v, *tables, offset=offset, outside=outside)
        close(found, expected)
        close(reference.shaw_attention(q, k, v, *tables, offset=offset, outside=outside), expected)


def test_shaw_in_matrices_refuses():
    q = np.ones((1, 3, 2))
    odd, even = np.ones((3, 2)), np.ones((4, 2))
    for function in (reference.shaw_attention_matrix, reference.shaw_attention):
        with pytest.raises(rp.RelposValueError, match=r"key_table: expected an odd number 2k\+1 of rows"):
            function(q, q, q, even, odd)
        with pytest.raises(rp.RelposValueError, match=r"value_table: expected an odd number 2k\+1 of rows"):
            function(q, q, q, odd, even)
        with pytest.raises(rp.RelposValueError, match=r"left: expected 0 \.\.\. 2 for value_table"):
            function(q, q, q, even, odd, left=(1, 3))
        with pytest.raises(rp.RelposValueError, match="outside: expected one of 'clip', 'zero'"):
            function(q, q, q, odd, odd, outside="wrap")


# ---------------------------------------------------------------------------------------------- terms by name


@pytest.mark.parametrize("projected", [(True, True), (False, False), (True, False)])
def test_absolute_terms(projected, rng):
    e, u = rng.standard_normal((2, 6, 4))
    sizes = (3 if all(projected) else 4, 4)
    w_q, w_k = (rng.standard_normal(sizes) if given else None for given in projected)
    terms = reference.absolute_terms(e, u, w_q, w_k)
    assert terms._fields == ("a", "b", "c", "d")
    for found, expected in zip(terms, naive.absolute_terms(e, u, w_q, w_k), strict=True):
        close(found, expected)
    eye = np.eye(4)
    wq, wk = (eye if w is None else w for w in (w_q, w_k))
    for i in range(6):
        for j in range(6):
            close(sum(terms)[i, j], (e[i] + u[i]).T @ wq.T @ wk @ (e[j] + u[j]))
    batch = reference.absolute_terms(np.stack([e, u]), np.stack([u, e]), w_q, w_k)
    close(batch.b[0], terms.b)
    close(batch.b[1], terms.c)


def test_absolute_terms_refuse():
    with pytest.raises(rp.RelposValueError, match=r"u: expected the shape of e \(3, 2\), found \(1, 2\)"):
        reference.absolute_terms(np.ones((3, 2)), np.ones((1, 2)))
    with pytest.raises(ValueError, match="matmul"):
        reference.absolute_terms(np.ones((3, 2)), np.ones((3, 2)), np.ones((2, 3)), np.ones((2, 3)))


@pytest.mark.parametrize(("l_q", "l_k"), [(1, 1), (5, 5), (3, 8), (6, 2)])
def test_relative_terms(l_q, l_k, rng):
    q, k, (u, v) = rng.standard_normal((l_q, 4)), rng.standard_normal((l_k, 4)), rng.standard_normal((2, 4))
    distances = list(range(l_k - 1, -l_q, -1))
    rows = rng.standard_normal((len(distances), 4))
    terms = reference.relative_terms(q, k, u, v, rows)
    loops = naive.relative_terms(q, k, u, v, lambda distance: rows[distances.index(distance)])
    for found, expected in zip(terms, loops, strict=True):
        close(found, expected)
    assert terms._fields == ("a", "b", "c", "d")
    close(terms.ac, (q + u) @ k.T)
    close(terms.ac + terms.bd, sum(loops))
    scheme = rp.TransformerXL(u[None], v[None], rows[:, None], variant="conformer")
    close(rp.logits(q, k, position=scheme, scale=1.0, backend="numpy"), terms.ac + terms.bd)


def test_relative_terms_of_heads(rng):
    q, k = rng.standard_normal((2, 2, 3, 4, 5))
    (u, v), rows = rng.standard_normal((2, 3, 5)), rng.standard_normal((3, 7, 5))
    terms = reference.relative_terms(q, k, u, v, rows)
    for b in range(2):
        for h in range(3):
            loops = naive.relative_terms(q[b, h], k[b, h], u[h], v[h], lambda distance, h=h: rows[h, 3 - distance])
            for found, expected in zip(terms, loops, strict=True):
                assert found.shape == (2, 3, 4, 4)
                close(found[b, h], expected)
    ac, bd = reference.transformer_xl_scores(q, k, u, v, rows.transpose(1, 0, 2), variant="conformer")
    close(terms.ac, ac)
    close(terms.bd, bd)


@pytest.mark.parametrize("count", [0, 4, 6])
def test_relative_terms_refuse(count):
    with pytest.raises(rp.RelposValueError, match="rows: expected 5 for L_q = 3 and L_k = 3"):
        reference.relative_terms(np.ones((3, 2)), np.ones((3, 2)), np.ones(2), np.ones(2), np.ones((count, 2)))


# ---------------------------------------------------------------------------------------------- sinusoids


@pytest.mark.parametrize("dim", [2, 6, 32])
@pytest.mark.parametrize("delta", [0, 1, -3, 2.5, 1000])
def test_rotation_moves_positions(dim, delta):
    for base in (10000.0, 50.0):
        m = reference.rotation_matrix(delta, dim, base=base)
        close(m, naive.rotation(delta, dim, base=base))
        for t in (0, 1, 17, -4):
            here, there = (naive.sinusoidal([at], dim, base=base)[0] for at in (t, t + delta))
            close(m @ here, there, 1e-11)
            close(m @ rp.Sinusoidal(dim, base=base).encode(np.array([t]))[0], there, 1e-11)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 5), rp.RelposValueError, "dim: a rotation needs an even number of dimensions, found 5"),
        ((1, 0), rp.RelposValueError, "dim: expected at least 2"),
        ((1, 4.0), rp.RelposTypeError, "dim: expected an integer"),
        (("1", 4), rp.RelposTypeError, "delta: expected a real number"),
        ((math.inf, 4), rp.RelposValueError, "delta: expected a finite number"),
        ((1, 4, 0.0), rp.RelposValueError, "base: expected a positive number"),
        ((1, 4, "e"), rp.RelposTypeError, "base: expected a real number"),
    ],
)
def test_rotation_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        reference.rotation_matrix(*arguments[:2], **dict(zip(["base"], arguments[2:], strict=False)))


@pytest.mark.parametrize("scheme", [rp.Sinusoidal(8), rp.LearnedAbsolute(np.arange(800.0).reshape(100, 8))], ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_encodings_are_added_before_dropout(scheme, dtype, rng):
    """What survives is x + P over 1 - p, at the rate asked for; the same state drops the same elements."""
    x = rng.standard_normal((20, 50, 8)).astype(dtype)
    kept = scheme(x, start=3)
    dropped = scheme(x, start=3, dropout=0.25, rng=np.random.default_rng(4))
    assert dropped.dtype == dtype
    survived = dropped != 0
    assert abs(survived.mean() - 0.75) < 0.02
    np.testing.assert_allclose(dropped[survived], (kept / 0.75)[survived], rtol=4e-3 if dtype == np.float16 else 1e-5)
    np.testing.assert_array_equal(scheme(x, 3, dropout=0.25, rng=np.random.default_rng(4)), dropped)
    np.testing.assert_array_equal(scheme(x, 3, dropout=0.0), kept)
    assert len(np.unique(survived.reshape(20, -1), axis=0)) == 20


@pytest.mark.parametrize("scheme", [rp.Sinusoidal(4), rp.LearnedAbsolute(np.ones((3, 4)))], ids=repr)
def test_dropout_of_encodings_refuses(scheme, rng):
    x = np.ones((2, 4))
    for rate in (-0.1, 1.0, 2):
        with pytest.raises(rp.RelposValueError, match=r"dropout: expected a rate in \[0, 1\)"):
            scheme(x, dropout=rate, rng=rng)
    for source in (None, 3):
        with pytest.raises(rp.RelposTypeError, match=r"rng: dropout needs a numpy\.random\.Generator"):
            scheme(x, dropout=0.5, rng=source)
    with pytest.raises(rp.RelposTypeError, match="dropout: expected a real number"):
        scheme(x, dropout="half", rng=rng)


# ---------------------------------------------------------------------------------------------- every layer


def test_encodings_at_every_layer(rng):
    x = rng.standard_normal((2, 5, 4))
    weights, encodings = rng.standard_normal((3, 4, 4)), rng.standard_normal((3, 5, 4))
    layers = [lambda y, w=w: np.tanh(y @ w) for w in weights]
    expected = naive.floats(x)
    for w, p in zip(naive.floats(weights), naive.floats(encodings), strict=True):
        for b in range(2):
            moved = [[a + c for a, c in zip(*rows, strict=True)] for rows in zip(expected[b], p, strict=True)]
            expected[b] = [[math.tanh(naive.dot(row, column)) for column in zip(*w, strict=True)] for row in moved]
    close(reference.add_at_every_layer(x, layers, encodings), expected)
    assert reference.add_at_every_layer(x, [], []) is x
    shared = rp.Sinusoidal(4).encode(5)
    once = reference.add_at_every_layer(x, [lambda y: y] * 3, [shared] * 3)
    close(once, x + 3 * naive.sinusoidal(5, 4))


def test_encodings_at_every_layer_refuse():
    x = np.ones((2, 5, 4))
    with pytest.raises(rp.RelposValueError, match="encodings: expected one per layer, 2, found 1"):
        reference.add_at_every_layer(x, [abs, abs], [x[0]])
    with pytest.raises(rp.RelposValueError, match=r"encodings\[1\]: expected \(5, 4\) .* found \(4,\)"):
        reference.add_at_every_layer(x, [abs, abs], [x[0], x[0, 0]])
    with pytest.raises(rp.RelposValueError, match=r"encodings\[0\]: expected \(5, 4\) .* found \(6, 4\)"):
        reference.add_at_every_layer(x, [abs], [np.ones((6, 4))])


# ---------------------------------------------------------------------------------------------- costs


def test_complexity():
    assert complexity("convolution", n=100, d=8, k=3) == (3 * 100 * 64, 1, 34)
    assert complexity("convolution", n=99, d=8, k=3).path == 33
    assert complexity("recurrent", n=100, d=8) == (100 * 64, 100, 100)
    assert complexity("self_attention", n=100, d=8) == (100 * 100 * 8, 1, 1)
    assert complexity("self_attention", n=7, d=1)._fields == ("operations", "sequential", "path")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": "pooling"}, rp.RelposValueError, "layer: expected one of 'convolution'"),
        ({"n": 0}, rp.RelposValueError, "n: expected at least 1"),
        ({"d": 2.0}, rp.RelposTypeError, "d: expected an integer"),
        ({"k": 3}, rp.RelposValueError, "k: 'recurrent' has no kernel, found 3"),
        ({"layer": "convolution"}, rp.RelposValueError, "k: a convolution needs"),
        ({"layer": "convolution", "k": 0}, rp.RelposValueError, "k: expected at least 1"),
    ],
)
def test_complexity_refuses(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        complexity(**{"layer": "recurrent", "n": 4, "d": 2} | arguments)


def counted(l_q, l_k, dim, v_dim, *, causal, tables=0, query_rows=(), value_rows=()):
    """Operations of one head, counted where loops would do them."""
    total = 0
    for i in range(l_q):
        total += sum(2 for rows in query_rows for _ in range(rows) for _ in range(dim))
        total += sum(2 for rows in value_rows for _ in range(rows) for _ in range(v_dim))
        for j in range(l_k):
            if causal and j > i + l_k - l_q:
                continue
            total += sum(2 for _ in range(dim)) + sum(2 for _ in range(v_dim))
            total += tables + len(query_rows) + len(value_rows)
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("l_q", "l_k"), [(0, 4), (1, 1), (5, 5), (3, 7), (7, 3)])
def test_attention_operations(l_q, l_k, causal, rng):
    heads, dim, v_dim = 2, 4, 3

    def count(scheme=None, batch=3):
        return attention_operations(batch, heads, l_q, l_k, dim, v_dim, scheme=scheme, causal=causal)

    def expected(**terms):
        return 3 * heads * counted(l_q, l_k, dim, v_dim, causal=causal, **terms)

    bias = rp.T5(rng.standard_normal((8, heads)))
    shaw = rp.Shaw(rng.standard_normal((5, dim)), rng.standard_normal((heads, 7, v_dim)))
    assert count() == count(rp.Plain()) == expected()
    assert isinstance(count(), int)
    assert count(bias) == expected(tables=1)
    # The rows of distances that occur, one at least.
    reached = {
        f"{name}_rows": [max(min(l_q - 1, k) + min(l_k - 1, k), 0) + 1] for name, k in (("query", 2), ("value", 3))
    }
    assert count(shaw) == expected(**reached)
    assert count((bias, shaw)) == expected(tables=1, **reached)
    assert count(shaw, batch=0) == 0
    rows = max(l_q + l_k - 1, 0)
    u = rng.standard_normal((heads, dim))
    conformer = rp.TransformerXL(u, u, rng.standard_normal((rows, heads, dim)), variant="conformer")
    assert count(conformer) == expected(query_rows=[rows])
    # Without a shift each key's position lengthens its vector, and nothing else is added.
    wenet = rp.TransformerXL(u, u, rng.standard_normal((l_k, heads, dim)), variant="wenet")
    assert count(wenet) == 3 * heads * counted(l_q, l_k, 2 * dim, v_dim, causal=causal)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"heads": 0}, rp.RelposValueError, "heads: expected at least 1"),
        ({"head_dim": 0}, rp.RelposValueError, "head_dim: expected at least 1"),
        ({"q_len": -1}, rp.RelposValueError, "q_len: expected at least 0"),
        ({"v_dim": 1.5}, rp.RelposTypeError, "v_dim: expected an integer"),
        ({"causal": 1}, rp.RelposTypeError, "causal: expected True or False"),
        ({"scheme": "t5"}, rp.RelposTypeError, "scheme: expected a scheme such as relpos_np.T5, found str"),
        ({"scheme": rp.T5(np.ones((8, 3)))}, rp.RelposValueError, "table: shape (8, 3)"),
    ],
)
def test_attention_operations_refuse(arguments, error, message):
    sizes = {"batch": 1, "heads": 2, "q_len": 3, "k_len": 3, "head_dim": 4, "v_dim": 4}
    with pytest.raises(error, match=re.escape(message)):
        attention_operations(**sizes | arguments)
