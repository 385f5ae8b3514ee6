"""Attention that is wrong in one way each, at the sizes and in the combinations that kernels have; NumPy, no package.

`kernel` is right; each entry of `WRONG` changes one step of it. ``python -m tests.wrong_kernels`` runs `conform` on
all of them with all families, and counts how many fail and how many are told the right cause.
"""

import inspect
import math
import sys
import time
from types import SimpleNamespace

import numpy as np

OPTIONS = ("mask", "causal", "window", "key_lengths", "scale", "offset", "softcap", "sinks")


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


def shown(at, start, **other):
    """Which keys a query may attend."""
    use = SimpleNamespace(**(vars(at) | other))
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


def t5(rows=lambda at, rows: rows, **other):
    def bias(at, _):
        found = rows(at, buckets(at, at.position, **other))
        table = at.position["table"]
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


def rotary(angle=lambda at, at_position, dim: at_position * 10000.0 ** (-np.arange(0, dim, 2) / dim), start=True):
    def turned(at, operands):
        found = []
        for x, first in zip(operands, (at.start if start else 0, 0), strict=True):
            theta = angle(at, (np.arange(x.shape[2]) + float(first))[:, None], at.dim)
            cos, sin = np.cos(theta), np.sin(theta)
            a, b = np.split(x.astype(np.float64), 2, -1)
            found.append(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype))
        return found

    return kernel(turned=turned)


def slopes(heads):
    def powers(n):
        return [2.0 ** (-8 * (h + 1) / n) for h in range(n)]

    base = 2 ** math.floor(math.log2(heads))
    return np.array(powers(base) + powers(2 * base)[0 : 2 * (heads - base) : 2])


def alibi(of=slopes, start=True):
    def bias(at, _):
        i = at.i if start else at.i - at.start
        return -of(at.heads)[:, None, None] * np.abs(at.j - i)

    return kernel(bias=bias)


def tiled(change, tile=64, **steps):
    """Scores within the tiles of queries and keys: `change` gets both tiles' numbers, and says which are left out."""

    def masked(at, s):
        row, column = np.arange(at.q_len)[:, None] // tile, at.j // tile
        return np.where(change(at, row, column), -np.inf, s)

    return kernel(masked=masked, **steps)


def padded(at, s):
    """Scores of 0 for keys that fill the last tile."""
    return np.concatenate([s, np.zeros((*s.shape[:-1], -at.k_len % 64), s.dtype)], -1)


def unscaled_tiles(at, p):
    """Online softmax that does not rescale what it has when a later tile has a larger maximum."""
    s = np.log(p)
    top = np.stack([s[..., n : n + 64].max(-1) for n in range(0, at.k_len, 64)], -1)
    running = np.maximum.accumulate(top, -1)
    return np.exp(s - np.repeat(running, 64, -1)[..., : at.k_len])


def narrow(bits):
    """float32 with fewer bits, as TF32."""

    def rounded(x):
        whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
        keep = np.uint32(23 - bits)
        return ((whole + (np.uint32(1) << (keep - np.uint32(1)))) >> keep << keep).view(np.float32)

    return rounded


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


def in_bfloat16(at, out):
    """Values added key by key, each sum rounded."""
    return out


def scaled_mask(at, mask):
    return mask * mask.dtype.type(at.dim**-0.5)


def with_option(name, change):
    def applied(at, value):
        return change(at, value) if getattr(at, name) is not None and getattr(at, name) is not False else value

    return applied


def first_head(at, seen):
    return shown(at, at.start, mask=at.mask[:, :1] if at.mask is not None and at.mask.ndim > 2 else at.mask)


def first_item(at, seen):
    return shown(at, at.start, mask=at.mask[:1] if at.mask is not None and at.mask.ndim > 2 else at.mask)


