"""Measure attention on this machine's GPU: ``python asv_bench/gpu.py --out FILE``.

Needs this package, Numba with CUDA, and torch for what it is compared with. The result of each call is compared with
the float64 reference before the call is timed; one that is wrong is not timed. Then the calls of a row take turns, in
an order that changes from round to round, and times are those between two CUDA events. FILE is written again after each
row. The exit status is 1 if a result of this library was wrong or a call of it failed.

``NUMBA_ENABLE_CUDASIM=1 python asv_bench/gpu.py --tiny`` tries the script in Numba's simulator, whose times mean
nothing. ``--tiny --rounds 0`` runs every kernel once on small shapes, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
# The library beside this file is measured, installed or not.
sys.path[:0] = [path for path in [str(HERE), str(HERE.parent)] if path not in sys.path]

import numpy as np  # noqa: E402
from benchmarks.shapes import SHAPES, Shape, as_mapping, lacking, make, wide  # noqa: E402

import relpos_np as rp  # noqa: E402
from relpos_np._commands.peers import OURS, UnavailableError  # noqa: E402
from relpos_np.testing import tolerance  # noqa: E402
from relpos_np.versions import of_packages  # noqa: E402

UNIT = "RELPOS_CUDA_UNIT"
PACKAGES = (
    *("relpos-np", "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm"),
    *("nvidia-nvjitlink", "nvidia-cuda-nvrtc", "torch", "triton", "ml_dtypes"),
)
SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"

# The calls that are timed beside OURS, and what they do.
MATRIX = f"{OURS}, matrix units"
SDPA, FLEX, INSIDE, EAGER = "torch sdpa", "torch flex", "torch sdpa, bias inside", "torch eager"
TURNED, AUTOGRAD, COPY = "torch sdpa, turned inside", "torch autograd", "copy"
WORDS = {
    OURS: "this library, products on the units that it chooses",
    MATRIX: f"this library with {UNIT}=mma",
    SDPA: "scaled_dot_product_attention, bias built before the call",
    INSIDE: "scaled_dot_product_attention, bias built inside the call",
    TURNED: "queries and keys turned by products with cosines and sines, then scaled_dot_product_attention",
    FLEX: "flex_attention, compiled, score_mod reads from the table, full float32 precision",
    EAGER: "products, softmax and products as models write them",
    AUTOGRAD: "bias gathered from the table, attention, and gradients of operands and table by autograd",
    COPY: "as many bytes as the result has, copied from device to device",
}

# Scores of the seeded inputs stay below this, in every row.
SCORES = 12.0
# Calls of other libraries that deviate more compute something else.
WORST = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 3e-2}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Shifted:
    """Products with distances for rel_shift."""

    heads: int
    q_len: int
    columns: int
    words: str
    storage: str = "float32"


@dataclass(frozen=True)
class Row:
    """A task ("attention", "backward", or a variant of rel_shift) at a shape, and the calls timed beside ours."""

    name: str
    task: str
    shape: Shape | Shifted
    calls: tuple[str, ...] = ()

    @property
    def shifts(self):
        return isinstance(self.shape, Shifted)


def t5(batch, heads, length, storage="float32"):
    return Shape("t5", batch, heads, length, length, 64, "T5 bias", storage=storage)


def decoding(keys, storage):
    return Shape("alibi", 1, 32, 1, keys, 128, "ALiBi, one query", storage=storage)


def square(kind, batch, length, words, *, causal=False):
    return Shape(kind, batch, 16, length, length, 64, words, causal=causal)


def memory(heads, q_len, k_len):
    words = f"Transformer-XL, causal, {k_len - q_len} keys of memory"
    return Shape("transformer_xl", 1, heads, q_len, k_len, 64, words, causal=True)


SHAW = Shape("shaw", 1, 16, 1024, 1024, 64, "Shaw, k = 16, on keys and values")
ROWS = (
    Row("t5-2048", "attention", t5(4, 16, 2048), (MATRIX, SDPA, FLEX)),
    Row("t5-2048-gradient", "backward", t5(4, 16, 2048), (AUTOGRAD,)),
    Row("t5-2048-bfloat16", "attention", t5(4, 16, 2048, "bfloat16"), (MATRIX, SDPA)),
    Row("t5-2048-float16", "attention", t5(4, 16, 2048, "float16"), (MATRIX, SDPA)),
    Row("conformer", "conformer", Shifted(16, 2048, 4095, "2048 queries and keys"), (COPY,)),
    Row("t5-1024", "attention", t5(4, 16, 1024), (SDPA, FLEX)),
    Row("t5-4096", "attention", t5(4, 16, 4096), (SDPA, FLEX)),
    Row("t5-1024-gradient", "backward", t5(4, 16, 1024), (AUTOGRAD,)),
    Row("t5-4096-gradient", "backward", t5(1, 16, 4096), (AUTOGRAD,)),
    Row("transformer_xl-shift", "transformer_xl", Shifted(16, 2048, 2048, "2048 queries and keys"), (COPY,)),
    Row("decode-16384", "attention", decoding(16384, "float32"), (SDPA,)),
    Row("decode-16384-bfloat16", "attention", decoding(16384, "bfloat16"), (SDPA,)),
    Row("decode-4096-float16", "attention", decoding(4096, "float16"), (SDPA,)),
    Row("plain-2048", "attention", square("plain", 4, 2048, "no positions"), (SDPA,)),
    Row("causal-2048", "attention", square("plain", 4, 2048, "no positions, causal", causal=True), (SDPA,)),
    Row("rotary-2048", "attention", square("rotary", 1, 2048, "rotary, causal", causal=True), (TURNED,)),
    Row("transformer_xl", "attention", memory(16, 1024, 2048), (INSIDE, EAGER)),
    Row("shaw", "attention", SHAW, (EAGER,)),
    Row("windows", "attention", SHAPES["D"], (SDPA,)),
    Row("windows-rstt", "attention", SHAPES["E"], (SDPA,)),
    Row("windows-gradient", "backward", replace(SHAPES["D"], batch=256), (AUTOGRAD,)),
    Row("transformer_xl-gradient", "backward", memory(8, 512, 1024), (AUTOGRAD,)),
    Row("shaw-gradient", "backward", replace(SHAW, heads=8, q_len=512, k_len=512), (AUTOGRAD,)),
)
NAMES = tuple(row.name for row in ROWS)


def tiny(row):
    """The row at a size that the simulator bears and that no tile divides."""
    shape = row.shape
    if row.shifts:
        columns = 9 if row.task == "conformer" else 5
        return replace(row, shape=replace(shape, heads=2, q_len=5, columns=columns))
    few = {"batch": 1, "heads": 2, "head_dim": 4}
    if shape.kind not in ("window", "rstt"):
        few["q_len"] = 1 if shape.q_len == 1 else 18
        few["k_len"] = few["q_len"] if shape.q_len == shape.k_len else 37
    return replace(row, shape=replace(shape, **few))


# The device


def cuda():
    """numba.cuda, or an error in the driver's words."""
    from relpos_np.kernels._cuda.launch.device import module

    return module()


