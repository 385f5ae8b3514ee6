"""Predict times on an H100 from machine code: ``python asv_bench/gpu/predict.py --out FILE`` needs no GPU.

Small calls are run by the interpreter of `machine.py`, and their results compared with float64. What a block costs is
linear in its tiles, so that two sizes tell what it costs at any. A launch takes as long as its blocks on all
multiprocessors, each of which has as many at once as registers and shared memory allow. That gives two limits, as for
any closed system of queues (Denning and Buzen, "The Operational Analysis of Queueing Network Models", Computing
Surveys 10 (3), 1978): n blocks together take no less than one alone, nor than n times what the busiest pipe needs, and
no more than one alone and n - 1 times that. These are predictions, and no measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from benchmarks.shapes import SHAPES, as_mapping, make  # noqa: E402

from gpu import dry, forecast, page, rows, sass  # noqa: E402
from gpu.machine import Block, Memory  # noqa: E402

# An H100 SXM5: data sheet and architecture white paper of NVIDIA (132 multiprocessors, 67 TFLOP/s in float32 at the
# highest clock, 3.35 TB/s, 228 KB of shared memory of which a block has one for the system); second-level cache as
# microbenchmarks found it.
H100 = {
    "name": "H100 SXM5",
    "multiprocessors": 132,
    "clock_ghz": 1.98,
    "memory_tbs": 3.35,
    "cache_tbs": 5.5,
    "registers": 65536,
    "shared": 228 << 10,
    "threads": 2048,
    "blocks": 32,
}
# Cycles of a multiprocessor per warp instruction: results per clock of compute capability 9.0 (CUDA C++ Programming
# Guide, "Arithmetic Instructions"): 128 in float32, 64 integer products, sums, comparisons and in float64, 16 of the
# special functions and conversions. Four schedulers issue an instruction each.
# Matrix units: 2048 products of half precision per clock are the data sheet's 989 TFLOP/s, of which `mma.sync`, unlike
# wgmma, is known to reach no more than two thirds: 62 % is assumed.
PIPES = {
    "issue": 0.25,
    "fma": 0.25,
    "integer products": 0.5,
    "alu": 0.5,
    "special": 2.0,
    "float64": 0.5,
    "matrix": 1.0 / 0.62,
}
FMA = {"FFMA", "FMUL", "FADD", "HFMA2", "HADD2"}
SPECIAL = {"MUFU", "I2F", "F2I", "F2F", "FCHK"}
ALU = {
    "IADD3", "LOP3", "ISETP", "SEL", "FSEL", "FSETP", "FMNMX", "LEA", "SHF", "MOV", "VIADD", "PLOP3", "P2R", "F2FP",
    "I2FP", "CS2R", "PRMT",
}  # fmt: skip
FIELDS = (*PIPES, "shared least", "shared most", "sectors", "alone")
# Kernels whose blocks have tiles; of others the first block of the full call is run.
TILED = ("attend", "query_gradient", "key_gradient")
TILE = 64
# Rows on matrix units.
MATRIX = ("t5-2048-bfloat16-mma", "t5-2048-float16-mma", "t5-2048-mma")


def pipe(name):
    """The pipe that an instruction keeps busy beside the scheduler, or nothing."""
    if name in FMA:
        return "fma"
    if name == "HMMA":
        return "matrix"
    if name == "IMAD":
        return "integer products"
    if name in SPECIAL:
        return "special"
    if name in ("DADD", "DMUL", "DFMA", "DSETP"):
        return "float64"
    return "alu" if name in ALU else ""


def cost(trace, program):
    """What a block costs, as `FIELDS`: cycles of each pipe, turns of shared memory, sectors, cycles alone."""
    found = dict.fromkeys(FIELDS, 0.0)
    for name, count in trace.by_name(program).items():
        found["issue"] += count * PIPES["issue"]
        if which := pipe(name):
            found[which] += count * PIPES[which]
    found["shared least"], found["shared most"] = trace.turns_least, trace.turns_most
    found["sectors"], found["alone"] = trace.sectors, trace.cycles
    return np.array([found[name] for name in FIELDS])


def named(launch):
    """A kernel's name: that of the function that made it."""
    return launch.kernel.py_func.__qualname__.partition(".")[0]


