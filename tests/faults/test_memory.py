"""Row 37: what a call asks for is known before it is taken, and refused if it is more than the limit."""

import functools
import gc
import importlib
import inspect
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._runtime import memory, results
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build
from relpos_np.types import Shift
from tests.every import ATTENTION
from tests.processes import child

HOST = rp.backend.HOST_BACKENDS
# Vectors per pair, maps by distance and by place, numbers per pair and head.
SOME = [("shaw", "zero"), ("t5", "exact"), ("window", "swin"), ("cope", "paper")]
# What Python itself needs for a call, whatever its size: frames, records, the error and its message.
PYTHON = 1 << 16
# Workspaces of two threads, which are the same for a small call, and maps that a scheme keeps from an earlier one.
KEPT = 1 << 23
CACHES = [
    x
    for x in gc.get_objects()
    if isinstance(x, functools._lru_cache_wrapper) and (getattr(x, "__module__", "") or "").startswith("relpos_np.")
]


def calls(example):
    """Each function that takes a scheme, as a call of a backend."""
    e = example
    grad = np.ones((*e.q.shape[:-1], e.v.shape[-1]), e.q.dtype)
    options = {"position": e.position, **e.kwargs}
    yield "attention", lambda backend: rp.attention(e.q, e.k, e.v, **options, backend=backend)
    yield "logits", lambda backend: rp.logits(e.q, e.k, **options, backend=backend)
    yield "attention_vjp", lambda backend: rp.attention_vjp(e.q, e.k, e.v, grad_out=grad, **options, backend=backend)


def peak(call, *args):
    """Bytes that a call has allocated at once, with nothing kept from earlier ones, and its error if it is refused."""
    for cache in CACHES:
        cache.cache_clear()
    refusal = None
    gc.collect(1)  # older garbage is not traced, and looking for it takes long after many tests
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        call(*args)
    except rp.RelposMemoryError as error:
        refusal = str(error)
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return most, refusal


@pytest.fixture
def asked(monkeypatch):
    """The largest sums that calls were judged by."""
    found, require = [], memory.require

    def recorded(function, parts):
        found.append(sum(parts.values()))
        require(function, parts)

    monkeypatch.setattr(memory, "require", recorded)
    return found


def judge(call, backend, asked, *, most=4):
    """The sum is at least what is allocated and not absurdly more, and less than it is refused early."""
    call(backend)  # what is imported, compiled and kept for the process
    asked.clear()
    with rp.memory_limit(1 << 60):
        used, refusal = peak(call, backend)
    assert refusal is None
    total = max(asked)
    assert used <= total + PYTHON, (backend, used, total)
    assert total <= most * used + KEPT, (backend, used, total)
    with rp.memory_limit(total):
        call(backend)
    for limit in (total // 8, total - 1):
        with rp.memory_limit(limit):
            used, refusal = peak(call, backend)
        assert refusal is not None
        assert str(limit) in refusal
        assert used <= limit + PYTHON, (backend, used, limit)


def judge_scheme(name, variant, length, dtype, asked):
    """Every function and backend of the host, each with a scheme that keeps nothing from the last."""
    for function in range(3):
        for backend in HOST:
            label, call = list(calls(build(name, lengths(length, length), dtype=dtype, seed=0, variant=variant)))[
                function
            ]
            if label != "logits" or backend != "numba":
                judge(call, backend, asked)


@pytest.mark.parametrize(("name", "variant"), SOME)
def test_row_37_no_scheme_takes_more_than_it_asks_for(name, variant, asked):
    judge_scheme(name, variant, 48, "float32", asked)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_37_no_variant_takes_more_than_it_asks_for(name, variant, asked):
    judge_scheme(name, variant, 120, "float64", asked)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("kind", ["t5", "shaw", "deberta"])
def test_row_37_given_positions_are_counted_part_by_part(kind, batch, asked, monkeypatch, rng):
    """Forward and back: what one part holds, and what is summed over all of them."""
    by_rows = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    monkeypatch.setattr(by_rows, "MAP_ROWS", 300)
    n = 1400
    q, g = rng.standard_normal((2, *batch, 2, n, 8))
    k, v = rng.standard_normal((2, *batch, 1, n, 8))
    tables = {
        "t5": lambda: rp.T5(rng.standard_normal((32, 2))),
        "shaw": lambda: rp.Shaw(*rng.standard_normal((2, 9, 8))),
        "deberta": lambda: rp.DeBERTa(*rng.standard_normal((2, 2, 16, 8)), max_position=64),
    }
    call = {"position": rp.AtPositions(tables[kind](), np.cumsum(rng.integers(1, 3, (*batch, n)), axis=-1))}
    judge(lambda backend: rp.attention(q, k, v, **call, backend=backend), "numba", asked)
    judge(lambda backend: rp.attention_vjp(q, k, v, grad_out=g, **call, backend=backend), "numba", asked)


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": 5},
    "key_lengths": {"key_lengths": 70},
    "bool mask": {"mask": np.tri(128, dtype=bool)},
    "bool mask of all pairs": {"mask": np.ones((2, 4, 128, 128), bool)},
    "float mask": {"mask": np.zeros((4, 128, 128))},
    "transposed mask": {"mask": np.zeros((128, 128)).T},
    "float16 mask": {"mask": np.zeros((128, 128), np.float16)},
    "dropout": {"dropout": 0.25},
}


