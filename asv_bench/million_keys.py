"""A million keys on four workers of little memory, to which things happen: ``python asv_bench/million_keys.py``.

Keys and values, 512 MB of them, are made block by block where they are needed, on each worker or in this process, so
that nobody holds them all. Once the run is left alone; then a worker is killed, paused, out of memory or restarted when
a quarter of the blocks are computed. All results must have the same bits; errors are those against float64 in blocks in
one process. Some minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded" / "million_keys.json"
sys.path[:0] = [path for path in (str(HERE.parent),) if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402

import relpos_np as rp  # noqa: E402
from relpos_np import distributed as parts  # noqa: E402
from tests import clusters  # noqa: E402

KEYS, QUERIES, DIM, BLOCK = 1_000_000, 2048, 64, 15625
WORKERS, LIMIT_MIB = 4, 512
# Queries whose errors are judged.
JUDGED = slice(960, 1088)


def block_of(seed: int, number: int) -> Any:
    """A block of keys (seed 1) or values (seed 2), (1, BLOCK, DIM)."""
    rng = np.random.default_rng([seed, number])
    return rng.standard_normal((1, BLOCK, DIM), dtype=np.float32)


def queries() -> Any:
    """All queries, (1, QUERIES, DIM)."""
    return np.random.default_rng(0).standard_normal((1, QUERIES, DIM), dtype=np.float32)


def scheme() -> rp.T5:
    """T5's buckets, for one head."""
    return rp.T5(np.random.default_rng(3).standard_normal((32, 1)).astype(np.float32))


def lazy() -> Any:
    """The call over Dask arrays."""
    import dask.array as da

    def operand(seed: int) -> Any:
        def made(block_info: Any = None) -> Any:
            return block_of(seed, block_info[None]["chunk-location"][1])

        chunks = ((1,), (BLOCK,) * (KEYS // BLOCK), (DIM,))
        return da.map_blocks(made, chunks=chunks, dtype=np.float32, meta=np.empty((0, 0, 0), np.float32))

    return parts.attention(
        da.from_array(queries(), chunks=-1), operand(1), operand(2), position=scheme(), min_operations=0
    )


def in_blocks(rows: slice, dtype: Any) -> tuple[Any, Any]:
    """The same for some queries in this process, block after block: outputs, and the sums of p |v|."""
    q = queries()[:, rows].astype(dtype)
    position, whole = rp.T5(scheme().table.astype(dtype)), None
    for number in range(KEYS // BLOCK):
        k, v = (block_of(seed, number).astype(dtype) for seed in (1, 2))
        both = np.concatenate([v, np.abs(v)], axis=-1)
        at = {"queries": (rows.start, QUERIES), "keys": (number * BLOCK, KEYS)}
        part = parts.partial(q, k, both, position=position, **at)
        whole = part if whole is None else parts.merge(whole, part)
    assert whole is not None
    return whole[0][..., :DIM], whole[0][..., DIM:]


def faults(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """What happens in each run."""
    return {
        "nothing": lambda _: None,
        "one killed": clusters.kill,
        "one paused for 3 s": clusters.pause,
        "one out of memory": lambda client: clusters.exhaust(client, folder / "flag"),
        "one restarted": clusters.restart,
    }


def peak_mib() -> float:
    """The largest resident memory of this process so far; `ru_maxrss` would count what forked it, too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def on_cluster(record: dict[str, Any]) -> Any:
    """Each run on a new cluster; the result of the first."""
    import distributed

    options: dict[str, Any] = {
        "n_workers": WORKERS,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "memory_limit": f"{LIMIT_MIB}MiB",
        "env": {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        "silence_logs": 50,
    }
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for name, fault in faults(Path(folder)).items():
            with distributed.LocalCluster(processes=True, **options) as cluster, distributed.Client(cluster) as client:
                # Loaded before the clock runs.
                client.run(warm)
                before = clusters.workers(client)
                started = time.perf_counter()
                future = client.compute(lazy())
                clusters.amid(client, future, KEYS // BLOCK // 4)
                kept = fault(client)
                result = future.result(timeout=900)
                seconds = time.perf_counter() - started
                said = kept.result(timeout=120) if kept is not None else None
                client.wait_for_workers(WORKERS, timeout=600)
                peaks = client.run(peak_mib)
                new = len(set(clusters.workers(client).values()) - set(before.values()))
            first = result if first is None else first
            record["runs"].append(
                {
                    "what": name,
                    "seconds": round(seconds, 2),
                    "same_bits": bool((result == first).all()),
                    "new_processes": new,
                    "peak_mib": [round(x, 1) for x in peaks.values()],
                }
                | ({} if said is None else {"hog": said})
            )
            print(record["runs"][-1], flush=True)
    return first


def warm() -> None:
    """Load the kernel, so that no run waits for it."""
    q = np.ones((1, 64, DIM), np.float32)
    parts.partial(q, q, q, position=scheme())


def sections() -> dict[str, str]:
    """A table for the documentation, from the record."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [
        "| what happens | s | same bits | new processes | largest resident memory of a worker, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {run['what']} | {run['seconds']:.0f} | {'yes' if run['same_bits'] else 'NO'} | {run['new_processes']} "
        f"| {max(run['peak_mib']):.0f} |"
        for run in record["runs"]
    ]
    words = (
        f"{record['keys']:,} keys and values, {record['operands_mib']} MiB, {record['queries']:,} queries, one head of "
        f"{record['head_dim']}, T5's buckets, {record['workers']} workers of {record['limit_mib']} MiB on "
        f"{record['cores']} cores beside other work. One process with blocks took "
        f"{record['one_process_seconds']:.0f} s. Errors of {record['judged_queries']} queries against float64 were "
        f"{record['cluster_error_in_eps_of_weights']:.2g} eps Σ p|v| at most, "
        f"{record['one_process_error_in_eps_of_weights']:.2g} in one process."
    )
    return {"figures_million_keys": "\n".join(rows), "figures_million_keys_words": words}


def main() -> int:
    """Run, judge and write."""
    import distributed

    record: dict[str, Any] = {
        "keys": KEYS,
        "queries": QUERIES,
        "head_dim": DIM,
        "block": BLOCK,
        "workers": WORKERS,
        "limit_mib": LIMIT_MIB,
        "operands_mib": round(2 * KEYS * DIM * 4 / 2**20),
        "cores": os.cpu_count(),
        "dask": distributed.__version__,
        "runs": [],
    }
    found = on_cluster(record)
    warm()
    started = time.perf_counter()
    alone, _ = in_blocks(slice(0, QUERIES), np.float32)
    record["one_process_seconds"] = round(time.perf_counter() - started, 2)
    record["one_process_peak_mib"] = round(peak_mib(), 1)
    exact, weight = in_blocks(JUDGED, np.float64)
    eps = np.finfo(np.float32).eps
    for name, result in (("cluster", found), ("one_process", alone)):
        error = np.abs(result[:, JUDGED] - exact)
        record[f"{name}_largest_error"] = float(error.max())
        record[f"{name}_error_in_eps_of_weights"] = round(float((error / (eps * weight)).max()), 3)
    record["judged_queries"] = exact.shape[1]
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in record.items() if name != "runs"}, indent=1))
    inside = all(peak <= LIMIT_MIB for run in record["runs"] for peak in run["peak_mib"])
    return 0 if inside and all(run["same_bits"] for run in record["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
