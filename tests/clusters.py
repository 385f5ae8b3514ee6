"""What happens to workers of a Dask cluster while they compute: killed, paused, out of memory, restarted."""

import os
import signal
import threading
import time

import numpy as np


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
