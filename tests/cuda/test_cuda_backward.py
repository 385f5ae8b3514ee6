"""The CUDA backend's gradients against the formulas' and against the dense evaluator of terms."""

from dataclasses import replace

import numpy as np
import pytest
from numba import cuda

import relpos_np as rp
from relpos_np import testing
from relpos_np._contract import check
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz
from relpos_np._dense import backward as gradient
from relpos_np._dense import from_terms
from relpos_np.kernels import _cuda
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from relpos_np.testing.arguments import rebuilt
from tests.cuda.terms import every_kind, in_float64, values
from tests.every import ATTENTION

# In the simulator NumPy warns of the infinities and NaN that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

# Between them they have terms of every kind.
SINGLE = ("plain", "shaw", "t5", "transformer_xl", "rotary", "window", "deberta", "kerple")
EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float32", "float64")}


def arrays(grads):
    """Every gradient by its name."""
    schemes = grads.position if isinstance(grads.position, tuple) else (grads.position,)
    found = {name: getattr(grads, name) for name in "qkv"}
    return found | {f"{name} of scheme {at}": x for at, scheme in enumerate(schemes) for name, x in scheme.items()}


def assert_close(found, expected, eps, length):
    """Sums of products have errors of some eps, more with their length, relative to the largest one."""
    found, expected = (x if isinstance(x, dict) else arrays(x) for x in (found, expected))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        size = np.abs(x).max(initial=0)
        np.testing.assert_allclose(np.asarray(found[name]), x, rtol=0, atol=eps * length * (size + 1), err_msg=name)


def first_item(one):
    """An example's first batch item, which takes half the time; all of it where positions belong to batch items."""
    kwargs, operands = dict(one.kwargs), tuple(x[:1] for x in (one.q, one.k, one.v))
    for name in {"mask", "key_lengths"} & set(kwargs):
        kwargs[name] = kwargs[name][:1]
    try:
        one.position.check(check.problem(*operands, **kwargs)[0].site)
    except rp.RelposError:
        return (one.q, one.k, one.v), one.kwargs
    return operands, kwargs


@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    [(n, v, "float64") for n, v in ATTENTION] + [(n, None, "float32") for n in SINGLE],
)
def test_gradients_of_every_scheme(name, variant, dtype, rng):
    one = testing.example(name, dtype=dtype, variant=variant, size="tiny")
    operands, options = first_item(one)
    shape = (*operands[0].shape[:-1], operands[2].shape[-1])
    given = {"grad_out": rng.standard_normal(shape), "grad_lse": rng.standard_normal(shape[:-1])}
    given = {n: x.astype(dtype) for n, x in given.items()}
    far = {n: cuda.to_device(x) for n, x in given.items()}
    # Operands stay on the device, and gradients of them come back there; those of a scheme's arrays on the host.
    found = rp.attention_vjp(*map(cuda.to_device, operands), position=one.position, backend="cuda", **far, **options)
    assert {x.dtype.name for x in arrays(found).values()} == {dtype}
    assert {type(getattr(found, n)) for n in "qkv"} == {DeviceArray}
    assert {type(x) for x in found.position.values()} <= {np.ndarray}
    wide = [x.astype(np.float64) for x in operands], {n: x.astype(np.float64) for n, x in given.items()}
    position = rebuilt(one.position, np.float64)
    expected = rp.attention_vjp(*wide[0], position=position, backend="numpy", **wide[1], **options)
    # 17 keys, 12 channels.
    assert_close(found, expected, EPS[dtype], 20)


def of_terms(grads, grad_v):
    """Every gradient by its place."""
    found = {"query": grads.query, "key": grads.key, "v": grad_v}
    for slot in ("tables", "queries", "keys", "values"):
        for at, term in enumerate(getattr(grads, slot)):
            found |= {f"{slot} {at} {n}": x for n, x in enumerate(values(term)) if isinstance(x, np.ndarray)}
    return found | {f"biases {at}": x for at, x in enumerate(grads.biases)}


def check_terms(operands, terms, given, options, length):
    """Compare with the dense evaluator in float64; return what was found."""
    dtype = operands[0].dtype.name
    problem, _, _ = check.problem(*operands, **options())
    found = of_terms(*_cuda.backward(problem, terms, *given))
    assert {x.dtype.name for x in found.values()} == {dtype}
    wide, _, _ = check.problem(*(x.astype(np.float64) for x in operands), **options())
    terms, given = in_float64(terms), [x.astype(np.float64) for x in given]
    expected = of_terms(*gradient.backward(wide, terms, from_terms.scores(wide, terms), *given))
    assert_close(found, expected, EPS[dtype], length)
    return found


