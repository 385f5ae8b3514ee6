"""Attention that is wrong in one way each, at the sizes and in the combinations that kernels have; NumPy, no package.

`kernel` is right; each entry of `WRONG` changes one step of it. ``python -m tests.wrong_kernels`` runs `conform` on
all of them with all families, and counts how many fail and how many are told the right cause.
"""

import inspect
import math
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


class Wrong(NamedTuple):
    """What is wrong, and a family of calls that shows it; the cause is to hold one of some words. `takes`: options."""

    words: str
    scheme: str
    family: str
    function: Callable
    causes: tuple[str, ...]
    takes: dict


def wrong(place, words, causes, function=None, takes=None, **steps):
    """A row of a table: `place` is scheme and family, bars part `causes`; `steps` of `kernel`, or a function."""
    told = tuple(causes.split(" | ")) if causes else ()
    return Wrong(words, *place.split(), function or kernel(**steps), told, takes or {})


def kernel(asks=(), **steps):
    """A function of q, k, v and options, with some steps changed: each gets the call and what it would have been."""

    def step(name, at, value):
        return steps[name](at, value) if name in steps else value

    def attend(
        q, k, v, mask=None, causal=False, window=None, key_lengths=None, scale=None, offset=None, softcap=None,
        sinks=None, return_lse=False, **position,
    ):  # fmt: skip
        at = SimpleNamespace(q=q, k=k, v=v, mask=mask, causal=causal, window=window, key_lengths=key_lengths)
        at.scale, at.offset, at.softcap, at.sinks, at.position = scale, offset, softcap, sinks, position
        step("before", at, None)
        return rest(at, return_lse)

    def rest(at, return_lse):
        q, k, v = at.q, at.k, at.v
        at.heads, at.q_len, at.dim = q.shape[1:]
        at.kv_heads, at.k_len, at.v_dim = v.shape[1:]
        group = step("group", at, np.arange(at.heads) // (at.heads // at.kv_heads))
        k, v = k[:, group], v[:, group]
        start = at.k_len - at.q_len if at.offset is None else at.offset
        at.start = step("start", at, start)
        at.i, at.j = (np.arange(at.q_len) + at.start)[:, None], np.arange(at.k_len)
        factor = q.dtype.type(step("scale", at, at.dim**-0.5 if at.scale is None else at.scale))
        q, k = step("turned", at, (q, k))
        with np.errstate(all="ignore"):
            s = step("scores", at, q @ k.swapaxes(-1, -2) * factor)
            s = s + np.asarray(step("bias", at, 0.0), s.dtype)
            if at.softcap is not None:
                s = step("cap", at, q.dtype.type(at.softcap) * np.tanh(s / q.dtype.type(at.softcap)))
            if at.mask is not None and at.mask.dtype != np.bool_:
                s = s + step("added", at, at.mask)
            s = np.where(step("shown", at, shown(at, start)), s, -np.inf)
            v = step("values", at, np.where((s > -np.inf).any(-2)[..., None], v, 0))
            return finished(at, step("masked", at, s), v, return_lse)

    def finished(at, s, v, return_lse):
        top = np.max(s, axis=-1, keepdims=True)
        if at.sinks is not None:
            top = np.maximum(top, step("sinks", at, at.sinks)[:, None, None])
        top = step("top", at, np.where(np.isfinite(top), top, 0).astype(s.dtype))
        p = step("weights", at, np.exp(s - top))
        total = p.sum(-1, keepdims=True)
        if at.sinks is not None:
            total = total + np.exp(step("sinks", at, at.sinks)[:, None, None] - top)
        p = p / np.where(total == 0, 1, total).astype(p.dtype)
        out = step("out", at, (p @ v.astype(p.dtype)).astype(v.dtype))
        if not return_lse:
            return out
        lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + top, -np.inf)[..., 0]
        return out, step("lse", at, lse)

    return named(attend, asks)


def moved(at, **other):
    """The call with something in another place."""
    return SimpleNamespace(**(vars(at) | other))


def shown(at, start, **other):
    """Which keys a query may attend."""
    use = moved(at, **other)
    i, j = (np.arange(use.q_len) + start)[:, None], np.arange(use.k_len)
    seen = np.ones((use.q_len, use.k_len), bool)
    if use.causal:
        seen &= j <= i
    if use.window is not None:
        seen &= (j >= i - use.window[0]) & (j <= i + use.window[1])
    seen = seen[None, None]
    if use.key_lengths is not None:
        seen = seen & (j < np.asarray(use.key_lengths)[:, None, None, None])
    if use.mask is not None:
        seen = seen & (use.mask if use.mask.dtype == np.bool_ else use.mask > -np.inf)
    return seen


