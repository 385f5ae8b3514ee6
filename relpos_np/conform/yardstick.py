r"""How wrong a straightforward implementation is in a format, which is what others are measured by.

That implementation holds the scores as an array, computes step by step with one operation of a framework each, and
rounds what each step returns to the format: products, what positions add, their sum, what is scaled, probabilities,
output. In float32 NumPy really is this implementation, and is run. For all formats its roundings are put into the exact
formula: an error of a score, or a relative one of a probability, is a number that a float mask adds to the score. So a
few lines say for every scheme what the output, the log-sum-exp and each gradient may be off by.

Like the tests of FlashAttention, an implementation may be `FORWARD` times as wrong in its results, `BACKWARD` times in
gradients: sums in another order make other errors of the same size, and the largest of some hundred errors of one size
rarely differs by more than that between two orders. One rounding of the largest result is always allowed, for what is
exact by luck. The same holds of the typical error of outputs and log-sum-exps, the median over rows of the root mean
square: it tells arithmetic that is coarser everywhere from one query that decides what the largest error is. Gradients
have none: where scores are large most of their rows are 0, but for rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Terms
from relpos_np._contract.turned import turn_channels
from relpos_np.api import attention_vjp, logits
from relpos_np.conform.arithmetic import coarser, output, roundings
from relpos_np.conform.formats import Format, format_of
from relpos_np.errors import RelposError
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.formulas.softmax import repeat_heads, softmax
from relpos_np.schemes.base import Position
from relpos_np.schemes.decomposed import DecomposedBias
from relpos_np.schemes.fox import FoX, forget_gates
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.positioned import Positioned
from relpos_np.schemes.rotary import Rotary
from relpos_np.testing.arguments import arguments, changed, rebuilt
from relpos_np.testing.compare import largest, ratio, typical
from relpos_np.testing.example import Example
from relpos_np.types import Array, Backend

FORWARD, BACKWARD = 2.0, 3.0
# Where scores are large, one query between two keys decides what the largest error is, so that a few choices of
# roundings may all be lucky: up to `_DRAWS` are tried, fewer where a call has so many rows that some never are.
_DRAWS, _SCORES = 32, 1 << 18
# A turn rounds cosine and sine, two products and their sum: of two channels of any angle, as much as three roundings.
_ROUNDINGS_OF_A_TURN = 3
ANGLES = "angles in float32"


# An answer this much nearer than is allowed needs no more draws, nor one that is as far off as this.
_PLAINLY_RIGHT, _PLAINLY_WRONG = 0.8, 100.0


# Numbers of a result from which on a typical error is judged: that of a few is as much luck as the largest.
_MANY = 256


@dataclass(eq=False)
class Truth:
    """What is right for a case by the names of its results, and how far off a straightforward implementation is.

    `straightforward` (the largest error) and `usual` (the typical one) grow with each of `draws`, which are taken as
    far as a verdict needs them.
    """

    expected: Mapping[str, Array]
    straightforward: dict[str, float]
    usual: dict[str, float]
    stored: Format
    draws: Iterator[Mapping[str, Array]]
    # On typical errors: angles in float32, each rounded more than once, are typical of every query.
    slack: float = 1.0
    # More draws, of what is right too and is told, where others leave an answer wrong.
    spare: Iterator[Mapping[str, Array]] | None = None
    told: str = ""
    grad_out: Array | None = None

    def _drawn(self) -> bool:
        """One more way of rounding; False if there is none."""
        found = next(self.draws, None)
        for name, x in (found or {}).items():
            self.straightforward[name] = max(self.straightforward[name], distance(x, self.expected[name]))
            self.usual[name] = max(self.usual[name], _apart(x, self.expected[name]))
        return found is not None

    def weighed(
        self, answers: Mapping[str, Array], dtypes: Mapping[str, str]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """How far off answers of these dtypes are, how far off they may be, and typical errors in units of such."""
        found = self._weighed(answers, dtypes)
        if self.spare is None or _within(*found):
            return found
        self.draws, self.spare = self.spare, None
        found = self._weighed(answers, dtypes)
        if _within(*found):
            self.told = ANGLES
        return found

    def _weighed(
        self, answers: Mapping[str, Array], dtypes: Mapping[str, str]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """The same, by draws that are left."""
        errors = {name: distance(x, self.expected[name]) for name, x in answers.items()}
        apart = {
            name: _apart(x, self.expected[name])
            for name, x in answers.items()
            if name in ("out", "lse") and x.size >= _MANY and np.isfinite(errors[name])
        }
        more = True
        while more:
            more = self._drawn()
            allowed = {name: self._allowed(name, dtypes[name]) for name in answers}
            rough = {name: error / (self._usual(name, dtypes[name]) or np.inf) for name, error in apart.items()}
            units = [errors[name] / allowed[name] if allowed[name] else float(errors[name] > 0) for name in errors]
            wrong = [one > _PLAINLY_WRONG for one in units]
            # Typical errors hardly differ between draws.
            fine = any(wrong) or max(rough.values(), default=0.0) <= 1
            if fine and all(bad or one <= _PLAINLY_RIGHT for bad, one in zip(wrong, units, strict=True)):
                break
        return errors, allowed, rough

    def allowed(self, name: str, dtype: str) -> float:
        """How far off a result that has this dtype may be."""
        while self._drawn():
            pass
        return self._allowed(name, dtype)

    def _allowed(self, name: str, dtype: str) -> float:
        """The same, by what has been drawn."""
        return _factor(name) * self.straightforward[name] + self._eps(name, dtype) * largest(self.expected[name])

    def _usual(self, name: str, dtype: str) -> float:
        """How large a typical error may be, by what has been drawn: at least a quarter of eps, of rounding once."""
        least = self._eps(name, dtype) / 4 * typical(self.expected[name])
        if name == "lse":
            # It is drawn without roundings of its own, which come with those of a sum, its logarithm and the largest.
            return self.slack * _factor(name) * float(np.hypot(self.usual[name], 2 * least))
        return self.slack * max(_factor(name) * self.usual[name], least)

    def _eps(self, name: str, dtype: str) -> float:
        """Of the format that a result is stored in.

        The dtype decides nothing about the output, lest rounding on the way be excused; but log-sum-exps are kept in
        float32 by some and not by others, and what only stores its operands may store its output too.
        """
        kept, returned = format_of(self.stored.computed), format_of(dtype)
        if name == "lse":
            return min(kept.eps, returned.eps)
        return kept.eps if self.stored.name == kept.name else max(kept.eps, returned.eps)


@dataclass(frozen=True, eq=False)
class Answer:
    """A case, what was returned for it by name, what is right, how far off that may be, and whether it is wrong.

    `rough`: the output is wrong by its typical error. `usual`: that of a straightforward implementation.
    """

    family: str
    example: Example
    returned: Mapping[str, Array]
    expected: Mapping[str, Array]
    allowed: Mapping[str, float]
    wrong: bool
    rough: bool = False
    usual: float = 0.0
    grad_out: Array | None = None


def _factor(name: str) -> float:
    return BACKWARD if name.startswith("grad_") else FORWARD


def _apart(x: Array, y: Array) -> float:
    """The typical difference; none between infinities that are equal."""
    with np.errstate(invalid="ignore"):
        return typical(np.where(x == y, 0.0, x - y))


def truth(
    one: Example,
    stored: Format,
    grad_out: Array | None,
    trained: tuple[str, ...],
    arithmetic: str | None = None,
) -> Truth:
    """Exact results of a case whose numbers the format holds, and the errors that an arithmetic of it may have."""
    kept = format_of(stored.computed)
    expected = _results(one, "numpy", grad_out, trained)
    worst, usual = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
    shared = _pairs_of_rows(one) if grad_out is not None else {}
    pairs = one.q.shape[0] * one.q.shape[1] * one.q.shape[2] * one.k.shape[2]
    for name, x in expected.items():
        if name.startswith("grad_") and name not in ("grad_q", "grad_k", "grad_v"):
            # Autograd adds the gradient of a row up pair by pair, and rounds each sum: errors in all directions, a
            # quarter of eps in the mean over sums that grow.
            counts, axis = np.full(1, max(1.0, pairs / max(len(x), 1)) if x.ndim else pairs), 0
            for rows, found in shared.items():
                axes = [n for n, size in enumerate(x.shape) if size == rows]
                if axes:
                    counts, axis = found, axes[0]
            roots = np.sqrt(counts).reshape(-1, *(1,) * (x.ndim - 1 - axis)) if x.ndim else np.sqrt(counts)
            errors = kept.eps / 4 * roots * np.abs(x)
            worst[name], usual[name] = largest(errors), typical(errors)
    draws = _straightforward(one, kept, grad_out, trained)
    if arithmetic is not None:
        draws = _with(arithmetic, one, kept, draws, grad_out, trained)
    slack = 1.5 if isinstance(one.position, Positioned) else 1.0
    spare = None
    if kept.eps < 2.0**-23 and isinstance(one.position, Rotary) and one.position.frequencies is None:
        spare = _drawn(one, kept, grad_out, trained, angles=True)
    return Truth(expected, worst, usual, stored, draws, slack, spare, grad_out=grad_out)


def _within(errors: Mapping[str, float], allowed: Mapping[str, float], rough: Mapping[str, float]) -> bool:
    """Whether neither errors nor typical ones are more than is allowed."""
    return all(errors[name] <= allowed[name] for name in errors) and max(rough.values(), default=0.0) <= 1


def _pairs_of_rows(one: Example) -> dict[int, Array]:
    """By the number of rows of a scheme's table how many pairs of query and key of all heads and items read each row.

    The rows at the ends of a table, which all larger distances read, have the most.
    """
    terms = _terms(one)
    if terms is None:
        return {}
    found: dict[int, Array] = {}
    maps = [term.index for listed in (terms.tables, terms.queries, terms.keys, terms.values) for term in listed]
    for one_map in maps:
        index = one_map.dense(one.q.shape[2], one.k.shape[2])
        times = one.q.shape[0] * one.q.shape[1] * one.q.shape[2] * one.k.shape[2] / index.size
        counts = times * np.bincount(index[index >= 0].ravel(), minlength=one_map.rows)
        found[one_map.rows] = np.maximum(counts, found.get(one_map.rows, 0.0))
    return found


def _terms(one: Example) -> Terms | None:
    """What positions add, as terms; None where a scheme has no such form."""
    problem, _, _ = check.problem(one.q, one.k, one.v, **{n: x for n, x in one.kwargs.items() if n != "sinks"})
    try:
        return (one.position or Plain()).lower(problem.q, problem.k, problem.site)
    except (RelposError, NotImplementedError):
        return None


def _has_vectors(one: Example) -> bool:
    """Whether queries or keys are multiplied with vectors of positions."""
    terms = _terms(one)
    return terms is not None and any(term.weights.shape[-1] > 1 for term in terms.queries + terms.keys)


def _with(
    arithmetic: str,
    one: Example,
    kept: Format,
    usual: Iterator[Mapping[str, Array]],
    grad_out: Array | None,
    trained: tuple[str, ...],
) -> Iterator[Mapping[str, Array]]:
    """Results of a named arithmetic: of a coarser one beside those of the format's own, of a finer one instead."""
    own = output(arithmetic, kept, one)
    if own is None:
        yield from usual
    elif kept.name == "float64":
        yield from _straightforward(one, format_of("float32"), grad_out, trained)
    elif not coarser(arithmetic, kept):
        for found in usual:
            yield {**found, "out": own}
    elif kept.name == "float32":
        of_queries, of_keys = roundings(arithmetic)
        cut = replace(one, q=of_queries(one.q), k=of_keys(one.k), v=of_keys(one.v))
        yield _results(cut, "numpy", None if grad_out is None else of_queries(grad_out), trained)
        yield from usual
    else:
        yield {**next(usual), "out": own}
        yield from usual


