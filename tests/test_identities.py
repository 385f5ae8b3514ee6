"""Identities that hold for every scheme of the register, on every backend.

Nothing is listed here. What a scheme's arrays have to do with the sizes of a call is found by building it for others,
when a test asks for it; a scheme that an identity does not speak of is skipped.
"""

from functools import cache
from operator import attrgetter

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls.lowering import each_lowered
from relpos_np._contract import check
from relpos_np.errors import RelposError
from relpos_np.testing.arguments import arguments
from tests import compare
from tests.every import remade
from tests.strategies import EVERY, KINDS, Case

SIZES = {"batch": (2,), "kv_heads": 2, "group": 2, "q_len": 9, "k_len": 9}
LARGER = {"batch": (3,), "kv_heads": 3, "q_len": 25, "k_len": 25}
BACKENDS = rp.backend.HOST_BACKENDS


def case_of(position, **sizes):
    given = {**SIZES, **sizes}
    return Case(11, (given["batch"],) * 3, **given, depth=6, v_dim=5, positions=(position,))


def made(position, **sizes):
    """Operands and the scheme."""
    case = case_of(position, **sizes)
    return *case.operands(np.float64), case.schemes(np.float64)[0]


def close(found, expected, atol=1e-12):
    for x, y in zip(found, expected, strict=True):
        compare.close(x, y, atol, rtol=1e-12)


def both(*operands, **options):
    return rp.attention(*operands, **options, return_lse=True)


# ---------------------------------------------------------------------------------------------- parts of a scheme


@cache
def axes_of(name):
    """By name of an array, the sizes of a call that each of its axes follows, and whether the rest stays as it is."""
    here = arguments(case_of(EVERY[name]).schemes(np.float64)[0])
    found, same = {array: {} for array, x in here.items() if isinstance(x, np.ndarray)}, True
    for size, value in LARGER.items():
        there = arguments(case_of(EVERY[name], **{size: value}).schemes(np.float64)[0])
        same &= all(repr(x) == repr(there[key]) for key, x in here.items() if key not in found)
        for array, axes in found.items():
            for axis, (n, other) in enumerate(zip(here[array].shape, there[array].shape, strict=True)):
                if n != other:
                    same &= axis not in axes and size not in axes.values()
                    axes[axis] = size
    return found, same


def has_parts(name):
    """Not on a grid, nor with a row per distance, of which a part of a call needs some from the middle."""
    axes, same = axes_of(name)
    return same and "rows" not in axes


def parts_of(name):
    """The axes of a scheme that can be made for a part of a call."""
    if not has_parts(name):
        pytest.skip("cannot be cut")
    return axes_of(name)[0]


def cut(scheme, axes, heads=None, **chosen):
    """The scheme for a part of a call: for some of its batch, heads, queries or keys."""

    def part(name, x):
        for axis, size in axes[name].items():
            where = chosen.get(size, slice(None))
            if size == "kv_heads":
                where = slice(None) if heads is None else heads[0] if x.shape[axis] == 2 else heads[1]
            x = x[(slice(None),) * axis + (where,)]
        return x

    given = arguments(scheme)
    return type(scheme)(**{name: part(name, x) if name in axes else x for name, x in given.items()})


@pytest.mark.parametrize("name", EVERY)
def test_heads_are_a_set(name):
    """Their order has no effect on what each of them does."""
    q, k, v, scheme = made(EVERY[name])
    given = arguments(scheme)
    within = any(isinstance(x, rp.Scheme) for x in given.values())
    if "head" in given or within or ("heads" in given and given.get("slopes") is None):
        pytest.skip("computes something from a head's index, or is around another scheme")
    for backend in BACKENDS:
        out, lse = both(q, k, v, position=scheme, causal=True, backend=backend)
        order = [1, 0], [3, 2, 1, 0]
        moved = cut(scheme, axes_of(name)[0], heads=order)
        operands = q[:, order[1]], k[:, order[0]], v[:, order[0]]
        close(both(*operands, position=moved, causal=True, backend=backend), (out[:, order[1]], lse[:, order[1]]))


@pytest.mark.parametrize("name", EVERY)
def test_decoding_token_by_token_is_the_full_pass(name):
    q, k, v, scheme = made(EVERY[name])
    if "past" in arguments(scheme):
        pytest.skip("needs what earlier queries said")
    for backend in BACKENDS:
        out, lse = both(q, k, v, position=scheme, causal=True, backend=backend)
        for t in range(9):
            new, past = slice(t, t + 1), slice(t + 1)
            step = cut(scheme, parts_of(name), q_len=new, k_len=past)
            operands = q[..., new, :], k[..., past, :], v[..., past, :]
            close(both(*operands, position=step, causal=True, backend=backend), (out[..., new, :], lse[..., new]))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", ["batch", "q_len", "k_len"])
