"""Attention as a web service: arrays q, k and v of an .npz in, the result as .npy out, in bounded memory and time.

WEB_CONCURRENCY=3 gunicorn --preload --chdir docs/examples --bind 127.0.0.1:8000 serve:application
uvicorn --app-dir docs/examples --port 8000 --lifespan off serve:asgi
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

# Read when the first result is made. What is kept for later results would come on top of the memory below.
os.environ.setdefault("RELPOS_RESULT_POOL", "0")

import relpos_np as rp
from relpos_np.complexity import attention_operations

# Bytes that the requests under way may have in all, in each process, beside what it has when it is idle.
MEMORY = int(os.environ.get("SERVE_MEMORY", str(512 << 20)))
# Of one request: its body, how much its arrays may unpack to, what its call may allocate, and about 2 s of a processor.
MOST_BODY = 64 << 20
MOST_TIMES = 16
MOST_CALL = 64 << 20
MOST_OPERATIONS = 100 * 10**9
# Seconds that a request waits for memory, and that its body may take to arrive.
PATIENCE = 10.0
PIECE = 1 << 20
# Gunicorn's own variable for the number of workers: together they have as many threads as there are processors.
WORKERS = int(os.environ.get("WEB_CONCURRENCY", "1"))
# A trained table, here of random numbers: 32 buckets, 4 heads.
POSITION = rp.T5(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))

STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    503: "Service Unavailable",
}
WAYS = {"/": "POST", "/healthz": "GET", "/readyz": "GET", "/metrics": "GET"}


def warm_up() -> None:
    """Before the server forks: kernels are compiled or loaded once, and all workers share them."""
    rp.set_num_threads(max(1, rp.get_num_threads() // WORKERS))
    for length in (1, 64, 300):  # decoding, windows, and everything else
        x = np.ones((4, length, 32), np.float32)
        rp.attention(x, np.repeat(x, 2, axis=1), np.repeat(x, 2, axis=1), position=POSITION)


warm_up()


class RefusedError(Exception):
    """A request that is not computed, with the status that says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Memory:
    """Bytes that are still free for requests; whoever gets some gives them back when its answer has been sent.

    Who asks first gets them first: small requests that keep coming would else leave a large one waiting for ever.
    """

    def __init__(self, size: int) -> None:
        self.free = size
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    def ask(self, size: int) -> Future[None]:
        """Wait for so many bytes, until the result is there; `settle` says how it ended."""
        asked: Future[None] = Future()
        with self._lock:
            self._waiting.append((size, asked))
        self.give(0)
        return asked

    def settle(self, asked: Future[None]) -> bool:
        """Wait no longer: whether the bytes were got."""
        got = not asked.cancel()
        self.give(0)  # to those who stood behind
        return got

    def give(self, size: int) -> None:
        """Give bytes back."""
        ready = []
        with self._lock:
            self.free += size
            while self._waiting and (self._waiting[0][0] <= self.free or self._waiting[0][1].cancelled()):
                size, asked = self._waiting.popleft()
                if asked.set_running_or_notify_cancel():
                    self.free -= size
                    ready.append(asked)
        for asked in ready:
            asked.set_result(None)

    def has(self, size: int) -> bool:
        """Whether a request for so many bytes would get them at once."""
        with self._lock:
            return not self._waiting and size <= self.free