def buckets(at, position, **other):
    """T5's rows of each pair, decided in float64 with a margin for the borders."""
    use = {"max_distance": 128, "bidirectional": True} | position | other
    count, most = len(position["table"]), use["max_distance"]
    d = at.j - at.i
    rows = np.zeros(d.shape, int)
    if use["bidirectional"]:
        count //= 2
        rows, d = rows + count * (d > 0), np.abs(d)
    else:
        d = np.maximum(-d, 0)
    exact = count // 2
    with np.errstate(all="ignore"):
        far = exact + np.floor(np.log(d / exact) / math.log(most / exact) * (count - exact) + 1e-12)
    return rows + np.where(d < exact, d, np.minimum(np.where(d < exact, 0, far), count - 1).astype(int))


def seen(**changes):
    """Keys as they are shown where options are changed, each by a function of the call and of what it has there."""

    def changed(at, _):
        given = {name: getattr(at, name) for name in changes}
        return shown(at, at.start, **{n: None if x is None else changes[n](at, x) for n, x in given.items()})

    return changed


def t5(rows=lambda at, rows: rows, of=lambda table: table, **other):
    def bias(at, _):
        found = rows(at, buckets(at, at.position, **other))
        table = of(at.position["table"])
        return np.moveaxis(table[np.clip(found, 0, len(table) - 1)], -1, 0)

    return kernel({"table": ..., "max_distance": 128, "bidirectional": True}, bias=bias)


def named(function, asks):
    """The function with these parameters in the place of any: it is asked for what it names."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(n, kind, default=inspect.Parameter.empty if x is ... else x) for n, x in dict(asks).items()
    ]

    def asked(*arrays, **options):
        return function(*arrays, **options)

    asked.__signature__ = inspect.Signature([*own, *more])
    return asked


def turn(x, places, frequencies):
    """Halves of the first channels turned, as many as there are frequencies for."""
    theta = places[:, None] * frequencies
    cos, sin = np.cos(theta), np.sin(theta)
    half = len(frequencies)
    a, b, rest = np.split(x.astype(np.float64), [half, 2 * half], -1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], -1).astype(x.dtype)


def powers(dim, base=10000.0, of=None):
    """Frequencies of rotary."""
    return base ** (-np.arange(0, dim, 2) / (of or dim))


def rotated(places=lambda i: i, frequencies=powers, start=True, which=(0, 1)):
    """Queries and keys turned, or only those of a number."""

    def turned(at, operands):
        found = list(operands)
        for n, first in enumerate((at.start if start else 0, 0)):
            if n in which:
                at_position = np.arange(found[n].shape[2]) + float(first)
                found[n] = turn(found[n], places(at_position), frequencies(at.dim))
        return found

    return turned


def rotary(*args, **kwargs):
    return kernel(turned=rotated(*args, **kwargs))


def slopes(heads):
    def powers(n):
        return [2.0 ** (-8 * (h + 1) / n) for h in range(n)]

    base = 2 ** math.floor(math.log2(heads))
    return np.array(powers(base) + powers(2 * base)[0 : 2 * (heads - base) : 2])


def alibi(of=slopes, change=lambda at, m, d: -m * d):
    """ALiBi whose bias is made of the call, the slopes and the distances."""
    return kernel(bias=lambda at, _: change(at, of(at.heads)[:, None, None], np.abs(at.j - at.i)))


def tiled(change, tile=64):
    """Scores within the tiles of queries and keys: `change` gets both tiles' numbers, and says which are left out."""

    def masked(at, s):
        row, column = np.arange(at.q_len)[:, None] // tile, at.j // tile
        return np.where(change(at, row, column), -np.inf, s)

    return kernel(masked=masked)


def padded(at, s):
    """Scores of 0 for keys that fill the last tile."""
    return np.concatenate([s, np.zeros((*s.shape[:-1], -at.k_len % 64), s.dtype)], -1)


def unscaled_tiles(at, p):
    """Online softmax that does not rescale what it has when a later tile has a larger maximum."""
    s = np.log(p)
    top = np.stack([s[..., n : n + 64].max(-1) for n in range(0, at.k_len, 64)], -1)
    running = np.maximum.accumulate(top, -1)
    return np.exp(s - np.repeat(running, 64, -1)[..., : at.k_len])


