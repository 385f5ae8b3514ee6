"""How planted bugs find their place: by function and syntax, whatever the formatting."""

import ast
import tomllib

import pytest

from tests.mutation import generated, trees
from tests.mutation.anchors import ROOT, AnchorError, Bug, planted

SOURCE = '''
"""A module."""
LIMIT = 3


class Scheme:
    """One."""

    @staticmethod
    def lower(q, u):
        """Several

          lines."""
        if u is not None:  # a remark
            q = q + (
                u[:, None]
            )
        for i in range(3):
            q[i] += u
        return q, q * LIMIT


# here
def other(u):
    return u[:, None] + 1  # kept
'''


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "relpos_np" / "schemes").mkdir(parents=True)
    (tmp_path / "relpos_np" / "schemes" / "one.py").write_text(SOURCE)
    return tmp_path


def edited(old, new):
    return ast.dump(ast.parse(SOURCE.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("at", "right", "wrong", "old", "new"),
    [
        ("Scheme.lower", "q+u[ :,None ]", "q", "q + (\n                u[:, None]\n            )", "q"),
        ("Scheme.lower", "q[i]", "q[0]", "q[i]", "q[0]"),
        ("Scheme.lower", "q[i] += u", "pass", "q[i] += u", "pass"),
        ("Scheme.lower", "for i in range(3): ...", "for i in range(1, 3): ...", "range(3)", "range(1, 3)"),
        ("Scheme.lower", "q, q * LIMIT", "(q, q)", "q, q * LIMIT", "q, q"),
        ("LIMIT", "3", "4", "LIMIT = 3", "LIMIT = 4"),
        ("other", "u[:, None]", "u", "return u[:, None]", "return u"),
    ],
)
def test_what_is_named_is_replaced_and_nothing_else(at, right, wrong, old, new, tree):
    changed = planted(Bug("a bug", f"schemes.one:{at}", right, wrong), tree)
    assert ast.dump(ast.parse(changed)) == edited(old, new)
    untouched = SOURCE.split("# here\n")[0 if at == "other" else 1]
    assert untouched in changed


@pytest.mark.parametrize(
    ("at", "right", "wrong", "words"),
    [
        ("schemes.two:Scheme.lower", "q[i]", "q", "no file .*two.py; it stands in schemes.one:Scheme.lower"),
        ("schemes.one:Scheme.lift", "q[i]", "q", "no Scheme.lift in .*; it stands in schemes.one:Scheme.lower"),
        ("schemes.one:other", "q[i]", "q", "stands 0 times, not once, .*; it stands in schemes.one:Scheme.lower"),
        ("schemes.one:other", "v[0]", "v", "stands nowhere else either"),
        ("schemes.one:Scheme.lower", "u", "v", "stands 3 times, not once, in schemes.one:Scheme.lower$"),
        ("schemes.one:other", "u[:, None]", "u[ :, None]", "nothing is replaced"),
    ],
)
def test_what_is_gone_is_said_with_where_it_went(at, right, wrong, words, tree):
    with pytest.raises(AnchorError, match=words):
        planted(Bug("a bug", at, right, wrong), tree)


def test_files_that_name_a_module_come_first():
    found = trees.likely("relpos_np/formulas/rotary_axes.py", ["tests/test_index.py"])
    assert found[:2] == ["tests/test_three_way.py", "tests/test_index.py"]
    assert any("rotary" in name for name in found[2:5])
    assert all("/cuda/" not in name for name in found)
    assert all("/cuda/" in name for name in trees.likely("relpos_np/kernels/_cuda/tile.py"))


MUTATED = """
class Scheme:
    def lower(self, q: float | None) -> float:
        if q is None:
            raise ValueError(f"q: found {q + 1}")
        return q + 2

    def __repr__(self):
        return "three" * 3


def _build(at):
    return at + 4


register("scheme", Scheme, 5)
"""


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("q is None", True),
        ("q + 2", True),
        ("float |", False),
        ("q + 1", False),
        ('"three"', False),
        ("at + 4", False),
        ("5", False),
    ],
)
def test_what_computes_nothing_is_not_mutated(code, counts, tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    generated._aside.cache_clear()
    (tmp_path / "scheme.py").write_text(MUTATED)
    lines = MUTATED.splitlines()
    line = next(n for n, text in enumerate(lines, 1) if code in text)
    assert generated.computes("scheme.py", line, lines[line - 1].index(code)) == counts


def test_each_survivor_has_one_verdict():
    for one in tomllib.loads(generated.JUDGED.read_text(encoding="utf-8")).get("survivor", []):
        assert {"at", "before", "after"} < set(one)
        assert ("equivalent" in one) != ("test" in one)
        assert "equivalent" in one or (ROOT / one["test"].partition("::")[0]).exists()
