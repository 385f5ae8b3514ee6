"""What published codes do differently and is no scheme of its own: functions with inputs, for the golden vectors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

import relpos_np as rp
from relpos_np import layers, reference
from relpos_np.errors import RelposError, RelposValueError
from relpos_np.schemes.sinusoidal import LAYOUTS as SINUSOIDAL
from relpos_np.testing.frozen import Numbers
from relpos_np.types import Backend, Shift

# What a file may ask for, and nothing else.
_LAYERS = ("SwinAttention", "cyclic_shift", "shift_mask", "window_partition")
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"relpos_np.reference.{name}": getattr(reference, name) for name in reference.__all__},
    **{f"relpos_np.layers.{name}": getattr(layers, name) for name in _LAYERS},
    "relpos_np.rel_shift": rp.rel_shift,
}


@dataclass(frozen=True)
class Call:
    """One call; where `then` is given, the result is a layer, which is called with that.

    `function` is a key in `FUNCTIONS`, the others are keyword arguments.
    """

    function: str
    arguments: Mapping[str, Any]
    then: Mapping[str, Any] | None = None

    def run(self, backend: Backend = "numpy") -> Any:
        """Make the call, on this backend where the function has the choice.

        Returns an array or a tuple of results; the name of the error, if it is one that the library raises.
        """
        if self.function not in FUNCTIONS:
            raise RelposValueError(f"function: {self.function!r} is not one of those that vectors may name")
        try:
            with rp.use_backend(backend):
                result = FUNCTIONS[self.function](**self.arguments)
                return result if self.then is None else result(**self.then)
        except RelposError as error:
            return type(error).__name__

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Names of the backends that can differ in the answer."""
        chosen = self.then is not None or "backend" in inspect.signature(FUNCTIONS[self.function]).parameters
        return rp.backend.BACKENDS if chosen else ("numpy",)


@dataclass(frozen=True)
class Divergence:
    """Calls that show one convention, or several beside each other.

    `name` is that of the record; `note` says who does it, and what to look for.
    """

    name: str
    note: str
    calls: list[Call] = field(default_factory=list)


def _reference(function: str, **arguments: Any) -> Call:
    return Call(f"relpos_np.reference.{function}", arguments)


def _each(function: str, arguments: Mapping[Any, Any]) -> list[Call]:
    """A call for each combination of what stands in lists; other arguments are the same in all.

    A list may belong to several arguments, whose names are a tuple, and holds a tuple for each call.
    """
    names = [key if isinstance(key, tuple) else (key,) for key in arguments]
    choices = [x if isinstance(x, list) else [x] for x in arguments.values()]
    found = []
    for chosen in product(*choices):
        given: dict[str, Any] = {}
        for key, value in zip(names, chosen, strict=True):
            given |= zip(key, value if len(key) > 1 else (value,), strict=True)
        found.append(_reference(function, **given))
    return found


_LONGROPE = {"short_factors": np.linspace(1, 1.5, 8), "long_factors": np.linspace(1, 30, 8)}
_CURVES = {name: np.array([[0.5, -1.0], [2.0, 0.25]]) for name in ("amplitudes", "sharpness", "offsets")}


class _Entry(NamedTuple):
    """Calls of one function that show a convention."""

    note: str
    arguments: Mapping[Any, Any]


