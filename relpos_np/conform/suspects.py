"""Known ways to get it wrong, each as what it would compute: an answer that is wrong is compared with all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from relpos_np.api import logits
from relpos_np.conform.altered import Answer, call_of, out_of, plain_outputs, remade, scale_of, seen
from relpos_np.conform.arithmetic import of_roundings
from relpos_np.conform.formats import Format, format_of
from relpos_np.conform.misread import of_arrays
from relpos_np.conform.tiles import of_tiles
from relpos_np.errors import RelposError
from relpos_np.formulas.softmax import repeat_heads, softmax
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.rotary import Rotary
from relpos_np.schemes.transformer_xl import TransformerXL
from relpos_np.testing.arguments import arguments
from relpos_np.testing.conventions import (
    ABSENT,
    CONVENTIONS,
    FROM_THE_END,
    IN_TURN,
    Convention,
    from_the_end,
    in_turn,
)
from relpos_np.testing.example import Example
from relpos_np.types import Array


@dataclass(frozen=True)
class Suspect:
    """What is wrong, in words, and the output it leads to for a case: None where it makes no sense.

    `rough`: the errors are those of rounding, whose order of operations nobody knows, and need only be like these.
    """

    cause: str
    answer: Answer
    rough: bool = False

    def output(self, one: Example) -> Array | None:
        """The wrong output, or None."""
        try:
            with np.errstate(all="ignore"):
                return self.answer(one)
        except RelposError:
            return None


def suspects(scheme: str, variant: str | None, kept: Format) -> list[Suspect]:
    """All that may explain a wrong answer for a scheme, what is likelier first."""
    conventions = [Suspect(one.mistake, partial(_by, one)) for one in CONVENTIONS if one.mistake]
    return [
        *_variants(scheme, variant),
        *conventions,
        *(Suspect(cause, answer) for cause, answer in _MISTAKES),
        *_flags(scheme),
        *(Suspect(cause, answer) for cause, answer in of_arrays(scheme)),
        *(Suspect(cause, answer) for cause, answer in of_tiles()),
        *(Suspect(cause, answer, rough=True) for cause, answer in of_roundings(kept)),
    ]


def _by(convention: Convention, one: Example) -> Array | None:
    """The output by another convention of one option."""
    call = call_of(one)
    value, option = convention.value(call), convention.option
    if value is ABSENT or value == call.meant(option):
        return None
    if option == "cap":
        return out_of(one, softcap=value[0], cap_order=value[1])
    if option == "hidden":
        return out_of(one, causal=None, mask=one.kwargs.get("mask") if value is None else seen(one, hidden=value))
    return out_of(one, **{option: value})


# ---------------------------------------------------------------------------------------------- variants

_VARIANTS = {
    ("t5", "float32"): "rounds buckets in float32",
    ("t5", "exact"): "decides buckets exactly where float32 is meant",
    ("shaw", "clip"): "clips distances beyond the table where zero is meant",
    ("shaw", "zero"): "gives zero beyond the table where clipping is meant",
    ("rotary", "half"): "pairs channel p with p + d/2 (layout 'half') where neighbours are meant",
    ("rotary", "interleaved"): "pairs neighbouring channels (layout 'interleaved') where p and p + d/2 are meant",
}


def _variants(scheme: str, variant: str | None) -> Iterator[Suspect]:
    """The scheme's other variants."""

    def answer(other: str, one: Example) -> Array | None:
        given = {} if one.position is None else arguments(one.position)
        names = [name for name, value in given.items() if isinstance(value, str) and value == variant]
        return remade(one, **{names[0]: other}) if names else None

    for other in SCHEMES[scheme].variants:
        if other != variant:
            words = _VARIANTS.get((scheme, other), "is another variant")
            yield Suspect(f"{words}: that is variant {other!r}", partial(answer, other))


def _flags(scheme: str) -> Iterator[Suspect]:
    """Flags of the scheme the other way round."""

    def flipped(name: str, one: Example) -> Array:
        return remade(one, **{name: not getattr(one.position, name)})

    for name, parameter in inspect.signature(SCHEMES[scheme].cls).parameters.items():
        if isinstance(parameter.default, bool):
            yield Suspect(f"takes {name} the other way round", partial(flipped, name))


# ---------------------------------------------------------------------------------------------- masks


def _masked_late(one: Example, *, again: bool = False) -> Array | None:
    """The mask applied to probabilities."""
    mask = one.kwargs.get("mask")
    if mask is None or not plain_outputs(one):
        return None
    options = {**one.kwargs, "mask": None}
    p, _ = softmax(logits(one.q, one.k, position=one.position, backend="numpy", **options))
    if again:
        p, _ = softmax(np.where(mask, p, -np.inf) if mask.dtype == np.bool_ else p + mask)
    else:
        p = np.where(mask, p, 0.0) if mask.dtype == np.bool_ else p + mask
    return np.asarray(p @ repeat_heads(one.v, one.q.shape[1]))


def _inverted(one: Example) -> Array | None:
    mask = one.kwargs.get("mask")
    return None if mask is None or mask.dtype != np.bool_ else out_of(one, mask=~mask)


def _later_keys(one: Example) -> Array | None:
    """The causal mask of the other side."""
    call = call_of(one)
    return out_of(one, causal=None, mask=seen(one, window=(0, None), offset=call.last)) if call.causal else None


# ---------------------------------------------------------------------------------------------- scores


def _parts(one: Example) -> tuple[Array, Array] | None:
    """Scaled products, and what positions add to them, without masks; None where they are no such sum."""
    if not plain_outputs(one):
        return None
    options = {name: one.kwargs[name] for name in ("offset", "scale") if name in one.kwargs}
    c, s = (
        logits(one.q, np.nan_to_num(one.k), position=position, backend="numpy", **options)
        for position in (None, one.position)
    )
    return c, s - c


