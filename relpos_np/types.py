"""Names for arrays in annotations, without the cost of importing `numpy.typing`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Int32: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
