"""Files that are damaged, hostile or none at all: refused with an error that names them, soon and in little memory."""

import errno
import hashlib
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np._commands import saved_call as archive
from relpos_np._files import npz as npzfile
from relpos_np._files import safetensors as tensorfile
from relpos_np._files import untrusted as reading
from relpos_np.testing import files, golden
from relpos_np.testing.arguments import decode
from tests.fuzz.targets import packed
from tests.processes import child

POSIX = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the files of Unix")


class Bomb:
    """Loading its pickle makes a folder, as a sign that code ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def record(path):
    """The golden vectors' reader, given the right sizes and checksums of r.json and r.npz or r.safetensors."""
    files_of = [path.parent / "r.json", path if path.suffix != ".json" else path.with_suffix(".npz")]
    digests = {
        file.name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for file in files_of
        for data in [file.read_bytes() if file.is_file() and file.resolve().parent == path.parent else b""]
    }
    return golden.read_record(path.parent, "r", digests)


READERS = {
    "npz": ("file.npz", archive.read),
    "tensors": ("file.safetensors", lambda path: dict(layers.tensors(path))),
    "state": ("file.safetensors", lambda path: layers.State(path, "a").take("b")),
    "manifest": ("manifest.json", lambda path: golden.manifest(path.parent)),
    "record": ("r.json", record),
    "arrays": ("r.npz", record),
    "bfloat16": ("r.safetensors", record),
}
DECLARED = {"format": golden.FORMAT, "version": golden.VERSION, "name": "r"}
DECLARED |= {"arrays": {"q": {"dtype": "float64", "shape": [2]}}}


@pytest.fixture(autouse=True)
def _around(tmp_path):
    complete(tmp_path)


def complete(tmp_path):
    """A record whose files are right."""
    (tmp_path / "r.json").write_text(json.dumps(DECLARED), encoding="utf-8")
    (tmp_path / "r.npz").write_bytes(zipped([("q.npy", npy())]))


def refused(name, path):
    """The error of a reader, which must name the file."""
    with pytest.raises(rp.RelposError) as found:
        READERS[name][1](path)
    assert path.name in str(found.value)
    return str(found.value)


