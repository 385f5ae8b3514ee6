"""What happens around a call: forks, signals, and children that are interrupted or killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.soaking import calls, kinds
from tests.soaking.calls import BACKENDS, pick
from tests.soaking.kinds import Report, bits

# A child that takes so long hangs.
_HANGS_SECONDS = 240
_RIGHT, _OTHER_BITS, _NEVER, _RAISED = 0, 3, 4, 70
_FATES = ("ends", "interrupted", "killed")


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


def _note(*_: Any) -> None:
    """A handler that does nothing: a call goes on after it."""


def listen() -> None:
    """Receive SIGUSR1, which would end the process; signals can be set up in the main thread only."""
    if hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note)


def signalled(rng: np.random.Generator, report: Report) -> None:
    """Signals that arrive in the thread of a call, one after the other, change no bit of it."""
    listen()
    if not hasattr(signal, "pthread_kill") or signal.getsignal(signal.SIGUSR1) is not _note:
        return kinds.forward(rng, report)
    call, backend = calls.call(rng), pick(rng, BACKENDS)
    report.where = f"{call.where}, {backend}, signals"
    before = bits(*call.operands)
    first = bits(*call.run(backend, return_lse=True))
    done, me, sent, made, same = threading.Event(), threading.get_ident(), 0, 0, True

    def disturb() -> None:
        nonlocal sent
        while not done.wait(0.0002):
            signal.pthread_kill(me, signal.SIGUSR1)
            sent += 1

    other = threading.Thread(target=disturb)
    other.start()
    try:
        # Short calls may be over before the other thread has had its turn.
        while made < 3 or sent < 3:
            same = bits(*call.run(backend, return_lse=True)) == first and same
            made += 1
    finally:
        done.set()
        other.join()
    report.expect(same, f"{backend} gave other bits under signals")
    report.expect(bits(*call.operands) == before, f"{backend} wrote to an operand")
    report.calls += made + 1
    return None
