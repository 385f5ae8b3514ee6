"""Fuzz the file readers with atheris: `python tests/fuzz/run.py --seconds 60`; needs the extra `fuzz`.

Each target runs in a process of its own for so many seconds, guided by coverage of the readers, from the seeds of
targets.py. Exit status 1 and the input, as a file, if a target lets anything but RelposError out, takes longer than
a minute, or more memory than 2 GiB. A finding belongs into tests/fuzz/findings/TARGET, from where the tests run it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Each target, and inputs that take it some seconds.
RUNS = {"npz": 2000, "tensors": 2000, "vectors": 800, "manifest": 16_000, "arguments": 160_000}
NAMES = tuple(RUNS)
# Never the kernels: Numba compiles their bytecode.
INSTRUMENTED = [
    "json",
    "zipfile",
    "relpos_np._commands.saved_call",
    "relpos_np._contract.check",
    "relpos_np.layers",
    "relpos_np._files.npz",
    "relpos_np._files.untrusted",
    "relpos_np.schemes",
    "relpos_np._files.safetensors",
    "relpos_np.testing",
]


def one(name, options):
    """Fuzz one target in this process; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz import targets
    target = targets.TARGETS[name]
    targets.seeds(name)
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


def several(names, seconds, corpus, artifacts, same=False):
    """Fuzz each in turn; the names of those that failed. `same`: the same inputs each time."""
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(corpus or scratch) / name
            words = Path(scratch) / "words"
            sys.path.insert(0, str(ROOT))
            from tests.fuzz import targets

            targets.write_seeds(name, folder)
            lines = (
                f'"{word}"' if "\\x" in word else '"' + word.replace('"', '\\"') + '"' for word in targets.words(name)
            )
            words.write_text("\n".join(lines) + "\n", encoding="utf-8")
            options = [
                *(["-seed=1", f"-runs={RUNS[name]}"] if same else [f"-max_total_time={seconds}"]),
                "-rss_limit_mb=2048",
                "-timeout=60",
                "-max_len=65536",
                "-print_final_stats=1",
                f"-dict={words}",
                f"-artifact_prefix={artifacts}/{name}-",
                str(folder),
            ]
            command = [sys.executable, __file__, "--one", name, *options]
            done = subprocess.run(
                command,
                # It ends without tidying up.
                env=os.environ | {"TMPDIR": scratch},
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds + 300,
            )
        last = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)[-1:]
        ran = re.search(r"number_of_executed_units: *(\d+)", done.stderr)
        rate = re.search(r"average_exec_per_sec: *(\d+)", done.stderr)
        print(f"{name}: {ran and ran[1]} inputs, {rate and rate[1]}/s, coverage {last and last[0][0]}: ", end="")
        print("ok" if done.returncode == 0 else "FAILED", flush=True)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-6000:])
            failed.append(name)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--same", action="store_true", help="in place of seconds, the same inputs each time")
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--corpus", help="folder where inputs that reach new code are kept; default none")
    parser.add_argument("--artifacts", default=".", help="folder for the inputs that fail")
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is missing: pip install -e '.[fuzz]' installs it where there are wheels of it")
    artifacts = Path(args.artifacts).resolve()
    return 1 if several(args.target or NAMES, args.seconds, args.corpus, artifacts, args.same) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.path.insert(0, str(ROOT))
        one(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
