"""Any two schemes in one call, with a mask of every pair: each array gets its own gradient."""

from functools import cache

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from tests.every import ATTENTION

# A few sums of some hundred products of numbers of about 1, in float64.
ROOM = 1e-12


@cache
def example(name, variant):
    return testing.example(name, variant=variant, size="tiny")


def gradients(found):
    arrays = {name: getattr(found, name) for name in ("q", "k", "v", "mask")}
    each = enumerate(found.position)
    return arrays | {f"{at}.{name}": x for at, own in each for name, x in own.items()}


@pytest.mark.parametrize("backend", ["numba", "terms"])
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_gradients_beside_any_other_scheme(name, variant, backend):
    """Kernels that share sums, or buffers, between the parts of a call must not mix them up."""
    e, rng = example(name, variant), np.random.default_rng(3)
    q, k, v = (x.astype(np.float64) for x in (e.q, e.k, e.v))
    rows = e.expected.shape[:-1]
    call = {**e.kwargs, "mask": rng.standard_normal((*rows, k.shape[-2])), "mask_gradient": True}
    call |= {"grad_out": rng.standard_normal(e.expected.shape), "grad_lse": rng.standard_normal(rows)}
    for other in ATTENTION:
        call["position"] = (e.position, example(*other).position)
        try:
            expected = gradients(rp.attention_vjp(q, k, v, **call, backend="numpy"))
        except rp.RelposError:
            # The two have no size in common, or both state the queries.
            continue
        found = gradients(rp.attention_vjp(q, k, v, **call, backend=backend))
        assert found.keys() == expected.keys()
        for part, x in expected.items():
            room = ROOM * (1 + np.abs(x).max(initial=0))
            np.testing.assert_allclose(found[part], x, rtol=0, atol=room, err_msg=f"{part}, beside {other}")
