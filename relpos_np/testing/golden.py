"""Golden vectors: writing inputs and exact answers to files, for projects in any language, and reading them back.

A set is a folder. `manifest.json` lists the records with the size and checksum of each file, and is written last. A
record is NAME.json, which says what it is, and NAME.npz (NAME.safetensors for bfloat16) with its arrays. The format is
described for readers in docs/vectors.md; `VERSION` is its number.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._files import safetensors as tensorfile
from relpos_np._files import untrusted as reading
from relpos_np.errors import RelposError, RelposImportError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing import files
from relpos_np.testing.arguments import decode
from relpos_np.testing.compare import ratio
from relpos_np.testing.files import DamagedError
from relpos_np.testing.functions import FUNCTIONS, Call
from relpos_np.testing.records import (
    BITS,
    DTYPES,
    Record,
    chosen,
    encoding_gradients,
    gradients,
    grid,
    leaves,
    plain,
    records,
    variants_of,
)
from relpos_np.types import Backend

FORMAT, VERSION = "relpos-vectors", 1
MANIFEST = "manifest.json"
# Neither a manifest nor a file of a record is ever longer.
_MANIFEST_LIMIT = 1 << 24
_RECORD_LIMIT = 1 << 28
# Of records in a grid, where one of both is given.
_LENGTHS, _DIMS = (33, 65), (64,)
# Integers that a call of a function may have, which may be lengths or channels, and their product.
_LARGEST, _PRODUCT = 1 << 13, 1 << 24
CONVENTIONS = """\
Shapes: q (B, H, L_q, D), k (B, H_kv, L_k, D), v (B, H_kv, L_k, D_v). Query head h reads key head h // (H / H_kv).
Query i stands at position i + offset among the keys; offset is L_k - L_q unless the call says otherwise.
Relative position d = j - (i + offset), negative for keys in the past.
Scores: scale q_i . k_j + what the scheme adds + a float mask; scale is 1/sqrt(D) unless the call says otherwise.
Only -inf in a float mask excludes; in a bool mask True means: may attend.
causal attends d <= 0 only, window (left, right) -left <= d <= right; null is no limit.
key_lengths: keys of a batch item from there on do not exist.
A query that may attend no key has output exactly 0 and log-sum-exp -inf.
lse is the natural logarithm of the sum of exponentials of the scores.
Keys and values that no query may attend may hold NaN.
Expected numbers are of the inputs as they are in the file, computed in float64.
They are rounded to the manifest's "bits" of the largest, or of 1; of functions each to those of float64.
An answer a is right if |a - e| <= atol for each element e; an infinity must be the same one.
atol is for arithmetic in the record's dtype (in float32 for half precision, rounded at the end).
Gradients are those of sum(out * grad_out).
"""


# ---------------------------------------------------------------------------------------------- writing


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _file(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_vectors(
    folder: Any,
    *,
    seed: int = 0,
    schemes: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] | None = None,
    head_dim: Sequence[int] | None = None,
) -> int:
    """Write the golden vectors of every scheme, variant and known divergence: the set v1, or a part of it.

    Parameters
    ----------
    folder : path-like
        Where; it must not exist or be empty.
    seed : int
        Of the random numbers. The same seed gives the same bytes on every machine.
    schemes : sequence of str, optional
        Those that are wanted, without functions; default all.
    dtypes : sequence of str
        Of "float64", "float32", "float16" and "bfloat16", whose records are .safetensors files and need the extra
        ``relpos-np[safetensors]``; default all others.
    lengths, head_dim : sequence of int, optional
        Records of these lengths of queries and keys and of these channels, in place of v1's; head_dim is 64 unless it
        is given, and lengths are 33 and 65.

    Returns
    -------
    int
        Number of records.

    Raises
    ------
    RelposError
        If the folder is not empty or cannot be written, a name or a size is none, or a package is missing.
    """
    sizes = {"lengths": lengths, "head_dim": head_dim}
    return sum(1 for _ in writing(folder, seed=seed, schemes=schemes, dtypes=dtypes, **sizes))


def writing(
    folder: Any,
    *,
    seed: int = 0,
    schemes: Sequence[str] | None = None,
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] | None = None,
    head_dim: Sequence[int] | None = None,
) -> Iterator[str]:
    """`write_vectors`, with the name of each record once it is written."""
    check.integer("seed", seed, 0)
    for name in schemes or ():
        check.choice("schemes", name, tuple(SCHEMES))
    for dtype in dtypes:
        check.choice("dtypes", dtype, (*DTYPES, "bfloat16"))
    if "bfloat16" in dtypes:
        files.safetensors({"a": np.zeros(1, tensorfile.bfloat16())})
    sizes = None if lengths is None and head_dim is None else grid(lengths or _LENGTHS, head_dim or _DIMS)
    listed: dict[str, Any] = {}
    with files.new_folder(folder) as target:
        for record in records(seed=seed, schemes=schemes, dtypes=dtypes, sizes=sizes):
            if record.name in listed:
                raise RelposValueError(f"two records are called {record.name}")
            listed[record.name] = {}
            for file, data in _contents(record).items():
                (target / file).write_bytes(data)
                listed[record.name][file] = _file(data)
            yield record.name
        (target / MANIFEST).write_bytes(_json(_manifest(listed, seed, schemes)))


def _contents(record: Record) -> dict[str, bytes]:
    """Both files of a record."""
    declared = {name: {"dtype": x.dtype.name, "shape": list(x.shape)} for name, x in record.arrays.items()}
    about = {"format": FORMAT, "version": VERSION, "name": record.name, **record.about, "arrays": declared}
    suffix, pack = (".safetensors", files.safetensors) if about.get("dtype") == "bfloat16" else (".npz", files.npz)
    return {record.name + ".json": _json(about), record.name + suffix: pack(record.arrays)}


def _manifest(listed: dict[str, Any], seed: int, names: Sequence[str] | None) -> dict[str, Any]:
    schemes = {
        name: {
            "class": info.cls.__name__,
            "paper": info.paper,
            "doi": info.doi,
            "equation": info.equation,
            "variants": variants_of(name, later=names is not None),
        }
        for name, info in ((name, SCHEMES[name]) for name in chosen(names))
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "seed": seed,
        "bits": BITS,
        "conventions": CONVENTIONS.splitlines(),
        "schemes": schemes,
        "records": listed,
    }


# ---------------------------------------------------------------------------------------------- reading


def manifest(folder: Any) -> dict[str, Any]:
    """The records of a set by name: names of files to their sizes and checksums.

    A RelposValueError says that there is no set, or its manifest is damaged or of another version.
    """
    path = Path(folder) / MANIFEST
    data = _read(path, str(path), _MANIFEST_LIMIT, "no such file; `relpos vectors` writes it last")
    found = _parsed(data, str(path))
    listed = found.get("records")
    if not isinstance(listed, dict) or not listed:
        raise RelposValueError(f"{path}: lists no records")
    for name, entry in listed.items():
        if not _usable(name, entry):
            raise RelposValueError(f"{path}: unusable entry of {reprlib.repr(name)}")
    return listed


def _usable(name: str, entry: Any) -> bool:
    """Whether an entry names the two files of its record, here in the folder, with sizes and checksums."""
    names = [{f"{name}.json", f"{name}{suffix}"} for suffix in (".npz", ".safetensors")]
    return (
        isinstance(entry, dict)
        and set(entry) in names
        and Path(name).name == name
        and "\\" not in name
        and name.isprintable()
        and all(
            isinstance(file, dict)
            and type(file.get("bytes")) is int
            and 0 <= file["bytes"] <= _RECORD_LIMIT
            and isinstance(file.get("sha256"), str)
            for file in entry.values()
        )
    )


def _read(path: Path, source: str, limit: int, missing: str) -> bytes:
    """The bytes of a file of no more than `limit`."""
    try:
        return reading.whole(path, limit)
    except FileNotFoundError:
        raise DamagedError(f"{source}: {missing}") from None
    except OSError as error:
        raise DamagedError(f"{source}: cannot be read: {error.strerror or error}") from error
    except RelposValueError as error:
        raise DamagedError(f"{source}: {error}") from error


def _parsed(data: bytes, source: str) -> dict[str, Any]:
    """The JSON of a file of this format and version."""
    try:
        found = reading.parsed(data)
    except RelposValueError as error:
        raise DamagedError(f"{source}: {error}") from error
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise DamagedError(
            f"{source}: expected format {FORMAT!r} of version {VERSION}, found {reprlib.repr(found.get('format'))} of "
            f"version {reprlib.repr(found.get('version'))}"
        )
    return found


def read_record(folder: Any, name: str, entry: Mapping[str, Any]) -> Record:
    """A record with read-only arrays, from files whose sizes and checksums are those of the manifest's `entry`.

    A RelposValueError says that a file is missing or damaged.
    """
    contents = {Path(file).suffix: _verified(Path(folder) / file, expected) for file, expected in entry.items()}
    about = _parsed(contents.pop(".json"), f"{name}.json")
    if about.get("name") != name or not isinstance(about.get("arrays"), dict):
        raise DamagedError(f"{name}.json: expected the record {name!r} with its arrays")
    ((suffix, data),) = contents.items()
    unpack = files.read_npz if suffix == ".npz" else files.read_safetensors
    try:
        return Record(name, about, unpack(data, about["arrays"]))
    except DamagedError as error:
        raise DamagedError(f"{name}{suffix}: {error}") from error


def _verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    """The bytes of a file that has the right size and checksum."""
    data = _read(path, path.name, expected["bytes"], "no such file")
    if _file(data) != {"bytes": expected["bytes"], "sha256": expected["sha256"]}:
        raise DamagedError(f"{path.name}: damaged: its {len(data)} bytes do not have the manifest's checksum")
    return data


# ---------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class Finding:
    """One comparison, or one file that cannot be used.

    Attributes
    ----------
    record : str
        Name of the record.
    what : str
        What was compared with the file, or why it cannot be used.
    error : float
        In units of what is tolerated; infinity for what cannot be used.
    """

    record: str
    what: str
    error: float

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance: an error of at most 1."""
        return self.error <= 1


