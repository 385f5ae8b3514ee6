"""Measure the README's figures and record them: ``python asv_bench/measure.py``.

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
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("NUMBA_NUM_THREADS", "2"))
os.environ.setdefault("NUMBA_NUM_THREADS", "2")

_MEMORY = """
import pathlib, sys
sys.path.insert(0, {here!r})
from benchmarks.shapes import inputs
import relpos_np as rp
def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
q, k, v, scheme = inputs({shape!r})
rp.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], position=scheme)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports
before = status("VmRSS")
out = rp.attention(q, k, v, position=scheme)
print(status("VmHWM") - before - out.nbytes)
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
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return float(result.stdout)


def measure_shape(shape, rounds, numpy_rounds):
    """Figures of one shape."""
    import numba
    from benchmarks.ceiling import fma_seconds, rate, turns_for
    from benchmarks.shapes import SHAPES, inputs, operations, row_error

    import relpos_np as rp

    q, k, v, scheme = inputs(shape)
    threads = numba.get_num_threads()

    def seconds(backend):
        started = time.perf_counter()
        rp.attention(q, k, v, position=scheme, backend=backend)
        return time.perf_counter() - started

    seconds("numba")
    turns = turns_for(min(seconds("numba") for _ in range(3)), threads)
    limits, times, slow = [], [], []
    for n in range(rounds):
        limits.append(rate(turns, threads, fma_seconds(turns, threads)))
        times.append(seconds("numba"))
        if n < numpy_rounds:
            slow.append(seconds("numpy"))
    speeds = [operations(shape) / t for t in times]
    return {
        "shape": SHAPES[shape],
        "threads": threads,
        "median_ms": statistics.median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "gflops_best": max(speeds) / 1e9,
        "fma_gflops_best": max(limits) / 1e9,
        "fraction_of_fma_best": max(speeds) / max(limits),
        "fraction_of_fma_median": statistics.median(s / f for s, f in zip(speeds, limits, strict=True)),
        "numpy_median_ms": statistics.median(slow) * 1e3,
        "times_numpy": statistics.median(slow) / statistics.median(times),
        "max_error": row_error(shape, rp.attention(q, k, v, position=scheme)),
        "extra_memory_mib": max(0.0, child(_MEMORY.format(here=str(HERE), shape=shape))) / 2**20,
        "rounds": rounds,
    }


def table(record):
    """The README's lines for a record."""
    versions = record["versions"]
    machine = (
        f"{versions['processor']}, {record['shapes']['A']['threads']} threads, float32, T5 bias of 32 buckets, "
        f"{versions['kernels']['vectors']} vectors, numba {versions['numba']}, {record['date']}. The limit is a loop "
        "of FMA instructions on registers, timed in turn with the kernel; a shared machine, hence medians and bests."
    )
    head = (
        "| batch × heads × length × head_dim | median ms (best) | of the limit, median (best) | × NumPy reference "
        "| extra memory | max error |"
    )
    rows = [
        f"| {' × '.join(map(str, figures['shape']))} | {figures['median_ms']:.1f} ({figures['best_ms']:.1f}) "
        f"| {figures['fraction_of_fma_median']:.0%} ({figures['fraction_of_fma_best']:.0%}) "
        f"| {figures['times_numpy']:.0f} | {figures['extra_memory_mib']:.1f} MiB | {figures['max_error']:.1e} |"
        for figures in record["shapes"].values()
    ]
    start = (
        f"A new process pays {record['import_over_numpy_ms']:.0f} ms for `import relpos_np` beyond NumPy's, and "
        f"{record['first_call_warm_s']:.2f} s for its first call, or {record['first_call_cold_s']:.1f} s if the kernel "
        "must be compiled."
    )
    return [machine, "", head, "| --- | --- | --- | --- | --- | --- |", *rows, "", start]


def write_readme(record):
    """Replace the figures between the README's two comments."""
    path = HERE.parent / "README.md"
    head, rest = path.read_text(encoding="utf-8").split("<!-- figures: written by asv_bench/measure.py -->\n")
    _, tail = rest.split("<!-- end of figures -->")
    figures = "\n".join(
        ["<!-- figures: written by asv_bench/measure.py -->", "", *table(record), "", "<!-- end of figures -->"]
    )
    path.write_text(head + figures + tail, encoding="utf-8")


def main():
    """Measure, record, write the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--numpy-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "recorded" / "cpu.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from relpos_np.versions import collect_versions

    record = {"date": time.strftime("%Y-%m-%d"), "shapes": {}}
    for shape in "ABC":
        record["shapes"][shape] = measure_shape(shape, arguments.rounds, arguments.numpy_rounds)
        print(shape, json.dumps(record["shapes"][shape]), flush=True)
    versions = collect_versions()
    versions["kernels"].pop("cache")
    record["versions"] = versions
    with tempfile.TemporaryDirectory() as folder:
        record["first_call_cold_s"] = child(_FIRST, RELPOS_CACHE_DIR=folder)
        record["first_call_warm_s"] = statistics.median(child(_FIRST, RELPOS_CACHE_DIR=folder) for _ in range(5))
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        child(_IMPORT, **compiled)
        record["import_over_numpy_ms"] = 1e3 * statistics.median(child(_IMPORT, **compiled) for _ in range(9))
    arguments.out.parent.mkdir(exist_ok=True, parents=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.out.name == "cpu.json":
        write_readme(record)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
