"""Chinese pages: lines that join without a space, the language of the page, and a sidebar of their own."""

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


def speak(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:  # noqa: ARG001
    """Tell browsers which language a page under ``zh`` is in, and leave only Chinese pages in its sidebar."""
    if page.startswith("zh/"):
        context["language"] = "zh"
        tree = re.search(r'<li class="toctree-l1 current.*?</ul>\s*</li>', context["furo_navigation_tree"], re.DOTALL)
        assert tree is not None, "the sidebar opens the branch of the page that it is beside"
        english = f'<a class="reference internal" href="{context["pathto"]("index")}">English</a>'
        context["furo_navigation_tree"] = f'<ul>{tree[0]}<li class="toctree-l1">{english}</li></ul>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Apply it to every page."""
    app.add_transform(JoinLines)
    app.connect("html-page-context", speak, priority=900)  # after the theme, which makes the sidebar
    return {"parallel_read_safe": True, "parallel_write_safe": True}
