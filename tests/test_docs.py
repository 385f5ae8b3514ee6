"""What the documentation shows must run, print what it says, and be there."""

import contextlib
import io
import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import main as cli

DOCS = Path(rp.__file__).parent.parent / "docs"
pytestmark = [
    pytest.mark.readme,
    pytest.mark.skipif(not DOCS.is_dir(), reason="there is no docs folder: not a checkout"),
]
TUTORIAL = sorted(path.name for path in (DOCS / "tutorial").glob("[0-9]*.md"))
RUN = [
    *(f"tutorial/{name}" for name in TUTORIAL),
    "checkpoints.md",
    "errata.md",
    "identify.md",
    "index.md",
    "limits.md",
    "own-scheme.md",
    "recipes.md",
    "recipes-serving.md",
    "serving.md",
    "test-your-kernel.md",
]
# Python, and what it prints where a block of text follows.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
# A line of the notes in errata.
QUOTE = re.compile(r"^> .*$", re.MULTILINE)
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]*)\)")


def text(page):
    return (DOCS / page).read_text(encoding="utf-8")


def stripped(printed):
    """Without the spaces that no reader sees."""
    return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())


def script(name):
    """A program of the docs folder as a module."""
    spec = spec_from_file_location(f"relpos_docs_{name}", DOCS / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", RUN)
def test_blocks_run_and_print_what_the_page_says(page):
    blocks = BLOCK.findall(text(page))
    assert blocks, f"{page} shows no Python"
    if "rp.threads(" in text(page):
        pytest.importorskip("threadpoolctl")
    names = {"__name__": "page"}
    with rp.use_backend("numpy"):
        for code, shown in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)  # noqa: S102
            assert stripped(printed.getvalue()) == stripped(shown), code


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_python_is_found(page):
    """A block that is indented or not closed would not be run."""
    assert text(page).count("```python") == len(BLOCK.findall(text(page)))


def test_pages_are_the_same_in_both_languages():
    assert sorted(path.name for path in (DOCS / "zh").glob("[0-9]*.md")) == TUTORIAL
    for name in (*TUTORIAL, "errata.md"):
        english, chinese = text(name if name == "errata.md" else f"tutorial/{name}"), text(f"zh/{name}")
        assert BLOCK.findall(english) == BLOCK.findall(chinese), name
        assert PICTURE.findall(english) == PICTURE.findall(chinese), name
        assert QUOTE.findall(english) == QUOTE.findall(chinese), name
        for heading in ("\n## ", "\n### "):
            assert english.count(heading) == chinese.count(heading), name


@pytest.mark.parametrize("page", [*(f"tutorial/{name}" for name in TUTORIAL), *(f"zh/{name}" for name in TUTORIAL)])
def test_a_notebook_has_the_blocks_of_its_page(page, monkeypatch):
    notebooks = script("notebooks")
    monkeypatch.setattr(notebooks.Path, "read_bytes", lambda _: b"drawn elsewhere")
    cells = notebooks.notebook(text(page))["cells"]
    found = [(x["source"], "".join(one["text"] for one in x["outputs"])) for x in cells if x["cell_type"] == "code"]
    assert found == [(code.rstrip(), printed) for code, printed in BLOCK.findall(text(page))]
    words = "\n".join(x["source"] for x in cells if x["cell_type"] == "markdown")
    assert "```python" not in words
    assert not re.search(r"\]\((?!https?:|attachment:)", words)
    pictures = {name for x in cells for name in x.get("attachments", ())}
    assert pictures == set(re.findall(r"attachment:([^)]*)", words))


def test_pictures_of_pages_are_drawn():
    pytest.importorskip("matplotlib")
    drawn = set(script("draw").names())
    shown = [
        (page.name, Path(target))
        for page in DOCS.rglob("*.md")
        if "_build" not in page.parts
        for target in PICTURE.findall(page.read_text(encoding="utf-8"))
    ]
    assert shown
    for page, target in shown:
        assert target.parent.name == "_pictures", page
        assert target.suffix == ".png", page
        assert target.stem in drawn, page


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_pages_of_schemes_show_calls_that_run(name, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    info = rp.SCHEMES[name]
    above, _, below = script("pages").page(info).partition("\n## Formula\n")
    names = {}
    for code, shown in BLOCK.findall(above):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), rp.use_backend("numpy"):
            exec(compile(code, name, "exec"), names)  # noqa: S102
        assert stripped(printed.getvalue()) == stripped(shown)
        assert "nan" not in shown
    if len(info.variants) > 1:
        assert all(re.search(rf"^ *{variant} +\[", above, re.MULTILINE) for variant in info.variants)
    assert f'@witness("{name}"' in below
    assert [row.models for row in ROWS if row.scheme == name and f"| {row.models} |" not in below] == []


