"""What tells cases in which a mistake is made from those in which it is not: lengths, sizes, options together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relpos_np.testing.arguments import arguments, parameters
from relpos_np.testing.example import Example

_SIZES = ("L_k", "L_q", "head_dim", "D_v", "H", "batch")
_Facts = dict[str, Any]
_TILES = (2, 8, 16, 32, 64, 128)

_RELATIONS: tuple[tuple[str, Callable[[_Facts], bool]], ...] = (
    ("L_q is less than L_k", lambda x: x["L_q"] < x["L_k"]),
    ("L_q is equal to L_k", lambda x: x["L_q"] == x["L_k"]),
    ("L_q is not L_k", lambda x: x["L_q"] != x["L_k"]),
    ("D_v is not D", lambda x: x["D_v"] != x["head_dim"]),
)

# Cases that ran, from which on it is no accident that they have something in common.
_SOME = 2


def _facts(one: Example) -> _Facts:
    """What may decide whether a mistake is made."""
    (batch, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = one.q.shape, one.v.shape
    names = {name for name, value in one.kwargs.items() if value is not None and value is not False}
    names -= {"offset"} - one.needs
    if heads != kv_heads:
        names |= {"grouped heads"} if kv_heads == 1 else {"grouped heads", "several shared key heads"}
    if one.position is not None:
        cls: type = type(one.position)
        defaults, given = parameters(cls), arguments(one.position)
        names |= {
            f"{n}={x}" for n, x in given.items() if isinstance(x, bool | int | float) and x != defaults[n].default
        }
    return {"L_k": k_len, "L_q": q_len, "head_dim": dim, "D_v": v_dim, "H": heads, "batch": batch, "names": names}


def _conditions(wrong: list[_Facts]) -> Iterator[tuple[str, Callable[[_Facts], bool]]]:
    """Conditions that all wrong cases fulfil, plainer ones first."""
    common = set.intersection(*(one["names"] for one in wrong))
    for name in sorted(common):
        yield f" with {name}", _has({name})
    yield from _of_sizes(wrong)
    for name in sorted(common):
        for other in sorted(common):
            if name < other:
                yield f" with {name} and {other} together", _has({name, other})
    for name in sorted({"causal", "mask", "key_lengths", "window"} - set().union(*(one["names"] for one in wrong))):
        yield f" without {name}", _lacks(name)


def _of_sizes(wrong: list[_Facts]) -> Iterator[tuple[str, Callable[[_Facts], bool]]]:
    """Those of lengths and other sizes."""
    for words, holds in _RELATIONS:
        if all(map(holds, wrong)):
            yield f" where {words}", holds
    for name in _SIZES:
        least, most = min(one[name] for one in wrong), max(one[name] for one in wrong)
        yield f" from {name} = {least} on", _between(name, least, None)
        yield f" up to {name} = {most}", _between(name, None, most)
        for tile in _TILES:
            if all(one[name] % tile for one in wrong):
                yield f" where {tile} does not divide {name}", _undivided(name, tile)
            if all(one[name] % tile == 0 for one in wrong):
                yield f" where {tile} divides {name}", _divided(name, tile)


def _but_for(wrong: list[_Facts], right: list[_Facts]) -> Iterator[str]:
    """One size that all cases have that are right, and none that are wrong."""
    for name in _SIZES:
        sizes = {one[name] for one in right}
        if len(right) >= _SOME and len(sizes) == 1 and not any(one[name] in sizes for one in wrong):
            yield f", but not where {name} = {sizes.pop()}"


def _has(names: set[str]) -> Callable[[_Facts], bool]:
    return lambda x: names <= x["names"]


def _lacks(name: str) -> Callable[[_Facts], bool]:
    return lambda x: name not in x["names"]


def _between(name: str, least: int | None, most: int | None) -> Callable[[_Facts], bool]:
    return lambda x: (least is None or x[name] >= least) and (most is None or x[name] <= most)


def _undivided(name: str, tile: int) -> Callable[[_Facts], bool]:
    return lambda x: x[name] % tile != 0


def _divided(name: str, tile: int) -> Callable[[_Facts], bool]:
    return lambda x: x[name] % tile == 0


def condition(wrong: list[Example], right: list[Example]) -> str | None:
    """What all wrong cases have and none of those that are right: words, empty without right ones, None if nothing."""
    if not right:
        return ""
    bad, good = [_facts(one) for one in wrong], [_facts(one) for one in right]
    found = next((f", only{words}" for words, holds in _conditions(bad) if not any(map(holds, good))), None)
    return found or next(_but_for(bad, good), None)


def by_sizes(wrong: list[Example], right: list[Example]) -> str:
    """The same in sizes alone, where some cases are wrong and some right; empty if nothing."""
    if min(len(wrong), len(right)) <= _SOME:
        return ""
    bad, good = [_facts(one) for one in wrong], [_facts(one) for one in right]
    found = (f", only{words}" for words, holds in _of_sizes(bad) if not any(map(holds, good)))
    return next(found, "") or next(_but_for(bad, good), "")


def runs_where(ran: list[Example], crashes: list[Example], crashed: list[Example]) -> tuple[str, str]:
    """What all cases have that ran, a head_dim and a divisor of lengths, and the flags that say so.

    Empty if they have nothing of the kind in common, or are few. All `crashes` tell what matters, and each case of one
    family that `crashed` has to lack some of it.
    """
    facts, bad = [_facts(one) for one in ran], [_facts(one) for one in crashes]
    dims, found, flags, conditions = {one["head_dim"] for one in facts}, [], [], []
    if len(facts) >= _SOME and len(dims) == 1 and any(one["head_dim"] not in dims for one in bad):
        dim = dims.pop()
        found.append(f"head_dim = {dim}")
        flags.append(f"--head-dim {dim}")
        conditions.append(_between("head_dim", dim, dim))
    divided = 0
    for name in ("L_q", "L_k"):
        lengths = {one[name] for one in facts}
        tile = next((n for n in reversed(_TILES) if all(x % n == 0 for x in lengths)), 1)
        if len(lengths) > 1 and tile > 1 and any(map(_undivided(name, tile), bad)):
            found.append(f"{tile} divides {name}")
            conditions.append(_divided(name, tile))
            divided = max(divided, tile)
    if divided:
        flags.append(f"--lengths {','.join(str(n * divided) for n in (1, 2, 4, 8))}")
    if not found or any(all(holds(_facts(one)) for holds in conditions) for one in crashed):
        return "", ""
    return f", runs only where {' and '.join(found)}", " ".join(flags)
