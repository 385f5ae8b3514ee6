"""Kernels that make gradients, and sinks of both passes."""
