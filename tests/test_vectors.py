"""Golden vectors: complete, the same bytes each time, checked from the files alone, and refused when damaged."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import main as cli
from relpos_np.testing import arguments, check_vectors, files, golden, records, write_vectors
from relpos_np.testing.arguments import decode, encode
from relpos_np.testing.functions import FUNCTIONS, Call, divergences
from relpos_np.testing.records import LATER, chosen, variants_of

DOCS = Path(rp.__file__).parent.parent / "docs" / "vectors.md"
PLAIN = ("numpy", "terms")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The whole set."""
    folder = tmp_path_factory.mktemp("vectors") / "golden"
    assert write_vectors(folder) == len(golden.manifest(folder))
    return folder


def only_few(patch):
    """What is written from here on: two schemes, and the shifts."""
    patch.setattr(records, "SCHEMES", {name: rp.SCHEMES[name] for name in ("t5", "learned")})
    kept = [d for d in divergences(0) if d.name.startswith("rel_shift")]
    patch.setattr(records, "divergences", lambda seed: iter(kept))


@pytest.fixture
def few(monkeypatch):
    only_few(monkeypatch)


@pytest.fixture(scope="module")
def small_set(tmp_path_factory):
    """A small set, of which each test has a copy."""
    folder = tmp_path_factory.mktemp("vectors") / "small"
    with pytest.MonkeyPatch.context() as patch:
        only_few(patch)
        write_vectors(folder)
    return folder


@pytest.fixture
def small(few, small_set, tmp_path):
    """A small set."""
    return shutil.copytree(small_set, tmp_path / "golden")


