"""Independent witnesses: every formula as plain loops over b, h, i, j, written from the papers.

Nothing here imports the package under test, and NumPy serves as a container only: no ``einsum``, no matrix product, no
broadcasting. Slow and obvious is the point. Shapes: q (B, H, L_q, D), k (B, H_kv, L_k, D), v (B, H_kv, L_k, D_v); query
head h reads key head h // (H / H_kv). A query i stands at position i + M, with M = L_k - L_q unless ``offset`` says
otherwise, and d = j - (i + M) is negative for keys in the past.

A scheme is a closure ``logit(b, h, i, j)``: what it adds to ``scale * q_i . k_j``, with its own scale already applied.
"""

import cmath
import math
from fractions import Fraction
from functools import cache
from operator import mul

import numpy as np

from tests.naive.by_name import Loops, flat, witness

NEG_INF = -math.inf


def dot(x, y):
    """Sum of x[p] * y[p]."""
    if len(x) != len(y):
        raise ValueError(f"a row of {len(x)} and a row of {len(y)}")
    return sum(map(mul, x, y), 0.0)


def floats(array):
    """Nested lists of Python floats (float64), so that no NumPy arithmetic is used by accident."""
    return np.asarray(array, dtype=np.float64).tolist()


def add(*logits):
    """Several schemes at once: their terms add up."""
    if len(logits) == 1:
        return logits[0]
    return lambda b, h, i, j: sum((logit(b, h, i, j) for logit in logits), 0.0)


# ---------------------------------------------------------------------------------------------- attention


