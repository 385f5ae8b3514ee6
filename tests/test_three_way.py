"""Loops == formula == terms on every backend, for every scheme of the register, forward and back.

Nothing is listed here: schemes, variants, loops and what may be chosen come from the registration, sizes from
hypothesis. Small calls are compared with the loops; large ones, beyond what any example uses, with the formula, and in
some rows with the loops.
"""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np.errors import RelposError
from relpos_np.testing.arguments import arguments
from tests import naive
from tests.compare import assert_backends, assert_close, assert_float32_promise, slope
from tests.every import ABSOLUTE, ATTENTION, remade
from tests.sizes import EDGES
from tests.strategies import EVERY, KINDS, Case, Position, cases, fits, float64_tolerance, shaping

BACKENDS = rp.backend.HOST_BACKENDS
SCHEMES = [name for name, info in rp.SCHEMES.items() if info.kind == "attention"]
TINY = ((2,), (2,), (2,))


def gradients(case, backend, **given):
    """Gradients of q, k, v, and of the arrays of each scheme in turn."""
    options = case.options(np.float64)
    options["position"] = case.schemes(np.float64)
    found = rp.attention_vjp(*case.operands(np.float64), **options, **given, backend=backend)
    given = {name: getattr(found, name) for name in case.numbers(np.float64)}
    return [found.q, found.k, found.v, *found.position, given]


def weights(case):
    """Seeded gradients of the output and of the log-sum-exp."""
    rng = np.random.default_rng([case.seed, 7])
    shape = (*case.batch, case.heads, case.q_len)
    return {"grad_out": rng.standard_normal((*shape, case.v_dim)), "grad_lse": rng.standard_normal(shape)}


def directions_of(case, grads):
    """A seeded direction for each array that has a gradient."""
    rng = np.random.default_rng([case.seed, 8])

    def direction(x):
        if isinstance(x, dict):
            return {name: direction(array) for name, array in x.items()}
        return rng.standard_normal(x.shape)

    return [direction(x) for x in grads]


def along(grads, directions):
    """The gradient's product with the direction, and how large its parts are."""
    flat = [(x[key], d[key]) for x, d in zip(grads, directions, strict=True) if isinstance(x, dict) for key in x]
    flat += [(x, d) for x, d in zip(grads, directions, strict=True) if not isinstance(x, dict)]
    parts = [x * d for x, d in flat]
    return sum(float(p.sum()) for p in parts), sum(float(np.square(p).sum()) for p in parts) ** 0.5


class Moved(Case):
    """A case some way along a direction in the space of all its arrays."""

    def operands(self, dtype, rounded=None):
        found = super().operands(dtype, rounded)
        return [x + self.far * d for x, d in zip(found, self.directions[:3], strict=True)]

    def schemes(self, dtype, rounded=None):
        found = super().schemes(dtype, rounded)
        return tuple(
            remade(scheme, lambda name, x, d=d: x + self.far * d[name] if name in d else x)
            for scheme, d in zip(found, self.directions[3:-1], strict=True)
        )

    def numbers(self, dtype, rounded=None):
        found = super().numbers(dtype, rounded)
        return {name: x + self.far * self.directions[-1][name] for name, x in found.items()}


def moved(case, directions, far):
    other = Moved(**vars_of(case))
    object.__setattr__(other, "directions", directions)
    object.__setattr__(other, "far", far)
    return other


def vars_of(case):
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def every_gradient(case):
    """Those of `weights`, by backend."""
    return {backend: gradients(case, backend, **weights(case)) for backend in BACKENDS}


def _bend(loss, step):
    """The second difference of a loss, per step."""
    return (loss(step) - 2 * loss(0.0) + loss(-step)) / step


def assert_slopes(case, evaluate, grads):
    """Gradients by backend, along a direction, are the slope of a loss; False where that has a kink."""
    given, directions = weights(case), directions_of(case, next(iter(grads.values())))

    @cache
    def loss(far):
        out, lse = evaluate(moved(case, directions, far))
        lse = np.where(np.isneginf(lse), 0.0, lse)
        return float((out * given["grad_out"]).sum() + (lse * given["grad_lse"]).sum())

    here = abs(loss(0.0))
    for backend, whole in grads.items():
        found, size = along(whole, directions)
        scale = here + size + 1.0
        # Of what is smooth they differ by rounding alone; kinks move both, by how much nobody knows. One right here
        # moves both alike, but bends the loss by as much per step however short that is. A curve that is only sharp
        # does neither over a shorter step.
        for step in (1e-4, 1e-5):
            wide, narrow = slope(loss, step), slope(loss, step / 2)
            bend = abs(2 * _bend(loss, step / 2) - _bend(loss, step))
            if max(abs(wide - narrow), bend) <= 1e-8 * scale:
                break
        else:
            return False
        known = 1e-9 * scale + 4 * abs(wide - narrow) + bend
        assert abs(found - narrow) <= known, f"{backend}: gradient {found}, slope {narrow}"
    return True


