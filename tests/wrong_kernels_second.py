"""More attention that is wrong in one way, thought of before the cases of `conform` were read: servers, tiles, schemes.

The entries of `SECOND` are as those in `tests.wrong_kernels`; one without a cause is only told to be wrong.
"""

import numpy as np

from tests.wrong_kernels import (
    alibi,
    buckets,
    coarse,
    kernel,
    moved,
    own_scale,
    powers,
    rotary,
    rotated,
    seen,
    shown,
    slopes,
    t5,
    tiled,
    turn,
    wrong,
)


def by_key_head(at, _):
    """Slopes of the key heads, which the query heads of a group share."""
    group = at.heads // at.kv_heads
    return -np.repeat(slopes(at.kv_heads), group)[:, None, None] * np.abs(at.j - at.i)


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


def softmax(s, axis=-1):
    """Weights; 0 where every score is -inf."""
    top = s.max(axis, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(axis, keepdims=True)
    return p / np.where(total > 0, total, 1)


def last_whole_tile(at, s):
    """The last 32 keys are left out where 32 divides their number."""
    whole = at.k_len % 32 == 0 and at.k_len > 32
    return np.where(at.j >= at.k_len - 32, -np.inf, s) if whole else s


def short_lengths(at, lengths):
    lengths = np.asarray(lengths)
    return lengths - ((lengths % 16 == 0) & (lengths > 0))


def values_in_turn(q, k, v):
    """Heads of values h mod H_kv, under right weights."""
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    return kernel()(q, k, np.tile(v, (1, q.shape[1] // v.shape[1], 1, 1)))


def floats_capped(q, k, v, mask=None, softcap=None):
    """A mask of floats is added before the cap."""
    if mask is None or mask.dtype == bool or softcap is None:
        return kernel()(q, k, v, mask=mask, softcap=softcap)
    k, v = for_queries(q, k, np.nan_to_num(v))
    cap = q.dtype.type(softcap)
    return softmax(cap * np.tanh((products(q, k) + mask) / cap)) @ v


def next_head(q, k, v):
    """The last tile of 32 keys goes on with those of the next head."""

    def padded(x):
        more = -x.shape[2] % 32
        return np.concatenate([x, np.resize(np.roll(x, -1, 1), (*x.shape[:2], more, x.shape[3]))], 2)

    return kernel()(q, padded(k), padded(v))


def products(q, k):
    return q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)


def for_queries(q, *operands):
    """Keys and values for each head of queries."""
    return [np.repeat(x, q.shape[1] // x.shape[1], 1) for x in operands]


def halves_averaged(at, out):
    """Keys in two parts from 512 on, whose outputs are averaged and not merged."""
    if at.k_len < 512 or at.sinks is not None:
        return out
    half = at.k_len // 2
    k, v = for_queries(at.q, at.k, np.nan_to_num(at.v))
    factor = at.dim**-0.5 if at.scale is None else at.scale
    seen = np.broadcast_to(shown(at, at.start), (*out.shape[:3], at.k_len))
    s = np.where(seen, at.q @ k.swapaxes(-1, -2) * out.dtype.type(factor), -np.inf)
    parts = slice(0, half), slice(half, None)
    return (sum(softmax(s[..., part]) @ v[:, :, part] for part in parts) / 2).astype(out.dtype)


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


def distances(q, k):
    return np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])


def shaw(reach=0, change=lambda d: d):
    """Shaw's vectors on keys and values."""

    def attend(q, k, v, key_table=None, value_table=None, causal=False):
        d = distances(q, k)

        def rows(table):
            most = len(table) // 2
            return table[np.clip(change(d), -most + reach, most - reach) + most]

        k, v = for_queries(q, k, v)
        s = products(q, k)
        if key_table is not None:
            s = s + np.einsum("bhid,ijd->bhij", q, rows(key_table)) * q.dtype.type(q.shape[-1] ** -0.5)
        p = softmax(np.where(d <= 0, s, -np.inf) if causal else s)
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
    return buckets(moved(at, i=-at.i, j=-at.j), at.position)


def partly_turned(at, operands):
    """A share of the channels is turned, with the frequencies of all of them."""
    used = powers(at.dim)[: (at.position["dim"] or at.dim) // 2]
    firsts = at.start, 0
    return [turn(x, np.arange(x.shape[2]) + first, used) for x, first in zip(operands, firsts, strict=True)]


def values_turned(at, v):
    return rotated()(at, (at.q, v))[1] if v.shape[-1] == at.dim else v


def over_queries(q, k, v):
    k, v = for_queries(q, k, v)
    return softmax(products(q, k), -2) @ v


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


def ring_of_keys(at, operands):
    """Keys of a ring of 128."""
    return rotated(lambda j: j % 128, which=(1,))(at, rotated(which=(0,))(at, operands))


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
    return shaw(change=np.negative)(q, k, v, key_table)


def lse_of_the_usual_scale(q, k, v, scale=None, return_lse=False):
    out = kernel()(q, k, v, scale=scale)
    return (out, kernel()(q, k, v, return_lse=True)[1]) if return_lse else out


def lse_without_sink(at, x):
    if at.sinks is None:
        return x
    return np.log(np.exp(x.astype(float)) - np.exp(at.sinks[:, None].astype(float))).astype(x.dtype)


def never_rescaled(q, k, v, dropout_mask=None, dropout=0.0):
    """Weights that are dropped, and those that stay not divided by 1 - dropout."""
    if dropout_mask is None:
        return kernel()(q, k, v)
    k, v = for_queries(q, k, v)
    return (softmax(products(q, k)) * dropout_mask) @ v


def uncapped(at, s):
    """From capped scores to products that are capped before they are scaled."""
    scale = at.dim**-0.5 if at.scale is None else at.scale
    raw = np.arctanh(s.astype(float) / at.softcap) * at.softcap / scale
    return (at.softcap * np.tanh(raw / at.softcap) * scale).astype(s.dtype)


def lengths_of_before(at, _):
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
    return softmax((used @ k.swapaxes(-1, -2) + shifted) * q.dtype.type(q.shape[-1] ** -0.5)) @ v


def table_by_columns(q, k, v, table, grid):
    """Rows of Swin's table counted down its columns."""
    if q.shape[1:3] != k.shape[1:3]:
        raise NotImplementedError
    height, width = grid
    y, x = np.divmod(np.arange(height * width), width)
    rows = (x[:, None] - x + width - 1) * (2 * height - 1) + (y[:, None] - y + height - 1)
    return softmax(products(q, k) + np.moveaxis(table[rows], -1, 0)) @ v


def one_ahead(at, m, _):
    """A step of a server whose queries stand one position too far."""
    return -m * np.abs(at.j - at.i - (at.q_len < at.k_len))


def lost_tile(at, window):
    """The tile before the window's edge is left out."""
    return (window[0] // 64 * 64 if window[0] > 64 else window[0], window[1])


def right_side(at, s):
    """A causal window has as many later keys as earlier ones."""
    if not at.causal or at.window is None:
        return s
    return shown(at, at.start, causal=False, window=(at.window[0],) * 2)


SECOND = [
    wrong("alibi self", "bias in powers of 2", "powers of 2", alibi(change=lambda at, m, d: -m * np.log(2) * d)),
    wrong("alibi grouped_heads", "slopes by key head", "slopes | key head", bias=by_key_head),
    wrong("alibi self", "distances in 8 bits", "8 bits", alibi(change=wrapped)),
    wrong(
        "alibi self",
        "bias scaled with the products",
        "scales what positions add",
        alibi(change=lambda at, m, d: -m * d * at.dim**-0.5),
    ),
    wrong("rotary self", "positions begin anew in each tile of 64", "64", rotary(lambda i: i % 64)),
    wrong("plain combined", "a cap on masked scores", "softcap | cap", masked=cap_of_masked),
    wrong("plain long", "halves of keys averaged from 512 on", "merge | average", out=halves_averaged),
    wrong(
        "plain windows",
        "no guard for a tile that is all masked",
        "all masked | no key of its first tile | NaN",
        masked=no_guard,
    ),
    wrong("plain windows", "a window by whole tiles", "whole tiles | window", shown=window_by_tile),
    wrong(
        "plain masks",
        "a mask of floats clipped at -10",
        "",
        added=lambda at, mask: np.maximum(mask, -10),
        shown=seen(mask=lambda at, m: m if m.dtype == bool else None),
    ),
    wrong("plain masks", "lengths by program, not by item", "item", shown=lengths_by_program),
    wrong("shaw self", "clips one distance early", "clips | one row | table", shaw(reach=1)),
    wrong("shaw self", "distances with the other sign", "i - j", shaw(change=np.negative)),
    wrong("t5 calls", "a bias kept from an older table", "state", with_stale_table()),
    wrong("t5 self", "T5's halves exchanged", "i - j | half", t5(backwards_buckets)),
    wrong(
        "t5 decoding",
        "a bias of T5 top-left",
        "positions count from 0 | stands at position i",
        t5(lambda at, _: buckets(moved(at, i=at.i - at.start), at.position)),
    ),
    wrong("t5 self", "T5's table in bfloat16", "bfloat16", t5(of=coarse)),
    wrong(
        "rotary self",
        "frequencies of all channels for some",
        "head_dim | frequencies",
        kernel({"dim": None}, turned=partly_turned),
    ),
    wrong("rotary self", "only queries are turned", "leaves keys where they are", rotary(which=(0,))),
    wrong("rotary self", "only keys are turned", "leaves queries where they are", rotary(which=(1,))),
    wrong("rotary self", "values are turned too", "values", turned=rotated(), values=values_turned),
    wrong("rotary self", "a base of 500,000", "base 500000", rotary(frequencies=lambda dim: powers(dim, 500000.0))),
    wrong("alibi cross", "positions of a step one too far", "one position | one too far", alibi(change=one_ahead)),
    wrong("alibi grouped_heads", "slopes in bfloat16", "bfloat16", alibi(lambda heads: coarse(slopes(heads)))),
    wrong(
        "alibi self",
        "distances stop at 127",
        "127 | 128",
        alibi(change=lambda at, m, d: -m * np.minimum(d, 127)),
    ),
    wrong("plain self", "softmax along queries", "quer", over_queries),
    wrong(
        "plain windows",
        "the tile before the window's edge left out",
        "the output is wrong from query 65 on",
        shown=seen(window=lost_tile),
    ),
    wrong(
        "plain cross",
        "as many keys as queries",
        "L_q",
        masked=lambda at, s: np.where((at.j >= at.q_len) & (at.q_len > 1), -np.inf, s),
    ),
    wrong(
        "plain long",
        "no key beyond 1,000",
        "no key from number 1000 on",
        masked=lambda at, s: np.where(at.j >= 1000, -np.inf, s),
    ),
    wrong(
        "plain self",
        "four heads and no more",
        "head 4 | heads",
        out=lambda at, x: np.where((np.arange(at.heads) < 4)[:, None, None], x, 0),
    ),
    wrong(
        "plain odd_sizes",
        "values beyond head_dim left out",
        "channel",
        values=lambda at, v: np.where(np.arange(v.shape[-1]) < at.dim, v, 0),
    ),
    wrong("plain options", "a cap before the scale", "softcap", cap=uncapped),
    wrong("plain options", "sinks are scaled", "sink", sinks=lambda at, x: x * x.dtype.type(at.dim**-0.5)),
    wrong("plain options", "log-sum-exp without the sink", "log-sum-exp | sink", lse=lse_without_sink),
    wrong(
        "plain ragged",
        "packed sequences see the one before",
        "",
        segments_joined,
        {"supports": ["segments", "causal", "cross"]},
    ),
    wrong(
        "plain excluded_rows",
        "lengths of the item before",
        "key_lengths of the batch item before",
        before=lengths_of_before,
    ),
    wrong("transformer_xl self", "both biases in both products", "u + v where u", both_biases),
    wrong("window self", "a window's table by columns", "column by column", table_by_columns),
    wrong("plain ragged", "what is kept is not rescaled", "dropout | 0.5 times", never_rescaled),
    wrong(
        "plain causal",
        "a causal tile by queries alone",
        "the output is wrong from query 64 on",
        tiled(lambda at, r, c: at.causal & (c == r - 1) & (r > 1), tile=32),
    ),
    wrong(
        "plain windows",
        "window with causal has its right side",
        "as many later keys as earlier ones",
        shown=right_side,
    ),
    wrong(
        "plain masks",
        "key_lengths ignored in decoding",
        "ignores key_lengths",
        shown=seen(key_lengths=lambda at, n: None if at.q_len < at.k_len else n),
    ),
    wrong("rotary self", "keys of a ring of 128", "begin anew after 128", turned=ring_of_keys),
    wrong(
        "plain options",
        "softcap is not multiplied by",
        "softcap is not multiplied by",
        cap=lambda at, s: s / at.q.dtype.type(at.softcap),
    ),
    wrong(
        "plain options",
        "a sink for each tile",
        "counts sinks once for each tile, in tiles of 64",
        sinks=lambda at, x: x + np.log(np.ceil(at.k_len / 64)).astype(x.dtype),
    ),
    wrong(
        "plain odd_sizes",
        "scale of whole vectors of 24",
        "rounded up to a multiple of 8",
        scale=own_scale(lambda at: -(-at.dim // 8) * 8),
    ),
    # Which of T5's buckets begins at 65 decides that both are the same.
    wrong("t5 causal", "the last bucket is never read", "last bucket | distances stop at 64", t5(last_but_one)),
    wrong(
        "transformer_xl self",
        "rows unscaled",
        "products with rows",
        rows_unscaled,
        {"variant": "conformer"},
    ),
    wrong("shaw cross", "Shaw's tables from the end", "distances i - j", shaw_from_the_end),
    wrong(
        "plain options",
        "log-sum-exp of another scale",
        "log-sum-exp with a scale of 1/sqrt",
        lse_of_the_usual_scale,
    ),
    wrong("plain ragged", "segments cut one token late", "one token too late", cut_late, {"supports": ["segments"]}),
    wrong("plain ragged", "segments end with tiles", "whole tiles of 16", to_the_tile, {"supports": ["segments"]}),
    wrong("plain ragged", "the last page whole", "last page whole", paged(whole=True), PAGED),
    wrong(
        "plain cross",
        "scale twice but for D = 64",
        "scale twice, but not where head_dim = 64",
        scale=own_scale(lambda at: at.dim if at.dim == 64 else at.dim**2),
    ),
    wrong("plain self", "the last tile left out where it is whole", "where it is whole", masked=last_whole_tile),
    wrong(
        "plain masks",
        "key_lengths short at whole tiles",
        "with whole tiles of 16",
        shown=seen(key_lengths=short_lengths),
    ),
    wrong("plain grouped_heads", "values of heads in turn", "of values alone", values_in_turn),
    wrong("plain combined", "a mask of floats capped", "also to masks of floats", floats_capped),
    wrong("plain grouped_heads", "the next head behind the last key", "only where 32 does not divide L_k", next_head),
    wrong(
        "rotary self",
        "half of the channels turn",
        "the first half of the channels",
        rotary(frequencies=lambda dim: powers(dim // 4 * 2)),
    ),
    wrong("plain ragged", "pages in order", "whatever block_table says", paged(ordered=True), PAGED),
]
