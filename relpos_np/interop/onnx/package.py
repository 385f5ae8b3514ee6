"""The package `onnx`, imported when it is first needed."""

from __future__ import annotations

from typing import Any

from relpos_np.errors import RelposImportError


def package() -> Any:
    """The module.

    Returns
    -------
    module
        `onnx`, with its helper.

    Raises
    ------
    RelposImportError
        If it is not installed.
    """
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise RelposImportError(
            f'models of ONNX need the package onnx ({error}); install it with `pip install "relpos-np[onnx]"`'
        ) from error
    return onnx
