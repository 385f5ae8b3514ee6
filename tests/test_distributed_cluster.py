"""Attention over Dask arrays on a cluster of processes, to which things happen while they work."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.distributed import attention
from tests import clusters
from tests.processes import ROOT

da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client():
    """Two processes on the loopback interface."""
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(processes=True, **options) as cluster, distributed.Client(cluster) as one:
        yield one


def call(rng, wait):
    """T5 over 8 by 16 blocks whose keys take a while to come, and what one process gives."""
    q, k, v = rng.standard_normal((3, 2, 128, 8))
    t5 = rp.T5(rng.standard_normal((32, 2)))
    options = {"position": t5, "causal": True, "backend": "terms"}

    def late(block):
        time.sleep(wait)
        return block

    blocks = [da.from_array(x, chunks=(1, size, 8)) for x, size in ((q, 16), (k, 8), (v, 8))]
    lazy = attention(blocks[0], blocks[1].map_blocks(late), blocks[2], **options)
    return lazy, rp.attention(q, k, v, **options)


def test_a_cluster_gives_what_one_process_gives(client, rng):
    lazy, expected = call(rng, 0.0)
    np.testing.assert_allclose(client.compute(lazy).result(timeout=60), expected, rtol=1e-12, atol=1e-12)


def test_a_worker_that_is_killed_costs_no_result(client, rng):
    lazy, expected = call(rng, 0.05)
    before = clusters.workers(client)
    future = client.compute(lazy)
    clusters.amid(client, future, 8)
    clusters.kill(client)
    np.testing.assert_allclose(future.result(timeout=120), expected, rtol=1e-12, atol=1e-12)
    client.wait_for_workers(2, timeout=60)
    # One of the processes is another one now.
    assert len(set(before.values()) & set(clusters.workers(client).values())) == 1


@pytest.mark.stress
@pytest.mark.parametrize("fault", ["nothing", "paused", "restarted"])
def test_row_49_a_worker_that_stops_costs_time_only(client, rng, fault):
    """The same bits as without it, since the same parts are merged in the same order."""
    undisturbed = client.compute(call(np.random.default_rng(1), 0.0)[0]).result(timeout=120)
    lazy, expected = call(np.random.default_rng(1), 0.05)
    client.wait_for_workers(2, timeout=60)
    future = client.compute(lazy)
    clusters.amid(client, future, 8)
    {"nothing": lambda _: None, "paused": clusters.pause, "restarted": clusters.restart}[fault](client)
    found = future.result(timeout=240)
    np.testing.assert_array_equal(found, undisturbed)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    client.wait_for_workers(2, timeout=120)


@pytest.mark.stress
def test_row_49_a_worker_whose_memory_another_task_takes(rng, tmp_path):
    """Its nanny ends it, and what it held is computed again elsewhere."""
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with (
        distributed.LocalCluster(processes=True, memory_limit="400MiB", silence_logs=50, **options) as cluster,
        distributed.Client(cluster) as one,
    ):
        lazy, expected = call(rng, 0.1)
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


@pytest.mark.stress
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
            lazy, expected = call(rng, 0.05)
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
