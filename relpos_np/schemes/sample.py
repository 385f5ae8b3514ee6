"""What seeded calls of a scheme are made of: lengths, numbers and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relpos_np.types import Array

Choice = TypeVar("Choice")


@dataclass(eq=False)
class Sample:
    """A source of numbers, and the lengths, variant and choices of one call.

    `heads` are those of queries and keys, or None: the scheme's example has those that it likes. `choices` are answers
    of `pick`, one after the other; an example has none, and takes the first of everything. `asked` keeps how many
    answers there were to each.
    """

    normal: Callable[..., Array]
    q_len: int
    k_len: int
    dim: int
    v_dim: int
    grid: tuple[int, int]
    frames: tuple[int, int] = (3, 2)
    variant: Any = None
    batch: tuple[int, ...] = (2,)
    heads: tuple[int, int] | None = None
    choices: Iterable[int] = ()
    asked: list[int] = field(init=False, repr=False, default_factory=list)
    _left: Iterator[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._left = iter(self.choices)

    def pick(self, first: Choice, *others: Choice) -> Choice:
        """The first of some choices in an example; any of them in a generated call."""
        self.asked.append(1 + len(others))
        return (first, *others)[next(self._left, 0) % (1 + len(others))]

    def operands(self, heads: int, kv_heads: int, q_len: int | None = None, k_len: int | None = None) -> dict[str, Any]:
        """Seeded q, k and v, with the sample's lengths unless others are given, and its heads unless it has none."""
        heads, kv_heads = self.heads or (heads, kv_heads)
        q_len, k_len = self.q_len if q_len is None else q_len, self.k_len if k_len is None else k_len
        return {
            "q": self.normal(*self.batch, heads, q_len, self.dim),
            "k": self.normal(*self.batch, kv_heads, k_len, self.dim),
            "v": self.normal(*self.batch, kv_heads, k_len, self.v_dim),
        }


# To the fields of an `Example`: operands, the scheme as `position`, and `kwargs` of the call.
Builder = Callable[[Sample], dict[str, Any]]


def encoded(x: Array, encoding: Callable[[Array], Array]) -> dict[str, Any]:
    """What the example of an absolute encoding consists of: its inputs, encoded as one head."""
    y = encoding(x)[..., None, :, :].astype(x.dtype, copy=False)
    return {"q": y, "k": y, "v": y, "position": None, "x": x, "encoding": encoding}
