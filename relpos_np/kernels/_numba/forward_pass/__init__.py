"""Kernels that make attention, its biases and products with tables, and `rel_shift`."""
