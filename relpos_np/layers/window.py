r"""Attention inside windows, of one set of tokens or between two: the whole module of RSTT, with weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from relpos_np import api
from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import drop, softmax
from relpos_np.layers.linear import Linear, merge_heads
from relpos_np.layers.state import Source, State
from relpos_np.schemes.window import WindowBias, rstt_frames, window_index
from relpos_np.types import Array, Backend, Precision

TABLE, INDEX = "relative_position_bias_table", "relative_position_index"
# The names in each kind of checkpoint: projections of queries, of keys and values, and of the output, and the table.
# Several names for one projection are stacked in that order.
_NAMES = {
    "rstt": (("q",), ("kv",), "proj", TABLE),
    "qkv": (("qkv",), (), "proj", TABLE),
    "transformers": (("self.query",), ("self.key", "self.value"), "output.dense", f"self.{TABLE}"),
    "transformers5": (("q_proj",), ("k_proj", "v_proj"), "o_proj", f"relative_position_bias.{TABLE}"),
}
FORMATS = tuple(_NAMES)
# A prefix may end at the block that holds the attention, or at the attention itself. In this order: in transformers a
# block has an output.dense of its own, which belongs to the layers after the attention.
_INSIDE = ("attn.", "attention.", "")


class WindowOptions(TypedDict, total=False):
    """What a call of a layer with windows takes beside its arrays."""

    train: bool
    rng: np.random.Generator | None
    precision: Precision | None
    backend: Backend | None


@np.errstate(all="ignore")
def truncated_normal(
    rng: np.random.Generator, shape: Sequence[int], *, std: float = 0.02, bound: float = 2.0, dtype: Any = np.float32
) -> Array:
    r"""Normal numbers of mean 0, those beyond a bound drawn again: how published window attention begins.

    .. math::

        x \sim \mathcal N(0, \sigma^2) \text{ given } |x| \le b

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    shape : sequence of int
        Shape of the result.
    std : float
        Standard deviation :math:`\sigma` of the normal distribution before it is cut.
    bound : float
        The bound b, in units of x and not of :math:`\sigma`. Published code cuts at 2, so with
        :math:`\sigma = 0.02` at 100 standard deviations: nothing is ever cut there.
    dtype : dtype
        Of the result; numbers are drawn in float64.

    Returns
    -------
    ndarray
        Independent numbers.

    Raises
    ------
    RelposValueError
        If `std` or `bound` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import truncated_normal
    >>> truncated_normal(np.random.default_rng(0), (2, 3)).shape
    (2, 3)
    """
    for name, value in (("std", std), ("bound", bound)):
        check.positive(name, value)
    x = _generator(rng).normal(scale=std, size=tuple(shape))
    while (beyond := np.abs(x) > bound).any():
        x[beyond] = rng.normal(scale=std, size=int(beyond.sum()))
    return x.astype(dtype)


class WindowAttention:
    r"""Multi-head attention in windows of a few video frames, of a window to itself or to another one.

    .. math::

        y = \big[\,\mathrm{softmax}(s^h)\, v^h\,\big]_h W_P^\top + b_P, \qquad
        s^h_{ij} = \sigma\, q^h_i \cdot k^h_j + T_{r(i, j),\, h} + m_{w, i, j}

    with :math:`q = x W_Q^\top + b_Q`, and k and v the halves of :math:`x' W_{KV}^\top + b_{KV}`. The bias is that of
    `relpos_np.WindowBias.rstt`; m is the mask of window w.

    Parameters
    ----------
    dim : int
        Number of channels C.
    num_frames_q, num_frames_kv : int
        Number of frames F_q of the queries and F_kv of keys and values. Both 1 is the attention of Swin, both the
        depth of a window that of Video Swin.
    window_size : tuple of int
        Height and width (Wh, Ww) of a window.
    num_heads : int
        Number of heads H.
    qkv_bias : bool
        Whether the projections of queries, keys and values have biases; the output's always has one.
    qk_scale : float, optional
        The factor :math:`\sigma`; default 1/sqrt(head_dim). Published code also takes 0 as "default", here it is 0.
    attn_drop, proj_drop : float
        Rates at which probabilities and outputs are dropped in training.
    head_dim : int, optional
        Channels D per head; default C / H. timm lets them differ.
    frames : sequence of int, optional
        Coordinates of the key frames among the query frames; default `relpos_np.reference.rstt_frames`.
    weights : mapping, optional
        Arrays by the names of RSTT, in the layout (out, in): "q.weight" (H D, C), "kv.weight" (2 H D, C),
        "proj.weight" (C, H D), their ".bias", and "relative_position_bias_table"
        ((2 F_q - 1)(2 Wh - 1)(2 Ww - 1), H). Default: drawn from `rng`.
    rng : numpy.random.Generator, optional
        Source of new weights: `truncated_normal` of deviation 0.02 for the table and all weights, 0 for biases. RSTT
        and Swin do the latter for whole models; default an unseeded generator.
    dtype : dtype
        float32 or float64, of drawn weights; given ones stay as they are, and are cast to the dtype of the inputs.

    Raises
    ------
    RelposError
        If an argument, or a weight's shape, does not fit the others.

    Notes
    -----
    A published checkpoint holds also "relative_position_index", which follows from the sizes. Where a source of
    weights holds it, it is compared, so that for instance a window of (3, 5) is not read as one of (5, 3).

    References
    ----------
    Geng et al., "RSTT: Real-time Spatial Temporal Transformer for Space-Time Video Super-Resolution", CVPR 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import WindowAttention
    >>> rng = np.random.default_rng(0)
    >>> layer = WindowAttention(8, 3, 2, (2, 2), 2, rng=rng)
    >>> q, kv = rng.standard_normal((5, 12, 8)), rng.standard_normal((5, 8, 8))
    >>> x, attn = layer(q, kv, backend="numpy")
    >>> x.shape, attn.shape
    ((5, 12, 8), (5, 2, 12, 8))
    """

    def __init__(
        self,
        dim: int,
        num_frames_q: int,
        num_frames_kv: int,
        window_size: Sequence[int],
        num_heads: int,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        *,
        head_dim: int | None = None,
        frames: Sequence[int] | None = None,
        weights: Mapping[str, Array] | None = None,
        rng: np.random.Generator | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.dim = check.integer("dim", dim, 1)
        self.num_frames_q = check.integer("num_frames_q", num_frames_q, 1)
        self.num_frames_kv = check.integer("num_frames_kv", num_frames_kv, 1)
        self.window_size = lengths("window_size", window_size, 2)
        self.num_heads = check.integer("num_heads", num_heads, 1)
        if head_dim is None and dim % num_heads:
            raise RelposValueError(f"num_heads: {num_heads} heads do not divide dim {dim}; pass head_dim=")
        self.head_dim = dim // num_heads if head_dim is None else check.integer("head_dim", head_dim, 1)
        self.scale = float(self.head_dim**-0.5) if qk_scale is None else check.real("qk_scale", qk_scale)
        self.attn_drop, self.proj_drop = check.rate("attn_drop", attn_drop), check.rate("proj_drop", proj_drop)
        shapes = self._shapes(check.flag("qkv_bias", qkv_bias))
        if weights is None:
            weights = _drawn(shapes, np.random.default_rng() if rng is None else _generator(rng), dtype)
        given = _checked(weights, shapes)
        self.q, self.kv, self.proj = (
            Linear(given[f"{name}.weight"], given.get(f"{name}.bias"), name=name) for name in ("q", "kv", "proj")
        )
        self.position = WindowBias.rstt(given[TABLE], self.num_frames_q, self.num_frames_kv, self.window_size, frames)
        self.frames = (
            rstt_frames(self.num_frames_q, self.num_frames_kv) if frames is None else check.integers("frames", frames)
        )
        self.tokens_q = self.num_frames_q * prod(self.window_size)
        self.tokens_kv = self.num_frames_kv * prod(self.window_size)
        if INDEX in weights:
            self._compare(np.asarray(weights[INDEX]))

    def _shapes(self, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
        inner = self.num_heads * self.head_dim
        extent = (self.num_frames_q, *self.window_size)
        shapes: dict[str, tuple[int, ...]] = {TABLE: (prod(2 * e - 1 for e in extent), self.num_heads)}
        shapes |= {"q.weight": (inner, self.dim), "kv.weight": (2 * inner, self.dim), "proj.weight": (self.dim, inner)}
        shapes |= {"q.bias": (inner,), "kv.bias": (2 * inner,)} if qkv_bias else {}
        return shapes | {"proj.bias": (self.dim,)}

    def _compare(self, stored: Array) -> None:
        axes = [np.arange(n) for n in (self.num_frames_q, *self.window_size)]
        own = window_index(axes, [self.frames, *axes[1:]], (self.num_frames_q, *self.window_size))
        if not np.array_equal(stored.ravel(), own.ravel()):  # torchvision stores it flat
            raise RelposValueError(
                f"relative_position_index: the stored one, {stored.shape}, is not that of window_size "
                f"{self.window_size} with {self.num_frames_q} and {self.num_frames_kv} frames, {own.shape}"
            )

    @classmethod
    def from_state_dict(
        cls,
        source: Source,
        num_frames_q: int,
        num_frames_kv: int,
        window_size: Sequence[int],
        *,
        prefix: str = "",
        format: str = "rstt",
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        frames: Sequence[int] | None = None,
    ) -> WindowAttention:
        """The layer with published weights; channels and heads follow from their shapes.

        Parameters
        ----------
        source : mapping, path or State
            See `relpos_np.layers.tensors`.
        num_frames_q, num_frames_kv, window_size
            See the class.
        prefix : str
            What precedes the names, up to the attention module, or to the block if that calls it attn or attention.
        format : {"rstt", "qkv", "transformers", "transformers5"}
            Names of the tensors: RSTT's q, kv, proj; one qkv as in Swin, timm and torchvision; transformers' as in
            its checkpoints (self.query, output.dense); and as in its modules since version 5 (q_proj, o_proj).
        qk_scale, attn_drop, proj_drop, frames
            See the class.

        Returns
        -------
        WindowAttention
            With weights in the dtype they are stored in; half precision is widened to float32.

        Raises
        ------
        RelposError
            If a tensor is missing, or its shape does not fit.
        """
        weights = read(source, prefix, format)
        dim, heads, head_dim = sizes(weights)
        return cls(
            dim,
            num_frames_q,
            num_frames_kv,
            window_size,
            heads,
            "q.bias" in weights,
            qk_scale,
            attn_drop,
            proj_drop,
            head_dim=head_dim,
            frames=frames,
            weights=weights,
        )

    def state_dict(self) -> dict[str, Array]:
        """The weights by their names in RSTT.

        Returns
        -------
        dict of str to ndarray
            As `from_state_dict` reads them.
        """
        layers = {"q": self.q, "kv": self.kv, "proj": self.proj}
        named = {TABLE: self.position.table}
        named |= {f"{name}.weight": layer.weight for name, layer in layers.items()}
        return named | {f"{name}.bias": layer.bias for name, layer in layers.items() if layer.bias is not None}

    @overload
    def __call__(
        self,
        q: Array,
        kv: Array | None = ...,
        mask: Array | None = ...,
        *,
        return_attention: Literal[True] = ...,
        **options: Unpack[WindowOptions],
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self,
        q: Array,
        kv: Array | None = ...,
        mask: Array | None = ...,
        *,
        return_attention: Literal[False],
        **options: Unpack[WindowOptions],
    ) -> Array: ...

    @overload
    def __call__(
        self,
        q: Array,
        kv: Array | None = ...,
        mask: Array | None = ...,
        *,
        return_attention: bool,
        **options: Unpack[WindowOptions],
    ) -> Array | tuple[Array, Array]: ...

    @np.errstate(all="ignore")
    def __call__(
        self,
        q: Array,
        kv: Array | None = None,
        mask: Array | None = None,
        *,
        train: bool = False,
        rng: np.random.Generator | None = None,
        precision: Precision | None = None,
        backend: Backend | None = None,
        return_attention: bool = True,
    ) -> Array | tuple[Array, Array]:
        r"""Attend within each window.

        Parameters
        ----------
        q : ndarray, shape (B n_W, F_q Wh Ww, C)
            Tokens of n_W windows of B items, windows fastest, as `window_partition` lays them out.
        kv : ndarray, shape (B n_W, F_kv Wh Ww, C), optional
            What keys and values are made of; default q.
        mask : ndarray of bool or float, shape (n_W, F_q Wh Ww, F_kv Wh Ww), optional
            One per window, the same for all items; see `shift_mask`. True means "may attend"; floats are added.
        train : bool
            Whether to drop.
        rng : numpy.random.Generator, optional
            Source of what is dropped: probabilities first, then outputs.
        precision : {"highest", "high", "medium"}, optional
            How exactly attention makes products, see `relpos_np.set_precision`; projections are not rounded.
        backend : {"numpy", "terms", "numba", "cuda"}, optional
            See `relpos_np.set_backend`.
        return_attention : bool
            Also return the probabilities, as the published module does. They are computed a second time, densely:
            without them the kernels never hold them.

        Returns
        -------
        x : ndarray, shape (B n_W, F_q Wh Ww, C)
            In the dtype of q.
        attn : ndarray, shape (B n_W, H, F_q Wh Ww, F_kv Wh Ww)
            The probabilities after dropout; only with `return_attention`.

        Raises
        ------
        RelposError
            Before any work, if a shape or dtype does not fit; also if `kv` is missing where F_q and F_kv differ, or
            `rng` where something is to be dropped.
        """
        check.flag("return_attention", return_attention)
        self._tokens("q", q, self.tokens_q)
        if kv is None and self.tokens_q != self.tokens_kv:
            raise RelposValueError(
                f"kv: needed, since num_frames_q is {self.num_frames_q} and num_frames_kv {self.num_frames_kv}"
            )
        if kv is not None:
            self._tokens("kv", kv, self.tokens_kv)
            if len(kv) != len(q) or kv.dtype.newbyteorder("=") != q.dtype.newbyteorder("="):
                raise RelposValueError(f"kv: expected {len(q)} windows in {q.dtype}, found {len(kv)} in {kv.dtype}")
        if mask is not None:
            mask = check.array("mask", mask)
            if mask.ndim != 3 or mask.shape[1:] != (self.tokens_q, self.tokens_kv) or not len(mask):
                raise RelposValueError(
                    f"mask: expected (n_windows, {self.tokens_q}, {self.tokens_kv}), found {mask.shape}"
                )
            if len(q) % len(mask):
                raise RelposValueError(f"mask: its {len(mask)} windows do not divide the {len(q)} of q")
        options: WindowOptions = {"train": train, "rng": rng, "precision": precision, "backend": backend}
        x, attn = self.attend(q, kv, self.position, mask, return_attention=return_attention, **options)
        return x if attn is None else (x, attn)

    def attend(
        self,
        q: Array,
        kv: Array | None,
        position: WindowBias,
        mask: Array | None,
        *,
        train: bool,
        rng: np.random.Generator | None,
        precision: Precision | None,
        backend: Backend | None,
        return_attention: bool,
    ) -> tuple[Array, Array | None]:
        """The same for windows of another size, with the bias that belongs to it.

        Parameters
        ----------
        q, kv
            As when the layer is called, with any number of tokens.
        position : WindowBias
            On grids of that many tokens.
        mask, train, rng, precision, backend, return_attention
            As when the layer is called.

        Returns
        -------
        tuple
            Outputs, and probabilities or None.
        """
        training = check.flag("train", train) and bool(self.attn_drop or self.proj_drop)
        if training:
            rng = _generator(rng)
        dtype = q.dtype
        q = check.stored("q", q)
        kv = q if kv is None else check.stored("kv", kv)
        queries = self._heads(self.q(q), 1)[0]
        k, v = self._heads(self.kv(kv), 2)
        # (B nW, H, N, D) becomes (B, nW, H, N, D), so that a mask per window needs no copy per item.
        windows = len(q) if mask is None else len(mask)
        split = [x.reshape(len(q) // max(windows, 1), windows, *x.shape[1:]) for x in (queries, k, v)]
        options: dict[str, Any] = {
            "position": position,
            "mask": None if mask is None else mask[:, None],
            "scale": self.scale,
            "backend": backend,
        }
        rate = self.attn_drop if training else 0.0
        # The probabilities to return need the same survivors as those that the kernel drops.
        twin = copy.deepcopy(rng) if rate and return_attention else None
        z = api.attention(*split, dropout=rate, rng=rng if rate else None, precision=precision, **options)
        attn = None
        if return_attention:
            p, _ = softmax(api.logits(*split[:2], **options))
            p = drop(p, *check.survivors(rate, twin, p.shape))
            attn = p.reshape(len(q), *p.shape[2:]).astype(dtype, copy=False)
        rate = self.proj_drop if training else 0.0
        x = self.proj(merge_heads(z.reshape(len(q), *z.shape[2:])), None if rate else dtype)
        x = drop(x, *check.survivors(rate, rng, x.shape))
        return x.astype(dtype, copy=False), attn

    def _heads(self, x: Array, parts: int) -> Array:
        """(n, N, parts H D) as (parts, n, H, N, D), without a copy."""
        return x.reshape(*x.shape[:2], parts, self.num_heads, self.head_dim).transpose(2, 0, 3, 1, 4)

    def _tokens(self, name: str, x: Any, tokens: int) -> None:
        x = check.array(name, x)
        if x.ndim != 3 or x.shape[1:] != (tokens, self.dim):
            raise RelposValueError(f"{name}: expected (B n_windows, {tokens}, {self.dim}), found {x.shape}")

    def __repr__(self) -> str:
        return (
            f"WindowAttention(dim={self.dim}, num_frames_q={self.num_frames_q}, num_frames_kv={self.num_frames_kv}, "
            f"window_size={self.window_size}, num_heads={self.num_heads})"
        )


def lengths(name: str, value: Any, axes: int | None = None, least: int = 1) -> tuple[int, ...]:
    """A tuple of Python integers from `least` on, one per axis; without `axes` of as many as there are."""
    wanted = 2 if axes is None else axes
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise RelposTypeError(f"{name}: expected {wanted} integers such as {(7,) * wanted}, found {value!r}")
    if not len(value) or axes not in (None, len(value)):
        raise RelposValueError(f"{name}: expected {wanted} integers, one per axis, found {value!r}")
    return tuple(check.integer(name, n, least) for n in value)


def read(source: Source, prefix: str, format: str) -> dict[str, Array]:
    """Published weights by RSTT's names, as `WindowAttention` takes them.

    Projections that are stored in parts are put together. `prefix` is what precedes the names, `format` one of
    `FORMATS`.
    """
    *parts, out, table = _NAMES[check.choice("format", format, FORMATS)]
    state = State(source, prefix)
    inside = next((s for s in _INSIDE if state.has(f"{s}{out}.weight")), "")
    state = State(state, inside)
    if state.has("logit_scale"):
        raise RelposValueError(
            f"{state.prefix}logit_scale: this is Swin v2, whose scores are cosines; expected the first version"
        )
    linear = {name: _stacked(state, names) for name, names in zip(("q", "kv"), parts, strict=True) if names}
    if "kv" not in linear:  # one projection for all three
        weight, bias = linear["q"]
        if len(weight) % 3:
            raise RelposValueError(f"{state.prefix}qkv.weight: expected three equal parts, found shape {weight.shape}")
        inner = len(weight) // 3
        linear = {
            name: (weight[rows], None if bias is None else bias[rows])
            for name, rows in (("q", slice(inner)), ("kv", slice(inner, None)))
        }
    linear["proj"] = state.take(f"{out}.weight"), state.take(f"{out}.bias")
    found = {TABLE: check.table(state.prefix + table, state.take(table), "rows heads")}
    for name, (weight, bias) in linear.items():
        found[f"{name}.weight"] = weight
        if bias is not None:
            found[f"{name}.bias"] = bias
    index = state.get(table.replace(TABLE, INDEX))
    return found if index is None else found | {INDEX: index}


def sizes(weights: Mapping[str, Array]) -> tuple[int, int, int]:
    """Channels, heads and channels per head, from the shapes of what `read` returns."""
    (inner, dim), heads = weights["q.weight"].shape, weights[TABLE].shape[-1]
    if inner % heads:
        raise RelposValueError(f"{TABLE}: its {heads} columns, one per head, do not divide {inner} channels")
    return dim, heads, inner // heads


def _stacked(state: State, names: Sequence[str]) -> tuple[Array, Array | None]:
    layers = [Linear.read(state, name) for name in names]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise RelposValueError(f"{state.prefix}{names[0]}.bias: only some of {', '.join(names)} have a bias")
    weight = np.concatenate([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    return weight, np.concatenate(biases) if biases else None


def _drawn(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator, dtype: Any) -> dict[str, Array]:
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise RelposTypeError(f"dtype: expected float32 or float64, found {np.dtype(dtype)}")
    return {
        name: np.zeros(shape, dtype) if name.endswith(".bias") else truncated_normal(rng, shape, dtype=dtype)
        for name, shape in shapes.items()
    }


def _checked(weights: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """The weights, if their names and shapes are the expected ones."""
    if not isinstance(weights, Mapping):
        raise RelposTypeError(f"weights: expected a mapping of names to arrays, found {type(weights).__name__}")
    if weights.keys() - {INDEX} != shapes.keys():
        raise RelposValueError(f"weights: expected {', '.join(shapes)}; found {', '.join(weights)}")
    for name, shape in shapes.items():
        if check.array(name, weights[name]).shape != shape:
            raise RelposValueError(f"{name}: expected shape {shape}, found {weights[name].shape}")
    return dict(weights)


def _generator(rng: Any) -> np.random.Generator:
    if not isinstance(rng, np.random.Generator):
        raise RelposTypeError(
            f"rng: expected a numpy.random.Generator, as from np.random.default_rng(seed), found {type(rng).__name__}"
        )
    return rng