def about(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def arrays(folder, name):
    with np.load(folder / f"{name}.npz", allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def rewrite(folder, name, change_about=None, change_arrays=None, data=None):
    """Change a record and give the manifest its new checksums: what an attacker, not an accident, would do."""
    described, held = about(folder, name), arrays(folder, name) if data is None else {}
    if change_about is not None:
        change_about(described)
    if change_arrays is not None:
        change_arrays(held)
        described["arrays"] = {k: {"dtype": x.dtype.name, "shape": list(x.shape)} for k, x in held.items()}
    contents = {
        f"{name}.json": json.dumps(described).encode(),
        f"{name}.npz": files.npz(held) if data is None else data,
    }
    listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for file, content in contents.items():
        (folder / file).write_bytes(content)
        listed["records"][name][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(listed), encoding="utf-8")


# ---------------------------------------------------------------------------------------------- what is in the set


def test_every_scheme_and_variant_is_there(whole):
    found = {
        (r["scheme"], r["variant"], r["dtype"])
        for name in golden.manifest(whole)
        if "scheme" in (r := about(whole, name))
    }
    dtypes = ("float16", "float32", "float64")
    expected = {(n, v, d) for n in chosen(None) for v in variants_of(n, later=False) or (None,) for d in dtypes}
    assert found == expected
    assert set(rp.SCHEMES) - {n for n, _, _ in found} <= set(LATER)


@pytest.mark.skipif(not DOCS.is_file(), reason="not a checkout")
def test_divergences_are_those_of_the_docs(whole):
    """Each name in the table of docs/vectors.md, in which * stands for a scheme's edges and dtypes, and each record."""
    table = DOCS.read_text(encoding="utf-8").partition("## Divergences")[2]
    names = re.findall(r"`([a-z0-9_.*]+)`", "".join(line for line in table.splitlines(True) if line.startswith("|")))
    assert len(names) > 40
    listed = list(golden.manifest(whole))
    for name in names:
        pattern = re.escape(name).replace(r"\*", ".*")
        assert any(re.fullmatch(pattern, record) for record in listed), name
    for one in divergences(0):
        stem = one.name.partition(".")[0]
        assert f"`{one.name}`" in table or f"`{stem}.*`" in table, one.name


@pytest.mark.parametrize("dtype", ["16", "32", "64", "_"])
@pytest.mark.parametrize("part", range(4))
def test_the_set_is_right_on_every_backend(whole, dtype, part):
    listed = golden.manifest(whole)
    names = [name for name in listed if (name[-2:] if ".float" in name else "_") == dtype][part::4]
    found = [x for name in names for x in golden.check_record(whole, name, listed[name], rp.backend.HOST_BACKENDS)]
    assert found
    assert [x for x in found if not x.ok] == []


def test_only_rstt_raises(whole):
    """A call that fails by mistake would be recorded as one that should."""
    for name in golden.manifest(whole):
        for call in about(whole, name).get("calls", ()):
            assert ("raises" in call) <= (name == "rstt_frames"), name
    assert {"raises" in call for call in about(whole, "rstt_frames")["calls"]} == {True, False}


def test_known_pairs_of_buckets(whole):
    """Where float32 and exact thresholds differ, as found by exhaustive search, and what exact arithmetic says."""
    for name, n, pair in (("tie_64_939", 728, (30, 31)), ("tie_58_282", 119, (46, 47))):
        held, described = arrays(whole, f"t5_bucket.{name}"), about(whole, f"t5_bucket.{name}")
        assert [call["arguments"]["rounding"] for call in described["calls"]] == ["exact", "float32"]
        at = np.flatnonzero(held["calls.0.relative_position"] == -n)
        assert tuple(int(held[f"calls.{c}.result"][at][0]) for c in (0, 1)) == pair
        both = described["calls"][0]["arguments"]["bidirectional"]
        side = described["calls"][0]["arguments"]["num_buckets"] // (2 if both else 1)
        exact, furthest = side // 2, described["calls"][0]["arguments"]["max_distance"]
        steps = side - exact
        reached = pair[0] - exact
        assert furthest**reached * exact ** (steps - reached) <= n**steps
        assert furthest ** (reached + 1) * exact ** (steps - reached - 1) > n**steps


def test_variants_differ_in_the_files(whole):
    """A divergence that the vectors cannot tell apart would be of no use."""
    pairs = [
        ("rel_shift.transformer_xl", "rel_shift.conformer"),
        ("rel_shift.xlnet", "rel_shift.conformer"),
        ("rel_shift.wenet", "rel_shift.transformer_xl"),
        ("sinusoidal.interleaved", "sinusoidal.concatenated"),
        ("sinusoidal.tensor2tensor", "sinusoidal.concatenated"),
        ("sinusoidal.interleaved", "sinusoidal.dimension_index"),
        ("pad_order.pad_then_shift", "pad_order.shift_then_pad"),
        ("rotate_pairs.half", "rotate_pairs.interleaved"),
        ("relative_vectors.clip", "relative_vectors.zero"),
        ("alibi_bias.symmetric", "alibi_bias.causal"),
        ("tisa_bias.paper", "tisa_bias.published"),
        ("section_axes.chunks", "section_axes.cyclic"),
    ]
    for first, second in pairs:
        a, b = arrays(whole, first), arrays(whole, second)
        last = max(name for name in a if name.endswith(".result") and name in b)
        assert a[last].shape != b[last].shape or not np.array_equal(a[last], b[last]), (first, second)


def test_the_manifest_explains_itself(whole):
    found = json.loads((whole / "manifest.json").read_text(encoding="utf-8"))
    assert set(found["schemes"]) == set(rp.SCHEMES)
    assert {name for name, entry in found["schemes"].items() if not entry["doi"]} == {"inkling"}
    record = about(whole, "rotary.half.causal.float32")
    assert (record["doi"], record["equation"]) == ("10.48550/arXiv.2104.09864", "15")
    assert any("Relative position d = j - (i + offset)" in line for line in found["conventions"])


def test_a_file_suffices_without_this_library(whole):
    """Plain attention with a mask in ten lines of NumPy, as another project would write it."""
    for edge in ("bool_mask", "one_key_head", "large_logits"):
        record, held = about(whole, f"plain.{edge}.float32"), arrays(whole, f"plain.{edge}.float32")
        q, k, v = (held[name].astype(np.float64) for name in "qkv")
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scale = record["call"].get("scale", q.shape[-1] ** -0.5)
        s = np.einsum("bhid,bhjd->bhij", q, k) * scale
        seen = held["mask"] if "mask" in held else np.ones(s.shape, bool)
        if record["call"].get("causal"):
            ahead = np.arange(s.shape[-1]) - np.arange(s.shape[-2])[:, None] - (s.shape[-1] - s.shape[-2])
            seen = seen & (ahead <= 0)
        s = np.where(seen, s, -np.inf)
        e = np.where(seen, np.exp(s - np.max(s, axis=-1, keepdims=True, initial=-1e300)), 0)
        out = np.einsum("bhij,bhjd->bhid", e / np.maximum(e.sum(-1, keepdims=True), 1e-300), v)
        entry = record["outputs"]["out"]
        assert np.abs(out - held[entry["array"]]).max() <= entry["atol"] / 4


# ---------------------------------------------------------------------------------------------- bytes

# Of the manifest of set v1, which is never to change: another set has another name.
SET_V1 = "ef12d0c1435dd1bd6dfbceb4f4f8d1633ae8408797713ade16ff0a98dae32502"


def test_the_set_is_frozen(whole):
    assert hashlib.sha256((whole / "manifest.json").read_bytes()).hexdigest() == SET_V1


def test_the_set_has_tiles_and_is_small(whole):
    sizes = {about(whole, f"t5.exact.{edge}.float32")["arrays"]["k"]["shape"][2] for edge in records._TILES}
    assert sizes == {33, 65, 129}
    # Of which xz makes 17 MB.
    assert sum(path.stat().st_size for path in whole.iterdir()) < 58e6


def test_answers_have_few_bits(whole):
    for name in ("t5.exact.own.float32", "t5.exact.length_65.float32", "shaw.clip.own.float64"):
        described, held = about(whole, name), arrays(whole, name)
        bits = json.loads((whole / "manifest.json").read_text(encoding="utf-8"))["bits"][described["dtype"]]
        for entry in described["outputs"].values():
            x = held[entry["array"]].astype(np.float64)
            mantissa = np.ldexp(x, bits - int(np.ceil(np.log2(max(1.0, np.abs(x[np.isfinite(x)]).max())))))
            assert np.array_equal(mantissa[np.isfinite(x)], np.rint(mantissa[np.isfinite(x)]))


def test_a_part_of_the_set(tmp_path, capsys):
    asked = ["--schemes", "alibi,t5", "--dtypes", "float32", "--lengths", "16,33", "--head-dim", "8"]
    assert cli.main(["vectors", str(tmp_path / "part"), *asked]) == 0
    assert "v1" not in capsys.readouterr().out
    names = list(golden.manifest(tmp_path / "part"))
    assert {name.split(".")[0] for name in names} == {"alibi", "t5"}
    assert {name.split(".")[-2] for name in names} == {"length_16_dim_8", "length_33_dim_8"}
    assert check_vectors(tmp_path / "part", backends=PLAIN) == []
    for name, value in (("schemes", ["t6"]), ("dtypes", ["int8"]), ("lengths", [0]), ("head_dim", [-1])):
        with pytest.raises(rp.RelposValueError, match=name):
            write_vectors(tmp_path / "none", **{name: value})


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(few, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_vectors(tmp_path / name, seed=seed)
    first, same, other = (digest(tmp_path / name) for name in "abc")
    assert first == same
    assert set(first) == set(other)
    assert first["t5.exact.own.float32.npz"] != other["t5.exact.own.float32.npz"]


def test_another_process_gives_the_same_bytes(small, tmp_path):
    code = (
        "import sys, relpos_np as rp\n"
        "from relpos_np.testing import golden, records\n"
        "records.SCHEMES = {name: rp.SCHEMES[name] for name in ('t5', 'learned')}\n"
        "records.divergences = lambda seed: iter(())\n"
        "golden.write_vectors(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "again")]
    # As on an older processor, whose exponentials and products have other last bits.
    older = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 X86_V3", "OPENBLAS_CORETYPE": "Nehalem"}
    seen = {"PYTHONHASHSEED": "7", "RELPOS_BACKEND": "numpy", "PYTHONWARNINGS": "ignore"} | older
    subprocess.run(command, check=True, env=seen, cwd=DOCS.parent.parent)
    again, first = digest(tmp_path / "again"), digest(small)
    common = set(again) - {"manifest.json"}
    assert common
    assert all(again[name] == first[name] for name in common)


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "float16", "float32", "float64"])
def test_arrays_go_to_and_fro(dtype, rng):
    held = {
        "a.b": (rng.standard_normal((3, 1, 2)) * 4).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "c": np.array(1, dtype),
    }
    held["t"] = held["a.b"].T
    declared = {k: {"dtype": x.dtype.name, "shape": list(x.shape)} for k, x in held.items()}
    found = files.read_npz(files.npz(held), declared)
    for name, x in held.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], x)


