"""What happens around a call: forks, whose children end, are interrupted or are killed."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import relpos_np as rp
from tests.soaking import calls, kinds
from tests.soaking.calls import BACKENDS, pick
from tests.soaking.kinds import Report, bits

# A child that takes so long hangs.
_HANGS_SECONDS = 240
_RIGHT, _OTHER_BITS, _NEVER, _RAISED = 0, 3, 4, 70
_FATES = ("ends", "interrupted", "killed")


def shared() -> tuple[Any, ...]:
    """What all that runs in a process shares, and no call may change: how NumPy errs, warnings, and random numbers."""
    _, numbers, *place = np.random.get_state()  # noqa: NPY002
    return np.geterr(), list(warnings.filters), numbers.tobytes(), place, rp.backend.current()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _child(run: Callable[[], bytes], first: bytes, fate: str, after: float) -> int:
    """What a forked child does; returns its exit status."""
    if fate == "interrupted":
        # What is raised in a callback of the garbage collector, such as Hypothesis has, is lost.
        gc.callbacks.clear()
        signal.signal(signal.SIGALRM, _interrupt)
        stop = time.monotonic() + 60
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            while time.monotonic() < stop:
                run()
        except KeyboardInterrupt:
            pass
        else:
            return _NEVER
    same = run() == first
    while same and fate == "killed":
        same = run() == first
    return _RIGHT if same else _OTHER_BITS


def _ended(child: int, seconds: float) -> int | None:
    """The exit status of a child, the negative number of the signal that ended it, or None if it goes on."""
    stop = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= stop:
            return None
        time.sleep(0.002)


def forked(rng: np.random.Generator, report: Report) -> None:
    """A child, forked amid calls of other threads, that ends, is interrupted or is killed: the same bits everywhere."""
    if not hasattr(os, "fork"):
        return kinds.forward(rng, report)
    call, backend, fate = calls.call(rng), pick(rng, BACKENDS), pick(rng, _FATES)
    after = float(rng.uniform(0.001, 0.03))
    report.where = f"{call.where}, {backend}, a child that {fate}"

    def run() -> bytes:
        return bits(*call.run(backend, return_lse=True))

    first = run()
    child = os.fork()
    if not child:
        status = _RAISED
        try:
            status = _child(run, first, fate, after)
        finally:
            os._exit(status)
    if fate == "killed":
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status_or_none = _ended(child, _HANGS_SECONDS)
    if status_or_none is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wanted = -signal.SIGKILL if fate == "killed" else _RIGHT
    report.expect(status_or_none == wanted, f"the child's status was {status_or_none}, not {wanted}")
    report.expect(run() == first, f"{backend} gave other bits after a fork")
    report.calls += 3
    return None
