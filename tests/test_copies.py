"""Beside its results a call makes nothing of the size of an operand, in any dtype, even where operands turn."""

import gc
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np._calls.lowering import all_terms, each_lowered
from relpos_np._contract import check
from relpos_np._contract.options import completed
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build
from tests.every import ATTENTION

workspace_bytes = pytest.importorskip("relpos_np.kernels._numba.plan.workspace_bytes").workspace_bytes

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Queries, keys, batch items: blocks of queries, whole windows, ranges of keys.
CALLS = {"blocks": (130, 130, 8), "windows": (64, 64, 16), "decoding": (1, 512, 8)}
HEADS = (8, 8)


class Call:
    """A call of a scheme with 64 channels, in which each head has keys of its own."""

    def __init__(self, name, variant, kind):
        q_len, k_len, items = CALLS[kind]
        size = lengths(q_len, k_len, 64, 64)
        e = build(name, size, dtype="float32", seed=0, variant=variant, heads=HEADS, batch=(items,))
        self.position, self.operands = e.position, (e.q, e.k, e.v)
        self.fits = (e.q.shape[-2], e.k.shape[-2]) == (q_len, k_len)
        self.problem, _, _ = check.call(*self.operands, completed(rp.attention, {}))
        schemes = e.position if isinstance(e.position, tuple) else (e.position,)
        self.terms = all_terms(each_lowered(schemes, self.problem, by_kernels=True))
        self.tables = sum(scheme.memory_bound(self.problem.site).lower for scheme in schemes)

    @property
    def moves_only(self):
        """Whether nothing needs to be made of operands: its terms are numbers in tables, and operands that turn."""
        t = self.terms
        made = [x for x in (t.query, t.key) if isinstance(x, np.ndarray)]
        return not (made or t.queries or t.keys or t.values or t.biases or t.turn)

    def extra(self, dtype):
        """Bytes of attention and of its gradients beside results, tables and maps, as shares of an operand."""
        q, k, v = (np.ascontiguousarray(x.astype(dtype)) for x in self.operands)
        out, w, options = np.empty_like(q), np.ones_like(q), {"position": self.position}
        parts = workspace_bytes(self.problem, self.terms, None, True)
        tables = self.tables + parts["tables and index maps"] + parts["sums of gradients"]
        yield (taken(lambda: rp.attention(q, k, v, out=out, **options)) - tables) / k.nbytes
        yield (taken(lambda: rp.attention_vjp(q, k, v, grad_out=w, **options)) - tables) / k.nbytes


def taken(call):
    """Bytes that a call allocates at once beside what it returns."""
    for _ in range(2):  # the second of a form keeps what later ones begin with
        call()
    gc.collect(1)
    tracemalloc.start()
    try:
        result = call()
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return most - left


# Those that compute with neither queries nor keys; of those whose operands turn every dtype, of others half precision.
TURNING = [pair for pair in ATTENTION if rp.SCHEMES[pair[0]].cls.rotates_operands]
MOVING = [pair for pair in ATTENTION if not rp.SCHEMES[pair[0]].cls.reads_operand_values and pair not in TURNING]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    [(*pair, x) for pair in TURNING for x in DTYPES] + [(*pair, x) for pair in MOVING for x in ("float16", "bfloat16")],
)
def test_nothing_of_the_size_of_an_operand_is_made(name, variant, dtype, kind):
    try:
        call = Call(name, variant, kind)
    except rp.RelposError:
        return  # no such lengths
    if call.fits and call.moves_only:
        assert max(call.extra(DTYPES[dtype])) <= 0.5


@pytest.mark.parametrize("kind", CALLS)
def test_of_which_schemes_that_is_said(kind):
    for name in ("rotary", "xpos", "plain", "t5", "alibi"):
        call = Call(name, None, kind)
        assert call.fits
        assert call.moves_only
    assert not Call("shaw", None, kind).moves_only
    assert not Call("transformer_xl", None, kind).moves_only


LAYERS = {
    "MultiHeadAttention": lambda w: layers.MultiHeadAttention(*w[:4], heads=4, position=rp.ALiBi()),
    "RelativeMultiHeadAttention": lambda w: layers.RelativeMultiHeadAttention(
        *w[:4], pos=w[4], content_bias=w[0, :4, :16], position_bias=w[1, :4, :16]
    ),
    "WindowAttention": lambda w: layers.WindowAttention(64, 1, 1, (7, 7), 4, rng=np.random.default_rng(0)),
    "SwinAttention": lambda w: layers.SwinAttention(64, (7, 7), 4, rng=np.random.default_rng(0)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_widen_and_round_some_rows_at_a_time(name, dtype, rng):
    """To the bits of float32, rounded once, and beside what they hold in float32 a part of their states at most."""
    layer = LAYERS[name]((rng.standard_normal((5, 64, 64)) / 8).astype(np.float32))
    shape = {"WindowAttention": (400, 49, 64), "SwinAttention": (4, 70, 70, 64)}.get(name, (40, 490, 64))
    options = {"return_attention": False} if name in ("WindowAttention", "SwinAttention") else {}
    x = rng.standard_normal(shape).astype(DTYPES[dtype])
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(layer(x, **options), layer(wide, **options).astype(x.dtype))
    saved = wide.nbytes - x.nbytes  # of the result, which is not among what is taken
    assert taken(lambda: layer(x, **options)) <= taken(lambda: layer(wide, **options)) + saved + wide.nbytes // 2