def simulated():
    """Whether this process runs Numba's simulator."""
    from relpos_np.kernels._cuda.launch.device import simulated

    return simulated()


@cache
def torch_on_device():
    """Torch with float32 products in float32, on the host in the simulator; an error says why there is none."""
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"torch cannot be imported: {error}") from error
    if not simulated() and not torch.cuda.is_available():
        raise UnavailableError(f"torch {torch.__version__} sees no GPU (it was built for CUDA {torch.version.cuda})")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch


def placed(x):
    """A new tensor with the same numbers on the device."""
    return x.clone() if simulated() else x.to("cuda", copy=True)


def as_tensor(x):
    """An array as a tensor on the device."""
    torch_on_device()
    from relpos_np._commands.peers.with_torch import tensor

    return placed(tensor(np.ascontiguousarray(x)))


def upload(x):
    """An array as callers hold it: a tensor, or numba.cuda's array without torch; in the simulator a copy."""
    if simulated():
        return x.copy()
    try:
        return as_tensor(x)
    except UnavailableError:
        if x.dtype.name == "bfloat16":
            raise
        return cuda().to_device(x)


def download(x):
    """A result of any library as NumPy, half precision widened."""
    if hasattr(x, "copy_to_host"):
        return wide(x.copy_to_host())
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if x.dtype.itemsize == 2 else x).numpy()
    if hasattr(x, "__cuda_array_interface__"):
        return wide(cuda().as_cuda_array(x).copy_to_host())
    return wide(np.asarray(x))


def times_ms(calls):
    """The time of each call by events on the default stream; by the clock in the simulator."""
    if simulated():
        stamps = [time.perf_counter()]
        for call in calls:
            call()
            stamps.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(stamps)]
    module = cuda()
    events = [(module.event(), module.event()) for _ in calls]
    for (start, end), call in zip(events, calls, strict=True):
        start.record()
        call()
        end.record()
    module.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


