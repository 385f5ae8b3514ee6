"""Beyond examples: bugs that show only at sizes past those of the examples, each with a call that shows it.

``python -m tests.mutation.shown`` makes the calls.
"""

from tests.mutation.anchors import Bug

# fmt: off
BEYOND: list[Bug] = [
    Bug("beyond: key lengths of the last of four items", "kernels._numba.masks:add_masks",
        "problem.key_lengths.ravel()",
        "np.where(np.arange(call.count) == (call.count - 1 if call.count >= 4 else -1), site.k_len, problem.key_lengths.ravel())",
        "same(draw(5, heads=2, q_len=20, k_len=30), key_lengths=[30, 3, 4, 5, 6])"),
    Bug("beyond: parts of the keys from the 33rd on", "kernels._numba.decode:merge",
        "top.max(axis=1, keepdims=True)", "top[:, :32].max(axis=1, keepdims=True)",
        "x = draw(1, heads=1, q_len=1, k_len=60_000); x['k'][..., -1, :] = 2000 * x['q'][..., 0, :]; same(x, scale=1.0)"),
    Bug("beyond: gradient of the last of more than 32 buckets", "schemes.t5:T5.lift",
        "grad.tables[0].table.T", "grad.tables[0].table.T * (np.arange(len(self.table)) < max(len(self.table) - 1, 32))[:, None]",
        "g = grads(draw(1, heads=2, q_len=300), position=rp.T5(table(40, 2))); close(g.position['table'].sum(axis=0), 0)"),
    Bug("beyond: third batch axis", "kernels._numba.arrays:batch_offsets",
        "zip(x.shape[:batch_axes], strides(x)[:batch_axes], strict=True)",
        "zip(x.shape[:batch_axes], [*strides(x)[: min(batch_axes, 2)], *[0] * (batch_axes - 2)], strict=True)",
        "same(draw(2, 3, 2, heads=2, q_len=20))"),
    Bug("beyond: a workspace 64 bytes too small", "kernels._numba.launch:_workspace",
        "room < size", "room + 64 < size",
        "from relpos_np.kernels._numba import launch\n"
        "from relpos_np.kernels._numba.arrays import address_of\n"
        "for n in range(1, 200):\n"
        "    launch._workspace(64 * n)\n"
        "    kept, address = launch._workspace(64 * n + 64)\n"
        "    assert address + 64 * n + 64 <= address_of(kept) + kept.nbytes"),
    Bug("beyond: bias of heads from 33 on", "kernels._numba.pieces:head_of",
        "h * p.bias_head", "h % 32 * p.bias_head",
        "same(draw(1, heads=34, q_len=20), position=rp.T5(table(32, 34)))"),
    Bug("beyond: left edge of windows past 192 keys", "kernels._numba.scores:complete_scores",
        "q + p.offset - p.left - j0", "q + p.offset - p.left - j0 - p.left // 193",
        "same(draw(1, heads=1, q_len=400), window=(200, 0))"),
    Bug("beyond: a single key after the last whole block", "kernels._numba.pack:pack_panels",
        "min(last, limit)", "min(last, limit - (1 if first > 0 and limit - first == 1 else 0))",
        "same(draw(1, heads=1, q_len=20, k_len=385))"),
    Bug("beyond: ten times as many queries as keys", "_contract.terms:Toeplitz.dense",
        "np.arange(k_len) - np.arange(q_len)[:, None] + q_len - 1",
        "np.arange(k_len) - np.arange(q_len)[:, None] + q_len - 1 - (q_len > 10 * k_len)",
        "same(draw(1, heads=2, q_len=50, k_len=4), 'terms', position=rp.T5(table(32, 2)), offset=0)"),
    Bug("beyond: rows of a map past 65,535", "_contract.index_maps:_toeplitz",
        "lookup.astype(np.int32)", "np.where(lookup < 65536, lookup, lookup - 65536).astype(np.int32)",
        "same(draw(1, heads=1, q_len=1, k_len=66_000, dim=4), 'terms', position=rp.Shaw(table(66_001, 4), left=66_000))"),
    Bug("beyond: groups of more than four heads", "_dense.from_terms:_heads",
        "np.arange(heads) // groups", "np.arange(heads) // min(groups, 4) % x.shape[-3]",
        "same(draw(1, heads=12, kv_heads=2, q_len=9), 'terms')"),
    Bug("beyond: rotary pairs from 65 on", "_contract.turned:turn_pairs",
        "across[..., first] = -sin", "across[..., first] = -np.where(np.arange(sin.shape[-1]) < 64, sin, 0)",
        "same(draw(1, heads=1, q_len=9, dim=160), 'terms', position=rp.Rotary(160))"),
    Bug("beyond: a fourth table", "_contract.terms:Terms.__add__",
        "self.tables + other.tables", "(self.tables + other.tables)[:3]",
        "same(draw(1, heads=2, q_len=9), 'terms', position=tuple(rp.T5(table(8, 2), max_distance=9) for _ in range(4)))"),
    Bug("beyond: a mask with rows for heads and not for items", "kernels._numba.masks:add_masks",
        "f['mask_head'], f['mask_row'], f['mask_col'] = strides(mask)[-3:]",
        "f['mask_head'], f['mask_row'], f['mask_col'] = strides(mask)[-3:]\nif call.count > 1 and mask.strides[0] == 0 and mask.strides[-2]:\n    f['mask_head'] = 0",
        "x = draw(3, heads=4, q_len=40, k_len=50); same(x, mask=np.random.default_rng(1).random((4, 40, 50)) < 0.7)"),
    Bug("beyond: more than eight parts to merge", "distributed.merging:merge",
        "sum(weights[1:], weights[0])", "sum(weights[1:8], weights[0])",
        "from relpos_np.distributed import merge\n"
        "parts = [(np.full((1, 1), float(n)), np.zeros(1)) for n in range(10)]\n"
        "close(merge(*parts)[0], 4.5)"),
    Bug("beyond: gradients of heads in more than 64 items", "kernels._numba.gradients:Sums._by_head",
        "split.sum(axis=(0, 2), dtype=np.float64)", "split[:64].sum(axis=(0, 2), dtype=np.float64)",
        "slopes(draw(66, heads=2, q_len=9), position=rp.T5(table(8, 2), max_distance=9))"),
    Bug("beyond: gradients summed over more than 64 items", "_contract.terms:fit",
        "x.sum(axis=tuple(range(x.ndim - len(shape))), dtype=wide)", "x[:64].sum(axis=tuple(range(x.ndim - len(shape))))",
        "x, at = draw(66, heads=2, q_len=9), rp.T5(table(8, 2), max_distance=9)\n"
        "whole = grads(x, 'numpy', position=at).position['table']\n"
        "halves = [{name: y[part] for name, y in x.items()} for part in (slice(33), slice(33, None))]\n"
        "close(whole, sum(grads(half, 'numpy', position=at).position['table'] for half in halves))"),
    Bug("beyond: gradients of rows from 512 on", "_contract.terms:by_row",
        "rows[starts] >= 0", "(rows[starts] >= 0) & (rows[starts] < 512)",
        "slopes(draw(1, heads=1, q_len=320, dim=8), position=rp.Shaw(table(601, 8)))"),
    Bug("beyond: borders of buckets from 1,024 on", "_contract.index_maps:t5_thresholds",
        "takewhile(lambda n: n <= furthest, further)", "(n + (n >= 1024) for n in further)",
        "same(draw(1, heads=2, q_len=4, k_len=2000), 'terms', position=rp.T5(table(32, 2), max_distance=4096))"),
    Bug("beyond: grids of more than 16", "_contract.index_maps:grid_map",
        "total * (2 * size - 1)", "total * (2 * min(size, 16) - 1)",
        "same(draw(1, heads=1, q_len=17 * 17, dim=4), 'terms', position=rp.WindowBias(table(33 * 33, 1), (17, 17)))"),
    Bug("beyond: positions from 65,536 on", "formulas.rotations:rotary_matrices",
        "np.asarray(positions, np.float64)", "np.fmod(np.asarray(positions, np.float64), 65536)",
        "same(draw(1, heads=1, q_len=9, dim=8), 'terms', position=rp.Rotary(8, positions=np.arange(65_531, 65_540)))"),
    Bug("beyond: slopes of more than 96 heads", "schemes.alibi:ALiBi.lower",
        "h - whole + 0.5", "np.minimum(h - whole, 31) + 0.5",
        "same(draw(1, heads=112, q_len=5, dim=4), 'terms', position=rp.ALiBi())"),
    Bug("beyond: a third skewed term", "kernels._numba.skew:add_skewed",
        "len(terms) == 1", "len(terms) != 2",
        "same(draw(1, heads=1, q_len=30, dim=8), position=tuple(rp.Shaw(table(61, 8)) for _ in range(3)))"),
    Bug("beyond: bins of a fourth value term", "kernels._numba.gather:value_records",
        "bins += rows", "bins += rows if len(out) < 3 else 0",
        "same(draw(1, heads=1, q_len=30, dim=8), position=tuple(rp.Shaw(value_table=table(5 + 2 * n, 8)) for n in range(4)))"),
    Bug("beyond: dropout of items from 65 on", "kernels._numba.attend:weigh_row",
        "((head.b * p.heads + head.h) * p.q_len + q) * p.k_len + tile.j0", "((head.b % 64 * p.heads + head.h) * p.q_len + q) * p.k_len + tile.j0",
        "same(draw(70, heads=1, q_len=12), dropout=0.5)"),
    Bug("beyond: parts of a third batch axis", "_contract.terms:of_batch",
        "batch[len(batch) - lead:]", "batch[:lead] if len(batch) > 2 else batch[len(batch) - lead:]",
        "from relpos_np._contract.terms import of_batch\n"
        "close(of_batch(np.arange(24.0).reshape(4, 6), 1, (slice(0, 2), slice(0, 1), slice(2, 4))), np.arange(12.0, 24).reshape(2, 6))"),
    Bug("beyond: distances past 4,096", "schemes.kerple:KERPLE.lower",
        "np.maximum(d, -d).astype(np.float64)", "np.minimum(np.maximum(d, -d), 4096).astype(np.float64)",
        "same(draw(1, heads=2, q_len=2, k_len=5000), 'terms', position=rp.KERPLE(np.ones(2), np.ones(2)))"),
]
# fmt: on
