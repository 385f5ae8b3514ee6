"""Layers with windows against plain loops: RSTT's attention, cutting, shifting and masking maps, Swin, Video Swin."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import layers
from relpos_np.layers import SwinAttention, VideoSwinAttention, WindowAttention
from tests import naive

TABLE = "relative_position_bias_table"
EPS = np.finfo(np.float64).eps


# ---------------------------------------------------------------------------------------------- witnesses
def bias_row(query, key, extent):
    """The row of a pair of coordinates: differences on the axes are digits to the bases 2E-1, from -(E-1) on."""
    row = 0
    for a, b, e in zip(query, key, extent, strict=True):
        row = row * (2 * e - 1) + (a - b + e - 1)
    return row


def attend(queries, keys, weights, heads, extent, added, scale=None):
    """One window: queries and keys are lists of (coordinates, vector); added(i, j) is the mask. Returns y and p."""
    (at_q, x), (at_k, context), table = zip(*queries, strict=True), zip(*keys, strict=True), weights[TABLE].tolist()
    q = naive.projected(x, weights["q.weight"], weights.get("q.bias"), heads)
    kv = naive.projected(context, weights["kv.weight"], weights.get("kv.bias"), 2 * heads)
    terms = {
        "logit": lambda b, h, i, j: table[bias_row(at_q[i], at_k[j], extent)][h],
        "allowed": lambda b, h, i, j: added(i, j),
        "scale": scale,
    }
    z, lse = naive.attention(q, kv[:, :heads], kv[:, heads:], **terms)
    p = np.exp(naive.logits(q, kv[:, :heads], **terms) - lse[..., None])
    return naive.projected(np.concatenate(list(z[0]), axis=-1), weights["proj.weight"], weights["proj.bias"])[0, 0], p[
        0
    ]


def rstt(q, kv, weights, heads, frames_q, frames_kv, window, mask=None, scale=None):
    """RSTT's module on windows; frames_kv are coordinates among the query frames."""
    grid_q = list(itertools.product(range(frames_q), range(window[0]), range(window[1])))
    grid_k = list(itertools.product(frames_kv, range(window[0]), range(window[1])))
    out = []
    for n in range(len(q)):
        queries = list(zip(grid_q, q[n].tolist(), strict=True))
        keys = list(zip(grid_k, (q if kv is None else kv)[n].tolist(), strict=True))
        m = None if mask is None else mask[n % len(mask)]
        extent = (frames_q, *window)
        out.append(attend(queries, keys, weights, heads, extent, lambda i, j, m=m: 0 if m is None else m[i, j], scale))
    return np.array([y for y, _ in out]), np.array([p for _, p in out])


