"""A scheme that is added in two files is found everywhere; that its bugs are too, the planted ones of others show."""

import os
import subprocess
import sys

import pytest

from tests.mutation.planted import copy_tree

pytestmark = pytest.mark.mutation

FOUND = """
import sys
sys.path[:0] = ["docs", "asv_bench"]
import relpos_np as rp, draw, pages, register
from benchmarks.accuracy import Accuracy
from relpos_np.testing import sweep
from relpos_np.testing.records import records
assert rp.Mixture and "mixture_logits" in rp.reference.__all__
assert "scheme_mixture" in draw.names() and "scheme_mixture.png" in draw.gallery()
assert "relpos_np.Mixture" in pages.page(rp.SCHEMES["mixture"]) and "schemes/mixture.md" in pages.table()
assert ("mixture", None) in sweep.parts() and "mixture" in Accuracy.params[0]
assert any("Mixture" in text for text in register.files().values())
assert any(record.name.startswith("mixture.") for record in records())
assert all(case.error() <= 1 for case in sweep.cases("mixture", None, ["numpy", "terms", "numba"], 0))
"""


def test_two_files_are_found_everywhere(tmp_path):
    """In a copy of the tree, where one that there is stands by other names as well."""
    copy_tree(tmp_path)
    for folder in ("relpos_np/schemes", "tests/naive"):
        text = (tmp_path / folder / "inkling.py").read_text(encoding="utf-8")
        for old, new in (("Inkling", "Mixture"), ("inkling", "mixture"), ("relative_logits", "mixture_logits")):
            text = text.replace(old, new)
        (tmp_path / folder / "mixture.py").write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", FOUND]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
