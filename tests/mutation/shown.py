"""Calls that show the bugs beyond examples: ``python -m tests.mutation.shown`` makes each with its bug and without.

Also what those calls are written with: operands of any size, and answers compared with those of the formulas.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import relpos_np as rp
from tests.mutation.anchors import file_of, planted


def draw(
    *batch: int, heads: int, q_len: int, kv_heads: int | None = None, k_len: int | None = None, dim: int = 16
) -> dict[str, Any]:
    """Queries, keys and values in float64."""
    rng = np.random.default_rng(0)
    k_len, kv_heads = k_len or q_len, kv_heads or heads
    q, k, v = (
        rng.standard_normal((*batch, h, n, dim)) for h, n in ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    )
    return {"q": q, "k": k, "v": v}


def table(*shape: int) -> Any:
    """Numbers of a trained table."""
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def close(found: Any, wanted: Any) -> None:
    """Equal but for rounding."""
    np.testing.assert_allclose(found, np.broadcast_to(wanted, np.shape(found)), rtol=1e-7, atol=1e-9)


def same(x: dict[str, Any], backend: str = "numba", **options: Any) -> None:
    """A backend gives what the formulas give."""

    def answer(backend: str) -> Any:
        rng = np.random.default_rng(1) if "dropout" in options else None
        return rp.attention(**x, **options, rng=rng, backend=backend)

    close(answer(backend), answer("numpy"))


def grads(x: dict[str, Any], backend: str = "numba", **options: Any) -> Any:
    """Gradients of a sum of the outputs, each with its own weight."""
    weights = np.random.default_rng(2).standard_normal(x["q"].shape[-2:])
    return rp.attention_vjp(**x, **options, grad_out=np.broadcast_to(weights, x["q"].shape), backend=backend)


def slopes(x: dict[str, Any], **options: Any) -> None:
    """Gradients of tables are those of the formulas."""
    found, wanted = (grads(x, backend, **options).position for backend in ("numba", "numpy"))
    for name, value in wanted.items():
        close(found[name], value)


def run(code: str) -> None:
    """Make a call."""
    exec(code, dict(globals()))  # noqa: S102


def main() -> int:
    """Make each call in a copy with its bug, which must fail, and here, which must not."""
    from tests.mutation.beyond import BEYOND
    from tests.mutation.trees import copy_tree

    chosen = [bug for bug in BEYOND if not sys.argv[1:] or any(word in bug.name for word in sys.argv[1:])]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(clean := Path(folder) / "clean")
        for bug in chosen:
            copy = Path(folder) / "copy"
            shutil.copytree(clean, copy, dirs_exist_ok=True)
            codes = []
            for source in ((clean / file_of(bug)).read_text(encoding="utf-8"), planted(bug, clean)):
                (copy / file_of(bug)).write_text(source, encoding="utf-8")
                command = [sys.executable, "-c", f"from tests.mutation.shown import run; run({bug.shown!r})"]
                environment = os.environ | {"PYTHONPATH": str(copy)}
                done = subprocess.run(command, cwd=copy, env=environment, check=False, capture_output=True, text=True)
                codes.append((done.returncode, done.stderr.strip()[-1500:]))
            good = codes[0][0] == 0 and codes[1][0] == 1 and "AssertionError" in codes[1][1]
            print("shown    " if good else "NOT SHOWN", bug.name, *([] if good else codes), flush=True)
            wrong += [] if good else [bug.name]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
