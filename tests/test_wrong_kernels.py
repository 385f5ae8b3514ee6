"""Ninety-nine wrong kernels fail and are told why; `python -m tests.wrong_kernels` asks them everything."""

import itertools

import pytest

from relpos_np.conform import conform
from tests.wrong_kernels import WRONG, alibi, beit, kernel, rotary, t5
from tests.wrong_kernels_second import SECOND

RIGHT = {"plain": kernel, "t5": t5, "rotary": rotary, "alibi": alibi, "beit": lambda: beit(lambda grid: grid)}
ALL = [*WRONG, *SECOND]
# What does not wait for the night.
DAILY = {("plain", "float64"), ("plain", "bfloat16"), ("rotary", "bfloat16"), *((name, "float32") for name in RIGHT)}


@pytest.mark.parametrize(
    ("scheme", "one"), [(one.scheme, one) for one in ALL], ids=[f"{one.scheme}: {one.words}" for one in ALL]
)
def test_a_wrong_kernel_is_told_why(scheme, one):
    report = conform(one.function, scheme, families={"self", one.family}, **one.takes)
    assert report.exit_code == 1
    cause = report.family(one.family).cause
    assert any(words in cause for words in one.causes) if one.causes else not cause, report.text()


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        pytest.param(*one, marks=() if one in DAILY else pytest.mark.slow)
        for one in itertools.product(RIGHT, ("float32", "float64", "bfloat16"))
    ],
)
def test_the_kernel_that_they_are_made_of_is_right(scheme, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    report = conform(RIGHT[scheme](), scheme, dtype=dtype, lengths=(1, 2, 33, 65))
    assert report.ok, report.text()
