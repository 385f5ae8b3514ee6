"""What is tested: a function, which arguments it takes, and how a case is put to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.options import SCORES
from relpos_np.conform import ragged
from relpos_np.conform.formats import Format, format_of
from relpos_np.conform.frameworks import Framework
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing.arguments import arguments, changed, parameters
from relpos_np.testing.example import Example
from relpos_np.types import Array

LAYOUTS = ("bhld", "blhd")
_UNKNOWN = re.compile(r"unexpected keyword argument '?(\w+)|incompatible (function|constructor) arguments")


class Refused(Exception):
    """The function says that it does not take such a call."""


class Crashed(Exception):
    """The function raises an error for a call that it takes."""


class Implementation:
    """A function ``f(q, k, v, ...)`` that takes, by their names, arguments of a scheme and options of a call.

    Parameters
    ----------
    function : callable
        Its first three parameters are q, k and v, whatever they are called.
    scheme : str
        Key in `SCHEMES`.
    framework : Framework
        Of its arrays.
    stored : Format
        Of its arrays of numbers.
    always : mapping or callable
        Arguments that it does not take, with what it does as if they were given; or a function of the case.
    layout : {"bhld", "blhd"}
        Order of the axes batch, heads, length and head_dim of its operands and of its output.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        scheme: str,
        framework: Framework,
        stored: Format,
        always: Mapping[str, Any] | Callable[[Example], Mapping[str, Any]],
        layout: str,
    ) -> None:
        self.function, self.framework, self.stored = function, framework, stored
        self.layout = check.choice("layout", layout, LAYOUTS)
        self.scheme = SCHEMES[scheme].cls
        self._constructor = parameters(self.scheme)
        self._asked = always if callable(always) else None
        self.always = {} if callable(always) else self._checked(always)
        self.takes, self.anything = _parameters(function)
        self.lse = "return_lse" in self.takes
        self._into = _required(function, "out")
        # Operands that the last call changed.
        self.written: tuple[str, ...] = ()
        # Results of the last call, as it returned them.
        self.results: dict[str, Any] = {}
        for name, one in self._constructor.items():
            if one.default is one.empty and not self._knows(name) and self._asked is None:
                raise RelposTypeError(
                    f"callable: {self.scheme.__name__} needs {name}, but the function takes {_listed(self.takes)} "
                    f"after q, k and v; wrap it in one that takes {name} by this name, or say always={{{name!r}: ...}}"
                )

    def _checked(self, always: Mapping[str, Any]) -> dict[str, Any]:
        """What it always does, under names that mean something."""
        for name in always:
            if name not in self._constructor and name not in SCORES:
                raise RelposValueError(
                    f"always: {name} is no argument of {self.scheme.__name__} and no option; "
                    f"expected one of {', '.join([*self._constructor, *SCORES])}"
                )
        return dict(always)

    def _knows(self, name: str) -> bool:
        return self.anything or name in self.takes or name in self.always

    def fitted(self, one: Example) -> tuple[Example | None, str]:
        """The case as the function can be asked it, or None and the reason why it cannot.

        Arguments of the scheme that the function does not take are left at their defaults.
        """
        options = dict(one.kwargs)
        if self._asked is not None:
            self.always = self._checked(self._asked(one))
        for name, value in self.always.items():
            if name not in SCORES:
                continue
            if name in options and not np.array_equal(options[name], value):
                return None, f"always does {name}={value}"
            options[name] = value
        # Queries stand at the end of the keys without being told.
        told = [name for name in options if name != "offset" or "offset" in one.needs]
        missing = [name for name in told if not self._knows(name)]
        if missing:
            return None, f"takes no argument {missing[0]}"
        position = one.position
        if position is not None and self._constructor:
            given = arguments(position)
            for name, parameter in self._constructor.items():
                if name in self.always:
                    given[name] = self.always[name]
                elif not self._knows(name) and not isinstance(given[name], str):
                    if one.family in ("borders", "flags") and not np.array_equal(given[name], parameter.default):
                        return None, f"takes no argument {name}"
                    given[name] = parameter.default
            try:
                position = self.scheme(**given)
            except RelposError as error:
                return None, str(error)
        # As the function gets its arrays.
        position = changed(position, format_of(self.stored.computed).rounded)
        found = replace(one, position=position, kwargs=options)
        try:
            problem, _, _ = check.problem(one.q, one.k, one.v, **options)
            (found.position or Plain()).check(problem.site)
        except RelposError as error:
            return None, f"without what the function does not take: {error}"
        return found, ""

    def lacks(self, way: str) -> str:
        """Why it cannot be called in a way, or nothing."""
        if way == "merged" and "mask" not in self.takes and self.scheme is not Plain:
            return "takes no argument mask"
        needed = ("out",) if way == "out" else ragged.WAYS.get(way, ())
        return next((f"takes no argument {name}" for name in needed if name not in self.takes), "")

    def arrays(self, one: Example) -> dict[str, Array]:
        """What may have gradients: q, k and v, and the scheme's arrays that the function takes."""
        found = {"q": one.q, "k": one.k, "v": one.v}
        return found | {n: x for n, x in self._named(one).items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"}

    def _named(self, one: Example) -> dict[str, Any]:
        """Arguments of the scheme by name."""
        given = {} if one.position is None or not self._constructor else arguments(one.position)
        return {
            name: value
            for name, value in given.items()
            if (name in self.takes or (self.anything and value is not None)) and name not in self.always
        }

    def run(self, one: Example, grad_out: Array | None = None, way: str = "") -> dict[str, tuple[Array, str]]:
        """Results by name, each in float64 and with the dtype it had: out, lse, and gradients by ``grad_`` and name.

        `way`: on "transposed" or "strided" views, with an array "out" to write into, or one of `ragged.WAYS`.
        """
        if way == "merged":
            by_mask = "mask" in self.takes and self.scheme is not Plain
            return ragged.merged([self.run(half) for half in ragged.halves(one, masked=by_mask)])
        kept = format_of(self.stored.computed)
        to = self.framework.array
        given = {name: self._operand(x, way) if name in "qkv" else to(x, kept) for name, x in self.arrays(one).items()}
        special = ragged.given(way, one)
        given |= {name: to(special.pop(name), self.stored) for name in "kv" if name in special}
        others: dict[str, Any] = {
            name: to(value, kept) if isinstance(value, np.ndarray) else value
            for name, value in {**self._named(one), **one.kwargs, **special}.items()
            if name not in given and (self.anything or name in self.takes)
        }
        names = list(given)

        def function(*arrays: Any, **more: Any) -> Any:
            named = dict(zip(names[3:], arrays[3:], strict=True))
            return self._called(self.function, *arrays[:3], **named, **others, **more)

        found, more = {}, {"return_lse": True} if self.lse else {}
        if way == "out" or self._into:
            empty = np.full((*one.q.shape[:3], one.v.shape[3]), np.nan)
            more["out"] = to(self._turned(empty), kept)
        before = {name: self.framework.back(name, x)[0].copy() for name, x in given.items()}
        out = function(*given.values(), **more)
        changed_ones = (
            n for n, x in before.items() if not np.array_equal(self.framework.back(n, given[n])[0], x, True)
        )
        self.written = tuple(changed_ones)
        if self.lse:
            if not isinstance(out, tuple | list) or len(out) != 2:
                raise RelposTypeError("callable: expected (out, lse) with return_lse=True")
            out, lse = out
            found["lse"] = self.framework.back("lse", lse)
        self.results = {"out": more.get("out", out)} | ({"lse": lse} if self.lse else {})
        found = {"out": self._returned("out", self.results["out"])} | found
        if grad_out is not None:
            turned = to(self._turned(grad_out), kept)
            pulled = self._called(self.framework.pulled, function, list(given.values()), turned)[1]
            for name, x in zip(names, pulled, strict=True):
                back = self._returned if name in "qkv" else self.framework.back
                found[f"grad_{name}"] = back(f"grad_{name}", x)
        return found

    def overwritten(self, results: Mapping[str, Any], returned: Mapping[str, tuple[Array, str]]) -> bool:
        """Whether results of an earlier call are no longer what it returned."""
        return any(not np.array_equal(self._returned(n, x)[0], returned[n][0], True) for n, x in results.items())

    @staticmethod
    def _called(function: Callable[..., Any], *arrays: Any, **named: Any) -> Any:
        """What a function returns; its errors are those of a function that refuses the call, or that crashes."""
        try:
            return function(*arrays, **named)
        except (Refused, Crashed):
            raise
        except (Exception, SystemExit) as error:  # which would be the exit code of the command
            reason = f"raises {type(error).__name__}: {' '.join(str(error).split())[:160]}".rstrip(": ")
            unknown = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
            if isinstance(error, NotImplementedError) or (unknown and unknown[1] in (None, *named)):
                raise Refused(reason) from error
            raise Crashed(reason) from error

    def _operand(self, x: Array, way: str) -> Any:
        """An operand in the function's layout, as a view where that is asked for."""
        to, x = self.framework.array, self._turned(x)
        if way == "transposed":
            return to(np.ascontiguousarray(x.swapaxes(1, 2)), self.stored).swapaxes(1, 2)
        if way == "strided":
            # Between the rows lies what must not be read.
            wide = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), np.nan)
            wide[:, :, ::2] = x
            return to(wide, self.stored)[:, :, ::2]
        return to(x, self.stored)

    def _turned(self, x: Array) -> Array:
        return x if self.layout == "bhld" else np.ascontiguousarray(x.swapaxes(1, 2))

    def _returned(self, name: str, x: Any) -> tuple[Array, str]:
        found, dtype = self.framework.back(name, x)
        return (found.swapaxes(1, 2) if self.layout == "blhd" and found.ndim == 4 else found), dtype


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Names of the parameters after the first three, and whether there are any others."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RelposTypeError(
            f"callable: its parameters cannot be found out ({error}); wrap it in a function"
        ) from error
    positional = [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3 and not any(one.kind is one.VAR_POSITIONAL for one in found):
        raise RelposTypeError(f"callable: expected f(q, k, v, ...), found parameters {[one.name for one in found]}")
    named = [
        one.name
        for one in found
        if one not in positional[:3] and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    return tuple(named), any(one.kind is one.VAR_KEYWORD for one in found)


def _required(function: Callable[..., Any], name: str) -> bool:
    """Whether a parameter has no default."""
    found = inspect.signature(function).parameters.get(name)
    return found is not None and found.default is found.empty and found.kind is not found.VAR_KEYWORD


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
