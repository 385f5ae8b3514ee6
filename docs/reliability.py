"""Write reliability.md, faults.md and determinism.md from records, tests and tables: ``python docs/reliability.py``."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RECORDED = ROOT / "asv_bench" / "recorded"

# What happens on bad input and faults: the input, and what happens. "E" is an exception before anything is written.
ROWS: Mapping[int, tuple[str, str]] = {
    1: ("a query that may attend no key", "its row is 0, its log-sum-exp -inf; no NaN, no warning"),
    2: ("all queries of a batch item without keys", "zeros"),
    3: (
        "a float mask with a large negative number on a whole row",
        "as written: the mean of the values, down to the lowest number that there is; only -inf masks",
    ),
    4: ("a row whose scores are all below -1e5", "the softmax, not 0"),
    5: ("+inf in q, k or the bias", "NaN in the rows that attend it, the others untouched"),
    6: ("NaN in query i", "NaN in row i only"),
    7: ("NaN or infinity in a key or value that is excluded", "it is not read: the result is finite"),
    8: ("NaN in a value that is attended", "NaN in its column of the rows that attend it"),
    9: ("scores up to the largest number", "finite: the largest takes all"),
    10: ("products beyond the largest float32", "NaN or infinity in that row, no crash; float64 is finite up to 1e150"),
    11: (
        "subnormal inputs",
        "the same on every CPU backend, in kernels also if the caller counts them as 0; a GPU may take them as 0",
    ),
    12: ("no queries", "an empty result"),
    13: ("no keys", "zeros"),
    14: ("no batch items or no heads", "an empty result"),
    15: ("head_dim 0", "E: RelposValueError"),
    16: ("values of another depth than keys", "works"),
    17: ("one token, less than a window, odd and rectangular windows", "as independent implementations have it"),
    18: ("L_q other than L_k without an offset", "queries are the last positions: offset L_k - L_q"),
    19: ("an offset that leaves early queries without keys", "zeros"),
    20: ("a map that is no multiple of the window, and a shift", "pad_order says which comes first"),
    21: (
        "strided, transposed, reversed and broadcast views",
        "the bits of a contiguous copy; nothing is written to them",
    ),
    22: ("read-only operands", "works"),
    23: ("out= that is read-only or overlaps an operand", "E: RelposValueError"),
    24: ("a buffer that is not aligned", "works, on a copy"),
    25: ("big-endian operands", "works, converted"),
    26: ("float16 and bfloat16", "sums in float32, rounded once; products of bfloat16 as `precision` says"),
    27: ("long double, complex", "E: RelposTypeError"),
    28: ("integers or bools as q, k, v", "E: RelposTypeError"),
    29: ("arrays of objects, lists", "E: RelposTypeError; nothing is unpickled or called"),
    30: ("a MaskedArray", "E: RelposTypeError"),
    31: ("a matrix; other subclasses of ndarray", "E: RelposTypeError; others are read as plain arrays"),
    32: ("a mask of integers; a mask of floats", "E: RelposTypeError; floats are added"),
    33: ("a mask or a table of the wrong shape", "E: RelposValueError that names both shapes"),
    34: ("an index outside its table", "E: RelposIndexError, before any kernel runs"),
    35: ("sizes of buckets that make no sense", "E: RelposValueError"),
    36: ("more than 2³¹ elements", "right, or E: RelposValueError; indices have 64 bits"),
    37: (
        "a request beyond the memory limit",
        "E: RelposMemoryError with the bytes asked for, before they are allocated",
    ),
    38: ("many threads of Python call at once", "the bits of one after the other, on every threading layer"),
    39: ("a fork after a parallel call", "the child works"),
    40: ("Ctrl-C in a long call", "KeyboardInterrupt within a second"),
    41: ("an exception or interrupt half way", "out= holds anything; nothing leaks, and the next call is right"),
    42: ("fast-math", "not used where NaN or infinity decide"),
    43: ("a kernel cache that is read-only, damaged, stale or shared", "works, with at most one warning"),
    44: ("no Numba, no GPU, no other package", "NumPy's backends work; a kernel is an ImportError with the remedy"),
    45: (
        "no device, no memory left on it, another device's array",
        "E with its cause; the device is usable afterwards",
    ),
    46: ("np.seterr(all='raise'), -W error, other locales and hash seeds", "the same bits, no exception"),
    47: ("requests to the example of a service, damaged or made to do harm", "status 400 or 413, bounded memory"),
    48: ("any number among a scheme's arguments", "time and memory follow the operands and arrays, or E"),
    49: (
        "a worker of a Dask cluster that is killed, paused, restarted or out of memory; a scheduler that dies",
        "costs time, and no bit of the result; of the scheduler Dask's FutureCancelledError, at once",
    ),
    50: ("an import in another interpreter of the process", "NumPy's ImportError; the main interpreter goes on"),
}

COLUMNS: Mapping[str, str] = {
    "again": "again",
    "threads": "threads",
    "batch": "batch",
    "heads": "heads",
    "padding": "padding",
    "layout": "layout",
}
_ALL = dict.fromkeys(COLUMNS, "yes")
_BLAS = dict.fromkeys(COLUMNS, "no¹")
# Whether bits are promised, for each kernel; a number leads to the reason below.
DETERMINISM: Mapping[str, Mapping[str, str]] = {
    "attention": _ALL,
    "windows": {**_ALL, "padding": "no²"},
    "decoding": {**_ALL, "padding": "no³"},
    "products": {**_ALL, "padding": "–"},
    "rel_shift": {**_ALL, "padding": "–"},
    "gradients of q, k, v": {**_ALL, "padding": "no²"},
    "gradients of tables": {**_ALL, "threads": "no⁴", "batch": "–", "heads": "–", "padding": "–"},
    "numpy": _BLAS,
    "terms": _BLAS,
    "CUDA attention": {**_ALL, "threads": "–", "padding": "yes"},
    "CUDA decoding": {**_ALL, "threads": "–", "padding": "no³"},
    "CUDA gradients": {**_ALL, "threads": "–", "padding": "yes"},
    "CUDA rel_shift": {**_ALL, "threads": "–", "padding": "–"},
}
REASONS = """\
1. Sums are those of the BLAS library below NumPy, which promises no order: it divides work by the number of threads and
   by shapes. The OpenBLAS of NumPy's wheels gives the same bits to the same call nearly always.
