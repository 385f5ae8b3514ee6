"""`relpos plot`: a picture of a scheme, of its table's rows, of rel_shift, or of a layer."""

from __future__ import annotations

import argparse

import relpos_np as rp
from relpos_np._commands.common import UnusableError, natural, refuse
from relpos_np._commands.names import scheme_named
from relpos_np._commands.terminal import print_json, print_lines
from relpos_np.formulas.relshift import VARIANTS

SUMMARY = "draw a scheme, its table's rows, rel_shift or a layer"
SHIFT = "rel_shift"
# Of `relpos_np.plot.layers`, which a mere completion of words need not import.
LAYERS = ("multi_head_attention", "relative_multi_head_attention", "swin_attention")
HELP = """\
Draws what positions do to the scores of a scheme, for tokens that are all alike and a table of random numbers; of an
absolute encoding, its rows. SCHEME is any name of a scheme: t5, T5, rope, or a variant that one scheme alone has, such
as swin. It may also be rel_shift, drawn before and after the shift, or a layer of relpos_np.layers, drawn as where its
attention goes. Needs matplotlib: pip install "relpos-np[plot]".
"""
EXAMPLE = """\
examples:
  relpos plot t5
  relpos plot transformer_xl --variant espnet_legacy --out shift.svg
  relpos plot rope
  relpos plot swin --rows
  relpos plot rstt --differences
  relpos plot rel_shift --variant transformer_xl
  relpos plot SwinAttention
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("scheme", metavar="SCHEME", help=f"{', '.join((*rp.SCHEMES, SHIFT, *LAYERS))}")
    parser.add_argument("--variant", help="of the scheme or of rel_shift; default the first")
    parser.add_argument("--rows", action="store_true", help="which row of its table each pair of a few tokens takes")
    parser.add_argument(
        "--differences",
        action="store_true",
        help="of windows: the bias by (Δframe, Δrow, Δcolumn), the query's coordinates less the key's",
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the random numbers; default 0")
    parser.add_argument("--out", metavar="FILE", help="PNG, SVG, PDF ...; default relpos-SCHEME.png")


def run(args: argparse.Namespace) -> int:
    """The picture of `relpos_np.plot.gallery`, `relpos_np.plot.diagrams` or `relpos_np.plot.layers`."""
    from relpos_np import plot
    from relpos_np.plot import diagrams
    from relpos_np.plot import gallery as pictures
    from relpos_np.plot.layers import layer_picture

    name, variant = scheme_named(args.scheme, args.variant, expected=(*rp.SCHEMES, SHIFT, *LAYERS))
    path = args.out or f"relpos-{name}.png"
    if name in LAYERS:
        refuse(args, ("variant", "rows", "differences"), f"is for schemes, and {name} is a layer")
        figure = layer_picture(name, seed=args.seed)
    elif name == SHIFT:
        refuse(args, ("rows", "differences"), "rel_shift has no table")
        variant = variant or VARIANTS[0]
        if variant not in VARIANTS:
            raise UnusableError(f"--variant: expected one of {', '.join(VARIANTS)}; found {variant!r}")
        figure = diagrams.rel_shift_steps(4, 5, variant)  # type: ignore[arg-type]
    elif args.rows and args.differences:
        raise UnusableError("--differences: another picture than --rows; ask for one")
    elif args.differences:
        figure = pictures.differences_picture(name, variant=variant, seed=args.seed)
    elif args.rows:
        figure = pictures.rows_picture(name, variant=variant, seed=args.seed)
    else:
        figure = pictures.scheme_picture(name, variant=variant, seed=args.seed)
    plot.save(figure, path)
    if args.json:
        print_json({"scheme": name, "variant": variant, "seed": args.seed, "plot": path})
    else:
        print_lines([("picture", path)])
    return 0
