"""Speech models with relative positions: Conformers, Parakeet, WavLM, Wav2Vec2-BERT, SeamlessM4T, SpeechT5 and VITS."""

from __future__ import annotations

from typing import Any

from relpos_np._contract import check
from relpos_np.configs.absolute import sinusoidal
from relpos_np.configs.decoders import divided, equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, Rule, SchemePlan
from relpos_np.configs.steps import TurnedInputs
from relpos_np.configs.t5_like import even_buckets
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.sinusoidal import Sinusoidal
from relpos_np.schemes.transformer_xl import TransformerXL, row_distances
from relpos_np.schemes.wavlm import WavLM, wavlm_gate
from relpos_np.types import Layout, Shift


def projected_rows(given: Given, weight: Any, variant: Shift, layout: Layout, clamp: int | None = None) -> Any:
    """Sinusoids of the distances of a call, projected to every head: (R, H, D)."""
    heads = given.arrays["u"].shape[0]
    width = weight.shape[-1]
    distances = row_distances(given.q_len, given.k_len, variant, clamp=clamp)
    rows = Sinusoidal(width, layout=layout).encode(distances).astype(given.dtype, copy=False)
    return (rows @ weight.T).reshape(len(distances), heads, given.head_dim)


def _conformer(given: Given) -> TransformerXL:
    rows = projected_rows(given, given.arrays["rows"], "conformer", "interleaved")
    return TransformerXL(given.arrays["u"], given.arrays["v"], rows, variant="conformer")


def _relative(prefix: str, u: str = "pos_bias_u", v: str = "pos_bias_v", rows: str = "linear_pos") -> SchemePlan:
    weights = {"u": f"{prefix}.{u}", "v": f"{prefix}.{v}", "rows": f"{prefix}.{rows}.weight"}
    remark = "rows: sinusoids of the distances, projected"
    return SchemePlan("TransformerXL", {"variant": "conformer"}, weights, remark=remark, make=_conformer, varies=True)


def _relative_key(keys: Keys, prefix: str) -> SchemePlan:
    left = keys.integer("left_max_position_embeddings", least=0)
    keys.integer("right_max_position_embeddings", least=0)
    return SchemePlan("Shaw", {"left": left}, {"key_table": f"{prefix}.distance_embedding.weight"})


def _conformer_layer(keys: Keys, prefix: str, found: dict[str, Any]) -> dict[str, Any]:
    """Whichever positions `position_embeddings_type` names."""
    kind = keys.only("position_embeddings_type", "relative", "relative_key", "rotary", None)
    if kind == "relative":
        found["schemes"] = (_relative(prefix),)
    elif kind == "relative_key":
        found["schemes"] = (_relative_key(keys, prefix),)
    elif kind == "rotary":
        found["before"] = (TurnedInputs(keys.real("rotary_embedding_base")),)
    keys.ignore(
        "rotary_embedding_base",
        "left_max_position_embeddings",
        "right_max_position_embeddings",
    )
    return found


def _adapter(keys: Keys) -> tuple[str, ...]:
    if not keys.flag("add_adapter"):
        return ()
    return ("the adapter behind these layers has attention of its own, which is not read",)


def _wav2vec2(keys: Keys, layer: int, part: str) -> LayerAttention:
    found = _conformer_layer(keys, f"encoder.layers.{layer}.self_attn", sizes(keys))
    if keys.model_type == "wav2vec2-conformer":
        keys.only("position_embeddings_type", "relative", "rotary", None)
    else:
        found["notes"] = _adapter(keys)
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


def _parakeet(keys: Keys, layer: int, part: str) -> LayerAttention:
    """NVIDIA's Conformer, whose class has as many key heads as heads, whatever a file says."""
    found = sizes(keys)
    keys.only("num_key_value_heads", found["heads"], None)
    # Of the inputs, and of the convolutions.
    keys.ignore("scale_input", "convolution_bias")
    plan = _relative(f"layers.{layer}.self_attn", "bias_u", "bias_v", "relative_k_proj")
    return LayerAttention(keys.model_type, part, layer, causal=False, schemes=(plan,), **found)


def _wavlm_scheme(given: Given) -> WavLM:
    arrays = given.arrays
    hidden = check.floating("hidden", given.inputs["hidden"]).astype(given.dtype, copy=False)
    gate = wavlm_gate(hidden, arrays["weight"], arrays["bias"], arrays["const"])
    return WavLM(arrays["table"], gate, max_distance=given.options["max_distance"], rounding="float32")


