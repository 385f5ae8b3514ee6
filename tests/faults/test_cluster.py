"""Workers of a Dask cluster that are paused, told to begin anew or out of memory, and a scheduler that dies."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import clusters
from tests.processes import ROOT

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="signals that Windows lacks"),
]


@pytest.fixture(scope="module")
def client():
    """Two processes on the loopback interface."""
    with clusters.two_workers() as one:
        yield one


@pytest.mark.parametrize("fault", ["nothing", "paused", "restarted"])
def test_row_49_a_worker_that_stops_costs_time_only(client, rng, fault):
    """The same bits as without it, since the same parts are merged in the same order."""
    undisturbed = client.compute(clusters.call(np.random.default_rng(1), 0.0)[0]).result(timeout=120)
    lazy, expected = clusters.call(np.random.default_rng(1), 0.05)
    client.wait_for_workers(2, timeout=60)
    future = client.compute(lazy)
    clusters.amid(client, future, 8)
    {"nothing": lambda _: None, "paused": clusters.pause, "restarted": clusters.restart}[fault](client)
    found = future.result(timeout=240)
    np.testing.assert_array_equal(found, undisturbed)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    client.wait_for_workers(2, timeout=120)


def test_row_49_a_worker_whose_memory_another_task_takes(rng, tmp_path):
    """Its nanny ends it, and what it held is computed again elsewhere."""
    with clusters.two_workers(memory_limit="400MiB", silence_logs=50) as one:
        lazy, expected = clusters.call(rng, 0.1)
        before = clusters.workers(one)
        future = one.compute(lazy)
        clusters.amid(one, future, 8)
        hog = clusters.exhaust(one, tmp_path / "flag")
        np.testing.assert_allclose(future.result(timeout=240), expected, rtol=1e-12, atol=1e-12)
        assert hog.result(timeout=120) == "again"
        one.wait_for_workers(2, timeout=120)
        assert set(clusters.workers(one).values()) != set(before.values())


def _started(module, *options):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", f"distributed.cli.{module}", *options, "--no-dashboard"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path})


def test_row_49_a_scheduler_that_dies_is_reported(rng):
    """Dask says so at once; with another scheduler and other workers the same client computes it again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    running = []

    def start():
        running.append(_started("dask_scheduler", "--host", "127.0.0.1", "--port", str(port)))
        running.append(_started("dask_worker", address, "--nthreads", "1", "--no-nanny"))

    try:
        start()
        with distributed.Client(address, timeout=120) as one:
            one.wait_for_workers(1, timeout=120)
            lazy, expected = clusters.call(rng, 0.05)
            future = one.compute(lazy)
            clusters.amid(one, future, 4)
            running[0].kill()
            running[0].wait()
            with pytest.raises(distributed.client.FutureCancelledError, match="scheduler-connection-lost"):
                future.result(timeout=60)
            start()
            one.wait_for_workers(1, timeout=120)
            np.testing.assert_allclose(one.compute(lazy).result(timeout=240), expected, rtol=1e-12, atol=1e-12)
    finally:
        for process in running:
            process.kill()
            process.wait()
