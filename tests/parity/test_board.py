"""The board: what was recorded of each installed package still holds, in short."""

import json

import pytest

from tests.parity import board
from tests.parity.adaptors import ADAPTORS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("adaptor", ADAPTORS, ids=lambda one: f"{one.package}-{one.scheme}-{one.variant}")
def test_what_was_recorded_still_holds(adaptor):
    installed = board.installed(adaptor.package)
    if installed is None:
        pytest.skip(f"{adaptor.package} is not installed")
    rows = [one for one in json.loads(board.RECORD.read_text(encoding="utf-8"))["rows"] if one["what"] == adaptor.name]
    recorded = {one["dtype"]: one for one in rows if one["package"] == adaptor.package}
    assert tuple(recorded) == adaptor.dtypes, "run python -m tests.parity.board"
    families = [name for name in board.SHORT if name in recorded["float32"]["families"]]
    try:
        function = adaptor.made()
    except ImportError as error:
        pytest.skip(f"{adaptor.package} cannot be imported: {error}")
    found = board.row(adaptor, board.report(adaptor, "float32", function, families))
    for name, one in found["families"].items():
        before = recorded["float32"]["families"][name]
        assert one["verdict"] == before["verdict"], (
            f"{adaptor.package} {installed}, {adaptor.name}: {name} is {one['verdict']}, and was {before['verdict']} "
            f"with {recorded['float32']['version']}; record the board anew"
        )
    assert found["families"]["self"]["ran"] > 0


def test_every_adaptor_is_on_the_board():
    rows = json.loads(board.RECORD.read_text(encoding="utf-8"))["rows"]
    assert [board.key(one) for one in rows] == [
        (one.package, one.name, one.scheme, dtype) for one in ADAPTORS for dtype in one.dtypes
    ]
    assert len({one["package"] for one in rows}) >= 8
    assert all(one["families"]["self"]["verdict"] == "right" for one in rows)
