"""The text encoder of a VITS voice, in NumPy around `relpos_np.layers`, and the rest of its network in ONNX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import relpos_np as rp
from networks.parts import Convolution, LayerNorm
from relpos_np.layers import Linear, MultiHeadAttention, State

LAYERS = 6
HEADS = 2
# Tensors of the graph where the text encoder ends: hidden states, mask of phonemes, mean and log deviation of the
# prior; and how the rest of the graph gets the mask besides.
ENCODED = (
    "/enc_p/encoder/Mul_2_output_0",
    "/enc_p/Cast_1_output_0",
    "/enc_p/Split_output_0",
    "/enc_p/Split_output_1",
)
MASK_AGAIN = "/enc_p/encoder/Unsqueeze_output_0"


def _pointwise(state: State, name: str) -> Linear:
    """A convolution of width 1, which is a projection."""
    return Linear(state.take(f"{name}.weight")[..., 0], state.take(f"{name}.bias"))


class Layer:
    """Attention and two convolutions, each added to what it got and normalised afterwards."""

    def __init__(self, state: State, number: int) -> None:
        attention = State(state, f"attn_layers.{number}")
        tables = [attention.take(f"emb_rel_{side}")[0] for side in "kv"]
        # A pair beyond the window of 4 gets no vector; in Shaw's paper it gets the outermost.
        position = rp.Shaw(*tables, outside="zero")
        projections = [_pointwise(attention, f"conv_{name}") for name in "qkvo"]
        self.attention = MultiHeadAttention(*projections, heads=HEADS, position=position)
        self.convolutions = [
            Convolution(
                state.take(f"ffn_layers.{number}.{name}.weight"), state.take(f"ffn_layers.{number}.{name}.bias")
            )
            for name in ("conv_1", "conv_2")
        ]
        self.norms = [
            LayerNorm(state.take(f"{name}.{number}.gamma"), state.take(f"{name}.{number}.beta"))
            for name in ("norm_layers_1", "norm_layers_2")
        ]

    def __call__(self, x: np.ndarray, mask: np.ndarray, lengths: np.ndarray, backend: str | None) -> np.ndarray:
        x = self.norms[0](x + self.attention(x, key_lengths=lengths, backend=backend))
        first, second = self.convolutions
        wide = np.maximum(first(x * mask), 0)
        return self.norms[1](x + second(wide * mask) * mask)


class TextEncoder:
    """Phonemes to the mean and the log deviation of each one's distribution over sounds.

    `weights` are the network's initialisers by name, as `initialisers` reads them.
    """

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        state = State(weights, "enc_p")
        self.embedding = state.take("emb.weight")
        self.layers = [Layer(State(state, "encoder"), n) for n in range(LAYERS)]
        self.prior = _pointwise(state, "proj")

    def __call__(
        self, ids: np.ndarray, lengths: np.ndarray, *, dtype: type = np.float32, backend: str | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hidden states, mean and log deviation, each (texts, L, 192), of phonemes (texts, L)."""
        mask = (np.arange(ids.shape[1]) < lengths[:, None])[..., None].astype(dtype)
        width = self.embedding.shape[1]
        x = self.embedding[ids].astype(dtype) * dtype(width**0.5) * mask
        for layer in self.layers:
            x = layer(x, mask, lengths, backend)
        x *= mask
        mean, log_deviation = np.split(self.prior(x) * mask, 2, axis=-1)
        return x, mean, log_deviation


def initialisers(path: Path) -> dict[str, np.ndarray]:
    """The weights in an ONNX file of a VITS voice, under the names of its modules."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    found = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    # The exporter gave this table another name; what reads it has kept its own.
    lookup = next(node for node in graph.node if node.name == "/enc_p/emb/Gather")
    found["enc_p.emb.weight"] = found[lookup.input[0]]
    return found


class Rest:
    """Durations, flow and vocoder: what turns the text encoder's answer into sound, run by onnxruntime."""

    def __init__(self, path: Path) -> None:
        import onnx
        import onnxruntime
        from onnx.utils import Extractor

        cut = Extractor(onnx.load(path)).extract_model([*ENCODED, MASK_AGAIN, "scales"], ["output"])
        self.session = onnxruntime.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])

    def __call__(
        self, encoded: tuple[np.ndarray, np.ndarray, np.ndarray], scales: tuple[float, float, float]
    ) -> np.ndarray:
        """Samples in -1 ... 1 of one text; scales are those of noise, length and the noise of durations."""
        states, mean, log_deviation = (np.swapaxes(one.astype(np.float32), 1, 2) for one in encoded)
        mask = np.ones((1, 1, states.shape[2]), np.float32)
        given = dict(zip(ENCODED, (states, mask, mean, log_deviation), strict=True))
        given |= {MASK_AGAIN: mask[:, None], "scales": np.array(scales, np.float32)}
        wanted = {one.name for one in self.session.get_inputs()}
        return self.session.run(None, {name: one for name, one in given.items() if name in wanted})[0].ravel()


def phoneme_numbers(text: str, config: Path) -> np.ndarray:
    """Numbers (1, L) of phonemes in IPA as a voice's configuration counts them: a pause after each, ends marked."""
    numbers = json.loads(config.read_text(encoding="utf-8"))["phoneme_id_map"]
    unknown = sorted(set(text) - set(numbers))
    if unknown:
        raise ValueError(f"the voice has no phonemes {' '.join(unknown)}; it has {' '.join(numbers)}")
    symbols = ["^", "_", *(symbol for phoneme in text for symbol in (phoneme, "_")), "$"]
    return np.array([[numbers[symbol][0] for symbol in symbols]], dtype=np.int64)
