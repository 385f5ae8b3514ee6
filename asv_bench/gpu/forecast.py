"""The recorded predictions for an H100 as Markdown for the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from report import grid, sizes

from . import rows

RECORD = Path(__file__).parent.parent / "recorded" / "h100.json"
# Columns of the second table: what a tile or block keeps busy, in cycles of a multiprocessor.
PIPES = ("issue", "fma", "integer products", "alu", "special", "matrix")


def span(values, digits=3):
    """A range of two numbers, or one if they do not differ in what is printed."""
    low, high = (f"{value:.{digits}g}" for value in values)
    return low if low == high else f"{low} to {high}"


def wanted(name, found):
    """What the goals of a row ask for: a figure, or how long a baseline must take."""
    if name not in rows.NAMES:
        return "-"
    parts = []
    for goal in rows.find(name).goals:
        if goal.figure:
            low, high = found[goal.figure]
            words = "predicted" if low >= goal.at_least else "possible" if high >= goal.at_least else "out of reach"
            parts.append(f"≥ {goal.at_least:g} TFLOP/s: {words}")
        else:
            parts.append(f"{goal.against} ≥ {span([goal.at_least * ms for ms in found['ms']])} ms")
    return "; ".join(parts) or "-"


def calls(record):
    """One line for each call."""
    cells = []
    for name, found in record["rows"].items():
        rate = f"{span(found['tflops'])} TFLOP/s" if "tflops" in found else f"{span(found['gbs'], 4)} GB/s"
        slowest = max(found["launches"], key=lambda launch: launch["ms"][0])
        bound = "memory" if found["memory_ms"] >= found["ms"][0] else slowest["bound"]
        words = f"{found['words']}, gradients" if found["task"] == "backward" else found["words"]
        cells.append(
            [name, words, sizes(found["shape"]), found["dtype"], span(found["ms"]), rate, bound, wanted(name, found)]
        )
    return grid(["row", "what", "shape", "dtype", "ms", "rate", "bound by", "goal"], cells)


def kernels(record):
    """One line for each kernel of a call that takes a tenth of its time or more."""
    cells = []
    for name, found in record["rows"].items():
        for launch in found["launches"]:
            if launch["ms"][0] < 0.1 * sum(one["ms"][0] for one in found["launches"]):
                continue
            cycles = launch["cycles"]
            turns = span([cycles["shared least"], cycles["shared most"]], 5)
            cells.append(
                [
                    name,
                    launch["kernel"],
                    f"{launch['blocks']} × {launch['threads']}",
                    str(launch["registers"]),
                    f"{launch['shared'] / 1024:.1f}",
                    f"{launch['resident']} ({launch['limit']})",
                    launch["per"],
                    *(f"{cycles.get(pipe, 0):.0f}" for pipe in PIPES),
                    turns,
                    f"{cycles['alone']:.0f}",
                ]
            )
    head = ["row", "kernel", "blocks × threads", "registers", "shared KB", "at once (limit)", "per"]
    return grid([*head, *PIPES, "shared memory", "alone"], cells)


def section(current, path=RECORD):
    """The part of the page; `current` names the sources of the kernels as they are now."""
    if not path.exists():
        return "Nothing is predicted: `python asv_bench/gpu/predict.py` makes the record."
    record = json.loads(path.read_text(encoding="utf-8"))
    device = record["device"]
    errors = {}
    for found in record["rows"].values():
        errors[found["dtype"]] = max(errors.get(found["dtype"], 0), found["error"])
    worst = ", ".join(f"{error:.0e} in {dtype}" for dtype, error in errors.items())
    where = (
        f"{device['name']}: {device['multiprocessors']} multiprocessors at {device['clock_ghz']:g} GHz, "
        f"{device['memory_tbs']:g} TB/s. Results of the machine code, run by the interpreter on small inputs, differ "
        f"from float64 by {worst} at most (gradients: in proportion to the largest)."
    )
    about = (
        "Of the kernels that take a tenth of a call's time or more, cycles of a multiprocessor for one block, or for "
        "one tile of 64 keys (or queries) of a block: first what schedulers and pipes are busy, then turns of shared "
        "memory if quarters of a warp share turns and if they do not, last how long a block that is alone takes."
    )
    lines = [
        where,
        "",
        *calls(record),
        "",
        about,
        "",
        *kernels(record),
    ]
    if record["kernels"] != current:
        lines[:0] = ["**Stale: the kernels have changed since this was predicted.**", ""]
    return "\n".join(lines)
