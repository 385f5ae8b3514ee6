"""The CUDA kernels against the formulas on calls that hypothesis makes up: shapes, schemes, masks, bands, layouts."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.compare import assert_same
from tests.strategies import cases

# In the simulator NumPy warns of the infinities that some calls put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
EXAMPLES = 30


@given(cases(small=True))
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_kernels_agree_with_the_formulas(case):
    assert_same(case.attention(np.float64, "cuda"), case.attention(np.float64, "numpy"), case)
