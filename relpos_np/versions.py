"""What this installation consists of, for bug reports."""

from __future__ import annotations

import sys
from typing import Any


def collect_versions() -> dict[str, Any]:
    """Versions, processor, vector target, threads and kernel cache, as plain data."""
    import platform
    from importlib import metadata

    import numpy as np

    import relpos_np

    found: dict[str, Any] = {
        "relpos_np": relpos_np.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor(),
        "numpy": np.__version__,
        "blas": np.show_config(mode="dicts")["Build Dependencies"]["blas"].get("name"),
        "backend": relpos_np.backend.current(),
    }
    for package in ("scipy", "numba", "llvmlite", "matplotlib", "rich"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    try:
        import numba

        from relpos_np.kernels._numba.build import cache_folder
        from relpos_np.kernels._numba.target import TARGET
    except ImportError as error:
        found["kernels"] = f"not available: {error}"
        return found
    folder = cache_folder()
    try:
        layer = numba.threading_layer()
    except ValueError:
        layer = f"not started ({numba.config.THREADING_LAYER})"
    found["kernels"] = {
        "vectors": TARGET.name,
        "threads": numba.get_num_threads(),
        "threading_layer": layer,
        "cache": None if folder is None else str(folder),
    }
    return found


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
    """Print versions, processor, vector width, threads and kernel cache.

    Parameters
    ----------
    as_json : bool
        Print JSON instead of lines.
    """
    found = collect_versions()
    if as_json:
        import json

        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:>12}: {text}")