@pytest.mark.parametrize(
    ("kind", "batch", "heads", "kv_heads", "q_len", "k_len", "dims", "dtype"),
    [
        ("distances", (), 1, 1, 1, 1, (1, 1), "float64"),
        ("distances", (2,), 2, 1, 7, 33, (17, 5), "float32"),
        ("per batch item", (2,), 2, 1, 7, 33, (17, 5), "float64"),
        ("pairs", (1, 2), 2, 2, 33, 7, (3, 5), "float64"),
        ("per batch item", (1,), 1, 1, 1, 65, (8, 4), "float64"),
        ("distances", (), 1, 1, 65, 33, (5, 20), "float32"),
    ],
)
def test_gradients_of_every_kind_of_term(kind, batch, heads, kv_heads, q_len, k_len, dims, dtype):
    rng = np.random.default_rng(q_len + k_len)
    made = every_kind(rng, batch, heads, kv_heads, q_len, k_len, dims, kind, dtype)
    # Scores are sums of fewer than 40 products and reach 20; gradients are sums over up to 65 pairs.
    check_terms(*made, lambda: {"causal": False, "offset": 2}, 65)


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "k_len", "options"),
    [((2,), 2, 7, 33, {}), ((), 1, 65, 33, {"causal": True, "dropout": 0.3}), ((1,), 1, 34, 40, {"key_lengths": 20})],
)
def test_gradients_of_products_with_relative_positions(batch, heads, q_len, k_len, options, monkeypatch):
    """Those that are made tile by tile, since there are as many rows as positions."""
    from relpos_np.kernels._cuda.plan import forward

    monkeypatch.setattr(forward, "FEW_ROWS", 4)
    rng = np.random.default_rng(q_len)
    operands, terms, given = every_kind(rng, batch, heads, 1, q_len, k_len, (5, 3), "distances", "float64")
    span = q_len + k_len - 1
    whole = Toeplitz(np.arange(span, dtype=np.int32)[::-1], span)
    terms.queries = (
        *terms.queries,
        QueryTerm(rng.standard_normal((*batch, heads, q_len, 40)), rng.standard_normal((heads, span, 40)), whole),
    )

    def kwargs():
        return options | ({"rng": np.random.default_rng(2)} if "dropout" in options else {})

    check_terms(operands, terms, given, kwargs, 100)


def masks(batch, q_len, k_len):
    """A mask of each kind, one of which leaves a query without keys."""
    rng = np.random.default_rng(7)
    there = rng.random((*batch, 1, q_len, k_len)) < 0.6
    there[..., 2, :] = False
    return {
        "bool": {"mask": there},
        "float": {"mask": np.where(there, rng.standard_normal(there.shape), -np.inf)},
        "keys": {"mask": there[..., :1, :], "causal": True},
        "window": {"window": (3, 1)},
        "causal window": {"causal": True, "window": 4, "offset": 5},
        "beyond the keys": {"window": (2, 0), "offset": 40},
        "before the keys": {"causal": True, "offset": -4},
        "lengths": {"key_lengths": np.array([0, 20])[: batch[0]], "scale": 0.3},
    }


@pytest.mark.parametrize("name", masks((2,), 7, 35))
def test_gradients_under_masks_bands_lengths_and_dropout(name):
    """All kinds of terms at once; half of the cases with dropout too."""
    rng = np.random.default_rng(3)
    batch, (q_len, k_len) = (2,), (7, 35) if name != "causal window" else (35, 40)
    made = every_kind(rng, batch, 1, 1, q_len, k_len, (5, 3), "pairs", "float64")
    made[1].queries, made[1].values = made[1].queries[:1], made[1].values[:1]
    options = masks(batch, q_len, k_len)[name]

    def given():
        drops = {"dropout": 0.4, "rng": np.random.default_rng(2)} if name in ("float", "keys", "causal window") else {}
        return options | drops

    check_terms(*made, given, 65)


