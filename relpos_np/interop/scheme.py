"""A scheme whose arrays belong to a package that trains them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from relpos_np._contract.options import ForeignOptions
from relpos_np.errors import RelposTypeError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array


class TensorOptions(ForeignOptions, total=False):
    """What a call of a package takes beside its operands: all that may be tensors, and all that may not."""

    position: Any
    mask: Any
    key_lengths: Any
    selected: Any
    query_scale: Any
    sinks: Any
    segments: Any
    offset: Any


class Trained:
    """A scheme whose arrays are another package's: what `trained` returns.

    Attributes
    ----------
    cls : type
        Class of the scheme.
    tensors : dict
        Tensors, by the name of the argument.
    settings : dict
        All other arguments.
    """

    def __init__(self, cls: type, tensors: dict[str, Any], settings: dict[str, Any]) -> None:
        self.cls, self.tensors, self.settings = cls, tensors, settings

    @classmethod
    def of(cls, scheme: Any, args: Any, kwargs: Any, is_tensor: Callable[[str, Any], bool]) -> Trained:
        """Sort the arguments of a scheme's class into tensors and settings.

        Parameters
        ----------
        scheme : type
            The class.
        args, kwargs
            What it would be called with.
        is_tensor : callable
            Says for the name and value of an argument whether it is a tensor.

        Returns
        -------
        Trained
            The scheme, with its tensors apart.

        Raises
        ------
        RelposTypeError
            If it is no scheme, or cannot be called like that.
        """
        if not (isinstance(scheme, type) and issubclass(scheme, Scheme)):
            raise RelposTypeError(f"scheme: expected the class of a scheme, such as relpos_np.T5, found {scheme!r}")
        try:
            given = inspect.signature(scheme).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise RelposTypeError(f"scheme: {scheme.__name__} cannot be called like that: {error}") from error
        tensors = {name: x for name, x in given.items() if is_tensor(name, x)}
        return cls(scheme, tensors, {name: x for name, x in given.items() if name not in tensors})

    def __repr__(self) -> str:
        parts = [f"{name}={tuple(x.shape)}" for name, x in self.tensors.items()]
        parts += [f"{name}={value!r}" for name, value in self.settings.items()]
        return f"trained({self.cls.__name__}, {', '.join(parts)})"


def made(positions: tuple[Any, ...], arrays: Iterable[Array]) -> tuple[Any, ...]:
    """Schemes as the library takes them, with these arrays in the order of the tensors that they replace."""
    left = iter(arrays)
    return tuple(
        x.cls(**{name: next(left) for name in x.tensors}, **x.settings) if isinstance(x, Trained) else x
        for x in positions
    )


def tensors(positions: tuple[Any, ...]) -> list[Any]:
    """All tensors of a call's schemes, in their order."""
    return [x for position in positions if isinstance(position, Trained) for x in position.tensors.values()]


def gradients(positions: tuple[Any, ...], found: tuple[dict[str, Array], ...]) -> list[Array | None]:
    """The gradient of each of them, None where there is none."""
    pairs = zip(positions, found, strict=True)
    return [
        arrays.get(name) for position, arrays in pairs if isinstance(position, Trained) for name in position.tensors
    ]


def as_tuple(position: Any) -> tuple[Any, ...]:
    """The argument `position` as a tuple."""
    return () if position is None else position if isinstance(position, tuple) else (position,)
