"""What ``compare.py`` asks of peers beside attention: its gradients, and rel_shift alone. Workers import this too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from benchmarks.shapes import SHIFTED, as_mapping, case, products, wide

import relpos_np as rp
from relpos_np._commands.peers import OURS, PEERS, Peer, Prepared, UnavailableError, ours
from relpos_np._commands.peers.shapes import TABLES, lacking
from relpos_np._commands.peers.tasks import TASKS, Task, described


def shift_error(x, result, _):
    """How far a result is from the entries that it should hold."""
    rows, columns = x.shape[1:]
    picked = np.arange(rows)[::-1, None] + np.arange(columns - rows + 1)
    return float(np.abs(np.asarray(result) - np.take_along_axis(x, picked[None], axis=-1)).max())


TASKS["backward"] = Task(
    case,
    lambda subject: subject.exact_gradients(),
    lambda subject, result, exact: subject.gradient_error(result, exact),
    lambda subject: described(subject) | {"amount": subject.backward_operations},
)
TASKS["rel_shift"] = Task(lambda _: products(), lambda _: {}, shift_error, lambda _: {"shape": list(SHIFTED)})
PEERS |= {
    OURS: replace(PEERS[OURS], module="more_tasks", tasks=("attention", "backward", "rel_shift")),
    "limit": replace(PEERS["limit"], tasks=("attention", "backward")),
    "torch autograd": Peer("more_tasks", "bias gathered, math of SDPA, backward", ("torch",), ("backward",)),
    "torch pad and reshape": Peer(
        "more_tasks", "as models write it: a copy with a column more, viewed", ("torch",), ("rel_shift",)
    ),
    "numpy view": Peer("more_tasks", "a strided view, copied", tasks=("rel_shift",)),
    "memcpy": Peer("more_tasks", "a copy of as many bytes as the result has, on one thread", tasks=("rel_shift",)),
}


def prepare(name, task, subject, threads, seconds):
    """The call of a task."""
    if task == "attention":
        return ours.prepare(name, task, subject, threads, seconds)
    if name.startswith("torch"):
        return (autograd if task == "backward" else padded)(subject, threads)
    if name == "numpy view":
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", backend="numpy").copy())
    if name == "memcpy":
        heads, rows, columns = subject.shape
        source = np.ones((heads, rows, columns - rows + 1), subject.dtype)
        target = np.zeros_like(source)
        return Prepared(lambda: np.copyto(target, source), note="one thread", answers=False)
    import numba

    numba.set_num_threads(threads)
    if task == "rel_shift":
        *lead, rows, columns = subject.shape
        kept = np.full((*lead, rows, columns - rows + 1), np.nan, subject.dtype)
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", out=kept))
    if reason := lacking(subject.shape):
        raise UnavailableError(reason)
    return Prepared(subject.attention_vjp, lambda found: {n: wide(x) for n, x in as_mapping(found).items()})


def padded(x, threads):
    """rel_shift as models write it in PyTorch."""
    import torch

    from relpos_np._commands.peers.with_torch import rel_shift

    torch.set_num_threads(threads)
    x = torch.from_numpy(x)
    k_len = x.shape[-1] - x.shape[-2] + 1
    return Prepared(lambda: rel_shift(x, k_len), lambda out: out.numpy(), "its result is a view with gaps")


def autograd(subject, threads):
    """Gather, attention and backward of PyTorch in one call."""
    if subject.shape.kind not in TABLES:
        raise UnavailableError("only written for tables")
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from relpos_np._commands.peers.with_torch import Operands, tensor, to_numpy

    torch.set_num_threads(threads)
    operands = Operands(subject)
    leaves = {"q": operands.q, "k": operands.k, "v": operands.v, **operands.arrays}
    for x in leaves.values():
        x.requires_grad_()
    gradient = tensor(subject.grad_out)

    def call():
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(operands.sdpa(), list(leaves.values()), gradient)

    names = [name if name in ("q", "k", "v") else f"position {name}" for name in leaves]
    return Prepared(call, lambda grads: {n: to_numpy(g) for n, g in zip(names, grads, strict=True)})