def zipped(members, how=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as target:
        for name, content in members:
            target.writestr(name, content)
    return buffer.getvalue()


def npy(shape="(2,)", descr="<f8", body=bytes(16), order=False, version=1):
    text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + body


# ---------------------------------------------------------------------------------------------- no pickle


def pickled(form, bomb):
    """A pickle in each place of a file that could hold one."""
    whole = pickle.dumps(bomb)
    objects = io.BytesIO()
    np.lib.format.write_array(objects, np.array([bomb], dtype=object), allow_pickle=True)
    fields = io.BytesIO()
    np.lib.format.write_array(fields, np.array([(bomb,)], dtype=[("x", object)]), allow_pickle=True)
    return {
        "the whole file": whole,
        "an array of objects": zipped([("q.npy", objects.getvalue())]),
        "an array of objects, compressed": zipped([("q.npy", objects.getvalue())], zipfile.ZIP_DEFLATED),
        "a field of objects": zipped([("q.npy", fields.getvalue())]),
        "a member": zipped([("q.npy", whole)]),
        "a member of another name": zipped([("data.pkl", whole), ("archive/data.pkl", whole)]),
        "after a header": zipped([("q.npy", npy(descr="|O", body=whole))]),
        "a single array": objects.getvalue(),
        "a tensor": packed({"a.b": {"dtype": "O", "shape": [], "data_offsets": [0, len(whole)]}}, whole),
        "a safetensors header": packed(whole),
    }[form]


FORMS = [
    "the whole file",
    "an array of objects",
    "an array of objects, compressed",
    "a field of objects",
    "a member",
    "a member of another name",
    "after a header",
    "a single array",
    "a tensor",
    "a safetensors header",
]


@pytest.mark.parametrize("form", FORMS)
def test_no_pickle_is_ever_loaded(form, tmp_path):
    bomb = tmp_path / "code ran"
    content = pickled(form, Bomb(bomb))
    for name in READERS:
        path = tmp_path / READERS[name][0]
        path.write_bytes(content)
        refused(name, path)
        complete(tmp_path)
    assert not bomb.exists()
    pickle.loads(pickle.dumps(Bomb(bomb)))
    assert bomb.exists()


def test_the_readers_of_records_reach_the_arrays(tmp_path):
    """Otherwise a pickle there would be refused for another reason."""
    assert record(tmp_path / "r.npz").arrays["q"].tolist() == [0, 0]
    (tmp_path / "r.safetensors").write_bytes(packed({"q": entry("F64", [2], 0, 16)}, bytes(16)))
    assert record(tmp_path / "r.safetensors").arrays["q"].tolist() == [0, 0]
    (tmp_path / "r.npz").write_bytes(pickled("an array of objects", Bomb(tmp_path / "code ran")))
    assert "pickled objects, which are never loaded" in refused("arrays", tmp_path / "r.npz")


# ---------------------------------------------------------------------------------------------- no file


@POSIX
@pytest.mark.parametrize("name", READERS)
def test_pipes_folders_devices_and_loops(name, tmp_path):
    """None is waited for: a pipe nobody writes to would block for ever, a device would never end."""
    path = tmp_path / READERS[name][0]
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert "not a regular file" in refused(name, path)
    path.unlink()
    path.mkdir()
    refused(name, path)
    path.rmdir()
    for target in ("/dev/zero", "/dev/null", "/dev/stdin", path.name, "nowhere"):
        path.symlink_to(target)
        refused(name, path)
        path.unlink()


def test_names_that_no_file_can_have():
    for path in ("a\0.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors"):
        with pytest.raises(rp.RelposValueError, match="source"):
            layers.tensors(path)
    with pytest.raises(OSError, match="null") as found:
        reading.opened("a\0")
    assert found.value.errno == errno.EINVAL


def test_files_that_change_while_they_are_read(tmp_path):
    """Cut short or replaced: an error, and no signal as from memory that maps the file."""
    path = tmp_path / "a.safetensors"
    content = packed({"w": {"dtype": "F64", "shape": [1 << 16], "data_offsets": [0, 1 << 19]}}, bytes(1 << 19))
    path.write_bytes(content)
    found = layers.tensors(path)
    assert found["w"].shape == (1 << 16,)
    os.truncate(path, 1 << 10)
    with pytest.raises(rp.RelposValueError, match=r"w: .*a\.safetensors has changed since it was opened"):
        found["w"]
    path.unlink()
    with pytest.raises(rp.RelposValueError, match=r"w: .*cannot be read"):
        found["w"]
    # At any moment in between: the sizes are those of before, and the bytes end.
    path.write_bytes(content)
    with path.open("rb") as file:
        entries = tensorfile.entries(file, len(content))
        os.truncate(path, 1 << 18)
        with pytest.raises(rp.RelposValueError, match=r"w: a.safetensors: ends \d+ bytes early"):
            tensorfile.tensor(file, "w", entries["w"], "a.safetensors")
    path.write_bytes(zipped([("q.npy", npy("(65536,)", body=bytes(1 << 19)))]))
    whole = path.read_bytes()
    for kept in (0, 10, 1 << 18, len(whole) - 30, len(whole) - 1):
        with pytest.raises(rp.RelposValueError):
            npzfile.read(io.BytesIO(whole[:kept]), len(whole), 1 << 28)


# ---------------------------------------------------------------------------------------------- .npz


def read_npz(data, limit=1 << 28):
    return npzfile.read(io.BytesIO(data), len(data), limit)


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("bytes cannot be float64", zipped([("q.npy", npy("(140737488355328,)"))])),
        ("bytes cannot be", zipped([("q.npy", npy("(9223372036854775807, 9223372036854775807)"))])),
        ("bytes cannot be", zipped([("q.npy", npy("(3,)"))])),
        ("expected a shape", zipped([("q.npy", npy("(99999999999999999999,)"))])),
        ("expected the header", zipped([("q.npy", npy("(-1,)"))])),
        ("expected the header", zipped([("q.npy", npy("(2,)", order="1"))])),
        ("expected the header", zipped([("q.npy", npy("__import__('os')"))])),
        ("expected the header", zipped([("q.npy", npy("[" * 3000))])),
        ("expected numbers", zipped([("q.npy", npy(descr="<M8[ns]"))])),
        (
            "a header of 10000000 bytes",
            zipped([("q.npy", npy(version=2)[:8] + struct.pack("<I", 10**7) + bytes(10**7))]),
        ),
        ("a header of 4294967295 bytes", zipped([("q.npy", npy(version=2)[:8] + b"\xff" * 20)])),
        ("is not an array", zipped([("q.npy", npy(version=3))])),
        ("is not an array", zipped([("q.npy", b"")])),
        ("is not an array", zipped([("q", npy())])),
        ("is not an array", zipped([("../../q.npy/", npy())])),
        ("an unusable name", zipped([("q\x1b[2J.npy", npy())])),
        ("compressed in another way", zipped([("q.npy", npy())], zipfile.ZIP_BZIP2)),
        ("compressed in another way", zipped([("q.npy", npy())], zipfile.ZIP_LZMA)),
        ("its directory is longer", zipped([(f"{n:01000d}.npy", b"") for n in range(1100)])),
        ("ends 8 bytes early|Bad magic|cannot hold|is not a zip", zipped([("q.npy", npy())])[:-1]),
    ],
    ids=range(20),
)
def test_archives_that_are_refused(words, data):
    with pytest.raises(rp.RelposValueError, match=words):
        read_npz(data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice():
    with pytest.raises(rp.RelposValueError, match=r"'q.npy': an unusable name, or one that is there twice"):
        read_npz(zipped([("q.npy", npy()), ("q.npy", npy())]))


def test_archives_that_are_read():
    """What NumPy and others write: both versions, both orders, empty arrays, one number, text, other bytes first."""
    rng = np.random.default_rng(0)
    held = {
        "a": rng.standard_normal((3, 4)),
        "f": np.asfortranarray(rng.standard_normal((3, 4))),
        "one": np.float32(3),
        "none": np.zeros((0, 5), "i4"),
        "text": np.array("t5"),
        "swapped": rng.standard_normal(3).astype(">f8"),
        "flag": np.array([True, False]),
    }
    for write in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        write(buffer, **held)
        found = read_npz(buffer.getvalue())
        assert list(found) == list(held)
        for name, x in found.items():
            assert x.dtype == np.asarray(held[name]).dtype
            np.testing.assert_array_equal(x, held[name])
            assert x.flags.writeable
            assert x.flags.aligned
    assert read_npz(zipped([("a.npy", npy(version=2)), ("b.npy", npy("(2L,)"))]))["b"].tolist() == [0, 0]
    other = b"{'shape': (2,),\"fortran_order\":True , 'descr': '<f8'}"
    whole = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(other)) + other + np.arange(2.0).tobytes()
    assert read_npz(zipped([("a.npy", whole)]))["a"].tolist() == [0, 1]


