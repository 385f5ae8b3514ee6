"""Values that turn and outputs that turn back: exact cases, options of a call, what is never read, what is refused."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._runtime import memory
from relpos_np.terms import SchemeGradient, Terms, ValueTurn
from relpos_np.testing import check_scheme
from tests.compare import close
from tests.faults.test_memory import asked, judge  # noqa: F401
from tests.test_schemes_rotary import make

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


# ---------------------------------------------------------------------------------------------- the rest of a call


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(dtype, backend, rng):
    """After the output has turned back: at most half a unit from the same numbers in float32."""
    q, k, v = drawn(rng, dtype)
    scheme = SCHEMES["last"](rng)
    exact = rp.attention(*(x.astype(np.float32) for x in (q, k, v)), position=scheme, backend=backend)
    found = rp.attention(q, k, v, position=scheme, backend=backend)
    assert found.dtype == dtype
    close(found.astype(np.float64), exact, 2e-6, rtol=float(ml_dtypes.finfo(dtype).eps) / 2)


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
    reads_operand_values = False

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
    assert repr(rp.Rotary(4, values=True)) == "Rotary(dim=4, values=True)"
    assert not rp.Rotary(4).turns_values
    with pytest.raises(rp.RelposTypeError, match="values: expected True or False, found 1"):
        rp.Rotary(4, values=1)
    with pytest.raises(TypeError, match="values"):
        rp.XPos(4, values=True)
    turn = ValueTurn((np.ones((1, 2, 1)),) * 2, (np.ones((1, 2, 1)),) * 2)
    with pytest.raises(rp.RelposValueError, match="two of the schemes turn values"):
        Terms(turn=turn) + Terms(turn=turn)
