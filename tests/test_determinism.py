"""Each cell of the table in docs/determinism.md: where it says yes, bits are equal; where it says no, numbers are."""

import numpy as np
import pytest

import relpos_np as rp
from tests.determinism import PROPERTIES, Kernel, close, equal
from tests.layouts import LAYOUTS
from tests.test_docs import DOCS, script

if not DOCS.is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)

STATED = script("reliability").DETERMINISM
# Beyond one block of keys; shared key heads; a window; few queries, with one range of keys and with several; and one
# head, which threads might want to divide.
KERNELS = {
    "attention": [
        Kernel("numba", (3, 2, 2, 300, 300, 64, 64)),
        Kernel("numba", (2, 4, 2, 97, 397, 33, 20)),
        Kernel("numba", (1, 1, 1, 700, 700, 64, 64)),
    ],
    "windows": [
        Kernel("numba", (3, 4, 2, 64, 64, 32, 64)),
        Kernel("numba", (3, 2, 2, 49, 49, 20, 32)),
        Kernel("numba", (1, 1, 1, 1000, 150, 64, 64)),
    ],
    "decoding": [
        Kernel("numba", (2, 2, 2, 1, 3000, 32, 64)),
        Kernel("numba", (2, 8, 2, 2, 300, 64, 64)),
        Kernel("numba", (1, 1, 1, 3, 1500, 64, 64)),
    ],
    "products": [
        Kernel("numba", (3, 4, 4, 90, 130, 32, 32), relative=True),
        Kernel("numba", (1, 1, 1, 400, 500, 64, 32), relative=True),
    ],
    "gradients of q, k, v": [
        Kernel("numba", (2, 1, 1, 300, 300, 32, 32), backward=True),
        Kernel("numba", (2, 4, 2, 64, 64, 32, 64), backward=True),
        Kernel("numba", (1, 1, 1, 700, 500, 32, 32), backward=True),
        Kernel("numba", (1, 1, 1, 700, 700, 32, 32), backward=True, window=(300, 20)),
        Kernel("numba", (1, 1, 1, 300, 4000, 8, 8), backward=True, window=(3300, 20)),
    ],
    "gradients of tables": [Kernel("numba", (2, 1, 1, 300, 300, 32, 32), backward=True, table=True)],
    "numpy": [Kernel("numpy", (2, 4, 2, 37, 50, 12, 9)), Kernel("numpy", (2, 2, 2, 20, 30, 8, 8), backward=True)],
    "terms": [Kernel("terms", (2, 4, 2, 37, 50, 12, 9)), Kernel("terms", (2, 2, 2, 20, 30, 8, 8), backward=True)],
}
CELLS = [
    (kernel, name, dtype)
    for kernel in KERNELS
    for name in PROPERTIES
    for dtype in ("float32", "float64")
    if STATED[kernel][name] != "–"
]


@pytest.mark.parametrize(("kernel", "name", "dtype"), CELLS)
def test_cell(kernel, name, dtype):
    stated = STATED[kernel][name]
    for one in KERNELS[kernel]:
        pairs = list(PROPERTIES[name](one, dtype))
        assert pairs
        if stated == "yes":
            assert all(map(equal, pairs)), one
        else:
            assert stated.startswith("no")
            assert all(close(pair, dtype) for pair in pairs), one


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["again", "threads", "batch", "heads"])
def test_decoding_of_half_precision(name, dtype):
    """Keys and values are read as they are stored."""
    pytest.importorskip("ml_dtypes")
    for one in KERNELS["decoding"]:
        assert all(map(equal, PROPERTIES[name](one, dtype)))


def test_what_has_no_differs_somewhere():
    """A "no" of the kernels is not modesty: else it should say yes."""
    cells = [("windows", "padding"), ("decoding", "padding"), ("gradients of q, k, v", "padding")]
    for kernel, name in (*cells, ("gradients of tables", "threads")):
        assert STATED[kernel][name].startswith("no")
        pairs = [pair for one in KERNELS[kernel] for pair in PROPERTIES[name](one, "float32")]
        assert not all(map(equal, pairs)), (kernel, name)


