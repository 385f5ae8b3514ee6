"""What a fork waits for: a child forked in the middle of it would inherit locks that nobody ever releases."""

from __future__ import annotations

import os
import threading

# Held by one thread at a time while kernels are imported, compiled, loaded or linked and pools are started. After a
# fork, Python does not release the lock of a module that another thread was importing, and Numba and LLVM have locks
# of their own.
preparing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)
