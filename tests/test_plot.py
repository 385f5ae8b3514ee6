"""Pictures: their numbers, and their refusals."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import plot
from relpos_np._commands import main as cli
from relpos_np._commands import plot as plot_command
from relpos_np.plot import diagrams
from relpos_np.plot import layers as plot_layers


def t5(heads=3):
    rng = np.random.default_rng(0)
    return rp.T5(rng.standard_normal((32, heads)), max_distance=64)


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """``command(argument, ...)``: what `relpos plot` ends with and says, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        capsys.readouterr()
        return cli.main(["plot", *words]), *capsys.readouterr()

    return call


def test_matplotlib_is_not_imported_before_a_picture_is_drawn():
    code = (
        "import relpos_np.plot, relpos_np._commands.main, sys; "
        "sys.exit('matplotlib' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_position_bias_is_what_positions_add():
    scheme = t5()
    np.testing.assert_array_equal(
        plot.position_bias(scheme, 5, 9), rp.reference.t5_bias(scheme.table, 5, 9, offset=4, max_distance=64)
    )
    u, v = np.ones((2, 4)), np.full((2, 4), 2.0)
    rows = np.random.default_rng(0).standard_normal((5 + 7 - 1, 2, 4))
    bias = plot.position_bias(rp.TransformerXL(u, v, rows, variant="conformer"), 5, 7)
    d = 6 - (4 + 2 - 3)
    assert bias[1, 4, 3] == pytest.approx((v[1] * rows[d, 1]).sum() / 2)
    for wrong in (rp.Shaw(np.ones((3, 4))), rp.Plain(), None):
        with pytest.raises(rp.RelposTypeError, match="no bias of its own"):
            plot.position_bias(wrong, 3, 3)


def test_bias_by_distance_draws_each_distance():
    pytest.importorskip("matplotlib")
    scheme = t5()
    ax = plot.bias_by_distance(scheme, 20, 30, labels=["a", "b", "c"])
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) > 2]
    bias = plot.position_bias(scheme, 20, 30)
    assert len(lines) == 3
    for h, line in enumerate(lines):
        drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        # Relative positions of the call: query i stands at i + 10.
        assert sorted(drawn) == list(range(-29, 20))
        for i, j in ((0, 0), (0, 29), (19, 0), (7, 17)):
            assert drawn[j - i - 10] == bias[h, i, j]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "c"]
    assert "j − i" in ax.get_xlabel()
    assert ax.get_ylabel()
    with pytest.raises(rp.RelposValueError, match="labels"):
        plot.bias_by_distance(scheme, 5, 5, labels=["one"])


def test_heat_map():
    pytest.importorskip("matplotlib")
    ax = plot.heat_map(np.array([[0.0, 1.0], [-np.inf, 0.5]]), title="t", labels=["a$", "b"])
    (image,) = ax.get_images()
    assert image.get_clim() == (0.0, 1.0)
    assert np.ma.getmaskarray(image.get_array())[1, 0]
    assert [text.get_text() for text in ax.get_xticklabels()] == [r"a\$", "b"]
    signed = plot.heat_map(np.array([[-2.0, 1.0]]), colorbar=False)
    assert signed.get_images()[0].get_clim() == (-2.0, 2.0)
    with pytest.raises(rp.RelposValueError, match="matrix"):
        plot.heat_map(np.ones(3))
    with pytest.raises(rp.RelposValueError, match="labels"):
        plot.heat_map(np.ones((2, 3)), labels=["a", "b"])


def test_picture_is_written_without_pyplot(tmp_path):
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 8, 4))
    figure = plot.attention_with_and_without(q, k, position=t5(), tokens=list("abcdefgh"), title="title")
    path = tmp_path / "picture.png"
    plot.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 4
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    for wrong in (tmp_path / "missing" / "picture.png", tmp_path / "picture.nonsense"):
        with pytest.raises(rp.RelposValueError, match="cannot be written"):
            plot.save(figure, wrong)