2. Few keys that all queries attend have a kernel of their own, for windows. With `key_lengths` the general kernel
   computes them, in another order.
3. Keys are attended in ranges whose number depends on L_k, padding included, but neither on threads nor on the batch.
4. Where a call has fewer heads in all (batch items times heads) than twice the threads, queries and keys are divided
   into ranges, whose number depends on the threads, and each has its own sums for a table. With more heads bits are the
   same for any number of threads. What the batch contributes is summed: no item has a gradient of its own.

Kernels begin with what a scheme makes. DAPE makes its bias by products of NumPy (1), and the scale of xPos has its
centre in the middle of all keys, padding included.
"""


def tests_of_rows() -> dict[int, list[str]]:
    """Files of the tests that carry a row's number in their names."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for numbers in re.findall(r"^def test_rows?_((?:\d+_)+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            for number in numbers.split("_")[:-1]:
                found[int(number)].add(path.relative_to(ROOT / "tests").as_posix())
    return {number: sorted(paths) for number, paths in found.items()}


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def recorded(name: str) -> Any:
    """A file of asv_bench/recorded, or None."""
    path = RECORDED / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def number(value: float | None) -> str:
    """Short."""
    return "" if value is None else f"{value:.3g}"


def promises() -> str:
    """The table of promises, with what was measured."""
    found = recorded("promises")
    if found is None:
        return "Not recorded yet.\n"
    rows = [
        [one["text"], f"{number(one['limit'])} {one['unit']}".strip(), number(one["measured"]), one["note"]]
        for one in found["promises"]
    ]
    soak, planted = recorded("soak"), recorded("planted")
    if soak:
        note = f"{soak['cases']['all']:,} cases in {soak['seconds'] / 60:.0f} min"
        drift = number(soak["resident_memory"]["drift_mib"])
        rows.append(["everything at once: wrong answers", "0 cases", number(soak["mismatches"]), note])
        rows.append(["everything at once: memory drift", "8 MiB", drift, note])
    if planted:
        note = f"`tests/mutation`: {planted['bugs']} bugs"
        rows.append(["planted bugs that the tests miss", "0 bugs", number(len(planted["survived"])), note])
    kernels = found["kernels"]
    where = (
        f"Measured on {found['processor']}, {kernels['threads']} threads, {kernels['vectors']}, Numba's layer "
        f"{kernels['threading_layer']}, NumPy {found['numpy']}, Numba {found['numba']}.\n\n"
    )
    return where + table(["Promise", "At most", "Measured", "Where"], rows)


