"""What the notes behind this library compute, mistakes included: their formulas and code, written again in NumPy.

``docs/errata.md`` quotes the lines that are wrong. Nothing here imports the package, so that the two can be compared.
"""

import math

import numpy as np


def softmax(scores):
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------- after Shaw


def clip(x, k):
    """As both notes define it."""
    return max(-k, min(k, x))


def shaw_output(x, w_q, w_k, w_v, rows_k, rows_v):
    """z_i of the formula with a^K and a^V: a sum over j for each i, rows w_{-k} ... w_k of the tables."""
    k, d_z = len(rows_k) // 2, w_q.shape[1]
    outputs = []
    for i in range(len(x)):
        places = [k + clip(j - i, k) for j in range(len(x))]
        e = [x[i] @ w_q @ (x[j] @ w_k + rows_k[at]) / math.sqrt(d_z) for j, at in enumerate(places)]
        alpha = softmax(np.array(e))
        outputs.append(sum(alpha[j] * (x[j] @ w_v + rows_v[at]) for j, at in enumerate(places)))
    return np.stack(outputs)


# ---------------------------------------------------------------------------------------------- RSTT's window


def window_rows(frames_q, frames_kv, window):
    """The module's buffer: a row of the table for each query and each key."""
    height, width = window
    step = (frames_q + 1) // frames_kv
    q_axes = [np.arange(frames_q), np.arange(height), np.arange(width)]
    kv_axes = [np.arange(0, frames_q, step), *q_axes[1:]]
    q, kv = (np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1) for axes in (q_axes, kv_axes))
    moved = (q[:, :, None] - kv[:, None, :]).transpose(1, 2, 0) + np.array([frames_q - 1, height - 1, width - 1])
    return moved @ [(2 * height - 1) * (2 * width - 1), 2 * width - 1, 1]


def window_attention(q, kv, frames_q, frames_kv, window, weights, mask=None):
    """The module's ``forward``: output and probabilities."""
    kv = q if kv is None else kv
    batch, n_q, channels = q.shape
    n_kv, table = kv.shape[1], weights["relative_position_bias_table"]
    heads = table.shape[1]
    project = {
        name: lambda x, n=name: x @ weights[f"{n}.weight"].T + weights[f"{n}.bias"] for name in ("q", "kv", "proj")
    }
    q = project["q"](q).reshape(batch, n_q, heads, -1).transpose(0, 2, 1, 3)
    k, v = project["kv"](kv).reshape(batch, n_kv, 2, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q * (channels // heads) ** -0.5 @ k.swapaxes(-1, -2)
    rows = window_rows(frames_q, frames_kv, window)
    scores = scores + table[rows.ravel()].reshape(n_q, n_kv, -1).transpose(2, 0, 1)
    if mask is not None:
        scores = (scores.reshape(-1, len(mask), heads, n_q, n_kv) + mask[:, None]).reshape(batch, heads, n_q, n_kv)
    attn = softmax(scores)
    return project["proj"]((attn @ v).swapaxes(1, 2).reshape(batch, n_q, channels)), attn


# ---------------------------------------------------------------------------------------------- absolute and relative


def channel_sinusoid(t, d_model):
    """PE(t), with a frequency for every channel."""
    angles = [t / 10000 ** (2 * i / d_model) for i in range(d_model)]
    return np.array([math.cos(angle) if i % 2 else math.sin(angle) for i, angle in enumerate(angles)])


# ---------------------------------------------------------------------------------------------- Transformer-XL


def score_terms(e, u, v, r):
    """The simplified terms (a) ... (d); ``r(i - j)`` is a vector."""
    pairs = [[(e[i], e[j], r(i - j)) for j in range(len(e))] for i in range(len(e))]
    return np.array([[[a @ b, a @ c, u @ b, v @ c] for a, b, c in row] for row in pairs]).transpose(2, 0, 1)


def position_scores(q, r):
    """The matrix A_bd; ``r(j - i)`` is a vector."""
    return np.array([[q[i] @ r(j - i) for j in range(len(q))] for i in range(len(q))])


def moved_left(products, by):
    """Row i without its first ``by(i)`` entries, and as many of the others as there are rows."""
    return np.stack([row[by(i) :][: len(products)] for i, row in enumerate(products)])


# ---------------------------------------------------------------------------------------------- the class for sinusoids


def positional_encoding(num_hiddens, max_len=1000, dtype=np.float32):
    """The table that the class holds, in the precision in which it is computed."""
    table = np.zeros((1, max_len, num_hiddens), dtype)
    exponents = np.arange(0, num_hiddens, 2, dtype=dtype) / dtype(num_hiddens)
    angles = np.arange(max_len, dtype=dtype).reshape(-1, 1) / np.power(dtype(10000), exponents)
    table[:, :, 0::2], table[:, :, 1::2] = np.sin(angles), np.cos(angles)
    return table


def encoded(x, table):
    """What ``forward`` returns, without dropout."""
    return x + table[:, : x.shape[1], :]
