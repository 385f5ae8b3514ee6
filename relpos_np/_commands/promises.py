"""What the library promises, each measured on this machine: `relpos check --promises`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing import Example, example
from relpos_np.testing.compare import EPS

__all__ = ["MEASURES", "Promise", "measure"]

_ROOT = Path(__file__).parents[2]
_THREADS, _CALLS = 8, 25
LAYERS = ("omp", "tbb", "workqueue")
# Seconds for what only a process of its own can show.
_SECONDS = 120


@dataclass(frozen=True)
class Promise:
    """One row of the table.

    `name` is short, for programs, and `text` says what is promised. `limit`, or None, is what may be measured at most;
    both numbers are in `unit`. `measured` and `ok`, whether the promise was kept, are None if it was not measured.
    `note` says where the largest number was found, or why there is none.
    """

    name: str
    text: str
    limit: float | None
    unit: str
    measured: float | None = None
    ok: bool | None = None
    note: str = ""


class _AbsentError(Exception):
    """A promise that cannot be measured here, and why."""


Found = tuple[float, str]


def _examples(*sizes: str) -> Iterator[Example]:
    """Every scheme and variant of attention in float32."""
    for name, info in SCHEMES.items():
        for variant in (info.variants or (None,)) if info.kind == "attention" else ():
            for size in sizes:
                yield example(name, variant=variant, size=size)


def _worst(found: Iterator[Found]) -> Found:
    """The largest number, and where it was found; NaN counts as infinite."""
    return max(((np.inf if np.isnan(x) else x, where) for x, where in found), default=(0.0, ""))


def _float32() -> Found:
    return _worst((4 * one.error(one.run("numba")[0]), one.where) for one in _examples("small", "blocks"))


def _than_numpy() -> Found:
    def found() -> Iterator[Found]:
        for one in _examples("small", "blocks"):
            ours, theirs = (float(np.abs(one.run(name)[0] - one.expected).max()) for name in ("numba", "numpy"))
            yield ours / (2 * theirs + 1e-6), one.where

    return _worst(found())


def _float64() -> Found:
    """Loops on numbers of fifty digits, which share no code with the library."""
    try:
        import mpmath
    except ImportError as error:
        raise _AbsentError("install mpmath") from error
    rng = np.random.default_rng(0)
    heads, q_len, k_len, depth = 2, 9, 17, 6
    q, k, v = (rng.standard_normal((heads, n, depth)) for n in (q_len, k_len, k_len))
    slopes, reach = rng.random(heads), 3
    table = rng.standard_normal((2 * reach + 1, depth))
    schemes = {"none": None, "ALiBi": rp.ALiBi(slopes), "Shaw": rp.Shaw(table)}

    def number(x: Any) -> Any:
        return mpmath.mpf(float(x))

    def score(kind: str, h: int, i: int, j: int) -> Any:
        d = j - i - (k_len - q_len)
        row = table[min(max(d, -reach), reach) + reach] if kind == "Shaw" else np.zeros(depth)
        terms = [number(a) * (number(b) + number(c)) for a, b, c in zip(q[h, i], k[h, j], row, strict=True)]
        content = mpmath.fsum(terms) / mpmath.sqrt(depth)
        return content - number(slopes[h]) * abs(d) if kind == "ALiBi" else content

    def found() -> Iterator[Found]:
        for kind, scheme in schemes.items():
            outs = {name: rp.attention(q, k, v, position=scheme, backend=name) for name in rp.backend.HOST_BACKENDS}
            for h, i in np.ndindex(heads, q_len):
                s = [score(kind, h, i, j) for j in range(k_len)]
                weights = [mpmath.exp(x) for x in s]
                unit = number(EPS["float64"]) * (1 + max(abs(x) for x in s)) / mpmath.fsum(weights)
                for c in range(depth):
                    column = [number(x) for x in v[h, :, c]]
                    exact = mpmath.fsum(w * x for w, x in zip(weights, column, strict=True)) / mpmath.fsum(weights)
                    size = unit * mpmath.fsum(w * abs(x) for w, x in zip(weights, column, strict=True))
                    for name, out in outs.items():
                        yield float(abs(number(out[h, i, c]) - exact) / size), f"{kind} on {name}"

    with mpmath.workdps(50):
        return _worst(found())


def _many_keys() -> Found:
    """Exact sums of rounded terms, whose own errors hardly add up."""
    rng = np.random.default_rng(0)

    def found() -> Iterator[Found]:
        for dtype in (np.float32, np.float64):
            q, k, v = ((0.3 * rng.standard_normal((1, n, 4))).astype(dtype) for n in (24, 100_000, 100_000))
            v = np.add(v, 0.5, dtype=dtype)
            out = rp.attention(q, k, v, backend="numba", return_lse=True)[0][0]
            weights = np.exp(q[0].astype(np.float64) @ k[0].T.astype(np.float64) / 2)
            totals = [math.fsum(row) for row in weights.tolist()]  # of lists: fsum takes NumPy's numbers one by one
            for i, c in np.ndindex(out.shape):
                terms = weights[i] * v[0, :, c]
                size = math.fsum(np.abs(terms).tolist()) / totals[i] * EPS[np.dtype(dtype).name]
                off = abs(out[i, c] - math.fsum(terms.tolist()) / totals[i])
                yield float(off / size), f"{np.dtype(dtype)}, 100,000 keys"

    return _worst(found())


def _many_terms() -> Found:
    """Gradients that are sums of equal numbers, each of which is rounded the same way; the exact sums are known."""
    rng, n = np.random.default_rng(0), 100_000

    def found() -> Iterator[Found]:
        for dtype in (np.float32, np.float64):
            labels, sign = rng.integers(0, 4, (24, n)), np.resize((1, -1), n)
            q, v = np.zeros((1, 24, 4), dtype), np.tile(sign[:, None], (1, 1, 4)).astype(dtype)
            given: dict[str, Any] = {"grad_out": np.ones_like(q), "scale": 1.0, "backend": "numba"}
            graph = rp.GraphLabels(labels, np.zeros((4, 1), dtype))
            grads = rp.attention_vjp(q, v, v, position=graph, **given)
            share = [[(labels == r).sum() / n, 4 * ((labels == r) * sign).sum() / n] for r in range(4)]
            vectors = rp.GraphLabels(labels, value_table=np.zeros((4, 4), dtype))
            of_values = rp.attention_vjp(q, v, v, position=vectors, **given).position["value_table"]
            unit = EPS[np.dtype(dtype).name] * (1 + math.log(n))
            where = f"{np.dtype(dtype)}, 24 queries, {n:,} keys"
            yield float(np.abs(grads.q - 4).max() / 4 / unit), f"queries, {where}"
            for r, (whole, signed) in enumerate(share):
                yield float(np.abs(of_values[r] / whole - 1).max() / unit), f"vectors of a label, {where}"
                error = abs(float(grads.position["table"][r, 0]) - signed)
                yield error / (4 * whole * unit), f"scalar of a label, {where}"

    return _worst(found())


def _sums() -> Found:
    """Values of 1: schemes that add to values or turn them are left out."""

    def found() -> Iterator[Found]:
        for one in _examples("small", "blocks"):
            scheme = one.position.scheme if isinstance(one.position, rp.AtPositions) else one.position
            adds = any(getattr(scheme, name, None) is not None for name in ("value_table", "value_tables"))
            if adds or (one.position is not None and one.position.turns_values):
                continue
            out, lse = replace(one, v=np.ones_like(one.v)).run("numba")
            yield float(np.abs(out[np.isfinite(lse)] - 1).max(initial=0.0)), one.where

    return _worst(found())


def _large(seed: int = 0, length: int = 300) -> Callable[[], bytes]:
    """A call that takes all threads."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, 4, length, 64), dtype=np.float32) for _ in range(3))
    position = rp.T5(rng.standard_normal((32, 4), dtype=np.float32))
    return lambda: rp.attention(q, k, v, position=position, backend="numba").tobytes()


