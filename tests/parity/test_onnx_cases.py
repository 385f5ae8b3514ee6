"""Golden vectors as test cases of ONNX, which its own runner executes with onnxruntime and with its evaluator."""

import json
import unittest
import warnings

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import main as cli
from relpos_np.testing import onnx_cases, write_onnx_cases
from relpos_np.testing.records import examples

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
base = pytest.importorskip("onnx.backend.base")
loader = pytest.importorskip("onnx.backend.test.loader")
runner = pytest.importorskip("onnx.backend.test.runner")
reference = pytest.importorskip("onnx.reference")


class Prepared(base.BackendRep):
    def __init__(self, run):
        self._run = run

    def run(self, inputs, **kwargs):
        return self._run(dict(zip("qkv", inputs, strict=True)))


class OnRuntime(base.Backend):
    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return Prepared(lambda inputs: session.run(None, inputs))

    @classmethod
    def supports_device(cls, device):
        return device == "CPU"


class OnEvaluator(OnRuntime):
    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        evaluator = reference.ReferenceEvaluator(model)
        return Prepared(lambda inputs: evaluator.run(None, inputs))


class Runner(runner.Runner):
    """ONNX's, with the cases of a folder and no others."""

    def __init__(self, backend, folder):
        with warnings.catch_warnings():  # building ONNX's own cases overflows and divides by zero
            warnings.simplefilter("ignore")
            super().__init__(backend, __name__)
        self._test_items.clear()
        for case in loader.load_model_tests(str(folder.parent), folder.name):
            self._add_model_test(case, "Relpos")


def executed(backend, folder):
    """How many cases ran, and the names of those that failed."""
    suite = Runner(backend, folder).test_suite
    result = unittest.TestResult()
    suite.run(result)
    wrong = [str(test) for test, _ in result.failures + result.errors]
    return result.testsRun - len(result.skipped), wrong


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases") / "golden"
    assert write_onnx_cases(folder) == len(list(folder.iterdir()))
    return folder


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(onnx_cases, "SCHEMES", {name: rp.SCHEMES[name] for name in ("t5", "rotary", "path")})


@pytest.mark.slow
def test_runner_executes_them_with_onnxruntime(whole):
    ran, wrong = executed(OnRuntime, whole)
    assert not wrong
    assert ran == len(list(whole.iterdir())) > 500


def test_runner_executes_them_with_the_evaluator(few, tmp_path):
    count = write_onnx_cases(tmp_path / "cases")
    assert executed(OnEvaluator, tmp_path / "cases") == (count, [])


def test_runner_finds_what_is_wrong(few, tmp_path):
    """An output of one case changed by twice its tolerance."""
    write_onnx_cases(tmp_path / "cases")
    case = tmp_path / "cases" / "test_relpos_t5_exact_own_float32"
    file = case / "test_data_set_0" / "output_0.pb"
    out = onnx.numpy_helper.to_array(onnx.load_tensor(str(file))).copy()
    out[0, 0, 0, 0] += 2 * json.loads((case / "data.json").read_text(encoding="utf-8"))["atol"]
    file.write_bytes(onnx.numpy_helper.from_array(out).SerializeToString())
    _, wrong = executed(OnRuntime, tmp_path / "cases")
    assert [name.split()[0] for name in wrong] == ["test_relpos_t5_exact_own_float32_cpu"]


def test_every_scheme_that_has_a_model_is_there(whole):
    found = {path.name.removeprefix("test_relpos_") for path in whole.iterdir()}
    for name in (
        "plain",
        "t5_exact",
        "shaw_clip",
        "rotary_half",
        "window_rstt",
        "transformer_xl_wenet",
        "irpe_cross",
        "swin_v2_paper",
    ):
        assert {f"{name}_own_float32", f"{name}_own_float64"} <= found
    assert not any(name.startswith("path") or "nan_excluded" in name for name in found)


def test_command(few, tmp_path, capsys):
    assert cli.main(["vectors", str(tmp_path / "a"), "--format", "onnx"]) == 0
    assert "schemes that no model can say: path" in capsys.readouterr().out
    assert cli.main(["vectors", str(tmp_path / "b"), "--format", "onnx", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schemes_without_a_model"] == ["path"]
    assert found["cases"] == len(list((tmp_path / "b").iterdir()))
    same = [[p.read_bytes() for p in sorted((tmp_path / one).rglob("*")) if p.is_file()] for one in "ab"]
    assert same[0] == same[1]
    for words in (["--check"], ["--dtypes", "float32"]):
        assert cli.main(["vectors", str(tmp_path / "c"), "--format", "onnx", *words]) == 2
        assert f"{words[0]}: goes without --format onnx" in capsys.readouterr().err
    assert cli.main(["vectors", str(tmp_path / "a"), "--format", "onnx"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_answers_are_exact(few, tmp_path):
    write_onnx_cases(tmp_path / "cases", seed=3)
    data = tmp_path / "cases" / "test_relpos_rotary_half_own_float64" / "test_data_set_0"
    q, k, v, out = (
        onnx.numpy_helper.to_array(onnx.load_tensor(str(data / name)))
        for name in ("input_0.pb", "input_1.pb", "input_2.pb", "output_0.pb")
    )
    one = next(
        one for one in examples("rotary", seed=3, dtypes=["float64"]) if (one.variant, one.edge) == ("half", "own")
    )
    for found, wanted in ((q, one.q), (k, one.k), (v, one.v), (out, one.expected)):
        np.testing.assert_array_equal(found, wanted)