# By function, and after a dot the argument after whose words records are named; lists hold what calls differ in.
_TABLE: Mapping[str, _Entry] = {
    "sinusoidal.layout": _Entry(
        "The paper's layout is interleaved. dimension_index is what some notes print by mistake: no rotation "
        "moves one position to another.",
        {"layout": SINUSOIDAL, "positions": np.array([0.0, 1.0, 2.0, 5.0, 63.0, 1000.0, -3.0, 2.5]), "dim": [2, 10, 7]},
    ),
    "rotation_matrix": _Entry(
        "Moves an interleaved sinusoid by so many positions.", {"delta": [0, 1, -2, 2.5], "dim": 6}
    ),
    "alibi_slopes": _Entry(
        "Numbers of heads that are no power of two: the slopes of the power below, then every other one of the power "
        "above; not sorted.",
        {"heads": [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 25, 32, 40, 71, 112]},
    ),
    "alibi_slopes.bias_max": _Entry(
        "MPT's alibi_bias_max in place of the paper's 8.",
        {"heads": [3, 8], "bias_max": [4.0, 16.0]},
    ),
    "alibi_bias.form": _Entry(
        "Forms that agree for keys in the past, after the softmax.",
        {
            "form": ("symmetric", "causal", "key"),
            "slopes": np.array([0.5, 0.125, 0.3]),
            "q_len": 3,
            "k_len": 5,
            "offset": [0, 2],
        },
    ),
    "relative_vectors.outside": _Entry(
        "Beyond the table: its outermost row (Shaw), or nothing (VITS, Music Transformer, later tensor2tensor).",
        {"outside": ("clip", "zero"), "table": np.arange(1.0, 16.0).reshape(5, 3), "q_len": 4, "k_len": 6, "offset": 2},
    ),
    "rotary_frequencies": _Entry(
        "The paper's, and a base of 500000.",
        {("dim", "base"): [(8, 10000.0), (64, 500000.0)]},
    ),
    "linear_frequencies": _Entry("Position interpolation.", {"dim": 16, "factor": 4.0}),
    "ntk_frequencies": _Entry(
        "The dynamic rule: nothing changes up to the trained length.",
        {"dim": 16, "length": [100, 2048, 5000], "trained_length": 2048, "factor": 2.0},
    ),
    "yarn_frequencies": _Entry(
        "Frequencies and the factor on attention; with the ends of the ramp rounded outwards, as published code has "
        "it, and without.",
        {"dim": 64, "factor": [4.0, 32.0], "trained_length": 4096, "truncate": [True, False]},
    ),
    "llama3_frequencies": _Entry(
        "Bands in the number of turns, without a factor on attention.",
        {"dim": 64, "factor": 8.0, "trained_length": 8192, "base": 500000.0},
    ),
    "longrope_frequencies": _Entry(
        "Short factors up to the trained length, long ones beyond; the factor on attention applies to both.",
        {"dim": 16, "length": [4096, 4097], "trained_length": 4096, "factor": 32.0, **_LONGROPE},
    ),
    "proportional_frequencies": _Entry(
        "A quarter of the pairs turns, with the frequencies and partners they have among all.",
        {"dim": 16, "share": 0.25},
    ),
    "axial_frequencies.spread": _Entry(
        "Images: each axis with the frequencies of its share (EVA-02), or dealt out in turn (Pixtral).",
        {"spread": ("same", "alternate"), "dim": 16, "axes": 2},
    ),
    "section_axes.order": _Entry(
        "Multimodal sections: one axis after the other (Qwen2-VL), or in turn (Qwen3-VL); in turn, the last ones "
        "may not find room.",
        {"order": ("chunks", "cyclic"), "sections": [(4, 3, 1), (24, 20, 20), (3, 5, 5)]},
    ),
    "xpos_scales": _Entry(
        "Factors of the queries, as the paper has them, and around a centre.",
        {"positions": np.arange(6.0), "pairs": 4, "centre": [0.0, 3.0]},
    ),
    "rstt_frames": _Entry(
        "Every s-th frame, s = (F_q + 1) // F_kv: an error unless that gives F_kv frames, as it does for "
        "F_q = 2 F_kv - 1 and few others. The published code goes on with another number of frames.",
        {
            ("num_frames_q", "num_frames_kv"): [
                *product(range(1, 13), repeat=2),
                *((2 * n - 1, n) for n in range(7, 17)),
            ]
        },
    ),
    "deberta_bucket": _Entry(
        "v1 counts one by one, v2 and v3 have logarithmic buckets, rounded up; v2's own sizes, and small ones.",
        {
            "distance": np.arange(-700, 701),
            ("span", "max_position"): [(512, None), (256, 512), (128, 513), (4, 32)],
        },
    ),
    "axis_rows.rounding": _Entry(
        "Grids of queries and keys that differ, as after MViT's pooling.",
        {"rounding": ("exact", "float32"), ("q_size", "k_size"): [(4, 4), (7, 3), (3, 7), (14, 5)]},
    ),
    "irpe_buckets.method": _Entry(
        "Rows of iRPE; pairs with a class token share the last.",
        {"method": ("product", "euclidean", "quantization", "cross"), "grid": (4, 5), "class_tokens": [0, 1]},
    ),
    "swin_v2_coordinates.variant": _Entry(
        "Coordinates of the network of Swin V2, also for a window other than the trained one; in an axis of "
        "length 1, where the published formula is 0/0, they are 0.",
        {
            "variant": ("microsoft", "transformers", "paper"),
            ("grid", "pretrained_grid"): [((8, 8), None), ((3, 5), (8, 8)), ((1, 4), None)],
        },
    ),
    "resize_table.mode": _Entry(
        "A table of a window of 2 by 3 for larger and smaller ones.",
        {
            "mode": ("cubic", "linear"),
            "table": np.cos(np.arange(15.0 * 2)).reshape(15, 2),
            "old_grid": (2, 3),
            "new_grid": [(4, 5), (3, 2), (1, 3)],
        },
    ),
    "neighborhood_axis": _Entry(
        "Neighbours and steps: at a border the window moves inward. Without and with dilation.",
        {("length", "dilation"): [(3, 1), (7, 1), (7, 2)], "kernel": 3},
    ),
    "tisa_bias.variant": _Entry(
        "The published code counts distances the other way, and is off by one.",
        {"variant": ("paper", "published"), **_CURVES, "q_len": 4, "k_len": 5, "offset": 1},
    ),
    "sandwich_bias.variant": _Entry(
        "NeMo's frequencies begin one pair later, and the largest bias is 0.",
        {"variant": ("paper", "nemo"), "heads": 3, "q_len": 4, "k_len": 6, "dim": 16, "offset": 2},
    ),
}