@pytest.mark.parametrize("dtype", ["float16", *(pytest.param(x, marks=pytest.mark.stress) for x in ("float32", ">f8"))])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", HOST)
def test_row_37_masks_dropout_and_other_dtypes_are_counted(backend, name, dtype, asked):
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((2, 4, 128, 24)).astype(dtype), rng.standard_normal((2, 1, 128, 8)).astype(dtype)
    k = np.asfortranarray(rng.standard_normal((2, 2, 128, 24)).astype(dtype))
    v = np.repeat(v, 2, axis=1)

    def call(backend):
        rng = np.random.default_rng(0) if "dropout" in OPTIONS[name] else None
        rp.attention(q, k, v, **OPTIONS[name], rng=rng, backend=backend, return_lse=True)

    judge(call, backend, asked)


@pytest.mark.parametrize(
    ("heads", "q_len", "k_len"), [(1, 40, 20_000), (1, 20_000, 40), (4, 40, 5000), (1, 3000, 3000), (9, 700, 700)]
)
def test_row_37_workspaces_of_gradients_that_are_cut(heads, q_len, k_len, asked, monkeypatch):
    """Each piece of work that is under way has one, where its sums wait between calls of the kernel."""
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    backjob = importlib.import_module("relpos_np.kernels._numba.plan.backward_job")
    monkeypatch.setattr(launch, "CALL_FLOPS", 1e6)
    # Those of other calls in this thread would not be counted.
    monkeypatch.setattr(launch, "KEEP_BYTES", 0)
    lent, counted, aligned, require = [], [], backjob.aligned, memory.require
    monkeypatch.setattr(backjob, "aligned", lambda *a: (lent.append(aligned(*a)), lent[-1])[1])
    monkeypatch.setattr(memory, "require", lambda name, parts: (counted.append(parts), require(name, parts)))
    q, k, v, grad_out = (np.zeros((heads, n, 32), np.float32) for n in (q_len, k_len, k_len, q_len))
    options = {"position": rp.T5(np.zeros((32, heads), np.float32)), "grad_out": grad_out}
    judge(lambda backend: rp.attention_vjp(q, k, v, **options, backend=backend), "numba", asked)
    # The sum has room to spare in its other parts.
    of_workspaces = max(parts.get("workspaces of threads on the way back", 0) for parts in counted)
    assert 0 < max(x.nbytes for x in lent) <= of_workspaces


