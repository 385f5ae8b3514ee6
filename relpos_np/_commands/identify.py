"""`relpos identify`: which scheme and conventions produced the arrays of a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from relpos_np._commands.common import MISMATCH
from relpos_np._commands.saved_call import option, read
from relpos_np._commands.terminal import note, print_json, print_lines

_OPERANDS = ("q", "k", "v", "out", "scores", "lse", "x")
_OPTIONS = ("mask", "key_lengths", "scale", "offset", "causal", "window", "softcap", "cap_order")

SUMMARY = "find which scheme and conventions produced saved arrays"
HELP = """\
Tries every scheme and variant that takes the arrays, under every convention of scale, alignment, window, soft cap and
sinks, and prints those that give the saved output within rounding. If these operands cannot tell some of them apart,
it prints them all, and why. If nothing fits, it tries tables, heads, axes and distances in other orders and windows of
every width, and prints what is nearest.

FILE is an .npz archive as for `relpos attend`. Its arrays:
  q k v                  (..., H, L_q, D), (..., H_kv, L_k, D), (..., H_kv, L_k, D_v), or with axes (..., L, H, D)
  out                    what attention returned; or scores, before the softmax, in which case v is not needed
  lse                    its log-sum-exp                                       optional
  x                      inputs, in place of q, k and v; out is then x with an encoding added
  mask key_lengths scale offset causal window softcap cap_order: as for `relpos attend`, those that you know
  NAME                   trained arrays of the positions under any names, all of which must be used; and settings under
                         their names in the constructor, such as base, grid or max_distance

Exit codes: 0 if at least one thing fits; 1 if nothing does; 2 if the file cannot be used.
"""
EXAMPLE = """\
examples:
  python -c "import numpy as np, relpos_np as rp; r = np.random.default_rng(0); \\
    q, k, v = r.standard_normal((3, 1, 4, 20, 16), 'float32'); \\
    np.savez('saved.npz', q=q, k=k, v=v, out=rp.attention(q, k, v, position=rp.Rotary(16), causal=True))"
  relpos identify saved.npz
  relpos identify saved.npz --json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("file", type=Path, metavar="FILE", help="an .npz archive with q, k, v and out")


def run(args: argparse.Namespace) -> int:
    """Identify the arrays of a file."""
    from relpos_np.testing.identify import identify

    arrays = read(args.file)
    operands = {name: arrays.pop(name) for name in _OPERANDS if name in arrays}
    options: dict[str, Any] = {name: option(name, arrays.pop(name)) for name in _OPTIONS if name in arrays}
    # What is left belongs to positions.
    found = identify(**operands, given=arrays, **options)
    if args.json:
        print_json({"file": str(args.file), **found.as_dict()})
        return 0 if found.matches else MISMATCH
    for n, match in enumerate(found.matches):
        print_lines(_lines(match, "scheme" if n == 0 else "or"))
    if not found.matches:
        note("relpos identify: nothing fits")
        for match in found.nearest:
            off = ("off by", f"{match.error:.2g} at most, {match.relative_error:.2g} of its size")
            print_lines([*_lines(match, "nearest"), off])
    lines = [("precision", found.precision)] if found.precision else []
    lines += [("note", text) for text in found.notes]
    lines += [("not tried", f"{name}: {why}") for name, why in found.untried.items() if not found.matches]
    print_lines([*lines, ("compared", f"{found.calls} calls")])
    return 0 if found.matches else MISMATCH


def _lines(match: Any, first: str) -> list[tuple[str, str]]:
    """One match, in words."""
    lines = [(first, match.scheme + (f", variant {match.variant}" if match.variant else ""))]
    if match.arrays:
        lines.append(("arrays", ", ".join(f"{name} = {own}" for name, own in match.arrays.items())))
    if match.settings:
        lines.append(("settings", ", ".join(f"{name}={value!r}" for name, value in match.settings.items())))
    if match.call:
        call = match.call
        words = [f"scale {call['scale']:.6g} ({call['scale_is']})", f"offset {call['offset']} ({call['offset_is']})"]
        words.append(
            ("causal" if call["causal"] else "not causal") + (f", {call['causal_is']}" if "causal_is" in call else "")
        )
        words += [f"{name} {call[name]}" for name in ("window", "softcap", "cap_order", "sinks") if name in call]
        lines.append(("call", "; ".join(words)))
    lines += [("read as", text) for text in match.layout]
    lines += [
        ("or", f"{name} {', '.join(map(str, values))}: the same answer here") for name, values in match.same.items()
    ]
    if match.why:
        lines.append(("because", match.why))
    return lines
