"""Golden vectors as test cases of ONNX: folders that its own backend runner and those of runtimes execute.

A case is a folder: ``model.onnx``, what goes in and what must come out in ``test_data_set_0``, and the tolerance in
``data.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError
from relpos_np.interop.onnx import to_onnx
from relpos_np.interop.onnx.package import package
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing.example import Example
from relpos_np.testing.files import new_folder
from relpos_np.testing.records import examples, name_of

# In half precision most nodes round every intermediate result, and an answer says little.
DTYPES = ("float64", "float32")


def write_onnx_cases(folder: Any, *, seed: int = 0) -> int:
    """Write the golden vectors that a model of ONNX can say as test cases of ONNX.

    Parameters
    ----------
    folder : path-like
        Where; it must not exist or be empty.
    seed : int
        Of the random numbers.

    Returns
    -------
    int
        Number of cases.

    Raises
    ------
    RelposError
        If the folder is not empty or cannot be written, or the package onnx is missing.
    """
    return sum(case is not None for _, case in writing_onnx(folder, seed=seed))


def writing_onnx(folder: Any, *, seed: int = 0) -> Iterator[tuple[str, str | None]]:
    """`write_onnx_cases`, with the scheme of each example and the case that it is, None if no model can say it."""
    check.integer("seed", seed, 0)
    package()
    with new_folder(folder) as target:
        for one in _examples(seed):
            case = None
            if (model := _model(one)) is not None:
                case = f"test_relpos_{name_of(one).replace('.', '_')}"
                _write(target / case, one, model)
            yield one.name, case


def _examples(seed: int) -> Iterator[Example]:
    for name, info in SCHEMES.items():
        if info.kind == "attention":
            for one in examples(name, seed=seed, dtypes=DTYPES):
                # ONNX multiplies what is excluded by 0.
                if one.edge != "nan_excluded":
                    yield one


def _model(one: Example) -> Any:
    q, k, v = one.q, one.k, one.v
    try:
        return to_onnx(one.position, q=q.shape, k=k.shape, v=v.shape, dtype=q.dtype, **one.kwargs)
    except RelposTypeError:
        return None


def _write(folder: Path, one: Example, model: Any) -> None:
    """One case, with the exact answer rounded to the dtype of the model."""
    data = folder / "test_data_set_0"
    data.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    expected = one.expected.astype(one.q.dtype)
    tolerated = float(np.max(one.tolerated()[0], initial=0.0))
    (folder / "data.json").write_text(json.dumps({"rtol": 0.0, "atol": tolerated}) + "\n", encoding="utf-8")
    for n, (name, x) in enumerate(zip("qkv", (one.q, one.k, one.v), strict=True)):
        (data / f"input_{n}.pb").write_bytes(_tensor(x, name))
    (data / "output_0.pb").write_bytes(_tensor(expected, "out"))


def _tensor(x: Any, name: str) -> bytes:
    return bytes(package().numpy_helper.from_array(np.ascontiguousarray(x), name).SerializeToString(deterministic=True))