def test_no_objects_in_files():
    with pytest.raises(rp.RelposTypeError, match="x: expected dtype"):
        files.npz({"x": np.array([{}], dtype=object)})
    with pytest.raises(rp.RelposTypeError, match="complex"):
        files.npz({"x": np.ones(2, complex)})


# ---------------------------------------------------------------------------------------------- bfloat16


def test_bfloat16(few, tmp_path):
    pytest.importorskip("safetensors")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in "ab":
        write_vectors(tmp_path / name, dtypes=("float32", "bfloat16"))
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert check_vectors(tmp_path / "a", backends=PLAIN) == []
    names = [path.name for path in (tmp_path / "a").glob("*.safetensors")]
    assert sorted(names) == [
        "learned.own.bfloat16.safetensors",
        "t5.exact.own.bfloat16.safetensors",
        "t5.float32.own.bfloat16.safetensors",
    ]
    entry = golden.manifest(tmp_path / "a")["t5.exact.own.bfloat16"]
    record = golden.read_record(tmp_path / "a", "t5.exact.own.bfloat16", entry)
    assert record.arrays["q"].dtype == ml_dtypes.bfloat16
    assert record.arrays["expected.out"].dtype == np.float32
    # A wrong number is noticed in this precision too: the tolerance is not far above one rounding.
    assert record.about["outputs"]["out"]["atol"] < 2.0**-5
    path = tmp_path / "a" / "t5.exact.own.bfloat16.safetensors"
    with pytest.raises(rp.RelposValueError, match="safetensors"):
        files.read_safetensors(path.read_bytes()[:50], record.about["arrays"])
    with pytest.raises(rp.RelposValueError, match="expected"):
        files.read_safetensors(path.read_bytes(), record.about["arrays"] | {"more": {"dtype": "bool", "shape": []}})
    wrong = record.about["arrays"] | {"q": {"dtype": "float16", "shape": list(record.arrays["q"].shape)}}
    with pytest.raises(rp.RelposValueError, match="q: found BF16"):
        files.read_safetensors(path.read_bytes(), wrong)


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_bfloat16_without_the_packages(few, tmp_path, monkeypatch, package):
    pytest.importorskip("ml_dtypes")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(rp.RelposImportError, match=r"relpos-np\[safetensors\]"):
        write_vectors(tmp_path / "a", dtypes=["bfloat16"])
    assert not (tmp_path / "a").exists()
    write_vectors(tmp_path / "b")


