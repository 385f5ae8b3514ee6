"""Seeded examples of every scheme, real data and tolerances, for the tests of this and of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np

from relpos_np import check
from relpos_np.api import attention, logits
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.registry import SCHEMES
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.learned import LearnedAbsolute
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.rotary import Rotary
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.sinusoidal import Sinusoidal
from relpos_np.schemes.t5 import T5
from relpos_np.schemes.transformer_xl import TransformerXL, row_distances
from relpos_np.schemes.window import WindowBias
from relpos_np.types import Array

__all__ = ["Example", "assert_matches", "example", "real_example", "tolerance"]

# Rounding errors in this unit: eps * sum_j p_j |v_j| * (1 + max |logit|). Every float kernel promises four.
_PROMISE = 4.0
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# Relative and absolute tolerances of torch.testing.assert_close.
_TORCH = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}


@dataclass(frozen=True, eq=False)
class Example:
    """Arguments of one call of attention, and what is right for it.

    Attributes
    ----------
    name : str
        Key in `relpos_np.SCHEMES`.
    variant : str or None
        One of the scheme's variants.
    q, k, v : ndarray, shapes (B, H, L_q, D), (B, H_kv, L_k, D) and (B, H_kv, L_k, D_v)
        Queries, keys and values. For an absolute scheme all three are its encoded inputs, as one head.
    position : scheme or None
        To be passed as ``position=``; None for an absolute scheme.
    kwargs : mapping
        Other arguments of `relpos_np.attention`, such as ``causal``.
    x : ndarray, shape (B, L, D), or None
        Inputs of an absolute scheme.
    encoding : callable or None
        The absolute scheme: q is ``encoding(x)``, rounded to the dtype of x.
    """

    name: str
    variant: str | None
    q: Array
    k: Array
    v: Array
    position: Scheme | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    x: Array | None = None
    encoding: Callable[[Array], Array] | None = None

    def run(self, backend: str | None = None) -> tuple[Array, Array]:
        """Output and log-sum-exp of one backend.

        Parameters
        ----------
        backend : str, optional
            See `relpos_np.set_backend`.

        Returns
        -------
        out, lse : ndarray
            As `relpos_np.attention` returns them.
        """
        return attention(
            self.q, self.k, self.v, position=self.position, backend=backend, return_lse=True, **self.kwargs
        )

    @cached_property
    def _expected(self) -> tuple[Array, Array, Array]:
        """Output, log-sum-exp and scores in float64."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        out, lse = attention(q, k, v, position=self.position, backend="numpy", return_lse=True, **self.kwargs)
        return out, lse, logits(q, k, position=self.position, backend="numpy", **self.kwargs)

    @property
    def expected(self) -> Array:
        """The reference's output for the same numbers in float64.

        Returns
        -------
        ndarray of float64, shape (B, H, L_q, D_v)
            What every backend must return, but for rounding.
        """
        return self._expected[0]

    @property
    def expected_lse(self) -> Array:
        """The reference's log-sum-exp for the same numbers in float64.

        Returns
        -------
        ndarray of float64, shape (B, H, L_q)
            The log-sum-exp of `relpos_np.attention`.
        """
        return self._expected[1]

    def error(self, out: Array, lse: Array | None = None, *, dtype: Any = None) -> float:
        """The largest error of an answer, in units of what is tolerated.

        Parameters
        ----------
        out : ndarray, shape (B, H, L_q, D_v)
            An output to be judged.
        lse : ndarray, shape (B, H, L_q), optional
            A log-sum-exp to be judged.
        dtype : dtype, optional
            Precision that is asked of the answer; default that of `q`.

        Returns
        -------
        float
            At most 1 if each element is within `tolerance`; infinity for a wrong shape, a NaN, or a
            query without keys whose output is not exactly 0.
        """
        dtype = self.q.dtype if dtype is None else dtype
        expected, expected_lse, s = self._expected
        bound = float(np.abs(s[np.isfinite(s)]).max(initial=0.0))
        weights = np.exp(s - np.where(np.isfinite(expected_lse), expected_lse, 0.0)[..., None])
        values = np.abs(self.v.astype(np.float64))
        magnitude = weights @ np.repeat(values, s.shape[-3] // values.shape[-3], axis=-3)
        table = getattr(self.position, "value_table", None)
        if table is not None:
            magnitude += np.abs(table).max() * weights.sum(axis=-1, keepdims=True)
        depth = self.q.shape[-1]
        worst = _ratio(out, expected, tolerance(dtype, logit_bound=bound, depth=depth, magnitude=magnitude))
        if lse is None:
            return worst
        # lse is of the size of a logit plus ln L_k, and half precision keeps it in float32.
        kept = "float32" if _EPS[np.dtype(dtype).name] > _EPS["float32"] else dtype
        slack = tolerance(kept, logit_bound=bound + float(np.log(max(s.shape[-1], 1))), depth=depth)
        return max(worst, _ratio(lse, expected_lse, slack))


def _ratio(actual: Array, expected: Array, tolerated: Any) -> float:
    """The largest of |actual - expected| / tolerated; equal elements, also infinities, count 0."""
    if actual.shape != expected.shape:
        return np.inf
    actual = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio = np.where(actual == expected, 0.0, np.abs(actual - expected) / tolerated)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


def tolerance(dtype: Any, *, logit_bound: float, depth: int = 64, magnitude: Any = 1.0) -> Any:
    r"""Rounding error that attention may have.

    .. math::

        4\, \varepsilon\, \sqrt{\max(1, D / 64)}\, (1 + \max |s|) \sum_j p_j |v_j|

    A logit's rounding error is relative to its size, the exponential makes an absolute error of it
    a relative one, and sums of D products gain the root. Half precision is computed in float32 and
    rounded once more at the end.

    Parameters
    ----------
    dtype : dtype
        float16, bfloat16, float32 or float64.
    logit_bound : float
        The largest score, in absolute value.
    depth : int
        head_dim D.
    magnitude : float or ndarray
        The sum of :math:`p_j |v_j|`; the largest absolute value will do.

    Returns
    -------
    float or ndarray
        Largest tolerable difference from the exact answer; shaped as `magnitude`.

    Raises
    ------
    RelposTypeError
        If the dtype is none of these.
    """
    name = np.dtype(dtype).name
    if name not in _EPS:
        raise RelposTypeError(f"dtype: expected one of {', '.join(_EPS)}; found {name}")
    half = _EPS[name] > _EPS["float32"]
    eps = _EPS["float32"] if half else _EPS[name]
    factor = _PROMISE * eps * np.sqrt(max(1.0, depth / 64)) * (1.0 + logit_bound)
    return (factor + (_EPS[name] if half else 0.0)) * magnitude


def assert_matches(actual: Any, expected: Any, *, dtype: Any = None) -> None:
    """Assert that an answer is right, with the tolerances that PyTorch uses by default.

    Parameters
    ----------
    actual : array_like
        What an implementation returned.
    expected : array_like
        What it should be, such as the float64 output of ``backend="numpy"``.
    dtype : dtype, optional
        Precision that is asked for; default that of `actual`. Relative and absolute tolerances are 1e-3
        and 1e-5 for float16, 1.6e-2 and 1e-5 for bfloat16, 1.3e-6 and 1e-5 for float32, 1e-7 and
        1e-7 for float64; other dtypes must be equal.

    Raises
    ------
    AssertionError
        If shapes differ, an element is off by more than ``atol + rtol * |expected|``, or one is NaN.
    """
    found, wanted = np.asarray(actual), np.asarray(expected)
    if found.shape != wanted.shape:
        raise AssertionError(f"shapes differ: found {found.shape}, expected {wanted.shape}")
    rtol, atol = _TORCH.get((found.dtype if dtype is None else np.dtype(dtype)).name, (0.0, 0.0))
    if rtol:
        # Sums of low precision, as in the message, would be useless.
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=False)


