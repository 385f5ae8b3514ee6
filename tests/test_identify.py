"""Identifying what produced arrays: every variant of the register, conventions, and what cannot be told apart."""

import json

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._commands import main as cli
from relpos_np.testing import identify
from tests.every import ABSOLUTE, ATTENTION


def laid_out(scheme):
    """Arrays of a scheme under names that say nothing, and its numbers under their own; no flags and no choices."""
    arrays, numbers = [], {}

    def look(scheme, prefix):
        for name, value in testing.arguments(scheme).items():
            if isinstance(value, np.ndarray):
                arrays.append(value)
            elif isinstance(value, tuple) and any(isinstance(entry, np.ndarray) for entry in value):
                arrays.extend(entry for entry in value if entry is not None)
            elif isinstance(value, rp.Scheme):
                look(value, f"{prefix}{name}.")
            elif value is not None and not isinstance(value, bool | str):
                numbers[prefix + name] = value

    look(scheme, "")
    return {f"array_{n}": x for n, x in enumerate(arrays)} | numbers


# Variants that the examples of some schemes cannot tell apart, and why.
ALIKE = {
    # Under a causal mask the forms differ by a number per query, which the softmax takes out.
    "alibi": [{("alibi", "symmetric"), ("alibi", "causal"), ("alibi", "key")}],
    # No distance of so few keys lies where float32 rounds to another bucket.
    "t5": [{("t5", "exact"), ("t5", "float32"), ("t5", "flaxformer")}],
    # The same shift; only the models' masks differ.
    "transformer_xl": [{("transformer_xl", "transformer_xl"), ("transformer_xl", "espnet_legacy")}],
    # Where both grids divide, pooled keys stand at the same coordinates.
    "decomposed": [{("decomposed", "sam"), ("decomposed", "mvit")}],
}


def first_variants():
    """Every scheme in the default run, its other variants in that of servers and crowds."""
    seen = set()
    for name, variant in ATTENTION:
        yield pytest.param(name, variant, marks=[pytest.mark.stress] if name in seen else [])
        seen.add(name)


@pytest.mark.parametrize(("name", "variant"), list(first_variants()))
def test_every_variant_is_found(name, variant):
    e = testing.example(name, variant=variant, size="tiny", dtype="float64")
    stated = {key: value for key, value in e.kwargs.items() if key in ("mask", "scale")}
    out = rp.attention(e.q, e.k, e.v, position=e.position, backend="numpy", **e.kwargs)
    found = identify(e.q, e.k, e.v, out=out, given=laid_out(e.position), **stated)
    assert found.precision == "float64"
    named = {(match.scheme, match.variant): match for match in found.matches}
    own = named[name, variant]
    others = next((group for group in ALIKE.get(name, ()) if (name, variant) in group), set())
    assert set(named) <= others | {(name, variant)}
    assert all(match.why for match in found.matches[1:])
    assert all(match.relative_error < 1e-12 for match in found.matches)
    # Each convention is the call's own, or one of those that are said to change nothing.
    scale = e.kwargs.get("scale", e.q.shape[-1] ** -0.5)
    wanted = {"causal": e.kwargs.get("causal", False), "offset": e.k.shape[-2] - e.q.shape[-2], "scale": scale}
    for option, value in wanted.items():
        assert value == own.call[option] or value in own.same[option], option


@pytest.mark.parametrize(("name", "variant"), ABSOLUTE)
def test_every_encoding_is_found(name, variant):
    e = testing.example(name, variant=variant, size="tiny")
    found = identify(x=e.x, out=e.encoding(e.x), given=laid_out(e.encoding))
    assert [(match.scheme, match.variant) for match in found.matches] == [(name, variant)]
    assert found.precision == "float32"
    assert found.unique


# --------------------------------------------------------------------------------- conventions of calls

RNG = np.random.default_rng(5)
Q, K, V = RNG.standard_normal((2, 4, 6, 8)), RNG.standard_normal((2, 2, 9, 8)), RNG.standard_normal((2, 2, 9, 5))
TABLE = RNG.standard_normal((8, 4))
T5 = rp.T5(TABLE, max_distance=16)
GIVEN = {"weights": TABLE, "max_distance": 16}