def _repeatable() -> Found:
    call = _large()
    first = call()
    with ThreadPoolExecutor(30) as pool:
        others = sum(found != first for found in pool.map(lambda _: call(), range(30)))
    return float(others), "30 calls at once, T5, 2 × 4 heads, 300 tokens"


def _batch() -> Found:
    """Kernels for attention, windows and decoding: items that have other bits than alone."""
    rng = np.random.default_rng(0)
    shapes = {"attention": (300, 300), "windows": (64, 64), "decoding": (1, 3000)}
    other = []
    for name, (q_len, k_len) in shapes.items():
        for dtype in (np.float32, np.float64):
            q, k, v = (rng.standard_normal((5, 3, n, 64)).astype(dtype) for n in (q_len, k_len, k_len))
            whole = rp.attention(q, k, v, backend="numba")
            alone = [rp.attention(q[b], k[b], v[b], backend="numba") for b in range(5)]
            other += [name] * sum(not np.array_equal(a, b) for a, b in zip(alone, whole, strict=True))
    return float(len(other)), ", ".join(
        dict.fromkeys(other)
    ) or "attention, windows, decoding; no promise for gradients"


def _child(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-500:] or f"exit status {done.returncode}")
    return done.stdout


_MEMORY = """
import numpy as np, relpos_np as rp
def memory(key):
    return next(int(x.split()[1]) * 1024 for x in open('/proc/self/status') if x.startswith(key))
rng = np.random.default_rng(0)
worst = 0.0
for length in (512, 2048, 8192):
    q, k, v = (rng.standard_normal((1, 2, length, 64), dtype=np.float32) for _ in range(3))
    t5 = rp.T5(rng.standard_normal((32, 2)).astype(np.float32))
    rp.attention(q[:, :, :200], k[:, :, :200], v[:, :, :200], position=t5, backend='numba')
    open('/proc/self/clear_refs', 'w').write('5')
    before = memory('VmRSS')
    out = rp.attention(q, k, v, position=t5, backend='numba')
    extra = memory('VmHWM') - before
    worst = max(worst, (extra - 1.2 * out.nbytes - k.nbytes) / 2**20)
print(worst)
"""


