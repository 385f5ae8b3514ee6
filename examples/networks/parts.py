"""What both networks need beside attention: layer normalisation and a convolution along the sequence."""

from __future__ import annotations

import numpy as np

from relpos_np.layers import Linear


class LayerNorm:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift it."""

    def __init__(self, gain: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> None:
        self.gain, self.bias, self.eps = gain, bias, eps

    def __call__(self, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        gain, bias = (one.astype(x.dtype, copy=False) for one in (self.gain, self.bias))
        return centred / np.sqrt(variance + x.dtype.type(self.eps)) * gain + bias


class Convolution:
    """A convolution along the sequence, zeros beyond both ends, as one projection of the neighbours side by side."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        outputs, inputs, self.width = weight.shape
        self.linear = Linear(weight.swapaxes(1, 2).reshape(outputs, self.width * inputs), bias)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        before = (self.width - 1) // 2
        padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(before, self.width - 1 - before), (0, 0)])
        length = x.shape[-2]
        return self.linear(np.concatenate([padded[..., n : n + length, :] for n in range(self.width)], axis=-1))
