"""What several commands share: exit codes, kinds of numbers, and whether the machine is busy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

from relpos_np.errors import RelposError


class UnusableError(RelposError):
    """A file or an option that cannot be used."""


# Exit codes: 0, what was asked for was done; 1, a wrong number was found; 2, it could not be done; 130, Ctrl-C.
# `relpos conform` has 3: nothing ran.
MISMATCH, FAILED, INTERRUPTED = 1, 2, 130

BUSY = "this machine is busy: calls wait for processors, and those of several threads wait longest"
# From so many times the best on, the median is that of calls that were interrupted.
_CALM = 2.0


def load() -> float | None:
    """Programs that want to run, per processor, during the last minute; None where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


def busy(median: float = 0.0, best: float = 0.0) -> bool:
    """Whether others want the processors too, or the median of some calls says so beside the best."""
    return (load() or 0.0) > 1 or median > _CALM * best


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise an error that names the first of these options that is given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            raise UnusableError(f"--{name.replace('_', '-')}: {why.format(name)}")


def natural(text: str) -> int:
    """A number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text}")
    return number


def names(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def naturals(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    return tuple(map(natural, names(text)))


def positive(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text}")
    return number
