"""Recorded figures as Markdown, for the terminal and the documentation: nothing is written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from relpos_np._commands.peers import OURS

RECORDED = Path(__file__).parent / "recorded"
TASKS = {"attention": "Forward", "backward": "Gradients, forward pass included", "rel_shift": "rel_shift alone"}


def grid(head, rows):
    """Lines of a table."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def brief(figure):
    """Three digits of a figure, without an exponent."""
    return f"{float(f'{figure:.3g}'):,.15g}"


def sizes(shape):
    """A shape with signs of multiplication."""
    return " × ".join(map(str, shape))


def machine(record):
    """What was measured on what, for cpu.json."""
    versions = record["versions"]
    return (
        f"{versions['processor']}, {record['shapes']['A']['threads']} threads, "
        f"{versions['kernels']['vectors']} vectors, numba {versions['numba']}, {record['date']}. The limit is a loop "
        "of FMA instructions on registers, timed in turn with the kernel; a shared machine, hence medians and bests."
    )


def shapes():
    """What the letters stand for."""
    from benchmarks.shapes import SHAPES

    rows = []
    for name, s in SHAPES.items():
        shortest = "" if s.shortest is None else f"{s.shortest} to "
        rows.append([name, s.words, sizes((s.batch, s.heads, s.q_len, s.head_dim)), f"{shortest}{s.k_len}"])
    return grid(["", "scheme", "queries: batch × heads × length × head_dim", "keys"], rows)


def called(letter, one):
    """A shape in words, and the letter that programs know it by."""
    words = one.get("words", letter).removesuffix(", in bfloat16")
    shortest = f"{one['shortest']:,} to " if "shortest" in one else ""
    return words if words == letter else f"{letter}: {words}, length {shortest}{one['shape'][2]:,}"


def kernels(record):
    """Every recorded shape of cpu.json, forward and backward."""
    head = ["shape", "median ms (best)", "GFLOP/s (best)", "of the limit, median (best)", "extra memory", "max error"]
    lines = [machine(record)]
    for key, title in (("shapes", TASKS["attention"]), ("backward", TASKS["backward"])):
        rows = [
            [
                called(name, record["shapes"][name]),
                f"{brief(f['median_ms'])} ({brief(f['best_ms'])})",
                f"{f['gflops_best']:.0f}",
                f"{f['fraction_of_fma_median']:.0%} ({f['fraction_of_fma_best']:.0%})",
                f"{f['extra_memory_mib']:.1f} MiB",
                f"{f['max_error']:.1e}",
            ]
            for name, f in record.get(key, {}).items()
        ]
        if rows:
            lines += ["", f"{title}:", "", *grid(head, rows)]
    for name, f in record["shapes"].items():
        share = f.get("fraction_of_read_median")
        if share is not None:
            what = f"{name} is bound by memory: reading its keys and values once takes {share:.0%} of the call's time."
            lines += ["", what]
    return lines


def growth(record):
    """Time and memory over the length, and time over threads."""
    lines = []
    if "lengths" in record:
        head = ["length N", "best ms", "time / N², ns", "extra memory", "extra memory / N, bytes"]
        rows = [
            [
                f"{int(length):,}",
                brief(f["best_ms"]),
                f"{f['best_ms'] * 1e6 / int(length) ** 2:.2f}",
                f"{f['extra_memory_mib']:.1f} MiB",
                f"{f['extra_memory_mib'] * 2**20 / int(length):.0f}",
            ]
            for length, f in record["lengths"].items()
        ]
        lines += ["One head of 64 with a T5 bias:", "", *grid(head, rows)]
    if "threads" in record:
        rows = [[count, brief(f["best_ms"]), f"{f['speedup']:.2f}"] for count, f in record["threads"].items()]
        lines += ["", "Shape B:", "", *grid(["threads", "best ms", "times as fast as one"], rows)]
    return lines


def small(record):
    """What small calls take."""
    head = ["call", "median µs", "of that beside the kernel"]
    rows = [
        [name, f"{f['median_us']:.0f}", f"{f['beside_kernel_us']:.0f}"] for name, f in record.get("small", {}).items()
    ]
    return grid(head, rows) if rows else []


def start(record):
    """What a new process pays."""
    line = (
        f"A new process pays {record['import_over_numpy_ms']:.0f} ms for `import relpos_np` beyond NumPy's, and "
        f"{record['first_call_warm_s']:.2f} s for its first call, or {record['first_call_cold_s']:.1f} s if the kernel "
        "must be compiled."
    )
    return ["", line]