def test_missing_matplotlib_names_the_remedy(monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(rp.RelposImportError, match=r'pip install "relpos-np\[plot\]"'):
        plot.heat_map(np.ones((2, 2)))
    code, out, err = command("t5")
    assert (code, out) == (2, "")
    assert 'pip install "relpos-np[plot]"' in err


def test_a_window_by_differences():
    """Every pair's bias stands at its differences, in the map of its Δframe; what no pair takes is blank."""
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    scheme = rp.WindowBias.rstt(rng.standard_normal((5 * 3 * 7, 2)), 3, 2, (2, 4))
    figure = diagrams.window_differences(scheme, head=1)
    maps = {ax.get_title(): np.ma.filled(ax.images[0].get_array(), np.nan) for ax in figure.axes if ax.images}
    bias, seen = plot.position_bias(scheme, 3 * 8, 2 * 8)[1], set()
    for i, j in np.ndindex(bias.shape):
        query, key = np.unravel_index(i, (3, 2, 4)), np.unravel_index(j, (2, 2, 4))
        frame = query[0] - (0, 2)[key[0]]
        at = f"Δframe {frame:+d}".replace("+0", "0"), query[1] - key[1] + 1, query[2] - key[2] + 3
        assert maps[at[0]][at[1:]] == bias[i, j]
        seen.add(at)
    assert sum(np.isfinite(one).sum() for one in maps.values()) == len(seen)
    assert list(maps) == [f"Δframe {n}" for n in ("-2", "-1", "0", "+1", "+2")]
    flat = diagrams.window_differences(rp.WindowBias(rng.standard_normal((9, 1)), (2, 2)))
    assert [ax.get_xlabel() for ax in flat.axes if ax.images] == ["Δcolumn"]
    with pytest.raises(rp.RelposTypeError, match="expected a WindowBias, found T5"):
        diagrams.window_differences(t5())
    with pytest.raises(rp.RelposValueError, match=r"head: expected 0 \.\.\. 1, found 2"):
        diagrams.window_differences(scheme, head=2)


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "scheme", "variant"),
    [
        (["rope"], "rotary", None),
        (["swin"], "window", "swin"),
        (["RSTT"], "window", "rstt"),
        (["TransformerXL"], "transformer_xl", None),
        (["transformer-xl", "--variant", "xlnet"], "transformer_xl", "xlnet"),
        (["swin", "--rows"], "window", "swin"),
        (["shaw", "--rows"], "shaw", None),
        (["rstt", "--differences"], "window", "rstt"),
        (["rel_shift"], "rel_shift", "transformer_xl"),
        (["rel_shift", "--variant", "conformer"], "rel_shift", "conformer"),
    ],
)
def test_plot_takes_the_names_that_the_field_uses(command, words, scheme, variant):
    pytest.importorskip("matplotlib")
    expected = {"scheme": scheme, "variant": variant, "seed": 0, "plot": f"relpos-{scheme}.png"}
    assert json.loads(command(*words, "--json")[1]) == expected
    assert Path(f"relpos-{scheme}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("word", ["SwinAttention", "multi_head_attention", "relative-multi-head-attention"])
def test_plot_of_a_layer(command, word):
    pytest.importorskip("matplotlib")
    found = json.loads(command(word, "--seed", "3", "--json")[1])
    assert found["scheme"].replace("_", "") == word.lower().replace("_", "").replace("-", "")
    assert found["seed"] == 3
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")


def test_plot_names_the_layers_that_there_are():
    assert tuple(plot_layers.LAYERS) == plot_command.LAYERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["swin_attention", "--rows"], "--rows: is for schemes, and swin_attention is a layer"),
        (["swin_attention", "--differences"], "--differences: is for schemes, and swin_attention is a layer"),
        (["swin_attention", "--variant", "swin"], "--variant: is for schemes, and swin_attention is a layer"),
        (["nothing"], "scheme: expected one of"),
        (["paper"], "found 'paper'"),  # a variant of several schemes
        (["rotray"], "found 'rotray'; did you mean rotary?"),
        (["swn"], "found 'swn'; did you mean window or swin_v2?"),
        (["swin", "--variant", "rstt"], "--variant: swin is a variant of window itself; found 'rstt'"),
        (["rope", "--rows"], "rotary: takes no rows of a table"),
        (["rel_shift", "--rows"], "--rows: rel_shift has no table"),
        (["rel_shift", "--differences"], "--differences: rel_shift has no table"),
        (["t5", "--differences"], "t5: has no table by differences"),
        (["swin", "--rows", "--differences"], "another picture than --rows"),
        (["rel_shift", "--variant", "shaw"], "expected one of transformer_xl, "),
        (["t5", "--variant", "wrong"], "variant: t5 has 'exact', 'float32', 'flaxformer'; found 'wrong'"),
        (["t5", "--out", "t5.nothing"], "the picture cannot be written to t5.nothing"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_plot_refuses(command, words, message):
    pytest.importorskip("matplotlib")
    code, out, err = command(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
