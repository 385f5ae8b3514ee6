"""A scheme of one's own, checked three ways: its formula, its terms on every backend, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from relpos_np import backend as _backend
from relpos_np._contract import check
from relpos_np._contract.options import Options
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import TableTerm, Terms, Toeplitz
from relpos_np.api import attention, attention_vjp
from relpos_np.distributed import merge, partial
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.testing.arguments import arguments, rebuilt
from relpos_np.testing.example import Example
from relpos_np.types import Array

# Options that parts of a call take as the call does.
_OF_PARTS = ("causal", "window", "scale", "offset", "key_lengths")
_REFUSED = {"backend", "dropout", "precision", "rng"}
# Steps of the central differences. The narrower is believed as far as both agree.
_WIDE, _NARROW = 1e-4, 5e-5


def check_scheme(
    scheme: Any,
    q: Array,
    k: Array,
    v: Array,
    *,
    gradients: bool = True,
    seed: int = 0,
    **options: Unpack[Options],
) -> dict[str, float]:
    r"""Check that a scheme's formula, terms and gradients say the same.

    Compared are, in float64 and in float32, the output and the log-sum-exp of ``backend="numpy"`` with those of
    "terms" and "numba": for the call as given, causal, within a window, with fewer keys and with other offsets, as far
    as `Scheme.check` admits these; and where the scheme can be computed in parts, those of two halves of the keys put
    together. In float64 the gradients of q, k, v and of each array that `Scheme.lift` returns, on all three backends,
    are compared with central differences of the formula.

    Parameters
    ----------
    scheme : scheme
        Of any class that derives from `relpos_np.Scheme` and keeps the arguments of its constructor as attributes of
        their names.
    q, k, v : ndarray, shapes (..., H, L_q, D), (..., H_kv, L_k, D) and (..., H_kv, L_k, D_v)
        A call that the scheme is for. Numbers other than q = k, H_kv < H, D_v other than D and L_q < L_k find more.
    gradients : bool
        False leaves gradients out, for a class without `Scheme.lift`.
    seed : int
        Of the gradients of the output, of directions and lengths.
    **options
        Of the call; see `relpos_np.attention`. Not `dropout`, `rng`, `precision` and `backend`.

    Returns
    -------
    dict of str to float
        What was compared, and its largest error in units of what is tolerated: at most 1.

    Raises
    ------
    AssertionError
        If something differs, or the scheme does other things than its class says, as in `Scheme.reads_operand_values`.
        It says what, on which backend and by how much.
    RelposError
        If the scheme or a method of it cannot be used as it is.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> from relpos_np.testing import check_scheme
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((4, 5, 8)), rng.standard_normal((2, 7, 8))
    >>> found = check_scheme(rp.T5(rng.standard_normal((32, 4))), q, k, k)
    >>> max(found.values()) <= 1
    True
    """
    if not isinstance(scheme, Scheme):
        raise RelposTypeError(f"scheme: expected an object of a class that derives from Scheme, found {scheme!r}")
    q, k, v = (check.floating(name, x).astype(np.float64) for name, x in (("q", q), ("k", k), ("v", v)))
    if min(x.ndim for x in (q, k, v)) < 3:
        raise RelposValueError(f"q, k, v: expected shapes (..., H, L, D), found {q.shape}, {k.shape} and {v.shape}")
    for name in _REFUSED & options.keys():
        raise RelposTypeError(f"{name}: the calls that are compared have none")
    rng = np.random.default_rng(check.integer("seed", seed, 0))
    found: dict[str, float] = {}
    for name, given in _calls(q.shape[-2], k.shape, options, rng):
        try:
            attention(q, k, v, position=scheme, backend="numpy", **given)
        except RelposError:
            if name == "as given":
                raise
            continue
        for dtype in ("float64", "float32"):
            operands = [x.astype(dtype) for x in (q, k, v)]
            one = Example("own", None, operands[0], operands[1], operands[2], rebuilt(scheme, dtype), given)
            for backend in ("terms", "numba"):
                found[f"{name}, {dtype}, {backend}"] = one.backend_error(backend)
    _declared(scheme, q, k, options)
    of_parts = {name: x for name, x in options.items() if name in _OF_PARTS}
    error = _parts(Example("own", None, q, k, v, scheme, of_parts))
    if error is not None:
        found["in parts, float64, numba"] = error
    _assert_within(found, "differs from the formula")
    if gradients:
        found |= _gradients(rebuilt(scheme, np.float64), q, k, v, options, rng)
    return found


def _calls(
    q_len: int, k_shape: tuple[int, ...], options: Mapping[str, Any], rng: np.random.Generator
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The call, and others like it."""
    k_len, given = k_shape[-2], dict(options)
    yield "as given", given
    yield "causal", given | {"causal": True}
    yield "in a window", given | {"window": (k_len // 2, k_len // 3)}
    yield "with fewer keys", given | {"key_lengths": rng.integers(0, k_len + 1, k_shape[:-3]), "offset": k_len - q_len}
    for offset in (0, k_len, -3):
        yield f"with offset {offset}", given | {"offset": offset}


def _declared(scheme: Scheme, q: Array, k: Array, options: Mapping[str, Any]) -> None:
    """Compare what a class says of itself with what it does; `content` is checked in every call."""
    problem = check.problem(q, k, None, **options)[0]
    name, site = type(scheme).__name__, problem.site
    if scheme.makes_vectors:
        _vectors(scheme, problem)
    if not scheme.reads_operand_values:
        nan = [np.full_like(x, np.nan) for x in (problem.q, problem.k)]
        terms = scheme.lower(nan[0], nan[1], site)
        own = [x for t in terms.queries for x in (t.query, t.weights)] + [x for t in terms.tables for x in (t.table,)]
        own += [x for t in terms.keys for x in (t.key, t.weights)] + [t.weights for t in terms.values]
        if any(np.isnan(x).any() for x in [*own, *terms.biases] if not any(x is y for y in nan)):
            raise AssertionError(
                f"{name}: `lower` computes with queries or keys: leave out reads_operand_values = False"
            )


def _vectors(scheme: Scheme, problem: Problem) -> None:
    """Compare what a class says `lower` makes of queries and keys with what differs when these do."""
    name, site = f"{type(scheme).__name__}.lower_vectors", problem.site
    terms, others = scheme.lower(problem.q, problem.k, site), scheme.lower(problem.q[..., ::-1], -problem.k, site)
    found, wanted = scheme.lower_vectors(problem.q, problem.k, site), terms.vectors()
    if len(found) != len(wanted) or not all(map(_same, found, wanted)):
        raise AssertionError(f"{name}: expected the vectors in the terms that `lower` makes, in their order")
    if not all(map(_same, _lasting(terms), _lasting(others))):
        raise AssertionError(f"{name}: `lower` makes more of queries or keys than vectors: leave it out")


def _lasting(terms: Terms) -> list[Array]:
    """Arrays of terms, but for vectors."""
    looked_up: list[Any] = [*terms.tables, *terms.queries, *terms.keys, *terms.values]
    tables = [x.table if isinstance(x, TableTerm) else x.weights for x in looked_up]
    maps = [x.index.lookup if isinstance(x.index, Toeplitz) else x.index.index for x in looked_up]
    return [*tables, *maps, *terms.biases]


def _same(one: Array, other: Array) -> bool:
    """Whether two arrays hold the same bits."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _parts(one: Example) -> float | None:
    """The error of two halves of the keys, put together; None where the scheme knows whole calls only."""
    q_len, k_len = one.q.shape[-2], one.k.shape[-2]
    if k_len < 2:
        return None
    given = {"position": one.position, "backend": "numba", "offset": k_len - q_len, **one.kwargs}

    def part(first: int, stop: int) -> tuple[Array, Array]:
        return partial(one.q, one.k[..., first:stop, :], one.v[..., first:stop, :], keys=(first, k_len), **given)

    try:
        halves = part(0, k_len // 2), part(k_len // 2, k_len)
    except RelposError:
        return None
    return one.error(*merge(*halves))


def _slope(loss: Callable[[float], float], step: float) -> float:
    """Fourth-order central difference of loss(t) at 0."""
    return (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step)


def _gradients(
    scheme: Scheme, q: Array, k: Array, v: Array, options: Any, rng: np.random.Generator
) -> dict[str, float]:
    """Errors of the gradients of every backend along a random direction of each array."""
    given, operands = arguments(scheme), {"q": q, "k": k, "v": v}
    out, lse = attention(q, k, v, position=scheme, backend="numpy", return_lse=True, **options)
    weight, weight_lse = (np.asarray(rng.standard_normal(x.shape)) for x in (out, lse))
    all_found = {
        backend: attention_vjp(
            q, k, v, grad_out=weight, grad_lse=weight_lse, position=scheme, backend=backend, **options
        )
        for backend in _backend.HOST_BACKENDS
    }
    errors = {}
    # An array of the scheme may have the name of an operand.
    moving = [*((name, True) for name in operands), *((name, False) for name in all_found["numpy"].position)]
    for name, of_call in moving:
        array = operands[name] if of_call else getattr(scheme, name)
        direction = np.asarray(rng.standard_normal(array.shape))

        def loss(
            t: float, name: str = name, of_call: bool = of_call, array: Array = array, direction: Array = direction
        ) -> float:
            changed = {name: array + t * direction}
            position = scheme if of_call else type(scheme)(**(given | changed))
            moved = operands | changed if of_call else operands
            out, lse = attention(
                moved["q"], moved["k"], moved["v"], position=position, backend="numpy", return_lse=True, **options
            )
            return float((out * weight).sum() + (np.where(np.isneginf(lse), 0.0, lse) * weight_lse).sum())

        wide, narrow = _slope(loss, _WIDE), _slope(loss, _NARROW)
        for backend, grads in all_found.items():
            grad = getattr(grads, name) if of_call else grads.position[name]
            scale = abs(loss(0.0)) + float(np.sqrt(np.square(grad * direction).sum())) + 1.0
            # Of what is smooth both differ by rounding alone; how far away a kink moves them nobody knows.
            known = 1e-9 * scale + 4 * abs(wide - narrow)
            if known > 1e-5 * scale:
                raise AssertionError(f"gradient of {name}: the formula has a kink here; try other arrays")
            whose = name if of_call else f"position {name}"
            errors[f"gradient of {whose}, {backend}"] = abs(float((grad * direction).sum()) - narrow) / known
    _assert_within(errors, "differs from central differences of the formula")
    return errors


def _assert_within(found: Mapping[str, float], what: str) -> None:
    """Raise for all that is not within what is tolerated, the worst first."""
    wrong = sorted(((error, name) for name, error in found.items() if not error <= 1), reverse=True)
    if wrong:
        listed = "; ".join(f"{name}: {error:.3g} times what is tolerated" for error, name in wrong)
        raise AssertionError(f"{what}: {listed}")
