"""Independent witnesses of schemes that add a number per head and pair, from tables or from a function."""

import math

import numpy as np

from tests.naive.by_name import flat, witness
from tests.naive.seeds import BUCKETS, dot, floats, t5_bucket

# ---------------------------------------------------------------------------------------------- layout of documents


def layout(
    table,
    x_table,
    y_table,
    boxes,
    l_q,
    l_k,
    *,
    positions=None,
    variant="layoutlmv2",
    max_distance=128,
    max_box_distance=256,
    factor=100.0,
    scale=1.0,
    offset=None,
    single=False,
    bucket=t5_bucket,
):
    """T[b(dp)] + Tx[b(dx)] + Ty[b(dy)], of tokens' boxes (Xu 2021; Huang 2022; Tang 2023).

    boxes (B, L_k, 4): left, top, right, bottom. Query i is token i + M. LayoutLM: left and bottom edges; version 3
    times the scale. UDOP: middles, the difference times 100, rounded towards zero; single: in float32.
    """
    offset = l_k - l_q if offset is None else offset
    tables = [None if t is None else floats(t) for t in (table, x_table, y_table)]

    def place(box, axis):
        if variant != "udop":
            return int(box[0] if axis == 0 else box[3])
        low, high = box[axis], box[axis + 2]
        if single:
            return (np.float32(low) + np.float32(high)) / np.float32(2)
        return (float(low) + float(high)) / 2

    def apart(there, here):
        if variant != "udop":
            return there - here
        if single:
            return int((there - here) * np.float32(factor))
        return int((there - here) * factor)

    def logit(b, h, i, j):
        total = 0.0
        here, there = boxes[b][i + offset], boxes[b][j]
        for axis in (0, 1):
            d = apart(place(there, axis), place(here, axis))
            rows = tables[axis + 1]
            total += rows[bucket(d, num_buckets=len(rows), max_distance=max_box_distance)][h]
        if tables[0] is not None:
            d = j - (i + offset)
            if positions is not None:
                d = int(positions[b][j]) - int(positions[b][i + offset])
            total += tables[0][bucket(d, num_buckets=len(tables[0]), max_distance=max_distance)][h]
        return scale * total if variant == "layoutlmv3" else total

    return logit


@witness("layout")
def layout_of(
    table, x_table, y_table, boxes, l_q, l_k, *, positions, variant, max_distance, max_box_distance, factor, rounding,
    scale, offset, batch
):  # fmt: skip
    """`layout` with the defaults of its variant (Xu 2021; Tang 2023)."""
    udop = variant == "udop"
    return layout(
        table,
        x_table,
        y_table,
        flat(boxes, batch, 2).tolist(),
        l_q,
        l_k,
        positions=None if positions is None else flat(positions, batch, 1).tolist(),
        variant=variant,
        max_distance=max_distance,
        max_box_distance=max_box_distance or (100 if udop else 256),
        factor=100.0 if factor is None else factor,
        scale=scale,
        offset=offset,
        single=udop and rounding == "float32",
        bucket=BUCKETS[rounding],
    )


# ---------------------------------------------------------------------------------------------- WavLM


def wavlm_gate(hidden, weight, bias, const):
    """g_bhi = a (b const_h - 1) + 2 with a, b the logistic function of two sums of 4 (Chen 2022, as its code has it).

    hidden (B, L, H d), weight (8, d), bias (8,), const (H,); head h sees its own d channels.
    """
    hidden, weight, bias, const = floats(hidden), floats(weight), floats(bias), floats(const)
    heads, depth = len(const), len(weight[0])
    out = np.empty((len(hidden), heads, len(hidden[0])))
    for b in range(len(hidden)):
        for h in range(heads):
            for i in range(len(hidden[0])):
                own = hidden[b][i][h * depth : (h + 1) * depth]
                eight = [dot(row, own) + shift for row, shift in zip(weight, bias, strict=True)]
                first, second = (1.0 / (1.0 + math.exp(-sum(part))) for part in (eight[:4], eight[4:]))
                out[b, h, i] = first * (second * const[h] - 1.0) + 2.0
    return out


@witness("wavlm")
def wavlm(table, gate, l_q, l_k, *, max_distance=800, rounding="exact", offset=None, batch=None):
    """g_bhi T[b(j-i-M), h], a gate times T5's bias (Chen 2022)."""
    offset = l_k - l_q if offset is None else offset
    rows, gate = floats(table), floats(gate if batch is None else flat(gate, batch, 2))
    bucket = BUCKETS[rounding]

    def logit(b, h, i, j):
        return gate[b][h][i] * rows[bucket(j - (i + offset), num_buckets=len(rows), max_distance=max_distance)][h]

    return logit


# ---------------------------------------------------------------------------------------------- FIRE


@witness("fire")
def fire(w1, b1, w2, b2, c, threshold, l_q, l_k, *, eps=0.0, offset=None):
    """f(ln(c|i-j|+1) / (ln(c max(L,i)+1) + eps)), f a perceptron with one hidden layer of ReLU (Li 2024).

    w1 (hidden,), b1 (hidden,), w2 (H, hidden), b2 (H,); i counts the query's position from 0.
    """
    offset = l_k - l_q if offset is None else offset
    w1, b1, w2, b2 = floats(w1), floats(b1), floats(w2), floats(b2)

    def logit(b, h, i, j):
        at = i + offset
        x = math.log(c * abs(at - j) + 1.0) / (math.log(c * max(threshold, at) + 1.0) + eps)
        hidden = [max(0.0, x * w + shift) for w, shift in zip(w1, b1, strict=True)]
        return dot(hidden, w2[h]) + b2[h]

    return logit


# ---------------------------------------------------------------------------------------------- Sandwich


@witness("sandwich")
def sandwich(l_q, l_k, heads, *, dim=128, base=10000.0, variant="paper", offset=None):
    """Inner product of sinusoids of i and j over 8 (h + 1) / H (Chi 2023, appendix E).

    nemo: frequencies counted from 1, less dim / 2, so that it is 0 at distance 0.
    """
    offset = l_k - l_q if offset is None else offset

    def logit(b, h, i, j):
        m, n = i + offset, j
        total = 0.0
        for p in range(dim // 2):
            wave = base ** (-2.0 * (p if variant == "paper" else p + 1) / dim)
            total += math.sin(m * wave) * math.sin(n * wave) + math.cos(m * wave) * math.cos(n * wave)
        if variant == "nemo":
            total -= dim / 2
        return total / (8.0 * (h + 1) / heads)

    return logit


# ---------------------------------------------------------------------------------------------- TISA


@witness("tisa")
def tisa(amplitudes, sharpness, offsets, l_q, l_k, *, variant="paper", offset=None):
    """Sum over s of a exp(-|b| (d - c)^2), d = j - i (Wennberg 2021); its code takes d = i - j - 1.

    Parameters of shape (kernels, H).
    """
    offset = l_k - l_q if offset is None else offset
    a, b_, c = floats(amplitudes), floats(sharpness), floats(offsets)

    def logit(b, h, i, j):
        d = j - (i + offset)
        at = d if variant == "paper" else -d - 1
        return sum(a[s][h] * math.exp(-abs(b_[s][h]) * (at - c[s][h]) ** 2) for s in range(len(a)))

    return logit
