"""Attention of this library in other packages: `interop.torch`, `.transformers` and `.jax`, each imported by name."""
