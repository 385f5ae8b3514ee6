"""`rp.from_config` on tiny random models of transformers: every layer equals the model's own eager attention."""

import json
from itertools import count
from operator import attrgetter

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytestmark = pytest.mark.filterwarnings("ignore")

from relpos_np.configs import model_types  # noqa: E402
from relpos_np.configs.families import FAMILIES  # noqa: E402
from tests.parity import attention_calls  # noqa: E402
from tests.parity.config_models import MODELS  # noqa: E402

LENGTH = 37
CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
AUTO = transformers.models.auto.modeling_auto.MODEL_MAPPING


def settings_of(model):
    settings = CONFIGS[model.model_type](**json.loads(json.dumps(model.config)))
    settings._attn_implementation = model.attention
    return settings


def build(model):
    """The model with weights large enough that scores are of order 1: position and masks are seen in the output."""
    settings = settings_of(model)
    net = (attrgetter(model.net)(transformers) if model.net else AUTO[type(settings)])(settings).eval()
    generator = torch.Generator().manual_seed(7)
    for name, x in net.named_parameters():
        if not x.requires_grad:
            continue  # sinusoids
        if x.ndim >= 2:
            fan = x.shape[-1] if "embed" not in name else 1
            x.copy_(torch.randn(x.shape, generator=generator) * 1.4 / fan**0.5)
        elif "sinks" in name or "bias" in name:
            x.copy_(torch.randn(x.shape, generator=generator) * 0.5)
    return net, settings


