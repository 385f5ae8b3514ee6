"""`relpos check`: all backends against the reference, or every promise on this machine."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import relpos_np as rp
from relpos_np._commands.common import MISMATCH, natural, refuse
from relpos_np._commands.terminal import print_json, print_table, progress
from relpos_np.versions import collect_versions

if TYPE_CHECKING:
    from relpos_np.testing.sweep import Case

SUMMARY = "compare all backends with the reference"
HELP = """\
Compares every backend of this machine with the reference in float64: every scheme and variant in float32, with several
masks, in half a minute; with --thorough at several lengths and in three precisions. An error of 1 is the largest that
is tolerated: 4 eps (1 + max |score|) sum p |v|, see relpos_np.testing.tolerance.

--promises measures something else, in about a minute: what the documentation promises of errors, equal bits, threads,
memory and Ctrl-C. It prints the limit and the figure of each. The exit code is 1 if a promise is broken.
"""
EXAMPLE = """\
examples:
  relpos check
  relpos check --thorough
  relpos check --seed 7 --json > check.json
  relpos check --promises
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--seed", type=natural, metavar="N", help="of the random numbers; default 0")
    parser.add_argument("--thorough", action="store_true", help="every length, mask and precision, in some minutes")
    parser.add_argument("--promises", action="store_true", help="measure what is promised, in place of the sweep")


def run(args: argparse.Namespace) -> int:
    """The sweep of `relpos_np.testing.sweep` or what `relpos_np._commands.promises` measures, as a table."""
    if not args.promises:
        return _sweep(args, args.seed or 0)
    refuse(args, ["seed", "thorough"], "goes without --promises, which are measured on fixed numbers")
    return _promises(args)


def _promises(args: argparse.Namespace) -> int:
    """Each promise with its limit and what was measured."""
    from relpos_np._commands.promises import measure

    started = time.perf_counter()
    found = [promise for _, promise in progress(measure(), "measuring", quiet=args.json)]
    ok = all(promise.ok is not False for promise in found)
    seconds = time.perf_counter() - started
    if args.json:
        versions = collect_versions()
        names = ("processor", "processors", "relpos_np", "python", "numpy", "numba", "kernels")
        facts = {"ok": ok, "seconds": seconds, **{name: versions[name] for name in names}}
        facts["kernels"] = {name: facts["kernels"][name] for name in ("vectors", "threads", "threading_layer")}
        print_json({**facts, "promises": [vars(promise) for promise in found]})
        return 0 if ok else MISMATCH

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    verdicts = {True: "ok", False: "BROKEN", None: ""}
    rows = [[one.text, cell(one.limit), cell(one.measured), one.unit, verdicts[one.ok], one.note] for one in found]
    print_table(["promise", "limit", "measured", "unit", "", "where"], rows)
    kept, broken = (sum(one.ok is verdict for one in found) for verdict in (True, False))
    print(f"{kept} kept, {broken} broken, {len(found) - kept - broken} not measured, in {seconds:.0f} s")
    return 0 if ok else MISMATCH


def _blamed(case: Case) -> str:
    """Which of a backend and the reference is wrong, by a third way to compute the same."""
    found = case.third_opinion()
    if found is None:
        return "nothing else can compute this call, so that either may be wrong"
    of_backend, of_reference = found
    if min(found) > 1:
        return "the scheme's terms in long double agree with neither"
    wrong = case.backend if of_backend > of_reference else "the reference"
    return (
        f"{wrong} is wrong: the scheme's terms in long double are within {of_backend:.2g} of {case.backend} and "
        f"within {of_reference:.2g} of the reference"
    )


def _sweep(args: argparse.Namespace, seed: int) -> int:
    from relpos_np.testing.sweep import DTYPES, cases, parts

    backends, absent = rp.backend.available()
    worst: dict[tuple[str, str | None, str, str], tuple[float, Case]] = {}
    count, started = 0, time.perf_counter()
    for part in progress(parts(), "checking", quiet=args.json):
        for case in cases(*part, backends, seed, args.thorough):
            key = *part, case.backend, case.dtype
            error = case.error()
            count += 1
            if key not in worst or error > worst[key][0]:
                worst[key] = error, case
    ok = all(error <= 1 for error, _ in worst.values())
    seconds = time.perf_counter() - started
    if args.json:
        names = ("scheme", "variant", "backend", "dtype")
        results = [
            {**dict(zip(names, key, strict=True)), "error": error, "where": case.example.where, "ok": error <= 1}
            for key, (error, case) in worst.items()
        ]
        found = {"ok": ok, "seed": seed, "cases": count, "seconds": seconds}
        print_json({**found, "not_available": absent, "results": results})
        return 0 if ok else MISMATCH

    dtypes = [name for name in DTYPES if any(key[3] == name for key in worst)]

    def cell(*key: Any) -> str:
        return f"{worst[key][0]:.2f}" if key in worst else "   -"

    rows = []
    for name, variant in dict.fromkeys(key[:2] for key in worst):
        cells = (" ".join(cell(name, variant, backend, dtype) for dtype in dtypes) for backend in backends)
        rows.append([name, variant or "", *(text if text.strip(" -") else "" for text in cells)])
    print(f"Largest errors in units of the tolerance, in {', '.join(dtypes)}:")
    print_table(["scheme", "variant", *backends], rows)
    for backend, reason in absent.items():
        print(f"not checked: {backend}: {reason}")
    for (_, _, backend, _), (error, case) in worst.items():
        if error > 1:
            print(f"MISMATCH of {backend} and the reference: {error:.3g} times the tolerance in {case.example.where}")
            print(f"    {_blamed(case)}")
    said = "right: all backends agree with the reference" if ok else "WRONG: not all backends agree with the reference"
    more = "" if args.thorough else "; --thorough compares more"
    print(f"{said}, in {count} cases and {seconds:.0f} s{more}")
    return 0 if ok else MISMATCH
