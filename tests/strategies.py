"""Calls of attention as hypothesis draws them: structure and a seed are drawn, numbers come from the seed.

A `Case` prints as the arguments it was made of, so that a failure shows a minimal call. It can build the library's
operands and schemes in any dtype, and the naive loops' closures for the same numbers. Schemes come from the register.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered
from relpos_np._contract import check
from relpos_np._contract.terms import ValueTurn
from relpos_np._dense import from_terms
from relpos_np.errors import RelposError
from relpos_np.schemes.liere import _blockwise, _Spectrum
from relpos_np.schemes.pope import _polar
from relpos_np.schemes.sample import Sample
from relpos_np.testing._sizes import lengths as sizes_of
from relpos_np.testing.arguments import arguments, rebuilt
from tests import naive
from tests.every import ATTENTION
from tests.sizes import BLOCK_KEYS, ROW_QUANTUM, around

SMALL_LENGTHS = (1, 2, 3, 5, 7, 8)
LENGTHS = (1, 7, 15, 16, 17, 63, 65, ROW_QUANTUM, 2 * ROW_QUANTUM, *around(BLOCK_KEYS))
SMALL_DIMS = (1, 2, 5, 7)
DIMS = (1, 7, 16, 20, 33, 64, 65)


@dataclass(frozen=True)
class Position:
    """One scheme of the register: its variant, and which of its example's choices are taken.

    `make` stands in for the example where a test needs a certain scheme: from a sample to the scheme.
    """

    name: str
    variant: str | None = None
    choices: tuple[int, ...] = ()
    make: Callable[[Sample], Any] | None = None

    def parts(self, sample):
        """The fields of an example."""
        sample = replace(sample, variant=self.variant, choices=self.choices)
        if self.make is not None:
            return {**sample.operands(1, 1), "position": self.make(sample)}
        return rp.SCHEMES[self.name].build(sample)


@dataclass(frozen=True)
class Mask:
    """A mask's kind ("bool" or "float"), shape, and share of allowed entries."""

    kind: str
    shape: tuple[int, ...]
    allowed: float

    def build(self, seed, dtype, rounded):
        rng = np.random.default_rng([seed, 99])
        there = np.asarray(rng.random(self.shape) < self.allowed)
        if self.kind == "bool":
            return there
        added = np.asarray(rng.standard_normal(self.shape)).astype(rounded).astype(dtype)
        return np.asarray(np.where(there, added, dtype(-np.inf)))


@lru_cache(maxsize=16)  # one call is asked for its numbers many times, as itself and as changed a little
def _parts(position, size, batch, heads, seed, rounded):
    rng = np.random.default_rng(seed)
    sample = Sample(lambda *shape: rng.standard_normal(shape).astype(rounded), **dict(size), batch=batch, heads=heads)
    return sample.operands(1, 1) if position is None else position.parts(sample)


