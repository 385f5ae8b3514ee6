"""Calls that the rows are tested with: one for each kernel, and tiny ones for CUDA's simulator."""

import contextlib
import os

import numpy as np

import relpos_np as rp

NAN, INF = np.nan, np.inf
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
HEADS = 2
# Of those, each takes its own way through the kernels: tables by distance and by pair, vectors met by queries, read
# skewed and by key, vectors of values, products with keys, a bias for every pair, and rotated operands.
SCHEMES = ("none", "t5", "grid", "shaw", "conformer", "wenet", "alibi_of_keys", "cope", "rotary")
FEW_SCHEMES = ("none", "t5", "shaw", "conformer")


def small(backend):
    """Whether the simulator computes, which takes a second for what others do in a millisecond."""
    return SIMULATED and backend == "cuda"


def simulate_only(**values):
    """Mark a test that the simulator runs with these values of its parameters only; others are left out there."""

    def marked(test):
        test.simulated_values = values
        return test

    return marked


def shapes(backend):
    """Numbers of queries and of keys: decoding, a window, and several blocks of keys."""
    return [(1, 9), (9, 11)] if small(backend) else [(1, 200), (64, 64), (70, 200)]


def dtypes(backend):
    """Precisions of the computation."""
    return [np.float32] if small(backend) else [np.float32, np.float64]


def make(rng, dtype=np.float64, *, q_len=5, k_len=6, heads=HEADS, kv_heads=None, batch=(2,), depth=4, v_dim=16):
    """Queries, keys and values; 16 columns of values are whole vectors, as the kernel for windows needs them."""
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = ((heads, q_len, depth), (kv_heads, k_len, depth), (kv_heads, k_len, v_dim))
    return [rng.standard_normal((*batch, *shape)).astype(dtype) for shape in shapes]


def operands(rng, backend, dtype, q_len, k_len):
    """Operands of one of the `shapes`: two query heads share a key head."""
    if small(backend):
        return make(rng, dtype, q_len=q_len, k_len=k_len, kv_heads=1, depth=2, v_dim=3)
    return make(rng, dtype, q_len=q_len, k_len=k_len, kv_heads=1)


def scheme(name, rng, q, k, v):
    """One of `SCHEMES` for a call with these operands."""
    dtype, heads, depth, v_dim = q.dtype, q.shape[-3], q.shape[-1], v.shape[-1]
    q_len, k_len = q.shape[-2], k.shape[-2]

    def table(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "none": lambda: None,
        "t5": lambda: rp.T5(table(32, heads)),
        "grid": lambda: rp.GraphLabels(rng.integers(-1, 7, (q_len, k_len)), table(7, heads)),
        "shaw": lambda: rp.Shaw(table(9, depth), table(9, v_dim)),
        "conformer": lambda: rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(q_len + k_len - 1, heads, depth), variant="conformer"
        ),
        "wenet": lambda: rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(k_len, heads, depth), variant="wenet"
        ),
        "alibi_of_keys": lambda: rp.ALiBi(table(heads), form="key"),
        "cope": lambda: rp.CoPE(table(5, depth)),
        "rotary": lambda: rp.Rotary(depth),
    }[name]()


def strict(backend):
    """NumPy raises wherever it is not lenient by itself; the simulator computes with NumPy's scalars."""
    return contextlib.nullcontext() if small(backend) else np.errstate(all="raise")


def both(q, k, v, *, backend, **options):
    """Output and log-sum-exp."""
    with strict(backend):
        return rp.attention(q, k, v, backend=backend, return_lse=True, **options)


def gradients(q, k, v, *, backend, grad_out=None, **options):
    """Gradients by name, "position." before those of the scheme's arrays; that of the output is 1 if none is given."""
    if grad_out is None:
        grad_out = np.ones((*q.shape[:-1], v.shape[-1]), q.dtype)
    with strict(backend):
        found = rp.attention_vjp(q, k, v, grad_out=grad_out, backend=backend, **options)
    own = {f"position.{name}": x for name, x in dict(found.position or {}).items()}
    more = {} if found.query_scale is None else {"query_scale": found.query_scale}
    return {"q": found.q, "k": found.k, "v": found.v} | own | more


def same(found, expected, where=""):
    """The same bits, or NaN in the same places."""
    names = expected if isinstance(expected, dict) else range(len(expected))
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{where} {name}")
        assert found[name].dtype.newbyteorder("=") == expected[name].dtype


def close(found, expected, dtype):
    """Equal up to rounding: scores below 10."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * np.finfo(dtype).eps)
