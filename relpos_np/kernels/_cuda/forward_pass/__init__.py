"""Kernels that make attention and products with tables, and `rel_shift`."""