def real_example() -> dict[str, Array]:
    """Real attention: four heads of one layer of all-mpnet-base-v2 on two texts.

    Returns
    -------
    dict of ndarray
        ``q``, ``k``, ``v`` and ``expected`` (2, 4, 69, 64) float32; ``table`` (32, 4) float32 for
        `relpos_np.T5`; ``mask`` (2, 69) bool, True for a word piece; ``tokens`` (2, 69), the
        word pieces. The scale is 1/8. ``expected`` comes from transformers in float64.
    """
    file = resources.files("relpos_np").joinpath("data/mpnet_layer5.npz")
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@dataclass(frozen=True)
class _Size:
    """Lengths that no block, panel or vector of a kernel divides."""

    q_len: int
    k_len: int
    dim: int
    v_dim: int
    grid: tuple[int, int]
    frames: tuple[int, int]


_SIZES = {
    "small": _Size(37, 53, 20, 12, (5, 7), (3, 2)),
    "blocks": _Size(203, 397, 36, 28, (14, 15), (7, 4)),
}
_Draw = Callable[..., Array]
_Parts = dict[str, Any]


def _qkv(draw: _Draw, size: _Size, heads: int, kv_heads: int, q_len: int = 0, k_len: int = 0) -> _Parts:
    q_len, k_len = q_len or size.q_len, k_len or size.k_len
    return {
        "q": draw(2, heads, q_len, size.dim),
        "k": draw(2, kv_heads, k_len, size.dim),
        "v": draw(2, kv_heads, k_len, size.v_dim),
    }


def _plain(draw: _Draw, size: _Size, _variant: str | None) -> _Parts:
    return {**_qkv(draw, size, 4, 2), "position": Plain(), "kwargs": {"causal": True}}


