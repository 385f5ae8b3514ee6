"""`relpos vectors`: exact answers as files, written or checked."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np

import relpos_np as rp
from relpos_np._commands.common import MISMATCH, names, natural, naturals, refuse
from relpos_np._commands.terminal import print_json, progress

SUMMARY = "write exact answers as files, for tests in any language"
HELP = """\
Writes golden vectors for every scheme and variant: inputs, constructor arguments, masks, and the exact output,
log-sum-exp and gradients in float64, with a tolerance for each precision; and the functions in which published codes
differ. A record is one .npz and one .json; manifest.json has checksums. docs/vectors.md describes them. Without options
it is the set v1, whose bytes are the same on every machine.

--check reads a set back, compares files with their checksums, and computes each record from its file on every backend
of this machine. The exit code is 1 if a file is missing or damaged, or a number is outside its tolerance.

--format c writes relpos_vectors.h, twenty small cases whose bytes are the same on every machine, and relpos_driver.c,
which runs a kernel in C on them.

--format onnx writes test cases of ONNX instead, for the runner of the package onnx and those of runtimes: a folder
each, with model.onnx, inputs and output. docs/onnx.md says how to run them.
"""
EXAMPLE = """\
examples:
  relpos vectors golden
  relpos vectors --check golden
  relpos vectors mine --schemes t5,alibi --dtypes float32 --lengths 64,65 --head-dim 128
  relpos vectors onnx-cases --format onnx
  relpos vectors c-cases --format c
"""


_CHOICES = ("seed", "schemes", "dtypes", "lengths", "head_dim")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="to write to, new or empty; with --check, to read")
    parser.add_argument("--check", action="store_true", help="read DIR back, and compare every backend with it")
    parser.add_argument(
        "--format",
        choices=("npz", "onnx", "c"),
        default="npz",
        help='what to write; onnx needs pip install "relpos-np[onnx]"',
    )
    parser.add_argument("--seed", type=natural, metavar="N", help="of the random numbers; default 0")
    parser.add_argument("--schemes", type=names, metavar="NAME,...", help="those alone; default all, and functions")
    parser.add_argument(
        "--dtypes",
        type=names,
        metavar="NAME,...",
        help='float64, float32, float16 (default all); bfloat16 needs pip install "relpos-np[safetensors]"',
    )
    parser.add_argument("--lengths", type=naturals, metavar="N,...", help="of queries and keys, in place of v1's")
    parser.add_argument("--head-dim", type=naturals, metavar="N,...", help="channels, in place of v1's")


def run(args: argparse.Namespace) -> int:
    """Write a set of golden vectors, or check one."""
    if args.format == "onnx":
        return _cases(args)
    if args.format == "c":
        return _header(args)
    from relpos_np.testing import golden

    started = time.perf_counter()
    if not args.check:
        options = {name: value for name in _CHOICES if (value := getattr(args, name)) is not None}
        count = sum(1 for _ in progress(golden.writing(args.folder, **options), "writing", quiet=args.json))
        size = sum(path.stat().st_size for path in args.folder.iterdir())
        digest = hashlib.sha256((args.folder / golden.MANIFEST).read_bytes()).hexdigest()
        if args.json:
            print_json({"folder": str(args.folder), "records": count, "bytes": size, "sha256": digest, **options})
        else:
            which = "" if options else ": the set v1"
            print(f"{count} records, {size / 1e6:.1f} MB, written to {args.folder}{which}")
            print(f"sha256 of manifest.json, which has those of all files: {digest}")
        return 0
    refuse(args, _CHOICES, "goes without --check; what was written decides")
    backends, absent = rp.backend.available()
    listed = golden.manifest(args.folder)
    found = [
        one
        for name, entry in progress(list(listed.items()), "checking", quiet=args.json)
        for one in golden.check_record(args.folder, name, entry, backends)
    ]
    wrong = [one for one in found if not one.ok]
    worst = max((one.error for one in found if one.ok), default=0.0)
    if args.json:
        facts = {"ok": not wrong, "records": len(listed), "comparisons": len(found), "largest_error": worst}
        problems = [{"record": one.record, "what": one.what, "error": one.error} for one in wrong]
        print_json({**facts, "backends": list(backends), "not_available": absent, "problems": problems})
        return MISMATCH if wrong else 0
    for one in wrong:
        amount = "" if one.error == np.inf else f": {one.error:.3g} times the tolerance"
        print(f"MISMATCH: {one.record}: {one.what}{amount}")
    for backend, reason in absent.items():
        print(f"not checked: {backend}: {reason}")
    print(
        f"{len(listed)} records, {len(found)} comparisons in {time.perf_counter() - started:.0f} s on "
        f"{', '.join(backends)}: {f'{len(wrong)} NOT' if wrong else 'all'} within the tolerance "
        f"(largest error {worst:.2f} of it)"
    )
    return MISMATCH if wrong else 0


def _cases(args: argparse.Namespace) -> int:
    """Write test cases of ONNX."""
    from relpos_np.testing.onnx_cases import writing_onnx

    refuse(args, ("check", *_CHOICES[1:]), "goes without --format onnx")
    seed = args.seed or 0
    found = list(progress(writing_onnx(args.folder, seed=seed), "writing", quiet=args.json))
    written = sum(case is not None for _, case in found)
    absent = sorted({name for name, _ in found} - {name for name, case in found if case is not None})
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    if args.json:
        facts = {"folder": str(args.folder), "cases": written, "bytes": size, "seed": seed}
        print_json({**facts, "schemes_without_a_model": absent})
    else:
        print(f"{written} cases, {size / 1e6:.1f} MB, written to {args.folder}")
        print(f"schemes that no model can say: {', '.join(absent)}")
    return 0


def _header(args: argparse.Namespace) -> int:
    """Write a header and a driver in C."""
    from relpos_np.testing.c_header import VERSION, writing_c

    refuse(args, ("check", *_CHOICES), "goes without --format c")
    written = list(writing_c(args.folder))
    if args.json:
        print_json({"folder": str(args.folder), "files": written, "version": VERSION})
    else:
        print(f"{' and '.join(written)} written to {args.folder}, version {VERSION}")
    return 0
