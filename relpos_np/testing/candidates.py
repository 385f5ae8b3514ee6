"""Positions that arrays may have been computed with: every scheme, variant and setting of the register that takes them.

A registered builder makes small calls of its scheme, and its choices say which forms the scheme has. Each form is a
template: its arrays are replaced by those that were given, its settings by those that were stated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations, islice, product
from math import isqrt
from typing import Any

import numpy as np

from relpos_np.errors import RelposError
from relpos_np.schemes.registry import SCHEMES, SchemeInfo
from relpos_np.schemes.sample import Sample
from relpos_np.testing._sizes import SIZES
from relpos_np.testing.arguments import CLASSES, decode, encode, parameters
from relpos_np.types import Array

# Forms of a scheme that are tried, those nearest to its example first; and in how many ways arrays may be its own.
_FORMS, _WAYS = 96, 240
_GRIDS = 6
# Arrays of a form only matter by their axes, so that a short call will do.
_LONGEST = 32
_ROOT = "position"


class _Choosing(Sample):
    """A sample that says how many choices there were; the first of everything beyond those that are given."""

    def __post_init__(self) -> None:
        self._path, self.counts = list(self.choices), []  # type: ignore[var-annotated]

    def pick(self, first: Any, *others: Any) -> Any:
        at = len(self.counts)
        self.counts.append(1 + len(others))
        return (first, *others)[self._path[at] if at < len(self._path) else 0]


@dataclass(frozen=True)
class Lengths:
    """Of the call that is looked at."""

    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dim: int
    v_dim: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """A scheme that the given arrays fit, with the settings and the array of each parameter by name."""

    scheme: str
    variant: str | None
    made: Any
    settings: dict[str, Any]
    arrays: dict[str, str]


@dataclass(eq=False)
class Candidates:
    """All candidates, and for schemes without one the reason."""

    found: list[Candidate] = field(default_factory=list)
    untried: dict[str, str] = field(default_factory=dict)
    complete: bool = True


# ------------------------------------------------------------------------------------------ forms of a scheme


def _grids(lengths: Lengths) -> list[tuple[int, int]]:
    """Heights and widths that queries may fill, also beside a class token or two; squares first."""
    found = []
    for tokens in range(3):
        points = lengths.q_len - tokens
        pairs = [(n, points // n) for n in range(isqrt(max(points, 0)), 0, -1) if points % n == 0]
        found += [pair for h, w in pairs[:_GRIDS] for pair in dict.fromkeys(((h, w), (w, h)))]
    return list(dict.fromkeys(found)) or [(1, 1)]


def _built(info: SchemeInfo, variant: str | None, lengths: Lengths, grid: tuple[int, int]) -> Iterator[Any]:
    """What the builder makes with its first choices, then with one other choice, and so on."""
    numbers = np.random.default_rng(0).standard_normal(997)
    # One array for each shape: forms of long calls have large ones, which nobody reads.
    drawn: dict[tuple[int, ...], Array] = {}

    def draw(*shape: int) -> Array:
        if shape not in drawn:
            drawn[shape] = np.resize(numbers, shape)
        return drawn[shape]

    paths: list[list[int]] = [[]]
    for at, path in enumerate(paths):
        if at == _FORMS:
            return
        sample = _Choosing(
            normal=draw,
            q_len=min(lengths.q_len, _LONGEST),
            k_len=min(lengths.k_len, _LONGEST),
            dim=lengths.dim,
            v_dim=lengths.v_dim,
            grid=grid,
            variant=variant,
            batch=(1,) * len(lengths.batch),
            heads=(lengths.heads, lengths.kv_heads),
            choices=path,
        )
        try:
            parts = info.build(sample)
        except (RelposError, ArithmeticError, IndexError, ValueError):
            # A scheme need not have a form for every length.
            parts = None
        if parts is not None:
            yield parts["position"] if info.kind == "attention" else parts["encoding"]
        for position in range(len(path), len(sample.counts)):
            same = [*path, *[0] * (position - len(path))]
            paths += [[*same, other] for other in range(1, sample.counts[position])]


def _templates(info: SchemeInfo, variant: str | None, lengths: Lengths) -> list[tuple[Any, dict[str, Array]]]:
    """Each form once, as `encode` describes it, with its arrays; these only matter by their axes."""
    seen: set[str] = set()
    found = []
    for n, grid in enumerate(_grids(lengths)):
        before = len(seen)
        for made in _built(info, variant, lengths, grid):
            arrays: dict[str, Array] = {}
            node = encode(made, _ROOT, arrays)
            key = repr((node, [x.shape for x in arrays.values()]))
            if key not in seen:
                seen.add(key)
                # Without their numbers: forms of long calls are kept.
                found.append((node, {name: np.broadcast_to(x.dtype.type(0), x.shape) for name, x in arrays.items()}))
        if n and len(seen) == before:  # the scheme asks for no grid
            break
    return found


def _plain(value: Any) -> bool:
    """Whether a value in a node is a setting: no array and no scheme in it."""
    if isinstance(value, dict):
        return set(value) == {"float"}
    return all(map(_plain, value)) if isinstance(value, list) else True


def _settings(node: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any], type]]:
    """Path of each setting, the arguments that hold it, and their class."""
    cls = CLASSES[node["class"]]
    for name, value in node["arguments"].items():
        if isinstance(value, dict) and "class" in value:
            yield from _settings(value, f"{prefix}{name}.")
        elif _plain(value):
            yield prefix + name, node["arguments"], cls


def _copied(node: Any) -> Any:
    """A node of its own: settings are written into it."""
    if isinstance(node, dict):
        return {name: _copied(value) for name, value in node.items()}
    return [_copied(value) for value in node] if isinstance(node, list) else node


def _default(cls: type, name: str) -> Any:
    return parameters(cls)[name].default


def _others(cls: type, name: str, value: Any) -> list[Any]:
    """What a flag or a choice may be instead; numpydoc lists the choices of a parameter in braces."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        listed = re.search(rf"^ *{name} : {{(.*?)}}", cls.__doc__ or "", re.MULTILINE)
        return [other for other in re.findall(r'"(.*?)"', listed[1]) if other != value] if listed else []
    return []


