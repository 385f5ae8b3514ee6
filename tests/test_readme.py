"""What the README prints must run, what it draws must have been recorded, and what it points to must be there."""

import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from relpos_np._commands import main as cli

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"  # also where the package is installed elsewhere
pytestmark = [
    pytest.mark.readme,
    pytest.mark.skipif(not README.is_file(), reason="there is no README.md: not a checkout"),
]


def blocks(language):
    """Fenced blocks of a language."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands():
    """Lines of shell blocks, without prompts and comments."""
    lines = "".join(blocks("bash|sh|shell|console")).splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip(" $") and not line.startswith("#")]


def test_python_blocks_run_in_order():
    """One script, so that a block may use what an earlier one made, with warnings as errors."""
    code = "\n".join(blocks("python"))
    assert code, "the README shows no Python"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == blocks("text")[0]


def test_the_mistake_is_named_as_printed(tmp_path, monkeypatch, capsys):
    """The function that it shows, and what the command says of it."""
    shown = blocks("text")[1].removeprefix("$ relpos ")
    line, _, printed = shown.partition("\n")
    words = shlex.split(line)
    module = words[1].partition(":")[0]
    (tmp_path / f"{module}.py").write_text(blocks("python")[-1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert cli.main(words) == 1
    monkeypatch.delitem(sys.modules, module)

    def lines(text):
        """Without versions, and without errors, which depend on the processor's BLAS."""
        named = re.sub(r", numpy [\d.]+\w*|[\d.e+-]+(?= of allowed)|(?<=allowed )[\d.e+-]+", "", text.strip())
        return [line.rstrip() for line in named.splitlines()]

    assert lines(capsys.readouterr().out) == lines(printed)


def test_two_commands_are_promised():
    """From a fresh clone: one line that installs and attends, one that runs the tests."""
    first, second = commands()
    parts = [part.split() for part in first.split("&&")]
    assert parts[0][1:] == ["-m", "venv", ".venv"]
    assert parts[1][:2] == [".venv/bin/pip", "install"]
    assert "-e" in parts[1]
    assert parts[2] == [".venv/bin/relpos", "attend"]
    assert second == ".venv/bin/pytest"


def test_code_blocks_say_their_language():
    """A block without one would be neither run nor checked."""
    fences = re.findall(r"^```(.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[1::2]) == {""}
    assert set(fences[0::2]) <= {"sh", "python", "text", "bibtex"}


def script(name):
    """A program of the docs folder as a module."""
    spec = spec_from_file_location(f"relpos_docs_{name}", ROOT / "docs" / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


def test_pictures_show_what_was_recorded():
    """Run `python docs/charts.py` after a comparison."""
    charts, text = script("charts"), README.read_text(encoding="utf-8")
    for path, picture in charts.pictures().items():
        assert path.read_text(encoding="utf-8") == picture
        assert f'"{path.relative_to(ROOT).as_posix()}"' in text


def test_what_is_not_faster_is_said():
    """Whoever takes less than 1.1 times our time at a recorded call is in the list."""
    charts = script("charts")
    found = charts.sections()["not_faster"]
    for name in ("compare.json", "compare-amx.json", "compare-fma.json"):
        for one in charts.recorded(name)["attention"].values():
            for peer in charts.PEERS.keys() - {charts.OURS, "torch sdpa, bias inside"}:
                ratio = one["peers"][peer].get("times_ours", 9.0)
                words = "PyTorch SDPA" if peer == "torch sdpa" else charts.PEERS[peer]
                assert (f"{words} {ratio:.2f}" in found) or ratio >= 1.1, (name, one["words"], peer)
    assert "T5-small, one text" in found


def targets(text):
    return re.findall(r'(?:\]\(|\b(?:src|srcset|href)=")([^)"]+)', text)


def test_it_fits_a_few_screens_and_points_to_what_is_there():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    for target in targets(text):
        assert (ROOT / target).is_file(), target


def test_links_on_a_package_index(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "hatchling.metadata.plugin.interface", SimpleNamespace(MetadataHookInterface=object)
    )
    described, text = script("on_index").described, README.read_text(encoding="utf-8")
    assert described(text, "") == {"readme": {"content-type": "text/markdown", "text": text}, "urls": {}}
    found = described(text, "https://example.org/us/relpos_np")
    assert all(target.startswith("https://example.org/us/relpos_np/") for target in targets(found["readme"]["text"]))
    assert 'srcset="https://example.org/us/relpos_np/raw/HEAD/docs/readme/speed-dark.svg"' in found["readme"]["text"]
    assert "(https://example.org/us/relpos_np/blob/HEAD/docs/install.md)" in found["readme"]["text"]
    assert "(#here)" in described("# t\n[a](#here)", "https://example.org/x")["readme"]["text"]
    assert found["urls"]["Repository"] == "https://example.org/us/relpos_np"
