"""Every row of the table of faults has a test that is named after it."""

import ast
import re
from pathlib import Path

ROWS = range(1, 51)


def rows_with_tests():
    """Numbers in the names of this folder's test functions."""
    files = Path(__file__).parent.glob("test_*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {int(found[1]) for name in names if (found := re.match(r"test_row_(\d\d)_", name))}


def test_every_row_is_tested():
    assert rows_with_tests() == set(ROWS)