def check_vectors(folder: Any, *, backends: Sequence[Backend] | None = None) -> list[Finding]:
    """Read a set back, compute every answer again from the files alone, and compare.

    Parameters
    ----------
    folder : path-like
        As `write_vectors` left it.
    backends : sequence of str, optional
        Which backends to run; default all that are installed.

    Returns
    -------
    list of Finding
        Those that are not within the tolerance, or not usable; empty if the set is right.

    Raises
    ------
    RelposError
        If there is no set, or a package is missing that reading it needs.
    """
    chosen = rp.backend.available()[0] if backends is None else backends
    found = [x for name, entry in manifest(folder).items() for x in check_record(folder, name, entry, chosen)]
    return [x for x in found if not x.ok]


def check_record(folder: Any, name: str, entry: Mapping[str, Any], backends: Sequence[Backend]) -> list[Finding]:
    """Read one record, compute its answers again from its files alone, and compare.

    Returns all comparisons; one with an infinite error for files that cannot be used. A RelposImportError says that a
    package is missing to read the record.
    """
    try:
        record = read_record(folder, name, entry)
        # A number in a record of somebody else's may overflow, which is then the finding.
        with np.errstate(all="ignore"):
            found = [Finding(name, what, error) for what, error in _comparisons(record, backends)]
    except RelposImportError:
        raise
    except RelposError as error:
        return [Finding(name, str(error), np.inf)]
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # The JSON is that of the checksum, but somebody else wrote it.
        return [Finding(name, f"{name}.json: {type(error).__name__}: {error}", np.inf)]
    return found or [Finding(name, f"{name}.json: nothing to compare", np.inf)]


