"""A pytest plugin that keeps one part of the tests, so that several processes compile kernels at the same time.

``RELPOS_GPU_SHARD=2/8 pytest -p tests.shard``: the third of eight parts. Tests beside each other, which often share a
kernel, stay together in groups.
"""

from __future__ import annotations

import os

GROUP = 4


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, os.environ.get("RELPOS_GPU_SHARD", "0/1").split("/"))
    kept = [n // GROUP % parts == part for n in range(len(items))]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]
