"""What positions and masks add to a tile of scores, for every kernel that streams."""

from __future__ import annotations

from typing import Any

from relpos_np.kernels._numba.forward_pass.pack import pack_indexed
from relpos_np.kernels._numba.forward_pass.work import (
    LOG2E,
    MINUS_INFINITY,
    PANEL_VECTORS,
    SCORE_ROWS,
    least_mask,
    round_up,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.rows import (
    add_constant,
    add_mask,
    add_row,
    at,
    bytes_,
    cap_row,
    fill_row,
    get,
    integers,
    lanes_of,
    longs,
    mask_row,
    max_row,
    pointer_like,
    put,
    scale_row,
    shut_row,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS
from relpos_np.kernels._numba.simd.tiles import pair_panel, score_panel


@helper
def score_plain(a: Any, lda: int, b: Any, depth: int, c: Any, stride: int, rows: int, cols: int) -> None:
    """`score_panel` as a function, so that its callers share one copy of the code."""
    score_panel(a, lda, b, depth, c, stride, rows, cols)


@helper
def score_pairs(a: Any, lda: int, b: Any, depth: int, c: Any, stride: int, rows: int, cols: int, scale: float) -> None:
    """`pair_panel` as a function."""
    pair_panel(a, lda, b, depth, c, stride, rows, cols, scale)


@helper
def skew_block(p: Any, base: Any, w: Any, q_row: int, head: Any, tile: Any, moved: int) -> None:
    """Products of the tile's queries with one weight row per distance.

    With `reach` the block's queries rounded up to whole panels, column c of the buffer belongs to distance
    j - i = j0 - i0 - (reach - 1) + c, so that row i of the tile reads it from column reach - 1 - i on. A tile
    `moved` keys further keeps what it shares with the one before.
    """
    rows, depth, width = tile.rows, p.skew_depth, PANEL_VECTORS * lanes_of(base)
    reach = round_up(p.block_queries, width)
    products, packed, stride = at(base, w.skew), at(base, w.skew_w), reach + BLOCK_KEYS
    weights = at(pointer_like(base, p.skew_w), head.h * p.skew_head)
    start = (reach - rows) // width * width
    if moved:
        for i in range(rows):
            line = at(products, i * stride)
            scale_row(line, at(line, moved), reach, 1.0)
        start = reach
    origin = tile.j0 - tile.i0 - (reach - 1)
    # Distances that no query may attend are left out: what stands there is overwritten with -inf.
    stop = min(reach + round_up(tile.cols, width), round_up(max(p.offset + p.right + 1 - origin, 0), width))
    index, limit = integers(p.skew_index), p.q_len + p.k_len - 1
    origin += p.q_len - 1
    pack_indexed(packed, weights, p.skew_row, index, origin + start, origin + stop, limit, depth)
    for c in range(start, stop, width):
        # The first rows come to these columns in the next tile only, unless this is the first.
        low = max(reach - c - width, 0) // SCORE_ROWS * SCORE_ROWS
        panel, out = at(packed, (c - start) * depth), at(products, low * stride + c)
        score_plain(at(base, w.skew_q + low * q_row), q_row, panel, depth, out, stride, rows - low, width)


@helper
def map_index(a: Any, b: int, q: int, j0: int) -> int:
    """Where the map of a gathered term has the row of query q and key j0 of batch item b."""
    where: int = b * a.map_batch + q * a.map_row + j0 + a.map_origin
    return where


@helper
def add_gathered(s: Any, a: Any, source: Any, t: int, cols: int) -> None:
    """s[j] += source[j * src_col + map[t + j]] for every entry of the map that is not negative."""
    index, col = integers(a.map), a.src_col
    if a.runs and col == 0:
        runs = integers(a.runs)
        j = 0
        while j < cols:
            r = get(index, t + j)
            end = min(get(runs, t + j) - t, cols)
            if r >= 0:
                add_constant(at(s, j), end - j, get(source, r), 1.0)
            j = end
    else:
        for j in range(cols):
            r = get(index, t + j)
            if r >= 0:
                put(s, j, get(s, j) + get(source, j * col + r))


@helper
def add_all_gathered(adds: Any, count: int, s: Any, head: Any, q: int, tile: Any) -> None:
    """Add to the scores s of query q what each of the records gathers."""
    for n in range(count):
        a = adds[n]
        origin = head.b * a.src_batch + head.h * a.src_head + q * a.src_row + tile.j0 * a.src_col
        add_gathered(s, a, at(pointer_like(s, a.src), origin), map_index(a, head.b, q, tile.j0), tile.cols)


@helper
def add_within_cap(p: Any, base: Any, s: Any, slopes: Any, head: Any, q: int, tile: Any) -> None:
    """Add a bias of every pair, if there is one, and cap the scores s of query q and all that was added to them."""
    inner = at(pointer_like(base, p.inner), head.inner + q * p.inner_row + tile.j0)
    if p.inner:
        add_row(s, inner, tile.cols, LOG2E)
    cap_row(s, tile.cols, p.cap, p.cap_inverse, slopes, p.cap_slopes)
    if p.inner:
        shut_row(s, inner, tile.cols)


@helper
def exclude_by_rule(p: Any, s: Any, b: int, q: int, tile: Any) -> None:
    """Exclude the keys of a tile that a rule leaves out for query q."""
    j0, cols = tile.j0, tile.cols
    if p.ranges:
        own = at(longs(p.ranges), b * p.ranges_batch + 2 * q)
        begin, end = min(max(get(own, 0) - j0, 0), cols), max(min(get(own, 1) - j0, cols), 0)
        fill_row(s, 0, begin, MINUS_INFINITY)
        fill_row(s, end, cols, MINUS_INFINITY)
    if p.step > 1:
        rest = (q + p.offset - j0) % p.step
        for j in range(cols):
            if j % p.step != rest:
                put(s, j, MINUS_INFINITY)


@helper
def complete_scores(p: Any, adds: Any, base: Any, w: Any, head: Any, tile: Any) -> None:
    """Complete a tile of plain products: bias, gathered terms, masks, and the maximum of each row."""
    lanes, j0, cols = lanes_of(base), tile.j0, tile.cols
    wide, reach = round_up(cols, lanes), round_up(p.block_queries, PANEL_VECTORS * lanes)
    for i in range(tile.rows):
        q = tile.i0 + i
        s = at(base, w.scores + (tile.first + i) * BLOCK_KEYS)
        slopes = at(base, w.caps + i * BLOCK_KEYS)
        if p.cap_content:
            cap_row(s, cols, p.cap, p.cap_inverse, slopes, p.cap_slopes)
        if p.bias_row:
            add_row(s, at(head.bias, q * p.bias_row + j0), cols, 1.0)
        if p.skew_depth:
            add_row(s, at(base, w.skew + i * (reach + BLOCK_KEYS) + reach - 1 - i), cols, 1.0)
        add_all_gathered(adds, p.add_count, s, head, q, tile)
        if p.cap > 0.0 and p.cap_content == 0:
            add_within_cap(p, base, s, slopes, head, q, tile)
        mask = head.mask + head.h * p.mask_head + q * p.mask_row + j0 * p.mask_col
        if p.soft:
            soft = at(pointer_like(base, p.soft), mask)
            least = least_mask(base)
            if p.mask_col:
                add_mask(s, soft, cols, least, LOG2E)
            elif get(soft, 0) == MINUS_INFINITY:
                fill_row(s, 0, cols, MINUS_INFINITY)
            else:
                add_constant(s, cols, max(get(soft, 0), least), LOG2E)
        if p.allowed:
            allowed = at(bytes_(p.allowed), mask)
            if p.mask_col:
                mask_row(s, allowed, cols, MINUS_INFINITY)
            elif get(allowed, 0) == 0:
                fill_row(s, 0, cols, MINUS_INFINITY)
        exclude_by_rule(p, s, head.b, q, tile)
        # Excluded keys are overwritten, not added to, so that what they hold never matters.
        begin = min(max(q + p.offset - p.left - j0, 0), cols)
        end = max(min(q + p.offset + p.right + 1 - j0, cols), 0)
        fill_row(s, 0, begin, MINUS_INFINITY)
        fill_row(s, end, wide, MINUS_INFINITY)
        max_row(s, wide, at(base, w.tops + (tile.first + i) * lanes))


@helper
def range_of(p: Any, b: int, i0: int, rows: int) -> tuple[int, int]:
    """The first key that a rule lets any of these queries attend, and the one after the last."""
    own = at(longs(p.ranges), b * p.ranges_batch + 2 * i0)
    first, stop = get(own, 0), get(own, 1)
    for i in range(1, rows):
        first, stop = min(first, get(own, 2 * i)), max(stop, get(own, 2 * i + 1))
    return first, stop


@helper
def in_band(p: Any, b: int, tile: Any) -> bool:
    """Whether the band and a rule let every query of a tile, of batch item b, attend every key of it."""
    if p.step > 1:
        return False
    if p.ranges:
        own = longs(p.ranges)
        for q in range(tile.i0, tile.i0 + tile.rows):
            n = b * p.ranges_batch + 2 * q
            if tile.j0 < get(own, n) or tile.j0 + tile.cols > get(own, n + 1):
                return False
    if tile.j0 < tile.i0 + tile.rows - 1 + p.offset - p.left:
        return False
    last: bool = tile.j0 + tile.cols <= tile.i0 + p.offset + p.right + 1
    return last