def cut(at, x):
    """Channels beyond a register."""
    return [np.where(np.arange(at.dim) < max(16, at.dim // 2), y, 0) for y in x]


def lengths_of(change):
    def seen(at, _):
        return shown(at, at.start, key_lengths=None if at.key_lengths is None else change(at.key_lengths))

    return seen


def window_of(change):
    def seen(at, _):
        return shown(at, at.start, window=None if at.window is None else change(at))

    return seen


def last_row(at, out):
    if at.q_len % 2 and at.q_len > 1:
        out = out.copy()
        out[:, :, -1] = 0
    return out


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


# What is wrong, scheme, a family that shows it, function, words of the cause of which one is to be there.
CRASH = ("crashes",)
WRONG = [
    (
        "crashes unless 16 divides L",
        "plain",
        "self",
        kernel(before=fails(lambda at: at.q.shape[2] % 16, RuntimeError)),
        CRASH,
    ),
    (
        "crashes for more than one token",
        "plain",
        "self",
        kernel(before=fails(lambda at: at.q.shape[2] > 1, IndexError)),
        CRASH,
    ),
    (
        "causal tile of the diagonal skipped from 65 on",
        "plain",
        "causal",
        tiled(lambda at, r, c: at.causal & (r > 0) & (r == c) if at.q_len == at.k_len else r < 0),
        ("diagonal",),
    ),
    (
        "window one short beyond 64 keys",
        "plain",
        "windows",
        kernel(shown=window_of(lambda at: (at.window[0] - (at.k_len > 64), at.window[1]))),
        ("window off by one",),
    ),
    ("half of the channels unread from 32 on", "plain", "self", kernel(turned=cut), ("channels",)),
    (
        "decoder's table one bucket off",
        "t5",
        "flags",
        t5(lambda at, rows: rows if at.position.get("bidirectional", True) else rows + 1),
        ("one row too late", "one row too early"),
    ),
    (
        "grouped heads in turn, but only with causal",
        "plain",
        "grouped_heads",
        kernel(group=lambda at, g: np.arange(at.heads) % at.kv_heads if at.causal else g),
        ("h mod H_kv",),
    ),
    (
        "causal ignored with key_lengths",
        "plain",
        "combined",
        kernel(shown=with_option("key_lengths", lambda at, s: shown(at, at.start, causal=False))),
        ("ignores causal",),
    ),
    ("reads views as if they were whole arrays", "plain", "calls", kernel(before=ignoring_strides), ("views", "strid")),
    ("scales q in place", "plain", "self", kernel(before=in_place), ("writes into its operand q",)),
    ("keeps keys from call to call", "plain", "calls", kernel(before=with_memory()), ("state",)),
    (
        "positions top-left in decoding",
        "rotary",
        "cross",
        rotary(start=False),
        ("positions count from 0", "stands at position i"),
    ),
    (
        "scale of all heads",
        "plain",
        "self",
        kernel(scale=lambda at, c: (at.heads * at.dim) ** -0.5 if at.scale is None else c),
        ("1/sqrt(H D)", "of all heads"),
    ),
    ("a constant scale", "plain", "self", kernel(scale=lambda at, c: 0.11), ("the scale is 0.11",)),
    (
        "exponent 2i / (d - 2)",
        "rotary",
        "self",
        rotary(lambda at, i, dim: i * 10000.0 ** (-np.arange(0, dim, 2) / (dim - 2))),
        ("d - 2",),
    ),
    ("log-sum-exp in powers of 2", "plain", "self", kernel(lse=lambda at, x: x / np.log(2)), ("powers of 2", "base 2")),
    ("TF32", "plain", "self", kernel(turned=lambda at, x: list(map(narrow(10), x))), ("TF32",)),
    ("grid's axes exchanged", "beit", "self", beit(lambda grid: grid[::-1]), ("axes",)),
    ("slopes of twice the heads", "alibi", "self", alibi(lambda heads: slopes(2 * heads)[:heads]), ("slopes",)),
    ("a mask of floats is scaled", "plain", "masks", kernel(added=scaled_mask), ("mask",)),
    (
        "positions in bfloat16",
        "rotary",
        "cross",
        rotary(lambda at, i, dim: coarse(i) * 10000.0 ** (-np.arange(0, dim, 2) / dim)),
        ("positions in bfloat16",),
    ),
    # Twenty of our own.
    (
        "the last part of a tile of keys left out",
        "plain",
        "self",
        tiled(lambda at, r, c: (c == at.k_len // 64) & (c > 0) & (r >= 0)),
        ("last", "tile"),
    ),
    (
        "keys of padding count",
        "plain",
        "self",
        kernel(masked=padded, values=lambda at, v: np.pad(v, [(0, 0), (0, 0), (0, -at.k_len % 64), (0, 0)])),
        ("padding", "padded"),
    ),
    ("no rescaling when the maximum grows", "plain", "self", kernel(weights=unscaled_tiles), ("rescale",)),
    ("the mask of the first head for all", "plain", "masks", kernel(shown=first_head), ("first head",)),
    (
        "the mask of the first item for all",
        "plain",
        "masks",
        kernel(shown=first_item),
        ("first batch item", "first item"),
    ),
    (
        "the length of the first item for all",
        "plain",
        "masks",
        kernel(shown=lengths_of(lambda n: np.full_like(n, n[0]))),
        ("first batch item", "first item"),
    ),
    ("key_lengths counts one key more", "plain", "masks", kernel(shown=lengths_of(lambda n: n + 1)), ("key_lengths",)),
    (
        "softcap ignored with causal",
        "plain",
        "combined",
        kernel(cap=lambda at, s: np.arctanh(s / at.softcap) * s.dtype.type(at.softcap) if at.causal else s),
        ("ignores softcap",),
    ),
    (
        "the sink of the first head for all",
        "plain",
        "options",
        kernel(sinks=lambda at, x: np.full_like(x, x[0])),
        ("sink",),
    ),
    (
        "slopes of 2^n heads cut",
        "alibi",
        "self",
        alibi(lambda heads: slopes(2 ** math.ceil(math.log2(heads)))[:heads]),
        ("slopes",),
    ),
    (
        "positions clipped at 511",
        "rotary",
        "cross",
        rotary(lambda at, i, dim: np.minimum(i, 511) * 10000.0 ** (-np.arange(0, dim, 2) / dim)),
        ("511", "512"),
    ),
    (
        "window of decoding top-left",
        "plain",
        "windows",
        kernel(
            shown=window_of(lambda at: (at.window[0] + at.start, at.window[1] - at.start) if at.start else at.window)
        ),
        ("stands at position i",),
    ),
    (
        "one key of the future in decoding",
        "plain",
        "decoding",
        kernel(
            shown=lambda at, s: (
                shown(at, at.start + 1, window=None) & shown(at, at.start, causal=False)
                if at.causal and at.q_len < at.k_len
                else s
            )
        ),
        ("causal", "one key"),
    ),
    (
        "key head 0 for all queries",
        "plain",
        "self",
        kernel(group=lambda at, g: g * 0),
        ("key head 0", "first key head"),
    ),
    ("scale of the call ignored", "plain", "options", kernel(scale=lambda at, c: at.dim**-0.5), ("ignores the scale",)),
    ("no maximum", "plain", "large_scores", kernel(top=lambda at, x: x * 0), ("largest score",)),
    ("max_distance ignored", "t5", "flags", t5(max_distance=128), ("max_distance",)),
    (
        "a mask of bool is added",
        "plain",
        "masks",
        kernel(
            shown=lambda at, s: shown(at, at.start, mask=None),
            scores=lambda at, s: s + at.mask if at.mask is not None and at.mask.dtype == bool else s,
        ),
        ("mask",),
    ),
    (
        "keys of the first item for all",
        "plain",
        "self",
        kernel(turned=lambda at, x: (x[0], np.repeat(x[1][:1], len(x[1]), 0))),
        ("first batch item", "first item"),
    ),
    (
        "scale of D_v",
        "plain",
        "odd_sizes",
        kernel(scale=lambda at, c: at.v_dim**-0.5 if at.scale is None else c),
        ("D_v",),
    ),
    (
        "scale of head_dim with padding",
        "plain",
        "odd_sizes",
        kernel(scale=lambda at, c: (2 ** math.ceil(math.log2(at.dim))) ** -0.5 if at.scale is None else c),
        ("power of 2", "power of two"),
    ),
    (
        "the last query left out where L_q is odd",
        "plain",
        "self",
        kernel(out=last_row),
        ("last quer", "2 does not divide L_q"),
    ),
    (
        "offset ignored",
        "plain",
        "combined",
        kernel(shown=lambda at, s: shown(at, at.k_len - at.q_len)),
        ("ignores offset", "offset"),
    ),
    (
        "0 times NaN",
        "plain",
        "nan_excluded",
        kernel(values=lambda at, v: at.v[:, np.arange(at.heads) // (at.heads // at.kv_heads)]),
        ("0 times NaN",),
    ),
]


def coarse(x):
    """The nearest numbers of 8 bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def main(chosen):
    from relpos_np.conform import conform

    failed = right = told = 0
    listed = [one for one in WRONG if not chosen or any(word in one[0] for word in chosen)]
    for words, scheme, _, function, causes in listed:
        start = time.perf_counter()
        report = conform(function, scheme)
        failed += report.exit_code == 1
        found = " | ".join(report.causes)
        named = any(cause in found for cause in causes)
        right += named
        told += bool(found)
        wrong = ",".join(one.name for one in report.families if one.verdict == "wrong")
        mark = "right" if named else "other" if found else "none"
        print(f"{mark:5} {time.perf_counter() - start:5.1f} s  {words}: {found} ({wrong})", flush=True)
    print(f"{failed} of {len(listed)} fail, {right} with the right cause, {told} with any")


if __name__ == "__main__":
    main(sys.argv[1:])
