"""Attention over Dask arrays on a cluster of processes, of which one is killed while it works."""

import os
import signal
import time

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.distributed import attention

da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client():
    """Two processes on the loopback interface."""
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
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


def finished(dask_scheduler):
    """How many blocks are computed."""
    return sum(
        task.state in ("memory", "released", "forgotten") and str(key).startswith("attention-part") and task.nbytes > 0
        for key, task in dask_scheduler.tasks.items()
    )


def test_a_worker_that_is_killed_costs_no_result(client, rng):
    lazy, expected = call(rng, 0.05)
    before = client.run(os.getpid)
    future = client.compute(lazy)
    deadline = time.monotonic() + 60
    while client.run_on_scheduler(finished) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not future.done()
    os.kill(next(iter(before.values())), signal.SIGKILL)
    np.testing.assert_allclose(future.result(timeout=120), expected, rtol=1e-12, atol=1e-12)
    client.wait_for_workers(2, timeout=60)
    # One of the processes is another one now.
    assert len(set(before.values()) & set(client.run(os.getpid).values())) == 1
