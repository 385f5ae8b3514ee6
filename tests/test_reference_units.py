"""References of every scheme against 40 digits, ordinary and very large scores; gradients of values by long double."""

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._calls.lowering import all_terms, each_lowered
from relpos_np._contract import check
from relpos_np._contract.terms import Terms
from relpos_np._dense import from_terms
from relpos_np._dense.backward import backward
from relpos_np._dense.bounds import widest
from relpos_np._dense.slopes import Slopes
from relpos_np.testing.cases import edges
from tests.bounds import exactly
from tests.every import ATTENTION


def off(found, wanted, tolerated):
    """The largest error, in units of what is tolerated; what is infinite is so in both."""
    pairs = zip(found.ravel(), wanted.ravel(), np.broadcast_to(tolerated, found.shape).ravel(), strict=True)
    errors = [0.0]
    for number, right, most in pairs:
        if Decimal(float(number)) != right:
            errors.append(float(abs(Decimal(float(number)) - right)) / most if np.isfinite(number) and most else np.inf)
    return max(errors)


def gradients_of_values(e, grad_out):
    """What p^T g is in more digits, and p^T |g|."""
    wide = widest(np.dtype(np.float64))
    problem, _, _ = check.problem(e.q, e.k, e.v, **e.kwargs)
    stored = {name: getattr(problem, name).astype(wide) for name in ("stored_q", "stored_k", "stored_v")}
    problem = replace(problem, **stored, site=replace(problem.site, dtype=wide))
    terms = all_terms(each_lowered((e.position,), problem))
    s = from_terms.scores(problem, terms, Slopes())
    return [backward(problem, Terms(turn=terms.turn), s, g.astype(wide), None)[1] for g in (grad_out, np.abs(grad_out))]


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_within_four_units(name, variant):
    """Outputs within 4 eps Σ p|v| (1 + max |s|), and the log-sum-exp within 4 eps (1 + max |s| + ln L_k)."""
    base = testing.example(name, variant=variant, size="tiny", dtype="float64")
    for e in (base, *(one for one in edges(base) if one.edge == "large_logits")):
        call = {"position": e.position, **e.kwargs}
        wanted, tolerated = exactly(e.q, e.k, e.v, **call), e.tolerated()
        for backend in ("numpy", "terms"):
            found = rp.attention(e.q, e.k, e.v, return_lse=True, backend=backend, **call)
            errors = [off(*each) for each in zip(found, wanted, tolerated, strict=True)]
            assert max(errors) <= 1, (e.edge, backend)


@pytest.mark.skipif(widest(np.dtype(np.float64)) == np.float64, reason="long double has no more digits here")
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_gradients_of_values_within_four_units(name, variant, rng):
    """Within 4 eps Σ p|g| (1 + max |s|), over queries; of values that turn by the largest of these."""
    base = testing.example(name, variant=variant, size="tiny", dtype="float64")
    for e in (base, *(one for one in edges(base) if one.edge == "large_logits")):
        grad_out = rng.standard_normal(e.expected.shape)
        wanted, size = gradients_of_values(e, grad_out)
        size = np.abs(size).max() if (name, variant) == ("rotary", "values") else size
        allowed = 4 * np.finfo(np.float64).eps * (1 + e.logit_bound) * size
        for backend in ("numpy", "terms"):
            call = {"grad_out": grad_out, "position": e.position, "backend": backend, **e.kwargs}
            found = rp.attention_vjp(e.q, e.k, e.v, **call).v
            assert (np.abs(found - wanted) <= allowed).all(), (e.edge, backend)
