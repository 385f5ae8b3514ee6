"""`rope_parameters` of configurations, read by transformers and by `rp.reference.rope_parameters`."""

import copy
import itertools

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, modeling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rope = pytest.importorskip("transformers.modeling_rope_utils")

# The peer's frequencies are float32, and go through a power and a few products.
RTOL = 16 * EPS32
LONG = {"original_max_position_embeddings": 64}
SHORT = [1 + 0.1 * n for n in range(32)]
SPREAD = [1.5**n for n in range(32)]

BASE = {"rope_theta": 5e5}
BETAS = {"beta_fast": 8.0, "beta_slow": 2.0}

CONFIGS = {
    "default": [{}, BASE, {"partial_rotary_factor": 0.5}, {"rope_type": None}],
    "linear": [{"factor": 1.0}, {"factor": 8}, {"factor": 2.5, "partial_rotary_factor": 0.25}, BASE | {"factor": 7.5}],
    "dynamic": [
        {"factor": 1.0},
        {"factor": 4.0},
        {"factor": 2.0, "partial_rotary_factor": 0.5},
        BASE | {"factor": 2.0},
    ],
    "yarn": [
        LONG | {"factor": factor} | more
        for factor in (1.0, 4.0, None)
        for more in (
            {},
            {"mscale": 0.707, "mscale_all_dim": 0.707},
            {"mscale": 1.0, "mscale_all_dim": 0},
            {"attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 1.5},
            {"beta_fast": 16, "beta_slow": 2, "truncate": False, "rope_theta": 150000},
            {"partial_rotary_factor": 0.5, "original_max_position_embeddings": None},
        )
    ]
    + [
        BASE | {"factor": factor, "original_max_position_embeddings": length, "truncate": truncate} | betas
        for factor, length in ((1.0, 4096), (4.0, 8192), (40.0, 4096), (16.0, 100))
        for truncate in (True, False)
        for betas in ({}, BETAS)
    ]
    + [
        BASE | {"factor": 40.0, "original_max_position_embeddings": 4096} | magnitudes
        for mscale, whole in ((0.707, 0.707), (1.0, 0.5), (0.3, 2.0))
        # Alone, neither has an effect there.
        for magnitudes in ({"mscale": mscale, "mscale_all_dim": whole}, {"mscale": mscale}, {"mscale_all_dim": whole})
    ],
    "longrope": [
        LONG | {"short_factor": SHORT, "long_factor": SPREAD} | more
        for more in (
            {},
            {"factor": 16.0},
            {"attention_factor": 1.19},
            {"original_max_position_embeddings": 256},
            {"partial_rotary_factor": 0.5, "short_factor": SHORT[:16], "long_factor": SPREAD[:16]},
        )
    ],
    "llama3": [
        LONG | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 20},
    ]
    + [
        BASE
        | {
            "factor": factor,
            "original_max_position_embeddings": length,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
        for factor, length in ((8.0, 8192), (32.0, 8192), (4.0, 512))
        for low, high in ((1.0, 4.0), (2.0, 16.0), (1.0, 1.0))
    ],
    "proportional": [{}, {"partial_rotary_factor": 0.25}]
    + [{"partial_rotary_factor": share, "factor": factor} for share in (0.25, 0.3, 0.5, 1.0) for factor in (1.0, 8.0)],
}


def without_nulls(parameters):
    return {key: value for key, value in parameters.items() if value is not None}


@pytest.mark.parametrize("length", [None, 64, 65, 256, 1000])
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [(kind, one) for kind, listed in CONFIGS.items() for one in listed],
    ids=lambda x: x if isinstance(x, str) else ",".join(f"{k}={v}" for k, v in x.items() if not isinstance(v, list)),
)
@pytest.mark.parametrize("old", [False, True])
def test_every_rule(kind, parameters, length, old):
    """As `rope_parameters`, and as `rope_scaling` with `rope_theta` beside it."""
    parameters = {"rope_type": kind} | copy.deepcopy(parameters)
    given = {("type" if key == "rope_type" else key) if old else key: x for key, x in parameters.items()}
    theta = given.pop("rope_theta", 10000.0) if old else None
    told = {"rope_theta": theta} if old else {}
    ours = rp.reference.rope_parameters(given, head_dim=64, length=length, max_position_embeddings=256, **told)
    # They want a factor that is there, if null, and every other key that is null away.
    factor = {"factor": parameters["factor"]} if "factor" in parameters else {}
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0} | without_nulls(parameters) | factor,
    )
    if kind == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        share = parameters.get("partial_rotary_factor", 1)
        config.head_dim = int(64 * share)
        theirs = module.compute_default_rope_parameters(config)
    else:
        theirs = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    assert ours[0].shape == tuple(theirs[0].shape)
    np.testing.assert_allclose(ours[0], theirs[0].numpy(), rtol=RTOL)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-15)


def test_no_rule_of_theirs_is_missing():
    assert set(rope.ROPE_INIT_FUNCTIONS) | {"default"} == set(CONFIGS)


def test_every_key_of_theirs_is_known():
    """A key that a release brings is read or refused, and never without a reason that is known here."""
    source = itertools.chain(*(set(one) for listed in CONFIGS.values() for one in listed))
    tested = set(source) | {"rope_type", "mrope_section"}
    assert set(rope.RopeParameters.__annotations__) <= tested


def test_alpha_of_hunyuan():
    peer = modeling("hunyuan_v1_dense")
    parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0, "beta_fast": 32}
    config = transformers.HunYuanDenseV1Config(head_dim=64, rope_parameters=dict(parameters))
    module = peer.HunYuanDenseV1RotaryEmbedding(config)
    ours = rp.reference.rope_parameters(parameters, head_dim=64)
    np.testing.assert_allclose(ours[0], module.inv_freq.numpy(), rtol=RTOL)
    assert ours[1] == module.attention_scaling


@pytest.mark.parametrize("length", [60, 70])
def test_magnitudes_of_phimoe(length):
    """Up to the original length; beyond, they keep the short factors but take the long magnitude."""
    peer = modeling("phimoe")
    parameters = LONG | {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": SPREAD,
        "short_mscale": 1.5,
        "long_mscale": 1.25,
    }
    config = transformers.PhimoeConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    config.head_dim = 64
    cos, _ = peer.PhimoeRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    omega, magnitude = rp.reference.rope_parameters(parameters, head_dim=64, length=length, max_position_embeddings=256)
    assert cos[0, 0, 0].item() == magnitude
    if length <= 64:
        found = np.cos(np.arange(length)[:, None] * omega) * magnitude
        np.testing.assert_allclose(found, cos[0, :, :32].numpy(), rtol=0, atol=length * RTOL)


def test_phi3_keeps_the_original_length_beside():
    peer = modeling("phi3")
    parameters = {"type": "longrope", "short_factor": SHORT, "long_factor": SPREAD}
    config = transformers.Phi3Config(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling=dict(parameters),
    )
    module = peer.Phi3RotaryEmbedding(config)
    ours = rp.reference.rope_parameters(
        parameters, head_dim=64, max_position_embeddings=256, original_max_position_embeddings=64
    )
    np.testing.assert_allclose(ours[0], module.inv_freq.numpy(), rtol=RTOL)
    np.testing.assert_allclose(ours[1], module.attention_scaling, rtol=1e-15)