@dataclass(frozen=True)
class Case:
    """One call of attention; a first scheme with lengths of its own (a window) changes those that are given."""

    seed: int
    leads: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...]
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    depth: int
    v_dim: int
    amplitude: float = 1.0
    positions: tuple[Position, ...] = ()
    mask: Mask | None = None
    causal: bool = False
    window: Any = None
    key_lengths: Any = None
    scale: float | None = None
    offset: int | None = None
    # As the loops take it.
    rule: tuple[Any, ...] | None = None
    softcap: float | None = None
    cap_order: str = "scores"
    # Axes of the arrays: "head", "query" or "row", for a number per query of each head.
    sinks: str | None = None
    query_scale: str | None = None
    # Keys that each query names; a negative number for others in each head.
    selected: int = 0
    # The lengths that were given, also to a case that is replaced.
    given: tuple[int, int] | None = field(default=None, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "given", self.given or (self.q_len, self.k_len))
        if self.positions:
            parts = self.parts(0, np.float64)
            object.__setattr__(self, "q_len", parts["q"].shape[-2])
            object.__setattr__(self, "k_len", parts["k"].shape[-2])

    @property
    def heads(self):
        return self.kv_heads * self.group

    def parts(self, at, rounded):
        """What the example of a scheme consists of, in one precision."""
        lengths = (self.q_len, self.k_len) if at else self.given
        size = tuple(vars(sizes_of(*lengths, self.depth, self.v_dim)).items())
        position = self.positions[at] if self.positions else None
        return _parts(position, size, self.batch, (self.heads, self.kv_heads), (self.seed, at), rounded)

    def operands(self, dtype, rounded=None):
        """q, k, v; with `rounded`, the values they have in that dtype."""
        parts = self.parts(0, rounded or dtype)
        out = []
        for name, lead in zip("qkv", self.leads, strict=True):
            # Of an axis that is broadcast, the first item stands for all.
            x = parts[name][(0,) * (len(self.batch) - len(lead))]
            x = x[tuple(slice(n) for n in lead)] * (self.amplitude if name == "q" else 1)
            out.append(np.ascontiguousarray(x.astype(rounded or dtype), dtype))
        return out

    def schemes(self, dtype, rounded=None):
        """The schemes, with arrays in one dtype."""
        made = (self.parts(at, rounded or dtype)["position"] for at in range(len(self.positions)))
        return tuple(rebuilt(position, dtype) for position in made)

    def numbers(self, dtype, rounded=None):
        """The options that are arrays and have gradients."""
        rng, made = np.random.default_rng([self.seed, 98]), {}
        rows = (*self.batch, self.heads, self.q_len)
        shapes = {"head": (self.heads,), "query": (self.q_len,), "row": rows, "item": (*self.batch, 1, self.q_len)}
        for name, kind in (("sinks", self.sinks), ("query_scale", self.query_scale)):
            if kind is not None:
                x = rng.standard_normal(shapes[kind])
                x = 2 * x if name == "sinks" else 1 + np.abs(x)
                made[name] = x.astype(rounded or dtype).astype(dtype)
        return made

    def _selected(self):
        """Indices of keys, or None."""
        if not self.selected:
            return None
        rng = np.random.default_rng([self.seed, 97])
        heads = (self.heads,) if self.selected < 0 else ()
        return rng.integers(-1, self.k_len, (*self.batch, *heads, self.q_len, abs(self.selected)))

    def _rule(self):
        if self.rule is None:
            return None
        kind, *numbers = self.rule
        if kind == "prefix":
            lengths = numbers[0]
            return rp.Prefix(lengths if isinstance(lengths, int) else np.array(lengths))
        return {"chunked": rp.Chunked, "dilated": rp.Dilated}[kind](*numbers)

    def options(self, dtype, rounded=None):
        """Keyword arguments of rp.attention."""
        schemes = self.schemes(dtype, rounded)
        lengths = self.key_lengths
        more = {"rule": self._rule(), "softcap": self.softcap, "selected": self._selected()}
        if self.softcap is not None:
            more["cap_order"] = self.cap_order
        more = {name: x for name, x in more.items() if x is not None}
        return (
            self.numbers(dtype, rounded)
            | more
            | {
                "position": None if not schemes else schemes[0] if len(schemes) == 1 else schemes,
                "mask": None if self.mask is None else self.mask.build(self.seed, dtype, rounded or dtype),
                "causal": self.causal,
                "window": self.window,
                "key_lengths": lengths if lengths is None or isinstance(lengths, int) else np.array(lengths),
                "scale": self.scale,
                # With lengths, calls of fewer queries must say where these stand.
                "offset": self.k_len - self.q_len if self.offset is None and lengths is not None else self.offset,
            }
        )

    def legal(self, dtype=np.float64):
        """Whether the library accepts the call."""
        try:
            problem = check.problem(*self.operands(dtype), **self._masks(dtype))[0]
            checked_schemes(tuple(self.schemes(dtype)), problem)
        except RelposError:
            return False
        return True

    def _masks(self, dtype, rounded=None):
        options = self.options(dtype, rounded)
        del options["position"]
        return options

    def _weakened(self, weight, lse):
        """What sinks leave of sums of p |v|."""
        sinks = self.numbers(np.float64).get("sinks")
        if sinks is None:
            return weight
        sinks = sinks[:, None] if self.sinks == "head" else sinks
        return weight / (1 + np.exp(np.minimum(sinks - lse, 700.0)))[..., None]

    def score_options(self, dtype):
        """Keyword arguments of rp.logits."""
        return {name: x for name, x in self.options(dtype).items() if name != "sinks"}

    def attention(self, dtype, backend, rounded=None):
        """Output and log-sum-exp of a backend."""
        operands, options = self.operands(dtype, rounded), self.options(dtype, rounded)
        with np.errstate(all="raise"):  # no legal input may need NumPy to be lenient
            return rp.attention(*operands, **options, backend=backend, return_lse=True)

    def loops(self):
        """What the naive functions take: operands with one batch axis, and the closures of all schemes."""
        q, k, v = (
            np.broadcast_to(x, (*self.batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])
            for x in self.operands(np.float64)
        )
        offset = self.k_len - self.q_len if self.offset is None else self.offset
        options = self.options(np.float64)
        if "query_scale" in options:
            factors = np.broadcast_to(options["query_scale"], (*self.batch, self.heads, self.q_len))
            q = np.broadcast_to(q, (q.shape[0], self.heads, *q.shape[2:])) * factors.reshape(-1, *q.shape[1:3], 1)
        mask, lengths, right = options["mask"], options["key_lengths"], self.window
        if isinstance(right, tuple):
            right = right[1]
        call = {
            "q": q,
            "k": k,
            "v": v,
            "l_q": self.q_len,
            "l_k": self.k_len,
            "heads": self.heads,
            "offset": offset,
            "scale": self.depth**-0.5 if self.scale is None else self.scale,
            "batch": self.batch,
            "last": min([0] * self.causal + ([] if right is None else [right]), default=None),
        }
        found = [
            naive.of(p.name, arguments(scheme), **call)
            for p, scheme in zip(self.positions, self.schemes(np.float64), strict=True)
        ]
        scale = self.scale
        for one in found:
            q, k = q if one.q is None else one.q, k if one.k is None else one.k
            scale = scale if one.scale is None else one.scale
            v = v if one.v is None else one.v
        values = [one.value for one in found if one.value is not None]

        def value(b, h, i, j):
            return [sum(column) for column in zip(*[x(b, h, i, j) for x in values], strict=True)]

        if mask is not None:
            mask = np.broadcast_to(mask, (*self.batch, self.heads, self.q_len, self.k_len))
            mask = mask.reshape(-1, *mask.shape[-3:])
        if lengths is not None:
            lengths = np.broadcast_to(lengths, self.batch).ravel().tolist()
        limits = {"mask": mask, "causal": self.causal, "window": self.window, "key_lengths": lengths}
        limits["rule"] = self.rule
        if self.rule is not None and self.rule[0] == "prefix" and not isinstance(self.rule[1], int):
            limits["rule"] = ("prefix", np.broadcast_to(self.rule[1], self.batch).ravel().tolist())
        selected = options.get("selected")
        if selected is not None:
            selected = selected if selected.ndim == len(self.batch) + 3 else selected[..., None, :, :]
            shape = (*self.batch, self.heads, self.q_len, selected.shape[-1])
            limits["selected"] = np.broadcast_to(selected, shape).reshape(-1, *shape[-3:]).tolist()
        sinks = options.get("sinks")
        if sinks is not None:
            sinks = np.broadcast_to(sinks[:, None] if self.sinks == "head" else sinks, (*self.batch, *q.shape[1:3]))
            sinks = sinks.reshape(q.shape[:3]).tolist()
        return (q, k, v), {
            "softcap": self.softcap,
            "cap_order": self.cap_order,
            "sinks": sinks,
            "product": next((one.product for one in found if one.product is not None), None),
            "logit": naive.add(*[one.logit for one in found if one.logit is not None]),
            "value": value if values else None,
            "back": next((one.back for one in found if one.back is not None), None),
            "allowed": naive.allowed(self.q_len, self.k_len, offset=offset, **limits),
            "scale": scale,
        }

    def naive(self, rows=None):
        """Output and log-sum-exp of the loops, in the shape of the call, or of some rows (b, h, i)."""
        operands, closures = self.loops()
        out, lse = naive.attention(*operands, **closures, rows=rows)
        if rows is not None:
            return out, lse
        return out.reshape(*self.batch, *out.shape[1:]), lse.reshape(*self.batch, *lse.shape[1:])

    def naive_logits(self):
        """Scores of the loops, in the shape of the call."""
        (q, k, _), closures = self.loops()
        del closures["value"], closures["sinks"], closures["back"]
        s = naive.logits(q, k, **closures)
        return s.reshape(*self.batch, *s.shape[1:])

    def sizes(self, rounded=np.float64):
        """What errors are relative to: (logit of each row, sum of p |v| of each output).

        A score is a sum, and rounding is relative to its parts even where they cancel: a row's logit counts with the
        largest sum of the absolute values of everything that its terms multiply and add.
        """
        q, k, v = self.operands(np.float64, rounded)
        problem = check.problem(q, k, np.abs(v), **self._masks(np.float64, rounded))[0]
        terms = all_terms(each_lowered(self.schemes(np.float64, rounded), problem))
        whole, turn = _absolute(terms, problem), None if terms.turn is None else terms.turn.sizes()
        for scheme in self.schemes(np.float64, rounded):
            whole = replace(whole, **_turned_sizes(scheme, problem.q, problem.k, problem.site))
        # What scales queries rounds them, before anything is made of them.
        counted = sum(_counted(scheme, problem) for scheme in self.schemes(np.float64, rounded) if self.query_scale)
        if turn is not None:
            problem = problem.with_values(np.maximum(turn.of_values(problem.v), turn.to_values(problem.v)))
        weight, lse = from_terms.attention(problem, replace(terms, values=whole.values, turn=None))
        if turn is not None:
            weight = np.maximum(turn.of_output(weight), turn.to_output(weight))
        weight = self._weakened(weight, lse)
        problem = check.problem(np.abs(q), np.abs(k), np.abs(v), **self._masks(np.float64, rounded))[0]
        problem.site.scale = abs(problem.site.scale)
        # A cap is never steeper than 1: errors of what it is given remain, and rounding it is relative to less.
        problem.softcap, problem.cap_content = 0.0, False
        if problem.mask is not None and problem.mask.dtype != np.bool_:
            problem.mask = np.where(np.isneginf(problem.mask), problem.mask, np.abs(problem.mask))
        s = from_terms.scores(problem, whole)
        return np.maximum(s.max(axis=-1, initial=0.0), 0.0) + counted, weight


