"""`relpos plot`: a picture of a scheme."""

from __future__ import annotations

import argparse

import relpos_np as rp
from relpos_np._commands.common import natural
from relpos_np._commands.terminal import print_json, print_lines

SUMMARY = "a picture of a scheme"
HELP = """\
What positions do to the scores of a scheme's seeded example, where the content is the same everywhere; of an absolute
encoding its rows. Trained tables are random numbers. Needs matplotlib: pip install "relpos-np[plot]".
"""
EXAMPLE = """\
examples:
  relpos plot t5
  relpos plot transformer_xl --variant espnet_legacy --out shift.svg
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("scheme", choices=tuple(rp.SCHEMES), metavar="SCHEME", help=", ".join(rp.SCHEMES))
    parser.add_argument("--variant", help="of the scheme; default its first")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the random numbers; default 0")
    parser.add_argument("--out", metavar="FILE", help="PNG, SVG, PDF ...; default relpos-SCHEME.png")


def run(args: argparse.Namespace) -> int:
    """The picture of `relpos_np.plot.gallery`."""
    from relpos_np import plot
    from relpos_np.plot import gallery as pictures

    path = args.out or f"relpos-{args.scheme}.png"
    plot.save(pictures.scheme_picture(args.scheme, variant=args.variant, seed=args.seed), path)
    if args.json:
        print_json({"scheme": args.scheme, "variant": args.variant, "seed": args.seed, "plot": path})
    else:
        print_lines([("picture", path)])
    return 0