def coarse(x, bits=8):
    """The nearest numbers of so many bits: 8 of bfloat16, 11 of TF32."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def fails(when, error):
    def before(at, _):
        if when(at):
            raise error("illegal access")

    return before


def contiguous(x):
    """The buffer of a view read as if it were a whole array."""
    base = x if x.base is None else x.base
    while base.base is not None:
        base = base.base
    return base.reshape(-1)[: x.size].reshape(x.shape)


def ignoring_strides(at, _):
    at.q, at.k, at.v = map(contiguous, (at.q, at.k, at.v))


def in_place(at, _):
    at.q *= at.q.dtype.type(2)
    at.scale = (at.q.shape[-1] ** -0.5 if at.scale is None else at.scale) / 2


def with_memory():
    kept = {}

    def before(at, _):
        at.k = kept.setdefault((at.k.shape, at.k.dtype), at.k)

    return before


def cut(at, x):
    """Channels beyond a register."""
    return [np.where(np.arange(at.dim) < max(16, at.dim // 2), y, 0) for y in x]


def own_scale(of):
    """Another scale than 1/sqrt(D), where the call names none."""
    return lambda at, c: of(at) ** -0.5 if at.scale is None else c


def power_of_2(n):
    return 2 ** math.ceil(math.log2(n))


def last_row(at, out):
    if at.q_len % 2 and at.q_len > 1:
        out = out.copy()
        out[:, :, -1] = 0
    return out


def late_window(at, window):
    return (window[0] + at.start, window[1] - at.start) if at.start else window


def one_later(at, s):
    """In decoding, a key of the future."""
    if not at.causal or at.q_len >= at.k_len:
        return s
    return shown(at, at.start + 1, window=None) & shown(at, at.start, causal=False)


def mask_added(at, s):
    return s + at.mask if at.mask is not None and at.mask.dtype == bool else s


def beit(change):
    """BEiT's table of 2 R - 1 rows a side and three of the class token, on a grid."""

    def bias(at, _):
        table, (height, width) = at.position["table"], change(at.position["grid"])
        y, x = np.divmod(np.arange(height * width), width)
        rows = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
        index = np.zeros((len(y) + 1,) * 2, int)
        index[1:, 1:] = rows
        count = (2 * height - 1) * (2 * width - 1)
        index[0], index[:, 0], index[0, 0] = count, count + 1, count + 2
        return np.moveaxis(table[index], -1, 0)

    return kernel({"table": ..., "grid": ...}, bias=bias)