def _counted(scheme, problem):
    """How much a relative change of queries, of 1, moves what CoPE adds to a score: through all gates, at most."""
    if not isinstance(scheme, rp.CoPE):
        return 0.0
    keys, gates, whole, *_ = scheme._steps(problem.q, problem.k, problem.site)
    products = np.abs(problem.q) @ np.abs(keys).swapaxes(-1, -2) * abs(problem.site.scale)
    moved = (gates * (1 - gates) * products).sum(axis=-1)
    return moved * np.abs(np.diff(whole, axis=-1)).max(axis=-1, initial=0.0) * abs(scheme._factor(problem.site))


def _absolute(terms, problem):
    """The same terms of numbers without their signs; what excludes a key goes on doing so."""

    def size(x):
        return None if x is None else np.where(np.isneginf(x), x, np.abs(x))

    return replace(
        terms,
        query=size(terms.query),
        key=size(terms.key),
        tables=tuple(replace(t, table=size(t.table)) for t in terms.tables),
        queries=tuple(replace(t, query=size(t.query), weights=size(t.weights)) for t in terms.queries),
        keys=tuple(replace(t, key=size(t.key), weights=size(t.weights)) for t in terms.keys),
        values=tuple(replace(t, weights=size(t.weights)) for t in terms.values),
        biases=tuple(size(bias) for bias in terms.biases),
    )


