"""Seeded examples of a scheme with the edges that implementations get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing._sizes import SIZES, Size, lengths
from relpos_np.testing.example import Example, accepted, build
from relpos_np.testing.families import FAMILIES, of_family
from relpos_np.testing.grid import RAGGED

# By the name of the edge: lengths of queries and of keys, head_dim and D_v.
_SMALL = SIZES["small"]
_SIZES: dict[str, Size] = {
    "own": _SMALL,
    "length_1": lengths(1, 1),
    "length_7": lengths(7, 7),
    "length_63": lengths(63, 65),
    "length_65": lengths(65, 63),
    "one_query": replace(_SMALL, q_len=1),
    "one_key": replace(_SMALL, k_len=1),
    "dim_1": replace(_SMALL, dim=1, v_dim=3),
    "dim_7": replace(_SMALL, dim=7, v_dim=7),
    "blocks": SIZES["blocks"],
    "length_1023": lengths(1023, 1023),
}
# Of an absolute scheme, whose inputs have one length.
_ABSOLUTE = ("own", "length_1", "length_7", "length_63", "length_65", "dim_1", "dim_7", "blocks", "length_1023")
# Of ordinary self-attention, the smallest.
_ORDINARY = 4
_MASKS = ("bool_mask", "float_mask", "key_lengths", "no_keys", "causal", "window", "nan_excluded")
_OTHERS = ("one_key_head", "large_logits")
EDGES = (*_SIZES, *_MASKS, *_OTHERS)


# What `supports` may name: options of a call, and shapes that are not ordinary.
FEATURES = (
    "cap_order",
    "causal",
    "cross",
    "float_mask",
    "grouped_heads",
    "key_lengths",
    "mask",
    "offset",
    "head_mask",
    "scale",
    "selected",
    "sinks",
    "softcap",
    "value_dim",
    "window",
    *RAGGED,
)


def checked(name: str, given: str | Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Words that are given for an argument, one or several, each of which is known."""
    found = (given,) if isinstance(given, str) else tuple(given)
    for one in found:
        check.choice(name, one, tuple(known))
    return found


def checked_families(families: str | Iterable[str]) -> tuple[str, ...]:
    """Families that are wanted: at least one."""
    found = checked("families", families, FAMILIES)
    if not found:
        raise RelposValueError("families: expected at least one, found none")
    return found


def cases(
    scheme: str,
    *,
    variant: str | None = None,
    dtype: Any = "float32",
    seed: int = 0,
    long: bool = True,
    families: str | Iterable[str] | None = None,
    supports: Iterable[str] | Callable[[Example], bool] | None = None,
) -> Iterator[Example]:
    """Examples of a scheme: self-attention, ordinary ones, then edges, as far as the scheme allows them.

    Parameters
    ----------
    scheme : str
        Key in `relpos_np.SCHEMES`.
    variant : str, optional
        One of the scheme's variants; default all of them in turn.
    dtype : dtype
        Of all arrays.
    seed : int
        Of the numbers.
    long : bool
        Whether to include those with `Example.long`, of 1023 queries and keys.
    families : str or iterable of str, optional
        Those of `FAMILIES` that are wanted, and nothing else; of each the smallest case comes first. "self" is what
        every implementation begins with: L_q = L_k > 1, H = H_kv, D = D_v and no option, from ``self_2`` on, which is
        (1, 2, 2, 8). Default: "self", and then what is listed below.
    supports : iterable of str or callable, optional
        What the implementation under test can do: the cases whose `Example.needs` are among these names. Or a function
        of an example that says whether it can. Default all cases.

    Yields
    ------
    Example
        Its `edge` says what is special, and `where` describes it for a failed test:

        - "self_2", "self_16", "self_33", "self_65": ordinary self-attention.
        - "own": what `example` makes, with L_q other than L_k and D_v other than D where the scheme allows it.
        - "length_1", "length_7", "length_63", "length_65", "length_1023": lengths beside powers of two; "blocks":
          some hundred, more than a kernel takes at a time; "one_query": the last query only, as in decoding;
          "one_key"; "dim_1" and "dim_7": head_dim.
        - "bool_mask": with a query that may attend no key, whose output is 0 and log-sum-exp -inf; "float_mask":
          with entries -inf; "key_lengths"; "no_keys": for a whole batch item; "causal"; "window".
        - "nan_excluded": NaN in keys and values that no query may attend.
        - "one_key_head": all query heads share one key head; "large_logits": scores far beyond what the exponential
          of float32 can hold.

        A scheme that fixes lengths (a window), rows (Transformer-XL) or channels (pairs that rotate) has not all.

    Raises
    ------
    RelposValueError
        If there is no such scheme, variant, family or name in `supports`; if the scheme has none of the families that
        are asked for; and, when the last case has been taken, if there was none: a test that ran nothing did not pass.
    """
    check.choice("scheme", scheme, tuple(SCHEMES))
    info = SCHEMES[scheme]
    if variant is not None and variant not in info.variants:
        raise RelposValueError(
            f"variant: {scheme} has {', '.join(map(repr, info.variants)) or 'none'}; found {variant!r}"
        )
    if families is not None:
        families = checked_families(families)
        if info.kind == "absolute":
            raise RelposValueError(f"families: {scheme} is added to inputs, and has none; found {families}")
    if supports is not None and not callable(supports):
        supports = frozenset(checked("supports", supports, FEATURES))

    def made(one: str | None) -> Iterator[Example]:
        if families is None:
            yield from _all(scheme, one, dtype, seed, long)
        for family in families or ():
            yield from of_family(family, scheme, variant=one, dtype=dtype, seed=seed)

    def chosen() -> Iterator[Example]:
        count = 0
        for case in (
            case for one in (info.variants or (None,) if variant is None else (variant,)) for case in made(one)
        ):
            if not long and case.long:
                continue
            if supports is not None and not (supports(case) if callable(supports) else case.needs <= supports):
                continue
            count += 1
            yield case
        if not count:
            wanted = "" if families is None else f" of {', '.join(families)}"
            raise RelposValueError(
                f"{'families' if supports is None else 'supports'}: no case{wanted} of {scheme} is left, and a test of "
                "none proves nothing; see testing.FAMILIES and Example.needs"
            )

    return chosen()