def only(found, scheme="t5"):
    """The one match, but for T5's roundings."""
    assert {match.scheme for match in found.matches} == {scheme}, found.nearest
    assert len({str(match.call) for match in found.matches}) == 1
    return found.matches[0]


@pytest.mark.parametrize("scale", [8**-0.5, 1.0, 0.125])
@pytest.mark.parametrize("offset", [3, 0])
@pytest.mark.parametrize("hidden", [None, 3, 0])
def test_scale_and_alignment(scale, offset, hidden):
    mask = None if hidden is None else np.arange(9) <= np.arange(6)[:, None] + hidden
    out = rp.attention(Q, K, V, position=T5, scale=scale, offset=offset, mask=mask, backend="numpy")
    call = only(identify(Q, K, V, out=out, given=GIVEN)).call
    assert (call["scale"], call["offset"], call["causal"]) == (scale, offset, hidden is not None)
    assert ("causal_is" in call) == (hidden not in (None, offset))


@pytest.mark.parametrize(("stated", "meant"), [(4, (4, 0)), (4, (3, 0)), (None, (2, 0)), ((3, 1), (3, 2)), (4, (2, 2))])
def test_windows(stated, meant):
    causal = meant[1] == 0
    out = rp.attention(Q, K, V, position=T5, window=meant, backend="numpy")
    match = only(identify(Q, K, V, out=out, given=GIVEN, window=stated, causal=causal))
    assert match.call["window"] in (meant, (meant[0], None))


@pytest.mark.parametrize("order", ["scores", "content"])
def test_caps_and_sinks(order):
    sinks = np.array([0.5, -1.0, 0.0, 2.0])
    options = {"softcap": 1.5, "cap_order": order, "sinks": sinks}
    out = rp.attention(Q, K, V, position=T5, backend="numpy", **options)
    call = only(identify(Q, K, V, out=out, given=GIVEN | {"extra": sinks}, softcap=1.5)).call
    assert (call["softcap"], call["cap_order"], call["sinks"]) == (1.5, order, "extra")


@pytest.mark.stress
@pytest.mark.parametrize(("cap", "order"), [(50.0, "scores"), (30.0, "content"), (10.0, "scores")])
def test_caps_that_nobody_stated(cap, order):
    """Those that models have; a stated one is never replaced by them."""
    how = {"position": T5, "softcap": cap, "cap_order": order, "scale": 1.0, "causal": True, "backend": "numpy"}
    out = rp.attention(Q, K, V, **how)
    call = only(identify(Q, K, V, out=out, given=GIVEN, causal=True)).call
    assert (call["softcap"], call["cap_order"], call["scale"], call["causal"]) == (cap, order, 1.0, True)
    assert not identify(Q, K, V, out=out, given=GIVEN, causal=True, softcap=3.0).matches


def test_a_cap_of_scores_that_nobody_stated():
    scores = rp.logits(Q, K, position=T5, softcap=30.0, backend="numpy")
    assert only(identify(Q, K, scores=scores, given=GIVEN)).call["softcap"] == 30.0