def rows_of_faults() -> str:
    """What happens, and where it is tested."""
    where = tests_of_rows()
    return table(
        ["", "Input or fault", "What happens", "Tested in"],
        [[str(n), *texts, ", ".join(f"`{p}`" for p in where.get(n, [])) or "–"] for n, texts in ROWS.items()],
    )


def mutation() -> str:
    """What the tests noticed of bugs that were planted."""
    planted = recorded("planted")
    if planted is None:
        return "Not recorded yet.\n"
    words = (
        f"Of {planted['bugs']} bugs in `tests/mutation` that somebody could have made, planted one at a time, the "
        f"tests missed {len(planted['survived'])} on {planted['date']}."
    )
    return textwrap.fill(words, 120) + "\n"


def soak() -> str:
    """The run that was recorded."""
    found = recorded("soak")
    if found is None:
        return "Not recorded yet.\n"
    resident = found["resident_memory"]
    errors = found["error_in_units_of_the_tolerance"]
    names = [
        name for name in ("float16", "bfloat16", "float32", "float64") if any(name in one for one in errors.values())
    ]
    rows = [[f"`{b}`", *(number(one[n]["error"]) if n in one else "" for n in names)] for b, one in errors.items()]
    crowds = ", ".join(f"{count} ({times} rounds)" for count, times in found["python_threads_by_rounds"].items())
    words = (
        f"Recorded on {found['date']} on {found['processor']} with {found['kernel_threads']} threads per kernel, seed "
        f"{found['seed']}: {found['cases']['all']:,} cases with {found['calls']:,} judged calls in "
        f"{found['seconds'] / 60:.0f} minutes, {found['mismatches']} mismatches. Resident memory was at "
        f"{resident['early_mib']:.0f} MiB early and at {resident['late_mib']:.0f} MiB late: a drift of "
        f"{resident['drift_mib']:.1f} MiB, where {resident['limit_mib']:.0f} are allowed. Threads of Python at once: "
        f"{crowds}. The largest errors, in units of what is tolerated:"
    )
    return textwrap.fill(words, 120) + "\n\n" + table(["Backend", *names], rows)


# What each page begins with.
WRITTEN = "<!-- Written by docs/reliability.py; change that, and run it. -->\n"


def pages() -> dict[str, str]:
    """Each page by its name."""
    return {"reliability.md": reliability(), "faults.md": faults(), "determinism.md": determinism()}


