"""Compare with other libraries: ``python asv_bench/compare.py --backward --rel-shift --out FILE``.

`relpos bench` with more tasks, peers of other environments, the machine's limit, and a record for the pages: how peers
take turns and what is reported, `relpos_np/_commands/peers/rounds.py` says. A peer that is not installed is reported
as such.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The library beside this file is compared, installed or not.
PATHS = [str(HERE), str(HERE.parent)]
sys.path[:0] = [path for path in PATHS if path not in sys.path]

import more_tasks  # noqa: E402
from report import peers  # noqa: E402

from relpos_np._commands.peers import OURS, PEERS, rounds  # noqa: E402
from relpos_np._commands.peers.shapes import SHAPES, SMALL  # noqa: E402
from relpos_np.versions import usable  # noqa: E402


def interpreter(name, given):
    """The interpreter of a peer: of the longest given name that it begins with."""
    fitting = [n for n in given if name == n or name.startswith(f"{n} ")]
    return given[max(fitting, key=len)] if fitting else sys.executable


def named(text):
    """The peers that an argument names: one, whose name may hold a comma, or several with commas between them."""
    return [text] if text in PEERS else [name for name in text.split(",") if name]


def run(arguments, given):
    """All comparisons that are asked for."""
    asked = {name for text in arguments.peers for name in named(text)}
    wanted = [name for name in PEERS if not asked or name in {*asked, OURS, "limit"}]
    letters = [letter for letter in arguments.shapes.split(",") if letter]
    jobs = {"attention": letters}
    if arguments.backward:
        jobs["backward"] = [n for n in letters if n[0] in "ABa"]
    if arguments.rel_shift:
        jobs["rel_shift"] = ["conformer"]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    record = rounds.run(
        wanted,
        jobs,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        threads=arguments.threads,
        interpreter=lambda name: interpreter(name, given),
        modules=[more_tasks.__name__],
        done=lambda task, shape, found: print("\n".join(peers({task: {shape: found}})), flush=True),
    )
    return record | {"compiler": bool(shutil.which("g++") or shutil.which("clang++"))}


def main(argv=None):
    """Compare, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join([*SHAPES, *SMALL])}")
    parser.add_argument(
        "--peers",
        action="append",
        default=[],
        help="names with commas between them, or one; may be repeated; default all of " + ", ".join(map(repr, PEERS)),
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one turn")
    parser.add_argument("--threads", type=int, default=usable() or 1)
    parser.add_argument("--backward", action="store_true", help="also gradients, at A and B, and in bfloat16")
    parser.add_argument("--rel-shift", action="store_true", help="also rel_shift alone")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter of the peers whose name begins so, such as torch=venv/bin/python; may be repeated",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    given = dict(one.split("=", 1) for one in arguments.python)
    for letter in filter(None, arguments.shapes.split(",")):
        if letter not in SHAPES | SMALL:
            parser.error(f"--shapes: there is no shape {letter!r}")
    for name in (name for text in arguments.peers for name in named(text)):
        if name not in PEERS:
            parser.error(f"--peers: there is no peer {name!r}; expected some of {', '.join(map(repr, PEERS))}")
    record = run(arguments, given)
    text = json.dumps(record, indent=1) + "\n"
    if arguments.out:
        arguments.out.parent.mkdir(exist_ok=True, parents=True)
        arguments.out.write_text(text, encoding="utf-8")
        print(f"written to {arguments.out}")
    return record


if __name__ == "__main__":
    main()
