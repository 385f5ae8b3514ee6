"""A class of a user's own, on every backend, and what is said of one that is not right."""

import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.distributed import merge, partial
from relpos_np.kernels._numba.plan.prepared import Prepared
from relpos_np.terms import Dense, KeyTerm, QueryTerm, SchemeGradient, TableTerm, Terms, Toeplitz, ValueTerm
from relpos_np.testing import check_scheme
from tests.compare import assert_is_slope

BACKENDS = rp.backend.HOST_BACKENDS
OPERANDS_AND_ARRAYS = ("q", "k", "v", *(f"position {name}" for name in ("scalars", "vectors", "keys", "values")))


class Everything(rp.Scheme):
    """A term of each kind: a table, vectors for queries, keys and values by clipped distance, and a dense map."""

    relative = True
    reads_operand_values = False

    def __init__(self, scalars, vectors, keys, values):
        self.scalars, self.vectors, self.keys, self.values = scalars, vectors, keys, values

    def _rows(self, site):
        d = np.arange(site.k_len) - (np.arange(site.q_len)[:, None] + site.offset)
        return np.clip(d, -2, 2) + 2

    def scores(self, q, k, site):
        r = self._rows(site)
        added = self.scalars.astype(site.dtype)[:, r]
        added = added + np.einsum("...id,ijd->...ij", q, self.vectors.astype(site.dtype)[r])
        return added + np.einsum("...jd,hijd->...ij", k, self.keys.astype(site.dtype)[None][:, r])

    def outputs(self, p, site):
        return np.einsum("...ij,ijd->...id", p, self.values.astype(site.dtype)[self._rows(site)])

    def lower(self, q, k, site):
        near = Toeplitz(np.clip(site.relative_positions(), -2, 2) + 2, 5)
        i, j = np.indices((site.q_len, site.k_len))
        pairs = Dense(np.clip(j - i - site.offset, -2, 2) + 2, 5)
        scalars, *others = (x.astype(site.dtype) for x in (self.scalars, self.vectors, self.keys, self.values))
        return Terms(
            tables=(TableTerm(scalars, pairs),),
            queries=(QueryTerm(q, others[0][None], near),),
            keys=(KeyTerm(k, others[1][None], pairs),),
            values=(ValueTerm(others[2][None], near),),
        )

    def lift(self, q, k, site, grad):
        arrays = {
            "scalars": grad.tables[0].table,
            "vectors": grad.queries[0].weights[0],
            "keys": grad.keys[0].weights[0],
            "values": grad.values[0].weights[0],
        }
        return SchemeGradient(grad.queries[0].query, grad.keys[0].key, arrays)


def made(rng, cls=Everything, heads=4, depth=6, v_dim=5):
    return cls(*(rng.standard_normal(s) for s in ((heads, 5), (5, depth), (5, depth), (5, v_dim))))


@pytest.fixture
def call():
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((2, 4, 7, 6)), rng.standard_normal((2, 2, 10, 6)), rng.standard_normal((2, 2, 10, 5))
    return q, k, v, made(rng)


def test_every_kind_of_term_and_every_gradient(call):
    found = check_scheme(call[3], *call[:3], causal=True)
    assert max(found.values()) <= 1
    assert {f"gradient of {n}, {b}" for n in OPERANDS_AND_ARRAYS for b in BACKENDS} <= set(found)
    assert "in parts, float64, numba" in found
    assert "with offset -3, float32, numba" in found


# ---------------------------------------------------------------------------------------------- what is not right


class WrongFormula(Everything):
    def scores(self, q, k, site):
        return super().scores(q, k, site) * 1.0001


class WrongValues(Everything):
    def outputs(self, p, site):
        return -super().outputs(p, site)


class WrongLift(Everything):
    def lift(self, q, k, site, grad):
        found = super().lift(q, k, site, grad)
        found.arrays["keys"] = found.arrays["keys"] * 1.001
        return found


class LostQuery(Everything):
    def lift(self, q, k, site, grad):
        return SchemeGradient(None, grad.keys[0].key, super().lift(q, k, site, grad).arrays)


