"""More attention that is wrong in one way, thought of before the cases of `conform` were read: servers, tiles, schemes.

Each entry of `SECOND` has the form of those in `tests.wrong_kernels`, and options of `conform` at the end.
"""

import numpy as np

from tests.wrong_kernels import alibi, buckets, kernel, rotary, shown, slopes, t5, tiled, window_of


def far(at, i=None):
    return np.abs(at.j - (at.i if i is None else i))


def penalty(change):
    """ALiBi whose bias is made of the call, the slopes and the distances."""
    return kernel(bias=lambda at, _: change(at, slopes(at.heads)[:, None, None], far(at)))


def by_key_head(at, _, d):
    """Slopes of the key heads, which the query heads of a group share."""
    group = at.heads // at.kv_heads
    return -np.repeat(slopes(at.kv_heads), group)[:, None, None] * d


def wrapped(at, m, _):
    """Distances kept in 8 bits."""
    return -m * np.abs((at.j - at.i + 128) % 256 - 128)


def in_turn(x, heads):
    """Of item b and head h the number of item (b H + h) mod B."""
    at = np.arange(len(x) * heads).reshape(len(x), heads) % len(x)
    return np.asarray(x)[at]


def lengths_by_program(at, _):
    if at.key_lengths is None:
        return shown(at, at.start)
    seen = shown(at, at.start, key_lengths=None)
    return seen & (at.j < in_turn(at.key_lengths, at.heads)[..., None, None])


def cap_of_masked(at, s):
    """The cap is put on scores that are masked already: -inf becomes -cap."""
    return np.where(np.isneginf(s), -s.dtype.type(at.softcap), s) if at.softcap is not None else s


def halves_averaged(at, out):
    """Keys in two parts from 512 on, whose outputs are averaged and not merged."""
    if at.k_len < 512 or at.sinks is not None:
        return out
    half = at.k_len // 2
    group = np.arange(at.heads) // (at.heads // at.kv_heads)
    k, v = at.k[:, group], np.nan_to_num(at.v[:, group])
    factor = at.dim**-0.5 if at.scale is None else at.scale
    seen = np.broadcast_to(shown(at, at.start), (*out.shape[:3], at.k_len))
    found = []
    for part in (slice(0, half), slice(half, None)):
        s = np.where(seen[..., part], at.q @ k[:, :, part].swapaxes(-1, -2) * out.dtype.type(factor), -np.inf)
        p = np.exp(s - np.where(np.isfinite(top := s.max(-1, keepdims=True)), top, 0))
        total = p.sum(-1, keepdims=True)
        found.append(p / np.where(total > 0, total, 1) @ v[:, :, part])
    return ((found[0] + found[1]) / 2).astype(out.dtype)


def no_guard(at, s):
    """Online softmax whose first tile of 64 keys may be all masked: exp(-inf - -inf) is NaN."""
    shut = np.isneginf(s)
    lost = shut[..., :64].all(-1, keepdims=True) & ~shut.all(-1, keepdims=True)
    return np.where(lost, np.nan, s)


def window_by_tile(at, _):
    """A window that is decided for whole tiles of 32 keys."""
    if at.window is None:
        return shown(at, at.start)
    i, j = (np.arange(at.q_len) + at.start)[:, None], at.j // 32 * 32
    return shown(at, at.start, window=None) & (j + 31 >= i - at.window[0]) & (j <= i + at.window[1])


def clipped_mask(at, mask):
    return np.maximum(mask, -10)


