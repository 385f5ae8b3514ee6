"""Rotary positions as configurations state them: `rope_parameters`, or `rope_scaling` beside `rope_theta`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from relpos_np._contract import check
from relpos_np.configs.keys import Keys
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.errors import RelposValueError
from relpos_np.formulas.rope_parameters import rope_parameters
from relpos_np.schemes.rotary import Rotary
from relpos_np.types import Array

# Rules whose frequencies depend on the longest position of a call.
_BY_LENGTH = ("dynamic", "longrope", "su")


def _rule(stored: Mapping[str, Any]) -> str:
    """The name of a rule as stored."""
    return str(stored.get("rope_type") or stored.get("type") or "default")


@dataclass(frozen=True)
class Parameters:
    """Rotary parameters of a layer: the stored mapping, and what stands beside it or is the model's default.

    Attributes
    ----------
    stored : mapping
        For `relpos_np.reference.rope_parameters`.
    theta, share : float
        Base, and the share of channels that turn, if the mapping does not say it.
    longest, original : int or None
        `max_position_embeddings` and `original_max_position_embeddings` beside the mapping.
    order : {"chunks", "cyclic"}
        How sections of pairs are laid out.
    notes : tuple of str
        What the file has and the model's class does not read.
    pairs : str
        Layout of the channels that turn together, where weights were stored with another one.
    """

    stored: Mapping[str, Any]
    theta: float
    share: float
    longest: int
    original: int | None
    order: Literal["chunks", "cyclic"] = "chunks"
    notes: tuple[str, ...] = ()
    pairs: str = ""

    @property
    def rule(self) -> str:
        """The name of the rule as stored."""
        return _rule(self.stored)

    def frequencies(self, head_dim: int, length: int | None = None) -> tuple[Array, float]:
        """Angles per step of a head's channels in a text of some length, and the attention factor."""
        return rope_parameters(
            self.stored,
            head_dim=head_dim,
            length=length,
            rope_theta=self.theta,
            partial_rotary_factor=self.share,
            max_position_embeddings=self.longest,
            original_max_position_embeddings=self.original,
            order=self.order,
        )

    def words(self) -> str:
        """The rule and its numbers, without lists."""
        share = {} if self.share == 1 else {"partial_rotary_factor": self.share}
        named = {"rope_theta": self.theta} | share | {name: x for name, x in self.stored.items() if x is not None}
        shown = [f"{name} {x}" for name, x in sorted(named.items()) if not isinstance(x, list | str)]
        return f"{self.rule}: {', '.join(shown)}"