# ---------------------------------------------------------------------------------------------- what is registered


@pytest.mark.parametrize("kind", EVERY)
def test_registered_examples(kind):
    """Every scheme and variant as it is registered, with grouped heads and D_v other than D."""
    case = Case(1, TINY, (2,), 2, 2, 9, 13, 6, 5, positions=(EVERY[kind],))
    for one in (case, replace(case, causal=True, amplitude=3.0)):
        expected = one.naive()
        assert_backends(one, expected, BACKENDS)
        # A kink may lie in the way, but not in all of these.
    seeded = (replace(case, seed=seed) for seed in range(1, 4))
    assert any(assert_slopes(one, Case.naive, every_gradient(one)) for one in seeded)


@pytest.mark.parametrize(("name", "variant"), ABSOLUTE)
@pytest.mark.parametrize("start", [0, 3])
def test_absolute_encodings(name, variant, start):
    """Inputs and a vector per position."""
    one = testing.example(name, variant=variant, dtype="float64", size="tiny")
    length = one.x.shape[-2]
    positions = np.arange(start, start + length)
    rows = naive.of(name, arguments(one.encoding), positions=positions)
    np.testing.assert_allclose(one.encoding.encode(positions), rows, rtol=0, atol=1e-15 * (2 + positions.max()))
    np.testing.assert_allclose(one.encoding(one.x), one.x + naive.of(name, arguments(one.encoding), positions=length))


# ---------------------------------------------------------------------------------------------- small calls


@pytest.mark.parametrize("name", SCHEMES)
def test_generated_calls(name):
    """Any call of one scheme, whatever its variant and choices."""

    @given(cases(small=True, name=name))
    def run(case):
        assume(case.positions)
        expected = case.naive()
        assert_backends(case, expected, BACKENDS)

    run()


