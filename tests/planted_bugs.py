"""Plant one bug at a time in a copy of the package and see the suite fail: ``python tests/planted_bugs.py [NAME ...]``.

Exit code 1 if a bug survives; ``--out`` writes what caught each. `test_planted_bugs.py` checks that each one still
applies to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Bug(NamedTuple):
    """Replace `right` by `wrong`, once, in a file of the package."""

    name: str
    file: str
    right: str
    wrong: str


# fmt: off
BUGS = [
    Bug("index: sign of d", "_contract/index_maps.py", "distance = np.abs(d) if bidirectional", "d = -d; distance = np.abs(d) if bidirectional"),
    Bug("index: offset", "_contract/index_maps.py", "k_len, dtype=np.int64) - offset if", "k_len, dtype=np.int64) - abs(offset) if"),
    Bug("index: clip for zero", "_contract/index_maps.py", "np.where((d >= -k) & (d <= right), inside, -1)", "np.where((d >= -k - 1) & (d <= right), inside, -1)"),
    Bug("index: bucket off by one", "_contract/index_maps.py", 'distance, side="right")', 'distance, side="left")'),
    Bug("index: transposed window", "_contract/index_maps.py", "q[:, None] - k[None, :] + (size - 1)", "k[None, :] - q[:, None] + (size - 1)"),
    Bug("index: stride of the grid", "_contract/index_maps.py", "total * (2 * size - 1)", "total * (2 * size)"),
    Bug("index: wrapped row", "_contract/index_maps.py", "relative_positions(q_len, k_len, offset) - first", "relative_positions(q_len, k_len, offset) - first + 1"),
    Bug("shaw: scale dropped in lower", "schemes/shaw.py", "self._per_head(self.key_table) * site.dtype.type(site.scale)", "self._per_head(self.key_table)"),
    Bug("shaw: scale dropped in the formula", "schemes/shaw.py", '"...id,...ijd->...ij", q, a) * site.dtype.type(site.scale)', '"...id,...ijd->...ij", q, a)'),
    Bug("t5: transposed table", "schemes/t5.py", "return table.T[:, bucket][:, d - nearest]", "return table.T[:, bucket][:, d.T[::-1, ::-1].T - nearest]"),
    Bug("xl: u missing in lower", "schemes/transformer_xl.py", "content = q + u[:, None, :]", "content = q"),
    Bug("xl: first row of xlnet", "schemes/transformer_xl.py", '(0 if self.variant in ("xlnet", "xlnet_uni") else 1)', "1"),
    Bug("sinusoid: frequency", "schemes/sinusoidal.py", "(np.arange(dim) // 2) / dim", "(np.arange(dim) // 2) / (dim - 1)"),
    Bug("rotary: sign", "formulas/rotations.py", "[np.cos(angle), -np.sin(angle)]", "[np.cos(angle), np.sin(angle)]"),
    Bug("rotary: sign in lower", "schemes/rotary.py", "np.negative(sin, out=across[..., first])", "across[..., first] = sin"),
    Bug("rotary: positions of queries", "schemes/rotary.py", "self.positions[..., site.offset : site.offset + site.q_len], self.positions", "self.positions[..., : site.q_len], self.positions"),
    Bug("rotary: grouped frequencies", "schemes/rotary.py", "np.repeat(queries[0], groups, axis=-3), np", "np.concatenate([queries[0]] * groups, axis=-3), np"),
    Bug("rotary: gradient of frequencies", "schemes/rotary.py", "turned[..., first]) - product", "turned[..., first]) + product"),
    Bug("xpos: keys scaled like queries", "schemes/rotary.py", "np.exp((middle - columns)", "np.exp((columns - middle)"),
    Bug("axes: sections in turn", "formulas/rotary_axes.py", "axis + len(counts) * np.arange(pairs)", "axis + (len(counts) - 1) * np.arange(pairs)"),
    Bug("alibi: extra slopes", "schemes/alibi.py", "h - whole + 0.5", "h - whole + 1"),
    Bug("reference: window", "_dense/forward.py", "(d >= -problem.left)", "(d > -problem.left)"),
    Bug("reference: empty rows", "_dense/forward.py", "safe = np.where(top == -np.inf, s.dtype.type(0), top)", "safe = top"),
    Bug("terms: grouped heads", "_dense/from_terms.py", "np.arange(heads) // groups", "np.arange(heads) % x.shape[-3]"),
    Bug("check: overlap of out", "_contract/check.py", "np.may_share_memory(out, x)", "out is x"),
    Bug("plan: maps per batch item as a window", "kernels/_numba/plan.py", "if any(isinstance(term.index, Dense) and term.index.index.ndim > 2", "if any(isinstance(term.index, Dense) and term.index.index.ndim > 3"),
    Bug("plan: a mask's strides decide", "kernels/_numba/plan.py", "problem.mask_of_keys and", "mask.strides[-2] == 0 and"),
    Bug("problem: layouts decide how a BLAS adds", "_contract/problem.py", "= map(np.ascontiguousarray, (self.q, self.stored_k, self.stored_v))", "= self.q, self.stored_k, self.stored_v"),
    Bug("backward: unit of the lse", "kernels/_numba/__init__.py", "attention(problem, terms, out, lse, 1.0)", "attention(problem, terms, out, lse); lse /= LOG2"),
    Bug("kernel: a key beyond the band is read", "kernels/_numba/attend.py", "last = min(end, i0 + rows + p.offset + p.right)", "last = min(end + 1, p.k_len, i0 + rows + p.offset + p.right)"),
    Bug("plan: key lengths", "kernels/_numba/plan.py", "batches[KEY_END] = problem.key_lengths.ravel()", "batches[KEY_END] = np.minimum(problem.key_lengths.ravel() + 1, site.k_len)"),
    Bug("kernel: mask of a row inverted", "kernels/_numba/attend.py", "elif get(allowed, 0) == 0:", "elif get(allowed, 0) != 0:"),
    Bug("kernel: missing -inf", "kernels/_numba/attend.py", "fill_row(s, end, wide, MINUS_INFINITY)", "fill_row(s, cols, wide, MINUS_INFINITY)"),
    Bug("kernel: left edge of the window", "kernels/_numba/attend.py", "begin = min(max(q + p.offset - p.left - j0, 0), cols)", "begin = min(max(q + p.offset - p.left - j0 + 1, 0), cols)"),
    Bug("kernel: grouped heads", "kernels/_numba/attend.py", "h // p.v_group", "h % (p.heads // p.v_group)"),
    Bug("kernel: base of the lse", "kernels/_numba/attend.py", "math.log2(total)) * p.lse_unit", "math.log2(total))"),
    Bug("kernel: values that are not finite", "kernels/_numba/attend.py", "poisoned = not short and", "poisoned = cols < 0 and"),
    Bug("kernel: bins not rescaled", "kernels/_numba/attend.py", "scale_row(bins, bins, p.bins, get(fade, i))", "scale_row(bins, bins, p.bins, 1.0)"),
    Bug("kernel: dropout not rescaled", "kernels/_numba/attend.py", "scale_row(s, s, last_seen, p.keep_scale)", "scale_row(s, s, last_seen, 1.0)"),
    Bug("kernel: rows of a table that do not follow each other", "kernels/_numba/attend.py", "even = even and get(index, r0 + r)", "even = even or get(index, r0 + r)"),
    Bug("kernel: rows that come to a distance", "kernels/_numba/attend.py", "max(reach - c - width, 0)", "max(reach - c, 0)"),
    Bug("kernel: last distance", "kernels/_numba/attend.py", "p.offset + p.right + 1 - origin, 0)", "p.offset + p.right + 1 - width - origin, 0)"),
    Bug("kernel: first row of a panel", "kernels/_numba/attend.py", "max(j0 + c - p.offset - p.right - i0, 0)", "max(j0 + c - p.offset - p.right - i0 + 12, 0)"),
    Bug("kernel: last row of a panel", "kernels/_numba/attend.py", "j0 + c + width - p.offset + p.left - i0, low)", "j0 + c + width - 12 - p.offset + p.left - i0, low)"),
    Bug("kernel: last key of a strip", "kernels/_numba/attend.py", "i0 + i2 + p.offset + p.right - j0", "i0 + i2 + p.offset + p.right - j0 - 1"),
    Bug("kernel: products of grouped heads", "kernels/_numba/product.py", "h // m.x_group", "h % (m.heads // m.x_group)"),
    Bug("rel_shift: bytes behind the last vector", "kernels/_numba/shift.py", "v.loop(whole, size, 1, [], byte)", "v.loop(size, size, 1, [], byte)"),
    Bug("windows: last tile of rows", "kernels/_numba/tiles.py", 'return v.b.select(v.b.icmp_signed("<", i, last), i, last)', "return i"),
    Bug("windows: grouped heads", "kernels/_numba/window.py", "h // p.v_group * p.v_head", "h * p.v_head"),
    Bug("windows: bias of a head", "kernels/_numba/window.py", "h * p.bias_head + i0 * p.bias_row", "i0 * p.bias_row"),
    Bug("windows: mask's rows of a later block", "kernels/_numba/window.py", "h * p.mask_head + i0 * p.mask_row", "h * p.mask_head"),
    Bug("windows: values that are not finite", "kernels/_numba/window.py", "        if poisoned:", "        if cols < 0:"),
    Bug("windows: rows without keys", "kernels/_numba/window.py", "0.0 if best == MINUS_INFINITY else best", "best"),
    Bug("windows: keys beyond a band", "kernels/_numba/plan.py", "site.q_len - 1 + site.offset, site.k_len - 1 - site.offset", "site.q_len - 2 + site.offset, site.k_len - 2 - site.offset"),
    Bug("windows: last run", "kernels/_numba/window.py", "stop = min(start + p.run, p.stop)", "stop = start + p.run"),
    Bug("kernel: padding beside a window's keys", "kernels/_numba/attend.py", "p.bias_tail and j0 % width == 0 and", "p.bias_tail and"),
    Bug("kernel: exponential underflows early", "kernels/_numba/vectors.py", "self.const(1.0 - bias)", "self.const(-14.0)"),
    Bug("kernel: rel_shift's zero", "kernels/_numba/shift.py", "own = columns - rows + 1 + i", "own = columns - rows + i"),
    Bug("fit: heads of a group", "_contract/terms.py", "size, x.shape[axis] // size, *x.shape[axis + 1 :]).sum(axis=axis + 1)", "x.shape[axis] // size, size, *x.shape[axis + 1 :]).sum(axis=axis)"),
    Bug("gradient: dropout counted twice", "_dense/backward.py", "ds = dp - np.sum(p * dp", "ds = dp - np.sum(kept * dp"),
    Bug("gradient: survivors not rescaled", "_dense/backward.py", "            dp = dp * (problem.keep * site.dtype.type(problem.keep_scale))", "            dp = dp * problem.keep"),
    Bug("gradient: sign of the lse's", "_dense/backward.py", "ds = ds + grad_lse[..., None]", "ds = ds - grad_lse[..., None]"),
    Bug("gradient: vectors of values before dropout", "_dense/backward.py", "sums = index.sums(kept)", "sums = index.sums(p)"),
    Bug("shaw: scale dropped in lift", "schemes/shaw.py", "(grad.queries[0].weights * site.dtype.type(site.scale))", "grad.queries[0].weights"),
    Bug("shaw: left of the keys' table for values", "schemes/shaw.py", "self._map(self.value_table, self._value_zero, site)", "self._map(self.value_table, self._key_zero, site)"),
    Bug("xl: where xlnet_uni runs on", "schemes/transformer_xl.py", '"xlnet_uni": 1}', '"xlnet_uni": 2}'),
    Bug("xl: zero_triu takes the diagonal", "schemes/transformer_xl.py", "furthest = 0 if self.zero_triu", "furthest = -1 if self.zero_triu"),
    Bug("xl: gradient of u into v", "schemes/transformer_xl.py", '"v": fit(position.sum', '"v": fit(content.sum'),
    Bug("xl: gradient of the next query's row", "schemes/transformer_xl.py", "position[..., 1:, :] += np.asarray(grad.queries[1].query)[..., :-1, :] * scale", "position += np.asarray(grad.queries[1].query) * scale"),
    Bug("swin_v2: slope of the sigmoid", "schemes/swin_v2.py", "dz * (4 / np.cosh(z / 2) ** 2)", "dz * (8 / np.cosh(z / 2) ** 2)"),
    Bug("swin_v2: limit of the scale in lift", "schemes/swin_v2.py", "np.where(self.logit_scale.ravel() <= _LARGEST_SCALE, scale, 0)", "scale"),
    Bug("swin_v2: gradient along the vector", "schemes/swin_v2.py", "turned = grad - np.where(length > _LEAST_NORM, along, 0) * unit", "turned = grad"),
    Bug("swin_v2: axes of the window", "schemes/swin_v2.py", "np.divmod(np.arange(prod(2 * window - 1)), 2 * window[1] - 1)", "np.divmod(np.arange(prod(2 * window - 1)), 2 * window[0] - 1)"),
    Bug("beit: token to patch and back", "schemes/beit.py", "index[1:, 0] += 1", "index[0, 1:] += 1"),
    Bug("decomposed: ceil for floor", "schemes/decomposed.py", "else i * large // small + k_size - 1 - j", "else -(-i * large // small) + k_size - 1 - j"),
    Bug("decomposed: resized back in lift", "schemes/decomposed.py", 'resize_matrix(len(table), rows, "linear").T @ weights', 'resize_matrix(rows, len(table), "linear") @ weights'),
    Bug("neighborhood: window beyond the border", "schemes/neighborhood.py", "max(0, min(i // gap - k // 2, len(same) - k))", "max(0, i // gap - k // 2)"),
    Bug("irpe: queries and keys", "schemes/irpe.py", "where = index if of_key else mirrored", "where = mirrored if of_key else index"),
    Bug("irpe: ceil for the nearest", "schemes/irpe.py", "round(round(y, _DECIMALS))", "math.ceil(round(y, _DECIMALS))"),
    Bug("layout: top edge", "schemes/layout.py", "return edges[0], edges[3]", "return edges[0], edges[1]"),
    Bug("layout: map of another offset", "schemes/layout.py", "key = (site.q_len, site.offset)", "key = (site.q_len, 0)"),
    Bug("layout: scale dropped in lift", "schemes/layout.py", "term.table.T * factor for name", "term.table.T for name"),
    Bug("layout: floor for truncation", "schemes/layout.py", "return apart.astype(np.int64)", "return np.floor(apart).astype(np.int64)"),
    Bug("wavlm: gradient of a gate", "schemes/wavlm.py", "g * (s[..., 1] * c - 1)", "g * (s[..., 1] * c + 1)"),
    Bug("fire: eps inside the logarithm", "schemes/fire.py", "np.log1p(c * m) + self.eps", "np.log1p(c * m + self.eps)"),
    Bug("fire: gradient of c above alone", "schemes/fire.py", ".sum() + (by_below * m / (1 + c * m)).sum()", ".sum()"),
    Bug("fire: threshold of all queries", "schemes/fire.py", " * (m == level)).sum()", ").sum()"),
    Bug("sandwich: nemo's first wave", "schemes/sandwich.py", "np.arange(2, self.dim + 1, 2)", "np.arange(0, self.dim, 2)"),
    Bug("tisa: published distance", "schemes/tisa.py", "np.negative(d + 1)", "np.negative(d)"),
    Bug("tisa: gradient of the absolute value", "schemes/tisa.py", "-high * np.sign(sharp[..., 0])", "-high"),
    Bug("deberta: scale dropped in lift", "schemes/deberta.py", "grad.keys[0].weights * scale", "grad.keys[0].weights"),
    Bug("deberta: end of a bucket", "_contract/index_maps.py", 'max_position), n, side="left")', 'max_position), n, side="right")'),
    Bug("graph: virtual node last", "schemes/graph.py", "labels[..., 1:, 1:] = inner", "labels[..., :-1, :-1] = inner"),
    Bug("graph: label 0 for none", "schemes/graph.py", "bias = np.where((labels >= 0)", "bias = np.where((labels > 0)"),
    Bug("cope: keys to the right of the query", "schemes/cope.py", "site.offset + site.right", "site.offset"),
    Bug("cope: gates without the scale in lift", "schemes/cope.py", "gates * (1 - gates) * site.scale", "gates * (1 - gates)"),
    Bug("xpos: gamma of a pair", "schemes/rotary.py", "np.arange(pairs) + pairs * self.gamma)", "np.arange(pairs) + self.gamma)"),
    Bug("rotary: heads of a group in lift", "schemes/rotary.py", "heads, angle.shape[-3] // heads, length, pairs).sum(axis=2)", "angle.shape[-3] // heads, heads, length, pairs).sum(axis=1)"),
    Bug("rotary: partners", "formulas/rotations.py", "turning[..., :pairs], turning[..., pairs:]", "turning[..., ::2], turning[..., 1::2]"),
    Bug("axes: rows and columns of a grid", "formulas/rotary_axes.py", 'indexing="ij"', 'indexing="xy"'),
    Bug("axes: middle of a patch", "formulas/rotary_axes.py", "(2.0 * np.arange(size) + 1.0) / size", "2.0 * np.arange(size) / size"),
    Bug("frequencies: end of yarn's ramp", "formulas/frequencies.py", "math.ceil(ends[1])", "math.floor(ends[1])"),
    Bug("frequencies: turns for radians", "formulas/frequencies.py", "trained_length * plain / (2 * math.pi) - low", "trained_length * plain - low"),
    Bug("resize: edges for centres", "formulas/resize_tables.py", "(2 * np.arange(new) + 1) * old - new, 2 * new", "2 * np.arange(new) * old, 2 * new"),
    Bug("resize: the other cubic", "formulas/resize_tables.py", "_A = -0.75", "_A = -0.5"),
    Bug("bucket: a border's own distance", "formulas/buckets.py", "max_distance ** (steps + 1) * exact**wide <= n", "max_distance ** (steps + 1) * exact**wide < n"),
    Bug("layers: positions scaled too", "layers/encoding.py", "return encoding(x * factor, start, dropout=dropout, rng=rng)", "return (encoding(x, start, dropout=dropout, rng=rng) * factor)"),
    Bug("layers: rows of no position", "layers/encoding.py", "LearnedAbsolute(table[unused:])", "LearnedAbsolute(table)"),
    Bug("layers: channels of a head", "layers/linear.py", "heads, x.shape[-1] // heads).swapaxes(-3, -2)", "x.shape[-1] // heads, heads).swapaxes(-1, -2).swapaxes(-3, -2)"),
    Bug("layers: cached keys last", "layers/linear.py", "np.concatenate([self.key, key], axis=-2)", "np.concatenate([key, self.key], axis=-2)"),
    Bug("layers: row of zero in reverse", "layers/multihead.py", "left=len(table) // 2 - 1)", "left=len(table) // 2)"),
    Bug("layers: scale of T5", "layers/multihead.py", 'scale=1.0 if format == "t5" else None', "scale=None"),
    Bug("layers: u and v", "layers/relative.py", "for name in (names.u, names.v)", "for name in (names.v, names.u)"),
    Bug("layers: outermost shared table", "layers/state.py", "range(len(parts), -1, -1)", "range(len(parts) + 1)"),
    Bug("layers: axes of the partition", "layers/swin.py", "(0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)", "(0, *range(2 * n - 1, 0, -2), *range(2, 2 * n + 1, 2), 2 * n + 1)"),
    Bug("layers: region of the mask", "layers/swin.py", "np.arange(g) >= g - s", "np.arange(g) > g - s"),
    Bug("layers: sign of the shift", "layers/swin.py", 'sign = 1 if check.flag("reverse", reverse) else -1', 'sign = -1 if check.flag("reverse", reverse) else 1'),
    Bug("layers: order of the padding", "layers/swin.py", 'self.pad_order == "pad_then_shift"', 'self.pad_order != "pad_then_shift"'),
    Bug("layers: map as large as the window", "layers/swin.py", "fits = [g <= w", "fits = [g < w"),
    Bug("layers: survivors of the probabilities returned", "layers/window.py", "copy.deepcopy(rng)", "copy.copy(rng)"),
    Bug("layers: output of the block", "layers/window.py", '_INSIDE = ("attn.", "attention.", "")', '_INSIDE = ("", "attn.", "attention.")'),
    Bug("backward: delta dropped", "kernels/_numba/backward.py", "get(pointer_like(base, e.delta), row))", "get(pointer_like(base, e.delta), row) * 0.0)"),
    Bug("backward: origin of the diagonals", "kernels/_numba/backward.py", "task * e.diag_task + j0 - q + p.q_len - 1", "task * e.diag_task + j0 - i + p.q_len - 1"),
    Bug("backward: skewed row", "kernels/_numba/backward.py", "origin = j0 - i0 - (block - 1) + p.q_len - 1", "origin = j0 - i0 - block + p.q_len - 1"),
    Bug("backward: survivors not rescaled", "kernels/_numba/backward.py", "scale_row(s, s, cols, p.keep_scale)", "scale_row(s, s, cols, 1.0)"),
    Bug("backward: left edge of the window", "kernels/_numba/backward.py", "first + p.offset - p.left)", "first + p.offset - p.left + 1)"),
    Bug("backward: keys' sums by query", "kernels/_numba/backplan.py", "(0, heads * head, head, 0, rows), 1, 0)", "(0, heads * head, head, rows, 0), 1, 0)"),
    Bug("backward: row 0 of a map", "_contract/terms.py", "there = rows[starts] >= 0", "there = rows[starts] > 0"),
    Bug("backward: columns of the second skewed term", "kernels/_numba/backplan.py", "slice(skew_at, skew_at + depth)", "slice(0, depth)"),
    Bug("backward: sign of the lse's gradient", "kernels/_numba/backplan.py", "delta - grad_lse", "delta + grad_lse"),
    Bug("decode: bias of the group's first head", "kernels/_numba/decode.py", "own = at(bias, g * p.bias_head)", "own = at(bias, 0 * p.bias_head)"),
    Bug("decode: keys of the last part", "kernels/_numba/decode.py", "(end - begin + e.parts - 1) // e.parts", "(end - begin) // e.parts"),
    Bug("decode: parts not rescaled", "kernels/_numba/decode.py", "np.matmul(share[:, None], sums)[:, 0]", "sums.sum(axis=1)"),
    Bug("decode: last key of the window", "kernels/_numba/decode.py", "q_len + p.offset + p.right)", "q_len - 1 + p.offset + p.right)"),
    Bug("decode: values before the window", "kernels/_numba/decode.py", "open_ = j0 >= p.q_len - 1 + p.offset - p.left", "open_ = j0 >= p.offset - p.left"),
    Bug("memory: keys behind the last one", "kernels/_numba/attend.py", "end = min(last, limit)", "end = limit"),
    Bug("memory: zeros for the last panel", "kernels/_numba/plan.py", "row = np.zeros(-(-k_len // panel) * panel, dtype)", "row = np.zeros(k_len, dtype)"),
    Bug("memory: sums behind the last distance", "kernels/_numba/backplan.py", "(tasks, span + ROW_QUANTUM, s_width)", "(tasks, span, s_width)"),
    Bug("memory: end of a buffer", "kernels/_numba/backward.py", "dq = dv + BLOCK_KEYS * v_width", "dq = dv + BLOCK_KEYS * v_width - 8"),
    Bug("memory: scores of eight rows", "kernels/_numba/decode.py", "values = scores + MOST_ROWS * BLOCK_KEYS", "values = scores + (MOST_ROWS - 1) * BLOCK_KEYS"),
    Bug("cuda: first key of a band", "kernels/_cuda/attend.py", "key = max(0, first + call.offset - call.left)", "key = max(0, first + call.offset - call.left + 1)"),
    Bug("cuda: last key of a band", "kernels/_cuda/attend.py", "stop = min(end, last - 1 + call.offset + call.right + 1)", "stop = min(end, last - 1 + call.offset + call.right)"),
    Bug("cuda: tiles that a band cuts", "kernels/_cuda/attend.py", "j + rows - 1 - i <= call.right", "j - i <= call.right"),
    Bug("cuda: sum not rescaled", "kernels/_cuda/attend.py", "total *= factor", "total *= one"),
    Bug("cuda: excluded values multiplied", "kernels/_cuda/attend.py", "careful = 1", "careful = 0"),
    Bug("cuda: channels of the second part", "kernels/_cuda/attend.py", "d = part * width + (c // 4) * 32 + across + c % 4", "d = (c // 4) * 32 + across + c % 4"),
    Bug("cuda: strip one step off", "kernels/_cuda/tile.py", "strip[(y - x if keys_first else x - y) + rows - 1]", "strip[(y - x if keys_first else x - y) + rows - 2]"),
    Bug("cuda: row 0 of a map left out", "kernels/_cuda/tile.py", "if row >= 0:\n                            scores", "if row > 0:\n                            scores"),
    Bug("cuda: skew one step off", "kernels/_cuda/tile.py", "across + c % 4 + half - rows + 1 + x", "across + c % 4 + half - rows + x"),
    Bug("cuda: band's end in a tile", "kernels/_cuda/tile.py", "distance > call.right:", "distance >= call.right:"),
    Bug("cuda: ranges not rescaled", "kernels/_cuda/decode.py", "total += own * share", "total += own"),
    Bug("cuda: lanes not rescaled", "kernels/_cuda/decode.py", "total = sums[n] * factors[n // LANES]", "total = sums[n]"),
    Bug("cuda: step to the next outer item", "kernels/_cuda/product.py", "x_at += call.a_outer - k * call.a_inner", "x_at += call.a_outer"),
    Bug("cuda: first part of a split sum", "kernels/_cuda/product.py", "for part in range(call.parts):", "for part in range(1, call.parts):"),
    Bug("cuda: dropped probabilities' gradient", "kernels/_cuda/backtile.py", "ds = p * delta if p < zero", "ds = -p * delta if p < zero"),
    Bug("cuda: gap after the zero", "kernels/_cuda/shift.py", "(0 if at < own else gap)", "0"),
    Bug("cuda: ties of bfloat16", "kernels/_cuda/intrinsics.py", "bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))", "bits + np.uint32(0x8000)"),
    Bug("cuda: steps of broadcast axes", "kernels/_cuda/operand.py", "kept = (0 if n == 1 else step for", "kept = (step for"),
    Bug("cuda: pairs of the interleaved layout", "kernels/_cuda/rotate.py", "first, second = 2 * p, 2 * p + 1", "first, second = 2 * p + 1, 2 * p"),
    Bug("cuda: distance 0 of a strip", "kernels/_cuda/plan.py", "return self.data.add(total) + self.site.q_len - 1,", "return self.data.add(total) + self.site.q_len,"),
    Bug("cuda: heads that share a key", "kernels/_cuda/backsums.py", "at = n // step * group * step + n % step", "at = n // step * step + n % step"),
    Bug("testing: no worse the wrong way", "testing/compare.py", "error > factor * allowed + floor", "allowed > factor * error + floor"),
    Bug("testing: NaN compares well", "testing/compare.py", "np.where(np.isnan(ratio), np.inf, ratio)", "np.where(np.isnan(ratio), 0.0, ratio)"),
    Bug("testing: tolerance of float32 for all", "testing/compare.py", 'eps = EPS["float32"] if half else EPS[name]', 'eps = EPS["float32"]'),
    Bug("testing: causal case sees all", "testing/cases.py", 'kept["causal"] = True', 'kept["causal"] = False'),
    Bug("testing: a case's own arguments", "testing/cases.py", 'for name in ("scale", "offset") if', 'for name in ("offset",) if'),
    Bug("testing: tolerance of the wrong precision", "testing/golden.py", 'entry["atol_float64" if precise else "atol"]', 'entry["atol"]'),
    Bug("testing: checksum not looked at", "testing/golden.py", 'if _file(data) != {"bytes": expected["bytes"], "sha256": expected["sha256"]}:', 'if len(data) != expected["bytes"]:'),
    Bug("testing: tolerance of a sum for each element", "testing/records.py", "largest = max(1.0, float(np.abs(value).max(initial=0.0)))", "largest = max(1.0, float(np.abs(value).sum()))"),
    Bug("testing: arrays by columns", "testing/files.py", "(x.dtype, x.shape) != (dtype, shape) or not x.flags.c_contiguous", "(x.dtype, x.shape) != (dtype, shape)"),
    Bug("npz: order of the axes", "_files/npz.py", 'order="F" if by_columns else "C"', 'order="C"'),
    Bug("npz: what compressed members may unpack to", "_files/npz.py", "if total > limit:", "if total > 1000 * limit:"),
    Bug("npz: names that are there twice", "_files/npz.py", "or name in names", "or name in ()"),
    Bug("safetensors: tensors that overlap", "_files/safetensors.py", "if entry.start != end:", "if entry.start > end:"),
    Bug("safetensors: files that change", "_files/safetensors.py", "if _version(os.fstat(file.fileno())) != self._version:", "if False:"),
    Bug("reading: pipes", "_files/untrusted.py", "if stat.S_ISREG(mode):", "if not stat.S_ISDIR(mode):"),
    Bug("reading: keys given twice", "_files/untrusted.py", "if len(found) != len(pairs):", "if len(found) > len(pairs):"),
    Bug("testing: layers on one backend", "testing/functions.py", 'chosen = self.then is not None or "backend"', 'chosen = "backend"'),
    Bug("parts: bias of the first heads", "distributed/slicing.py", "return x if len(x) == 1 else x[heads]", "return x[: heads.stop - heads.start]"),
    Bug("parts: keys that exist", "distributed/slicing.py", "np.clip(lengths - keys.start, 0", "np.clip(lengths, 0"),
    Bug("parts: a scheme that computes with keys", "distributed/slicing.py", "    if depends:\n", "    if scheme.content:\n"),
    Bug("merge: unweighted", "distributed/merging.py", "merged + share * out", "merged + out"),
    Bug("merge: a part without keys", "distributed/merging.py", "np.isneginf(own)[..., None]", "np.isnan(own)[..., None]"),
    Bug("parts: offset of the queries", "_contract/problem.py", "site.offset + self.queries.start - self.keys.start", "site.offset - self.keys.start"),
    Bug("parts: a distance too early", "_contract/terms.py", "first = keys.start - queries.stop + q_len", "first = keys.start - queries.start"),
    Bug("fire: place of a part's queries", "schemes/fire.py", "cut._first_key = part.keys.start", "cut._first_key = 0"),
    Bug("xl: rows of a part", "schemes/transformer_xl.py", "cut.rows, cut._row = self.rows[low : high + 1, part.heads], own - low", "cut.rows, cut._row = self.rows[low : high + 1, part.heads], own"),
    Bug("jobs: steps of values", "kernels/_numba/job.py", "k.dtype.char, v.strides, v.dtype.char)", "k.dtype.char, v.dtype.char)"),
    Bug("jobs: factor on the scores", "kernels/_numba/job.py", "site.v_dim, site.offset, site.scale)", "site.v_dim, site.offset)"),
    Bug("jobs: maps by pair", "kernels/_numba/job.py", "t.index.index.ndim if isinstance(t.index, Dense) else 0", "0"),
    Bug("jobs: lengths of keys", "kernels/_numba/job.py", "or problem.key_lengths is not None or problem.keep", "or problem.keep"),
    Bug("jobs: threads", "kernels/_numba/job.py", "site.dtype.char, no_lse, threads, maps)", "site.dtype.char, no_lse, maps)"),
    Bug("jobs: biases of the first call", "kernels/_numba/plan.py", "        if self.terms.tables:\n            self._bias()\n", ""),
    Bug("jobs: what is gathered", "kernels/_numba/job.py", 'and not planner.fields["add_count"] and', "and"),
    Bug("jobs: items of a batch", "kernels/_numba/job.py", " and planner.count <= MOST_ITEMS:", ":"),
    Bug("layout: a part's tokens", "schemes/layout.py", "cut._positions = at if", "cut._positions = np.arange(len(at)) if"),
    Bug("testing: forgotten precision", "testing/arguments.py", 'value.astype(dtype) if value.dtype.kind == "f" or', 'value if value.dtype.kind == "f" or'),
]
# fmt: on

# What most likely notices a bug in a file, in the order to be run: test files, some of them with a word for pytest's -k.
# The rest of the suite runs only if this passes.
FIRST = {
    "formulas/rotary_axes.py": "schemes_rotary_positions schemes_rotary",
    "formulas/buckets.py": "index schemes_tables seed_formulas",
    "_contract/check.py": "faults:row_23 bad_input faults",
    "_dense/forward.py": "faults:row_19 faults schemes",
    "distributed/merging.py": "distributed",
    "distributed/slicing.py": "distributed",
    "formulas/frequencies.py": "schemes_rotary schemes_rotary_positions",
    "_dense/backward.py": "gradients:option gradients",
    "_contract/index_maps.py": "index schemes schemes_bias schemes_vectors",
    "kernels/_numba/__init__.py": "faults:row_09 faults",
    "kernels/_numba/attend.py": "interpreted/attention:each_kind faults equivalence kernels:next_query kernels",
    "kernels/_numba/backplan.py": "interpreted/backward:each_kind gradients:numba terms:backward",
    "kernels/_numba/backward.py": "interpreted/backward:each_kind gradients:numba terms:backward",
    "kernels/_numba/decode.py": "interpreted/others:decoding decode faults",
    "kernels/_numba/job.py": "jobs",
    "kernels/_numba/plan.py": "jobs interpreted/others:windows kernels:bands faults equivalence",
    "kernels/_numba/shift.py": "rel_shift",
    "kernels/_numba/vectors.py": "kernels faults",
    "kernels/_numba/product.py": "equivalence terms faults",
    "kernels/_numba/tiles.py": "kernels:windows kernels",
    "kernels/_numba/window.py": "kernels:windows kernels",
    "_dense/from_terms.py": "schemes equivalence",
    **{
        f"kernels/_cuda/{name}.py": tests
        for name, tests in {
            "attend": "cuda/attention cuda/properties cuda/backward",
            "backsums": "cuda/resident cuda/backward",
            "backtile": "cuda/backward:dropout cuda/backward",
            "decode": "cuda/decode",
            "intrinsics": "cuda/operand cuda/arrays",
            "operand": "cuda/operand cuda/arrays",
            "plan": "cuda/attention:t5 cuda/attention",
            "product": "cuda/product",
            "rotate": "cuda/resident cuda/operand cuda/arrays",
            "shift": "cuda/shift cuda/attention:rel_shift",
            "tile": "cuda/attention:t5 cuda/attention",
        }.items()
    },
    "layers/encoding.py": "layers",
    "layers/linear.py": "layers",
    "layers/multihead.py": "layers layers_state",
    "layers/relative.py": "layers layers_state",
    "layers/state.py": "layers_state layers",
    "layers/swin.py": "layers_window",
    "layers/window.py": "layers_window",
    "_files/npz.py": "bad_files cli",
    "_contract/problem.py": "distributed faults:row_37 faults",
    "_files/untrusted.py": "bad_files",
    "formulas/resize_tables.py": "schemes_windows",
    "formulas/rotations.py": "schemes_rotary",
    "schemes/alibi.py": "schemes_bias",
    "schemes/beit.py": "schemes_windows",
    "schemes/cope.py": "schemes_cope gradients:cope",
    "schemes/deberta.py": "schemes_vectors:deberta gradients:deberta",
    "schemes/decomposed.py": "schemes_windows gradients:decomposed",
    "schemes/fire.py": "schemes_curves gradients:fire distributed:fire",
    "schemes/graph.py": "schemes_vectors:graph schemes_vectors",
    "schemes/irpe.py": "schemes_grids",
    "schemes/layout.py": "schemes_tables gradients:layout distributed:layout",
    "schemes/neighborhood.py": "schemes_grids",
    "schemes/rotary.py": "schemes_rotary schemes_rotary_positions gradients",
    "schemes/sandwich.py": "schemes_curves",
    "schemes/shaw.py": "schemes schemes_vectors:shaw gradients:shaw",
    "schemes/sinusoidal.py": "schemes",
    "schemes/swin_v2.py": "schemes_windows gradients:swin_v2",
    "schemes/t5.py": "schemes seed_formulas",
    "schemes/tisa.py": "schemes_curves gradients:tisa",
    "schemes/transformer_xl.py": "schemes schemes_vectors:transformer_xl gradients:transformer_xl distributed:transformer_xl",
    "schemes/wavlm.py": "schemes_tables gradients:wavlm",
    "_contract/terms.py": "terms gradients:option gradients distributed",
    "_files/safetensors.py": "bad_files layers_state",
    "testing/arguments.py": "testing:gradient testing:arguments vectors",
    "testing/cases.py": "testing cli",
    "testing/compare.py": "testing vectors",
    "testing/files.py": "vectors:archives vectors",
    "testing/functions.py": "vectors:what_is_run vectors",
    "testing/golden.py": "vectors:record vectors:missing vectors",
    "testing/records.py": "vectors:roundings vectors",
}
# The suite, the quickest files first; "faults" is a folder.
TESTS = """
    index rel_shift schemes schemes_rotary seed_formulas terms schemes_bias schemes_windows schemes_curves schemes_cope
    schemes_grids schemes_tables schemes_vectors schemes_rotary_positions layers layers_state layers_window bad_input
    faults testing testing_examples mpmath equivalence decode jobs distributed vectors gradients cli kernels stateful bad_files