def test_gradients_where_what_is_excluded_holds_anything(rng):
    (q, k, v), terms, given = every_kind(rng, (), 1, 1, 5, 36, (5, 3), "pairs", "float64")
    last = np.arange(36) >= 30
    found = []
    for value, other in ((0.0, 0.0), (np.nan, np.inf)):
        q[:, 2], given[0][:, 2], given[1][:, 2] = other, value, value
        for term in terms.queries:
            term.query[..., 2, :] = value
        for x in (k, *(term.key for term in terms.keys)):
            x[..., last, :] = value
        v[..., last, :] = other
        mask = ~(last | (np.arange(5)[:, None] == 2))
        problem, _, _ = check.problem(q, k, v, mask=mask)
        found.append(of_terms(*_cuda.backward(problem, terms, *given)))
        problem, _, _ = check.problem(q[:, :2], k, v, key_lengths=30)
        few = Terms(keys=tuple(KeyTerm(t.key, t.weights, Toeplitz(np.arange(37) % 4, 4)) for t in terms.keys[:1]))
        found.append(of_terms(*_cuda.backward(problem, few, given[0][:, :2], None)))
    for clean, dirty in zip(found[:2], found[2:], strict=True):
        for name, x in clean.items():
            np.testing.assert_array_equal(dirty[name], x, err_msg=name)
        assert not dirty["v"][:, last].any()
        assert not dirty["key"][:, last].any()
    assert not found[2]["query"][:, 2].any()


def test_bad_numbers_reach_gradients_of_those_that_attend_them(rng):
    q, k, v = (rng.standard_normal((1, 9, 4)) for _ in range(3))
    k[0, 7, 2], v[0, 5, 0] = np.nan, np.nan
    found, expected = (rp.attention_vjp(q, k, v, grad_out=q, causal=True, backend=b) for b in ("cuda", "numpy"))
    for name in "qkv":
        np.testing.assert_array_equal(np.isnan(getattr(found, name)), np.isnan(getattr(expected, name)), err_msg=name)


@pytest.mark.parametrize("dim", [5, 150], ids=["a block", "several blocks share a head"])
def test_gradients_repeat_bit_by_bit_in_any_number_of_pieces(dim, rng, monkeypatch):
    from relpos_np.kernels._cuda.plan import backward as backplan
    from relpos_np.kernels._cuda.plan import forward

    operands, terms, given = every_kind(rng, (), 2, 1, 33, 35, (dim, 3), "pairs", "float32")
    along = TableTerm(np.float32(rng.standard_normal((2, 4))), Toeplitz(np.arange(67, dtype=np.int32) % 4, 4))
    every = Toeplitz(np.arange(67, dtype=np.int32), 67)
    skewed = QueryTerm(terms.queries[0].query, np.float32(rng.standard_normal((1, 67, 4))), every)
    queries = (skewed, terms.queries[0])
    monkeypatch.setattr(forward, "FEW_ROWS", 60)
    terms = replace(terms, tables=(*terms.tables, along), queries=queries, keys=(), values=terms.values[:1])
    problem, _, _ = check.problem(*operands)
    launches, launch = [], backplan.launch

    def counted(kernel, *rest):
        launches.append(kernel)
        launch(kernel, *rest)

    monkeypatch.setattr(backplan, "launch", counted)
    found = [of_terms(*_cuda.backward(problem, terms, *given))]
    once = len(launches)
    monkeypatch.setattr(backplan, "PRIVATE_BYTES", 1)
    found.append(of_terms(*_cuda.backward(problem, terms, *given)))
    # Four tiles of queries: three more launches of the kernel and of those that add up what is of three kinds.
    assert len(launches) == 2 * once + 12
    for name, x in found[0].items():
        np.testing.assert_array_equal(found[1][name], x, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_half_precision(dtype, rng):
    """Stored numbers are read as they are; gradients are those of float32 arithmetic."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 7, 20), (1, 9, 20), (1, 9, 3)))
    table, grad_out = rng.standard_normal((8, 2)).astype(np.float32), rng.standard_normal((2, 7, 3))
    found = rp.attention_vjp(q, k, v, grad_out=grad_out.astype(dtype), position=rp.T5(table), backend="cuda")
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = rp.attention_vjp(
        *wide, grad_out=grad_out.astype(dtype).astype(np.float64), position=rp.T5(table.astype(np.float64))
    )
    for name in "qkv":
        x = getattr(expected, name)
        assert getattr(found, name).dtype == q.dtype
        # Rounded once, at the end.
        eps = float(testing.compare.EPS[q.dtype.name])
        np.testing.assert_allclose(getattr(found, name).astype(np.float64), x, rtol=eps, atol=40 * EPS["float32"])
    np.testing.assert_allclose(found.position["table"], expected.position["table"], atol=100 * EPS["float32"])


def test_gradients_of_many_channels(rng):
    """Several blocks share a head's channels, and fragments have the largest size."""
    for dim, v_dim in ((150, 7), (9, 140)):
        q, k, v = (rng.standard_normal((1, n, d)).astype(np.float32) for n, d in ((5, dim), (34, dim), (34, v_dim)))
        position = rp.Shaw(*(rng.standard_normal((5, d)).astype(np.float32) for d in (dim, v_dim)))
        grad_out = rng.standard_normal((1, 5, v_dim)).astype(np.float32)
        wide = rp.Shaw(*(x.astype(np.float64) for x in (position.key_table, position.value_table)))
        found = rp.attention_vjp(q, k, v, grad_out=grad_out, position=position, backend="cuda")
        expected = rp.attention_vjp(
            *(x.astype(np.float64) for x in (q, k, v)), grad_out=grad_out.astype(np.float64), position=wide
        )
        assert_close(found, expected, EPS["float32"], dim + v_dim)


def test_the_device_s_own_sizes(rng, monkeypatch):
    """In the simulator tiles are smaller than on a device: once with those of a device, ragged at every edge."""
    from relpos_np.kernels._cuda.backward_pass import sizes

    monkeypatch.setattr(sizes, "simulated", lambda: False)
    assert sizes.query_side(np.dtype(np.float32), 12)[0].rows == 64
    made = every_kind(rng, (), 1, 1, 66, 67, (12, 9), "pairs", "float32")
    check_terms(*made, lambda: {"causal": True}, 130)


@pytest.mark.parametrize(("batch", "q_len", "k_len", "v_dim"), [(2, 0, 3, 5), (2, 3, 0, 5), (0, 3, 3, 5), (1, 3, 4, 0)])
def test_gradients_of_empty_axes(batch, q_len, k_len, v_dim, rng):
    shapes = ((batch, 2, q_len, 5), (batch, 1, k_len, 5), (batch, 1, k_len, v_dim))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    given = {
        "grad_out": np.zeros((batch, 2, q_len, v_dim)),
        "grad_lse": rng.standard_normal((batch, 2, q_len)),
        "position": (
            rp.ALiBi(np.array([0.5, 0.1])),
            *([rp.Shaw(*rng.standard_normal((2, 5, 5)))] if v_dim == 5 else []),
        ),
    }
    found, expected = (rp.attention_vjp(q, k, v, backend=b, **given) for b in ("cuda", "numpy"))
    assert_close(found, expected, EPS["float64"], 20)


def test_gradients_of_broadcast_operands(rng):
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 1, 2, 4, 5), (3, 1, 6, 5), (6, 3)))
    v = np.broadcast_to(v, (2, 3, 1, 6, 3))
    given = {"grad_out": rng.standard_normal((2, 3, 2, 4, 3)), "position": rp.Rotary(4)}
    found, expected = (rp.attention_vjp(q, k, v, backend=b, **given) for b in ("cuda", "numpy"))
    assert_close(found, expected, EPS["float64"], 40)


