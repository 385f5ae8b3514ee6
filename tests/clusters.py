"""A Dask cluster of two processes, a call for it, and what may happen to its workers."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np

import relpos_np as rp
from relpos_np.distributed import attention


@contextmanager
def two_workers(**options):
    """A client of two processes on the loopback interface."""
    import distributed

    # Without a port of its own, the dashboard of a second cluster warns that the usual one is taken.
    place = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(processes=True, **place, **options) as cluster, distributed.Client(cluster) as one:
        yield one


def call(rng, wait):
    """T5 over 8 by 16 blocks whose keys take a while to come, and what one process gives."""
    import dask.array as da

    q, k, v = rng.standard_normal((3, 2, 128, 8))
    t5 = rp.T5(rng.standard_normal((32, 2)))
    options = {"position": t5, "causal": True, "backend": "terms"}

    def late(block):
        time.sleep(wait)
        return block

    blocks = [da.from_array(x, chunks=(1, size, 8)) for x, size in ((q, 16), (k, 8), (v, 8))]
    lazy = attention(blocks[0], blocks[1].map_blocks(late), blocks[2], min_operations=0, **options)
    return lazy, rp.attention(q, k, v, **options)


def workers(client):
    """The workers' addresses and the numbers of their processes."""
    return client.run(os.getpid)


def _first(client):
    return next(iter(workers(client).items()))


def kill(client):
    """The process ends at once; its nanny starts another."""
    os.kill(_first(client)[1], signal.SIGKILL)


def pause(client, seconds=3.0):
    """The process stops for a while, in the midst of what it does, and answers nobody."""
    pid = _first(client)[1]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def _hog(flag):
    """Take more memory than a worker has, the first time, until its nanny ends the process."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "again"
    held = []
    for _ in range(1200):
        held.append(np.ones(1 << 21))
        time.sleep(0.05)
    return "survived"


def exhaust(client, flag):
    """A task of somebody else takes all memory of a worker; it is not to blame for it the second time."""
    return client.submit(
        _hog, str(flag), workers=[_first(client)[0]], allow_other_workers=True, pure=False, priority=99
    )


def restart(client):
    """The worker is told to begin anew."""
    client.restart_workers([_first(client)[0]], timeout=120, raise_for_error=False)


def finished(dask_scheduler):
    """How many blocks are computed, to be run on the scheduler."""
    return sum(
        task.state in ("memory", "released", "forgotten") and str(key).startswith("attention-part") and task.nbytes > 0
        for key, task in dask_scheduler.tasks.items()
    )


def amid(client, future, blocks, timeout=300):
    """Wait until so many blocks are computed and the result is not."""
    deadline = time.monotonic() + timeout
    while client.run_on_scheduler(finished) < blocks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not future.done()
