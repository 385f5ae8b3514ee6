"""What a model may ask of its attention: each argument and attribute with its meaning, and an error for any other."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from relpos_np.errors import RelposValueError

NAME = "relpos_np"
_OTHERWISE = 'use model.set_attn_implementation("eager")'

# Arguments that the implementation computes with.
COMPUTED = frozenset({"dropout", "scaling", "is_causal", "position_bias"})

# Arguments that change nothing in what attention computes, and why.
IRRELEVANT = {
    "sliding_window": "the mask says it; eager attention does not read it, and flash attention has no mask",
    "position_ids": "already in queries, keys and the mask; flash attention reads packed sequences from them",
    "max_length_q": "sizes of flash attention's launch, beside cu_seq_lens_q",
    "max_length_k": "sizes of flash attention's launch, beside cu_seq_lens_k",
    "deterministic": "which of flash attention's backward passes runs; here every one is deterministic",
    "output_hidden_states": "the model's own work; attention has nothing to do with it",
    "output_router_logits": "of a mixture of experts",
    "num_items_in_batch": "divides the loss",
    "use_cache": "the cache was read and written before attention",
    "return_dict": "the form of the model's answer",
    "grid_thw": "sizes of images: read by encodings of positions, and by no attention",
    "logits_to_keep": "which states the model's head reads",
    "cache_position": "already in the mask and in the cache",
}


@dataclass(frozen=True)
class Option:
    """Arguments that an option of `relpos_np.attention` means.

    Attributes
    ----------
    name : str
        The option.
    arguments : tuple of str
        The arguments; one without the others is refused.
    read : callable
        From the arguments, in this order, to the option.
    """

    name: str
    arguments: tuple[str, ...]
    read: Callable[..., Any] = lambda value: value


def _per_query(sinks: Any) -> Any:
    """Sinks of each query, which stand beside the scores as one more column."""
    if sinks.ndim != 4 or sinks.shape[-1] != 1:
        raise RelposValueError(f"sinks: expected shape (B, H, L_q, 1), found {tuple(sinks.shape)}")
    return sinks.squeeze(-1)


# Arguments with an option of the same meaning.
OPTIONS = {
    argument: option
    for option in (
        Option("softcap", ("softcap",)),
        Option("sinks", ("s_aux",)),
        Option("sinks", ("sinks",), _per_query),
        Option("selected", ("indices",)),
        Option("precision", ("precision",)),
        Option("segments", ("cu_seq_lens_q", "cu_seq_lens_k"), lambda queries, keys: (queries, keys)),
    )
    for argument in option.arguments
}

# Arguments that no option means. Any name in no table is refused too: these are known, and decided.
REFUSED = {
    "block_indices": "selected blocks of keys",
    "cache": "keys and values in pages",
    "seq_idx": "packed sequences, by index",
}

# Attributes of a module that an eager attention function reads, and what becomes of them.
ATTRIBUTES = {
    "num_key_value_groups": "the numbers of heads say it; both are compared",
    "head_dim": "the default of the scale; compared with the query's",
    "training": "whether dropout is on, as in eager attention",
    "sinks": "given as s_aux too, or None; refused where they are not",
}


def _refuse(module: Any, name: str, found: str) -> RelposValueError:
    return RelposValueError(
        f"{name}: {type(module).__name__} {found}, and attention implementation {NAME!r} does not have it; {_OTHERWISE}"
    )


def options(module: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `relpos_np.attention` that a model's further arguments mean; an error for any not known."""
    if given.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise RelposValueError(
            f"output_attentions: attention implementation {NAME!r} never holds the probabilities; {_OTHERWISE}"
        )
    wanted: dict[str, Option] = {}
    for name, value in given.items():
        if value is None or name in IRRELEVANT or name == "output_attentions":
            continue
        option = OPTIONS.get(name)
        if option is None:
            known = f" ({REFUSED[name]})" if name in REFUSED else ""
            raise _refuse(module, name, f"asks for it{known}")
        if wanted.setdefault(option.name, option) is not option:
            raise _refuse(module, name, f"asks for it and for {wanted[option.name].arguments[0]}")
    found = {}
    for option in wanted.values():
        values = {argument: given.get(argument) for argument in option.arguments}
        for name, value in values.items():
            if value is None:
                raise _refuse(module, name, f"asks for {', '.join(option.arguments)} and gives None here")
        found[option.name] = option.read(*values.values())
    return found


def check_module(module: Any, query: Any, key: Any, scaling: float | None, given: Mapping[str, Any]) -> None:
    """Refuse a module whose own eager attention reads what is not known here, or whose heads do not fit."""
    name = type(module).__name__
    if query.ndim != 4 or key.ndim != 4:
        raise RelposValueError(f"query: expected (B, H, L, D), found {tuple(query.shape)} in {name}; {_OTHERWISE}")
    groups = getattr(module, "num_key_value_groups", 1)
    if query.shape[1] != key.shape[1] * groups:
        raise RelposValueError(
            f"num_key_value_groups: {name} has {groups}, with {query.shape[1]} heads of queries and {key.shape[1]} "
            "of keys"
        )
    head_dim = getattr(module, "head_dim", query.shape[-1])
    if scaling is None and head_dim != query.shape[-1]:
        raise RelposValueError(f"head_dim: {name} has {head_dim}, and queries {query.shape[-1]}: the scale is unknown")
    for function in eager(type(module)):
        for attribute in sorted(_reads(function)):
            known = attribute in ATTRIBUTES and (attribute != "sinks" or given.get("s_aux") is not None)
            if not known and getattr(module, attribute, None) is not None:
                raise _refuse(module, f"module.{attribute}", f"({function.__name__}) reads it")


def eager(cls: Any) -> tuple[Callable[..., Any], ...]:
    """The eager attention functions beside a class."""
    return _eager_in(cls.__module__)


@lru_cache(maxsize=1024)
def _eager_in(name: str) -> tuple[Callable[..., Any], ...]:
    beside = vars(sys.modules[name])
    return tuple(x for name, x in beside.items() if "eager_attention_forward" in name and inspect.isfunction(x))


@lru_cache(maxsize=1024)
def _reads(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the module's attributes that an eager attention function reads."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # defined where there is no file
        return frozenset()
    module, *_ = inspect.signature(function).parameters
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == module:
                found.add(attribute)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id=name), ast.Constant(value), *_]):
                if name == module:
                    found.add(str(value))
    return frozenset(found)
