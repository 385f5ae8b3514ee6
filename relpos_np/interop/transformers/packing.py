"""Tokens of a padded batch without the padding, one sequence after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from relpos_np.errors import RelposValueError

# How many packed passes run in all threads: without one nobody asks for the variable, which compilers cannot trace.
_passes = 0
_lock = threading.Lock()
# Of the model that runs in this thread.
_of_model: ContextVar[Packing | None] = ContextVar("relpos_np_packing", default=None)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of a batch are.

    Attributes
    ----------
    shape : tuple of int
        (B, L) of the padded batch.
    index : torch.Tensor of int, shape (T,)
        Of each token among the B L of the batch.
    bounds : torch.Tensor of int, shape (B + 1,)
        Cumulative numbers of tokens: the segments of attention.
    """

    shape: tuple[int, int]
    index: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, attention_mask: Any, tokens: torch.Tensor) -> Packing:
        """What an attention mask says, or that there is no padding."""
        batch, length = tokens.shape[:2]
        if attention_mask is None:
            attention_mask = torch.ones((batch, length), dtype=torch.bool, device=tokens.device)
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != (batch, length):
            found = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
            raise RelposValueError(f"attention_mask: expected shape {(batch, length)}, found {found}")
        real = attention_mask.bool()
        begins = real.clone()
        begins[:, 1:] &= ~real[:, :-1]
        if bool((begins.sum(1) > 1).any()):
            raise RelposValueError(
                "attention_mask: expected the tokens of each sequence side by side, found padding between them"
            )
        bounds = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        return cls((batch, length), real.flatten().nonzero().squeeze(1), bounds)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, L, ...) as one row (1, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """The row as a batch, with zeros where padding is."""
        rows = x.new_zeros((self.shape[0] * self.shape[1], *x.shape[2:]))
        return rows.index_copy(0, self.index, x.squeeze(0)).unflatten(0, self.shape)

    def positions(self) -> torch.Tensor:
        """Positions (1, T) of tokens within their sequences."""
        lengths = self.bounds.diff()
        starts = torch.repeat_interleave(self.bounds[:-1], lengths)
        return (torch.arange(len(self.index), device=self.index.device) - starts).unsqueeze(0)

    def unpack_all(self, found: Any) -> Any:
        """A model's answer, with every row of vectors in it as a batch."""
        if isinstance(found, ModelOutput):
            for name, x in found.items():
                found[name] = self.unpack_all(x)
        elif isinstance(found, tuple):
            return tuple(self.unpack_all(x) for x in found)
        elif isinstance(found, torch.Tensor) and found.ndim == 3 and found.shape[:2] == (1, len(self.index)):
            return self.unpack(found)
        return found

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """For a forward pass of a model, whose masks have the segments then."""
        global _passes  # noqa: PLW0603  (no attribute, so that compilers can ask for it)
        with _lock:
            _passes += 1
        before = _of_model.set(self)
        try:
            yield
        finally:
            _of_model.reset(before)
            with _lock:
                _passes -= 1


def of_model() -> Packing | None:
    """That of the model which runs in this thread, if it has one."""
    return _of_model.get() if _passes else None
