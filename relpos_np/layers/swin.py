r"""Shifted windows on images and videos: cutting, shifting and masking, and the attention of Swin and Video Swin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Literal, Self, Unpack, overload

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.layers.state import Source
from relpos_np.layers.window import WindowAttention, WindowOptions, lengths, read, sizes
from relpos_np.schemes.window import WindowBias
from relpos_np.types import Array, Backend, Precision

PAD_ORDERS = ("pad_then_shift", "shift_then_pad")
SMALL_MAPS = ("axis", "all", "pad", "keep")


def window_partition(x: Array, window: Sequence[int]) -> Array:
    r"""Cut a map into windows.

    Token t of window w of item b is the one at grid coordinates :math:`c_a = w_a W_a + t_a` on each axis a, with w
    and t counted in row-major order.

    Parameters
    ----------
    x : ndarray, shape (..., grid axes, C)
        Any dtype; the grid has as many axes as `window` has entries, (height, width) or (frames, height, width).
    window : sequence of int
        Lengths W of a window, which divide those of the grid.

    Returns
    -------
    ndarray, shape (B n_W, N, C)
        Windows of N tokens, those of one item after each other, with all axes before the grid as B.

    Raises
    ------
    RelposValueError
        If the grid is no multiple of the window.

    References
    ----------
    Liu et al., "Swin Transformer", ICCV 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import window_partition
    >>> window_partition(np.arange(8).reshape(1, 2, 4, 1), (2, 2))[..., 0]
    array([[0, 1, 4, 5],
           [2, 3, 6, 7]])
    """
    x = check.array("x", x)
    sides = lengths("window", window)
    n = len(sides)
    if x.ndim < n + 1:
        raise RelposValueError(f"x: expected {n} grid axes and channels, found shape {x.shape}")
    lead, grid, channels = x.shape[: -n - 1], x.shape[-n - 1 : -1], x.shape[-1]
    counts = _counts("x", grid, sides)
    cut = x.reshape(prod(lead), *(m for pair in zip(counts, sides, strict=True) for m in pair), channels)
    order = (0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)
    return cut.transpose(order).reshape(-1 if x.size else prod(lead) * prod(counts), prod(sides), channels)


def window_reverse(windows: Array, window: Sequence[int], grid: Sequence[int]) -> Array:
    """Put windows together again: what `window_partition` did, undone.

    Parameters
    ----------
    windows : ndarray, shape (B n_W, N, C)
        Windows of N tokens.
    window, grid : sequence of int
        Lengths of a window and of the whole map, along each axis.

    Returns
    -------
    ndarray, shape (B, grid axes, C)
        The map.

    Raises
    ------
    RelposValueError
        If the numbers of windows or tokens do not fit the grid.
    """
    windows = check.array("windows", windows)
    sides = lengths("window", window)
    n = len(sides)
    whole = lengths("grid", grid, n)
    counts = _counts("grid", whole, sides)
    if windows.ndim != 3 or windows.shape[1] != prod(sides) or len(windows) % prod(counts):
        raise RelposValueError(
            f"windows: expected (B * {prod(counts)}, {prod(sides)}, C) for a grid {whole} of windows {sides}, "
            f"found shape {windows.shape}"
        )
    batch = len(windows) // prod(counts)
    cut = windows.reshape(batch, *counts, *sides, windows.shape[-1])
    order = (0, *(a for pair in zip(range(1, n + 1), range(n + 1, 2 * n + 1), strict=True) for a in pair), 2 * n + 1)
    return cut.transpose(order).reshape(batch, *whole, windows.shape[-1])


def cyclic_shift(x: Array, shift: Sequence[int], *, reverse: bool = False) -> Array:
    """Move a map towards its origin, so that what leaves it there comes back at its end.

    Parameters
    ----------
    x : ndarray, shape (..., grid axes, C)
        Any dtype.
    shift : sequence of int
        By how many tokens, along each axis of the grid.
    reverse : bool
        Undo it.

    Returns
    -------
    ndarray
        In the shape of x; x itself where nothing is shifted.

    Raises
    ------
    RelposValueError
        If x has fewer axes than `shift` has entries.
    """
    x = check.array("x", x)
    places = lengths("shift", shift, least=0)
    if x.ndim < len(places) + 1:
        raise RelposValueError(f"x: expected {len(places)} grid axes and channels, found shape {x.shape}")
    sign = 1 if check.flag("reverse", reverse) else -1
    if not any(places):
        return x
    return np.roll(x, [sign * s for s in places], tuple(range(-len(places) - 1, -1)))


def shift_mask(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], value: float | None = -100.0
) -> Array | None:
    r"""Which tokens of a shifted window were neighbours before the shift.

    .. math::

        m_{w, i, j} = \begin{cases} 0 & \rho_a(w, i) = \rho_a(w, j) \text{ on every axis } a \\
        \text{value} & \text{else} \end{cases}
        \qquad \rho_a = [\,c_a \ge G_a - s_a\,]

    with c the coordinates in the shifted map of lengths G and s the shift. Published code numbers three regions per
    axis; the boundary between the first two lies between windows and separates nothing.

    Parameters
    ----------
    grid, window, shift : sequence of int
        Lengths of the map and of a window, and the shift in tokens, along each axis.
    value : float, optional
        What is added to the scores of other pairs: -100, as all published code has it, lets them through with a
        weight of about :math:`e^{-100}`; -inf excludes them. None gives a mask of bool, True for pairs to keep.

    Returns
    -------
    ndarray of float32 or bool, shape (n_W, N, N), or None
        Read-only; None where nothing is shifted.

    Raises
    ------
    RelposValueError
        If the grid is no multiple of the window, the shift is not below the window, or `value` is NaN.

    References
    ----------
    Liu et al., "Swin Transformer", ICCV 2021, section 3.2.

    Examples
    --------
    >>> from relpos_np.layers import shift_mask
    >>> shift_mask((4,), (2,), (1,))[1]
    array([[   0., -100.],
           [-100.,    0.]], dtype=float32)
    """
    sides = lengths("window", window)
    whole, places = lengths("grid", grid, len(sides)), lengths("shift", shift, len(sides), 0)
    _counts("grid", whole, sides)
    _below("shift", places, sides)
    if value is not None and value != -np.inf:
        value = check.real("value", value)
    return _mask(whole, sides, places, value) if any(places) else None


# A model calls with two or three sizes in turn; the mask of a large image has some 10 MB.
@lru_cache(maxsize=4)
def _mask(grid: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], value: float | None) -> Array:
    # One bit per axis; a token's region is the number they make.
    bits = [(np.arange(g) >= g - s) << a for a, (g, s) in enumerate(zip(grid, shift, strict=True))]
    region = window_partition(np.add.reduce(np.meshgrid(*bits, indexing="ij"))[..., None], window)[..., 0]
    same = region[:, :, None] == region[:, None, :]
    mask: Array = same if value is None else np.where(same, np.float32(0), np.float32(value))
    mask.flags.writeable = False
    return mask


class _ShiftedWindows:
    """What `SwinAttention` and `VideoSwinAttention` share; they differ in the number of axes."""

    axes: ClassVar[int]

    def __init__(
        self,
        dim: int,
        window_size: Sequence[int],
        num_heads: int,
        *,
        shift_size: Sequence[int] | None = None,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        head_dim: int | None = None,
        pad_order: str = "pad_then_shift",
        small_maps: str = "axis",
        mask_value: float | None = -100.0,
        weights: Mapping[str, Array] | None = None,
        rng: np.random.Generator | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.window_size = lengths("window_size", window_size, self.axes)
        self.shift_size = (0,) * self.axes if shift_size is None else lengths("shift_size", shift_size, self.axes, 0)
        _below("shift_size", self.shift_size, self.window_size)
        self.pad_order = check.choice("pad_order", pad_order, PAD_ORDERS)
        self.small_maps = check.choice("small_maps", small_maps, SMALL_MAPS)
        self.mask_value = mask_value
        if mask_value is not None and mask_value != -np.inf:
            self.mask_value = check.real("mask_value", mask_value)
        frames = self.window_size[0] if self.axes == 3 else 1
        self.attention = WindowAttention(
            dim,
            frames,
            frames,
            self.window_size[-2:],
            num_heads,
            qkv_bias,
            qk_scale,
            attn_drop,
            proj_drop,
            head_dim=head_dim,
            weights=weights,
            rng=rng,
            dtype=dtype,
        )

    @classmethod
    def from_state_dict(
        cls,
        source: Source,
        window_size: Sequence[int],
        *,
        prefix: str = "",
        format: str = "qkv",
        shift_size: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """The layer with published weights; channels and heads follow from their shapes.

        Parameters
        ----------
        source : mapping, path or State
            See `relpos_np.layers.tensors`.
        window_size : tuple of int
            Lengths of a window; of several that fit the table, only the model's configuration tells which.
        prefix : str
            What precedes the names, such as "layers.0.blocks.1", with or without the ".attn" that follows.
        format : {"qkv", "rstt", "transformers", "transformers5"}
            Names of the tensors. "qkv" are those of Swin, Video Swin, timm and torchvision; "transformers" those of
            transformers' checkpoints (attention.self.query), "transformers5" those of its modules since version 5
            (attention.q_proj).
        shift_size : tuple of int, optional
            The shift in tokens; default none.
        **options
            qk_scale, attn_drop, proj_drop, pad_order, small_maps and mask_value, as the class takes them. Names do not
            tell which software they belong to, so nothing of this is guessed.

        Returns
        -------
        layer
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
            window_size,
            heads,
            shift_size=shift_size,
            qkv_bias="q.bias" in weights,
            head_dim=head_dim,
            weights=weights,
            **options,
        )

    def plan(self, grid: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """What is done with a map: the window and the shift that are used, and the padded lengths.

        Parameters
        ----------
        grid : sequence of int
            Lengths of the map.

        Returns
        -------
        window, shift, padded : tuple of int
            One entry per axis.
        """
        whole = lengths("grid", grid, self.axes)
        window, shift = self.window_size, self.shift_size
        fits = [g <= w for g, w in zip(whole, window, strict=True)]
        if self.small_maps == "all" and any(fits):
            window = tuple(min(w, *whole) for w in window)
            shift = (0,) * self.axes
        if self.small_maps == "axis":
            window = tuple(min(g, w) for g, w in zip(whole, window, strict=True))
        if self.small_maps in ("axis", "pad"):
            shift = tuple(0 if fit else s for fit, s in zip(fits, shift, strict=True))
        padded = tuple(-(-g // w) * w for g, w in zip(whole, window, strict=True))
        return window, shift, padded

    @overload
    def __call__(
        self, x: Array, *, return_attention: Literal[False] = ..., **options: Unpack[WindowOptions]
    ) -> Array: ...

    @overload
    def __call__(
        self, x: Array, *, return_attention: Literal[True], **options: Unpack[WindowOptions]
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: Array, *, return_attention: bool, **options: Unpack[WindowOptions]
    ) -> Array | tuple[Array, Array]: ...

    @np.errstate(all="ignore")
    def __call__(
        self,
        x: Array,
        *,
        train: bool = False,
        rng: np.random.Generator | None = None,
        precision: Precision | None = None,
        backend: Backend | None = None,
        return_attention: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Attend within the windows of a map.

        Parameters
        ----------
        x : ndarray, shape (B, grid axes, C)
            A normalised map: padding puts zeros behind the normalisation.
        train : bool
            Whether to drop.
        rng : numpy.random.Generator, optional
            Source of what is dropped.
        precision : {"highest", "high", "medium"}, optional
            How exactly attention makes products, see `relpos_np.set_precision`; projections are not rounded.
        backend : {"numpy", "terms", "numba", "cuda"}, optional
            See `relpos_np.set_backend`.
        return_attention : bool
            Also return the probabilities.

        Returns
        -------
        y : ndarray, shape (B, grid axes, C)
            What the block adds to its input.
        attn : ndarray, shape (B n_W, H, N, N)
            Probabilities within windows of the shifted, padded map; only with `return_attention`.

        Raises
        ------
        RelposError
            If a shape or dtype does not fit, before any work.
        """
        x = check.array("x", x)
        check.floating("x", x[:0])
        if x.ndim != self.axes + 2 or x.shape[-1] != self.attention.dim or 0 in x.shape[1:]:
            names = ("frames", "height", "width")[-self.axes :]
            raise RelposValueError(f"x: expected (B, {', '.join(names)}, {self.attention.dim}), found {x.shape}")
        check.flag("return_attention", return_attention)
        grid = x.shape[1:-1]
        window, shift, padded = self.plan(grid)
        pads_first = self.pad_order == "pad_then_shift"
        y = _pad(x, padded) if pads_first else x
        y = _pad(cyclic_shift(y, shift), padded)
        options: WindowOptions = {"train": train, "rng": rng, "precision": precision, "backend": backend}
        windows, mask = window_partition(y, window), shift_mask(padded, window, shift, self.mask_value)
        bias = self._bias(window)
        y, attn = self.attention.attend(windows, None, bias, mask, return_attention=return_attention, **options)
        inside = (slice(None), *(slice(g) for g in grid))
        y = window_reverse(y, window, padded)
        y = cyclic_shift(y if pads_first else y[inside], shift, reverse=True)[inside]
        return y if attn is None else (y, attn)

    def _bias(self, window: tuple[int, ...]) -> WindowBias:
        """The scheme of a window; a smaller one reads the rows of its own differences from the same table."""
        if window == self.window_size:
            return self.attention.position
        extent = self.attention.position.extent
        return WindowBias(self.attention.position.table, (*(1,) * (3 - self.axes), *window), extent=extent)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dim={self.attention.dim}, window_size={self.window_size}, "
            f"num_heads={self.attention.num_heads}, shift_size={self.shift_size}, pad_order={self.pad_order!r}, "
            f"small_maps={self.small_maps!r})"
        )


class SwinAttention(_ShiftedWindows):
    r"""The attention of a Swin block: windows of an image, shifted or not.

    The map is padded to a multiple of the window, shifted, and cut into windows; each attends to itself with the bias
    of `relpos_np.WindowBias`, masked by `shift_mask`; then all of it is undone. The scores are

    .. math::

        s^h_{ij} = \sigma\, q^h_i \cdot k^h_j + T_{r(i, j),\, h} + m_{w, i, j} .

    Parameters
    ----------
    dim : int
        Number of channels C.
    window_size : tuple of int
        Height and width of a window.
    num_heads : int
        Number of heads H.
    shift_size : tuple of int, optional
        The shift in tokens, below the window's lengths; default none. Every second block shifts by half a window.
    qkv_bias, qk_scale, attn_drop, proj_drop, head_dim
        See `WindowAttention`.
    pad_order : {"pad_then_shift", "shift_then_pad"}
        What is done first with a map that is no multiple of the window; see Notes.
    small_maps : {"axis", "all", "pad", "keep"}
        What is done with a map no larger than the window; see Notes.
    mask_value : float, optional
        What is added to pairs from different regions: -100 as published, -inf, or None for a mask of bool.
    weights, rng, dtype
        See `WindowAttention`, with one frame.

    Raises
    ------
    RelposError
        If an argument does not fit the others.

    Notes
    -----
    All published code pads with zeros at the end of each axis, behind the normalisation, and masks no padding: a padded
    token takes part with the projections' biases as its key and value.

    `pad_order`: transformers, torchvision and the detection code of Swin pad first. timm shifts first. Then the
    tokens that came round stand before the padding, while the mask still sets apart the last places of the padded
    map; so opposite edges of the image attend each other there. The outputs of the two differ on maps that are no
    multiple of the window; on others both are the same.

    `small_maps`, for an axis of the map that is not longer than the window's:

    - "axis": there the window is the map and nothing is shifted (timm, Video Swin).
    - "all": then no axis is shifted, and no side of the window is longer than the shortest of the map (Swin's
      classification code, transformers; both fail if that makes the window smaller, since their index does not
      shrink with it).
    - "pad": the map is padded to the window and not shifted there (torchvision).
    - "keep": the map is padded to the window and shifted like any other (`always_partition` in timm and
      transformers, the detection code of Swin).

    A smaller window uses the table's rows for its own differences of coordinates. timm instead makes the table for
    the smaller window: give that one as `window_size`.

    References
    ----------
    Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import SwinAttention
    >>> rng = np.random.default_rng(0)
    >>> layer = SwinAttention(8, (4, 4), 2, shift_size=(2, 2), rng=rng)
    >>> layer(rng.standard_normal((1, 6, 9, 8)), backend="numpy").shape
    (1, 6, 9, 8)
    """

    axes = 2


class VideoSwinAttention(_ShiftedWindows):
    r"""The attention of a Video Swin block: windows of frames, height and width, shifted or not.

    As `SwinAttention`, on three axes.

    .. math::

        s^h_{ij} = \sigma\, q^h_i \cdot k^h_j + T_{r(i, j),\, h} + m_{w, i, j}

    Parameters
    ----------
    dim : int
        Channels of the input and of the output.
    window_size : tuple of int
        Frames, height and width of a window.
    num_heads, shift_size, qkv_bias, qk_scale, attn_drop, proj_drop, head_dim
        See `SwinAttention`; the shift has three entries.
    pad_order : {"pad_then_shift", "shift_then_pad"}
        What is done first with a map that is no multiple of the window; Video Swin, torchvision and RSTT pad first.
    small_maps : {"axis", "all", "pad", "keep"}
        What is done with a map no larger than the window; "axis" as in Video Swin and torchvision.
    mask_value
        See `SwinAttention`.
    weights, rng, dtype
        See `WindowAttention`, with the window's frames for queries and keys.

    Raises
    ------
    RelposError
        If an argument does not fit the others.

    Notes
    -----
    Where the window is smaller than the table's, Video Swin and torchvision take the first N rows and columns of the
    index map of the full window. That is right while only the number of frames is smaller; else it reads the rows
    of other differences. Here every size uses its own.

    References
    ----------
    Liu et al., "Video Swin Transformer", CVPR 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import VideoSwinAttention
    >>> rng = np.random.default_rng(0)
    >>> layer = VideoSwinAttention(8, (2, 4, 4), 2, shift_size=(1, 2, 2), rng=rng)
    >>> layer(rng.standard_normal((1, 3, 6, 8, 8)), backend="numpy").shape
    (1, 3, 6, 8, 8)
    """

    axes = 3


def _counts(name: str, grid: Sequence[int], window: Sequence[int]) -> tuple[int, ...]:
    if any(g % w for g, w in zip(grid, window, strict=True)):
        raise RelposValueError(f"{name}: the grid {tuple(grid)} is no multiple of the window {tuple(window)}; pad it")
    return tuple(g // w for g, w in zip(grid, window, strict=True))


def _below(name: str, shift: Sequence[int], window: Sequence[int]) -> None:
    if any(s >= w for s, w in zip(shift, window, strict=True)):
        raise RelposValueError(f"{name}: expected places below the window {tuple(window)}, found {tuple(shift)}")


def _pad(x: Array, padded: Sequence[int]) -> Array:
    extra = [(0, p - g) for p, g in zip(padded, x.shape[1:-1], strict=True)]
    return np.pad(x, [(0, 0), *extra, (0, 0)]) if any(e for _, e in extra) else x
