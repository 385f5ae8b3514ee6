"""Row 37: `Scheme.memory_bound` is what a scheme holds for pairs of query and key at most, and never absurdly more."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._contract.terms import nothing
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build
from tests.every import ATTENTION
from tests.faults.test_memory import peak

# Numbers of queries, of keys, and channels; in each, something else is the larger part of what a scheme holds.
SIZES = {
    "many pairs": lambda n: lengths(2 * n, 2 * n, 6, 2),
    "many queries": lambda n: lengths(4 * n, n // 2, 6, 2),
    "many keys": lambda n: lengths(n // 2, 4 * n, 6, 2),
    "wide vectors": lambda n: lengths(n, n, 40, 36),
}
# Frames, records, and blocks of a fixed size, which fill up before anything grows.
FIXED, BLOCKS = 1 << 16, 1 << 20


def call_of(name, variant, size):
    one = build(name, size, dtype="float32", seed=0, variant=variant)
    problem, _, _ = check.problem(one.q, one.k, one.v, **one.kwargs)
    problem.pack()
    one.position.check(problem.site)
    return one.position, problem


def measured(name, variant, size):
    """Bytes that each method of a scheme takes at once, and the bounds on them, with nothing kept from before."""
    used = {}

    def run(method, *arguments):
        used[method] = peak(getattr(scheme, method), *arguments)[0]

    scheme, problem = call_of(name, variant, size)
    q, k, site = problem.q, problem.k, problem.site
    all_k = repeat_heads(k, site.heads)
    run("transform", q, all_k, site)
    run("scores", q, all_k, site)
    run("turn_values", repeat_heads(problem.v, site.heads), site)
    run("turn_output", np.ones(problem.out_shape, np.float32), site)
    run("outputs", np.ones((*site.batch, site.heads, site.q_len, site.k_len), np.float32), site)
    scheme, _ = call_of(name, variant, size)
    run("lower", q, k, site)
    terms = scheme.lower(q, k, site)
    grads, _ = nothing(terms, q, k, problem.v)
    if not scheme.content:
        grads.query = grads.key = None
    run("lift", q, k, site, grads)
    return used, scheme.memory_bound(site)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_37_what_a_scheme_holds_for_pairs(name, variant, size):
    """Twice the lengths take twice of what is linear, which the differences leave out, and more of the rest."""
    try:
        measured(name, variant, SIZES[size](8))  # what is imported and kept for the process
        (used, held), (used_twice, held_twice) = (measured(name, variant, SIZES[size](n)) for n in (64, 128))
    except rp.RelposValueError as error:
        if size == "many pairs":
            raise
        pytest.skip(f"not a call of this scheme: {error}")
    grown = {method: used_twice[method] - 2 * used[method] for method in used}
    for side, methods in {
        "formula": ("transform", "scores", "turn_values", "turn_output", "outputs"),
        "lower": ("lower",),
        "lift": ("lift",),
    }.items():
        most = max(0, *(grown[method] for method in methods))
        bound = getattr(held_twice, side) - 2 * getattr(held, side)
        assert most <= 1.05 * bound + FIXED, f"{side}: {most} bytes, bounded by {bound}: override memory_bound"
        assert bound <= 8 * most + BLOCKS, f"{side}: {most} bytes, bounded by {bound}: memory_bound is absurdly large"


@pytest.mark.parametrize("scheme", [rp.Rotary(), rp.XPos()], ids=["rotary", "xpos"])
def test_row_37_what_turned_operands_take(scheme, rng):
    """They grow with items and heads as well as with lengths, which cancel out above."""
    q, k, v = rng.standard_normal((3, 32, 8, 64, 32)).astype(np.float32)
    site = check.problem(q, k, v)[0].site
    used = peak(scheme.transform, q, k, site)[0]
    assert q.nbytes + k.nbytes <= used <= 1.05 * scheme.memory_bound(site).formula + FIXED
