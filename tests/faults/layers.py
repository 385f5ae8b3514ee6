"""Numba's threading layers, each in a process of its own, because a process has one for all its life."""

import os
import sysconfig
from pathlib import Path

import pytest

from tests.processes import child

LAYERS = ("omp", "tbb", "workqueue")


def environment(layer):
    """Variables that choose a layer; of "default" none."""
    if layer == "default":
        return {}
    found = {"NUMBA_THREADING_LAYER": layer}
    if layer == "tbb":
        # pip puts TBB into the environment's lib folder, where the system's loader does not look by itself.
        folders = [str(Path(sysconfig.get_path("data")) / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found


def on_layer(layer, code, *options, timeout=300, **variables):
    """Run code on a layer, in a process of its own, and return what it printed; it must end without an error.

    Skipped where the layer does not load, but failed if RELPOS_LAYERS=required.
    """
    status, out, log = child(code, *options, timeout=timeout, **environment(layer), **variables)
    if "No threading layer could be loaded" in log:
        if os.environ.get("RELPOS_LAYERS") == "required":
            pytest.fail(f"{layer} does not load: {log}")
        pytest.skip(f"{layer} is not available")
    assert status == 0, log
    return out