def _comparisons(record: Record, backends: Sequence[Backend]) -> Iterator[tuple[str, float]]:
    kind = record.about.get("kind")
    if kind == "attention":
        return _check_attention(record, backends)
    if kind == "encoding":
        return _check_encoding(record)
    if kind == "function":
        return _check_function(record, backends)
    raise DamagedError(f"{record.name}.json: unknown kind {kind!r}")


def _compared(record: Record, found: Mapping[str, Any], label: str) -> Iterator[tuple[str, float]]:
    """Each answer, or each that this backend gives, against the record's."""
    outputs = record.about["outputs"]
    for name, actual in found.items():
        entry = outputs[name]
        atol = entry["atol"]
        if not isinstance(atol, float) or not 0 <= atol < np.inf:
            raise DamagedError(f"{record.name}.json: {name}: unusable tolerance {atol!r}")
        yield f"{name}{label}", ratio(np.asarray(actual), record.arrays[entry["array"]], atol)


def _check_attention(record: Record, backends: Sequence[Backend]) -> Iterator[tuple[str, float]]:
    about, arrays = record.about, record.arrays
    position = decode(about["position"], arrays)
    call = {name: decode(node, arrays) for name, node in about["call"].items()}
    q, k, v, grad = (arrays[name] for name in ("q", "k", "v", "grad_out"))
    for backend in backends:
        out, lse = rp.attention(q, k, v, position=position, backend=backend, return_lse=True, **call)
        found = {"out": out, "lse": lse}
        if backend in ("numpy", "terms"):
            gradient = rp.attention_vjp(q, k, v, grad_out=grad, position=position, backend=backend, **call)
            found |= gradients(gradient)
            if set(found) != set(about["outputs"]):
                raise DamagedError(f"{record.name}.json: expected outputs {', '.join(found)}")
        yield from _compared(record, found, f" of backend {backend} in {q.dtype}")