def claimed(data, **fields):
    """The archive with other numbers in its directory."""
    at = data.rindex(b"PK\x01\x02")
    places = {"method": (10, "<H"), "packed": (20, "<I"), "unpacked": (24, "<I")}
    out = bytearray(data)
    for name, value in fields.items():
        offset, kind = places[name]
        struct.pack_into(kind, out, at + offset, value)
    return bytes(out)


def test_sizes_that_are_not_true():
    data = zipped([("q.npy", npy())], zipfile.ZIP_DEFLATED)
    for lie in (
        {"unpacked": 0xFFFFFFFE},
        {"packed": 0xFFFFFFFE},
        {"unpacked": 3},
        {"packed": 1},
        {"unpacked": 1 << 20},
    ):
        with pytest.raises(rp.RelposValueError):
            read_npz(claimed(data, **lie))
    # Zip64: the sizes stand in a field of their own, or it is missing.
    with pytest.raises(rp.RelposValueError):
        read_npz(claimed(data, unpacked=0xFFFFFFFF))
    # Changed numbers do not have the checksum.
    at = (whole := zipped([("q.npy", npy())])).index(bytes(16))
    with pytest.raises(rp.RelposValueError, match="CRC"):
        read_npz(whole[:at] + b"\1" + whole[at + 1 :])


def test_what_a_compressed_archive_may_unpack_to(tmp_path, monkeypatch):
    """So many times its own size; the error says how to save a larger one, and that works."""
    monkeypatch.setattr(npzfile, "_UNPACKED", 1 << 16)
    path = tmp_path / "in.npz"
    np.savez_compressed(path, q=np.zeros((100, 1000)))
    with pytest.raises(rp.RelposError, match=r"in.npz: .*800128 bytes, and 65536 are allowed .* numpy.savez,"):
        archive.read(path)
    np.savez(path, q=np.zeros((100, 1000)))
    assert archive.read(path)["q"].shape == (100, 1000)
    np.savez_compressed(path, q=np.random.default_rng(0).random((100, 1000)))
    assert archive.read(path)["q"].shape == (100, 1000)


def test_load_npz_takes_bytes_and_paths_within_a_limit(tmp_path):
    path = tmp_path / "in.npz"
    np.savez_compressed(path, q=np.zeros((100, 1000)), k=np.arange(3))
    for source in (path, str(path), path.read_bytes()):
        found = rp.load_npz(source)
        assert list(found) == ["q", "k"]
        np.testing.assert_array_equal(found["k"], np.arange(3))
        assert found["q"].shape == (100, 1000)
        size = 800_128 + 152
        assert rp.load_npz(source, limit=size).keys() == found.keys()
        with pytest.raises(rp.RelposMemoryError, match=f"have {size} bytes, and {size - 1} are allowed for a file of"):
            rp.load_npz(source, limit=size - 1)


