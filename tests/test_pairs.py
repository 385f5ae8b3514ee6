"""Any two schemes in one call, with grouped heads and a mask of every pair: each array gets its own gradient."""

import numpy as np
import pytest

import relpos_np as rp
from tests.every import ATTENTION
from tests.strategies import Case, Position

# A few sums of some hundred products of numbers of about 1, in float64.
ROOM = 1e-12


def gradients(found):
    arrays = {name: getattr(found, name) for name in ("q", "k", "v", "mask")}
    each = enumerate(found.position)
    return arrays | {f"{at}.{name}": x for at, own in each for name, x in own.items()}


@pytest.mark.parametrize("first", range(len(ATTENTION)), ids=lambda n: " ".join(filter(None, ATTENTION[n])))
def test_gradients_beside_any_other_scheme(first):
    """What shares sums, buffers or a way to cut the call into parts must not mix up the parts of one."""
    rng, (name, variant) = np.random.default_rng(3), ATTENTION[first]
    for other in ATTENTION[first:]:  # in which order they stand, `test_identities.py` exchanges
        try:
            case = Case(
                5, ((2,), (1,), (2,)), (2,), 1, 2, 12, 12, 12, 5, positions=(Position(name, variant), Position(*other))
            )
            operands, call = case.operands(np.float64), case.options(np.float64)
            rows = rp.attention(*operands, **call, backend="numpy").shape[:-1]
        except rp.RelposError:
            # The two have no lengths in common, or both state the queries.
            continue
        call |= {"mask": rng.standard_normal((*rows, case.k_len)), "mask_gradient": True}
        call |= {"grad_out": rng.standard_normal((*rows, case.v_dim)), "grad_lse": rng.standard_normal(rows)}
        expected = gradients(rp.attention_vjp(*operands, **call, backend="numpy"))
        for backend in ("numba", "terms"):
            found = gradients(rp.attention_vjp(*operands, **call, backend=backend))
            assert found.keys() == expected.keys()
            for part, x in expected.items():
                room = ROOM * (1 + np.abs(x).max(initial=0))
                np.testing.assert_allclose(found[part], x, rtol=0, atol=room, err_msg=f"{part}, {other}, {backend}")
