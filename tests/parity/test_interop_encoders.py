"""Whole encoders without padding: the padded model's results at tokens, of layers that never see padding."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")

from relpos_np.interop.transformers import packing, unpadded  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 60, "pad_token_id": 1}
DEBERTA = {
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "relative_attention": True,
    "share_att_key": True,
}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
CONFIGS = {
    "bert": hf.BertConfig(**SMALL),
    "roberta": hf.RobertaConfig(**SMALL),
    "xlm-roberta": hf.XLMRobertaConfig(**SMALL),
    "electra": hf.ElectraConfig(**SMALL, embedding_size=16),
    "albert": hf.AlbertConfig(**SMALL, embedding_size=16),
    "mpnet": hf.MPNetConfig(**SMALL),
    "distilbert": hf.DistilBertConfig(
        dim=32, n_layers=2, n_heads=4, hidden_dim=40, vocab_size=60, max_position_embeddings=64, pad_token_id=1
    ),
    "modernbert": hf.ModernBertConfig(**SMALL, **SPECIAL, local_attention=8, global_attn_every_n_layers=2),
    "deberta v3": hf.DebertaV2Config(**SMALL, **DEBERTA),
    "deberta, c2p alone": hf.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["c2p"]),
    "deberta, no positions": hf.DebertaV2Config(**SMALL, relative_attention=False),
    "t5": hf.T5Config(**T5),
    "mt5": hf.MT5Config(**T5),
    "umt5": hf.UMT5Config(**T5),
}
ENCODERS = {"t5": hf.T5EncoderModel, "mt5": hf.MT5EncoderModel, "umt5": hf.UMT5EncoderModel}
LENGTHS = torch.tensor([30, 7, 1, 18])
EPS = float(np.finfo(np.float32).eps)


def made(name):
    torch.manual_seed(0)
    config = CONFIGS[name]
    return (ENCODERS[name](config) if name in ENCODERS else hf.AutoModel.from_config(config)).eval()


@pytest.fixture
def batch():
    """Tokens padded behind, and which are real."""
    torch.manual_seed(1)
    mask = (torch.arange(30) < LENGTHS[:, None]).long()
    return {"input_ids": torch.randint(5, 60, (4, 30)) * mask + (1 - mask), "attention_mask": mask}


def assert_same_tokens(found, expected, mask):
    size = float(expected.detach().abs().max())
    assert (found - expected).abs()[mask.bool()].max() < 64 * EPS * size
    assert not found[~mask.bool()].any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_tokens_are_those_of_the_padded_model(name, side, batch):
    model = made(name)
    if side == "left":
        batch = {key: x.flip(1) for key, x in batch.items()}
    expected = model(**batch, output_hidden_states=True)
    with unpadded(model) as same:
        assert same is model
        found = model(**batch, output_hidden_states=True)
    assert_same_tokens(found.last_hidden_state, expected.last_hidden_state, batch["attention_mask"])
    for x, y in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert x.shape == y.shape
        real = batch["attention_mask"].bool()
        assert (x - y).abs()[real].max() < 64 * EPS * float(y.abs().max())
    if side == "right" and getattr(expected, "pooler_output", None) is not None:
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=0, atol=64 * EPS)
    assert torch.equal(model(**batch).last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_layers_never_see_padding(name, batch):
    """All products with weights are of tokens alone, and no mask of pairs is made."""
    model, seen = made(name), set()
    hooked = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x.out_features in (40, 80)]
    assert hooked
    for linear in hooked:
        linear.register_forward_hook(lambda _, given, __: seen.add(tuple(given[0].shape[:-1])))
    with unpadded(model):
        model(**batch)
    assert seen == {(1, int(LENGTHS.sum()))}


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "deberta v3", "t5"])
@torch.enable_grad()
def test_gradients(name, batch):
    model = made(name)
    weights = torch.randn(4, 30, 32) * batch["attention_mask"][..., None]
    (model(**batch).last_hidden_state * weights).sum().backward()
    expected = {key: x.grad for key, x in model.named_parameters()}
    model.zero_grad()
    with unpadded(model):
        (model(**batch).last_hidden_state * weights).sum().backward()
    for key, x in model.named_parameters():
        if expected[key] is not None:
            size = max(float(expected[key].abs().max()), 1.0)
            torch.testing.assert_close(x.grad, expected[key], rtol=0, atol=256 * EPS * size, msg=key)


@torch.no_grad()
def test_heads_and_decoders_see_the_padded_batch(batch):
    torch.manual_seed(0)
    head = hf.BertForSequenceClassification(CONFIGS["bert"]).eval()
    generating = hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)).eval()
    for model, more in ((head, {}), (generating, {"decoder_input_ids": torch.randint(5, 60, (4, 5))})):
        expected = model(**batch, **more).logits
        with unpadded(model):
            found = model(**batch, **more).logits
        size = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * EPS * size)


@torch.no_grad()
def test_other_ways_to_call(batch):
    """Embeddings for tokens, tuples for records, no mask, an empty sequence, positions of one's own."""
    model, mask = made("modernbert"), batch["attention_mask"]
    embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]), "attention_mask": mask}
    at = (torch.arange(30) + 3).expand(4, 30)
    expected = model(**embedded, position_ids=at).last_hidden_state
    with unpadded(model):
        assert_same_tokens(model(**embedded, position_ids=at).last_hidden_state, expected, mask)
    for name in ("bert", "mpnet", "deberta v3", "t5"):
        model = made(name)
        expected = model(**batch).last_hidden_state
        plain = model(input_ids=batch["input_ids"][:1]).last_hidden_state
        with unpadded(model):
            found = model(**batch, return_dict=False)
            assert_same_tokens(found[0], expected, mask)
            assert_same_tokens(model(input_ids=batch["input_ids"][:1]).last_hidden_state, plain, mask[:1])
            empty = model(input_ids=batch["input_ids"], attention_mask=mask * (LENGTHS != 7)[:, None])
        assert not empty.last_hidden_state[1].any()
        assert_same_tokens(empty.last_hidden_state[[0, 2, 3]], expected[[0, 2, 3]], mask[[0, 2, 3]])


