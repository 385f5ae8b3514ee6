"""Runs kernel tests on Arm, emulated by QEMU: ``python -m tests.emulated.run FOLDER``, as root on Debian for x86-64.

What Debian and PyPI have for Arm is fetched to a folder, where it stays for the next run: an interpreter, which is
unpacked and not installed, and wheels of the versions that this environment has. Kernels are compiled here for a
Neoverse V1 (`cross.py`), because the emulated compiler takes ten times as long, and run there. Exit status 3: something
is missing or cannot be fetched, and nothing was run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EMULATOR, SUITE, PYTHON = "qemu-aarch64-static", "bookworm", "3.11"
PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "llvmlite",
    "ml_dtypes",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "mpmath",
    "threadpoolctl",
)
# The interpreter and its libraries, among what Debian calls a minimal system.
NEEDED = ("python3", "lib", "zlib")
# What Linux says on a Graviton 3; QEMU 7 shows the file of the machine it runs on.
PROCESSOR = """\
processor\t: 0
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimddp sha3 sm4 sha512 sve svebf16 i8mm bf16 rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
DESCRIPTION = """
import ctypes, json, platform
import llvmlite.binding as llvm
from relpos_np.kernels._numba import target
ask = ctypes.CDLL(None).getauxval
ask.restype = ctypes.c_ulong
print(json.dumps({
    "triple": llvm.get_process_triple(), "name": llvm.get_host_cpu_name(),
    "features": dict(llvm.get_host_cpu_features()), "machine": platform.machine(), "python": platform.python_version(),
    "auxiliary": ask(26), "bf16": target._system_says_bf16(), "unit": target.UNIT,
}))
"""
KERNELS = (
    *("attention float32", "windows float32", "backward float32", "decoding float32", "products float32", "rel_shift"),
    *("attention bfloat16", "windows bfloat16", "backward bfloat16", "decoding bfloat16"),
)
TESTS = ("tests/test_half.py", "tests/test_decode.py", "tests/test_rel_shift.py")
# float16 takes the kernels of float32, and only what reads and writes it is seen there.
SELECTED = (
    "((errors_are_those or errors_of_gradients) and (bfloat16 or plain))"
    " or excluded_changes or layouts_threads or rel_shift_moves"
    " or (half_precision_is_read_as_it_lies and bfloat16) or large_input"
)


class Missing(Exception):
    """Nothing can be run here."""


def step(name: str, started: float) -> None:
    """Say what was done, and for how long."""
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def fetch(command: list[str], what: str) -> None:
    """Run a command that needs the network."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Missing(f"{what} CANNOT BE FETCHED: {(run.stderr or run.stdout).strip()[-500:]}")


def make_root(root: Path) -> None:
    """Unpack an interpreter for Arm."""
    fetch(
        ["debootstrap", "--download-only", "--arch=arm64", "--variant=minbase", "--include=python3", SUITE, str(root)],
        "Debian's packages for Arm",
    )
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        if package.name.startswith(NEEDED):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
        package.unlink()
    # Debootstrap may have left a link to the folder of this machine.
    if (root / "proc").is_symlink():
        (root / "proc").unlink()
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(PROCESSOR)


def make_site(site: Path) -> None:
    """Unpack wheels for Arm."""
    platforms = [f"--platform=manylinux_2_{n}_aarch64" for n in (28, 27, 17)] + ["--platform=manylinux2014_aarch64"]
    wanted = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(site)]
    fetch([*command, *platforms, "--only-binary=:all:", f"--python-version={PYTHON}", *wanted], "wheels for Arm")


def fetch_all(folder: Path) -> None:
    """Bring there what is not there yet."""
    for program in (EMULATOR, "debootstrap", "dpkg-deb"):
        if not shutil.which(program):
            raise Missing(f"{program} is not installed")
    for name, make in (("root", make_root), ("site", make_site)):
        started = time.perf_counter()
        if not (folder / name).exists():
            shutil.rmtree(folder / "part", ignore_errors=True)
            make(folder / "part")
            (folder / "part").rename(folder / name)
        step(f"{name} for Arm", started)


class Arm:
    """An emulated interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "QEMU_LD_PREFIX": str(folder / "root"),
            "QEMU_CPU": "max",
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "RELPOS_CACHE_DIR": str(folder / "kernels"),
            "HYPOTHESIS_PROFILE": "ci",
        }

    def run(self, *arguments: str, **environment: str) -> str:
        """Run Python there; returns what it prints."""
        command = [EMULATOR, str(self.folder / f"root/usr/bin/python{PYTHON}"), *arguments]
        run = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=self.environment | environment
        )
        if run.returncode:
            sys.exit(f"{run.stdout[-5000:]}\n{' '.join(arguments)[:100]}: exit status {run.returncode}")
        return run.stdout


def compile_kernels(arm: Arm) -> None:
    """Put the kernels into the cache of the emulated interpreter."""
    there = arm.run("-c", DESCRIPTION)
    if (unit := json.loads(there)["unit"]) != "mmla":
        sys.exit(f"a processor with BFMMLA takes the unit {unit!r}")
    environment = os.environ | {"RELPOS_CACHE_DIR": str(arm.folder / "kernels"), "RELPOS_MATRIX_UNIT": ""}
    command = [sys.executable, "-m", "tests.emulated.cross", *KERNELS]
    subprocess.run(command, input=there, text=True, check=True, cwd=ROOT, env=environment)


def compare_units(arm: Arm) -> None:
    """BFMMLA has the bits of BFDOT, and both are as exact as sums of float32."""
    found = {unit: json.loads(arm.run("-m", "tests.products", RELPOS_MATRIX_UNIT=unit)) for unit in ("mmla", "dot")}
    for unit, (name, *_, error) in found.items():
        if name != unit or not error <= 1.0:
            sys.exit(f"{unit}: errors of {error} times what rounding allows, by {name}")
    if found["mmla"][1:3] != found["dot"][1:3]:
        sys.exit("BFMMLA and BFDOT differ in their bits")


def main() -> None:
    """Fetch, compile and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fetch_all(folder)
    except Missing as missing:
        print(f"!!!! {missing}", "!!!! No kernel was run on Arm.", sep="\n", file=sys.stderr)
        sys.exit(3)
    arm = Arm(folder)
    started = time.perf_counter()
    compile_kernels(arm)
    step("kernels compiled for Arm", started)
    compiled, started = set((folder / "kernels").iterdir()), time.perf_counter()
    compare_units(arm)
    step("BFMMLA and BFDOT", started)
    started = time.perf_counter()
    said = arm.run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-k", SELECTED, *TESTS)
    print(said.strip().splitlines()[-1])
    step("tests", started)
    for entry in sorted(set((folder / "kernels").iterdir()) - compiled):
        print(f"compiled by the emulated compiler, which takes long: {entry.name}")


if __name__ == "__main__":
    main()