def swin(x, weights, heads, table_window, window, shift, order, masked):
    """A block's attention, from where each token of a map stands: x (B, *grid, C), any number of axes."""
    grid = x.shape[1:-1]
    axes = range(len(grid))
    padded = [math.ceil(g / w) * w for g, w in zip(grid, window, strict=True)]
    lengths = padded if order == "pad_then_shift" else grid
    y = np.full(x.shape, np.nan)
    for b, corner in itertools.product(
        range(len(x)), itertools.product(*(range(0, p, w) for p, w in zip(padded, window, strict=True)))
    ):
        tokens, owners, places = [], [], []
        for t in itertools.product(*(range(w) for w in window)):
            c = [corner[a] + t[a] for a in axes]
            # Where the token comes from: the shift goes round the padded map, or round the map alone.
            owner = [(c[a] + shift[a]) % lengths[a] if c[a] < lengths[a] else c[a] for a in axes]
            real = all(owner[a] < grid[a] for a in axes) and all(c[a] < lengths[a] for a in axes)
            tokens.append((t, x[(b, *owner)].tolist() if real else [0.0] * x.shape[-1]))
            owners.append(tuple(owner) if real else None)
            # Two tokens of a window are neighbours if going round the padded map separates neither.
            places.append([(c[a] + shift[a]) // padded[a] for a in axes])
        out, _ = attend(
            tokens, tokens, weights, heads, table_window, lambda i, j, r=places: 0.0 if r[i] == r[j] else masked
        )
        for owner, value in zip(owners, out, strict=True):
            if owner is not None:
                y[(b, *owner)] = value
    assert not np.isnan(y).any()
    return y


def weights_of(layer):
    return getattr(layer, "attention", layer).state_dict()


def randomise(layer_class, rng, *args, **options):
    """A layer whose weights, biases and table all matter."""
    drawn = weights_of(layer_class(*args, **options, dtype=np.float64, rng=rng))
    weights = {name: rng.normal(scale=0.5, size=value.shape) for name, value in drawn.items()}
    return layer_class(*args, **options, weights=weights)


# ---------------------------------------------------------------------------------------------- RSTT
CASES = {
    "self": ((2, 2, (2, 2)), {}),
    "one frame": ((1, 1, (2, 3)), {}),
    "cross": ((3, 2, (2, 2)), {}),
    "cross, not square": ((3, 2, (1, 3)), {"qkv_bias": False}),
    "other frames": ((4, 2, (2, 1)), {"frames": [3, 0]}),
    "scale": ((2, 2, (1, 2)), {"qk_scale": -0.7}),
    "wide heads": ((2, 2, (1, 2)), {"head_dim": 5}),
}


@pytest.mark.parametrize("masked", ["none", "float", "-inf", "bool"])
@pytest.mark.parametrize("case", CASES)
def test_rstt_equals_loops(case, masked, backend, rng):
    (f_q, f_kv, window), options = CASES[case]
    layer = randomise(WindowAttention, rng, 6, f_q, f_kv, window, 2, **options)
    n_q, n_kv = f_q * window[0] * window[1], f_kv * window[0] * window[1]
    q = rng.standard_normal((6, n_q, 6))
    kv = None if f_q == f_kv and case != "self" else rng.standard_normal((6, n_kv, 6))
    mask = {"none": None, "float": rng.normal(size=(3, n_q, n_kv))}.get(masked)
    if masked in ("-inf", "bool"):
        keep = rng.random((3, n_q, n_kv)) < 0.6
        keep[..., 0] = True
        mask = keep if masked == "bool" else np.where(keep, 0.0, -np.inf)
    frames = options.get("frames", range(0, f_q, (f_q + 1) // f_kv))
    added = np.where(mask, 0.0, -np.inf) if masked == "bool" else mask
    x, attn = rstt(q, kv, weights_of(layer), 2, f_q, frames, window, added, options.get("qk_scale"))
    got, probabilities = layer(q, kv, mask, backend=backend)
    assert got.dtype == probabilities.dtype == np.float64
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(probabilities, attn, rtol=0, atol=1e-12)
    alone = layer(q, kv, mask, backend=backend, return_attention=False)
    np.testing.assert_array_equal(alone, got)


def test_dtypes(backend, rng):
    layer = WindowAttention(8, 2, 2, (2, 2), 2, rng=rng)
    assert {value.dtype for value in weights_of(layer).values()} == {np.dtype(np.float32)}
    q = rng.standard_normal((2, 8, 8))
    layer = randomise(WindowAttention, rng, 8, 2, 2, (2, 2), 2)
    exact = layer(q, backend="numpy")[0]
    for dtype in (np.float64, np.float32, np.float16):
        x, attn = layer(q.astype(dtype), backend=backend)
        assert x.dtype == attn.dtype == dtype
        np.testing.assert_allclose(x, exact, rtol=0, atol=32 * np.finfo(dtype).eps * np.abs(exact).max())


def test_what_is_not_finite_stays_in_its_window(backend, rng):
    layer = randomise(WindowAttention, rng, 6, 1, 1, (2, 2), 2)
    q = rng.standard_normal((4, 4, 6))
    clean = layer(q, backend=backend, return_attention=False)
    q[2, 1, 3] = np.nan
    got = layer(q, backend=backend, return_attention=False)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(clean, 2, 0))


# ---------------------------------------------------------------------------------------------- dropout
def test_dropout_of_probabilities(backend, rng):
    layer = randomise(WindowAttention, rng, 8, 2, 2, (4, 4), 2, attn_drop=0.3)
    w, q = weights_of(layer), rng.standard_normal((20, 32, 8))
    _, p = layer(q, backend=backend)
    x, dropped = layer(q, train=True, rng=np.random.default_rng(1), backend=backend)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], p[kept] / 0.7, rtol=4 * EPS)
    # A binomial share of survivors, within five standard deviations.
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / p.size)
    # The output is made of the probabilities that are returned: after dropout, as published.
    v = (q @ w["kv.weight"].T + w["kv.bias"])[..., 8:].reshape(20, 32, 2, 4).swapaxes(1, 2)
    z = (dropped @ v).swapaxes(1, 2).reshape(20, 32, 8)
    np.testing.assert_allclose(x, z @ w["proj.weight"].T + w["proj.bias"], rtol=0, atol=1e-12)