# ---------------------------------------------------------------------------------------------- what checking notices


def problems(folder, backends=PLAIN):
    return [f"{one.record}: {one.what}" for one in check_vectors(folder, backends=backends)]


@pytest.mark.parametrize("file", ["t5.exact.own.float32.npz", "t5.exact.own.float32.json", "rel_shift.xlnet.npz"])
def test_missing_and_damaged_files(small, file):
    whole = (small / file).read_bytes()
    record = file.rpartition(".")[0]
    for damaged in (whole[:-1], whole + b"\0", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        (small / file).write_bytes(damaged)
        (found,) = problems(small)
        assert found.startswith(f"{record}: {file}: ")
        # However well it reads, what has the right size needs the right checksum.
        assert "checksum" in found or len(damaged) != len(whole)
    (small / file).unlink()
    assert problems(small) == [f"{record}: {file}: no such file"]
    (small / file).mkdir()
    assert "cannot be read" in problems(small)[0]


@pytest.mark.parametrize("name", ["t5.exact.own.float64", "t5.exact.bool_mask.float32", "t5.exact.own.float16"])
def test_a_changed_number_is_noticed(small, name):
    """With right checksums; each output by a few tolerances in one element."""
    pristine = {path.name: path.read_bytes() for path in small.iterdir()}
    for output, entry in about(small, name)["outputs"].items():

        def change(held, entry=entry):
            at = np.unravel_index(np.nanargmax(np.abs(np.where(np.isfinite(x := held[entry["array"]]), x, 0))), x.shape)
            held[entry["array"]][at] += 2.5 * entry["atol"]

        rewrite(small, name, change_arrays=change)
        found = problems(small)
        assert found, output
        assert all(text.startswith(f"{name}: {output} of backend ") for text in found)
        for file, content in pristine.items():
            (small / file).write_bytes(content)


def test_tolerances_are_roundings_of_the_largest_number(small):
    """A sum of a thousand elements would be tolerated as an error of each."""
    for name in golden.manifest(small):
        described = about(small, name)
        if described["kind"] == "function" or described["edge"] != "own":
            continue
        held, eps = arrays(small, name), np.finfo(described["dtype"]).eps
        for output, entry in described["outputs"].items():
            # A rounding error of a score of 30 is 30 times as large; a gradient has eight times as many as a sum.
            largest = 240 * max(1.0, np.abs(held[entry["array"]]).max())
            rounding = 2.0 ** -records.BITS[described["dtype"]]
            assert 0 < entry["atol"] <= (eps + rounding / 100) * largest, (name, output)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out", "position.table", "mask"])
def test_a_changed_input_is_noticed(small, name):
    """The file is what is checked: not a scheme or numbers made anew from the seed."""

    def change(held):
        held[name] = ~held[name] if held[name].dtype == bool else held[name] * np.float32(1.01)

    rewrite(small, "t5.exact.own.float32", change_arrays=change)
    assert problems(small)


def test_a_changed_argument_is_noticed(small):
    def change(described):
        described["position"]["arguments"]["max_distance"] = 12

    rewrite(small, "t5.exact.own.float32", change_about=change)
    assert any("out of backend terms" in text for text in problems(small))


def test_a_wrong_function_is_noticed(small, monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "relpos_np.rel_shift", lambda x, variant: x)
    assert any(text.startswith("rel_shift.conformer: call 3 of relpos_np.rel_shift") for text in problems(small))
    monkeypatch.setitem(FUNCTIONS, "relpos_np.rel_shift", lambda x, variant: x.astype(int))
    assert any(text.startswith("rel_shift.wenet") for text in problems(small))


NONSENSE = [
    ("unknown kind", lambda d: d.update(kind="code")),
    ("expected format", lambda d: d.update(version=99)),
    ("expected the record", lambda d: d.update(name="other")),
    ("class: expected one of", lambda d: d["position"].update({"class": "os.system"})),
    ("is missing", lambda d: d["position"]["arguments"].update(table={"array": "nothing"})),
    ("T5: expected arguments table, max_distance", lambda d: d["position"]["arguments"].update(more=1)),
    ("max_distance", lambda d: d["position"]["arguments"].update(max_distance=-1)),
    ("expected a value", lambda d: d["position"]["arguments"].update(max_distance={"eval": "1"})),
    ("expected outputs", lambda d: d["outputs"].pop("gradient.q")),
    ("expected outputs", lambda d: d["outputs"].update(other=d["outputs"].pop("lse"))),
    ("unusable tolerance", lambda d: d["outputs"]["out"].update(atol=-1.0)),
    ("unusable tolerance", lambda d: d["outputs"]["out"].update(atol="1")),
    ("KeyError", lambda d: d["outputs"]["out"].update(array="nothing")),
    ("KeyError", lambda d: d.pop("call")),
    ("TypeError", lambda d: d.update(outputs=3)),
    ("expected a dtype and a shape", lambda d: d["arrays"].update(q=3)),
    ("expected a shape", lambda d: d["arrays"]["q"].update(shape=[-1])),
    ("expected a dtype", lambda d: d["arrays"]["q"].update(dtype="object")),
    ("expected float32", lambda d: d["arrays"]["q"].update(shape=d["arrays"]["q"]["shape"][::-1])),
    ("expected float32 (1073741824", lambda d: d["arrays"]["q"].update(shape=[1 << 30, 1 << 30])),
    ("expected", lambda d: d["arrays"].pop("q")),
]


@pytest.mark.parametrize(("words", "change"), NONSENSE, ids=map(str, range(len(NONSENSE))))
def test_a_record_that_makes_no_sense(small, words, change):
    rewrite(small, "t5.exact.own.float32", change_about=change)
    found = problems(small)
    assert len(found) == 1, found
    assert words in found[0]


def test_what_is_run_on_every_backend():
    assert Call("relpos_np.reference.t5_bucket", {}).backends == ("numpy",)
    assert Call("relpos_np.rel_shift", {}).backends == rp.backend.BACKENDS
    # A layer has the choice when it is called.
    assert Call("relpos_np.layers.SwinAttention", {}, {"x": 1}).backends == rp.backend.BACKENDS


def test_functions_that_may_not_be_named(small):
    def change(described):
        described["calls"][0]["function"] = "os.getcwd"

    rewrite(small, "rel_shift.xlnet", change_about=change)
    assert "no function that vectors may name" in problems(small)[0]
    with pytest.raises(rp.RelposValueError, match="vectors may name"):
        Call("os.getcwd", {}).run()


def test_archives_that_ask_for_too_much(small):
    """Compressed members and headers of enormous arrays are refused before anything of that size is made."""
    name = "t5.exact.own.float32"
    held = arrays(small, name)

    def archive(compression, first):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as target:
            for key, x in held.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, x, version=(1, 0))
                target.writestr(f"{key}.npy", first if key == "q" and first else content.getvalue())
        return buffer.getvalue()

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 44,)})
    pickled = io.BytesIO()
    np.lib.format.write_array(pickled, np.array([None], dtype=object), allow_pickle=True)
    columns = io.BytesIO()
    np.lib.format.write_array(columns, np.asfortranarray(held["q"]), version=(1, 0))
    padding = b"\0" * held["q"].nbytes
    for data, words in (
        (archive(zipfile.ZIP_STORED, columns.getvalue()), "q: found"),
        (archive(zipfile.ZIP_DEFLATED, None), "are allowed for a file of"),
        (archive(zipfile.ZIP_STORED, header.getvalue() + padding), "bytes cannot be float32"),
        (archive(zipfile.ZIP_STORED, pickled.getvalue() + padding), "q.npy: holds pickled objects"),
        (archive(zipfile.ZIP_STORED, b"\x93NUMPY\x03\x00" + padding), "q.npy is not an array"),
        (archive(zipfile.ZIP_STORED, padding + b"\0" * 64), "not a readable"),
        (b"no archive", "not a readable"),
    ):
        rewrite(small, name, data=data)
        (found,) = problems(small)
        assert words in found


