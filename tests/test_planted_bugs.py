"""The planted bugs still apply: each replaces something that stands in the code, by something else."""

import pytest

from tests.planted_bugs import BUGS, FIRST, INTERPRETED, OTHERS, ROOT, SIMULATED, TESTS, file_of


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_applies(bug):
    assert bug.right in (ROOT / "relpos_np" / bug.file).read_text(encoding="utf-8")
    assert bug.right != bug.wrong


def test_there_are_enough_with_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 75


def test_every_test_file_is_run_or_said_not_to_be():
    there = [path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")]
    assert sorted([*TESTS.split(), *OTHERS.split()]) == sorted([*there, "faults"])


def test_every_file_with_a_bug_has_tests_that_run_first():
    assert set(FIRST) == {bug.file for bug in BUGS}
    for names in FIRST.values():
        first = {name.partition(":")[0] for name in names.split()}
        assert first
        apart = {"cuda": SIMULATED, "interpreted": INTERPRETED}
        assert first <= {*TESTS.split(), *(f"{folder}/{n}" for folder, names in apart.items() for n in names.split())}
        assert all((ROOT / file_of(name)).exists() for name in first)
