"""Known ways to get it wrong, each as what it would compute: an answer that is wrong is compared with all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np.api import attention, logits
from relpos_np.conform.formats import Format
from relpos_np.errors import RelposError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.rotary import Rotary
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.transformer_xl import TransformerXL
from relpos_np.testing.arguments import arguments
from relpos_np.testing.example import Example
from relpos_np.types import Array

Answer = Callable[[Example], Array | None]


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
    return [
        *_variants(scheme, variant),
        *(Suspect(f"aligns the causal mask top-left: {more}", answer) for more, answer in _TOP_LEFT),
        *(Suspect(cause, answer) for cause, answer in _SCALES),
        *(Suspect(cause, answer) for cause, answer in _windows()),
        *(Suspect(cause, answer) for cause, answer in _XL),
        *(Suspect(cause, answer) for cause, answer in _MASKS),
        *(Suspect(cause, answer) for cause, answer in _POSITIONS),
        *(Suspect(cause, answer) for cause, answer in _HEADS),
        *_arguments(scheme),
        *_precision(kept),
    ]


def _out(one: Example, **changes: Any) -> Array:
    """The exact output with another position, operands or options; an option that is None is left out."""
    given = {"q": one.q, "k": one.k, "v": one.v, "position": one.position, **one.kwargs, **changes}
    found: Array = attention(backend="numpy", **{n: x for n, x in given.items() if x is not None or n == "position"})
    return found


def _remade(one: Example, **changes: Any) -> Scheme:
    assert one.position is not None
    return type(one.position)(**(arguments(one.position) | changes))


def _scale(one: Example) -> float:
    return float(one.kwargs.get("scale", one.q.shape[-1] ** -0.5))


def _shaped(one: Example) -> tuple[int, int]:
    return one.q.shape[2], one.k.shape[2]


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
    for other in SCHEMES[scheme].variants:
        if other == variant:
            continue

        def answer(one: Example, other: str = other) -> Array | None:
            given = {} if one.position is None else arguments(one.position)
            names = [name for name, value in given.items() if isinstance(value, str) and value == variant]
            return _out(one, position=_remade(one, **{names[0]: other})) if names else None

        words = _VARIANTS.get((scheme, other), "is another variant")
        yield Suspect(f"{words}: that is variant {other!r}", answer)


def _arguments(scheme: str) -> Iterator[Suspect]:
    """Flags of the scheme the other way round."""
    for name, one in inspect.signature(SCHEMES[scheme].cls).parameters.items():
        if isinstance(one.default, bool):

            def flipped(case: Example, name: str = name) -> Array:
                return _out(case, position=_remade(case, **{name: not getattr(case.position, name)}))

            yield Suspect(f"takes {name} the other way round", flipped)


# ---------------------------------------------------------------------------------------------- masks


def _band(one: Example, least: int | None, most: int | None, offset: int) -> Array:
    """Whether least <= j - i - offset <= most, and the case's own mask of bool."""
    q_len, k_len = _shaped(one)
    d = np.arange(k_len) - (np.arange(q_len)[:, None] + offset)
    allowed = (d >= (-k_len - q_len if least is None else least)) & (d <= (k_len + q_len if most is None else most))
    mask = one.kwargs.get("mask")
    if mask is None:
        return allowed
    return np.asarray(mask & allowed if mask.dtype == np.bool_ else np.where(allowed, mask, -np.inf))


def _top_left(one: Example, *, positions: bool) -> Array | None:
    q_len, k_len = _shaped(one)
    if q_len == k_len or not (one.kwargs.get("causal") or positions):
        return None
    if positions:
        return _out(one, offset=0)
    return _out(one, causal=None, mask=_band(one, None, 0, 0))


_TOP_LEFT: tuple[tuple[str, Answer], ...] = (
    ("query i attends keys up to i, not up to i + L_k - L_q", lambda one: _top_left(one, positions=False)),
    ("query i stands at position i, not at i + L_k - L_q", lambda one: _top_left(one, positions=True)),
)


def _windows() -> Iterator[tuple[str, Answer]]:
    """Windows that are off by one, on either side."""
    for left, right in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)):

        def answer(one: Example, left: int = left, right: int = right) -> Array | None:
            if "window" not in one.kwargs:
                return None
            to_left, to_right = one.kwargs["window"]
            if to_left + left < 0 or to_right + right < 0:
                return None
            return _out(one, window=(to_left + left, to_right + right))

        sides = ((left, "on the left"), (right, "on the right"))
        words = [f"one key {'more' if n > 0 else 'fewer'} {side}" for n, side in sides if n]
        yield f"window off by one: {' and '.join(words)}", answer


def _without(name: str) -> Answer:
    return lambda one: _out(one, **{name: None}) if one.kwargs.get(name) is not None else None


