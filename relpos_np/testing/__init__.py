"""Seeded examples of every scheme, real data, golden vectors and tolerances, for the tests of other packages too."""

from relpos_np.testing.arguments import arguments
from relpos_np.testing.cases import cases
from relpos_np.testing.compare import assert_matches, assert_no_worse_than, tolerance
from relpos_np.testing.example import Example, example, real_example
from relpos_np.testing.families import FAMILIES
from relpos_np.testing.golden import check_vectors, write_vectors
from relpos_np.testing.identification import Identification, Match
from relpos_np.testing.identify import identify
from relpos_np.testing.onnx_cases import write_onnx_cases
from relpos_np.testing.three_way import check_scheme

__all__ = [
    "FAMILIES",
    "Example",
    "Identification",
    "Match",
    "arguments",
    "assert_matches",
    "assert_no_worse_than",
    "cases",
    "check_scheme",
    "check_vectors",
    "example",
    "identify",
    "real_example",
    "tolerance",
    "write_onnx_cases",
    "write_vectors",
]
