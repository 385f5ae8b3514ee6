"""What formulas refuse they refuse whatever Python was asked to leave out."""

import pytest

from tests.processes import child

BOGUS = """
refused = []
for call in (
    lambda: rp.reference.t5_bucket(np.arange(3), rounding="bogus"),
    lambda: rp.reference.rel_shift(np.ones((2, 4)), "bogus"),
    lambda: rp.reference.sinusoidal(np.arange(3), 4, layout="bogus"),
    lambda: rp.reference.rotate_pairs(np.ones((2, 4)), np.ones((2, 2, 2, 2)), layout="bogus"),
    lambda: rp.reference.rotate_pairs(np.ones((2, 4)), np.ones((2, 2, 2, 2)), layout=None),
):
    try:
        call()
    except rp.RelposError as error:
        refused.append(str(error))
print(len(refused), all("expected one of" in message for message in refused))
"""


@pytest.mark.parametrize("options", [(), ("-OO",)], ids=["as ever", "without docstrings"])
def test_unknown_words_are_refused(options):
    status, out, log = child(BOGUS, *options)
    assert status == 0, log
    assert out.split() == ["5", "True"], log
