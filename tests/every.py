"""Every scheme of the registry with each of its variants, as (name, variant or None)."""

import relpos_np as rp
from relpos_np.testing.sweep import parts

ATTENTION = [pair for pair in parts() if rp.SCHEMES[pair[0]].kind == "attention"]
ABSOLUTE = [pair for pair in parts() if rp.SCHEMES[pair[0]].kind == "absolute"]
