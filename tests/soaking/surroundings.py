"""What happens around a call: forks, signals, children that are interrupted or killed, and files that lie."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np import layers
from relpos_np._commands import saved_call
from relpos_np.errors import RelposError
from tests.fuzz import targets
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


_received = [0]


def _note(*_: Any) -> None:
    _received[0] += 1


def received() -> int:
    """How many signals have arrived."""
    return _received[0]


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


@cache
def _seeds(name: str) -> list[bytes]:
    return [data for data in targets.seeds(name) if data[:1] != b"\x01"]


_CONFIGS = [
    json.dumps(one)
    for one in (
        {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        },
        {"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2},
        {"model_type": "deberta-v2", "hidden_size": 64, "num_attention_heads": 4, "position_buckets": 8},
    )
]


def _npz(path: Path) -> None:
    found = saved_call.read(path)
    call = saved_call.call_arguments(found, None, str(path))
    if max(x.size for x in found.values()) <= 1 << 14 and call["k"].ndim >= 2:
        rp.attention(**call)


def _tensors(path: Path) -> None:
    found = layers.tensors(path)
    for name in found:
        found[name]


def _config(path: Path) -> None:
    rp.from_config(json.loads(path.read_text()), layer=0)


READERS: dict[str, Callable[[Path], None]] = {"npz": _npz, "safetensors": _tensors, "json": _config}
_TARGETS = {"npz": "npz", "safetensors": "tensors"}


def tampered(rng: np.random.Generator, name: str) -> bytes:
    """A file as it should be, with one byte changed, with several, or made of nothing."""
    if name == "json":
        return pick(rng, _CONFIGS).encode() if rng.random() < 0.2 else targets.edited(rng.bytes(32), _CONFIGS)
    how, data = rng.random(), pick(rng, _seeds(_TARGETS[name]))
    if how < 0.3:
        return targets.built(rng.bytes(200)) if name == "npz" else targets.packed(rng.bytes(64), rng.bytes(16))
    if how < 0.5:
        at = int(rng.integers(len(data)))
        return data[:at] + rng.bytes(1) + data[at + 1 :]
    return data if how < 0.7 else targets.mutated(data, rng)


def hostile(rng: np.random.Generator, report: Report) -> None:
    """A file of which some bytes or values were changed: read or refused, and calls before and after agree."""
    call, backend, name = calls.call(rng), pick(rng, BACKENDS), pick(rng, sorted(READERS))
    first = bits(*call.run(backend, return_lse=True))
    data = tampered(rng, name)
    report.where = f"{call.where}, {backend}, after a .{name} file: {data[:4096].hex()}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file.{name}"
        path.write_bytes(data)
        try:
            with np.errstate(all="ignore"):
                READERS[name](path)
        except RelposError as error:
            report.expect(len(str(error)) > 10, f"the message says nothing: {error}")
    report.expect(bits(*call.run(backend, return_lse=True)) == first, f"{backend} gave other bits after a bad file")
    report.calls += 2
