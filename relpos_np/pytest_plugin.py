"""Fixture `relpos_conform` of pytest: a test of somebody's attention is one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relpos_np.conform import Report


@pytest.fixture
def relpos_conform() -> Callable[..., Report]:
    """``relpos_conform(function, "t5", ...)``: `relpos_np.conform.conform`, failing the test unless it conforms."""

    def tested(function: str | Callable[..., Any], scheme: str, **options: Any) -> Report:
        __tracebackhide__ = True
        # Every run of pytest loads this file, wherever the package is installed.
        from relpos_np.conform import conform

        report = conform(function, scheme, **options)
        if not report.ok:
            pytest.fail(report.text(), pytrace=False)
        return report

    return tested
