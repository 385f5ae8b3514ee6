"""What several commands share: exit codes and kinds of numbers."""

from __future__ import annotations

import argparse

# Exit codes: 0, what was asked for was done; 1, a wrong number was found; 2, it could not be done. `relpos conform` has
# 3: nothing ran.
MISMATCH, FAILED = 1, 2


def natural(text: str) -> int:
    """A number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text}")
    return number


def positive(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text}")
    return number
