"""`relpos warmup`: compile all kernels, for a container image."""

from __future__ import annotations

import argparse

import relpos_np as rp
from relpos_np._commands.terminal import print_json, print_table, progress

SUMMARY = "compile all kernels, for a container image"
HELP = """\
Compiles every CPU kernel for this processor, one after the other, and keeps them in RELPOS_CACHE_DIR (default: the
user's cache folder), where later processes find them. The first time takes about a minute. A kernel runs only on
the model of processor that it was compiled on; with RELPOS_CPU_LEVEL=x86-64-v3 (or -v4) on every one of that level.
"""
EXAMPLE = """\
examples:
  relpos warmup
  RELPOS_CACHE_DIR=kernels relpos warmup --json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""


def run(args: argparse.Namespace) -> int:
    """Compile what is not in the cache yet."""
    kernels = rp.backend.kernels("numba")
    done = dict(progress(kernels.warm_up(), "compiling", quiet=args.json))
    folder = kernels.cache_folder()
    if args.json:
        print_json({"folder": None if folder is None else str(folder), "seconds": done})
        return 0
    print_table(["kernel", "seconds"], [[name, f"{seconds:.1f}"] for name, seconds in done.items()])
    print(f"kept in {folder}" if folder is not None else "not kept: the folder cannot be written")
    return 0
