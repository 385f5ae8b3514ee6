"""Attention with positions as a model of ONNX, which any of its runtimes executes."""

from relpos_np.interop.onnx.export import to_onnx

__all__ = ["to_onnx"]
