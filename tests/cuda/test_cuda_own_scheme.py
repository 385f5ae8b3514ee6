"""A user's class on the device: operands of the host, and arrays that are there already."""

import numpy as np
import pytest

import relpos_np as rp
from tests.cuda.doubles import There
from tests.test_own_scheme import Everything, made
from tests.test_schemes_rotary_values import Scaled


class Shifted(Everything):
    """Its queries are sums, which a device makes itself."""

    reads_operand_values = True

    def scores(self, q, k, site):
        return super().scores(q + q, k, site)

    def lower(self, q, k, site):
        return super().lower(q + q, k, site)

    def lift(self, q, k, site, grad):
        found = super().lift(q, k, site, grad)
        found.q = found.q + found.q
        return found


def turning(rng, **options):
    """Values that turn, with frequencies of each head that have a gradient."""
    frequencies = rng.standard_normal((1, 2, 2))
    places = {"positions": rng.standard_normal((2, 1, 5)), "key_positions": rng.standard_normal((1, 7))}
    return rp.Rotary(frequencies=frequencies, values=True, magnitude=1.25, **places, **options)


TURNING = {
    "first channels": turning,
    "others": lambda rng: turning(rng, channels=(1, 5), layout="interleaved"),
    "a class of one's own": lambda rng: Scaled(rng.standard_normal((7, 2)), rng.standard_normal((5, 2))),
}


@pytest.mark.parametrize("cls", [Everything, Shifted])
def test_own_scheme(cls, rng):
    assert_as_on_the_host(made(np.random.default_rng(0), cls), rng)


@pytest.mark.parametrize("name", TURNING)
def test_values_that_turn(name, rng):
    assert_as_on_the_host(TURNING[name](np.random.default_rng(0)), rng)


def assert_as_on_the_host(position, rng):
    q, k, v = (rng.standard_normal((2, h, n, d)).astype(np.float32) for h, n, d in ((4, 5, 6), (2, 7, 6), (2, 7, 5)))
    wanted = rp.attention(q, k, v, position=position, backend="numpy")
    grads = rp.attention_vjp(q, k, v, grad_out=wanted, position=position, backend="numpy")
    for given in ((q, k, v), tuple(map(There, (q, k, v)))):
        out = rp.attention(*given, position=position, backend="cuda")
        grad_out = wanted if given[0] is q else There(wanted)
        found = rp.attention_vjp(*given, grad_out=grad_out, position=position, backend="cuda")
        host = [x if isinstance(x, np.ndarray) else x.copy_to_host() for x in (out, found.q, found.k, found.v)]
        for x, y in zip(host, (wanted, grads.q, grads.k, grads.v), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
        for name, x in grads.position.items():
            np.testing.assert_allclose(found.position[name], x, rtol=0, atol=5e-5)