def cell(found):
    """One peer's figure at one shape."""
    if found is None or "unavailable" in found:
        return "-"
    text = f"{brief(found['median_ms'])} ({brief(found['best_ms'])})"
    ratio = found.get("times_ours")
    return text if ratio is None else f"{text} {ratio:.2f}×"


def limits(one):
    """The machine's limit at a shape, and how much of it we reach."""
    limit, ours = one.get("limit"), one["peers"].get(OURS, {})
    units = {"operations": "GFLOP/s", "bytes": "GB/s"}
    best = f"{limit['best'] / 1e9:.0f} {units[limit['of']]}" if limit else "-"
    known = "fraction_of_limit" in ours
    return [best, f"{ours['fraction_of_limit']:.0%} ({ours['fraction_of_limit_best']:.0%})" if known else "-"]


def remarks(shapes):
    """Largest errors by storage, what peers say of their calls, and why a cell is empty."""
    errors, notes, absent = {}, {}, {}
    for letter, one in shapes.items():
        for name, found in one["peers"].items():
            if "unavailable" in found:
                absent.setdefault((name, found["unavailable"]), []).append(letter)
                continue
            if found["error"] is not None:
                of_storage = errors.setdefault(one.get("storage", "float32"), {})
                of_storage[name] = max(of_storage.get(name, 0.0), found["error"])
            if found["note"]:
                notes.setdefault((name, found["note"]), []).append(letter)
    lines = [""]
    for storage, of_storage in errors.items():
        # Results in half precision are rounded to it, which says more than the arithmetic does.
        where = "" if storage == "float32" else f" in {storage}"
        found = ", ".join(f"{n} {e:.1e}" for n, e in of_storage.items())
        lines += [f"Largest errors against float64{where}: {found}.", ""]
    lines += [f"- {name} ({', '.join(where)}): {what}" for (name, what), where in notes.items()]
    lines += [f"- {name} ({', '.join(where)}) is missing: {why}" for (name, why), where in absent.items()]
    return lines


def peers(record):
    """compare.json: a table for each task and storage, a line per shape and a column per peer."""
    lines = []
    for task, title in TASKS.items():
        shapes = record.get(task, {})
        for storage in dict.fromkeys(one.get("storage", "float32") for one in shapes.values()):
            stored = {name: one for name, one in shapes.items() if one.get("storage", "float32") == storage}
            names = list(dict.fromkeys(name for one in stored.values() for name in one["peers"]))
            ends = ["the limit, best", f"{OURS}, of the limit"] * any("limit" in one for one in stored.values())
            rows = [
                [called(letter, one), *(cell(one["peers"].get(name)) for name in names), *(limits(one) if ends else ())]
                for letter, one in stored.items()
            ]
            lines += [f"{title}, in {storage}, ms: median (best), and the median in units of {OURS}'s:", ""]
            lines += [*grid(["shape", *names, *ends], rows), *remarks(stored), ""]
    return lines


def origin(record):
    """What was compared on what, for compare.json."""
    found = {}
    for versions in record["versions"].values():
        found |= {package: version for package, version in versions.items() if version}
    load = [f"{record[key][0]:.1f}" for key in ("load_before", "load_after")]
    lines = [
        f"{record['processor']}, {record['threads']} threads for all, {record['date']}, {record['rounds']} "
        f"rounds; load average {load[0]} before and {load[1]} after. Python {found.pop('python')}, "
        + ", ".join(f"{package} {version}" for package, version in found.items())
        + ".",
        "",
    ]
    return [*lines, *(f"- {name}: {words}" for name, words in record["words"].items()), ""]


def interop(record):
    """Whole encoders on this library and on others, for interop.json."""
    load = [f"{record[key][0]:.1f}" for key in ("load_before", "load_after")]
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    line = (
        f"{record['processor']}, {record['threads']} threads, {record['date']}, {record['rounds']} rounds; load "
        f"average {load[0]} before and {load[1]} after. Random weights; {versions}."
    )
    rows = []
    for work, dtypes in record["works"].items():
        for dtype, found in dtypes.items():
            for way, ms in found["median_ms"].items():
                ratio = "" if way == OURS else f"{found['times_ours'][way]:.2f}"
                rows.append(
                    [work, dtype, f"{found['real']:.0%}", way, f"{ms:,.0f}", ratio, f"{found['errors'][way]:.1g}"]
                )
    head = ["encoder", "dtype", "real tokens", "", "ms", "times our time", "largest error"]
    return [line, "", *grid(head, rows)]