class FalselyRelative(Everything):
    """Counts from the first key of a call, and so differs in a part of it."""

    def scores(self, q, k, site):
        return super().scores(q, k, site) + np.arange(site.k_len)

    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        terms.biases = (np.arange(site.k_len, dtype=site.dtype)[(None,) * (len(site.batch) + 2)],)
        return terms


class FalselyIdle(Everything):
    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        terms.queries[0].query = q * 1
        return terms


class Excluding(Everything):
    """The furthest later keys are excluded."""

    def scores(self, q, k, site):
        return np.where(self._rows(site) == 4, -np.inf, super().scores(q, k, site))

    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        shut = np.where(self._rows(site) == 4, -np.inf, 0.0).astype(site.dtype)
        terms.biases = (shut[(None,) * (len(site.batch) + 1)],)
        return terms


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (WrongFormula, "differs from the formula: .*float64"),
        (WrongValues, "differs from the formula: .*as given, float32, numba"),
        (WrongLift, "gradient of position keys, (numpy|terms|numba): "),
        (LostQuery, "gradient of q, numba"),
        (FalselyRelative, "differs from the formula: in parts"),
        (FalselyIdle, "FalselyIdle: `lower` computes .* leave out reads_operand_values = False"),
    ],
)
def test_what_is_wrong_is_found(call, cls, words):
    wrong = made(np.random.default_rng(5), cls)
    with pytest.raises(AssertionError, match=words) as caught:
        check_scheme(wrong, *call[:3])
    if cls in (WrongLift, LostQuery):
        named = {part.split(",")[0] for part in str(caught.value).split(": ", 1)[1].split("; ")}
        assert len(named) == 1, "nothing else is wrong"


def test_keys_that_are_excluded_may_hold_anything(call):
    """Nothing is declared: -inf in the scores of the formula and in the terms says it."""
    q, k, v, _ = call
    own = made(np.random.default_rng(5), Excluding)
    assert max(check_scheme(own, q, k, v, gradients=False).values()) <= 1
    options = {"position": own, "offset": 0}
    wanted = rp.attention(q[..., :2, :], k, v, **options, backend="numpy")
    k, v = k.copy(), v.copy()
    k[..., 4:, :] = v[..., 4:, :] = np.nan
    for backend in BACKENDS:
        found = rp.attention(q[..., :2, :], k, v, **options, backend=backend)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


class Vectors(Everything):
    """Queries and keys of its own, the latter as they are, and a vector that is added to queries of a term."""

    content = reads_operand_values = True

    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        terms.query, terms.key, query = self.lower_vectors(q, k, site)[:3]
        terms.queries = (replace(terms.queries[0], query=query),)
        return terms

    def lower_vectors(self, q, k, site):
        return 1 * q, k, q + 0, k


class Absent(Vectors):
    def lower_vectors(self, q, k, site):
        return super().lower_vectors(q, k, site)[:3]


class Wider(Vectors):
    def lower_vectors(self, q, k, site):
        found = super().lower_vectors(q, k, site)
        self.calls = getattr(self, "calls", 0) + 1
        return found if self.calls == 1 else (found[0][..., :1], *found[1:])


class More(Vectors):
    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        terms.biases = (np.zeros_like(terms.query[..., :1]) + q.mean(),)
        return terms

    def lower_vectors(self, q, k, site):
        return super().lower_vectors(q, k, site)


class Other(Vectors):
    """What the class above makes is not all."""

    def lower(self, q, k, site):
        terms = super().lower(q, k, site)
        terms.biases = (np.zeros_like(terms.query[..., :1]) + q.mean(),)
        return terms


def test_vectors_are_made_in_each_prepared_call(call, monkeypatch):
    q, k, v, _ = call
    own, runs, run = made(np.random.default_rng(5), Vectors), [], Prepared.run
    monkeypatch.setattr(Prepared, "run", lambda self, *rest: runs.append(1) or run(self, *rest))
    ready = rp.prepare(np.full_like(q, np.nan), k, v, position=own)
    assert (ready(q, k, v) == rp.attention(q, k, v, position=own)).all()
    assert runs
    assert "as given, float64, numba" in check_scheme(own, q, k, v, gradients=False)


