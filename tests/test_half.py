"""Half precision and `precision=`: errors within what rounding allows, the same promises, no copies, every unit."""

import json
import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.kernels._numba.simd import target
from tests.every import ATTENTION
from tests.processes import ROOT, child
from tests.sizes import BLOCK_KEYS

BRAIN = np.dtype(ml_dtypes.bfloat16)
# What rounding to nearest may change, relative to the number.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Blocks of queries and of keys, windows, odd lengths and dimensions, one key.
SHAPES = [
    (2, 2, 49, 49, 32),
    (1, 3, 65, 7, 7),
    (2, 1, 30, 400, 33),
    (1, 2, 2 * BLOCK_KEYS + 1, BLOCK_KEYS + 1, 64),
    (1, 1, 26, 1, 5),
    (1, 2, 25, BLOCK_KEYS + 3, 1),
]
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "band": {"window": (20, 5)},
    "lengths": {"key_lengths": 5},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
}


def draw(rng, shape, dtype):
    batch, heads, q_len, k_len, dim = shape
    lengths = (q_len, k_len, k_len)
    return [
        rng.standard_normal((batch, heads, n, d)).astype(dtype)
        for n, d in zip(lengths, (dim, dim, dim + 1), strict=True)
    ]


def call_of(rng, shape, name):
    """Options of a call; masks leave something to every row but the first."""
    options = dict(CALLS[name])
    if "key_lengths" in options:
        options |= {"key_lengths": min(5, shape[3]), "offset": shape[3] - shape[2]}
    if "mask" in options:
        mask = rng.random(shape[2:4]) < 0.7
        mask[0] = False
        options["mask"] = (
            mask if options["mask"] == "bool" else np.where(mask, rng.standard_normal(mask.shape), -np.inf)
        )
    return options


