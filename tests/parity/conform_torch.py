"""Attention as authors write it in PyTorch: right, and wrong in ten ways. Nothing here comes from the package."""

import math

import torch


def softmax(s):
    """Zero for queries that may attend no key."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(torch.isfinite(top), top, 0))
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1, total)


def repeated(q, k, v):
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def distances(q, k):
    return torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None] - (k.shape[-2] - q.shape[-2])


def allowed(q, k, mask=None, causal=False, window=None, key_lengths=None):
    d = distances(q, k)
    found = torch.ones(q.shape[0], q.shape[1], *d.shape, dtype=torch.bool)
    if causal:
        found &= d <= 0
    if window is not None:
        found &= (d >= -window[0]) & (d <= window[1])
    if key_lengths is not None:
        found &= torch.arange(k.shape[-2]) < key_lengths[:, None, None, None]
    if mask is not None:
        found &= mask if mask.dtype == torch.bool else mask > -torch.inf
    return found


def finished(s, q, k, v, mask=None, return_lse=False, **options):
    """From scores of all pairs to the output; excluded keys and values may hold anything."""
    shown = allowed(q, k, mask, **options)
    if mask is not None and mask.dtype != torch.bool:
        s = s + torch.where(mask > -torch.inf, mask, 0)
    s = torch.where(shown, s, -torch.inf)
    used = shown.any(-2)[..., None]
    out = softmax(s.float() if s.dtype != torch.float64 else s).to(v.dtype) @ torch.where(used, v, 0)
    return (out, torch.logsumexp(s, -1)) if return_lse else out


def products(q, k, scale=None):
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def plain(q, k, v, mask=None, causal=False, window=None, key_lengths=None, scale=None, return_lse=False):
    k, v = repeated(q, k, v)
    return finished(
        products(q, k, scale), q, k, v, mask, return_lse, causal=causal, window=window, key_lengths=key_lengths
    )


def buckets(d, count, most, *, single=False):
    """T5's, decided exactly by default: the logarithm in float64, with a margin for the borders."""
    half = count // 2
    exact = half // 2
    near = d.abs()
    kind = torch.float32 if single else torch.float64
    ratio = torch.log(near.clamp(min=1).to(kind) / exact) / math.log(most / exact) * (half - exact)
    far = exact + (ratio if single else ratio + 1e-12).long()
    return torch.where(near < exact, near, far.clamp(max=half - 1)) + half * (d > 0)


def t5(q, k, v, table, max_distance=128, mask=None, causal=False, window=None, key_lengths=None, scale=None):
    k, v = repeated(q, k, v)
    bias = table[buckets(distances(q, k), len(table), max_distance)].movedim(-1, 0)
    s = products(q, k, scale) + bias
    return finished(s, q, k, v, mask, causal=causal, window=window, key_lengths=key_lengths)


def rows_of(table, d, *, zero):
    half = len(table) // 2
    found = table[d.clamp(-half, half) + half]
    return torch.where((d.abs() <= half)[..., None], found, 0) if zero else found


def shaw(q, k, v, key_table, value_table, causal=False, *, zero=False):
    d = distances(q, k)
    a_k, a_v = rows_of(key_table, d, zero=zero), rows_of(value_table, d, zero=zero)
    s = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, a_k)) * q.shape[-1] ** -0.5
    p = softmax(torch.where(allowed(q, k, causal=causal), s, -torch.inf))
    return p @ v + torch.einsum("bhij,ijd->bhid", p, a_v)


def angles(length, dim, start=0):
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (torch.arange(length) + start)[:, None] * inverse


def turned(x, start=0, *, neighbours=False):
    angle = angles(x.shape[-2], x.shape[-1], start)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    one, two = a * cos - b * sin, a * sin + b * cos
    return torch.stack([one, two], -1).flatten(-2) if neighbours else torch.cat([one, two], -1)


def rotary(q, k, v, causal=False, mask=None, key_lengths=None, return_lse=False):
    k, v = repeated(q, k, v)
    s = products(turned(q, k.shape[-2] - q.shape[-2]), turned(k))
    return finished(s, q, k, v, mask, return_lse, causal=causal, key_lengths=key_lengths)


def conformer(q, k, v, content_bias, position_bias, rows, causal=False):
    """Scores with u, v and the published shift: a column of zeros, then the first row of the new shape is left out."""
    content = (q + content_bias[:, None]) @ k.mT
    x = (q + position_bias[:, None]) @ rows.permute(1, 2, 0)
    padded = torch.cat([torch.zeros_like(x[..., :1]), x], -1).flatten(-2)
    shifted = padded[..., q.shape[-2] :].unflatten(-1, x.shape[-2:])[..., : k.shape[-2]]
    return finished((content + shifted) * q.shape[-1] ** -0.5, q, k, v, causal=causal)


def ordinary(q, k, v, causal=False):
    """Without grouped heads, which matmul refuses."""
    return finished(products(q, k), q, k, v, causal=causal)


# ---------------------------------------------------------------------------------------------- wrong in ten ways


def buckets_in_float32(q, k, v, table, max_distance=128):
    bias = table[buckets(distances(q, k), len(table), max_distance, single=True)].movedim(-1, 0)
    return finished(products(q, k) + bias, q, k, v)


def causal_top_left(q, k, v, causal=False):
    s = products(q, k)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return softmax(s) @ v


def clips(q, k, v, key_table, value_table):
    return shaw(q, k, v, key_table, value_table, zero=False)


def scale_missing(q, k, v, causal=False):
    return finished(q @ k.mT, q, k, v, causal=causal)


def scale_twice(q, k, v, causal=False):
    root = q.shape[-1] ** -0.5
    return torch.nn.functional.scaled_dot_product_attention(q * root, k, v, is_causal=causal)


def other_layout(q, k, v):
    return finished(products(turned(q, neighbours=True), turned(k, neighbours=True)), q, k, v)


def window_off_by_one(q, k, v, window=None, causal=False):
    if window is not None:
        window = window[0] - 1, window[1]
    return finished(products(q, k), q, k, v, causal=causal, window=window)


def swapped(q, k, v, content_bias, position_bias, rows):
    return conformer(q, k, v, position_bias, content_bias, rows)


def shift_keeps_its_first_row(q, k, v, content_bias, position_bias, rows):
    content = (q + content_bias[:, None]) @ k.mT
    x = (q + position_bias[:, None]) @ rows.permute(1, 2, 0)
    padded = torch.cat([torch.zeros_like(x[..., :1]), x], -1).flatten(-2)
    shifted = padded[..., : x.shape[-2] * x.shape[-1]].unflatten(-1, x.shape[-2:])[..., : k.shape[-2]]
    return finished((content + shifted) * q.shape[-1] ** -0.5, q, k, v)


def masked_late(q, k, v, mask=None):
    p = softmax(products(q, k))
    if mask is not None:
        p = p * mask if mask.dtype == torch.bool else p + mask
    return p @ v


def sums_in_half(q, k, v):
    """A loop over keys that adds up in the dtype of the operands."""
    s = products(q, k)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    out, total = torch.zeros_like(q @ v.mT @ v), torch.zeros_like(p[..., :1])
    for j in range(k.shape[-2]):
        out = out + p[..., j : j + 1] * v[..., j : j + 1, :]
        total = total + p[..., j : j + 1]
    return out / total
