"""The service of the documentation under load: right requests, damaged ones, and some that are made to do harm."""

import collections
import io
import itertools
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.bodies import mixed
from tests.faults.layers import LAYERS, environment
from tests.faults.service import FOLDER, POSITION, packed, post, request, server
from tests.processes import child

for package in ("numba", "threadpoolctl", "gunicorn", "uvicorn"):
    pytest.importorskip(package)
pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not a checkout"),
]
COUNT = int(os.environ.get("RELPOS_SERVICE_REQUESTS", "1500"))
# What requests may have in each process, and what its threads may keep between them beside.
MEMORY, KEPT = 320 << 20, 48 << 20


def raw(port, data):
    """The status that answers bytes on a connection, or None if none comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=100) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            found = connection.recv(12)
        except ConnectionResetError:
            return None
    return int(found[9:]) if len(found) == 12 else None


def peaks(process):
    """The largest memory so far of each process of a tree, by its id."""
    found, todo = {}, [process]
    while todo:
        pid = todo.pop()
        status = Path(f"/proc/{pid}/status").read_text()
        found[pid] = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10
        todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def wrong(port, kind, name, body, statuses):
    """What is wrong with the answer to a request, if anything is, and its status."""
    if kind == "raw":
        status = raw(port, body)
        return status, None if status in statuses else f"{name}: status {status}"
    status, answer = post(port, body)
    if status not in statuses:
        return status, f"{kind} {name}: status {status}: {answer[:200]}"
    if status == 200:
        with np.load(io.BytesIO(body)) as arrays:
            expected = rp.attention(*(arrays[name] for name in "qkv"), position=POSITION)
        found = np.load(io.BytesIO(answer))
        if found.dtype != expected.dtype or not np.array_equal(found, expected, equal_nan=True):
            return status, f"{kind} {name}: another answer than that of a direct call"
    return status, None


def counted(port):
    """Requests by status, as the service has counted them."""
    status, text = post(port, None, "/metrics", "GET")
    assert status == 200
    return {int(code): int(n) for code, n in re.findall(r'relpos_requests_total\{code="(\d+)"\} (\d+)', text.decode())}


# Workers are forked after kernels have run.
SERVERS = {
    "gunicorn sync": ("--workers", "3"),
    "gunicorn gthread": ("--workers", "2", "--worker-class", "gthread", "--threads", "4"),
    "uvicorn": (),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_row_47_requests_of_all_kinds(kind, tmp_path):
    """No status 500, every right answer equal to a direct call, memory within its limit, and all is counted."""
    name = kind.split()[0]
    log = tmp_path / "log"
    statuses, lock = collections.Counter(), threading.Lock()
    requests = mixed(0, COUNT)

    def one(_):
        with lock:
            given = next(requests)
        status, problem = wrong(port, *given)
        with lock:
            statuses[given[0], status] += 1
        return problem

    with server(log, *SERVERS[kind], name=name, SERVE_MEMORY=str(MEMORY)) as port:
        pid = int(re.search(r"(?:Listening at: .* \(|Started server process \[)(\d+)", log.read_text())[1])
        for path in ("/healthz", "/readyz"):
            assert post(port, None, path, "GET") == (200, b"ok")
        idle = max(peaks(pid).values())
        with ThreadPoolExecutor(8) as pool:
            problems = list(itertools.islice(filter(None, pool.map(one, range(COUNT))), 20))
        assert problems == []
        used = max(peaks(pid).values()) - idle
        assert used <= MEMORY + KEPT, f"{used} bytes beyond the {idle} of an idle process"
        assert post(port, None, "/readyz", "GET") == (200, b"ok")
        found = counted(port)
    assert found[200] == sum(n for (_, status), n in statuses.items() if status == 200)
    assert found[413] == sum(n for (_, status), n in statuses.items() if status == 413)
    assert {status for _, status in statuses} <= {200, 400, 404, 405, 411, 413, None}
    assert statuses["good", 200] > COUNT // 2
    assert "Traceback" not in log.read_text()
    print(f"{kind}: {used >> 20} MiB beyond the {idle >> 20} of an idle process;", dict(statuses))


WAITING = """
sys.path.insert(0, "docs/examples")
import serve
memory = serve.Memory(10)
first, large, small = map(memory.ask, (8, 9, 1))
print([x.done() for x in (first, large, small)])
memory.give(8)
print([x.done() for x in (large, small)], memory.has(1))
late = memory.ask(5)
print(memory.settle(late), memory.has(1))
memory.give(10)
print(memory.has(10))
serve.PATIENCE, statuses = 0.1, []
serve.memory.ask(serve.MEMORY)
asked = {"PATH_INFO": "/", "REQUEST_METHOD": "POST", "CONTENT_LENGTH": "9"}
serve.application(asked, lambda status, headers: statuses.append((status, dict(headers)["Retry-After"])))
print(statuses)
"""


def test_row_47_small_requests_leave_room_for_a_large_one():
    """Who asks first is served first; who waits in vain keeps nothing, and is told to come again."""
    code, out, log = child(WAITING)
    assert code == 0, log
    assert out.splitlines() == [
        "[True, False, False]",
        "[True, True] False",
        "False False",
        "True",
        "[('503 Service Unavailable', '1')]",
    ]


# ---------------------------------------------------------------------------------------------- workers of gunicorn


def load(port, clients, count):
    """Requests from several clients at once; returns what is wrong with the answers."""

    def one(seed):
        return wrong(port, "good", f"seed {seed}", packed(**dict(zip("qkv", request(seed), strict=True))), {200})[1]

    with ThreadPoolExecutor(clients) as pool:
        return list(filter(None, pool.map(one, range(count))))


@pytest.mark.parametrize("layer", LAYERS)
def test_row_39_workers_that_use_several_threads(layer, tmp_path):
    """One worker's share is two threads: the parent has used its pool, and the children may not."""
    variables = environment(layer) | {"WEB_CONCURRENCY": "1", "NUMBA_NUM_THREADS": "2"}
    with server(tmp_path / "log", "--workers", "3", "--worker-class", "gthread", "--threads", "2", **variables) as port:
        assert load(port, 6, 120) == []


def test_row_39_a_worker_that_is_killed_is_replaced(tmp_path):
    log = tmp_path / "log"
    with server(log, "--workers", "2") as port:
        assert load(port, 4, 20) == []
        victim = int(re.search(r"Booting worker with pid: (\d+)", log.read_text())[1])
        os.kill(victim, signal.SIGKILL)
        time.sleep(1)
        assert load(port, 4, 40) == []
        assert len(re.findall("Booting worker", log.read_text())) >= 3
