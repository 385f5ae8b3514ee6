"""Examples by family: what an implementation supports comes in steps, the first of which is ordinary self-attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from relpos_np.errors import RelposError
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.t5 import T5
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import Example, accepted, build
from relpos_np.testing.grid import Form, Grid

FAMILIES: Mapping[str, str] = {
    "self": "self-attention: L_q = L_k > 1, H = H_kv, D = D_v, no option",
    "causal": "the same with causal=True",
    "cross": "L_q other than L_k, no option",
    "decoding": "causal, and the queries are the last of the keys",
    "windows": "a window, and one that is causal",
    "masks": "masks of bool and of floats, and key_lengths",
    "grouped_heads": "query heads that share key heads",
    "odd_sizes": "lengths and head_dim that nothing divides, and D_v other than D",
    "options": "a scale, an offset, softcap in both orders, sinks and selected keys, each alone",
    "combined": "all pairs of options, and each with key heads that are shared",
    "flags": "each choice that the scheme has beside its first one: buckets of decoders, positions, channels, blocks",
    "borders": "tables whose borders show how a scheme rounds",
    "excluded_rows": "queries that may attend no key, as with padding on the left: output 0, log-sum-exp -inf",
    "nan_excluded": "NaN in keys and values that no query may attend",
    "long": "1025 queries and keys",
    "large_scores": "scores far beyond what the exponential of float32 can hold",
    "calls": "on transposed and strided views, twice with other numbers between, with an array to write into",
    "ragged": "calls that stand for several: packed sequences, offsets by item, caches, merged keys, dropped weights",
}


def of_family(family: str, scheme: str, *, variant: str | None, dtype: Any, seed: int) -> Iterator[Example]:
    """The cases of one family, smallest first, as far as the scheme allows them."""
    for form in forms_of(family, scheme, variant, Grid()):
        found = made(form, scheme, variant, dtype, seed)
        if found is not None:
            yield found


def forms_of(family: str, scheme: str, variant: str | None, grid: Grid) -> Iterator[Form]:
    """The forms of one family, smallest first, for a scheme."""
    yield from grid.forms(family, flags(scheme, variant) if family == "flags" else ())


@cache
def flags(scheme: str, variant: str | None) -> tuple[tuple[int, ...], ...]:
    """Choices of the scheme's builder, each of which has one thing other than the first."""
    asked: list[int] = []
    build(scheme, lengths(33, 33, 32, 32), dtype=np.float32, seed=0, variant=variant, asked=asked)
    return tuple((0,) * n + (other,) for n, count in enumerate(asked) for other in range(1, count))


def made(form: Form, scheme: str, variant: str | None, dtype: Any, seed: int) -> Example | None:
    """A case, or None where the scheme has its own lengths, or does not accept the call."""
    size = lengths(form.q_len, form.k_len, form.dim, form.v_dim)
    chosen = {"heads": form.heads, "batch": (form.batch,), "choices": form.choices}
    try:
        one = build(scheme, size, dtype=dtype, seed=seed, variant=variant, **chosen)  # type: ignore[arg-type]
    except RelposError:
        return None
    (_, _, q_len, _), k_len = one.q.shape, one.k.shape[2]
    # A scheme that lies on a grid may add a class token: what matters is whether the lengths are equal, as was asked.
    if (q_len == k_len) != (form.q_len == form.k_len):
        return None
    # Of fewer queries nobody knows whether they stand at the end of all keys or of those that exist.
    placed = form.options.keys() != {"key_lengths", "offset"} or not isinstance(one.position, Plain | None)
    if "key_lengths" in form.options and q_len < k_len and placed:
        return None
    rng = np.random.default_rng([seed, q_len, k_len])
    options = {name: _option(value, form.options, one, rng) for name, value in form.options.items()}
    one = replace(one, edge=form.edge, kwargs=options, family=form.family)
    if form.arrays == "large":
        one = replace(one, q=one.q * one.q.dtype.type(64))
    elif form.arrays == "nan":
        one = _with_nan(one)
    elif form.arrays:
        bordered = _bordered(one, 38, {"near": 49, "far": 196}[form.arrays])
        if bordered is None:
            return None
        one = bordered
    return accepted(one)


def _option(value: Any, options: Mapping[str, Any], one: Example, rng: np.random.Generator) -> Any:
    """An array or a number for the lengths of a case, which leaves a key to each query unless that is the point."""
    (batch, heads, q_len, _), k_len = one.q.shape, one.k.shape[2]
    if not isinstance(value, str):
        return value
    left = max(5, k_len // 6)
    if value == "wide":
        return left, max(1, k_len // 11)
    if value == "end":
        return k_len - q_len
    if value == "middle":
        return max(3, k_len - q_len - 2)
    if value == "one":
        return rng.standard_normal(heads).astype(one.q.dtype)
    if value in ("bool", "head", "row"):
        mask = rng.random((batch, heads if value == "head" else 1, q_len, k_len)) < 0.7
        mask[..., 0] = True
        at = np.arange(q_len)
        mask[..., at, np.clip(at + _first(options, q_len, k_len), 0, k_len - 1)] = True
        if value == "row":
            mask[:, :, q_len // 2] = False
        return mask
    if value == "keys":
        mask = rng.random((batch, 1, 1, k_len)) < 0.7
        mask[..., 0] = True
        return mask
    if value == "float":
        mask = np.where(rng.random((q_len, k_len)) < 0.2, -np.inf, rng.standard_normal((q_len, k_len)))
        at = np.arange(q_len)
        mask[:, 0] = mask[at, np.clip(at + _first(options, q_len, k_len), 0, k_len - 1)] = 0.5
        return mask.astype(one.q.dtype)
    if value == "left":
        return (np.arange(k_len) >= np.arange(batch)[:, None] * (k_len // (2 * batch)))[:, None, None]
    if value == "some" and "selected" in options:
        # In any order, fewer than there are, some of them none.
        found = np.argsort(rng.random((batch, q_len, k_len)), axis=-1)[..., : max(2, k_len // 3)]
        found[..., 1:][rng.random(found[..., 1:].shape) < 0.2] = -1
        return found
    if value == "last":
        return np.broadcast_to(np.arange(k_len) < k_len - 2, (batch, 1, q_len, k_len)).copy()
    if value == "none":
        return np.arange(batch) * k_len // max(1, batch - 1)
    # With a window the last query must reach one of the keys.
    fewest = k_len - left // 2 if "window" in options else k_len // 2
    return np.linspace(fewest, k_len - 1, batch).astype(np.int64)


def _first(options: Mapping[str, Any], q_len: int, k_len: int) -> int:
    """The position of the first query."""
    return max(3, k_len - q_len - 2) if "offset" in options else k_len - q_len


def _with_nan(one: Example) -> Example:
    """NaN where no query looks."""
    k, v, k_len = one.k.copy(), one.v.copy(), one.k.shape[2]
    batch = len(one.q)
    for b, length in enumerate(one.kwargs.get("key_lengths", np.full(batch, k_len - 2))):
        k[b, :, length:] = v[b, :, length:] = np.nan
    return replace(one, k=k, v=v)


def _bordered(one: Example, buckets: int, max_distance: int) -> Example | None:
    """T5 with buckets that have a border exactly at a whole distance, which float32 rounds to the other side."""
    if not isinstance(one.position, T5):
        return None
    table = np.random.default_rng(buckets).standard_normal((buckets, one.q.shape[1])).astype(one.q.dtype)
    position = T5(
        table,
        max_distance=max_distance,
        bidirectional=one.position.bidirectional,
        rounding=one.position.rounding,
    )
    return replace(one, position=position)
