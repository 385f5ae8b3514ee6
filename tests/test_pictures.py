"""Diagrams and the pictures of schemes: what they draw is what the formulas give."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import plot, testing
from relpos_np.plot import diagrams
from relpos_np.plot import gallery as pictures

pytest.importorskip("matplotlib")


def words(ax):
    return [text.get_text() for text in ax.texts]


def image(ax):
    return np.ma.filled(np.ma.asarray(ax.get_images()[0].get_array(), dtype=np.float64), np.nan)


def test_bias_maps_have_one_scale_of_colours():
    bias = np.stack([np.full((3, 4), 2.0), np.full((3, 4), -1.0)])
    bias[0, 0, 0] = -np.inf
    figure = plot.bias_maps(bias, heads=["a", "b"])
    maps = [ax for ax in figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in maps] == ["a", "b"]
    assert {ax.get_images()[0].get_clim() for ax in maps} == {(-2.0, 2.0)}
    assert {ax.get_images()[0].get_cmap().name for ax in maps} == {"RdBu_r"}
    assert np.isnan(image(maps[0])[0, 0])
    np.testing.assert_array_equal(image(maps[1]), bias[1])
    for wrong, options in ((np.ones((3, 4)), {}), (np.ones((0, 3, 4)), {}), (bias, {"heads": ["a"]})):
        with pytest.raises(rp.RelposValueError):
            plot.bias_maps(wrong, **options)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0], (0, 3)), ([-1.0, 3.0], (-3, 3)), ([-2.0, -1.0], (-2, 0)), ([0.0, np.nan], (-1, 1))],
)
def test_ends_of_colours(values, expected):
    assert plot.span(np.array(values)) == expected


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


def test_speed_by_length_draws_what_was_recorded():
    lengths = {"512": {"best_ms": 1.0, "extra_memory_mib": 0.5}, "1024": {"best_ms": 4.5, "extra_memory_mib": 0.7}}
    left, right = diagrams.speed_by_length(lengths).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.get_lines()}
    assert drawn["measured"] == [1.0, 4.5]
    assert drawn["∝ length²"] == [4.5 / 4, 4.5]
    assert list(right.get_lines()[0].get_ydata()) == [1.0, 4.0]  # 512 x 512 float32 are a MiB
    with pytest.raises(rp.RelposValueError, match="at least two"):
        diagrams.speed_by_length({"512": lengths["512"]})


@pytest.mark.parametrize("title", [None, "A name"])
def test_titles(title):
    """Of figures, and of one map on axes of one's own; five maps leave the rest of their grid empty."""
    lengths = {n: {"best_ms": 1.0, "extra_memory_mib": 0.5} for n in ("512", "1024")}
    figures = [
        plot.bias_maps(np.ones((5, 2, 3)), title=title),
        diagrams.encoding_map(rp.Sinusoidal(6), 9, title=title),
        diagrams.rotary_angles({"a": rp.reference.rotary_frequencies(8)}, 5, title=title),
        diagrams.rel_shift_steps(3, 3, title=title),
        diagrams.speed_by_length(lengths, title=title),
    ]
    for figure in figures:
        assert figure.get_suptitle() == (title or "")
    assert [ax.axison for ax in figures[0].axes[:8]] == [True] * 5 + [False] * 3
    ax = plot.new_figure(3, 3).subplots()
    assert diagrams.numbered_map(np.ones((2, 2), int), ax, title=title) is ax
    assert ax.get_title() == (title or "")


def test_position_effect_is_the_bias_where_there_is_one():
    one = testing.example("t5", dtype="float64")
    effect = pictures.position_effect(one)
    q_len, k_len = one.q.shape[-2], one.k.shape[-2]
    bias = rp.reference.t5_bias(one.position.table, q_len, k_len, offset=k_len - q_len)
    np.testing.assert_allclose(effect, bias, rtol=0, atol=1e-12)


def test_position_effect_of_excluded_keys_is_blank():
    one = testing.example("kerple", dtype="float64")
    effect = pictures.position_effect(one)
    d = np.arange(effect.shape[-1]) - np.arange(effect.shape[-2])[:, None] - (effect.shape[-1] - effect.shape[-2])
    assert (np.isnan(effect) == (d > 0)).all()


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


def test_unknown_schemes_and_variants():
    with pytest.raises(rp.RelposValueError, match="name"):
        pictures.scheme_picture("nothing")
    with pytest.raises(rp.RelposValueError, match="variant"):
        pictures.scheme_picture("t5", variant="nothing")
