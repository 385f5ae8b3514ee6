"""Reading published weights: a mapping of arrays or a .safetensors file, never a pickle."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relpos_np._files.safetensors import Shards, TensorFile, checkpoint, half
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array

Source: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | State"

# Files that frameworks write with pickle: loading one runs whatever code it names.
_PICKLED = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Names:
    """How a publisher calls the tensors of an attention module; `Linear` weights without ``.weight``."""

    query: str
    key: str
    value: str
    out: str
    # Where a table of positions may be: here or, shared by layers, above. See `State.find`.
    table: tuple[str, ...] = ()
    # Of relative sinusoids: their projection, the two biases (here or above), and which rows they expect.
    pos: str = ""
    u: str = ""
    v: str = ""
    variant: Any = ""


_SPEECH = ("linear_q", "linear_k", "linear_v", "linear_out")
_CONFORMER = (*_SPEECH, (), "linear_pos", "pos_bias_u", "pos_bias_v")
_STACKED = ("qkv_net", "qkv_net", "qkv_net", "o_net")
_FIRST_BLOCK = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"

# Names below the prefix, which is that of the attention module itself, in the comment.
ATTENTION = {
    # encoder.block.3.layer.0.SelfAttention; layers share the first block's table, except in umT5.
    "t5": Names("q", "k", "v", "o", table=("relative_attention_bias.weight", _FIRST_BLOCK)),
    # encoder.layer.3.attention.attn; the table is the encoder's.
    "mpnet": Names("q", "k", "v", "o", table=("relative_attention_bias.weight",)),
    # encoder.layers.3.self_attn
    "wav2vec2_bert": Names(*_SPEECH, table=("distance_embedding.weight",)),
    # speecht5.encoder.wrapped_encoder.layers.3.attention; the table is the encoder's.
    "speecht5": Names("q_proj", "k_proj", "v_proj", "out_proj", table=("pe_k.weight", "embed_positions.pe_k.weight")),
    # encoder.layer.3.attention; positions are added to the embeddings.
    "bert": Names("self.query", "self.key", "self.value", "output.dense"),
    # encoder.encoders.3.self_attn of a model without relative positions.
    "espnet": Names(*_SPEECH),
    # torch.nn.MultiheadAttention; the three projections are stacked.
    "torch": Names("q_proj", "k_proj", "v_proj", "out_proj"),
}
RELATIVE = {
    # encoder.encoders.3.self_attn, RelPositionMultiHeadedAttention
    "espnet": Names(*_CONFORMER, "conformer"),
    # The same names, LegacyRelPositionMultiHeadedAttention
    "espnet_legacy": Names(*_CONFORMER, "espnet_legacy"),
    # encoder.encoders.3.self_attn, without a shift
    "wenet": Names(*_CONFORMER, "wenet"),
    # wav2vec2_conformer.encoder.layers.3.self_attn
    "wav2vec2_conformer": Names(*_CONFORMER, "conformer"),
    # encoder.layers.3.self_attn of Parakeet; since version 5 layers.3.self_attn
    "parakeet": Names("q_proj", "k_proj", "v_proj", "o_proj", (), "relative_k_proj", "bias_u", "bias_v", "conformer"),
    # transformer.layer.3.rel_attn; tensors are (d_model, heads, head_dim).
    "xlnet": Names("q", "k", "v", "o", (), "r", "r_w_bias", "r_r_bias", "xlnet"),
    # The same names, attn_type="uni".
    "xlnet_uni": Names("q", "k", "v", "o", (), "r", "r_w_bias", "r_r_bias", "xlnet_uni"),
    # layers.3.dec_attn; the three projections are stacked, and the biases may be the model's.
    "transformer_xl": Names(*_STACKED, (), "r_net", "r_w_bias", "r_r_bias", "transformer_xl"),
}
# Tables of absolute positions, and how many of their first rows belong to no position.
ABSOLUTE = {
    "bert": ("embeddings.position_embeddings.weight", 0),
    "roberta": ("embeddings.position_embeddings.weight", 2),
    "gpt2": ("wpe.weight", 0),
    "bart": ("embed_positions.weight", 2),
}


class _Arrays(Mapping[str, Array]):
    """A mapping whose values become arrays when they are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Array:
        value = self._values[name]
        if isinstance(value, np.ndarray):
            return value
        try:
            if str(getattr(value, "dtype", "")) == "torch.bfloat16":
                # Which NumPy has not: the upper halves of float32.
                return half((np.asarray(value.float()).view(np.uint32) >> 16).astype(np.uint16))
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            # Tensors of other frameworks refuse in many words: on a GPU, with a gradient, in bfloat16.
            raise RelposTypeError(f"{name}: {type(value).__name__} cannot be read as an array: {error}") from error
        if array.dtype == object:
            raise RelposTypeError(f"{name}: expected an array of numbers, found {type(value).__name__}")
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def tensors(source: Source) -> Mapping[str, Array]:
    """The arrays of a state dict or of a .safetensors file, each read when it is asked for.

    Parameters
    ----------
    source : mapping, str, path-like or State
        Names to arrays or to anything that `numpy.asarray` reads, such as a PyTorch state dict on the CPU; or the
        path of a .safetensors file, of the index of a sharded checkpoint, or of the folder of either.

    Returns
    -------
    mapping of str to ndarray
        In the dtype they are stored in; bfloat16 is that of ml_dtypes, and float32 without that package.

    Raises
    ------
    RelposValueError
        If the path is another one, or a file is missing or damaged. Pickled files (.bin, .pt, .pth) are never read,
        because reading one can run any code.
    RelposTypeError
        If `source` is something else, or a tensor has a type that NumPy has not.

    Examples
    --------
    >>> from relpos_np.layers import tensors
    >>> list(tensors({"q.weight": [[1.0, 2.0]]}))
    ['q.weight']
    """
    if isinstance(source, State):
        return {name: source.take(name) for name in source.names()}
    if isinstance(source, TensorFile | Shards | _Arrays):
        return source
    if isinstance(source, Mapping):
        return _Arrays(source)
    if not isinstance(source, str | os.PathLike):
        raise RelposTypeError(f"source: expected a mapping or a path, found {type(source).__name__}")
    try:
        path = Path(source)
    except TypeError as error:
        raise RelposTypeError(f"source: expected a path in characters: {error}") from error
    if path.suffix in _PICKLED:
        raise RelposValueError(
            f"source: {path} is a pickled checkpoint, and reading one can run any code it names; load it where you "
            "trust it, and save it with safetensors.torch.save_file, or pass the state dict itself"
        )
    folder = os.path.isdir(path)  # noqa: PTH112 -- False for a name that no file can have
    if not (folder or path.name.endswith((".safetensors", ".safetensors.index.json"))):
        raise RelposValueError(
            f"source: expected a path that ends in .safetensors or .safetensors.index.json, or a folder, found {path}"
        )
    return checkpoint(path)


