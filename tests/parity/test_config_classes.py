"""What `relpos_np` keeps of transformers' configuration classes, and what the tool of mutations finds."""

import json

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.parity import config_classes, config_mutations  # noqa: E402
from tests.parity.config_models import MODELS  # noqa: E402


def test_the_record_is_that_of_the_installed_classes():
    """A release shows as a difference of the file that `python -m tests.parity.config_classes` writes."""
    recorded = json.loads(config_classes.RECORD.read_text(encoding="utf-8"))
    if recorded["transformers"] != transformers.__version__:
        pytest.skip(f"recorded with {recorded['transformers']}")
    assert json.loads(json.dumps(config_classes.record())) == recorded


def test_every_type_was_changed_key_by_key():
    """The record of the last run, which was of every type, found nothing."""
    recorded = json.loads(config_mutations.RECORD.read_text(encoding="utf-8"))
    assert recorded["differences"] == []
    assert recorded["changes"].keys() == {model.model_type for model in config_mutations.MUTATED}
    assert min(recorded["changes"].values()) > 100


def test_no_change_of_a_key_is_passed_over():
    """Of one model: `python -m tests.parity.config_mutations` takes all."""
    (model,) = (model for model in MODELS if model.model_type == "afmoe")
    with torch.no_grad():
        assert list(config_mutations.differences(model)) == []


def test_the_tool_finds_a_key_that_is_passed_over(monkeypatch):
    """A soft cap that is not read."""
    model = next(model for model in MODELS if model.model_type == "gemma2")
    read = rp.from_config
    monkeypatch.setattr(rp, "from_config", lambda config, **o: read({**config, "attn_logit_softcapping": 2.0}, **o))
    monkeypatch.setattr(config_mutations, "cases", lambda _: [("attn_logit_softcapping", 0.5), ("rms_norm_eps", 1e-5)])
    with torch.no_grad():
        found = list(config_mutations.differences(model))
    assert [change[:2] for change in found] == [(("attn_logit_softcapping", 0.5), "passed")]
