"""The board: what `conform` finds of the attention of other packages, by scheme and family.

``python -m tests.parity.board`` writes ``asv_bench/recorded/board.json`` and needs the packages; arguments choose some
of them, whose rows alone are written anew. ``python docs/field.py`` makes the page of it.
"""

import json
import sys
import warnings
from dataclasses import replace
from functools import wraps

from relpos_np.conform import conform
from tests.parity.adaptors import ADAPTORS, RECORDED, installed, written

RECORD = RECORDED / "board.json"
# Families that are quick, and enough to see that a package still does what was recorded.
SHORT = ("self", "causal", "decoding", "masks")


def report(adaptor, dtype, function=None, families=None):
    """What `conform` finds of one adaptor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs: of what is slow, or not compiled
        return conform(
            refusing(function or adaptor.made()),
            adaptor.scheme,
            variant=adaptor.variant,
            framework=adaptor.framework,
            dtype=dtype,
            always=adaptor.always,
            layout=adaptor.layout,
            lengths=adaptor.lengths,
            families=families,
        )


def refusing(function):
    """The function with errors of a package as refusals: what it does not take is no mistake on the board."""

    @wraps(function)
    def attend(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise NotImplementedError(f"{type(error).__name__}: {error}") from error

    return attend


def row(adaptor, found):
    """A report as the board keeps it: of each family the verdict, the cause, and the smallest case that is wrong."""
    families = {}
    for family in found.families:
        # A case that is refused is no fault here, even where its family was asked for.
        one = replace(family, required=False)
        kept = {"verdict": one.verdict, "ran": one.ran, "cases": len(one.findings)}
        if one.ran:
            kept["ratio"] = float(f"{min(one.ratio, 1e300):.2g}")
        if one.reason:
            kept["reason"] = one.reason
        if one.smallest is not None:
            case = one.smallest
            kept |= {"cause": one.cause, "smallest": f"{case.edge} ({case.where})", "words": case.reason}
        families[one.name] = kept
    return {
        "package": adaptor.package,
        "version": installed(adaptor.package),
        "what": adaptor.name,
        "scheme": adaptor.scheme,
        "variant": adaptor.variant,
        "dtype": found.dtype,
        "families": families,
    }


def key(one):
    return one["package"], one["what"], one["scheme"], one["dtype"]


def record(names=()):
    """Run the adaptors of these packages, or of all that are installed."""
    before = json.loads(RECORD.read_text(encoding="utf-8"))["rows"] if RECORD.exists() else []
    rows = {key(one): one for one in before}
    chosen = [one for one in ADAPTORS if installed(one.package) and (not names or one.package in names)]
    for adaptor in chosen:
        function = adaptor.made()
        for dtype in adaptor.dtypes:
            found = report(adaptor, dtype, function)
            one = row(adaptor, found)
            rows[key(one)] = one
            print(f"{adaptor.package} {adaptor.name}, {dtype}: {found.summary}", flush=True)
    known = [(one.package, one.name, one.scheme, dtype) for one in ADAPTORS for dtype in one.dtypes]
    written(RECORD, rows=[rows[one] for one in known if one in rows])


if __name__ == "__main__":
    record(sys.argv[1:])