MANIFESTS = [
    ("lists no records", lambda m: m.update(records={})),
    ("lists no records", lambda m: m.pop("records")),
    ("expected format", lambda m: m.update(format="other")),
    ("expected format", lambda m: m.update(version=2)),
    ("unusable entry", lambda m: m["records"].update({"rel_shift.xlnet": 3})),
    ("unusable entry", lambda m: m["records"]["rel_shift.xlnet"].pop("rel_shift.xlnet.npz")),
    ("unusable entry", lambda m: m["records"]["rel_shift.xlnet"]["rel_shift.xlnet.npz"].update(bytes="3")),
]


@pytest.mark.parametrize(("words", "change"), MANIFESTS, ids=map(str, range(len(MANIFESTS))))
def test_manifests(small, words, change):
    listed = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    change(listed)
    (small / "manifest.json").write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(rp.RelposValueError, match=words):
        check_vectors(small)


def test_folders(small, tmp_path, few):
    with pytest.raises(rp.RelposValueError, match="not empty"):
        write_vectors(small)
    with pytest.raises(rp.RelposValueError, match="no such file"):
        check_vectors(tmp_path / "nowhere")
    (small / "manifest.json").write_bytes(b"\xff{")
    with pytest.raises(rp.RelposValueError, match="not readable as JSON"):
        check_vectors(small)
    (small / "manifest.json").write_text("[1]")
    with pytest.raises(rp.RelposValueError, match="expected a JSON object"):
        check_vectors(small)
    (tmp_path / "empty").mkdir()
    assert write_vectors(str(tmp_path / "empty")) > 10
    shutil.rmtree(tmp_path / "empty")
    with pytest.raises(rp.RelposValueError, match="seed"):
        write_vectors(tmp_path / "empty", seed=-1)
    assert not (tmp_path / "empty").exists()


# ---------------------------------------------------------------------------------------------- values in JSON


def test_values_go_to_and_fro(rng):
    x = rng.standard_normal((2, 3))
    scheme = rp.Shaw(rng.standard_normal((3, 4)), outside="zero")
    value = {"a": (1, 2.5, None, True, "text", -np.inf), "b": [x, (x + 1,)], "scheme": scheme, "n": np.int64(3)}
    held = {}
    node = json.loads(json.dumps(encode(value, "v", held), allow_nan=False))
    assert sorted(held) == ["v.b.0", "v.b.1.0", "v.scheme.key_table"]
    found = decode(node, held)
    assert found["a"] == value["a"]
    assert found["n"] == 3
    assert type(found["n"]) is int
    np.testing.assert_array_equal(found["b"][1][0], x + 1)
    assert repr(found["scheme"]) == repr(scheme)
    np.testing.assert_array_equal(arguments(found["scheme"])["key_table"], scheme.key_table)
    with pytest.raises(rp.RelposTypeError, match=r"v\.0: a function"):
        encode([lambda: None], "v", {})
