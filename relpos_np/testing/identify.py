"""Find which scheme, variant and conventions produced the arrays that somebody saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposError, RelposValueError
from relpos_np.testing import one_number
from relpos_np.testing.arguments import parameters
from relpos_np.testing.candidates import Candidate, Lengths, candidates
from relpos_np.testing.compare import EPS
from relpos_np.testing.compare import largest as largest_of
from relpos_np.testing.conventions import Call, Options, combinations, with_caps
from relpos_np.testing.identification import Identification
from relpos_np.testing.one_number import SCALE, Unknown
from relpos_np.testing.operands import (
    ONE_AXIS,
    Operands,
    computed,
    fitted_window,
    has_axis_of_one,
    is_causal,
    keeps_values,
    may_be_causal,
    readings,
    without_axis_of_one,
)
from relpos_np.testing.pairs_of_schemes import pairs_of_schemes
from relpos_np.testing.precisions import RUNGS, Fit, distance, finest, grouped, match, relative_to, rung_of, same, why
from relpos_np.testing.saved_arrays import OPTIONS, checked_names, operands_of
from relpos_np.types import Array

# Calls that are made at most.
_CALLS = 30_000
_NEAREST = 5
# Calls of each stage after the first.
_SCANNED = 6_000
# An error of the size of the answer's tenth is no rounding.
_NEAR = 0.1
# Numbers that are looked for first, the most usual ones.
_FIRST = ("scale", "dim", "factor", "base", "max_distance", "dim of the last channels")
# Keys of a call whose window is looked for.
_WIDEST = 512
# Fits whose error is larger than the best one's by more than this factor are no fits.
_AS_GOOD = 1.25
# What a scheme says that does not take a call, or arrays that are not its own.
_REFUSALS = (RelposError, ArithmeticError, IndexError, MemoryError, ValueError)


@dataclass(eq=False)
class _Search:
    """What is compared, and what has been found so far."""

    dtype: np.dtype[Any]
    stated: Mapping[str, Any]
    given: Mapping[str, Array]
    settings: Mapping[str, Any]
    calls: int = 0
    # Calls at which a stage ends.
    most: int = _CALLS
    complete: bool = True
    untried: dict[str, str] = field(default_factory=dict)
    fits: list[Fit] = field(default_factory=list)
    # Of each candidate, and of each way to read the operands, what comes closest and does not fit.
    nearest: dict[tuple[int, int], Fit] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    # Of each candidate by its options but for the scale the smallest error with one of those that are usual.
    seen: dict[tuple[int, Options], float] = field(default_factory=dict)

    def call(self, at: Operands) -> Call:
        """What is known of the call."""
        return Call(*at.lengths, **{name: x for name, x in self.stated.items() if name in OPTIONS})

    def combinations(self, at: Operands, sinks: str | None = None) -> list[Options]:
        """All combinations of options that are tried."""
        return list(combinations(self.call(at), sinks))

    def ended(self, calls: int = 1) -> bool:
        """Whether the stage has no room for so many calls."""
        if self.calls + calls > self.most:
            self.complete = False
            return True
        return False


def identify(
    q: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    *,
    out: Array | None = None,
    scores: Array | None = None,
    lse: Array | None = None,
    x: Array | None = None,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> Identification:
    """Find which scheme, variant and conventions produced an output or scores.

    Every scheme of the register that takes the arrays is tried in all its variants, with scale 1/sqrt(D), none and
    twice, positions and causal masks aligned at the first or at the last key, and what is stated as it may have been
    meant. If nothing fits, one number is fitted, a scale or a rotary base; then the arrays are read in other orders,
    windows are looked for on either side, other numbers (the share of channels that turns, a factor, a magnitude), and
    then every two schemes together.

    Parameters
    ----------
    q, k, v : ndarray, shapes (..., H, L_q, D), (..., H_kv, L_k, D) and (..., H_kv, L_k, D_v)
        Operands. Axes (..., L, H, D) are found out.
    out : ndarray, shape (..., H, L_q, D_v)
        The output of attention, or x with an encoding added.
    scores : ndarray, shape (..., H, L_q, L_k)
        Scores before the softmax, in place of an output; what is excluded is -inf or below -10000.
    lse : ndarray, shape (..., H, L_q), optional
        The log-sum-exp, which tells apart what differs by a number per query.
    x : ndarray, shape (..., L, D)
        Inputs that an absolute encoding was added to, in place of q, k and v.
    given : mapping, optional
        Trained arrays of the positions under any names, all of which must be used; and settings under the names of
        constructors' parameters, such as ``base`` or ``grid``, which are used as they are.
    **options
        What is known of the call: scale, offset, causal, window, softcap, cap_order, mask, key_lengths. A window is
        also tried one shorter and longer, half as wide and on one side; a cap before and after positions.

    Returns
    -------
    Identification
        What fits, or what is nearest.

    Raises
    ------
    RelposError
        If arrays are missing or do not belong together, an answer has no finite number, or a name means nothing.

    Notes
    -----
    Of large operands the last queries of the first batch item are compared, so that time does not grow with the length
    squared. One real number that is neither a default nor stated is found: as released models have it, or else the
    roundest one that explains the answer is told, with a note of those that explain it as well. A scheme with two such
    numbers is nearest and does not fit, but for a scale beside one of the usual caps. Short calls turn slow channels
    too little for a base to be seen.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4))
    >>> out = rp.attention(q, k, v, position=rp.ALiBi(form="symmetric"), causal=True, scale=1.0)
    >>> found = rp.testing.identify(q, k, v, out=out, lse=None)
    >>> [(match.scheme, match.call["scale_is"]) for match in found.matches][0]
    ('alibi', 'none')
    """
    stated, arrays, settings = checked_names(given, options)
    if x is not None:
        return _absolute(x, out, arrays, settings, {"q": q, "k": k, "v": v, "scores": scores, "lse": lse} | stated)
    named = {"q": q, "k": k, "v": v, "out": out, "scores": scores, "lse": lse}
    readable = list(operands_of(named, stated))
    search = _Search(check.array("out", scores if out is None else out).dtype, stated, arrays, settings)
    for stage in _stages(search, readable):
        before = dict(search.nearest)
        stage()
        if _best(search):
            break
        # What the first stage finds is nearest; a guess that does not explain the answer says nothing.
        if stage.func is not _look:
            search.nearest = before
        search.most = search.calls + _SCANNED
    return _result(search, readable[0])


def _stages(search: _Search, readable: list[Operands]) -> Iterator[partial[None]]:
    """What is tried, one after the other until something fits."""
    ways = [(at, dict(search.given)) for at in readable]
    if any(has_axis_of_one(x) for x in search.given.values()):
        tables = without_axis_of_one(search.given)
        ways += [(replace(at, layout=(*at.layout, ONE_AXIS)), tables) for at in readable]
    for way in ways:
        yield partial(_look, search, *way)
    if search.stated.get("window") is None and readable[0].out is not None:
        yield partial(_look_for_windows, search, readable[0])
    for at, _ in ways:
        yield partial(_look_for_numbers, search, at, _FIRST)
    for way in ways:
        for other in readings(*way):
            yield partial(_look, search, *other)
    yield partial(_look_for_numbers, search, readable[0], ())
    yield partial(_scan, search, readable[0], with_caps)
    yield partial(_look_for_capped_scales, search, readable[0])
    for at in readable:
        yield partial(_look_for_two, search, at)


# ---------------------------------------------------------------------------------------------- searching


def _look(search: _Search, at: Operands, tables: Mapping[str, Array]) -> None:
    """Compare every candidate under every convention with the answer."""
    lengths = _lengths(at)
    heads, q_len = at.sizes[-3:-1]
    # Arrays that may be sinks: a number per head, or per head and query.
    sinks = [n for n, x in tables.items() if x.dtype.kind == "f" and x.shape in ((heads,), (heads, q_len))]
    for sink in (None, *(sinks if at.out is not None else [])):
        own = {name: x for name, x in tables.items() if name != sink}
        found = candidates(lengths, own, search.settings, "attention")
        if sink is None:
            search.untried |= {name: why for name, why in found.untried.items() if name not in search.untried}
        search.complete &= found.complete
        hows = search.combinations(at, sink)
        for candidate in found.found:
            own_hows = _with_own_scale(search, at, candidate, hows)
            _compare(search, at, candidate, own_hows, None if sink is None else tables[sink])


def _with_own_scale(search: _Search, at: Operands, candidate: Candidate, hows: list[Options]) -> list[Options]:
    """Some options, and the same with the scale that published models of a scheme have."""
    scale = getattr(candidate.made, "scale", None)
    if "scale" in search.stated or not isinstance(scale, float):
        return hows
    meant = search.call(at).meant("scale")
    return hows + [replace(how, scale=scale) for how in hows if how.scale == meant]


def _lengths(at: Operands) -> Lengths:
    shape, v_dim = at.sizes, 1 if at.v is None else at.v.shape[-1]
    return Lengths(shape[:-3], shape[-3], at.k.shape[-3], shape[-2], shape[-1], at.q.shape[-1], v_dim)


def _compare(
    search: _Search, at: Operands, candidate: Candidate, hows: Iterable[Options], sinks: Array | None = None
) -> bool:
    """One candidate under some conventions; whether it can be computed under any."""
    refused = ""
    tried = False
    doubted = search.stated.get("causal") is None and keeps_values(candidate.made)
    # What a scheme refuses, it refuses with every scale.
    hopeless: set[Options] = set()
    for how in hows:
        if search.calls >= _CALLS:
            search.complete = False
            break
        if (unscaled := replace(how, scale=1.0)) in hopeless:
            continue
        if doubted and how.hidden is not None and not may_be_causal(at, how.hidden):
            continue
        search.calls += 1
        try:
            answer, lse = computed(at, candidate.made, how, sinks)
        except _REFUSALS as error:
            refused = refused or str(error)
            hopeless.add(unscaled)
            continue
        tried = True
        largest, relative = distance(at, answer, lse)
        if np.isfinite(relative):
            key = id(candidate), unscaled
            search.seen[key] = min(relative, search.seen.get(key, np.inf))
            fit = Fit(candidate, how, at, largest, relative, answer)
            if relative < _NEAR:
                fit.rung = rung_of(search.dtype, fit, sinks)
            _keep(search, fit)
    if not tried and refused and not any(one.candidate.scheme == candidate.scheme for one in _compared(search)):
        search.untried.setdefault(candidate.scheme, refused)
    elif tried:
        search.untried.pop(candidate.scheme, None)
    return tried or not refused


def _keep(search: _Search, fit: Fit) -> None:
    """All that fit, and of the others the nearest of each candidate."""
    place = id(fit.candidate), id(fit.at)
    if fit.rung < len(RUNGS):
        search.fits.append(fit)
    elif place not in search.nearest or fit.relative < search.nearest[place].relative:
        search.nearest[place] = fit


def _compared(search: _Search) -> Iterator[Fit]:
    """All that was compared and is kept."""
    yield from search.fits
    yield from search.nearest.values()


def _best(search: _Search) -> list[Fit]:
    """The fits that cannot be told apart from the best one."""
    if not search.fits:
        return []
    rung = min(fit.rung for fit in search.fits)
    fits = [fit for fit in search.fits if fit.rung == rung]
    least = min(fit.relative for fit in fits)
    noise = 64 * EPS["float64" if rung == 0 else "float32"]
    best = sorted((fit for fit in fits if fit.relative <= _AS_GOOD * least + noise), key=_plainness)
    bare = next((fit for fit in best if fit.candidate.scheme == "plain"), None)
    # What hardly adds anything explains no more than nothing does.
    return [fit for fit in best if bare is None or fit.candidate.scheme == "plain" or same(fit.answer, bare.answer)]


def _plainness(fit: Fit) -> tuple[int, ...]:
    """Fewest settings and conventions that are not the usual ones first."""
    how, call, own = fit.how, Call(*fit.at.lengths), fit.candidate
    cls: type = type(own.made)
    defaults = parameters(cls)
    chosen = sum(name not in defaults or value != defaults[name].default for name, value in own.settings.items())
    unusual = (how.scale != call.meant("scale")) + (how.offset != call.last) + (how.hidden not in (None, how.offset))
    return (unusual + (how.window is not None) + (how.cap[0] is not None), chosen, len(own.settings))


def _nearest(fits: Iterable[Fit]) -> list[Fit]:
    """The nearest of each scheme and variant, the nearest first."""
    by_name: dict[tuple[str, str | None], Fit] = {}
    for fit in sorted(fits, key=lambda one: one.relative):
        by_name.setdefault((fit.candidate.scheme, fit.candidate.variant), fit)
    return list(by_name.values())


def _scan(search: _Search, at: Operands, changed: Callable[[Options, Call], list[Options]]) -> None:
    """Options that nobody stated, for the nearest position of each scheme and variant."""
    nearest = _nearest(fit for fit in _compared(search) if fit.how.sinks is None and fit.at is at)
    for how in search.combinations(at):
        hows = changed(how, search.call(at))
        for fit in nearest:
            if search.ended(len(hows)):
                break
            _compare(search, at, fit.candidate, hows)
        if _best(search):
            return


def _look_for_windows(search: _Search, at: Operands) -> None:
    """A window that nobody stated, for the nearest position of each scheme and variant."""
    nearest = _nearest(fit for fit in _compared(search) if fit.how.sinks is None and fit.at is at)
    if at.sizes[-1] > _WIDEST:
        search.said.append(f"more than {_WIDEST} keys: windows that nobody stated were not tried")
        return
    for how in search.combinations(at):
        for fit in nearest:
            if how.window is not None or search.ended(2):
                continue
            search.calls += 1
            try:
                window = fitted_window(at, fit.candidate.made, how)
            except _REFUSALS:
                continue
            if window is not None:
                _compare(search, at, fit.candidate, [replace(how, window=window)])
        if _best(search):
            return


def _look_for_numbers(search: _Search, at: Operands, names: tuple[str, ...]) -> None:
    """One number that nobody stated: those of released models, then one that is fitted to the answer.

    Of these names, or where there are none, of all others.
    """
    own = {id(one.candidate): one.candidate for one in _compared(search) if one.at is at and one.how.sinks is None}
    ways: dict[str, list[tuple[Unknown, Candidate, Options]]] = {}
    for candidate in own.values():
        found = [*one_number.unknowns(candidate, search.settings, at.lengths[0], at.sizes[-3])]
        found += [SCALE] * ("scale" not in search.stated)
        for unknown in found:
            if unknown.name in (names or {unknown.name} - set(_FIRST)):
                hows = _hows(search, at, unknown, candidate)
                ways.setdefault(unknown.name, []).extend((unknown, candidate, how) for how in hows)
    ordered = sorted(ways, key=[*names, *ways].index)
    meant = search.call(at).meant("scale")
    for name in ordered:
        usual = [way for way in ways[name] if way[2].scale == meant]
        for n in range(max((len(way[0].values) for way in usual), default=0)):
            for way in usual:
                if not search.ended() and not _best(search):
                    _try(search, at, way, slice(n, n + 1))
        if _best(search):
            return
    for name in ordered:
        search.most = search.calls + _SCANNED
        _look_for_number(search, at, ways[name])
        if _best(search):
            return


def _hows(search: _Search, at: Operands, unknown: Unknown, candidate: Candidate) -> list[Options]:
    """Combinations of options under which a number is looked for."""
    found = search.combinations(at)
    if search.stated.get("causal") is None and keeps_values(candidate.made):
        found = [how for how in found if how.hidden is None or may_be_causal(at, how.hidden)]
        shown = {how.hidden for how in found if how.hidden is not None and is_causal(at, how.hidden)}
        found = [how for how in found if not shown or how.hidden in shown]
    if unknown is SCALE:
        return list(dict.fromkeys(replace(how, scale=1.0) for how in found))
    meant = search.call(at).meant("scale")
    return [how for how in found if unknown.landmarks or how.scale == meant]


def _look_for_capped_scales(search: _Search, at: Operands) -> None:
    """A scale under each of the usual caps, where nobody stated either, of the two nearest positions."""
    if "scale" in search.stated:
        return
    nearest = _nearest(fit for fit in _compared(search) if fit.how.sinks is None and fit.at is at)[:2]
    call = search.call(at)
    ways = [(SCALE, fit.candidate, how) for fit in nearest for how in with_caps(replace(fit.how, scale=1.0), call)]
    _look_for_number(search, at, ways, len(ways))


def _look_for_number(
    search: _Search, at: Operands, ways: list[tuple[Unknown, Candidate, Options]], most: int = _NEAREST
) -> None:
    """One number, in so many candidates under some options."""

    def error(way: tuple[Unknown, Candidate, Options], value: float) -> float:
        unknown, candidate, how = way
        search.calls += 1
        try:
            candidate, how = unknown.applied(candidate, how, value)
            answer, lse = computed(at, candidate.made, how, None)
        except (RelposError, ArithmeticError, ValueError):
            return np.inf
        found = distance(at, answer, lse)[1]
        return found if np.isfinite(found) else np.inf

    ranked: list[tuple[float, int, int]] = []
    for n, way in enumerate(ways):
        if search.ended(0):
            break
        if way[0] is SCALE:
            ranked.append(_rank(search.seen.get((id(way[1]), way[2]), np.inf), way[1], n))
        elif way[0].landmarks:
            ranked.append(_rank(min(error(way, value) for value in way[0].landmarks), way[1], n))
    nearest = [ways[n] for far, _, n in sorted(ranked)[:most] if far < np.inf]
    for way in nearest:
        _try(search, at, way)
    for way in nearest:
        if not _best(search):
            _fit(search, at, way, partial(error, way))


def _rank(far: float, candidate: Candidate, n: int) -> tuple[float, int, int]:
    """The nearest first; of what is about as near the fewest settings: some schemes hardly add anything."""
    return float(f"{far:.3g}"), len(candidate.settings), n


def _try(search: _Search, at: Operands, way: tuple[Unknown, Candidate, Options], which: slice = slice(None)) -> None:
    """The values that released models have."""
    unknown, candidate, how = way
    for value in unknown.values[which]:
        try:
            other, meant = unknown.applied(candidate, how, value)
        except _REFUSALS:
            continue
        _compare(search, at, other, [meant])


def _fit(search: _Search, at: Operands, way: tuple[Unknown, Candidate, Options], error: one_number.Error) -> None:
    """A number that is fitted: the roundest among those that explain the answer, and which these are."""
    unknown, candidate, how = way
    number = one_number.lowest(unknown, error, max(at.sizes[-2:]))
    least = error(number)

    def fits(other: float) -> bool:
        return error(other) <= _AS_GOOD * least + 64 * EPS["float64"]

    count = len(search.fits)
    changed, meant = unknown.applied(candidate, how, number)
    _compare(search, at, changed, [meant])
    # Rounding on the way, which is not that of the answer, would excuse a number that is only near.
    if len(search.fits) == count or search.fits[-1].rung >= RUNGS.index("float16 inside"):
        return
    v_dim = at.lengths[0] if at.v is None else at.v.shape[-1]
    sizes = at.lengths[0], at.sizes[-3], v_dim
    round_one = next(other for other in one_number.rounder(unknown, number, sizes) if fits(other))
    first, last = one_number.alike(number, fits)
    search.fits.pop()
    changed, meant = unknown.applied(candidate, how, round_one)
    _compare(search, at, changed, [meant])
    search.said.append(f"{unknown.name}: fitted to the answer, which {first:.9g} to {last:.9g} explain as well")


def _look_for_two(search: _Search, at: Operands) -> None:
    """Two schemes together."""
    if not at.whole:
        search.said.append("large operands: two schemes together were not tried")
        return
    hows = search.combinations(at)

    def scores(candidate: Candidate) -> Array | None:
        search.calls += 1
        for how in (hows[0], hows[-1]):
            try:
                return computed(at, candidate.made, how, None, scores=True)[0]
            except _REFUSALS:
                continue
        return None

    pairs = list(pairs_of_schemes(_lengths(at), search.given, search.settings, scores))
    refused: set[int] = set()
    for how in hows:
        for pair in pairs:
            if search.ended():
                break
            if id(pair) not in refused and not _compare(search, at, pair, [how]):
                refused.add(id(pair))


# ---------------------------------------------------------------------------------------------- telling


def _result(search: _Search, first: Operands) -> Identification:
    best = _best(search)
    groups = grouped(best)
    matches = [match(group, "" if n == 0 else why(groups[0][0], group[0], n)) for n, group in enumerate(groups)]
    nearest = [] if matches else [match([fit], "") for fit in _nearest(search.nearest.values())[:_NEAREST]]
    if "scale" not in search.stated:
        sizes = first.lengths[0], first.sizes[-3], first.lengths[0] if first.v is None else first.v.shape[-1]
        words = one_number.known_scales(*sizes)
        for one in (*matches, *nearest):
            if one.call["scale_is"] == "as stated":
                one.call["scale_is"] = words.get(one.call["scale"], "fitted to the answer")
    precision = RUNGS[best[0].rung] if best else None
    return Identification(
        tuple(matches), tuple(nearest), precision, search.untried, tuple(_notes(search, first)), search.calls
    )


def _notes(search: _Search, at: Operands) -> Iterator[str]:
    q_len, k_len = at.sizes[-2:]
    if q_len == k_len:
        yield "L_q = L_k, so that alignment at the first and at the last key are the same"
    if q_len == 1:
        yield "L_q = 1, so that a causal mask that is aligned at the last key hides nothing"
    if at.k.shape[-3] in (1, at.q.shape[-3]):
        yield "H_kv is 1 or H, so that the order of grouped heads cannot be seen"
    if not at.whole:
        batch, rows = at.cut
        yield f"large operands: queries from {rows.start} on of {'the first batch item' if batch else 'the call'}"
    if unknown := int(np.isnan(at.wanted).sum()):
        yield f"{unknown} numbers are NaN and were not compared"
    yield from search.said
    if not search.complete:
        yield "the search was cut short: these arrays can be used in more ways than are tried; name them or state more"


# ------------------------------------------------------------------------------------------- absolute


def _absolute(
    x: Array, out: Array | None, arrays: Mapping[str, Array], settings: Mapping[str, Any], others: Mapping[str, Any]
) -> Identification:
    """The same for what is added to inputs."""
    for name, value in others.items():
        if value is not None:
            raise RelposValueError(f"{name}: does not go with x, to which an encoding was added; expected x and out")
    if out is None:
        raise RelposValueError("out: is missing; expected x and out, which is x with an encoding added")
    inputs, wanted = (check.floating(name, value) for name, value in (("x", x), ("out", out)))
    if inputs.ndim < 2 or inputs.shape != wanted.shape or not inputs.size:
        raise RelposValueError(f"out: expected the shape of x, (..., L, D), found {wanted.shape} and {inputs.shape}")
    dtype = check.array("out", out).dtype
    inputs, wanted = inputs.astype(np.float64), wanted.astype(np.float64)
    if not np.isfinite(wanted).any():
        raise RelposValueError("out: holds no finite number")
    length, dim = inputs.shape[-2:]
    lengths = Lengths(inputs.shape[:-2], 1, 1, length, length, dim, dim)
    found, layout = candidates(lengths, arrays, settings, "absolute"), ""
    if arrays and not found.found:
        found, layout = candidates(lengths, without_axis_of_one(arrays), settings, "absolute"), ONE_AXIS
    search = _Search(dtype, {}, arrays, settings, complete=found.complete, untried=dict(found.untried))
    heads = inputs[..., None, :, :]
    at = Operands(heads, heads, heads, wanted[..., None, :, :], None, None, layout=(layout,) if layout else ())
    size = largest_of(inputs) + 1.0
    for candidate in found.found:
        search.calls += 1
        try:
            answer = candidate.made(inputs)
        except _REFUSALS as error:
            search.untried.setdefault(candidate.scheme, str(error))
            continue
        largest, relative = relative_to(answer, wanted)
        if np.isfinite(relative):
            fit = Fit(candidate, Options(1.0, 0), at, largest, relative, answer)
            fit.rung = finest(dtype, wanted, largest, lambda label: 8 * EPS.get(label, 0.0) * size)
            _keep(search, fit)
    found_as = _result(search, at)
    bare = [tuple(replace(one, call={}) for one in group) for group in (found_as.matches, found_as.nearest)]
    notes = tuple(note for note in found_as.notes if "cut short" in note or "NaN" in note)
    return replace(found_as, matches=bare[0], nearest=bare[1], notes=notes)
