"""What the documentation shows must run, print what it says, and be there."""

import contextlib
import io
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import relpos_np as rp

DOCS = Path(rp.__file__).parent.parent / "docs"
pytestmark = [
    pytest.mark.readme,
    pytest.mark.skipif(not DOCS.is_dir(), reason="there is no docs folder: not a checkout"),
]
TUTORIAL = sorted(path.name for path in (DOCS / "tutorial").glob("[0-9]*.md"))
RUN = [f"tutorial/{name}" for name in TUTORIAL]
# Python, and what it prints where a block of text follows.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
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
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", RUN)
def test_blocks_run_and_print_what_the_page_says(page):
    blocks = BLOCK.findall(text(page))
    assert blocks, f"{page} shows no Python"
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


def test_the_tutorial_is_the_same_in_both_languages():
    assert sorted(path.name for path in (DOCS / "zh").glob("[0-9]*.md")) == TUTORIAL
    for name in TUTORIAL:
        english, chinese = text(f"tutorial/{name}"), text(f"zh/{name}")
        assert BLOCK.findall(english) == BLOCK.findall(chinese), name
        assert PICTURE.findall(english) == PICTURE.findall(chinese), name
        assert english.count("\n## ") == chinese.count("\n## "), name


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


def test_the_gallery_has_every_scheme_and_links_to_its_page():
    pytest.importorskip("matplotlib")
    words = script("draw").gallery()
    for name, info in rp.SCHEMES.items():
        assert f"_pictures/scheme_{name}.png" in words
        assert f"]({info.docs})" in words
        assert (DOCS / info.docs).is_file()