@pytest.mark.parametrize(("kv_heads", "group", "depth"), [(64, 1, 16), (8, 4, 128), (5, 8, 40)])
def test_row_37_workspaces_of_heads_that_are_decoded_together(kv_heads, group, depth, asked, monkeypatch):
    """Each head has its own in the workspace of a thread, where those of a token lie side by side."""
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    lent, counted, lend, require = [], [], launch.lend, memory.require
    monkeypatch.setattr(launch, "lend", lambda size, threads: lent.append(size * threads) or lend(size, threads))
    monkeypatch.setattr(memory, "require", lambda name, parts: (counted.append(parts), require(name, parts)))
    q = np.zeros((40, kv_heads * group, 1, depth), np.float32)
    k = np.zeros((40, 200, kv_heads, depth), np.float32).swapaxes(1, 2)
    with rp.memory_limit(1 << 40):
        rp.attention(q, k, k, position=rp.Rotary(depth), backend="numba")
    assert 0 < max(lent) <= max(parts.get("workspaces of threads", 0) for parts in counted)


# Products in every layout that is read where it lies, or that a kernel or NumPy may have to copy.
PRODUCTS = {
    "C order": lambda: np.zeros((4, 256, 300)),
    "every other column": lambda: np.zeros((4, 256, 600))[:, :, ::2],
    "fewer rows": lambda: np.zeros((4, 512, 300))[:, ::2],
    "columns first": lambda: np.zeros((4, 300, 256)).swapaxes(1, 2),
    "big-endian": lambda: np.zeros((4, 256, 300), ">f8"),
    "misaligned": lambda: np.zeros(4 * 256 * 300 * 8 + 1, np.uint8)[1:].view(np.float64).reshape(4, 256, 300),
}


# Where a result goes: a new array, or one of the caller's that is filled as it lies, or copied to.
OUTS = {
    "new": lambda shape: {},
    "out": lambda shape: {"out": np.empty(shape)},
    "out, every other column": lambda shape: {"out": np.empty((*shape[:-1], 2 * shape[-1]))[..., ::2]},
}


@pytest.mark.parametrize("where", OUTS)
@pytest.mark.parametrize("layout", PRODUCTS)
@pytest.mark.parametrize("variant", get_args(Shift))
@pytest.mark.parametrize("backend", HOST)
def test_row_37_rel_shift(backend, variant, layout, where, asked, monkeypatch):
    """In memory that is traced, which the pool's is not."""
    monkeypatch.setattr(results, "_chosen", 0)
    x = PRODUCTS[layout]()
    out = OUTS[where](rp.rel_shift(x, variant=variant).shape)

    def call(backend):
        return rp.rel_shift(x, variant=variant, backend=backend, **out)

    if np.may_share_memory(call(backend), x):
        with rp.memory_limit(1 << 16):  # a view takes nothing
            call(backend)
    else:
        judge(call, backend, asked)


CONVERTED = {
    "float16 mask": lambda n: {"mask": np.zeros((n, n), np.float16)},
    "float64 mask": lambda n: {"mask": np.zeros((n, n))},
    "big-endian mask": lambda n: {"mask": np.zeros((n, n), ">f4")},
    "selection": lambda n: {"selected": np.zeros((n, n), np.int64)},
    "selection and mask": lambda n: {"selected": np.zeros((n, 1), np.int64), "mask": np.zeros((n, n), np.float16)},
    "dropout": lambda n: {"dropout": 0.5, "rng": np.random.default_rng(0)},
}


@pytest.mark.parametrize("name", CONVERTED)
@pytest.mark.parametrize("function", ["attention", "attention_vjp", "logits"])
def test_row_37_what_is_refused_has_converted_nothing(function, name):
    """Masks and selections of half a megabyte and more, beside the small things that a refused call may take."""
    q, options = np.zeros((1, 512, 4), np.float32), CONVERTED[name](512)
    operands, more = (q, q, q), {"grad_out": q} if function == "attention_vjp" else {}
    if function == "logits":
        operands, options = (q, q), {key: x for key, x in options.items() if key not in ("dropout", "rng")}
    for backend in HOST:
        with rp.memory_limit(PYTHON):
            for _ in range(2):  # the first call imports
                used, refusal = peak(lambda b: getattr(rp, function)(*operands, **options, **more, backend=b), backend)
        assert refusal is not None
        assert used <= 2 * PYTHON


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_row_37_a_refused_call_changes_nothing(dropout, backend):
    """Neither what is passed in nor the state of the generator."""
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((2, 40, 8)).astype(np.float32) for _ in range(3)]
    copies = [x.copy() for x in arrays]
    out = np.full((2, 40, 8), 7, np.float32)
    state = rng.bit_generator.state
    options = {"dropout": dropout, "rng": rng, "position": rp.T5(np.ones((32, 2), np.float32))}
    for limit in (0, 1000, 32_000):
        with (
            rp.memory_limit(limit),
            pytest.raises(rp.RelposMemoryError, match=rf"attention: asks for \d+ bytes.* {limit} bytes"),
        ):
            rp.attention(*arrays, **options, backend=backend, out=out)
    assert (out == 7).all()
    assert rng.bit_generator.state == state
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)
    rp.attention(*arrays, **options, backend=backend, out=out)
    assert not (out == 7).any()


