"""What is fuzzed: each target reads bytes that may be anything, and lets only RelposError be raised.

Anything else that leaves a target is a finding: another exception, a warning, a pickle, an array that is larger than
its file. A target takes bytes and returns whether the reader accepted them. `CORPORA` has seeds for each.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import io
import json
import pickle
import re
import shutil
import struct
import tempfile
import warnings
import zipfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

import relpos_np as rp
from relpos_np import layers, testing
from relpos_np._commands import saved_call as archive
from relpos_np._files import untrusted as reading
from relpos_np.testing import files, golden, records
from relpos_np.testing.arguments import arguments, decode, encode

FOLDER = Path(tempfile.mkdtemp(prefix="relpos-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
# More scores than this take too long.
_SCORES = 1 << 14


def _no_pickle(*_, **__):
    raise AssertionError("a pickle would have been loaded")


@contextmanager
def guarded():
    """Nothing is unpickled, warned of, or left changed; RelposError is the only way out but success."""
    kept = pickle.loads, pickle.load, pickle.Unpickler, pickle._Unpickler
    pickle.loads = pickle.load = pickle.Unpickler = pickle._Unpickler = _no_pickle
    before = np.geterr()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        pickle.loads, pickle.load, pickle.Unpickler, pickle._Unpickler = kept
        assert np.geterr() == before


def _names(error, text):
    """An error must say which file it is about."""
    assert str(text) in str(error), error


def _file(data, name):
    path = FOLDER / name
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------------------------------------- .npz

OPTIONS = ["q", "k", "v", "mask", "key_lengths", "scale", "causal", "window", "offset", "scheme", "extra"]
PARAMETERS = ["table", "key_table", "max_distance", "bidirectional", "slopes", "grid", "key_grid", "key_coords.0"]
PARAMETERS += ["dim", "base", "left"]
NAMES = [*OPTIONS, *(f"position.{name}" for name in PARAMETERS)]
NAMES += ["sinks", "query_scale", "selected", "softcap", "cap_order", "segments", "key_segments"]
NAMES += ["rule", "rule.size", "rule.lengths", "rule.step", "rule.left"]
WORDS = {
    "scheme": list(rp.SCHEMES),
    "rule": ["chunked", "dilated", "prefix", "none"],
    "cap_order": ["scores", "content"],
}
DTYPES = ["<f4", "<f8", "<f2", "|b1", "<i8", "<i4", "|u1", "<U12", ">f8", "<c8", "|V2", "|O", "|S3", "<f16"]


class Choices:
    """Decisions made from bytes, the same for the same bytes; 0 once they are used up."""

    def __init__(self, data):
        self._data, self._at = data, 0

    def below(self, n):
        self._at += 1
        return self._data[self._at - 1] % n if self._at <= len(self._data) else 0

    def take(self, n):
        self._at += n
        return self._data[self._at - n : self._at].ljust(n, b"\0")


_VALUES = (None, True, 0, 1, -1, 2, 3, 7, 64, 999_999_999, 1 << 62, 0.5, -2.5, 1e300, "", "zero", "causal", [], [1, 2])
_VALUES += ({"array": "x"}, {"array": "n"}, {"float": "nan"}, {"float": "-inf"}, {"mapping": {}}, [[1], None], [4, 4])


def edited(data, texts):
    """One of some JSON texts with a few values exchanged, removed or swapped; bytes decide which."""
    choices = Choices(data)
    root = [json.loads(texts[choices.below(len(texts))])]
    for _ in range(1 + choices.below(4)):
        within, key = root, 0
        while isinstance(within[key], dict | list) and within[key] and choices.below(8):
            within = within[key]
            key = (list(within) if isinstance(within, dict) else range(len(within)))[choices.below(len(within))]
        if isinstance(within[key], int | float) and not isinstance(within[key], bool) and choices.below(2):
            within[key] = within[key] + choices.below(7) - 3
        elif within is not root and not choices.below(6):
            del within[key]
        else:
            within[key] = copy.deepcopy(_VALUES[choices.below(len(_VALUES))])
        if not root:
            break
    return json.dumps(root[0] if root else None).encode()


def built(data):
    """An archive whose checksums are right, and whose members are drawn."""
    choices = Choices(data)
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w") as file:
        warnings.simplefilter("ignore")  # a name may come twice
        drawn = [*range(3), *(choices.below(len(NAMES)) for _ in range(choices.below(6)))]
        heads, length, dim = (1 + choices.below(4) for _ in range(3))
        for at in drawn:
            kind = DTYPES[(choices.below(3) if choices.below(8) else choices.below(len(DTYPES))) if at else 0]
            shape = [1 + choices.below(2), heads, length, dim] if at < 3 else []
            if at >= 3 or not choices.below(6):
                shape = [choices.below(9) for _ in range(choices.below(5))]
            if words := WORDS.get(NAMES[at]):
                content = io.BytesIO()
                np.save(content, np.array(words[choices.below(len(words))]))
                file.writestr(f"{NAMES[at]}.npy", content.getvalue())
                continue
            claimed = shape if choices.below(16) else [n << choices.below(64) for n in shape]
            said = f"({', '.join(map(str, claimed))}{',' if len(claimed) == 1 else ''})"
            text = f"{{'descr': '{kind}', 'fortran_order': {choices.below(5) == 4}, 'shape': {said}, }}"
            header = text.encode().ljust(117) + b"\n"
            count = int(np.prod(shape, dtype=int)) * (16 if kind == "|O" else np.dtype(kind).itemsize)
            numbers = (
                choices.take(min(count, 64)) if choices.below(2) else np.ones(8, kind.replace("O", "V8")).tobytes()
            )
            body = (numbers * (count // max(1, len(numbers)) + 1))[:count]
            whole = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body
            how = zipfile.ZIP_DEFLATED if choices.below(2) else zipfile.ZIP_STORED
            file.writestr(f"{NAMES[at]}.npy", whole, how)
    return target.getvalue()


def npz(data):
    """`relpos attend FILE`: bytes as they are, or after a 1 as decisions of what an intact archive holds."""
    path = _file(built(data[1:]) if data[:1] == b"\x01" else data, "file.npz")
    with guarded():
        try:
            found = archive.read(path)
            assert sum(x.nbytes for x in found.values()) <= max(1 << 28, 16 * path.stat().st_size)
            call = archive.call_arguments(found, None, str(path))
            sizes = [call["q"].shape, call["k"].shape]
            if any(len(shape) < 2 for shape in sizes) or max(x.size for x in found.values()) > _SCORES:
                return True
            if sizes[0][-2] * sizes[1][-2] * int(np.prod(sizes[0][:-2])) > _SCORES:
                return True
            backend = rp.backend.HOST_BACKENDS[len(data) % 3]
            out, lse = rp.attention(**call, backend=backend, return_lse=True)
        except rp.RelposError as error:
            if isinstance(error, archive.UnusableError) and "scheme" not in str(error):
                _names(error, path)
            return False
        assert out.dtype == call["q"].dtype.newbyteorder("=")
        assert lse.shape == out.shape[:-1]
        small = all(np.isfinite(call[name]).all() and np.abs(call[name]).max(initial=0) < 1e3 for name in "qkv")
        small &= (
            not call.keys() & {"sinks", "query_scale"}
            and abs(call.get("scale", 1)) < 1e3
            and call.get("mask", np.ones(1, bool)).dtype == bool
        )
        assert np.isfinite(out).all() or not small or call["position"] is not None
    return True


def _npz_seeds():
    for name in ("plain", "t5", "shaw", "window", "rotary"):
        one = testing.example(name, size="tiny" if name != "window" else "small")
        held = {"q": one.q, "k": one.k, "v": one.v, "scheme": np.array(name)}
        held |= {key: np.asarray(value) for key, value in one.kwargs.items() if value is not None}
        for key, value in arguments(one.position).items():
            if isinstance(value, np.ndarray | int | float | str | bool):
                held[f"position.{key}"] = np.asarray(value)
        for write in (np.savez, np.savez_compressed):
            buffer = io.BytesIO()
            write(
                buffer,
                **{
                    key: x[..., :3] if key in "qkv" and x.ndim == 4 and name == "plain" else x
                    for key, x in held.items()
                },
            )
            if len(buffer.getvalue()) < 1 << 16:
                yield buffer.getvalue()
    rng = np.random.default_rng(0)
    for n in range(24):
        yield b"\x01" + rng.integers(256, size=20 + 8 * n, dtype=np.uint8).tobytes()
    yield b"\x93NUMPY\x01\x00"
    yield pickle.dumps({"q": [1.0]})


# ---------------------------------------------------------------------------------------------- .safetensors


def tensors(data):
    """`relpos_np.layers.tensors` and the golden vectors' reader; what they accept, safetensors itself accepts."""
    import safetensors

    if data[:1] == b"\x01":
        header = edited(data[1:], _headers())
        stops = [int(n) for n in re.findall(rb"(\d+)\]", header) if len(n) < 4]
        data = packed(header, bytes(max(stops, default=0)))
    path = _file(data, "file.safetensors")
    with guarded():
        try:
            found = layers.tensors(path)
        except rp.RelposError as error:
            _names(error, path)
            return False
        readable = {}
        for name in found:
            try:
                readable[name] = found[name]
            except rp.RelposTypeError:
                continue
            except rp.RelposValueError as error:
                # Axes that are too long for NumPy, beside an empty one.
                _names(error, path)
        assert sum(x.nbytes for x in readable.values()) <= len(data)
        declared = {name: {"dtype": x.dtype.name, "shape": list(x.shape)} for name, x in readable.items()}
        try:
            again = files.read_safetensors(data, declared)
        except rp.RelposError:
            again = {}
        for name, x in again.items():
            assert x.tobytes() == readable[name].tobytes()
        if len(readable) == len(found):
            theirs = dict(safetensors.deserialize(data))
            assert set(theirs) == set(readable)
            for name, x in readable.items():
                assert bytes(theirs[name]["data"]) == x.tobytes()
                assert tuple(theirs[name]["shape"]) == x.shape
    return True