def test_what_is_refused(batch):
    gpt2 = hf.GPT2Model(hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60))
    convolution = hf.DebertaV2Model(hf.DebertaV2Config(**SMALL, **DEBERTA, conv_kernel_size=3))
    decoder = hf.BertModel(hf.BertConfig(**SMALL, is_decoder=True))
    for model, message in (
        (gpt2, "model: GPT2Model has no encoder whose tokens are known to meet in attention alone: none of T5Stack"),
        (convolution, "model: DebertaV2Model has DebertaV2Encoder.conv, a convolution over neighbouring tokens"),
        (decoder, "model: BertModel has no encoder"),
    ):
        with pytest.raises(rp.RelposValueError, match=message), unpadded(model):
            pass
    with (
        pytest.raises(rp.RelposTypeError, match="model: expected a model of transformers"),
        unpadded(torch.nn.Linear(1, 1)),
    ):
        pass
    model, ids, mask = made("bert"), batch["input_ids"], batch["attention_mask"]
    holes = mask.clone()
    holes[0, 4] = 0
    with unpadded(model):
        for given, message in (
            ({"attention_mask": holes}, "attention_mask: expected the tokens of each sequence side by side"),
            ({"attention_mask": mask[:, None]}, r"attention_mask: expected shape \(4, 30\), found \(4, 1, 30\)"),
            (
                {"attention_mask": mask, "encoder_hidden_states": torch.zeros(4, 3, 32)},
                "encoder_hidden_states: BertModel",
            ),
            ({"attention_mask": mask, "output_attentions": True}, "output_attentions"),
        ):
            with pytest.raises(rp.RelposValueError, match=message):
                model(input_ids=ids, **given)
        with pytest.raises(rp.RelposValueError, match="input_ids: expected input_ids or inputs_embeds"):
            model(attention_mask=mask)
    assert packing.of_model() is None


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta v3", "t5"])
@torch.enable_grad()
def test_layers_that_run_again_on_the_way_back(name, batch):
    """Inside of the block they see the same sequences; outside they say that they cannot."""
    model = made(name)
    with unpadded(model):
        model(**batch).last_hidden_state.square().sum().backward()
        expected = {key: x.grad for key, x in model.named_parameters()}
        model.zero_grad()
        model.activation_checkpointing_enable()
        model.train()
        for x in model.modules():
            if isinstance(x, torch.nn.Dropout):
                x.p = 0.0
            for rate in ("attention_dropout", "dropout"):
                if isinstance(getattr(x, rate, None), float):
                    setattr(x, rate, 0.0)
        model(**batch).last_hidden_state.square().sum().backward()
        for key, x in model.named_parameters():
            if expected[key] is not None:
                torch.testing.assert_close(x.grad, expected[key], rtol=0, atol=0, msg=key)
        late = model(**batch).last_hidden_state.square().sum()
    # T5's own attention meets its positions before its mask.
    error, message = (
        (TypeError, "Positions") if name == "t5" else (rp.RelposValueError, "mask: layers whose tokens are")
    )
    with pytest.raises(error, match=message):
        late.backward()
