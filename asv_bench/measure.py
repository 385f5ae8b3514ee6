"""Measure what this library takes, and record it: ``python asv_bench/measure.py``.

Each round runs the FMA loop, the kernel and (less often) NumPy one after the other, each ratio is
taken within a round, and medians and bests of all rounds are written to ``recorded/``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
# The library beside this file is measured, installed or not.
PATHS = [str(HERE), str(HERE.parent)]
sys.path[:0] = [path for path in PATHS if path not in sys.path]

os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("NUMBA_NUM_THREADS", "2"))
os.environ.setdefault("NUMBA_NUM_THREADS", "2")

_MEMORY = """
import sys
sys.path[:0] = {paths!r}
from benchmarks.memory import extra_memory, settle
from benchmarks.scaling import of_length
from benchmarks.shapes import case
subject = of_length({shape!r}) if isinstance({shape!r}, int) else case({shape!r})
settle(backward={backward!r})
subject.grad_out
results = (subject.q, subject.k, subject.v, *subject.arrays.values()) if {backward!r} else (subject.q,)
call = subject.attention_vjp if {backward!r} else subject.attention
print(extra_memory(call, sum(x.nbytes for x in results)))
"""

_FIRST = """
import time, numpy, relpos_np
x = numpy.ones((1, 2, 64, 64), numpy.float32)
started = time.perf_counter()
relpos_np.attention(x, x, x)
print(time.perf_counter() - started)
"""

_IMPORT = """
import time, numpy
started = time.perf_counter()
import relpos_np
print(time.perf_counter() - started)
"""


def child(code, **environment):
    """Run code in a new process and return the number it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(result.stdout)


def extra_mib(shape, *, backward=False):
    """Extra memory of a call in a new process; `shape` is a letter or a length."""
    return child(_MEMORY.format(paths=PATHS, shape=shape, backward=backward)) / 2**20


def turns_of(call, operations, rounds, also=None):
    """Times of a call in turn with the FMA loop, and what they say of the machine's limit; `also` after each."""
    import numba
    from benchmarks.ceiling import fma_seconds, rate, timed, turns_for

    threads = numba.get_num_threads()
    call()
    turns = turns_for(min(timed(call) for _ in range(3)), threads)
    limits, times = [], []
    for n in range(rounds):
        limits.append(rate(turns, threads, fma_seconds(turns, threads)))
        times.append(timed(call))
        if also:
            also(n)
    speeds = [operations / t for t in times]
    return {
        "threads": threads,
        "median_ms": statistics.median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "gflops_best": max(speeds) / 1e9,
        "fma_gflops_best": max(limits) / 1e9,
        "fraction_of_fma_best": max(speeds) / max(limits),
        "fraction_of_fma_median": statistics.median(s / f for s, f in zip(speeds, limits, strict=True)),
        "rounds": rounds,
    }


def measure_shape(shape, rounds, numpy_rounds):
    """Figures of one shape."""
    from benchmarks.ceiling import fraction_of_read, timed
    from benchmarks.shapes import case

    subject = case(shape)
    s = subject.shape
    slow = []

    def reference(n):
        if n < numpy_rounds:
            # Threads of a pool go on waiting for work in a loop for a while: first the kernels', then the BLAS's.
            time.sleep(0.1)
            slow.append(timed(lambda: subject.attention(backend="numpy")))
            time.sleep(0.1)

    found = {"shape": [s.batch, s.heads, s.q_len, s.head_dim], "keys": s.k_len, "words": s.words}
    found["storage"] = s.storage
    found |= turns_of(subject.into_kept, subject.operations, rounds, reference)
    found["numpy_median_ms"] = statistics.median(slow) * 1e3
    found["times_numpy"] = found["numpy_median_ms"] / found["median_ms"]
    found["max_error"] = subject.error(subject.attention())
    found["extra_memory_mib"] = extra_mib(shape)
    if s.q_len == 1:
        found["fraction_of_read_median"] = fraction_of_read(subject.into_kept, (subject.k, subject.v), rounds)
    return found


def measure_backward(shape, rounds):
    """Figures of the gradients at one shape."""
    from benchmarks.shapes import as_mapping, case

    subject = case(shape)
    found = turns_of(subject.attention_vjp, subject.backward_operations, rounds)
    found["max_error"] = subject.gradient_error(as_mapping(subject.attention_vjp()))
    found["extra_memory_mib"] = extra_mib(shape, backward=True)
    return found


def measure_growth(rounds):
    """Time and memory over the length, time over threads."""
    import numba
    from benchmarks.ceiling import timed
    from benchmarks.scaling import LENGTHS, LONG, of_length, thread_counts
    from benchmarks.shapes import case

    lengths = {}
    for length in (*LENGTHS, LONG):
        subject = of_length(length)
        subject.attention()
        best = min(timed(subject.attention) for _ in range(3 if length == LONG else rounds))
        lengths[str(length)] = {"best_ms": best * 1e3, "extra_memory_mib": extra_mib(length)}
    subject, most = case("B"), numba.get_num_threads()
    subject.attention()
    times = {count: [] for count in thread_counts() if count <= most}
    for _ in range(rounds):
        for count, past in times.items():
            numba.set_num_threads(count)
            past.append(timed(subject.attention))
    numba.set_num_threads(most)
    threads = {
        str(count): {
            "best_ms": min(past) * 1e3,
            "speedup": statistics.median(one / t for one, t in zip(times[1], past, strict=True)),
        }
        for count, past in times.items()
    }
    return {"lengths": lengths, "threads": threads}


def measure_small():
    """What small calls take, and what of that beside the kernel."""
    from benchmarks.small import CALLS, beside_kernel, microseconds, small_call

    found = {}
    for name in CALLS:
        call = small_call(name)
        found[name] = {"median_us": microseconds(call), "beside_kernel_us": beside_kernel(call)}
    return found


def versions_without_paths():
    """What was measured, and with what; not where that lies."""
    from relpos_np.versions import collect_versions, settings

    versions = collect_versions() | {"environment": settings()}
    for name in ("installed", "not_available"):
        del versions[name]
    del versions["kernels"]["cache"]
    return versions


def main():
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--numpy-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "recorded" / "cpu.json")
    arguments = parser.parse_args()
    from benchmarks.shapes import BACKWARD, SHAPES, lacking

    record = {"date": time.strftime("%Y-%m-%d"), "load_before": list(os.getloadavg()), "shapes": {}, "backward": {}}
    for shape, sizes in SHAPES.items():
        if reason := lacking(sizes):
            print(f"{shape} is left out: {reason}", flush=True)
            continue
        record["shapes"][shape] = measure_shape(shape, arguments.rounds, arguments.numpy_rounds)
        print(shape, json.dumps(record["shapes"][shape]), flush=True)
    for shape in BACKWARD:
        record["backward"][shape] = measure_backward(shape, arguments.rounds)
        print(shape, "backward", json.dumps(record["backward"][shape]), flush=True)
    record |= measure_growth(arguments.rounds)
    record["small"] = measure_small()
    record["versions"] = versions_without_paths()
    with tempfile.TemporaryDirectory() as folder:
        record["first_call_cold_s"] = child(_FIRST, RELPOS_CACHE_DIR=folder)
        record["first_call_warm_s"] = statistics.median(child(_FIRST, RELPOS_CACHE_DIR=folder) for _ in range(5))
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        child(_IMPORT, **compiled)
        record["import_over_numpy_ms"] = 1e3 * statistics.median(child(_IMPORT, **compiled) for _ in range(9))
    record["load_after"] = list(os.getloadavg())
    arguments.out.parent.mkdir(exist_ok=True, parents=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