def sets_for(amount):
    """How many sets of operands of so many bytes the second-level cache cannot hold: two at least."""
    size = 0 if simulated() else cuda().get_current_device().L2_CACHE_SIZE
    return int(min(max(2, -(-2 * size // max(amount, 1)) + 1), 48))


def output_of(*command):
    """What a program prints, or why it did not."""
    try:
        return subprocess.check_output(command, text=True, timeout=20, cwd=HERE).strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"


def environment():
    """The device, the driver, versions, and torch's settings."""
    found = {"device": {"name": "Numba's simulator"}}
    if not simulated():
        unit = cuda().get_current_device()
        name = unit.name.decode() if isinstance(unit.name, bytes) else str(unit.name)
        found["device"] = {
            "name": name,
            "compute_capability": list(unit.compute_capability),
            "multiprocessors": int(unit.MULTIPROCESSOR_COUNT),
            "l2_cache_bytes": int(unit.L2_CACHE_SIZE),
        }
        found["cuda"] = ".".join(map(str, cuda().runtime.get_version()))
        found["nvidia_smi"] = output_of("nvidia-smi", f"--query-gpu={SMI}", "--format=csv")
    found["versions"] = {"python": platform.python_version()} | of_packages(PACKAGES)
    found["commit"] = os.environ.get("RELPOS_COMMIT") or output_of("git", "rev-parse", "HEAD")
    try:
        torch = torch_on_device()
        settings = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
        found["torch"] = {name: getattr(torch.backends.cuda, name)() for name in settings}
        found["torch"]["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    except UnavailableError as error:
        found["torch"] = str(error)
    return found


# What is timed


class Prepared:
    """Calls on sets of operands in turn; `unit` is what this library multiplies with."""

    def __init__(self, call, sets, to_numpy=download, unit="auto"):
        self.call, self.sets, self.to_numpy, self.unit = call, sets, to_numpy, unit
        self.turn = 0

    def __call__(self):
        self.turn = (self.turn + 1) % len(self.sets)
        os.environ[UNIT] = self.unit
        return self.call(*self.sets[self.turn])

    def answer(self):
        """The result for a set, on the host."""
        return self.to_numpy(self())


def ours(name, row, subject, count):
    """This library's call."""
    if row.shifts:
        sets = [[upload(subject)] for _ in range(count)]
        return Prepared(lambda x: rp.rel_shift(x, variant=row.task, backend="cuda"), sets)
    if reason := lacking(row.shape):
        raise UnavailableError(reason)
    options = subject.kwargs | {"backend": "cuda"}
    arrays = [subject.q, subject.k, subject.v]
    if row.task == "attention":
        sets = [list(map(upload, arrays)) for _ in range(count)]
        unit = "mma" if name == MATRIX else "auto"
        return Prepared(lambda q, k, v: rp.attention(q, k, v, **options), sets, unit=unit)
    sets = [list(map(upload, [*arrays, subject.grad_out])) for _ in range(count)]

    def gradients(found):
        return {name: download(x) for name, x in as_mapping(found).items()}

    return Prepared(lambda q, k, v, g: rp.attention_vjp(q, k, v, grad_out=g, **options), sets, gradients)


def copy(row, x, count):
    """A copy of as many bytes as rel_shift's result has."""
    source = x[..., : keys_of(row)].ravel()
    sets = [(cuda().to_device(source), cuda().device_array(source.size, x.dtype)) for _ in range(count)]
    return Prepared(lambda given, taken: taken.copy_to_device(given), sets)


def turned(held):
    """Rotary positions as models apply them, with cosines and sines made before the call."""
    torch = torch_on_device()
    length, depth = held.shape.k_len, held.shape.head_dim
    speed = 10000.0 ** (-torch.arange(0, depth, 2, dtype=torch.float64) / depth)
    angles = (torch.arange(length, dtype=torch.float64)[:, None] * speed).repeat(1, 2)
    cosines, sines = (f(angles).float().to(held.q.device) for f in (torch.cos, torch.sin))

    def turn(x):
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-second, first], dim=-1) * sines

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(turn(held.q), turn(held.k), held.v, is_causal=True)


def with_torch(name, row, subject, count):
    """Torch's call on the device, from the class that `relpos bench` runs on the host."""
    torch = torch_on_device()
    from relpos_np._commands.peers import with_torch as peer

    torch.set_grad_enabled(name == AUTOGRAD)
    # Turning is no part of what it holds.
    plain = replace(subject, shape=replace(row.shape, kind="plain"))
    held = peer.Operands(plain if name == TURNED else subject)
    for attribute, x in vars(held).items():
        if isinstance(x, torch.Tensor):
            setattr(held, attribute, placed(x))
    held.arrays = {key: placed(x) for key, x in held.arrays.items()}
    sets = [[placed(x) for x in (held.q, held.k, held.v)] for _ in range(count)]
    if name == AUTOGRAD:
        return gradients_of(torch, held, sets, as_tensor(subject.grad_out))
    runs = {INSIDE: held.sdpa, EAGER: held.eager}
    if name == FLEX:
        runs[FLEX] = peer.flex(subject, held).call
    elif name == TURNED:
        runs[TURNED] = turned(held)
    elif name == SDPA:
        bias = None if row.shape.kind == "plain" else held.bias().contiguous()
        options = {"attn_mask": bias, "is_causal": row.shape.kind == "plain" and row.shape.causal}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        runs[SDPA] = lambda: sdpa(held.q, held.k, held.v, **options)

    def call(*operands):
        held.q, held.k, held.v = operands
        return runs[name]()

    return Prepared(call, sets)


def gradients_of(torch, held, sets, gradient):
    """Positions' part from the tables, attention, and the gradients of operands and tables, in one call."""
    run = held.eager if held.shape.kind == "shaw" else held.sdpa
    tables = [x.requires_grad_() for x in held.arrays.values()]
    names = ["q", "k", "v", *(f"position {name}" for name in held.arrays)]

    def call(*operands):
        held.q, held.k, held.v = operands
        if held.shape.kind == "transformer_xl":
            # The copy that it holds was made before any gradient was wanted.
            held.rows = held.arrays["rows"].permute(1, 2, 0)
        return torch.autograd.grad(run(), [*operands, *tables], gradient)

    def to_numpy(found):
        return {name: download(x) for name, x in zip(names, found, strict=True)}

    return Prepared(call, [[x.requires_grad_() for x in operands] for operands in sets], to_numpy)


def prepare(name, row, subject, count):
    """One call of a row."""
    if name == COPY:
        return copy(row, subject, count)
    return (ours if name in (OURS, MATRIX) else with_torch)(name, row, subject, count)


# What is right


def keys_of(row):
    """Columns of rel_shift's result."""
    return row.shape.columns - (row.shape.q_len - 1 if row.task == "conformer" else 0)


def inputs(row):
    """Seeded inputs, and bytes that a call must read and write at least."""
    shape = row.shape
    if row.shifts:
        x = np.random.default_rng(0).standard_normal((shape.heads, shape.q_len, shape.columns), dtype=np.float32)
        return x, 2 * x.itemsize * shape.heads * shape.q_len * keys_of(row)
    subject = make(shape)
    return subject, subject.bytes * (2 if row.task == "backward" else 1)


class Exact:
    """The float64 answer of a row, and how far a call may be from it."""

    def __init__(self, row, subject):
        self.row, self.subject = row, subject
        if row.shifts:
            self.answer = rp.rel_shift(subject, variant=row.task, backend="numpy")
        else:
            self.answer = subject.exact() if row.task == "attention" else subject.exact_gradients()

    def allowed(self, name):
        """The largest error that rounding explains; for other libraries, one that another formula would exceed."""
        shape = self.row.shape
        if self.row.shifts:
            return 0.0
        if name not in (OURS, MATRIX):
            return WORST[shape.storage]
        if self.row.task == "backward":
            # In proportion to the largest entry; scores are computed twice, and sums are as long as the sequence.
            return 2 * float(tolerance("float32", logit_bound=SCORES, depth=max(shape.q_len, shape.k_len)))
        largest = float(np.abs(wide(self.subject.v)).max())
        found = float(tolerance("float32", logit_bound=SCORES)) * largest
        if shape.storage != "float32":
            found += EPS[shape.storage] * float(np.abs(self.answer).max())
            if name == MATRIX:
                # Weights are rounded too.
                found += EPS[shape.storage] / 2 * largest
        return found

    def error(self, found):
        """The largest deviation: absolute, of gradients in proportion to the largest entry."""
        if self.row.shifts:
            return float(np.abs(found - self.answer).max())
        judged = self.subject.error if self.row.task == "attention" else self.subject.gradient_error
        return float(judged(found, self.answer))


def checked(name, row, subject, count, exact):
    """A call whose answer is right or None, and what is recorded of it."""
    try:
        call = prepare(name, row, subject, count)
        if name == COPY:
            return call, {"status": "right", "error": None}
        error, allowed = exact.error(call.answer()), exact.allowed(name)
    except UnavailableError as reason:
        return None, {"status": "missing", "reason": str(reason)}
    except Exception as reason:  # noqa: BLE001 - recorded, and the others are still measured
        return None, {"status": "failed", "reason": f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:500]}
    found = {"status": "right", "error": error, "allowed": allowed}
    if not error <= allowed:
        return None, found | {"status": "wrong", "reason": f"deviates from float64 by {error:.2e}"}
    return call, found


def alternate(calls, rounds, seconds):
    """Times of every call in ms, a list for each round; the order turns from round to round."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        times_ms([call])
        counts[name] = int(min(max(1, seconds / (times_ms([call])[0] / 1e3)), 50))
    names = list(calls)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            # The first is not counted: others have used the device meanwhile.
            times[name].append(times_ms([calls[name]] * (counts[name] + 1))[1:])
    return times


def measure(row, rounds, seconds):
    """Check and time all calls of a row."""
    shape = row.shape
    subject, amount = inputs(row)
    sizes = ("heads", "q_len", "columns") if row.shifts else ("batch", "heads", "q_len", "k_len", "head_dim")
    operations = None
    if not row.shifts:
        operations = int(subject.operations if row.task == "attention" else subject.backward_operations)
    found = {
        "task": "rel_shift" if row.shifts else row.task,
        "words": shape.words,
        "shape": [getattr(shape, size) for size in sizes],
        "storage": shape.storage,
        "bytes": amount,
        "operations": operations,
        "sets": sets_for(amount),
        "calls": {},
    }
    exact, calls = Exact(row, subject), {}
    for name in (OURS, *row.calls):
        call, found["calls"][name] = checked(name, row, subject, found["sets"], exact)
        if call:
            calls[name] = call
    if not rounds:
        return found
    times = alternate(calls, rounds, seconds)
    for name, past in times.items():
        every = [t for turn in past for t in turn]
        median = statistics.median(every)
        one = {"median_ms": median, "best_ms": min(every), "calls": len(every), "gbs": amount / median / 1e6}
        if operations:
            one["tflops"] = operations / median / 1e9
        if OURS in times:
            turns = [[statistics.median(turn) for turn in times[who]] for who in (name, OURS)]
            one["times_ours"] = statistics.median(x / y for x, y in zip(*turns, strict=True))
        found["calls"][name] |= one
    return found


def line(name, found):
    """A row in the terminal."""
    parts = [
        f"{call} {one['median_ms']:.4g} ms" if "median_ms" in one else f"{call} {one.get('reason', one['status'])}"
        for call, one in found["calls"].items()
    ]
    return f"{name}: {'; '.join(parts)}"


def arguments(argv):
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the record; by default nothing is written")
    parser.add_argument("--rows", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=7, help="0: results are checked and nothing is timed")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one turn")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    found = parser.parse_args(argv)
    found.rows = [name for name in found.rows.split(",") if name]
    for name in found.rows:
        if name not in NAMES:
            parser.error(f"--rows: there is no row {name!r}")
    try:
        cuda()
    except rp.RelposImportError as error:
        parser.error(f"nothing can be measured: {error}")
    if simulated() and not found.tiny:
        parser.error("--tiny is needed in the simulator")
    return found


def main(argv=None):
    """Check, measure, record."""
    asked = arguments(argv)
    warnings.simplefilter("ignore")
    if simulated():
        from tests import fibers

        fibers.install()
    record = {"date": time.strftime("%Y-%m-%d"), "simulated": simulated(), "tiny": asked.tiny, "rounds": asked.rounds}
    record |= environment() | {"words": WORDS, "complete": False, "rows": {}}
    status = 0
    for row in (row for row in ROWS if row.name in asked.rows):
        found = measure(tiny(row) if asked.tiny else row, asked.rounds, asked.seconds)
        record["rows"][row.name] = found
        record["complete"] = len(record["rows"]) == len(set(asked.rows))
        if any(one["status"] in ("wrong", "failed") for name, one in found["calls"].items() if name in (OURS, MATRIX)):
            status = 1
        print(line(row.name, found), flush=True)
        if asked.out:
            asked.out.parent.mkdir(exist_ok=True, parents=True)
            asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