@pytest.mark.parametrize("window", [(192, 24), (40, 0), (None, 30)])
@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_an_item_alone_whose_queries_are_divided(name, window, rng):
    """Blocks of queries end elsewhere then, and with them the keys that some row of a table has in common."""
    tables = rng.standard_normal((2, 1, 16, 24), dtype=np.float32)
    scheme = {"t5": lambda: rp.T5(tables[0, 0, :, :1]), "shaw": lambda: rp.Shaw(*tables[:, 0, :9])}
    scheme["deberta"] = lambda: rp.DeBERTa(*tables, max_position=64)
    q, k, v, g = rng.standard_normal((4, 5, 1, 348, 24), dtype=np.float32)
    call = {"position": scheme[name](), "window": window, "backend": "numba"}

    def found(own):
        grads = rp.attention_vjp(q[own], k[own], v[own], grad_out=g[own], **call)
        return rp.attention(q[own], k[own], v[own], **call), grads.q, grads.k, grads.v

    alone = found(slice(2, 3))
    for one, own in zip(found(slice(None)), alone, strict=True):
        np.testing.assert_array_equal(one[2:3], own)


@pytest.mark.parametrize("seen", [slice(0, 140), slice(20, 200)])
def test_a_mask_says_nothing_of_keys_that_do_not_exist(seen, rng):
    """Not to a call, to a prepared one or to one of items."""
    q, k, v = rng.standard_normal((3, 2, 1, 251, 16), dtype=np.float32)
    longer = [np.pad(x, ((0, 0), (0, 0), (0, 40), (0, 0))) for x in (k, v)]
    mask = np.zeros((2, 1, 1, 251), bool)
    mask[..., seen] = True
    open_end = np.pad(mask, ((0, 0), (0, 0), (0, 0), (0, 40)), constant_values=True)
    options = {"mask": open_end, "offset": 0, "backend": "numba"}
    expected = rp.attention(q, k, v, mask=mask, backend="numba")
    np.testing.assert_array_equal(rp.attention(q, *longer, key_lengths=251, **options), expected)
    np.testing.assert_array_equal(rp.prepare(q, *longer, **options)(q, *longer, key_lengths=251), expected)
    options["offset"] = np.zeros(2, int)
    np.testing.assert_array_equal(rp.attention(q, *longer, key_lengths=251, **options), expected)


def test_gradients_of_tables_with_heads_enough_for_all_threads():
    """The condition in the page: then bits are the same."""
    import numba

    heads = 2 * numba.config.NUMBA_NUM_THREADS
    one = Kernel("numba", (2, heads, heads, 100, 120, 16, 16), backward=True, table=True)
    assert all(map(equal, PROPERTIES["threads"](one, "float32")))


@pytest.mark.parametrize("variant", ["conformer", "xlnet", "transformer_xl"])
def test_rel_shift(variant, rng):
    """Elements are moved, never summed."""
    import numba

    columns = {"conformer": 150, "xlnet": 151}.get(variant, 90)
    x = rng.standard_normal((3, 4, 61, columns)).astype(np.float32)
    whole = rp.rel_shift(x, variant=variant, backend="numba")
    before = numba.get_num_threads()
    try:
        for count in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(count)
            np.testing.assert_array_equal(rp.rel_shift(x, variant=variant, backend="numba"), whole)
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(rp.rel_shift(x[1:2, 2:3], variant=variant, backend="numba"), whole[1:2, 2:3])
    for change in LAYOUTS.values():
        np.testing.assert_array_equal(rp.rel_shift(change(x), variant=variant, backend="numba"), whole)


def test_the_table_is_complete():
    numbered = {"¹", "²", "³", "⁴"}
    for kernel, cells in STATED.items():
        assert set(cells) == set(PROPERTIES), kernel
        for cell in cells.values():
            assert cell in {"yes", "–"} or (cell[:2] == "no" and cell[2:] in numbered), (kernel, cell)
    assert {kernel for kernel in STATED if not kernel.startswith("CUDA")} == {*KERNELS, "rel_shift"}