def _plain_outputs(one: Example) -> bool:
    """Whether the output is the sum of p v and nothing else."""
    position, names = one.position, ("outputs", "turn_values", "turn_output")
    return position is None or all(getattr(type(position), name) is getattr(Scheme, name) for name in names)


def _masked_late(one: Example, *, again: bool = False) -> Array | None:
    """The mask applied to probabilities."""
    mask = one.kwargs.get("mask")
    if mask is None or not _plain_outputs(one):
        return None
    options = {name: value for name, value in one.kwargs.items() if name not in ("mask", "scale")}
    s = logits(one.q, one.k, position=one.position, scale=_scale(one), backend="numpy", **options)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    p = np.where(mask, p, 0.0) if mask.dtype == np.bool_ else p + mask
    if again:
        p = np.where(mask, p, -np.inf) if mask.dtype == np.bool_ else p
        p = np.exp(p - p.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True)
    return np.asarray(p @ repeat_heads(one.v, one.q.shape[1]))


def _inverted(one: Example) -> Array | None:
    mask = one.kwargs.get("mask")
    return None if mask is None or mask.dtype != np.bool_ else _out(one, mask=~mask)


def _strict(one: Example) -> Array | None:
    q_len, k_len = _shaped(one)
    return _out(one, causal=None, mask=_band(one, None, -1, k_len - q_len)) if one.kwargs.get("causal") else None


def _backwards(one: Example) -> Array | None:
    q_len, k_len = _shaped(one)
    return _out(one, causal=None, mask=_band(one, 0, None, k_len - q_len)) if one.kwargs.get("causal") else None


_MASKS: tuple[tuple[str, Answer], ...] = (
    ("applies the mask after the softmax, to probabilities", _masked_late),
    ("applies the mask to probabilities, and the softmax again", lambda one: _masked_late(one, again=True)),
    ("takes True in a mask for excluded", _inverted),
    ("ignores the mask", _without("mask")),
    ("ignores causal", _without("causal")),
    ("ignores the window", _without("window")),
    ("ignores key_lengths", _without("key_lengths")),
    ("causal leaves out the query's own key", _strict),
    ("causal the wrong way round: attends later keys", _backwards),
)


# ---------------------------------------------------------------------------------------------- scores


def _parts(one: Example) -> tuple[Array, Array] | None:
    """Scaled products, and what positions add to them, without masks; None where they are no such sum."""
    if not _plain_outputs(one):
        return None
    scale = _scale(one)
    options = {name: one.kwargs[name] for name in ("offset",) if name in one.kwargs}
    k = np.nan_to_num(one.k)
    s = logits(one.q, k, position=one.position, scale=scale, backend="numpy", **options)
    return (c := logits(one.q, k, scale=scale, backend="numpy")), s - c


def _from_scores(one: Example, s: Array) -> Array:
    """Attention with these scores and the case's masks."""
    mask = one.kwargs.get("mask")
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == np.bool_ else s + mask
    return _out(one, q=np.zeros_like(one.q), k=np.zeros_like(one.k), position=None, mask=s)


def _mixed(content: Callable[[float], float], added: Callable[[float], float]) -> Answer:
    """Both parts with other factors, which are functions of the scale."""

    def answer(one: Example) -> Array | None:
        parts = _parts(one)
        if parts is None or one.position is None:
            return None
        return _from_scores(one, parts[0] * content(_scale(one)) + parts[1] * added(_scale(one)))

    return answer


_SCALES: tuple[tuple[str, Answer], ...] = (
    ("scale missing", lambda one: _out(one, scale=1.0)),
    ("scale twice", lambda one: _out(one, scale=_scale(one) ** 2)),
    ("scale missing on the products, not on what positions add", _mixed(lambda c: 1 / c, lambda _: 1.0)),
    ("scales what positions add, which is meant as it is", _mixed(lambda _: 1.0, lambda c: c)),
    ("does not scale what positions add", _mixed(lambda _: 1.0, lambda c: 1 / c)),
    ("subtracts what positions add", _mixed(lambda _: 1.0, lambda _: -1.0)),
    ("softmax in powers of 2 in place of e", _mixed(lambda _: np.log(2), lambda _: np.log(2))),
)


# ---------------------------------------------------------------------------------------------- positions


def _reversed(one: Example) -> Array | None:
    """Distances with the other sign, which is the case read from its end."""
    if one.kwargs.keys() - {"scale"} or one.q.shape[2] != one.k.shape[2]:
        return None
    return _out(one, q=one.q[:, :, ::-1], k=one.k[:, :, ::-1], v=one.v[:, :, ::-1])[:, :, ::-1]


def _rolled(step: int) -> Answer:
    """Tables of relative positions read one row too early or too late."""

    def answer(one: Example) -> Array | None:
        if not isinstance(one.position, Shaw):
            return None
        tables = {n: getattr(one.position, n) for n in ("key_table", "value_table")}
        return _out(one, position=_remade(one, **{n: np.roll(x, step, -2) for n, x in tables.items() if x is not None}))

    return answer


