"""Attention of this library in other packages: `interop.torch`, `.transformers`, `.jax` and `.onnx`, each by name."""
