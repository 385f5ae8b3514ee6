"""`relpos info`: versions, processor, threads, kernel cache."""

from __future__ import annotations

import argparse

import relpos_np as rp

SUMMARY = "print versions, processor, threads and kernel cache"
HELP = """\
Prints the versions of relpos_np and its packages, the processor, threads, and the folder of compiled kernels. Please
add it to a report of a problem. `relpos_np.show_versions()` prints the same.
"""
EXAMPLE = """\
examples:
  relpos info
  relpos info --json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""


def run(args: argparse.Namespace) -> int:
    """What `relpos_np.show_versions` prints."""
    rp.show_versions(as_json=args.json)
    return 0
