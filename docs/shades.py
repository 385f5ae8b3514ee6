"""Every picture in the colours of the page: the one that `draw` makes for dark pages stands beside the light one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PICTURES = Path(__file__).parent / "_pictures"


def is_wide(name: str) -> bool:
    """Whether a PNG file is so wide that a phone should scroll along it and not shrink it."""
    width, height = struct.unpack(">II", (PICTURES / name).read_bytes()[16:24])
    return bool(width > 2 * height)


class BothShades(SphinxTransform):
    """Say of each picture that it is for light pages, and put the dark one after it; the theme shows one of them."""

    default_priority = 400  # before Sphinx collects the files of pictures

    def apply(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Change the page."""
        for light in list(self.document.findall(nodes.image)):
            folder, slash, name = light["uri"].rpartition("_pictures/")
            if slash:
                if is_wide(name):
                    light.parent["classes"].append("wide-picture")
                dark = light.deepcopy()
                dark["uri"] = f"{folder}_pictures/dark/{name}"
                light["classes"].append("only-light")
                dark["classes"].append("only-dark")
                light.parent.insert(light.parent.index(light) + 1, dark)


def setup(app: Sphinx) -> dict[str, bool]:
    """Apply it to every page."""
    app.add_transform(BothShades)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
