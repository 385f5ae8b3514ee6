"""Speak phonemes: a VITS voice whose text encoder (Shaw's relative positions) runs in NumPy and relpos_np.

    python examples/vits_speak.py "həlˈoʊ wˈɜːld" --out hello.wav

The phonemes are IPA, as `espeak-ng --ipa` prints them. onnxruntime runs what comes after the text encoder.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from networks.vits import Rest, TextEncoder, initialisers, phoneme_numbers
from networks.weights import MissingWeightsError, voice

RATE = 22_050
# Of noise, length and the noise of durations; without noise a text always sounds the same.
SCALES = (0.0, 1.0, 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a WAV file; exit code 2 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phonemes")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"), metavar="WAV", help="default speech.wav")
    args = parser.parse_args(argv)
    try:
        network, config = voice()
        ids = phoneme_numbers(args.phonemes, config)
        encoder, rest = TextEncoder(initialisers(network)), Rest(network)
    except (OSError, ValueError, MissingWeightsError, ImportError) as error:
        print(f"vits_speak: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    encoded = encoder(ids, np.array([ids.shape[1]]))
    seconds = time.perf_counter() - started
    samples = rest(encoded, SCALES)
    with wave.open(str(args.out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    print(f"{args.out}: {len(samples) / RATE:.1f} s of speech; text encoder {1000 * seconds:.0f} ms", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
