"""Records of GPUs as Markdown for the documentation: one table per device, and a mark where kernels changed since."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from report import grid, sizes

from . import forecast, rows

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "relpos_np" / "kernels" / "_cuda"
FORMAT = 1
TASKS = {"attention": "Forward", "backward": "Gradients, forward pass included", "rel_shift": "rel_shift"}


def kernel_hash(folder=KERNELS):
    """A name for the sources of the kernels: it changes with any of them."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def records(folder=HERE):
    """The latest complete record of each device; what the simulator wrote is not one."""
    latest = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format") != FORMAT:
            raise ValueError(f"{path}: expected a record of format {FORMAT}, found {record.get('format')!r}")
        if record["simulated"] or record["tiny"] or "rows" not in record:
            continue
        name = record["device"]["name"]
        order = (record["date"], len(path.stem), path.stem)
        if name not in latest or order > latest[name][0]:
            latest[name] = (order, path, record)
    return {name: (path, record) for name, (_, path, record) in sorted(latest.items())}


def quoted(words):
    """What a program said, as it is: nothing in it may be taken for markup."""
    text = " ".join(str(words).split()).replace("`", "'").replace("{", "(").replace("}", ")")
    return f"`{text}`"


def origin(path, record):
    """What was measured, with what."""
    versions = {name: version for name, version in record["versions"].items() if version}
    versions.pop("platform", None)
    smi = (record["driver"] or {}).get("smi", {}).get("gpus") or [{}]
    driver = smi[0].get("driver_version", "unknown")
    commit = record["commit"]["id"] or "unknown commit"
    changed = ", with uncommitted changes" if record["commit"].get("changed") else ""
    lines = [
        f"{record['date']}, driver {driver} (CUDA {record['driver']['cuda']}), CUDA {record['cuda']} for the kernels, "
        f"commit {commit[:12]}{changed}; " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        f"From `asv_bench/gpu/{path.name}`, which also has the flags of the baselines.",
    ]
    if not record["complete"]:
        lines.append("The run was cut off: what is missing was not measured.")
    return [" ".join(lines)]


def checked(record):
    """The checks in one list."""
    found = record.get("checks", {})
    lines = []
    for name, one in found.items():
        words = one["status"]
        if name == "tests" and "passed" in one:
            words += f", {one['passed']} passed, {one['failed']} failed, {one['skipped']} skipped"
        if "reason" in one and one["status"] != "failed":
            words += f" ({quoted(one['reason'])})"
        lines.append(f"- {name}: {words}")
    same = record.get("repeat", {})
    if same:
        bad = [name for name, one in same.items() if one["status"] != "passed"]
        lines.append(f"- runs agree bit by bit: {'not ' + ', '.join(bad) if bad else 'all of ' + ', '.join(same)}")
    return lines


def ceilings(record):
    """The device's limits, measured in the same run."""
    lines = []
    for group in record.get("ceilings", {}).values():
        for name, one in group.items():
            if not isinstance(one, dict):
                continue
            if "tflops" in one:
                lines.append(f"- {name}: {one['tflops']:.1f} TFLOP/s")
            elif "gbs" in one:
                lines.append(f"- {name}: {one['gbs']:.0f} GB/s")
            elif "us_host" in one:
                lines.append(f"- a launch by {name}: {one['us_host']:.1f} µs")
            else:
                lines.append(f"- {name}: {one['status']} ({quoted(one['reason'])})")
    return lines


def compared(row):
    """Each baseline: how many times as long it took, and its own time."""
    parts = []
    for name, one in row.get("baselines", {}).items():
        if "ratio" in one:
            parts.append(f"{name} {one['ratio']:.2f}× ({one['ms_median']:.3g} ms)")
        else:
            parts.append(f"{name} {one['status']}")
    return "; ".join(parts) or "-"


