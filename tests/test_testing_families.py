"""Cases by family: what is first, what is smallest, what is chosen, and that choosing nothing is an error."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.testing.cases import FEATURES
from relpos_np.testing.families import of_family
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
    assert len(found) == 4
    for one in found:
        assert one.needs == frozenset()
        assert one.kwargs == {}
        assert one.q.shape == one.k.shape == one.v.shape
        assert one.q.shape[2] > 1
        assert one.family == "self"
    sizes = [one.q.size for one in found]
    assert sizes == sorted(sizes)
    first = next(testing.cases(name, variant=variant))
    assert first.edge == "self_2"
    np.testing.assert_array_equal(first.q, found[0].q)


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_families_are_right_on_terms(name, variant):
    for family in testing.FAMILIES:
        for one in of_family(family, name, variant=variant, dtype="float32", seed=0):
            if one.long:
                continue
            assert one.backend_error("terms") <= 1, one.where


def test_what_families_hold():
    found = {one.edge: one for one in testing.cases("t5", variant="exact", families=testing.FAMILIES)}
    assert {one.family for one in found.values()} == set(testing.FAMILIES)
    by_family = {family: [one for one in found.values() if one.family == family] for family in testing.FAMILIES}
    assert all(one.needs == {"causal"} for one in by_family["causal"])
    assert all(one.needs == {"cross"} for one in by_family["cross"])
    assert all(one.needs == {"cross", "causal"} for one in by_family["decoding"])
    assert all("window" in one.needs for one in by_family["windows"])
    assert all(one.needs == {"grouped_heads"} for one in by_family["grouped_heads"])
    assert set().union(*(one.needs for one in by_family["masks"])) == {"mask", "float_mask", "key_lengths"}
    assert all(one.long for one in by_family["long"])
    assert all((one.expected_lse == -np.inf).any() for one in by_family["excluded_rows"])
    for one in by_family["nan_excluded"]:
        assert np.isnan(one.k).any()
        assert np.isfinite(one.expected).all()
    assert all(one.logit_bound > 89 for one in by_family["large_scores"])
    for one in by_family["borders"]:
        other = rp.T5(one.position.table, max_distance=one.position.max_distance, rounding="float32")
        assert np.abs(rp.attention(one.q, one.k, one.v, position=other) - one.expected).max() > 1e-3
    assert set().union(*(one.needs for one in found.values())) <= set(FEATURES)


def test_supports_by_name_and_by_function():
    edges = [one.edge for one in testing.cases("plain", families=("masks", "self"), supports=["mask"])]
    assert edges == ["bool_mask_5", "bool_mask_40", "self_2", "self_5", "self_16", "self_40"]
    small = [one.edge for one in testing.cases("plain", supports=lambda one: one.q.size < 100 and not one.needs)]
    assert small == ["self_2", "self_5"]
    assert [one.edge for one in testing.cases("t5", variant="exact", families="long", long=True)] == ["long_1023"]


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
