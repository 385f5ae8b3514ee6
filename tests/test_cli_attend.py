"""What `relpos attend` says of speed, on a machine that is idle and on one whose processors are taken."""

import json
import os

import pytest

from relpos_np._commands import attend, common
from relpos_np._commands.main import main


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs the embedded example with given times and load; returns what is printed, in JSON and in words."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def run(ours, numpys, load):
        monkeypatch.setattr(attend, "_repeated", lambda calls: dict(zip(calls, (ours, numpys), strict=True)))
        monkeypatch.setattr(common, "load", lambda: load)
        monkeypatch.setattr(attend, "load", lambda: load)
        printed = []
        for options in (["--json"], []):
            assert main(["attend", "--backend", "terms", "--plot", "none", *options]) == 0
            printed.append(capsys.readouterr().out)
        return json.loads(printed[0]), printed[1]

    return run


def test_calls_that_were_interrupted_do_not_count(said):
    found, words = said([1e-4, *[2e-2] * 20], [1e-3, *[3e-3] * 20], 0.1)
    assert found["speedup"] == pytest.approx(10)
    assert (found["seconds"], found["fastest_seconds"]) == (2e-2, 1e-4)
    assert (found["numpy_seconds"], found["numpy_fastest_seconds"]) == (3e-3, 1e-3)
    assert found["busy"] is True
    assert "terms is 10.0 times as fast" in words
    assert "100 µs (best of 21, median 20 ms)" in words
    assert "this machine is busy" in words


def test_an_idle_machine_is_not_called_busy(said):
    found, words = said([1.0e-4, 1.1e-4, 1.9e-4], [1e-3] * 3, 0.9)
    assert found["busy"] is False
    assert "busy" not in words
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize("chosen", [None, "active"])
def test_threads_sleep_while_they_wait_if_processors_are_taken(said, chosen, monkeypatch):
    """Unless the user has said what they do."""
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    # So that it is taken back in the end.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    found, words = said([1e-4] * 3, [1e-3] * 3, 3.0)
    assert found["busy"] is True
    assert "this machine is busy" in words
    assert os.environ["OMP_WAIT_POLICY"] == (chosen or "passive")
