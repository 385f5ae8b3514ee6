"""What the formulas promise: identities that no single implementation would be asked to fulfil by accident."""

import inspect
import sys

import numpy as np
import pytest

import relpos_np as rp
from tests import naive

LAYOUTS = ("interleaved", "concatenated", "tensor2tensor", "dimension_index")


def make(rng, q_len=9, k_len=9, heads=2, depth=6, v_dim=5):
    return tuple(rng.standard_normal((2, heads, *s)) for s in ((q_len, depth), (k_len, depth), (k_len, v_dim)))


def transformer_xl(rng, q_len, k_len, variant="transformer_xl"):
    rows = len(rp.reference.row_distances(q_len, k_len, variant))
    return rp.TransformerXL(*(rng.standard_normal(shape) for shape in ((2, 6), (2, 6), (rows, 2, 6))), variant=variant)


def close(a, b, atol=1e-13):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------- all schemes


def test_decoding_transformer_xl(backend, rng):
    """Each step needs the rows of its own length: the last of the full pass's."""
    q, k, v = make(rng)
    scheme = transformer_xl(rng, 9, 9)
    out = rp.attention(q, k, v, position=scheme, causal=True, backend=backend)
    for t in range(9):
        now = rp.TransformerXL(scheme.u, scheme.v, scheme.rows[8 - t :])
        step = rp.attention(
            q[..., t : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :], position=now, causal=True, backend=backend
        )
        close(step[..., 0, :], out[..., t, :])


def test_two_transformer_xl_cannot_be_combined(rng):
    """Both would replace the query; whoever cannot evaluate that says so instead of dropping one."""
    q, k, v = make(rng)
    pair = tuple(transformer_xl(rng, 9, 9, variant) for variant in ("conformer", "xlnet"))
    for backend in ("terms", "numba"):
        with pytest.raises(rp.RelposValueError, match="position"):
            rp.attention(q, k, v, position=pair, backend=backend)


def test_an_empty_tuple_is_no_scheme(backend, rng):
    q, k, v = make(rng)
    np.testing.assert_array_equal(
        rp.attention(q, k, v, position=(), backend=backend), rp.attention(q, k, v, backend=backend)
    )


# ---------------------------------------------------------------------------------------------- Shaw


def test_shaw_k_0_shifts_rows_and_adds_its_vector(backend, rng):
    q, k, v = make(rng)
    key_row, value_row = rng.standard_normal((1, 6)), rng.standard_normal((1, 5))
    plain, plain_lse = rp.attention(q, k, v, backend=backend, return_lse=True)
    out, lse = rp.attention(q, k, v, position=rp.Shaw(key_row, value_row), backend=backend, return_lse=True)
    close(out, plain + value_row[0])
    close(lse, plain_lse + q @ key_row[0] / np.sqrt(6))
    # outside="zero" keeps the vector to the diagonal
    p = np.exp(rp.logits(q, k) - plain_lse[..., None])
    zero = rp.attention(q, k, v, position=rp.Shaw(value_table=value_row, outside="zero"), backend=backend)
    close(zero, plain + np.diagonal(p, axis1=-2, axis2=-1)[..., None] * value_row[0])


def test_shaw_rows_belong_to_keys_less_queries(backend):
    """Row k-1 is the previous key, row k+1 the next: the sign j - i."""
    q, k, v = np.zeros((1, 4, 1)), np.zeros((1, 4, 1)), np.zeros((1, 4, 3))
    table = np.eye(3)[:, :]  # previous and before, same, next and later
    out = rp.attention(q, k, v, position=rp.Shaw(value_table=table), backend=backend)[0]
    close(out, np.array([[0, 1, 3], [1, 1, 2], [2, 1, 1], [3, 1, 0]]) / 4)


# ---------------------------------------------------------------------------------------------- T5


def test_t5_directions(backend, rng):
    """Bidirectional: later keys use the second half. Causal: all later keys share bucket 0."""
    q, k = np.zeros((1, 5, 2)), np.zeros((1, 5, 2))
    table = np.arange(8.0)[:, None]
    s = rp.logits(q, k, position=rp.T5(table, max_distance=8), backend=backend)[0]
    assert s[0, 1] == 5
    assert s[1, 0] == 1
    assert s[2, 2] == 0
    s = rp.logits(q, k, position=rp.T5(table, max_distance=8, bidirectional=False), backend=backend)[0]
    assert (s[np.triu_indices(5)] == 0).all()
    assert s[3, 0] == 3


@pytest.mark.parametrize(("rounding", "bucket"), [("exact", 30), ("float32", 31)])
def test_t5_rounding_reaches_the_scores(rounding, bucket, backend):
    scheme = rp.T5(np.arange(64.0)[:, None], max_distance=939, rounding=rounding)
    q, k = np.zeros((1, 2, 1)), np.zeros((1, 730, 1))
    assert rp.logits(q, k, position=scheme, backend=backend)[0, 0, 0] == bucket
    assert rp.logits(q, k, position=scheme, offset=0, backend=backend)[0, 0, 728] == 32 + bucket
    out = rp.attention(
        q,
        k,
        np.arange(730.0)[None, :, None],
        position=scheme,
        mask=np.arange(730) < 1,
        backend=backend,
        return_lse=True,
    )
    np.testing.assert_allclose(out[1][0, 0], bucket, rtol=1e-15)


