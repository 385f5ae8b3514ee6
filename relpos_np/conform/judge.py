"""Run an implementation on seeded cases, family by family, and say what is wrong with it and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from relpos_np._contract import check
from relpos_np.conform.arithmetic import arithmetics, found_out
from relpos_np.conform.arithmetic import chosen as named_arithmetic
from relpos_np.conform.bench import Bench
from relpos_np.conform.causes import explained
from relpos_np.conform.customs import BORDERS, CONVENTIONS
from relpos_np.conform.formats import DTYPES, Format, format_of
from relpos_np.conform.frameworks import Framework, framework_of, loaded
from relpos_np.conform.implementation import LAYOUTS, Implementation
from relpos_np.conform.report import Family, Finding, Report
from relpos_np.conform.suspects import suspects
from relpos_np.conform.yardstick import ANGLES, Answer
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing.cases import FEATURES, checked, checked_families
from relpos_np.testing.example import Example
from relpos_np.testing.families import FAMILIES, forms_of
from relpos_np.testing.grid import Form, Grid


def conform(
    function: str | Callable[..., Any],
    scheme: str,
    *,
    variant: str | None = None,
    framework: str | None = None,
    dtype: str = "float32",
    grad: bool = False,
    families: str | Iterable[str] | None = None,
    supports: Iterable[str] | None = None,
    excluded: str | Iterable[str] = (),
    always: Mapping[str, Any] | Callable[[Example], Mapping[str, Any]] | None = None,
    layout: str = "bhld",
    device: str | None = None,
    head_dim: int | Iterable[int] | None = None,
    lengths: int | Iterable[int] | None = None,
    heads: int | tuple[int, int] | list[int | tuple[int, int]] | None = None,
    batch: int | Iterable[int] | None = None,
    arithmetic: str | None = None,
    conventions: str | None = None,
    thorough: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    r"""Test an implementation of attention in any framework against a scheme.

    It is called as ``function(q, k, v, ...)`` with further arguments by name: the arrays and numbers of the scheme
    under the names of its constructor (``table`` of `T5`, ``slopes`` of `ALiBi`), options under those of
    `relpos_np.attention`. What it does not name it is not given, and cases that need it are reported as not run.

    Parameters
    ----------
    function : callable or str
        The implementation, or ``"package.module:name"``, or the path of an ONNX model whose inputs have these names.
    scheme : str
        Key in `relpos_np.SCHEMES`, but for those that are added to inputs.
    variant : str, optional
        One of the scheme's variants; default the first.
    framework : {"numpy", "torch", "jax", "onnx"}, optional
        Whose arrays it takes; default the one that the function's file imports. Results may be arrays of any package
        that has DLPack.
    dtype : {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
        Of the arrays it gets. With float8 only q, k and v are of it, and all else, with the output, of bfloat16.
    grad : bool
        Whether to compare gradients of q, k, v and of the scheme's arrays, by autograd of torch or JAX.
    families : str or iterable of str, optional
        Which of `testing.FAMILIES` it must pass: a case of these that is refused or cannot be run is an error. Default
        all that it can run.
    supports : iterable of str, optional
        What it supports, as in `testing.cases`: other cases are not tried, and refusing one of these is wrong.
    excluded : str or iterable of str, optional
        Families and features that it has not, which are not tried.
    always : mapping or callable, optional
        What it does as if it had been told: ``{"scale": 1.0}`` where it does not scale, ``{"causal": True}``. Or a
        function of the case, an `Example`, that returns such a mapping.
    layout : {"bhld", "blhd"}
        Axes of q, k, v and of the output: batch, heads, length and head_dim, or length before heads.
    device : str, optional
        Of torch, default "cpu".
    head_dim, lengths : int or iterable of int, optional
        Those that it takes: cases have no others. Default all, in which an error other than NotImplementedError is
        wrong.
    heads : int, tuple of int, or list of these, optional
        The same of heads: H, with any H_kv, or (H, H_kv).
    batch : int or iterable of int, optional
        The same of batch items.
    arithmetic : {"float64", "float32", "tf32", "half_products", "int8_cache", "float8_cache", "stored", "half_sums"}
        What it is meant to compute with, to whose errors it is held. float64: "float64" or "float32".
        float32: "float32", "tf32", "half_products", of bfloat16, or "int8_cache" and "float8_cache", with keys and
        values in eight bits; half precision: "float32" and one rounding, "half_products" with sums in float32,
        "stored", where every intermediate result is rounded, or "half_sums".
        Default "float64", "float32" and "stored"; which it is, as far as
        its errors tell, is said in `Report.arithmetic`.
    conventions : {"torch", "flash", "onnx"}, optional
        Whose conventions are right where no result is: for queries without keys, NaN behind a mask, and queries that
        are more than the keys. Default: a difference of convention is told as such, with exit code 1.
    thorough : bool
        Whether to run every length with everything, which takes minutes, instead of a choice.
    seed : int
        Of the numbers.
    progress : callable, optional
        Called with the name of its family before each case.

    Returns
    -------
    Report
        ``report.ok``; ``print(report.text())`` for people.

    Raises
    ------
    RelposError
        If the arguments cannot be used, or a package is missing; errors of the function are reported, and not raised.

    Notes
    -----
    An answer in a dtype is compared with the exact one for the same numbers, and may be 2 times as far from it,
    gradients 3 times, as a straightforward implementation in that dtype, which stores every intermediate result; and
    one rounding further. These are the factors of FlashAttention's tests: sums in another order have errors of the same
    size, and rarely more than that between the largest of each. float32 that was rounded to half precision on the way
    fails.

    A function refuses a case by raising NotImplementedError, or TypeError for an argument that it passes on and that is
    unknown there. Any other error is a crash, and wrong. Self-attention must run in full, or nothing is proven; nor
    does a case with one key prove anything, whose output is that key's value whatever is computed.

    A wrong answer is compared with what known mistakes lead to: another variant, another alignment, a scale that is
    missing. `Report.causes` are those that give the same numbers.
    """
    check.choice("scheme", scheme, tuple(SCHEMES))
    if SCHEMES[scheme].kind == "absolute":
        raise RelposValueError(f"scheme: {scheme} is added to inputs before attention; expected a scheme of attention")
    variants = SCHEMES[scheme].variants
    if variant is not None:
        check.choice("variant", variant, variants)
    grid = grid_of(head_dim, lengths, heads, batch, thorough=thorough)
    chosen = variant or next(iter(variants), None)
    stored = format_of(dtype)
    wanted = tuple(FAMILIES) if families is None else checked_families(families)
    able = None if supports is None else frozenset(checked("supports", supports, FEATURES))
    left_out = frozenset(checked("excluded", excluded, (*FAMILIES, *FEATURES)))
    if isinstance(function, str):
        subject, function = function, loaded(function, framework)
        framework = "onnx" if framework is None and subject.endswith(".onnx") else framework
    else:
        if not callable(function):
            raise RelposTypeError(f"function: expected a callable, found {type(function).__name__}")
        subject = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    home = framework_of(framework, function, device)
    if check.flag("grad", grad):
        _can_differentiate(home, stored)
    tested = Implementation(function, scheme, home, stored, always or {}, layout)
    bench = Bench(
        tested,
        stored,
        scheme,
        chosen,
        check.integer("seed", seed, 0),
        able,
        left_out,
        grad=grad,
        arithmetic=named_arithmetic(arithmetic, format_of(stored.computed)),
        conventions=None if conventions is None else check.choice("conventions", conventions, CONVENTIONS),
        asked=families is not None,
    )
    found, forms = [], {}
    for name in FAMILIES:
        if name not in wanted:
            continue
        cases = []
        for form in forms_of(name, scheme, chosen, grid):
            one = bench.made(form)
            if one is not None:
                if progress is not None:
                    progress(name)
                cases.append(bench.finding(form, one))
                forms[name, one.edge] = form
        if not any(one.verdict == "right" for one in cases):
            # Some borders are decided by the last bit of a logarithm, but not all of them.
            cases = [replace(one, verdict="wrong") if one.reason == BORDERS.words else one for one in cases]
        if cases:
            cases.sort(key=lambda one: one.work)
            found.append(Family(name, tuple(cases), required=families is not None))
        elif families is not None:
            raise RelposValueError(f"families: {scheme} has no case of {name}")
    smaller = _Shrinking(bench, forms, grid)
    told = explained(found, bench, suspects(scheme, chosen, format_of(stored.computed)), smaller.answer)
    if layout := _other_layout(bench, forms, told):
        told = [replace(one, cause=layout) if one.verdict == "wrong" else one for one in told]
    told = [smaller.shown(one, told) for one in told]
    computes = _arithmetic(bench)
    if computes and any(one.reason == ANGLES for family in told for one in family.findings):
        computes += f", {ANGLES}"
    return Report(subject, scheme, chosen, home.name, home.version, dtype, grad, tuple(told), seed, computes)


def _other_layout(bench: Bench, forms: Mapping[tuple[str, str], Form], families: list[Family]) -> str:
    """What is said of a function that is wrong in ordinary cases, and right with its axes in the other order."""
    unknown = [one for one in families if one.name == "self" and one.verdict == "wrong"]
    if not unknown or (unknown[0].cause and not unknown[0].cause.startswith("crashes")):
        return ""
    tested = copy(bench.tested)
    tested.layout = next(one for one in LAYOUTS if one != tested.layout)
    other = replace(bench, tested=tested, answers=[], crashes=[])
    ordinary = [form for (name, _), form in forms.items() if name == "self"]
    ran = [other.finding(form, one) for form in ordinary if (one := other.made(form)) is not None]
    if not all(one.verdict == "right" for one in ran):
        return ""
    axes = {"b": "batch", "h": "heads", "l": "length", "d": "head_dim"}
    return f"takes ({', '.join(axes[x] for x in tested.layout)})"


# Cases by which arithmetic is found out: this many, of so many keys at least, and the errors of so many numbers.
_SHOWN, _KEYS, _NUMBERS = 4, 32, 1024


def _arithmetic(bench: Bench) -> str:
    """What an implementation computes with, in words: as asked for, or as its errors in ordinary cases show."""
    kept = format_of(bench.stored.computed)
    if bench.arithmetic is not None:
        return arithmetics(kept)[bench.arithmetic].words
    shown = [
        one
        for one in bench.answers
        if one.family in ("self", "causal", "cross")
        and one.example.k.shape[2] >= _KEYS
        and one.expected["out"].size >= _NUMBERS
    ][:_SHOWN]
    if kept.name != "float64" and any(one.wrong and not one.rough for one in shown):
        return ""
    answers = [(one.example, one.returned["out"], one.expected["out"], one.usual) for one in shown]
    found = found_out(answers, kept, right=not any(one.wrong for one in shown))
    return arithmetics(kept)[found].words if found else ""


class _Shrinking:
    """The smallest failure of each family, made once."""

    def __init__(self, bench: Bench, forms: Mapping[tuple[str, str], Form], grid: Grid) -> None:
        self._bench, self._forms, self._grid = bench, forms, grid
        self._made: dict[str, tuple[Finding, Answer | None]] = {}

    def _of(self, one: Family) -> tuple[Finding, Answer | None]:
        assert one.smallest is not None
        if one.name not in self._made:
            form = self._forms[one.name, one.smallest.edge]
            self._made[one.name] = self._bench.shrunk(form, one.smallest, self._grid)
        return self._made[one.name]

    def answer(self, one: Family) -> Answer | None:
        """What was returned for it."""
        return self._of(one)[1]

    def shown(self, one: Family, families: list[Family]) -> Family:
        """The family with its failure, if no other that has the same cause has a smaller one."""
        if one.smallest is None:
            return one
        alike = [other for other in families if other.smallest is not None and other.cause == one.cause]
        known = [other for other in alike if other.name in self._made]
        first = known[0] if known else min(alike, key=lambda other: other.smallest.work if other.smallest else 0)
        found = self._of(one)[0] if one is first else one.smallest
        return one if found is one.smallest else replace(one, shrunk=found)


def _can_differentiate(home: Framework, stored: Format) -> None:
    if not home.differentiates:
        raise RelposValueError(f"grad: {home.name} has no autograd; expected framework torch or jax")
    if stored.name != stored.computed:
        raise RelposValueError(f"grad: {stored.name} only stores numbers; expected one of {', '.join(DTYPES[:4])}")


def grid_of(
    head_dim: Any = None, lengths: Any = None, heads: Any = None, batch: Any = None, *, thorough: bool = False
) -> Grid:
    """The sizes that are taken; a RelposError says which of them are none."""

    def whole(name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        if not found:
            raise RelposValueError(f"{name}: expected at least one, found none")
        return tuple(check.integer(name, one, 1) for one in found)

    pairs = None
    if heads is not None:
        entries = heads if isinstance(heads, list | set) else [heads]
        pairs = tuple(_heads(one) for one in entries)
    dims, batches = whole("head_dim", head_dim), whole("batch", batch)
    return Grid(whole("lengths", lengths), dims, pairs, batches, check.flag("thorough", thorough))


def _heads(value: Any) -> tuple[int, int | None]:
    """H and H_kv; of H alone, any H_kv."""
    pair = value if isinstance(value, tuple) else (value,)
    found = [check.integer("heads", one, 1) for one in pair]
    if len(found) == 1:
        return found[0], None
    if len(found) != 2 or found[0] % found[1]:
        raise RelposValueError(f"heads: expected H or (H, H_kv) with H a multiple of H_kv, found {value}")
    return found[0], found[1]
