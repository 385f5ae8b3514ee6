"""What a layer does to its queries, keys and values before attention, and to the output after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from relpos_np.configs.plans import SchemePlan

_OPERANDS = {"q": "q", "k": "k", "v": "v", "o": "the output"}


def _listed(letters: str) -> str:
    """Operands by their letters, as one says them."""
    *others, last = (_OPERANDS[letter] for letter in letters)
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of some operands.

    Attributes
    ----------
    names : tuple of str
        Modules below the layer's attention that hold the weights, one for each operand; () for a norm without weights.
    of : str
        The operands: letters of q, k and v, or o for the output.
    kind : {"rms", "layer"}
        Division by the root mean square, or by the deviation from the mean.
    each : bool
        Whether every head is normed by itself, or all together.
    eps : float
        What is added to the mean of the squares.
    shift : float
        What is added to the weights as they are stored.
    """

    names: tuple[str, ...] = ("q_norm", "k_norm")
    of: str = "qk"
    kind: Literal["rms", "layer"] = "rms"
    each: bool = True
    eps: float = 1e-6
    shift: float = 0.0

    def __str__(self) -> str:
        kind = "RMS" if self.kind == "rms" else "layer"
        where = "per head" if self.each else "over all heads"
        weights = f"{', '.join(self.names)}{f' plus {self.shift:g}' if self.shift else ''}" or "no weights"
        return f"{kind} norm of {_listed(self.of)}, {where} ({weights}; eps {self.eps:g})"


@dataclass(frozen=True, slots=True)
class Clip:
    """Queries, keys and values within a limit on both sides."""

    limit: float

    def __str__(self) -> str:
        return f"q, k and v clipped to ±{self.limit:g}"


@dataclass(frozen=True, slots=True)
class Times:
    """Keys or values with a factor, which `key` of the configuration stores."""

    of: Literal["k", "v"]
    factor: float
    key: str

    def __str__(self) -> str:
        return f"{self.of} times {self.factor:g} ({self.key})"


@dataclass(frozen=True, slots=True)
class Latent:
    """Keys and values from latent vectors, and queries perhaps too: sizes, and factors on both kinds of vectors.

    The turning channels of a key are the same for all heads, and come from the layer's input.
    """

    rank: int
    turning: int
    query_factor: float = 1.0
    factor: float = 1.0
    eps: float = 1e-6

    def __str__(self) -> str:
        words = "keys and values from their latent vectors, the turning channels of a key the same for all heads"
        if self.query_factor == self.factor == 1:
            return words
        return f"{words}; q times {self.query_factor:g} and the latent vectors times {self.factor:g}"


@dataclass(frozen=True, slots=True)
class KeysAsValues:
    """Values are what the projection of the keys makes."""

    def __str__(self) -> str:
        return "v is what k_proj makes"


@dataclass(frozen=True, slots=True)
class Gate:
    """The output times a gate, which a projection makes of the layer's input.

    Attributes
    ----------
    name : str
        The projection, to one number per head or per channel; that of the queries may make both, head by head.
    bias : str
        A number per head that is stored apart; "" for none.
    activation : {"sigmoid", "softplus"}
        What makes factors of its numbers.
    """

    name: str
    bias: str = ""
    activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def __str__(self) -> str:
        beside = ", which makes both queries and gates" if self.name == "q_proj" else ""
        bias = f" plus {self.bias}" if self.bias else ""
        return f"the output times the {self.activation} of {self.name} of the layer's input{bias}{beside}"


@dataclass(frozen=True, slots=True)
class TurnedInputs:
    """The inputs of the projections of queries and keys turn, see `relpos_np.reference.rotate_inputs`."""

    base: float

    def __str__(self) -> str:
        return f"inputs of the projections of q and k turned, rp.reference.rotate_inputs with base {self.base:g}"


@dataclass(frozen=True, slots=True)
class Turned:
    """Queries and keys turn before other steps: a norm with weights that comes after cannot be exchanged with it."""

    plan: SchemePlan

    def __str__(self) -> str:
        return f"q and k turned, {self.plan.words()}"


@dataclass(frozen=True, slots=True)
class KeysOf:
    """Keys and values are those of an earlier layer."""

    layer: int

    def __str__(self) -> str:
        return f"k and v are those of layer {self.layer}, which has the same positions"


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of a layer and not done by `LayerAttention.run`."""

    text: str

    def __str__(self) -> str:
        return self.text


Step: TypeAlias = Norm | Clip | Times | Latent | KeysAsValues | TurnedInputs | Turned | KeysOf | Told
Finish: TypeAlias = Norm | Gate
