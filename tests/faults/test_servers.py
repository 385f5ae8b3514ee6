"""A web server that forks its workers after kernels have run, under load: every answer is the right one."""

import io
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.layers import LAYERS, environment
from tests.faults.service import FOLDER, POSITION, packed, post, request, server

pytest.importorskip("numba")
pytest.importorskip("gunicorn")
pytest.importorskip("threadpoolctl")
pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not a checkout"),
]


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
        assert post(port, b"")[0] == 400
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
