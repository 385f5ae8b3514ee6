"""`relpos bench`: this machine's times, beside those of whatever else is installed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relpos_np import versions
from relpos_np._commands.common import BUSY, MISMATCH, UnusableError, busy, positive
from relpos_np._commands.peers import OURS, PEERS, rounds
from relpos_np._commands.peers.shapes import SHAPES, SMALL
from relpos_np._commands.terminal import print_json, print_lines, print_table
from relpos_np._commands.terminal import seconds as duration

SUMMARY = "time attention beside other packages"
HELP = """\
Times attention of this library beside the packages that you have installed: NumPy (the formula), torch, onnxruntime
and openvino with onnx, jax. Each runs in a process of its own with the same number of threads, in turns, and only if
its result agrees with float64. "median" and "best" are over all calls; "times" says how many times as long as relpos_np
a package takes, as the median over the rounds. Packages that are not installed are listed.
Torch's flex_attention needs a C++ compiler, and compiles for long: name it with --peers to run it.
"""
EXAMPLE = """\
examples:
  relpos bench
  relpos bench --shapes a h --peers numpy --rounds 1 --json
  relpos bench --shapes a --peers numpy --rounds 1 --json speed.json
"""
JSON = {
    "nargs": "?",
    "const": "-",
    "metavar": "FILE",
    "help": "print one JSON object and nothing else; with a FILE, write it there beside the tables",
}
# A bias, windows and one query: what kernels differ in most, and few enough for a minute with all peers.
_SHAPES = ("A", "D", "H")
# What takes long to compile, what computes in another precision, and the machine's limit, which is no peer.
_UNASKED = ("torch flex", "openvino, own precision", "limit")
_PEERS = tuple(name for name in PEERS if name != OURS)
# Of one turn of one peer.
_SECONDS = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    shapes = ", ".join(f"{name} {s.words}" for name, s in SHAPES.items() if s.storage == "float32")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[*SHAPES, *SMALL],
        default=_SHAPES,
        metavar="LETTER",
        help=f"default {' '.join(_SHAPES)}; of {shapes}; with a b behind the letter in bfloat16; small letters are "
        "small cases",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=_PEERS,
        metavar="PEER",
        help=f"of {', '.join(map(repr, _PEERS))}; default all but {', '.join(map(repr, _UNASKED))}",
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each; default 5")
    parser.add_argument("--threads", type=positive, metavar="N", help="of each; default all processors")


def _lacking(name: str) -> str:
    """The package that a peer needs and this environment lacks; empty if it is there."""
    return next((package for package in PEERS[name].packages if find_spec(package) is None), "")


def run(args: argparse.Namespace) -> int:
    """A table for each shape, and what to know about them."""
    allowed = versions.usable() or 1
    threads = args.threads or allowed
    if threads > allowed:
        raise UnusableError(f"--threads: at most {allowed} here (processors), found {threads}")
    if args.json not in (None, "-") and not Path(args.json).parent.is_dir():
        raise UnusableError(f"--json: {args.json} cannot be written: there is no such folder")
    asked = tuple(args.peers or (name for name in _PEERS if name not in _UNASKED))
    lacking = {name: package for name in asked if (package := _lacking(name))}
    names = [name for name in PEERS if name == OURS or (name in asked and name not in lacking)]
    alone = args.json == "-"
    disturbed = busy()

    if not alone:
        print_lines(
            [
                ("processor", f"{versions.processor()}, {threads} of {allowed} threads"),
                ("peers", "; ".join(names)),
                *([("not installed", ", ".join(dict.fromkeys(lacking.values())))] if lacking else []),
            ]
        )
    try:
        record = rounds.run(
            names,
            {"attention": args.shapes},
            rounds=args.rounds,
            seconds=_SECONDS,
            threads=threads,
            done=None if alone else _print_shape,
        )
    except ChildProcessError as error:
        raise UnusableError(f"{error}; name the others with --peers") from error
    ours = [one["peers"][OURS] for one in record["attention"].values()]
    disturbed = disturbed or any(busy(f["median_ms"], f["best_ms"]) for f in ours if "median_ms" in f)
    wrong = any("error" not in f for f in ours)
    record |= {"not_installed": lacking, "busy": disturbed, "ok": not wrong}
    if alone:
        print_json(record)
    else:
        for line in _remarks(record["attention"]):
            print(line)
        if disturbed:
            print(f"note: {BUSY}")
    if args.json not in (None, "-"):
        _write(Path(args.json), record)
    return MISMATCH if wrong else 0


def _print_shape(_task: str, shape: str, found: Mapping[str, Any]) -> None:
    """The table of one shape, the fastest first."""
    batch, heads, q_len, k_len, head_dim = found["shape"]
    storage = "" if found["storage"] in found["words"] else f", {found['storage']}"
    print(f"\n{shape}: {found['words']}{storage}; {batch} × {heads} heads, {q_len} × {k_len}, head_dim {head_dim}")
    timed = {name: f for name, f in found["peers"].items() if "median_ms" in f}
    rows = [
        [
            name,
            duration(f["median_ms"] / 1e3),
            duration(f["best_ms"] / 1e3),
            f"{f['times_ours']:.2f}" if "times_ours" in f else "-",
            f"{f['error']:.0e}",
        ]
        for name, f in sorted(timed.items(), key=lambda item: item[1]["median_ms"])
    ]
    if rows:
        print_table(["", "median", "best", "times", "max error"], rows)
    if "limit" in found:
        unit = {"operations": "FLOP/s", "bytes": "B/s"}[found["limit"]["of"]]
        print(f"limit: {found['limit']['best'] / 1e9:.0f} G{unit}")


def _remarks(shapes: Mapping[str, Any]) -> Iterator[str]:
    """What peers do, and why one has no time."""
    yield ""
    timed: dict[str, None] = {}
    missing: dict[tuple[str, str], list[str]] = {}
    for shape, one in shapes.items():
        for name, found in one["peers"].items():
            if "unavailable" in found:
                missing.setdefault((name, found["unavailable"]), []).append(shape)
            else:
                timed[name] = None
    for name in timed:
        yield f"{name}: {PEERS[name].words}"
    for (name, why), where in missing.items():
        yield f"{name} has no time in {', '.join(where)}: {why}"


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """The record as a file."""
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"--json: {path} cannot be written: {error.strerror or error}") from error
    print_lines([("written to", str(path))])
