"""Bounds of errors and the errors, on random calls of every scheme."""

from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple

import ml_dtypes
import numpy as np

import relpos_np as rp
from relpos_np._calls.lowering import all_terms, each_lowered
from relpos_np._contract import check
from relpos_np._dense.bounds import widest
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build, example
from tests import exact
from tests.every import ATTENTION

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Ratios(NamedTuple):
    """Elements that were compared, those outside, and bounds over errors where there is an error."""

    elements: int
    outside: int
    ratios: np.ndarray

    def __add__(self, other):
        ratios = np.concatenate([self.ratios, other.ratios])
        return Ratios(self.elements + other.elements, self.outside + other.outside, ratios)


NOTHING = Ratios(0, 0, np.zeros(0))


@np.errstate(over="ignore")  # of half precision
def random_call(name, variant, dtype, rng):
    """A random call of a scheme: lengths, masks, cap, sinks, scale and values of any size."""
    size = lengths(*(int(n) for n in rng.integers(1, 13, 2)), int(rng.integers(1, 7)) * 2, int(rng.integers(1, 5)) * 2)
    seed = int(rng.integers(1 << 30))
    try:
        e = build(name, size, dtype=dtype, seed=seed, variant=variant)
        rp.attention(e.q, e.k, e.v, position=e.position, backend="numpy", **e.kwargs)
    except rp.RelposError:
        e = example(name, size="tiny", dtype=dtype, seed=seed, variant=variant)
    q, k, v = e.q, e.k, e.v
    (batch, heads, q_len, _), k_len = q.shape, k.shape[2]
    options = dict(e.kwargs)
    if rng.random() < 0.3:
        q = (q * dtype(rng.choice([8.0, 0.01]))).astype(dtype)
    if rng.random() < 0.3:
        v = (v * dtype(rng.choice([1.0, 1e-5, 100.0])) + dtype(rng.choice([3.0, 0.0]))).astype(dtype)
    kind = rng.integers(5)
    if kind == 1:
        options["mask"] = rng.random((batch, heads, q_len, k_len)) < 0.6
        options["mask"][0, :, q_len // 2] = False
    elif kind == 2:
        mask = rng.standard_normal((q_len, k_len))
        mask *= rng.choice([1.0, 100.0, 1e4])
        options["mask"] = np.where(rng.random(mask.shape) < 0.3, -np.inf, mask).astype(dtype)
    elif kind == 3:
        options["key_lengths"] = rng.integers(0, k_len + 1, batch)
    elif kind == 4:
        options["window"] = tuple(int(n) for n in rng.integers(0, k_len + 1, 2))
    if rng.random() < 0.2:
        options["softcap"] = float(rng.choice([0.7, 3.0]))
    if rng.random() < 0.2:
        options["sinks"] = (2 * rng.standard_normal(heads)).astype(dtype)
    call = {"position": e.position, **options}
    try:
        rp.attention(q, k, v, backend="numpy", **call)
    except rp.RelposError:  # a scheme that fixes what it attends
        call = {"position": e.position, **e.kwargs}
    return q, k, v, call


def exactly(q, k, v, *, position=None, **options):
    """The exact output and log-sum-exp of a call, as decimals: of its terms as bounds take them."""
    wide = widest(np.dtype(np.float64 if q.dtype == np.float64 else np.float32))
    operands = [x.astype(np.float64) for x in (q, k, v)]
    problem, _, _ = check.problem(*operands, **options)
    problem = replace(
        problem,
        **{f"stored_{name}": getattr(problem, f"stored_{name}").astype(wide) for name in "qkv"},
        site=replace(problem.site, dtype=wide),
    )
    sinks = options.get("sinks")
    if sinks is not None:
        sinks = np.broadcast_to(sinks[:, None], problem.out_shape[:-1])
    return exact.attention(problem, all_terms(each_lowered((position,), problem)), sinks)


def judged(found, bound, wanted):
    """`Ratios` of what was found."""
    outside, ratios = 0, []
    pairs = zip(np.asarray(found, np.float64).ravel(), bound.ravel(), wanted.ravel(), strict=True)
    for number, most, right in pairs:
        if np.isposinf(most):  # which says nothing
            continue
        if np.isinf(number) and Decimal(float(number)) == right:
            error = Decimal(0)
        else:
            error = abs(Decimal(float(number)) - right)
        outside += not error <= Decimal(float(most))
        # What is smaller is the rounding of the decimals.
        if error > abs(right) * Decimal("1e-30"):
            ratios.append(float(Decimal(float(most)) / error))
    return Ratios(bound.size, outside, np.array(ratios, np.float64))


def compared(q, k, v, call, wanted, backend):
    """`Ratios` of the output and of the log-sum-exp of one backend."""
    out, lse, bound, lse_bound = rp.attention(q, k, v, return_lse=True, return_bound=True, backend=backend, **call)
    return judged(out, bound, wanted[0]), judged(lse, lse_bound, wanted[1])


def sweep(elements, seed=0, backends=("numpy", "terms", "numba")):
    """What was found, by (scheme, dtype, backend): rounds of all schemes, until so many elements were compared.

    A round has one call of each variant, in a dtype which the next round changes.
    """
    rng, found = np.random.default_rng(seed), defaultdict(lambda: (NOTHING, NOTHING))
    turn, dtypes = 0, list(DTYPES)
    while sum(out.elements for out, _ in found.values()) < elements:
        for at, (name, variant) in enumerate(ATTENTION):
            dtype = dtypes[(at + turn) % len(dtypes)]
            q, k, v, call = random_call(name, variant, DTYPES[dtype], rng)
            wanted = exactly(q, k, v, **call)
            for backend in backends:
                own, before = compared(q, k, v, call, wanted, backend), found[name, dtype, backend]
                found[name, dtype, backend] = tuple(a + b for a, b in zip(before, own, strict=True))
        turn += 1
    return dict(found)