def shaw(reach=0, turn=lambda d: d):
    """Shaw's vectors on keys and values."""

    def attend(q, k, v, key_table=None, value_table=None, causal=False):
        d = turn(np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2]))

        def rows(table):
            most = len(table) // 2
            return table[np.clip(d, -most + reach, most - reach) + most]

        k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q @ k.swapaxes(-1, -2)
        if key_table is not None:
            s = s + np.einsum("bhid,ijd->bhij", q, rows(key_table))
        s = s * q.dtype.type(q.shape[-1] ** -0.5)
        if causal:
            s = np.where(np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        out = p @ v
        return out if value_table is None else out + np.einsum("bhij,ijd->bhid", p, rows(value_table))

    return attend


def with_stale_table():
    """A bias that is kept by the lengths of the call, whatever the table is by then."""
    kept = {}

    def bias(at, _):
        key = at.q_len, at.k_len, at.heads, len(at.position["table"])
        if key not in kept:
            kept[key] = np.moveaxis(at.position["table"][buckets(at, at.position)], -1, 0)
        return kept[key]

    return kernel({"table": ..., "max_distance": 128}, bias=bias)


def backwards_buckets(at, _):
    """The upper half of the table for keys before the query."""
    return buckets(type(at)(**(vars(at) | {"i": -at.i, "j": -at.j})), at.position)


def partial_rotary(q, k, v, dim=None, causal=False):
    """A share of the channels is turned, with the frequencies of all of them."""
    dim = dim or q.shape[-1]

    def turned(x, first):
        theta = (np.arange(x.shape[2]) + first)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / q.shape[-1])
        cos, sin = np.cos(theta).astype(x.dtype), np.sin(theta).astype(x.dtype)
        a, b = x[..., : dim // 2], x[..., dim // 2 : dim]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., dim:]], -1)

    return kernel()(turned(q, k.shape[2] - q.shape[2]), turned(k, 0), v, causal=causal)


def one_operand(which):
    def turned(at, operands):
        found = rotary_turn(at, operands)
        return [found[n] if n == which else operands[n] for n in (0, 1)]

    return kernel(turned=turned)


def rotary_turn(at, operands):
    found = []
    for x, first in zip(operands, (at.start, 0), strict=True):
        theta = (np.arange(x.shape[2]) + float(first))[:, None] * 10000.0 ** (-np.arange(0, at.dim, 2) / at.dim)
        cos, sin = np.cos(theta), np.sin(theta)
        a, b = np.split(x.astype(np.float64), 2, -1)
        found.append(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype))
    return found


def values_turned(at, v):
    return rotary_turn(at, (at.q, v))[1] if v.shape[-1] == at.dim else v


def over_queries(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-2, keepdims=True))
    return p / p.sum(-2, keepdims=True) @ v


def segments_joined(q, k, v, causal=False, segments=None):
    """Packed sequences whose keys reach into the one before."""
    if segments is None:
        return kernel()(q, k, v, causal=causal)
    of = np.searchsorted(segments, np.arange(q.shape[2]), "right")
    seen = (of[:, None] - of >= 0) & (of[:, None] - of <= 1)
    return kernel()(q, k, v, causal=causal, mask=seen)


def of_segments(seen):
    """Packed sequences by which keys a query sees of where its own begins and ends; without segments it is right."""

    def attend(q, k, v, segments=None):
        if segments is None:
            return kernel()(q, k, v)
        at = np.arange(q.shape[2])
        own = np.searchsorted(segments, at, "right")
        return kernel()(q, k, v, mask=seen(at, segments[own - 1][:, None], segments[own][:, None])[None, None])

    return attend


def cut_late(q, k, v, segments=None):
    own = np.searchsorted(() if segments is None else segments[1:-1] + 1, np.arange(q.shape[2]), "right")
    return kernel()(q, k, v, mask=(own[:, None] == own)[None, None])


to_the_tile = of_segments(lambda j, a, b: (j >= a) & (j < a + -(-(b - a) // 16) * 16))
PAGED = {"supports": ["key_lengths", "paged"]}


def paged(*, whole=False, ordered=False):
    """A cache in pages of 16, whose table, or the length of whose last page, is not read."""

    def attend(q, k, v, key_lengths=None, block_table=None):
        if block_table is not None:
            table = np.arange(block_table.size).reshape(block_table.shape) if ordered else block_table
            k, v = (x[table].reshape(len(table), -1, *x.shape[2:]).swapaxes(1, 2) for x in (k, v))
            key_lengths = -(-key_lengths // 16) * 16 if whole else key_lengths
        return kernel()(q, k, v, key_lengths=key_lengths)

    return attend


def ring_of_keys(q, k, v):
    def turned(at, operands):
        theta = 10000.0 ** (-np.arange(0, at.dim, 2) / at.dim)
        start = at.k_len - at.q_len
        for x, places in zip(operands, (start + np.arange(at.q_len), np.arange(at.k_len) % 128), strict=True):
            cos, sin = np.cos(places[:, None] * theta), np.sin(places[:, None] * theta)
            a, b = np.split(x.astype(np.float64), 2, -1)
            yield np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)

    return kernel(turned=turned)(q, k, v)


def last_but_one(at, rows):
    half = len(at.position["table"]) // (2 if at.position["bidirectional"] else 1)
    return np.where(rows % half == half - 1, rows - 1, rows)


def rows_unscaled(q, k, v, content_bias, position_bias, rows):
    """Transformer-XL's products with rows as they are."""
    by_row = (q + position_bias[:, None]) @ rows.transpose(1, 2, 0)
    at = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] + q.shape[2] - 1
    bias = np.take_along_axis(by_row, np.broadcast_to(at, (*q.shape[:3], k.shape[2])), -1)
    return kernel(bias=lambda _at, _: bias)(q + content_bias[:, None], k, v)


def shaw_from_the_end(q, k, v, key_table):
    """Shaw's vectors of the distances i - j."""
    if key_table.ndim != 2:
        raise NotImplementedError
    half = len(key_table) // 2
    d = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - np.arange(k.shape[2])
    vectors = key_table[np.clip(d, -half, half) + half]
    bias = np.einsum("bhid,ijd->bhij", q, vectors) * q.dtype.type(q.shape[-1] ** -0.5)
    return kernel(bias=lambda _at, _: bias)(q, k, v)


def lse_of_the_usual_scale(q, k, v, scale=None, return_lse=False):
    out = kernel()(q, k, v, scale=scale)
    return (out, kernel()(q, k, v, return_lse=True)[1]) if return_lse else out


def never_rescaled(q, k, v, dropout_mask=None, dropout=0.0):
    """Weights that are dropped, and those that stay not divided by 1 - dropout."""
    if dropout_mask is None:
        return kernel()(q, k, v)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) * dropout_mask) @ v


