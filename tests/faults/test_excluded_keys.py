"""Row 7: what no query may attend may hold anything, and what one query may not attend does not reach that query."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._calls.dense_bias import DenseBias
from tests.every import ATTENTION
from tests.faults.calls import (
    FEW_SCHEMES,
    INF,
    NAN,
    SCHEMES,
    both,
    dtypes,
    gradients,
    operands,
    same,
    scheme,
    shapes,
    simulate_only,
    small,
)

# For n keys: what excludes some of them for every query, in every way that there is.
EXCLUSIONS = {
    "key_lengths": lambda q_len, n: {"key_lengths": np.array([n // 2, n - 1]), "offset": n - q_len},
    "bool_key_padding": lambda q_len, n: {
        "mask": np.arange(n)[None, None, None, :] < np.array([n // 2, n - 2])[:, None, None, None]
    },
    "bool_before": lambda q_len, n: {"mask": np.arange(n) >= n // 3},
    "bool_full": lambda q_len, n: {"mask": np.broadcast_to(np.arange(n) < n // 2, (2, 2, q_len, n)).copy()},
    "bool_holes": lambda q_len, n: {"mask": np.arange(n)[None, :] % 7 != 3},
    "float_key_padding": lambda q_len, n: {"mask": np.where(np.arange(n) < n // 2, 0.0, -INF)},
    "float_full": lambda q_len, n: {
        "mask": np.broadcast_to(np.where(np.arange(n) < n // 2, 0.5, -INF), (q_len, n)).copy()
    },
    "window_and_offset": lambda q_len, n: {"window": 3, "offset": 4 - q_len},
    "causal_and_offset": lambda q_len, n: {"causal": True, "offset": n // 2 - q_len},
    "window_right": lambda q_len, n: {"window": (None, 2), "offset": n // 2 - q_len},
    "window_left": lambda q_len, n: {"window": (2, None), "offset": 5},
    "very_negative_offset": lambda q_len, n: {"causal": True, "offset": -(1 << 40)},
    "very_positive_offset": lambda q_len, n: {"window": 5, "offset": 1 << 40},
}
FEW_EXCLUSIONS = ("key_lengths", "bool_holes", "float_full", "causal_and_offset", "window_left")
PLACED = ("window_and_offset", "causal_and_offset", "window_right", "window_left")
FAR = ("very_negative_offset", "very_positive_offset")


def exclusion(how, q_len, k_len, dtype):
    """Options that exclude some keys."""
    options = EXCLUSIONS[how](q_len, k_len)
    if options.get("mask") is not None and options["mask"].dtype != bool:
        options["mask"] = options["mask"].astype(dtype)
    return options


def calls(backend, how):
    """Operands, options and keys that nobody attends (B, L_k), for each precision and shape."""
    rng = np.random.default_rng(7)
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            options = exclusion(how, q_len, k_len, dtype)
            unused = (rp.logits(q, k, **options, backend="numpy") == -INF).all(axis=(1, 2))
            assert unused.any()
            yield q, k, v, options, unused


def soiled(x, unused, bad):
    """A copy with `bad` in every key that is not used."""
    out = x.copy()
    for b, keys in enumerate(unused):
        out[b, :, keys] = bad
    return out


def fits(name, how):
    """Transformer-XL's rows belong to the usual offset, and a rotation by a position of 2**40 to none.

    CoPE does not see masks and lengths, and says so: it counts the keys that these hide, unless they are NaN.
    """
    placed = how in PLACED or how in FAR
    if name == "cope" and not placed:
        return False
    return not (name in ("conformer", "wenet") and placed) and not (name in ("rotary", "alibi_of_keys") and how in FAR)


@pytest.mark.parametrize("how", EXCLUSIONS)
def test_row_07_excluded_keys_may_hold_anything(how, backend, rng):
    """The same bits whatever k and v hold there, whatever excludes them and whichever scheme is used."""
    known = FEW_SCHEMES[1:2] if small(backend) else SCHEMES if backend == "numba" else FEW_SCHEMES
    names = [name for name in known if fits(name, how)]
    for q, k, v, options, unused in calls(backend, how):
        for name in names:
            position = scheme(name, rng, q, k, v)
            clean = both(q, k, v, position=position, **options, backend=backend)
            assert np.isfinite(clean[0]).all()
            for bad in (NAN, INF, -INF) if backend == "numba" else (NAN,):
                dirty = soiled(k, unused, bad), soiled(v, unused, bad)
                same(both(q, *dirty, position=position, **options, backend=backend), clean, name)


@pytest.mark.parametrize("how", EXCLUSIONS)
@simulate_only(how=FEW_EXCLUSIONS)
def test_row_07_gradients_of_excluded_keys_are_zero(how, backend, rng):
    known = FEW_SCHEMES[1:2] if small(backend) else SCHEMES if backend == "numba" else FEW_SCHEMES
    names = [name for name in known if fits(name, how)]
    for q, k, v, options, unused in list(calls(backend, how))[-1 if small(backend) else 0 :]:
        for name in names:
            position = scheme(name, rng, q, k, v)
            clean = gradients(q, k, v, position=position, **options, backend=backend)
            assert all(np.isfinite(x).all() for x in clean.values())
            dirty = soiled(k, unused, NAN), soiled(v, unused, INF)
            found = gradients(q, *dirty, position=position, **options, backend=backend)
            same(found, clean, name)
            for x in (found["k"], found["v"]):
                assert all((x[b, :, keys] == 0).all() for b, keys in enumerate(unused)), name


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_07_no_scheme_lets_an_excluded_key_reach_others(name, variant, rng):
    """Every scheme and variant: padding of keys, however it is said, with the gradients of all arrays."""
    e = testing.example(name, variant=variant, dtype="float64", size="tiny")
    n = e.k.shape[-2] - 2
    if set(e.kwargs) & {"mask", "key_lengths"}:
        options = {name: x for name, x in e.kwargs.items() if name not in ("mask", "key_lengths")}
    else:
        options = dict(e.kwargs)
    k, v = e.k.copy(), e.v.copy()
    k[..., n:, :], v[..., n:, :] = NAN, INF
    if name == "cope":
        k[...] = e.k  # counted, because the scheme does not see the lengths
    seen = np.arange(n + 2) < n
    float_mask = np.where(seen, rng.standard_normal((e.q.shape[-2], 1)), -INF)
    usual = n + 2 - e.q.shape[-2]
    for hidden in (
        {"key_lengths": n, "offset": usual},
        {"mask": seen & np.ones((e.q.shape[-2], 1), bool)},
        {"mask": float_mask},
    ):
        for backend in rp.backend.HOST_BACKENDS:
            arguments = {"position": e.position, **hidden, **options, "backend": backend}
            same(both(e.q, k, v, **arguments), both(e.q, e.k, e.v, **arguments), backend)
            same(gradients(e.q, k, v, **arguments), gradients(e.q, e.k, e.v, **arguments), backend)
            if hidden.get("mask") is float_mask and e.kwargs.get("cap_order") != "scores":
                # Then the mask is one more bias of every pair, beside those of the scheme.
                arguments["mask_gradient"] = True
                same(gradients(e.q, k, v, **arguments), gradients(e.q, e.k, e.v, **arguments), backend)


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_07_nor_one_that_a_neighbourhood_excludes(name, variant):
    """A scheme that excludes keys does so whatever those beside it make of them."""
    e = testing.example(name, variant=variant, dtype="float64", size="tiny")
    n = min(e.q.shape[-2], e.k.shape[-2])
    q, k, v = e.q[..., :n, :], e.k[..., :n, :], e.v[..., :n, :]
    far = np.abs(np.arange(n)[:, None] - np.arange(n)) > n // 3
    position = (e.position, DenseBias(np.where(far, -INF, 0.25)))
    try:
        seen = rp.logits(q, k, position=position, backend="numpy")[..., -1] != -INF
    except rp.RelposError:
        return  # lengths or positions of its own
    if name == "cope":
        return  # a query counts keys that a mask hides
    dirty = k.copy()
    dirty[..., -1, :] = NAN
    for backend in rp.backend.HOST_BACKENDS:
        clean, found = (rp.attention(q, x, v, position=position, backend=backend) for x in (k, dirty))
        np.testing.assert_array_equal(found[~seen], clean[~seen])
        assert np.isnan(found[seen]).all()


ROWWISE = {
    "causal": lambda n: {"causal": True},
    "window": lambda n: {"window": (3, 5)},
    "bool": lambda n: {"mask": np.arange(n)[:, None] % 3 != np.arange(n) % 3},
    "float": lambda n: {"mask": np.where(np.arange(n)[:, None] % 3 != np.arange(n) % 3, 0.5, -INF)},
    "bool_column": lambda n: {"mask": np.arange(n)[:, None] % 3 != 1},
    "float_column": lambda n: {"mask": np.where(np.arange(n)[:, None] % 3 != 1, 0.5, -INF)},
    "bool_heads": lambda n: {"mask": np.array([True, False])[:, None, None]},
    "float_heads": lambda n: {"mask": np.array([0.5, -INF])[:, None, None]},
}


@pytest.mark.parametrize("how", ROWWISE)
def test_row_07_a_bad_key_does_not_reach_queries_that_exclude_it(how, backend, rng):
    """The same key is attended by some queries and excluded for others, which must not change."""
    n = 11 if small(backend) else 70
    for dtype in dtypes(backend):
        q, k, v = operands(rng, backend, dtype, n, n)
        options = ROWWISE[how](n)
        if "mask" in options and options["mask"].dtype != bool:
            options["mask"] = options["mask"].astype(dtype)
        excluded = rp.logits(q, k, **options, backend="numpy")[..., n // 2] == -INF
        assert excluded.any()
        assert not excluded.all()
        for name in ("t5",) if small(backend) else FEW_SCHEMES:
            position = scheme(name, rng, q, k, v)
            clean = both(q, k, v, position=position, **options, backend=backend)
            # One gradient for each kind of exclusion is enough for the simulator.
            both_ways = not small(backend) or how in ("causal", "bool", "float")
            clean_q = gradients(q, k, v, position=position, **options, backend=backend)["q"] if both_ways else None
            for bad in (NAN, INF):
                dirty = k.copy(), v.copy()
                for x in dirty:
                    x[..., n // 2, :] = bad
                found = both(q, *dirty, position=position, **options, backend=backend)
                atol = 64 * np.finfo(dtype).eps
                for a, b in zip(clean, found, strict=True):
                    np.testing.assert_allclose(b[excluded], a[excluded], rtol=0, atol=atol, err_msg=name)
                if np.isnan(bad):
                    assert np.isnan(found[0][~excluded]).all(), name
                if np.isnan(bad) and both_ways:
                    slope = gradients(q, *dirty, position=position, **options, backend=backend)["q"]
                    np.testing.assert_allclose(slope[excluded], clean_q[excluded], rtol=0, atol=16 * atol, err_msg=name)


@pytest.mark.parametrize("how", ["key_lengths", "causal", "window"])
@simulate_only(how=["window"])
def test_row_07_a_mask_may_hold_anything_where_a_key_is_excluded_anyway(how, backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            options = {
                "key_lengths": {"key_lengths": k_len - 3},
                "causal": {"causal": True, "offset": k_len // 2},
                "window": {"window": (3, 0), "offset": k_len // 2},
            }[how]
            mask = rng.standard_normal((q_len, k_len)).astype(dtype)
            clean = both(q, k, v, mask=mask, **options, backend=backend)
            slopes = gradients(q, k, v, mask=mask, **options, backend=backend)
            out = (rp.logits(q, k, **options, backend="numpy") == -INF)[0, 0]
            assert out.any()
            for bad in (NAN, INF):
                mask[out] = bad
                same(both(q, k, v, mask=mask, **options, backend=backend), clean)
            same(gradients(q, k, v, mask=mask, **options, backend=backend), slopes)


# Of a causal call with as many keys as queries: entries that later keys alone would read.
LATER = {
    "t5": lambda n, x: rp.T5(x(32, 2)),
    "shaw": lambda n, x: rp.Shaw(x(9, 4)),
    "grid": lambda n, x: rp.WindowBias(x(2 * n - 1, 2), (n,)),
    "conformer": lambda n, x: rp.TransformerXL(x(2, 4), x(2, 4), x(2 * n - 1, 2, 4), variant="conformer"),
}


@pytest.mark.parametrize("kind", LATER)
def test_row_07_rows_of_tables_that_belong_to_excluded_keys_may_hold_anything(kind, backend, rng):
    n = 9 if small(backend) else 70
    for dtype in dtypes(backend):
        q, k, v = (rng.standard_normal((1, 2, n, d)).astype(dtype) for d in (4, 4, 16))
        drawn = []

        def draw(*shape, drawn=drawn, dtype=dtype):
            drawn.append(rng.standard_normal(shape).astype(dtype))
            return drawn[-1]

        position = LATER[kind](n, draw)
        table = drawn[-1]
        clean = both(q, k, v, position=position, causal=True, backend=backend)
        # A row counts if it has a gradient of the sum of all outputs and of the log-sum-exp.
        ones = np.ones(q.shape[:-1])
        given = rng.standard_normal((*q.shape[:-1], 16))
        wide = LATER[kind](n, lambda *shape, left=list(drawn): left.pop(0).astype(np.float64))
        used = gradients(
            *(x.astype(np.float64) for x in (q, k, v)),
            position=wide,
            grad_out=given,
            grad_lse=ones,
            causal=True,
            backend="numpy",
        )
        name = {"shaw": "key_table", "conformer": "rows"}.get(kind, "table")
        unused = (used[f"position.{name}"] == 0).reshape(len(table), -1).all(axis=1)
        assert unused.any()
        table[unused] = NAN
        same(both(q, k, v, position=position, causal=True, backend=backend), clean, kind)