def test_arrays_in_other_orders():
    out = rp.attention(Q, K, V, position=T5, backend="numpy")
    turned = {name: x.swapaxes(-2, -3) for name, x in (("q", Q), ("k", K), ("v", V), ("out", out))}
    assert "q, k, v (..., L, H, D)" in only(identify(**turned, given=GIVEN)).layout
    match = only(identify(Q, K, V, out=out, given=GIVEN | {"weights": TABLE.T}))
    assert match.layout == ("tables with their two axes swapped",)
    heads = np.array([0, 1, 0, 1])
    out = rp.attention(Q, K[:, heads], V[:, heads], position=T5, backend="numpy")
    assert only(identify(Q, K, V, out=out, given=GIVEN)).layout == ("query head h reads key head h modulo H_kv",)
    q, k, v = (x[..., ::-1, :] for x in (Q, K, V))
    out = rp.attention(q, k, v, position=T5, offset=0, backend="numpy")[..., ::-1, :]
    assert only(identify(Q, K, V, out=out, given=GIVEN)).layout == ("distances count from query to key, i - j",)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_precision(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    found = identify(q, k, v, out=rp.attention(q, k, v, position=T5, backend="terms"), given=GIVEN)
    assert found.precision == dtype
    assert only(found).scheme == "t5"


@pytest.mark.parametrize(
    ("base", "dtype"),
    [(500_000.0, "float32"), (123.4567, "float64"), pytest.param(7_654_321.0, "float32", marks=pytest.mark.stress)],
)
def test_a_rotary_base_that_nobody_stated(base, dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    rotary = rp.Rotary(8, base=base, layout="interleaved")
    found = identify(q, k, v, out=rp.attention(q, k, v, position=rotary, causal=True, backend="numpy"))
    match = only(found, "rotary")
    assert (match.variant, match.call["causal"], found.precision) == ("interleaved", True, dtype)
    fitted = [note for note in found.notes if note.startswith("base: fitted")]
    if base == 500_000.0:
        assert (match.settings["base"], fitted) == (base, [])
    else:
        first, last = (float(x) for x in fitted[0].split("which ")[1].split(" explain")[0].split(" to "))
        assert first <= base <= last
        assert first <= match.settings["base"] <= last
        assert last - first < 1e-4 * base
        # Not more digits than the answer tells.
        assert match.settings["base"] == (base if dtype == "float64" else 7_654_300.0)


SQUARE = RNG.standard_normal((3, 1, 4, 12, 16))
PARTIAL = rp.Rotary(4)


@pytest.mark.parametrize(
    ("position", "scale", "words"),
    [
        (None, 48**-0.5, "1/sqrt(3 D)"),
        (None, 0.3, "fitted to the answer"),
        (T5, 64**-0.5, "1/sqrt(H D)"),
        pytest.param(rp.Rotary(), 0.37, "fitted to the answer", marks=pytest.mark.stress),
    ],
)
def test_a_scale_that_nobody_stated(position, scale, words):
    q, k, v = SQUARE
    given = GIVEN if position is T5 else {}
    out = rp.attention(q, k, v, position=position, scale=scale, causal=True, backend="numpy")
    found = identify(q, k, v, out=out, given=given, causal=True)
    assert found.matches, found.nearest
    # Not a scheme that hardly adds anything.
    assert position is not None or {match.scheme for match in found.matches} == {"plain"}
    assert found.matches[0].call["scale"] == pytest.approx(scale, rel=1e-9)
    assert found.matches[0].call["scale_is"] == words
    assert any(note.startswith("scale: fitted") for note in found.notes)


@pytest.mark.parametrize("position", [PARTIAL, pytest.param(rp.Rotary(channels=(12, 16)), marks=pytest.mark.stress)])
def test_a_share_of_the_channels_that_nobody_stated(position):
    q, k, v = SQUARE
    out = rp.attention(q, k, v, position=position, causal=True, backend="numpy")
    match = only(identify(q, k, v, out=out, causal=True), "rotary")
    wanted = {"dim": 4} if position is PARTIAL else {"channels": (12, 16)}
    assert wanted.items() <= match.settings.items()


@pytest.mark.parametrize("window", [(4, 2), (None, 2), (3, 0)])
def test_windows_that_nobody_stated(window):
    q, k, v = SQUARE
    out = rp.attention(q, k, v, position=T5, window=window, backend="numpy")
    match = only(identify(q, k, v, out=out, given=GIVEN))
    assert match.call["window"] == window


def test_a_factor_on_a_table():
    q, k, v = SQUARE
    out = rp.attention(q, k, v, position=rp.T5(3 * TABLE, max_distance=16), backend="numpy")
    assert only(identify(q, k, v, out=out, given=GIVEN, causal=False, scale=0.25)).settings["factor"] == 3


def test_slopes_of_heads_that_are_no_power_of_2():
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 6, 24, 16))
    slopes = 2.0 ** (-8 * np.arange(1, 7) / 6)
    out = rp.attention(q, k, v, position=rp.ALiBi(slopes=slopes), causal=True, backend="numpy")
    (one,) = identify(q, k, v, out=out, causal=True, scale=0.25).matches
    assert (one.scheme, one.settings["slopes"]) == ("alibi", "2^(-8 h / H)")