def uncapped(at, s):
    """From capped scores to products that are capped before they are scaled."""
    scale = at.dim**-0.5 if at.scale is None else at.scale
    raw = np.arctanh(s.astype(float) / at.softcap) * at.softcap / scale
    return (at.softcap * np.tanh(raw / at.softcap) * scale).astype(s.dtype)


def lengths_of_before(at):
    """An index that starts at the wrong item; without keys it divides by 0."""
    if at.key_lengths is not None:
        at.key_lengths = np.roll(at.key_lengths, 1)


def both_biases(q, k, v, content_bias, position_bias, rows):
    """One sum of the biases for both products."""
    if q.shape[1:3] != k.shape[1:3]:
        raise NotImplementedError
    used = q + (content_bias + position_bias)[:, None]
    x = used @ rows.transpose(1, 2, 0)
    padded = np.concatenate([np.zeros_like(x[..., :1]), x], -1).reshape(*x.shape[:2], -1)
    shifted = padded[..., q.shape[2] :].reshape(x.shape)[..., : k.shape[2]]
    s = (used @ k.swapaxes(-1, -2) + shifted) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def table_by_columns(q, k, v, table, grid):
    """Rows of Swin's table counted down its columns."""
    if q.shape[1:3] != k.shape[1:3]:
        raise NotImplementedError
    height, width = grid
    y, x = np.divmod(np.arange(height * width), width)
    rows = (x[:, None] - x + width - 1) * (2 * height - 1) + (y[:, None] - y + height - 1)
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5) + np.moveaxis(table[rows], -1, 0)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def bias_of_later(at, _):
    """A step of a server whose queries stand one position too far."""
    ahead = at.q_len < at.k_len
    return -slopes(at.heads)[:, None, None] * np.abs(at.j - at.i - ahead)


def coarse_of(bits):
    def rounded(x):
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)

    return rounded


def cut_table(at, _):
    """A table in bfloat16."""
    return np.moveaxis(coarse_of(7)(at.position["table"])[buckets(at, at.position)], -1, 0)