def inputs_of(model, settings):
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(3, 50, (2, length), generator=generator)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def codes(length, count):
        return torch.randint(3, 50, (2, length, count), generator=generator)

    def frames():
        # Windows of one size, or frames.
        one_size = "fullatt_block_indexes" in model.config and not settings.fullatt_block_indexes
        rows, columns = (8, 12) if one_size else (8, 14)
        channels = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
        return {"hidden_states": normal(2 * rows * columns, channels), "grid_thw": torch.tensor([[2, rows, columns]])}

    def prefix():
        vision, text = settings.vision_config, ids(LENGTH)
        text[:, : (vision.image_size // vision.patch_size) ** 2] = settings.image_token_id
        kinds = (torch.arange(LENGTH) >= given["prefix_lengths"]).long().expand(2, -1)
        pixels = normal(2, 3, vision.image_size, vision.image_size)
        return {"input_ids": text, "token_type_ids": kinds, "pixel_values": pixels}

    def patches():
        shapes = torch.tensor([[4, 9], [9, 4]])
        pixels = normal(2, 36, 3 * settings.patch_size**2)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(2, 36), "spatial_shapes": shapes}

    given, c = dict(model.given), settings
    cross = "encoder_hidden_states"
    return {
        "text": lambda: {"input_ids": ids(LENGTH), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
        "ids": lambda: {"input_ids": ids(LENGTH)},
        "boxes": lambda: {"input_ids": ids(LENGTH), "bbox": torch.tensor(given["boxes"]).expand(2, -1, -1)},
        "codes": lambda: {"input_ids": codes(LENGTH, c.num_codebooks)},
        "embedded": lambda: {"inputs_embeds": normal(2, LENGTH, c.hidden_size)},
        "pair": lambda: {"input_ids": ids(LENGTH), "decoder_input_ids": ids(23)},
        "mel": lambda: {"input_features": normal(2, c.num_mel_bins, 80), "decoder_input_ids": ids(23)},
        "pixels": lambda: {"pixel_values": normal(1 + (c.model_type != "pixtral"), 3, c.image_size, c.image_size)},
        "video": lambda: {"pixel_values": normal(2, c.num_frames, 3, c.image_size, c.image_size)},
        "patches": patches,
        "speech": lambda: {"input_values": normal(2, 12000), "decoder_input_ids": ids(23)},
        "channels": lambda: {"input_ids": codes(23, c.num_channels), cross: normal(2, LENGTH, c.cross_hidden_size)},
        "codebooks": lambda: {"input_ids": ids(23).repeat(c.num_codebooks, 1), cross: normal(2, LENGTH, 64)},
        "mels": lambda: {"input_values": normal(2, c.max_length, c.num_mel_bins)},
        "frames": frames,
        "prefix": prefix,
        "wave": lambda: {"input_values": normal(2, 320)},
        "bins": lambda: {"input_features": normal(2, 8 * LENGTH, c.num_mel_bins)},
        "features": lambda: {"input_features": normal(2, LENGTH, c.feature_projection_input_dim)},
        "hidden": lambda: {"input_values": normal(2, LENGTH, 64), "decoder_input_values": normal(2, 23, 64)},
        "decoding": lambda: {"input_ids": ids(23), cross: normal(2, LENGTH, 64)},
        "vits": lambda: {"input_ids": ids(LENGTH), "padding_mask": torch.ones(2, LENGTH, 1)},
    }[model.inputs]()


def run(net, settings, model):
    if model.calls in ("wavlm", "xlnet", "diffllama", "jetmoe"):
        recording = getattr(attention_calls, model.calls)(net)
    elif model.calls == "interface":
        recording = attention_calls.interface(net, last=model.last)
    else:
        recording = attention_calls.hooks(net, *attention_calls.HOOKS[model.calls])
    with recording as seen:
        net.get_submodule(model.via)(**inputs_of(model, settings))
    return seen


def readable(stored, part=""):
    """Numbers of the layers of a stack, but for those of a hybrid that are refused by their type."""
    found = []
    for number in count():
        try:
            rp.from_config(stored, layer=number, part=part)
        except rp.RelposError as error:
            if str(error).startswith("layer: expected"):
                break
            if not str(error).startswith(f"layer_types: layer {number} is "):
                raise
        else:
            found.append(number)
    return found


def in_order(stored, parts):
    """Parts and numbers of layers in the order in which a model runs through them."""
    if "cross" not in parts:
        return [(part, n) for part in parts for n in readable(stored, part)]
    *encoders, decoder, cross = parts
    both = [(part, n) for n in readable(stored, decoder) for part in (decoder, cross)]
    return [(part, n) for part in encoders for n in readable(stored, part)] + both


def merged(call, out):
    """(B, H, L, D) as the model has it."""
    out = np.moveaxis(out, -3, -2)
    out = out.reshape(*out.shape[:-2], -1)
    return call.project(out) if call.project is not None else out


def errors(model, net, seen, stored):
    """The first call of which the layer that is read answers something else: its part, number and error; else None."""
    weights = {name: x.numpy() for name, x in net.state_dict().items()}
    order = in_order(stored, model.parts)
    if len(seen) != len(order):
        return f"{len(seen)} calls, {len(order)} layers"
    for (part, number), call in zip(order, seen, strict=True):
        layer = rp.from_config(stored, layer=number, part=part)
        bound = layer.bind(weights)
        if model.scaled:
            call.q /= layer.scale
        takes = (*layer.inputs, *layer.optional)
        inputs = {name: x for name, x in (*model.given, *call.inputs.items()) if name in takes}
        inputs |= {name: call.inputs[name] for name in layer.needs}
        found = merged(call, bound(call.q, call.k, call.v, mask=call.mask, backend="numpy", **inputs))
        error = np.abs(found - call.out).max() / max(np.abs(call.v).max(), np.abs(call.out).max())
        if not error < 1e-4:
            return f"{part} layer {number}: {error:.2g}"
    return None


def name_of(model):
    return f"{model.model_type}-{MODELS.index(model)}"


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_layers_are_those_of_the_model(model, record_property):
    net, settings = build(model)
    weights = {name: x.numpy() for name, x in net.state_dict().items()}
    stored = json.loads(settings.to_json_string(use_diff=False))
    brief = json.loads(settings.to_json_string(use_diff=True))
    for config in (stored, brief) if model.published else ():
        config["model_type"] = model.published
    seen = run(net, settings, model)
    order = in_order(stored, model.parts)
    assert len(seen) == len(order)
    for (part, number), call in zip(order, seen, strict=True):
        layer = rp.from_config(stored, layer=number, part=part)
        assert rp.from_config(brief, layer=number, part=part).describe() == layer.describe()
        bound = layer.bind(weights)
        if model.scaled:
            call.q /= layer.scale
        takes = (*layer.inputs, *layer.optional)
        inputs = {name: x for name, x in model.given if name in takes}
        inputs |= {name: x for name, x in call.inputs.items() if name in takes}
        needed = {name: call.inputs[name] for name in layer.needs}
        found = merged(call, bound(call.q, call.k, call.v, mask=call.mask, backend="numpy", **inputs, **needed))
        size = max(np.abs(call.v).max(), np.abs(call.out).max())
        error = np.abs(found - call.out).max() / size
        record_property("error", float(error))
        position = bound.position(call.q, call.k, **inputs) or None
        scale = None if np.isnan(layer.scale) else layer.scale
        scores = rp.logits(call.q, call.k, position=position, scale=scale)
        eps = np.finfo(np.float32).eps
        assert error < 8 * eps * (1 + np.abs(scores).max()), f"{part} layer {number}: {error}\n{layer.describe()}"
        # Without its positions, its masks or another of its options it would be seen to differ.
        options = bound.options(call.q, call.k, **inputs) | {"mask": call.mask} | needed
        lacking = [{"position": None}] if layer.schemes else []
        lacking += [{name: None} for name in ("sinks", "query_scale", "selected") if name in options]
        if layer.softcap is not None:
            lacking.append({"softcap": None, "cap_order": "scores"})
        ruled = layer.rule is not None and layer.rule.options.get("size", 0) < call.k.shape[-2]
        if layer.causal or layer.window is not None or ruled:
            lacking.append({"causal": False, "window": None, "rule": None})
        for left_out in lacking:
            other = rp.attention(call.q, call.k, call.v, **{"position": position, **options, **left_out})
            assert np.abs(merged(call, other) - call.out).max() / size > 1e-3, left_out


@pytest.mark.parametrize("name", [name for name in model_types() if name in CONFIGS])
def test_defaults_are_those_of_the_configuration_class(name):
    """A configuration that stores nothing means what the model's class says."""
    if name in ("glm4_moe", "qwen3_omni_moe_text"):  # no head_dim, and heads that do not divide the channels
        with pytest.raises(rp.RelposError, match="head_dim"):
            rp.from_config({"model_type": name}, layer=0)
        return
    if FAMILIES[name].count is not None:  # a hybrid: the same layers are understood
        whole = json.loads(CONFIGS[name]().to_json_string(use_diff=False))
        if name == "lfm2_moe":  # whose class has no layer_types
            with pytest.raises(rp.RelposError, match="layer_types: the configuration of lfm2_moe has none"):
                rp.from_config(whole, layer=0)
            return
        numbers = readable(whole)
        assert numbers == readable({"model_type": name})
        for number in numbers:
            told = rp.from_config(whole, layer=number).as_dict()
            assert rp.from_config({"model_type": name}, layer=number).as_dict() == told
        return
    # The class of gpt-sw3 calls itself gpt2.
    whole = json.loads(CONFIGS[name]().to_json_string(use_diff=False)) | {"model_type": name}
    for part in rp.configs.parts_of(whole):
        nothing = rp.from_config({"model_type": name}, layer=0, part=part)
        for number in {0, 1, nothing.layers // 2, nothing.layers - 1}:
            told = rp.from_config(whole, layer=number, part=part).as_dict()
            assert rp.from_config({"model_type": name}, layer=number, part=part).as_dict() == told


def test_every_model_type_is_swept():
    swept = {model.published or model.model_type for model in MODELS} - {"paligemma"}
    # Which must be 4,096 channels wide: in tests/test_config_names.py.
    swept |= {"baichuan"}
    # Which transformers has no more: in tests/test_config_names.py.
    swept |= {"transfo-xl"}
    # Those of diffusers are in test_video.py.
    assert swept == {name for name in model_types() if FAMILIES[name].package == "transformers"}


FORMS = [model for model in MODELS if model.model_type in CONFIGS and not model.published]


@pytest.mark.parametrize("model", FORMS, ids=[f"{model.model_type}-{n}" for n, model in enumerate(FORMS)])
def test_objects_and_files_saved_again_are_the_same_layer(model):
    raw = json.loads(json.dumps({**model.config, "model_type": model.model_type}))
    settings = settings_of(model)
    saved = [json.loads(settings.to_json_string(use_diff=diff)) for diff in (False, True)]

    hybrid = model.model_type in FAMILIES and FAMILIES[model.model_type].count is not None
    number = readable(raw)[0] if hybrid else 0

    def told(config):
        found = {}
        for part in rp.configs.parts_of(config):
            layer = rp.from_config(config, layer=number, part=part)
            # How the numbers of a rule are spelled differs.
            schemes = [(plan.scheme, plan.weights, plan.inputs) for plan in layer.schemes]
            steps = [str(step).partition(", Rotary")[0] for step in layer.before]
            sizes = layer.layers, layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, layer.scale
            found[part] = schemes, sizes, layer.causal, layer.window, layer.rule, layer.softcap, steps
        return found

    for config in (settings, *saved):
        assert told(config) == told(raw)