def test_dropout_of_outputs(backend, rng):
    layer = randomise(WindowAttention, rng, 8, 1, 1, (4, 4), 2, proj_drop=0.25)
    q = rng.standard_normal((40, 16, 8))
    x, _ = layer(q, backend=backend)
    dropped, attn = layer(q, train=True, rng=np.random.default_rng(1), backend=backend)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], x[kept] / 0.75, rtol=4 * EPS)
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / x.size)
    np.testing.assert_array_equal(attn, layer(q, backend=backend)[1])


def test_dropout_is_repeatable_and_the_same_on_every_backend(rng):
    layer = randomise(WindowAttention, rng, 8, 1, 1, (3, 3), 2, attn_drop=0.4, proj_drop=0.2)
    q, mask = rng.standard_normal((6, 9, 8)), rng.random((3, 9, 9)) < 0.8
    mask[..., 0] = True
    results = []
    for backend, both in itertools.product(rp.backend.HOST_BACKENDS, (True, False)):
        source = np.random.default_rng(5)
        out = layer(q, mask=mask, train=True, rng=source, backend=backend, return_attention=both)
        results.append((out[0] if both else out, source.random()))
    for x, following in results[1:]:
        np.testing.assert_allclose(x, results[0][0], rtol=0, atol=1e-12)
        assert following == results[0][1]  # the generator is left in the same state


# ---------------------------------------------------------------------------------------------- new weights
@pytest.mark.parametrize(("std", "bound"), [(0.02, 2.0), (1.0, 1.5), (3.0, 1.0)])
def test_truncated_normal(std, bound, rng):
    x = layers.truncated_normal(rng, (50, 200), std=std, bound=bound, dtype=np.float64)
    assert np.abs(x).max() <= bound
    stats = pytest.importorskip("scipy.stats")  # seconds to import
    assert stats.kstest(x.ravel(), stats.truncnorm(-bound / std, bound / std, scale=std).cdf).pvalue > 1e-3


def test_new_layers(rng):
    layer = WindowAttention(96, 3, 2, (4, 4), 3, rng=np.random.default_rng(3))
    for name, value in weights_of(layer).items():
        if name.endswith("bias"):
            np.testing.assert_array_equal(value, 0)
        else:
            assert abs(value.std() / 0.02 - 1) < 5 / math.sqrt(2 * value.size)
            assert abs(value.mean()) < 5 * 0.02 / math.sqrt(value.size)
    again = weights_of(WindowAttention(96, 3, 2, (4, 4), 3, rng=np.random.default_rng(3)))
    other = weights_of(WindowAttention(96, 3, 2, (4, 4), 3))
    assert weights_of(layer)[TABLE].shape == (5 * 7 * 7, 3)
    np.testing.assert_array_equal(weights_of(layer)["kv.weight"], again["kv.weight"])
    assert (weights_of(layer)["kv.weight"] != other["kv.weight"]).any()
    assert "q.bias" not in weights_of(WindowAttention(8, 1, 1, (2, 2), 2, qkv_bias=False))


# ---------------------------------------------------------------------------------------------- state dicts
def named(weights, style):
    """Weights by RSTT's names as others name them."""
    w, inner = weights, len(weights["q.weight"])
    out = {}
    for end in ("weight", "bias"):
        if f"q.{end}" in w:
            k, v = w[f"kv.{end}"][:inner], w[f"kv.{end}"][inner:]
            out |= {
                "rstt": {f"q.{end}": w[f"q.{end}"], f"kv.{end}": w[f"kv.{end}"]},
                "qkv": {f"qkv.{end}": np.concatenate([w[f"q.{end}"], k, v])},
                "transformers": {f"self.query.{end}": w[f"q.{end}"], f"self.key.{end}": k, f"self.value.{end}": v},
                "transformers5": {f"q_proj.{end}": w[f"q.{end}"], f"k_proj.{end}": k, f"v_proj.{end}": v},
            }[style]
        project = {"transformers": "output.dense", "transformers5": "o_proj"}.get(style, "proj")
        out[f"{project}.{end}"] = w[f"proj.{end}"]
    above = {"transformers": "self.", "transformers5": "relative_position_bias."}.get(style, "")
    return out | {above + TABLE: w[TABLE]}


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("style", ["rstt", "qkv", "transformers", "transformers5"])
def test_state_dicts(style, qkv_bias, rng):
    layer = randomise(WindowAttention, rng, 8, 2, 2, (2, 3), 2, qkv_bias=qkv_bias)
    q = rng.standard_normal((2, 12, 8))
    expected = layer(q, backend="numpy")[0]
    inside = "attention" if style.startswith("transformers") else "attn"
    source = {f"blocks.1.{inside}.{name}": value for name, value in named(weights_of(layer), style).items()}
    # In transformers the block has a projection of this name too.
    source |= {"blocks.1.output.dense.weight": np.ones((8, 32)), "blocks.1.output.dense.bias": np.ones(8)}
    for prefix in ("blocks.1", f"blocks.1.{inside}."):
        loaded = WindowAttention.from_state_dict(source, 2, 2, (2, 3), prefix=prefix, format=style)
        np.testing.assert_array_equal(loaded(q, backend="numpy")[0], expected)
        assert weights_of(loaded).keys() == weights_of(layer).keys()
    video = VideoSwinAttention.from_state_dict(source, (2, 2, 3), prefix="blocks.1", format=style)
    whole = video(q.reshape(2, 2, 2, 3, 8), backend="numpy")
    np.testing.assert_array_equal(whole.reshape(2, 12, 8), expected)