def test_vectors_of_packed_sequences(call):
    """They are made of each sequence's own queries and keys."""
    q, k, v, _ = call
    own, ends = made(np.random.default_rng(5), Vectors), ((0, 3, q.shape[-2]), (0, 5, k.shape[-2]))
    found = rp.attention(q, k, v, position=own, segments=tuple(map(np.array, ends)))
    parts = [
        rp.attention(q[..., a:b, :], k[..., c:d, :], v[..., c:d, :], position=own)
        for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True)
    ]
    np.testing.assert_array_equal(found, np.concatenate(parts, axis=-2))


def test_vectors_that_are_not_all_are_refused(call):
    q, k, v, _ = call
    for cls, words in ((Absent, "expected the vectors"), (More, "makes more of queries or keys")):
        with pytest.raises(AssertionError, match=rf"{cls.__name__}.lower_vectors: .*{words}"):
            check_scheme(made(np.random.default_rng(5), cls), q, k, v, gradients=False)
    ready = rp.prepare(q, k, v, position=made(np.random.default_rng(5), Wider))
    with pytest.raises(rp.RelposValueError, match=r"Wider.lower_vectors: expected .* found shape"):
        ready(q, k, v)
    own = made(np.random.default_rng(5), Other)
    assert not own.makes_vectors
    found = rp.prepare(np.zeros_like(q), k, v, position=own)(q, k, v)
    assert (found == rp.attention(q, k, v, position=own)).all()


class Bare(rp.Scheme):
    """The formula alone."""

    def scores(self, q, k, site):
        return np.arange(float(site.k_len))


class Lowered(Bare):
    def lower(self, q, k, site):
        return Terms(biases=(np.arange(site.k_len, dtype=site.dtype)[(None,) * (len(site.batch) + 2)],))


def test_a_formula_alone_is_enough_for_the_reference(call):
    q, k, v, _ = call
    wanted = rp.attention(q, k, v, mask=np.arange(10.0), backend="numpy")
    np.testing.assert_array_equal(rp.attention(q, k, v, position=Bare(), backend="numpy"), wanted)
    assert np.isfinite(rp.logits(q, k, position=Bare(), backend="numba")).all()
    for backend in ("terms", "numba"):
        with pytest.raises(rp.RelposTypeError, match=r"Bare has no lower\(q, k, site\).*backend='numpy'"):
            rp.attention(q, k, v, position=Bare(), backend=backend)
    with pytest.raises(rp.RelposTypeError, match="Bare has no lower"):
        rp.attention_vjp(q, k, v, position=Bare(), grad_out=wanted, backend="numpy")
    with pytest.raises(rp.RelposTypeError, match="Bare has no lower"):
        rp.prepare(q, k, v, position=Bare())
    with pytest.raises(rp.RelposTypeError, match="Bare has no lower"):
        rp.logits(q, k, position=Bare(), backend="terms")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_need_the_way_back(call, backend):
    q, k, v, _ = call
    with pytest.raises(rp.RelposTypeError, match=r"Lowered has no lift\(q, k, site, grad\)"):
        rp.attention_vjp(q, k, v, position=Lowered(), grad_out=v, backend=backend)
    assert max(check_scheme(Lowered(), q, k, v, gradients=False).values()) <= 1


def lowering(make, **flags):
    """A class that states what `make` returns."""
    return type("Own", (rp.Scheme,), {"lower": lambda self, q, k, site: make(q, k, site), **flags})()


def table(site, **other):
    rows = site.q_len + site.k_len - 1
    given = {"table": np.zeros((4, rows)), "index": Toeplitz(np.arange(rows), rows)} | other
    return Terms(tables=(TableTerm(**given),))


