"""MPNet's encoder and the sentence embeddings of all-mpnet-base-v2, in NumPy around `relpos_np.layers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import erf

from networks.parts import LayerNorm
from relpos_np.layers import Linear, MultiHeadAttention, State

# Word pieces beyond this are cut off, as the published model does.
MAX_LENGTH = 384


class Layer:
    """Attention and two projections, each added to what it got and normalised afterwards."""

    def __init__(self, state: State, eps: float) -> None:
        # The T5 table is the encoder's; the state finds it above this layer.
        self.attention = MultiHeadAttention.from_state_dict(state, prefix="attention.attn", format="mpnet")
        self.widen = Linear.read(state, "intermediate.dense")
        self.narrow = Linear.read(state, "output.dense")
        self.norms = [
            LayerNorm(state.take(f"{name}.LayerNorm.weight"), state.take(f"{name}.LayerNorm.bias"), eps)
            for name in ("attention", "output")
        ]

    def __call__(self, x: np.ndarray, lengths: np.ndarray, backend: str | None) -> np.ndarray:
        x = self.norms[0](x + self.attention(x, key_lengths=lengths, backend=backend))
        wide = self.widen(x)
        wide *= 0.5 * (1 + erf(wide * x.dtype.type(0.5**0.5)))
        return self.norms[1](x + self.narrow(wide))


class MPNet:
    """The encoder, from a folder with `model.safetensors` and `config.json`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = State(folder / "model.safetensors")
        eps = config["layer_norm_eps"]
        self.words = state.take("embeddings.word_embeddings.weight")
        self.positions = state.take("embeddings.position_embeddings.weight")
        self.padding = int(config["pad_token_id"])
        self.norm = LayerNorm(state.take("embeddings.LayerNorm.weight"), state.take("embeddings.LayerNorm.bias"), eps)
        self.layers = [Layer(State(state, f"encoder.layer.{n}"), eps) for n in range(config["num_hidden_layers"])]

    def __call__(
        self, ids: np.ndarray, lengths: np.ndarray, *, dtype: type = np.float32, backend: str | None = None
    ) -> np.ndarray:
        """Hidden states (texts, L, 768) of word pieces (texts, L), of which `lengths` belong to each text."""
        # Position 0 of the text has the row after the padding's own.
        positions = self.padding + 1 + np.arange(ids.shape[1])
        positions = np.where(np.arange(ids.shape[1]) < lengths[:, None], positions, self.padding)
        x = self.norm(self.words[ids].astype(dtype) + self.positions[positions].astype(dtype))
        for layer in self.layers:
            x = layer(x, lengths, backend)
        return x


class Embedder:
    """Texts to vectors of length 1, whose products say how close two texts are in meaning."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.network = MPNet(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_LENGTH)
        self.tokenizer.enable_padding(pad_id=self.network.padding, pad_token="<pad>")

    def pieces(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the word pieces, padded to the longest text, and how many each text has."""
        encoded = self.tokenizer.encode_batch(list(texts))
        ids = np.array([one.ids for one in encoded], dtype=np.int64)
        return ids, np.array([sum(one.attention_mask) for one in encoded], dtype=np.int64)

    def __call__(self, texts: Sequence[str], *, dtype: type = np.float32, backend: str | None = None) -> np.ndarray:
        """Embeddings (texts, 768)."""
        ids, lengths = self.pieces(texts)
        return self.pool(self.network(ids, lengths, dtype=dtype, backend=backend), lengths)

    @staticmethod
    def pool(states: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The mean of hidden states (texts, L, 768) over each text's word pieces, divided by its norm."""
        own = np.arange(states.shape[1]) < lengths[:, None]
        mean = np.where(own[..., None], states, 0).sum(axis=1) / lengths[:, None].astype(states.dtype)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)
