"""A web server that forks its workers after kernels have run, under load: every answer is the right one."""

import contextlib
import http.client
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.layers import LAYERS, environment
from tests.processes import ROOT

pytest.importorskip("numba")
config = pytest.importorskip("gunicorn.config")
pytest.importorskip("threadpoolctl")
FOLDER = ROOT / "docs" / "examples"
pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not a checkout"),
]
POSITION = rp.T5(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))


@contextlib.contextmanager
def server(log, *options, **variables):
    """Gunicorn with the program of the documentation, on a free port; stopped in the end, with nothing left."""
    argv = [sys.executable, "-m", "gunicorn", "--chdir", str(FOLDER), "--bind", "127.0.0.1:0", "--preload", *options]
    if "control_socket" in {setting.name for setting in config.KNOWN_SETTINGS}:  # of newer versions, in the home folder
        argv.append("--no-control-socket")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*argv, "serve:application"],
            stdout=file, stderr=file, start_new_session=True, env=os.environ | variables | {"PYTHONPATH": path},
        )  # fmt: skip
    try:
        stop = time.monotonic() + 200
        while not (found := re.search(r"Listening at: http://127.0.0.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < stop, log.read_text()
            time.sleep(0.1)
        yield int(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nobody is left in its session's group
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    try:
        connection.request("POST", "/", body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def packed(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def request(seed):
    """Arrays of a request: a step of decoding, windows, and calls for one thread and for several."""
    rng = np.random.default_rng(seed)
    q_len, k_len = ((1, 500), (49, 49), (20, 60), (300, 300))[seed % 4]
    dtype = np.float64 if seed % 7 == 0 else np.float32
    return [rng.standard_normal((4, n, 32)).astype(dtype) for n in (q_len, k_len, k_len)]


def load(port, clients, count):
    """Requests from several clients at once; returns the seeds of those that were answered wrongly, and process ids."""

    def one(seed):
        q, k, v = request(seed)
        status, body = post(port, packed(q=q, k=k, v=v))
        if status != 200:
            return seed, status, body
        found, expected = np.load(io.BytesIO(body)), rp.attention(q, k, v, position=POSITION)
        return None if found.dtype == q.dtype and np.array_equal(found, expected) else (seed, "wrong")

    with ThreadPoolExecutor(clients) as pool:
        return [found for found in pool.map(one, range(count)) if found is not None]


@pytest.mark.parametrize("worker", ["sync", "gthread"])
def test_row_39_preloaded_workers_under_load(worker, tmp_path):
    """Three workers, and as many threads in each as fit: 300 requests from 8 clients, and some that are wrong."""
    options = ["--workers", "3", "--worker-class", worker, *(["--threads", "4"] if worker == "gthread" else [])]
    with server(tmp_path / "log", *options) as port:
        assert load(port, 8, 300) == []
        q, k, v = request(1)
        for body in (
            packed(q=q, k=k),
            packed(q=q, k=k[:, :5], v=v),
            b"no archive",
            packed(q=np.array([None]), k=k, v=v),
        ):
            status, words = post(port, body)
            assert (status, bool(words)) == (400, True)
        assert post(port, b"")[0] == 413
        assert load(port, 8, 20) == []
    assert "Traceback" not in (tmp_path / "log").read_text()


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


def test_row_39_requests_under_way_are_answered_before_the_end(tmp_path):
    with server(tmp_path / "log", "--workers", "2", "--worker-class", "gthread", "--threads", "2") as port:
        q, k, v = np.random.default_rng(0).standard_normal((3, 4, 6000, 32)).astype(np.float32)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, port, packed(q=q, k=k, v=v))
            time.sleep(0.3)
            os.kill(int(re.search(r"Listening at: .* \((\d+)\)", (tmp_path / "log").read_text())[1]), signal.SIGTERM)
            status, body = waiting.result()
        assert status == 200
        np.testing.assert_array_equal(np.load(io.BytesIO(body)), rp.attention(q, k, v, position=POSITION))