def _left_out(name: str) -> Answer:
    def answer(one: Example) -> Array | None:
        if getattr(one.position, name, None) is None:
            return None
        return _out(one, position=_remade(one, **{name: None}))

    return answer


def _coarse(name: str) -> Answer:
    """Positions, hence angles, held in half precision."""

    def answer(one: Example) -> Array | None:
        if type(one.position) is not Rotary or one.position.positions is not None:
            return None
        from relpos_np.conform.formats import format_of

        k_len = one.k.shape[2]
        return _out(one, position=_remade(one, positions=format_of(name).rounded(np.arange(float(k_len)))))

    return answer


_POSITIONS: tuple[tuple[str, Answer], ...] = (
    ("leaves positions out", lambda one: None if one.position is None else _out(one, position=None)),
    ("counts distances i - j where j - i is meant", _reversed),
    ("reads relative vectors one row too early", _rolled(1)),
    ("reads relative vectors one row too late", _rolled(-1)),
    ("leaves the vectors on values out", _left_out("value_table")),
    ("leaves the vectors on keys out", _left_out("key_table")),
    ("holds positions in bfloat16", _coarse("bfloat16")),
    ("holds positions in float16", _coarse("float16")),
)


def _biases(content: str, position: str) -> Answer:
    """Transformer-XL with other biases: "u", "v" or "" for none."""

    def answer(one: Example) -> Array | None:
        if not isinstance(one.position, TransformerXL):
            return None
        given = {"u": one.position.content_bias, "v": one.position.position_bias}
        zero = np.zeros_like(given["u"])
        return _out(
            one,
            position=_remade(one, content_bias=given.get(content, zero), position_bias=given.get(position, zero)),
        )

    return answer


def _shifted(start: Callable[[int], int] | None) -> Answer:
    """rel_shift that begins elsewhere in the padded products, or none at all where `start` is None."""

    def answer(one: Example) -> Array | None:
        x = one.position
        if not isinstance(x, TransformerXL) or x.variant == "wenet":
            return None
        q_len, k_len = _shaped(one)
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
        scale = _scale(one)
        content = (one.q + x.content_bias[:, None]) @ np.nan_to_num(repeat_heads(one.k, one.q.shape[1])).swapaxes(
            -1, -2
        )
        return _from_scores(one, (content + found) * scale)

    return answer


_XL: tuple[tuple[str, Answer], ...] = (
    ("u and v swapped", _biases("v", "u")),
    ("u missing", _biases("", "v")),
    ("v missing", _biases("u", "")),
    ("u where v is meant, too", _biases("u", "u")),
    ("v where u is meant, too", _biases("v", "v")),
    ("rel_shift missing", _shifted(None)),
    ("rel_shift keeps its first row, which is to be left out", _shifted(lambda _: 0)),
    ("rel_shift lacks the column of zeros: one row too far", _shifted(lambda q_len: q_len + 1)),
    ("rel_shift one row too short", _shifted(lambda q_len: q_len - 1)),
)


def _heads_in_turn(one: Example) -> Array | None:
    """Query head h uses key head h mod H_kv."""
    heads, kv_heads = one.q.shape[1], one.k.shape[1]
    if kv_heads in (1, heads):
        return None
    turns = np.arange(heads) % kv_heads
    return _out(one, k=one.k[:, turns], v=one.v[:, turns])


_HEADS: tuple[tuple[str, Answer], ...] = (
    ("query head h uses key head h mod H_kv in place of h // (H / H_kv)", _heads_in_turn),
)


# ---------------------------------------------------------------------------------------------- precision


def _summed(kept: Format, *, normalised: bool) -> Answer:
    """Sums over keys that are rounded to the format after each key."""

    def answer(one: Example) -> Array | None:
        if not _plain_outputs(one) or kept.name not in ("float16", "bfloat16"):
            return None
        narrow = kept.dtype
        s = logits(one.q, one.k, position=one.position, backend="numpy", **one.kwargs)
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(top), top, 0.0))
        if normalised:
            p = p / p.sum(axis=-1, keepdims=True)
        p, v = p.astype(narrow), repeat_heads(one.v, one.q.shape[1]).astype(narrow)
        total = np.zeros((*p.shape[:-1], 1), narrow)
        out = np.zeros((*p.shape[:-1], v.shape[-1]), narrow)
        for j in range(p.shape[-1]):
            out = out + p[..., j : j + 1] * v[..., j : j + 1, :]
            total = total + p[..., j : j + 1]
        return np.asarray(out if normalised else out / total).astype(np.float64)

    return answer


def _precision(kept: Format) -> Iterator[Suspect]:
    for normalised, words in ((False, "weights and values"), (True, "probabilities times values")):
        yield Suspect(f"sums over keys in {kept.name}: {words}", _summed(kept, normalised=normalised), rough=True)
