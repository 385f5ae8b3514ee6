"""What the files around the package say of it: requirements said once, paths that exist, the layout as it is."""

import re
import tomllib
from pathlib import Path

import pytest

import relpos_np as rp
from tests.test_imports import LEVELS

ROOT = Path(rp.__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
SETTINGS = [
    ".ci/nightly",
    ".ci/run",
    ".ci/stages",
    ".pre-commit-config.yaml",
    ".readthedocs.yaml",
    "CONTRIBUTING.md",
    "docs/developing.md",
    "noxfile.py",
    "pyproject.toml",
    *(f".github/workflows/{path.name}" for path in (ROOT / ".github/workflows").iterdir()),
]


def included(requirement):
    """The extras of this package that a requirement names, None if it is another package's."""
    found = re.fullmatch(r"relpos-np\[([\w,]+)\]", requirement)
    return found and found[1].split(",")


def closure(extra):
    """All requirements that an extra brings by others."""
    for requirement in EXTRAS[extra]:
        for other in included(requirement) or ():
            yield from EXTRAS[other]
            yield from closure(other)


def test_each_requirement_is_said_once():
    for extra, requirements in EXTRAS.items():
        assert not set(requirements) & set(closure(extra)), extra
    bounded = [one for requirements in EXTRAS.values() for one in requirements if re.search("[<>=]=", one)]
    assert sorted(bounded) == sorted(set(bounded))
    # `uv run` installs the group "dev"; a list of requirements in it would be a second one.
    assert PYPROJECT["dependency-groups"] == {"dev": ["relpos-np[dev]"]}


def spelled(pattern):
    """A glob for each alternative in braces."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    return [one for word in found[1].split(",") for one in spelled(pattern.replace(found[0], word, 1))]


@pytest.mark.parametrize("name", SETTINGS)
def test_paths_in_settings_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    folders = r"relpos_np|tests|docs|examples|asv_bench|\.github|\.ci"
    paths = re.findall(rf"(?<![\w./*$-])(?:{folders})/[\w./*{{}},-]*[\w*}}]", text)
    # What builds and other people make.
    made = re.compile(r"docs/_build|asv_bench/\.asv|/TARGET$")
    for path in paths:
        for pattern in spelled(path):
            assert made.search(path) or any(ROOT.glob(pattern)), f"{name}: {path}"


def test_layout_in_the_guide_is_that_of_the_package():
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    rows = [re.fullmatch(r"\| (\d+) \| (.*?) \| .* \|", line) for line in lines]
    found = {int(row[1]): set(re.findall(r"`(\w+)`", row[2])) for row in rows if row}
    assert found == {n: {room or "__init__" for room in rooms} for n, rooms in enumerate(LEVELS)}
    assert len(lines) <= 60
