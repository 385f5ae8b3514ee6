"""The planted bugs apply, and some that are drawn anew each time are caught: ``pytest -m mutation``."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.planted import NEEDS, ROOT, bugs, can_run, draw, plant_all, read_record, with_bug

pytestmark = pytest.mark.mutation

ALL = bugs()


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_bug_applies(bug):
    with_bug(bug)
    assert bug.line != bug.bug
    assert bug.needs in NEEDS
    assert bug.tests
    assert [test for test in bug.tests if not Path(ROOT, test.partition("::")[0]).is_file()] == []


def test_names_are_distinct():
    assert [name for name, count in Counter(bug.name for bug in ALL).items() if count > 1] == []


def test_some_are_caught(capsys):
    """Of those that were caught before; the night plants all."""
    caught = read_record()["seconds"]
    with capsys.disabled():
        outcomes = plant_all(draw([bug for bug in ALL if bug.name in caught and can_run(bug)], 6), jobs=2)
    assert [str(found) for found in outcomes if not found.by or found.broken] == []