# ---------------------------------------------------------------------------------------------- Transformer-XL


def test_transformer_xl_is_the_sum_of_its_four_terms(backend, rng):
    """a + b + c + d with sinusoidal rows, loops over pairs; causal, because only distances >= 0 have a row."""
    l_q, l_k, depth = 4, 7, 6
    q, k = rng.standard_normal((l_q, depth)), rng.standard_normal((l_k, depth))
    u, v = rng.standard_normal((2, depth))

    def encode(distance):
        return naive.sinusoidal([distance], depth, layout="concatenated")[0]

    a, b, c, d = naive.relative_terms(q, k, u, v, encode)
    rows = rp.Sinusoidal(depth, layout="concatenated").encode(rp.reference.row_distances(l_q, l_k))[:, None]
    scheme = rp.TransformerXL(u[None], v[None], rows)
    s = rp.logits(q, k, position=scheme, causal=True, backend=backend)
    expected = np.where(np.arange(l_k) <= np.arange(l_q)[:, None] + 3, (a + b + c + d) / np.sqrt(depth), -np.inf)
    close(s, expected)
    for variant in ("conformer", "xlnet"):
        rows = rp.Sinusoidal(depth, layout="concatenated").encode(rp.reference.row_distances(l_q, l_k, variant))
        scheme = rp.TransformerXL(u[None], v[None], rows[:, None], variant=variant)
        close(rp.logits(q, k, position=scheme, backend=backend), (a + b + c + d) / np.sqrt(depth))


def test_absolute_expansion(rng):
    """(E+U) Wq^T Wk (E+U)^T is a + b + c + d: what attention on absolute encodings computes."""
    e, w_q, w_k = rng.standard_normal((5, 4)), *rng.standard_normal((2, 3, 4))
    p = rp.Sinusoidal(4).encode(5)
    total = sum(naive.absolute_terms(e, p, w_q, w_k))
    x = rp.Sinusoidal(4)(e)
    close(rp.logits(x @ w_q.T, x @ w_k.T, scale=1.0), total)
    close(rp.logits(x, x, scale=1.0), sum(naive.absolute_terms(e, p)))


@pytest.mark.parametrize("variant", ["transformer_xl", "espnet_legacy"])
def test_transformer_xl_garbage_is_reproduced(variant, backend, rng):
    """Without a causal mask entries above the diagonal are 0 and the next query's products."""
    q, k, _ = make(rng, 4, 6)
    scheme = transformer_xl(rng, 4, 6, variant)
    s = rp.logits(q, k, position=scheme, scale=1.0, backend=backend)
    content = np.einsum("bhid,bhjd->bhij", q + scheme.u[:, None], k)
    position = np.einsum("bhid,rhd->bhir", q + scheme.v[:, None], scheme.rows)
    for i in range(4):
        for j in range(6):
            d = j - i - 2
            expected = position[..., i, 5 + d] if d <= 0 else 0 if d == 1 else position[..., i + 1, d - 2]
            close(s[..., i, j], content[..., i, j] + expected)


# ---------------------------------------------------------------------------------------------- windows


def test_window_sign_is_query_less_key(backend):
    q = np.zeros((1, 3, 1))
    s = rp.logits(q, q, position=rp.WindowBias(np.arange(5.0)[:, None], (3,)), backend=backend)[0]
    np.testing.assert_array_equal(s, [[2, 1, 0], [3, 2, 1], [4, 3, 2]])


def test_window_table_of_a_larger_extent(backend, rng):
    """A table trained on 4 x 4 windows serves 2 x 3 ones: its centre is used."""
    table = rng.standard_normal((7 * 7, 2))
    small = table.reshape(7, 7, 2)[2:5, 1:6].reshape(-1, 2)
    q, k, v = make(rng, 6, 6)
    large = rp.attention(q, k, v, position=rp.WindowBias(table, (2, 3), extent=(4, 4)), backend=backend)
    close(large, rp.attention(q, k, v, position=rp.WindowBias(small, (2, 3)), backend=backend))


def test_window_axes_are_row_major(backend, rng):
    q = np.zeros((1, 6, 1))
    table = rng.standard_normal((3 * 5, 1))
    s = rp.logits(q, q, position=rp.WindowBias(table, (2, 3)), backend=backend)[0]
    for i in range(6):
        for j in range(6):
            dh, dw = i // 3 - j // 3, i % 3 - j % 3
            assert s[i, j] == table[(dh + 1) * 5 + dw + 2, 0]


