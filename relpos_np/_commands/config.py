"""`relpos config`: what the attention of a published model's layers is, from its config.json."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from relpos_np._commands.common import natural
from relpos_np.configs import LayerAttention, from_config, layers_of, model_types, parts_of
from relpos_np.configs.read import ranges
from relpos_np.errors import RelposValueError

SUMMARY = "print the attention of a model's layers, from its config.json"
HELP = """\
Reads the configuration of a published model, as transformers or diffusers store it, and prints the attention of each
layer: positions, scale, which keys a query attends, soft caps, sinks, factors on queries, the weights it needs, and
what you pass to a call. If it does not know a key that may change attention, it stops and names all such keys.
`relpos_np.from_config` returns the same as an object that makes the call. Of two files it prints what differs.
"""
EXAMPLE = """\
examples:
  relpos config config.json
  relpos config . --part encoder --layer 5
  relpos config base/config.json finetuned/config.json
  relpos config config.json --json
  relpos config config.json --ignore rope_scaling
  relpos config --types
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="a config.json, the folder of one, or a GGUF file")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="another one: print what differs, layer by layer")
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
    layers = _all(args, args.file)
    if args.other is not None:
        found = _differences(layers, _all(args, args.other))
        print(json.dumps({"differences": found}) if args.json else _told(found))
    elif args.json:
        print(json.dumps({"layers": [layer.as_dict() for layer in layers]}))
    else:
        print("\n\n".join(_alike(layers)))
        if len(layers) > 1 and (cache := sum(layer.cache_bytes() for layer in layers)):
            print(f"\ncache of these layers: {cache} bytes a token in 16 bits")
    return 0


def _all(args: argparse.Namespace, file: str) -> list[LayerAttention]:
    """The layers that are asked for."""
    parts = parts_of(file) if args.part is None else (args.part,)
    if args.layer is None:
        return [layer for part in parts for layer in layers_of(file, part=part, ignore=args.ignore)]
    return [from_config(file, layer=args.layer, part=part, ignore=args.ignore) for part in parts]


def _differences(ours: list[LayerAttention], theirs: list[LayerAttention]) -> list[dict[str, Any]]:
    """What differs between layers of the same part and number: those that differ in the same way together."""
    both = [{(layer.part, layer.layer): _rows(layer) for layer in layers} for layers in (ours, theirs)]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for part, number in dict.fromkeys([*both[0], *both[1]]):
        first, second = (side.get((part, number), {}) for side in both)
        names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
        rows = {name: [first.get(name), second.get(name)] for name in names}
        if rows:
            same = found.setdefault((part, json.dumps(rows)), {"part": part, "layers": [], "rows": rows})
            same["layers"].append(number)
    return list(found.values())


def _rows(layer: LayerAttention) -> dict[str, str]:
    """Rows of a layer by their names, with what goes on in the next line."""
    found: dict[str, str] = {}
    for name, text in layer.rows():
        last = name or next(reversed(found))
        found[last] = f"{found[last]}; {text}" if last in found else text
    return found


def _told(found: list[dict[str, Any]]) -> str:
    """Differences in lines: - for the first file, + for the other one."""
    lines = []
    for one in found:
        lines.append(f"{one['part']}{', ' if one['part'] else ''}layers {ranges(one['layers'])}")
        for name, sides in one["rows"].items():
            lines += [f"  {sign} {name:<16}{text}" for sign, text in zip("-+", sides, strict=True) if text is not None]
    return "\n".join(lines) or "no difference in attention"


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