def _tables() -> Iterator[Divergence]:
    for name, (note, arguments) in _TABLE.items():
        function, _, choice = name.partition(".")
        words = arguments.get(choice)
        if not isinstance(words, tuple):
            yield Divergence(name, note, _each(function, arguments))
            continue
        for word in words:
            yield Divergence(f"{function}.{word}", note, _each(function, {**arguments, choice: word}))


def _shifts() -> Iterator[Divergence]:
    for variant in get_args(Shift):
        calls = []
        for q_len, k_len in ((1, 1), (5, 5), (4, 7)):
            columns = len(reference.row_distances(q_len, k_len, variant))
            x = np.arange(2.0 * q_len * columns).reshape(2, q_len, columns)
            calls.append(_reference("row_distances", q_len=q_len, k_len=k_len, variant=variant))
            calls.append(Call("relpos_np.rel_shift", {"x": x, "variant": variant}))
        yield Divergence(
            f"rel_shift.{variant}",
            "Entries number the input, so that the result shows where each came from. The distance of each column is "
            "given before. transformer_xl and espnet_legacy run on into the next query's row beyond the diagonal.",
            calls,
        )


# (buckets, largest distance, bidirectional) and what is known of them.
_BUCKETS = {
    "t5": (32, 128, True, "T5 and MPNet. Ties lie at distances 16, 32 and 64, and both roundings agree."),
    "t5_causal": (32, 128, False, "T5's decoder: keys after the query share bucket 0."),
    "wavlm": (320, 800, True, "WavLM."),
    "near_28_882": (
        28,
        882,
        False,
        "Keys 488 before the query lie 1e-6 below a border: 25; float32 code that multiplies first gets 26.",
    ),
    "tie_64_939": (64, 939, True, "Keys 728 before the query: bucket 30 exactly, 31 in float32."),
    "tie_58_282": (58, 282, False, "Keys 119 before the query: bucket 46 exactly, 47 in float32."),
}


def _buckets() -> Iterator[Divergence]:
    for name, (buckets, furthest, both, note) in _BUCKETS.items():
        given = {"num_buckets": buckets, "max_distance": furthest, "bidirectional": both}
        distances = np.arange(-furthest - 70, furthest + 71)
        calls = _each("t5_bucket", given | {"relative_position": distances, "rounding": ["exact", "float32"]})
        yield Divergence(f"t5_bucket.{name}", f"Exactly, then in float32 as frameworks compute it. {note}", calls)


