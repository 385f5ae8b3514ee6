"""Cases by family: what is first, what is smallest, what is chosen, and that choosing nothing is an error."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.testing.cases import FEATURES
from relpos_np.testing.families import forms_of, made, of_family
from relpos_np.testing.grid import Grid
from tests.every import ATTENTION

# Queries on a grid of their own: never as many as keys.
NO_SELF = {("window", "rstt"), ("decomposed", "mvit")}
ALL = ATTENTION


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_every_scheme_has_ordinary_self_attention_first(name, variant):
    if (name, variant) in NO_SELF:
        with pytest.raises(rp.RelposValueError, match="no case of self"):
            list(testing.cases(name, variant=variant, families="self"))
        return
    found = list(testing.cases(name, variant=variant, families="self"))
    assert len(found) == 6
    for one in found:
        assert one.needs == frozenset()
        assert one.kwargs == {}
        assert one.q.shape == one.k.shape == one.v.shape
        assert one.q.shape[2] > 1
        assert one.family == "self"
    sizes = [one.q.size * one.k.shape[2] for one in found]
    assert sizes[0] == min(sizes)
    assert sizes[-1] == max(sizes)
    first = next(testing.cases(name, variant=variant))
    assert first.edge == "self_2"
    np.testing.assert_array_equal(first.q, found[0].q)


@pytest.mark.parametrize(
    ("longest", "every", "every_pair"), [(33, 5, 5), pytest.param(129, 1, 3, marks=pytest.mark.slow)], ids=["33", "129"]
)
@pytest.mark.parametrize(("name", "variant"), ALL)
def test_families_are_right_on_terms(name, variant, longest, every, every_pair):
    # Pairs of options are the largest family, a third of which is enough for each scheme.
    for family in testing.FAMILIES:
        found = of_family(family, name, variant=variant, dtype="float32", seed=0)
        small = [one for one in found if not one.long and one.q.shape[2] * one.k.shape[2] <= longest**2]
        for one in small[:: every_pair if family == "combined" else every]:
            assert one.backend_error("terms") <= 1, one.where


def test_what_families_hold():
    found = {one.edge: one for one in testing.cases("t5", variant="exact", families=testing.FAMILIES)}
    assert {one.family for one in found.values()} == set(testing.FAMILIES)
    by_family = {family: [one for one in found.values() if one.family == family] for family in testing.FAMILIES}
    assert all(one.needs == {"causal"} for one in by_family["causal"])
    assert all(one.needs == {"cross"} for one in by_family["cross"])
    assert all(one.needs == {"cross", "causal"} for one in by_family["decoding"])
    assert all("window" in one.needs for one in by_family["windows"])
    assert all("grouped_heads" in one.needs for one in by_family["grouped_heads"])
    assert set().union(*(one.needs for one in by_family["masks"])) == {"mask", "head_mask", "float_mask", "key_lengths"}
    assert all(one.long for one in by_family["long"])
    assert all((one.expected_lse == -np.inf).any() for one in by_family["excluded_rows"])
    for one in by_family["nan_excluded"]:
        assert np.isnan(one.k).any(axis=(1, 2, 3)).all()
        assert np.isfinite(one.expected).all()
    assert all(one.logit_bound > 89 for one in by_family["large_scores"])
    for one in by_family["borders"]:
        other = rp.T5(one.position.table, max_distance=one.position.max_distance, rounding="float32")
        assert np.abs(rp.attention(one.q, one.k, one.v, position=other) - one.expected).max() > 1e-3
    assert set().union(*(one.needs for one in found.values())) <= set(FEATURES)


def test_supports_by_name_and_by_function():
    edges = {one.edge for one in testing.cases("plain", families=("masks", "self"), supports=["mask"])}
    assert edges == {
        *(f"{word}_{n}" for word in ("bool_mask", "bool_mask_of_keys") for n in (9, 65, 129)),
        *(f"self_{n}" for n in (2, 16, 33, 65, 128, 257)),
    }
    small = [one.edge for one in testing.cases("plain", supports=lambda one: one.q.size < 100 and not one.needs)]
    assert small == ["self_2"]
    assert [one.edge for one in testing.cases("t5", variant="exact", families="long", long=True)] == ["long_1025"]


def test_every_pair_of_options_and_every_size_beside_a_tile_is_there():
    found = list(testing.cases("plain", families=testing.FAMILIES))
    options = [set(one.kwargs) for one in found if one.family == "combined"]
    names = {"causal", "window", "mask", "key_lengths", "scale", "offset", "softcap", "sinks"}
    assert all(any({a, b} <= one for one in options) for a in names for b in names)
    lengths = {n for one in found for n in (one.q.shape[2], one.k.shape[2])}
    assert {1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1023, 1024, 1025} <= lengths
    assert {one.q.shape[3] for one in found} >= {7, 32, 64, 96, 128}
    together = {(one.q.shape[3], one.q.shape[0] > 1, one.q.shape[2] > 64) for one in found}
    assert {(dim, some, far) for dim in (32, 64, 128) for some in (True, False) for far in (True, False)} <= together
    # Without keys only where that is the point.
    for one in found:
        assert np.isfinite(one.expected_lse).all() or one.family == "excluded_rows", one.where


def test_flags_are_those_of_the_registration():
    found = {repr(one.position) for one in testing.cases("t5", variant="exact", families="flags")}
    assert any("bidirectional=False" in one for one in found)
    assert len({one.partition("max_distance=")[2] for one in found}) > 2


@pytest.mark.parametrize("scheme", ["plain", "t5"])
def test_a_grid_has_no_other_sizes(scheme):
    """Kinds of cases stay: lengths that differ, heads that are grouped, options."""
    grid = Grid(lengths=(16, 64, 128), dims=(64,), heads=((8, None),), batches=(2,))
    found = [
        one
        for family in testing.FAMILIES
        for form in forms_of(family, scheme, None, grid)
        if (one := made(form, scheme, None, "float32", 0)) is not None
    ]
    assert {n for one in found for n in (one.q.shape[2], one.k.shape[2])} == {16, 64, 128}
    assert {(one.q.shape[0], one.q.shape[1], one.q.shape[3], one.v.shape[3]) for one in found} == {(2, 8, 64, 64)}
    assert {"self", "cross", "decoding", "grouped_heads", "combined", "calls"} <= {one.family for one in found}
    assert len({(one.family, one.edge) for one in found}) == len(found)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("families", {"families": "selfish"}),
        ("families", {"families": ()}),
        ("supports", {"supports": ["grouped"]}),
        ("no case of long", {"families": "long", "long": False}),
        ("no case of causal", {"families": "causal", "supports": []}),
        ("no case of t5", {"supports": lambda one: False}),
        ("no case of borders", {"scheme": "plain", "families": "borders"}),
        ("added to inputs", {"scheme": "sinusoidal", "families": "self"}),
    ],
)
def test_asking_for_nothing_is_an_error(words, options):
    with pytest.raises(rp.RelposValueError, match=words):
        list(testing.cases(**{"scheme": "t5", **options}))