def _turned_sizes(scheme, q, k, site):
    """What channels that have turned are sums of: a turn may leave little of what another is multiplied with."""
    if isinstance(scheme, rp.Rotary):
        of_query, of_key = scheme._tables(site)
        turn = ValueTurn(of_key, of_query, scheme.layout, scheme._first, scheme.blocks).sizes()
        q, k = np.abs(q), np.abs(k)
        query = np.maximum(turn.of_output(q), turn.to_output(q))
        return {"query": query, "key": np.maximum(turn.of_values(k), turn.to_values(k))}
    if isinstance(scheme, rp.LieRE):
        turns = [np.abs(_Spectrum(scheme.generators, at).rotations()) for at in scheme._at(site)]
        return {"query": _blockwise(np.abs(q), turns[0]), "key": _blockwise(np.abs(k), turns[1])}
    if isinstance(scheme, rp.PoPE):
        # Whatever its angle leaves of a magnitude.
        whole = np.full(scheme.bias.shape[-1], 1.0 + 1.0j)
        return {"query": np.abs(_polar(q, whole)), "key": np.abs(_polar(k, whole))}
    return {}


def float64_tolerance(case):
    """How far two correct float64 evaluations may be apart: (output, lse), from epsilon and the sums' lengths."""
    eps = np.finfo(np.float64).eps
    top, weight = case.sizes()
    # An angle, or another product with a position, has an error of its own size in radians.
    first = case.k_len - case.q_len if case.offset is None else int(np.abs(case.offset).max())
    furthest = max(abs(first), abs(first) + case.q_len, case.k_len)
    angle = 0 if all(rp.SCHEMES[position.name].far for position in case.positions) else furthest
    score = (2 * (case.depth + 8) + angle) * eps * (1 + top)
    out = (2 * score + 2 * (case.k_len + 8) * eps)[..., None] * weight
    return np.maximum(out, np.finfo(np.float64).tiny), score + 2 * (case.k_len + 8) * eps