def rounding_bound(q, k, v, unit, **options):
    """The answer in float64, and how far rounding of probabilities and of the result may lead away from it."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth = rp.attention(*wide, **options, backend="numpy")
    size = rp.attention(wide[0], wide[1], np.abs(wide[2]), **options, backend="numpy")
    # Sums of float32, and scores whose error is one of float32 too.
    return truth, unit * (size + np.abs(truth)) + 1e-4 * size + 1e-30


@pytest.mark.parametrize("dtype", [BRAIN, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_errors_are_those_of_rounding(name, shape, dtype, rng):
    q, k, v = draw(rng, shape, dtype)
    options = call_of(rng, shape, name)
    position = rp.T5(rng.standard_normal((32, shape[1])))
    found, lse = rp.attention(q, k, v, position=position, return_lse=True, **options)
    truth, bound = rounding_bound(q, k, v, UNIT[dtype.name], position=position, **options)
    assert found.dtype == dtype
    assert (np.abs(found.astype(np.float64) - truth) <= bound).all()
    wide = [x.astype(np.float64) for x in (q, k, v)]
    _, expected = rp.attention(*wide, position=position, return_lse=True, backend="numpy", **options)
    # Scores are sums of float32: the log-sum-exp loses nothing.
    np.testing.assert_allclose(lse, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_every_scheme(name, variant):
    """As far from the formula as rounding turned operands to bfloat16 leads, and no further."""
    e = testing.example(name, variant=variant, dtype=np.float32)
    half = [x.astype(BRAIN) for x in (e.q, e.k, e.v)]
    found = rp.attention(*half, position=e.position, **e.kwargs)
    exact = rp.attention(*(x.astype(np.float32) for x in half), position=e.position, **e.kwargs, backend="numpy")
    # Schemes that turn or scale operands have them rounded again: scores of size 4 or so are off by 4 * 2^-8.
    assert np.abs(found.astype(np.float32) - exact).max() <= 0.05 * max(np.abs(exact).max(), 1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_highest_has_the_bits_of_float32(name, shape, rng):
    for dtype in (BRAIN, np.float16):
        q, k, v = draw(rng, shape, dtype)
        options = call_of(rng, shape, name)
        found = rp.attention(q, k, v, precision="highest", **options)
        wide = rp.attention(*(x.astype(np.float32) for x in (q, k, v)), **options)
        np.testing.assert_array_equal(found, wide.astype(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_have_the_bits_of_float32(shape, rng):
    q, k, v = draw(rng, shape, BRAIN)
    grad = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(BRAIN)
    wide = rp.attention_vjp(*(x.astype(np.float32) for x in (q, k, v)), grad_out=grad.astype(np.float32))
    for dtype, options in ((BRAIN, {"precision": "highest"}), (np.float16, {})):
        operands = [x.astype(np.float32).astype(dtype) for x in (q, k, v, grad)]
        found = rp.attention_vjp(*operands[:3], grad_out=operands[3], **options)
        if dtype != BRAIN:  # which rounds other numbers
            operands = [x.astype(np.float32) for x in operands]
            wide = rp.attention_vjp(*operands[:3], grad_out=operands[3])
        for name in "qkv":
            np.testing.assert_array_equal(getattr(found, name), getattr(wide, name).astype(dtype))


def gradient_bounds(q, k, v, grad, **options):
    """Gradients in float64, and how far rounded probabilities and slopes may lead away from them."""
    unit, smallest = UNIT[q.dtype.name], float(ml_dtypes.finfo(q.dtype).smallest_subnormal)
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    truth = rp.attention_vjp(q, k, v, grad_out=grad, **options, backend="numpy")
    s = rp.logits(q, k, **options, backend="numpy")
    top = np.maximum(s.max(axis=-1, keepdims=True), -1e300)
    p = np.exp(s - top)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
    products = np.abs(grad) @ np.abs(v).swapaxes(-1, -2)
    # Of the slopes: products less their mean, which a rounded output gives.
    slopes = p * (products + (p * products).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    sizes = {"q": slopes @ np.abs(k), "k": slopes.swapaxes(-1, -2) @ np.abs(q), "v": p.swapaxes(-1, -2) @ np.abs(grad)}
    return {
        name: (getattr(truth, name), unit * (2 * size + np.abs(getattr(truth, name))) + 1e-4 * size + smallest)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("dtype", [BRAIN, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_errors_of_gradients_are_those_of_rounding(name, shape, dtype, rng):
    q, k, v = draw(rng, shape, dtype)
    grad = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(dtype)
    options = call_of(rng, shape, name)
    options["position"] = rp.T5(rng.standard_normal((32, shape[1])))
    found = rp.attention_vjp(q, k, v, grad_out=grad, **options)
    for letter, (truth, bound) in gradient_bounds(q, k, v, grad, **options).items():
        own = getattr(found, letter)
        assert own.dtype == dtype
        assert (np.abs(own.astype(np.float64) - truth) <= bound).all(), letter


@pytest.mark.parametrize("kind", [np.nan, np.inf])
def test_gradients_of_what_is_excluded_and_of_what_is_not_finite(kind, rng):
    """An excluded key changes no bit; a number that is not finite reaches the gradients that it has a share in."""
    q, k, v = draw(rng, (1, 2, 101, 210, 24), BRAIN)
    grad = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(BRAIN)
    mask = rng.random((101, 210)) < 0.7
    mask[:, 0], mask[1::2, -1] = True, False
    mask[:, 7] = False
    clean = rp.attention_vjp(q, k, v, grad_out=grad, mask=mask)
    k[..., 7, :], v[..., 7, 0] = kind, kind
    found = rp.attention_vjp(q, k, v, grad_out=grad, mask=mask)
    for name in "qkv":
        np.testing.assert_array_equal(getattr(found, name), getattr(clean, name))
    k[..., -1, 3], grad[..., 5, 2], q[..., 8, 1] = kind, kind, kind
    found = rp.attention_vjp(q, k, v, grad_out=grad, mask=mask)
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) for x in (q, k, v, grad)]
        truth = rp.attention_vjp(*wide[:3], grad_out=wide[3], mask=mask, backend="numpy")
    for name in "qkv":
        own, exact = (np.isfinite(getattr(x, name).astype(np.float64)) for x in (found, truth))
        np.testing.assert_array_equal(own, exact)


@pytest.mark.parametrize("dtype", [BRAIN, np.dtype(np.float16)], ids=str)
def test_the_gradient_of_the_output_is_read_as_it_lies(dtype, rng):
    """In any layout and beside operands of another dtype, with the bits of its numbers in float32."""
    q, k, v = (x.astype(np.float32) for x in draw(rng, (2, 3, 70, 90, 8), dtype))
    whole = rng.standard_normal((2, 3, 70, v.shape[-1])).astype(dtype)
    repeated = np.broadcast_to(whole[:, :1, :1], whole.shape)
    turned = np.ascontiguousarray(whole.swapaxes(1, 2)).swapaxes(1, 2)
    for grad in (whole, turned, repeated, repeated[..., ::-1], np.broadcast_to(whole[..., :1], whole.shape)):
        found = rp.attention_vjp(q, k, v, grad_out=grad)
        wide = rp.attention_vjp(q, k, v, grad_out=np.ascontiguousarray(grad, np.float32))
        for name in "qkv":
            np.testing.assert_array_equal(getattr(found, name), getattr(wide, name))
    doubles = [x.astype(np.float64) for x in (q, k, v)]
    found = rp.attention_vjp(*doubles, grad_out=whole)
    np.testing.assert_array_equal(found.q, rp.attention_vjp(*doubles, grad_out=whole.astype(np.float64)).q)


def test_gradients_of_what_is_shared_are_rounded_once(rng):
    """Heads, batch items and schemes add up gradients in float32, of which one number is rounded."""
    q, k, v = (rng.standard_normal((2, h, 40, 16)).astype(BRAIN) for h in (4, 2, 2))
    q, grad = np.broadcast_to(q[:1], q.shape), rng.standard_normal(q.shape).astype(BRAIN)
    table = rng.standard_normal((9, 16)).astype(np.float32)
    for position in (None, rp.Shaw(table), rp.Rotary()):
        found = rp.attention_vjp(q[0], k, v, grad_out=grad, position=position, precision="highest")
        wide = [x.astype(np.float32) for x in (q[0], k, v, grad)]
        exact = rp.attention_vjp(*wide[:3], grad_out=wide[3], position=position)
        for name in "qkv":
            np.testing.assert_array_equal(getattr(found, name), getattr(exact, name).astype(BRAIN))


def test_gradients_that_schemes_add_to_are_rounded_once(rng):
    """After the share of their vectors: at most half a unit from the same numbers in float32."""
    q, k, v, g = rng.standard_normal((4, 2, 2, 40, 16)).astype(BRAIN)
    scheme = rp.DeBERTa(*rng.standard_normal((2, 2, 16, 16)).astype(np.float32))
    found = rp.attention_vjp(q, k, v, grad_out=g, position=scheme, precision="highest")
    wide = [x.astype(np.float32) for x in (q, k, v, g)]
    exact = rp.attention_vjp(*wide[:3], grad_out=wide[3], position=scheme)
    for x, y in ((found.q, exact.q), (found.k, exact.k)):
        np.testing.assert_allclose(
            x.astype(np.float64), y, rtol=1.01 * float(ml_dtypes.finfo(BRAIN).eps) / 2, atol=2e-6
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
def test_what_is_excluded_changes_no_bit_and_what_is_not_finite_reaches_who_attends_it(shape, kind, rng):
    q, k, v = draw(rng, shape, BRAIN)
    mask = rng.random(shape[2:4]) < 0.7
    mask[:, 0] = True
    mask[1::2, -1] = shape[3] == 1
    clean = rp.attention(q, k, v, mask=mask)
    k[..., -1, :], v[..., -1, 0] = (kind, kind) if shape[3] > 1 else (k[..., -1, :], v[..., -1, 0])
    found = rp.attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(found[..., 1::2, :], clean[..., 1::2, :])
    k[..., -1, :] = 0
    found = rp.attention(q, k, v, mask=mask).astype(np.float32)
    with np.errstate(invalid="ignore"):
        truth = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), mask=mask, backend="numpy")
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(truth))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(truth))
    np.testing.assert_array_equal(found[np.isinf(truth)], truth[np.isinf(truth)])


def test_layouts_threads_and_neighbours_change_no_bit(rng):
    alone_and_turned(draw(rng, (3, 2, 200, 300, 24), BRAIN))


def alone_and_turned(operands):
    """Each of three items alone, another layout, one thread and a given array: the same bits."""
    whole = rp.attention(*operands, causal=True)
    for n in range(3):
        np.testing.assert_array_equal(rp.attention(*(x[n] for x in operands), causal=True), whole[n])
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in operands]
    np.testing.assert_array_equal(rp.attention(*turned, causal=True), whole)
    with rp.threads(1):
        np.testing.assert_array_equal(rp.attention(*operands, causal=True), whole)
    out = np.full_like(whole, np.nan)
    assert rp.attention(*operands, causal=True, out=out) is out
    np.testing.assert_array_equal(out, whole)


def test_medium_rounds_float32(rng):
    q, k, v = draw(rng, (1, 2, 100, 300, 32), np.float32)
    exact = rp.attention(q, k, v)
    rounded = [x.astype(BRAIN) for x in (q, k, v)]
    with rp.use_precision("medium"):
        found = rp.attention(q, k, v)
        # For as many queries as decoding takes, products are of float32 in any case.
        np.testing.assert_array_equal(
            rp.attention(q[..., :4, :], k, v), rp.attention(q[..., :4, :], k, v, precision="highest")
        )
    if target.UNIT == "none":
        np.testing.assert_array_equal(found, exact)
    else:
        np.testing.assert_array_equal(found.astype(BRAIN), rp.attention(*rounded))
    if not target.TILED:  # which make products of planes
        np.testing.assert_array_equal(rp.attention(q, k, v, precision="high"), exact)
        wide = rp.attention(*rounded, precision="highest")
        np.testing.assert_array_equal(rp.attention(*rounded, precision="high"), wide)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    np.testing.assert_array_equal(rp.attention(*wide, precision="medium"), rp.attention(*wide))


ON_A_UNIT = """
import json, ml_dtypes
from relpos_np.kernels._numba.simd.target import UNIT
half = rng.standard_normal((3, 2, 70, 64)).astype(ml_dtypes.bfloat16)
found = rp.attention(*half)
wide = rp.attention(*half, precision="highest") if UNIT == "none" else None
exact = rp.attention(*half.astype(float), backend="numpy")
print(json.dumps([UNIT, float(abs(found.astype(float) - exact).max()), bool(np.all(found == wide))]))
"""


@pytest.mark.simulator
@pytest.mark.parametrize("unit", ["emulated tiles", "emulated mmla", "emulated", "none"])
def test_units_by_name(unit):
    """What this processor lacks, or does faster, gives answers as good; without a unit products are of float32."""
    status, out, log = child(ON_A_UNIT, RELPOS_MATRIX_UNIT=unit)
    assert status == 0, log
    name, error, as_highest = json.loads(out)
    assert (name, as_highest) == (unit, unit == "none")
    assert error < 2 * UNIT["bfloat16"]


BY_PLANES = """
import numba
from relpos_np.kernels._numba.simd.rows import floats
from relpos_np.kernels._numba.simd.bfloat16_planes import split_pairs, split_rows
from relpos_np.kernels._numba.simd.tiles import accumulate_planes, plane_panel