class Counts:
    """Requests by status and duration, in memory that a parent shares with its forks: any of them reports for all."""

    LIMITS = (0.001, 0.01, 0.1, 1.0, 10.0, float("inf"))
    ROWS = 512

    def __init__(self) -> None:
        columns = len(STATUS) + len(self.LIMITS) + 1
        self._table = np.frombuffer(mmap.mmap(-1, 8 * self.ROWS * columns), np.float64).reshape(self.ROWS, columns)
        self._lock = threading.Lock()
        # Each process writes to a row of its own, so that no lock is shared that a killed one would keep.
        self._row, self._next = 0, itertools.count(1)
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        self._of_child = next(self._next) % self.ROWS

    def _in_child(self) -> None:
        self._row, self._lock = self._of_child, threading.Lock()

    def add(self, status: int, seconds: float) -> None:
        """Count a request."""
        first = next(n for n, limit in enumerate(self.LIMITS) if seconds <= limit)
        with self._lock:
            row = self._table[self._row]
            row[list(STATUS).index(status)] += 1
            row[len(STATUS) + first] += 1
            row[-1] += seconds

    def text(self) -> str:
        """The text format of Prometheus."""
        found = self._table.sum(0)
        within = np.cumsum(found[len(STATUS) : -1])
        lines = [
            "# HELP relpos_requests_total Requests by status, without those of the pages for operators.",
            "# TYPE relpos_requests_total counter",
        ]
        lines += [f'relpos_requests_total{{code="{s}"}} {found[n]:.0f}' for n, s in enumerate(STATUS)]
        lines += [
            "# HELP relpos_request_seconds Until the answer is computed.",
            "# TYPE relpos_request_seconds histogram",
        ]
        for limit, count in zip(self.LIMITS, within, strict=True):
            name = "+Inf" if limit == self.LIMITS[-1] else f"{limit:g}"
            lines.append(f'relpos_request_seconds_bucket{{le="{name}"}} {count:.0f}')
        lines += [f"relpos_request_seconds_sum {found[-1]:.6f}", f"relpos_request_seconds_count {within[-1]:.0f}"]
        return "\n".join([*lines, ""])


memory, counts = Memory(MEMORY), Counts()


def admitted(path: str, method: str, length: str | None) -> int:
    """By what a request says of itself, before any of its body is read: how many bytes its body has."""
    if path not in WAYS:
        raise RefusedError(404, f"expected one of {', '.join(WAYS)}")
    if method != WAYS[path]:
        raise RefusedError(405, f"expected {WAYS[path]}")
    if path != "/":
        return 0
    if length is None:
        raise RefusedError(411, "expected a Content-Length")
    if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) == 0:
        raise RefusedError(400, "expected the bytes of an .npz with q, k and v")
    if cost(int(length)) > MEMORY or int(length) > MOST_BODY:
        raise RefusedError(413, f"expected at most {MOST_BODY} bytes, found {length}")
    return int(length)


def cost(size: int) -> int:
    """Bytes that a request with such a body may have while it is computed and sent."""
    # A body arrives in parts, which are then joined.
    return 2 * size + unpacked(size) + MOST_CALL + PIECE


def unpacked(size: int) -> int:
    """Bytes that the arrays of a body may have."""
    return min(MOST_TIMES * size, MOST_BODY)


def attended(body: bytes) -> np.ndarray[Any, Any]:
    """Attention of the arrays in an .npz, which is never unpickled."""
    try:
        arrays = rp.load_npz(body, limit=unpacked(len(body)))
        if set(arrays) != set("qkv"):
            raise RefusedError(400, f"expected arrays q, k and v, found {sorted(arrays)}")
        q, k, v = (arrays[name] for name in "qkv")
        if any(x.ndim < 2 or not x.size for x in (q, k, v)):
            raise RefusedError(400, f"expected shapes (..., heads, length, dim), found {q.shape}, {k.shape}, {v.shape}")
        batch = int(np.prod(np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), dtype=object))
        # The softmax of a pair takes about as long as 16 channels of its products.
        work = attention_operations(
            batch,
            q.shape[-3] if q.ndim > 2 else 1,
            q.shape[-2],
            k.shape[-2],
            max(q.shape[-1], 16),
            max(v.shape[-1], 16),
        )
        if work > MOST_OPERATIONS:
            raise RefusedError(413, f"asks for {work} operations, and {MOST_OPERATIONS} are allowed")
        with rp.memory_limit(MOST_CALL):
            return rp.attention(q, k, v, position=POSITION)
    except rp.RelposMemoryError as error:
        raise RefusedError(413, str(error)) from error
    except MemoryError as error:
        raise RefusedError(503, "out of memory") from error
    except (rp.RelposError, ValueError) as error:  # NumPy says of batch axes that they do not broadcast
        raise RefusedError(400, str(error)) from error


