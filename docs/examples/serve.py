"""Attention as a web service, for any WSGI server: arrays q, k and v of an .npz in, the result as .npy out.

WEB_CONCURRENCY=3 gunicorn --preload --chdir docs/examples --bind 127.0.0.1:8000 serve:application
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import relpos_np as rp

MOST_BYTES = 64 * 1024 * 1024
# Gunicorn's own variable for the number of workers: together they have as many threads as there are processors.
WORKERS = int(os.environ.get("WEB_CONCURRENCY", "1"))
# A trained table, here of random numbers: 32 buckets, 4 heads.
POSITION = rp.T5(np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32))


def warm_up() -> None:
    """Before the server forks: kernels are compiled or loaded once, and all workers share them."""
    rp.set_num_threads(max(1, rp.get_num_threads() // WORKERS))
    for length in (1, 64, 300):  # decoding, windows, and everything else
        x = np.ones((4, length, 32), np.float32)
        rp.attention(x, np.repeat(x, 2, axis=1), np.repeat(x, 2, axis=1), position=POSITION)


warm_up()


def answer(body: bytes) -> bytes:
    """Attention of the arrays in an .npz, which is never unpickled, as the bytes of an .npy."""
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        q, k, v = (arrays[name] for name in "qkv")
    found = io.BytesIO()
    np.save(found, rp.attention(q, k, v, position=POSITION))
    return found.getvalue()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """One request."""
    size = int(environ.get("CONTENT_LENGTH") or 0)
    if not 0 < size <= MOST_BYTES:
        status, body = "413 Content Too Large", f"expected 1 to {MOST_BYTES} bytes, found {size}".encode()
    else:
        try:
            status, body = "200 OK", answer(environ["wsgi.input"].read(size))
        except (rp.RelposError, KeyError, ValueError, zipfile.BadZipFile) as error:
            status, body = "400 Bad Request", str(error).encode()
    start_response(status, [("Content-Type", "application/octet-stream"), ("Content-Length", str(len(body)))])
    return [body]