NEAR = Toeplitz(np.zeros(16, np.int64), 1)
REFUSED = {
    "no record": (lambda q, k, s: None, TypeError, "result: expected relpos_np.terms.Terms, found NoneType"),
    "no tuple": (lambda q, k, s: Terms(tables=TableTerm(np.zeros((1, 1)), NEAR)), TypeError, "tables: .*a tuple"),
    "heads": (lambda q, k, s: table(s, table=np.zeros((3, 16))), ValueError, "1 or 4 heads first, found .*3, 16"),
    "axes": (lambda q, k, s: table(s, table=np.zeros(16)), ValueError, "2 axes, found shape .16"),
    "list": (lambda q, k, s: table(s, table=[[0.0]]), TypeError, "an array, found list"),
    "dtype": (lambda q, k, s: table(s, table=np.zeros((4, 16), np.float32)), TypeError, "float64 .*float32"),
    "rows": (lambda q, k, s: table(s, index=Toeplitz(np.zeros(16, int), 9)), ValueError, "the 16 rows .*found 9"),
    "short lookup": (lambda q, k, s: table(s, index=Toeplitz(np.zeros(15, int), 16)), ValueError, "16,.*found .15"),
    "pairs": (lambda q, k, s: table(s, index=Dense(np.zeros((10, 7), int), 16)), ValueError, "10, 7"),
    "batch": (lambda q, k, s: table(s, index=Dense(np.zeros((3, 7, 10), int), 16)), ValueError, "3, 7, 10"),
    "no map": (lambda q, k, s: table(s, index=np.zeros(16, int)), TypeError, "Toeplitz or Dense, found ndarray"),
    "content": (lambda q, k, s: Terms(query=q), ValueError, "`content` of the class is False"),
    "vectors": (lambda q, k, s: Terms(queries=(QueryTerm(q[..., :5], np.zeros((1, 1, 6)), NEAR),)), ValueError, "7, 5"),
    "key heads": (lambda q, k, s: Terms(keys=(KeyTerm(np.repeat(k, 2, 1), np.zeros((1, 1, 6)), NEAR),)), ValueError,
                  "2, 10, 6.*found .2, 4, 10, 6"),
    "values": (lambda q, k, s: Terms(values=(ValueTerm(np.zeros((1, 1, 6)), NEAR),)), ValueError, "D_v = 5"),
    "bias axes": (lambda q, k, s: Terms(biases=(np.zeros((7, 10)),)), ValueError, "4 axes"),
    "bias": (lambda q, k, s: Terms(biases=(np.zeros((1, 3, 7, 10)),)), ValueError, "or length 1, found .1, 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", ["terms", "numba"])
def test_terms_that_do_not_fit_reach_no_kernel(call, name, backend):
    make, kind, words = REFUSED[name]
    with pytest.raises(rp.RelposError, match=f"position: Own.lower: .*{words}") as caught:
        rp.attention(*call[:3], position=lowering(make), backend=backend)
    assert isinstance(caught.value, kind)


def test_content_operands_that_do_not_fit_reach_no_kernel(call):
    q, k, v, _ = call
    for make, words in (
        (lambda q, k, s: Terms(), "0 of them"),
        (lambda q, k, s: Terms(query=q[0]), "4 axes"),
        (lambda q, k, s: Terms(query=q[:, :2]), "2, 4, 7"),
        (lambda q, k, s: Terms(query=q[..., :5]), "5 and 6"),
    ):
        with pytest.raises(rp.RelposValueError, match=words):
            rp.attention(q, k, v, position=lowering(make, content=True), backend="numba")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "SchemeGradient, found NoneType"),
        (SchemeGradient(q=np.zeros(3)), "q: expected shape"),
        (SchemeGradient(arrays={"absent": np.zeros(3)}), "'absent' is no array"),
        (SchemeGradient(arrays={"keys": np.zeros(3)}), r"'keys': expected shape \(5, 6\), found \(3,\)"),
    ],
)
def test_gradients_that_do_not_fit(call, found, words):
    own = made(np.random.default_rng(0), type("Own", (Everything,), {"lift": lambda *_: found}))
    with pytest.raises(rp.RelposError, match=words):
        rp.attention_vjp(*call[:3], grad_out=np.zeros((2, 4, 7, 5)), position=own, backend="numpy")


def test_outputs_of_another_shape(call):
    own = type("Own", (Bare,), {"outputs": lambda *_: np.zeros((3, 1, 1, 7, 5))})()
    with pytest.raises(rp.RelposValueError, match=r"Own adds the output has shape \(3, 2, 4, 7, 5\)"):
        rp.attention(*call[:3], position=own, backend="numpy")