def goals(row):
    """Each goal of a row, reached or not."""
    words = {True: "reached", False: "not reached", None: "unknown"}
    parts = []
    for goal in row.get("goals", ()):
        unit = f"≥ {goal['at_least']:g}× {goal['against']}" if goal["against"] else f"≥ {goal['at_least']:g} TFLOP/s"
        parts.append(f"{unit}: {words[goal['met']]}")
    return "; ".join(parts) or "-"


def table(record, current):
    """A table for each task; a row whose kernels have changed since is marked."""
    head = ["", "shape", "dtype", "median ms (best)", "TFLOP/s", "GB/s", "max error", "others, in our time", "goals"]
    lines, absent, stale = [], [], False
    for task, title in TASKS.items():
        cells = []
        for name, row in record["rows"].items():
            if row["task"] != task:
                continue
            old = row["kernels"] != current
            stale |= old
            label = f"{name} (stale)" if old else name
            if row["status"] != "passed":
                cells.append([label, sizes(row["shape"]), row["dtype"], "failed", *["-"] * 5])
                absent.append(f"- {label} failed: {quoted(row['reason'])}")
                continue
            cells.append(
                [
                    label,
                    sizes(row["shape"]),
                    row["dtype"],
                    f"{row['ms_median']:.3g} ({row['ms_min']:.3g})",
                    "-" if row["tflops"] is None else f"{row['tflops']:.1f}",
                    f"{row['gbs']:.0f}",
                    f"{row['error']:.1e}",
                    compared(row),
                    goals(row),
                ]
            )
            absent += [
                f"- {other} ({name}) is {one['status']}: {quoted(one['reason'])}"
                for other, one in row["baselines"].items()
                if "reason" in one
            ]
        if cells:
            lines += [f"{title}:", "", *grid(head, [[c.replace("|", r"\|") for c in line] for line in cells]), ""]
    if stale:
        lines += ["Rows marked stale were measured before the kernels' sources changed to what they are now.", ""]
    words = sorted({row["operands"] for row in record["rows"].values() if "operands" in row})
    if words:
        lines += [f"Operands of our calls: {'; '.join(words)}.", ""]
    return [*lines, *absent]


def figures(folder=HERE, kernels=KERNELS):
    """The part of the page with the figures; what it says where there are none."""
    current = kernel_hash(kernels)
    lines = []
    for name, (path, record) in records(folder).items():
        parts = origin(path, record), checked(record), ceilings(record), table(record, current)
        lines += [f"### {name}", ""]
        for part in parts:
            lines += [*part, ""]
    if not lines:
        return (
            "**No figure measured on a GPU exists yet.** There is no record in `asv_bench/gpu/`, and nothing on this "
            "page says how fast the kernels are. `tests/gpu/run_all.sh asv_bench/gpu`, on a machine with an NVIDIA "
            "GPU, makes one."
        )
    return "\n".join(lines).strip()


def wanted():
    """The goals and what they are about, from the rows themselves."""
    by_words = {}
    for row in rows.ROWS:
        for goal in row.goals:
            by_words.setdefault((goal.words, goal.at_least, goal.against), []).append(row.name)
    cells = [
        [words, f"{least:g}×, {against}" if against else f"{least:g} TFLOP/s", ", ".join(names)]
        for (words, least, against), names in by_words.items()
    ]
    return "\n".join(grid(["goal", "at least", "rows"], cells))


def measured():
    """Every row and its baselines."""
    cells = []
    for row in rows.ROWS:
        shape = sizes(rows.dimensions(row.shape))
        cells.append([row.name, TASKS[row.task], row.shape.words, shape, ", ".join(row.baselines)])
    return "\n".join(grid(["row", "task", "what", "shape", "compared with"], cells))


def baselines():
    """What the names of the baselines mean."""
    return "\n".join(f"- {name}: {words}" for name, words in rows.WORDS.items())


def sections(folder=HERE):
    """The documentation's parts, by the name under which the page includes them."""
    return {
        "gpu_figures": figures(folder),
        "gpu_goals": wanted(),
        "gpu_rows": measured(),
        "gpu_baselines": baselines(),
        "gpu_predictions": forecast.section(kernel_hash()),
    }
