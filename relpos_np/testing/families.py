"""Examples by family: what an implementation supports comes in steps, the first of which is ordinary self-attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relpos_np.errors import RelposError
from relpos_np.schemes.t5 import T5
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import Example, accepted, build

FAMILIES: Mapping[str, str] = {
    "self": "self-attention: L_q = L_k > 1, H = H_kv, D = D_v, no option",
    "causal": "the same with causal=True",
    "cross": "L_q other than L_k, no option",
    "decoding": "causal, and the queries are the last of the keys",
    "windows": "a window, and one that is causal",
    "masks": "masks of bool and of floats, and key_lengths",
    "grouped_heads": "query heads that share key heads",
    "odd_sizes": "lengths and head_dim that nothing divides, and D_v other than D",
    "borders": "tables whose borders show how a scheme rounds",
    "excluded_rows": "queries that may attend no key: output 0, log-sum-exp -inf",
    "nan_excluded": "NaN in keys and values that no query may attend",
    "long": "1023 queries and keys",
    "large_scores": "scores far beyond what the exponential of float32 can hold",
}


@dataclass(frozen=True)
class _Form:
    """One case: its name, its sizes, its options, and whether something is done to its arrays."""

    edge: str
    q_len: int
    k_len: int
    dim: int = 8
    v_dim: int = 8
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: str = ""


def _square(family: str, *sizes: int, **more: Any) -> list[_Form]:
    return [_Form(f"{family}_{n}", n, n, **more) for n in sizes]


# The smallest first. Strings among the options stand for arrays, which `_option` makes for the lengths of the case.
_FORMS: Mapping[str, list[_Form]] = {
    "self": [*_square("self", 2, 5, 16), *_square("self", 40, batch=2)],
    "causal": [*_square("causal", 2, 5, 16, options={"causal": True})],
    "cross": [_Form("cross_5x9", 5, 9), _Form("cross_9x5", 9, 5), _Form("cross_16x40", 16, 40, batch=2)],
    "decoding": [
        _Form("decoding_1x9", 1, 9, options={"causal": True}),
        _Form("decoding_4x9", 4, 9, options={"causal": True}),
        _Form("decoding_16x40", 16, 40, batch=2, options={"causal": True}),
    ],
    "windows": [
        _Form("window_9", 9, 9, options={"window": (2, 1)}),
        _Form("window_causal_9", 9, 9, options={"window": (3, 0), "causal": True}),
        _Form("window_40", 40, 40, batch=2, options={"window": (11, 6)}),
    ],
    "masks": [
        _Form("bool_mask_5", 5, 5, options={"mask": "bool"}),
        _Form("float_mask_5", 5, 5, options={"mask": "float"}),
        _Form("key_lengths_9", 9, 9, batch=2, options={"key_lengths": "some"}),
        _Form("bool_mask_40", 40, 40, batch=2, options={"mask": "bool"}),
    ],
    "grouped_heads": [
        _Form("grouped_heads_5", 5, 5, heads=(4, 2)),
        _Form("one_key_head_5", 5, 5, heads=(4, 1)),
        _Form("grouped_heads_16", 16, 16, heads=(6, 2), batch=2),
    ],
    "odd_sizes": [
        _Form("length_1", 1, 1),
        _Form("length_7", 7, 7),
        _Form("value_dim_5", 7, 7, v_dim=5),
        _Form("dim_7", 7, 7, dim=7, v_dim=7, heads=(3, 3)),
        _Form("dim_18", 7, 7, dim=18, v_dim=18, heads=(3, 3)),
        _Form("length_63", 63, 63),
        _Form("length_65", 65, 65, batch=2),
    ],
    "borders": [_Form("borders_24", 24, 24), _Form("borders_64", 64, 64)],
    "excluded_rows": [
        _Form("no_keys_mask_5", 5, 5, options={"mask": "row"}),
        _Form("no_keys_5", 5, 5, batch=2, options={"key_lengths": "none"}),
    ],
    "nan_excluded": [
        _Form("nan_mask_5", 5, 5, options={"mask": "last"}, arrays="nan"),
        _Form("nan_9", 9, 9, batch=2, options={"key_lengths": "some"}, arrays="nan"),
    ],
    "long": _square("long", 1023),
    "large_scores": _square("large_scores", 16, 40, arrays="large"),
}


def of_family(family: str, scheme: str, *, variant: str | None, dtype: Any, seed: int) -> Iterator[Example]:
    """The cases of one family, smallest first, as far as the scheme allows them."""
    for form in _FORMS[family]:
        found = _made(form, scheme, variant, dtype, seed)
        if found is not None:
            yield replace(found, family=family)


def _made(form: _Form, scheme: str, variant: str | None, dtype: Any, seed: int) -> Example | None:
    """A case, or None where the scheme has its own lengths, or does not accept the call."""
    size = lengths(form.q_len, form.k_len, form.dim, form.v_dim)
    try:
        one = build(scheme, size, dtype=dtype, seed=seed, variant=variant, heads=form.heads, batch=(form.batch,))
    except RelposError:
        return None
    (_, _, q_len, _), k_len = one.q.shape, one.k.shape[2]
    # A scheme that lies on a grid may add a class token: what matters is whether the lengths are equal, as was asked.
    if (q_len == k_len) != (form.q_len == form.k_len):
        return None
    rng = np.random.default_rng([seed, q_len, k_len])
    options = {name: _option(value, one, rng) for name, value in form.options.items()}
    one = replace(one, edge=form.edge, kwargs=options)
    if form.edge.startswith("borders"):
        bordered = _bordered(one, 38, 49) if form.edge == "borders_24" else _bordered(one, 38, 196)
        if bordered is None:
            return None
        one = bordered
    if form.arrays == "large":
        one = replace(one, q=one.q * one.q.dtype.type(64))
    elif form.arrays == "nan":
        one = _with_nan(one)
    return accepted(one)


def _option(value: Any, one: Example, rng: np.random.Generator) -> Any:
    """An array for the lengths of a case."""
    (batch, heads, q_len, _), k_len = one.q.shape, one.k.shape[2]
    if not isinstance(value, str):
        return value
    if value in ("bool", "row"):
        mask = rng.random((batch, heads, q_len, k_len)) < 0.7
        mask[..., 0] = True
        if value == "row":
            mask[:, :, q_len // 2] = False
        return mask
    if value == "float":
        mask = np.where(rng.random((q_len, k_len)) < 0.2, -np.inf, rng.standard_normal((q_len, k_len)))
        mask[:, 0] = 0.5
        return mask.astype(one.q.dtype)
    if value == "last":
        return np.broadcast_to(np.arange(k_len) < k_len - 2, (batch, heads, q_len, k_len)).copy()
    return np.array([0, k_len] if value == "none" else [k_len // 2, k_len - 1])


def _with_nan(one: Example) -> Example:
    """NaN where no query looks."""
    k, v, k_len = one.k.copy(), one.v.copy(), one.k.shape[2]
    lengths_of_items = one.kwargs.get("key_lengths", np.array([k_len - 2]))
    for b, length in enumerate(lengths_of_items):
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
