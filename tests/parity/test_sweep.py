"""Model types of transformers, tiny: equal to their own attention, or refused by name."""

import json
import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")

from relpos_np.interop.transformers import asked  # noqa: E402
from tests.parity import sweep, tiny  # noqa: E402

EQUAL = ("llama", "bert", "gpt2", "vit", "t5", "whisper", "clip", "splinter", "pegasus_x", "nllb-moe", "qwen2_moe")
EQUAL += ("deepseek_v32", "hy_v4", "inkling2_text", "gpt_oss", "mimo_v2_flash", "deepseek_v4", "gemma2", "t5gemma2")
REFUSED = {"bigbird_pegasus": "mask", "git": "mask", "bridgetower": "is_causal", "blt_global_transformer": "is_causal"}
# Verdicts of a wrong or missing answer.
WRONG = {"differs", "failed", "no call"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
def test_some_model_types(name):
    ((_, row, _),) = sweep.sweep([name])
    if name in REFUSED:
        assert row["verdict"] == "refused", row
        assert row["why"].startswith(f"{REFUSED[name]}: ")
    else:
        assert row["verdict"] == "equal", row
        assert row["calls"] >= row["layers"] > 0 or name == "clip"
        assert max(row["difference"].values()) <= sweep.TOLERANCE


def test_the_record_holds_no_wrong_answer():
    rows = json.loads(sweep.RECORD.read_text(encoding="utf-8"))["types"]
    verdicts = {row["verdict"] for row in rows.values()}
    assert not verdicts & WRONG
    known = asked.OPTIONS.keys() | asked.REFUSED.keys() | {"mask", "is_causal", "num_key_value_groups", "query"}
    for name, row in rows.items():
        if row["verdict"] == "refused":
            assert re.match(r"[\w.]+", row["why"])[0] in known, name


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_model_type():
    """Five minutes of one processor: none may differ, and what was equal when it was recorded still is."""
    recorded = json.loads(sweep.RECORD.read_text(encoding="utf-8"))
    found = {name: row for name, row, _ in sweep.sweep()}
    assert len(found) == len(tiny.model_types()) > 500
    assert {name: row for name, row in found.items() if row["verdict"] in WRONG} == {}
    if recorded["transformers"] == transformers.__version__:
        equal = [name for name, row in recorded["types"].items() if row["verdict"] == "equal"]
        # One that took nearly too long to build may take too long elsewhere.
        assert {found[name]["verdict"] for name in equal if "more than" not in found[name].get("why", "")} == {"equal"}


HEADS = {
    "llama": "LlamaForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "bert": "BertForMaskedLM",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEADS)
def test_heads_losses_and_generation_ask_for_nothing_unknown(name, monkeypatch):
    monkeypatch.setattr(tiny, "class_of", lambda _: getattr(transformers, HEADS[name]))
    torch.manual_seed(0)
    model = tiny.build(tiny.model_types()[name], "tiny, as many heads of keys")
    model.config.use_cache, model.config.decoder_start_token_id = True, 0
    if model.can_generate():
        model.generation_config.decoder_start_token_id = 0
    ids = torch.randint(tiny.FIRST_TOKEN, tiny.VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    # What a query of padding answers means nothing: nor does the token after it.
    labels = ids.clone()
    labels[0, :5] = -100
    options = {"labels": labels, "num_items_in_batch": torch.tensor(24), "output_hidden_states": True}

    def answers():
        out = model(ids, attention_mask=mask, **options)
        found = [out.loss]
        if model.can_generate():
            kept = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            made = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **kept)
            found += list(made.logits)
        return found

    expected = answers()
    assert len(expected) == (1 if name == "bert" else 5)
    sweep.register(model)
    for a, b in zip(answers(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_gap_is_not_explained_away():
    """An answer that is wrong is neither the model's own error nor its other implementation's."""
    model, inputs, _ = sweep.built(tiny.model_types()["llama"])
    expected = sweep.run(model, inputs)
    wrong = [x + 0.01 for x in expected]
    assert sweep.explained(model, inputs, wrong, None, 0.01) is None
