"""Pictures of what positions contribute to attention; matplotlib is imported only when one is drawn."""

from relpos_np.plot.bias import *  # noqa: F403
from relpos_np.plot.bias import __all__ as __all__
