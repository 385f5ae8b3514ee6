"""Attention of this library in models of transformers: as one of its attention implementations, or patched in."""

import relpos_np.interop.torch  # noqa: F401 - first: where PyTorch is missing, its error says so
from relpos_np.errors import RelposImportError

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401 - whether they are there
except ImportError as error:
    raise RelposImportError(
        f"relpos_np.interop.transformers cannot import transformers 5.23 or later ({error}); install it with "
        "`pip install 'transformers>=5.23'`"
    ) from error

from relpos_np.interop.transformers.asked import NAME
from relpos_np.interop.transformers.encoders import unpadded
from relpos_np.interop.transformers.interface import register
from relpos_np.interop.transformers.layers import Used, used
from relpos_np.interop.transformers.patches import patch, patched, unpatch

__all__ = ["NAME", "Used", "patch", "patched", "register", "unpadded", "unpatch", "used"]
