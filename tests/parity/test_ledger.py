"""The ledger: whether the installed version of each package still computes what was recorded."""

import json

import pytest

pytest.importorskip("torch")

from tests.parity import ledger

pytestmark = pytest.mark.filterwarnings("ignore")
RECORDED = json.loads(ledger.RECORD.read_text(encoding="utf-8"))["entries"]


@pytest.mark.parametrize("name", ledger.ENTRIES)
def test_what_is_recorded_is_still_so(name):
    one, recorded = ledger.ENTRIES[name], RECORDED[name]
    if one.installed is None:
        pytest.skip(f"{one.package} is not installed")
    try:
        ours, theirs = one.answers()
    except ImportError as error:
        pytest.skip(f"{one.package} cannot be imported: {error}")
    assert ours == recorded["ours"], "this library answers otherwise than it did"
    assert (theirs == ours) == (one.kind == "claim"), (
        f"{one.package} {one.installed} no longer differs, as {recorded['version']} did: close the entry, and say "
        "which version changed it"
    )
    assert theirs == recorded["theirs"], (
        f"{one.package} {one.installed} computes {theirs}, and {recorded['version']} {recorded['theirs']}: look at it"
    )


def test_every_entry_is_recorded_as_it_reads():
    assert list(RECORDED) == list(ledger.ENTRIES)
    for name, one in ledger.ENTRIES.items():
        assert one.kind in ledger.KINDS
        for field in ("package", "kind", "case", "why", "link"):
            assert RECORDED[name][field] == getattr(one, field), f"{name}: run python -m tests.parity.ledger"
        assert (RECORDED[name]["ours"] == RECORDED[name]["theirs"]) == (one.kind == "claim")
