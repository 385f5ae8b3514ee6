"""Rotary parameters as configurations spell them: `rope_parameters` or `rope_scaling` read to frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas import frequencies
from relpos_np.formulas.rotary_axes import axis_frequencies, section_axes
from relpos_np.types import Array

# What every rule may have, and what each reads beside.
_ALL = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_YARN = frozenset({"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"})
_KEYS = {
    "default": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    # Checkpoints of HunYuan hold YaRN's keys, too, which no published code of this rule reads.
    "ntk_alpha": frozenset({"alpha", "factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"}),
    # Yarn-Llama says whether it was trained with the rule, which its code reads of "dynamic-yarn" alone.
    "yarn": _YARN | {"original_max_position_embeddings", "truncate", "finetuned"},
    "longrope": frozenset(
        {
            "factor",
            "short_factor",
            "long_factor",
            "short_mscale",
            "long_mscale",
            "attention_factor",
            "original_max_position_embeddings",
        }
    ),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "proportional": frozenset({"factor"}),
}
# Names that checkpoints have beside those of today.
_OLD = {"mrope": "default", "su": "longrope"}
# Keys with a meaning that is not that of frequencies.
_ELSEWHERE = {
    "llama_4_scaling_beta": "it scales queries by position; take it out, and pass the call's query_scale",
    "xdrope_section": "it lays out four coordinates; take it out, and use axis_frequencies",
}


def rope_parameters(
    parameters: Mapping[str, Any] | None,
    *,
    head_dim: int,
    length: int | None = None,
    rope_theta: float | None = None,
    partial_rotary_factor: float | None = None,
    max_position_embeddings: int | None = None,
    original_max_position_embeddings: int | None = None,
    order: Literal["chunks", "cyclic"] | None = None,
) -> tuple[Array, float]:
    r"""Frequencies and attention factor of a model, from its configuration as it is published.

    ======================= ===========================================================================
    `rope_type` or `type`   rule, with the keys that it reads
    ======================= ===========================================================================
    default, mrope          `rotary_frequencies`
    linear                  `linear_frequencies`: `factor`
    dynamic                 `ntk_frequencies`: `factor`, trained on `max_position_embeddings`; with
                            `alpha` (HunYuan) `ntk_alpha_frequencies`
    yarn                    `yarn_frequencies`: `factor`, `original_max_position_embeddings`,
                            `beta_fast`, `beta_slow`, `truncate`, `mscale` with `mscale_all_dim`,
                            `attention_factor`; `finetuned` (Yarn-Llama) changes nothing
    longrope, su            `longrope_frequencies`: `short_factor`, `long_factor`, `factor`,
                            `original_max_position_embeddings`, `attention_factor` or `short_mscale`
                            with `long_mscale`
    llama3                  `llama3_frequencies`: `factor`, `low_freq_factor`, `high_freq_factor`,
                            `original_max_position_embeddings`
    proportional            `proportional_frequencies`: `factor`, `partial_rotary_factor`
    ======================= ===========================================================================

    All may have `rope_theta`, `partial_rotary_factor`, and `mrope_section` with `mrope_interleaved`. A key that the
    rule does not read is refused by its name, as it would change results elsewhere; null is as good as no key.

    Parameters
    ----------
    parameters : mapping or None
        The value of `rope_parameters`, or of `rope_scaling` in older configurations; None for no rule. Where each type
        of layer has its own, that of one of them.
    head_dim : int
        Number of channels of a head.
    length : int, optional
        Length of the text, which decides for "dynamic" and "longrope". By default it is none that the model was not
        trained on.
    rope_theta, partial_rotary_factor : float, optional
        The keys beside `rope_scaling` in older configurations, for a mapping that lacks them; 10000 and 1 by default.
    max_position_embeddings : int, optional
        The key of that name: trained length of "dynamic"; divided by the original one, the factor of a "yarn" or
        "longrope" that has none; the original one where that is missing.
    original_max_position_embeddings : int, optional
        The key beside the mapping (Phi-3); it goes before that of the mapping.
    order : {"chunks", "cyclic"}, optional
        How `mrope_section` is laid out, see `section_axes`, if `mrope_interleaved` does not say so; default "chunks".

    Returns
    -------
    frequencies : ndarray of float64, shape (P,), or (A, P) with `mrope_section`
        Angle per step of position, for `Rotary`'s ``frequencies``.
    magnitude : float
        The attention factor, for `Rotary`'s ``magnitude``.

    Raises
    ------
    RelposValueError
        If a key is unknown or missing, a rule is unknown, an odd number of channels would turn, or a number is out of
        the rule's range.
    RelposTypeError
        If `parameters` are no mapping, or a value is of a wrong type.

    Notes
    -----
    DeepSeek's models also multiply their scale by the square of YaRN's magnitude for
    :math:`\mu'` = `mscale_all_dim`; that is the call's ``scale``, and not in the attention factor.

    For texts beyond the original length, the code of Phi-3.5-MoE in transformers takes `long_mscale` but keeps the
    short factors; here the long ones are taken.

    References
    ----------
    The keys are those of `modeling_rope_utils.py` in Hugging Face transformers; the rules cite their papers.
    """
    given = _Given(parameters)
    kind = given.kind()
    given.only(_KEYS[kind] | _ALL, kind)
    head_dim = check.integer("head_dim", head_dim, 1)
    base = check.positive("rope_theta", given.get("rope_theta", 10000.0 if rope_theta is None else rope_theta))
    share = given.get("partial_rotary_factor", 1.0 if partial_rotary_factor is None else partial_rotary_factor)
    if not 0 <= check.real("partial_rotary_factor", share) <= 1:
        raise RelposValueError(f"partial_rotary_factor: expected a number from 0 to 1, found {share}")
    if length is not None:
        length = check.integer("length", length, 1)
    longest = max_position_embeddings
    if longest is not None:
        longest = check.integer("max_position_embeddings", longest, 1)
    trained = original_max_position_embeddings
    if trained is None:
        trained = given.get("original_max_position_embeddings", longest)
    if trained is not None:
        trained = check.integer("original_max_position_embeddings", trained, 1)

    dim = head_dim if kind == "proportional" else int(head_dim * share)
    if dim < 2 or dim % 2:
        raise RelposValueError(
            f"partial_rotary_factor: {share:g} of head_dim {head_dim} is {dim} channels; expected an even number"
        )
    omega, magnitude = _RULES[kind](given, _Sizes(dim, base, share, length, trained, longest))
    sections = given.get("mrope_section")
    interleaved = given.get("mrope_interleaved")
    if interleaved is not None:
        stated: Literal["chunks", "cyclic"]
        stated = "cyclic" if check.flag("mrope_interleaved", interleaved) else "chunks"
        if order not in (None, stated):
            raise RelposValueError(f"order: mrope_interleaved says {stated!r}, found {order!r}")
        order = stated
    if sections is None:
        return omega, magnitude
    sections = check.integers("mrope_section", sections)
    if sections.shape != (3,):
        raise RelposValueError(f"mrope_section: expected three numbers of pairs, found shape {sections.shape}")
    # Not "time_last": configurations that have it list other axes first.
    order = check.choice("order", "chunks" if order is None else order, ("chunks", "cyclic"))
    if order == "chunks" and sections.sum() != len(omega):
        raise RelposValueError(f"mrope_section: expected a sum of {len(omega)} pairs, found {sections.tolist()}")
    return axis_frequencies(omega, section_axes(sections.tolist(), order=order, pairs=len(omega)), 3), magnitude


class _Given:
    """The keys of a mapping that have a value."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RelposTypeError(f"parameters: expected a mapping or None, found {type(parameters).__name__}")
        self.values = {key: value for key, value in (parameters or {}).items() if value is not None}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def real(self, key: str, default: Any = None) -> float:
        """A number, which must be there unless there is a default."""
        if self.get(key, default) is None:
            raise RelposValueError(f"parameters: expected a key {key!r}, found {', '.join(sorted(self.values))}")
        return check.real(key, self.get(key, default))

    def kind(self) -> str:
        """The rule: `rope_type`, or `type` in older configurations, where they may not contradict."""
        named = {key: self.values[key] for key in ("rope_type", "type") if key in self.values}
        kinds = []
        for key, value in named.items():
            known = isinstance(value, str) and (value in _KEYS or value in _OLD) and value != "ntk_alpha"
            if not known:
                words = ", ".join(repr(kind) for kind in (*_KEYS, *_OLD) if kind != "ntk_alpha")
                raise RelposValueError(f"{key}: expected one of {words}; found {value!r}")
            kinds.append(_OLD.get(value, value))
        if len(set(kinds)) > 1:
            raise RelposValueError(f"rope_type, type: expected one rule, found {' and '.join(map(repr, kinds))}")
        kind = kinds[0] if kinds else "default"
        return "ntk_alpha" if kind == "dynamic" and self.get("alpha") else kind

    def only(self, known: frozenset[str], kind: str) -> None:
        """Refuse every other key."""
        for key, value in self.values.items():
            if key in known:
                continue
            if key in _ELSEWHERE:
                raise RelposValueError(f"{key}: no frequencies depend on it; {_ELSEWHERE[key]}")
            if isinstance(value, Mapping):
                raise RelposValueError(f"{key}: expected the parameters of one type of layer; pass parameters[{key!r}]")
            raise RelposValueError(f"{key}: rope_type {kind!r} has no such key; expected {', '.join(sorted(known))}")


