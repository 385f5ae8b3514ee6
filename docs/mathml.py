"""Formulas as MathML, written when the pages are built: a browser draws them itself, and no script is fetched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.errors import ExtensionError

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

CONVERTER = LatexToMathML()
# An environment without others inside it.
INNERMOST = re.compile(r"\\begin\{(\w+)\*?\}(?:(?!\\begin\{).)*?\\end\{\1\*?\}", re.DOTALL)


def lined(latex: str) -> str:
    r"""With lines that ``\\`` ends, or that ``&`` aligns, in an environment for that."""
    outside, found = latex, 1
    while found:
        outside, found = INNERMOST.subn("", outside)
    return rf"\begin{{aligned}}{latex}\end{{aligned}}" if re.search(r"\\\\|(?<!\\)&", outside) else latex


def markup(latex: str, *, block: bool) -> str:
    """MathML of one formula.

    Parameters
    ----------
    latex : str
        As in the page.
    block : bool
        On a line of its own.

    Returns
    -------
    str
        An element ``<math>``.

    Raises
    ------
    ExtensionError
        If it is not understood, so that no page shows a formula in red.
    """
    try:
        return CONVERTER.convert_with_local_state(lined(latex.strip()), displaystyle=block)
    except LatexError as error:
        raise ExtensionError(f"no MathML for {latex!r}: {error}") from error


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """A formula within a sentence."""
    writer.body.append(markup(node.astext(), block=False))
    raise nodes.SkipNode


def display(writer: HTML5Translator, node: nodes.math_block) -> None:
    """A formula of its own; empty lines separate several."""
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    writer.body += [markup(part, block=True) for part in re.split(r"\n\s*\n", node.astext()) if part.strip()]
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """For ``html_math_renderer``."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
