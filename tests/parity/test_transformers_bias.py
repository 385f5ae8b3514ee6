"""Hugging Face transformers: ALiBi of BLOOM, MPT and Falcon."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, added, modeling, sdpa

torch = pytest.importorskip("torch")
bloom, falcon, mpt = map(modeling, ("bloom", "falcon", "mpt"))

HEADS = [1, 2, 3, 8, 12, 16, 40, 71, 112]


@pytest.mark.parametrize("heads", HEADS)
def test_key_form_is_that_of_bloom(heads):
    """Its slopes are powers of a float32 number, whose rounding they multiply by up to H."""
    expected = bloom.build_alibi_tensor(torch.ones(1, 33, dtype=torch.long), heads, torch.float64).numpy()
    found = added(rp.ALiBi(form="key"), heads, 1, 33)
    np.testing.assert_allclose(found, expected, rtol=(heads + 2) * EPS32, atol=0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bias_max", [8, 4, 16])
def test_causal_form_is_that_of_mpt(heads, bias_max):
    """MPT has the row of the last query, and words the rule for slopes in another way."""
    expected = mpt.build_mpt_alibi_tensor(heads, 33, alibi_bias_max=bias_max).numpy()
    found = added(rp.ALiBi(form="causal", bias_max=bias_max), heads, 1, 33)
    np.testing.assert_allclose(found, expected, rtol=4 * EPS32, atol=0)
    if bias_max == 8:
        np.testing.assert_array_equal(added(rp.ALiBi(form="causal"), heads, 1, 33), found)


def test_mpt_of_transformers_computes_with_8_whatever_its_configuration_says():
    outputs = []
    for bias_max in (8, 2):
        torch.manual_seed(0)
        settings = {"d_model": 12, "n_heads": 3, "n_layers": 1, "vocab_size": 7, "max_seq_len": 16}
        settings["attn_config"] = {"alibi_bias_max": bias_max}
        model = mpt.MptModel(mpt.MptConfig(**settings)).eval()
        assert model.config.attn_config.alibi_bias_max == bias_max
        outputs.append(model(torch.arange(7)[None]).last_hidden_state)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("heads", HEADS)
def test_falcon_rounds_its_bias_to_bfloat16(heads):
    """Slopes and products are rounded, each by up to 2^-8."""
    expected = falcon.build_alibi_tensor(torch.ones(1, 33, dtype=torch.long), heads, torch.float64).numpy()
    found = added(rp.ALiBi(form="key"), heads, 1, 33)
    np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("form", ["symmetric", "causal", "key"])
def test_attention_of_bloom(form, agrees, rng):
    """All forms behind a causal mask, also where BLOOM counts positions from the end of the padding."""
    heads, length = 6, 19
    q, k, v = rng.standard_normal((3, 2, heads, length, 8))
    there = np.arange(length) >= np.array([[0], [5]])
    bias = bloom.build_alibi_tensor(torch.from_numpy(there.astype(np.int64)), heads, torch.float64)
    bias = bias.reshape(2, heads, 1, length).expand(2, heads, length, length).clone()
    seen = torch.from_numpy(np.tril(np.ones((length, length), bool)) & there[:, None, None])
    # Queries that are padding see nothing.
    expected = sdpa(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf)).nan_to_num()
    slopes = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float64)[:, 0, 1].numpy()
    agrees(expected, q, k, v, position=rp.ALiBi(slopes, form=form), causal=True, mask=there[:, None, None])
