"""`relpos config`: what the attention of a published model's layers is, from its config.json."""

from __future__ import annotations

import argparse
import json
import re

from relpos_np._commands.common import natural
from relpos_np.configs import LayerAttention, from_config, layers_of, model_types, parts_of
from relpos_np.configs.read import ranges
from relpos_np.errors import RelposValueError

SUMMARY = "print the attention of a model's layers, from its config.json"
HELP = """\
Reads the configuration of a published model, as transformers or diffusers store it, and prints the attention of each
layer: positions, scale, which keys a query attends, soft caps, sinks, factors on queries, the weights it needs, and
what you pass to a call. If it does not know a key that may change attention, it stops and names all such keys.
`relpos_np.from_config` returns the same as an object that makes the call.
"""
EXAMPLE = """\
examples:
  relpos config config.json
  relpos config . --part encoder --layer 5
  relpos config config.json --json
  relpos config config.json --ignore rope_scaling
  relpos config --types
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="a config.json, or the folder of one")
    parser.add_argument("--layer", type=natural, help="one layer, from 0 (default: all)")
    parser.add_argument("--part", help="one stack of layers, such as encoder, decoder, cross or text (default: all)")
    parser.add_argument(
        "--ignore",
        metavar="KEYS",
        type=lambda text: text.split(","),
        default=[],
        help="names of keys, with commas between them, to read the file without",
    )
    parser.add_argument("--types", action="store_true", help="list the model types that it knows, and read no file")


def run(args: argparse.Namespace) -> int:
    """Print one layer or all, those that are alike once."""
    if args.types:
        print(json.dumps({"model_types": model_types()}) if args.json else "\n".join(model_types()))
        return 0
    if args.file is None:
        raise RelposValueError("FILE: expected a config.json, or --types")
    parts = parts_of(args.file) if args.part is None else (args.part,)
    layers = [layer for part in parts for layer in _layers(args, part)]
    if args.json:
        print(json.dumps({"layers": [layer.as_dict() for layer in layers]}))
    else:
        print("\n\n".join(_alike(layers)))
    return 0


def _layers(args: argparse.Namespace, part: str) -> tuple[LayerAttention, ...]:
    if args.layer is None:
        return layers_of(args.file, part=part, ignore=args.ignore)
    return (from_config(args.file, layer=args.layer, part=part, ignore=args.ignore),)


def _alike(layers: list[LayerAttention]) -> list[str]:
    """Descriptions, each under the numbers of the layers that it holds for, but for numbers in names of weights."""
    texts: dict[tuple[str, str], list[LayerAttention]] = {}
    for layer in layers:
        body = layer.describe().partition("\n")[2]
        for name in layer.weights:
            body = body.replace(f"[{name}]", f"[{re.sub('[0-9]+', 'N', name)}]")
        texts.setdefault((layer.part, body), []).append(layer)
    found = []
    for alike in texts.values():
        first = alike[0]
        head, _, body = first.describe().partition("\n")
        if len(alike) > 1:
            part = f", {first.part}" if first.part else ""
            head = f"{first.model_type}{part}, layers {ranges([layer.layer for layer in alike])} of {first.layers}"
            for names in zip(*(layer.weights for layer in alike), strict=True):
                body = body.replace(f"[{names[0]}]", f"[{_template(names)}]")
        found.append(f"{head}\n{body}")
    return found


def _template(names: tuple[str, ...]) -> str:
    """One name for several: N where their numbers differ."""
    pieces = zip(*(re.split("([0-9]+)", name) for name in names), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "N" for piece in pieces)