def packed(header, data=b""):
    """A .safetensors file of a header and numbers, whether or not they fit."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@cache
def _headers():
    return [json.dumps(json.loads(data[8 : 8 + data[0]])).encode() for data in list(_tensor_files())[:7]]


def _tensor_seeds():
    yield from _tensor_files()
    yield from _decisions()


def _tensor_files():
    def entry(dtype, shape, *offsets):
        return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}

    yield packed({})
    yield packed({"__metadata__": {"format": "np"}, "w": entry("F32", [2], 0, 8)}, bytes(8))
    yield packed(
        {"a": entry("BF16", [1, 3], 0, 6), "b": entry("F64", [], 6, 14), "c": entry("I8", [0], 14, 14)}, bytes(14)
    )
    yield packed(
        {"a": entry("F16", [2], 0, 4), "b": entry("BOOL", [2], 4, 6), "d": entry("C64", [1], 6, 14)}, bytes(14)
    )
    yield packed({"a": entry("F8_E4M3", [2], 0, 2), "b": entry("U16", [2, 1], 2, 6)}, bytes(6))
    yield packed({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12))
    yield packed({"a": entry("F32", [1 << 61], 0, 8)}, bytes(8))
    yield packed(b'{"a":' * 100 + b"{" + b"}" * 101)
    yield (1 << 63).to_bytes(8, "little") + b"{}"
    yield pickle.dumps({"w": [1.0]})


# ---------------------------------------------------------------------------------------------- JSON

_ARRAYS = {}


def _golden():
    """Small records, once: (name, what the JSON says, the other file)."""
    if not _ARRAYS:
        kept = records.SCHEMES
        try:
            records.SCHEMES = {name: rp.SCHEMES[name] for name in ("t5", "learned", "window", "rotary", "shaw")}
            for one in records.records():
                short = one.about["kind"] == "function" or one.name.endswith("own.float32")
                if short and sum(x.nbytes for x in one.arrays.values()) < 1 << 15:
                    described, numbers = golden._contents(one).values()
                    _ARRAYS[one.name] = (json.dumps(json.loads(described)).encode(), numbers)
        finally:
            records.SCHEMES = kept
    return _ARRAYS


def vectors(data):
    """A record's JSON, with the arrays of the record whose name it has, as `relpos vectors --check` reads them."""
    held = _golden()
    if data[:1] == b"\x01":
        data = edited(data[1:], [described for described, _ in held.values()])
    name = next((name for name in held if f'"{name}"'.encode() in data), "rel_shift.xlnet")
    contents = {f"{name}.json": data, f"{name}.npz": held[name][1]}
    entry = {file: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for file, x in contents.items()}
    for file, content in contents.items():
        _file(content, file)
    with guarded():
        try:
            golden.read_record(FOLDER, name, entry)
        except rp.RelposError as error:
            _names(error, name)
        found = golden.check_record(FOLDER, name, entry, ("numpy",))
        assert found
        assert all(isinstance(one.what, str) for one in found)
    return all(one.ok for one in found)