def _check_encoding(record: Record) -> Iterator[tuple[str, float]]:
    stored = decode(record.about["encoding"], record.arrays)
    x, grad = (record.arrays[name] for name in ("x", "grad_out"))
    found = {"out": stored(x)}
    for name, value in encoding_gradients(stored, grad, np.float64 if x.dtype == np.float64 else np.float32).items():
        found[f"gradient.encoding.{name}"] = value
    if set(found) != set(record.about["outputs"]):
        raise DamagedError(f"{record.name}.json: expected outputs {', '.join(found)}")
    yield from _compared(record, found, f" in {x.dtype}")


def _check_function(record: Record, backends: Sequence[Backend]) -> Iterator[tuple[str, float]]:
    for n, entry in enumerate(record.about["calls"]):
        arguments, then = (
            {name: decode(node, record.arrays) for name, node in entry[key].items()} if key in entry else None
            for key in ("arguments", "then")
        )
        # Integers that may be sizes of arrays.
        given = [x for each in (arguments, then) for name, x in (each or {}).items() if name != "trained_length"]
        sizes = [max(abs(x), 1) for x in leaves(given) if type(x) is int]
        if max(sizes, default=0) > _LARGEST or math.prod(sizes) > _PRODUCT:
            raise DamagedError(f"{record.name}.json: call {n} asks for arrays that are too large")
        call = Call(entry["function"], arguments or {}, then)
        if call.function not in FUNCTIONS:
            raise DamagedError(f"{record.name}.json: {call.function!r} is no function that vectors may name")
        for backend in call.backends:
            if backend in backends:
                result = call.run(backend)
                if "raises" in entry:
                    error = 0.0 if result == entry["raises"] else np.inf
                else:
                    error = _difference(plain(result), decode(entry["result"], record.arrays), entry["atol"])
                yield f"call {n} of {call.function} on backend {backend}", error


def _difference(actual: Any, expected: Any, atol: float) -> float:
    """The largest error in a tree of results; infinity where they differ in form."""
    if isinstance(expected, tuple):
        if not isinstance(actual, tuple) or len(actual) != len(expected):
            return np.inf
        return max((_difference(a, e, atol) for a, e in zip(actual, expected, strict=True)), default=0.0)
    if actual is None or expected is None or isinstance(actual, str):
        return 0.0 if actual is expected else np.inf
    found, wanted = np.asarray(actual), np.asarray(expected)
    if found.dtype.kind != wanted.dtype.kind:
        return np.inf
    return ratio(found.astype(np.float64), wanted.astype(np.float64), atol)
