r"""Frequencies of rotary positions: the paper's, and the rules for longer texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.types import Array

# Far beyond any head: frequencies are made before the number of channels is known to fit.
_MOST = 1 << 20


def _rotated(dim: Any, base: Any) -> tuple[int, float]:
    """Number of rotated channels and base, in range."""
    if check.integer("dim", dim, 2) % 2:
        raise RelposValueError(f"dim: expected an even number of channels, found {dim}")
    if dim > _MOST:
        raise RelposValueError(f"dim: expected at most {_MOST} channels, found {dim}")
    return int(dim), check.positive("base", base)


def _share(name: str, value: Any, most: float) -> float:
    if not 0 <= check.real(name, value) <= most:
        raise RelposValueError(f"{name}: expected a number from 0 to {most:g}, found {value}")
    return float(value)


def _factor(value: Any) -> float:
    if check.real("factor", value) < 1:
        raise RelposValueError(f"factor: expected at least 1, found {value}")
    return float(value)


def rotary_frequencies(dim: int, *, base: float = 10000.0) -> Array:
    r"""Frequencies of the paper: :math:`\omega_p = \mathrm{base}^{-2p/d}`.

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even.
    base : float
        Ratio between the longest and the shortest wavelength (`rope_theta`).

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position, one per pair.

    Raises
    ------
    RelposValueError
        If `dim` is odd or below 2, or `base` is not positive.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    dim, base = _rotated(dim, base)
    frequencies: Array = base ** (-2.0 * np.arange(dim // 2) / dim)
    return frequencies


def linear_frequencies(dim: int, *, factor: float, base: float = 10000.0) -> Array:
    r"""Position interpolation: positions t / s, which is :math:`\omega_p / s`.

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even.
    factor : float
        How many times longer the context becomes, s.
    base : float
        See `rotary_frequencies`.

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position.

    Raises
    ------
    RelposValueError
        If `factor` is below 1, or as for `rotary_frequencies`.

    References
    ----------
    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023.
    """
    return rotary_frequencies(dim, base=base) / _factor(factor)


def ntk_frequencies(dim: int, *, length: int, trained_length: int, factor: float, base: float = 10000.0) -> Array:
    r"""The "dynamic" NTK rule: a larger base once the text is longer than those seen in training.

    .. math::

        \mathrm{base}' = \mathrm{base} \left(\frac{s L}{L_0} - (s - 1)\right)^{d / (d - 2)}, \qquad L > L_0

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even, at least 4.
    length : int
        Length L of the text; up to L_0 nothing changes.
    trained_length : int
        Longest length seen in training, L_0.
    factor : float
        The factor s.
    base : float
        See `rotary_frequencies`.

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position.

    Raises
    ------
    RelposValueError
        If `dim` is odd or below 4, a length is below 1, `factor` is below 1 or `base` is not positive.

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024, describe the
    rule; the formula is that of Hugging Face transformers.
    """
    dim, base = _rotated(dim, base)
    check.integer("dim", dim, 4)
    length, trained_length = check.integer("length", length, 1), check.integer("trained_length", trained_length, 1)
    factor = _factor(factor)
    growth = factor * max(length, trained_length) / trained_length - (factor - 1)
    return rotary_frequencies(dim, base=base * growth ** (dim / (dim - 2)))


def ntk_alpha_frequencies(dim: int, *, alpha: float, base: float = 10000.0) -> Array:
    r"""The first NTK rule: a base that is larger for texts of all lengths.

    .. math::

        \mathrm{base}' = \mathrm{base}\; \alpha^{d / (d - 2)}

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even, at least 4.
    alpha : float
        The number :math:`\alpha`, by which the slowest pair is interpolated.
    base : float
        See `rotary_frequencies`.

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position.

    Raises
    ------
    RelposValueError
        If `dim` is odd or below 4, or `alpha` or `base` is not positive.

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024, definition 1, attribute
    "NTK-aware" interpolation to a post of 2023; HunYuan's models name the number `alpha`.
    """
    dim, base = _rotated(dim, base)
    check.integer("dim", dim, 4)
    return rotary_frequencies(dim, base=base * check.positive("alpha", alpha) ** (dim / (dim - 2)))


def yarn_frequencies(
    dim: int,
    *,
    factor: float,
    trained_length: int,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    mscale: float = 1.0,
    mscale_all: float = 0.0,
) -> tuple[Array, float]:
    r"""YaRN: fast pairs keep their frequency, slow ones are interpolated, with a ramp between.

    .. math::

        \omega'_p = (1 - g_p)\,\omega_p + g_p\,\frac{\omega_p}{s}, \qquad
        g_p = \mathrm{clip}\left(\frac{p - a}{b - a},\, 0,\, 1\right), \qquad
        m = \frac{0.1\, \mu \ln s + 1}{0.1\, \mu' \ln s + 1}

    The pair that turns :math:`\beta` times within :math:`L_0` positions is
    :math:`p(\beta) = \frac{d \ln(L_0 / 2\pi\beta)}{2 \ln \mathrm{base}}`; a is
    :math:`\max(\lfloor p(\beta_\mathrm{fast}) \rfloor, 0)` and b is
    :math:`\min(\lceil p(\beta_\mathrm{slow}) \rceil, d - 1)`.

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even.
    factor : float
        How many times longer the context becomes, s.
    trained_length : int
        Longest length seen in training, L_0.
    base : float
        See `rotary_frequencies`; larger than 1.
    beta_fast, beta_slow : float
        Turns within L_0 above which a pair is kept and below which it is interpolated.
    truncate : bool
        Whether to round the ends of the ramp outwards to whole pairs, as the published code does.
    mscale, mscale_all : float
        :math:`\mu` and :math:`\mu'`; the paper has 1 and 0. transformers reads its ``mscale`` and
        ``mscale_all_dim`` (DeepSeek) only where both are given and not 0, else it takes the paper's.

    Returns
    -------
    frequencies : ndarray of float64, shape (d / 2,)
        Angle per step of position.
    magnitude : float
        The attention factor m, for `Rotary`'s ``magnitude``.

    Raises
    ------
    RelposValueError
        If `factor` or `trained_length` is below 1, `base` is at most 1, not 0 < `beta_slow` < `beta_fast`, an
        `mscale` is negative, or as for `rotary_frequencies`.

    References
    ----------
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024. The
    paper's ramp is linear in the number of turns, its published code's in the index of the pair, as here.
    """
    plain, factor = rotary_frequencies(dim, base=base), _factor(factor)
    if base <= 1:
        raise RelposValueError(f"base: expected a number above 1, found {base}")
    trained_length = check.integer("trained_length", trained_length, 1)
    fast, slow = check.real("beta_fast", beta_fast), check.positive("beta_slow", beta_slow)
    # Where they are the same (Kimi K2), rounding makes the ramp.
    if fast < slow:
        raise RelposValueError(f"beta_fast: expected at least beta_slow = {beta_slow}, found {beta_fast}")
    ends = [dim * math.log(trained_length / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in (fast, slow)]
    if check.flag("truncate", truncate):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    # Where the ends meet there is a step; the published code makes it with the same thousandth.
    span = last - first or 0.001
    share = np.clip((np.arange(dim // 2) - first) / span, 0.0, 1.0)
    magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return plain * (1 - share) + plain / factor * share, magnitude


def yarn_magnitude(factor: float, mscale: float) -> float:
    r"""What YaRN multiplies queries and keys with, :math:`0.1\, \mu \ln s + 1`.

    Parameters
    ----------
    factor : float
        How many times longer the context becomes, s.
    mscale : float
        :math:`\mu`. DeepSeek multiplies the scale of attention with the square for its `mscale_all_dim`.

    Returns
    -------
    float
        The factor.

    Raises
    ------
    RelposValueError
        If `factor` is below 1, or `mscale` negative.
    """
    return 0.1 * _share("mscale", mscale, math.inf) * math.log(_factor(factor)) + 1.0


def llama3_frequencies(
    dim: int,
    *,
    factor: float,
    trained_length: int,
    base: float = 10000.0,
    low_factor: float = 1.0,
    high_factor: float = 4.0,
) -> Array:
    r"""Llama 3.1: like YaRN with bands in the number of turns within the trained length, and no attention factor.

    .. math::

        \omega'_p = (1 - g_p)\,\frac{\omega_p}{s} + g_p\,\omega_p, \qquad
        g_p = \mathrm{clip}\left(\frac{L_0\,\omega_p / 2\pi - l}{h - l},\, 0,\, 1\right)

    Parameters
    ----------
    dim, factor, trained_length, base
        See `yarn_frequencies`; `base` as in `rotary_frequencies`.
    low_factor, high_factor : float
        Turns within L_0: l, below which a pair is interpolated, and h, above which it is kept. Where they are the
        same, as in Llama 4 Scout, there is a step between.

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position.

    Raises
    ------
    RelposValueError
        If `factor` or `trained_length` is below 1, not 0 < `low_factor` <= `high_factor`, or as for
        `rotary_frequencies`.

    References
    ----------
    Grattafiori et al., "The Llama 3 Herd of Models", 2024; the formula is that of the published code.
    """
    plain, factor = rotary_frequencies(dim, base=base), _factor(factor)
    trained_length = check.integer("trained_length", trained_length, 1)
    low, high = check.positive("low_factor", low_factor), check.real("high_factor", high_factor)
    if high < low:
        raise RelposValueError(f"high_factor: expected at least low_factor = {low_factor}, found {high_factor}")
    turns = trained_length * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else np.where(turns < low, 0.0, 1.0)
    found: Array = plain / factor * (1 - kept) + plain * kept
    return found


def longrope_frequencies(
    dim: int,
    *,
    short_factors: Any,
    long_factors: Any,
    length: int,
    trained_length: int,
    factor: float,
    base: float = 10000.0,
) -> tuple[Array, float]:
    r"""LongRoPE: each pair is interpolated by a factor of its own, found by a search.

    .. math::

        \omega'_p = \frac{\omega_p}{\lambda_p}, \qquad
        \lambda = \begin{cases} \lambda^\mathrm{long} & L > L_0 \\ \lambda^\mathrm{short} & L \le L_0 \end{cases},
        \qquad m = \sqrt{1 + \frac{\ln s}{\ln L_0}}

    Parameters
    ----------
    dim : int
        Number of rotated channels d, even.
    short_factors, long_factors : ndarray or sequence of float, shape (d / 2,)
        Factors :math:`\lambda_p`, one per pair, as published with a model (`short_factor`, `long_factor`).
    length : int
        Length L of the text, which chooses between them.
    trained_length : int
        Longest length seen in training, L_0; at least 2.
    factor : float
        How many times longer the context may become, s: ``max_position_embeddings`` divided by L_0, whatever L.
    base : float
        See `rotary_frequencies`.

    Returns
    -------
    frequencies : ndarray of float64, shape (d / 2,)
        Angle per step of position.
    magnitude : float
        The attention factor m, for `Rotary`'s ``magnitude``; it applies to short texts too.

    Raises
    ------
    RelposValueError
        If there is not one positive factor per pair, `length` or `factor` is below 1, `trained_length` is below 2, or
        as for `rotary_frequencies`.

    References
    ----------
    Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", ICML 2024. The paper also leaves
    the first positions of a text uninterpolated; the published models (Phi-3) and transformers do not.
    """
    plain = rotary_frequencies(dim, base=base)
    factors = {"short_factors": short_factors, "long_factors": long_factors}
    for name, value in factors.items():
        # Configurations are read to lists.
        listed = np.array([check.real(name, x) for x in value]) if isinstance(value, list | tuple) else value
        factors[name] = check.table(name, listed, "pairs").astype(np.float64)
        if factors[name].shape != plain.shape:
            raise RelposValueError(f"{name}: expected shape {plain.shape} for dim {dim}, found {factors[name].shape}")
        if not (np.isfinite(factors[name]) & (factors[name] > 0)).all():
            raise RelposValueError(f"{name}: expected positive numbers, found {factors[name].min()}")
    length, trained_length = check.integer("length", length, 1), check.integer("trained_length", trained_length, 2)
    chosen = factors["long_factors" if length > trained_length else "short_factors"]
    return plain / chosen, math.sqrt(1.0 + math.log(_factor(factor)) / math.log(trained_length))


def proportional_frequencies(dim: int, *, share: float = 1.0, factor: float = 1.0, base: float = 10000.0) -> Array:
    r"""Only the fastest pairs turn, with the frequencies they have among all; the others stand still.

    .. math::

        \omega'_p = \begin{cases} \omega_p / s & p < \lfloor \rho d / 2 \rfloor \\ 0 & \text{else} \end{cases}

    Parameters
    ----------
    dim : int
        Number of channels d, even: all of a head's. A pair keeps the partner it has among all channels, unlike with
        `Rotary`'s ``dim``, where the first channels have frequencies and partners of their own.
    share : float
        Share :math:`\rho` of the pairs that turn (`partial_rotary_factor`).
    factor : float
        See `linear_frequencies`.
    base : float
        See `rotary_frequencies`.

    Returns
    -------
    ndarray of float64, shape (d / 2,)
        Angle per step of position.

    Raises
    ------
    RelposValueError
        If `share` is not in [0, 1], or as for `linear_frequencies`.

    References
    ----------
    Barbero et al., "Round and Round We Go! What Makes Rotary Positional Encodings Useful?", ICLR 2025 (p-RoPE); the
    formula is that of Hugging Face transformers, "proportional".
    """
    frequencies = linear_frequencies(dim, factor=factor, base=base)
    turning = int(_share("share", share, 1.0) * dim // 2)
    frequencies[turning:] = 0.0
    return frequencies
