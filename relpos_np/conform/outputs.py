"""What wrong outputs show by themselves, where no known mistake gives them: a scale that fits, where they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relpos_np.api import attention_vjp
from relpos_np.conform.altered import out_of, plain_outputs, scale_of, scores_of, values_of
from relpos_np.conform.formats import format_of
from relpos_np.conform.yardstick import Answer, distance
from relpos_np.errors import RelposError
from relpos_np.formulas.softmax import repeat_heads, softmax
from relpos_np.testing.compare import largest
from relpos_np.testing.example import Example
from relpos_np.types import Array

# Of a search for one number: times the meant one, in steps, and how often the best interval is divided.
_FACTORS = np.geomspace(1 / 32, 32, 25)
_DIVISIONS = 40
# What is left of an error at the best step, if a scale is the cause.
_BETTER = 0.5
# How far off an output is at least, in units of what is allowed, for its places to be looked at: rounding has none.
_PLAINLY = 1e4
_AXES = ("batch item", "head", "query", "channel")
_TILES = (128, 64, 32, 16, 8)
# Families that show how something is done which ordinary ones do not need.
_SPECIAL = ("large_scores", "nan_excluded", "excluded_rows", "calls")


def by_output(wrong: list[Answer], every: list[Answer]) -> str:
    """A cause for wrong answers of one family, of which the smallest is first; `every` is wrong in some family."""
    for name, axes in (("out", "batch, heads, queries, D_v"), ("lse", "batch, heads, queries")):
        if any(name in one.returned and one.returned[name].shape != one.expected[name].shape for one in wrong):
            return f"{name} has another shape than ({axes})"
    if all(_right(one) for one in wrong):
        return _of_lse(wrong)
    shown = [one for one in every if not _right(one)]
    return _special(wrong, shown) or _rounded(wrong) or _factor(wrong) or _last_key(wrong) or _region(shown)


def _right(one: Answer) -> bool:
    """Whether the output is right, and something else wrong."""
    return distance(one.returned["out"], one.expected["out"]) <= one.allowed["out"]


def _rounded(wrong: list[Answer]) -> str:
    """Outputs that a coarser format holds, and that are right but for that."""
    for format_ in map(format_of, ("bfloat16", "float16")):
        outs = [(one.returned["out"], one.expected["out"]) for one in wrong]
        if all(distance(x, format_.rounded(x)) == 0 and distance(x, y) <= format_.eps * largest(y) for x, y in outs):
            return f"rounds its output to {format_.name}"
    return ""


def _factor(wrong: list[Answer]) -> str:
    """Outputs that are all a constant times what they should be."""
    factors = []
    for one in wrong:
        out, expected = one.returned["out"], one.expected["out"]
        square = float((expected * expected).sum())
        factor = float((out * expected).sum()) / square if square else np.nan
        if not np.isfinite(factor) or distance(out, factor * expected) > 2 * one.allowed["out"]:
            return ""
        factors.append(factor)
    first = factors[0]
    if not np.allclose(factors, first, rtol=1e-3) or abs(first - 1) < 1e-3:
        return ""
    return f"the output is {first:.4g} times what it should be"


def _last_key(wrong: list[Answer]) -> str:
    """A number of keys, the same in all answers, from which on none is read."""
    stops = {_keys_read(one) for one in wrong}
    stop = stops.pop() if len(stops) == 1 else 0
    return f"reads no key from number {stop} on" if stop else ""


@np.errstate(all="ignore")
def _keys_read(one: Answer) -> int:
    """How many of the first keys explain an answer; 0 where no number does."""
    if not plain_outputs(one.example) or one.example.kwargs.get("sinks") is not None:
        return 0
    s, v = scores_of(one.example), values_of(one.example)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    last = p[:, :, -1]
    found = np.cumsum(last[..., None] * v, axis=-2) / np.cumsum(last, axis=-1)[..., None]
    errors = np.abs(found - one.returned["out"][:, :, -1, None]).max(axis=(0, 1, 3))
    stop = int(np.where(np.isfinite(errors), errors, np.inf).argmin()) + 1
    total = p[..., :stop].sum(axis=-1, keepdims=True)
    out = p[..., :stop] @ v[:, :, :stop] / np.where(total > 0, total, 1.0)
    return stop if stop < s.shape[-1] and distance(out, one.returned["out"]) <= 2 * one.allowed["out"] else 0


def _largest(one: Example) -> Array:
    return np.asarray(scores_of(one).max(axis=-1))


_LSE: tuple[tuple[str, Callable[[Example, Array], Array]], ...] = (
    ("log-sum-exp in powers of 2 in place of e", lambda _, x: x / np.log(2)),
    ("log-sum-exp with the other sign", lambda _, x: -x),
    ("log-sum-exp without the largest score, which is subtracted first", lambda one, x: x - _largest(one)),
    (
        "log-sum-exp without the sink",
        lambda one, x: x if one.kwargs.get("sinks") is None else softmax(scores_of(one))[1],
    ),
    (
        "log-sum-exp with a scale of 1/sqrt(head_dim), whatever is meant",
        lambda one, _: replace(one, kwargs={n: x for n, x in one.kwargs.items() if n != "scale"}).run("numpy")[1],
    ),
    ("the largest score in place of the log-sum-exp", lambda one, _: _largest(one)),
    ("the sum of exponentials in place of its logarithm", lambda _, x: np.exp(x)),
)


@np.errstate(all="ignore")
def _of_lse(wrong: list[Answer]) -> str:
    """Outputs are right, and log-sum-exps are not, or else gradients."""
    found = [one for one in wrong if "lse" in one.returned]
    for words, change in _LSE:
        if found and all(_alike(one, change(one.example, one.expected["lse"])) for one in found):
            return words
    return _of_gradients(wrong)


def _of_gradients(wrong: list[Answer]) -> str:
    """What all gradients show that are wrong."""
    names = sorted({n for one in wrong for n in one.returned if n.startswith("grad_") and not _gradient(one, n, 1.0)})
    zero = [n for n in names if all(not one.returned[n].any() for one in wrong if n in one.returned)]
    if zero:
        return (
            f"the gradient of {', '.join(n[5:] for n in zero)} is 0: cut from autograd, as by detach or a new Parameter"
        )
    found = [(one, n) for one in wrong for n in names if n in one.returned]
    if not found:
        return ""
    (first, name), told = found[0], " and ".join(names)
    expected = first.expected[name]
    fitted = float((first.returned[name] * expected).sum() / max(float((expected * expected).sum()), 1e-300))
    factors: tuple[tuple[str, Callable[[Example], float]], ...] = (
        ("the scale is missing", lambda one: 1 / scale_of(one)),
        ("scaled twice", scale_of),
        (f"{fitted:.4g} times what it should be", lambda _: fitted),
    )
    for words, factor in factors:
        if all(_gradient(one, n, factor(one.example)) for one, n in found):
            return f"{told}: {words}"
    if all(_without_cap(one) for one in wrong):
        return f"{told}: the derivative of softcap is missing"
    if names == ["grad_k", "grad_q"]:
        return _without_sums(wrong)
    if where := _zero_heads(found):
        return f"{told}: 0 {where}"
    for words, some in _SUMS:
        if all(_of_some(one, n, some(one.example)) for one, n in found):
            return f"{told}: {words}"
    return ""


# Sums of gradients that are not made: which items and heads, (B, H), are all that is left of them.
_SUMS: tuple[tuple[str, Callable[[Example], Array]], ...] = (
    ("that of the first batch item alone", lambda one: np.arange(len(one.q))[:, None] + _group(one) * 0 < 1),
    (
        "that of the last batch item alone",
        lambda one: np.arange(len(one.q))[:, None] + _group(one) * 0 == len(one.q) - 1,
    ),
    ("that of the first query head of each group alone", lambda one: (_group(one) == 0)[None]),
    ("that of the last query head of each group alone", lambda one: (_group(one) == _group(one)[-1])[None]),
)


def _group(one: Example) -> Array:
    """The number of each query head in its group."""
    return np.asarray(np.arange(one.q.shape[1]) % (one.q.shape[1] // one.k.shape[1]))


def _of_some(one: Answer, name: str, some: Array) -> bool:
    """Whether a gradient is that of some items and heads."""
    if one.grad_out is None:
        return False
    case, grad_out = one.example, np.where(some[..., None, None], one.grad_out, 0.0)
    found = attention_vjp(
        case.q, case.k, case.v, position=case.position, grad_out=grad_out, backend="numpy", **case.kwargs
    )
    named = {"q": found.q, "k": found.k, "v": found.v} | dict(found.position)
    return distance(one.returned[name], named[name[5:]]) <= 2 * one.allowed[name]


def _gradient(one: Answer, name: str, factor: float) -> bool:
    """Whether a gradient is what it should be times a factor."""
    found, expected = one.returned[name], one.expected[name]
    return distance(found, factor * expected) <= 2 * one.allowed[name] * max(1.0, abs(factor))


def _without_sums(wrong: list[Answer]) -> str:
    """Gradients of scores that lack what each row subtracts: that of q is off along the average of keys."""
    for one in wrong:
        if one.example.name != "plain":
            return ""
        keys = softmax(scores_of(one.example))[0] @ repeat_heads(one.example.k, one.example.q.shape[1])
        off = one.returned["grad_q"] - one.expected["grad_q"]
        along = (off * keys).sum(-1, keepdims=True) / np.maximum((keys * keys).sum(-1, keepdims=True), 1e-300) * keys
        if distance(off, along) > 4 * one.allowed["grad_q"] + 1e-6 * largest(off):
            return ""
    return "gradients of scores lack the sum of out * grad_out, which each row subtracts"


def _without_cap(one: Answer) -> bool:
    """Whether the gradients of q and k are those of scores that nothing has capped."""
    case = one.example
    if one.grad_out is None or case.kwargs.get("softcap") is None or not plain_outputs(case):
        return False
    heads, kv_heads = case.q.shape[1], case.k.shape[1]
    p = softmax(scores_of(case))[0]
    of_p = p * (one.grad_out @ values_of(case).swapaxes(-1, -2))
    of_s = scale_of(case) * (of_p - p * of_p.sum(-1, keepdims=True))
    of_k = (of_s.swapaxes(-1, -2) @ case.q).reshape(len(p), kv_heads, heads // kv_heads, *case.k.shape[2:]).sum(2)
    found = {"grad_q": of_s @ repeat_heads(np.nan_to_num(case.k), heads), "grad_k": of_k}
    return all(distance(one.returned[n], x) <= 2 * one.allowed[n] for n, x in found.items() if n in one.returned)


def _zero_heads(found: list[tuple[Answer, str]]) -> str:
    """Of which heads alone gradients are 0, where others are right; "" where that is not what is wrong."""
    places = []
    for one, name in found:
        x, expected = one.returned[name], one.expected[name]
        if x.ndim != 4 or x.shape != expected.shape:
            return ""
        zero = np.asarray(~x.any(axis=(0, 2, 3)) & expected.any(axis=(0, 2, 3)))
        if not zero.any() or distance(x[:, ~zero], expected[:, ~zero]) > 2 * one.allowed[name]:
            return ""
        places.append(zero)
    where = _words(places, "head")
    return f"{where} alone" if where else "for some heads"


def _alike(one: Answer, lse: Array) -> bool:
    """Whether a log-sum-exp was returned, where the right one is finite."""
    there = np.isfinite(one.expected["lse"])
    return distance(one.returned["lse"][there], lse[there]) <= 4 * one.allowed["lse"] * max(
        1.0, float(np.abs(lse[there]).max())
    )


def _special(wrong: list[Answer], every: list[Answer]) -> str:
    """What a kind of case alone shows, if ordinary cases with its options, or fewer, are right."""
    if all(np.isnan(one.returned["out"]).any() for one in wrong):
        tile = next((n for n in _TILES if all(_nan_where_first_tile_is_shut(one, n) for one in wrong)), 0)
        if tile:
            return f"NaN for queries that may attend no key of the first tile of {tile}: exp(-inf - -inf)"
    ordinary = [set(other.example.kwargs) for other in every if other.family not in _SPECIAL]
    alone = [one for one in wrong if not any(names <= set(one.example.kwargs) for names in ordinary)]
    if not alone:
        return ""
    if alone[0].family == "large_scores" and not np.isfinite(alone[0].returned["out"]).all():
        return "the exponential overflows: the largest score is not subtracted first"
    return ""


def _nan_where_first_tile_is_shut(one: Answer, tile: int) -> bool:
    shut = np.isneginf(scores_of(one.example))
    lost = shut[..., :tile].all(axis=-1) & ~shut.all(axis=-1)
    return bool(lost.any()) and np.array_equal(np.isnan(one.returned["out"]).any(axis=-1), lost)


def fitted_scale(first: Answer, wrong: list[Answer]) -> tuple[str, Callable[[Example], Array]] | None:
    """A constant scale, or a constant times the meant one, that gives all answers: in words, and what it leads to.

    It is looked for in the first answer, which is a small one.
    """
    if not all(np.isfinite(one.returned["out"]).all() for one in (first, *wrong)):
        return None

    def off(one: Answer, scale: float) -> float:
        try:
            return distance(out_of(one.example, scale=scale), one.returned["out"])
        except RelposError:
            return np.inf

    tried = scale_of(first.example) * _FACTORS
    errors = [off(first, float(scale)) for scale in tried]
    best = int(np.argmin(errors))
    if errors[best] > _BETTER * distance(first.returned["out"], first.expected["out"]):
        return None
    low, high = (float(tried[min(max(best + n, 0), len(tried) - 1)]) for n in (-1, 1))
    # A small answer says where the scale is, one with more numbers what it is.
    ordinary = scale_of(first.example) / scale_of(wrong[0].example)
    constant = off(wrong[0], (low + high) / 2) < off(wrong[0], (low + high) / 2 / ordinary)
    low, high = (low, high) if constant else (low / ordinary, high / ordinary)
    for _ in range(_DIVISIONS):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if off(wrong[0], a) < off(wrong[0], b) else (a, high)
    scale = (low + high) / 2
    times = scale / scale_of(wrong[0].example)
    if all(off(one, scale) <= 4 * one.allowed["out"] for one in wrong):
        return f"the scale is {scale:.4g}, whatever is meant", lambda one: out_of(one, scale=scale)
    if all(off(one, times * scale_of(one.example)) <= 4 * one.allowed["out"] for one in wrong):
        return f"the scale is {times:.4g} times what is meant", lambda one: out_of(one, scale=times * scale_of(one))
    return None


def _region(wrong: list[Answer]) -> str:
    """Where alone outputs are wrong, if that is the same in all cases: heads, items, queries or channels."""
    if not all(far_off(one) for one in wrong):
        return ""
    for axis, word in enumerate(_AXES):
        places = [_along(one, axis) for one in wrong]
        if any(bad.all() or not bad.any() for bad in places):
            continue
        zero = all(
            (np.take(x.returned["out"], np.flatnonzero(b), axis) == 0).all() for x, b in zip(wrong, places, strict=True)
        )
        where = _words(places, word)
        if where:
            return f"the output is {'0' if zero else 'wrong'} {where} alone"
    return ""


def far_off(one: Answer) -> bool:
    """Whether an output is wrong by more than any rounding."""
    out, expected = one.returned["out"], one.expected["out"]
    return out.shape == expected.shape and distance(out, expected) > _PLAINLY * one.allowed["out"]


def _along(one: Answer, axis: int) -> Array:
    """Which entries of an axis have something wrong."""
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(one.returned["out"] - one.expected["out"]) <= one.allowed["out"])
    return np.asarray(bad.any(axis=tuple(n for n in range(4) if n != axis)))


def _words(places: list[Array], word: str) -> str:
    """The rule that all places follow, if there is one."""
    ends = [(int(np.flatnonzero(bad)[0]), int(np.flatnonzero(bad)[-1]), len(bad)) for bad in places]
    if all(last == 0 for _, last, _ in ends):
        return f"for the first {word}"
    if not all(last == count - 1 for _, last, count in ends):
        return ""
    firsts = {first for first, _, _ in ends}
    if firsts == {0}:
        return ""
    if len(firsts) == 1:
        return f"from {word} {firsts.pop()} on, counted from 0,"
    if all(first == last for first, last, _ in ends):
        return f"for the last {word}"
    tile = next((n for n in _TILES if all(first == count // n * n for first, _, count in ends)), 0)
    return f"for what follows the last whole tile of {tile}, by {word}," if tile else ""
