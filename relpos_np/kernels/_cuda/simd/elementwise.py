"""Element by element on the device: copies between layouts and dtypes, sums and products of two arrays."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.launch.device import inline, jit, launch, simulated
from relpos_np.kernels._cuda.simd.intrinsics import converters, reader

THREADS = 64
# Axes that a kernel counts through; the host goes through others.
AXES = 4


def _itself(x: Any) -> Any:
    return x


def _first(a: Any, _: Any) -> Any:
    return a


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _product(a: Any, b: Any) -> Any:
    return a * b


OPERATIONS = {"copy": _first, "add": _sum, "multiply": _product}


def is_brain(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is bfloat16, which is uint16 on the device."""
    return dtype.name == "bfloat16"


@cache
def _elementwise(operation: str, x_dtype: Any, y_dtype: Any, out_dtype: Any, real: Any) -> Any:
    """The kernel for an operation and three dtypes, computing in `real`; if that is None, elements are only moved."""
    if real is None:
        read_x = read_y = narrow = inline(_itself)
    else:
        read_x, read_y, narrow = reader(x_dtype.name, real), reader(y_dtype.name, real), converters(out_dtype.name)[1]
    combine = inline(OPERATIONS[operation])

    @jit()
    def kernel(x, y, out, count, sizes, x_steps, y_steps, out_steps):  # type: ignore[no-untyped-def]
        _, n1, n2, n3 = sizes
        x0, x1, x2, x3 = x_steps
        y0, y1, y2, y3 = y_steps
        o0, o1, o2, o3 = out_steps
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < count:
            d = n % n3
            rest = n // n3
            c = rest % n2
            rest //= n2
            b = rest % n1
            a = rest // n1
            left = read_x(x[a * x0 + b * x1 + c * x2 + d * x3])
            right = read_y(y[a * y0 + b * y1 + c * y2 + d * y3])
            out[a * o0 + b * o1 + c * o2 + d * o3] = narrow(combine(left, right))
            n += cuda.gridDim.x * THREADS

    return kernel


def _merged(shape: tuple[int, ...], steps: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Sizes and steps with axes of one entry left out and neighbouring axes joined where all arrays allow it."""
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        own = [step[axis] for step in steps]
        if sizes and all(walk[-1] == step * size for walk, step in zip(walks, own, strict=True)):
            sizes[-1] *= size
            for walk, step in zip(walks, own, strict=True):
                walk[-1] = step
        else:
            sizes.append(size)
            for walk, step in zip(walks, own, strict=True):
                walk.append(step)
    return sizes, walks


def elementwise(
    operation: str,
    shape: tuple[int, ...],
    x: tuple[Any, tuple[int, ...], np.dtype[Any]],
    y: tuple[Any, tuple[int, ...], np.dtype[Any]] | None,
    out: tuple[Any, tuple[int, ...], np.dtype[Any]],
) -> None:
    """Fill `out` with a copy of x, or with the sum or product of x and y: "copy", "add" or "multiply".

    All have one shape. Each is a flat array on the device, its steps along the axes in elements, 0 where it repeats,
    and its dtype.
    """
    count = math.prod(shape)
    if not count:
        return
    second = x if y is None else y
    dtypes = [x[2], second[2], out[2]]
    real: np.dtype[Any] | None = None
    if operation != "copy" or x[2] != out[2]:
        real = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    kernel = _elementwise(operation, *dtypes, real)
    sizes, walks = _merged(shape, [x[1], second[1], out[1]])
    extra = max(len(sizes) - AXES, 0)
    pad = AXES - len(sizes) + extra
    inner = [1] * pad + sizes[extra:]
    inner_count = math.prod(inner)
    blocks = min(-(-inner_count // THREADS), 4 if simulated() else 1 << 16)
    steps = [(*[0] * pad, *walk[extra:]) for walk in walks]
    for at in np.ndindex(*sizes[:extra]):
        flats = [
            flat[start:] if (start := sum(i * step for i, step in zip(at, walk, strict=False))) else flat
            for flat, walk in zip((x[0], second[0], out[0]), walks, strict=True)
        ]
        launch(kernel, blocks, THREADS, *flats, inner_count, tuple(inner), *steps)
