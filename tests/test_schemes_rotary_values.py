"""Values that turn and outputs that turn back: exact cases, options of a call, what is never read, what is refused."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._runtime import memory
from relpos_np.distributed import merge, partial
from relpos_np.terms import SchemeGradient, Terms, ValueTurn
from relpos_np.testing import check_scheme
from tests.faults.test_memory import asked, judge  # noqa: F401
from tests.test_schemes import close
from tests.test_schemes_rotary import make

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
SCHEMES = {
    "all": lambda rng: rp.Rotary(4, values=True),
    "last": lambda rng: rp.Rotary(channels=(2, 6), layout="interleaved", base=50.0, values=True),
    "trained": lambda rng: rp.Rotary(frequencies=rng.standard_normal(2), values=True, magnitude=1.25),
    "heads": lambda rng: rp.Rotary(
        frequencies=rng.standard_normal((2, 2, 2)),
        positions=rng.standard_normal((2, 2, 7)),
        key_positions=rng.standard_normal((2, 9)),
        values=True,
        blocks=2,
        magnitude=1.25,
    ),
}


def drawn(rng, dtype=np.float64, v_dim=7):
    q, k = rng.standard_normal((2, 4, 7, 6)), rng.standard_normal((2, 2, 9, 6))
    return tuple(x.astype(dtype) for x in (q, k, rng.standard_normal((2, 2, 9, v_dim))))


# ---------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize("name", SCHEMES)
def test_formula_terms_parts_and_gradients(name, rng):
    q, k, v = drawn(rng)
    found = check_scheme(SCHEMES[name](rng), q, k, v, causal=True)
    assert max(found.values()) <= 1
    assert "in parts, float64, numba" in found
    if name in ("trained", "heads"):
        assert "gradient of position frequencies, numba" in found


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("offset", [0, 5, -3])
def test_one_key_is_turned_by_its_distance(layout, offset, backend, rng):
    """With all probability on key j, the output is its value turned by (j - i - M) w."""
    q, k, v = make(rng, depth=4)
    only = np.arange(7) % 4
    mask = np.arange(9) == only[:, None]
    waves = np.array([0.7, 0.02])
    scheme = rp.Rotary(frequencies=waves, layout=layout, values=True)
    out = rp.attention(q, k, v, position=scheme, mask=mask, offset=offset, backend=backend)
    angle = (only - np.arange(7) - offset)[:, None] * waves
    a, b = ([0, 1], [2, 3]) if layout == "half" else ([0, 2], [1, 3])
    chosen = np.repeat(v[:, :, only], 4, axis=1)
    z = (chosen[..., a] + 1j * chosen[..., b]) * np.exp(1j * angle)
    close(out[..., a], z.real, 1e-13)
    close(out[..., b], z.imag, 1e-13)
    np.testing.assert_array_equal(out[..., 4], chosen[..., 4])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scores_do_not_change(name, backend, rng):
    q, k, v = drawn(rng)
    scheme = SCHEMES[name](rng)
    arguments = rp.testing.arguments(scheme)
    plain = rp.Rotary(**{**arguments, "values": False})
    _, lse = rp.attention(q, k, v, position=scheme, return_lse=True, backend=backend)
    _, expected = rp.attention(q, k, v, position=plain, return_lse=True, backend=backend)
    np.testing.assert_array_equal(lse, expected)
    s = [rp.logits(q, k, position=one, backend=backend) for one in (scheme, plain)]
    np.testing.assert_array_equal(*s)


def test_only_differences_of_positions_count(backend, rng):
    q, k, v = drawn(rng)
    at = rng.integers(0, 50, 9)
    near, far = (rp.Rotary(6, positions=at + start, values=True) for start in (0, 1000))
    close(*(rp.attention(q, k, v, position=one, backend=backend) for one in (near, far)), 1e-11)


def test_magnitude_is_in_values_and_output(backend, rng):
    q, k, v = drawn(rng)
    wide, plain = (rp.Rotary(6, values=True, magnitude=m) for m in (1.5, 1.0))
    found = rp.attention(q, k, v, position=wide, scale=0.1, backend=backend)
    expected = rp.attention(q, k, v, position=plain, scale=0.1 * 1.5**2, backend=backend)
    close(found[..., :6], 1.5**2 * expected[..., :6], 1e-13)
    close(found[..., 6], expected[..., 6], 1e-13)


# ---------------------------------------------------------------------------------------------- excluded keys


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_excluded_keys_change_no_bit(name, hole, backend, rng):
    """Turning makes a copy of all values; what nobody may attend stays in its row of it."""
    q, k, v = drawn(rng)
    scheme, w = SCHEMES[name](rng), rng.standard_normal((2, 4, 7, 7))
    mask = np.ones(9, bool)
    mask[[0, 4]] = False
    options = {"position": scheme, "mask": mask, "key_lengths": np.array([8, 6]), "backend": backend}
    bad_k, bad_v = k.copy(), v.copy()
    for x in (bad_k, bad_v):
        x[:, :, [0, 4, 8]] = hole
        x[1, :, 6:] = hole
    found, expected = (rp.attention(q, *kv, **options) for kv in ((bad_k, bad_v), (k, v)))
    np.testing.assert_array_equal(found, expected)
    found, expected = (rp.attention_vjp(q, *kv, grad_out=w, **options) for kv in ((bad_k, bad_v), (k, v)))
    for one in "qkv":
        np.testing.assert_array_equal(getattr(found, one), getattr(expected, one))
    for key, x in expected.position.items():
        np.testing.assert_array_equal(found.position[key], x)


def test_without_keys(backend, rng):
    q, k, v = drawn(rng)
    scheme = SCHEMES["trained"](rng)
    out = rp.attention(q, k, v, position=scheme, key_lengths=0, backend=backend)
    np.testing.assert_array_equal(out, 0)
    for q_len, k_len in ((0, 9), (7, 0), (0, 0)):
        cut = q[:, :, :q_len], k[:, :, :k_len], v[:, :, :k_len]
        out = rp.attention(*cut, position=scheme, backend=backend)
        assert out.shape == (2, 4, q_len, 7)
        grads = rp.attention_vjp(*cut, grad_out=out, position=scheme, backend=backend)
        np.testing.assert_array_equal(grads.position["frequencies"], 0)
        assert grads.v.shape == cut[2].shape


# ---------------------------------------------------------------------------------------------- the rest of a call


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_rounded_once(dtype, backend, rng):
    q, k, v = drawn(rng, dtype)
    scheme = SCHEMES["last"](rng)
    wide = [x.astype(np.float64 if dtype is np.float64 else np.float32) for x in (q, k, v)]
    exact = rp.attention(*wide, position=scheme, backend=backend)
    found = rp.attention(q, k, v, position=scheme, backend=backend)
    assert found.dtype == dtype
    bound = 0 if np.dtype(dtype).itemsize > 2 else float(ml_dtypes.finfo(dtype).eps) * np.abs(exact) / 2 + 2e-6
    assert (np.abs(found.astype(np.float64) - exact) <= bound).all()
    grads = rp.attention_vjp(q, k, v, grad_out=found, position=scheme, backend=backend)
    assert {grads.q.dtype, grads.k.dtype, grads.v.dtype} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_any_layout_and_prepared_calls(dtype, backend, rng):
    q, k, v = drawn(rng, dtype)
    options = {"position": SCHEMES["all"](rng), "causal": True, "backend": backend}
    expected, lse = rp.attention(q, k, v, **options, return_lse=True)
    for out in (np.empty(expected.shape, dtype), np.empty((*expected.shape[:-1], 14), dtype)[..., ::2]):
        assert rp.attention(q, k, v, **options, out=out) is out
        assert out.tobytes() == expected.tobytes()
    ready = rp.prepare(*(np.zeros_like(x) for x in (q, k, v)), **options)
    found = ready(q, k, v, return_lse=True)
    assert found[0].tobytes() == expected.tobytes()
    assert found[1].tobytes() == lse.tobytes()


def test_operands_are_read_as_they_lie(backend, rng):
    q, k, v = drawn(rng)
    options = {"position": SCHEMES["last"](rng), "backend": backend}
    expected = rp.attention(q, k, v, **options)
    for axis in (-1, -2, -3):
        lying = [np.moveaxis(np.ascontiguousarray(np.moveaxis(x, axis, 0)), 0, axis) for x in (q, k, v)]
        copies = [x.copy() for x in lying]
        np.testing.assert_array_equal(rp.attention(*lying, **options), expected)
        for x, copy in zip(lying, copies, strict=True):
            np.testing.assert_array_equal(x, copy)


def test_values_of_one_item_serve_all(backend, rng):
    q, k, v = drawn(rng)
    options = {"position": SCHEMES["heads"](rng), "backend": backend}
    w = rng.standard_normal((2, 4, 7, 7))
    spread = np.broadcast_to(v[:1], v.shape)
    close(*(rp.attention(q, k, x, **options) for x in (v[:1], spread.copy())), 1e-14)
    one, all_items = (rp.attention_vjp(q, k, x, grad_out=w, **options) for x in (v[:1], spread.copy()))
    close(one.v, all_items.v.sum(axis=0, keepdims=True), 1e-12)
    close(one.position["frequencies"], all_items.position["frequencies"], 1e-11)


def test_segments_and_offsets_are_separate_calls(backend, rng):
    q, k, v = drawn(rng)
    scheme = SCHEMES["trained"](rng)
    w = rng.standard_normal((2, 4, 7, 7))
    options = {"position": scheme, "causal": True, "backend": backend}
    packed = rp.attention(q, k, v, segments=([0, 3, 7], [0, 4, 9]), **options)
    packed_grads = rp.attention_vjp(q, k, v, grad_out=w, segments=([0, 3, 7], [0, 4, 9]), **options)
    total = 0
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 7), slice(4, 9))):
        own = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        np.testing.assert_array_equal(packed[:, :, rows], rp.attention(*own, **options))
        grads = rp.attention_vjp(*own, grad_out=w[:, :, rows], **options)
        np.testing.assert_array_equal(packed_grads.v[:, :, keys], grads.v)
        total = total + grads.position["frequencies"]
    close(packed_grads.position["frequencies"], total, 1e-13)
    found = rp.attention(q, k, v, offset=np.array([1, 4]), **options)
    for item, offset in enumerate((1, 4)):
        own = (x[item : item + 1] for x in (q, k, v))
        np.testing.assert_array_equal(found[item : item + 1], rp.attention(*own, offset=offset, **options))


def test_sinks_and_dropout(backend, rng):
    """Sinks take their share of every channel alike; dropout is that of the probabilities."""
    q, k, v = drawn(rng)
    scheme, sinks = SCHEMES["trained"](rng), rng.standard_normal(4)
    options = {"position": scheme, "backend": backend}
    out, lse = rp.attention(q, k, v, **options, return_lse=True)
    found, with_sinks = rp.attention(q, k, v, sinks=sinks, **options, return_lse=True)
    close(found, out * np.exp(lse - with_sinks)[..., None], 1e-13)
    w = rng.standard_normal(out.shape)

    def loss(moved, share):
        position = rp.Rotary(frequencies=moved, values=True, magnitude=1.25)
        noise = {"dropout": 0.4, "rng": np.random.default_rng(5)}
        options = {"position": position, "sinks": share, "backend": "numpy", **noise}
        return float((rp.attention(q, k, v, **options) * w).sum())

    grads = rp.attention_vjp(q, k, v, grad_out=w, sinks=sinks, dropout=0.4, rng=np.random.default_rng(5), **options)
    for name, found, step in (
        ("frequencies", grads.position["frequencies"], rng.standard_normal(2)),
        ("sinks", grads.sinks, rng.standard_normal(4)),
    ):

        def along(t, name=name, step=step):
            moved = scheme.frequencies + t * step if name == "frequencies" else scheme.frequencies
            return loss(moved, sinks + t * step if name == "sinks" else sinks)

        h = 1e-4
        slope = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
        assert abs(slope - (found * step).sum()) <= 1e-9 * (1 + abs(slope))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_gradients_are_of_the_precision_of_the_call(dtype, backend, rng):
    q, k, v = drawn(rng, dtype)
    options = {"position": SCHEMES["trained"](rng), "grad_out": np.ones((2, 4, 7, 7), dtype), "backend": backend}
    medium, highest, usual = (
        rp.attention_vjp(q, k, v, precision=one, **options) for one in ("medium", "highest", None)
    )
    size = np.abs(highest.position["frequencies"]).max()
    # Values that turn are turned in float32.
    np.testing.assert_array_equal(usual.position["frequencies"], highest.position["frequencies"])
    np.testing.assert_array_equal(usual.v, highest.v)
    # Of sums over all pairs, of numbers with either sign that are off by some roundings to 8 bits.
    np.testing.assert_allclose(
        medium.position["frequencies"], highest.position["frequencies"], rtol=0, atol=0.03 * size
    )


def test_parts_are_merged(rng):
    q, k, v = drawn(rng)
    for make_scheme in SCHEMES.values():
        scheme = make_scheme(rng)
        for backend in ("terms", "numba"):
            given = {"position": scheme, "backend": backend}
            expected = rp.attention(q, k, v, **given)
            for rows in (slice(0, 3), slice(3, 7)):
                parts = [
                    partial(
                        q[:, :, rows], k[:, :, keys], v[:, :, keys],
                        queries=(rows.start, 7), keys=(keys.start, 9), **given,
                    )
                    for keys in (slice(0, 4), slice(4, 9))
                ]  # fmt: skip
                close(merge(*parts)[0], expected[:, :, rows], 1e-13)


@pytest.mark.parametrize("name", ["last", "trained"])
@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_row_37_memory_is_counted(name, backend, dtype, asked, rng):  # noqa: F811
    """Turned copies of values and of the output, and what gradients of frequencies take."""
    q, k, v = (rng.standard_normal((2, 4, 200, n)).astype(dtype) for n in (8, 8, 300))
    scheme = SCHEMES[name](rng)
    judge(lambda backend: rp.attention(q, k, v, position=scheme, backend=backend), backend, asked)
    w = np.ones_like(v)
    judge(lambda backend: rp.attention_vjp(q, k, v, grad_out=w, position=scheme, backend=backend), backend, asked)


@pytest.mark.parametrize("backend", ["terms", "numba"])
def test_row_37_copies_that_turned_have_a_part_of_the_sum(backend, monkeypatch, rng):
    """Memory of results is kept and not seen above."""
    parts, require = {}, memory.require
    monkeypatch.setattr(memory, "require", lambda function, found: parts.update(found) or require(function, found))
    q, k, v = (x.astype(np.float16) for x in drawn(rng))
    with rp.memory_limit(1 << 40):
        out = rp.attention(q, k, v, position=SCHEMES["last"](rng), backend=backend)
        assert parts["turned values and output"] >= 4 * (v.size + out.size)
        rp.attention_vjp(q, k, v, grad_out=out, position=SCHEMES["last"](rng), backend=backend)
    # Values turn, and the gradient of the output; then those of values turn back, beside what is to turn.
    assert parts["turned values and output"] >= 4 * 2 * (v.size + out.size)


# ---------------------------------------------------------------------------------------------- a class of one's own


class Scaled(rp.Scheme):
    """Values times complex numbers of their keys, outputs times conjugates of those of their queries; no content."""

    turns_values = True
    computes = False

    def __init__(self, keys, queries):
        self.keys, self.queries = keys, queries  # (L, 2)

    def turn_values(self, v, site):
        return self._times(v, self.keys[:, 0] + 1j * self.keys[:, 1])

    def turn_output(self, out, site):
        return self._times(out, self.queries[:, 0] - 1j * self.queries[:, 1])

    @staticmethod
    def _times(x, z):
        turned = np.array(x)
        y = (x[..., 1] + 1j * x[..., 2]) * z
        turned[..., 1], turned[..., 2] = y.real, y.imag
        return turned

    def lower(self, q, k, site):
        return Terms(
            turn=ValueTurn(*(self._factors(x, site) for x in (self.keys, self.queries)), first=1, trained=True)
        )

    @staticmethod
    def _factors(x, site):
        return x[None, :, :1].astype(site.dtype), x[None, :, 1:].astype(site.dtype)

    def lift(self, q, k, site, grad):
        keys, queries = (np.stack([x[0, :, 0] for x in factors], -1) for factors in (grad.turn.key, grad.turn.query))
        return SchemeGradient(arrays={"keys": keys, "queries": queries})


def test_own_scheme_turns_values(rng):
    q, k, v = drawn(rng)
    own = Scaled(rng.standard_normal((9, 2)), rng.standard_normal((7, 2)))
    found = check_scheme(own, q, k, v, causal=True)
    assert max(found.values()) <= 1
    assert {"gradient of position keys, numba", "gradient of position queries, terms"} <= set(found)
    assert "in parts, float64, numba" in found
    ready = rp.prepare(q, k, v, position=own)
    np.testing.assert_array_equal(ready(q, k, v), rp.attention(q, k, v, position=own))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda turn: None, "turn: expected a ValueTurn"),
        (lambda turn: (turn.key, turn.query), "turn: expected relpos_np.terms.ValueTurn, found tuple"),
        (
            lambda turn: ValueTurn(turn.key, turn.query, first=6),
            "among D_v = 7 channels, found 1 pairs in 1 blocks from channel 6",
        ),
        (lambda turn: ValueTurn(turn.key, turn.query, first=1, blocks=2), "found 1 pairs in 2 blocks from channel 1"),
        (lambda turn: ValueTurn(turn.key, turn.query, layout="both"), "layout: "),
        (lambda turn: ValueTurn(turn.key[0], turn.query), "key of turn: expected two arrays.*found ndarray"),
        (lambda turn: ValueTurn(turn.key, (1.0, 2.0)), "query of turn: expected an array, found float"),
        (lambda turn: ValueTurn(turn.query, turn.query, first=1), "key of turn: expected shape"),
        (lambda turn: ValueTurn(turn.key, turn.key, first=1), "query of turn: expected shape"),
        (lambda turn: ValueTurn(turn.key, tuple(x.astype(np.float32) for x in turn.query)), "expected dtype float64"),
    ],
)
def test_what_a_class_states_is_checked(change, words, rng):
    q, k, v = drawn(rng)

    class Wrong(Scaled):
        def lower(self, q, k, site):
            return Terms(turn=change(super().lower(q, k, site).turn))

    own = Wrong(rng.standard_normal((9, 2)), rng.standard_normal((7, 2)))
    for backend in ("terms", "numba"):
        with pytest.raises(rp.RelposError, match=words):
            rp.attention(q, k, v, position=own, backend=backend)


def test_what_turns_unsaid_is_refused(rng):
    class Silent(Scaled):
        turns_values = False

    own = Silent(rng.standard_normal((9, 2)), rng.standard_normal((7, 2)))
    with pytest.raises(rp.RelposValueError, match=r"turn: expected none, as `turns_values` of the class is False"):
        rp.attention(*drawn(rng), position=own)


# ---------------------------------------------------------------------------------------------- with others


def test_biases_add_up(backend, rng):
    q, k, v = drawn(rng)
    scheme, bias = SCHEMES["last"](rng), rp.T5(rng.standard_normal((32, 4)))
    expected = rp.attention(q, k, v, position=scheme, mask=rp.logits(0 * q, k, position=bias), backend=backend)
    for pair in ((scheme, bias), (bias, scheme)):
        close(rp.attention(q, k, v, position=pair, backend=backend), expected, 1e-13)


def test_what_has_no_meaning_is_refused(backend, rng):
    q, k, v = drawn(rng)
    scheme = SCHEMES["last"](rng)
    own = Scaled(rng.standard_normal((9, 2)), rng.standard_normal((7, 2)))
    shaw = rp.Shaw(rng.standard_normal((5, 6)), rng.standard_normal((5, 7)))
    for pair, words in (((scheme, own), "two of the schemes turn values"), ((shaw, scheme), "Shaw may add vectors")):
        for position in (pair, pair[::-1]):
            with pytest.raises(rp.RelposValueError, match=words):
                rp.attention(q, k, v, position=position, backend=backend)
            rp.logits(q, k, position=position, backend=backend)
    with pytest.raises(rp.RelposValueError, match=r"values: channels \(2, 6\) are to turn, v of the call has 5"):
        rp.attention(q, k, v[..., :5], position=scheme, backend=backend)
    with pytest.raises(rp.RelposValueError, match=r"values: channels \(0, 6\) are to turn, v of the call has 5"):
        rp.attention(q, k, v[..., :5], position=rp.Rotary(values=True), backend=backend)


def test_arguments():
    assert repr(rp.Rotary(4, values=True)) == "Rotary(4, base=10000.0, layout='half', values=True)"
    assert not rp.Rotary(4).turns_values
    with pytest.raises(rp.RelposTypeError, match="values: expected True or False, found 1"):
        rp.Rotary(4, values=1)
    with pytest.raises(TypeError, match="values"):
        rp.XPos(4, values=True)
    turn = ValueTurn((np.ones((1, 2, 1)),) * 2, (np.ones((1, 2, 1)),) * 2)
    with pytest.raises(rp.RelposValueError, match="two of the schemes turn values"):
        Terms(turn=turn) + Terms(turn=turn)
