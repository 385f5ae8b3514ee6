"""Numba's threading layers, each in a process of its own, because a process has one for all its life."""

import os

import pytest

from relpos_np._commands import promises
from relpos_np._commands.promises import LAYERS
from tests.processes import child

__all__ = ["LAYERS", "environment", "on_layer"]


def environment(layer):
    """Variables that choose a layer; of "default" none."""
    return {} if layer == "default" else promises.on_layer(layer)


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
