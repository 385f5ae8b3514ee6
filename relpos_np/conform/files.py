"""A report as other programs read it: JSON, JUnit's XML, and a badge."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

from relpos_np.conform.report import Finding, Report
from relpos_np.testing.identification import plain

# Widths of letters on a badge, in a sans serif of 11 pixels, and its colours.
_LETTER = 6.6
_COLOURS = {0: "#2e7d32", 1: "#b71c1c", 3: "#757575"}


def as_json(report: Report) -> str:
    """One object."""
    return json.dumps(plain(report.as_dict()), indent=2, allow_nan=False)


def as_junit(report: Report) -> str:
    """One suite with a test for each case: a failure where it is wrong, skipped where it did not run."""
    cases = [(family, one) for family in report.families for one in family.findings]
    suite = ET.Element("testsuite", name=f"relpos conform {report.title}", tests=str(len(cases)), errors="0")
    for word, verdicts in (("failures", ("wrong",)), ("skipped", ("refused", "not run"))):
        suite.set(word, str(sum(one.verdict in verdicts for _, one in cases)))
    for family, one in cases:
        element = ET.SubElement(
            suite, "testcase", classname=f"relpos.{report.scheme}.{family.name}", name=one.edge, time="0"
        )
        if one.verdict == "wrong":
            ET.SubElement(element, "failure", message=family.cause or one.reason or "wrong").text = _details(one)
        elif one.verdict != "right":
            ET.SubElement(element, "skipped", message=one.reason)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def _details(one: Finding) -> str:
    lines = [f"{name} is off by {one.errors[name]:.6g}, allowed {one.allowed[name]:.6g}" for name in one.wrong]
    return "\n".join([one.where, *lines, one.reason])


def as_badge(report: Report) -> str:
    """An SVG of one line: the scheme, and how many families are right of those that ran."""
    ran = [one for one in report.families if one.ran]
    right = sum(one.verdict != "wrong" for one in ran)
    left = f"{report.scheme} {report.dtype}"
    wrong = sum(one.verdict == "wrong" for one in report.families)
    words = {0: f"conforms: {right} families", 1: f"wrong: {wrong} families", 3: "nothing ran"}[report.exit_code]
    widths = [round(_LETTER * len(text) + 12) for text in (left, words)]
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(sum(widths)), height="20", role="img")
    svg.set("aria-label", f"{left}: {words}")
    start = 0
    for text, width, colour in zip((left, words), widths, ("#424242", _COLOURS[report.exit_code]), strict=True):
        ET.SubElement(svg, "rect", x=str(start), width=str(width), height="20", fill=colour)
        label = ET.SubElement(svg, "text", x=str(start + width / 2), y="14", fill="#fff")
        label.set("text-anchor", "middle")
        label.set("font-family", "Verdana,sans-serif")
        label.set("font-size", "11")
        label.text = text
        start += width
    return ET.tostring(svg, encoding="unicode")


def written(report: Report, **paths: Path | None) -> None:
    """Write those of ``json``, ``junit`` and ``badge`` that have a path."""
    makers = {"json": as_json, "junit": as_junit, "badge": as_badge}
    for name, path in paths.items():
        if path is not None:
            path.write_text(makers[name](report) + "\n", encoding="utf-8")
