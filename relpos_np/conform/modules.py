"""Modules of PyTorch without glue: where their parameters and arguments get what a case has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from relpos_np.conform.frameworks import imported
from relpos_np.conform.judge import conform
from relpos_np.conform.report import Report
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing.arguments import parameters

_OPERANDS = ("q", "k", "v")


def conform_module(module: Any, scheme: str, *, names: Mapping[str, str] | None = None, **options: Any) -> Report:
    """Test a module of PyTorch against a scheme, without a function around it.

    Parameters
    ----------
    module : torch.nn.Module
        Its ``forward`` takes q, k and v, in ``layout``; or, where `names` says which weights project them, inputs
        (batch, length, heads * head_dim) of queries, keys and values. Of several results the first is the output.
    scheme : str
        Key in `relpos_np.SCHEMES`.
    names : mapping of str to str, optional
        By the name that `conform` has for it, the module's: of an argument of ``forward`` (``{"causal":
        "is_causal"}``), or the path of a parameter or buffer, which gets the case's array in every call (``{"table":
        "bias.weight"}``), with gradients. "q", "k", "v" and "out" are paths of weights that project: identities are
        put there, and 0 into biases beside them. What has its own name need not be named.
    **options
        As for `conform`. With projections, `heads` and `head_dim` must say how inputs are split.

    Returns
    -------
    Report
        As of `conform`.

    Raises
    ------
    RelposError
        As `conform`, and if the module has none of these names.

    Notes
    -----
    Arrays go to parameters through ``torch.func.functional_call``, so that autograd sees them: wrapping one in
    ``nn.Parameter`` within a function cuts its gradient.
    """
    torch = imported("torch", "torch")
    if not isinstance(module, torch.nn.Module):
        raise RelposTypeError(f"module: expected a torch.nn.Module, found {type(module).__name__}")
    named = dict(names or {})
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    forward = inspect.signature(module.forward).parameters
    projections = {name: named.pop(name) for name in (*_OPERANDS, "out") if name in named}
    for name, path in (*named.items(), *projections.items()):
        if path not in stored and (name in projections or path not in forward):
            raise RelposValueError(f"names: the module has no {path} for {name}; expected one of {', '.join(stored)}")
    if projections:
        heads, dim = (options.get(name) for name in ("heads", "head_dim"))
        if not isinstance(heads, int) or not isinstance(dim, int):
            raise RelposValueError("heads: expected heads= and head_dim= as numbers, by which inputs are split")
        # Groups of key heads have weights of another shape.
        options = options | {"heads": (heads, heads)}
    taken = {name: name for name in forward if name not in list(forward)[:3]} | {
        name: name for name in parameters(SCHEMES[scheme].cls) if name in stored
    }
    taken = {name: path for name, path in taken.items() if path not in named.values()} | named

    def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
        unknown = next((name for name in given if name not in taken), None)
        if unknown is not None:
            raise NotImplementedError(f"takes no argument {unknown}")
        paths = {taken[name]: value for name, value in given.items()}
        weights = {path: value for path, value in paths.items() if path in stored}
        arguments = {path: value for path, value in paths.items() if path not in stored}
        fixed = {path: x.to(q) if x.is_floating_point() else x.to(q.device) for path, x in stored.items()}
        for path in projections.values():
            weights |= _identity(torch, path, fixed)
        operands = [_packed(x) for x in (q, k, v)] if projections else [q, k, v]
        found = torch.func.functional_call(module, {**fixed, **weights}, tuple(operands), arguments)
        found = found[0] if isinstance(found, tuple | list) else found
        return found.unflatten(-1, (q.shape[1], -1)).transpose(1, 2) if projections else found

    attend.__qualname__ = type(module).__name__
    attend.__signature__ = _signature(taken)  # type: ignore[attr-defined]
    return conform(attend, scheme, framework="torch", **options)


def _signature(taken: Mapping[str, str]) -> inspect.Signature:
    """Of a function of q, k, v and what the module takes by name."""
    one = inspect.Parameter
    operands = [one(name, one.POSITIONAL_OR_KEYWORD) for name in _OPERANDS]
    return inspect.Signature([*operands, *(one(name, one.KEYWORD_ONLY, default=None) for name in taken)])


def _packed(x: Any) -> Any:
    """(B, H, L, D) as (B, L, H D)."""
    return x.transpose(1, 2).flatten(-2)


def _identity(torch: Any, path: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A weight that changes nothing, several of one shape above each other in one matrix, and biases of 0 beside it."""
    weight = stored[path]
    rows, columns = weight.shape
    if rows % columns:
        raise RelposValueError(f"names: {path} projects {columns} channels to {rows}, which can be no identity")
    eye = torch.eye(columns, dtype=weight.dtype, device=weight.device).repeat(rows // columns, 1)
    biases = [path[: -len("weight")] + "bias"] if path.endswith("weight") else []
    return {path: eye} | {name: torch.zeros_like(stored[name]) for name in biases if name in stored}
