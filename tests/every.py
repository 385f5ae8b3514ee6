"""Every scheme of the registry with each of its variants, as (name, variant or None)."""

import numpy as np

import relpos_np as rp
from relpos_np import testing
from relpos_np._contract import check
from relpos_np._contract.problem import Part
from relpos_np.schemes.base import Scheme
from relpos_np.testing.sweep import parts

ATTENTION = [pair for pair in parts() if rp.SCHEMES[pair[0]].kind == "attention"]
ABSOLUTE = [pair for pair in parts() if rp.SCHEMES[pair[0]].kind == "absolute"]


def restarts(name, variant=None):
    """Whether a shorter call may use the scheme as it is."""
    scheme = testing.example(name, variant=variant, size="tiny").position
    return scheme.relative or scheme.token_independent


RESTARTING = [pair for pair in ATTENTION if restarts(*pair)]


def remade(scheme, change, within=""):
    """The scheme made again, with what `change` makes of each of its floating-point arrays, given with their names.

    Those of a scheme within it have names with a dot.
    """
    made = {}
    for name, x in testing.arguments(scheme).items():
        if isinstance(x, Scheme):
            made[name] = remade(x, change, f"{within}{name}.")
        elif isinstance(x, np.ndarray) and x.dtype.kind == "f":
            made[name] = change(within + name, x)
        else:
            made[name] = x
    return type(scheme)(**made)


def divisible(name, variant=None):
    """Whether a scheme can be computed for a part of a call."""
    e = testing.example(name, variant=variant, size="tiny")
    site = check.problem(e.q, e.k, e.v, **e.kwargs)[0].site
    try:
        e.position.narrow(site, Part.of(site))
    except rp.RelposError:
        return False
    return True