@numba.njit
def multiply(x, y, left, right, scores, sums, fade, planes):
    split_rows(floats(left), 256, 16, floats(x), 32, 16, 32, 32, planes)
    split_pairs(floats(right), 1024, 64, floats(y), 64, 32, 64, planes)
    plane_panel(floats(left), 16, 256, floats(right), 1024, 16, floats(scores), 64, 16, 64, planes)
    a, b, c, f = floats(left), floats(right), floats(sums), floats(fade)
    accumulate_planes(a, 16, b, 64, c, 64, f, 16, 64, 16, planes, 256, 1024)

x, y = rng.standard_normal((16, 32)).astype("f"), rng.standard_normal((32, 64)).astype("f")
x[:, 2:] = 0  # sums of two products have few roundings
exact, size = x.astype(float) @ y, abs(x.astype(float)) @ abs(y)
for planes in (2, 3):
    # What planes are not written, or not made, is NaN.
    left, right = np.full((planes, 16, 16), np.nan, "f"), np.full((planes, 16, 64), np.nan, "f")
    scores, sums, fade = np.full((16, 64), np.nan, "f"), np.zeros((16, 64), "f"), np.ones(16, "f")
    multiply(*(z.ctypes.data for z in (x, y, left, right, scores, sums, fade)), planes)
    for found in (scores, sums):
        print(float((abs(found - exact) / size).max()))