class Answer:
    """Status, headers and parts of an answer; whoever sends it closes it, which gives its memory back."""

    def __init__(self, status: int, content: str | np.ndarray[Any, Any], started: float | None, taken: int = 0) -> None:
        """`started` is None for the pages of operators, which are not counted."""
        self.status, self.taken = status, taken
        if isinstance(content, str):
            head, data = b"", memoryview(content.encode(errors="backslashreplace"))
        else:
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(content))
            head, data = file.getvalue(), memoryview(np.ascontiguousarray(content)).cast("B")
        self.headers = [
            ("Content-Type", "text/plain; charset=utf-8" if isinstance(content, str) else "application/octet-stream"),
            ("Content-Length", str(len(head) + len(data))),
        ]
        if status == 503:
            self.headers.append(("Retry-After", "1"))
        if status == 405:
            self.headers.append(("Allow", "GET, POST"))
        self.head, self.data = head, data
        if started is not None:
            counts.add(status, time.monotonic() - started)

    def __iter__(self) -> Iterator[bytes]:
        """The parts, without a copy of the whole."""
        yield self.head
        for at in range(0, len(self.data), PIECE):
            yield bytes(self.data[at : at + PIECE])

    def close(self) -> None:
        """Give the memory back."""
        memory.give(self.taken)
        self.taken = 0


def page(path: str) -> Answer:
    """For operators: whether it is alive; whether it would take a small request now; what was counted."""
    if path == "/readyz" and not memory.has(cost(PIECE)):
        return Answer(503, "busy", None)
    return Answer(200, counts.text() if path == "/metrics" else "ok", None)


def got(asked: Future[None], size: int) -> int:
    """Bytes that a request has got, which waits no longer."""
    if not memory.settle(asked):
        raise RefusedError(503, "busy")
    return size


def read(file: Any, size: int) -> bytes:
    """The body of a request, which says that it has so many bytes."""
    parts, missing = [], size
    while missing and (part := file.read(min(missing, PIECE))):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise RefusedError(400, f"the body ends {missing} bytes early")
    return b"".join(parts)


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """One request, of a WSGI server."""
    started, taken, path = time.monotonic(), 0, environ.get("PATH_INFO", "/")
    try:
        size = admitted(path, environ["REQUEST_METHOD"], environ.get("CONTENT_LENGTH") or None)
        if path != "/":
            answer = page(path)
        else:
            asked = memory.ask(cost(size))
            with contextlib.suppress(TimeoutError):
                asked.result(PATIENCE)
            taken = got(asked, cost(size))
            answer = Answer(200, attended(read(environ["wsgi.input"], size)), started, taken)
    except RefusedError as error:
        answer = Answer(error.status, str(error)[:2000], started, taken)
    except BaseException:
        memory.give(taken)
        raise
    start_response(f"{answer.status} {STATUS[answer.status]}", answer.headers)
    return answer


# Of an ASGI server: more calls at once would only wait for each other, each with memory of its own.
computing = ThreadPoolExecutor(2)


async def asgi(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """One request, of an ASGI server."""
    if scope["type"] != "http":
        raise RuntimeError(f"expected a request of HTTP, found {scope['type']}")
    started, taken, path = time.monotonic(), 0, scope["path"]
    try:
        try:
            length = dict(scope["headers"]).get(b"content-length")
            size = admitted(path, scope["method"], None if length is None else length.decode("latin-1"))
            if path != "/":
                answer = page(path)
            else:
                asked = memory.ask(cost(size))
                try:
                    await asyncio.wait({asyncio.wrap_future(asked)}, timeout=PATIENCE)
                except BaseException:
                    memory.give(cost(size) if memory.settle(asked) else 0)
                    raise
                taken = got(asked, cost(size))
                body = await received(receive, size)
                out = await asyncio.get_running_loop().run_in_executor(computing, attended, body)
                answer = Answer(200, out, started)
        except RefusedError as error:
            answer = Answer(error.status, str(error)[:2000], started)
        named = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": named})
        for part in answer:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        memory.give(taken)


async def received(receive: Callable[[], Awaitable[dict[str, Any]]], size: int) -> bytes:
    """As `read`, from an ASGI server."""
    parts, missing = [], size
    try:
        async with asyncio.timeout(PATIENCE):
            while missing > 0:
                message = await receive()
                parts.append(message.get("body", b""))
                missing -= len(parts[-1])
                if missing and not message.get("more_body", False):
                    raise RefusedError(400, f"the body ends {missing} bytes early")
    except TimeoutError:
        raise RefusedError(408, f"{missing} bytes of the body were not there after {PATIENCE:g} s") from None
    return b"".join(parts)