class Runner:
    """Compiles kernels once each and runs their blocks."""

    def __init__(self):
        self.programs = {}

    def program(self, launch):
        """Machine code and program of a launch's kernel."""
        key = launch.kernel, dry.kinds(launch)
        if key not in self.programs:
            code = dry.compiled(launch)
            self.programs[key] = code, sass.disassembled(code.cubin)
        return self.programs[key]

    def run(self, launch, numbers):
        """What blocks of a launch cost, by number."""
        code, program = self.program(launch)
        memory = Memory()
        given = dry.parameters(launch.arguments, memory)
        with np.errstate(all="ignore"):
            sizes = launch.blocks, launch.threads
            traces = [Block(program, given, memory, sizes, n, code.shared).run() for n in numbers]
        return [cost(trace, program) for trace in traces]

    def call(self, call):
        """Run all launches of a call in full: what their blocks cost, by name, and its result."""
        costs = {}

        def launch(kernel, blocks, threads, *arguments):
            one = dry.Launch(kernel, blocks, threads, arguments)
            costs[named(one)] = self.run(one, range(blocks))

        with dry.launching(launch):
            result = call()
        return costs, result

    def checked(self, case, task):
        """The same for a case, and the largest error of its result."""
        if task == "backward":
            costs, result = self.call(lambda: case.attention_vjp(backend="cuda"))
            return costs, case.gradient_error(as_mapping(result))
        costs, result = self.call(lambda: case.attention(backend="cuda"))
        return costs, case.error(result)


def planned(call):
    """Launches of a full call, which are not run."""
    launches = []
    with dry.launching(lambda *given: launches.append(dry.Launch(*given[:3], given[3:]))):
        call()
    return launches


