"""`relpos check --promises`: what it measures, what it says, and that it notices what is broken."""

import json
import sys

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._commands import main as cli
from relpos_np._commands import promises
from tests.every import ATTENTION

BY_NAME = {name: how for name, _, _, _, how in promises.MEASURES}
LIMITS = {name: limit for name, _, limit, _, _ in promises.MEASURES}


@pytest.fixture
def few(monkeypatch):
    """Two small examples in place of all."""
    monkeypatch.setattr(promises, "_examples", lambda *_: iter([testing.example("t5"), testing.example("alibi")]))


def test_every_scheme_is_measured():
    found = {(one.name, one.variant) for one in promises._examples("tiny")}
    assert found == set(ATTENTION)


def keep(monkeypatch, *names):
    """Measure these promises only."""
    monkeypatch.setattr(promises, "MEASURES", tuple(row for row in promises.MEASURES if row[0] in names))


def command(capsys, *argv):
    code = cli.main(["check", "--promises", *argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        *("float32", "float64", "than_numpy", "many_terms", "sums", "repeatable", "batch"),
        pytest.param("many_keys", marks=pytest.mark.slow),  # tests/test_many_keys.py says the same of fewer numbers
    ],
)
def test_promises_are_kept(name, few):
    if name == "float64":
        pytest.importorskip("mpmath")
    measured, note = BY_NAME[name]()
    assert 0 <= measured <= LIMITS[name]
    assert note
    if name in {"float32", "float64", "many_keys", "many_terms", "than_numpy"}:
        assert measured > 0, "nothing was measured"


@pytest.mark.stress
def test_all_promises_are_kept(capsys):
    """With every example, as a user measures them."""
    code, said = command(capsys)
    assert code == 0, said


def test_wrong_numbers_break_promises(few, unmet, monkeypatch):
    right = rp.backend.evaluate
    monkeypatch.setattr(rp.backend, "evaluate", lambda *args: tuple(x * np.float32(1.00001) for x in right(*args)))
    for name in ("float32", "many_keys", "than_numpy", "sums"):
        assert BY_NAME[name]()[0] > LIMITS[name], name
    monkeypatch.setattr(rp.backend, "evaluate", lambda *args: tuple(x * np.nan for x in right(*args)))
    assert BY_NAME["float32"]()[0] == np.inf


def test_wrong_float64_breaks_its_promise(monkeypatch):
    pytest.importorskip("mpmath")
    right = rp.attention
    monkeypatch.setattr(rp, "attention", lambda *args, **kwargs: right(*args, **kwargs) * (1 + 1e-13))
    assert BY_NAME["float64"]()[0] > LIMITS["float64"]


def test_bits_that_differ_break_promises(monkeypatch):
    right, calls = rp.attention, iter(range(1000))
    monkeypatch.setattr(rp, "attention", lambda *args, **kwargs: right(*args, **kwargs) + next(calls) % 2)
    for name in ("repeatable", "batch"):
        assert BY_NAME[name]()[0] > 0, name


@pytest.mark.parametrize("name", ["memory", "interrupt", "callers"])
def test_what_a_process_of_its_own_shows(name, monkeypatch):
    """Not the numbers, which a busy machine spoils and other tests are about: what is made of an answer."""
    answers = {"memory": "9.5\n", "interrupt": "1.25\n", "callers": "3\n"}
    monkeypatch.setattr(promises, "_child", lambda *_, **__: answers[name])
    try:
        measured, _ = BY_NAME[name]()
    except promises._AbsentError:
        pytest.skip("not on this system")
    assert measured > LIMITS[name]
    assert measured == float(answers[name]) * (3 if name == "callers" else 1)


def test_an_interrupt_that_never_comes_breaks_the_promise(monkeypatch):
    if sys.platform == "win32":
        pytest.skip("not measured there")
    monkeypatch.setattr(promises, "_child", lambda *_, **__: "")
    assert BY_NAME["interrupt"]()[0] == np.inf


def test_a_process_that_dies_breaks_the_promise(monkeypatch, capsys):
    keep(monkeypatch, "callers")
    monkeypatch.setattr(promises, "_AT_ONCE", "raise SystemExit('killed')")
    code, out = command(capsys, "--json")
    (found,) = json.loads(out)["promises"]
    assert code == 1
    assert found["ok"] is False
    assert "killed" in found["note"]


def test_what_is_missing_is_said_and_breaks_nothing(monkeypatch, capsys):
    keep(monkeypatch, "float64")
    monkeypatch.setitem(sys.modules, "mpmath", None)
    code, out = command(capsys, "--json")
    found = {one["name"]: one for one in json.loads(out)["promises"]}
    assert code == 0
    assert all(one["ok"] is None and one["measured"] is None for one in found.values())
    assert "install mpmath" in found["float64"]["note"]


@pytest.mark.parametrize(("measured", "code", "word"), [(0.5, 0, "ok"), (1.5, 1, "BROKEN")])
def test_the_table_and_the_exit_code(measured, code, word, monkeypatch, capsys):
    monkeypatch.setattr(promises, "MEASURES", (("one", "a promise", 1.0, "s", lambda: (measured, "somewhere")),))
    found, out = command(capsys)
    assert found == code
    assert word in out
    assert "a promise" in out
    assert "somewhere" in out
    found, out = command(capsys, "--json")
    assert found == code
    answer = json.loads(out)
    assert answer["ok"] is (code == 0)
    assert answer["processor"]
    assert answer["promises"][0]["measured"] == measured


def test_promises_have_no_seed(capsys):
    assert cli.main(["check", "--promises", "--seed", "3"]) == 2
    assert "--seed" in capsys.readouterr().err
