"""Modules of other packages and their inputs, as the comparisons need them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def randomised(module, std=0.4):
    """The module in float64 and evaluation mode, every parameter drawn anew (some are initialised to zero)."""
    module = module.double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


def without(module, name):
    """The module with its output projection taken away, so that attention itself is seen."""
    setattr(module, name, torch.nn.Identity())
    return module


def split_heads(flat, heads=4):
    """(B, L, H*D) tensor to (B, H, L, D) array."""
    batch, length, width = flat.shape
    return flat.reshape(batch, length, heads, width // heads).transpose(1, 2).numpy()


def padding(length, lengths):
    """True where a token stands."""
    return np.arange(length) < np.array(lengths)[:, None]


def additive(mask):
    """The finite additive mask of transformers for a boolean one."""
    lowest = torch.finfo(torch.float64).min
    return torch.where(torch.from_numpy(mask.copy()), 0.0, torch.tensor(lowest, dtype=torch.float64))