# What `conform` has no name for: it says that these are wrong, and no more.
UNNAMED = {"a mask of floats clipped at -10", "packed sequences see the one before"}
SECOND = [
    ("bias in powers of 2", "alibi", "self", penalty(lambda at, m, d: -m * np.log(2) * d), ("powers of 2",), {}),
    (
        "slopes by key head",
        "alibi",
        "grouped_heads",
        kernel(bias=lambda at, _: by_key_head(at, _, far(at))),
        ("slopes", "key head"),
        {},
    ),
    ("distances in 8 bits", "alibi", "self", penalty(wrapped), ("8 bits",), {}),
    (
        "bias scaled with the products",
        "alibi",
        "self",
        penalty(lambda at, m, d: -m * d * at.dim**-0.5),
        ("scales what positions add",),
        {},
    ),
    (
        "positions begin anew in each tile of 64",
        "rotary",
        "self",
        rotary(lambda at, i, dim: i % 64 * 10000.0 ** (-np.arange(0, dim, 2) / dim)),
        ("64",),
        {},
    ),
    ("a cap on masked scores", "plain", "combined", kernel(masked=cap_of_masked), ("softcap", "cap"), {}),
    ("halves of keys averaged from 512 on", "plain", "long", kernel(out=halves_averaged), ("merge", "average"), {}),
    (
        "no guard for a tile that is all masked",
        "plain",
        "windows",
        kernel(masked=no_guard),
        ("all masked", "no key of its first tile", "NaN"),
        {},
    ),
    ("a window by whole tiles", "plain", "windows", kernel(shown=window_by_tile), ("whole tiles", "window"), {}),
    (
        "a mask of floats clipped at -10",
        "plain",
        "masks",
        kernel(
            added=clipped_mask,
            shown=lambda at, s: shown(at, at.start, mask=None) if at.mask is not None and at.mask.dtype != bool else s,
        ),
        ("mask",),
        {},
    ),
    ("lengths by program, not by item", "plain", "masks", kernel(shown=lengths_by_program), ("item",), {}),
    ("clips one distance early", "shaw", "self", shaw(reach=1), ("clips", "one row", "table"), {}),
    ("distances with the other sign", "shaw", "self", shaw(turn=lambda d: -d), ("i - j",), {}),
    ("a bias kept from an older table", "t5", "calls", with_stale_table(), ("state",), {}),
    ("T5's halves exchanged", "t5", "self", t5(backwards_buckets), ("i - j", "half"), {}),
    (
        "a bias of T5 top-left",
        "t5",
        "decoding",
        kernel(
            {"table": ..., "max_distance": 128},
            bias=lambda at, _: np.moveaxis(
                at.position["table"][buckets(type(at)(**(vars(at) | {"i": at.i - at.start})), at.position)], -1, 0
            ),
        ),
        ("positions count from 0", "stands at position i"),
        {},
    ),
    (
        "T5's table in bfloat16",
        "t5",
        "self",
        kernel({"table": ..., "max_distance": 128}, bias=cut_table),
        ("bfloat16",),
        {},
    ),
    ("frequencies of all channels for some", "rotary", "self", partial_rotary, ("head_dim", "frequencies"), {}),
    ("only queries are turned", "rotary", "self", one_operand(0), ("leaves keys where they are",), {}),
    ("only keys are turned", "rotary", "self", one_operand(1), ("leaves queries where they are",), {}),
    (
        "values are turned too",
        "rotary",
        "self",
        kernel(turned=rotary_turn, values=values_turned),
        ("values",),
        {},
    ),
    (
        "a base of 500,000",
        "rotary",
        "self",
        rotary(lambda at, i, dim: i * 500000.0 ** (-np.arange(0, dim, 2) / dim)),
        ("base 500000",),
        {},
    ),
    (
        "positions of a step one too far",
        "alibi",
        "cross",
        kernel(bias=bias_of_later),
        ("one position", "one too far"),
        {},
    ),
    (
        "slopes in bfloat16",
        "alibi",
        "grouped_heads",
        alibi(lambda heads: coarse_of(7)(slopes(heads))),
        ("bfloat16",),
        {},
    ),
    ("distances stop at 127", "alibi", "self", penalty(lambda at, m, d: -m * np.minimum(d, 127)), ("127", "128"), {}),
    ("softmax along queries", "plain", "self", over_queries, ("queries", "quer"), {}),
    (
        "the tile before the window's edge left out",
        "plain",
        "windows",
        kernel(
            shown=window_of(lambda at: (at.window[0] // 64 * 64 if at.window[0] > 64 else at.window[0], at.window[1]))
        ),
        ("the output is wrong from query 65 on",),
        {},
    ),
    (
        "as many keys as queries",
        "plain",
        "cross",
        kernel(masked=lambda at, s: np.where((at.j >= at.q_len) & (at.q_len > 1), -np.inf, s)),
        ("L_q",),
        {},
    ),
    (
        "no key beyond 1,000",
        "plain",
        "long",
        kernel(masked=lambda at, s: np.where(at.j >= 1000, -np.inf, s)),
        ("no key from number 1000 on",),
        {},
    ),
    (
        "four heads and no more",
        "plain",
        "self",
        kernel(out=lambda at, x: np.where((np.arange(at.heads) < 4)[:, None, None], x, 0)),
        ("head 4", "heads"),
        {},
    ),
    (
        "values beyond head_dim left out",
        "plain",
        "odd_sizes",
        kernel(values=lambda at, v: np.where(np.arange(v.shape[-1]) < at.dim, v, 0)),
        ("channel",),
        {},
    ),
    (
        "a cap before the scale",
        "plain",
        "options",
        kernel(cap=uncapped),
        ("softcap",),
        {},
    ),
    ("sinks are scaled", "plain", "options", kernel(sinks=lambda at, x: x * x.dtype.type(at.dim**-0.5)), ("sink",), {}),
    (
        "log-sum-exp without the sink",
        "plain",
        "options",
        kernel(
            lse=lambda at, x: (
                x
                if at.sinks is None
                else np.log(np.exp(x.astype(float)) - np.exp(at.sinks[:, None].astype(float))).astype(x.dtype)
            )
        ),
        ("log-sum-exp", "sink"),
        {},
    ),
    (
        "packed sequences see the one before",
        "plain",
        "ragged",
        segments_joined,
        ("segments",),
        {"supports": ["segments", "causal", "cross"]},
    ),
    (
        "lengths of the item before",
        "plain",
        "excluded_rows",
        kernel(before=lambda at, _: lengths_of_before(at)),
        ("key_lengths of the batch item before",),
        {},
    ),
    ("both biases in both products", "transformer_xl", "self", both_biases, ("u + v where u",), {}),
    ("a window's table by columns", "window", "self", table_by_columns, ("column by column",), {}),
    ("what is kept is not rescaled", "plain", "ragged", never_rescaled, ("dropout", "0.5 times"), {}),
    (
        "a causal tile by queries alone",
        "plain",
        "causal",
        tiled(lambda at, r, c: at.causal & (c == r - 1) & (r > 1), tile=32),
        ("the output is wrong from query 64 on",),
        {},
    ),
    (
        "window with causal has its right side",
        "plain",
        "windows",
        kernel(
            shown=lambda at, s: (
                shown(at, at.start, causal=False, window=(at.window[0], at.window[0]))
                if at.causal and at.window is not None
                else s
            )
        ),
        ("as many later keys as earlier ones",),
        {},
    ),
    (
        "key_lengths ignored in decoding",
        "plain",
        "masks",
        kernel(
            shown=lambda at, s: (
                shown(at, at.start, key_lengths=None) if at.key_lengths is not None and at.q_len < at.k_len else s
            )
        ),
        ("ignores key_lengths",),
        {},
    ),
    ("keys of a ring of 128", "rotary", "self", ring_of_keys, ("begin anew after 128",), {}),
    (
        "softcap is not multiplied by",
        "plain",
        "options",
        kernel(cap=lambda at, s: s / at.q.dtype.type(at.softcap)),
        ("softcap is not multiplied by",),
        {},
    ),
    (
        "a sink for each tile",
        "plain",
        "options",
        kernel(sinks=lambda at, x: x + np.log(np.ceil(at.k_len / 64)).astype(x.dtype)),
        ("counts sinks once for each tile, in tiles of 64",),
        {},
    ),
    (
        "scale of whole vectors of 24",
        "plain",
        "odd_sizes",
        kernel(scale=lambda at, x: x if at.scale is not None or at.dim % 8 == 0 else (-(-at.dim // 8) * 8) ** -0.5),
        ("rounded up to a multiple of 8",),
        {},
    ),
    # Which of T5's buckets begins at 65 decides that both are the same.
    ("the last bucket is never read", "t5", "causal", t5(last_but_one), ("last bucket", "distances stop at 64"), {}),
    ("rows unscaled", "transformer_xl", "self", rows_unscaled, ("products with rows",), {"variant": "conformer"}),
    ("Shaw's tables from the end", "shaw", "cross", shaw_from_the_end, ("distances i - j",), {}),
    (
        "log-sum-exp of another scale",
        "plain",
        "options",
        lse_of_the_usual_scale,
        ("log-sum-exp with a scale of 1/sqrt",),
        {},
    ),
    ("segments cut one token late", "plain", "ragged", cut_late, ("one token too late",), {"supports": ["segments"]}),
    ("segments end with tiles", "plain", "ragged", to_the_tile, ("whole tiles of 16",), {"supports": ["segments"]}),
    ("the last page whole", "plain", "ragged", paged(whole=True), ("last page whole",), PAGED),
    ("pages in order", "plain", "ragged", paged(ordered=True), ("whatever block_table says",), PAGED),
]