# Why a model type was not built: a part of what was recorded, and what it means.
NOT_BUILT = (
    ("million parameters", "too large"),
    ("more than", "too slow"),
    ("library but it was not found", "it needs another package"),
    ("no class of models", "a configuration without a model of its own"),
    ("no inputs", "what it takes is not known"),
    ("changes from call to call", "its own answer changes from call to call"),
)


def model_types(record):
    """What became of each model type of transformers, for transformers.json."""
    types = record["types"]
    names = {}
    for name, row in types.items():
        verdict = row["verdict"]
        if verdict == "refused":
            verdict = f"refused: `{row['why'].partition(':')[0]}`"
        elif verdict == "not built":
            known = [words for part, words in NOT_BUILT if part in row["why"]]
            verdict = f"not built: {(known or ['its sizes or inputs do not fit'])[0]}"
        names.setdefault(verdict, []).append(name)
    worst = max(
        max(row["difference"].values()) for row in types.values() if row["verdict"] == "equal" and "because" not in row
    )
    line = (
        f"{len(types)} model types of transformers {record['transformers']}, torch {record['torch']}, "
        f"{record['date']}; {record['length']} tokens, float32, random weights. Largest difference of those that are "
        f"equal: {worst:.0e} of the largest state."
    )
    rows = [[verdict, str(len(found)), ", ".join(found)] for verdict, found in sorted(names.items())]
    own = "; ".join(f"{name} ({row['because']})" for name, row in types.items() if "because" in row)
    return [
        line,
        "",
        *grid(["verdict", "types", "names"], rows),
        "",
        f"Counted as equal, with a reason: {own or 'none'}.",
    ]


def arm(record):
    """Predictions for cores of Arm, for arm.json."""
    head = ["loop", *record["cores"]]
    rows = []
    for name in next(iter(record["cores"].values())):
        found = [core[name] for core in record["cores"].values()]
        rows.append([name, *(f"{f['operations_per_cycle']:.1f} ({f['cycles']:.0f} cycles)" for f in found)])
    return [f"llvm-mca, {record['tool']}:", "", *grid(head, rows)]


def gpu(record):
    """Every row of gpu.json: this library's calls, beside those of others."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    lines = [f"{record['device']['name']}, {record['date']}, commit {record['commit'][:10]}; {versions}.", ""]
    head = ["row", "shape", "stored as", "call", "ms: median (best)", "TFLOP/s", "GB/s", "max error", "as long as ours"]
    rows, reasons = [], []
    for name, row in record["rows"].items():
        for call, f in row["calls"].items():
            if "median_ms" not in f:
                reasons.append(f"- {name}, {call}: {f['status']}" + f", `{f['reason']}`" * ("reason" in f))
                continue
            figures = [f"{brief(f['median_ms'])} ({brief(f['best_ms'])})"]
            figures += [brief(f["tflops"]) if "tflops" in f else "", brief(f["gbs"])]
            figures += ["" if f["error"] is None else f"{f['error']:.1e}"]
            ratio = f"{f['times_ours']:.2f}×" if "times_ours" in f else ""
            rows.append([name, sizes(row["shape"]), row["storage"], call, *figures, ratio])
    return [*lines, *grid(head, rows), "", *reasons]


def sections(folder=RECORDED):
    """The documentation's parts, by the name under which a page includes them."""

    def read(name, *parts):
        path = folder / name
        lines = []
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            lines = [line for part in parts for line in part(record)]
        return "\n".join(lines).strip() or f"Nothing is recorded for this in `asv_bench/recorded/{name}`."

    return {
        "figures_shapes": "\n".join(shapes()),
        "figures_kernels": read("cpu.json", kernels),
        "figures_growth": read("cpu.json", growth),
        "figures_small": read("cpu.json", small, start),
        "figures_interop": read("interop.json", interop),
        "figures_model_types": read("transformers.json", model_types),
        "figures_arm": read("arm.json", arm),
        "figures_gpu": read("gpu.json", gpu),
        "figures_peers": read("compare.json", origin, peers),
        "figures_peers_amx": read("compare-amx.json", origin, peers),
        "figures_peers_fma": read("compare-fma.json", origin, peers),
    }
