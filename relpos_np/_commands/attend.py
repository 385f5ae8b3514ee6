"""`relpos attend`: attention on real data, or on a file."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

import relpos_np as rp
from relpos_np._commands.common import BUSY, MISMATCH, UnusableError, busy, load, positive, refuse
from relpos_np._commands.names import attention_schemes
from relpos_np._commands.saved_call import call_arguments, needed, read
from relpos_np._commands.terminal import note, print_json, print_lines
from relpos_np._commands.terminal import seconds as duration
from relpos_np.errors import RelposImportError
from relpos_np.types import Array, Backend

_T = TypeVar("_T")

# The options of a file that a picture of scores has.
_DRAWN = {"position", *rp.logits.options}  # type: ignore[attr-defined]

# float32 against float64 on the real example, whose outputs are below 1.
_REAL_LIMIT = 2e-6
_REAL_HEADS = ("head 0", "head 3", "head 7", "head 11")

SUMMARY = "run attention on real data, or on a file"
HELP = """\
Without FILE, runs four heads of a trained model (all-mpnet-base-v2, T5 bias) on two texts, and compares the result
with what transformers computed and with the float64 reference. The package holds the numbers.

FILE is an .npz archive. A compressed one may hold 256 MiB, or 16 times its size. Nothing is unpickled. Its arrays:
  q k v            (..., H, L_q, D), (..., H_kv, L_k, D), (..., H_kv, L_k, D_v)
  mask             bool (True = may attend) or float (added)          optional
  key_lengths      integers, one per batch item                       optional
  scale            a number                                           optional
  offset           an integer, or one per batch item                  optional
  causal           True or False                                      optional
  window           w, or (left, right); a negative entry is no limit  optional
  rule             chunked, prefix or dilated, with rule.size, rule.left, rule.right (negative: no limit), rule.lengths
                   or rule.step                                       optional
  selected         the keys that each query may attend                optional
  query_scale      factors on queries                                 optional
  softcap          a number; cap_order: scores or content             optional
  sinks            one per head, or per query                         optional
  segments         cumulative lengths of packed sequences; key_segments: of keys, if they have others   optional
  scheme           a name, as for --scheme                            optional
  position.NAME    parameter NAME of the scheme's constructor; position.key_coords.0 for its axis 0; for a scheme
                   within the scheme its name, and position.bias.NAME for its parameters
The result is an .npz archive with `out` and `lse`.
"""
EXAMPLE = """\
examples:
  relpos attend
  relpos attend --threads 1 --plot none --json

  python -c "import numpy as np; r = np.random.default_rng(0); \\
    np.savez('in.npz', **{n: r.standard_normal((1, 4, 100, 64), 'float32') for n in 'qkv'}, \\
    scheme='t5', **{'position.table': r.standard_normal((32, 4), 'float32'), 'position.max_distance': 64})"
  relpos attend in.npz --out out.npz
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="an .npz archive with q, k and v")
    needs = {name: ", ".join(needed(name)) for name in attention_schemes()}
    named = ", ".join(f"{name} ({needs[name]})" if needs[name] else name for name in needs)
    parser.add_argument(
        "--scheme",
        help=f"of FILE, which must hold what stands in brackets as position.NAME: {named}; default: no positions",
    )
    parser.add_argument("--out", type=Path, help="file for the result of FILE; default FILE-out.npz")
    parser.add_argument(
        "--plot",
        metavar="PNG",
        help='picture to write; "none" for none; default relpos-attend.png, with a FILE none',
    )
    parser.add_argument("--backend", choices=rp.backend.BACKENDS, help="default: $RELPOS_BACKEND, or numba")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of the numba backend")


