"""Models that ask for options of a call, tiny: their own eager attention's answers and gradients."""

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore")

from relpos_np.interop.transformers import asked, interface, register, used  # noqa: E402
from tests.parity import sweep, tiny  # noqa: E402
from tests.parity.small import small  # noqa: E402

# What each of them must have handed over.
MODELS = {
    "gpt_oss": {"sinks"},
    "openai_privacy_filter": {"sinks"},
    "mimo_v2_flash": {"sinks"},
    "granite_swa": {"sinks"},
    "granitemoe_swa": {"sinks"},
    "flint": {"sinks"},
    "deepseek_v4": {"sinks"},
    "inkling2_text": {"sinks"},
    "hy_v4": {"sinks", "selected"},
    "deepseek_v32": {"selected"},
    "glm_moe_dsa": {"selected"},
    "axk2": {"selected"},
    "mistral_large4_text": {"selected"},
    "dots3_note_text": {"selected"},
    "gemma2": {"softcap"},
    "vaultgemma": {"softcap"},
    "t5gemma": {"softcap"},
    "videoprism_text_model": {"softcap"},
    "gemma3_text": set(),
    "llama4_text": set(),
    "ministral3": set(),
    "modernbert": set(),
    "splinter": set(),
    "pegasus_x": set(),
}


def handed(calls):
    """The options of all calls that were made, and of one of them the values."""
    return {name: x for one in calls for name, x in one.options.items() if x is not None}


def answers(model, inputs):
    """What the model answers, and the gradients of all its parameters."""
    torch.manual_seed(0)
    model.zero_grad()
    with torch.enable_grad():
        out = sweep.tensors(model(**inputs))
        sum((x * torch.linspace(-1, 1, x.shape[-1])).sum() for x in out if x.requires_grad).backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return [x.detach() for x in out], grads


@pytest.mark.parametrize("name", MODELS)
def test_answers_and_gradients(name, calls):
    """Within 1e-5 of the largest number; caps are set to where they bend scores."""
    model, inputs, _ = sweep.built(tiny.model_types()[name])
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 1.0
    expected, expected_grads = answers(model, inputs)
    register(model)
    assert used(model).here
    found, grads = answers(model, inputs)
    options = handed(calls)
    assert options.keys() >= MODELS[name]
    assert sweep.difference(found, expected) <= sweep.TOLERANCE
    assert grads.keys() == expected_grads.keys()
    for key, own in expected_grads.items():
        torch.testing.assert_close(grads[key], own, rtol=0, atol=1e-5 * max(1.0, float(own.abs().max())), msg=key)
    sinks = [x for key, x in grads.items() if "sink" in key]
    assert bool(sinks) == ("sinks" in MODELS[name])
    assert all(x.abs().max() > 1e-4 for x in sinks)
    if "selected" in MODELS[name]:
        assert options["selected"].shape[-1] < tiny.LENGTH


def packed_llama():
    model = small("Llama", use_cache=False)
    tiny.randomise(model)
    bounds = torch.tensor([0, 7, 20, 21, 40], dtype=torch.int32)
    position_ids = torch.cat([torch.arange(n) for n in bounds.diff()])[None]
    return model, bounds, {"input_ids": torch.randint(1, 50, (1, 40)), "position_ids": position_ids}


def test_packed_sequences(calls):
    """As by eager attention, whose mask comes from positions that begin again."""
    model, bounds, inputs = packed_llama()
    expected, _ = answers(model, inputs)
    register(model)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 19, "max_length_k": 19}
    for given in (inputs | packed, {"input_ids": inputs["input_ids"], **packed}):
        calls.clear()
        found, _ = answers(model, given)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert [x.tolist() for x in handed(calls)["segments"]] == [bounds.tolist()] * 2
    for missing in ("cu_seq_lens_q", "cu_seq_lens_k"):
        with pytest.raises(rp.RelposValueError, match=f"^{missing}: LlamaAttention asks for cu_seq_lens_q, cu_seq"):
            model(**inputs, **{name: x for name, x in packed.items() if name != missing})
    wrong = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds[:-1])
    with pytest.raises(rp.RelposValueError, match="segments: expected cumulative lengths from 0 to the 40 queries"):
        model(**inputs, **wrong)


def test_packed_images():
    """A vision model's sequences, which see all of their own: as one call for each."""
    module, q = torch.nn.Module(), torch.randn(1, 4, 12, 8)
    k, v = torch.randn(2, 1, 4, 18, 8)
    queries, keys = torch.tensor([0, 5, 12]), torch.tensor([0, 8, 18])
    given = {"is_causal": False, "scaling": 0.3}
    found, _ = interface.forward(module, q, k, v, None, **given, cu_seq_lens_q=queries, cu_seq_lens_k=keys)
    parts = zip(q.split([5, 7], 2), k.split([8, 10], 2), v.split([8, 10], 2), strict=True)
    expected = torch.cat([interface.forward(module, *x, None, **given)[0] for x in parts], 1)
    assert torch.equal(found, expected)


def test_what_nobody_defines_together_is_refused():
    module, q = torch.nn.Module(), torch.randn(1, 4, 5, 8)
    module.is_causal = False
    bounds = torch.tensor([0, 5])
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for mask, options, message in (
        (None, {"softcap": 2.0, "position_bias": torch.zeros(1, 4, 5, 5)}, "^softcap: together with position_bias"),
        (None, {"sinks": torch.zeros(4)}, r"^sinks: expected shape \(B, H, L_q, 1\), found \(4,\)"),
        (None, {"sinks": torch.zeros(1, 4, 5, 1), "s_aux": torch.zeros(4)}, "asks for it and for s"),
        (
            interface.Mask((1, 1, 5, 5), 3),
            packed,
            "^cu_seq_lens_q: packed sequences of 5 queries that begin at position 3",
        ),
        (None, {"softcap": torch.ones(2)}, "^softcap: expected a real number"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            interface.forward(module, q, q, q, mask, **options)


def test_each_argument_belongs_to_an_option_of_the_call():
    for argument, option in asked.OPTIONS.items():
        assert argument in option.arguments
        assert option.name in rp.attention.options