def _extra_memory() -> Found:
    if not Path("/proc/self/clear_refs").exists():
        raise _AbsentError("only Linux tells the peak")
    _large()()  # compiled here, so that the process only loads it
    try:
        return max(float(_child(_MEMORY)), 0.0), "512, 2,048 and 8,192 tokens"
    except RuntimeError as error:
        if "Permission" not in str(error):
            raise
        raise _AbsentError("the system does not let the peak be reset") from error


_AT_ONCE = f"""
from concurrent.futures import ThreadPoolExecutor
from relpos_np._commands import promises
call = promises._large()
first = call()
with ThreadPoolExecutor({_THREADS}) as pool:
    print(sum(found != first for found in pool.map(lambda _: call(), range({_THREADS * _CALLS}))))
"""


def on_layer(layer: str) -> dict[str, str]:
    """Variables for a process that runs on one of Numba's `LAYERS`."""
    found = {"NUMBA_THREADING_LAYER": layer}
    if layer == "tbb":
        # pip puts TBB into the environment's lib folder, where the system's loader does not look by itself.
        folders = (str(Path(sysconfig.get_path("data")) / "lib"), os.environ.get("LD_LIBRARY_PATH"))
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found


def _callers() -> Found:
    wrong, ran, lacking = 0, [], []
    for layer in LAYERS:
        try:
            wrong += int(_child(_AT_ONCE, **on_layer(layer)))
            ran.append(layer)
        except RuntimeError as error:
            if "threading layer" not in str(error):
                return np.inf, f"{layer}: {error}"
            lacking.append(layer)
    absent = f"; not installed: {', '.join(lacking)}" if lacking else ""
    return float(wrong), f"{_THREADS} threads × {_CALLS} calls on {', '.join(ran)}{absent}"


_INTERRUPT = """
import signal, threading, time
import numpy as np, relpos_np as rp
signal.signal(signal.SIGINT, signal.default_int_handler)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((4, 16384, 64), dtype=np.float32) for _ in range(3))
rp.attention(q[:, :64], k[:, :64], v[:, :64], backend='numba')
sent = []
def send():
    time.sleep(0.3)
    sent.append(time.perf_counter())
    signal.raise_signal(signal.SIGINT)
threading.Thread(target=send, daemon=True).start()
try:
    while not sent or time.perf_counter() < sent[0] + 20:
        rp.attention(q, k, v, backend='numba')
except KeyboardInterrupt:
    print(time.perf_counter() - sent[0])
"""


def _interrupt() -> Found:
    if sys.platform == "win32":
        raise _AbsentError("signals to itself need another system")
    said = _child(_INTERRUPT)
    return (float(said) if said.strip() else np.inf), "4 heads, 16,384 tokens"


# Sixteen roundings. Values and weights are summed in different orders, over 192 keys at a time, and both sums are near
# 1: 1.3e-6 was measured, and 1.6e-6 of NumPy's own sums in float32, so that 1e-6 would be too little for either.
_SUM_LIMIT = 16 * EPS["float32"]

# Name, what is promised, the limit and its unit, and how it is measured.
MEASURES: tuple[tuple[str, str, float, str, Callable[[], Found]], ...] = (
    ("float32", "float32 kernels against float64", 4.0, "eps Σ p|v| (1 + max |s|)", _float32),
    ("than_numpy", "the same against NumPy in float32", 1.0, "× (2 × NumPy's error + 1e-6)", _than_numpy),
    ("float64", "float64 against 50 digits", 4.0, "eps Σ p|v| (1 + max |s|)", _float64),
    ("many_keys", "float32 and float64 kernels, however many keys", 4.0, "eps Σ p|v|", _many_keys),
    ("many_terms", "gradients over many keys, sums of equal numbers", 2.0, "eps Σ |x| (1 + lse)", _many_terms),
    ("sums", "probabilities sum to 1, in float32", _SUM_LIMIT, "", _sums),
    ("repeatable", "the same bits again, in 30 calls at once", 0.0, "other results", _repeatable),
    ("batch", "a batch item has the bits it has alone", 0.0, "other results", _batch),
    ("memory", "extra memory beyond 1.2 × output + packed keys", 8.0, "MiB", _extra_memory),
    ("callers", "many threads call at once, on every layer", 0.0, "other results", _callers),
    ("interrupt", "Ctrl-C ends a long call", 1.0, "s", _interrupt),
)


def measure() -> Iterator[tuple[str, Promise]]:
    """Measure every promise, one after another; a RelposImportError without Numba, whose kernels most are about."""
    rp.backend.kernels("numba")
    for name, text, limit, unit, how in MEASURES:
        promise = Promise(name, text, limit, unit)
        try:
            measured, note = how()
        except _AbsentError as reason:
            yield name, replace(promise, note=f"not measured: {reason}")
            continue
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield name, replace(promise, measured=np.inf, ok=False, note=str(error))
            continue
        yield name, replace(promise, measured=measured, ok=measured <= limit, note=note)
