"""Which layers of a model run on this library, and which do not."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import transformers

from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.interop.transformers.asked import NAME
from relpos_np.interop.transformers.switch import implementation, replaced


@dataclass(frozen=True)
class Used:
    """Names of a model's attention layers, as `torch.nn.Module.named_modules` gives them.

    Attributes
    ----------
    here : tuple of str
        Those that run on this library.
    elsewhere : tuple of str
        All others: of another implementation, or with attention of their own, which transformers' interface does not
        reach.
    """

    here: tuple[str, ...]
    elsewhere: tuple[str, ...]


def check_model(model: Any) -> None:
    """Refuse what is no model of transformers."""
    if not isinstance(model, transformers.PreTrainedModel):
        raise RelposTypeError(f"model: expected a model of transformers, found {type(model).__name__}")


def used(model: Any) -> Used:
    """Which attention layers of a model run on this library, as it is set up now.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model after ``set_attn_implementation``, `patch`, or inside of a ``with patched(model)`` block.

    Returns
    -------
    Used
        A layer is a module whose class calls transformers' interface, or that is named attention and contains no such
        module. Whether a forward pass reaches it depends on its inputs.

    Raises
    ------
    RelposTypeError
        If it is not a model of transformers.
    """
    layers = _layers(model)
    here = [name for name, module in layers.items() if _runs_here(module)]
    return Used(tuple(here), tuple(name for name in layers if name not in set(here)))


def check_used(model: Any) -> None:
    """Refuse a model of which no layer would run here if the implementation were set."""
    layers = _layers(model)
    if not any(calls_interface(type(module)) for module in layers.values()):
        kinds = ", ".join(sorted({type(module).__name__ for module in layers.values()})) or "no attention"
        raise RelposValueError(
            f"model: {type(model).__name__} has {kinds}: nothing goes through transformers' interface, so that "
            f"{NAME!r} would do nothing; relpos_np.interop.transformers.patched knows MPNet and BLOOM"
        )


def _layers(model: Any) -> dict[str, Any]:
    """Attention modules by name: the innermost of those named so, and all that call the interface."""
    check_model(model)
    named = {
        name: module
        for name, module in model.named_modules()
        if calls_interface(type(module)) or re.search("Attention|Attn", type(module).__name__)
    }
    # A module around others that are attention themselves only projects and adds.
    outer = {name[: at.start()] for name in named for at in re.finditer(r"\.|$", name) if name[: at.start()] != name}
    return {name: x for name, x in named.items() if calls_interface(type(x)) or name not in outer}


def _runs_here(module: Any) -> bool:
    return replaced(module) or (
        calls_interface(type(module)) and implementation(getattr(module, "config", None)) == NAME
    )


def calls_interface(cls: Any) -> bool:
    """Whether a method of a class looks up transformers' interface."""
    # Every model has methods that ask which implementations there are.
    own = (base for base in cls.__mro__ if base not in transformers.PreTrainedModel.__mro__)
    methods = (x for base in own for x in vars(base).values() if inspect.isfunction(x))
    return any("ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(x).__code__.co_names for x in methods)