@cache
def setting_names() -> frozenset[str]:
    """Parameters of any scheme that are numbers, flags or choices: what a file can state by name."""
    small = SIZES["tiny"]
    lengths = Lengths((2,), 4, 2, small.q_len, small.k_len, small.dim, small.v_dim)
    found: dict[str, bool] = {}
    for info in SCHEMES.values():
        for variant in info.variants or (None,):
            for made in _built(info, variant, lengths, small.grid):
                node = encode(made, _ROOT, {})
                for path, held, cls in _settings(node):
                    name = path.rpartition(".")[2]
                    kind = parameters(cls)[name].annotation
                    found[name] = found.get(name, False) or held[name] is not None or kind not in ("Any", "Scheme")
    return frozenset(name for name, is_setting in found.items() if is_setting)


@cache
def parameter_names() -> frozenset[str]:
    """Parameters of all schemes."""
    return frozenset(name for info in SCHEMES.values() for name in parameters(info.cls))


# --------------------------------------------------------------------------------------- settings of a form


def _kinds(node: Any) -> dict[str, tuple[Any, ...]]:
    """What can tell variants apart in the arguments of a form: choices, flags, axes, and what is there at all."""
    cls = CLASSES[node["class"]]
    found: dict[str, tuple[Any, ...]] = {}
    for name, value in node["arguments"].items():
        if isinstance(value, str | bool):
            found[name] = (value,)
        elif isinstance(value, list):
            found[name] = (len(value), _plain(value), all(entry == _default(cls, name) for entry in value))
        else:
            found[name] = (isinstance(value, dict), value is None, value == _default(cls, name))
    return found


