"""Old names of arguments, attributes and gradients: they work, and say what they are now called."""

import inspect
import warnings

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np._commands.saved_call import call_arguments
from relpos_np.testing.arguments import decode, encode

TABLE = np.arange(15.0 * 2).reshape(15, 2)
NETWORK = (np.ones((3, 2)), np.ones(3), np.ones((2, 3)), np.zeros(2))
U, V, ROWS = np.ones((2, 4)), np.full((2, 4), 2.0), np.ones((5, 2, 4))
SQUARE = np.eye(8)
# What is made with old names, with new ones, and the attributes that have both.
MADE = {
    "window": (
        lambda: rp.WindowBias(TABLE, query_grid=(2, 3)),
        lambda: rp.WindowBias(TABLE, grid=(2, 3)),
        {"query_grid": "grid"},
    ),
    "rstt": (
        lambda: rp.WindowBias.rstt(np.ones((9, 2)), 5, 3, window_size=(1, 1)),
        lambda: rp.WindowBias.rstt(np.ones((9, 2)), 5, 3, grid=(1, 1)),
        {"query_grid": "grid"},
    ),
    "decomposed": (
        lambda: rp.DecomposedBias(np.ones((3, 4)), np.ones((5, 4)), query_grid=(2, 3)),
        lambda: rp.DecomposedBias(np.ones((3, 4)), np.ones((5, 4)), grid=(2, 3)),
        {"query_grid": "grid"},
    ),
    "swin_v2": (
        lambda: rp.SwinV2(*NETWORK, window=(2, 3), pretrained_window=(4, 4)),
        lambda: rp.SwinV2(*NETWORK, grid=(2, 3), pretrained_grid=(4, 4)),
        {"window": "grid", "pretrained_window": "pretrained_grid"},
    ),
    "transformer_xl": (
        lambda: rp.TransformerXL(u=U, v=V, rows=ROWS),
        lambda: rp.TransformerXL(content_bias=U, position_bias=V, rows=ROWS),
        {"u": "content_bias", "v": "position_bias"},
    ),
    "layer": (
        lambda: layers.RelativeMultiHeadAttention(SQUARE, SQUARE, SQUARE, pos=SQUARE, u=U, v=V),
        lambda: layers.RelativeMultiHeadAttention(SQUARE, SQUARE, SQUARE, pos=SQUARE, content_bias=U, position_bias=V),
        {"u": "content_bias", "v": "position_bias"},
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_old_arguments_and_attributes(name):
    old, new, attributes = MADE[name]
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        found = old()
    assert all(one.filename == __file__ for one in caught), "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = new()
        assert repr(found) == repr(wanted)
        assert not {*attributes} & {*inspect.signature(type(wanted)).parameters}
    for before, after in attributes.items():
        with pytest.warns(DeprecationWarning, match=f"^{before} is now called {after}$") as caught:
            same = getattr(found, before)
        assert caught[0].filename == __file__
        np.testing.assert_array_equal(same, getattr(wanted, after))


FUNCTIONS = {
    "swin_v2_coordinates": (
        {"window": (2, 3), "pretrained_window": (4, 4)},
        {"grid": (2, 3), "pretrained_grid": (4, 4)},
    ),
    "swin_v2_bias": (
        {**dict(zip(("hidden_weight", "hidden_bias", "output_weight"), NETWORK, strict=False)), "window": (2, 3)},
        {**dict(zip(("hidden_weight", "hidden_bias", "output_weight"), NETWORK, strict=False)), "grid": (2, 3)},
    ),
    "decomposed_scores": (
        {"q": np.ones((6, 4)), "height_table": np.ones((3, 4)), "width_table": np.ones((5, 4)), "query_grid": (2, 3),
         "key_grid": (2, 3)},
        {"q": np.ones((6, 4)), "height_table": np.ones((3, 4)), "width_table": np.ones((5, 4)), "grid": (2, 3),
         "key_grid": (2, 3)},
    ),
    "transformer_xl_scores": (
        {"q": np.ones((2, 5, 4)), "k": np.ones((2, 5, 4)), "u": U, "v": V, "rows": ROWS},
        {"q": np.ones((2, 5, 4)), "k": np.ones((2, 5, 4)), "content_bias": U, "position_bias": V, "rows": ROWS},
    ),
    "relative_terms": (
        {"q": np.ones((3, 4)), "k": np.ones((3, 4)), "u": U[0], "v": V[0], "rows": ROWS[:, 0]},
        {"q": np.ones((3, 4)), "k": np.ones((3, 4)), "content_bias": U[0], "position_bias": V[0], "rows": ROWS[:, 0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_old_arguments_of_functions(name):
    old, new = FUNCTIONS[name]
    function = getattr(rp.reference, name)
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        found = function(**old)
    assert all(one.filename == __file__ for one in caught)
    for x, y in zip(found, function(**new), strict=True):
        np.testing.assert_array_equal(x, y)


def test_old_names_of_gradients():
    q = np.random.default_rng(0).standard_normal((2, 5, 4))
    grads = rp.attention_vjp(q, q, q, grad_out=q, position=rp.TransformerXL(U, V, ROWS), causal=True).position
    assert set(grads) == {"content_bias", "position_bias", "rows"}
    for old, new in (("u", "content_bias"), ("v", "position_bias")):
        with pytest.warns(DeprecationWarning, match=f"^{old} is now called {new}$"):
            np.testing.assert_array_equal(grads[old], grads[new])
    with pytest.raises(KeyError, match="w"):
        grads["w"]
    with pytest.raises(KeyError, match="u"):
        rp.attention_vjp(q, q, q, grad_out=q, position=rp.ALiBi(np.ones(2))).position["u"]


def test_both_names_are_refused():
    with pytest.raises(rp.RelposTypeError, match="grid: found twice, also by its old name query_grid"):
        rp.WindowBias(TABLE, query_grid=(2, 3), grid=(2, 3))
    with pytest.warns(DeprecationWarning, match="grid"), pytest.raises(TypeError, match="grid"):
        rp.WindowBias(TABLE, (2, 3), query_grid=(2, 3))


def test_files_of_earlier_versions():
    """Golden vectors, and calls for `relpos attend`."""
    arrays = {}
    node = encode(rp.WindowBias(TABLE, (2, 3)), "position", arrays)
    node["arguments"]["query_grid"] = node["arguments"].pop("grid")
    with pytest.warns(DeprecationWarning, match="query_grid is now called grid"):
        assert decode(node, arrays).grid == (2, 3)
    given = {"position.table": TABLE, "position.query_grid": np.array([2, 3])}
    given |= dict.fromkeys("qkv", np.zeros((1, 2, 6, 4)))
    with pytest.warns(DeprecationWarning, match="query_grid is now called grid"):
        assert call_arguments(given, "window", "file")["position"].grid == (2, 3)