def distance(x: Array, y: Array) -> float:
    """The largest difference; none between infinities that are equal, infinite for NaN and for another shape."""
    return ratio(x, y, 1.0)


def _straightforward(
    one: Example, kept: Format, grad_out: Array | None, trained: tuple[str, ...]
) -> Iterator[Mapping[str, Array]]:
    """Results of the straightforward implementation, several times where roundings can fall otherwise."""
    if kept.name in ("float32", "float64"):
        # In float64 the reference is the answer, and the same formula in terms has errors of its own.
        backend: Backend = "numpy" if kept.name == "float32" else "terms"
        dtype = np.dtype(kept.name)
        q, k, v, kwargs, grad = changed((one.q, one.k, one.v, one.kwargs, grad_out), lambda x: x.astype(dtype))
        cast = replace(one, q=q, k=k, v=v, kwargs=kwargs, position=rebuilt(one.position, dtype))
        with suppress(RelposError):  # of a scheme with the reference only, which has no terms
            yield {name: x.astype(np.float64) for name, x in _results(cast, backend, grad, trained).items()}
    yield from _drawn(one, kept, grad_out, trained, angles=kept.eps >= 2.0**-23)


def _drawn(
    one: Example, kept: Format, grad_out: Array | None, trained: tuple[str, ...], *, angles: bool
) -> Iterator[Mapping[str, Array]]:
    """Results with all roundings at random; `angles`: with rotary angles in float32, too."""
    batch, heads, q_len, _ = one.q.shape
    draws = min(_DRAWS, max(2, _SCORES // (batch * heads * q_len * one.k.shape[2])))
    chosen = {"angles": angles, "vectors": _has_vectors(one)}
    off = np.zeros(())
    for seed in range(draws):
        rough = _rounded(one, kept, np.random.default_rng(seed), scaled_last=seed % 2 == 1, **chosen)
        turned, added = None, _summed(one, kept, np.random.default_rng(seed))
        if grad_out is not None:
            # What reaches a score is a product with values, which is rounded before a sum is subtracted from it.
            turned = grad_out * (1 + kept.eps * np.random.default_rng(seed).uniform(-1, 1, grad_out.shape) + off)
            added |= _summed_back(one, kept, np.random.default_rng(seed), grad_out)
        found = _results(rough, "numpy", turned, trained)
        found = {name: x + added.get(name, 0.0) for name, x in found.items()}
        if kept.name in ("float32", "float64"):
            # FlashAttention's way back makes weights of scores that are computed again, and of the log-sum-exp of those
            # before: roundings of both are left in a row, in whose weights all gradients are linear.
            off = np.where(np.isfinite(one.expected_lse), found["lse"] - one.expected_lse, 0.0)[..., None]
        yield {name: x if name == "lse" else kept.rounded(x) for name, x in found.items()}


def _summed(one: Example, kept: Format, rng: np.random.Generator) -> dict[str, Array]:
    """Errors of adding up weights, and values, key by key: of sums that grow to their size, each rounded anyhow.

    Half precision is added up in float32, whose errors do not show.
    """
    if kept.name not in ("float32", "float64"):
        return {}
    sizes, _ = replace(one, v=np.abs(one.v)).run("numpy")
    step = kept.eps / 2 * np.sqrt(one.k.shape[2] / 3)
    return {
        "out": np.asarray(step * np.abs(sizes) * rng.uniform(-1, 1, sizes.shape)),
        # Relative to a sum is absolute in its logarithm.
        "lse": np.asarray(step * rng.uniform(-1, 1, sizes.shape[:-1])),
    }


def _summed_back(one: Example, kept: Format, rng: np.random.Generator, grad_out: Array) -> dict[str, Array]:
    """The same of gradients: each pair's product of D_v terms is rounded for itself, then what pairs add up to.

    What positions multiply with values is left out, being of the size of what values are.
    """
    if kept.name not in ("float32", "float64"):
        return {}
    heads, q_len, k_len = one.q.shape[1], one.q.shape[2], one.k.shape[2]
    k, v = repeat_heads(one.k, heads), repeat_heads(one.v, heads)
    scale = one.kwargs.get("scale", one.q.shape[-1] ** -0.5)
    scores = {name: value for name, value in one.kwargs.items() if name != "sinks"}
    s = logits(one.q, one.k, position=one.position, backend="numpy", **scores)
    lse = np.where(np.isfinite(one.expected_lse), one.expected_lse, 0.0)
    p = np.exp(s - lse[..., None])
    v = np.where(p.any(axis=-2)[..., None], v, 0.0)
    k = np.where(p.any(axis=-2)[..., None], k, 0.0)

    def size(terms: int, sums: Array) -> Array:
        return np.asarray(kept.eps / 2 * np.sqrt(terms / 3) * np.abs(sums) * rng.uniform(-1, 1, sums.shape))

    products = grad_out @ v.swapaxes(-1, -2)
    to_scores = p * (products - (p * products).sum(axis=-1, keepdims=True)) * scale
    off = p * size(v.shape[-1], np.abs(grad_out) @ np.abs(v).swapaxes(-1, -2)) * scale
    off = off - p * off.sum(axis=-1, keepdims=True)
    to_keys, with_keys = to_scores.swapaxes(-1, -2), off.swapaxes(-1, -2)
    found = {
        "grad_q": off @ k + size(k_len, np.abs(to_scores) @ np.abs(k)),
        "grad_k": with_keys @ one.q + size(q_len, np.abs(to_keys) @ np.abs(one.q)),
        "grad_v": size(q_len, p.swapaxes(-1, -2) @ np.abs(grad_out)),
    }
    groups = (*one.k.shape[:2], heads // one.k.shape[1])
    for name in ("grad_k", "grad_v"):
        found[name] = found[name].reshape(*groups, *found[name].shape[2:]).sum(axis=2)
    return found


def _results(one: Example, backend: Backend, grad_out: Array | None, trained: tuple[str, ...]) -> dict[str, Array]:
    """Output, log-sum-exp and gradients by name."""
    out, lse = one.run(backend)
    found = {"out": out, "lse": lse}
    if grad_out is not None:
        back = attention_vjp(
            one.q, one.k, one.v, position=one.position, grad_out=grad_out, backend=backend, **one.kwargs
        )
        named = {"q": back.q, "k": back.k, "v": back.v} | dict(back.position)
        found |= {f"grad_{name}": named[name] for name in trained if name in named}
    return found


@np.errstate(all="ignore")
def _rounded(
    one: Example, kept: Format, rng: np.random.Generator, *, scaled_last: bool, angles: bool, vectors: bool
) -> Example:
    """The case with the roundings of each step as a float mask, and operands rounded after a step of their own."""
    steps = _ROUNDINGS_OF_A_TURN if isinstance(one.position, Positioned) else 1

    eps = max(kept.eps, 2.0**-23) if angles and isinstance(one.position, Rotary) else kept.eps

    def shaken(x: Array) -> Array:
        return np.asarray(x * (1 + eps / 2 * np.sqrt(steps) * rng.uniform(-1, 1, x.shape)))

    position = _angles_in_float32(one, rng) if angles else one.position
    q, k = map(shaken, _turned_on(one, position) if angles else (one.q, one.k))
    hidden = ("mask", "key_lengths", "causal", "window", "scale")
    plain = {name: value for name, value in one.kwargs.items() if name not in hidden}
    scores = {name: value for name, value in one.kwargs.items() if name != "sinks"}
    scale = one.kwargs.get("scale", one.q.shape[-1] ** -0.5)
    s = logits(q, k, position=position, backend="numpy", **scores)
    products = q @ repeat_heads(k, q.shape[1]).swapaxes(-1, -2) * scale
    mask = one.kwargs.get("mask")
    # Papers that multiply queries with vectors of positions scale the sum, others products before anything is added.
    # What a step gets was rounded before, so the exact score tells nothing about how the step rounds it: it is off by
    # any part of half a unit.
    unscaled = [products, s - products, s] if scaled_last else [products]
    scaled = [s] if scaled_last else [products, s - products, s]
    half_units = [kept.unit(x) / 2 for x in scaled] + [kept.unit(x / scale) / 2 * scale for x in unscaled]
    if kept.name in ("float32", "float64"):
        # D products are added one by one: sums that grow to what they come to, and wander by half of the root of their
        # squares on the way.
        squares = q**2 @ repeat_heads(k**2, q.shape[1]).swapaxes(-1, -2) * scale**2
        half_units.append(kept.eps / 2 * np.sqrt(q.shape[-1] / 3 * (products**2 / 3 + squares / 2)))
        if vectors:
            # So are products with vectors of positions, whose squares add up to about what their sums have on average.
            added = np.where(np.isfinite(s), s - products, 0.0)
            squares = (added**2).mean(axis=-1, keepdims=True)
            half_units.append(kept.eps / 2 * np.sqrt(q.shape[-1] / 3 * (added**2 / 3 + squares / 2)))
    error = np.sum([unit * rng.uniform(-1, 1, s.shape) for unit in half_units], axis=0)
    made = _made_in_steps(one, kept, rng)
    if made is not None:
        error = error + logits(q, k, position=made, backend="numpy", **scores) - s
    error = np.where(np.isfinite(s) & np.isfinite(error), error, 0.0)
    p, _ = softmax(s + error)
    error = error + np.where(p > 0, np.nan_to_num(np.log(kept.rounded(p) / p), posinf=0.0, neginf=0.0), 0.0)
    if mask is not None and mask.dtype == np.bool_:
        error = np.where(mask, error, -np.inf)
    elif mask is not None:
        error = error + mask
    kwargs = plain | {name: one.kwargs[name] for name in hidden if name in one.kwargs} | {"mask": error}
    return Example(one.name, one.variant, q, k, one.v, position, kwargs)  # type: ignore[arg-type]


def _angles_in_float32(one: Example, rng: np.random.Generator) -> Position:
    """Rotary positions with angles as frameworks compute them: in float32, from frequencies in float32."""
    position = one.position
    if not isinstance(position, Rotary) or position.frequencies is not None:
        return position
    rough = copy.copy(position)
    rough.dim = position.dim or one.q.shape[-1]
    exact = rotary_frequencies(rough.dim, base=position.base)
    rough.frequencies = exact * (1 + 2.0**-23 * rng.uniform(-1, 1, exact.shape))
    return rough


def _turned_on(one: Example, position: Position) -> tuple[Array, Array]:
    """Queries and keys turned by what products of positions and frequencies are rounded by in float32.

    It differs from one position to the next, while a frequency that is off turns neighbours alike.
    """
    if not isinstance(position, Rotary) or position.frequencies is None or position.frequencies.ndim > 1:
        return one.q, one.k
    columns = np.arange(one.k.shape[2]) * 1.0 if position.positions is None else position.positions
    start = one.kwargs.get("offset", one.k.shape[2] - one.q.shape[2])
    among = np.arange(one.q.shape[2]) + start
    if position.key_positions is not None:
        rows, columns = columns, position.key_positions
    else:
        rows = among * 1.0 if position.positions is None else columns[..., among]
    single, found = position.frequencies.astype(np.float32), []
    for x, t in ((one.q, rows[..., None]), (one.k, columns[..., None])):
        off = (t.astype(np.float32) * single - t * single.astype(np.float64))[..., None, :, :]
        first = 0 if position.channels is None else position.channels[0]
        found.append(turn_channels(x, np.cos(off), np.sin(off), position.layout, first, position.blocks))
    return found[0], found[1]


def _made_in_steps(one: Example, kept: Format, rng: np.random.Generator) -> Position:
    """Positions of which something is computed before it is added, and rounded at each step; None of all others."""
    position, eps = one.position, min(kept.eps, 2.0**-23)
    if isinstance(position, FoX):
        # Each sum of gates is rounded, and goes on into the next; nobody adds them up in half precision.
        log_gates = forget_gates(position.gates, variant=position.variant)
        steps = kept.eps / 2 * np.abs(log_gates) if position.variant != "log" else np.zeros_like(log_gates)
        steps = steps + eps / 2 * np.abs(np.cumsum(log_gates, axis=-1))
        return FoX(log_gates + steps * rng.uniform(-1, 1, steps.shape), variant="log")
    if isinstance(position, DecomposedBias):
        given = {name: _resized(x, rows, eps, rng) for name, x, rows in position.needed()}
        return type(position)(**(arguments(position) | given))
    return None


def _resized(table: Array, rows: int, eps: float, rng: np.random.Generator) -> Array:
    """A table with so many rows, interpolated at places that are rounded to numbers of this eps."""
    old = len(table)
    if old == rows:
        return table
    places = (np.arange(rows) + 0.5) * old / rows - 0.5
    places = places + eps * np.maximum(places, 1.0) * rng.uniform(-1, 1, rows)
    lower = np.clip(np.floor(places).astype(np.int64), 0, old - 1)
    share = np.clip(places - lower, 0.0, 1.0)[:, None]
    found = (1 - share) * table[lower] + share * table[np.minimum(lower + 1, old - 1)]
    return np.asarray(found * (1 + eps * rng.uniform(-1, 1, found.shape)))
