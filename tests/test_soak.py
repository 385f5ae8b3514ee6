"""The soak itself: a case of every kind passes, is repeated by its number, and a run makes a record."""

import json

import pytest

from tests import soak
from tests.soaking import kinds


def first_of(kind, seed=0):
    """The number of the first case of a kind."""
    return next(n for n in range(1000) if soak.draw(seed, n)[0] is kind)


@pytest.mark.parametrize("kind", [kind for _, kind in soak.KINDS], ids=lambda kind: kind.__name__)
def test_a_case_of_every_kind_is_right(kind):
    name, report = soak.run(0, first_of(kind))
    assert name == kind.__name__
    assert report.where
    assert not report.problems
    assert report.calls > 0


def test_one_case_is_repeated_and_described(capsys):
    number = first_of(kinds.forward)
    assert soak.main(["--case", str(number)]) == 0
    out = capsys.readouterr().out
    assert f"case {number} of seed 0: forward" in out
    assert "times the tolerance" in out


def test_a_short_run_makes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "_CROWDS", (2,))
    out = tmp_path / "record.json"
    code = soak.main(["--minutes", "0.02", "--seed", "5", "--out", str(out)])
    record = json.loads(out.read_text())
    assert code == (0 if record["ok"] else 1)
    assert record["mismatches"] == 0
    assert record["cases"]["all"] > 0
    assert {"seed", "seconds", "calls", "processor", "versions", "resident_memory"} <= set(record)
    assert "cases" in capsys.readouterr().err
