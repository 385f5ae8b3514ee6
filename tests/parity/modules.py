"""Modules of other packages and their inputs, as the comparisons need them."""

import contextlib
import sys
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")


@contextlib.contextmanager
def without_torchvision():
    """Lets timm be imported where torchvision is not installed.

    timm's attention uses nothing of it, but its data pipeline and its batch norms import it. The stub is gone again
    afterwards, so that packages which look for torchvision still see that it is missing.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        names = [f"torchvision{part}" for part in ("", ".datasets", ".ops", ".ops.misc", ".transforms")]
        names.append("torchvision.transforms.functional")
        modules = {name: mock.MagicMock(name=name) for name in names}
        modules["torchvision.ops.misc"].FrozenBatchNorm2d = torch.nn.Identity  # timm asks isinstance of it
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in names:
                del sys.modules[name]
    else:
        yield


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