def resident(launch, code):
    """Blocks of a kernel that a multiprocessor has at once, and what keeps it from more."""
    registers = -(-code.registers // 8) * 8 * launch.threads
    limits = {
        "registers": H100["registers"] // registers,
        "shared memory": H100["shared"] // (-(-(code.shared + 1024) // 128) * 128),
        "threads": H100["threads"] // launch.threads,
        "blocks": H100["blocks"],
    }
    name = min(limits, key=limits.get)
    return limits[name], name


def together(block, count):
    """Fewest and most cycles of so many blocks on a multiprocessor at once, and the busiest pipe."""
    of = dict(zip(FIELDS, block, strict=True))
    busy = {name: of[name] for name in PIPES}
    # A multiprocessor takes 64 bytes per cycle from the second-level cache.
    busy["second-level cache"] = of["sectors"] * 0.5
    least = busy | {"shared memory": of["shared least"]}
    most = busy | {"shared memory": of["shared most"]}
    name = max(least, key=least.get)
    high = of["alone"] + (count - 1) * max(most.values())
    return max(of["alone"], count * least[name]), high, name


def seconds(launch, code, blocks, weights):
    """Fewest and most seconds of a launch whose blocks cost `blocks`, each so many times; and what binds it."""
    many, processors = sum(weights), H100["multiprocessors"]
    at_once, limit = resident(launch, code)
    mean = np.average(blocks, axis=0, weights=weights)
    rate = H100["clock_ghz"] * 1e9
    used = min(at_once, -(-many // processors))
    if used < at_once:
        limit = "few blocks"
    low, high, name = together(mean, used)
    full, rest = divmod(many, processors * at_once)
    if full:
        low_s = low * many / (processors * at_once) / rate
        tail = together(mean, -(-rest // processors))[1] if rest else 0.0
        high_s = (full * high + tail) / rate
    else:
        worst = max(blocks, key=lambda block: together(block, used)[0])
        low_s, high_s = low / rate, together(worst, used)[1] / rate
        if low == mean[-1]:
            name = "latency"
    cached = mean[FIELDS.index("sectors")] * 32 * many / (H100["cache_tbs"] * 1e12)
    if cached > low_s:
        low_s, name = cached, "second-level cache"
    return low_s, max(high_s, low_s), name, used, limit


def tiles_of(shape):
    """Key tiles of each block of queries of a head."""
    count = -(-shape.q_len // TILE)
    if not shape.causal:
        return [-(-shape.k_len // TILE)] * count
    offset = shape.k_len - shape.q_len
    return [-(-min((n + 1) * TILE + offset, shape.k_len) // TILE) for n in range(count)]


def small(shape):
    """Two calls whose blocks have different numbers of tiles, or one if its blocks are those of the full call."""
    one = replace(shape, batch=1, heads=1)
    if shape.q_len == 1:
        return [replace(one, heads=2, k_len=300)]
    if shape.kind in ("window", "rstt"):
        return [one]
    if shape.causal:
        # Blocks of three tiles and of two.
        return [replace(one, q_len=2 * TILE, k_len=3 * TILE)]
    return [replace(one, q_len=n * TILE, k_len=n * TILE) for n in (1, 2)]


def tiled_costs(runs, name, shape):
    """What the blocks of a tiled kernel cost at a shape: each different one, and how often there is one."""
    per_head = shape.batch * shape.heads
    if shape.kind in ("window", "rstt"):
        found = runs[0][name]
        return found, [per_head] * len(found), None
    if shape.causal:
        three, two = runs[0][name]
        step, tiles = three - two, 2
        first = two
    else:
        first, step, tiles = runs[0][name][0], runs[1][name][0] - runs[0][name][0], 1
    counts, times = np.unique(tiles_of(shape), return_counts=True)
    return [first + (n - tiles) * step for n in counts], (times * per_head).tolist(), step


def predicted(runner, shape, task):
    """The record of a row."""
    case = make(shape)
    work = case.attention_vjp if task == "backward" else case.attention
    launches = planned(lambda: work(backend="cuda"))
    runs, errors = [], []
    for one in small(shape):
        costs, error = runner.checked(make(one), task)
        runs.append(costs)
        errors.append(error)
    record = {"task": task, "shape": rows.dimensions(shape), "words": shape.words, "dtype": shape.storage}
    record["launches"] = []
    low = high = 0.0
    for launch in launches:
        code, program = runner.program(launch)
        kernel, step = named(launch), None
        if kernel in TILED:
            blocks, weights, step = tiled_costs(runs, kernel, shape)
        else:
            blocks, weights = runner.run(launch, [0]), [launch.blocks]
        assert sum(weights) == launch.blocks, (kernel, sum(weights), launch.blocks)
        low_s, high_s, bound, used, limit = seconds(launch, code, blocks, weights)
        low, high = low + low_s, high + high_s
        mean = np.average(blocks, axis=0, weights=weights) if step is None else step
        record["launches"].append(
            {
                "kernel": kernel, "blocks": launch.blocks, "threads": launch.threads, "registers": code.registers,
                "shared": code.shared, "resident": used, "limit": limit, "bound": bound,
                "instructions": len(program.instructions), "ms": [low_s * 1e3, high_s * 1e3],
                "per": "block" if step is None else "tile",
                "cycles": {field: round(float(n), 1) for field, n in zip(FIELDS, mean, strict=True)},
            }
        )  # fmt: skip
    memory = case.bytes / (H100["memory_tbs"] * 1e12)
    record["memory_ms"] = memory * 1e3
    low, high = float(max(low, memory)), float(max(high, memory))
    operations = case.backward_operations if task == "backward" else case.operations
    record |= {"ms": [low * 1e3, high * 1e3], "tflops": [operations / high / 1e12, operations / low / 1e12]}
    record["error"] = max(errors)
    return record


def shifted(runner, row):
    """The record of a row of rel_shift, which memory bounds if its loads are many enough."""
    import relpos_np as rp

    x = rows.products(row.shape)
    few = rows.products(row.tiny)
    _, result = runner.call(lambda: rp.rel_shift(few, variant=row.shape.variant, backend="cuda"))
    error = float(np.abs(result - rp.rel_shift(few, variant=row.shape.variant)).max())
    (launch,) = planned(lambda: rp.rel_shift(x, variant=row.shape.variant, backend="cuda"))
    code, _ = runner.program(launch)
    costs = runner.run(launch, [0, 1])
    low, high, bound, used, limit = seconds(launch, code, costs, [launch.blocks - 1, 1])
    # The result, and as many bytes of the input.
    moved = 2 * row.shape.heads * row.shape.q_len**2 * x.itemsize
    memory = moved / (H100["memory_tbs"] * 1e12)
    return {
        "task": row.task, "shape": rows.dimensions(row.shape), "words": row.shape.words, "dtype": "float32",
        "memory_ms": memory * 1e3, "ms": [max(low, memory) * 1e3, max(high, memory) * 1e3],
        "gbs": [moved / max(high, memory) / 1e9, moved / max(low, memory) / 1e9], "error": error,
        "launches": [
            {
                "kernel": "shift", "blocks": launch.blocks, "threads": launch.threads, "registers": code.registers,
                "shared": code.shared, "resident": used, "limit": limit,
                "bound": "memory" if memory > low else bound, "ms": [low * 1e3, high * 1e3], "per": "block",
                "cycles": {field: round(float(n), 1) for field, n in zip(FIELDS, costs[0], strict=True)},
            }
        ],
    }  # fmt: skip


def subjects():
    """Rows by name: the shapes of the figures, those of the goals, and gradients with the table's."""
    found = {name: (SHAPES[name], "attention", "fma") for name in ("A", "B", "C", "D", "E", "F", "G", "H", "Bb")}
    for name in ("t5-1024", "t5-2048", "t5-4096", "t5-2048-bfloat16", "t5-2048-gradient", *MATRIX):
        row = rows.find(name)
        found[name] = row.shape, row.task, row.unit
    return found


def keep(record, path):
    """Write a record, its rows in the order of `subjects`, if there is a place for it."""
    if path:
        names = [*subjects(), *(row.name for row in rows.ROWS if row.task == "rel_shift")]
        found = {name: record["rows"][name] for name in names if name in record["rows"]}
        path.write_text(json.dumps(record | {"rows": found}, indent=1) + "\n", encoding="utf-8")


def main(argv=None):
    """Predict, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="names, with commas; by default all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    runner, wanted = Runner(), [name for name in arguments.rows.split(",") if name]
    record = {"device": H100, "kernels": page.kernel_hash(), "rows": {}}
    if arguments.out and arguments.out.exists():
        # Rows that are not asked for stay, unless kernels have changed.
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        if old["kernels"] == record["kernels"] and old["device"] == record["device"]:
            record["rows"] = old["rows"]
    for name, (shape, task, unit) in subjects().items():
        if not wanted or name in wanted:
            began = time.perf_counter()
            os.environ["RELPOS_CUDA_UNIT"] = unit
            record["rows"][name] = found = predicted(runner, shape, task)
            keep(record, arguments.out)
            words = f"{forecast.span(found['ms'])} ms, {forecast.span(found['tflops'])} TFLOP/s"
            print(f"{name}: {words}, error {found['error']:.1e}, {time.perf_counter() - began:.0f} s", flush=True)
    for row in rows.ROWS:
        if row.task == "rel_shift" and (not wanted or row.name in wanted):
            record["rows"][row.name] = found = shifted(runner, row)
            keep(record, arguments.out)
            print(f"{row.name}: {forecast.span(found['ms'])} ms, {forecast.span(found['gbs'], 4)} GB/s", flush=True)
    return record


if __name__ == "__main__":
    main()
