"""Test somebody's attention in any framework: one callable, one line, a verdict by family, and the known cause."""

from relpos_np.conform.judge import conform
from relpos_np.conform.modules import conform_module
from relpos_np.conform.report import Family, Finding, Report

__all__ = ["Family", "Finding", "Report", "conform", "conform_module"]