class NamedLikeAnOperand(rp.Scheme):
    """Its array is called v, and its gradient is wrong."""

    def __init__(self, v):
        self.v = v

    def scores(self, q, k, site):
        return self.v.astype(site.dtype)

    def lower(self, q, k, site):
        return Terms(biases=(self.v.astype(site.dtype)[(None,) * (len(site.batch) + 1)],))

    def lift(self, q, k, site, grad):
        return SchemeGradient(arrays={"v": 2 * grad.biases[0].reshape(self.v.shape)})


def test_an_array_with_the_name_of_an_operand(call):
    own = NamedLikeAnOperand(np.random.default_rng(0).standard_normal((7, 10)))
    with pytest.raises(AssertionError, match="gradient of position v, numba"):
        check_scheme(own, *call[:3])


def test_scores_of_another_shape(call):
    own = type("Own", (Bare,), {"scores": lambda *_: np.zeros((3, 1, 1, 7, 10))})()
    with pytest.raises(rp.RelposValueError, match=r"Own adds the scores have shape \(3, 2, 4, 7, 10\)"):
        rp.attention(*call[:3], position=own, backend="numpy")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda q, k, v, own: ((None, q, k, v), {}), TypeError, "scheme: "),
        (lambda q, k, v, own: ((own, q[0, 0], k[0, 0], v[0, 0]), {}), ValueError, "q, k, v: "),
        (lambda q, k, v, own: ((own, q, k, v), {"dropout": 0.5}), TypeError, "dropout: "),
        (lambda q, k, v, own: ((own, q, k, v), {"seed": -1}), ValueError, "seed: "),
        (lambda q, k, v, own: ((own, q, k, v), {"colour": 1}), TypeError, "colour"),
    ],
)
def test_bad_arguments_of_the_check(call, given, error, words):
    operands, options = given(*call)
    with pytest.raises(rp.RelposError, match=words) as caught:
        check_scheme(*operands, **options)
    assert isinstance(caught.value, error)


# ---------------------------------------------------------------------------------------------- functions of scores


def cubed(s, b, h, i, j):
    return s + 0.1 * (1 + b) * s**3 - 0.2 * h * np.abs(i - j)


def slope_of_cubed(s, b, h, i, j):
    return 1 + 0.3 * (1 + b) * s**2


def changed_by_hand(q, k, v, position):
    """Loops over what `cubed` says, and attention with the result as a mask."""
    s = rp.logits(q, k, position=position, backend="numpy")
    found = np.empty_like(s)
    for b, h, i, j in np.ndindex(*s.shape):
        x = s[b, h, i, j]
        found[b, h, i, j] = x + 0.1 * (1 + b) * x**3 - 0.2 * h * abs(i - j)
    return rp.attention(0 * q, k, v, mask=found, backend="numpy", return_lse=True), found


@pytest.mark.parametrize("backend", ["numpy", "terms"])
def test_score_mod(call, backend):
    """After what other schemes add, before masks; the index of queries is no position."""
    q, k, v, _ = call
    own = rp.ALiBi()
    (out, lse), s = changed_by_hand(q, k, v, own)
    position = (own, rp.ScoreMod(cubed))
    found = rp.attention(q, k, v, position=position, backend=backend, return_lse=True)
    np.testing.assert_allclose(found[0], out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1], lse, rtol=1e-13)
    np.testing.assert_allclose(rp.logits(q, k, position=position, backend=backend), s, rtol=1e-11, atol=1e-12)
    # What comes first in the tuple changes nothing but the order of functions.
    twice = (rp.ScoreMod(lambda s, *_: 2 * s), own, rp.ScoreMod(lambda s, *_: s + 1))
    np.testing.assert_allclose(
        rp.logits(q, k, position=twice, causal=True, backend=backend),
        2 * rp.logits(q, k, position=own, causal=True, backend="numpy") + 1,
        rtol=1e-12,
    )


