r"""Attention with relative sinusoids as a whole module: Transformer-XL, XLNet and the Conformer family."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.options import Options, completed, takes
from relpos_np.errors import RelposValueError
from relpos_np.layers.encoding import RelativePositionalEncoding
from relpos_np.layers.linear import Cache, Context, Linear, Projected, StateOptions, Weights, thirds
from relpos_np.layers.state import RELATIVE, Source, State
from relpos_np.schemes.transformer_xl import TransformerXL, row_distances
from relpos_np.types import Array, Shift


class _Options(StateOptions, total=False):
    """What a call takes."""

    pos_emb: Array | None


class RelativeMultiHeadAttention(Projected):
    r"""Attention with content and position biases, and sinusoids of distances projected by :math:`W_R`.

    .. math::

        \mathrm{out} = W^O\, [z^{(1)}; \ldots; z^{(H)}], \qquad z = \mathrm{softmax}(s)\, V, \qquad
        s_{ij} = \sigma \left[ (q_i + u) \cdot k_j + (q_i + v) \cdot W_R\, \mathrm{PE}(i + M - j) \right]

    with q, K, V projected from the states, as in `MultiHeadAttention`, and M = L_k - L_q earlier ones.

    Parameters
    ----------
    query, key, value : Linear, ndarray or (weight, bias)
        Projections, weights of shape (H * D, d_x), (H * D, d_c) and (H * D_v, d_c).
    out : Linear, ndarray or (weight, bias), optional
        Projection of the concatenated heads, weight (d_out, H * D_v); without it they are returned as they are.
    pos : Linear, ndarray or (weight, bias)
        Projection :math:`W_R` of the sinusoids, weight (H * D, d_pos): ``linear_pos``, ``r_net``.
    content_bias, position_bias : ndarray, shape (H, D)
        The biases u and v: ``pos_bias_u`` and ``pos_bias_v``, ``r_w_bias`` and ``r_r_bias``.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        Which distances and which shift; see `relpos_np.TransformerXL`.
    encoding : RelativePositionalEncoding, optional
        The sinusoids, of the same variant; default those that the variant was published with.
    zero_triu : bool
        ESPnet's option of that name: no position term for keys after the query, j > i + M. Not for "wenet".
    scale : float, optional
        The factor on both products; default 1/sqrt(D).

    Raises
    ------
    RelposError
        If shapes do not fit each other, naming the argument, what was found and what was expected.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019, section 3.3.
    Yang et al., "XLNet", NeurIPS 2019. Gulati et al., "Conformer", Interspeech 2020. Published modules of
    Transformer-XL and XLNet go on with a residual connection and a LayerNorm, which are not part of this one.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import RelativeMultiHeadAttention
    >>> rng = np.random.default_rng(0)
    >>> weights, (u, v) = rng.standard_normal((5, 8, 8)), rng.standard_normal((2, 2, 4))
    >>> biases = {"content_bias": u, "position_bias": v}
    >>> layer = RelativeMultiHeadAttention(*weights[:4], pos=weights[4], **biases, variant="conformer")
    >>> layer(rng.standard_normal((3, 5, 8)), backend="numpy").shape
    (3, 5, 8)
    """

    def __init__(
        self,
        query: Weights,
        key: Weights,
        value: Weights,
        out: Weights | None = None,
        *,
        pos: Weights,
        content_bias: Any,
        position_bias: Any,
        variant: Shift = "transformer_xl",
        encoding: RelativePositionalEncoding | None = None,
        zero_triu: bool = False,
        scale: float | None = None,
    ) -> None:
        self.content_bias = check.table("content_bias", content_bias, "heads head_dim")
        self.position_bias = check.table("position_bias", position_bias, "heads head_dim")
        super().__init__(query, key, value, out, len(self.content_bias))
        self.pos = Linear.of(pos, "pos")
        for name, table in (("content_bias", self.content_bias), ("position_bias", self.position_bias)):
            if table.shape != (self.heads, self.head_dim):
                raise RelposValueError(
                    f"{name}: expected ({self.heads}, {self.head_dim}) from content_bias and query.weight "
                    f"{self.query.weight.shape}, found {table.shape}"
                )
        if self.pos.outputs != self.query.outputs:
            raise RelposValueError(
                f"pos.weight: expected {self.query.outputs} outputs as the queries have, found shape "
                f"{self.pos.weight.shape}"
            )
        if encoding is None:
            encoding = RelativePositionalEncoding(self.pos.inputs, variant=variant)
        if encoding.variant != variant:
            raise RelposValueError(f"encoding: expected variant {variant!r}, found {encoding!r}")
        if encoding.dim != self.pos.inputs:
            raise RelposValueError(
                f"encoding: expected {self.pos.inputs} dimensions as pos.weight {self.pos.weight.shape} takes, found "
                f"{encoding!r}"
            )
        if check.flag("zero_triu", zero_triu) and variant == "wenet":
            raise RelposValueError("zero_triu: variant 'wenet' has no positions that are relative, found True")
        self.variant, self.encoding, self.zero_triu = encoding.variant, encoding, bool(zero_triu)
        self.scale = None if scale is None else check.real("scale", scale)

    @classmethod
    def from_state_dict(
        cls,
        source: Source,
        *,
        prefix: str = "",
        format: str,
        clamp_len: int | None = None,
        max_len: int = 5000,
        zero_triu: bool = False,
    ) -> RelativeMultiHeadAttention:
        """A module with published weights.

        Parameters
        ----------
        source : mapping, str, path-like or State
            See `relpos_np.layers.tensors`: a state dict, or the path of a .safetensors file.
        prefix : str
            That of the attention module, for instance ``"encoder.encoders.0.self_attn"``.
        format : str
            Whose names, and which variant: `relpos_np.layers.state.RELATIVE` lists them. Names do not tell ESPnet's
            two and WeNet's apart: the publisher's configuration does.

            - "espnet", "espnet_legacy", "wenet", "wav2vec2_conformer": ``linear_q`` ... ``linear_out``,
              ``linear_pos``, ``pos_bias_u``, ``pos_bias_v``. NeMo uses the names and the variant of "espnet".
            - "parakeet": ``q_proj`` ... ``o_proj``, ``relative_k_proj``, ``bias_u`` and ``bias_v`` of transformers.
            - "xlnet", "xlnet_uni": ``q``, ``k``, ``v``, ``o``, ``r`` as (d_model, H, D), ``r_w_bias``, ``r_r_bias``;
              the second for a model of ``attn_type="uni"``. The biases of segments are not read.
            - "transformer_xl": ``qkv_net``, ``r_net``, ``o_net`` of the authors' code, ``r_w_bias`` and
              ``r_r_bias``, the model's or the layer's own.
        clamp_len, max_len : int
            See `RelativePositionalEncoding`.
        zero_triu : bool
            See the class.

        Returns
        -------
        RelativeMultiHeadAttention
            In float32 or float64; half precision is widened.

        Raises
        ------
        RelposValueError
            If a tensor is missing (the message lists the nearest names) or shapes do not fit.
        """
        names = RELATIVE[check.choice("format", format, tuple(RELATIVE))]
        state = State(source, prefix)
        parts = [names.query, names.key, names.value, names.out, names.pos]
        if format in ("xlnet", "xlnet_uni"):
            # (d_model, H, D): the first axis is the input of q, k, v and r, and the output of o.
            flat = [_flat(state, name) for name in parts]
            query, key, value, pos = (Linear(flat[n].T, name=state.prefix + parts[n]) for n in (0, 1, 2, 4))
            out = Linear(flat[3], name=state.prefix + names.out)
        elif format == "transformer_xl":
            stacked = thirds(state, f"{names.query}.weight")
            query, key, value = (Linear(part, name=state.prefix + names.query) for part in stacked)
            out, pos = Linear.read(state, names.out), Linear.read(state, names.pos)
        else:
            query, key, value, out, pos = (Linear.read(state, name) for name in parts)
        encoding = RelativePositionalEncoding(pos.inputs, variant=names.variant, clamp_len=clamp_len, max_len=max_len)
        u, v = (state.shared(name) for name in (names.u, names.v))
        rows = {"variant": names.variant, "encoding": encoding, "zero_triu": zero_triu}
        return cls(query, key, value, out, pos=pos, content_bias=u, position_bias=v, **rows)

    def rows(self, q_len: int, k_len: int, pos_emb: Array | None = None, dtype: Any = np.float64) -> Array:
        r"""Projected encodings :math:`W_R\, \mathrm{PE}(\delta)`, one per distance.

        Parameters
        ----------
        q_len, k_len : int
            Number of queries L_q and of keys L_k.
        pos_emb : ndarray, shape (R, d_pos) or (1, R, d_pos), optional
            Encodings to project instead of those of `encoding`.
        dtype : dtype
            In which to project.

        Returns
        -------
        ndarray, shape (R, H, D)
            As `relpos_np.TransformerXL` takes them.

        Raises
        ------
        RelposValueError
            If `pos_emb` does not have a row for each distance.
        """
        wanted = len(row_distances(q_len, k_len, self.variant))
        if pos_emb is None:
            encoded = self.encoding.encode(q_len, k_len, dtype)
        else:
            encoded = check.floating("pos_emb", pos_emb).astype(dtype, copy=False)
            if encoded.shape not in ((wanted, self.pos.inputs), (1, wanted, self.pos.inputs)):
                raise RelposValueError(
                    f"pos_emb: expected ({wanted}, {self.pos.inputs}) for variant {self.variant!r} with L_q = {q_len} "
                    f"and L_k = {k_len}, found {encoded.shape}"
                )
        return self.pos(encoded).reshape(wanted, self.heads, self.head_dim)

    def _scheme(self, q: Array, k: Array, pos_emb: Array | None) -> TransformerXL:
        """The scheme of one call."""
        q_len, k_len = q.shape[-2], k.shape[-2]
        rows = self.rows(q_len, k_len, pos_emb, q.dtype)
        return TransformerXL(
            self.content_bias, self.position_bias, rows, variant=self.variant, zero_triu=self.zero_triu
        )

    @overload
    def __call__(
        self,
        x: Array,
        context: Context = ...,
        *,
        return_probabilities: Literal[False] = ...,
        **options: Unpack[_Options],
    ) -> Array: ...

    @overload
    def __call__(
        self, x: Array, context: Context = ..., *, return_probabilities: Literal[True], **options: Unpack[_Options]
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: Array, context: Context = ..., *, return_probabilities: bool, **options: Unpack[_Options]
    ) -> Array | tuple[Array, Array]: ...

    @takes(but=("scale", "offset", "segments"))
    @np.errstate(all="ignore")
    def __call__(
        self,
        x: Array,
        context: Context = None,
        *,
        values: Array | None = None,
        memory: Array | None = None,
        cache: Cache | None = None,
        pos_emb: Array | None = None,
        return_probabilities: bool = False,
        **options: Unpack[Options],
    ) -> Array | tuple[Array, Array]:
        """Attend.

        Parameters
        ----------
        x : ndarray, shape (..., L_q, d_x)
            States that ask: float16, bfloat16, float32 or float64. They are the last positions of what is attended.
        context : ndarray, shape (..., L_k, d_c), or Cache, optional
            States that are attended instead of x, as in XLNet's query stream.
        values, memory, cache
            See `MultiHeadAttention`. Transformer-XL and XLNet pass the hidden states of the segment before as
            `memory`.
        pos_emb : ndarray, shape (R, d_pos) or (1, R, d_pos), optional
            Encodings of the distances, if not those of the module's `encoding`: what ESPnet's and
            Wav2Vec2-Conformer's modules are given.
        mask, key_lengths, causal, window, rule, selected, query_scale, softcap, cap_order, sinks
            See `MultiHeadAttention`. Transformer-XL is meant to be used with ``causal=True``.
        dropout, rng, precision, backend, return_probabilities
            See `MultiHeadAttention`.

        Returns
        -------
        out : ndarray, shape (..., L_q, d_out)
            In the dtype of `x`.
        probabilities : ndarray, shape (..., H, L_q, L_k)
            Only with `return_probabilities`.

        Raises
        ------
        RelposError
            Naming the argument, what was found and what was expected.
        """
        given = completed(type(self).__call__, options) | {"scale": self.scale}
        return self._attend(
            x, context, values, memory, cache, lambda q, k: self._scheme(q, k, pos_emb), return_probabilities, given
        )

    def __repr__(self) -> str:
        return (
            f"RelativeMultiHeadAttention({self.query.inputs}, heads={self.heads}, variant={self.variant!r}, "
            f"encoding={self.encoding!r})"
        )


def _flat(state: State, name: str) -> Array:
    """XLNet's (d_model, H, D) as (d_model, H * D)."""
    x = state.take(name)
    if x.ndim != 3:
        raise RelposValueError(f"{state.prefix}{name}: expected (d_model, heads, head_dim), found shape {x.shape}")
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])
