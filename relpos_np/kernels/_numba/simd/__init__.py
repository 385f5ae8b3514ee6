"""Vectors, register tiles and matrix units of the processor, as Numba intrinsics over raw pointers."""
