"""Modules of other packages and their inputs, as the comparisons need them."""

import contextlib
import importlib
import sys
from unittest import mock

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")

EPS32 = np.finfo(np.float32).eps


def modeling(name):
    """The module of transformers with the code of a model."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


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


def timm(name):
    """A module of timm."""
    with without_torchvision():
        pytest.importorskip("timm.models.swin_transformer")
        return importlib.import_module(f"timm.{name}")


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


def normal(*shape):
    """A tensor of random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def state_of(module):
    """Weights as arrays, by name."""
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def split_heads(flat, heads=4):
    """(..., L, H*D) tensor to (..., H, L, D) array."""
    return flat.unflatten(-1, (heads, -1)).transpose(-3, -2).numpy()


def projected(module, names, x, heads=4):
    """What projections of the module make of x, as arrays of heads: their names in one text."""
    return [split_heads(getattr(module, name)(x), heads) for name in names.split()]


def chunked(flat, heads=4):
    """q, k and v of one projection: three (B, H, N, D) arrays."""
    return [split_heads(part, heads) for part in flat.chunk(3, dim=-1)]


def added(position, *shape):
    """What a scheme adds to scores of (..., H, L_q, L_k)."""
    *lead, q_len, k_len = shape
    q, k = np.zeros((*lead, q_len, 1)), np.zeros((*lead, k_len, 1))
    return rp.logits(q, k, position=position, scale=1.0, backend="numpy")


def padding(length, lengths):
    """True where a token stands."""
    return np.arange(length) < np.array(lengths)[:, None]


def half_padded(length):
    """A mask of keys (B, 1, 1, L) of two sequences: the second is half as long."""
    return padding(length, [length, (length + 1) // 2])[:, None, None]


def additive(mask):
    """The finite additive mask of transformers for a boolean one."""
    lowest = torch.finfo(torch.float64).min
    return torch.where(torch.from_numpy(mask.copy()), 0.0, torch.tensor(lowest, dtype=torch.float64))


def sdpa(q, k, v, **options):
    """PyTorch's own attention, of arrays or tensors; heads of keys may be fewer."""
    return torch.nn.functional.scaled_dot_product_attention(
        *map(torch.as_tensor, (q, k, v)), enable_gqa=True, **options
    )
