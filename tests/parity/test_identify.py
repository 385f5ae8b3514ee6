"""`identify` on archives of other packages: each is named, none wrongly."""

import pytest

pytest.importorskip("torch")

from relpos_np.testing import identify
from tests.parity.adaptors import installed
from tests.parity.archives import ARCHIVES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ARCHIVES)
def test_foreign_archives_are_named(name):
    one = ARCHIVES[name]
    if installed(one.package) is None:
        pytest.skip(f"{one.package} is not installed")
    found = identify(**one.arrays())
    assert found.matches, found.nearest
    assert {match.scheme for match in found.matches} <= set(one.schemes)
    assert one.settings.items() <= found.matches[0].settings.items()
    assert one.call.items() <= found.matches[0].call.items()
