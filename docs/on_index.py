"""README as a package index needs it: hatchling calls this while it builds a distribution.

An index shows README away from its repository, where relative links lead nowhere. `repository` in pyproject.toml says
where the project is hosted. Links, badges and the addresses of the package follow from it; without it README is taken
as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# What a link, a picture or one of its sources points to, unless it is an address or a place on the page.
TARGET = re.compile(r'(\]\(|\b(?:src|srcset|href)=")(?![a-z]+:|#)([^)"\s]+)')
PICTURES = (".svg", ".png")


def absolute(text: str, repository: str) -> str:
    """README with every relative link as an address in the repository."""

    def replaced(found: re.Match[str]) -> str:
        kind = "raw" if found[2].endswith(PICTURES) else "blob"
        return f"{found[1]}{repository}/{kind}/HEAD/{found[2]}"

    return TARGET.sub(replaced, text)


def badges(repository: str) -> str:
    """Whether tests pass, said by the place that runs them."""
    workflow = f"{repository}/actions/workflows/ci.yml"
    return f"[![tests]({workflow}/badge.svg)]({workflow})"


def described(text: str, repository: str) -> dict[str, Any]:
    """What the setting decides of a distribution's metadata."""
    urls = {}
    if repository:
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n{badges(repository)}\n{absolute(rest, repository)}"
        urls = {"Repository": repository, "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md"}
    return {"readme": {"content-type": "text/markdown", "text": text}, "urls": urls}


class OnIndex(MetadataHookInterface):  # type: ignore[misc]
    """The hook that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add what the setting decides."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata |= described(text, self.config["repository"])
