"""How much more memory a process holds at its peak during a call than before it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from .shapes import SMALL, lacking, make


def settle(*, backward=False):
    """Compile or load all kernels and start the threads, with small calls; give back the workspace they leave.

    A workspace is kept for the next call: what a first call of a shape allocates has to count.
    """
    for shape in SMALL.values():
        if lacking(shape):
            continue
        small = make(shape)
        small.attention()
        if backward and shape.q_len > 1:
            small.attention_vjp()
    from numba.np.ufunc.parallel import _launch_threads

    from relpos_np.kernels._numba.launch import launcher

    _launch_threads()
    vars(launcher._local).clear()


def extra_memory(call, size):
    """Peak of the resident set beyond what it was before, in bytes, without the result's `size`.

    Meant for a process of its own. Linux can forget earlier peaks; elsewhere the figure is how far the call raised
    the process's peak.
    """
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def read(name):
        lines = status.read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    def peak():
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024

    try:
        forget.write_text("5", encoding="utf-8")
        before, after = read("VmRSS"), lambda: read("VmHWM")
    except OSError:
        before, after = peak(), peak
    result = call()
    grown = after() - before
    del result
    return max(0, grown - size)