def test_row_37_the_result_is_not_counted_where_it_is_given(asked):
    q = np.zeros((1, 4096, 64), np.float32)
    out = np.empty_like(q)
    with rp.memory_limit(1 << 40):
        rp.attention(q, q, q)
        without = max(asked)
        asked.clear()
        rp.attention(q, q, q, out=out)
    assert without - max(asked) == out.nbytes


@pytest.mark.parametrize("options", [{}, {"sinks": np.zeros(2)}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
@pytest.mark.parametrize("backend", HOST)
def test_row_37_results_that_do_not_go_straight_to_out_are_counted(backend, layout, options, asked, monkeypatch):
    """Of many rows, so that the result is larger than all else; in memory that is traced, which the pool's is not."""
    monkeypatch.setattr(results, "_chosen", 0)
    q, k, v = np.zeros((2, 10_000, 4)), np.zeros((2, 2, 4)), np.zeros((2, 2, 50))
    shapes = {"rows": (2, 10_000, 50), "columns": (2, 50, 10_000), "every other": (2, 20_000, 50)}
    out = np.empty(shapes[layout])
    out = {"rows": out, "columns": out.swapaxes(1, 2), "every other": out[:, ::2]}[layout]
    judge(lambda name: rp.attention(q, k, v, out=out, backend=name, **options), backend, asked)


def test_row_37_kernels_need_no_matrix_of_scores():
    """The limit that the default backend works under is far below what the reference asks for."""
    q = np.zeros((4, 2048, 32), np.float32)
    with rp.memory_limit(16 << 20):
        rp.attention(q, q, q, backend="numba")
        with pytest.raises(rp.RelposMemoryError, match="dense matrices of scores"):
            rp.attention(q, q, q, backend="numpy")
        with pytest.raises(rp.RelposMemoryError, match="dropout's mask"):
            rp.attention(q, q, q, backend="numba", dropout=0.5, rng=np.random.default_rng())


@pytest.mark.parametrize("bad", [-1, 1.0, "1 GiB", True, [1]])
def test_row_37_limits_that_are_none(bad):
    for use in (rp.set_memory_limit, lambda limit: rp.memory_limit(limit).__enter__()):
        with pytest.raises(rp.RelposError, match="limit"):
            use(bad)
    assert memory.limit() is None


def test_row_37_whose_limit_holds():
    """The innermost block, then the process, then the environment; each thread has its own blocks."""
    q = np.ones((1, 5, 4), np.float32)
    try:
        rp.set_memory_limit(np.int64(10))
        with pytest.raises(rp.RelposMemoryError, match="limit of 10 bytes"):
            rp.attention(q, q, q)
        with rp.memory_limit(None):
            rp.attention(q, q, q)
            with rp.memory_limit(20), pytest.raises(rp.RelposMemoryError, match="limit of 20 bytes"):
                rp.attention(q, q, q)
            with ThreadPoolExecutor(1) as pool, pytest.raises(rp.RelposMemoryError, match="limit of 10 bytes"):
                pool.submit(rp.attention, q, q, q).result()
    finally:
        rp.set_memory_limit(None)
    rp.attention(q, q, q)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "said"), [("30", "limit of 30 bytes"), ("1 GiB", "RELPOS_MEMORY_LIMIT: expected bytes"), ("", "fine")]
)
def test_row_37_a_limit_from_the_environment(value, said):
    code = (
        "q = np.ones((1, 5, 4), np.float32)\n"
        "try: rp.attention(q, q, q); print('fine')\n"
        "except rp.RelposError as error: print(error)\n"
        "rp.set_memory_limit(None); rp.attention(q, q, q)"
    )
    status, out, log = child(code, RELPOS_MEMORY_LIMIT=value)
    assert status == 0, log
    assert said in out


