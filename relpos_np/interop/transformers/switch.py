"""Methods of one model that are replaced in the forward passes that ask for it, and in no other."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from relpos_np.errors import RelposValueError
from relpos_np.interop.torch import outside_graphs
from relpos_np.interop.transformers.asked import NAME, eager


@dataclass(frozen=True)
class Positions:
    """What a patched model hands from layer to layer in place of a bias per pair."""

    scheme: Any
    offset: int | None = None


@dataclass(eq=False)
class Switch:
    """What one model has in place of its own methods.

    Replacements lie in the model while anybody uses them, and do nothing unless the switch is on in the thread that
    calls. So a forward pass that began before, or runs in another thread, is its own from beginning to end.
    """

    places: list[tuple[Any, str]] = field(default_factory=list)
    configs: list[tuple[Any, str]] = field(default_factory=list)
    users: int = 0
    permanent: bool = False

    @property
    def on(self) -> bool:
        """Whether forward passes that begin now, in this thread, run on this library."""
        return self.permanent or self in _on.get()


_KEY = "_relpos_np_switch"
_lock = threading.Lock()
_on: ContextVar[tuple[Switch, ...]] = ContextVar("relpos_np_patched", default=())
# By identity of the configuration: whose it is now, and the implementation it had.
_switched: dict[int, tuple[Switch, str]] = {}


@dataclass(eq=False)
class _Either:
    """A method of one module: the replacement where the switch is on, else its own."""

    switch: Switch
    module: Any
    method: str
    replacement: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.switch in _on.get():
            return self.replacement(self.module, *args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)


@dataclass(eq=False)
class _Whole:
    """The forward pass of a model that is patched for good: with the switch on from its beginning to its end."""

    switch: Switch
    root: Any
    model: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self.model).forward
        with _lock:
            # Otherwise it was taken away after this was looked up.
            there = self.switch.users > 0
            self.switch.users += there
        if not there:
            return own(self.model, *args, **kwargs)
        with in_use(self.root, self.switch):
            return own(self.model, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the method: generation and trainers ask for it."""
        return inspect.signature(type(self.model).forward.__get__(self.model))


def installed(model: Any, jobs: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Switch:
    """The switch of a model with one more user, and its replacements in place. `release` takes the user away."""
    with _lock:
        switch: Switch = vars(model).get(_KEY) or Switch()
        if not switch.users:
            jobs = list(jobs)
            for module, method, _ in jobs:
                if method in vars(module):
                    raise RelposValueError(
                        f"model: {type(module).__name__}.{method} of this model was replaced already"
                    )
            configs = {id(x.config): x.config for x in model.modules() if isinstance(x, transformers.PreTrainedModel)}
            if taken := [type(x).__name__ for key, x in configs.items() if key in _switched]:
                raise RelposValueError(f"model: {', '.join(taken)} is that of another model that is patched already")
            for module, method, replacement in jobs:
                setattr(module, method, _Either(switch, module, method, replacement))
                switch.places.append((module, method))
            for key, config in configs.items():
                own = config._attn_implementation
                _switched[key] = (switch, own)
                switch.configs.append((config, own))
                config._attn_implementation_internal = NAME
            vars(model)[_KEY] = switch
        switch.users += 1
    return switch


def release(model: Any, switch: Switch) -> None:
    """One user less; after the last, all is as it was."""
    with _lock:
        switch.users -= 1
        if switch.users:
            return
        for config, own in switch.configs:
            config._attn_implementation_internal = own
            _switched.pop(id(config), None)  # a copy of a patched model never had one
        for module, method in switch.places:
            delattr(module, method)
        switch.configs.clear()
        switch.places.clear()
        del vars(model)[_KEY]


@contextmanager
def turned_on(switch: Switch) -> Iterator[None]:
    """The switch on in this thread."""
    before = _on.set((*_on.get(), switch))
    try:
        yield
    finally:
        _on.reset(before)


@contextmanager
def in_use(model: Any, switch: Switch) -> Iterator[None]:
    """The switch on in this thread, with one user less at the end."""
    try:
        with turned_on(switch):
            yield
    finally:
        release(model, switch)


def make_permanent(model: Any, switch: Switch) -> None:
    """Turn the switch on for all forward passes of the model, and of the models in it, that begin from now on."""
    with _lock:
        if switch.permanent:
            raise RelposValueError(f"model: {type(model).__name__} is patched already")
        whole = [x for x in model.modules() if isinstance(x, transformers.PreTrainedModel) and "forward" not in vars(x)]
        # The model itself last: until then, a pass that begins is its own.
        for part in reversed(whole):
            part.forward = _Whole(switch, model, part)
        switch.permanent = True


def end_permanent(model: Any) -> None:
    """Take back `make_permanent`. Passes that are under way end as they began."""
    with _lock:
        switch: Switch | None = vars(model).get(_KEY)
        if switch is None or not switch.permanent:
            raise RelposValueError(f"model: {type(model).__name__} is not patched")
        for part in model.modules():
            if isinstance(vars(part).get("forward"), _Whole):
                del part.forward
        switch.permanent = False
    release(model, switch)


def replaced(module: Any) -> bool:
    """Whether this module's forward method is one that runs on this library now."""
    either = vars(module).get("forward")
    return isinstance(either, _Either) and either.switch.on


def implementation(config: Any) -> str | None:
    """Name of the attention implementation that a configuration means in this thread."""
    switch, own = _switched.get(id(config), (None, None))
    if switch is None or switch.on:
        name: str | None = getattr(config, "_attn_implementation", None)
        return name
    return own


def delegate(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that leaves passes in which the switch is off to the implementation that they had."""

    @wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = _left_to(getattr(module, "config", None))
        if own is None:
            return forward(module, *args, **kwargs)
        if own != "eager":
            return ALL_ATTENTION_FUNCTIONS[own](module, *args, **kwargs)
        functions = eager(type(module))
        if len(functions) != 1:
            raise RelposValueError(
                f"model: {type(module).__name__} of a model that another thread has patched: which of "
                f"{len(functions)} functions is its eager attention is unknown"
            )
        return functions[0](module, *args, **kwargs)

    outside: Callable[..., Any] = outside_graphs(run)
    return outside


def delegate_mask(mask_of: Callable[..., Any]) -> Callable[..., Any]:
    """`delegate` for the function that makes masks."""

    @wraps(mask_of)
    def run(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        own = _left_to(config)
        make = mask_of if own is None else ALL_MASK_ATTENTION_FUNCTIONS[own]
        return make(*args, config=config, **kwargs)

    return run


def _left_to(config: Any) -> str | None:
    """The implementation that a configuration had, where another thread has patched its model and this one has not."""
    switch, own = _switched.get(id(config), (None, None))
    return None if switch is None or switch in _on.get() or own == NAME else own