def reliability() -> str:
    """What is promised, and what was measured of it."""
    return f"""\
{WRITTEN}# Reliability

What this library promises, and what was measured of it. [What faults lead to](faults.md) and
[what changes the bits of a result](determinism.md) have pages of their own.

## Promises

`relpos check --promises` measures these on your machine in about a minute; its exit code is 1 if one is broken.

{promises()}
The unit eps Σ p|v| (1 + max |s|) is one rounding of an output: a score's error is relative to its size, and the
exponential makes it a relative one of the weights. Where a score is a sum of parts, which may cancel, |s| is the sum of
their sizes, and so is each channel that a rotation makes of others. Outputs near 0 have no small error relative to
themselves, so that no number of units in the last place is promised for single elements.

However many keys there are: tiles of keys are summed in groups, and errors of 48 queries with a million keys in float32
were 3.4 eps Σ p|v| at most; those of the gradients of 48 values from a million queries were 2.9 eps Σ p|g|. Numbers
that are all equal are rounded the same way each time. Sums of them, in gradients and by row of a table, keep what they
lose; within a group it is up to 16 eps. The factor 1 + lse is what a probability may be off, by rounding of its score.

These figures are of numbers that differ. Where weights and values are all equal, such as 0.1 over equal weights,
kernels were up to 18 eps off in float32, at 383 keys as at a million. The references have no such exception: their
outputs, and gradients of q, k and v, are within 4 eps Σ p|v| of what the probabilities of their scores give, for any
numbers and any length, because they sum few keys at a time and keep what additions lose.

Masks, tables and products may be as large as the dtype has numbers, and rows may have nothing but such scores: the
kernels then give what the formulas do, on a CPU at the price of a second call.

That probabilities sum to 1 within 1e-6 would be more than float32 gives: weights and values are summed in different
orders, both sums are near 1, and the kernels are off by up to 1.3e-6, NumPy in float32 by up to 1.6e-6. The limit is 16
roundings.

## Bugs that the tests notice

{mutation()}
## Soak

`python tests/soak.py --minutes 30` draws random calls: every scheme, variant and option, shapes, masks, dtypes, memory
layouts, gradients, packed sequences, shifts, interrupts and failed allocations at any line, on several threads whose
number changes, amid forks whose children are interrupted or killed. Every answer is compared with float64, and again
with itself, bit by bit. CI does this for ten minutes each night. A case is repeated with `--seed` and `--case`.

{soak()}
Memory is what is resident after a collection of cycles, with one arena of malloc and arrays of more than 256 KiB
outside of it; the drift is the median of the last fifth of the samples less that of the first, after a quarter of the
samples as a warm-up. With its defaults glibc gives threads arenas of their own, up to eight per processor, and keeps
what was freed in them: with eight threads on two processors some hundred MiB more after minutes, which nobody holds and
which is no leak. In a server with many threads, set `MALLOC_ARENA_MAX=2`.
"""


def faults() -> str:
    """What happens on bad input and faults."""
    return f"""\
{WRITTEN}# Bad input and faults

What a call does with input that is wrong, and what it leaves behind when something fails. Every row has a test with
its number in its name. "E" is an exception, a subclass of `RelposError` unless it says otherwise, before anything is
written.

{rows_of_faults()}"""


def determinism() -> str:
    """What changes the bits of a result."""
    kinds = table(
        ["Kernel", *COLUMNS.values()], [[kernel, *(cells[c] for c in COLUMNS)] for kernel, cells in DETERMINISM.items()]
    )
    return f"""\
{WRITTEN}# Determinism

Whether a result has the same bits

- **again**: when the call is repeated, also by several threads at once;
- **threads**: for any number of threads;
- **batch**: for a batch item alone;
- **heads**: for a key head alone, with its query heads;
- **padding**: with further keys that `key_lengths` leaves out, whatever they hold;
- **layout**: for views of any strides, alignment and byte order.

{kinds}
{REASONS}
All of this is for one version of the library and of Numba on one model of processor or GPU: other vector units and
other compilers round differently. What has "no" agrees within the tolerance. `tests/test_determinism.py` and
`tests/cuda/test_cuda_determinism.py` test each cell.
"""


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
