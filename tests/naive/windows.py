"""Loops for positions on image grids: Swin V2, BEiT, SAM and MViTv2, neighbourhoods, iRPE, and the resizing of tables.

Tokens of a grid are counted row by row. Nothing here imports the package under test; see ``tests/naive/seeds.py``.
"""

import math
from fractions import Fraction
from functools import cache

import numpy as np

from tests.naive.by_name import Loops, witness
from tests.naive.seeds import NEG_INF, dot, floats

# ---------------------------------------------------------------------------------------------- Swin V2


def swin_v2_operands(q, k, logit_scale):
    """(e^min(t_h, ln 100) q/|q|, k/|k|), norms at least 1e-12, to be multiplied without a scale (Liu 2022, eq. 2)."""

    def unit(row):
        norm = max(math.sqrt(dot(row, row)), 1e-12)
        return [x / norm for x in row]

    factors = [math.exp(min(t, math.log(100.0))) for t in np.asarray(logit_scale, dtype=np.float64).ravel().tolist()]
    sharp = [
        [[[factors[h] * x for x in unit(row)] for row in head] for h, head in enumerate(item)] for item in floats(q)
    ]
    return np.array(sharp), np.array([[[unit(row) for row in head] for head in item] for item in floats(k)])


def swin_v2_coordinate(d, axis, window, pretrained, variant):
    """One coordinate of the difference d along an axis (Liu 2022, eq. 4, and the published code)."""
    if variant == "paper":
        return math.copysign(math.log(1.0 + abs(d)), d)
    span = max((window if pretrained is None else pretrained)[axis] - 1, 1)
    if variant == "transformers" and pretrained is None and window[0] == 1:
        span = 1
    return math.copysign(math.log2(1.0 + 8.0 * abs(d) / span) / math.log2(8.0), d)