@contextmanager
def _threads(count: int | None, backend: Backend) -> Iterator[None]:
    """Run with so many threads."""
    if count is None:
        yield
        return
    if backend != "numba":
        raise UnusableError(
            f"--threads: only backend 'numba' has threads of its own, the backend is {backend!r}; add --backend numba"
        )
    rp.backend.kernels("numba")
    from numba import config

    if count > (most := config.NUMBA_NUM_THREADS):
        raise UnusableError(f"--threads: at most {most} here (processors, or NUMBA_NUM_THREADS), found {count}")
    with rp.threads(count, blas=False):
        yield


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _repeated(calls: Mapping[str, Callable[[], Any]], rounds: int = 5, budget: float = 1.0) -> dict[str, list[float]]:
    """Sorted seconds of each call; they take turns of some calls each, so that a busy machine slows all of them.

    The best of each says how fast it is: it is the time of a call that nobody interrupted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            stop = time.perf_counter() + budget / rounds / len(calls)
            for n in range(50):
                if n >= 3 and time.perf_counter() > stop:
                    break
                times[name].append(_timed(call)[1])
    return {name: sorted(spent) for name, spent in times.items()}


def run(args: argparse.Namespace) -> int:
    """Attention of the embedded example, or of a file."""
    backend = rp.backend.current(args.backend)
    if busy():
        # GNU OpenMP reads it when a kernel first runs: threads then sleep while they wait for others, which a turn of
        # another program keeps from going on, where spinning would take processors from exactly those.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if args.file is not None:
        with _threads(args.threads, backend):
            return _attend_file(args, backend)
    refuse(args, ("scheme", "out"), "goes with a FILE: relpos attend FILE --{} ...")
    with _threads(args.threads, backend):
        return _attend_real(args, backend)


def _kernel_facts(backend: Backend) -> dict[str, Any]:
    """Vector unit and threads, which only compiled kernels have."""
    kernels = rp.versions.kernels() if backend == "numba" else "none"
    return {name: None if isinstance(kernels, str) else kernels[name] for name in ("vectors", "threads")}


def _attend_real(args: argparse.Namespace, backend: Backend) -> int:
    """The embedded example: correct, and how fast."""
    from relpos_np.testing import real_example

    real = real_example()
    options: dict[str, Any] = {
        "position": rp.T5(real["table"], max_distance=128),
        "mask": real["mask"][:, None, None, :],
        "scale": 0.125,
    }
    q, k, v, expected = (real[name] for name in ("q", "k", "v", "expected"))

    def call(name: Backend) -> Array:
        return np.asarray(rp.attention(q, k, v, backend=name, **options))

    out, first = _timed(lambda: call(backend))
    oracle = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="numpy", **options)
    errors = {"transformers": _largest(out, expected), "float64": _largest(out, oracle)}
    ok = all(error <= _REAL_LIMIT for error in errors.values())
    compared: tuple[Backend, ...] = (backend, "numpy")
    times = _repeated({name: partial(call, name) for name in compared})
    seconds, numpy_seconds = median(times[backend]), median(times["numpy"])
    best, numpy_best = times[backend][0], times["numpy"][0]
    disturbed = busy(seconds, best)
    path = _draw(args.plot or "relpos-attend.png", lambda: _real_picture(real, options))
    found = {
        "backend": backend,
        "ok": ok,
        "error": errors,
        "limit": _REAL_LIMIT,
        "seconds": seconds,
        "fastest_seconds": best,
        "runs": len(times[backend]),
        "numpy_seconds": numpy_seconds,
        "numpy_fastest_seconds": numpy_best,
        "speedup": numpy_best / best,
        "first_call_seconds": first,
        "load": load(),
        "busy": disturbed,
        **_kernel_facts(backend),
        "plot": path,
    }
    if args.json:
        print_json(found)
        return 0 if ok else MISMATCH
    texts, heads, length, dim = q.shape
    lines = [
        ("data", f"all-mpnet-base-v2, layer 5: {texts} texts, {heads} heads, {length} tokens, head_dim {dim}, float32"),
        ("positions", "T5, 32 buckets up to distance 128"),
        ("backend", f"{backend}, {found['vectors']}, {found['threads']} threads" if found["vectors"] else backend),
        ("max error", f"{errors['transformers']:.1e} from transformers"),
        ("", f"{errors['float64']:.1e} from the float64 reference"),
        ("verdict", f"correct (limit {_REAL_LIMIT:.0e})" if ok else f"MISMATCH: the limit is {_REAL_LIMIT:.0e}"),
        ("time", f"{duration(best)} (best of {len(times[backend])}, median {duration(seconds)})"),
        ("first call", duration(first)),
    ]
    if backend != "numpy":
        lines.append(
            ("NumPy", f"{duration(numpy_best)}: {backend} is {numpy_best / best:.1f} times as fast, by the best")
        )
    if disturbed:
        lines.append(("note", BUSY))
    if path:
        lines.append(("picture", path))
    print_lines(lines)
    return 0 if ok else MISMATCH


def _largest(actual: Array, expected: Array) -> float:
    """The largest difference; a NaN counts as infinite."""
    difference = float(np.abs(actual.astype(np.float64) - expected).max())
    return np.inf if np.isnan(difference) else difference


def _real_picture(real: Mapping[str, Array], options: Mapping[str, Any]) -> Any:
    """The shorter text, without its padding; head 11, which looks for the next word."""
    from relpos_np import plot

    length = int(real["mask"][1].sum())
    return plot.attention_with_and_without(
        real["q"][1, :, :length],
        real["k"][1, :, :length],
        position=options["position"],
        scale=options["scale"],
        tokens=[str(token) for token in real["tokens"][1, :length]],
        head=3,
        heads=_REAL_HEADS,
        title="What positions do to attention: all-mpnet-base-v2, layer 5",
    )


def _draw(target: str | None, picture: Callable[[], Any]) -> str | None:
    """Write a picture; return its path, and what to tell the user where there is none."""
    if target is None or target.lower() == "none":
        return None
    from relpos_np import plot

    try:
        figure = picture()
    except RelposImportError as error:
        note(f"relpos attend: no picture: {error}")
        return None
    plot.save(figure, target)
    return target


def _attend_file(args: argparse.Namespace, backend: Backend) -> int:
    """Attention of the arrays in a file."""
    arrays = read(args.file)
    out_path = args.out or args.file.with_name(f"{args.file.stem}-out.npz")
    with suppress(OSError):
        if out_path.samefile(args.file):
            raise UnusableError(f"--out: {out_path} is the input")
    call = call_arguments(arrays, args.scheme, str(args.file))
    q, k, v = (call.pop(name) for name in "qkv")
    undrawn = [name for name in call if name not in _DRAWN or (name == "offset" and np.ndim(call[name]))]
    if undrawn and args.plot is not None and args.plot.lower() != "none":
        raise UnusableError(f"--plot: no picture of a call with {', '.join(undrawn)}; leave --plot out")
    (out, lse), seconds = _timed(lambda: rp.attention(q, k, v, backend=backend, return_lse=True, **call))
    try:
        with out_path.open("wb") as file:
            np.savez(file, out=out, lse=lse)
    except OSError as error:
        raise UnusableError(
            f"{out_path}: cannot be written: {error.strerror or error}; choose another place with --out"
        ) from error

    def picture() -> Any:
        from relpos_np import plot

        # Batch and head 0.
        p = plot.attention_weights(q, k, **call)
        return plot.heat_map(p.reshape(-1, *p.shape[-2:])[0], title=f"{args.file.name}: attention of head 0").figure

    path = _draw(args.plot, picture)
    found = {
        "file": str(args.file),
        "out": str(out_path),
        "shape": list(out.shape),
        "dtype": str(out.dtype),
        "position": None if call.get("position") is None else repr(call["position"]),
        "finite": bool(np.isfinite(out).all()),
        "backend": backend,
        **_kernel_facts(backend),
        "first_call_seconds": seconds,
        "plot": path,
    }
    if args.json:
        print_json(found)
        return 0
    lines = [
        ("input", f"q {q.shape}, k {k.shape}, v {v.shape}, {q.dtype}"),
        ("positions", found["position"] or "none"),
        ("output", f"{out_path}: out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}"),
        ("time", f"{duration(seconds)} on backend {backend}, first call"),
    ]
    if not found["finite"]:
        lines.append(("note", "the output holds NaN or infinity"))
    if path:
        lines.append(("picture", path))
    print_lines(lines)
    return 0
