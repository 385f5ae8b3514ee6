"""Diagrams and the pictures of schemes: what they draw is what the formulas give."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.plot import diagrams
from relpos_np.plot import gallery as pictures
from relpos_np.plot import layers as of_layers

pytest.importorskip("matplotlib")


def words(ax):
    return [text.get_text() for text in ax.texts]


def image(ax):
    return np.ma.filled(np.ma.asarray(ax.get_images()[0].get_array(), dtype=np.float64), np.nan)


def test_numbered_map_writes_each_row_number():
    ax = diagrams.numbered_map(np.array([[2, -1], [0, 31]]))
    assert words(ax) == ["2", "", "0", "31"]
    assert np.isnan(image(ax)[0, 1])
    with pytest.raises(rp.RelposValueError, match="integers"):
        diagrams.numbered_map(np.ones((2, 2)))
    with pytest.raises(rp.RelposValueError, match="labels"):
        diagrams.numbered_map(np.ones((2, 2), int), labels=["a"])


def test_encoding_map_draws_rows_and_products():
    left, right = (ax for ax in diagrams.encoding_map(rp.Sinusoidal(6), 9).axes if ax.get_title())
    pe = rp.reference.sinusoidal(np.arange(9), 6)
    np.testing.assert_array_equal(image(left), pe)
    np.testing.assert_allclose(image(right), pe @ pe.T, rtol=1e-14)


def test_rotary_angles_draw_wavelengths():
    rules = {"a": rp.reference.rotary_frequencies(8), "b": rp.reference.linear_frequencies(8, factor=2.0)}
    left, right = (ax for ax in diagrams.rotary_angles(rules, 5).axes if ax.get_title())
    np.testing.assert_array_equal(image(left), np.cos(np.arange(5)[:, None] * rules["a"]))
    lines = {line.get_label(): line.get_ydata() for line in right.get_lines()}
    np.testing.assert_allclose(lines["b"], 2 * lines["a"], rtol=1e-14)
    assert lines["a"][0] == pytest.approx(2 * np.pi)
    for wrong in ({}, {"a": np.ones((2, 3))}):
        with pytest.raises(rp.RelposValueError, match="rules"):
            diagrams.rotary_angles(wrong, 5)


@pytest.mark.parametrize(
    ("variant", "first_row", "wrong"),
    [
        ("conformer", ["q_0R_{0}", "q_0R_{−1}", "q_0R_{−2}"], 0),
        ("xlnet", ["q_0R_{0}", "q_0R_{−1}", "q_0R_{−2}"], 0),
        # Made up, then of the next query.
        ("transformer_xl", ["q_0R_{0}", "0", "q_1R_{2}"], 3),
        ("espnet_legacy", ["q_0R_{0}", "0", "q_1R_{2}"], 3),
    ],
)
def test_rel_shift_steps(variant, first_row, wrong):
    before, after = diagrams.rel_shift_steps(3, 3, variant).axes
    assert [word.strip("$") for word in words(after)[:3]] == first_row
    assert sum(text.get_color() == "tab:red" for text in after.texts) == wrong
    columns = len(rp.reference.row_distances(3, 3, variant))
    assert len(words(before)) == 3 * columns
    pale = sum(text.get_color() == "0.6" for text in before.texts)
    kept = len({word for word in words(after) if word != "0"})
    assert pale == 3 * columns - kept
    assert np.isnan(image(after)).sum() == wrong


@pytest.mark.parametrize(
    ("name", "variant", "title"),
    [
        ("t5", None, "By relative position"),
        ("rotary", "interleaved", "By relative position"),
        ("shaw", "zero", "By relative position"),
        ("transformer_xl", "conformer", "By relative position"),
        ("fire", None, "Query 18: not by relative position alone"),
        ("window", "video", "Query"),
        ("graph", None, "Query"),
    ],
)
def test_what_depends_on_relative_position_alone(name, variant, title):
    figure = pictures.scheme_picture(name, variant=variant)
    assert figure.axes[2].get_title().startswith(title)
    assert figure.get_suptitle().startswith(rp.SCHEMES[name].cls.__name__)


def test_the_line_is_what_the_map_shows():
    figure = pictures.scheme_picture("alibi")
    line = figure.axes[2].get_lines()[-2]
    one = testing.example("alibi", dtype="float64")
    drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    for d in (-30, -1, 0, 7):
        assert drawn[d] == pytest.approx(-one.position.slopes[0] * abs(d), abs=1e-12)


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_every_scheme_has_a_picture(name):
    figure = pictures.scheme_picture(name)
    assert image(figure.axes[0]).size > 100


@pytest.mark.parametrize("name", of_layers.LAYERS)
def test_pictures_of_layers(name):
    figure = of_layers.layer_picture(name, seed=1)
    layer, size = of_layers.LAYERS[name](np.random.default_rng(1))
    drawn = of_layers.attention_of_alike_tokens(layer, size)[0]
    assert figure.get_suptitle().startswith(type(layer).__name__)
    if name == "swin_attention":
        np.testing.assert_array_equal(image(figure.axes[3]), drawn[4 * 8 + 4].reshape(8, 8))
        assert [ax.get_title() for ax in figure.axes[1:4]] == [
            f"From token {at}" for at in ("(0, 0)", "(0, 4)", "(4, 4)")
        ]
        # Written in the cells of a map are windows after the shift: the first one begins at (2, 2).
        assert words(figure.axes[0])[: 2 * 8 + 3] == [*"3322223333222233", *"110"]
    else:
        np.testing.assert_array_equal(image(figure.axes[0]), drawn)
        np.testing.assert_array_equal(figure.axes[1].get_lines()[-1].get_ydata(), drawn[24])