def _from_scores(one: Example, s: Array) -> Array:
    """Attention with these scores and the case's masks."""
    mask = one.kwargs.get("mask")
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == np.bool_ else s + mask
    return out_of(one, q=np.zeros_like(one.q), k=np.zeros_like(one.k), position=None, mask=s)


def _mixed(content: Callable[[float], float], added: Callable[[float], float]) -> Answer:
    """Both parts with other factors, which are functions of the scale."""

    def answer(one: Example) -> Array | None:
        parts = _parts(one)
        if parts is None or one.position is None:
            return None
        return _from_scores(one, parts[0] * content(scale_of(one)) + parts[1] * added(scale_of(one)))

    return answer


# ---------------------------------------------------------------------------------------------- positions


def _reversed(one: Example) -> Array | None:
    """Distances with the other sign, which is the case read from its end."""
    if one.kwargs.keys() - {"scale"} or one.q.shape[2] != one.k.shape[2]:
        return None
    q, k, v = from_the_end(one.q, one.k, one.v)
    return out_of(one, q=q, k=k, v=v)[:, :, ::-1]


def _heads_in_turn(one: Example) -> Array | None:
    found = in_turn(one.q.shape[1], one.k, one.v)
    return None if found is None else out_of(one, k=found[0], v=found[1])


def _left_out(name: str) -> Answer:
    return lambda one: None if getattr(one.position, name, None) is None else remade(one, **{name: None})


def _coarse(name: str) -> Answer:
    """Positions, hence angles, held in half precision."""

    def answer(one: Example) -> Array | None:
        if type(one.position) is not Rotary or one.position.positions is not None:
            return None
        call, held = call_of(one), format_of(name).rounded
        rows = held(np.arange(float(call.q_len)) + call.meant("offset"))
        return remade(one, positions=rows, key_positions=held(np.arange(float(call.k_len))))

    return answer


def _biases(content: str, position: str) -> Answer:
    """Transformer-XL with other biases: "u", "v" or "" for none."""

    def answer(one: Example) -> Array | None:
        if not isinstance(one.position, TransformerXL):
            return None
        u, v = one.position.content_bias, one.position.position_bias
        given = {"u": u, "v": v, "": np.zeros_like(u)}
        return remade(one, content_bias=given[content], position_bias=given[position])

    return answer


def _shifted(start: Callable[[int], int] | None) -> Answer:
    """rel_shift that begins elsewhere in the padded products, or none at all where `start` is None."""

    def answer(one: Example) -> Array | None:
        x = one.position
        if not isinstance(x, TransformerXL) or x.variant == "wenet":
            return None
        q_len, k_len = one.q.shape[2], one.k.shape[2]
        products = (one.q + x.position_bias[:, None]) @ x.rows.transpose(1, 2, 0)
        rows = products.shape[-1]
        if start is None:
            found = products[..., :k_len]
        else:
            flat = np.concatenate([np.zeros_like(products[..., :1]), products], -1).reshape(*products.shape[:2], -1)
            flat = np.concatenate([flat, np.zeros((*flat.shape[:2], 3 * q_len + 2))], -1)[..., start(q_len) :]
            found = flat[..., : q_len * rows].reshape(*products.shape[:3], rows)[..., :k_len]
        if found.shape[-1] != k_len:
            return None
        k = np.nan_to_num(repeat_heads(one.k, one.q.shape[1]))
        content = (one.q + x.content_bias[:, None]) @ k.swapaxes(-1, -2)
        return _from_scores(one, (content + found) * scale_of(one))

    return answer


# Likelier ones first. Those that are a convention of an option come before them.
_MISTAKES: tuple[tuple[str, Answer], ...] = (
    ("scale missing on the products, not on what positions add", _mixed(lambda c: 1 / c, lambda _: 1.0)),
    ("scales what positions add, which is meant as it is", _mixed(lambda _: 1.0, lambda c: c)),
    ("does not scale what positions add", _mixed(lambda _: 1.0, lambda c: 1 / c)),
    ("subtracts what positions add", _mixed(lambda _: 1.0, lambda _: -1.0)),
    ("softmax in powers of 2 in place of e", _mixed(lambda _: np.log(2), lambda _: np.log(2))),
    ("u and v swapped", _biases("v", "u")),
    ("u missing", _biases("", "v")),
    ("v missing", _biases("u", "")),
    ("u where v is meant, too", _biases("u", "u")),
    ("v where u is meant, too", _biases("v", "v")),
    ("rel_shift missing", _shifted(None)),
    ("rel_shift keeps its first row, which is to be left out", _shifted(lambda _: 0)),
    ("rel_shift lacks the column of zeros: one row too far", _shifted(lambda q_len: q_len + 1)),
    ("rel_shift one row too short", _shifted(lambda q_len: q_len - 1)),
    ("applies the mask after the softmax, to probabilities", _masked_late),
    ("applies the mask to probabilities, and the softmax again", partial(_masked_late, again=True)),
    ("takes True in a mask for excluded", _inverted),
    ("causal the wrong way round: attends later keys", _later_keys),
    ("leaves positions out", lambda one: None if one.position is None else out_of(one, position=None)),
    (FROM_THE_END.mistake, _reversed),
    ("leaves the vectors on values out", _left_out("value_table")),
    ("leaves the vectors on keys out", _left_out("key_table")),
    ("holds positions in bfloat16", _coarse("bfloat16")),
    ("holds positions in float16", _coarse("float16")),
    (IN_TURN.mistake, _heads_in_turn),
)
