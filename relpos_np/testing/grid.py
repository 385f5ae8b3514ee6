"""The one grid that cases are drawn from: sizes on both sides of the borders of tiles, and all pairs of options.

The rule, which no random number enters: a family lists its lengths and options, and head_dim, heads and batch come
from `DIMS`, `HEADS` and `BATCHES` in turn, whose numbers of entries have no common divisor. So two sizes that are
wrong only together meet within a dozen cases. Each option is alone in a family of its own, and each pair of options
is in "combined". A call of more than `_SCORES` scores has one batch item and then fewer heads; only what depends on
the length alone is asked with a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

# Lengths: single ones, beside and at multiples of the tiles that kernels have, and some that are long.
LENGTHS = (2, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)
DIMS = (64, 32, 128)
HEADS = ((12, 12), (2, 2), (3, 3), (8, 8), (5, 5))
GROUPED = ((4, 2), (4, 1), (6, 2), (8, 2), (8, 4), (12, 3), (6, 1))
BATCHES = (2, 1, 1, 3)
# Scores of a call, beyond which a batch item and two heads are enough, and one head.
_SCORES, _MANY = 1 << 16, 1 << 20
_LONG = 512

# What is combined; strings stand for arrays and widths, which are made for the lengths of a case.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": "wide"},
    "bool_mask": {"mask": "bool"},
    "float_mask": {"mask": "float"},
    "key_lengths": {"key_lengths": "some"},
    "scale": {"scale": 0.3},
    "offset": {"offset": "middle"},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": "one"},
}
# What is tried alone.
ALONE: Mapping[str, Mapping[str, Any]] = {
    **OPTIONS,
    "softcap_of_products": {"softcap": 2.0, "cap_order": "content"},
    "selected": {"selected": "some"},
}


@dataclass(frozen=True)
class Form:
    """One case: what is special about it, its sizes, options, and what is done to its arrays.

    `choices` are those of the scheme's builder. `fixed`: it is about these lengths or this head_dim.
    """

    family: str
    q_len: int
    k_len: int
    dim: int = 64
    v_dim: int = 64
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""
    arrays: str = ""
    choices: tuple[int, ...] = ()
    fixed: bool = False

    @property
    def edge(self) -> str:
        """Its name."""
        size = f"{self.q_len}" if self.q_len == self.k_len else f"{self.q_len}x{self.k_len}"
        flags = "".join(f"_{n}" for n in self.choices)
        return f"{self.word or self.family}{flags}_{size}"

    @property
    def way(self) -> str:
        """How it is called, for a case that is about that: one of `CALLS` or `RAGGED`, else nothing."""
        if self.family not in ("calls", "ragged"):
            return ""
        return next(way for way in (*CALLS, *RAGGED) if self.word.startswith(way))

    @property
    def scores(self) -> int:
        """How many there are."""
        return self.batch * self.heads[0] * self.q_len * self.k_len


@dataclass(frozen=True)
class Grid:
    """Which sizes an implementation takes, None for all, and whether every case is wanted or a first verdict.

    Attributes
    ----------
    lengths, dims, batches : tuple of int, optional
        Of queries and of keys; of head_dim; of batch items.
    heads : tuple of (int, int or None), optional
        H and H_kv; None for any number of key heads.
    thorough : bool
        Every length instead of a choice.
    """

    lengths: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int | None], ...] | None = None
    batches: tuple[int, ...] | None = None
    thorough: bool = False

    def forms(self, family: str, flags: Sequence[tuple[int, ...]] = ()) -> Iterator[Form]:
        """The cases of one family in sizes that are taken, the smallest first, each once."""
        listed = list(_FAMILIES[family](self.thorough))
        if family == "flags":
            listed = [replace(one, choices=choices) for choices in flags for one in listed]
        found: dict[str, Form] = {}
        for n, form in enumerate(listed):
            one = self._fitted(form, n, len(listed))
            if one is not None and one.edge in found and found[one.edge].dim != one.dim:
                one = replace(one, word=f"{one.word or family}_d{one.dim}")
            if one is not None:
                found.setdefault(one.edge, one)
        yield from sorted(found.values(), key=lambda one: one.scores * (one.dim + one.v_dim))

    def _fitted(self, form: Form, n: int, count: int) -> Form | None:
        """The form with sizes that are taken in the place of others; None if it is about those others."""
        one = form
        if self.dims is not None and not {form.dim, form.v_dim} <= set(self.dims):
            if form.fixed or form.dim != form.v_dim:
                return None
            dim = self.dims[n % len(self.dims)]
            one = replace(one, dim=dim, v_dim=dim)
        if self.batches is not None and form.batch not in self.batches:
            one = replace(one, batch=self.batches[n % len(self.batches)])
        if self.heads is not None:
            heads = self._heads(form.heads, n)
            if heads is None:
                return None
            one = replace(one, heads=heads)
        if self.lengths is not None and not {form.q_len, form.k_len} <= set(self.lengths):
            pairs = _related(self.lengths, form)
            if form.fixed or not pairs:
                return None
            q_len, k_len = pairs[n * (len(pairs) - 1) // max(1, count - 1)]
            one = replace(one, q_len=q_len, k_len=k_len)
        return one

    def _heads(self, meant: tuple[int, int], n: int) -> tuple[int, int] | None:
        """Heads that are taken, and that are grouped where those of the form are."""
        assert self.heads is not None
        group = meant[0] // meant[1]
        fitting = []
        for heads, kv_heads in self.heads:
            if kv_heads is None:
                kv = heads if group == 1 else next((heads // g for g in (group, 2, heads) if heads % g == 0), heads)
            else:
                kv = kv_heads
            if (heads == kv) == (group == 1):
                fitting.append((heads, kv))
        return meant if meant in fitting else fitting[n % len(fitting)] if fitting else None


def _related(lengths: tuple[int, ...], form: Form) -> list[tuple[int, int]]:
    """Pairs of these lengths of which the first is less than, equal to or more than the second, as in the form."""
    rank = (form.q_len > form.k_len) - (form.q_len < form.k_len)
    pairs = [(a, b) for a in sorted(lengths) for b in sorted(lengths) if (a > b) - (a < b) == rank]
    if form.family == "long":
        return pairs[-1:] if pairs[-1][0] >= _LONG else []
    # Of self-attention on one token nothing depends.
    return [one for one in pairs if form.family != "self" or one != (1, 1)]


def _turn(
    family: str,
    sizes: Sequence[tuple[int, int]],
    start: int = 0,
    among: Sequence[tuple[int, int]] = HEADS,
    **more: Any,
) -> list[Form]:
    """Forms of these lengths, with the other sizes in turn from the entry `start` on."""
    found = []
    if "key_lengths" in more.get("options", ()):
        # Of fewer queries nobody knows whether they stand at the end of all keys or of those that exist.
        sizes = [(max(size), size[1]) for size in sizes]
    for n, (q_len, k_len) in enumerate(sizes, start):
        dim, batch, heads = DIMS[n % len(DIMS)], BATCHES[n % len(BATCHES)], among[n % len(among)]
        given = {"dim": dim, "v_dim": dim, "heads": heads, "batch": batch, **more}
        found.append(_affordable(Form(family, q_len, k_len, **given)))
    return found


def _affordable(one: Form) -> Form:
    """The form, with fewer items and heads where it has many scores; heads are grouped if they were."""
    if one.scores > _SCORES:
        one = replace(one, batch=1)
    heads, kv_heads = one.heads
    if one.scores > _SCORES and heads > 2:
        one = replace(one, heads=(2 * heads // kv_heads, 2) if kv_heads > 1 else (2, 1))
    if one.scores > _MANY and heads == kv_heads:
        one = replace(one, heads=(1, 1))
    return one


def _square(*lengths: int) -> list[tuple[int, int]]:
    return [(n, n) for n in lengths]


def _chosen(thorough: bool, *first: int, most: int = _LONG) -> list[tuple[int, int]]:
    return _square(*((n for n in LENGTHS if n <= most) if thorough else first))


def _self(thorough: bool) -> list[Form]:
    return [Form("self", 2, 2, 8, 8), *_turn("self", _chosen(thorough, 16, 33, 65, 128, 257, most=LENGTHS[-1]))]


def _causal(thorough: bool) -> list[Form]:
    sizes = _chosen(thorough, 33, 64, 65, 129, 256, most=LENGTHS[-1])
    return [Form("causal", 2, 2, 8, 8, options={"causal": True}), *_turn("causal", sizes, 1, options={"causal": True})]


_CROSS = [(5, 9), (9, 5), (33, 64), (129, 65), (1, 127), (31, 257), (1025, 17), (3, 1023)]


def _cross(thorough: bool) -> list[Form]:
    more = [(a, b) for a in LENGTHS for b in (1, 31, 64, 129, 256) if a != b and a * b < 1 << 18] if thorough else []
    return _turn("cross", [*_CROSS, *more], 2)


def _decoding(thorough: bool) -> list[Form]:
    sizes = [(1, 9), (4, 33), (33, 65), (1, 129), (17, 128), (65, 130), (2, 257), (1, 1023), (1, 1024), (3, 1025)]
    if thorough:
        sizes += [(a, b) for a in (1, 2, 16, 33, 64, 65, 128) for b in LENGTHS if a < b]
    return _turn("decoding", sizes, 3, options={"causal": True})


def _windows(thorough: bool) -> list[Form]:
    sides = [(9, (2, 1)), (65, (11, 6)), (129, (70, 3)), (128, (0, 5)), (257, (64, 31))]
    behind = [(9, 3), (65, 16), (129, 63), (257, 64), (256, 128)]
    if thorough:
        sides += [(n, (n // 2, n // 3)) for n in LENGTHS[1:-3]] + [(n, (31, 32)) for n in LENGTHS[5:]]
        behind += [(n, w) for n in LENGTHS[5:-3] for w in (31, 32, 33, 64) if w < n]
    found = []
    for n, (length, window) in enumerate(sides):
        found += _turn("windows", [(length, length)], n, options={"window": window}, word="window")
    for n, (length, left) in enumerate(behind):
        options = {"window": (left, 0), "causal": True}
        found += _turn("windows", [(length, length)], n, options=options, word="window_causal")
    options = {"window": (40, 0), "causal": True}
    return [*found, *_turn("windows", [(3, 129), (1, 300)], 2, options=options, word="window_decoding")]


def _masks(thorough: bool) -> list[Form]:
    kinds = {
        "bool_mask": {"mask": "bool"},
        "bool_mask_by_head": {"mask": "head"},
        "bool_mask_of_keys": {"mask": "keys"},
        "float_mask": {"mask": "float"},
        "key_lengths": {"key_lengths": "some"},
    }
    sizes = _chosen(thorough, 9, 65, 129)
    found = []
    for n, (word, options) in enumerate(kinds.items()):
        forms = _turn("masks", sizes, n, options=options, word=word)
        # Items differ in length.
        found += [replace(one, batch=max(one.batch, 2)) if word == "key_lengths" else one for one in forms]
    # Only where nothing depends on where queries stand.
    options = {**kinds["key_lengths"], "offset": "end"}
    cached = Form("masks", 1, 65, heads=(4, 4), batch=3, options=options, word="key_lengths")
    return [*found, cached, replace(cached, q_len=17, k_len=129, dim=32, v_dim=32, heads=(3, 3))]


def _grouped(thorough: bool) -> list[Form]:
    plain = _turn("grouped_heads", [*_chosen(thorough, 5, 33, 65, 128), (1, 129), (17, 96)], among=GROUPED)
    options = {"causal": True}
    word = "grouped_causal"
    return [*plain, *_turn("grouped_heads", [(65, 65), (1, 257)], 3, among=GROUPED, options=options, word=word)]


def _odd(thorough: bool) -> list[Form]:
    dims = [
        (7, 7),
        (18, 18),
        (40, 40),
        (80, 80),
        (96, 96),
        (64, 128),
        (32, 20),
        *([(1, 1), (192, 128), (256, 256)] * thorough),
    ]
    found = [Form("odd_sizes", 1, 1, 8, 8, fixed=True, word="length")]
    for n, (dim, v_dim) in enumerate(dims):
        word = f"dim_{dim}" if dim == v_dim else f"value_dim_{v_dim}"
        length = (33, 65, 7)[n % 3]
        found.append(Form("odd_sizes", length, length, dim, v_dim, HEADS[n % 5], word=word, fixed=True))
    return [*found, *_turn("odd_sizes", _square(7, 63, 97, 200), 1, word="length")]


def _one_option(family: str, *names: str) -> Any:
    def listed(thorough: bool) -> list[Form]:
        found = []
        for n, name in enumerate(names):
            sizes = [*_chosen(thorough, 9, 65), (5, 129)]
            found += _turn(family, sizes, n, options=ALONE[name], word=name)
        return found

    return listed


_TOGETHER = [(65, 65), (40, 129), (128, 128), (33, 33), (7, 64), (129, 129), (64, 64)]


def _combined(thorough: bool) -> list[Form]:
    """All pairs of options, and each option with key heads that are shared."""
    found = []
    for n, (one, other) in enumerate(combinations(OPTIONS, 2)):
        options = {**OPTIONS[one], **OPTIONS[other]}
        if len(options) == len(OPTIONS[one]) + len(OPTIONS[other]):
            sizes = _TOGETHER if thorough else [_TOGETHER[n % len(_TOGETHER)]]
            found += _turn("combined", sizes, n, options=options, word=f"{one}_{other}")
    for n, (one, alone) in enumerate(OPTIONS.items()):
        sizes = _TOGETHER if thorough else [_TOGETHER[n % len(_TOGETHER)]]
        found += _turn("combined", sizes, n, among=GROUPED, options=alone, word=f"{one}_grouped_heads")
    return found


def _flags(thorough: bool) -> list[Form]:
    sizes = (33, 65, 129) if thorough else (65,)
    decoding = _turn("flags", [(17, 96)], options={"causal": True}, word="flags_causal")
    return [*_turn("flags", _square(*sizes), 1), *decoding]


def _borders(_: bool) -> list[Form]:
    return [Form("borders", n, n, 8, 8, word=f"borders_{x}", arrays=x) for n, x in ((24, "near"), (64, "far"))]


def _excluded(thorough: bool) -> list[Form]:
    row, none, left = {"mask": "row"}, {"key_lengths": "none"}, {"mask": "left", "causal": True}
    return [
        *_turn("excluded_rows", _chosen(thorough, 5, 65), options=row, word="no_keys_mask"),
        *(replace(one, batch=2) for one in _turn("excluded_rows", _square(5, 65), 1, options=none, word="no_keys")),
        *(
            replace(one, batch=2)
            for one in _turn("excluded_rows", _square(9, 65), 2, options=left, word="left_padding")
        ),
        *_turn("excluded_rows", [(9, 5), (96, 65)], options={"causal": True}, word="causal_more_queries"),
    ]


def _nan(thorough: bool) -> list[Form]:
    some = _turn("nan_excluded", _chosen(thorough, 9, 65), 1, options={"key_lengths": "some"}, word="nan", arrays="nan")
    mask = _turn("nan_excluded", _chosen(thorough, 5, 65), options={"mask": "last"}, word="nan_mask", arrays="nan")
    return [*mask, *(replace(one, batch=2) for one in some)]


def _long(thorough: bool) -> list[Form]:
    return _turn("long", _square(1025, *([1023, 1024, 2049] * thorough)), batch=1, heads=(1, 1), dim=64, v_dim=64)


def _large(thorough: bool) -> list[Form]:
    return _turn("large_scores", _chosen(thorough, 16, 65, 129), arrays="large")


# Each a way to call, which `conform` knows.
CALLS = ("transposed", "strided", "twice", "out")


def _calls(thorough: bool) -> list[Form]:
    sizes = (33, 65, 128) if thorough else (65,)
    return [
        replace(one, batch=max(one.batch, 2)) for way in CALLS for one in _turn("calls", _square(*sizes), 2, word=way)
    ]


# Ways to put several calls as one, which `conform` knows.
RAGGED = ("segments", "offsets", "static_cache", "paged", "merged", "dropped")


def _ragged(thorough: bool) -> list[Form]:
    """Of packed sequences as many queries as keys, of caches fewer; the larger ones are causal."""
    found = []
    for n, way in enumerate(RAGGED):
        cached = way in ("offsets", "static_cache", "paged")
        sizes = [(1, 65), (5, 129)] if cached else _square(33, 129)
        sizes += ([(17, 256), (33, 1024)] if cached else _square(64, 257)) * thorough
        for at, one in enumerate(_turn("ragged", sizes, n, word=way)):
            # An offset says nothing without causal; what encoders and one query need is asked without.
            causal = way == "offsets" or (at > 0 and way not in ("merged", "dropped"))
            found.append(replace(one, batch=max(one.batch, 2), options={"causal": True} if causal else {}))
    return found


# Options that have families of their own.
_ELSEWHERE = ("causal", "window", "bool_mask", "float_mask", "key_lengths")
_FAMILIES: Mapping[str, Any] = {
    "self": _self,
    "causal": _causal,
    "cross": _cross,
    "decoding": _decoding,
    "windows": _windows,
    "masks": _masks,
    "grouped_heads": _grouped,
    "odd_sizes": _odd,
    "options": _one_option("options", *(name for name in ALONE if name not in _ELSEWHERE)),
    "combined": _combined,
    "flags": _flags,
    "borders": _borders,
    "excluded_rows": _excluded,
    "nan_excluded": _nan,
    "long": _long,
    "large_scores": _large,
    "calls": _calls,
    "ragged": _ragged,
}