def test_state_dict_options(rng):
    layer = randomise(WindowAttention, rng, 6, 4, 2, (2, 1), 2, head_dim=4, qk_scale=0.3, frames=[3, 0])
    loaded = WindowAttention.from_state_dict(
        layer.state_dict(), 4, 2, (2, 1), qk_scale=0.3, frames=[3, 0], attn_drop=0.1, proj_drop=0.2
    )
    q, kv = rng.standard_normal((2, 8, 6)), rng.standard_normal((2, 4, 6))
    np.testing.assert_array_equal(loaded(q, kv, backend="numpy")[0], layer(q, kv, backend="numpy")[0])
    assert (loaded.head_dim, loaded.attn_drop, loaded.proj_drop) == (4, 0.1, 0.2)


@pytest.mark.parametrize("flat", [False, True])
def test_a_stored_index_is_compared(flat, rng):
    layer = randomise(WindowAttention, rng, 6, 3, 2, (3, 2), 2)
    axes = [np.arange(3), np.arange(3), np.arange(2)]
    index = rp.reference.window_index(axes, [np.array([0, 2]), *axes[1:]], (3, 3, 2))
    source = layer.state_dict() | {"relative_position_index": index.ravel() if flat else index}
    WindowAttention.from_state_dict(source, 3, 2, (3, 2))
    with pytest.raises(rp.RelposValueError, match="relative_position_index"):
        WindowAttention.from_state_dict(source, 3, 2, (2, 3))
    with pytest.raises(rp.RelposValueError, match="relative_position_index"):
        WindowAttention.from_state_dict(source, 3, 2, (3, 2), frames=[0, 1])


# ---------------------------------------------------------------------------------------------- maps and windows
@st.composite
def maps(draw):
    """Grid, window and shift on one to three axes."""
    axes = draw(st.integers(1, 3))
    window = [draw(st.integers(1, 4)) for _ in range(axes)]
    grid = [w * draw(st.integers(1, 3)) for w in window]
    return tuple(grid), tuple(window), tuple(draw(st.integers(0, w - 1)) for w in window)


