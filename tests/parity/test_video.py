"""`rp.from_config` on tiny random models of diffusers: every layer equals the model's own attention."""

import inspect
import json
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

from relpos_np.configs import model_types  # noqa: E402
from relpos_np.configs.families import FAMILIES  # noqa: E402

HEADS, DIM, TEXT, GRID = 2, 32, 5, (3, 4, 6)
IMAGE = (1, 5, 6)
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": DIM, "num_layers": 2, "in_channels": 4}
COG = SIZES | {"out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8, "max_text_seq_length": TEXT}
COG |= {"sample_height": 8, "sample_width": 12, "sample_frames": 9, "use_rotary_positional_embeddings": True}
MODELS = {
    "wan": ("WanTransformer3DModel", SIZES | {"text_dim": 8, "freq_dim": 8, "ffn_dim": 16}),
    "cogvideox": ("CogVideoXTransformer3DModel", COG),
    "cogvideox with a table": (
        "CogVideoXTransformer3DModel",
        COG | {"use_learned_positional_embeddings": True, "in_channels": 8},
    ),
    "cogvideox without rotary": (
        "CogVideoXTransformer3DModel",
        COG | {"use_rotary_positional_embeddings": False},
    ),
    "cogvideox 1.5": ("CogVideoXTransformer3DModel", COG | {"patch_size_t": 1, "patch_bias": False}),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        SIZES
        | {"num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 8, "pooled_projection_dim": 8}
        | {"rope_axes_dim": (8, 12, 12), "guidance_embeds": False},
    ),
}
FLUX = SIZES | {"num_single_layers": 1, "joint_attention_dim": 8, "axes_dims_rope": (8, 12, 12)}
QWEN = {name: x for name, x in FLUX.items() if name != "num_single_layers"} | {"out_channels": 4, "patch_size": 1}
SD3 = SIZES | {"joint_attention_dim": 8, "caption_projection_dim": 64, "pooled_projection_dim": 8, "sample_size": 12}
SD3 |= {"qk_norm": "rms_norm", "dual_attention_layers": (1,), "pos_embed_max_size": 9, "out_channels": 4}
UNET = {"block_out_channels": (64, 128), "attention_head_dim": (2, 4), "layers_per_block": 1, "norm_num_groups": 8}
UNET |= {"cross_attention_dim": 8, "sample_size": 12, "transformer_layers_per_block": (1, 2)}
UNET |= {"down_block_types": ("CrossAttnDownBlock2D",) * 2, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
MODELS |= {
    "flux": ("FluxTransformer2DModel", FLUX | {"pooled_projection_dim": 8}),
    "chroma": (
        "ChromaTransformer2DModel",
        FLUX | {"approximator_num_channels": 64, "approximator_hidden_dim": 8, "approximator_layers": 1},
    ),
    "qwen-image": ("QwenImageTransformer2DModel", QWEN),
    "sd3 without rotary": ("SD3Transformer2DModel", SD3),
    "unet without rotary": ("UNet2DConditionModel", UNET),
}


@contextmanager
def recorded(net, plain):
    """Queries and keys after their norms, (B, H, L, D), then values and the output: of every call that has norms.

    Of a `plain` network, which has none and turns nothing, of every call.
    """
    seen, normed, removed, names = [], {}, [], type(net).__name__
    original = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, *args, **options):
        out = original(query, key, value, *args, **options)
        if plain:
            seen.append([x.double().numpy() for x in (query, key, value, out)])
        if normed:
            pairs = [(normed["norm_q"], normed["norm_k"])]
            if "norm_added_q" in normed:
                pairs.append((normed["norm_added_q"], normed["norm_added_k"]))
            # Flux has the text first, and names its norms last; Stable Diffusion 3 has no order to mind.
            pairs = pairs[::-1] if "Flux" in names or "Chroma" in names or "QwenImage" in names else pairs
            q, k = (torch.cat([in_heads(pair[n]) for pair in pairs], dim=2) for n in (0, 1))
            seen.append([x.double().numpy() for x in (q, k, value, out)])
            normed.clear()
        return out

    for name, module in net.named_modules():
        own = name.rpartition(".")[2]
        if own in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            # Copied, as CogVideoX turns in place.
            note = lambda m, x, y, own=own: normed.update({own: y.clone()})  # noqa: E731
            removed.append(module.register_forward_hook(note))
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield seen
    for handle in removed:
        handle.remove()


def in_heads(x):
    if x.ndim == 3:
        x = x.unflatten(-1, (HEADS, DIM))
    return x if x.shape[1] == HEADS else x.transpose(1, 2)


def inputs_of(net, name):
    """Two latent videos of patches 1 x 2 x 2, and text."""
    generator = torch.Generator().manual_seed(1)
    frames, height, width = GRID[0], 2 * GRID[1], 2 * GRID[2]
    channels = net.config.in_channels
    given = {"timestep": torch.tensor([3, 5])}
    given["encoder_hidden_states"] = torch.randn((2, TEXT, 8), generator=generator)
    if "UNet" in name:
        return given | {"sample": torch.randn((2, 4, 12, 12), generator=generator)}
    if "2DModel" in name:
        given["timestep"] = given["timestep"] / 10
        given["pooled_projections"] = torch.randn((2, 8), generator=generator)
        if "SD3" in name:
            return given | {"hidden_states": torch.randn((2, channels, 10, 12), generator=generator)}
        given["hidden_states"] = torch.randn((2, IMAGE[1] * IMAGE[2], channels), generator=generator)
        if "Qwen" in name:
            del given["pooled_projections"]
            return given | {"img_shapes": [[IMAGE]] * 2, "encoder_hidden_states_mask": torch.ones(2, TEXT)}
        if "Chroma" in name:
            del given["pooled_projections"]
        given["img_ids"] = diffusers.FluxPipeline._prepare_latent_image_ids(1, *IMAGE[1:], "cpu", torch.float32)
        return given | {"txt_ids": torch.zeros(TEXT, 3)}
    if "Cog" in name:
        given["hidden_states"] = torch.randn((2, frames, channels, height, width), generator=generator)
        if net.config.use_rotary_positional_embeddings:
            pipeline = SimpleNamespace(transformer=net, vae_scale_factor_spatial=8)
            make = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings
            given["image_rotary_emb"] = make(pipeline, 8 * height, 8 * width, frames, torch.device("cpu"))
        return given
    given["hidden_states"] = torch.randn((2, channels, frames, height, width), generator=generator)
    if "Hunyuan" in name:
        given["encoder_attention_mask"] = torch.ones(2, TEXT)
        given["pooled_projections"] = torch.randn((2, 8), generator=generator)
    return given


@pytest.mark.parametrize("case", MODELS)
def test_layers_are_those_of_the_model(case, record_property):
    name, config = MODELS[case]
    net = getattr(diffusers, name)(**config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, x in net.named_parameters():
            if x.ndim >= 2:
                x.copy_(torch.randn(x.shape, generator=generator) * 1.4 / x[0].numel() ** 0.5)
            elif "norm_q" in key and "weight" in key:
                x.fill_(2.0)  # so that scores are of order 1
        with recorded(net, plain="unet" in case) as seen:
            net(**inputs_of(net, name))
    stored = json.loads(net.to_json_string())
    assert stored["_class_name"] == name
    parts = rp.configs.parts_of(stored)
    layers = rp.from_config(stored, layer=0, part=parts[0]).layers
    twice = config.get("dual_attention_layers", ())
    order = [(part, n) for n in range(layers) for part in parts for _ in range(1 + (n in twice))]
    assert len(seen) == len(order)
    for (part, number), (q, k, v, out) in zip(order, seen, strict=True):
        layer = rp.from_config(stored, layer=number, part=part)
        grid = IMAGE if "2DModel" in name else GRID
        inputs = dict.fromkeys(layer.inputs, grid)
        bound = layer.bind()
        found = bound(q, k, v, backend="numpy", **inputs)
        size = np.abs(v).max()
        error = np.abs(found - out).max() / size
        record_property("error", float(error))
        scores = rp.logits(q, k, position=bound.position(q, k, **inputs) or None)
        # Angles of float32, at positions and frequencies of float32.
        assert error < 8 * np.finfo(np.float32).eps * (1 + np.abs(scores).max()), (part, number, error)
        assert bool(layer.schemes) == (part != "cross" and "without" not in case)
        if layer.schemes:
            assert np.abs(rp.attention(q, k, v) - out).max() / size > 1e-3
            turned = bound(q, k, v, grid=grid[::-1]) if "cog" not in case else found + 1
            assert np.abs(turned - out).max() / size > 1e-3


@pytest.mark.parametrize("name", [name for name in model_types() if FAMILIES[name].package == "diffusers"])
def test_defaults_are_those_of_the_class(name):
    arguments = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    whole = {x.name: x.default for x in arguments if x.default is not x.empty}
    told = rp.from_config({"_class_name": name, **whole}, layer=0).as_dict()
    assert rp.from_config({"_class_name": name}, layer=0).as_dict() == told
    assert name in {name for name, _ in MODELS.values()}