def stored(keys: Keys) -> dict[str, Any]:
    """`rope_scaling`, else `rope_parameters`, else those of the model's class, in which null stands for its own."""
    scaling, new = keys.get("rope_scaling", None), keys.get("rope_parameters", None)
    new = keys.family.defaults.get("rope_parameters") if new is None else new
    for name, value in (("rope_scaling", scaling), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise RelposValueError(f"{name}: expected an object, found {value!r}")
    return dict(scaling or new or {})


def parameters(
    keys: Keys,
    layer_type: str = "",
    *,
    theta: float | Mapping[str, float] = 10000.0,
    share: float | None = 1.0,
    theta_keys: Mapping[str, str] | str = "rope_theta",
    share_key: str = "partial_rotary_factor",
    elsewhere: Sequence[str] = (),
    plain: Sequence[str] = (),
    order: Literal["chunks", "cyclic"] = "chunks",
    sections: Sequence[int] | None = None,
) -> Parameters:
    """The rotary parameters of a layer, whichever way they are stored.

    Parameters
    ----------
    keys : Keys
        Of the model.
    layer_type : str
        Whose parameters, where types of layers have their own.
    theta, share : float
        What the model's class has where neither is stored; `theta` may be given per type of layer, and `share` may be
        None where the class reads none under the default rule.
    theta_keys, share_key : str
        Where they are stored beside `rope_scaling`; the former may be given per type of layer.
    elsewhere : sequence of str
        Parameters that the model's reader itself takes.
    plain : sequence of str
        Types of layers to which `rope_scaling` beside them does not apply.
    order, sections
        Of multimodal positions: the order, and the model's default sections.
    """
    scaling, raw = keys.get("rope_scaling", None), stored(keys)
    types = [name for name in raw if name.endswith("_attention")]
    if layer_type in raw:
        own = raw[layer_type] or {}
        if not isinstance(own, Mapping):
            raise RelposValueError(f"rope_parameters: expected an object for {layer_type}, found {own!r}")
        raw = dict(own)
    elif types:
        raise RelposValueError(f"rope_parameters: has {', '.join(types)}, and nothing for {layer_type!r}")
    elif raw and not scaling and isinstance(theta, Mapping) | isinstance(theta_keys, Mapping):
        raise RelposValueError(
            f"rope_parameters: expected an object for each type of layer, found one for all, which the class of "
            f"{keys.model_type} does not read"
        )
    elif layer_type in plain and scaling:
        raw = {}
    if scaling and isinstance(theta_keys, Mapping) and keys.get("rope_parameters", None):
        raise RelposValueError(
            f"rope_scaling: found beside rope_parameters, which the class of {keys.model_type} does not expect"
        )
    raw = {name: value for name, value in raw.items() if name not in elsewhere}
    never = ("short_mscale", "long_mscale", *(("finetuned",) if _rule(raw) == "yarn" else ()))
    unread = [name for name in never if raw.pop(name, None) is not None]
    if sections is not None:
        raw.setdefault("mrope_section", list(sections))
    elif raw.get("mrope_interleaved") is True:
        order = "cyclic"
    key = theta_keys[layer_type] if isinstance(theta_keys, Mapping) else theta_keys
    base, part = keys.get(key, None), keys.get(share_key, None)
    if isinstance(theta_keys, Mapping):
        keys.ignore(*theta_keys.values())
    plain_rule = _rule(raw) in ("default", "mrope")
    if share is None and plain_rule and any(x not in (None, 1) for x in (part, raw.get("partial_rotary_factor"))):
        unread.append(share_key)
        part = None
        raw.pop("partial_rotary_factor", None)
    share = 1.0 if share is None else share
    default = theta[layer_type] if isinstance(theta, Mapping) else theta
    original = keys.get("original_max_position_embeddings", None)
    return Parameters(
        raw,
        check.positive("rope_theta", default if base is None else base),
        check.positive("partial_rotary_factor", share if part is None else part),
        keys.integer("max_position_embeddings", 2048),
        original if original is None else check.integer("original_max_position_embeddings", original, 1),
        order,
        tuple(f"{name}: the class of {keys.model_type} does not read it" for name in unread),
        keys.only("_rope_pairs", "", "half", "interleaved", default=""),
    )


def _by_length(given: Given, *, head_dim: int, sign: int) -> Rotary:
    """Frequencies that the longest position decides."""
    options = dict(given.options)
    rope = options.pop("rope_parameters")
    omega, magnitude = rope.frequencies(head_dim, given.reach)
    return Rotary(frequencies=sign * omega, **({"magnitude": magnitude} | options))


def _by_position(given: Given) -> Rotary:
    """Positions of three coordinates, or those of plain text, which are all the same."""
    options = dict(given.options)
    omega = options.pop("frequencies")
    positions = given.inputs.get("positions")
    if positions is None:
        return Rotary(frequencies=omega.sum(axis=0), **options)
    return Rotary(frequencies=omega, positions=positions, **options)


def plan(
    rope: Parameters,
    head_dim: int,
    *,
    layout: str = "half",
    before: int = 0,
    backwards: bool = False,
    magnitude: float | None = None,
) -> SchemePlan:
    """The rotary scheme of some parameters.

    Parameters
    ----------
    rope : Parameters
        As stored.
    head_dim : int
        Channels of which a share turns.
    layout : {"half", "interleaved"}
        Which pairs.
    before : int
        Channels of a head in front of these.
    backwards : bool
        Whether pairs turn the other way.
    magnitude : float, optional
        In place of the rule's attention factor.
    """
    layout = rope.pairs or layout
    shown: dict[str, Any] = {} if layout == "half" else {"layout": layout}
    if before:
        shown["channels"] = (before, before + head_dim)
    omega, factor = rope.frequencies(head_dim)
    factor = factor if magnitude is None else magnitude
    if rope.rule in _BY_LENGTH:
        remark = f"{rope.words()}; by the longest position of a call"
        shown |= {} if magnitude is None else {"magnitude": magnitude}
        make = partial(_by_length, head_dim=head_dim, sign=-1 if backwards else 1)
        return SchemePlan("Rotary", shown | {"rope_parameters": rope}, remark=remark, make=make, varies=True)
    if factor != 1.0:
        shown["magnitude"] = factor
    if omega.ndim == 2:
        remark = f"{rope.words()}; sections of pairs {rope.stored['mrope_section']}, {rope.order}"
        options = shown | {"frequencies": omega}
        return SchemePlan("Rotary", options, optional=("positions",), remark=remark, make=_by_position, varies=True)
    if backwards:
        remark = f"{rope.words()}; pairs turn the other way"
        return SchemePlan("Rotary", shown | {"frequencies": -omega}, remark=remark)
    if rope.rule == "default":
        base = float(rope.stored.get("rope_theta") or rope.theta)
        return SchemePlan(
            "Rotary", ({"dim": 2 * len(omega)} if 2 * len(omega) < head_dim else {}) | {"base": base} | shown
        )
    return SchemePlan("Rotary", shown | {"frequencies": omega}, remark=rope.words())