@given(maps(), st.lists(st.integers(0, 3), max_size=2))
def test_partition(sizes, lead):
    grid, window, _ = sizes
    x = np.arange(math.prod(lead) * math.prod(grid) * 2).reshape(*lead, *grid, 2)
    got = layers.window_partition(x, window)
    items = x.reshape(math.prod(lead), *grid, 2)
    expected = [
        [items[(b, *(c + s for c, s in zip(corner, t, strict=True)))] for t in itertools.product(*map(range, window))]
        for b in range(len(items))
        for corner in itertools.product(*(range(0, g, w) for g, w in zip(grid, window, strict=True)))
    ]
    assert got.shape == (math.prod(lead) * math.prod(grid) // math.prod(window), math.prod(window), 2)
    np.testing.assert_array_equal(got, np.array(expected, dtype=x.dtype).reshape(got.shape))
    np.testing.assert_array_equal(layers.window_reverse(got, window, grid), items)


@given(maps())
def test_cyclic_shift(sizes):
    grid, _, shift = sizes
    x = np.arange(math.prod(grid) * 4).reshape(2, *grid, 2)
    got = layers.cyclic_shift(x, shift)
    for c in itertools.product(*map(range, grid)):
        origin = tuple((i + s) % g for i, s, g in zip(c, shift, grid, strict=True))
        np.testing.assert_array_equal(got[(slice(None), *c)], x[(slice(None), *origin)])
    np.testing.assert_array_equal(layers.cyclic_shift(got, shift, reverse=True), x)


@given(maps())
def test_shift_mask_keeps_what_stood_together(sizes):
    grid, window, shift = sizes
    mask = layers.shift_mask(grid, window, shift)
    if not any(shift):
        assert mask is None
        return
    windows = []
    for corner in itertools.product(*(range(0, g, w) for g, w in zip(grid, window, strict=True))):
        here = [[c + t for c, t in zip(corner, token, strict=True)] for token in itertools.product(*map(range, window))]
        was = [[(c + s) % g for c, s, g in zip(token, shift, grid, strict=True)] for token in here]
        # Neighbours are those whose distance the shift did not change.
        windows.append(
            [
                [
                    all(a - b == c - d for a, b, c, d in zip(here[i], here[j], was[i], was[j], strict=True))
                    for j in range(len(here))
                ]
                for i in range(len(here))
            ]
        )
    np.testing.assert_array_equal(mask, np.where(windows, 0, -100))
    assert mask.dtype == np.float32
    np.testing.assert_array_equal(layers.shift_mask(grid, window, shift, None), windows)
    np.testing.assert_array_equal(layers.shift_mask(grid, window, shift, -np.inf), np.where(windows, 0, -np.inf))


# ---------------------------------------------------------------------------------------------- Swin
PLANS = {
    # grid, window, shift, small_maps: window, shift, padded
    ((8, 8), (4, 4), (2, 2), "axis"): ((4, 4), (2, 2), (8, 8)),
    ((5, 9), (4, 3), (2, 1), "axis"): ((4, 3), (2, 1), (8, 9)),
    ((4, 9), (4, 4), (2, 2), "axis"): ((4, 4), (0, 2), (4, 12)),
    ((3, 9), (4, 4), (2, 2), "axis"): ((3, 4), (0, 2), (3, 12)),
    ((3, 9), (4, 4), (2, 2), "all"): ((3, 3), (0, 0), (3, 9)),
    ((4, 9), (4, 4), (2, 2), "all"): ((4, 4), (0, 0), (4, 12)),
    ((5, 9), (4, 4), (2, 2), "all"): ((4, 4), (2, 2), (8, 12)),
    ((3, 9), (4, 4), (2, 2), "pad"): ((4, 4), (0, 2), (4, 12)),
    ((3, 9), (4, 4), (2, 2), "keep"): ((4, 4), (2, 2), (4, 12)),
    ((2, 7, 4), (8, 7, 3), (4, 3, 1), "axis"): ((2, 7, 3), (0, 0, 1), (2, 7, 6)),
}


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_plan(case):
    grid, window, shift, small = case
    kind = SwinAttention if len(grid) == 2 else VideoSwinAttention
    assert kind(4, window, 1, shift_size=shift, small_maps=small).plan(grid) == PLANS[case]


MAPS = [
    ((4, 6), (2, 3), (1, 1)),
    ((4, 6), (2, 3), (0, 0)),
    ((5, 4), (3, 3), (1, 2)),
    ((3, 5), (2, 4), (1, 0)),
    ((2, 7), (3, 3), (2, 1)),
    ((2, 2), (3, 4), (1, 1)),
    ((3, 4, 3), (2, 2, 2), (1, 1, 1)),
    ((1, 3, 4), (2, 2, 3), (1, 0, 2)),
]


@pytest.mark.parametrize("order", ["pad_then_shift", "shift_then_pad"])
@pytest.mark.parametrize(("grid", "window", "shift"), MAPS)
def test_swin_equals_loops(grid, window, shift, order, backend, rng):
    kind = SwinAttention if len(grid) == 2 else VideoSwinAttention
    x = rng.standard_normal((2, *grid, 4))
    for small, value in (("axis", -100.0), ("all", -100.0), ("pad", -np.inf), ("keep", None)):
        layer = randomise(
            kind, rng, 4, window, 2, shift_size=shift, pad_order=order, small_maps=small, mask_value=value
        )
        used, moved, _ = layer.plan(grid)
        added = -np.inf if value is None else value
        expected = swin(x, weights_of(layer), 2, window, used, moved, order, added)
        got = layer(x, backend=backend)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_rstt_blocks_from_their_parts(backend, rng):
    """With all frames in a window the mask is that of the pixels, repeated: what the documentation shows."""
    frames, kept, window = 3, 2, (2, 2)
    x, memory = rng.standard_normal((2, frames, 4, 6, 4)), rng.standard_normal((2, kept, 4, 6, 4))
    places = layers.shift_mask((4, 6), window, (1, 1), None)
    queries = layers.window_partition(layers.cyclic_shift(x, (0, 1, 1)), (frames, *window))

    def put_back(y):
        return layers.cyclic_shift(layers.window_reverse(y, (frames, *window), (3, 4, 6)), (0, 1, 1), reverse=True)

    itself = randomise(WindowAttention, rng, 4, frames, frames, window, 2)
    block = VideoSwinAttention(4, (frames, *window), 2, shift_size=(0, 1, 1), weights=weights_of(itself))
    y = itself(queries, mask=np.tile(places, (1, frames, frames)), backend=backend)[0]
    np.testing.assert_allclose(put_back(y), block(x, backend=backend), rtol=0, atol=1e-12)

    cross = randomise(WindowAttention, rng, 4, frames, kept, window, 2)
    context = layers.window_partition(layers.cyclic_shift(memory, (0, 1, 1)), (kept, *window))
    y = put_back(cross(queries, context, np.tile(places, (1, frames, kept)), backend=backend)[0])
    # The pixel in the corner attends the other tokens that stood in its corner: one pixel of all frames.
    for corner in ((0, 0), (0, 5), (3, 0), (3, 5)):
        tokens = [((f, 0, 0), x[0, f, *corner].tolist()) for f in range(frames)]
        others = [((2 * f, 0, 0), memory[0, f, *corner].tolist()) for f in range(kept)]
        expected, _ = attend(tokens, others, weights_of(cross), 2, (frames, *window), lambda i, j: 0.0)
        np.testing.assert_allclose(y[0, :, *corner], expected, rtol=0, atol=1e-12)


def test_probabilities_of_a_map(backend, rng):
    layer = randomise(SwinAttention, rng, 4, (2, 3), 2, shift_size=(1, 1), mask_value=None)
    x = rng.standard_normal((2, 3, 4, 4))
    y, attn = layer(x, backend=backend, return_attention=True)
    np.testing.assert_array_equal(y, layer(x, backend=backend))
    assert attn.shape == (8, 2, 6, 6)
    np.testing.assert_allclose(attn.sum(-1), 1, rtol=8 * EPS)
    keep = layers.shift_mask((4, 6), (2, 3), (1, 1), None)
    np.testing.assert_array_equal(attn != 0, np.broadcast_to(np.tile(keep, (2, 1, 1))[:, None], attn.shape))


def test_dropout_of_a_map(rng):
    layer = randomise(SwinAttention, rng, 4, (2, 2), 2, shift_size=(1, 1), attn_drop=0.3, proj_drop=0.5)
    x = rng.standard_normal((1, 20, 21, 4))
    once = [layer(x, train=True, rng=np.random.default_rng(2), backend=b) for b in rp.backend.HOST_BACKENDS]
    for other in once[1:]:
        np.testing.assert_allclose(other, once[0], rtol=0, atol=1e-12)
    assert abs((once[0] != 0).mean() - 0.5) < 5 * math.sqrt(0.25 / x.size)
    assert (layer(x, backend="numpy") != 0).all()


def test_repr():
    layer = SwinAttention(8, (4, 4), 2, shift_size=(2, 2))
    assert repr(layer).startswith("SwinAttention(dim=8, window_size=(4, 4), num_heads=2, shift_size=(2, 2)")
    assert repr(layer.attention).startswith("WindowAttention(dim=8, num_frames_q=1")


# ---------------------------------------------------------------------------------------------- bad calls
X = np.ones((2, 8, 8, 8))
WINDOWS = np.ones((6, 4, 8))
LAYER = WindowAttention(8, 1, 1, (2, 2), 2, rng=np.random.default_rng(0))
DROPPING = WindowAttention(8, 1, 1, (2, 2), 2, attn_drop=0.5, proj_drop=0.5)
CROSS = WindowAttention(8, 3, 2, (2, 2), 2)
SWIN = SwinAttention(8, (4, 4), 2, shift_size=(2, 2))
STATE = LAYER.state_dict()
read_map, read_window = SwinAttention.from_state_dict, WindowAttention.from_state_dict
BAD = {
    # the first word of the name is what the message must begin with
    "dim: zero": (lambda: WindowAttention(0, 1, 1, (2, 2), 2), ValueError),
    "dim: float": (lambda: WindowAttention(8.0, 1, 1, (2, 2), 2), TypeError),
    "num_heads: do not divide": (lambda: WindowAttention(8, 1, 1, (2, 2), 3), ValueError),
    "num_heads: zero": (lambda: WindowAttention(8, 1, 1, (2, 2), 0), ValueError),
    "num_frames_q: zero": (lambda: WindowAttention(8, 0, 1, (2, 2), 2), ValueError),
    "num_frames_kv: no such rule": (lambda: WindowAttention(8, 4, 3, (2, 2), 2), ValueError),
    "key_coords: outside": (lambda: WindowAttention(8, 2, 2, (2, 2), 2, frames=[0, 5]), ValueError),
    "key_coords: not integers": (lambda: WindowAttention(8, 2, 2, (2, 2), 2, frames=[0.5, 1.5]), TypeError),
    "window_size: int": (lambda: WindowAttention(8, 1, 1, 2, 2), TypeError),
    "window_size: text": (lambda: WindowAttention(8, 1, 1, "22", 2), TypeError),
    "window_size: three": (lambda: WindowAttention(8, 1, 1, (2, 2, 2), 2), ValueError),
    "window_size: two": (lambda: VideoSwinAttention(8, (2, 2), 2), ValueError),
    "window_size: zero": (lambda: SwinAttention(8, (0, 2), 2), ValueError),
    "qkv_bias: int": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, qkv_bias=1), TypeError),
    "qk_scale: NaN": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, qk_scale=np.nan), ValueError),
    "attn_drop: one": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, attn_drop=1.0), ValueError),
    "proj_drop: below": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, proj_drop=-0.1), ValueError),
    "rng: seed": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, rng=0), TypeError),
    "dtype: int": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, dtype=np.int64), TypeError),
    "weights: list": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, weights=[1]), TypeError),
    "weights: names": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, weights={"q.weight": X}), ValueError),
    "weights: bias unwanted": (lambda: WindowAttention(8, 1, 1, (2, 2), 2, False, weights=STATE), ValueError),
    f"{TABLE}: shape": (lambda: WindowAttention(8, 1, 1, (3, 2), 2, weights=STATE), ValueError),
    "std: zero": (lambda: layers.truncated_normal(np.random.default_rng(0), (2,), std=0), ValueError),
    "bound: below": (lambda: layers.truncated_normal(np.random.default_rng(0), (2,), bound=-1), ValueError),
    "shift_size: window": (lambda: SwinAttention(8, (4, 4), 2, shift_size=(4, 0)), ValueError),
    "shift_size: negative": (lambda: SwinAttention(8, (4, 4), 2, shift_size=(-1, 0)), ValueError),
    "shift_size: one": (lambda: SwinAttention(8, (4, 4), 2, shift_size=(1,)), ValueError),
    "pad_order: unknown": (lambda: SwinAttention(8, (4, 4), 2, pad_order="roll"), ValueError),
    "small_maps: unknown": (lambda: SwinAttention(8, (4, 4), 2, small_maps="crop"), ValueError),
    "mask_value: NaN": (lambda: SwinAttention(8, (4, 4), 2, mask_value=np.nan), ValueError),
    "mask_value: text": (lambda: SwinAttention(8, (4, 4), 2, mask_value="-inf"), TypeError),
    "q: list": (lambda: LAYER(WINDOWS.tolist()), TypeError),
    "q: int": (lambda: LAYER(WINDOWS.astype(int)), TypeError),
    "q: tokens": (lambda: LAYER(WINDOWS[:, :3]), ValueError),
    "q: channels": (lambda: LAYER(WINDOWS[..., :4]), ValueError),
    "q: axes": (lambda: LAYER(WINDOWS[None]), ValueError),
    "kv: needed": (lambda: CROSS(np.ones((2, 12, 8))), ValueError),
    "kv: tokens": (lambda: CROSS(np.ones((2, 12, 8)), np.ones((2, 12, 8))), ValueError),
    "kv: windows": (lambda: LAYER(WINDOWS, WINDOWS[:3]), ValueError),
    "kv: dtype": (lambda: LAYER(WINDOWS, WINDOWS.astype(np.float32)), ValueError),
    "mask: windows": (lambda: LAYER(WINDOWS, mask=np.ones((4, 4, 4), bool)), ValueError),
    "mask: none": (lambda: LAYER(WINDOWS, mask=np.ones((0, 4, 4), bool)), ValueError),
    "mask: tokens": (lambda: LAYER(WINDOWS, mask=np.ones((3, 4, 5), bool)), ValueError),
    "mask: axes": (lambda: LAYER(WINDOWS, mask=np.ones((4, 4), bool)), ValueError),
    "mask: int": (lambda: LAYER(WINDOWS, mask=np.ones((3, 4, 4), int)), TypeError),
    "rng: missing": (lambda: DROPPING(WINDOWS, train=True), TypeError),
    "train: int": (lambda: LAYER(WINDOWS, train=1), TypeError),
    "return_attention: int": (lambda: LAYER(WINDOWS, return_attention=1), TypeError),
    "backend: unknown": (lambda: LAYER(WINDOWS, backend="torch"), ValueError),
    "x: axes": (lambda: SWIN(X[0]), ValueError),
    "x: channels": (lambda: SWIN(X[..., :4]), ValueError),
    "x: no height": (lambda: SWIN(X[:, :0]), ValueError),
    "x: list": (lambda: SWIN(X.tolist()), TypeError),
    "x: not a multiple": (lambda: layers.window_partition(X, (3, 4)), ValueError),
    "x: too few axes": (lambda: layers.window_partition(X[0, 0], (2, 2)), ValueError),
    "x: too few axes to shift": (lambda: layers.cyclic_shift(X[0, 0], (2, 2)), ValueError),
    "window: empty": (lambda: layers.window_partition(X, ()), ValueError),
    "window: int": (lambda: layers.window_partition(X, 4), TypeError),
    "window: float": (lambda: layers.window_partition(X, (4.0, 4.0)), TypeError),
    "windows: number": (lambda: layers.window_reverse(np.ones((3, 4, 8)), (2, 2), (4, 4)), ValueError),
    "windows: tokens": (lambda: layers.window_reverse(np.ones((4, 3, 8)), (2, 2), (4, 4)), ValueError),
    "grid: no multiple": (lambda: layers.window_reverse(np.ones((4, 4, 8)), (2, 2), (4, 5)), ValueError),
    "grid: axes": (lambda: layers.shift_mask((4,), (2, 2), (1, 1)), ValueError),
    "grid: no multiple for a mask": (lambda: layers.shift_mask((4, 5), (2, 2), (1, 1)), ValueError),
    "shift: window": (lambda: layers.shift_mask((4, 4), (2, 2), (2, 0)), ValueError),
    "value: NaN": (lambda: layers.shift_mask((4, 4), (2, 2), (1, 0), np.nan), ValueError),
    "value: inf": (lambda: layers.shift_mask((4, 4), (2, 2), (1, 0), np.inf), ValueError),
    "reverse: int": (lambda: layers.cyclic_shift(X, (1, 1), reverse=1), TypeError),
    "format: unknown": (lambda: read_window(STATE, 1, 1, (2, 2), format="onnx"), ValueError),
    "layers.qkv.weight: missing": (lambda: read_map({"layers.q.weight": X}, (2, 2), prefix="layers"), ValueError),
    "attn.logit_scale: second version": (
        lambda: read_map({f"attn.{n}": v for n, v in named(STATE, "qkv").items()} | {"attn.logit_scale": X}, (2, 2)),
        ValueError,
    ),
    "qkv.weight: no three parts": (
        lambda: read_map(named(STATE, "qkv") | {"qkv.weight": X[0, :, 0], "qkv.bias": X[0, 0, 0]}, (2, 2)),
        ValueError,
    ),
    f"{TABLE}: heads": (lambda: read_window(STATE | {TABLE: np.ones((9, 3))}, 1, 1, (2, 2)), ValueError),
    f"{TABLE}: columns": (lambda: read_map(named(STATE, "qkv") | {TABLE: np.ones((9, 3))}, (2, 2)), ValueError),
    "attention.k_proj.bias: some": (
        lambda: read_map(
            {f"attention.{n}": v for n, v in named(STATE, "transformers5").items() if n != "v_proj.bias"},
            (2, 2),
            format="transformers5",
        ),
        ValueError,
    ),
    "proj.bias: missing": (
        lambda: read_map({n: v for n, v in STATE.items() if n != "proj.bias"}, (2, 2), format="rstt"),
        ValueError,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, kind = BAD[name]
    with pytest.raises(rp.RelposError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert str(caught.value).startswith(name.partition(":")[0]), str(caught.value)


def test_a_mask_is_made_once_and_cannot_be_written_to():
    mask = layers.shift_mask((8, 8), (4, 4), (2, 2))
    assert mask is layers.shift_mask([8, 8], np.array([4, 4]), (2, 2))
    with pytest.raises(ValueError, match="read-only"):
        mask[...] = 0