# ---------------------------------------------------------------------------------------------- absolute


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 2, 5, 6, 64])
def test_sinusoidal_against_loops(layout, dim):
    if dim % 2 and layout in ("concatenated", "tensor2tensor"):
        with pytest.raises(rp.RelposValueError, match=f"dim: .*{dim}"):
            rp.Sinusoidal(dim, layout=layout)
        return
    scheme = rp.Sinusoidal(dim, layout=layout, base=500.0)
    close(scheme.encode(50), naive.sinusoidal(50, dim, base=500.0, layout=layout), 1e-12)
    positions = np.array([-3, 7, 7, 1000])
    close(scheme.encode(positions), naive.sinusoidal(positions, dim, base=500.0, layout=layout), 1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoidal_products_depend_on_distance_alone(layout):
    """PE PE^T is Toeplitz for every layout but the one that numbers dimensions instead of pairs."""
    p = rp.Sinusoidal(32, layout=layout).encode(40)
    gram = p @ p.T
    spread = max(np.ptp(np.diagonal(gram, d)) for d in range(-39, 40))
    assert (spread > 0.1) if layout == "dimension_index" else (spread < 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoidal_shift_is_a_rotation(layout):
    """M(delta) PE(t) = PE(t + delta); the dimension-index variant has no such matrix."""
    dim, delta = 16, 5
    scheme = rp.Sinusoidal(dim, layout=layout)
    half = dim // 2
    pairs = [(2 * p, 2 * p + 1) if layout in ("interleaved", "dimension_index") else (p, p + half) for p in range(half)]
    rotation = np.zeros((dim, dim))
    for p, (s, c) in enumerate(pairs):
        w = 10000.0 ** (-p / (half - 1) if layout == "tensor2tensor" else -2 * p / dim)
        rotation[np.ix_((s, c), (s, c))] = [
            [np.cos(delta * w), np.sin(delta * w)],
            [-np.sin(delta * w), np.cos(delta * w)],
        ]
    t = np.arange(30)
    moved, wanted = scheme.encode(t) @ rotation.T, scheme.encode(t + delta)
    close(np.linalg.det(rotation), 1)
    if layout == "dimension_index":
        assert np.abs(moved - wanted).max() > 0.1
        fit, *_ = np.linalg.lstsq(scheme.encode(t)[:, :4], wanted[:, :4], rcond=None)
        assert np.abs(scheme.encode(t)[:, :4] @ fit - wanted[:, :4]).max() > 1e-3
    else:
        close(moved, wanted, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("dim", [2, 16, 64])
def test_sinusoidal_norm(layout, dim):
    p = rp.Sinusoidal(dim, layout=layout).encode(100)
    close((p**2).sum(axis=1), dim / 2, 1e-12)


def test_sinusoidal_at_position_0_and_layouts_are_permutations():
    interleaved = rp.Sinusoidal(8).encode(20)
    np.testing.assert_array_equal(interleaved[0], [0, 1] * 4)
    concatenated = rp.Sinusoidal(8, layout="concatenated").encode(20)
    close(concatenated[:, :4], interleaved[:, 0::2])
    close(concatenated[:, 4:], interleaved[:, 1::2])


def test_sinusoidal_is_added_to_inputs(rng):
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    y = rp.Sinusoidal(8)(x, start=3)
    assert y.dtype == np.float32
    close(y, x + rp.Sinusoidal(8).encode(np.arange(3, 8)).astype(np.float32), 1e-6)
    np.testing.assert_array_equal(
        rp.Sinusoidal(8).encode(8, np.float32)[3:], rp.Sinusoidal(8).encode(np.arange(3, 8), np.float32)
    )


def test_sinusoidal_far_away_is_exact_in_float64():
    """Angles are taken in float64 even for float32 results."""
    far = np.array([10**7 + 1])
    close(rp.Sinusoidal(4).encode(far, np.float32), naive.sinusoidal(far, 4), 1e-7)


def test_learned_rows(rng):
    table = rng.standard_normal((6, 4))
    scheme = rp.LearnedAbsolute(table)
    np.testing.assert_array_equal(scheme.encode(6), naive.learned(table, 6))
    np.testing.assert_array_equal(scheme.encode(np.array([5, 0, 5])), table[[5, 0, 5]])
    x = rng.standard_normal((2, 3, 4))
    np.testing.assert_array_equal(scheme(x, start=3), x + table[3:6])
    assert scheme(x.astype(np.float32)).dtype == np.float32
    assert scheme.encode(0).shape == (0, 4)


def test_learned_beyond_the_table_is_an_error(rng):
    scheme = rp.LearnedAbsolute(rng.standard_normal((6, 4)))
    for call in (
        lambda: scheme.encode(7),
        lambda: scheme.encode(np.array([6])),
        lambda: scheme.encode(np.array([0, -1])),
        lambda: scheme(np.zeros((7, 4))),
        lambda: scheme(np.zeros((3, 4)), start=4),
    ):
        with pytest.raises(rp.RelposIndexError, match=r"positions: expected 0 \.\.\. 5"):
            call()


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_formulas_and_classes_have_the_same_defaults(name):
    """None of a class stands for what its variant says."""
    cls = rp.SCHEMES[name].cls
    module = sys.modules[cls.__module__]
    own = {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.default is not p.empty}
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == module.__name__ and function.__name__[0] != "_":
            for one in inspect.signature(function).parameters.values():
                if one.default is not one.empty and own.get(one.name) is not None:
                    assert one.default == own[one.name], f"{function.__name__}: {one.name}"
