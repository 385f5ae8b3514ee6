"""Search a text by meaning: all-mpnet-base-v2 (12 layers with T5's relative positions) in NumPy and relpos_np.

python examples/mpnet_search.py "how long does the first call take"
python examples/mpnet_search.py --text notes.md --top 5 "what did we decide about the budget"
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from networks.mpnet import Embedder
from networks.weights import MissingWeightsError, mpnet

README = Path(__file__).parent.parent / "README.md"
BATCH = 8


def passages(text: str) -> list[str]:
    """Paragraphs and list entries of a Markdown or plain text, without headings, tables and code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=- )", prose))
    return [block for block in blocks if len(block.split()) >= 5 and not block.startswith(("#", "|"))]


def embed(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Embeddings of many texts; those of like length go together, so that little is padded."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    found = np.empty((len(texts), 768), np.float32)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        found[batch] = embedder([texts[n] for n in batch])
        if sys.stderr.isatty():
            print(f"\rreading: {start + len(batch)} of {len(order)} passages", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the passages nearest to a question; exit code 2 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--text", type=Path, default=README, metavar="FILE", help="to search in; default README.md")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="passages to print; default 3")
    args = parser.parse_args(argv)
    try:
        texts = passages(args.text.read_text(encoding="utf-8"))
        embedder = Embedder(mpnet())
    except (OSError, MissingWeightsError, ImportError) as error:
        print(f"mpnet_search: {error}", file=sys.stderr)
        return 2
    if not texts:
        print(f"mpnet_search: {args.text}: no paragraph of at least five words", file=sys.stderr)
        return 2
    started = time.perf_counter()
    closeness = embed(embedder, texts) @ embed(embedder, [args.question])[0]
    seconds = time.perf_counter() - started
    for n in np.argsort(-closeness)[: args.top]:
        print(f"{closeness[n]:.3f}  {texts[n]}")
    print(f"{len(texts)} passages of {args.text.name} in {seconds:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