def test_reliability_is_what_the_script_writes():
    """Run `python docs/reliability.py` after a change of the tests, of what was recorded, or of its tables."""
    reliability = script("reliability")
    for name, written in reliability.pages().items():
        assert text(name) == written
    assert list(reliability.ROWS) == list(range(1, 1 + len(reliability.ROWS)))
    assert set(reliability.tests_of_rows()) == set(reliability.ROWS)


def test_board_and_ledger_are_what_the_script_writes():
    """Run `python docs/field.py` after recording what other packages do."""
    for name, written in script("field").pages().items():
        assert text(name) == written


CHECKPOINTS = script("checkpoints") if DOCS.is_dir() else None
ROWS = [row for rows in CHECKPOINTS.TABLES.values() for row in rows] if CHECKPOINTS else []


def arrays(row, rng):
    """Arrays of the shapes that a row states."""
    corner = rng.integers(0, 500, (1, row.tokens, 2))
    special = {
        "boxes": np.concatenate([corner, corner + 100], axis=-1),
        "distances": rng.integers(0, 9, (row.tokens - 1, row.tokens - 1)),
        "c": np.array(0.5),
        "threshold": np.array(4.0),
        "magnitude": 1.1,
    }
    letters = {"H": row.heads, "D": row.dim}
    found = {}
    for name, shape in row.arrays.items():
        # Slopes of KERPLE must not be negative, and small numbers suit all others as well.
        numbers = np.abs(rng.standard_normal([letters.get(n, n) for n in shape]))
        found[name] = special.get(name, numbers)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.models)
def test_calls_of_checkpoints(row):
    rng = np.random.default_rng(0)
    info = rp.SCHEMES[row.scheme]
    names = {"np": np, "rp": rp, "H": row.heads, "D": row.dim, "L": row.tokens, **arrays(row, rng)}
    assert info.cls.__name__ in row.call
    if info.kind == "absolute":
        names["x"] = rng.standard_normal((2, row.tokens, row.dim))
        encoded = eval(row.call, names)
        assert encoded.shape == names["x"].shape
        assert np.abs(encoded - names["x"]).max() > 0.1
        return
    position = eval(row.call, names)
    assert type(position) is info.cls
    options = eval(f"dict({row.options})", names | {"position": position})
    q = rng.standard_normal((1, row.heads, row.tokens, row.dim))
    k, v = rng.standard_normal((2, 1, row.heads, row.keys or row.tokens, row.dim))
    out = rp.attention(q, k, v, position=position, backend="numpy", **options)
    plain = rp.attention(q, k, v, backend="numpy", **options)
    assert np.isfinite(out).all()
    assert np.abs(out - plain).max() > 1e-3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.models)
def test_what_the_table_says_of_the_scale(row):
    """The column and the call say the same."""
    said = re.search(r"scale=([\w./]+)", row.options)
    assert (said.group(1) if said else row.scale) == {"1": "1.0"}.get(row.scale, row.scale)


ROOT = DOCS.parent
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell_lines():
    """Commands of every page, without comments."""
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        if "_build" in page.parts or not page.is_file():
            continue
        for block in SHELL.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)}")


def arguments(words):
    """A command's own words, behind what is installed first and settings of the environment."""
    for end in range(len(words) - 1, -1, -1):
        if words[end] == "&&":
            words = words[end + 1 :]
            break
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return [Path(words[0]).name if words[0].startswith(".venv/") else words[0], *words[1:]]


@pytest.mark.parametrize("words", [*shell_lines()])
def test_commands_are_those_that_exist(words, tmp_path, monkeypatch, capsys):
    """Pictures are drawn; of other commands what they name is there: options, files, extras, markers."""
    program, *rest = arguments(words)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if program == "relpos":
        parsed = cli._parser().parse_args(rest)
        if parsed.command == "plot":
            pytest.importorskip("matplotlib")
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("MPLBACKEND", "Agg")
            assert cli.main(rest) == 0
            assert list(tmp_path.iterdir())
            capsys.readouterr()
    elif program in ("pip", "python3"):
        for extras in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
            assert all(re.search(rf"^{name} = ", settings, re.MULTILINE) for name in extras.split(","))
        for name in re.findall(r"-r (\S+)", " ".join(rest)):
            assert (ROOT / name).is_file()
    elif program == "pytest":
        for marker in re.findall(r"-m (\w+)", " ".join(rest)):
            assert f'"{marker}: ' in settings
    else:
        assert program in ("python", "tests/gpu/run_all.sh"), words
        file = ROOT / (rest[0] if program == "python" else "asv_bench/gpu.py")
        source = file.read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in rest if word.startswith("--"))
