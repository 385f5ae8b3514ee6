"""Ninety-nine wrong kernels fail and are told why; `python -m tests.wrong_kernels` asks them everything."""

import itertools

import pytest

from relpos_np.conform import conform
from tests.wrong_kernels import WRONG, alibi, beit, kernel, rotary, t5
from tests.wrong_kernels_second import SECOND, UNNAMED

RIGHT = {"plain": kernel, "t5": t5, "rotary": rotary, "alibi": alibi, "beit": lambda: beit(lambda grid: grid)}
# What does not wait for the night.
DAILY = {("plain", "float64"), ("plain", "bfloat16"), ("rotary", "bfloat16"), *((name, "float32") for name in RIGHT)}


@pytest.mark.parametrize(("words", "scheme", "family", "function", "causes"), WRONG, ids=[one[0] for one in WRONG])
def test_a_wrong_kernel_is_told_why(words, scheme, family, function, causes):
    report = conform(function, scheme, families={"self", family})
    assert report.exit_code == 1
    assert any(cause in report.family(family).cause for cause in causes), report.text()


@pytest.mark.parametrize(
    ("words", "scheme", "family", "function", "causes", "takes"), SECOND, ids=[one[0] for one in SECOND]
)
def test_another_wrong_kernel_is_told_why(words, scheme, family, function, causes, takes):
    report = conform(function, scheme, families={"self", family}, **takes)
    assert report.exit_code == 1
    cause = report.family(family).cause
    assert any(word in cause for word in causes) if words not in UNNAMED else not cause, report.text()


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
