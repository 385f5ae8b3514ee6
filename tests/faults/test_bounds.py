"""What is read and written: nothing outside of arrays, and no key that lengths or a band exclude.

Each test runs a process of its own in which arrays lie beside pages that may not be touched.
"""

import sys

import pytest

from tests.processes import child

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are protected through mprotect")

PRELUDE = "from tests.faults.pages import at_end, at_start, forget, hide\n"

# Any call of a mix of sizes beside and far from vectors, register tiles and blocks, with every array against a page.
ODD_SHAPES = """
def pick(*xs):
    return xs[rng.integers(len(xs))]

LENGTHS = (1, 2, 3, 7, 8, 9, 12, 13, 24, 25, 31, 48, 49, 63, 64, 65, 96, 97, 191, 192, 193, 200, 385)
DIMS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128)

def one(place):
    dtype = np.dtype(pick("f4", "f8", "f2"))
    new = lambda *shape: place(rng.standard_normal(shape).astype(dtype))
    q_len, k_len, d, dv = (int(pick(*xs)) for xs in ((*LENGTHS, 1, 1), LENGTHS, DIMS, (*DIMS, 16, 32)))
    b, kv = int(pick(1, 2)), int(pick(1, 2))
    h = kv * int(pick(1, 1, 2, 3))
    q, k, v = new(b, h, q_len, d), new(b, kv, k_len, d), new(b, kv, k_len, dv)
    options = {"causal": bool(pick(0, 1))}
    if pick(0, 0, 1):
        options["window"] = (int(pick(0, 3, 70)), int(pick(0, 2, 30)))
    if pick(0, 0, 1):
        options["key_lengths"] = place(rng.integers(0, k_len + 1, b))
    kind = pick("none", "none", "t5", "shaw", "grid", "conformer", "wenet", "alibi", "rotary", "cope")
    if pick(0, 0, 1) and kind not in ("conformer", "wenet", "rotary", "cope"):
        options["offset"] = int(pick(0, -5, 5, -k_len, k_len))
    shapes = (b, h, q_len, k_len), (1, q_len, k_len), (k_len,), (b, 1, 1, k_len), (q_len, 1), (b, 1, q_len, 1)
    shape = pick(None, *shapes)
    if shape:
        seen = rng.random(shape) < 0.7
        options["mask"] = place(seen if pick(0, 1) else np.where(seen, 0.5, -np.inf).astype(dtype))
    rows = int(pick(1, 3, 9))
    options["position"] = {
        "none": lambda: None,
        "t5": lambda: rp.T5(new(32, h)),
        "shaw": lambda: rp.Shaw(new(2 * rows + 1, d), new(h, 2 * rows + 1, dv) if pick(0, 1) else None),
        "grid": lambda: rp.GraphLabels(place(rng.integers(-1, rows, (q_len, k_len)).astype("i4")), new(rows, h)),
        "conformer": lambda: rp.TransformerXL(new(h, d), new(h, d), new(q_len + k_len - 1, h, d), variant="conformer"),
        "wenet": lambda: rp.TransformerXL(new(h, d), new(h, d), new(k_len, h, d), variant="wenet"),
        "alibi": lambda: rp.ALiBi(new(h), form=pick("symmetric", "key")),
        "rotary": lambda: rp.Rotary(d) if d % 2 == 0 else None,
        "cope": lambda: rp.CoPE(new(9, d)),
    }[kind]()
    out = place(np.zeros((b, h, q_len, dv), dtype)) if pick(0, 1) else None
    found, lse = rp.attention(q, k, v, out=out, return_lse=True, backend="numba", **options)
    if n % 8 == 0:
        expected = rp.attention(q, k, v, backend="numpy", **options)
        assert np.allclose(found, expected, rtol=0, atol={2: 0.02, 4: 2e-3, 8: 1e-10}[dtype.itemsize]), kind
    if pick(0, 1):
        grad_lse = place(np.where(np.isneginf(lse), 0, 1).astype(lse.dtype))
        rp.attention_vjp(q, k, v, grad_out=new(b, h, q_len, dv), grad_lse=grad_lse, backend="numba", **options)

def shift(place):
    rows, columns = int(pick(1, 2, 3, 7, 33)), int(pick(1, 3, 8, 33, 65, 300))
    x = (9 * rng.standard_normal((2, rows, columns))).astype(pick("f4", "f2", "i1", "c16"))
    for variant in ("conformer", "xlnet", "transformer_xl"):
        if columns < rows:
            continue
        expected = rp.rel_shift(x, variant=variant, backend="numpy")
        out = place(np.zeros(expected.shape, x.dtype))
        assert (rp.rel_shift(place(x), variant=variant, backend="numba", out=out) == expected).all()

for n in range(COUNT):
    place = pick(at_end, at_start)
    one(place)
    shift(place)
    forget()
print("all", COUNT)
"""