def grid(q_len, k_len):
    """A scheme whose index map is given pair by pair, for any lengths."""
    extent = max(q_len, k_len)

    def make(at):
        table = at.normal(2 * extent - 1, at.heads[0])
        return rp.WindowBias(table, (q_len,), (k_len,), extent=(extent,))

    return Position("window", make=make)


# Every scheme of attention with each variant; the first variant has the scheme's name alone.
KINDS = {
    name if variant in (None, *rp.SCHEMES[name].variants[:1]) else f"{name} {variant}": Position(name, variant)
    for name, variant in ATTENTION
}
# Each as examples have it, and with all second choices, such as tables per head or positions of one's own.
EVERY = KINDS | {f"{name}, chosen": replace(position, choices=(1,) * 8) for name, position in KINDS.items()}
T5_CAUSAL = Position("t5", choices=(5,))
SHAW_PER_HEAD = Position("shaw", "zero", choices=(1,))


# ---------------------------------------------------------------------------------------------- what is drawn


def fits(position, offset):
    """Whether a scheme may stand so far away: where positions are computed with, they lose digits."""
    return rp.SCHEMES[position.name].far or offset is None or abs(offset) <= 20


def _position(pair, choices):
    return Position(*pair, tuple(choices))


@st.composite
def positions(draw, offset, name=None):
    """No scheme, one, or a tuple whose terms add up; `Case.legal` says whether they go together."""
    # No lambdas: hypothesis would parse this file to describe them, which CPython 3.11 cannot do on two threads.
    one = st.builds(
        _position,
        st.sampled_from([pair for pair in ATTENTION if name in (None, pair[0])]),
        st.lists(st.integers(0, 5), max_size=6),
    ).filter(partial(fits, offset=offset))
    if name is not None:
        return (draw(one),)
    count = draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))
    return tuple(draw(one) for _ in range(count))


@st.composite
def masks(draw, shape):
    """Full, row, key-padding and broadcast masks, bool or float with -inf."""
    axes = draw(st.integers(0, len(shape)))
    kept = [n if draw(st.booleans()) else 1 for n in shape[len(shape) - axes :]]
    if len(shape) == 4 and kept == [shape[0], shape[-1]]:
        kept = [1, *kept]  # where it may be a row for each item of the batch, two axes are refused
    return Mask(
        draw(st.sampled_from(["bool", "float"])), tuple(kept), draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
    )


@st.composite
def lead_axes(draw):
    """Batch axes of q, k and v, which broadcast to the last one returned."""
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2), (1, 3)]))
    leads = []
    for _ in range(3):
        lead = tuple(n if draw(st.sampled_from([True, True, False])) else 1 for n in batch)
        leads.append(lead[1:] if lead and lead[0] == 1 and draw(st.booleans()) else lead)
    return tuple(leads), tuple(np.broadcast_shapes(*leads))


def offsets(q_len, k_len):
    """The usual offset, near ones, and ones that leave all or no keys in the past."""
    near = st.integers(-q_len - 2, k_len + 2)
    return st.none() | near | st.sampled_from([-1000, 1000, -(1 << 31) - 5, 1 << 33, -(1 << 50)])


