"""`relpos check`: all backends against the reference."""

from __future__ import annotations

import argparse
import time
from typing import Any

import relpos_np as rp
from relpos_np.commands.common import MISMATCH, natural
from relpos_np.terminal import print_json, print_table, progress

SUMMARY = "all backends against the reference"
HELP = """\
Every scheme and variant with several lengths, masks and dtypes on every backend of this machine, against the
reference in float64. Errors are in units of what is tolerated (4 eps (1 + max |score|) sum p |v|, see
relpos_np.testing.tolerance), so that 1 is the limit.
"""
EXAMPLE = """\
examples:
  relpos check
  relpos check --seed 7 --json > check.json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the random numbers; default 0")


def run(args: argparse.Namespace) -> int:
    """The sweep of `relpos_np.sweep`, as a table."""
    from relpos_np.sweep import DTYPES, cases, parts

    backends, absent = rp.backend.available()
    worst: dict[tuple[str, str | None, str, str], tuple[float, str]] = {}
    count, started = 0, time.perf_counter()
    for part in progress(parts(), "checking", quiet=args.json):
        for case in cases(*part, backends, args.seed):
            key = *part, case.backend, case.dtype
            error = case.error()
            count += 1
            if key not in worst or error > worst[key][0]:
                worst[key] = error, case.example.where
    ok = all(error <= 1 for error, _ in worst.values())
    seconds = time.perf_counter() - started
    if args.json:
        names = ("scheme", "variant", "backend", "dtype")
        results = [
            {**dict(zip(names, key, strict=True)), "error": error, "where": where, "ok": error <= 1}
            for key, (error, where) in worst.items()
        ]
        found = {"ok": ok, "seed": args.seed, "cases": count, "seconds": seconds}
        print_json({**found, "not_available": absent, "results": results})
        return 0 if ok else MISMATCH

    def cell(*key: Any) -> str:
        return f"{worst[key][0]:.2f}" if key in worst else "   -"

    rows = []
    for name, variant in dict.fromkeys(key[:2] for key in worst):
        cells = (" ".join(cell(name, variant, backend, dtype) for dtype in DTYPES) for backend in backends)
        rows.append([name, variant or "", *(text if text.strip(" -") else "" for text in cells)])
    print(f"Largest errors in units of the tolerance, in {', '.join(DTYPES)}:")
    print_table(["scheme", "variant", *backends], rows)
    for backend, reason in absent.items():
        print(f"not checked: {backend}: {reason}")
    for (_, _, backend, _), (error, where) in worst.items():
        if error > 1:
            print(f"MISMATCH on {backend}: {error:.3g} times the tolerance in {where}")
    print(f"{count} cases in {seconds:.0f} s; {'all' if ok else 'NOT all'} within the tolerance")
    return 0 if ok else MISMATCH