def _shaw(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    parts = _qkv(draw, size, 3, 3)
    tables = draw(2 * 5 + 1, size.dim), draw(2 * 4 + 1, size.v_dim)
    return {**parts, "position": Shaw(*tables, outside=variant or "clip")}


def _t5(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    parts = _qkv(draw, size, 4, 2)
    position = T5(draw(32, 4), max_distance=128, rounding=variant or "exact")
    mask = np.ones((2, 1, 1, size.k_len), dtype=np.bool_)
    mask[1, ..., -size.k_len // 3 :] = False
    return {**parts, "position": position, "kwargs": {"scale": 0.5, "mask": mask}}


def _transformer_xl(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    parts = _qkv(draw, size, 3, 3)
    rows = len(row_distances(size.q_len, size.k_len, variant or "transformer_xl"))
    u, v, r = draw(3, size.dim), draw(3, size.dim), draw(rows, 3, size.dim)
    position = TransformerXL(u, v, r, variant=variant or "transformer_xl")
    # Only the original hides what its shift leaves above the diagonal.
    return {**parts, "position": position, "kwargs": {"causal": variant in (None, "transformer_xl")}}


def _rotary(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    parts = _qkv(draw, size, 4, 2)
    # The last four channels stay, as in models that turn only some.
    position = Rotary(size.dim - 4, base=500.0, layout=variant or "half", magnitude=1.125)
    return {**parts, "position": position, "kwargs": {"causal": True}}


def _window(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    (height, width), (frames_q, frames_kv) = size.grid, size.frames
    if variant in (None, "swin"):
        table = draw((2 * height - 1) * (2 * width - 1), 3)
        return {**_qkv(draw, size, 3, 3, height * width, height * width), "position": WindowBias(table, size.grid)}
    height, width = (height + 1) // 2, (width + 1) // 2
    area = height * width
    table = draw((2 * frames_q - 1) * (2 * height - 1) * (2 * width - 1), 3)
    if variant == "video":
        length = frames_q * area
        position = WindowBias(table, (frames_q, height, width))
        return {**_qkv(draw, size, 3, 3, length, length), "position": position}
    position = WindowBias.rstt(table, frames_q, frames_kv, (height, width))
    return {**_qkv(draw, size, 3, 3, frames_q * area, frames_kv * area), "position": position}


def _alibi(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    if variant == "causal":
        return {**_qkv(draw, size, 4, 2), "position": ALiBi(form="causal"), "kwargs": {"causal": True}}
    if variant == "key":
        # As many heads as are no power of two, whose slopes follow another rule.
        return {**_qkv(draw, size, 6, 2), "position": ALiBi(heads=6, form="key"), "kwargs": {"causal": True}}
    return {**_qkv(draw, size, 4, 2), "position": ALiBi(np.abs(draw(4)))}


def _kerple(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    parts = _qkv(draw, size, 4, 2)
    # Powers up to 1 keep the scores of a few hundred keys small.
    a, b = (np.exp(-np.abs(draw(4))).astype(parts["q"].dtype) for _ in "ab")
    return {**parts, "position": KERPLE(a, b, form=variant or "log"), "kwargs": {"causal": True}}


def _encoded(x: Array, encoding: Callable[[Array], Array]) -> _Parts:
    y = encoding(x)[:, None].astype(x.dtype, copy=False)
    return {"q": y, "k": y, "v": y, "position": None, "x": x, "encoding": encoding}


def _sinusoidal(draw: _Draw, size: _Size, variant: str | None) -> _Parts:
    return _encoded(draw(2, size.q_len, size.dim), Sinusoidal(size.dim, layout=variant or "interleaved"))


def _learned(draw: _Draw, size: _Size, _variant: str | None) -> _Parts:
    return _encoded(draw(2, size.q_len, size.dim), LearnedAbsolute(draw(size.q_len + 3, size.dim)))


_BUILDERS: Mapping[str, Callable[[_Draw, _Size, str | None], _Parts]] = MappingProxyType(
    {
        "plain": _plain,
        "shaw": _shaw,
        "t5": _t5,
        "transformer_xl": _transformer_xl,
        "rotary": _rotary,
        "window": _window,
        "alibi": _alibi,
        "kerple": _kerple,
        "sinusoidal": _sinusoidal,
        "learned": _learned,
    }
)


def example(
    name: str, *, dtype: Any = "float32", seed: int = 0, variant: str | None = None, size: str = "small"
) -> Example:
    """A seeded example of a scheme.

    Parameters
    ----------
    name : str
        Key in `relpos_np.SCHEMES`.
    dtype : dtype
        Of all arrays; the same numbers are drawn for each and rounded to it.
    seed : int
        Of the numbers.
    variant : str, optional
        One of the scheme's variants; default the first.
    size : {"small", "blocks"}
        "small" has about 37 queries and 53 keys, "blocks" a few hundred, which is more than the kernels
        take at a time. Neither is a multiple of a vector or a block.

    Returns
    -------
    Example
        ``rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs)`` is valid for each.

    Raises
    ------
    RelposValueError
        If there is no such scheme, variant or size.
    """
    check.choice("name", name, tuple(SCHEMES))
    check.choice("size", size, tuple(_SIZES))
    variants = SCHEMES[name].variants
    if variant is not None and variant not in variants:
        raise RelposValueError(f"variant: {name} has {', '.join(map(repr, variants)) or 'none'}; found {variant!r}")
    rng = np.random.default_rng(check.integer("seed", seed, 0))

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    return Example(
        name=name, variant=variant or next(iter(variants), None), **_BUILDERS[name](draw, _SIZES[size], variant)
    )
