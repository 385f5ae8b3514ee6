"""The planted bugs still apply: each replaces something that stands in the code, by something else."""

import pytest

from tests.planted_bugs import BUGS, ROOT


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_applies(bug):
    assert bug.right in (ROOT / "relpos_np" / bug.file).read_text(encoding="utf-8")
    assert bug.right != bug.wrong


def test_there_are_enough_with_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 25