class State:
    """The tensors below a prefix, with errors that say which names do exist.

    Parameters
    ----------
    source : mapping, str, path-like or State
        See `tensors`; of another `State` the prefixes are joined.
    prefix : str
        What precedes every name, such as ``"encoder.block.0.layer.0."``; a dot at its end is added.

    Examples
    --------
    >>> from relpos_np.layers import State
    >>> state = State({"attn.q.weight": [[1.0, 2.0]]}, "attn")
    >>> state.take("q.weight")
    array([[1., 2.]])
    >>> state.get("q.bias") is None
    True
    """

    def __init__(self, source: Source, prefix: str = "") -> None:
        if not isinstance(prefix, str):
            raise RelposTypeError(f"prefix: expected a string, found {type(prefix).__name__}")
        joined = prefix + "." if prefix and not prefix.endswith(".") else prefix
        above = source if isinstance(source, State) else None
        self._tensors: Mapping[str, Array] = tensors(source) if above is None else above._tensors
        self.prefix: str = joined if above is None else above.prefix + joined

    def names(self) -> list[str]:
        """The names below the prefix, without it.

        Returns
        -------
        list of str
            In the order of the source.
        """
        return [name.removeprefix(self.prefix) for name in self._tensors if name.startswith(self.prefix)]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor.

        Parameters
        ----------
        name : str
            Without the prefix.

        Returns
        -------
        bool
            True if `take` would find it.
        """
        return self.prefix + name in self._tensors

    def get(self, name: str) -> Array | None:
        """The tensor of that name, or None.

        Parameters
        ----------
        name : str
            Without the prefix.

        Returns
        -------
        ndarray or None
            As stored.
        """
        return self._tensors[self.prefix + name] if self.has(name) else None

    def take(self, name: str) -> Array:
        """The tensor of that name.

        Parameters
        ----------
        name : str
            Without the prefix.

        Returns
        -------
        ndarray
            As stored.

        Raises
        ------
        RelposValueError
            If there is none; the message lists the nearest names that exist.
        """
        full = self.prefix + name
        if full not in self._tensors:
            raise RelposValueError(f"{full}: no such tensor; {self.nearest(name)}")
        return self._tensors[full]

    def find(self, *names: str) -> Array | None:
        """A tensor that layers share: the first of the names below the prefix, or below what precedes it.

        Parameters
        ----------
        *names : str
            Tried in this order below the prefix, then below the prefix less its last component, and so on to the
            source as a whole.

        Returns
        -------
        ndarray or None
            As stored; None where no level has any of the names.
        """
        parts = self.prefix.split(".")[:-1]
        for depth in range(len(parts), -1, -1):
            above = "".join(part + "." for part in parts[:depth])
            for name in names:
                if above + name in self._tensors:
                    return self._tensors[above + name]
        return None

    def shared(self, *names: str) -> Array:
        """As `find`, for a tensor that there must be.

        Parameters
        ----------
        *names : str
            See `find`.

        Returns
        -------
        ndarray
            As stored.

        Raises
        ------
        RelposValueError
            If no level has any of the names.
        """
        found = self.find(*names)
        if found is None:
            raise RelposValueError(f"{self.prefix}{names[0]}: no such tensor, here or above; {self.nearest(names[0])}")
        return found

    def nearest(self, name: str) -> str:
        """Existing names that resemble one that is missing, in words.

        Parameters
        ----------
        name : str
            Without the prefix.

        Returns
        -------
        str
            For an error message.
        """
        names, full = list(self._tensors), self.prefix + name
        if not names:
            return "the source holds none"
        # A wrong prefix leaves the last words right: names that end alike come before those that look alike.
        last = full.rsplit(".", 2)[-2:]
        alike = [name for name in names if name.rsplit(".", 2)[-2:] == last]
        close = difflib.get_close_matches(full, alike or names, n=5, cutoff=0.0)
        return "nearest: " + ", ".join(close)

    def __repr__(self) -> str:
        return f"State({len(self.names())} tensors below {self.prefix!r})"
