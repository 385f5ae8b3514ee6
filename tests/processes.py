"""Code run in a Python process of its own, as tests of threads, signals, caches and start-up need it."""

import os
import subprocess
import sys
from pathlib import Path

import relpos_np as rp

ROOT = Path(rp.__file__).parent.parent


def child(code, *options, timeout=300, bare=False, **environment):
    """Run code in a process of its own; returns (exit status, output, log and errors). `bare`: nothing is imported."""
    prelude = (
        "import os, sys, logging, numpy as np, relpos_np as rp\n"
        "logging.basicConfig(level='INFO', stream=sys.stderr)\n"
        "rng = np.random.default_rng(0)\n"
    )
    run = subprocess.run(
        [sys.executable, *options, "-c", code if bare else prelude + code],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )
    return run.returncode, run.stdout, run.stderr
