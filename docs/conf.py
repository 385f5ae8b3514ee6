"""Settings of the documentation: pages come from the docstrings, and nothing is fetched."""

from __future__ import annotations

import sys
from pathlib import Path

import relpos_np

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the loops of the tests
sys.path.insert(0, str(Path(__file__).parent.parent / "asv_bench"))
sys.path.insert(0, str(Path(__file__).parent))

import charts
import checkpoints
import draw
import million_keys
import notebooks
import pages
import report
import scaling_plan

project = "relpos_np"
author = project_copyright = "The relpos_np developers"
version = release = relpos_np.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "backlinks",
    "chinese",
    "mathml",
    "pages",
    "shades",
]
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["pages.css"]
# What is printed, and what is not code, has no button.
copybutton_selector = ", ".join(f"div.highlight-{language} pre" for language in ("python", "pycon", "sh"))
copybutton_prompt_text = ">>> "
exclude_patterns = ["_build", "_notebooks", "notes"]
html_theme = "furo"
html_title = f"relpos_np {release}"
nitpicky = True

# Types stand in the docstrings, in words; annotations would only repeat them.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
myst_enable_extensions = ["colon_fence", "dollarmath", "substitution"]
myst_heading_anchors = 3


draw.draw_all()
pages.write_all()
notebooks.write_all()
myst_substitutions = {
    "schemes": pages.table(),
    "gallery": draw.gallery(),
    "rounded": pages.rounded(),
    "checkpoints": checkpoints.tables(),
    "families": checkpoints.families(),
    "published": checkpoints.published(),
    **report.sections(),
    **charts.sections(),
    **scaling_plan.sections(),
    **million_keys.sections(),
}
