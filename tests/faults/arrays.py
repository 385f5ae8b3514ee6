"""Every place where the public API takes an array, found by inspection, with a call that puts something else there."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.testing import example
from relpos_np.testing.arguments import arguments
from relpos_np.testing.sweep import parts


@dataclass(frozen=True)
class Place:
    """An argument: what it is called, an array that fits, and the call with another value in its place."""

    label: str
    name: str
    good: np.ndarray
    call: Any


class Called:
    """An object that could be a number or an array, and must not be asked."""

    def __array__(self, *args, **kwargs):
        raise AssertionError("an object of the user was called")

    __float__ = __int__ = __index__ = __len__ = __getitem__ = __iter__ = __array__


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def whole(count):
    return np.arange(count, dtype=np.int64)


def rare_schemes():
    """Schemes with the arrays that `relpos_np.testing` gives to no example."""
    positions = np.arange(5, dtype=np.float64)
    yield rp.Rotary(8, frequencies=draw(4), positions=positions, key_positions=np.arange(7.0))
    yield rp.Rotary(8, positions=whole(5), key_positions=whole(7))
    yield rp.AtPositions(rp.ALiBi(), positions=whole(5), key_positions=whole(7))
    yield rp.XPos(8, positions=positions, key_positions=np.arange(7.0))
    yield rp.CoPE(draw(5, 8), gate_key=draw(2, 7, 8), counted=np.ones((5, 7), bool))
    yield rp.SwinV2(draw(6, 2), draw(6), draw(2, 6), np.ones(2), (2, 3), output_bias=draw(2))
    yield rp.GraphLabels(np.zeros((5, 7), int), draw(3, 2))
    yield rp.ALiBi(np.ones(2))
    yield rp.PoPE(draw(8), frequencies=draw(8), positions=positions, key_positions=np.arange(7.0))
    yield rp.Selective(past=draw(7))


def remade(cls, given, name, other):
    """Another scheme with one argument replaced."""
    return cls(**given | {name: other})


def of_schemes():
    """Arrays of the constructor of every scheme and variant of the register, and of those above."""
    seen = set()
    drawn = (example(name, variant=variant, dtype="float64", size="tiny") for name, variant in parts())
    made = [e.position if e.position is not None else e.encoding for e in drawn]
    for scheme in (*made, *rare_schemes()):
        given = arguments(scheme)
        for name, value in given.items():
            if not isinstance(value, np.ndarray) or (key := (type(scheme), name, value.dtype)) in seen:
                continue
            seen.add(key)

            call = partial(remade, type(scheme), given, name)
            yield Place(f"{type(scheme).__name__}({name}: {value.dtype})", name, np.array(value), call)


def of_calls():
    """Arrays of the functions."""
    q, k, v = draw(2, 5, 8), draw(2, 7, 8), draw(2, 7, 6)
    given = {"q": q, "k": k, "v": v, "mask": draw(5, 7)}
    for name, good in given.items():
        yield Place(f"attention({name})", name, good, lambda x, n=name: rp.attention(**given | {n: x}))
        if name != "v":
            yield Place(
                f"logits({name})",
                name,
                good,
                lambda x, n=name: rp.logits(**{m: y for m, y in (given | {n: x}).items() if m != "v"}),
            )
    more = given | {"grad_out": draw(2, 5, 6), "grad_lse": draw(2, 5)}
    for name, good in more.items():
        yield Place(f"attention_vjp({name})", name, good, lambda x, n=name: rp.attention_vjp(**more | {n: x}))
    yield Place("rel_shift(x)", "x", draw(3, 5, 7), rp.rel_shift)
    yield Place("rel_shift(out)", "out", draw(3, 5, 7), lambda x: rp.rel_shift(draw(3, 5, 7), out=x))
    yield Place("attention(out)", "out", draw(2, 5, 6), lambda x: rp.attention(q, k, v, out=x))
    for encoding in (rp.Sinusoidal(8), rp.LearnedAbsolute(draw(9, 8))):
        yield Place(f"{type(encoding).__name__}()(x)", "x", draw(5, 8), encoding)


def of_layers():
    """Weights and inputs of layers."""
    from relpos_np import layers

    w, b, x = draw(8, 8), draw(8), draw(2, 5, 8)
    yield Place("Linear(weight)", "weight", w, lambda y: layers.Linear(y, b))
    yield Place("Linear(bias)", "bias", b, lambda y: layers.Linear(w, y))
    yield Place("Linear()(x)", "x", x, layers.Linear(w, b))
    attend = layers.MultiHeadAttention(w, w, w, w, heads=2)
    yield Place("MultiHeadAttention(query)", "query", w, lambda y: layers.MultiHeadAttention(y, w, w, w, heads=2))
    yield Place("MultiHeadAttention(out)", "out", w, lambda y: layers.MultiHeadAttention(w, w, w, y, heads=2))
    yield Place("MultiHeadAttention()(x)", "x", x, attend)
    yield Place("PositionalEncoding()(x)", "x", x, layers.PositionalEncoding(rp.Sinusoidal(8)))
    u, rel = draw(2, 4), layers.RelativeMultiHeadAttention
    yield Place(
        "RelativeMultiHeadAttention(content_bias)",
        "content_bias",
        u,
        lambda y: rel(w, w, w, pos=w, content_bias=y, position_bias=u),
    )
    yield Place(
        "RelativeMultiHeadAttention(pos)", "pos", w, lambda y: rel(w, w, w, pos=y, content_bias=u, position_bias=u)
    )
    swin = layers.SwinAttention(8, (2, 2), 2, rng=np.random.default_rng(0), dtype=np.float64)
    yield Place("SwinAttention()(x)", "x", draw(1, 4, 4, 8), swin)
    yield Place("window_partition(x)", "x", draw(1, 4, 4, 8), lambda y: layers.window_partition(y, (2, 2)))
    yield Place("window_reverse(windows)", "windows", draw(4, 4, 8), lambda y: layers.window_reverse(y, (2, 2), (4, 4)))
    yield Place("cyclic_shift(x)", "x", draw(1, 4, 4, 8), lambda y: layers.cyclic_shift(y, (1, 1)))


PLACES = {place.label: place for source in (of_calls, of_schemes, of_layers) for place in source()}


def unknown_parameters():
    """Parameters of schemes that may be arrays, by their annotation, but for which there is no place."""
    covered = {(label.partition("(")[0], place.name) for label, place in PLACES.items()}
    return {
        (info.cls.__name__, name)
        for info in rp.SCHEMES.values()
        for name, parameter in inspect.signature(info.cls).parameters.items()
        if "Any" in str(parameter.annotation) and (info.cls.__name__, name) not in covered
    }
