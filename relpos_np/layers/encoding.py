r"""Encodings of positions as modules: scaled inputs plus vectors, or beside the vectors of relative positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.relshift import VARIANTS
from relpos_np.formulas.softmax import drop
from relpos_np.layers.state import ABSOLUTE, Source, State
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.learned import LearnedAbsolute
from relpos_np.schemes.sinusoidal import Sinusoidal
from relpos_np.schemes.transformer_xl import row_distances
from relpos_np.types import Array, Int64, Layout, Shift


class _Weighted(AbsoluteEncoding):
    """Another encoding times a factor."""

    def __init__(self, encoding: AbsoluteEncoding, factor: float) -> None:
        self.dim, self.least = encoding.dim, encoding.least
        self._encoding, self._factor = encoding, factor

    def encode(self, positions: Any) -> Array:
        return np.asarray(self._encoding.encode(positions) * self._factor)


class PositionalEncoding:
    r"""Inputs with the vectors of their positions added.

    .. math::

        y_t = \mathrm{dropout}(s\, x_t + \alpha\, \mathrm{PE}(t)), \qquad
        s = \sqrt{D} \text{ with } \texttt{scaled}, \text{ else } 1

    Parameters
    ----------
    encoding : int, Sinusoidal or LearnedAbsolute
        The vectors; a number of dimensions means `relpos_np.Sinusoidal` of that many.
    scaled : bool
        Multiply the inputs with :math:`\sqrt{D}` first, as the paper does with embeddings, and ESPnet's
        ``PositionalEncoding``. ESPnet's ``ScaledPositionalEncoding`` and SpeechT5 do not, and learn `alpha`.
    alpha : float
        Factor on the vectors.

    Raises
    ------
    RelposTypeError
        If `encoding` is something else.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, sections 3.4 and 3.5; Li et al., "Neural Speech Synthesis
    with Transformer Network", AAAI 2019, for alpha.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import PositionalEncoding
    >>> PositionalEncoding(4, scaled=True)(np.ones((1, 2, 4)))[0, 0]
    array([2., 3., 2., 3.])
    """

    def __init__(self, encoding: Any, *, scaled: bool = False, alpha: Any = 1.0) -> None:
        if isinstance(encoding, bool) or not isinstance(encoding, int | np.integer | AbsoluteEncoding):
            raise RelposTypeError(
                "encoding: expected a number of dimensions or an encoding such as relpos_np.Sinusoidal, found "
                f"{type(encoding).__name__}"
            )
        self.encoding = encoding if isinstance(encoding, AbsoluteEncoding) else Sinusoidal(int(encoding))
        self.scaled = check.flag("scaled", scaled)
        self.alpha = check.real("alpha", alpha.item() if isinstance(alpha, np.ndarray) and alpha.size == 1 else alpha)

    @classmethod
    def from_state_dict(
        cls, source: Source, *, prefix: str = "", format: str, scaled: bool = False
    ) -> PositionalEncoding:
        """Learned vectors under the names that publishers give them.

        Parameters
        ----------
        source : mapping, str, path-like or State
            See `relpos_np.layers.tensors`.
        prefix : str
            That of the model, for instance ``"bert"``.
        format : {"bert", "roberta", "gpt2", "bart"}
            The first two read ``embeddings.position_embeddings.weight``, the others ``wpe.weight`` and
            ``embed_positions.weight`` (of ``encoder`` or ``decoder``: name it in the prefix). The first two rows of
            RoBERTa's and BART's tables belong to no position and are left out.
        scaled : bool
            See the class; BART has it as ``scale_embedding``.

        Returns
        -------
        PositionalEncoding
            With `relpos_np.LearnedAbsolute`.

        Raises
        ------
        RelposValueError
            If the tensor is missing or its shape is not that of a table.
        """
        name, unused = ABSOLUTE[check.choice("format", format, tuple(ABSOLUTE))]
        state = State(source, prefix)
        table = check.table(state.prefix + name, state.take(name), "max_positions dim")
        if len(table) <= unused:
            raise RelposValueError(f"{state.prefix}{name}: expected more than {unused} rows, found {table.shape}")
        return cls(LearnedAbsolute(table[unused:]), scaled=scaled)

    @np.errstate(all="ignore")
    def __call__(
        self, x: Any, start: int = 0, *, dropout: float = 0.0, rng: np.random.Generator | None = None
    ) -> Array:
        """Add the vectors of positions start ... start + L - 1.

        Parameters
        ----------
        x : ndarray, shape (..., L, D)
            Inputs.
        start : int
            Position of the first, for instance the number of tokens that were decoded before.
        dropout : float
            Rate at which elements of the sum become 0; the others are divided by 1 - dropout.
        rng : numpy.random.Generator, optional
            Source of the dropout mask.

        Returns
        -------
        ndarray, shape (..., L, D)
            In the dtype of `x`.

        Raises
        ------
        RelposError
            If a shape or an option does not fit, or a position has no vector.
        """
        dtype = check.array("x", x).dtype
        x = check.floating("x", x)
        encoding = self.encoding if self.alpha == 1.0 else _Weighted(self.encoding, self.alpha)
        factor = x.dtype.type(math.sqrt(encoding.dim) if self.scaled else 1.0)
        return encoding(x * factor, start, dropout=dropout, rng=rng).astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"PositionalEncoding({self.encoding!r}, scaled={self.scaled}, alpha={self.alpha})"


class RelativePositionalEncoding:
    r"""Sinusoids of the relative positions that a variant of Transformer-XL's attention expects.

    .. math::

        y_t = \mathrm{dropout}(s\, x_t), \qquad r_n = \mathrm{dropout}(\mathrm{PE}(\delta_n))

    with distances :math:`\delta_n` as `relpos_np.schemes.transformer_xl.row_distances` lists them.

    Parameters
    ----------
    dim : int
        Number of dimensions D, even for Transformer-XL and XLNet.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        See `relpos_np.TransformerXL`.
    layout : str, optional
        See `relpos_np.Sinusoidal`. Default: "concatenated" for Transformer-XL and XLNet, "interleaved" for the others.
    base : float
        See `relpos_np.Sinusoidal`.
    clamp_len : int, optional
        Larger distances count as this many (``clamp_len`` of Transformer-XL and XLNet, where 0 or -1 means
        none; here None does).
    max_len : int
        "espnet_legacy" only: its rows count down from ``max(max_len, L_k) - 1``, whatever the input's length. This
        is the length its table was made for, 5000 in the published code, or the longest input it has seen.
    scaled : bool
        Multiply the inputs of a call with :math:`\sqrt{D}`, as ESPnet does. Transformer-XL and XLNet do not.

    Raises
    ------
    RelposValueError
        If an option is out of range.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019, appendix B;
    https://github.com/espnet/espnet/pull/2816 for the two of ESPnet.

    Examples
    --------
    >>> import numpy as np
    >>> from relpos_np.layers import RelativePositionalEncoding
    >>> encoding = RelativePositionalEncoding(4, variant="conformer")
    >>> encoding.distances(3, 3)
    array([ 2,  1,  0, -1, -2])
    >>> x, pos_emb = encoding(np.ones((1, 3, 4)))
    >>> x.shape, pos_emb.shape
    ((1, 3, 4), (1, 5, 4))
    """

    def __init__(
        self,
        dim: int,
        *,
        variant: Shift = "conformer",
        layout: Layout | None = None,
        base: float = 10000.0,
        clamp_len: int | None = None,
        max_len: int = 5000,
        scaled: bool = False,
    ) -> None:
        self.variant = check.choice("variant", variant, VARIANTS)
        if layout is None:
            layout = "concatenated" if variant.startswith(("transformer_xl", "xlnet")) else "interleaved"
        self.sinusoids = Sinusoidal(dim, base=base, layout=layout)
        if dim % 2 and variant.startswith(("transformer_xl", "xlnet")):
            raise RelposValueError(f"dim: variant {variant!r} needs an even number of dimensions, found {dim}")
        self.clamp_len = None if clamp_len is None else check.integer("clamp_len", clamp_len, 1)
        if self.clamp_len is not None and variant == "espnet_legacy":
            raise RelposValueError(f"clamp_len: expected None for variant {variant!r}, found {clamp_len}")
        self.max_len = check.integer("max_len", max_len, 1)
        self.scaled = check.flag("scaled", scaled)

    @property
    def dim(self) -> int:
        """Number of dimensions D."""
        return self.sinusoids.dim

    def distances(self, q_len: int, k_len: int) -> Int64:
        """The relative position that each row encodes.

        Parameters
        ----------
        q_len, k_len : int
            Number of queries L_q and of keys L_k.

        Returns
        -------
        ndarray of int64, shape (R,)
            Distances, clamped where the module does so.
        """
        distances = row_distances(q_len, k_len, self.variant, clamp=self.clamp_len)
        return distances + (max(self.max_len, k_len) - k_len) if self.variant == "espnet_legacy" else distances

    def encode(self, q_len: int, k_len: int, dtype: Any = np.float64) -> Array:
        """Sinusoids of these distances.

        Parameters
        ----------
        q_len, k_len : int
            Number of queries L_q and of keys L_k.
        dtype : dtype
            Of the result; angles are computed in float64.

        Returns
        -------
        ndarray, shape (R, D)
            One row per distance.
        """
        return self.sinusoids.encode(self.distances(q_len, k_len), dtype)

    @np.errstate(all="ignore")
    def __call__(
        self, x: Any, memory: int = 0, *, dropout: float = 0.0, rng: np.random.Generator | None = None
    ) -> tuple[Array, Array]:
        """The inputs, scaled if so chosen, and the encodings for their self-attention.

        Parameters
        ----------
        x : ndarray, shape (..., L, D)
            Inputs.
        memory : int
            Number M of states before them that they attend as well.
        dropout : float
            Rate at which elements of both become 0; the others are divided by 1 - dropout.
        rng : numpy.random.Generator, optional
            Source of the two dropout masks, drawn for `x` first.

        Returns
        -------
        x : ndarray, shape (..., L, D)
            In the dtype given.
        pos_emb : ndarray, shape (1, R, D)
            In the same dtype.

        Raises
        ------
        RelposError
            If a shape or an option does not fit.
        """
        dtype = check.array("x", x).dtype
        x = check.floating("x", x)
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise RelposValueError(f"x: expected shape (..., L, {self.dim}), found {x.shape}")
        length = x.shape[-2]
        pos_emb = self.encode(length, length + check.integer("memory", memory, 0), x.dtype)[None]
        if self.scaled:
            x = x * x.dtype.type(math.sqrt(self.dim))
        x, pos_emb = (drop(part, *check.survivors(dropout, rng, part.shape)) for part in (x, pos_emb))
        return x.astype(dtype), pos_emb.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"RelativePositionalEncoding(dim={self.dim}, variant={self.variant!r}, scaled={self.scaled})"
