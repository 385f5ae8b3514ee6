"""Copies on the device that repeated calls share: what terms hold, found again by its content.

Calls of a layer would upload the same tables, index maps and records each time. A copy belongs to the stream that
made it, in whose order it was written, so that no other stream reads it too early; and kernels only read it, so that
calls may share it. The oldest go when all of them take more than `MOST_BYTES`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.launch import device
from relpos_np.types import Array

# Of one copy: to find what is larger costs more than to send it. And of all copies of a context.
LARGEST = 1 << 20
MOST_BYTES = 32 << 20


class Store:
    """The copies of one context: device arrays by stream and content, the latest used last."""

    def __init__(self, context: Any) -> None:
        self.context, self.copies, self.size = context, OrderedDict[Any, list[Any]](), 0

    def add(self, key: Any, found: list[Any], size: int) -> None:
        """Keep copies of so many bytes, and give up the oldest beyond `MOST_BYTES`."""
        if key in self.copies:
            return
        self.copies[key] = found
        self.size += size
        while self.size > MOST_BYTES:
            (_, content), _ = self.copies.popitem(last=False)
            self.size -= sum(len(words) for _, words in content)


_lock = threading.Lock()
# By the number of the device; a context that was reset has lost its memory.
_stores: dict[int, Store] = {}


def _store() -> Store:
    """The store of the current context."""
    context = None if device.simulated() else device.module().current_context()
    number = 0 if context is None else int(context.device.id)
    if number not in _stores or _stores[number].context is not context:
        _stores[number] = Store(context)
    return _stores[number]


def kept(*arrays: Array) -> list[Any]:
    """Copies of several flat arrays on the device, which are only to be read: earlier ones, or made by one transfer."""
    size = sum(x.nbytes for x in arrays)
    if size > LARGEST:
        return device.upload_all(*arrays)
    key = device.current_stream(), tuple((x.dtype.str, np.ascontiguousarray(x).tobytes()) for x in arrays)
    with _lock:
        found = _store().copies.get(key)
        if found is not None:
            _store().copies.move_to_end(key)
            return list(found)
    # Not under the lock: where memory runs out, the stores are emptied.
    found = device.upload_all(*arrays)
    with _lock:
        _store().add(key, found, size)
    return list(found)


def forget() -> None:
    """Give up all copies; calls that use them keep theirs."""
    with _lock:
        _stores.clear()


device.on_release(forget)
