"""Time a T5 encoder of transformers on this library: ``python asv_bench/interop.py --out FILE``.

A model of T5-small's size with random weights runs on PyTorch's attention (eager and SDPA) and on this library's
(patched in), one after the other in each round, in one process, as its users have it. A ratio is the median over
rounds of the ratio within a round. Answers are compared before anything is timed. Both orders of import are measured,
in processes of their own: it decides which threads the kernels run on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SIZE = {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_kv": 64, "d_ff": 2048, "vocab_size": 1000}
ORDERS = ("torch first", "relpos_np first")


def start_kernels():
    """Start Numba's threads."""
    import numpy as np

    import relpos_np as rp

    x = np.zeros((1, 8, 512, 64), np.float32)
    rp.attention(x, x, x)


def measure(lengths, rounds, order, size):
    """Medians and ratios, by length."""
    if order == "relpos_np first":
        start_kernels()
    import torch
    import transformers

    import relpos_np as rp
    from relpos_np._commands.peers import OURS
    from relpos_np.interop.transformers import patched
    from relpos_np.kernels._numba.launch import launcher

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["NUMBA_NUM_THREADS"]))
    model = transformers.T5EncoderModel(transformers.T5Config(**size)).eval()

    def answer(way, ids):
        if way == OURS:
            with patched(model):
                return model(ids).last_hidden_state
        model.set_attn_implementation(way)
        return model(ids).last_hidden_state

    found = {}
    with torch.no_grad():
        for length in lengths:
            ids = torch.randint(1, size["vocab_size"], (1, length))
            ways = ("eager", "sdpa", OURS)
            answers = {way: answer(way, ids) for way in ways}
            error = max(float((answers[way] - answers["eager"]).abs().max()) for way in ways)
            if error > 1e-4:
                sys.exit(f"{length} tokens: answers differ by {error}")
            seconds = {way: [] for way in ways}
            for _ in range(rounds):
                for way in ways:
                    answer(way, ids[:, :64])  # threads and caches are as this way leaves them
                    started = time.perf_counter()
                    answer(way, ids)
                    seconds[way].append(time.perf_counter() - started)
            ratios = {
                way: statistics.median(x / y for x, y in zip(seconds[way], seconds[OURS], strict=True))
                for way in ways[:-1]
            }
            found[str(length)] = {
                "median_ms": {way: round(1e3 * statistics.median(x), 2) for way, x in seconds.items()},
                "best_ms": {way: round(1e3 * min(x), 2) for way, x in seconds.items()},
                "times_as_fast_as": {way: round(x, 2) for way, x in ratios.items()},
                "largest_difference": error,
            }
    shared = launcher._shared()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "relpos_np": rp.__version__}
    return {"lengths": found, "kernels_run_on_torch_threads": shared is not None, "versions": versions}


def child(order, arguments):
    """One order of import, in a process of its own."""
    count = str(arguments.threads)
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), count)
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["--order", order, "--rounds", str(arguments.rounds), "--lengths", *map(str, arguments.lengths)]
    run = subprocess.run(
        [sys.executable, __file__, *options],
        env=os.environ | pinned | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--note", default="", help="what else used the machine meanwhile")
    parser.add_argument("--order", choices=ORDERS, help="measure one order of import in this process")
    arguments = parser.parse_args()
    if arguments.order:
        print(json.dumps(measure(arguments.lengths, arguments.rounds, arguments.order, SIZE)))
        return
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from relpos_np.versions import processor

    record = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "note": arguments.note,
        "model": SIZE,
        "load_before": os.getloadavg(),
    }
    record["orders"] = {order: child(order, arguments) for order in ORDERS}
    record["load_after"] = os.getloadavg()
    text = json.dumps(record, indent=1) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