def spread(*shape):
    """An array of any size that is one number in memory."""
    return np.broadcast_to(np.float32(1), shape)


def absurd():
    """Calls that no machine can answer, though their operands take 4 bytes."""
    many = spread(1, 1 << 25, 1)
    far = spread(1, 1 << 40, 1)
    batch = spread(1 << 30, 1, 1 << 16, 1)
    yield "scores of 4 PiB", lambda **o: rp.attention(many, many, many, **o), ("numpy", "terms")
    yield "scores of 2**82 bytes", lambda **o: rp.attention(far, far, far, **o), ("numpy", "terms")
    yield "gradients of 2**82 bytes", lambda **o: rp.attention_vjp(far, far, far, grad_out=far, **o), ("numpy", "terms")
    yield "scores to look at", lambda **o: rp.logits(many, many, **o), HOST
    yield "more scores to look at", lambda **o: rp.logits(far, far, **o), HOST
    yield "a result of 256 TiB", lambda **o: rp.attention(batch, spread(1, 2, 1), spread(1, 2, 1), **o), ("numba",)
    yield "a result of 4 TiB", lambda **o: rp.attention(far, spread(1, 300, 1), spread(1, 300, 1), **o), ("numba",)
    yield (
        "a result of 4 TiB to prepare",
        lambda **o: rp.prepare(far, spread(1, 300, 1), spread(1, 300, 1), **o),
        ("numba",),
    )
    mask = spread(1, 1).astype(bool)
    yield "a mask of 2**80 pairs", lambda **o: rp.attention(far, far, far, mask=mask, **o), HOST
    rng = np.random.default_rng(0)
    yield "dropout of 2**50 pairs", lambda **o: rp.attention(many, many, many, dropout=0.5, rng=rng, **o), HOST
    yield "a shift", lambda **o: rp.rel_shift(spread(1 << 36, 100, 200), variant="transformer_xl", **o), ("numpy",)
    yield "a copied shift", lambda **o: rp.rel_shift(spread(1 << 36, 100, 200), variant="conformer", **o), ("numba",)


ABSURD = {name: (call, backends) for name, call, backends in absurd()}


@pytest.mark.parametrize("name", ABSURD)
def test_row_37_requests_that_no_machine_can_satisfy(name):
    """Without a limit the system's refusal is this library's error, and says how many bytes."""
    call, backends = ABSURD[name]
    for backend in backends:
        with pytest.raises(rp.RelposMemoryError, match=r"bytes|[KMGTPE]iB") as caught:
            call(backend=backend)
        assert isinstance(caught.value, MemoryError)
        with rp.memory_limit(1 << 30), pytest.raises(rp.RelposMemoryError):
            call(backend=backend)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("by", ["token", "channel"])
def test_row_37_codes(by, dtype, asked):
    x = np.ones((4, 300, 64), dtype)
    judge(lambda backend: rp.quantize(x, by=by), "numpy", asked)


def test_row_37_every_public_function_says_what_it_takes_or_needs_little():
    """A new function of the API must be judged here as well."""
    # A configuration is read into a plan of a few kilobytes; what its layers compute is a call of `attention`.
    # A model of ONNX and a file have limits of their own (tests/parity/test_to_onnx.py, tests/test_bad_files.py).
    # Tokens are written where there is memory; pages are gathered within the limit (tests/test_paged.py).
    small = {"from_config", "load_npz", "paged_attention", "to_onnx", "write_pages"}
    judged = {"attention", "attention_vjp", "logits", "prepare", "quantize", "rel_shift"} | small
    functions = {name for name in rp.__all__ if inspect.isfunction(getattr(rp, name))}
    assert functions - judged == {
        *("get_num_threads", "memory_limit", "set_backend", "set_memory_limit", "set_num_threads", "set_precision"),
        *("show_versions", "threads", "use_backend", "use_precision"),
    }