def test_gradients_of_heads_that_share_a_key_on_the_device(rng):
    """Sums over a group's heads are made there, and are those of the host bit by bit."""
    q, k, v, grad_out = (
        rng.standard_normal(shape) for shape in ((2, 4, 3, 5), (2, 2, 7, 5), (2, 2, 7, 3), (2, 4, 3, 3))
    )
    far = [cuda.to_device(x) for x in (q, k, v, grad_out)]
    for position in (rp.ALiBi(), rp.DeBERTa(*rng.standard_normal((2, 4, 8, 5)))):
        near = rp.attention_vjp(q, k, v, grad_out=grad_out, position=position, backend="cuda")
        found = rp.attention_vjp(*far[:3], grad_out=far[3], position=position, backend="cuda")
        for name in "qkv":
            np.testing.assert_array_equal(np.asarray(getattr(found, name)), getattr(near, name))


def test_shared_memory_fits(monkeypatch):
    """Kernels are made, if not compiled, with the sizes that they have on a device; each checks what it shares."""
    from relpos_np.kernels._cuda.backward_pass import sizes
    from relpos_np.kernels._cuda.backward_pass.keys import key_gradient
    from relpos_np.kernels._cuda.backward_pass.queries import query_gradient

    monkeypatch.setattr(sizes, "simulated", lambda: False)
    for name in EPS:
        dtype = np.dtype(name)
        for dim in (8, 32, 64, 96, 128, 256):
            for skewed in (False, True):
                tiling, width = sizes.query_side(dtype, dim, skewed)
                assert query_gradient(tiling, (name,) * 3, dim, width, skewed) is not None
                tiling, width = sizes.key_side(dtype, dim, 64)
                assert key_gradient(tiling, (name,) * 3, dim, width, skewed) is not None
    tiling, _ = sizes.query_side(np.dtype(np.float32), 64)
    with pytest.raises(AssertionError, match="shared memory"):
        sizes.fits(tiling, (111, 111))
