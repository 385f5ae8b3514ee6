"""The command line: what it prints, writes and returns, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._commands import main as cli
from relpos_np._commands.names import scheme_named
from relpos_np.schemes.base import Scheme
from relpos_np.testing import sweep
from tests.every import ATTENTION


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RELPOS_BACKEND", raising=False)


@pytest.fixture
def run(capsys):
    """``run(argument, ...)``: exit code, stdout and stderr."""

    def call(*argv):
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def as_json(run):
    """``as_json(argument, ...)``: the object that --json prints, with nothing on stderr and this exit code."""

    def call(*argv, code=0):
        found, out, err = run(*argv, "--json")
        assert (found, err) == (code, "")
        return json.loads(out)

    return call


@pytest.fixture
def refuses(run):
    """``refuses("words", argument, ...)``: exit code 2 and one line on stderr that holds the words."""

    def call(words, *argv):
        code, out, err = run(*argv)
        assert code == 2
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert "Traceback" not in err
        assert words in err

    return call


def archive(one):
    """An example as the arrays of a file."""
    return {
        "q": one.q,
        "k": one.k,
        "v": one.v,
        "scheme": one.name,
        **one.kwargs,
        **parameters("position", one.position),
    }


def parameters(prefix, scheme):
    """The arguments of a scheme as the arrays of a file."""
    arrays = {}
    for name, value in testing.arguments(scheme).items():
        if name == "key_coords":
            arrays |= {f"{prefix}.{name}.{n}": c for n, c in enumerate(value or ()) if c is not None}
        elif isinstance(value, Scheme):
            arrays[f"{prefix}.{name}"] = next(n for n, info in rp.SCHEMES.items() if info.cls is type(value))
            arrays |= parameters(f"{prefix}.{name}", value)
        elif value is not None:
            arrays[f"{prefix}.{name}"] = value
    return arrays


def qkv(**more):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((2, 3, 7, 4)) for name in "qkv"} | more


def saved(path="in.npz", **arrays):
    np.savez(path, **arrays)
    return path


# --------------------------------------------------------------------------------- help and description


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"relpos {rp.__version__}\n")
    said = run("--help")[1]
    assert all(name in said for name in ("attend", "config", "plot", "check", "identify", "vectors", "warmup", "info"))
    assert "PYTEST" not in said  # of the module's docstring only what users want to know
    for command in ("attend", "config", "plot", "check", "identify", "vectors", "warmup", "info"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"relpos {command}" in out.partition("example")[2]
    assert run()[0] == 2
    assert run("fly")[0] == 2
    code, _, err = run("check", "t5")
    assert code == 2
    assert err.startswith("usage: relpos check ")
    assert "relpos check: error: unrecognized arguments: t5" in err
    assert run("check", "--seed", "-1")[0] == 2
    assert run("attend", "--threads", "0")[0] == 2


def test_warmup_prepares_every_kernel(run, as_json):
    numba_kernels = pytest.importorskip("relpos_np.kernels._numba")
    found = as_json("warmup")
    assert set(found["seconds"]) == set(numba_kernels.KERNELS)
    stored = {path.name.partition("-")[0] for path in Path(found["folder"]).iterdir()}
    assert {kernel.function.__name__.strip("_") for kernel in numba_kernels.KERNELS.values()} <= stored
    code, out, _ = run("warmup")
    assert code == 0
    assert f"kept in {found['folder']}" in out


def test_info(run, as_json):
    assert as_json("info")["relpos_np"] == rp.__version__
    assert rp.__version__ in run("info")[1]


def test_as_a_module():
    command = [sys.executable, "-m", "relpos_np", "attend", "--json", "--backend", "numpy", "--plot", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert done.stderr == ""


# --------------------------------------------------------------------------------- attend, the real example


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_real_example(as_json, backend, tmp_path):
    if backend == "numba":
        pytest.importorskip("numba")
    found = as_json("attend", "--backend", backend, "--plot", "none")
    assert found["backend"] == backend
    assert found["ok"] is True
    assert max(found["error"].values()) <= 2e-6
    assert found["seconds"] > 0
    assert found["numpy_seconds"] > 0
    assert found["first_call_seconds"] > 0
    assert (found["vectors"] is None) == (backend != "numba")
    assert not list(tmp_path.iterdir())


def test_real_example_in_words(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = run("attend", "--backend", "terms")
    assert code == 0
    assert "correct" in out
    assert "times as fast" in out
    assert (tmp_path / "relpos-attend.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_backend_gives_exit_code_1(run, as_json, monkeypatch):
    right = rp.backend.evaluate

    def wrong(*args):
        out, lse = right(*args)
        out[0, 0, 0, 0] += 1e-5
        return out, lse

    monkeypatch.setattr(rp.backend, "evaluate", wrong)
    code, out, _ = run("attend", "--backend", "terms", "--plot", "none")
    assert code == 1
    assert "MISMATCH" in out
    assert as_json("attend", "--backend", "terms", "--plot", "none", code=1)["ok"] is False


def test_without_matplotlib_the_rest_goes_on(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    code, out, err = run("attend", "--backend", "numpy", "--json")
    assert code == 0
    assert json.loads(out)["plot"] is None
    assert 'pip install "relpos-np[plot]"' in err
    assert not list(tmp_path.iterdir())


def test_threads(as_json, refuses):
    numba = pytest.importorskip("numba")
    before = numba.get_num_threads()
    assert as_json("attend", "--backend", "numba", "--threads", "1", "--plot", "none")["threads"] == 1
    assert numba.get_num_threads() == before
    refuses("at most", "attend", "--backend", "numba", "--threads", "100000")
    refuses("only backend 'numba'", "attend", "--backend", "numpy", "--threads", "1")


def test_unusable_options(refuses, monkeypatch):
    refuses("goes with a FILE", "attend", "--scheme", "t5")
    refuses("goes with a FILE", "attend", "--out", "x.npz")
    monkeypatch.setenv("RELPOS_BACKEND", "abacus")
    refuses("abacus", "attend")


# --------------------------------------------------------------------------------- attend FILE


@pytest.mark.parametrize("word", ["RoPE", "rotary", "Rotary", "ROTARY"])
def test_every_name_of_a_scheme_is_taken(run, word):
    for words in (("attend", saved(**qkv(scheme=word))), ("attend", saved(**qkv()), "--scheme", word)):
        code, _, err = run(*words, "--backend", "numpy")
        assert (code, err) == (0, "")


def test_every_class_and_every_key_is_a_name():
    every = tuple(rp.SCHEMES)
    for name, info in rp.SCHEMES.items():
        for text in (name, info.cls.__name__, name.upper().replace("_", "-")):
            assert scheme_named(text, expected=every) == (name, None)
    assert scheme_named("espnet-legacy", expected=every) == ("transformer_xl", "espnet_legacy")


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_every_scheme_from_a_file(as_json, name, variant, tmp_path):
    one = testing.example(name, dtype="float64", variant=variant)
    found = as_json("attend", saved(**archive(one)), "--backend", "terms")
    assert found["out"] == "in-out.npz"
    assert found["finite"] is True
    assert found["shape"] == list(one.expected.shape)
    with np.load("in-out.npz", allow_pickle=False) as result:
        assert set(result.files) == {"out", "lse"}
        assert one.error(result["out"], result["lse"]) <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in-out.npz", "in.npz"]


def test_a_scheme_within_a_scheme_from_a_file(run, rng):
    """With parameters of its own, and with ones that mean nothing."""
    network = {"w1": rng.standard_normal((5, 6)), "b1": rng.standard_normal(5), "w2": rng.standard_normal((3, 5))}
    dape = {**network, "b2": rng.standard_normal(3)}
    arrays = qkv(scheme="dape", **{f"position.{name}": x for name, x in dape.items()})
    slopes = np.array([0.25, 1.0, 3.0])
    given = {"position.bias": "alibi", "position.bias.slopes": slopes, "position.bias.form": "causal"}
    code, _, err = run("attend", saved(**arrays, **given), "--backend", "terms")
    assert (code, err) == (0, "")
    scheme = rp.DAPE(rp.ALiBi(slopes, form="causal"), **dape)
    with np.load("in-out.npz", allow_pickle=False) as result:
        testing.assert_matches(result["out"], rp.attention(*(arrays[name] for name in "qkv"), position=scheme))
    for wrong, words in (
        ({"position.bias": "alib"}, "scheme: expected one of .* found 'alib'"),
        ({"position.bias.slopes": slopes}, "dape needs position.bias"),
        (
            {**given, "position.bias.slope": slopes},
            r"alibi has no parameter position\.bias\.slope; expected .*bias\.slopes",
        ),
        ({**given, "position.bias.bias.w1": slopes}, r"no parameter position\.bias\.bias\.w1"),
        ({"position.bias": np.array(["alibi", "t5"])}, r"position\.bias: expected a single value"),
        ({"position.bias": slopes[:1]}, "scheme: expected one of"),
    ):
        code, _, err = run("attend", saved(**arrays, **wrong))
        assert code != 0
        assert re.search(words, err), err


def test_options_from_a_file(run):
    arrays = qkv(causal=True, window=np.array([-1, 2]), scale=np.float32(0.25), offset=1, key_lengths=np.array([3, 7]))
    code, out, _ = run("attend", saved(**arrays), "--out", "result", "--backend", "terms")
    assert code == 0
    assert "result" in out
    expected = rp.attention(
        *(arrays[name] for name in "qkv"),
        causal=True,
        window=(None, 2),
        scale=0.25,
        offset=1,
        key_lengths=arrays["key_lengths"],
        backend="numpy",
    )
    with np.load("result", allow_pickle=False) as result:
        testing.assert_matches(result["out"], expected)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"rule": "chunked", "rule.size": 2, "rule.left": -1}, {"rule": rp.Chunked(2, left=None)}),
        ({"rule": "dilated", "rule.step": 3}, {"rule": rp.Dilated(3)}),
        ({"rule": "prefix", "rule.lengths": np.array([2, 4])}, {"rule": rp.Prefix(np.array([2, 4]))}),
        ({"softcap": 0.5, "cap_order": "content"}, {"softcap": 0.5, "cap_order": "content"}),
        ({"offset": np.array([0, 2]), "causal": True}, {"offset": np.array([0, 2]), "causal": True}),
        ({"segments": np.array([0, 2, 7]), "key_segments": np.array([0, 3, 7])}, {"segments": ([0, 2, 7], [0, 3, 7])}),
        ({"selected": np.array([[[0, 6]] * 7] * 2)}, {"selected": np.array([[[0, 6]] * 7] * 2)}),
        ({"sinks": np.arange(3.0), "query_scale": np.arange(7.0)},) * 2,
    ],
    ids="-".join,
)
def test_what_released_models_need_from_a_file(run, given, options):
    arrays = qkv()
    assert run("attend", saved(**arrays, **given), "--backend", "terms")[0] == 0
    out, lse = rp.attention(*(arrays[name] for name in "qkv"), return_lse=True, backend="numpy", **options)
    with np.load("in-out.npz", allow_pickle=False) as result:
        np.testing.assert_allclose(result["out"], out, rtol=0, atol=1e-13)
        np.testing.assert_allclose(result["lse"], lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "given", [{"sinks": np.ones(3)}, {"segments": np.array([0, 7]), "key_segments": np.array([0, 7])}]
)
def test_no_picture_of_what_scores_do_not_show(refuses, given, tmp_path):
    refuses("no picture of a call with", "attend", saved(**qkv(), **given), "--plot", "p.png", "--backend", "terms")
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


TABLE = {"position.table": np.ones((32, 3))}
WINDOW = {"position.grid": np.array([7, 1]), "position.table": np.ones((13, 3))}


@pytest.mark.parametrize(
    ("words", "arrays"),
    [
        ("missing v", {name: np.ones((3, 4)) for name in "qk"}),
        ("missing q, k, v", {}),
        ("unknown values", qkv(values=np.ones(3))),
        ("unknown table", qkv(scheme="t5", table=np.ones((32, 3)))),
        ("no parameter position.tabel", qkv(scheme="t5", **{"position.tabel": np.ones((32, 3))})),
        ("no parameter position.table; expected none", qkv(scheme="plain", **TABLE)),
        ("t5 needs position.table", qkv(scheme="t5")),
        ("without a scheme", qkv(**TABLE)),
        ("found 'ropes'; did you mean rotary or ", qkv(scheme="ropes")),
        (
            "espnet_legacy is a variant of transformer_xl; say",
            qkv(scheme="espnet_legacy", **{"position.variant": "xlnet"}),
        ),
        ("rstt is a variant of window; say window", qkv(scheme="rstt")),
        ("added to the inputs", qkv(scheme="sinusoidal", **{"position.dim": 4})),
        ("max_distance", qkv(scheme="t5", **TABLE, **{"position.max_distance": 1.5})),
        ("max_distance: expected an integer", qkv(scheme="t5", **TABLE, **{"position.max_distance": np.ones((1, 2))})),
        ("scheme: expected a single", qkv(scheme=["t5", "shaw"])),
        ("is for 4 heads", qkv(scheme="t5", **{"position.table": np.ones((32, 4))})),
        ("key_coords.2", qkv(scheme="window", **WINDOW, **{"position.key_coords.2": np.arange(7)})),
        ("expected position.table", qkv(scheme="window", **WINDOW, **{"position.key_coords": np.arange(7)})),
        ("window: expected one or two", qkv(window=1.5)),
        ("window", qkv(window=np.array([1, 2, 3]))),
        ("causal: expected True", qkv(causal=1)),
        ("key_segments without segments", qkv(key_segments=np.array([0, 7]))),
        ("rule.size without an array `rule`", qkv(**{"rule.size": 3})),
        ("rule: expected one of chunked, dilated, prefix", qkv(rule="causal")),
        ("chunked has no parameter rule.step", qkv(rule="chunked", **{"rule.step": 3})),
        ("chunked needs rule.size", qkv(rule="chunked")),
        ("step: expected an integer", qkv(rule="dilated", **{"rule.step": 1.5})),
        ("lengths: expected integers", qkv(rule="prefix", **{"rule.lengths": "two"})),
        ("cap_order: expected one of", qkv(softcap=1.0, cap_order="mask")),
        ("scale: expected a single", qkv(scale=np.ones(2))),
        ("head_dim", qkv() | {"k": np.ones((2, 3, 7, 5))}),
        ("one dtype", qkv() | {"k": np.ones((2, 3, 7, 4), "float32")}),
        ("mask", qkv(mask=np.ones((5, 5), bool))),
        ("expected dtype", {name: np.array(["a", "b"]) for name in "qkv"}),
    ],
)
def test_files_with_the_wrong_arrays(refuses, words, arrays, tmp_path):
    refuses(words, "attend", saved(**arrays), "--backend", "terms")
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_results_are_not_written_over_the_input(refuses):
    path = saved(**qkv())
    refuses("is the input", "attend", path, "--out", path)
    refuses("cannot be written", "attend", path, "--out", "no/such/folder.npz", "--backend", "terms")


# --------------------------------------------------------------------------------- vectors


@pytest.fixture
def few_vectors(monkeypatch):
    """Golden vectors of two schemes and of no function, and backends that need no compiler."""
    from relpos_np.testing import records

    monkeypatch.setattr(records, "SCHEMES", {name: rp.SCHEMES[name] for name in ("t5", "learned")})
    monkeypatch.setattr(records, "divergences", lambda seed: iter(()))
    monkeypatch.setattr(rp.backend, "available", lambda: (("numpy", "terms"), {"numba": "it is not installed"}))


def test_vectors(run, as_json, few_vectors, tmp_path):
    code, out, err = run("vectors", "golden")
    assert (code, err) == (0, "")
    assert "records, " in out
    code, out, err = run("vectors", "--check", "golden")
    assert (code, err) == (0, "")
    assert "all within the tolerance" in out
    assert "not checked: numba: it is not installed" in out
    written = as_json("vectors", "other", "--seed", "1")
    assert written["records"] == len(list((tmp_path / "other").glob("*.npz")))
    found = as_json("vectors", "--check", "other")
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["comparisons"] > 5 * found["records"]


def test_wrong_vectors_give_exit_code_1(run, as_json, few_vectors, unmet, tmp_path, monkeypatch):
    run("vectors", "golden")
    (tmp_path / "golden" / "t5.exact.own.float32.npz").unlink()
    (tmp_path / "golden" / "t5.exact.own.float64.json").write_text("{}")
    code, out, _ = run("vectors", "--check", "golden")
    assert code == 1
    assert "MISMATCH: t5.exact.own.float32: t5.exact.own.float32.npz: no such file\n" in out
    assert "MISMATCH: t5.exact.own.float64: t5.exact.own.float64.json" in out
    assert len(as_json("vectors", "--check", "golden", code=1)["problems"]) == 2
    right = rp.backend.evaluate
    monkeypatch.setattr(rp.backend, "evaluate", lambda *args: tuple(x * 1.01 for x in right(*args)))
    code, out, _ = run("vectors", "--check", "golden")
    assert code == 1
    assert "out of backend terms in float64" in out
    assert "times the tolerance" in out


def test_unusable_vectors(refuses, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    refuses("not empty", "vectors", "full")
    refuses("no such file", "vectors", "--check", "nowhere")
    refuses("goes without --check", "vectors", "--check", "full", "--seed", "3")
    refuses("goes without --check", "vectors", "--check", "full", "--dtypes", "float32")
    (tmp_path / "full" / "manifest.json").write_text("[")
    refuses("not readable as JSON", "vectors", "--check", "full")
    refuses("cannot be written", "vectors", tmp_path / "full" / "x" / "y")


# --------------------------------------------------------------------------------- check


@pytest.fixture
def few_cases(monkeypatch):
    """The sweep with a few edges of two schemes, and with the backends that need no compiler."""
    every = sweep.examples
    some = ("own", "bool_mask", "length_1")
    monkeypatch.setattr(sweep, "SCHEMES", {name: rp.SCHEMES[name] for name in ("t5", "sinusoidal")})
    monkeypatch.setattr(
        sweep, "examples", lambda *args, **kwargs: (e for e in every(*args, **kwargs) if e.edge in some)
    )
    monkeypatch.setattr(rp.backend, "available", lambda: (("numpy", "terms"), {"numba": "it is not installed"}))


def test_check(run, as_json, few_cases):
    code, out, err = run("check", "--seed", "3")
    assert (code, err) == (0, "")
    assert "not checked: numba" in out
    assert "t5" in out
    found = as_json("check")
    assert found["ok"] is True
    assert found["not_available"] == {"numba": "it is not installed"}
    assert {(r["scheme"], r["backend"]) for r in found["results"]} == {
        ("t5", "numpy"),
        ("t5", "terms"),
        ("sinusoidal", "numpy"),
    }
    assert all(0 <= r["error"] <= 1 for r in found["results"])


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_check_finds_a_wrong_backend(run, as_json, few_cases, unmet, monkeypatch, factor):
    right = rp.backend.evaluate
    monkeypatch.setattr(rp.backend, "evaluate", lambda *args: tuple(x * factor for x in right(*args)))
    code, out, _ = run("check")
    assert code == 1
    assert "MISMATCH of terms and the reference" in out
    assert "times the tolerance in t5 exact, float32, " in out
    assert "terms is wrong: the scheme's terms in long double are within " in out
    assert {r["backend"] for r in as_json("check", code=1)["results"] if not r["ok"]} == {"terms"}


def test_check_finds_a_wrong_reference(run, few_cases, monkeypatch):
    """What is blamed is not the backend that differs from it."""
    right = rp.T5.scores
    monkeypatch.setattr(rp.T5, "scores", lambda *args: right(*args) * (1 + 1e-3))
    code, out, _ = run("check")
    assert code == 1
    assert "MISMATCH of terms and the reference" in out
    assert "terms is wrong" not in out
    assert "    the reference is wrong: " in out


def test_check_finds_a_wrong_encoding(run, few_cases, monkeypatch):
    right = rp.Sinusoidal.__call__
    monkeypatch.setattr(rp.Sinusoidal, "__call__", lambda self, x: right(self, x) + (x.dtype == "float32") * 1e-5)
    out = run("check")[1]
    assert "MISMATCH of numpy and the reference" in out
    assert "either may be wrong" in out
    assert "in sinusoidal interleaved, float32, " in out


@pytest.mark.slow
def test_the_sweep_is_complete():
    found = [(*part, case) for part in sweep.parts() for case in sweep.cases(*part, rp.backend.BACKENDS, 0)]
    wanted = {(n, v, b) for n, i in rp.SCHEMES.items() for v in i.variants or (None,) for b in i.backends}
    assert {(name, variant, case.backend) for name, variant, case in found} == wanted
    assert {case.dtype for *_, case in found} == set(sweep.DTYPES)
    # All that `cases` makes but the long ones, in each precision.
    made = {(one.edge, dtype) for dtype in sweep.DTYPES for one in testing.cases("t5", dtype=dtype) if not one.long}
    assert {(c.example.edge, c.dtype) for n, _, c in found if n == "t5"} == made - {("blocks", "float16")}


@pytest.mark.parametrize("missing", [("numba",), ("numba", "cuda")], ids=str)
def test_backends_of_this_machine(missing, monkeypatch):
    def kernels(name):
        if name in missing:
            raise rp.RelposImportError(f"no compiler for {name}")

    monkeypatch.setattr(rp.backend, "kernels", kernels)
    there = tuple(name for name in rp.backend.BACKENDS if name not in missing)
    assert rp.backend.available() == (there, {name: f"no compiler for {name}" for name in missing})


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal(run, as_json, few_cases, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = run("check")
    assert code == 0
    assert "sinusoidal" in out
    assert "checking" in err
    assert as_json("check")["ok"] is True


def test_interruption(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "cases", interrupt)
    code, _, err = run("check")
    assert (code, err) == (130, "relpos check: interrupted\n")


def test_config_prints_layers_that_are_alike_once(run, refuses):
    stored = {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 9}
    Path("config.json").write_text(json.dumps(stored), encoding="utf-8")
    code, out, _ = run("config", "config.json")
    assert code == 0
    assert "gemma2, layers 0, 2 of 4" in out
    assert "gemma2, layers 1, 3 of 4" in out
    assert out.count("soft cap") == 2
    _, out, _ = run("config", ".", "--layer", 1)
    assert out.startswith("gemma2, layer 1 of 4")
    layers = json.loads(run("config", "config.json", "--json")[1])["layers"]
    assert [layer["window"] for layer in layers] == [[8, None], None] * 2
    assert "gemma2" in json.loads(run("config", "--types", "--json")[1])["model_types"]
    refuses("layer: expected 0 ... 3", "config", "config.json", "--layer", 4)
    refuses("cannot be read", "config", "other.json")
    refuses("--types", "config")
    Path("config.json").write_text(json.dumps(stored | {"attn_twist": 1}), encoding="utf-8")
    refuses("attn_twist", "config", "config.json")


def test_config_prints_parts(run):
    Path("config.json").write_text(json.dumps({"model_type": "t5"}), encoding="utf-8")
    _, out, _ = run("config", "config.json")
    assert [line for line in out.splitlines() if line.startswith("t5")] == [
        "t5, encoder, layers 0-5 of 6",
        "t5, decoder, layers 0-5 of 6",
        "t5, cross, layers 0-5 of 6",
    ]
    assert "encoder.block.0.layer.0." in out
    assert run("config", "config.json", "--part", "cross")[1].count("t5,") == 1
    Path("config.json").write_text(json.dumps({"model_type": "umt5"}), encoding="utf-8")
    assert "decoder.block.N.layer.0." in run("config", "config.json")[1]