def run(code, **options):
    """Run code beside protected pages; it must end by itself and say so."""
    status, said, errors = child(PRELUDE + code, "-X", "faulthandler", **options)
    assert status == 0, f"status {status}\n{said[-2000:]}\n{errors[-4000:]}"
    return said


def test_protected_pages_kill_who_reads_or_writes_them():
    """That the other tests can fail: a byte behind the end, one before the beginning, and a hidden key."""
    for touch in (
        "x = at_end(np.ones(5)); print(np.lib.stride_tricks.as_strided(x, (6,))[5])",
        "x = at_start(np.ones(5)); print(np.lib.stride_tricks.as_strided(x[::-1], (6,))[5])",
        "x = at_end(np.ones(5)); np.lib.stride_tricks.as_strided(x, (6,))[5] = 1",
        "x = hide(np.ones((1, 1, 2, 512)), np.array([[True, False]])); print(x[0, 0, 0].sum()); x[0, 0, 1].sum()",
    ):
        assert child(PRELUDE + touch)[0] < 0


def test_row_34_kernels_touch_nothing_outside_of_their_arrays():
    """Operands, tables, masks, lengths, gradients and results, forwards and backwards, whose ends are a page's."""
    assert "all 80" in run("COUNT = 80\n" + ODD_SHAPES)


@pytest.mark.stress
def test_row_34_kernels_touch_nothing_outside_of_their_arrays_at_length():
    assert "all 1000" in run("rng = np.random.default_rng(1)\nCOUNT = 1000\n" + ODD_SHAPES, timeout=600)


HIDDEN = """
def call(q_len, k_len, dtype, depth, options, position):
    new = lambda heads, n: rng.standard_normal((2, heads, n, depth)).astype(dtype)
    q, k, v, grad_out = new(2, q_len), new(1, k_len), new(1, k_len), new(2, q_len)
    seen = (rp.logits(q, k, **options, backend="numpy") != -np.inf).any(axis=(1, 2))
    assert not seen.all()
    hidden = hide(k, seen), hide(v, seen)
    options = {**options, "position": position, "backend": "numba"}
    for a, b in zip(*(rp.attention(q, *x, return_lse=True, **options) for x in ((k, v), hidden))):
        assert (a == b).all(), (q_len, k_len, dtype, options, np.abs(a - b).max())
    if dtype == "f2":
        return
    first, second = (rp.attention_vjp(q, *x, grad_out=grad_out, **options) for x in ((k, v), hidden))
    assert all((getattr(first, x) == getattr(second, x)).all() for x in "qkv")

count = 0
# Rows of a whole page each. Half precision is read as it lies by the kernel for few queries.
for dtype, depth in (("f4", 1024), ("f8", 512), ("f2", 2048)):
    table = lambda *shape: rng.standard_normal(shape).astype(dtype)
    for q_len in (1, 4) if dtype == "f2" else (1, 50):
        for k_len in (40, 300):
            usual = {"key_lengths": np.array([k_len // 3, k_len - 1])}
            for options in (
                usual,
                {"key_lengths": np.array([0, 5])},
                {"causal": True, "offset": 20 - q_len},
                {"causal": True, "offset": -1000},
                {"window": (5, 7), "offset": 12 - q_len},
                {"window": (6, None), "offset": k_len - 20},
                {"window": 3, "offset": 25 - q_len, **usual},
            ):
                call(q_len, k_len, dtype, depth, options, None)
                count += 1
            for position in (rp.T5(table(32, 2)), rp.Shaw(table(9, depth), table(9, depth))):
                if dtype != "f2" or isinstance(position, rp.T5):
                    call(q_len, k_len, dtype, depth, usual, position)
                    call(q_len, k_len, dtype, depth, {"window": (5, 7), "offset": 15 - q_len}, position)
                    count += 2
            if dtype != "f2":
                rows = table(q_len + k_len - 1, 2, depth)
                position = rp.TransformerXL(table(2, depth), table(2, depth), rows, variant="conformer")
                call(q_len, k_len, dtype, depth, usual, position)
                count += 1
print("all", count)
"""


def test_row_07_keys_that_lengths_or_a_band_exclude_are_never_read():
    """They lie in pages that may not be touched: by no CPU kernel, forwards or backwards."""
    assert "all" in run(HIDDEN)
