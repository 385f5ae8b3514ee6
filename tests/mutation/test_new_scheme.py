"""A scheme that is added in two files is found everywhere; that its bugs are too, the planted ones of others show."""

import os
import subprocess
import sys

import pytest

from tests.mutation.planted import copy_tree

pytestmark = pytest.mark.mutation

SCHEME = '''
r"""A bias that falls with the square of the distance."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import difference_map, relative_positions
from relpos_np._contract.problem import Site
from relpos_np._contract.terms import TableTerm, Terms
from relpos_np.schemes.base import Scheme, SchemeGradient
from relpos_np.schemes.registry import register
from relpos_np.schemes.sample import Sample
from relpos_np.types import Array


def gaussian_bias(w: Array, b: Array, q_len: int, k_len: int, offset: int) -> Array:
    r"""The bias of every pair: -abs(w d^2 + b)."""
    d = np.arange(k_len) - np.arange(q_len)[:, None] - offset
    return -np.abs(w[:, None, None] * d**2 + b[:, None, None])


class GaussianBias(Scheme):
    r"""A bias -abs(w d^2 + b) of each head."""

    relative = True

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = check.table("w", w, "heads"), check.table("b", b, "heads")

    def check(self, site: Site) -> None:
        if len(self.w) != site.heads:
            raise check.RelposValueError(f"w: {len(self.w)} heads, the call has {site.heads}")

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        return gaussian_bias(self.w, self.b, site.q_len, site.k_len, site.offset).astype(site.dtype)

    def _inside(self, site: Site) -> tuple[Array, Array]:
        squares = np.square(relative_positions(site.q_len, site.k_len, site.offset).astype(np.float64))
        return squares, np.multiply.outer(self.w, squares) + self.b[:, None]

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        table = -np.abs(self._inside(site)[1])
        return Terms(tables=(TableTerm(table.astype(site.dtype), difference_map(site.q_len, site.k_len)),))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        squares, inside = self._inside(site)
        slope = -np.sign(inside) * grad.tables[0].table
        return SchemeGradient(arrays={"w": (slope * squares).sum(axis=-1), "b": slope.sum(axis=-1)})

    def __repr__(self) -> str:
        return f"GaussianBias(heads={len(self.w)})"


@register("gaussian", GaussianBias, adds="a bias by the squared distance", paper="Nobody, 2026", models="none")
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads = parts["q"].shape[-3]
    w, b = np.abs(at.normal(heads)) / at.pick(64, 8), at.normal(heads)
    return {**parts, "position": GaussianBias(w.astype(b.dtype), b), "kwargs": {"causal": True}}

'''
LOOPS = '''
"""A Gaussian bias as loops."""

from tests.naive.by_name import witness
from tests.naive.seeds import floats


@witness("gaussian")
def gaussian(w, b, offset):
    """-|w d^2 + b| (Nobody 2026)."""
    w, b = floats(w), floats(b)
    return lambda _, h, i, j: -abs(w[h] * (j - i - offset) ** 2 + b[h])
'''
FOUND = """
import sys
sys.path[:0] = ["docs", "asv_bench"]
import relpos_np as rp, draw, pages, register
from benchmarks.accuracy import Accuracy
from relpos_np.testing import sweep
from relpos_np.testing.records import records
assert rp.GaussianBias and "gaussian_bias" in rp.reference.__all__
assert "scheme_gaussian" in draw.names() and "scheme_gaussian.png" in draw.gallery()
assert "relpos_np.GaussianBias" in pages.page(rp.SCHEMES["gaussian"]) and "schemes/gaussian.md" in pages.table()
assert ("gaussian", None) in sweep.parts() and "gaussian" in Accuracy.params[0]
assert any("GaussianBias" in text for text in register.files().values())
assert any(record.name.startswith("gaussian.") for record in records())
assert all(case.error() <= 1 for case in sweep.cases("gaussian", None, ["numpy", "terms", "numba"], 0))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree with the new scheme."""
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    (tree / "relpos_np/schemes/gaussian.py").write_text(SCHEME.lstrip(), encoding="utf-8")
    (tree / "tests/naive/gaussian.py").write_text(LOOPS.lstrip(), encoding="utf-8")
    return tree


def test_two_files_are_found_everywhere(copy):
    environment = os.environ | {"PYTHONPATH": str(copy), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", FOUND]
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