def _wavlm(keys: Keys, layer: int, part: str) -> LayerAttention:
    """The first layer's table, and a gate of each layer's own, which its input opens."""
    own = f"encoder.layers.{layer}.attention.gru_rel_pos"
    weights = {
        "table": "encoder.layers.0.attention.rel_attn_embed.weight",
        "weight": f"{own}_linear.weight",
        "bias": f"{own}_linear.bias",
        "const": f"{own}_const",
    }
    even_buckets(keys, "num_buckets")
    options = {"max_distance": keys.integer("max_bucket_distance")}
    plan = SchemePlan(
        "WavLM",
        options,
        weights,
        inputs=("hidden",),
        remark="hidden: the input of the layer's projections, for the gate",
        make=_wavlm_scheme,
        varies=True,
    )
    return LayerAttention(keys.model_type, part, layer, causal=False, schemes=(plan,), **sizes(keys))


def _counted(keys: Keys, side: str) -> dict[str, Any]:
    heads = keys.integer(f"{side}_attention_heads")
    return equal_heads(keys.integer(f"{side}_layers"), heads, divided(keys, "hidden_size", heads))


_SEAMLESS_SIDES = ("encoder", "decoder", "speech_encoder", "t2u_encoder", "t2u_decoder")


def _seamless(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A text encoder and decoder with sinusoids, and a Conformer for speech."""
    width = keys.integer("hidden_size")
    second = keys.model_type == "seamless_m4t_v2"
    for side in _SEAMLESS_SIDES:
        keys.ignore(f"{side}_attention_heads", f"{side}_layers")
    keys.ignore("position_embeddings_type", "rotary_embedding_base")
    keys.ignore("left_max_position_embeddings", "right_max_position_embeddings")
    keys.ignore("speech_encoder_chunk_size", "speech_encoder_left_chunk_num")
    if part == "speech_encoder":
        found = _counted(keys, part) | {"causal": False, "notes": _adapter(keys)}
        allowed = ("relative_key", None) if second else ("relative", "rotary", None)
        keys.only("position_embeddings_type", *allowed)
        found = _conformer_layer(keys, f"speech_encoder.encoder.layers.{layer}.self_attn", found)
        size = keys.get("speech_encoder_chunk_size", None)
        if second and size is not None:
            left = keys.integer("speech_encoder_left_chunk_num", least=-1)
            options = {
                "size": check.integer("speech_encoder_chunk_size", size, 1),
                "left": None if left < 0 else left,
            }
            found["rule"] = Rule("Chunked", options)
        return LayerAttention(keys.model_type, part, layer, **found)
    found = _counted(keys, "encoder" if part == "encoder" else "decoder")
    added = None if part == "cross" else sinusoidal(width, "tensor2tensor", 2)
    return LayerAttention(keys.model_type, part, layer, causal=part == "decoder", added=added, **found)


def _reversed(given: Given) -> Shaw:
    return Shaw(given.arrays["pe_k"][::-1], left=given.options["left"])


def _speecht5(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Shaw's keys in the encoder, counted the other way and with one row too many in front."""
    for side in ("encoder", "decoder"):
        keys.ignore(f"{side}_attention_heads", f"{side}_layers")
    farthest = keys.integer("encoder_max_relative_position")
    found = _counted(keys, "encoder" if part == "encoder" else "decoder")
    if part == "encoder":
        table = "encoder.wrapped_encoder.embed_positions.pe_k.weight"
        plan = SchemePlan(
            "Shaw",
            {"left": farthest - 1},
            {"pe_k": table},
            remark="rows in reverse: key_table=pe_k[::-1]",
            make=_reversed,
        )
        found["schemes"] = (plan,)
    return LayerAttention(keys.model_type, part, layer, causal=part == "decoder", **found)


def _windowed(given: Given) -> Shaw:
    return Shaw(given.arrays["emb_rel_k"][0], given.arrays["emb_rel_v"][0], outside="zero")


def _vits(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Shaw's keys and values within a window, nothing beyond it."""
    found = sizes(keys)
    size = keys.get("window_size")
    if size:
        own = f"text_encoder.encoder.layers.{layer}.attention"
        weights = {name: f"{own}.{name}" for name in ("emb_rel_k", "emb_rel_v")}
        remark = f"window {check.integer('window_size', size, 1)}"
        found["schemes"] = (SchemePlan("Shaw", {"outside": "zero"}, weights, remark=remark, make=_windowed),)
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


_KIND = "Speech and music"
register(_wav2vec2, "wav2vec2-conformer wav2vec2-bert", kind=_KIND)
register(_parakeet, "parakeet_encoder", kind=_KIND)
register(_wavlm, "wavlm", kind=_KIND)
register(_seamless, "seamless_m4t seamless_m4t_v2", kind=_KIND, parts=("encoder", "decoder", "cross", "speech_encoder"))
register(_speecht5, "speecht5", kind=_KIND, parts=("encoder", "decoder", "cross"))
register(_vits, "vits", kind=_KIND)
