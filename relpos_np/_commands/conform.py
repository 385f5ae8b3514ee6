"""`relpos conform`: an implementation in any framework against a scheme."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from relpos_np._commands.common import names
from relpos_np._commands.names import attention_schemes, scheme_named
from relpos_np.errors import RelposValueError

SUMMARY = "test your implementation, in any framework, against a scheme"
HELP = """\
Calls FUNCTION, f(q, k, v, ...) in torch, JAX or NumPy, or an ONNX model, on seeded cases, family by family:
self-attention, causal, cross, decoding, windows, masks, grouped heads, odd sizes, all pairs of options, each flag of
the scheme, queries without keys, NaN in excluded keys, long, large scores, views and repeated calls. Further arguments
are given by name as far as it takes them: arrays of the scheme (table, slopes), options of relpos_np.attention (mask,
causal, window, key_lengths, scale, offset, softcap, sinks, return_lse), and out, an array to write into.

An answer may be 2 times as far from float64 as a straightforward implementation in its dtype, a gradient 3 times. A
wrong one is compared with what known mistakes lead to, and the one that gives the same numbers is named, with the
smallest case that shows it. A crash is wrong; NotImplementedError is a refusal. --head-dim, --lengths, --heads, --batch
and --except say what FUNCTION takes, --arithmetic what it computes with. Where frameworks disagree and none is wrong
(queries without keys, NaN behind a mask, more queries than keys), --conventions says whose result is meant.

Exit code 0 if all that ran is right, 1 if something is wrong, 2 if the arguments cannot be used, 3 if nothing is
proven.
"""
EXAMPLE = """\
examples:
  relpos conform mypackage.attention:t5 --scheme t5
  relpos conform mypackage.attention:t5 --scheme t5 --dtype float16 --families self,cross --json
  relpos conform mypackage.attention:alibi --scheme alibi --supports causal,cross --junit found.xml --badge found.svg
  relpos conform mypackage.attention:unscaled --scheme plain --always scale=1.0
  relpos conform mypackage.attention:flash --scheme plain --head-dim 64 --lengths 64,128 --heads 8,8/2 --thorough
"""

# Options that are passed on as they are, and those that are numbers between commas.
_AS_GIVEN = (
    *("framework", "dtype", "grad", "families", "supports", "excluded", "layout", "device", "arithmetic"),
    *("conventions", "thorough", "seed"),
)
_SIZES = ("head_dim", "lengths", "batch")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("callable", metavar="FUNCTION", help="its module and name, or a file that ends in .onnx")
    parser.add_argument("--scheme", required=True, help="what it should compute, such as t5 or rotary")
    parser.add_argument("--variant", help="one of its variants; default the first")
    parser.add_argument("--framework", metavar="NAME", help="numpy, torch, jax or onnx; default what its file imports")
    parser.add_argument(
        "--dtype", default="float32", help="float64, float32, float16, bfloat16, float8_e4m3fn or _e5m2"
    )
    parser.add_argument("--grad", action="store_true", help="compare gradients too, by autograd of torch or JAX")
    parser.add_argument(
        "--families", type=names, metavar="A,B", help="those that it must pass; default all that it can run"
    )
    parser.add_argument(
        "--supports", type=names, metavar="A,B", help="what it supports, such as causal,mask; default all"
    )
    parser.add_argument(
        "--except", dest="excluded", type=names, default=(), metavar="A,B", help="families and features that it has not"
    )
    parser.add_argument(
        "--always",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="what it does unasked; may be repeated",
    )
    parser.add_argument("--layout", default="bhld", help="axes of its arrays: bhld, or blhd with lengths before heads")
    parser.add_argument("--device", help="of torch, such as cuda")
    parser.add_argument("--head-dim", metavar="N,N", help="those that it takes; default all")
    parser.add_argument("--lengths", metavar="N,N", help="the same of queries and of keys")
    parser.add_argument("--heads", metavar="H,H/K", help="the same of heads: H, or H/K with K key heads")
    parser.add_argument("--batch", metavar="N,N", help="the same of batch items")
    parser.add_argument(
        "--arithmetic",
        metavar="NAME",
        help="float32, tf32, half_products, int8_cache, float8_cache, stored or half_sums",
    )
    parser.add_argument("--conventions", help="torch, flash or onnx: whose, where no result is the right one")
    parser.add_argument("--thorough", action="store_true", help="all lengths with everything, in a minute or two")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers; default 0")
    for name, what in (("junit", "XML for a continuous integration"), ("badge", "an SVG")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"also write {what}")


def run(args: argparse.Namespace) -> int:
    """Test the function, print a table or JSON, and write files."""
    from relpos_np.conform import conform
    from relpos_np.conform.files import as_json, written

    scheme, variant = scheme_named(args.scheme, args.variant, expected=attention_schemes())
    sizes: dict[str, Any] = {n: _numbers(f"--{n.replace('_', '-')}", getattr(args, n)) for n in _SIZES}
    # A module beside the caller, as `python -m` finds it.
    sys.path.insert(0, str(Path.cwd()))
    try:
        report = conform(
            args.callable,
            scheme,
            variant=variant,
            always=dict(map(_value, args.always)),
            heads=_heads(args.heads),
            progress=_told if args.thorough and sys.stderr.isatty() else None,
            **{name: getattr(args, name) for name in _AS_GIVEN},
            **sizes,
        )
    finally:
        sys.path.remove(str(Path.cwd()))
    written(report, junit=args.junit, badge=args.badge)
    print(as_json(report) if args.json else report.text())
    return report.exit_code


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = names(text)
    if not found or not all(name.isdecimal() for name in found):
        raise RelposValueError(f"{flag}: expected whole numbers between commas, found {text!r}")
    return tuple(map(int, found))


def _heads(text: str | None) -> list[int | tuple[int, int]] | None:
    if text is None:
        return None
    found: list[int | tuple[int, int]] = []
    for name in names(text) or ("",):
        numbers = _numbers("--heads", name.replace("/", ",")) or ()
        if len(numbers) > 2:
            raise RelposValueError(f"--heads: expected H or H/K, found {name!r}")
        found.append(numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1]))
    return found


def _told(family: str) -> None:
    """One more case has begun."""
    print(f"\r{family:<20}", end="", file=sys.stderr, flush=True)


def _value(text: str) -> tuple[str, Any]:
    """A name and a literal of Python, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RelposValueError(f"--always: expected NAME=VALUE, found {text!r}")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return name, value