def windows(k_len):
    """None, w, or (left, right) with None as unbounded."""
    side = st.none() | st.integers(0, k_len + 1)
    return st.none() | st.integers(0, k_len + 1) | st.tuples(side, side)


@st.composite
def rules(draw, batch, k_len):
    """A rule, as loops take it."""
    kind = draw(st.sampled_from(["chunked", "prefix", "dilated"]))
    if kind == "chunked":
        chunks = st.none() | st.integers(0, 2)
        return kind, draw(st.integers(1, k_len + 2)), draw(chunks), draw(chunks)
    if kind == "dilated":
        return kind, draw(st.integers(1, k_len + 1))
    length = st.integers(0, k_len + 1)
    return kind, draw(length | st.lists(length, min_size=batch[-1], max_size=batch[-1]) if batch else length)


@st.composite
def shaping(draw, batch, k_len):
    """Options of a call that most calls do without."""
    rule = draw(st.none() | rules(batch, k_len))
    found = {
        "rule": rule,
        "softcap": draw(st.sampled_from([None, 0.5, 3.0, 50.0])),
        "sinks": draw(st.sampled_from([None, "head", "row", "item"])),
        "query_scale": draw(st.sampled_from([None, "query", "row", "item"])),
        "selected": draw(st.sampled_from([0, 0, 1, 3, -2])),
    }
    if found["softcap"] is not None:
        found["cap_order"] = draw(st.sampled_from(["scores", "content"]))
    if rule is not None and rule[0] == "prefix":
        found["causal"] = False
    return found


@st.composite
def cases(draw, *, small=True, plain=False, name=None, shaped=True):
    """Any legal call, with the options of `shaping` or without. Small ones are within reach of the naive loops."""
    lengths, dims = (SMALL_LENGTHS, SMALL_DIMS) if small else (LENGTHS, DIMS)
    leads, batch = (
        draw(lead_axes()) if small else draw(st.sampled_from([(((), (), ()), ()), (((2,), (1,), (2,)), (2,))]))
    )
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]))
    q_len, k_len = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    depth = draw(st.sampled_from(dims))
    offset = draw(st.none() | offsets(q_len, k_len))
    shape = (batch, kv_heads, group, q_len, k_len, depth, draw(st.sampled_from(dims)))
    base = _legal(draw(st.integers(0, 999)), leads, *shape, () if plain else draw(positions(offset, name)), offset)
    # A window has lengths of its own.
    q_len, k_len = base.q_len, base.k_len
    length = st.integers(0, k_len)
    lengths_of = st.none() | length
    more = draw(st.one_of(st.just({}), shaping(batch, k_len))) if shaped else {}
    if batch and (batch[-1] > 1 or prod(batch) == 1):  # one entry for several items is refused
        lengths_of |= st.lists(length, min_size=batch[-1], max_size=batch[-1])
    usual = {
        "amplitude": draw(st.sampled_from([1.0, 1.0, 5.0])),
        "mask": draw(st.none() | masks((*batch, kv_heads * group, q_len, k_len))),
        "causal": draw(st.booleans()),
        "window": draw(windows(k_len)),
        "key_lengths": draw(lengths_of),
        "scale": draw(st.sampled_from([None, None, 1.0, 0.3, -0.7, 0.0])),
    }
    window, rule = usual["window"], more.get("rule")
    if rule is not None and rule[0] == "prefix" and 0 in (window, window[1] if isinstance(window, tuple) else None):
        # It would hide the prefix, which is refused.
        usual["window"] = None
    found = replace(base, **usual | more)
    # Where positions are part of the product, nothing says what a cap of products is for.
    return found if found.cap_order == "scores" or found.legal() else replace(found, cap_order="scores")


def _legal(seed, leads, batch, kv_heads, group, q_len, k_len, depth, v_dim, found, offset):
    """The case with as many of its schemes as go together, and without the offset if they need the usual one."""
    for kept in dict.fromkeys([found, *((one,) for one in found), ()]):
        for at in dict.fromkeys([offset, None]):
            try:
                case = Case(seed, leads, batch, kv_heads, group, q_len, k_len, depth, v_dim, positions=kept, offset=at)
            except RelposError:
                break
            if case.legal():
                return case
    raise AssertionError("a call without schemes is legal")