def score_of(q, k, *, logit=None, allowed=None, scale=None, softcap=None, cap_order="scores", product=None):
    """Closure: s_ij = scale q_i . k_j + logit(b,h,i,j) + mask, -inf where excluded (Vaswani 2017, eq. 1).

    softcap c: c tanh(x / c) of all but the mask (Gemma 2), or with cap_order "content" of the product alone.
    product(b, h, i, j): in place of scale q_i . k_j.
    """
    (_, n_h, _, dim), h_kv = np.shape(q), np.shape(k)[1]
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    q, k = floats(q), floats(k)

    def score(b, h, i, j):
        extra = 0.0 if allowed is None else allowed(b, h, i, j)
        if extra == NEG_INF:  # neither the key nor its position is looked at
            return NEG_INF
        pair = q[b][h][i], k[b][h // (n_h // h_kv)][j]
        content = scale * dot(*pair) if product is None else product(b, h, i, j)
        if softcap is not None and cap_order == "content":
            content = softcap * math.tanh(content / softcap)
        added = 0.0 if logit is None else logit(b, h, i, j)
        if added == NEG_INF:  # a scheme excludes keys too
            return NEG_INF
        whole = content + added
        if softcap is not None and cap_order == "scores":
            whole = softcap * math.tanh(whole / softcap)
        return whole + extra

    return score


def logits(q, k, **terms):
    """All scores of `score_of`."""
    (n_b, n_h, l_q, _), l_k = np.shape(q), np.shape(k)[2]
    score, out = score_of(q, k, **terms), np.empty((n_b, n_h, l_q, l_k))
    for b, h, i, j in np.ndindex(out.shape):
        out[b, h, i, j] = score(b, h, i, j)
    return out


def attention(q, k, v, *, value=None, rows=None, sinks=None, back=None, **terms):
    """out_i = sum_j softmax_j(s_ij) (v_j + value(b,h,i,j)) and lse_i = log sum_j exp s_ij (Vaswani 2017, eq. 1).

    Keys at -inf are never touched, so NaN in them stays there. A row without keys gives zeros and lse = -inf.
    `rows`: some (b, h, i), in place of which the results have one axis. sinks[b][h][i]: one more score, which has no
    value (gpt-oss). back(b, h, i, row): what becomes of a row of the output.
    """
    (n_b, n_h, l_q, _), (_, h_kv, l_k, d_v) = np.shape(q), np.shape(v)
    score, v = score_of(q, k, **terms), floats(v)
    outs, lses = [], []
    for b, h, i in np.ndindex(n_b, n_h, l_q) if rows is None else rows:
        row = [score(b, h, i, j) for j in range(l_k)]
        seen = [j for j in range(l_k) if row[j] != NEG_INF]
        out, lse = [0.0] * d_v, NEG_INF
        if seen:
            top = max(row[j] for j in seen)
            if sinks is not None:
                top = max(top, sinks[b][h][i])
            weight = {j: math.exp(row[j] - top) for j in seen}
            total = math.fsum(weight.values()) + (0.0 if sinks is None else math.exp(sinks[b][h][i] - top))
            lse = top + math.log(total)
            for j in seen:
                moved = None if value is None else value(b, h, i, j)
                for c, x in enumerate(v[b][h // (n_h // h_kv)][j]):
                    out[c] += weight[j] / total * (x if moved is None else x + moved[c])
        elif sinks is not None:
            lse = sinks[b][h][i]
        outs.append(out if back is None else back(b, h, i, out))
        lses.append(lse)
    shape = (n_b, n_h, l_q) if rows is None else (len(lses),)
    return np.reshape(np.array(outs), (*shape, d_v)), np.reshape(lses, shape)


def projected(x, weight, bias=None, heads=1):
    """W x + b of each row x, cut into heads: (1, H, L, D)."""
    bias = [0.0] * len(weight) if bias is None else floats(bias)
    rows = [[dot(line, row) + b for line, b in zip(floats(weight), bias, strict=True)] for row in floats(x)]
    return np.reshape(rows, (1, len(rows), heads, -1)).swapaxes(1, 2)


def self_attention(x, w_query, w_key, w_value):
    """z_i = sum_j softmax_j(x_i Wq (x_j Wk)^T / sqrt(d_z)) x_j Wv, rows x_i on the left (Shaw 2018, eq. 1 and 2)."""
    x, columns = floats(x), [list(zip(*floats(w), strict=True)) for w in (w_query, w_key, w_value)]
    q, k, v = ([[dot(row, column) for column in w] for row in x] for w in columns)
    out = np.empty((len(x), len(v[0])))
    for i in range(len(x)):
        e = [math.exp(dot(q[i], key) / math.sqrt(len(key))) for key in k]
        for c in range(len(v[0])):
            out[i, c] = sum(weight / sum(e) * value[c] for weight, value in zip(e, v, strict=True))
    return out


def ruled_out(rule, b, n, j):
    """Whether a rule excludes key j for a query at position n: ("chunked", size, left, right) and so on."""
    kind, *numbers = rule
    if kind == "chunked":
        size, left, right = numbers
        apart = math.floor(Fraction(j, size)) - math.floor(Fraction(n, size))
        return (left is not None and apart < -left) or (right is not None and apart > right)
    if kind == "prefix":
        lengths = numbers[0]
        return j > n and j >= (lengths if isinstance(lengths, int) else lengths[b])
    return (j - n) % numbers[0] != 0


def allowed(l_q, l_k, *, mask=None, causal=False, window=None, key_lengths=None, offset=None, rule=None, selected=None):
    """Closure: -inf for an excluded pair, otherwise the float mask's term (0 without one).

    Bool mask: True may attend. causal: d <= 0. window w: |d| <= w; (left, right): -left <= d <= right, None unbounded.
    key_lengths[b]: keys from there on are padding. rule: see `ruled_out`. selected[b][h][i]: keys, -1 for none.
    """
    offset = l_k - l_q if offset is None else offset
    left, right = (window, window) if window is None or isinstance(window, int) else window
    table = None if mask is None else np.asarray(mask)

    def term(b, h, i, j):
        d = j - (i + offset)
        if causal and d > 0:
            return NEG_INF
        if left is not None and d < -left:
            return NEG_INF
        if right is not None and d > right:
            return NEG_INF
        if key_lengths is not None and j >= key_lengths[b]:
            return NEG_INF
        if rule is not None and ruled_out(rule, b, i + offset, j):
            return NEG_INF
        if selected is not None and j not in selected[b][h][i]:
            return NEG_INF
        if table is None:
            return 0.0
        where = (b, h, i, j)[4 - table.ndim :]
        entry = table[tuple(0 if size == 1 else at for size, at in zip(table.shape, where, strict=True))]
        if table.dtype == bool:
            return 0.0 if entry else NEG_INF
        return float(entry)

    return term


@witness("plain")
def plain():
    """Nothing is added (Vaswani 2017)."""
    return Loops()


# ---------------------------------------------------------------------------------------------- Shaw


@witness("shaw")
def shaw(q, l_k, key_table=None, value_table=None, *, outside="clip", left=None, offset=None, scale=None):
    """(logit, value): q_i . wK[c] scale and wV[c], c = clip(j-i-M, -k, k) + k (Shaw 2018, eq. 3 to 5).

    outside="zero": no row at all beyond k (VITS, Music Transformer). Tables (2k+1, D), or (H, 2k+1, D) one per head.
    left: rows before that of d = 0, a number or one for each table; without it there are as many after as before.
    """
    _, _, l_q, dim = np.shape(q)
    offset = l_k - l_q if offset is None else offset
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    queries = floats(q)
    key_left, value_left = left if isinstance(left, tuple) else (left, left)

    def row(table, before, h, i, j):
        table = table[h] if isinstance(table[0][0], list) else table
        before = (len(table) - 1) // 2 if before is None else before
        at = j - (i + offset) + before
        if outside == "zero" and not 0 <= at < len(table):
            return [0.0] * len(table[0])
        return table[max(0, min(len(table) - 1, at))]

    key_rows = None if key_table is None else floats(key_table)
    value_rows = None if value_table is None else floats(value_table)

    def logit(b, h, i, j):
        return scale * dot(queries[b][h][i], row(key_rows, key_left, h, i, j))

    def value(b, h, i, j):
        return row(value_rows, value_left, h, i, j)

    return None if key_rows is None else logit, None if value_rows is None else value


# ---------------------------------------------------------------------------------------------- T5


def _t5_side(d, num_buckets, bidirectional):
    """First bucket of d's side, its distance n, and the number of buckets on that side (Raffel 2020, section 2.1)."""
    if bidirectional:
        half = num_buckets // 2
        return (half if d > 0 else 0), abs(d), half
    return 0, max(-d, 0), num_buckets


def t5_bucket(d, *, num_buckets=32, max_distance=128, bidirectional=True):
    """n < E: n, else E + floor((n_b - E) ln(n/E) / ln(D_max/E)), at most n_b - 1; exact rationals (Raffel 2020).

    floor(...) >= t says (D_max/E)^t <= (n/E)^(n_b-E), which fractions decide without rounding.
    """
    first, n, side = _t5_side(d, num_buckets, bidirectional)
    exact = side // 2
    if n < exact:
        return first + n
    power = Fraction(n, exact) ** (side - exact)
    step = 0
    while step < side - exact and Fraction(max_distance, exact) ** (step + 1) <= power:
        step += 1
    return first + min(side - 1, exact + step)


def t5_bucket_float32(d, *, num_buckets=32, max_distance=128, bidirectional=True):
    """The same formula in single precision, every operation rounded as PyTorch and TensorFlow round it."""
    first, n, side = _t5_side(d, num_buckets, bidirectional)
    exact = side // 2
    if n < exact:
        return first + n
    ratio = np.float32(n) / np.float32(exact)
    log_ratio = np.float32(math.log(float(ratio)))
    scaled = log_ratio / np.float32(math.log(max_distance / exact)) * np.float32(side - exact)
    return first + min(side - 1, exact + int(scaled))


def t5_bucket_flaxformer(d, *, num_buckets=32, max_distance=128, bidirectional=True):
    """The formula with the logarithm of n/E + eps in single precision, which float64 then goes on with."""
    first, n, side = _t5_side(d, num_buckets, bidirectional)
    exact = side // 2
    if n < exact:
        return first + n
    ratio = np.float32(n) / np.float32(exact) + np.float32(2.0**-23)
    scaled = float(np.float32(math.log(float(ratio)))) / math.log(max_distance / exact) * (side - exact)
    return first + min(side - 1, exact + int(scaled))


# A distance occurs many times, and fractions are slow.
BUCKETS = {
    "exact": cache(t5_bucket),
    "float32": cache(t5_bucket_float32),
    "flaxformer": cache(t5_bucket_flaxformer),
}


@witness("t5")
def t5(table, l_q, l_k, *, max_distance=128, bidirectional=True, rounding="exact", offset=None, bucket=None):
    """One scalar T[bucket(j-i-M), h] per pair and head, not scaled (Raffel 2020, section 2.1)."""
    offset = l_k - l_q if offset is None else offset
    rows = floats(table)
    bucket = bucket or BUCKETS[rounding]

    def logit(b, h, i, j):
        d = j - (i + offset)
        at = bucket(d, num_buckets=len(rows), max_distance=max_distance, bidirectional=bidirectional)
        return rows[at][h]

    return logit


# ---------------------------------------------------------------------------------------------- Transformer-XL


def _cut(flat, width):
    """A flat list cut into rows of ``width``, as ``reshape`` does."""
    return [flat[at : at + width] for at in range(0, len(flat), width)]


def shift_rows(rows, variant):
    """The published reshape trick on one matrix (list of rows), step by step on a flat list.

    transformer_xl, espnet_legacy: zero column in front, drop the first L, cut to width K (Dai 2019, appendix B).
    conformer: the same, then the first L_k columns. xlnet: no zero column, cut to width - 1. wenet: nothing.
    xlnet_uni: as xlnet, but all of width - 1 = L_k columns are kept.
    """
    height, width = len(rows), len(rows[0])
    if variant == "wenet":
        return [list(row) for row in rows]
    if variant in ("xlnet", "xlnet_uni"):
        flat = [x for row in rows for x in row]
        keys = width - height if variant == "xlnet" else width - 1
        return [row[:keys] for row in _cut(flat[height:], width - 1)]
    flat = [x for row in rows for x in [0.0, *row]]
    shifted = _cut(flat[height:], width)
    if variant in ("transformer_xl", "espnet_legacy"):
        return shifted
    if variant == "conformer":
        return [row[: width - height + 1] for row in shifted]
    raise ValueError(variant)


def rel_shift(x, variant="transformer_xl"):
    """``shift_rows`` on the last two axes of an array of any rank."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 2:
        return np.array(shift_rows(x.tolist(), variant))
    return np.array([rel_shift(part, variant) for part in x])


@witness("transformer_xl")
def transformer_xl(q, k, content_bias, position_bias, rows, *, variant="transformer_xl", zero_triu=False, scale=None):
    """scale [(q_i + u) . k_j + shift((q + v) rows^T)_ij] (Dai 2019, section 3.3).

    zero_triu (ESPnet): nothing but (q_i + u) . k_j for keys j > i + M. WeNet has one product, of keys with their rows.
    """
    (_, n_h, l_q, dim), (_, h_kv, l_k, _) = np.shape(q), np.shape(k)
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    q, k, u, v, rows = map(floats, (q, k, content_bias, position_bias, rows))

    @cache
    def shifted(b, h):
        products = []
        for i in range(l_q):
            biased = [q[b][h][i][p] + v[h][p] for p in range(dim)]
            products.append([dot(biased, row[h]) for row in rows])
        return shift_rows(products, variant)

    def logit(b, h, i, j):
        return 0.0 if zero_triu and j > i + l_k - l_q else scale * shifted(b, h)[i][j]

    def content(b, h, i, j):
        biased = [q[b][h][i][p] + u[h][p] for p in range(dim)]
        return scale * dot(biased, k[b][h // (n_h // h_kv)][j])

    if variant == "wenet":
        return Loops(product=lambda *at: content(*at) + logit(*at))
    return Loops(logit, product=content)


def relative_terms(q, k, u, v, encode):
    """a = q_i.k_j, b = q_i.R, c = u.k_j, d = v.R with R = encode(i+M-j), one head (Dai 2019, section 3.3)."""
    q, k, u, v = floats(q), floats(k), floats(u), floats(v)
    memory = len(k) - len(q)
    a, b, c, d = (np.empty((len(q), len(k))) for _ in range(4))
    for i in range(len(q)):
        for j in range(len(k)):
            r = floats(encode(i + memory - j))
            a[i, j], b[i, j], c[i, j], d[i, j] = dot(q[i], k[j]), dot(q[i], r), dot(u, k[j]), dot(v, r)
    return a, b, c, d


def absolute_terms(e, p, w_query=None, w_key=None):
    """(E_i+U_i)^T Wq^T Wk (E_j+U_j) = a + b + c + d, in the order EE, EU, UE, UU (Dai 2019, section 3.3).

    e, p (L, D_in); w_query, w_key (D, D_in) act on column vectors; without them the products are taken directly.
    """

    def project(weight, x):
        return x if weight is None else [dot(line, x) for line in floats(weight)]

    e, p = floats(e), floats(p)
    terms = [np.empty((len(e), len(e))) for _ in range(4)]
    pairs = [(e, e), (e, p), (p, e), (p, p)]
    for term, (left, right) in zip(terms, pairs, strict=True):
        for i in range(len(e)):
            for j in range(len(e)):
                term[i, j] = dot(project(w_query, left[i]), project(w_key, right[j]))
    return tuple(terms)


# ---------------------------------------------------------------------------------------------- rotary


def rotary(q, k, *, dim=None, base=10000.0, layout="half", frequencies=None, magnitude=1.0, offset=None):
    """(R_{i+M} q_i, R_j k_j): pair p as a complex number times m e^(i t w_p), w_p = base^(-2p/d) (Su 2021, eq. 12).

    interleaved: pair p is channels 2p and 2p+1; half: p and p + d/2. Channels from d on stay.
    """
    (_, _, l_q, depth), l_k = np.shape(q), np.shape(k)[2]
    offset = l_k - l_q if offset is None else offset
    if frequencies is None:
        dim = depth if dim is None else dim
        waves = [base ** (-2.0 * p / dim) for p in range(dim // 2)]
    else:
        waves = floats(frequencies)

    def turn(vector, t):
        turned = list(vector)
        for p, wave in enumerate(waves):
            a, b = (p, p + len(waves)) if layout == "half" else (2 * p, 2 * p + 1)
            z = complex(vector[a], vector[b]) * magnitude * cmath.exp(1j * t * wave)
            turned[a], turned[b] = z.real, z.imag
        return turned

    def each(x, start):
        return [[[turn(row, start + t) for t, row in enumerate(head)] for head in item] for item in floats(x)]

    return np.array(each(q, offset)).reshape(np.shape(q)), np.array(each(k, 0)).reshape(np.shape(k))


# ---------------------------------------------------------------------------------------------- windows


def _cells(axes):
    """All coordinate tuples of a grid, last axis fastest."""
    if not axes:
        return [()]
    return [(first, *rest) for first in axes[0] for rest in _cells(axes[1:])]


def window_index(query_grid, key_grid=None, *, key_coords=None, extent=None):
    """Row-major index of (c_q - c_k + extent - 1) in a box of sizes 2 extent - 1 (Liu 2021, section 3.2)."""
    key_grid = query_grid if key_grid is None else key_grid
    extent = query_grid if extent is None else extent
    key_axes = [range(size) for size in key_grid]
    for axis, coords in enumerate(key_coords or ()):
        if coords is not None:
            key_axes[axis] = coords
    queries, keys = _cells([range(size) for size in query_grid]), _cells(key_axes)
    index = np.empty((len(queries), len(keys)), dtype=np.int64)
    for i, at_q in enumerate(queries):
        for j, at_k in enumerate(keys):
            flat = 0
            for c_q, c_k, size in zip(at_q, at_k, extent, strict=True):
                step = int(c_q) - int(c_k) + size - 1
                if not 0 <= step < 2 * size - 1:
                    raise IndexError((at_q, at_k, tuple(extent)))
                flat = flat * (2 * size - 1) + step
            index[i, j] = flat
    return index


def rstt_frames(num_frames_q, num_frames_kv):
    """RSTT's key frames 0, s, 2s ... < F_q with s = (F_q + 1) // F_kv; must be F_kv of them (Geng 2022)."""
    step = (num_frames_q + 1) // num_frames_kv
    frames = [frame for frame in range(num_frames_q) if step and frame % step == 0]
    if len(frames) != num_frames_kv:
        raise ValueError((num_frames_kv, len(frames)))
    return frames


@witness("window")
def window(table, grid, key_grid, key_coords, extent):
    """`window_bias` of a `window_index` (Liu 2021, eq. 4; Geng 2022)."""
    return window_bias(table, window_index(grid, key_grid, key_coords=key_coords, extent=extent))


def window_bias(table, index):
    """T[index(i,j), h] added to the logits (Liu 2021, eq. 4)."""
    rows, index = floats(table), np.asarray(index).tolist()
    return lambda b, h, i, j: rows[index[i][j]][h]


# ---------------------------------------------------------------------------------------------- biases by formula


def alibi_slope(h, heads, bias_max=8.0):
    """2^(-8(h+1)/H), or for other H those of c heads, then the odd-numbered of 2c heads (Press 2022, section 3)."""
    below = 1
    while 2 * below <= heads:
        below *= 2
    if h < below:
        return 2.0 ** (-bias_max * (h + 1) / below)
    counted_from_one = 2 * (h - below) + 1
    return 2.0 ** (-bias_max * counted_from_one / (2 * below))


@witness("alibi")
def alibi(l_q, l_k, heads, *, slopes=None, form="symmetric", bias_max=None, offset=None, batch=(1,)):
    """-m_bh |i+M-j|; causal: m_bh (j-i-M); key: m_bh j; m is the same in all items (Press 2022, section 3)."""
    offset = l_k - l_q if offset is None else offset
    default = [alibi_slope(h, heads, bias_max or 8.0) for h in range(heads)]
    m = floats(flat(default if slopes is None else slopes, batch, 1))

    def logit(b, h, i, j):
        slope = m[b if len(m) > 1 else 0][h]
        if form == "key":
            return slope * j
        distance = i + offset - j
        return -slope * (distance if form == "causal" else abs(distance))

    return logit


@witness("kerple")
def kerple(a, b, l_q, l_k, *, form="log", offset=None):
    """-r1 log(1 + r2 |m-n|); power: -r1 |m-n|^r2; r1 = a, r2 = b (Chi 2022, section 4.2)."""
    offset = l_k - l_q if offset is None else offset
    r1, r2 = floats(a), floats(b)

    def logit(_, h, m, n):
        distance = float(abs(m + offset - n))
        return -r1[h] * (math.log(1.0 + r2[h] * distance) if form == "log" else math.pow(distance, r2[h]))

    return logit


# ---------------------------------------------------------------------------------------------- absolute


@witness("sinusoidal")
def sinusoidal(positions, dim, *, base=10000.0, layout="interleaved"):
    """Sine and cosine of t w, one row per position t (an int means 0 ... positions-1).

    interleaved: column 2p sin, 2p+1 cos, w = base^(-2p/D) (Vaswani 2017, section 3.5).
    concatenated: the same w, all sines then all cosines (Transformer-XL code); of an odd D a sine more (MarianMT).
    tensor2tensor: sines then cosines, w = base^(-p/(D/2-1)); of an odd D the last is 0 (fairseq).
    dimension_index: column i even sin, odd cos, w = base^(-2i/D) with i the column itself.
    """
    times = range(positions) if isinstance(positions, int) else np.asarray(positions).tolist()
    half = dim // 2
    out = np.empty((len(times), dim))
    for row, t in enumerate(times):
        for c in range(dim):
            if layout == "interleaved":
                exponent, wave = -2.0 * (c // 2) / dim, math.cos if c % 2 else math.sin
            elif layout == "dimension_index":
                exponent, wave = -2.0 * c / dim, math.cos if c % 2 else math.sin
            elif layout == "concatenated":
                sines = dim - half
                exponent, wave = -2.0 * (c % sines) / dim, math.cos if c >= sines else math.sin
            elif layout == "tensor2tensor":
                if c == 2 * half:
                    out[row, c] = 0.0
                    continue
                exponent, wave = -(c % half) / max(half - 1, 1), math.cos if c >= half else math.sin
            else:
                raise ValueError(layout)
            out[row, c] = wave(t * base**exponent)
    return out


def rotation(delta, dim, *, base=10000.0):
    """Blocks [[cos, sin], [-sin, cos]] of delta w_j, w_j = base^(-2j/d), along the diagonal (Vaswani 2017, 3.5)."""
    out = np.zeros((dim, dim))
    for j in range(dim // 2):
        angle = delta / base ** (2 * j / dim)
        out[2 * j, 2 * j], out[2 * j, 2 * j + 1] = math.cos(angle), math.sin(angle)
        out[2 * j + 1, 2 * j], out[2 * j + 1, 2 * j + 1] = -math.sin(angle), math.cos(angle)
    return out


@witness("learned")
def learned(table, positions):
    """W[t] for every position t, an error beyond the table (Gehring 2017)."""
    rows = floats(table)
    times = range(positions) if isinstance(positions, int) else np.asarray(positions).tolist()
    for t in times:
        if not 0 <= t < len(rows):
            raise IndexError(t)
    return np.array([rows[t] for t in times])