def swin_v2(w1, b1, w2, window, *, b2=None, pretrained=None, variant="microsoft"):
    """16 / (1 + e^-z), z the MLP of both coordinates; "paper": z itself (Liu 2022, section 3.3)."""
    w1, b1, w2 = floats(w1), floats(b1), floats(w2)
    b2 = [0.0] * len(w2) if b2 is None else floats(b2)

    def logit(b, h, i, j):
        steps = (i // window[1] - j // window[1], i % window[1] - j % window[1])
        at = [swin_v2_coordinate(d, axis, window, pretrained, variant) for axis, d in enumerate(steps)]
        hidden = [max(0.0, dot(line, at) + bias) for line, bias in zip(w1, b1, strict=True)]
        z = dot(w2[h], hidden) + b2[h]
        return z if variant == "paper" else 16.0 / (1.0 + math.exp(-z))

    return logit


@witness("swin_v2")
def swin_v2_of(
    q, k, hidden_weight, hidden_bias, output_weight, logit_scale, grid, output_bias, pretrained_grid, variant, scale
):
    """Cosines of queries and keys, and the bias of `swin_v2` (Liu 2022, section 3.2 and 3.3).

    The usual scale of a call stands for none, and any other multiplies the product in proportion.
    """
    sharp, units = swin_v2_operands(q, k, logit_scale)
    options = {"b2": output_bias, "pretrained": pretrained_grid, "variant": variant}
    return Loops(
        swin_v2(hidden_weight, hidden_bias, output_weight, grid, **options),
        q=sharp,
        k=units,
        scale=scale * math.sqrt(np.shape(q)[3]),
    )


# ---------------------------------------------------------------------------------------------- BEiT and resizing


@witness("beit")
def beit(table, grid):
    """T[r, h]: the window's rows, then class to token, token to class, class to class (Bao 2022, section 2.1)."""
    rows, (height, width) = floats(table), grid
    extra = (2 * height - 1) * (2 * width - 1)

    def logit(b, h, i, j):
        if i == 0 and j == 0:
            return rows[extra + 2][h]
        if i == 0:
            return rows[extra][h]
        if j == 0:
            return rows[extra + 1][h]
        down = (i - 1) // width - (j - 1) // width + height - 1
        right = (i - 1) % width - (j - 1) % width + width - 1
        return rows[down * (2 * width - 1) + right][h]

    return logit


def _keys_kernel(x, a=-0.75):
    """Cubic convolution kernel (Keys 1981, eq. 4, with a in place of -1/2)."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def progression(old, new):
    """0, and on both sides the sums of 1, r, r^2 ...; bisection for r so that the last is new // 2 (BEiT 2022)."""
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        r = (low + high) / 2
        if sum(r**i for i in range(old // 2)) > new // 2:
            high = r
        else:
            low = r
    places = [sum(r**i for i in range(c)) for c in range(old // 2 + 1)]
    return [-x for x in reversed(places[1:])] + places


def _between(line, places, x):
    """Linear interpolation; the last number beyond either end."""
    if x <= places[0]:
        return line[0]
    for left in range(len(line) - 1):
        if x <= places[left + 1]:
            share = (x - places[left]) / (places[left + 1] - places[left])
            return (1 - share) * line[left] + share * line[left + 1]
    return line[-1]


def resample(line, size, mode):
    """A list at ``size`` points, pixel centres aligned, the border repeated (Keys 1981); or at integers (BEiT 2022)."""
    if mode == "geometric":
        places = progression(len(line), size)
        return [_between(line, places, r - size // 2) for r in range(size)]
    out, last = [], len(line) - 1
    for r in range(size):
        x = (r + 0.5) * len(line) / size - 0.5
        if mode == "linear":
            x = min(max(x, 0.0), float(last))
        below = math.floor(x)
        total = 0.0
        for at in range(below - 1, below + 3):
            weight = _keys_kernel(x - at) if mode == "cubic" else max(0.0, 1.0 - abs(x - at))
            total += weight * line[min(max(at, 0), last)]
        out.append(total)
    return out


def resize_table(table, old_grid, new_grid, *, mode="cubic", extra_rows=0):
    """Each column as an image of (2h-1)(2w-1), resampled along one axis, then the other; extra rows stay."""
    rows = floats(table)
    (h_old, w_old), (h_new, w_new) = ([2 * side - 1 for side in grid] for grid in (old_grid, new_grid))
    columns = []
    for column in zip(*rows[: len(rows) - extra_rows], strict=True):
        image = [resample(column[y * w_old : (y + 1) * w_old], w_new, mode) for y in range(h_old)]
        tall = [resample(line, h_new, mode) for line in zip(*image, strict=True)]
        columns.append([tall[x][y] for y in range(h_new) for x in range(w_new)])
    return np.array([list(row) for row in zip(*columns, strict=True)] + rows[len(rows) - extra_rows :])


# ---------------------------------------------------------------------------------------------- SAM and MViTv2


def decomposed_row(i, j, size_q, size_k):
    """floor(i max(k/q, 1) - j max(q/k, 1) + (k-1) max(q/k, 1)), with fractions (Li 2022, section 4.1)."""
    wide, narrow = max(Fraction(size_k, size_q), 1), max(Fraction(size_q, size_k), 1)
    return math.floor(i * wide - j * narrow + (size_k - 1) * narrow)


def decomposed(q, height_table, width_table, grid_q, grid_k=None, *, class_token=False, row=decomposed_row):
    """q_i . (R_h[row] + R_w[row]), q not scaled, tables resampled to 2 max(q, k) - 1 rows (Li 2022, section 4.1)."""
    grid_k = grid_q if grid_k is None else grid_k
    q, row = floats(q), cache(row)
    tables = []
    for table, size_q, size_k in zip((height_table, width_table), grid_q, grid_k, strict=True):
        columns = list(zip(*floats(table), strict=True))
        columns = [resample(column, 2 * max(size_q, size_k) - 1, "linear") for column in columns]
        tables.append(list(zip(*columns, strict=True)))

    def logit(b, h, i, j):
        if class_token and 0 in (i, j):
            return 0.0
        at_q, at_k = i - class_token, j - class_token
        r_h = row(at_q // grid_q[1], at_k // grid_k[1], grid_q[0], grid_k[0])
        r_w = row(at_q % grid_q[1], at_k % grid_k[1], grid_q[1], grid_k[1])
        return dot(q[b][h][i], tables[0][r_h]) + dot(q[b][h][i], tables[1][r_w])

    return logit


@witness("decomposed")
def decomposed_of(q, height_table, width_table, grid, key_grid, variant, class_token, rounding):
    """`decomposed`; its variants differ only in the tables that they accept (Li 2022; Kirillov 2023)."""
    assert variant in ("sam", "mvit")
    assert rounding == "exact"
    return decomposed(q, height_table, width_table, grid, key_grid, class_token=class_token)


# ---------------------------------------------------------------------------------------------- neighbourhoods


def _coordinates(token, grid):
    at = []
    for size in reversed(grid):
        at.append(token % size)
        token //= size
    return at[::-1]


def neighbours(i, length, kernel, dilation=1):
    """The kernel nearest positions with i's remainder by the dilation, k // 2 on either side where there are as many.

    At a border the window does not shrink: it stops at the border (Hassani 2023, section 3; Hassani & Shi 2022).
    """
    group = [p for p in range(length) if p % dilation == i % dilation]
    first = group.index(i) - kernel // 2
    while first < 0:
        first += 1
    while first + kernel > len(group):
        first -= 1
    return group[first : first + kernel]


@witness("neighborhood")
def neighborhood(table, grid, kernel, dilation=None):
    """B[h, key - query + k - 1 along each axis], -inf for keys that are no neighbours (Hassani 2023, section 3)."""
    dilation = [1] * len(grid) if dilation is None else dilation
    values = None if table is None else floats(table)

    def logit(b, h, i, j):
        value = None if values is None else values[h]
        axes = zip(_coordinates(i, grid), _coordinates(j, grid), grid, kernel, dilation, strict=True)
        for at_q, at_k, size, side, gap in axes:
            if at_k not in neighbours(at_q, size, side, gap):
                return NEG_INF
            if value is not None:
                value = value[(at_k - at_q) // gap + side - 1]
        return 0.0 if value is None else value

    return logit


# ---------------------------------------------------------------------------------------------- iRPE


def irpe_piecewise(x, alpha, beta, gamma):
    """g(x): x up to alpha, then sign(x) min(beta, round(alpha + ...)) on a logarithmic scale (Wu 2021, section 3)."""
    if abs(x) <= alpha:
        return round(x)
    y = alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)
    return int(math.copysign(int(min(beta, round(y))), x))


_piecewise = cache(irpe_piecewise)


def irpe_buckets(i, j, grid, *, method, alpha, beta, gamma, class_tokens=0):
    """Bucket of the pair, or both of them for "cross"; one more for pairs with a class token (Wu 2021, section 3)."""
    side = int(beta)
    if i < class_tokens or j < class_tokens:
        last = (2 * side + 1) ** 2 if method == "product" else 2 * side + 1
        return [last] * (2 if method == "cross" else 1)
    (y_q, x_q), (y_k, x_k) = (_coordinates(t - class_tokens, grid) for t in (i, j))
    down, right = y_q - y_k, x_q - x_k

    def g(x):
        return _piecewise(x, alpha, beta, gamma) + side

    if method == "euclidean":
        return [g(round(math.sqrt(down**2 + right**2)))]
    if method == "quantization":
        return [g(down**2 + right**2)]
    if method == "product":
        return [g(down) * (2 * side + 1) + g(right)]
    return [g(down), g(right)]


def _of_head(table, h):
    return table[h if len(table) > 1 else 0]


def _parts(table, method):
    """One table per map: "cross" has two."""
    return [] if table is None else floats(table) if method == "cross" else [floats(table)]


def irpe(q, k, grid, *, key_table=None, query_table=None, mode="contextual", scale=None, **options):
    """scale q_i . K[b(i, j)] + scale k_j . Q[b(j, i)], or K[b(i, j)] + Q[b(j, i)] as numbers (Wu 2021, section 3)."""
    (_, n_h, _, dim), (_, h_kv, _, _) = np.shape(q), np.shape(k)
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    q, k = floats(q), floats(k)
    of_key, of_query = (_parts(table, options["method"]) for table in (key_table, query_table))

    def logit(b, h, i, j):
        total = 0.0
        for tables, vector, at in (
            (of_key, q[b][h][i], (i, j)),
            (of_query, k[b][h // (n_h // h_kv)][j], (j, i)),
        ):
            for table, row in zip(tables, irpe_buckets(*at, grid, **options) if tables else [], strict=True):
                entry = _of_head(table, h)[row]
                total += entry if mode == "bias" else scale * dot(vector, entry)
        return total

    return logit


def irpe_value(grid, value_table, **options):
    """V[b(i, j)], added to the value of key j as query i sees it (Wu 2021, section 3)."""
    tables = _parts(value_table, options["method"])

    def value(b, h, i, j):
        rows = irpe_buckets(i, j, grid, **options)
        vectors = [_of_head(table, h)[row] for table, row in zip(tables, rows, strict=True)]
        return [sum(parts) for parts in zip(*vectors, strict=True)]

    return value


@witness("irpe")
def irpe_of(q, k, grid, key_table, query_table, value_table, mode, method, alpha, beta, gamma, class_tokens, scale):
    """`irpe` and `irpe_value` (Wu 2021, section 3)."""
    options = {"method": method, "alpha": alpha, "beta": beta, "gamma": gamma, "class_tokens": class_tokens}
    logit = irpe(q, k, grid, key_table=key_table, query_table=query_table, mode=mode, scale=scale, **options)
    return logit, None if value_table is None else irpe_value(grid, value_table, **options)