"""


@pytest.mark.slow
def test_every_product_of_planes():
    """Sums of two products of float32: dropping any product of planes takes them beyond this, ten times at least."""
    status, out, log = child(BY_PLANES, RELPOS_MATRIX_UNIT="emulated tiles")
    assert status == 0, log
    errors = [float(line) for line in out.split()]
    assert max(errors[:2]) <= 3 * 2.0**-16
    assert max(errors[2:]) <= 4 * 2.0**-23


HAS_TILES = pytest.mark.skipif(target.host_features().get("amx-bf16", False), reason="this processor has them")


@pytest.mark.parametrize("unit", ["abacus", pytest.param("tiles", marks=HAS_TILES)])
def test_a_unit_that_is_not_here(unit):
    status, _, log = child("rp.attention(*np.ones((3, 2, 2)))", RELPOS_MATRIX_UNIT=unit)
    assert status == 1
    assert "RELPOS_MATRIX_UNIT: expected one of auto, " in log


@pytest.mark.simulator
def test_matrix_tiles_that_this_processor_lacks():
    """Some tests of this file, and the interpreter's with its checked memory; each operation on a tile is emulated."""
    files = [
        "tests/test_planes.py",
        "tests/test_half.py",
        "tests/test_backward_blocks.py",
        "tests/interpreted/test_interpreted_attention.py",
        "tests/interpreted/test_interpreted_backward.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        [*command, "-k", TILED],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"RELPOS_MATRIX_UNIT": "emulated tiles"},
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


TILED = (
    "errors_are_those or errors_of_gradients or gradients_of_what_is_excluded or excluded_changes or layouts_threads "
    "or half_precision or that_turn or test_planes or medium or (share_keys and bfloat16)"
)

COMPILED = r"""
import ctypes, json, re
import llvmlite.binding, numba
libraries = ctypes.CDLL
ctypes.CDLL = lambda name: type("System", (), {"syscall": lambda *_: 0})  # which allows everything
from relpos_np.kernels._numba.simd import target
ctypes.CDLL = libraries
from relpos_np.kernels._numba.forward_pass.attend import attend
from relpos_np.kernels._numba.forward_pass.window import windows
words, found = ("tileloadd", "tdpbf16ps"), [target.UNIT]
for kernel in (windows["bfloat16"], attend["planes"]):
    code = kernel._compile()._library.get_asm_str()
    loops = [part.split() for part in re.findall(r"\n\.LBB.*?\tj[a-z]+\t", code, re.DOTALL)]
    found.append([{word: part.count(word) for word in words} for part in loops])
print(json.dumps(found))
"""


@pytest.mark.simulator
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler makes code for this family of processors")
def test_matrix_tiles_are_the_processors_instructions():
    """Made for a processor that has them: a loop of four loads and four products, which hide each other's time."""
    names = "avx512f avx512vl avx512dq avx512bw avx512bf16 amx-tile amx-bf16 avx2 fma f16c bmi bmi2 lzcnt popcnt"
    features = ",".join("+" + name for name in names.split())
    processor = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": features}
    status, out, log = child(COMPILED, bare=True, timeout=600, RELPOS_MATRIX_UNIT="tiles", **processor)
    assert status == 0, log
    unit, pairs, planes = json.loads(out)
    assert unit == "tiles"
    for loops in (pairs, planes):
        assert {"tileloadd": 4, "tdpbf16ps": 4} in loops