class _Variants:
    """Which variant of a scheme a form is, by the arguments that are alike in all forms of a variant."""

    def __init__(self, forms: Mapping[str | None, list[tuple[Any, dict[str, Array]]]]) -> None:
        kinds = {variant: [_kinds(node) for node, _ in found] for variant, found in forms.items() if found}
        first = {variant: found[0] for variant, found in kinds.items()}
        names = next(iter(first.values()), {})
        alike = [n for n in names if all(one[n] == first[v][n] for v, found in kinds.items() for one in found)]
        self.names = [n for n in alike if len({one[n] for one in first.values()}) > 1]
        self._first = first

    def of(self, node: Any, own: str | None) -> str | None:
        """The variant that agrees in most of these arguments; where several do, the form's own."""
        if not self.names:
            return own
        kinds = _kinds(node)
        agree = {variant: sum(one[n] == kinds[n] for n in self.names) for variant, one in self._first.items()}
        most = max(agree.values())
        return own if agree.get(own) == most else next(v for v, count in agree.items() if count == most)


@lru_cache(256)
def _forms(
    info: SchemeInfo, lengths: Lengths
) -> tuple[dict[str | None, list[tuple[Any, dict[str, Array]]]], _Variants]:
    """The forms of each variant, and what tells these apart."""
    forms = {variant: _templates(info, variant, lengths) for variant in info.variants or (None,)}
    return forms, _Variants(forms)


def _set(node: Any, stated: Mapping[str, Any], how: str, kept: Sequence[str]) -> Any:
    """A node with settings as stated, and the others as they are or, if they may be, at their defaults.

    A real number that is not stated is at its default: that of an example is one among many.
    """
    node = _copied(node)
    for path, held, cls in list(_settings(node)):
        name = path.rpartition(".")[2]
        if path in stated or name in stated:
            held[name] = stated.get(path, stated.get(name))
        elif (how == "default" or isinstance(held[name], float)) and path not in kept:
            value = _default(cls, name)
            if value is inspect.Parameter.empty:
                continue
            held[name] = list(value) if isinstance(value, tuple) else value
    return node


def _varied(node: Any, stated: Mapping[str, Any]) -> Iterator[Any]:
    """The node, and each node with one flag or choice changed."""
    yield node
    for at, (path, held, cls) in enumerate(list(_settings(node))):
        name = path.rpartition(".")[2]
        if path in stated or name in stated:
            continue
        for other in _others(cls, name, held[name]):
            changed = _copied(node)
            list(_settings(changed))[at][1][name] = other
            yield changed


# ------------------------------------------------------------------------------------- arrays of a form


def _fits(slot: Array, x: Array) -> bool:
    """Whether an array has the axes of a form's own, and numbers of its kind; integers may stand for real numbers."""
    kind, wanted = ({"u": "i", "i": "i", "b": "b"}.get(one.dtype.kind, "f") for one in (x, slot))
    return slot.ndim == x.ndim and (kind == wanted or (wanted, kind) == ("f", "i"))


def _kept(node: Any, slots: Mapping[str, Array], count: int) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """So many of a form's arrays, and the others: those that the constructor can do without may be left out."""
    cls = CLASSES[node["class"]]
    names = [name.removeprefix(_ROOT + ".") for name in slots]
    spare = [name for name in names if "." not in name and _default(cls, name) is None]
    for left_out in combinations(spare, len(names) - count) if len(names) >= count else ():
        yield [name for name in names if name not in left_out], left_out


def _without(node: Any, left_out: Sequence[str]) -> Any:
    """The node without some of its arrays."""
    return node | {"arguments": node["arguments"] | dict.fromkeys(left_out)} if left_out else node


def _assigned(names: list[str], slots: Mapping[str, Array], given: Mapping[str, Array]) -> Iterator[dict[str, str]]:
    """Every way in which each parameter gets one of the arrays and none is left."""

    def options(name: str) -> list[str]:
        slot = slots[f"{_ROOT}.{name}"]
        own = [one for one in given if one.removeprefix(_ROOT + ".") == name]
        found = own or [one for one, x in given.items() if _fits(slot, x)]
        return sorted(found, key=lambda one: given[one].shape != slot.shape)

    def fill(left: list[str], used: dict[str, str]) -> Iterator[dict[str, str]]:
        if not left:
            yield dict(used)
            return
        for one in options(left[0]):
            if one not in used.values():
                yield from fill(left[1:], used | {left[0]: one})

    yield from fill(names, {})