@pytest.mark.parametrize("name", SCHEMES)
def test_generated_gradients(name):
    """Any call of one scheme: the loops, moved along all arrays at once, change as the gradients say."""

    @given(cases(small=True, name=name))
    @settings(max_examples=settings().max_examples // 4)
    def run(case):
        assume(case.positions)
        calm = replace(case, amplitude=1.0)
        assume(assert_slopes(calm, Case.naive, every_gradient(calm)))

    run()


# ---------------------------------------------------------------------------------------------- beyond examples


BATCHES = ((), (5,), (70,), (2, 1, 3), (3, 2, 1, 2))
HEADS = ((1, 1), (2, 2), (1, 5), (33, 1), (3, 7))
LENGTHS = (2, *EDGES, 300, 1500)
# Scores of a call, and numbers of an operand, at most.
PAIRS, NUMBERS = 600_000, 3_000_000


@st.composite
def large_cases(draw, name):
    """Several batch axes, many items and heads, lengths beside blocks' edges, far more queries than keys or fewer."""
    batch, (kv_heads, group) = draw(st.sampled_from(BATCHES)), draw(st.sampled_from(HEADS))
    items, heads = prod(batch), kv_heads * group
    some = draw(st.sampled_from([n for n in LENGTHS if items * heads * n <= PAIRS]))
    others = draw(st.sampled_from([n for n in LENGTHS if items * heads * some * n <= PAIRS]))
    q_len, k_len = draw(st.permutations([some, others]))
    variant = draw(st.sampled_from(rp.SCHEMES[name].variants or (None,)))
    position = Position(name, variant, tuple(draw(st.lists(st.integers(0, 5), max_size=6))))
    rows = items * kv_heads * max(group * q_len, k_len)
    depth = draw(st.sampled_from([n for n in (2, 8, 17, 33, 160) if rows * n <= NUMBERS]))
    v_dim = draw(st.sampled_from([n for n in (1, 8, 33) if rows * n <= NUMBERS]))
    try:
        case = Case(
            draw(st.integers(0, 999)), (batch,) * 3, batch, kv_heads, group, q_len, k_len, depth, v_dim,
            positions=(position,), amplitude=draw(st.sampled_from([1.0, 30.0])),
        )  # fmt: skip
    except RelposError:
        reject()
    # Grids have lengths of their own, and as many queries as keys.
    few = {"given": None, "q_len": min(q_len, k_len), "k_len": min(q_len, k_len)}
    if items * case.heads * case.q_len * case.k_len > PAIRS:
        case = replace(case, **few)
    assume(items * case.heads * case.q_len * case.k_len <= PAIRS)
    rng = np.random.default_rng(case.seed)
    lengths = rng.integers(0, case.k_len + 1, batch).tolist() if draw(st.booleans()) else None
    usual = {
        "causal": draw(st.booleans()),
        "key_lengths": lengths,
        "window": draw(st.sampled_from([None, (30, None), (100, 7)])),
        "offset": draw(st.sampled_from([None, 0, 5])),
    }
    case = replace(case, **usual | draw(st.one_of(st.just({}), shaping(batch, case.k_len))))
    # Some schemes know no queries past the last key, or before the first.
    for changes in ({}, {"offset": None}, {"offset": None, "given": None, "q_len": min(case.q_len, case.k_len)}):
        if replace(case, **changes).legal():
            return replace(case, **changes)
    return reject()


def some_rows(case):
    """Rows (b, h, i) with batch items flattened: the corners, and others."""
    shape = (prod(case.batch), case.heads, case.q_len)
    rng = np.random.default_rng(case.seed)
    rows = {tuple(n - 1 for n in shape), (0, 0, 0), (shape[0] - 1, 0, 0)}
    rows |= {tuple(int(x) for x in rng.integers(0, shape)) for _ in range(3)}
    return sorted(rows)


def at_rows(case, out, lse, rows):
    """What stands in some rows of a result."""
    shape = (prod(case.batch), case.heads, case.q_len)
    picked = tuple(np.array(rows).T)
    out = np.broadcast_to(out, (*case.batch, *shape[1:], case.v_dim)).reshape(*shape, -1)
    return out[picked], np.broadcast_to(lse, (*case.batch, *shape[1:])).reshape(shape)[picked]


def assert_agreement(case):
    """Formula == terms == kernels everywhere, and == the loops in some rows."""
    expected = case.attention(np.float64, "numpy")
    tolerance = float64_tolerance(case)
    assert_backends(case, expected, BACKENDS[1:], tolerance)
    rows = some_rows(case)
    tolerance = at_rows(case, *tolerance, rows)
    for found, wanted, allowed in zip(at_rows(case, *expected, rows), case.naive(rows), tolerance, strict=True):
        assert_close(found, wanted, allowed, f"numpy, at one of the rows {rows}", f"\n{case}")


def extremes(name):
    """More heads than 32, and more than ten times as many queries as keys, where the scheme knows such calls."""
    for kv_heads, q_len, k_len in ((35, 5, 7), (2, 130, 11)):
        position = Position(name, next(iter(rp.SCHEMES[name].variants), None), ())
        with suppress(RelposError):
            case = Case(7, ((),) * 3, (), kv_heads, 1, q_len, k_len, 8, 8, positions=(position,), amplitude=1.0)
            if case.legal():
                yield case


@pytest.mark.parametrize("name", SCHEMES)
def test_beyond_examples(name):
    """Large calls: values, float32, and each gradient of each backend, number by number and as a slope."""
    for one in extremes(name):
        assert_agreement(one)

    @given(large_cases(name))
    @settings(max_examples=settings().max_examples // 5)
    def run(case):
        assert_agreement(case)
        assert_float32_promise(case)
        calm = replace(case, amplitude=1.0)
        grads = every_gradient(calm)
        expected = grads["numpy"]
        for backend in BACKENDS[1:]:
            for found, wanted in zip(grads[backend], expected, strict=True):
                pairs = [(found[n], wanted[n]) for n in wanted] if isinstance(wanted, dict) else [(found, wanted)]
                for x, y in pairs:
                    assert np.abs(x - y).max(initial=0.0) <= 1e-11 * max(np.abs(y).max(initial=0.0), 1.0)
        # All gradients are the same numbers, and so are all values: one slope is that of all of them.
        assert_slopes(calm, lambda one: one.attention(np.float64, "numba"), {"numpy": expected})

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_many_keys(kind):
    """More keys than 32 ranges of them hold, and scores that float32 must not exponentiate as they are."""
    try:
        case = Case(2, ((), (), ()), (), 1, 1, 1, 60_000, 2, 1, positions=(KINDS[kind],), amplitude=90.0)
        if case.k_len < 60_000 or not (case.legal(np.float64) and case.legal(np.float32)):
            return
        expected = case.attention(np.float64, "numpy")
    except RelposError:  # rows or grids for so many keys are not to be had
        return
    assert_backends(case, expected, ("numba",))
    assert_float32_promise(case)


@pytest.mark.parametrize("name", SCHEMES)
def test_far_away(name):
    """Schemes that say so lose no digits however far away the queries are."""
    position = Position(name)
    if not fits(position, 1 << 40):
        return
    case = Case(4, TINY, (2,), 1, 2, 9, 12, 6, 5, positions=(position,), offset=1 << 40)
    if case.legal():
        expected = case.naive()
        assert_backends(case, expected, BACKENDS)


def test_every_pair_is_there():
    """The lists above are those of the register."""
    assert {name for name, _ in ATTENTION} == set(SCHEMES)
    assert len(KINDS) == len(ATTENTION)
