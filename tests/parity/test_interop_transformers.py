"""Models of transformers with random weights: run on this library, they answer as in their own eager attention."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from relpos_np.interop.transformers import interface, patched, register  # noqa: E402
from tests.parity.small import generating, small  # noqa: E402


def build(name, dtype):
    return small(name).to(dtype)


def test_a_patched_t5_holds_no_bias_per_pair(calls):
    model = build("T5", torch.float32).encoder
    with patched(model):
        model(torch.randint(1, 50, (1, 40)))
    found = [(one.options["position"][0].table.shape, one.options.get("mask")) for one in calls]
    assert found == [((32, 4), None)] * 2


@pytest.mark.parametrize("name", ["T5", "Bloom"])
def test_generation_with_a_cache(name):
    """Every token alone, from keys that are kept: queries begin where the cache ends."""
    cls = {"T5": transformers.T5ForConditionalGeneration, "Bloom": transformers.BloomForCausalLM}[name]
    model, options = generating(cls)
    ids = torch.randint(1, 50, (2, 9))
    options |= {"attention_mask": torch.ones_like(ids), "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    with patched(model):
        found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", ["interface", "patch"])
def test_gradients_of_a_t5_encoder(run):
    model = build("T5", torch.float64).encoder
    ids = torch.randint(1, 50, (2, 17))
    grads = []

    def collect():
        with torch.enable_grad():
            model.zero_grad()
            model(ids).last_hidden_state.square().sum().backward()
        grads.append({name: x.grad.clone() for name, x in model.named_parameters()})

    collect()
    if run == "patch":
        with patched(model):
            collect()
    else:
        model.set_attn_implementation(register())
        collect()
    assert any("relative_attention_bias" in name for name in grads[0])
    for name, expected in grads[0].items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-9, atol=1e-10, msg=name)


def test_dropout_is_for_training_alone():
    """Whoever calls hands over the rate and the module: transformers' own functions ask the module too."""
    module = build("GPT2", torch.float32).h[0].attn
    q, k, v = torch.randn(3, 1, 4, 9, 16)
    mask = torch.zeros(1, 1, 9, 9)

    def call(rate):
        return interface.forward(module, q, k, v, mask, dropout=rate)[0]

    kept = call(0.0)
    assert torch.equal(call(0.5), kept)
    module.train()
    assert not torch.equal(call(0.5), kept)


def test_what_is_not_there_is_refused():
    model = build("Gemma2", torch.float32)
    model.set_attn_implementation(register())
    with pytest.raises(rp.RelposValueError, match=r"block_indices: Gemma2Attention asks for it"):
        model(torch.ones(1, 5, dtype=torch.int64), block_indices=torch.zeros(1))
    with pytest.raises(rp.RelposValueError, match="Gemma2Model has none of BloomAttention"), patched(model):
        pass
    with pytest.raises(rp.RelposTypeError, match="expected a model of transformers"), patched(np.zeros(3)):
        pass
    model = build("MPNet", torch.float32)
    with pytest.raises(rp.RelposValueError, match="output_attentions"), patched(model):
        model(torch.ones(1, 5, dtype=torch.int64), output_attentions=True)
    assert "forward" not in vars(model.encoder.layer[0].attention.attn)


def test_another_version_of_transformers_is_refused(monkeypatch):
    from transformers.models.mpnet import modeling_mpnet

    model = build("MPNet", torch.float32)
    monkeypatch.setattr(modeling_mpnet.MPNetSelfAttention, "forward", lambda self, hidden_states: hidden_states)
    message = r"MPNetSelfAttention.forward takes self, hidden_states; this"
    with pytest.raises(rp.RelposImportError, match=message), patched(model):
        pass
