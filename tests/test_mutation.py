"""How planted bugs find their place: by a line of a file, whatever its indentation."""

import pytest

from tests.mutation.planted import Bug, DoesNotApplyError, draw, with_bug

SOURCE = """\
class Scheme:
    def lower(self, q, u):
        for i in range(3):
            q[i] += u
        return q

    def lift(self, q, u):
        return q
"""


@pytest.fixture
def tree(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "relpos_np").mkdir(exist_ok=True)
        (tmp_path / "relpos_np" / f"{name}.py").write_text(SOURCE)
    (tmp_path / "relpos_np" / "empty.py").write_text("")
    return tmp_path


def bug(line, wrong, name="one"):
    return Bug("a bug", f"relpos_np/{name}.py", line, wrong, ["tests/test_one.py"])


@pytest.mark.parametrize(
    ("line", "wrong", "old", "new"),
    [
        ("q[i] += u", "q[0] += u", "q[i]", "q[0]"),
        ("for i in range(3):", "for i in range(2):", "range(3)", "range(2)"),
        ("q[i] += u", "if i:\n    q[i] += u", "q[i] += u", "if i:\n                q[i] += u"),
        ("    q[i] += u\nreturn q", "    q[i] += u\nreturn u", "return q", "return u"),
        (
            "def lift(self, q, u):\n    return q",
            "def lift(self, q, u):\n    return -q",
            "u):\n        return q",
            "u):\n        return -q",
        ),
    ],
)
def test_the_line_is_replaced_and_nothing_else(line, wrong, old, new, tree):
    assert with_bug(bug(line, wrong), tree) == SOURCE.replace(old, new, 1)


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("return q", "one", "stands 2 times, not once, in relpos_np/one.py; "),
        ("return u", "one", "stands 0 times, .*; it stands nowhere"),
        ("q[i] += u", "empty", "stands 0 times, .*; it stands in relpos_np/one.py, relpos_np/two.py"),
        ("q[i] += u", "gone", "stands 0 times, not once, in relpos_np/gone.py; "),
    ],
)
def test_a_line_that_is_gone_is_named_with_where_it_went(line, name, words, tree):
    with pytest.raises(DoesNotApplyError, match=words):
        with_bug(bug(line, "pass", name), tree)


def test_the_seed_of_a_draw_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("RELPOS_SEED", "7")
    chosen = [bug(str(n), "pass") for n in range(50)]
    assert draw(chosen, 3) == draw(chosen, 3, 7) != draw(chosen, 3, 8)
    assert capsys.readouterr().out.splitlines()[0] == "bugs drawn with seed 7"
    monkeypatch.delenv("RELPOS_SEED")
    assert len({line.line for _ in range(5) for line in draw(chosen, 10)}) > 10