@pytest.mark.parametrize("backend", ["numpy", "terms"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_a_score_mod(call, backend, causal):
    q, k, v, _ = call
    rng = np.random.default_rng(1)
    own = made(rng)
    cap = rp.ScoreMod(lambda s, *_: 3 * np.tanh(s / 3), derivative=lambda s, *_: 1 / np.cosh(s / 3) ** 2)
    shut = rp.ScoreMod(lambda s, b, h, i, j: np.where(j == 2, -np.inf, s), derivative=lambda s, *_: np.ones_like(s))
    position = (own, rp.ScoreMod(cubed, derivative=slope_of_cubed), cap, shut)
    options = {"position": position, "causal": causal}
    out, lse = rp.attention(q, k, v, **options, backend=backend, return_lse=True)
    weights = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    grads = rp.attention_vjp(q, k, v, grad_out=weights[0], grad_lse=weights[1], **options, backend=backend)
    assert (grads.k[..., 2, :] == 0).all()
    for name, at in (("q", 0), ("k", 1), ("v", 2)):
        direction = rng.standard_normal(call[at].shape)

        def loss(t, at=at, direction=direction):
            moved = [x + t * direction if n == at else x for n, x in enumerate(call[:3])]
            out, lse = rp.attention(*moved, **options, backend="numpy", return_lse=True)
            return float((out * weights[0]).sum() + (lse * weights[1]).sum())

        assert_is_slope(getattr(grads, name), direction, loss)
    direction = rng.standard_normal(own.scalars.shape)

    def loss_of_table(t):
        moved = Everything(own.scalars + t * direction, own.vectors, own.keys, own.values)
        out, lse = rp.attention(
            q, k, v, position=(moved, *position[1:]), causal=causal, backend="numpy", return_lse=True
        )
        return float((out * weights[0]).sum() + (lse * weights[1]).sum())

    assert_is_slope(grads.position[0]["scalars"], direction, loss_of_table)
    assert grads.position[1:] == ({}, {}, {})


@pytest.mark.parametrize("backend", ["numpy", "terms"])
def test_what_a_score_mod_excludes_is_not_capped(call, backend):
    """The cap is for scores; a key that a function has excluded stays so, and may hold anything."""
    q, k, v, _ = call
    one = {"derivative": lambda s, *_: np.ones_like(s)}
    shut = rp.ScoreMod(lambda s, b, h, i, j: np.where(j == 2, -np.inf, s), **one)
    again = rp.ScoreMod(lambda s, *_: np.maximum(s, -9.0), **one)
    mask = np.arange(k.shape[-2]) != 2
    expected = rp.attention(q, k, v, mask=np.broadcast_to(mask, (7, 10)), softcap=2.0, backend="numpy")
    options = {"softcap": 2.0, "backend": backend}
    np.testing.assert_allclose(rp.attention(q, k, v, position=shut, **options), expected, rtol=0, atol=1e-14)
    k, v = k.copy(), v.copy()
    k[..., 2, :] = v[..., 2, :] = np.nan
    for position in (shut, (shut, again)):
        np.testing.assert_allclose(rp.attention(q, k, v, position=position, **options), expected, rtol=0, atol=1e-14)
        grads = rp.attention_vjp(q, k, v, position=position, grad_out=expected, **options)
        assert (grads.k[..., 2, :] == 0).all()
        assert np.isfinite(grads.q).all()


def test_indices_of_several_batch_axes_and_of_none():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 5, 6))
    for x, count in ((q, np.arange(6).reshape(2, 3, 1, 1, 1)), (q[0, 0], 0), (q[0, 0, 0], 0)):
        found = rp.logits(x, x, position=rp.ScoreMod(lambda s, b, h, i, j: 0 * s + b), backend="numpy")
        assert (found == count).all()
        assert found.shape == (*x.shape[:-1], 5)