def test_a_cap_and_a_scale_that_nobody_stated():
    q, k, v, table = (np.random.default_rng(2).standard_normal(s) for s in (*[(4, 24, 16)] * 3, (32, 4)))
    position = rp.T5(table)
    out = rp.attention(3 * q, k, v, position=position, causal=True, scale=0.11, softcap=30.0, backend="numpy")
    (one,) = identify(3 * q, k, v, out=out, causal=True, given={"table": table}).matches
    assert (one.scheme, one.call["softcap"], one.call["cap_order"]) == ("t5", 30.0, "scores")
    assert one.call["scale"] == pytest.approx(0.11)


def test_the_bias_max_of_mpt():
    q, k, v = SQUARE
    out = rp.attention(q, k, v, position=rp.ALiBi(bias_max=16.0, form="key"), causal=True, backend="numpy")
    assert identify(q, k, v, out=out, causal=True, scale=0.25).matches[0].settings["bias_max"] == 16


def test_sinks_may_be_frequencies():
    """Whose base is no number that is looked for."""
    q, k, v = SQUARE
    out = rp.attention(q, k, v, window=(5, 0), sinks=np.ones(q.shape[1]), softcap=3.0, backend="numpy")
    assert not identify(q, k, v, out=out, given={"sinks": np.ones(q.shape[1])}).matches


def test_a_factor_on_positions_is_found_before_rarer_numbers():
    q, k, v = SQUARE
    slower = rp.Rotary(frequencies=rp.reference.rotary_frequencies(q.shape[-1]) / 3)
    found = identify(q, k, v, out=rp.attention(q, k, v, position=slower, backend="numpy"), causal=False, scale=0.25)
    assert only(found, "rotary").settings["factor"] == 3
    assert found.calls < 2000


def test_tables_as_checkpoints_have_them():
    q, k, v = SQUARE
    rows = RNG.standard_normal((1, 9, 16))
    out = rp.attention(q, k, v, position=rp.Shaw(rows[0]), backend="numpy")
    match = only(identify(q, k, v, out=out, given={"rel": rows}), "shaw")
    assert match.layout == ("tables without their first axis, which has length 1",)
    x, positions = RNG.standard_normal((2, 12, 16)), RNG.standard_normal((1, 40, 16))
    match = identify(x=x, out=x + positions[:, :12], given={"pos": positions}).matches[0]
    assert (match.scheme, match.layout) == ("learned", ("tables without their first axis, which has length 1",))


@pytest.mark.parametrize(
    ("position", "given", "named"),
    [
        ((T5, rp.ALiBi(form="symmetric")), GIVEN, "alibi + t5"),
        pytest.param((rp.Rotary(), T5), GIVEN, "rotary + t5", marks=pytest.mark.stress),
        pytest.param((rp.Rotary(), rp.ALiBi()), {}, "alibi + rotary", marks=pytest.mark.stress),
        pytest.param((T5, rp.T5(TABLE[:6])), GIVEN | {"other": TABLE[:6]}, None, marks=pytest.mark.stress),
    ],
)
def test_two_schemes_together(position, given, named):
    found = identify(Q, K, V, out=rp.attention(Q, K, V, position=position, backend="numpy"), given=given)
    if named is None:
        # max_distance is 16 for one of them and 128 for the other, and was stated for both.
        assert not found.matches
        return
    assert {match.scheme for match in found.matches} == {named}
    match = found.matches[0]
    assert (match.call["scale_is"], match.call["causal"]) == ("1/sqrt(D)", False)
    assert match.arrays == ({"t5.table": "weights"} if given else {})
    assert all(one.why for one in found.matches[1:])


def test_scores_and_log_sum_exp_tell_more():
    keys = rp.ALiBi(form="key")
    out, lse = rp.attention(Q, K, V, position=keys, causal=True, return_lse=True, backend="numpy")
    named = [match.variant for match in identify(Q, K, V, out=out).matches]
    assert {"key", "causal"} <= set(named)
    found = identify(Q, K, V, out=out, lse=lse)
    assert {match.variant for match in found.matches} == {"key"}
    scores = np.where(np.isneginf(s := rp.logits(Q, K, position=keys, causal=True)), -1e9, s)
    assert {match.variant for match in identify(Q, K, scores=scores).matches} == {"key"}