@dataclass(frozen=True)
class _Sizes:
    """What rules compute with beside their keys."""

    dim: int
    base: float
    share: float
    length: int | None
    original: int | None
    longest: int | None

    @property
    def trained(self) -> int:
        """The original length, which must be there."""
        if self.original is None:
            raise RelposValueError("original_max_position_embeddings: expected it, or max_position_embeddings")
        return self.original

    def growth(self, given: _Given) -> float:
        """`factor`, or what the lengths say."""
        if given.get("factor") is None and self.longest is None:
            raise RelposValueError("factor: expected it, or max_position_embeddings")
        return given.real("factor", None if self.longest is None else self.longest / self.trained)


def _default(given: _Given, at: _Sizes) -> tuple[Array, float]:
    if given.real("factor", 1.0) != 1:
        raise RelposValueError(f"factor: {given.get('factor')} has no effect with rope_type 'default'; expected 1")
    return frequencies.rotary_frequencies(at.dim, base=at.base), 1.0


def _linear(given: _Given, at: _Sizes) -> tuple[Array, float]:
    return frequencies.linear_frequencies(at.dim, factor=given.real("factor"), base=at.base), 1.0


def _dynamic(given: _Given, at: _Sizes) -> tuple[Array, float]:
    if at.longest is None:
        raise RelposValueError("max_position_embeddings: rope_type 'dynamic' needs it, the trained length")
    length = at.longest if at.length is None else at.length
    factor = given.real("factor")
    return frequencies.ntk_frequencies(
        at.dim, length=length, trained_length=at.longest, factor=factor, base=at.base
    ), 1.0