def test_a_score_mod_in_half_precision_and_without_keys(call):
    q, k, v = (x.astype(np.float16) for x in call[:3])
    seen = []
    mod = rp.ScoreMod(lambda s, b, h, i, j: (seen.append(s.dtype), s / 2)[1])
    out = rp.attention(q, k, v, position=mod, backend="numpy")
    assert out.dtype == np.float16
    assert seen == [np.float32]
    np.testing.assert_array_equal(out, rp.attention(q, k, v, scale=6**-0.5 / 2, backend="numpy"))
    assert (rp.attention(q, k[..., :0, :], v[..., :0, :], position=mod, backend="terms") == 0).all()


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_kernels_refuse_a_score_mod(call, backend):
    q, k, v, _ = call
    mod = rp.ScoreMod(cubed, derivative=slope_of_cubed)
    words = f"ScoreMod changes scores as a whole.*expected backend 'numpy' or 'terms', found '{backend}'"
    for run in (
        lambda: rp.attention(q, k, v, position=(rp.ALiBi(), mod), backend=backend),
        lambda: rp.attention_vjp(q, k, v, position=mod, grad_out=v, backend=backend),
        lambda: rp.prepare(q, k, v, position=mod, backend=backend),
        lambda: partial(q, k, v, position=mod, backend=backend),
    ):
        with pytest.raises(rp.RelposTypeError, match=words):
            run()
    # The scores themselves are the reference's on these backends.
    assert rp.logits(q, k, position=mod, backend=backend).shape == (2, 4, 7, 10)


def test_parts_of_a_call_refuse_a_score_mod(call):
    """Its indices would be those of the part; all of a call is a part, too."""
    q, k, v, _ = call
    mod = rp.ScoreMod(cubed)
    whole = rp.attention(q, k, v, position=mod, backend="terms")
    np.testing.assert_array_equal(merge(partial(q, k, v, position=mod, backend="terms"))[0], whole)
    with pytest.raises(rp.RelposError, match="ScoreMod"):
        partial(q, k[..., :5, :], v[..., :5, :], keys=(0, 10), position=mod, backend="terms")


@pytest.mark.parametrize("backend", ["numpy", "terms"])
def test_a_gradient_needs_the_derivative(call, backend):
    q, k, v, _ = call
    with pytest.raises(rp.RelposTypeError, match="ScoreMod has no derivative of what it makes of the scores"):
        rp.attention_vjp(q, k, v, position=rp.ScoreMod(cubed), grad_out=v, backend=backend)
    mask = {"mask": np.zeros((7, 10)), "mask_gradient": True}
    with pytest.raises(rp.RelposValueError, match="mask_gradient: no gradient of a float mask beside ScoreMod, which"):
        rp.attention_vjp(q, k, v, position=(rp.ALiBi(), rp.ScoreMod(cubed)), grad_out=v, **mask, backend=backend)


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda: rp.ScoreMod(3), "function: expected a function of .*found 3"),
        (lambda: rp.ScoreMod(cubed, derivative="x"), "derivative: .*found 'x'"),
        (lambda: rp.ScoreMod(lambda s, *_: s > 0), "function: expected floating-point numbers .*found dtype bool"),
        (lambda: rp.ScoreMod(lambda s, *_: s[..., :3]), r"function: what it returns, \(2, 4, 7, 3\), does not"),
        (lambda: rp.ScoreMod(lambda s, *_: s[None]), r"function: what it returns, \(1, 2, 4, 7, 10\), does not"),
    ],
)
def test_bad_functions(call, mod, words):
    q, k, v, _ = call
    with pytest.raises(rp.RelposError, match=words):
        rp.attention(q, k, v, position=mod(), backend="numpy")


def test_a_score_mod_prints_names_and_travels_as_its_function_does():
    mod = rp.ScoreMod(cubed, derivative=slope_of_cubed)
    assert repr(mod) == "ScoreMod(cubed, derivative=slope_of_cubed)"
    assert pickle.loads(pickle.dumps(mod)).function is cubed


def test_a_score_mod_within_a_limit_of_memory(call):
    q, k, v, _ = call
    mod, long = rp.ScoreMod(cubed), np.zeros((1, 8000, 4))
    wanted = rp.attention(q, k, v, position=mod, backend="numpy")
    with rp.memory_limit(1 << 26):
        np.testing.assert_array_equal(rp.attention(q, k, v, position=mod, backend="numpy"), wanted)
        with pytest.raises(rp.RelposMemoryError):
            rp.attention(long, long, long, position=mod, backend="numpy")