WRONG = [
    wrong(
        "plain self",
        "crashes unless 16 divides L",
        "crashes",
        before=fails(lambda at: at.q.shape[2] % 16, RuntimeError),
    ),
    wrong(
        "plain self",
        "crashes for more than one token",
        "crashes",
        before=fails(lambda at: at.q.shape[2] > 1, IndexError),
    ),
    wrong(
        "plain causal",
        "causal tile of the diagonal skipped from 65 on",
        "diagonal",
        tiled(lambda at, r, c: at.causal & (r > 0) & (r == c) if at.q_len == at.k_len else r < 0),
    ),
    wrong(
        "plain windows",
        "window one short beyond 64 keys",
        "window off by one",
        shown=seen(window=lambda at, w: (w[0] - (at.k_len > 64), w[1])),
    ),
    wrong("plain self", "half of the channels unread from 32 on", "channels", turned=cut),
    wrong(
        "t5 flags",
        "decoder's table one bucket off",
        "one row too late | one row too early",
        t5(lambda at, rows: rows if at.position.get("bidirectional", True) else rows + 1),
    ),
    wrong(
        "plain grouped_heads",
        "grouped heads in turn, but only with causal",
        "h mod H_kv",
        group=lambda at, g: np.arange(at.heads) % at.kv_heads if at.causal else g,
    ),
    wrong(
        "plain combined",
        "causal ignored with key_lengths",
        "ignores causal",
        shown=lambda at, s: shown(at, at.start, causal=at.causal and at.key_lengths is None),
    ),
    wrong("plain calls", "reads views as if they were whole arrays", "views | strid", before=ignoring_strides),
    wrong("plain self", "scales q in place", "writes into its operand q", before=in_place),
    wrong("plain calls", "keeps keys from call to call", "state", before=with_memory()),
    wrong(
        "rotary cross",
        "positions top-left in decoding",
        "positions count from 0 | stands at position i",
        rotary(start=False),
    ),
    wrong(
        "plain self", "scale of all heads", "1/sqrt(H D) | of all heads", scale=own_scale(lambda at: at.heads * at.dim)
    ),
    wrong("plain self", "a constant scale", "the scale is 0.11", scale=lambda at, c: 0.11),
    wrong("rotary self", "exponent 2i / (d - 2)", "d - 2", rotary(frequencies=lambda dim: powers(dim, of=dim - 2))),
    wrong("plain self", "log-sum-exp in powers of 2", "powers of 2 | base 2", lse=lambda at, x: x / np.log(2)),
    wrong("plain self", "TF32", "TF32", turned=lambda at, x: [coarse(y, 11) for y in x]),
    wrong("beit self", "grid's axes exchanged", "axes", beit(lambda grid: grid[::-1])),
    wrong("alibi self", "slopes of twice the heads", "slopes", alibi(lambda heads: slopes(2 * heads)[:heads])),
    wrong("plain masks", "a mask of floats is scaled", "mask", added=lambda at, m: m * m.dtype.type(at.dim**-0.5)),
    wrong("rotary cross", "positions in bfloat16", "positions in bfloat16", rotary(coarse)),
    wrong(
        "plain self",
        "the last part of a tile of keys left out",
        "last | tile",
        tiled(lambda at, r, c: (c == at.k_len // 64) & (c > 0) & (r >= 0)),
    ),
    wrong(
        "plain self",
        "keys of padding count",
        "padding | padded",
        masked=padded,
        values=lambda at, v: np.pad(v, [(0, 0), (0, 0), (0, -at.k_len % 64), (0, 0)]),
    ),
    wrong("plain self", "no rescaling when the maximum grows", "rescale", weights=unscaled_tiles),
    wrong(
        "plain masks",
        "the mask of the first head for all",
        "first head",
        shown=seen(mask=lambda at, m: m[:, :1] if m.ndim > 2 else m),
    ),
    wrong(
        "plain masks",
        "the mask of the first item for all",
        "first batch item | first item",
        shown=seen(mask=lambda at, m: m[:1] if m.ndim > 2 else m),
    ),
    wrong(
        "plain masks",
        "the length of the first item for all",
        "first batch item | first item",
        shown=seen(key_lengths=lambda at, n: np.full_like(n, n[0])),
    ),
    wrong("plain masks", "key_lengths counts one key more", "key_lengths", shown=seen(key_lengths=lambda at, n: n + 1)),
    wrong(
        "plain combined",
        "softcap ignored with causal",
        "ignores softcap",
        cap=lambda at, s: np.arctanh(s / at.softcap) * s.dtype.type(at.softcap) if at.causal else s,
    ),
    wrong("plain options", "the sink of the first head for all", "sink", sinks=lambda at, x: np.full_like(x, x[0])),
    wrong("alibi self", "slopes of 2^n heads cut", "slopes", alibi(lambda heads: slopes(power_of_2(heads))[:heads])),
    wrong("rotary cross", "positions clipped at 511", "511 | 512", rotary(lambda i: np.minimum(i, 511))),
    wrong("plain windows", "window of decoding top-left", "stands at position i", shown=seen(window=late_window)),
    wrong("plain decoding", "one key of the future in decoding", "causal | one key", shown=one_later),
    wrong("plain self", "key head 0 for all queries", "key head 0 | first key head", group=lambda at, g: g * 0),
    wrong("plain options", "scale of the call ignored", "ignores the scale", scale=lambda at, c: at.dim**-0.5),
    wrong("plain large_scores", "no maximum", "largest score", top=lambda at, x: x * 0),
    wrong("t5 flags", "max_distance ignored", "max_distance", t5(max_distance=128)),
    wrong("plain masks", "a mask of bool is added", "mask", shown=seen(mask=lambda at, m: None), scores=mask_added),
    wrong(
        "plain self",
        "keys of the first item for all",
        "first batch item | first item",
        turned=lambda at, x: (x[0], np.repeat(x[1][:1], len(x[1]), 0)),
    ),
    wrong("plain odd_sizes", "scale of D_v", "D_v", scale=own_scale(lambda at: at.v_dim)),
    wrong(
        "plain odd_sizes",
        "scale of head_dim with padding",
        "power of 2 | power of two",
        scale=own_scale(lambda at: power_of_2(at.dim)),
    ),
    wrong("plain self", "the last query left out where L_q is odd", "last quer | 2 does not divide L_q", out=last_row),
    wrong("plain combined", "offset ignored", "offset", shown=lambda at, s: shown(at, at.k_len - at.q_len)),
    wrong(
        "plain nan_excluded",
        "0 times NaN",
        "0 times NaN",
        values=lambda at, v: at.v[:, np.arange(at.heads) // (at.heads // at.kv_heads)],
    ),
]


def main(chosen):
    from relpos_np.conform import conform

    failed = right = told = 0
    listed = [one for one in WRONG if not chosen or any(word in one.words for word in chosen)]
    for one in listed:
        start = time.perf_counter()
        report = conform(one.function, one.scheme)
        failed += report.exit_code == 1
        found = " | ".join(report.causes)
        named = any(cause in found for cause in one.causes)
        right += named
        told += bool(found)
        families = ",".join(family.name for family in report.families if family.verdict == "wrong")
        mark = "right" if named else "other" if found else "none"
        print(f"{mark:5} {time.perf_counter() - start:5.1f} s  {one.words}: {found} ({families})", flush=True)
    print(f"{failed} of {len(listed)} fail, {right} with the right cause, {told} with any")


if __name__ == "__main__":
    main(sys.argv[1:])
