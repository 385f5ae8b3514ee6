"""What this installation consists of, for bug reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

# What changes how anything here runs; others are nobody's business.
_VARIABLES = ("RELPOS_", "NUMBA_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_VISIBLE_DEVICES")
# Those that kernels, pictures and weights come from, and those whose arrays users bring.
_PACKAGES = (
    "scipy",
    "numba",
    "llvmlite",
    "numba-cuda",
    "matplotlib",
    "rich",
    "ml_dtypes",
    "safetensors",
    "torch",
    "jax",
    "cupy",
)


def collect_versions() -> dict[str, Any]:
    """Versions, processor, vector target, threads, kernel cache, backends and environment, as plain data."""
    import platform
    from pathlib import Path

    import numpy as np

    import relpos_np

    found: dict[str, Any] = {
        "relpos_np": relpos_np.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "processors": {"here": os.cpu_count(), "ours": usable()},
        "numpy": np.__version__,
        "blas": blas() or np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name"),
        "backend": relpos_np.backend.current(),
    }
    found |= of_packages(_PACKAGES)
    found["installed"] = str(Path(relpos_np.__file__).parent)
    found["not_available"] = relpos_np.backend.available()[1]
    found["environment"] = _environment()
    found["kernels"] = kernels()
    return found


def _environment() -> dict[str, str]:
    """Variables of the environment that change how anything here runs."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def settings() -> dict[str, str]:
    """The same without paths."""
    return {name: value for name, value in _environment().items() if os.sep not in value}


def blas() -> str | None:
    """NumPy's BLAS, its version and its kernels for this processor; None where threadpoolctl is not installed."""
    import numpy as np  # noqa: F401  # which loads it

    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    for one in threadpool_info():
        if one["user_api"] == "blas":
            return " ".join(str(one[key]) for key in ("internal_api", "version", "architecture") if one.get(key))
    return None


def of_packages(names: Iterable[str]) -> dict[str, str | None]:
    """The version of each package; None where it is not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def kernels() -> dict[str, Any] | str:
    """Vector target, threads and cache of the CPU kernels, or why there are none."""
    try:
        import numba

        from relpos_np._runtime.threadcount import get_num_threads
        from relpos_np.kernels._numba.launch.cache import cache_folder
        from relpos_np.kernels._numba.simd.level import COMPILED_FOR
        from relpos_np.kernels._numba.simd.target import TARGET, UNIT
    except ImportError as error:
        return f"not available: {error}"
    folder = cache_folder()
    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = f"not started ({numba.config.THREADING_LAYER})"
    return {
        "compiled_for": COMPILED_FOR,
        "vectors": TARGET.name,
        "matrix_unit": UNIT,
        "threads": get_num_threads(),
        "threading_layer": layer,
        # None where it cannot be written: a warning says why.
        "cache": None if folder is None else str(folder),
    }


def usable() -> int | None:
    """Processors that this process may run on: containers and schedulers often allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    """The processor's name."""
    import platform
    from pathlib import Path

    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def show_versions(*, as_json: bool = False) -> None:
    """Print what a report of a problem should hold: versions, processor, threads, kernel cache, backends, environment.

    Of the environment only variables of this package, of Numba, of CUDA and of the libraries below NumPy are printed.

    Parameters
    ----------
    as_json : bool
        Print JSON instead of lines.

    Examples
    --------
    >>> import relpos_np as rp
    >>> rp.show_versions()
    relpos_np: ...
    """
    found = collect_versions()
    if as_json:
        import json

        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) or "none" if isinstance(value, dict) else value
        print(f"{name:>13}: {text}")
