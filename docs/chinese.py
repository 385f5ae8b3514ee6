"""Lines of Chinese join without the space that a line break is in other languages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Characters and punctuation of full width.
WIDE = re.compile(r"[　-〿一-鿿＀-￯“”]")


class JoinLines(SphinxTransform):
    """Take line breaks between Chinese characters out of paragraphs."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Change the page."""
        for text in list(self.document.findall(nodes.Text)):
            if text != "\n":  # which is how a line's end within a paragraph is read
                continue
            row = text.parent
            at = next(n for n, node in enumerate(row) if node is text)  # others are equal
            if 0 < at < len(row) - 1 and WIDE.match(row[at - 1].astext()[-1:]) and WIDE.match(row[at + 1].astext()[:1]):
                del row[at]


def setup(app: Sphinx) -> dict[str, bool]:
    """Apply it to every page."""
    app.add_transform(JoinLines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