def _all(scheme: str, variant: str | None, dtype: Any, seed: int, long: bool) -> Iterator[Example]:
    """Self-attention, and then the scheme's own example with every edge."""
    absolute = SCHEMES[scheme].kind == "absolute"
    if not absolute:
        yield from islice(of_family("self", scheme, variant=variant, dtype=dtype, seed=seed), _ORDINARY)
    base = build(scheme, _SIZES["own"], dtype=dtype, seed=seed, variant=variant)
    shapes = set()
    for edge, size in _SIZES.items():
        if (absolute and edge not in _ABSOLUTE) or (not long and edge == "length_1023"):
            continue
        found = base if edge == "own" else sized(base, size, edge, dtype, seed)
        # A scheme with lengths of its own makes the same of several sizes.
        if found is not None and (key := (found.q.shape, found.v.shape)) not in shapes:
            shapes.add(key)
            yield found
    if not absolute:
        yield from edges(base)


def edges(base: Example, numbers: Callable[[int], Any] = np.random.default_rng) -> Iterator[Example]:
    """The same operands with each mask, with one key head, with large scores, as far as the scheme allows them."""
    for edge in (*_MASKS, *_OTHERS):
        found = _edge(base, edge, numbers(base.q.size))
        if found is not None:
            yield found


def sized(base: Example, size: Size, edge: str, dtype: Any, seed: int, **more: Any) -> Example | None:
    """The same scheme with other lengths, which are called `edge`; None if it cannot have them."""
    try:
        found = build(base.name, size, dtype=dtype, seed=seed, variant=base.variant, **more)
    except RelposError:
        return None
    return accepted(replace(found, edge=edge))


def _edge(base: Example, edge: str, rng: Any) -> Example | None:
    """The example with another mask, one key head or large scores; its scale and offset stay otherwise."""
    (batch, heads, q_len, dim), k_len = base.q.shape, base.k.shape[2]
    kept: dict[str, Any] = {name: base.kwargs[name] for name in ("scale", "offset") if name in base.kwargs}
    arrays: dict[str, Any] = {}
    if edge == "bool_mask":
        kept["mask"] = rng.random((batch, heads, q_len, k_len)) < 0.7
        # A query without keys has output 0 and log-sum-exp -inf.
        kept["mask"][0, :, q_len // 2] = False
    elif edge == "float_mask":
        mask = np.where(rng.random((q_len, k_len)) < 0.2, -np.inf, rng.standard_normal((q_len, k_len)))
        kept["mask"] = mask.astype(base.q.dtype)
    elif edge == "key_lengths":
        kept["key_lengths"] = np.array([k_len // 3, k_len - 1])
    elif edge == "no_keys":
        kept["key_lengths"] = np.array([0, k_len])
    elif edge == "causal":
        kept["causal"] = True
    elif edge == "window":
        kept["window"] = (11, 6)
    elif edge == "nan_excluded":
        kept["key_lengths"] = np.array([k_len // 2, k_len - 1])
        arrays = {"k": base.k.copy(), "v": base.v.copy()}
        for b, length in enumerate(kept["key_lengths"]):
            for x in arrays.values():
                x[b, :, length:] = np.nan
    elif edge == "one_key_head":
        if base.k.shape[1] == 1:
            return None
        kept, arrays = dict(base.kwargs), {"k": base.k[:, :1], "v": base.v[:, :1]}
    else:
        kept = {**base.kwargs, "scale": 64.0 * base.kwargs.get("scale", dim**-0.5)}
    if "key_lengths" in kept:
        # Queries are the last positions, whatever keys exist.
        kept.setdefault("offset", k_len - q_len)
    return accepted(replace(base, kwargs=kept, edge=edge, **arrays))
