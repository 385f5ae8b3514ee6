"""Names for annotations: of arrays, without the cost of importing `numpy.typing`, and of words that functions take."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Int32: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

Backend: TypeAlias = Literal["numpy", "terms", "numba", "cuda"]
Precision: TypeAlias = Literal["highest", "high", "medium"]
Layout: TypeAlias = Literal["interleaved", "concatenated", "tensor2tensor", "dimension_index"]
Shift: TypeAlias = Literal["transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"]
