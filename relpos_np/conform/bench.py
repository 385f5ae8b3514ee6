"""Runs cases of one implementation: which are right, wrong, refused or not asked, and the smallest that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relpos_np.conform.customs import BORDERS, custom_of, may_apply
from relpos_np.conform.formats import Format, format_of
from relpos_np.conform.implementation import Crashed, Implementation, Refused
from relpos_np.conform.ragged import ASKED, WAYS, misread, parts
from relpos_np.conform.report import Finding
from relpos_np.conform.yardstick import Answer, Truth, distance, truth
from relpos_np.errors import RelposError
from relpos_np.testing.arguments import arguments, changed
from relpos_np.testing.example import Example, accepted
from relpos_np.testing.families import made
from relpos_np.testing.grid import Form, Grid
from relpos_np.types import Array

STATE = "keeps state from call to call: an answer depends on the calls before it"
SHARED = "returns an array that a later call overwrites: results that a caller keeps change"
# Of shrinking one failure: how many cases are tried, and of how many scores together.
_TRIES, _WORK = 40, 1 << 22
# Sizes that a failure may be shrunk to, where nothing is said of what the implementation takes.
_LENGTHS = (2, 3, 4, 8, 9, 16, 17, 32, 33, 34, 64, 65, 66, 96, 97, 127, 128, 129, 130, 256, 257)
_DIMS = (2, 4, 8, 16, 32, 64, 96)
_HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3))


@dataclass(eq=False)
class Bench:
    """Runs cases of one implementation, and keeps answers to be explained.

    `able` is what it supports, None for everything; `asked` whether families were named.
    """

    tested: Implementation
    stored: Format
    scheme: str
    variant: str | None
    seed: int
    able: frozenset[str] | None
    excluded: frozenset[str]
    grad: bool
    arithmetic: str | None
    conventions: str | None
    asked: bool
    answers: list[Answer] = field(default_factory=list)
    # Cases in which it crashed.
    crashes: list[Example] = field(default_factory=list)

    def made(self, form: Form) -> Example | None:
        """The case of a form, with numbers that the format holds; None where the scheme has no such call."""
        one = made(form, self.scheme, self.variant, np.float64, self.seed)
        if one is None:
            return None
        q, k, v = (self.stored.rounded(x) for x in (one.q, one.k, one.v))
        return replace(one, q=q, k=k, v=v, kwargs=changed(one.kwargs, format_of(self.stored.computed).rounded))

    def finding(self, form: Form, one: Example) -> Finding:
        """Run a case, and judge it."""
        (batch, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = one.q.shape, one.v.shape
        where = f"batch={batch}, H={heads}, H_kv={kv_heads}, L_q={q_len}, L_k={k_len}, D={dim}, D_v={v_dim}"
        work = batch * heads * q_len * k_len * (dim + v_dim)
        about = {"family": form.family, "edge": one.edge, "where": where, "work": work}
        way = form.way
        # A cache has more keys than there are queries, which is no need of its own.
        needs = one.needs - {"cross"} | {way} if form.family == "ragged" else one.needs
        if self.able is not None and not needs <= self.able:
            missing = ", ".join(sorted(needs - self.able))
            return Finding(**about, verdict="not run", reason=f"supports leaves out {missing}")
        if left_out := sorted((needs | {form.family}) & self.excluded):
            return Finding(**about, verdict="not run", reason=f"left out: {', '.join(left_out)}")
        lacking = self.tested.lacks(way)
        if not lacking and way in ASKED and self.able is None and not self.asked:
            lacking = f"asked only by families=['ragged'] or supports=['{way}']"
        if lacking:
            return Finding(**about, verdict="not run", reason=lacking)
        fitted, reason = self.tested.fitted(one)
        if fitted is None:
            return Finding(**about, verdict="not run", reason=reason)
        try:
            with np.errstate(all="ignore"):
                return self._judged(about, fitted, way)
        except Refused as error:
            return Finding(**about, verdict="refused" if self.able is None else "wrong", reason=str(error))
        except Crashed as error:
            if form.family == "flags" and _kinds(one) != _kinds(self.made(replace(form, choices=()))):
                # It has no argument for this form of an array, and cannot say so by its name.
                return Finding(**about, verdict="refused" if self.able is None else "wrong", reason=str(error))
            self.crashes.append(fitted)
            return Finding(**about, verdict="wrong", reason=str(error), proves=k_len > 1)

    def _judged(self, about: dict[str, Any], one: Example, way: str) -> Finding:
        if way in WAYS:
            return self._in_parts(about, one, way)
        grad_out = None
        if self.grad:
            rng = np.random.default_rng([self.seed, one.q.shape[2]])
            kept = format_of(self.stored.computed)
            grad_out = kept.rounded(rng.standard_normal((*one.q.shape[:3], one.v.shape[3])))
        returned = self.tested.run(one, grad_out, way)
        results = self.tested.results
        right = self._truth(one, grad_out)
        first = self._weighed(about, one, returned, right)
        if way != "twice" or first.verdict != "right":
            return first
        other = self._other_numbers(one)
        between = self._weighed(about, other, self.tested.run(other, None), self._truth(other, None))
        if between.verdict != "wrong" and self.tested.overwritten(results, returned):
            return replace(first, verdict="wrong", reason=SHARED)
        again = self.tested.run(one, grad_out)
        last = self._weighed(about, one, again, right)
        if "wrong" in (between.verdict, last.verdict):
            return replace(last if last.verdict == "wrong" else between, reason=STATE)
        apart = max(distance(again[n][0], returned[n][0]) for n in returned)
        return replace(first, reason=f"two runs differ by {apart:.2g}") if apart > 0 else first

    def _truth(self, one: Example, grad_out: Array | None) -> Truth:
        return truth(one, self.stored, grad_out, tuple(self.tested.arrays(one)), self.arithmetic)

    def unsteady(self, answer: Answer) -> str:
        """Whether two calls with the same numbers differ by more than is allowed, in words."""
        with suppress(Refused, Crashed), np.errstate(all="ignore"):
            first, again = (self.tested.run(answer.example, answer.grad_out) for _ in range(2))
            for name, (x, _) in first.items():
                same = np.array_equal(x, again[name][0], equal_nan=True)
                if not same and distance(again[name][0], x) > answer.allowed.get(name, np.inf):
                    return "two calls with the same numbers give different results: a race, or numbers that nothing set"
        return ""

    def _other_numbers(self, one: Example) -> Example:
        """The case with other operands, and other numbers in those arrays of the scheme that the function takes."""
        found = replace(one, q=one.q[::-1], k=one.k[::-1], v=one.v[::-1])
        taken = {name: x[::-1].copy() for name, x in self.tested.arrays(one).items() if name not in "qkv" and x.ndim}
        if one.position is None or not taken:
            return found
        with suppress(RelposError):  # of a scheme whose rows have an order
            position = type(one.position)(**(arguments(one.position) | taken))
            return accepted(replace(found, position=position)) or found
        return found

    def _in_parts(self, about: dict[str, Any], one: Example, way: str) -> Finding:
        """An answer to a call that stands for several: the worst of its parts."""
        listed = list(parts(way, one))
        if any(accepted(part) is None for part, _ in listed):
            return Finding(**about, verdict="not run", reason="the scheme has no such call")
        returned = self.tested.run(one, None, way)
        if way == "merged" and format_of(returned["lse"][1]).eps > format_of("float32").eps:
            return Finding(**about, verdict="not run", reason="its log-sum-exps are kept in half precision")
        found = []
        for part, where in listed:
            answer = {
                name: (x[where], dtype) for name, (x, dtype) in returned.items() if name == "out" or way == "merged"
            }
            found.append(self._weighed(about, part, answer, self._truth(part, None)))
        worst = max(found, key=lambda each: (each.verdict == "wrong", each.ratio))
        if worst.verdict == "wrong":
            told = misread(way, one, returned["out"][0], max(each.allowed["out"] for each in found))
            return replace(worst, reason=told or worst.reason)
        return worst

    def _weighed(
        self, about: dict[str, Any], one: Example, returned: Mapping[str, tuple[Array, str]], right: Truth
    ) -> Finding:
        """An answer beside what is right; it is kept to be explained."""
        answers = {name: x for name, (x, _) in returned.items() if name in right.expected}
        errors, allowed, rough = right.weighed(answers, {name: returned[name][1] for name in answers})
        told = {**about, "errors": errors, "allowed": allowed, "rough": rough, "proves": one.k.shape[2] > 1}
        if self.tested.written:
            return Finding(**told, verdict="wrong", reason=f"writes into its operand {self.tested.written[0]}")
        far = [name for name in errors if not errors[name] <= allowed[name]]
        if far and may_apply(one, right.expected):
            # What a convention decides is plainly wrong; the rest may need every draw to be seen right.
            allowed |= {name: right.allowed(name, returned[name][1]) for name in answers}
        coarse = [name for name, error in rough.items() if error > 1]
        wrong, only_rough = bool(far or coarse), not far and "out" in coarse
        usual = right.usual["out"]
        kept = Answer(about["family"], one, answers, right.expected, allowed, wrong, only_rough, usual, right.grad_out)
        custom = custom_of(kept, self.conventions) if far else None
        if custom is not None:
            accepted = self.conventions in custom.whose or custom is BORDERS
            return Finding(**told, verdict="convention", reason=custom.words, whose=custom.whose, accepted=accepted)
        self.answers.append(kept)
        reason = _in_words(answers, right, errors, allowed) if kept.wrong else right.told
        return Finding(**told, verdict="wrong" if kept.wrong else "right", reason=reason)

    def shrunk(self, form: Form, found: Finding, grid: Grid) -> tuple[Finding, Answer | None]:
        """The smallest case that fails as this one does, by taking away options, items, heads, length and channels.

        With its answer, None where there is no smaller one.
        """
        kept, best, answer = (len(self.answers), len(self.crashes)), found, None
        tries, work, progress = 0, 0, True
        while progress:
            progress = False
            for smaller in _smaller(form, grid):
                one = self.made(smaller)
                if one is None:
                    continue
                tries, work = tries + 1, work + smaller.scores
                if tries > _TRIES or work > _WORK:
                    break
                before = len(self.answers)
                other = self.finding(smaller, one)
                if _alike(other, found) and other.work < best.work:
                    # None of a crash, nor of a convention.
                    answer = self.answers[-1] if len(self.answers) > before else None
                    form, best, progress = smaller, other, True
                    break
        del self.answers[kept[0] :], self.crashes[kept[1] :]
        return best, answer


def _kinds(one: Example | None) -> dict[str, tuple[str, int]]:
    """Of each argument of the scheme its type and number of axes."""
    given = {} if one is None or one.position is None else arguments(one.position)
    return {name: (type(value).__name__, np.ndim(value)) for name, value in given.items()}


def _alike(other: Finding, found: Finding) -> bool:
    """Whether two cases fail in the same way."""
    if other.verdict != found.verdict or bool(other.errors) != bool(found.errors):
        return False
    return other.reason == found.reason or not found.errors or " has shape " in found.reason


def _smaller(form: Form, grid: Grid) -> Iterator[Form]:
    """Forms that lack something of this one, the smallest of each kind first."""
    if form.family in ("borders", "calls", "ragged"):
        return
    least = replace(form, batch=form.batch if grid.batches else 1)
    if grid.heads is None:
        least = replace(least, heads=(1, 1) if form.heads[0] == form.heads[1] else (2, 1))
    if grid.dims is None and form.dim == form.v_dim:
        least = replace(least, dim=min(_DIMS), v_dim=min(_DIMS))
    if least != form:
        yield least
    if form.batch > 1 and grid.batches is None:
        yield replace(form, batch=1)
    if len(form.options) > 1:
        for name in form.options:
            yield replace(form, options={n: x for n, x in form.options.items() if n != name})
    if grid.heads is None:
        for heads in _HEADS:
            if heads[0] < form.heads[0] and (heads[0] == heads[1]) == (form.heads[0] == form.heads[1]):
                yield replace(form, heads=heads)
    lengths = grid.lengths or _LENGTHS
    for n in (x for x in sorted(lengths) if x > 1):
        if form.q_len == form.k_len and n < form.k_len:
            yield replace(form, q_len=n, k_len=n)
        elif form.q_len < form.k_len and form.q_len < n < form.k_len:
            yield replace(form, k_len=n)
    if form.q_len < form.k_len and form.q_len > 1 and (grid.lengths is None or 1 in grid.lengths):
        yield replace(form, q_len=1)
    for dim in sorted(grid.dims or _DIMS):
        if dim < form.dim and form.dim == form.v_dim:
            yield replace(form, dim=dim, v_dim=dim)


def _in_words(
    answers: Mapping[str, Array], right: Truth, errors: Mapping[str, float], allowed: Mapping[str, float]
) -> str:
    """What can be seen without a suspect."""
    for name, x in answers.items():
        if errors[name] <= allowed[name]:
            continue
        expected = right.expected[name]
        if x.shape != expected.shape:
            return f"{name} has shape {x.shape}, expected {expected.shape}"
        empty = ~np.isfinite(right.expected["lse"])
        if np.isnan(x).any():
            rows = np.isnan(x) if x.ndim == empty.ndim else np.isnan(x).any(axis=-1)
            if rows.shape == empty.shape and not (rows & ~empty).any():
                return f"{name} is NaN for queries that may attend no key, expected {0 if name == 'out' else '-inf'}"
            return f"{name} holds NaN"
        if np.isinf(x[np.isfinite(expected)]).any():
            return f"{name} holds infinities"
        if name == "lse" and distance(x * np.log(2), expected) <= 2 * allowed[name]:
            return "lse is in powers of 2, expected those of e"
    return ""
