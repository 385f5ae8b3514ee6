"""`to_onnx`: a call of attention as a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np

import relpos_np as rp
from relpos_np._calls import validate_terms
from relpos_np._calls.lowering import all_terms, checked_schemes
from relpos_np._contract import check
from relpos_np._contract.options import DEFAULTS, Options, completed, takes
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.interop.onnx.attention import Call
from relpos_np.interop.onnx.graph import Graph, described
from relpos_np.interop.onnx.masks import INPUTS, masks
from relpos_np.interop.onnx.operand import Traced, UntracedError
from relpos_np.interop.onnx.package import package
from relpos_np.interop.onnx.places import Places
from relpos_np.interop.onnx.scores import Added
from relpos_np.interop.onnx.written import WRITTEN
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.base import Position, Scheme
from relpos_np.schemes.rotary import Rotary

OPSETS = (23, 24)
# Of the format itself: what wrote the first of these operator sets.
_IR_VERSION = 11
# Options that need no length.
_SYMBOLIC = ("causal", "window", "scale", "offset", "softcap", "cap_order", "sinks")

Shape = tuple[int | str, int, int | str, int]


@takes(but=("segments", "dropout", "rng", "precision", "backend"))
def to_onnx(
    position: Position = None,
    *,
    q: Sequence[int | str],
    k: Sequence[int | str],
    v: Sequence[int | str],
    dtype: Any = "float32",
    longest: int | None = None,
    inputs: Sequence[str] = (),
    opset: int = 23,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """A call of `attention` as a model of ONNX, with inputs q, k and v and the output "out".

    Parameters
    ----------
    position : scheme or tuple of schemes, optional
        See `attention`. Its arrays become initializers, in the form in which its terms hold them.
    q, k, v : sequence of int or str, (B, H, L_q, D), (B, H_kv, L_k, D) and (B, H_kv, L_k, D_v)
        Shapes. Batch items and lengths may have a name in place of a number, such as ``("batch", 8, "length", 64)``:
        they are then those of the model's inputs, and the same wherever they have the same name.
    dtype : {"float32", "float64"}
        Of all operands.
    longest : int, optional
        The longest L_q or L_k that is ever used, needed where lengths have names. A longer one is an error of the
        runtime where positions are looked up; so are, with `Rotary`, queries that stand before the first key or at
        `longest` and beyond.
    inputs : sequence of str
        Further inputs of the model: "bool_mask" or "float_mask" (B, 1, L_q, L_k), "key_lengths" (B), "offset" (B), and
        arrays of the scheme by the names of its attributes that differ from call to call, such as "gate" of `WavLM`.
        With "offset" and "key_lengths" keys lie in a cache of a fixed size.
    opset : {23, 24}
        The set of operators.
    mask, key_lengths, causal, window, rule, selected, scale, offset, query_scale, softcap, cap_order, sinks
        See `attention`; what they hold is part of the model. `offset` is one integer; where lengths have names it is by
        default L_k - L_q of the inputs.
    return_lse : bool
        Whether the model has a second output "lse".

    Returns
    -------
    onnx.ModelProto
        A model that ``onnx.checker.check_model`` accepts; ``onnx.save`` writes it.

    Raises
    ------
    RelposImportError
        If the package onnx is not installed.
    RelposError
        As `attention`; if a scheme computes with queries, keys or scores in a way that no nodes are written for; and
        if lengths have names, or the offset is an input, and an array has an entry for each of so many positions, or
        `position` is not one of those below.

    Notes
    -----
    In float32 attention is the operator Attention with what positions add as its mask, and positions turn by the
    operator RotaryEmbedding. float64, terms of values (`Shaw`, `IRPE`), sinks, the log-sum-exp and a cap beside any
    mask or bias are nodes such as MatMul and Exp, because the operators have no such thing, hold float32 numbers, or
    are defined differently by different releases of ONNX.

    Lengths may have names, and the offset may be an input, for the schemes to which distances are all (`T5`, `Shaw`,
    `DeBERTa`, `KERPLE`, `Sandwich`, `TISA`), for `ALiBi` but in its form "key", for `Rotary` without positions of its
    own, and without a scheme.

    NaN or infinity in an excluded key or value reaches the output, as everywhere in ONNX; a query that may attend no
    key gets 0.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> t5 = rp.T5(np.zeros((32, 8), np.float32))
    >>> size = (1, 8, 128, 64)
    >>> model = rp.to_onnx(t5, q=size, k=size, v=size)  # doctest: +SKIP
    """
    given = completed(to_onnx, options)
    package()
    check.flag("return_lse", return_lse)
    if check.integer("opset", opset) not in OPSETS:
        raise RelposValueError(f"opset: expected one of {', '.join(map(str, OPSETS))}, found {opset}")
    kind = np.dtype(
        check.choice("dtype", dtype if isinstance(dtype, str) else np.dtype(dtype).name, ("float32", "float64"))
    )
    shapes = {name: _shape(name, shape) for name, shape in (("q", q), ("k", k), ("v", v))}
    further = _names(inputs)
    model = _Model(shapes, kind, _longest(shapes, longest, moves="offset" in further), further)
    return model.made(position, given, opset, with_lse=return_lse)


def _shape(name: str, shape: Any) -> Shape:
    if isinstance(shape, str) or not isinstance(shape, Sequence) or len(shape) != 4:
        raise RelposTypeError(f"{name}: expected a shape of four sizes (B, H, L, D), found {shape!r}")
    for axis, n in enumerate(shape):
        if isinstance(n, str) and n.isidentifier() and axis in (0, 2):
            continue
        if isinstance(n, str):
            raise RelposValueError(f"{name}: axis {axis} cannot be {n!r}; batch items and lengths may have a name")
        check.integer(f"{name}: axis {axis}", n, 1)
    b, h, length, d = shape
    return b, h, length, d


def _longest(shapes: dict[str, Shape], longest: Any, *, moves: bool) -> int | None:
    """The longest length, for which schemes are lowered; None if lengths are numbers and no query `moves`."""
    named = sorted({n for shape in shapes.values() if isinstance(n := shape[2], str)})
    least = max([1, *(n for x in shapes.values() if isinstance(n := x[2], int))])
    if longest is None:
        if named:
            raise RelposValueError(f"longest: expected the longest of {', '.join(named)} that is ever used, found None")
        return least if moves else None
    if not named and not moves:
        raise RelposValueError(f"longest: {longest} without a length that has a name")
    return check.integer("longest", longest, least)


def _names(inputs: Any) -> tuple[str, ...]:
    if isinstance(inputs, str) or not isinstance(inputs, Sequence) or not all(isinstance(x, str) for x in inputs):
        raise RelposTypeError(f"inputs: expected a sequence of names, found {inputs!r}")
    if len(set(inputs)) < len(inputs):
        raise RelposValueError(f"inputs: expected each name once, found {inputs!r}")
    return tuple(inputs)


@dataclass(eq=False)
class _Model:
    """What a model is made from.

    `shapes` of q, k and v; `longest` where lengths have names or queries move; `inputs` beside q, k and v.
    """

    shapes: dict[str, Shape]
    dtype: np.dtype[Any]
    longest: int | None
    inputs: tuple[str, ...]

    @property
    def _fixed(self) -> str:
        """What an array with an entry for each position needs, and what there is instead."""
        if "offset" in self.inputs:
            return "an offset that is part of the model; found an input"
        return "lengths that are numbers; found names in q, k or v"

    def made(self, position: Position, given: Any, opset: int, *, with_lse: bool) -> Any:
        """The model."""
        problem = self._problem(given)
        schemes = checked_schemes(position, problem, "terms")
        q, v, site = self.shapes["q"], self.shapes["v"], problem.site
        offset = site.offset if self.longest is None else given["offset"]
        lengths = site.q_len, site.k_len, site.offset
        places = Places(Graph(), q[0], q[2], self.shapes["k"][2], offset, site.heads, lengths, "offset" in self.inputs)
        graph = places.graph
        operands = [
            Traced(places, graph.input(name, self.dtype, self.shapes[name]), x.shape, self.dtype, side)
            for name, x, side in zip("qkv", (problem.stored_q, problem.stored_k, problem.stored_v), "qkk", strict=True)
        ]
        if given["query_scale"] is not None:
            factors = check.per_query("query_scale", given["query_scale"], problem.out_shape[:-1], self.dtype)
            operands[0] = operands[0] * np.ascontiguousarray(factors)[..., None]
        terms = self._lowered(schemes, operands, problem)
        try:
            out, lse = self._attended(places, problem, terms, operands, given, with_lse=with_lse)
        except UntracedError as error:
            names = ", ".join(type(scheme).__name__ for scheme in schemes)
            raise RelposTypeError(f"position: {names} cannot be a model: its terms need {error}") from None
        outputs: list[tuple[str, str, tuple[int | str, ...]]] = [(out, "out", (*q[:3], v[3]))]
        if lse is not None and with_lse:
            outputs.append((lse, "lse", q[:3]))
        return _model(graph, outputs, self.dtype, opset)

    def _problem(self, given: Any) -> Problem:
        """The call that is lowered: with one batch item and the longest length in place of names."""
        if self.longest is not None:
            for name in given:
                if name not in _SYMBOLIC and given[name] is not DEFAULTS[name]:
                    raise RelposValueError(f"{name}: needs {self._fixed}")
        b = self.shapes["q"][0]
        batch = 1 if isinstance(b, str) else b
        for name, shape in self.shapes.items():
            if shape[0] != b:
                raise RelposValueError(f"{name}: expected {b!r} batch items like q, found {shape[0]!r}")
        if self.shapes["k"][2] != self.shapes["v"][2]:
            raise RelposValueError(f"v: expected length {self.shapes['k'][2]!r} like k, found {self.shapes['v'][2]!r}")
        for name in ("key_lengths", "offset"):
            if name in self.inputs and given[name] is not None:
                raise RelposValueError(f"{name}: expected an option or an input, found both")
        operands = []
        for _, heads, length, channels in self.shapes.values():
            count = length if self.longest is None else self.longest
            assert isinstance(count, int)
            operands.append(np.broadcast_to(np.zeros((), self.dtype), (batch, heads, count, channels)))
        options: Any = {**DEFAULTS, **given, "query_scale": None}
        if self.longest is not None:
            if given["offset"] is not None:
                check.integer("offset", given["offset"])
            options["offset"] = 0
        problem, _, _ = check.call(operands[0], operands[1], operands[2], options)
        return problem

    def _lowered(self, schemes: tuple[Scheme, ...], operands: list[Traced], problem: Problem) -> Terms:
        """All terms, from operands that are traced."""
        found, left = [], [name for name in self.inputs if name not in INPUTS]
        for scheme in schemes:
            name = type(scheme).__name__
            if self.longest is not None and not _by_distance(scheme):
                raise RelposTypeError(f"position: {name} needs {self._fixed}")
            own = scheme
            for one in [x for x in left if not x.startswith("_") and isinstance(getattr(scheme, x, None), np.ndarray)]:
                own = self._with_input(own, one, operands[0].places)
                left.remove(one)
            try:
                lower = partial(written, own) if (written := WRITTEN.get(type(own))) else own.lower
                terms = lower(operands[0], operands[1], problem.site)  # type: ignore[arg-type]
            except UntracedError as error:
                raise RelposTypeError(
                    f"position: {name} cannot be a model: what it computes with q, k or an input needs {error}, "
                    "for which there are no nodes"
                ) from None
            lowered = validate_terms.checked(own, terms, problem.site)
            if lowered.changes:
                raise RelposTypeError(f"position: {name} cannot be a model: it changes scores as a whole")
            found.append(lowered)
        if left:
            raise RelposValueError(
                f"inputs: no scheme has an array {left[0]!r}; expected {', '.join(INPUTS)} or the name of one"
            )
        return all_terms(found)

    def _with_input(self, scheme: Scheme, name: str, places: Places) -> Scheme:
        """The scheme with an input of the model in place of an array."""
        if self.longest is not None or isinstance(self.shapes["q"][0], str):
            raise RelposValueError(f"inputs: {name!r} needs numbers in q, k and v")
        array = getattr(scheme, name)
        if array.dtype.kind != "f":
            raise RelposTypeError(
                f"inputs: expected an array of floating-point numbers, found {name!r} of {array.dtype}"
            )
        cut = copy.copy(scheme)
        given = places.graph.input(name, self.dtype, array.shape)
        setattr(cut, name, Traced(places, given, array.shape, self.dtype))
        return cut

    def _attended(
        self, places: Places, problem: Problem, terms: Terms, operands: list[Traced], given: Any, *, with_lse: bool
    ) -> tuple[str, str | None]:
        graph, site = places.graph, problem.site
        added, pairs = Added(places, problem).to_scores(terms)
        sinks = None
        if given["sinks"] is not None:
            scores = check.per_head("sinks", given["sinks"], problem.out_shape[:-1], self.dtype)
            if given["sinks"].ndim == 1:
                scores = scores[:1, :, :1]
            elif self.longest is not None:
                raise RelposValueError("sinks: expected a number per head where lengths have names")
            sinks = graph.constant(scores[..., None], "sinks")
        query, key = (
            own if made is None else made for own, made in zip(operands[:2], (terms.query, terms.key), strict=True)
        )
        turn, value = terms.turn, operands[2]
        if turn is not None:
            value = turn.of_values(value)
        seen = masks(places, problem, self.shapes["q"][0], [x for x in self.inputs if x in INPUTS], pairs)
        call = Call(places, problem, terms, query, key, value, added, seen, sinks)
        out, lse = call.outputs(with_lse=with_lse)
        traced = Traced(places, out, problem.out_shape, site.dtype, "q")
        return (traced if turn is None else turn.of_output(traced)).name, lse


def _by_distance(scheme: Scheme) -> bool:
    """Whether the call of the longest lengths says what a shorter one is."""
    if isinstance(scheme, ALiBi):
        return scheme.form != "key"
    return scheme.relative or (type(scheme) is Rotary and scheme.positions is None and scheme.key_positions is None)


def _model(graph: Graph, outputs: list[tuple[str, str, Any]], dtype: np.dtype[Any], opset: int) -> Any:
    onnx = package()
    for name, wanted, _ in outputs:
        graph.nodes.append(onnx.helper.make_node("Identity", [name], [wanted], name=wanted))
    described_outputs = [described(wanted, dtype, shape) for _, wanted, shape in outputs]
    body = onnx.helper.make_graph(graph.nodes, "attention", graph.inputs, described_outputs, graph.initializers)
    model = onnx.helper.make_model(
        body,
        opset_imports=[onnx.helper.make_opsetid("", opset)],
        producer_name="relpos_np",
        producer_version=rp.__version__,
        ir_version=_IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    return model