# ------------------------------------------------------------------------------------------- candidates


class _Stated(dict[str, Any]):
    """Settings that are a key themselves."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


@dataclass(frozen=True, eq=False)
class _Form:
    """A form of a scheme with its settings, and which of the given arrays are its own."""

    node: Any
    variant: str | None
    settings: dict[str, Any]
    assigned: dict[str, str]


@dataclass(eq=False)
class _Chosen:
    """Forms of a scheme, how many arrays its forms have, and whether these are all ways to use those that are given."""

    forms: list[_Form] = field(default_factory=list)
    counts: set[int] = field(default_factory=set)
    complete: bool = True


def candidates(lengths: Lengths, given: Mapping[str, Array], stated: Mapping[str, Any], kind: str) -> Candidates:
    """Every scheme of a kind, "attention" or "absolute", that takes all arrays that are given."""
    result = Candidates()
    # The numbers in arrays do not matter to what takes them.
    axes = tuple((name, x.shape, x.dtype.str) for name, x in given.items())
    settings = _Stated(stated)
    for name, info in SCHEMES.items():
        if info.kind == kind:
            _of_scheme(name, given, _chosen_forms(info, lengths, axes, settings), result)
    return result


def _of_scheme(name: str, given: Mapping[str, Array], chosen: _Chosen, result: Candidates) -> None:
    refused, count = "", len(result.found)
    result.complete &= chosen.complete
    for form in chosen.forms:
        values = {f"{_ROOT}.{parameter}": given[own] for parameter, own in form.assigned.items()}
        try:
            made = decode(form.node, values)
        except (RelposError, ArithmeticError, IndexError, TypeError, ValueError) as error:
            refused = refused or str(error)
            continue
        result.found.append(Candidate(name, form.variant, made, dict(form.settings), dict(form.assigned)))
    if len(result.found) == count:
        wanted = " or ".join(map(str, sorted(chosen.counts)))
        takes = f"its forms have {wanted} arrays, given are {len(given)}" if len(given) not in chosen.counts else ""
        result.untried[name] = refused or takes or "no array that is given has the axes of its own"


@lru_cache(1024)
def _chosen_forms(
    info: SchemeInfo, lengths: Lengths, axes: tuple[tuple[str, tuple[int, ...], str], ...], stated: _Stated
) -> _Chosen:
    """The forms of a scheme that take arrays of these names and axes."""
    given = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape, dtype in axes}
    seen: set[str] = set()
    chosen_before: set[str] = set()
    result = _Chosen()
    forms, variants = _forms(info, lengths)
    for variant, (node, slots) in ((v, form) for v, found in forms.items() for form in found):
        result.counts.add(len(slots))
        for names, left_out in _kept(node, slots, len(given)):
            kinds = [(x.ndim, x.dtype.kind) for x in slots.values()]
            ways = list(islice(_assigned(names, slots, given), _WAYS + 1))
            result.complete &= len(ways) <= _WAYS
            for how in ("as built", "default") if ways else ():
                chosen = _set(_without(node, left_out), stated, how, variants.names)
                # Many forms are alike but for numbers that are stated or at their defaults.
                if (same := f"{variant} {chosen} {names} {kinds}") in chosen_before:
                    continue
                chosen_before.add(same)
                varied = [(one, repr(one)) for one in _varied(chosen, stated)]
                for assigned, (one, text) in product(ways[:_WAYS], varied):
                    key = f"{text} {assigned}"
                    if key in seen:
                        continue
                    seen.add(key)
                    settings = {path: held[path.rpartition(".")[2]] for path, held, _ in _settings(one)}
                    shown = {n: v for n, v in settings.items() if v is not None}
                    result.forms.append(_Form(one, variants.of(one, variant), shown, assigned))
    return result
