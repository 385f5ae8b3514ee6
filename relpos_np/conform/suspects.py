"""Known ways to get it wrong, each as what it would compute: an answer that is wrong is compared with all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from relpos_np.api import logits
from relpos_np.conform.altered import (
    Answer,
    added_to,
    call_of,
    content_of,
    from_parts,
    hiding,
    out_of,
    plain_outputs,
    remade,
    scale_of,
    scores_of,
    seen,
)
from relpos_np.conform.arithmetic import Likeness, coarser_than, of_roundings
from relpos_np.conform.formats import Format
from relpos_np.conform.misread import of_arrays
from relpos_np.conform.placed import of_positions
from relpos_np.conform.tiles import of_tiles
from relpos_np.errors import RelposError
from relpos_np.formulas.softmax import repeat_heads, softmax
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.transformer_xl import TransformerXL
from relpos_np.testing.arguments import arguments
from relpos_np.testing.conventions import ABSENT, CONVENTIONS, IN_TURN, Convention, in_turn
from relpos_np.testing.example import Example
from relpos_np.testing.frozen import coarse
from relpos_np.types import Array


@dataclass(frozen=True)
class Suspect:
    """What is wrong, in words, and the output it leads to for a case: None where it makes no sense.

    `like`: of errors of rounding, whose order of operations nobody knows, how like these an answer's are, up to 1.
    """

    cause: str
    answer: Answer
    like: Likeness | None = None

    @property
    def rough(self) -> bool:
        """Whether its errors are those of rounding."""
        return self.like is not None

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
        *(Suspect(cause, answer) for cause, answer in of_positions()),
        *(Suspect(cause, answer) for cause, answer in of_arrays(scheme, kept)),
        *(Suspect(f"holds what positions add in {n}", partial(_rounded_positions, b)) for n, b in coarser_than(kept)),
        *(Suspect(cause, answer) for cause, answer in of_tiles()),
        *(Suspect(cause, answer, like) for cause, answer, like in of_roundings(kept)),
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
        # Whose borders another logarithm in float32 may have, too: PyTorch's has some.
        if other not in (variant, "flaxformer"):
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


def _capped_late(one: Example, *, floats: bool = False) -> Array | None:
    """The cap on scores that are masked already, also by `floats`: of what is excluded it makes -cap."""
    cap = one.kwargs.get("softcap")
    if cap is None or one.kwargs.get("cap_order") == "content" or not plain_outputs(one):
        return None
    s, mask = scores_of(one), one.kwargs.get("mask")
    hidden = np.isneginf(s)
    if floats and mask is not None and mask.dtype != np.bool_:
        finite = np.where(hidden, 0.0, mask)
        s = cap * np.tanh(np.arctanh((np.where(hidden, 0.0, s) - finite) / cap) + finite / cap)
    return _softmax_of(one, np.where(hidden, -cap, s))


def _cap_before_scale(one: Example) -> Array | None:
    """The cap on products that are not scaled yet."""
    cap, scale, added = one.kwargs.get("softcap"), scale_of(one), added_to(one)
    if cap is None or not plain_outputs(one):
        return None
    content = content_of(one) / scale
    capped = cap * np.tanh(content / cap) * scale
    return from_parts(one, capped, 0.0 if added is None else added, capped=True)


def _only_tanh(one: Example) -> Array | None:
    """A cap that divides, and does not multiply."""
    cap, order, added = one.kwargs.get("softcap"), one.kwargs.get("cap_order"), added_to(one)
    if cap is None or not plain_outputs(one):
        return None
    after = 0.0 if added is None else added
    content = content_of(one)
    if order == "content":
        return from_parts(one, np.tanh(content / cap), after, capped=True)
    return from_parts(one, np.tanh((content + after) / cap), capped=True)


def _both_sides(one: Example) -> Array | None:
    """A window that reaches as far to the right as to the left, though causal."""
    call = call_of(one)
    if call.sides is None or not call.causal or not call.sides[0]:
        return None
    return out_of(one, causal=None, window=(call.sides[0], call.sides[0]))


def _over_queries(one: Example) -> Array | None:
    """Exponentials that are divided by their sum over queries."""
    if not plain_outputs(one):
        return None
    p, _ = softmax(scores_of(one).swapaxes(-1, -2))
    return np.asarray(p.swapaxes(-1, -2) @ repeat_heads(one.v, one.q.shape[1]))


def _as_many_keys(one: Example) -> Array | None:
    """A loop over keys that ends after as many as there are queries."""
    q_len, k_len = one.q.shape[2], one.k.shape[2]
    return None if q_len >= k_len else hiding(one, np.arange(k_len) >= q_len)


def _in_halves(one: Example) -> Array | None:
    """Two parts of the keys whose outputs are averaged."""
    k_len = one.k.shape[2]
    first = np.arange(k_len) < k_len // 2
    return None if k_len < 2 else (hiding(one, first) + hiding(one, ~first)) / 2


def _softmax_of(one: Example, s: Array) -> Array:
    p, _ = softmax(s)
    return np.asarray(p @ repeat_heads(np.nan_to_num(one.v), one.q.shape[1]))


# ---------------------------------------------------------------------------------------------- scores


def _mixed(content: Callable[[float], float], added: Callable[[float], float]) -> Answer:
    """Both parts with other factors, which are functions of the scale."""

    def answer(one: Example) -> Array | None:
        positions = added_to(one)
        if positions is None:
            return None
        return from_parts(one, content_of(one) * content(scale_of(one)), positions * added(scale_of(one)))

    return answer


# ---------------------------------------------------------------------------------------------- positions


def _heads_in_turn(names: str, one: Example) -> Array | None:
    found = in_turn(one.q.shape[1], one.k, one.v)
    if found is None:
        return None
    right = {name: repeat_heads(getattr(one, name), one.q.shape[1]) for name in "kv"}
    return out_of(one, **right | {name: x for name, x in zip("kv", found, strict=True) if name in names})


def _left_out(name: str) -> Answer:
    return lambda one: None if getattr(one.position, name, None) is None else remade(one, **{name: None})


def _rounded_positions(bits: int, one: Example) -> Array | None:
    """What positions add with so many bits."""
    added = added_to(one)
    return None if added is None else from_parts(one, content_of(one), coarse(added, bits))


def _biases(content: str, position: str) -> Answer:
    """Transformer-XL with other biases: "u", "v" or "" for none."""

    def answer(one: Example) -> Array | None:
        if not isinstance(one.position, TransformerXL):
            return None
        u, v = one.position.content_bias, one.position.position_bias
        given = {"u": u, "v": v, "": np.zeros_like(u), "u + v": u + v}
        return remade(one, content_bias=given[content], position_bias=given[position])

    return answer


def _rows_unscaled(one: Example) -> Array | None:
    """Transformer-XL whose products with rows are not scaled, as those with keys are."""
    x = one.position
    if not isinstance(x, TransformerXL):
        return None
    bare = type(x)(**(arguments(x) | {"rows": np.zeros_like(x.rows)}))
    without = logits(one.q, np.nan_to_num(one.k), position=bare, backend="numpy", scale=scale_of(one))
    whole = logits(one.q, np.nan_to_num(one.k), position=x, backend="numpy", scale=scale_of(one))
    return from_parts(one, without, (whole - without) / scale_of(one))


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
        return from_parts(one, (content + found) * scale_of(one))

    return answer


# Likelier ones first. Those that are a convention of an option come before them.
_MISTAKES: tuple[tuple[str, Answer], ...] = (
    ("scale missing on the products, not on what positions add", _mixed(lambda c: 1 / c, lambda _: 1.0)),
    ("scales what positions add, which is meant as it is", _mixed(lambda _: 1.0, lambda c: c)),
    ("does not scale what positions add", _mixed(lambda _: 1.0, lambda c: 1 / c)),
    ("subtracts what positions add", _mixed(lambda _: 1.0, lambda _: -1.0)),
    ("softmax in powers of 2 in place of e", _mixed(lambda _: np.log(2), lambda _: np.log(2))),
    ("adds positions in powers of 2 to scores in powers of e", _mixed(lambda _: 1.0, lambda _: np.log(2))),
    ("adds positions in powers of e to scores in powers of 2", _mixed(lambda _: 1.0, lambda _: 1 / np.log(2))),
    ("u and v swapped", _biases("v", "u")),
    ("u missing", _biases("", "v")),
    ("v missing", _biases("u", "")),
    ("u where v is meant, too", _biases("u", "u")),
    ("v where u is meant, too", _biases("v", "v")),
    ("u + v where u and where v is meant", _biases("u + v", "u + v")),
    ("does not scale products with rows", _rows_unscaled),
    ("rel_shift missing", _shifted(None)),
    ("rel_shift keeps its first row, which is to be left out", _shifted(lambda _: 0)),
    ("rel_shift lacks the column of zeros: one row too far", _shifted(lambda q_len: q_len + 1)),
    ("rel_shift one row too short", _shifted(lambda q_len: q_len - 1)),
    ("applies the mask after the softmax, to probabilities", _masked_late),
    ("applies the mask to probabilities, and the softmax again", partial(_masked_late, again=True)),
    ("takes True in a mask for excluded", _inverted),
    ("applies softcap to masked scores: what is excluded has score -softcap", _capped_late),
    ("applies softcap to masked scores, also to masks of floats", partial(_capped_late, floats=True)),
    ("applies softcap before the scale", _cap_before_scale),
    ("softcap is not multiplied by: tanh(s / cap) in place of cap tanh(s / cap)", _only_tanh),
    ("attends as many later keys as earlier ones where a window is given, though causal", _both_sides),
    ("softmax over queries in place of keys", _over_queries),
    ("reads as many keys as there are queries", _as_many_keys),
    ("averages the outputs of two halves of the keys, whatever their weights", _in_halves),
    ("causal the wrong way round: attends later keys", _later_keys),
    ("leaves positions out", lambda one: None if one.position is None else out_of(one, position=None)),
    ("leaves the vectors on values out", _left_out("value_table")),
    ("leaves the vectors on keys out", _left_out("key_table")),
    (IN_TURN.mistake, partial(_heads_in_turn, "kv")),
    (f"of keys alone: {IN_TURN.mistake}", partial(_heads_in_turn, "k")),
    (f"of values alone: {IN_TURN.mistake}", partial(_heads_in_turn, "v")),
)
