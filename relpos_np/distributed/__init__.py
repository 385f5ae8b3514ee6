"""Attention in parts, on one machine or on many: `partial`, `merge`, and whole calls over Dask arrays."""

from relpos_np.distributed.arrays import attention
from relpos_np.distributed.merging import merge
from relpos_np.distributed.parts import partial
from relpos_np.distributed.planning import Plan, plan

__all__ = ["Plan", "attention", "merge", "partial", "plan"]
