"""What a fork waits for: a child that is forked in the midst of it would find locks that nobody ever opens again."""

from __future__ import annotations

import os
import threading

# Held while kernels are imported, compiled, loaded or linked and pools are started, by one thread at a time. Python
# opens no lock of a module that another thread was importing, and Numba and LLVM have locks of their own.
preparing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)
