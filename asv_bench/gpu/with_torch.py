"""What rows are compared with: torch on the same device in the same process, and copies from device to device."""

from __future__ import annotations

import numpy as np

from . import device
from .ours import Prepared


class MissingError(Exception):
    """A baseline cannot run here, and why."""


def flags(torch):
    """Settings that change what torch's kernels compute, or which of them run."""
    cuda, backends = torch.backends.cuda, torch.backends
    found = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        ask = getattr(cuda, f"{name}_sdp_enabled", None)
        if ask is not None:
            found[f"{name}_sdp"] = bool(ask())
    return found


def full_precision():
    """Torch with float32 products in float32; an error that says why not if it is missing."""
    torch, reason = device.torch_on_device()
    if torch is None:
        raise MissingError(reason)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch


def on_device(subject):
    """The operands and arrays of a case as tensors, by the class that models them on the host."""
    torch = full_precision()
    from relpos_np._commands.peers.with_torch import Operands

    held = Operands(subject)
    for name, x in vars(held).items():
        if isinstance(x, torch.Tensor):
            setattr(held, name, x.clone() if device.simulated() else x.to("cuda"))
    held.arrays = {name: x.clone() if device.simulated() else x.to("cuda") for name, x in held.arrays.items()}
    return held


def sets(held, count):
    """The operands, and copies of them elsewhere."""
    first = held.q, held.k, held.v
    return [first, *([x.clone() for x in first] for _ in range(count - 1))]


def use(held, operands):
    held.q, held.k, held.v = operands


def forward(name, subject, count):
    """SDPA, flex_attention or single operations."""
    torch = full_precision()
    from torch.nn import functional

    from relpos_np._commands.peers import UnavailableError, with_torch

    torch.set_grad_enabled(False)
    held = on_device(subject)
    note = ""
    if name == "torch flex":
        try:
            made = with_torch.flex(held)
        except UnavailableError as error:
            raise MissingError(str(error)) from error
        run, note = made.call, made.note
    elif name == "torch eager":
        run = held.eager
    elif name == "torch sdpa, bias inside":
        run = held.sdpa
    elif name == "torch sdpa, turned inside":
        run = rotated(held)
    else:
        bias = None if subject.shape.kind == "plain" else held.bias().contiguous()
        causal = subject.shape.kind == "plain" and subject.shape.causal

        def run():
            return functional.scaled_dot_product_attention(held.q, held.k, held.v, attn_mask=bias, is_causal=causal)

    def call(*operands):
        use(held, operands)
        return run()

    return Prepared(call, sets(held, count), device.download), flags(torch), note


def rotated(held):
    """Rotary positions as models apply them, with cosines and sines made before the call."""
    torch = full_precision()
    length, depth = held.shape.k_len, held.shape.head_dim
    speed = 10000.0 ** (-torch.arange(0, depth, 2, dtype=torch.float64) / depth)
    angles = (torch.arange(length, dtype=torch.float64)[:, None] * speed).repeat(1, 2)
    cosines, sines = (f(angles).float().to(held.q.device) for f in (torch.cos, torch.sin))

    def turn(x):
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-second, first], dim=-1) * sines

    def run():
        return torch.nn.functional.scaled_dot_product_attention(turn(held.q), turn(held.k), held.v, is_causal=True)

    return run


def autograd(subject, count):
    """Positions' part from the tables, attention, and the gradients of operands and tables, in one call."""
    torch = full_precision()
    torch.set_grad_enabled(True)
    held = on_device(subject)
    run = held.eager if subject.shape.kind == "shaw" else held.sdpa
    gradient = device.as_tensor(subject.grad_out)
    own = list(held.arrays.values())
    for x in own:
        x.requires_grad_()
    all_sets = [[x.detach().requires_grad_() for x in operands] for operands in sets(held, count)]
    names = ["q", "k", "v", *(f"position {name}" for name in held.arrays)]
    if subject.shape.kind == "transformer_xl":
        # A permuted copy was made before any gradient was wanted.
        plain = run

        def run():
            held.rows = held.arrays["rows"].permute(1, 2, 0)
            return plain()

    def call(*operands):
        use(held, operands)
        return torch.autograd.grad(run(), [*operands, *own], gradient)

    def to_numpy(found):
        return {name: device.download(x) for name, x in zip(names, found, strict=True)}

    return Prepared(call, all_sets, to_numpy), flags(torch), "gradients included, as in our call"


def shifts(name, row, x, count):
    """rel_shift by strides, and a copy of as much."""
    shape = row.shape
    square = shape.variant == "transformer_xl"
    k_len = shape.columns if square else shape.columns - shape.q_len + 1
    if name == "copy":
        return copy((*x.shape[:-1], k_len), count)
    torch = full_precision()
    torch.set_grad_enabled(False)
    from relpos_np._commands.peers.with_torch import rel_shift

    all_sets = [(device.as_tensor(x),) for _ in range(count)]
    if name == "torch pad and reshape":
        return Prepared(lambda y: rel_shift(y, k_len).contiguous(), all_sets, device.download), flags(torch), ""
    rows, columns = shape.q_len, shape.columns

    def call(y):
        return torch.as_strided(y, (*y.shape[:-1], k_len), (rows * columns, columns - 1, 1), rows - 1).contiguous()

    return Prepared(call, all_sets, device.download), flags(torch), ""


def copy(shape, count):
    """Copies of an array's bytes by the driver, from one place to another."""
    source = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    cuda = device.cuda()
    all_sets = []
    for _ in range(count):
        given = cuda.to_device(source.reshape(-1))
        all_sets.append((given, cuda.device_array(source.size, np.float32)))

    def call(given, taken):
        taken.copy_to_device(given)
        return taken

    return Prepared(call, all_sets, lambda taken: taken.copy_to_host().reshape(shape)), {}, ""


def prepare(name, row, subject, count):
    """A baseline's call, the flags it runs under, and a note."""
    if row.task == "rel_shift":
        return shifts(name, row, subject, count)
    if row.task == "backward":
        return autograd(subject, count)
    return forward(name, subject, count)
