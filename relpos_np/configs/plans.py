"""What a layer has before there are weights: its schemes, a temperature, a rule of what is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import numpy as np

from relpos_np._contract import check, problem, rules
from relpos_np.errors import RelposValueError
from relpos_np.formulas.temperature import query_temperature
from relpos_np.schemes.registry import SCHEMES
from relpos_np.types import Array, Int64

_CLASSES = {info.cls.__name__: info.cls for info in SCHEMES.values()}


@dataclass(frozen=True, slots=True)
class Given:
    """What a scheme is made of: the plan's options, arrays from the state dict, a call's lengths and other inputs.

    `places` are the positions of its queries, and `reach` is one more than the last position of a query or a key.
    """

    options: Mapping[str, Any]
    arrays: Mapping[str, Array]
    q_len: int
    k_len: int
    places: Int64
    reach: int
    head_dim: int
    dtype: np.dtype[Any]
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class SchemePlan:
    """A scheme that a layer has.

    Attributes
    ----------
    scheme : str
        Name of the class in `relpos_np`.
    options : mapping
        Arguments of its constructor that the configuration decides.
    weights : mapping
        What is read from a state dict: names there, without the model's prefix, by names of arguments. Of several
        names, which versions of the model's code gave, the first that is found.
    inputs : tuple of str
        What a call must give besides q, k and v.
    optional : tuple of str
        What it may give.
    remark : str
        What to mind.
    make : callable
        From a `Given` to the scheme; by default the class is called with options and arrays.
    varies : bool
        Whether it is another scheme for other lengths or inputs.
    """

    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    remark: str = ""
    make: Callable[[Given], Any] | None = field(default=None, repr=False)
    varies: bool = False

    def build(self, given: Given) -> Any:
        """The scheme itself.

        Parameters
        ----------
        given : Given
            What it is made of.

        Returns
        -------
        scheme or absolute encoding
            For ``position=``, or for inputs.
        """
        if self.make is not None:
            return self.make(given)
        return _CLASSES[self.scheme](**given.options, **given.arrays)

    def words(self) -> str:
        """The scheme and its arguments as one would write them.

        Returns
        -------
        str
            Weights by their names in brackets, arrays by their shapes.
        """
        parts = [f"{name}={_short(value)}" for name, value in self.options.items()]
        parts += [f"{name}=[{first(path)}]" for name, path in self.weights.items()]
        return f"{self.scheme}({', '.join(parts)})"

    def as_dict(self) -> dict[str, Any]:
        """The plan as what JSON can say.

        Returns
        -------
        dict
            Names of attributes to values, arrays as lists.
        """
        found = {
            "scheme": self.scheme,
            "options": {name: _plain(x) for name, x in self.options.items()},
            "weights": {name: first(path) for name, path in self.weights.items()},
            "inputs": list(self.inputs),
        }
        return found | ({"remark": self.remark} if self.remark else {})


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor on the query that grows with its position, see `relpos_np.reference.query_temperature`.

    Attributes
    ----------
    variant : str
        Whose formula.
    length, strength : float
        Its numbers.
    """

    variant: str
    length: float
    strength: float

    def factors(self, positions: Array) -> Array:
        """The factors of some positions.

        Parameters
        ----------
        positions : ndarray of int
            Positions of queries.

        Returns
        -------
        ndarray of float64
            In their shape.
        """
        return query_temperature(positions, **asdict(self))

    def words(self) -> str:
        """The temperature as one would write it.

        Returns
        -------
        str
            The formula's name and its numbers.
        """
        return f"query_temperature(variant={self.variant!r}, length={self.length:g}, strength={self.strength:g})"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of which keys are seen.

    Attributes
    ----------
    name : str
        Its class in `relpos_np`.
    options : mapping
        Its arguments that the configuration decides.
    inputs : mapping
        Its other arguments to names of what every call gives.
    most : int or None
        The largest number that these may hold.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None

    def build(self, inputs: Mapping[str, Any]) -> problem.Rule:
        """The rule itself.

        Parameters
        ----------
        inputs : mapping
            What a call gives.

        Returns
        -------
        rule
            For ``rule=``.

        Raises
        ------
        RelposError
            If an input is larger than it may be, or does not fit the rule.
        """
        for name in self.inputs.values() if self.most is not None else ():
            if (largest := check.integers(name, inputs[name]).max(initial=0)) > self.most:
                raise RelposValueError(f"{name}: expected at most {self.most}, found {largest}")
        given = {argument: inputs[name] for argument, name in self.inputs.items()}
        made: problem.Rule = getattr(rules, self.name)(**self.options, **given)
        return made

    def words(self) -> str:
        """The rule as one would write it.

        Returns
        -------
        str
            Its class and its arguments.
        """
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in {**self.options, **self.inputs}.items())})"


def first(name: str | tuple[str, ...]) -> str:
    """The name of a weight, of several that versions gave the first."""
    return name if isinstance(name, str) else name[0]


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<{'x'.join(map(str, value.shape))}>"
    if is_dataclass(value):
        return "..."
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