def test_empty_calls(name, size):
    """Nothing to attend to, nobody who attends, and nobody at all: zeros, also as gradients."""
    q, k, v, scheme = made(EVERY[name])
    scheme = cut(scheme, parts_of(name), **{size: slice(0)})
    if size == "batch":
        q, k, v = q[:0], k[:0], v[:0]
    elif size == "q_len":
        q = q[..., :0, :]
    else:
        k, v = k[..., :0, :], v[..., :0, :]
    # Queries with positions in the text of their keys have none if there are no keys.
    offset = 0 if size == "q_len" else None
    try:
        scheme.check(check.problem(q, k, v, offset=offset)[0].site)
    except RelposError:
        assert size == "k_len"
        return
    for backend in BACKENDS:
        out, lse = both(q, k, v, position=scheme, offset=offset, backend=backend)
        assert out.shape == (*q.shape[:-1], 5)
        assert not out.any()
        assert (lse == -np.inf).all()
        grads = rp.attention_vjp(
            q, k, v, position=scheme, offset=offset, grad_out=out, grad_lse=np.zeros_like(lse), backend=backend
        )
        for x, grad in ((q, grads.q), (k, grads.k), (v, grads.v)):
            assert grad.shape == x.shape
            assert not grad.any()
        assert not any(x.any() for x in grads.position.values())


@pytest.mark.parametrize("name", [name for name in EVERY if made(EVERY[name])[-1].relative])
def test_distances_alone_decide(name):
    """A piece of both texts at its offset, whatever precedes and follows it."""
    q, k, v, scheme = made(EVERY[name])
    mask = (np.arange(9) >= 2) & (np.arange(9) < 8)
    for backend in BACKENDS:
        whole = both(q, k, v, position=scheme, offset=4, mask=mask, backend=backend)
        part = cut(scheme, parts_of(name), q_len=slice(3, 8))
        found = both(q[..., 3:8, :], k[..., 2:8, :], v[..., 2:8, :], position=part, offset=4 + 3 - 2, backend=backend)
        close(found, (whole[0][..., 3:8, :], whole[1][..., 3:8]))


def test_most_schemes_are_not_skipped():
    """So that the tests mean something; whoever adds a scheme that is skipped need not add it here."""
    cut, alone, added = ({EVERY[n].name for n in EVERY if there(n)} for there in (has_parts, silent, adds_only))
    assert {"shaw", "t5", "rotary", "xpos", "layout", "wavlm", "fire", "graph", "cope"} <= cut
    assert {"shaw", "t5", "fire", "window", "tisa"} <= alone
    assert {"t5", "alibi", "kerple", "fire", "window", "beit"} <= added


# ---------------------------------------------------------------------------------------------- what is added


def silent(name):
    """The scheme with zeros, or None where it has no arrays, must not have zeros, or then still does something."""
    scheme = case_of(EVERY[name]).schemes(np.float64)[0]
    if scheme.content or isinstance(scheme, rp.NeighborhoodBias):
        return None
    if name in ("fox", "fox, chosen", "fox cable", "fox cable, chosen", "dape") or "past" in arguments(scheme):
        return None  # a gate of 0 is half open, ALiBi has slopes of its own, queries vote whatever was said before
    try:
        zero = remade(scheme, lambda _, x: np.zeros_like(x) if x.ndim else x)
    except RelposError:
        return None
    return zero if any(isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in arguments(scheme).values()) else None


@pytest.mark.parametrize("name", EVERY)
def test_zeros_are_plain_attention(name):
    """And other numbers are not."""
    q, k, v, scheme = made(EVERY[name])
    zero = silent(name)
    if zero is None:
        pytest.skip("has no zeros, or does something then")
    for backend in BACKENDS:
        plain = both(q, k, v, backend=backend)
        close(both(q, k, v, position=zero, backend=backend), plain)
        found = both(q, k, v, position=scheme, backend=backend)
        assert max(np.abs(x - y).max() for x, y in zip(found, plain, strict=True)) > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_a_constant_per_row_changes_the_log_sum_exp_alone(name):
    q, k, v, scheme = made(EVERY[name])
    row = np.random.default_rng(1).standard_normal((q.shape[-2], 1)) * 3
    for backend in BACKENDS:
        out, lse = both(q, k, v, position=scheme, backend=backend)
        close(both(q, k, v, position=scheme, mask=row, backend=backend), (out, lse + row[:, 0]))