def _ntk_alpha(given: _Given, at: _Sizes) -> tuple[Array, float]:
    return frequencies.ntk_alpha_frequencies(at.dim, alpha=given.real("alpha"), base=at.base), 1.0


def _yarn(given: _Given, at: _Sizes) -> tuple[Array, float]:
    scales = {}
    check.flag("finetuned", given.get("finetuned", True))
    # Published code reads them together or not at all.
    if given.get("mscale") and given.get("mscale_all_dim"):
        scales = {"mscale": given.real("mscale"), "mscale_all": given.real("mscale_all_dim")}
    omega, magnitude = frequencies.yarn_frequencies(
        at.dim,
        factor=at.growth(given),
        trained_length=at.trained,
        base=at.base,
        beta_fast=given.real("beta_fast", 32.0),
        beta_slow=given.real("beta_slow", 1.0),
        truncate=check.flag("truncate", given.get("truncate", True)),
        **scales,
    )
    return omega, given.real("attention_factor", magnitude)


def _longrope(given: _Given, at: _Sizes) -> tuple[Array, float]:
    length = at.trained if at.length is None else at.length
    keys = [key for key in ("short_mscale", "long_mscale", "attention_factor") if given.get(key) is not None]
    chosen = None
    if keys == ["attention_factor"]:
        chosen = given.real("attention_factor")
    elif keys == ["short_mscale", "long_mscale"]:
        chosen = given.real("long_mscale" if length > at.trained else "short_mscale")
    elif keys:
        raise RelposValueError(f"{keys[0]}: expected attention_factor, or short_mscale and long_mscale, found {keys}")
    for key in ("short_factor", "long_factor"):
        if given.get(key) is None:
            raise RelposValueError(f"{key}: rope_type 'longrope' needs it, found {', '.join(sorted(given.values))}")
    omega, magnitude = frequencies.longrope_frequencies(
        at.dim,
        short_factors=given.get("short_factor"),
        long_factors=given.get("long_factor"),
        length=length,
        trained_length=at.trained,
        # It decides for nothing but the attention factor.
        factor=at.growth(given) if chosen is None else 1.0,
        base=at.base,
    )
    return omega, magnitude if chosen is None else chosen


def _llama3(given: _Given, at: _Sizes) -> tuple[Array, float]:
    omega = frequencies.llama3_frequencies(
        at.dim,
        factor=given.real("factor"),
        trained_length=at.trained,
        base=at.base,
        low_factor=given.real("low_freq_factor"),
        high_factor=given.real("high_freq_factor"),
    )
    return omega, 1.0


def _proportional(given: _Given, at: _Sizes) -> tuple[Array, float]:
    return frequencies.proportional_frequencies(
        at.dim, share=at.share, factor=given.real("factor", 1.0), base=at.base
    ), 1.0


_RULES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