def manifest(data):
    """The list of a set's records."""
    if data[:1] == b"\x01":
        data = edited(data[1:], list(_manifests()))
    path = _file(data, golden.MANIFEST)
    with guarded():
        try:
            found = golden.manifest(FOLDER)
        except rp.RelposError as error:
            _names(error, path)
            return False
        for name, entry in found.items():
            try:
                golden.read_record(FOLDER, name, entry)
            except rp.RelposError as error:
                _names(error, name)
    return True


def arguments_of(data):
    """JSON to the arguments of a constructor."""
    if data[:1] == b"\x01":
        data = edited(data[1:], _scheme_texts())
    arrays = {"x": np.ones((3, 2), np.float32), "n": np.arange(4)}
    with guarded():
        try:
            decode(reading.parsed(data), arrays)
        except rp.RelposError:
            return False
    return True


def _vector_seeds():
    for described, _ in _golden().values():
        if len(described) < 1 << 14:
            yield described
    yield from _decisions()


def _manifest_seeds():
    yield from _manifests()
    yield from _decisions()
    yield b'{"format": NaN, "version": 1e999, "records": {"\\u0000": 1, "\\ud800": 2}}'


def _manifests():
    file = {"bytes": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}
    base = {"format": golden.FORMAT, "version": golden.VERSION}
    yield json.dumps(base | {"records": {"a": {"a.json": file, "a.npz": file}}}).encode()
    yield json.dumps(base | {"records": {"": {".json": file, ".safetensors": file}}}).encode()
    yield json.dumps(base | {"records": {}}).encode()