def _rotations(rng: Numbers) -> Iterator[Divergence]:
    x, positions = rng.standard_normal((2, 5, 10)), np.array([0.0, 1.0, 7.0, -2.0, 100.0])
    matrices = reference.rotary_matrices(positions, reference.rotary_frequencies(8))
    for layout in ("half", "interleaved"):
        yield Divergence(
            f"rotate_pairs.{layout}",
            "Which channels are partners; the last two of ten stay. Weights of one layout are wrong in the other.",
            [_reference("rotate_pairs", x=x, matrices=matrices, layout=layout)],
        )
    # Two calls, the second on what the first returns.
    plain, weights = rng.standard_normal((5, 8)), rng.standard_normal((2, 8, 8))
    turned = reference.rotate_inputs(plain, 2)
    yield Divergence(
        "rotary_before_projection",
        "wav2vec2-conformer turns the inputs, and projects them then: the products (part a of the second call) depend "
        "on more than the difference of positions, other than with rotary positions proper.",
        [
            _reference("rotate_inputs", x=plain, heads=2),
            _reference("absolute_terms", e=turned, u=np.zeros_like(turned), w_q=weights[0], w_k=weights[1]),
        ],
    )


def _windows(rng: Numbers) -> Iterator[Divergence]:
    def index(grid: tuple[int, ...], extent: tuple[int, ...]) -> Call:
        tokens = [np.arange(n) for n in grid]
        return _reference("window_index", query=tokens, key=tokens, extent=extent)

    yield Divergence(
        "window_index",
        "Query less key along each axis, row-major. The last two are windows that are shorter in time and narrower "
        "than the table's: only the first has the leading rows and columns of the whole window's index, which "
        "published code takes for both.",
        [index((2, 3), (2, 3)), *(index(grid, (2, 2, 3)) for grid in ((2, 2, 3), (1, 2, 3), (2, 2, 2)))],
    )
    shifted: dict[str, Any] = {"grid": (4, 6), "window": (2, 3), "shift": (1, 1)}
    yield Divergence(
        "shift_mask",
        "What is added to the scores of pairs that the shift brought together: -100 in published code; or excluded.",
        [Call("relpos_np.layers.shift_mask", shifted | {"value": value}) for value in (-100.0, -np.inf, None)],
    )
    x = rng.standard_normal((1, 5, 6, 8))
    shapes: dict[str, tuple[int, ...]] = {"q.weight": (8, 8), "kv.weight": (16, 8), "proj.weight": (8, 8)}
    shapes |= {"relative_position_bias_table": (49, 2), "q.bias": (8,), "kv.bias": (16,), "proj.bias": (8,)}
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for order in ("pad_then_shift", "shift_then_pad"):
        given = {"dim": 8, "window_size": (4, 4), "num_heads": 2, "shift_size": (2, 2), "weights": weights}
        yield Divergence(
            f"pad_order.{order}",
            "A map of 5 by 6 in windows of 4 by 4, shifted by 2: transformers and torchvision pad first, timm shifts "
            "first.",
            [Call("relpos_np.layers.SwinAttention", {**given, "pad_order": order}, {"x": x})],
        )


def _terms(rng: Numbers) -> Iterator[Divergence]:
    e, u, w_q, w_k = (rng.standard_normal(shape) for shape in ((4, 6), (4, 6), (5, 6), (5, 6)))
    yield Divergence(
        "absolute_terms",
        "The four parts of scores with absolute positions, with projections and without.",
        [_reference("absolute_terms", e=e, u=u, w_q=w_q, w_k=w_k), _reference("absolute_terms", e=e, u=u)],
    )
    q, k, a, b, rows = (rng.standard_normal(shape) for shape in ((3, 6), (5, 6), (6,), (6,), (7, 6)))
    yield Divergence(
        "relative_terms",
        "The four parts of Transformer-XL's scores; rows for the distances 4 ... -2.",
        [_reference("relative_terms", q=q, k=k, content_bias=a, position_bias=b, rows=rows)],
    )


def divergences(seed: int) -> Iterator[Divergence]:
    """All of them, with random inputs, always in the same order."""
    rng = Numbers(seed)
    for found in (_shifts(), _buckets(), _tables(), _rotations(rng), _windows(rng), _terms(rng)):
        yield from found
