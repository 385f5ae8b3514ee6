"""The planted bugs still apply, and a sample of them is caught: ``pytest -m mutation``."""

import os

import pytest

from tests.mutation import planted
from tests.mutation.anchors import planted as apply
from tests.mutation.planted import ALL

pytestmark = pytest.mark.mutation


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_bug_applies(bug):
    apply(bug)


def test_there_are_enough_with_names_of_their_own():
    assert len({bug.name for bug in ALL}) == len(ALL) >= 200


def test_a_sample_is_caught():
    seed = int(os.environ.get("RELPOS_MUTATION_SEED", "0"))
    known = [bug for bug in ALL if bug.name in planted.recorded()]
    found, broken = planted.run(planted.sample(known, 8, seed), jobs=2, quick=True)
    assert [name for name, by in found.items() if not by] == []
    assert broken is None