"""
# What says nothing of numbers.
OTHERS = """
    asv cli_help completeness cuda determinism distributed_cluster docs gpu_script imports interop pictures
    planted_bugs plot promises readme soak supply_chain
"""
# Kernels of the CPU without a compiler; those that name them first.
INTERPRETED = "attention backward memory others"
# In the simulator; of other files they say nothing.
SIMULATED = "attention arrays backward decode operand product properties resident shift"

# One thread for products of matrices, because the operands are small, and the same drawn examples each time.
QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "ci"}
COMMAND = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-x",
    "--no-header",
    "--tb=no",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow and not stress",
)


def file_of(name: str) -> str:
    """Path of a test file, or of the folder of faults."""
    if name == "faults":
        return "tests/faults"
    folder, _, own = name.rpartition("/")
    return f"tests/{folder}/test_{folder}_{own}.py" if folder else f"tests/test_{name}.py"


def failure(copy: Path, kernels: Path, tests: Iterable[str]) -> str | None:
    """The first of these tests that fails in a copy, or how the run ended; None if all pass."""
    tests = list(tests)
    environment = os.environ | QUIET | {"RELPOS_CACHE_DIR": str(kernels), "PYTHONPATH": str(copy)}
    if tests[0].startswith("tests/cuda/"):
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    try:
        result = subprocess.run(
            [*COMMAND, *tests], cwd=copy, env=environment, check=False, capture_output=True, text=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return "the suite hangs"
    if result.returncode < 0:
        return f"the suite ends with signal {-result.returncode}"
    for line in result.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" ", 1)[1].split(" - ")[0]
    if result.returncode:
        sys.exit(f"the suite did not run\n{result.stdout}{result.stderr}")
    return None


def caught(bug: Bug, clean: Path, kernels: Path) -> str | None:
    """What notices the bug."""
    with tempfile.TemporaryDirectory(dir=clean.parent) as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(clean, copy)
        return noticed_in(copy, bug, kernels)


def noticed_in(copy: Path, bug: Bug, kernels: Path) -> str | None:
    """The same in a copy that nobody else uses."""
    path = copy / "relpos_np" / bug.file
    path.write_text(path.read_text(encoding="utf-8").replace(bug.right, bug.wrong, 1), encoding="utf-8")
    first = [name.split(":") for name in FIRST[bug.file].split()]
    rest = [name for name in TESTS.split() if [name] not in first]
    runs = [[file_of(name), *(f"-k{word}" for word in words)] for name, *words in first]
    if "_cuda" not in bug.file:
        runs.append([file_of(name) for name in rest])
    return next((found for tests in runs if (found := failure(copy, kernels, tests))), None)


def main() -> int:
    """Plant the bugs named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Plant bugs one at a time, and see the suite catch each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs; default all")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    chosen = [bug for bug in BUGS if not args.names or bug.name in args.names]
    if len(chosen) < len(args.names):
        parser.error(f"no such bugs: {set(args.names) - {bug.name for bug in BUGS}}")
    with tempfile.TemporaryDirectory() as folder:
        # What is edited meanwhile does not matter.
        clean, kernels = Path(folder) / "clean", Path(folder) / "kernels"
        for name in ("relpos_np", "tests", "docs"):
            shutil.copytree(ROOT / name, clean / name, ignore=shutil.ignore_patterns("__pycache__", "parity"))
        shutil.copy(ROOT / "pyproject.toml", clean)

        def plant(bug: Bug) -> str | None:
            started = time.perf_counter()
            by = caught(bug, clean, kernels)
            took = time.perf_counter() - started
            print(f"caught    {bug.name}: {by}" if by else f"SURVIVED  {bug.name}", f"({took:.0f} s)", flush=True)
            return by

        with ThreadPoolExecutor(args.jobs) as pool:
            found = {bug.name: by for bug, by in zip(chosen, pool.map(plant, chosen), strict=True)}
        # A test that fails anyway notices nothing.
        noticed = {by for by in found.values() if by and by.startswith("tests/")}
        simulated = {name for name in noticed if name.startswith("tests/cuda/")}
        runs = [sorted(names) for names in (noticed - simulated, simulated) if names]
        broken = next((failed for names in runs if (failed := failure(clean, kernels, names))), None)
    alive = [name for name, by in found.items() if not by]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} planted bugs caught")
    if broken:
        print(f"but without any bug there is a failure as well: {broken}")
    if args.out:
        date = datetime.now(UTC).date().isoformat()
        record = {"date": date, "bugs": len(chosen), "survived": alive, "fails_anyway": broken, "caught_by": found}
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if alive or broken else 0


if __name__ == "__main__":
    sys.exit(main())