@cache
def _scheme_texts():
    return list(_written_schemes())


def _written_schemes():
    for name, info in rp.SCHEMES.items():
        for variant in info.variants or (None,):
            one = testing.example(name, variant=variant)
            held = {}
            node = encode(one.encoding if info.kind == "absolute" else one.position, "x", held)
            yield re.sub(rb'"array": "[^"]*"', b'"array": "x"', json.dumps(node).encode())


def _decisions():
    rng = np.random.default_rng(1)
    for n in range(40):
        yield b"\x01" + rng.integers(256, size=8 + n, dtype=np.uint8).tobytes()


def _argument_seeds():
    yield from _scheme_texts()
    yield from _decisions()
    yield b'{"mapping": {"a": [1, 2.5, {"float": "nan"}, {"array": "x"}, null, true]}}'
    yield b"[" * 300 + b"]" * 300
    yield b'{"mapping": {"a": ' + b"9" * 5000 + b"}}"


TARGETS = {"npz": npz, "tensors": tensors, "vectors": vectors, "manifest": manifest, "arguments": arguments_of}
CORPORA = {
    "npz": _npz_seeds,
    "tensors": _tensor_seeds,
    "vectors": _vector_seeds,
    "manifest": _manifest_seeds,
    "arguments": _argument_seeds,
}
# Of .npz and .safetensors files, of names that are paths, and of all JSON.
_BYTES = {
    "npz": ("PK\\x05\\x06", "PK\\x01\\x02", "PK\\x06\\x06", "\\x93NUMPY", "'|O'", "'descr': '<f4'", "'shape': ("),
    "tensors": ("\\x00\\x00",),
    "manifest": ("\\\\u0000", "..", "/"),
}
_JSON = ("-1", "0.5", "1e300", "999999999", "null", "true", "[]", '"nan"', '"float"', '"mapping"')


def words(name):
    """What a mutation may insert, as a fuzzer reads it: words of a target's own texts and those of its format."""
    texts = [data for data in CORPORA[name]() if data[:1] in (b"{", b"[") or data[8:9] == b"{"]
    found = {word.decode() for data in texts for word in re.findall(rb'"[\w.-]{1,40}"', data)}
    return [*_BYTES.get(name, ()), *_JSON, *sorted(found)]


def seeds(name):
    """The corpus of a target: what its own module makes, and the findings of the past."""
    found = list(CORPORA[name]())
    past = Path(__file__).parent / "findings" / name
    found += [path.read_bytes() for path in sorted(past.iterdir())] if past.is_dir() else []
    return found


def mutated(data, rng):
    """Bytes with some changed, removed, repeated or moved: what a fuzzer does, without its guidance."""
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(found) + 1))
        stop = min(len(found), at + int(rng.integers(1, 1 << int(rng.integers(1, 7)))))
        kind = rng.integers(6)
        if kind == 0:
            found[at:stop] = b""
        elif kind == 1:
            found[at:at] = found[at:stop]
        elif kind == 2:
            found[at:at] = rng.integers(256, size=int(rng.integers(1, 9)), dtype=np.uint8).tobytes()
        elif kind == 3 and at < len(found):
            found[at] = int(rng.integers(256))
        elif kind == 4 and at < len(found):
            found[at] ^= 1 << int(rng.integers(8))
        else:
            found[at:stop] = bytes([int(rng.choice([0, 255, 48, 57, 45]))]) * (stop - at)
    return bytes(found)


def write_seeds(name, folder):
    """The corpus as files, for atheris."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (Path(folder) / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