@pytest.mark.stress
def test_nothing_fits():
    found = identify(Q, K, V, out=RNG.standard_normal((2, 4, 6, 5)), given=GIVEN)
    assert (found.matches, found.precision, found.unique) == ((), None, False)
    assert found.nearest
    assert min(match.relative_error for match in found.nearest) > 0.1
    assert "takes" in found.untried["fire"] or "arrays" in found.untried["fire"]
    # A setting that is not stated is not guessed, but for rotary bases; one that is stated is used as it is.
    sandwich = rp.attention(Q, K, V, position=rp.Sandwich(dim=6), backend="numpy")
    assert not identify(Q, K, V, out=sandwich).matches
    assert only(identify(Q, K, V, out=sandwich, given={"dim": 6}), "sandwich").settings["dim"] == 6
    rotary = rp.attention(Q, K, V, position=rp.Rotary(8, base=123.0), backend="numpy")
    assert only(identify(Q, K, V, out=rotary, given={"base": 123.0}), "rotary").settings["base"] == 123.0
    assert not identify(Q, K, V, out=rotary, given={"base": 124.0}).matches


@pytest.mark.stress
def test_large_operands_are_cut():
    q, k, v = RNG.standard_normal((3, 2, 2, 3000, 8))
    out = rp.attention(q, k, v, position=T5_OF_TWO, window=(700, 0))
    found = identify(q, k, v, out=out, given={"weights": T5_OF_TWO.table}, window=700)
    assert only(found).call["window"] == (700, 0)
    assert any("large operands" in note for note in found.notes)
    assert "selective" not in {match.scheme for match in found.matches}


T5_OF_TWO = rp.T5(TABLE[:, :2])


# --------------------------------------------------------------------------------- refusals and the command


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("out or scores: is missing", {"q": Q, "k": K, "v": V}),
        ("v: is missing", {"q": Q, "k": K, "out": Q}),
        ("q: is missing", {"out": Q}),
        ("shapes do not belong together", {"q": Q, "k": K, "v": V, "out": Q[:1]}),
        ("holds no finite number", {"q": Q, "k": K, "v": V, "out": np.full((2, 4, 6, 5), np.nan)}),
        ("either out or scores", {"q": Q, "k": K, "v": V, "out": Q, "scores": Q}),
        ("no scheme has a parameter of this name", {"q": Q, "k": K, "scores": Q, "given": {"bas": 3.0}}),
        ("expected an array of numbers", {"q": Q, "k": K, "scores": Q, "given": {"t": np.array(["a"] * 3)}}),
        ("identify has no such argument", {"q": Q, "k": K, "scores": Q, "dropout": 0.1}),
        ("window: expected", {"q": Q, "k": K, "scores": Q, "window": (1, 2, 3)}),
        ("cap_order", {"q": Q, "k": K, "scores": Q, "cap_order": "scores"}),
        ("does not go with x", {"x": Q, "q": Q, "out": Q}),
        ("expected the shape of x", {"x": Q, "out": K}),
        ("mask", {"q": Q, "k": K, "v": V, "out": Q[..., :5], "mask": np.ones(4, bool)}),
    ],
)
def test_bad_input(words, arguments):
    with pytest.raises(rp.RelposError, match=words):
        identify(**arguments)


def test_command(tmp_path, capsys):
    path = tmp_path / "saved.npz"
    out = rp.attention(Q, K, V, position=T5, causal=True, backend="numpy")
    np.savez(path, q=Q, k=K, v=V, out=out, causal=True, **{"position.weights": TABLE, "max_distance": 16})
    assert cli.main(["identify", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "float64"
    assert {match["scheme"] for match in found["matches"]} == {"t5"}
    assert found["matches"][1]["why"]
    assert cli.main(["identify", str(path)]) == 0
    assert "table = position.weights" in capsys.readouterr().out
    np.savez(path, x=Q, out=Q**2, dim=8)
    assert cli.main(["identify", str(path)]) == 1
    assert "nearest" in capsys.readouterr().out
    np.savez(path, q=Q, k=K)
    assert cli.main(["identify", str(path)]) == 2
    assert "out or scores: is missing" in capsys.readouterr().err
