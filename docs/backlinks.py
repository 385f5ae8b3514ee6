"""From a page of source code back to the page that describes it, where its name is not that of the module.

``sphinx.ext.viewcode`` keeps one module's name for each file of code, but here a class is described under the name that
users import, and the functions of its file under that of the file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LINK = re.compile(r'(<a class="viewcode-back" href="[^"#]*?(\w+(?:/\w+)?)\.html)#([\w.]+)"')


def mend(app: Sphinx, pagename: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Point links to names that a page describes."""
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    described = app.env.domaindata["py"]["objects"]

    def right(link: re.Match[str]) -> str:
        before, name = link[1], link[3]
        if name not in described:
            home = pagename.removeprefix("_modules/").replace("/", ".")
            tail = name.removeprefix("relpos_np.")
            ends = (f"{home}.{tail}", f".{tail}")
            name = next((full for end in ends for full in described if full.endswith(end)), name)
        place = described[name].node_id if name in described else name
        return f'{before}#{place}"'

    context["body"] = LINK.sub(right, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """After viewcode has written the page's body."""
    app.connect("html-page-context", mend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
