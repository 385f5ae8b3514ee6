"""`LayerAttention.run` on tiny random models of transformers in float64: the model's own attention modules."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytestmark = pytest.mark.filterwarnings("ignore")

from relpos_np.layers import PublishedAttention  # noqa: E402
from tests.parity.config_models import MODELS  # noqa: E402
from tests.parity.test_from_config import build, in_order, inputs_of, name_of  # noqa: E402


@contextmanager
def in_float64():
    """What code of transformers computes in float32 whatever its input is: norms, softmax, angles, tables."""
    usual = torch.get_default_dtype()
    with (
        patch.multiple(torch, float32=torch.float64, float=torch.float64, FloatTensor=torch.DoubleTensor),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def array(x):
    while isinstance(x, (tuple, list)):
        x = x[0]
    return x.detach().numpy()


@contextmanager
def recorded(net, whole):
    """Inputs of the projections, the output, and what else the first call of each attention was given or chose."""
    seen, removed, chosen = {key: {} for key in whole}, [], []

    def hook(name, note, *, before=False):
        module = net.get_submodule(name.rstrip("."))
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        removed.append(register(note, with_kwargs=True))

    for key, one in whole.items():
        mine = seen[key]

        def keep(_, args, kwargs, *out, mine=mine, name):
            mine.setdefault(name, array(args[0] if name != "out" else out))

        def around(_, args, kwargs, out, mine=mine):
            # WavLM hands its weights to a function.
            mine.setdefault("out", array(out))
            masks = [x for x in (*args[1:2], kwargs.get("attention_mask")) if isinstance(x, torch.Tensor)]
            mine |= {"masks": [array(x) for x in masks]}
            mine |= {"selected": chosen[-1].numpy()} if chosen else {}
            mine.setdefault("x", array(args[0] if args else kwargs["hidden_states"]))

        # Of self-attention the input of all three; that of the others may have turned.
        names = [name for name in one.names if f"{one.path}{name}.weight" in net.state_dict()]
        hook(one.path + names[0 if one.layer.part == "cross" else -1], partial(keep, name="x"), before=True)
        hook(one.path + names[-1], partial(keep, name="states"), before=True)
        hook(one.path + one.out, partial(keep, name="out"))
        hook(one.path, around)
    for name, module in net.named_modules():
        if name.endswith(".indexer"):
            removed.append(module.register_forward_hook(lambda _, args, out: chosen.append(out)))
    try:
        yield seen
    finally:
        for handle in removed:
            handle.remove()


# Of models that have two stacks, where the layers do not say which is theirs.
PREFIXES = {"text": "language_model.", "vision": "vision_tower."}
PREFIXES_OF = {"phi4_multimodal": "layers."}
# What keeps a layer from being run as a whole.
REFUSED = {
    "gemma3n_text": "k and v are those of layer",
    "gemma4_text": "k and v are those of layer",
    "axk2": "a gate beside the queries",
    "diffllama": "attend twice",
    "jetmoe": "from the experts",
    "deepseek_v4": "RMS norm of q",
    "inkling_text": "short convolutions",
    "xlnet": "has one of self.query",
}


def read(layer, weights, prefix):
    try:
        return PublishedAttention(layer, weights, prefix=prefix)
    except rp.RelposError as error:
        if REFUSED.get(layer.model_type, "nothing") not in str(error):
            raise
        return None


# Heads of the width that most published models have half or all of.
WIDE = ("llama", "qwen3", "gemma2", "cohere2", "glm4", "phi3", "gpt_neox", "bert", "afmoe", "gpt_oss")
WIDER = [next(model for model in MODELS if model.model_type == name and not model.published) for name in WIDE]
WIDER = [
    replace(model, config={**model.config, "hidden_size": 256, "head_dim": 64, "rope_parameters": None})
    for model in WIDER
]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_as_people_hold_them(tmp_path, name):
    """A state dict in bfloat16, and the folder that transformers writes in several files: the same layer."""
    model = next(model for model in MODELS if model.model_type == name)
    with torch.no_grad():
        net = build(model)[0].bfloat16()
    state = net.state_dict()
    net.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    layer, x = rp.from_config(tmp_path, layer=2), np.random.default_rng(0).standard_normal((1, 9, 64))
    expected = layer.run(x, {key: w.float().numpy() for key, w in state.items()})
    for source in (state, tmp_path):
        np.testing.assert_array_equal(layer.run(x, source), expected)


@pytest.mark.parametrize("model", WIDER, ids=WIDE)
def test_whole_layers_of_64_channels(model):
    test_whole_layers_are_those_of_the_model(model)


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_whole_layers_are_those_of_the_model(model):
    with in_float64(), torch.no_grad():
        net, settings = build(model)
        net = net.double()
        if hasattr(net, "set_experts_implementation"):
            net.set_experts_implementation("eager")  # others have no float64
        stored = json.loads(settings.to_json_string(use_diff=False))
        stored["model_type"] = model.published or settings.model_type
        weights = {name: array(x) for name, x in net.state_dict().items()}
        layers = {(part, n): rp.from_config(stored, layer=n, part=part) for part, n in in_order(stored, model.parts)}
        via = f"{model.via}." if model.via and model.parts != ("",) else PREFIXES_OF.get(model.model_type, "")
        whole = {key: read(layer, weights, PREFIXES.get(key[0], via)) for key, layer in layers.items()}
        whole = {key: one for key, one in whole.items() if one is not None}
        with recorded(net, whole) as seen:
            given = inputs_of(model, settings)
            net.get_submodule(model.via)(**{n: x.double() if x.is_floating_point() else x for n, x in given.items()})
    assert whole or model.model_type in REFUSED
    for key, one in whole.items():
        layer, call = layers[key], seen[key]
        options = {name: value for name, value in model.given if name in (*layer.inputs, *layer.optional)}
        options |= {name: call[name] for name in layer.needs}
        x, y = call["x"], call["out"]
        if "grid" in options and "frames" in model.inputs:  # frames lie side by side
            x, y = (z.reshape(-1, int(np.prod(options["grid"])), z.shape[-1]) for z in (x, y))
        if x.ndim == 4:
            x, y = (z.reshape(len(z), -1, z.shape[-1]) for z in (x, y))
        if "shift" in str(layer.notes):
            mask = call["masks"][0][:, None] * (2 if model.model_type == "swinv2" else 1)  # which adds it twice
            options["mask"] = np.tile(mask, (len(x) // len(mask), 1, 1, 1))
        options |= {"context": call["states"]} if layer.part == "cross" else {}
        found = one(x, backend="numpy", **options)
        assert found.shape == y.shape
        assert np.abs(found - y).max() < 1e-12 * max(1, np.abs(y).max()), key
        own = {name.removeprefix(one.path): w for name, w in weights.items() if name.startswith(one.path)}
        if not any(name not in own for name in layer.weights) or not layer.weights:
            np.testing.assert_array_equal(layer.run(x, own, backend="numpy", **options), found)