def test_load_npz_refuses_by_name(tmp_path):
    with pytest.raises(rp.RelposValueError, match=r"source: .*nowhere\.npz: no such file"):
        rp.load_npz(tmp_path / "nowhere.npz")
    with pytest.raises(rp.RelposValueError, match=r"source: .*: not a readable \.npz archive: Is a directory"):
        rp.load_npz(tmp_path)
    with pytest.raises(rp.RelposValueError, match=r"source: not a readable \.npz archive"):
        rp.load_npz(b"hello")
    with pytest.raises(rp.RelposValueError, match="single array"):
        rp.load_npz(npy())
    for source in (3, None, np.zeros(3), bytearray(b"PK"), io.BytesIO()):
        with pytest.raises(rp.RelposTypeError, match="source: expected bytes or a path, found"):
            rp.load_npz(source)
    for limit in (1.5, "1", True):
        with pytest.raises(rp.RelposTypeError, match="limit: expected an integer"):
            rp.load_npz(b"", limit=limit)
    with pytest.raises(rp.RelposValueError, match="limit: expected at least 0"):
        rp.load_npz(b"", limit=-1)


@pytest.mark.slow
@POSIX
def test_the_memory_of_refused_files_is_bounded(tmp_path):
    """Bombs and lies, in a process that may take 300 MB more than it has."""
    bomb = zipped([("q.npy", npy("(40000000,)", body=bytes(320_000_000)))], zipfile.ZIP_DEFLATED)
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "bomb.npz").write_bytes(bomb)
    (tmp_path / "claim.npz").write_bytes(zipped([("q.npy", npy("(1099511627776,)"))]))
    with (tmp_path / "sparse.npz").open("wb") as file:
        file.truncate(1 << 40)
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with (tmp_path / "deep.safetensors").open("wb") as file:
        file.write((1 << 24).to_bytes(8, "little") + b"[" * (1 << 24))
    with (tmp_path / "header.safetensors").open("wb") as file:
        file.write((1 << 39).to_bytes(8, "little") + b"{")
        file.truncate(1 << 40)
    (tmp_path / "manifest.json").write_bytes(b"{")
    os.truncate(tmp_path / "manifest.json", 1 << 40)
    code = (
        "import resource, sys, pathlib\n"
        "from relpos_np import layers\n"
        "from relpos_np._commands import saved_call as archive\n"
        "from relpos_np.testing import golden\n"
        "used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "for path in sorted(folder.iterdir()):\n"
        "    read = {'.npz': archive.read, '.safetensors': layers.tensors}.get(path.suffix)\n"
        "    try:\n"
        "        read(path) if read else golden.manifest(folder)\n"
        "    except rp.RelposError as error:\n"
        "        assert str(path) in str(error), error\n"
        "        assert 'not enough memory' not in str(error), error\n"
        "        print(path.name)\n"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    status, out, err = child(code, "-W", "error")
    assert status == 0, err
    assert len(out.split()) == len(list(tmp_path.iterdir())) == 7


# ---------------------------------------------------------------------------------------------- .safetensors


def entry(dtype, shape, *offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("too few", b"\x02\0\0"),
        ("header of 9223372036854775808 bytes", (1 << 63).to_bytes(8, "little") + b"{}"),
        ("header of 18446744073709551615 bytes", b"\xff" * 8 + b"{}"),
        ("header of 3 bytes", (3).to_bytes(8, "little") + b"{}"),
        ("expected a JSON object", packed(b"[]")),
        ("not readable as JSON", packed(b"\xff\xfe{}")),
        ("not readable as JSON", packed(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
        ("given twice", packed(b'{"a": 1, "a": 2}')),
        ("a number of 1000000 digits", packed(b'{"a": ' + b"1" * 1_000_000 + b"}")),
        ("NaN is no number", packed(b'{"a": NaN}')),
        ("Infinity is no number", packed(b'{"a": -Infinity}')),
        ("too large", packed(b'{"a": 1e999}')),
        ("expected dtype, shape and data_offsets", packed({"a": 1})),
        ("name of a dtype", packed({"a": entry(["F32"], [1], 0, 4)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [1.0], 0, 4)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [True], 0, 4)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [-1], 0, 4)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [1] * 65, 0, 4)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [1], 4, 0)}, bytes(4))),
        ("expected a shape", packed({"a": entry("F32", [1], 0, 1 << 63)}, bytes(4))),
        ("4 bytes cannot be F32", packed({"a": entry("F32", [2], 0, 4)}, bytes(4))),
        ("4 bytes cannot be F32", packed({"a": entry("F32", [1 << 61, 1 << 61], 0, 4)}, bytes(4))),
        ("tensors end at byte .*, the file at", packed({"a": entry("F32", [1], 0, 4)})),
        ("tensors end at byte .*, the file at", packed({"a": entry("F32", [1], 0, 4)}, bytes(5))),
        ("'b': starts at", packed({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12))),
        ("'b': starts at", packed({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12))),
        ("'a': starts at", packed({"a": entry("F32", [1], 4, 8)}, bytes(8))),
        ("__metadata__", packed({"__metadata__": {"a": 1}})),
    ],
    ids=range(28),
)
def test_safetensors_that_are_refused(words, data, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(rp.RelposValueError, match=rf"a\.safetensors: not a readable \.safetensors file: .*{words}"):
        layers.tensors(path)
    with pytest.raises(files.DamagedError, match=words):
        files.read_safetensors(data, {})


# ---------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("words", "records"),
    [
        ("unusable entry", '{"a": {"a.json": {"bytes": -1, "sha256": ""}, "a.npz": {"bytes": 1, "sha256": ""}}}'),
        ("unusable entry", '{"a": {"a.json": {"bytes": 1e3, "sha256": ""}, "a.npz": {"bytes": 1, "sha256": ""}}}'),
        ("unusable entry", '{"a": {"a.json": {"bytes": 9e99, "sha256": ""}}}'),
        (
            "unusable entry",
            '{"a": {"a.json": {"bytes": 1, "sha256": ""}, "a.npz": {"bytes": 99999999999, "sha256": ""}}}',
        ),
        ("unusable entry", '{"\\u0000": {"\\u0000.json": {"bytes": 1, "sha256": ""}}}'),
        (
            "unusable entry",
            '{"../a": {"../a.json": {"bytes": 1, "sha256": ""}, "../a.npz": {"bytes": 1, "sha256": ""}}}',
        ),
        ("lists no records", "[]"),
        ("given twice", '{"a": 1, "a": 1}'),
        ("NaN", '{"a": NaN}'),
    ],
    ids=range(9),
)
def test_manifests_that_are_refused(words, records, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(f'{{"format": "relpos-vectors", "version": 1, "records": {records}}}', encoding="utf-8")
    assert words in refused("manifest", path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("within no more than 16", "[" * 300 + "]" * 300),
        ("expected a value", '{"array": []}'),
        ("expected a value", '{"array": "x", "float": "nan"}'),
        ("expected a value", '{"class": ["T5"], "arguments": {}}'),
        ("expected a value", '{"class": "T5", "arguments": []}'),
        ("class: expected one of", '{"class": "__import__", "arguments": {}}'),
        ("expected arguments table", '{"class": "T5", "arguments": {}}'),
        ("expected arguments none", '{"class": "Plain", "arguments": {"x": 1}}'),
        ("expected arguments", '{"class": "T5", "arguments": {"table": {"array": "x"}, "self": 1}}'),
    ],
    ids=range(9),
)
def test_arguments_that_are_refused(words, text):
    with pytest.raises(rp.RelposError, match=words) as found:
        decode(json.loads(text), {"x": np.ones((32, 2))})
    assert len(str(found.value)) < 1000


def test_grids_in_files_take_no_memory_before_a_call_has_as_many_tokens():
    """Found by fuzzing: the maps of windows were made at once."""
    huge = (4, 999_999_999)
    with pytest.raises(rp.RelposValueError, match=r"table: extent .* needs"):
        rp.WindowBias(np.ones((21, 2)), huge)
    scheme = rp.WindowBias(np.ones((1, 2)), (1, 1, 1), (5000,) * 3, key_coords=([0] * 5000,) * 3)
    q, k = np.ones((2, 1, 4)), np.ones((2, 7, 4))
    with pytest.raises(rp.RelposValueError, match="key_grid"):
        rp.attention(q, k, k, position=scheme)
    with pytest.raises(rp.RelposTypeError, match="key_coords"):
        rp.WindowBias(np.ones((1, 2)), (1,), key_coords=True)
    with pytest.raises(rp.RelposTypeError, match="key_coords"):
        rp.WindowBias(np.ones((1, 2)), (1,), key_coords=([[0], [0, 0]],))
    with pytest.raises(rp.RelposValueError, match="dim: expected at most"):
        rp.Rotary(dim=1 << 40)
