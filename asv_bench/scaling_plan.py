"""Compare `relpos_np.distributed.plan` with small runs, and record both: ``python asv_bench/scaling_plan.py``.

Rates are measured apart from the runs: operations per second by one block in this process, seconds per task by tasks
that do nothing, and bytes per second by an array that goes from one worker to the other. Of every time the best of
several is kept, since others may use the machine. About a minute.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded" / "distributed.json"
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
# Each worker is one thread; the library is found by workers too.
os.environ["NUMBA_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402

import relpos_np as rp  # noqa: E402
from relpos_np import distributed as parts  # noqa: E402

DIM, HEADS = 64, 4
# Workers, queries and keys, and the length of a block.
RUNS = [
    (workers, length, chunk)
    for length, chunk in ((4096, 512), (4096, 1024), (8192, 1024), (8192, 2048))
    for workers in (1, 2)
]
PLAN_1000: dict[str, Any] = {
    "batch": 1,
    "heads": 32,
    "kv_heads": 8,
    "q_len": 1 << 20,
    "k_len": 1 << 20,
    "head_dim": 128,
    "causal": True,
}


def operations_per_second(chunk: int) -> float:
    """Of one block of the runs, in this process, on one thread."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, chunk, DIM)).astype(np.float32)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        parts.partial(q, k, v, position=scheme(1), causal=False)
        times.append(time.perf_counter() - started)
    return 4 * chunk * chunk * DIM / min(times)


def scheme(heads: int) -> rp.T5:
    """T5's buckets."""
    return rp.T5(np.random.default_rng(1).standard_normal((32, heads)).astype(np.float32))


def seconds_per_task(client: Any) -> float:
    """What a task that does nothing costs, when there are many of them."""
    times = []
    for n in range(5):
        started = time.perf_counter()
        client.gather(client.map(lambda x: x, range(1000 * n, 1000 * n + 500)))
        times.append((time.perf_counter() - started) / 500)
    return min(times)


def bytes_per_second(client: Any) -> float:
    """Of an array that goes from one worker to the other."""
    first, second = client.scheduler_info(n_workers=-1)["workers"]
    times = []
    for n in range(5):
        x = client.submit(lambda seed: np.full(1 << 24, seed, np.uint8), n, workers=[first])
        client.submit(len, x, workers=[first]).result()
        started = time.perf_counter()
        client.submit(lambda y: y[0], x, workers=[second]).result()
        times.append(time.perf_counter() - started)
    return (1 << 24) / min(times)


def measured(client: Any, length: int, chunk: int) -> tuple[float, int]:
    """Seconds of a run, the best of four, and bytes that workers sent."""
    import dask.array as da

    # Operands are made on the workers, before the clock runs.
    normal = da.random.default_rng(2).standard_normal
    blocks = client.persist([normal((HEADS, length, DIM), chunks=(1, chunk, DIM), dtype=np.float32) for _ in "qkv"])
    client.gather(client.compute([block.sum() for block in blocks]))
    times, sent = [], []
    for _ in range(4):
        before = sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())
        out = parts.attention(*blocks, position=scheme(HEADS), causal=True, min_operations=0)
        started = time.perf_counter()
        # What remains on the workers is the result, as it would be in a longer computation.
        result = client.persist(out)
        client.gather(client.compute(result.sum()))
        times.append(time.perf_counter() - started)
        after = sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())
        sent.append(after - before)
        del result, out
    return min(times), int(statistics.median(sent))


def main() -> int:
    """Measure, print and write."""
    import distributed

    record: dict[str, Any] = {"dask": distributed.__version__, "cores": os.cpu_count(), "head_dim": DIM, "heads": HEADS}
    record["operations"] = {chunk: operations_per_second(chunk) for chunk in sorted({run[2] for run in RUNS})}
    record["runs"] = []
    for workers in (1, 2):
        options = {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
        with distributed.LocalCluster(processes=True, **options) as cluster, distributed.Client(cluster) as client:
            client.gather([client.submit(operations_per_second, 512, workers=[w], pure=False) for w in client.run(int)])
            record.setdefault("task_seconds", {})[workers] = seconds_per_task(client)
            if workers == 2:
                record["bandwidth"] = bytes_per_second(client)
            for _, length, chunk in (run for run in RUNS if run[0] == workers):
                seconds, sent = measured(client, length, chunk)
                record["runs"].append(
                    {"workers": workers, "length": length, "chunk": chunk, "seconds": seconds, "bytes": sent}
                )
                print(record["runs"][-1])
    for run in record["runs"]:
        expected = planned(record, run)
        run["planned_seconds"], run["planned_bytes"] = expected.seconds, expected.moved_bytes
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(sections()["figures_distributed"])
    return 0


def planned(record: dict[str, Any], run: dict[str, Any]) -> parts.Plan:
    """The plan of a run, from rates that were measured apart from it."""
    return parts.plan(
        workers=run["workers"],
        batch=1,
        heads=record["heads"],
        q_len=run["length"],
        k_len=run["length"],
        head_dim=record["head_dim"],
        query_chunk=run["chunk"],
        key_chunk=run["chunk"],
        causal=True,
        # Keys of a record that was read are strings.
        operations={int(k): v for k, v in record["operations"].items()}[run["chunk"]],
        bandwidth=record["bandwidth"],
        task_seconds={int(k): v for k, v in record["task_seconds"].items()}[run["workers"]],
    )


def sections() -> dict[str, str]:
    """Tables for the documentation, from the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [
        "| workers | keys | block | planned s | measured s | planned MB | sent MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {r['workers']} | {r['length']} | {r['chunk']} | {r['planned_seconds']:.2f} | {r['seconds']:.2f} "
        f"| {r['planned_bytes'] / 1e6:.1f} | {r['bytes'] / 1e6:.1f} |"
        for r in record["runs"]
    ]
    rate = max(record["operations"].values())
    task = record["task_seconds"]["2"]
    plans = [
        "| workers | block | tasks | depth | MB per task | GB moved | scheduler s | compute s | transfer s | total s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workers, chunk in ((10, 16384), (100, 16384), (1000, 4096), (1000, 8192), (1000, 16384), (1000, 65536)):
        p = parts.plan(
            workers=workers,
            query_chunk=chunk,
            key_chunk=chunk,
            operations=rate,
            bandwidth=1.25e9,
            task_seconds=task,
            **PLAN_1000,
        )
        plans.append(
            f"| {workers} | {chunk} | {p.tasks:,} | {p.depth} | {p.task_bytes / 1e6:.0f} "
            f"| {p.moved_bytes / 1e9:,.0f} | {p.scheduler_seconds:,.0f} | {p.compute_seconds:,.0f} "
            f"| {p.transfer_seconds:.1f} | {p.seconds:,.0f} |"
        )
    rates = (
        f"{rate / 1e9:.0f} GFLOP/s of one thread, {1000 * task:.1f} ms per task and, between two processes of the "
        f"machine, {record['bandwidth'] / 1e9:.1f} GB/s"
    )
    return {
        "figures_distributed": "\n".join(rows),
        "figures_scale_out": "\n".join(plans),
        "figures_distributed_rates": rates,
    }


if __name__ == "__main__":
    sys.exit(main())
