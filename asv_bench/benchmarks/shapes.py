"""The cases of `relpos bench`, and what only benchmarks need of them: gradients, products of rel_shift, selections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

import relpos_np as rp

from . import cases
from .cases import SHAPES, SMALL, Shape, lacking, narrow, wide

__all__ = ["BACKWARD", "SHAPES", "SMALL", "TRACKED", "Case", "Shape", "as_mapping", "case", "lacking", "make", "wide"]

# Products of queries with distances for rel_shift: (heads, L_q, columns) for "conformer", 2048 queries and keys.
SHIFTED = (8, 2048, 4095)
# What asv follows from commit to commit.
TRACKED = (*"ABCDEFGH", "Hb", "Bb", "Db", "I", "J", "L", "N", "O")
BACKWARD = ("A", "B", "D", "E", "F", "G")
# Largest error of rounding to a storage, in proportion to the number: half a unit in the last place.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Case(cases.Case):
    """A case with gradients."""

    def attention_vjp(self, **options: Any) -> Any:
        """The call with gradients."""
        return rp.attention_vjp(self.q, self.k, self.v, grad_out=self.grad_out, **self.kwargs, **options)

    @cached_property
    def grad_out(self) -> np.ndarray:
        """Seeded gradient of the output; in all these shapes D_v is D."""
        drawn = np.random.default_rng(2).standard_normal(self.q.shape, dtype=np.float32)
        return narrow(np.asarray(drawn), self.shape.storage)

    @property
    def backward_operations(self) -> int:
        """`operations` of attention_vjp, which runs the call, computes scores again, and has two products for each."""
        s = self.shape
        on_keys, on_values = self._position_products()
        # Products with keys and their tables: forward, again, and the gradients of both factors. Those with
        # values: forward, and the gradients of both factors.
        one = 4 * (2 * self.pairs * s.head_dim + on_keys) + 3 * (2 * self.pairs * s.head_dim + on_values)
        return s.batch * s.heads * one

    @property
    def bytes(self) -> int:
        """Memory that the operands and the result take: all of it must be moved once."""
        return self.q.nbytes + self.k.nbytes + self.v.nbytes + self.q.nbytes

    def exact_gradients(self) -> dict[str, np.ndarray]:
        """Gradients by the reference in float64."""
        q, k, v, gradient = (wide(x).astype(np.float64) for x in (self.q, self.k, self.v, self.grad_out))
        return as_mapping(rp.attention_vjp(q, k, v, grad_out=gradient, backend="numpy", **self.kwargs))

    def gradient_error(
        self, gradients: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray] | None = None
    ) -> float:
        """Largest deviation of a gradient from float64, in proportion to its largest entry."""
        exact = self.exact_gradients() if exact is None else exact
        return max(float(np.abs(np.asarray(gradients[n]) - x).max() / np.abs(x).max()) for n, x in exact.items())


def as_mapping(gradient: Any) -> dict[str, np.ndarray]:
    """Gradients by name: q, k, v, and the scheme's arrays behind the word position."""
    own = {f"position {name}": x for name, x in gradient.position.items()}
    return {"q": gradient.q, "k": gradient.k, "v": gradient.v, **own}


def make(shape: Shape) -> Case:
    """A shape's case: the same numbers every time."""
    made = cases.make(shape)
    return Case(made.shape, made.q, made.k, made.v, made.arrays)


def case(name: str) -> Case:
    """The case of a shape's name."""
    return make((SHAPES | SMALL)[name])


def small(name: str) -> Case:
    """A small case of the same kind and storage."""
    like = SHAPES[name]
    kind = like.kind, like.storage, like.shortest is None
    return next(make(s) for s in SMALL.values() if (s.kind, s.storage, s.shortest is None) == kind)


def products(variant: str = "conformer") -> np.ndarray:
    """Seeded products of queries with distances."""
    sizes = SHIFTED if variant == "conformer" else (*SHIFTED[:2], SHIFTED[1])
    return np.random.default_rng(0).standard_normal(sizes, dtype=np.float32)
