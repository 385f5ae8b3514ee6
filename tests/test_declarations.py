"""What a scheme declares of itself is what it does, for every scheme and variant of the registry."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._dense import from_terms
from relpos_np.testing import example
from tests.every import ATTENTION

VARIANTS = {name: [variant for other, variant in ATTENTION if other == name] for name, _ in ATTENTION}


def problem_of(name, variant, dtype=np.float64):
    one = example(name, dtype=dtype, variant=variant, size="tiny")
    return check.problem(one.q, one.k, one.v, **one.kwargs)[0], one.position


def arrays(record, given):
    """Every array in a record of terms, but those that were given: with where it stands."""
    if isinstance(record, np.ndarray):
        return {} if any(record is x for x in given) else {"": record}
    if isinstance(record, tuple):
        parts = {str(n): x for n, x in enumerate(record)}
    elif is_dataclass(record):
        parts = {field.name: getattr(record, field.name) for field in fields(record)}
    else:
        return {}
    return {f"{name}.{inner}": x for name, part in parts.items() for inner, x in arrays(part, given).items()}


def computes(scheme, q, k, site):
    """Whether numbers in q or k turn up in the terms: NaN makes NaN where zeros make none."""
    found = []
    for number in (0.0, np.nan):
        given = tuple(np.full(x.shape, number, x.dtype) for x in (q, k))
        made = arrays(scheme.lower(*given, site), given)
        found.append({at: np.isnan(x) for at, x in made.items() if x.dtype.kind == "f"})
    zeros, nans = found
    return zeros.keys() != nans.keys() or any((zeros[at] != nans[at]).any() for at in zeros)


@pytest.mark.parametrize("name", VARIANTS)
def test_computes_is_declared(name):
    for variant in VARIANTS[name]:
        problem, scheme = problem_of(name, variant)
        found = computes(scheme, problem.q, problem.k, problem.site)
        assert found == scheme.reads_operand_values, f"{name} {variant}: declare reads_operand_values = {found}"


def lasting(terms):
    """Every array in terms, but for vectors."""
    return {at: x.tobytes() for at, x in arrays(terms, terms.vectors()).items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_vectors_are_all_that_is_made(name, rng):
    """Of one call and of another, in grouped heads where the scheme takes them."""
    for variant in VARIANTS[name]:
        problem, scheme = problem_of(name, variant)
        site = problem.site
        if not scheme.makes_vectors:
            continue
        for q, k in ((problem.q, problem.k), (rng.standard_normal(problem.q.shape), -problem.k)):
            found, terms = scheme.lower_vectors(q, k, site), scheme.lower(q, k, site)
            assert [(x.shape, x.tobytes()) for x in found] == [(x.shape, x.tobytes()) for x in terms.vectors()]
            assert lasting(terms) == lasting(scheme.lower(problem.q, problem.k, site))


@pytest.mark.parametrize("name", VARIANTS)
def test_content_is_declared(name):
    for variant in VARIANTS[name]:
        problem, scheme = problem_of(name, variant)
        terms = scheme.lower(problem.q, problem.k, problem.site)
        found = terms.query is not None or terms.key is not None
        assert found == scheme.content, f"{name} {variant}: declare content = {found}"


@pytest.mark.parametrize("name", [name for name in VARIANTS if rp.SCHEMES[name].cls.relative])
def test_relative_is_true(name):
    """Pairs at one distance get the same score in calls of other lengths and offsets, if all vectors are alike."""
    for variant in VARIANTS[name]:
        _, scheme = problem_of(name, variant)
        problem, _ = problem_of(name, variant)
        if not scheme.relative:
            continue
        vector = problem.q[:1, :, :1]
        seen = {}
        for q_len, k_len, offset in ((9, 14, 5), (13, 6, -2), (4, 11, 0)):
            q = np.repeat(vector, q_len, axis=-2)
            call = check.problem(q, np.repeat(vector, k_len, axis=-2), None, offset=offset)[0]
            s = from_terms.scores(call, scheme.lower(call.q, call.k, call.site))[0]
            for i, j in np.ndindex(q_len, k_len):
                np.testing.assert_allclose(s[:, i, j], seen.setdefault(j - i - offset, s[:, i, j]), rtol=1e-12)
        assert len(seen) > 10
