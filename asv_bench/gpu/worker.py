"""The process that uses the device: ``python -m gpu.worker``, one JSON request and one answer a line.

It is apart from the program that keeps the record, which can replace it where a kernel hangs or breaks the context.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import replace

import numpy as np
from benchmarks.shapes import wide

import relpos_np as rp
from relpos_np.testing import tolerance
from tests import fibers

from . import ceilings, device, ours, rows, with_torch

# Scores of the seeded inputs stay below this, in every row.
SCORES = 12.0
# Baselines that compute something else are reported, not timed. Those in full precision are closer.
WORST = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 3e-2}


def said(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class Exact:
    """The right answer of a row, and how far ours may be from it."""

    def __init__(self, row, subject):
        self.row, self.subject = row, subject
        eps32 = tolerance("float32", logit_bound=SCORES)
        if row.task == "rel_shift":
            self.answer = rp.rel_shift(subject, variant=row.shape.variant, backend="numpy")
            self.allowed = 0.0
        elif row.task == "backward":
            self.answer = subject.exact_gradients()
            # In proportion to the largest entry; scores are computed twice, and sums are as long as the sequence.
            length = max(row.shape.q_len, row.shape.k_len)
            self.allowed = 2 * float(tolerance("float32", logit_bound=SCORES, depth=length))
        else:
            self.answer = subject.exact()
            storage = row.shape.storage
            largest = float(np.abs(wide(subject.v)).max())
            self.allowed = float(eps32) * largest
            if storage != "float32":
                eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[storage]
                self.allowed += eps * float(np.abs(self.answer).max())
                if row.unit == "mma":
                    # Weights are rounded too.
                    self.allowed += eps / 2 * largest

    def error(self, found):
        """The largest deviation: absolute, of gradients in proportion to the largest entry."""
        if self.row.task == "rel_shift":
            return 0.0 if np.array_equal(found, self.answer) else float(np.abs(found - self.answer).max()) or np.inf
        if self.row.task == "backward":
            return self.subject.gradient_error(found, self.answer)
        return self.subject.error(found, self.answer)


class Worker:
    """Answers requests."""

    def __init__(self, tiny):
        self.tiny = tiny

    def about(self):
        """The device and versions."""
        return device.about() | {"versions": device.versions(), "arrays": ours.refusal()}

    def clocks(self):
        """What nvidia-smi says while the device is still warm."""
        return device.smi()

    def ceiling(self, name):
        """One of the limits."""
        return ceilings.measure(name, self.tiny)

    def subject(self, row):
        """Seeded inputs of a row, and the bytes of one call."""
        shape = row.tiny if self.tiny else row.shape
        if row.task == "rel_shift":
            x = rows.products(shape)
            k_len = shape.columns - (shape.q_len - 1 if shape.variant == "conformer" else 0)
            return replace(row, shape=shape), x, 2 * x.itemsize * shape.heads * shape.q_len * k_len
        made = rows.gpu_case(shape)
        return replace(row, shape=shape), made, made.bytes * (2 if row.task == "backward" else 1)

    def repeat(self, name):
        """Whether two runs of a row agree bit by bit."""
        row, subject, _ = self.subject(rows.find(name))
        prepared, words = ours.prepare(row, subject, 2)
        found = []
        for operands in (prepared.sets[0], prepared.sets[0], prepared.sets[1]):
            answer = prepared.to_numpy(prepared.of(*operands))
            found.append(answer if isinstance(answer, dict) else {"result": answer})
        differ = [n for n, x in found[0].items() for y in found[1:] if x.tobytes() != y[n].tobytes()]
        if differ:
            raise AssertionError(f"two runs differ in {', '.join(sorted(set(differ)))}")
        return {"equal": True, "runs": len(found), "operands": words}

    def row(self, name, rounds, seconds):
        """Time ours and the baselines in turn."""
        row, subject, amount = self.subject(rows.find(name))
        count = ours.sets_for(amount)
        exact = Exact(row, subject)
        prepared, words = ours.prepare(row, subject, count)
        error = float(exact.error(prepared.answer()))
        found = {"operands": words, "sets": count, "error": error, "tolerance": exact.allowed}
        if not error <= exact.allowed:
            raise AssertionError(f"its result deviates from float64 by {error:.2e}; allowed are {exact.allowed:.2e}")
        calls, baselines = {"ours": prepared}, {}
        for other in row.baselines:
            baselines[other] = self.baseline(other, row, subject, count, exact, calls)
        times = self.alternate(calls, rounds, seconds)
        found |= figures(times["ours"]) | speeds(row, subject, amount, times["ours"])
        for other, one in baselines.items():
            if other in times:
                medians = [[statistics.median(turn) for turn in times[who]] for who in (other, "ours")]
                ratio = statistics.median(theirs / mine for theirs, mine in zip(*medians, strict=True))
                baselines[other] = one | figures(times[other]) | {"ratio": ratio}
        return found | {"baselines": baselines}

    def baseline(self, name, row, subject, count, exact, calls):
        """Prepare and check a baseline; add its call, or say why there is none."""
        try:
            if name == rows.FMA:
                prepared, note = ours.prepare(replace(row, unit="fma"), subject, count)
                flags = {"RELPOS_CUDA_UNIT": "fma"}
            else:
                prepared, flags, note = with_torch.prepare(name, row, subject, count)
            one = {"flags": flags, "note": note}
            if name == rows.COPY:
                prepared()
                one["error"] = None
            else:
                one["error"] = float(exact.error(prepared.answer()))
                storage = "float32" if row.task == "rel_shift" else row.shape.storage
                if not one["error"] < WORST[storage]:
                    return one | {"status": "wrong", "reason": f"deviates from float64 by {one['error']:.2e}"}
        except with_torch.MissingError as error:
            return {"status": "missing", "reason": str(error)}
        except Exception as error:  # noqa: BLE001 - a baseline's fault is recorded, and ours is still timed
            return {"status": "missing", "reason": said(error)}
        calls[name] = prepared
        return one | {"status": "measured"}

    def alternate(self, calls, rounds, seconds):
        """Times of every call in ms, a list for each round; the order turns from round to round."""
        counts, times = {}, {name: [] for name in calls}
        for name, call in calls.items():
            device.times_ms([call])  # once more to warm up
            counts[name] = int(min(max(1, seconds / (device.times_ms([call])[0] / 1e3)), 50))
        names = list(calls)
        for turn in range(rounds):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                # One that is not timed: others have used the device meanwhile.
                untimed = [] if device.simulated() else [calls[name]]
                times[name].append(device.times_ms([*untimed, *[calls[name]] * counts[name]])[len(untimed) :])
        return times


def figures(times):
    """Median and minimum over all calls."""
    return ceilings.summary([t for turn in times for t in turn])


def speeds(row, subject, amount, times):
    """TFLOP/s of the products that are needed, and GB/s of what must be moved at least."""
    median = statistics.median(t for turn in times for t in turn)
    found = {"bytes": amount, "gbs": amount / median / 1e6, "operations": None, "tflops": None}
    if row.task != "rel_shift":
        work = subject.operations if row.task == "attention" else subject.backward_operations
        found |= {"operations": int(work), "tflops": work / median / 1e9}
    return found


def main():
    """Answer until the pipe is closed. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    fibers.install()
    worker = Worker(tiny="--tiny" in sys.argv)
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        started = time.perf_counter()
        try:
            answer = {"status": "passed"} | getattr(worker, what)(**request)
        except Exception as error:  # noqa: BLE001 - recorded by whoever asked
            traceback.print_exc()
            answer = {"status": "failed", "reason": said(error), "broken": not device.working()}
        answer["seconds"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("broken"):
            return


if __name__ == "__main__":
    main()