def adds_only(name):
    """Whether the scheme is tables and biases alone, which neither read queries and keys nor change values."""
    q, k, v, scheme = made(EVERY[name])
    terms, other = (each_lowered((scheme,), check.problem(*x, v)[0])[0] for x in ((q, k), (0 * q, 0 * k)))
    reads = scheme.content or terms.queries or terms.keys or terms.values
    same = all(np.array_equal(x, y) for x, y in zip(terms.biases, other.biases, strict=True))
    return not reads and same and bool(terms.tables + terms.biases)


@pytest.mark.parametrize("name", EVERY)
def test_a_bias_is_a_float_mask(name):
    """Whatever multiplies the products."""
    if not adds_only(name):
        pytest.skip("is no bias")
    q, k, v, scheme = made(EVERY[name])
    for backend in BACKENDS:
        for scale in (None, 0.0, -2.5):
            bias = rp.logits(0 * q, 0 * k, position=scheme, scale=scale, backend="numpy")
            expected = both(q, k, v, mask=bias, scale=scale, backend=backend)
            close(both(q, k, v, position=scheme, scale=scale, backend=backend), expected)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("other", ["t5", "shaw zero"])
def test_two_schemes_add_up(name, other):
    """In either order, and twice the same unless it changes the content."""
    q, k, v, scheme = made(EVERY[name])
    second = case_of(KINDS[other], q_len=q.shape[-2], k_len=k.shape[-2]).schemes(np.float64)[0]
    pairs = [(scheme, second), (second, scheme)] + [(scheme, scheme)] * (not changes_query(name))
    for backend in BACKENDS:
        alone = [rp.logits(q, k, position=one, backend=backend) for one in (None, scheme, second)]
        for pair in pairs:
            expected = alone[1] + alone[1 if pair[1] is scheme and pair[0] is scheme else 2] - alone[0]
            close([rp.logits(q, k, position=pair, backend=backend)], [expected])
        if scheme.turns_values and type(second).outputs is not rp.Scheme.outputs:
            for pair in pairs:
                with pytest.raises(rp.RelposValueError, match="position"):
                    rp.attention(q, k, v, position=pair, backend=backend)
            continue
        close(*(both(q, k, v, position=pair, backend=backend) for pair in pairs[:2]))


def changes_query(name):
    """Whether the terms have another query or key: two such schemes do not go together."""
    q, k, v, scheme = made(EVERY[name])
    (terms,) = each_lowered((scheme,), check.problem(q, k, v)[0])
    return terms.query is not None or terms.key is not None


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", KINDS)
def test_a_grid_has_as_many_tokens_as_the_call(name):
    q, k, v, scheme = made(KINDS[name])
    if not {"grid", "extent"} & set(arguments(scheme)):
        pytest.skip("has no grid")
    with pytest.raises(rp.RelposError):
        rp.attention(q[..., 1:, :], k, v, position=scheme)
    with pytest.raises(rp.RelposError):
        rp.attention(q, k[..., 1:, :], v[..., 1:, :], position=scheme)


@pytest.mark.parametrize("name", EVERY)
def test_arrays_have_as_many_heads_as_the_call(name):
    q, k, v, scheme = made(EVERY[name])
    if not any("kv_heads" in axes.values() for axes in axes_of(name)[0].values()):
        pytest.skip("is the same for any number of heads")
    with pytest.raises(rp.RelposValueError, match="heads"):
        rp.attention(*(np.repeat(x, 3, axis=1) for x in (q, k, v)), position=scheme)


@pytest.mark.parametrize("name", EVERY)
def test_every_trained_array_has_a_gradient(name):
    """In its shape and dtype; where a query or a key stands is not trained."""
    q, k, v, scheme = made(EVERY[name])
    found = rp.attention_vjp(q, k, v, position=scheme, grad_out=rp.attention(q, k, v, position=scheme)).position
    floats = set()
    remade(scheme, lambda n, x: floats.add(n) or x)
    assert set(found) == floats - {"positions", "key_positions", "boxes"}
    for n, grad in found.items():
        assert (grad.shape, grad.dtype) == (attrgetter(n)(scheme).shape, attrgetter(n)(scheme).dtype)
