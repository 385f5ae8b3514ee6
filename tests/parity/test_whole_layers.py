"""`LayerAttention.run` on tiny random models of transformers in float64: the model's own attention modules."""

import json
from contextlib import contextmanager
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
    """What code of transformers computes in float32 whatever its input is: norms, softmax, angles."""
    with (
        patch.multiple(torch, float32=torch.float64, float=torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def array(x):
    return x.detach().numpy()


@contextmanager
def recorded(net, paths):
    """Input, other input and output of some modules: each a module and the one below it that projects its output."""
    seen, removed = {}, []
    for key, (path, out) in paths.items():
        module = net.get_submodule(path.rstrip("."))

        def entering(_, args, kwargs, key=key):
            states = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states", kwargs.get("cross_states")))
            given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            seen.setdefault(key, [given, states, None])

        def leaving(_, args, y, key=key):
            if seen[key][2] is None:
                seen[key][2] = y

        removed.append(module.register_forward_pre_hook(entering, with_kwargs=True))
        removed.append(module.get_submodule(out).register_forward_hook(leaving))
    try:
        yield seen
    finally:
        for handle in removed:
            handle.remove()


# What keeps a layer from being run as a whole.
TOLD = {}


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_whole_layers_are_those_of_the_model(model):
    with in_float64():
        net, settings = build(model)
        net = net.double()
        stored = json.loads(settings.to_json_string(use_diff=False)) | {
            "model_type": model.published or settings.model_type
        }
        weights = {name: array(x) for name, x in net.state_dict().items()}
        order = in_order(stored, model.parts)
        layers = {(part, n): rp.from_config(stored, layer=n, part=part) for part, n in order}
        whole = {key: PublishedAttention(layer, weights) for key, layer in layers.items()}
        with recorded(net, {key: (one.path, one.out) for key, one in whole.items()}) as seen, torch.no_grad():
            inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs_of(model, settings).items()}
            net.get_submodule(model.via)(**inputs)
    for (part, number), one in whole.items():
        x, states, y = (None if x is None else array(x) for x in seen[part, number])
        layer = layers[part, number]
        more = {name: value for name, value in model.given if name in (*layer.inputs, *layer.optional)}
        found = one(x, context=states if part == "cross" else None, backend="numpy", **more)
        assert np.abs(found - y).max() < 1e-12 * max(1, np.abs(y).max()), (part, number)
        own = {name.removeprefix(one.path): w for name, w in weights.items() if name.startswith(one.path)}
        assert own
