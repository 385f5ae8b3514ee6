r"""Multi-head attention as a whole module: projections around `relpos_np.attention` with any scheme."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.options import Options, completed, takes
from relpos_np.errors import RelposValueError
from relpos_np.layers.linear import Cache, Context, Linear, Projected, StateOptions, Weights, thirds
from relpos_np.layers.state import ATTENTION, Names, Source, State
from relpos_np.schemes.base import Position, Scheme
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.t5 import T5
from relpos_np.types import Array


class MultiHeadAttention(Projected):
    r"""Attention between projected states, with the positions of any scheme.

    .. math::

        \mathrm{out} = W^O\, [z^{(1)}; \ldots; z^{(H)}], \qquad
        z^{(h)} = \mathrm{attention}(W^Q_h x,\; W^K_h c,\; W^V_h c)

    with biases where they are given. The context c is x itself (self-attention), or other states (cross-attention).

    Parameters
    ----------
    query, key, value : Linear, ndarray or (weight, bias)
        Projections, weights of shape (H * D, d_x), (H_kv * D, d_c) and (H_kv * D_v, d_c): rows are outputs, as in
        PyTorch.
    out : Linear, ndarray or (weight, bias), optional
        Projection of the concatenated heads, weight (d_out, H * D_v); without it they are returned as they are.
    heads : int
        Number of query heads H. That of keys and values, H_kv, follows from the shapes.
    position : scheme or tuple of schemes, optional
        What positions contribute; see `relpos_np.attention`. Absolute encodings are added to the inputs instead,
        with `PositionalEncoding`.
    scale : float, optional
        The factor on q . k; default 1/sqrt(D). T5's weights expect 1.

    Raises
    ------
    RelposError
        If shapes do not fit each other, naming the argument, what was found and what was expected.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> import relpos_np as rp
    >>> from relpos_np.layers import MultiHeadAttention
    >>> rng = np.random.default_rng(0)
    >>> weights = rng.standard_normal((4, 8, 8))
    >>> layer = MultiHeadAttention(*weights, heads=2, position=rp.ALiBi(heads=2))
    >>> layer(rng.standard_normal((3, 5, 8)), causal=True, backend="numpy").shape
    (3, 5, 8)
    """

    def __init__(
        self,
        query: Weights,
        key: Weights,
        value: Weights,
        out: Weights | None = None,
        *,
        heads: int,
        position: Position = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(query, key, value, out, heads)
        schemes = position if isinstance(position, tuple) else (position,)
        if position is not None and not all(isinstance(scheme, Scheme) for scheme in schemes):
            found = ", ".join(type(scheme).__name__ for scheme in schemes)
            raise RelposValueError(f"position: expected schemes such as relpos_np.T5, found {found}")
        self.position = position
        self.scale = None if scale is None else check.real("scale", scale)

    @classmethod
    def from_state_dict(
        cls,
        source: Source,
        *,
        prefix: str = "",
        format: str,
        heads: int | None = None,
        position: Position = None,
        max_distance: int = 128,
        bidirectional: bool | None = None,
        left: int = 64,
        right: int = 8,
    ) -> MultiHeadAttention:
        """A module with published weights; its positions are read as well.

        Parameters
        ----------
        source : mapping, str, path-like or State
            See `relpos_np.layers.tensors`: a state dict, or the path of a .safetensors file.
        prefix : str
            That of the attention module, for instance ``"encoder.block.0.layer.0.SelfAttention"``.
        format : {"t5", "mpnet", "wav2vec2_bert", "speecht5", "bert", "espnet", "torch"}
            Whose names: `relpos_np.layers.state.ATTENTION` lists them.

            - "t5": ``q`` ... ``o`` without scaling, and ``relative_attention_bias``, which layers after the first
              take from block 0. ``EncDecAttention`` has no positions.
            - "mpnet": the same names, scaled; always 32 buckets up to 128, and the table is the encoder's.
            - "wav2vec2_bert": ``linear_q`` ... and ``distance_embedding``, clipped at `left` and `right`.
            - "speecht5": ``q_proj`` ... and the encoder's ``pe_k``, counted by i - j with 2 m rows; its decoder has
              none: ``position=()``.
            - "bert", "espnet", "torch": no positions. The last is `torch.nn.MultiheadAttention`.
        heads : int, optional
            Number of heads; needed where no table of positions shows it.
        position : scheme or tuple of schemes, optional
            Instead of those in the source; ``()`` for none.
        max_distance : int
            "t5": the model's ``relative_attention_max_distance``.
        bidirectional : bool, optional
            "t5": default False where the prefix names a decoder, else True.
        left, right : int
            "wav2vec2_bert": how far the table reaches.

        Returns
        -------
        MultiHeadAttention
            In float32 or float64; half precision is widened.

        Raises
        ------
        RelposValueError
            If a tensor is missing (the message lists the nearest names) or shapes do not fit.

        Examples
        --------
        >>> import numpy as np
        >>> from relpos_np.layers import MultiHeadAttention
        >>> state = {f"{name}.weight": np.eye(8) for name in ("q", "k", "v", "o")}
        >>> state["relative_attention_bias.weight"] = np.zeros((32, 2))
        >>> MultiHeadAttention.from_state_dict(state, format="t5")
        MultiHeadAttention(8 -> 8, heads=2, position=T5(table=(32, 2), rounding='float32'))
        """
        names = ATTENTION[check.choice("format", format, tuple(ATTENTION))]
        state = State(source, prefix)
        query, key, value = (
            _stacked(state)
            if format == "torch"
            else (Linear.read(state, name) for name in (names.query, names.key, names.value))
        )
        out = Linear.read(state, names.out)
        table = _table(state, names) if position is None else None
        if table is not None:
            shown = table.shape[1] if format in ("t5", "mpnet") else query.outputs // table.shape[1]
            if heads is not None and heads != shown:
                raise RelposValueError(f"heads: the table of positions {table.shape} is for {shown}, found {heads}")
            heads = shown
        if heads is None:
            raise RelposValueError("heads: nothing in the source shows their number; pass heads=")
        if table is not None and format == "t5":
            both = "decoder" not in state.prefix.split(".") if bidirectional is None else bidirectional
            position = T5(table, max_distance=max_distance, bidirectional=both, rounding="float32")
        elif table is not None and format == "mpnet":
            position = T5(table)
        elif table is not None and format == "wav2vec2_bert":
            reach = check.integer("left", left, 0) + check.integer("right", right, 0) + 1
            if len(table) != reach:
                raise RelposValueError(f"left: {left} + {right} + 1 = {reach} rows expected, found {table.shape}")
            position = Shaw(table, left=left)
        elif table is not None:
            # Rows count i - j from -m to m - 1; in reverse they are those of j - i from -(m - 1) to m.
            position = Shaw(table[::-1], left=len(table) // 2 - 1)
        return cls(query, key, value, out, heads=heads, position=position, scale=1.0 if format == "t5" else None)

    @overload
    def __call__(
        self,
        x: Array,
        context: Context = ...,
        *,
        return_probabilities: Literal[False] = ...,
        **options: Unpack[StateOptions],
    ) -> Array: ...

    @overload
    def __call__(
        self, x: Array, context: Context = ..., *, return_probabilities: Literal[True], **options: Unpack[StateOptions]
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: Array, context: Context = ..., *, return_probabilities: bool, **options: Unpack[StateOptions]
    ) -> Array | tuple[Array, Array]: ...

    @takes(but=("scale",))
    @np.errstate(all="ignore")
    def __call__(
        self,
        x: Array,
        context: Context = None,
        *,
        values: Array | None = None,
        memory: Array | None = None,
        cache: Cache | None = None,
        return_probabilities: bool = False,
        **options: Unpack[Options],
    ) -> Array | tuple[Array, Array]:
        """Attend.

        Parameters
        ----------
        x : ndarray, shape (..., L_q, d_x)
            States that ask: float16, bfloat16, float32 or float64.
        context : ndarray, shape (..., L_k, d_c), or Cache, optional
            States that are attended, or what `project` made of them; default x.
        values : ndarray, shape (..., L_k, d_c), optional
            States that the values are made of; default `context`. With x rotated beforehand as `context`, and x
            itself here, this is the rotary mode of Wav2Vec2-Conformer, which turns the inputs of the projections.
        memory : ndarray, shape (..., M, d_c), optional
            Earlier states, attended before those of `context`.
        cache : Cache, optional
            Keys and values of earlier calls, attended before this call's, which are added.
        mask : ndarray of bool or float, optional
            Broadcast to (..., H, L_q, L_k), where L_k counts memory and cache; see `relpos_np.attention`.
        key_lengths : int or ndarray of int, optional
            Per batch item, how many keys exist, memory and cache among them.
        causal : bool
            Attend d <= 0 only.
        window, rule, selected, query_scale, softcap, cap_order, sinks, segments
            See `relpos_np.attention`. `query_scale` is for projected queries; lengths of keys count memory and cache.
        offset : int or ndarray of int, optional
            Position of the first query among the keys; default L_k - L_q, which is the number of earlier states in
            self-attention. An array has one for each batch item.
        dropout : float
            Rate at which probabilities are dropped; needs `rng`.
        rng : numpy.random.Generator, optional
            Source of the dropout mask.
        precision : {"highest", "high", "medium"}, optional
            How exactly attention makes products, see `relpos_np.set_precision`; projections are not rounded.
        backend : {"numpy", "terms", "numba", "cuda"}, optional
            See `relpos_np.set_backend`.
        return_probabilities : bool
            Also return the probabilities, before dropout. They are computed apart from the output, in memory of
            L_q L_k, and not with `segments` or an array as `offset`.

        Returns
        -------
        out : ndarray, shape (..., L_q, d_out)
            In the dtype of `x`; computed in float32 for half precision.
        probabilities : ndarray, shape (..., H, L_q, L_k)
            Only with `return_probabilities`.

        Raises
        ------
        RelposError
            Naming the argument, what was found and what was expected. A cache is then left as it was.
        """
        given = completed(type(self).__call__, options) | {"scale": self.scale}
        return self._attend(x, context, values, memory, cache, lambda *_: self.position, return_probabilities, given)

    def __repr__(self) -> str:
        outputs = self.heads * self.value.outputs // self.kv_heads if self.out is None else self.out.outputs
        return f"MultiHeadAttention({self.query.inputs} -> {outputs}, heads={self.heads}, position={self.position!r})"


def _stacked(state: State) -> tuple[Linear, Linear, Linear]:
    """The projections of torch.nn.MultiheadAttention, in one tensor where their inputs have one width."""
    if state.has("bias_k"):
        raise RelposValueError(f"{state.prefix}bias_k: a learned key and value (add_bias_kv) are not supported")
    names = ("q_proj", "k_proj", "v_proj")
    stacked = state.get("in_proj_weight")
    weights = [state.take(f"{name}_weight") for name in names] if stacked is None else thirds(state, "in_proj_weight")
    biases = thirds(state, "in_proj_bias") if state.has("in_proj_bias") else [None] * 3
    q, k, v = (Linear(w, b, name=state.prefix + n) for n, w, b in zip(names, weights, biases, strict=True))
    return q, k, v


def _table(state: State, names: Names) -> Array | None:
    """The table of positions; None where the module has none by design."""
    if not names.table or "EncDecAttention" in state.prefix.split("."):
        return None
    found = state.find(*names.table)
    if found is None:
        raise RelposValueError(
            f"{state.prefix}{names.table[0]}: no such tensor, here or above; pass position=, or position=() for an "
            f"attention without positions; {state.nearest(names.table[0])}"
        )
    return check.table(names.table[0], found, "rows columns")
