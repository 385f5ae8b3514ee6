"""`relpos bench`: what it prints, what it writes, and what it makes of packages and machines that are not as hoped."""

import json

import pytest

from relpos_np._commands import bench, common
from relpos_np._commands.main import main
from relpos_np._commands.peers import OURS, PEERS, rounds
from relpos_np._commands.peers.shapes import SHAPES

SMALL = ["bench", "--shapes", "a", "h", "--peers", "numpy", "--rounds", "2"]


def test_tables_and_a_file(tmp_path, capsys, monkeypatch):
    """Run as it is, in a folder with a file whose name is that of a module."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(9)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--threads", "1", "--json", "speed.json"]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert record["processor"] in out
    assert (record["threads"], record["ok"], record["not_installed"]) == (1, True, {})
    for letter in "ah":
        found = record["attention"][letter]["peers"]
        assert list(found) == [OURS, "numpy"]
        for one in found.values():
            assert one["error"] < 4e-6
            assert 0 < one["best_ms"] <= one["median_ms"]
            assert one["calls"] >= 2
        assert found[OURS]["times_ours"] == 1
        assert f"{found['numpy']['times_ours']:.2f}" in out
    assert "a: T5 bias, float32; 1 × 2 heads, 48 × 48, head_dim 16" in out
    assert f"numpy: {PEERS['numpy'].words}" in out


def test_what_is_timed_unasked_exists():
    assert set(bench._SHAPES) <= set(SHAPES)
    assert set(bench._UNASKED) <= set(PEERS)


def timed(median, best):
    return {"median_ms": median, "best_ms": best, "times_ours": 1.0, "error": 1e-6, "note": "", "calls": 3}


@pytest.fixture
def bench_of(monkeypatch, capsys):
    """Runs the command with times that are given in place of those of processes; returns its code and what it says."""
    monkeypatch.setattr(common, "load", lambda: 0.2)

    def run(ours, *words):
        asked = []

        def given(names, jobs, done=None, **options):
            asked.extend(names)
            shape = {"words": "T5 bias", "storage": "float32", "shape": [1, 2, 48, 48, 16], "peers": {OURS: ours}}
            if done:
                done("attention", "a", shape)
            return {"attention": {"a": shape}}

        monkeypatch.setattr(rounds, "run", given)
        return main(["bench", *words]), capsys.readouterr(), asked

    return run


def test_what_is_not_installed_is_named(bench_of, monkeypatch):
    there = {"numpy", "numba", "llvmlite", "torch", "onnx"}
    monkeypatch.setattr(bench, "find_spec", lambda name: name if name in there else None)
    code, said, asked = bench_of(timed(2.0, 1.9))
    assert code == 0
    assert asked == [OURS, "torch eager", "torch sdpa", "torch sdpa, bias inside", "numpy"]
    assert "not installed  onnxruntime, openvino, jax\n" in said.out
    assert "2 ms    1.9 ms  1.00   1e-06" in said.out
    found = json.loads(bench_of(timed(2.0, 1.9), "--json")[1].out)
    assert found["not_installed"] == {"onnxruntime": "onnxruntime", "openvino": "openvino", "jax": "jax"}
    code, _, asked = bench_of(timed(2.0, 1.9), "--peers", "torch flex", "jax")
    assert (code, asked) == (0, [OURS, "torch flex"])


def test_a_busy_machine_is_called_busy(bench_of, monkeypatch):
    assert "busy" not in bench_of(timed(2.0, 1.1))[1].out
    assert json.loads(bench_of(timed(2.0, 1.1), "--json")[1].out)["busy"] is False
    assert common.BUSY in bench_of(timed(2.0, 0.9))[1].out
    monkeypatch.setattr(common, "load", lambda: 1.2)
    assert common.BUSY in bench_of(timed(2.0, 1.9))[1].out
    assert json.loads(bench_of(timed(2.0, 1.9), "--json")[1].out)["busy"] is True


def test_a_wrong_result_of_ours_is_a_mismatch(bench_of):
    code, said, _ = bench_of({"unavailable": "its result deviates from float64 by 1.0e-01"})
    assert code == common.MISMATCH
    assert "relpos_np has no time in a: its result deviates from float64" in said.out


def test_refusals(bench_of, monkeypatch, capsys):
    for wrong, words in (
        (["--threads", "999"], "--threads: at most"),
        (["--json", "no/such/folder.json"], "--json: no/such/folder.json cannot be written"),
    ):
        code, said, asked = bench_of(timed(2.0, 1.9), *wrong)
        assert (code, asked) == (common.FAILED, [])
        assert words in said.err
    with pytest.raises(SystemExit):
        main(["bench", "--peers", "abacus"])
    assert "invalid choice: 'abacus'" in capsys.readouterr().err

    def dies(*arguments, **options):
        raise ChildProcessError("numpy: its process ended with code -4 during 'prepare'")

    monkeypatch.setattr(rounds, "run", dies)
    assert main(["bench"]) == common.FAILED
    assert "ended with code -4 during 'prepare'; name the others with --peers" in capsys.readouterr().err


def test_a_process_that_ends_is_named(monkeypatch):
    """Before it answers: with an interpreter that knows none of these arguments."""
    process = rounds.Process("numpy", "true", 1)
    with pytest.raises(ChildProcessError, match="numpy: its process ended with code 0 during 'versions'"):
        process.ask("versions")
    process.close()
