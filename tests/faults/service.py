"""The service of the documentation, started as a server of its own, and requests to it."""

import contextlib
import http.client
import io
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import relpos_np as rp
from tests.processes import ROOT

FOLDER = ROOT / "docs" / "examples"
POSITION = rp.T5(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))


def command(name, options):
    """What starts it on a free port, and what its log says then."""
    if name == "uvicorn":
        argv = ["--app-dir", FOLDER, "--port", "0", "--lifespan", "off", "--no-access-log", *options, "serve:asgi"]
        return argv, r"running on http://127.0.0.1:(\d+)"
    from gunicorn.config import KNOWN_SETTINGS

    # Newer versions put a socket into the home folder.
    quiet = ["--no-control-socket"] if "control_socket" in {setting.name for setting in KNOWN_SETTINGS} else []
    argv = ["--chdir", FOLDER, "--bind", "127.0.0.1:0", "--preload", *quiet, *options, "serve:application"]
    return argv, r"Listening at: http://127.0.0.1:(\d+)"


@contextlib.contextmanager
def server(log, *options, name="gunicorn", **variables):
    """The service on a free port, which is given; stopped in the end, with nothing left."""
    argv, listening = command(name, options)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", name, *map(str, argv)],
            stdout=file, stderr=file, start_new_session=True, env=os.environ | variables | {"PYTHONPATH": path},
        )  # fmt: skip
    try:
        stop = time.monotonic() + 200
        while not (found := re.search(listening, log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < stop, log.read_text()
            time.sleep(0.1)
        yield int(found[1])
        process.send_signal(signal.SIGTERM)
        # Uvicorn ends by the signal that it got.
        assert process.wait(30) in (0, -signal.SIGTERM), log.read_text()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nobody is left in its session's group
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def post(port, body, path="/", method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    try:
        connection.request(method, path, body)
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
