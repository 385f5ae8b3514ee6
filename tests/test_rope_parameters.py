"""Rotary parameters as configurations spell them: every key is read, or refused by its name."""

import json

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import assert_error_names

F = rp.reference
BASE = 5e5
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1.0, 2.0, 8.0, 32.0]}
GIVEN = {"short_factors": FACTORS["short_factor"], "long_factors": FACTORS["long_factor"]}


def read(text, **beside):
    """From JSON, as configurations are."""
    return F.rope_parameters(json.loads(text), **({"head_dim": 8} | beside))


# What stands in a configuration and beside it, and the same said by hand.
READ = {
    "nothing": ("null", {}, lambda: (F.rotary_frequencies(8), 1.0)),
    "default": ('{"rope_type": "default", "rope_theta": 5e5}', {}, lambda: (F.rotary_frequencies(8, base=BASE), 1.0)),
    "theta beside": ("{}", {"rope_theta": BASE}, lambda: (F.rotary_frequencies(8, base=BASE), 1.0)),
    "theta inside goes first": (
        '{"rope_theta": 5e5}',
        {"rope_theta": 10.0},
        lambda: (F.rotary_frequencies(8, base=BASE), 1.0),
    ),
    "a part": ('{"partial_rotary_factor": 0.5}', {}, lambda: (F.rotary_frequencies(4), 1.0)),
    "a part beside": ("{}", {"partial_rotary_factor": 0.25}, lambda: (F.rotary_frequencies(2), 1.0)),
    "a part is rounded down": (
        '{"partial_rotary_factor": 0.3}',
        {"head_dim": 14},
        lambda: (F.rotary_frequencies(4), 1.0),
    ),
    "linear": ('{"type": "linear", "factor": 4}', {}, lambda: (F.linear_frequencies(8, factor=4.0), 1.0)),
    "dynamic": (
        '{"type": "dynamic", "factor": 2.0}',
        {"max_position_embeddings": 64, "length": 100},
        lambda: (F.ntk_frequencies(8, length=100, trained_length=64, factor=2.0), 1.0),
    ),
    "dynamic, any length": (
        '{"type": "dynamic", "factor": 2.0}',
        {"max_position_embeddings": 64},
        lambda: (F.rotary_frequencies(8), 1.0),
    ),
    "alpha": (
        '{"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}',
        {},
        lambda: (F.rotary_frequencies(8, base=10000.0 * 1000.0 ** (4 / 3)), 1.0),
    ),
    "yarn": (
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}',
        {"max_position_embeddings": 100},
        lambda: F.yarn_frequencies(8, factor=4.0, trained_length=64),
    ),
    "yarn, everything": (
        """{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2,
        "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": false, "rope_theta": 5e5}""",
        {},
        lambda: F.yarn_frequencies(
            8,
            factor=4.0,
            trained_length=64,
            base=BASE,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all=0.5,
            truncate=False,
        ),
    ),
    "yarn, one magnitude alone": (
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7}',
        {},
        lambda: F.yarn_frequencies(8, factor=4.0, trained_length=64),
    ),
    "yarn, attention factor": (
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.5}',
        {},
        lambda: (F.yarn_frequencies(8, factor=4.0, trained_length=64)[0], 0.5),
    ),
    "yarn, factor from lengths": (
        '{"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 64}',
        {"max_position_embeddings": 256},
        lambda: F.yarn_frequencies(8, factor=4.0, trained_length=64),
    ),
    "yarn, what says how it was trained": (
        '{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": true}',
        {},
        lambda: F.yarn_frequencies(8, factor=4.0, trained_length=64),
    ),
    "yarn, length beside": (
        '{"rope_type": "yarn", "factor": 4.0}',
        {"max_position_embeddings": 64},
        lambda: F.yarn_frequencies(8, factor=4.0, trained_length=64),
    ),
    "llama3": (
        """{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64}""",
        {},
        lambda: (F.llama3_frequencies(8, factor=8.0, trained_length=64, low_factor=1.5, high_factor=3.0), 1.0),
    ),
    "proportional": (
        '{"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}',
        {},
        lambda: (F.proportional_frequencies(8, share=0.5, factor=2.0), 1.0),
    ),
    "sections": (
        '{"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}',
        {},
        lambda: (F.axis_frequencies(F.rotary_frequencies(8), np.array([0, 0, 1, 2])), 1.0),
    ),
    "sections in turn": (
        '{"mrope_interleaved": true, "mrope_section": [2, 1, 1]}',
        {},
        lambda: (F.axis_frequencies(F.rotary_frequencies(8), np.array([0, 1, 2, 0])), 1.0),
    ),
    "sections in turn, too many": (
        '{"mrope_interleaved": true, "mrope_section": [1, 4, 1]}',
        {"head_dim": 10},
        lambda: (F.axis_frequencies(F.rotary_frequencies(10), np.array([0, 1, 2, 0, 1])), 1.0),
    ),
    "sections in turn, said beside": (
        '{"mrope_section": [2, 1, 1]}',
        {"order": "cyclic"},
        lambda: (F.axis_frequencies(F.rotary_frequencies(8), np.array([0, 1, 2, 0])), 1.0),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_configurations_are_read(name):
    text, beside, by_hand = READ[name]
    omega, magnitude = read(text, **beside)
    expected, factor = by_hand()
    assert omega.dtype == np.float64
    np.testing.assert_array_equal(omega, expected)
    assert magnitude == factor


@pytest.mark.parametrize("length", [None, 1, 64, 65, 300])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_read(length, kind):
    inside = FACTORS | {"type": kind, "original_max_position_embeddings": 64}
    by_hand = F.longrope_frequencies(8, length=length or 1, trained_length=64, factor=4.0, **GIVEN)
    for given, beside in (
        (inside, {"max_position_embeddings": 256}),
        (inside | {"factor": 4.0}, {"max_position_embeddings": 100}),
        # The one beside goes first.
        (inside | {"original_max_position_embeddings": 9, "factor": 4.0}, {"original_max_position_embeddings": 64}),
    ):
        found = read(json.dumps(given), length=length, **beside)
        np.testing.assert_array_equal(found[0], by_hand[0])
        assert found[1] == by_hand[1]
    assert read(json.dumps(inside | {"attention_factor": 1.25}), length=length)[1] == 1.25
    scales = {"short_mscale": 1.1, "long_mscale": 1.2}
    assert read(json.dumps(inside | scales), length=length)[1] == (1.2 if (length or 1) > 64 else 1.1)


def test_what_is_read_attends(rng):
    q, k, v = rng.standard_normal((3, 2, 6, 8))
    omega, magnitude = read('{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}')
    found = rp.attention(q, k, v, position=rp.Rotary(frequencies=omega, magnitude=magnitude), backend="numpy")
    turned = [rp.reference.rotate_pairs(x, rp.reference.rotary_matrices(np.arange(6), omega)) for x in (q, k)]
    expected = rp.attention(*turned, v, scale=magnitude**2 / 8**0.5, backend="numpy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


REFUSED = {
    "unknown": ('{"rope_type": "yarn", "factor": 4, "beta": 1}', {}, ["beta", "yarn", "beta_fast"]),
    "unknown rule": ('{"rope_type": "ntk"}', {}, ["rope_type", "'ntk'", "'dynamic'"]),
    "unknown old rule": ('{"type": "axial"}', {}, ["type", "'axial'"]),
    "not a name": ('{"type": 3}', {}, ["type", "3"]),
    "hidden rule": ('{"rope_type": "ntk_alpha"}', {}, ["rope_type", "'ntk_alpha'"]),
    "contradiction": ('{"rope_type": "linear", "type": "yarn", "factor": 4}', {}, ["rope_type", "'linear'", "'yarn'"]),
    "no effect": ('{"rope_type": "default", "factor": 4}', {}, ["factor", "4", "'default'"]),
    "of another rule": ('{"type": "linear", "factor": 4, "low_freq_factor": 1}', {}, ["low_freq_factor", "'linear'"]),
    "elsewhere": ('{"llama_4_scaling_beta": 0.1}', {}, ["llama_4_scaling_beta", "query_scale"]),
    "nested": ('{"full_attention": {"rope_type": "default"}}', {}, ["full_attention", "parameters['full_attention']"]),
    "list": ("[1]", {}, ["parameters", "list"]),
    "linear: missing": ('{"type": "linear"}', {}, ["'factor'", "type"]),
    "linear: null": ('{"type": "linear", "factor": null}', {}, ["'factor'"]),
    "linear: text": ('{"type": "linear", "factor": "4"}', {}, ["factor", "'4'"]),
    "dynamic: length": ('{"type": "dynamic", "factor": 4}', {}, ["max_position_embeddings", "'dynamic'"]),
    "yarn: length": ('{"type": "yarn", "factor": 4}', {}, ["original_max_position_embeddings"]),
    "yarn: factor": ('{"type": "yarn", "original_max_position_embeddings": 9}', {}, ["factor"]),
    "yarn: truncate": (
        '{"type": "yarn", "factor": 4, "original_max_position_embeddings": 9, "truncate": 1}',
        {},
        ["truncate", "1"],
    ),
    "llama3: missing": (
        '{"type": "llama3", "factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 9}',
        {},
        ["'low_freq_factor'"],
    ),
    "longrope: missing": (
        '{"type": "longrope", "short_factor": [1, 1, 1, 1], "factor": 4, "original_max_position_embeddings": 9}',
        {},
        ["long_factor", "short_factor"],
    ),
    "longrope: one magnitude": (
        json.dumps(FACTORS | {"type": "longrope", "short_mscale": 1.0, "original_max_position_embeddings": 9}),
        {},
        ["short_mscale", "long_mscale"],
    ),
    "longrope: text": (
        json.dumps(FACTORS | {"type": "longrope", "short_factor": ["1"], "original_max_position_embeddings": 9}),
        {"max_position_embeddings": 90},
        ["short_factors", "'1'"],
    ),
    "theta": ('{"rope_theta": -1}', {}, ["rope_theta", "-1"]),
    "part: large": ('{"partial_rotary_factor": 2}', {}, ["partial_rotary_factor", "2"]),
    "part: odd": ('{"partial_rotary_factor": 0.4}', {}, ["partial_rotary_factor", "3 channels"]),
    "part: none": ('{"partial_rotary_factor": 0}', {}, ["partial_rotary_factor", "0 channels"]),
    "head_dim": ("{}", {"head_dim": 8.0}, ["head_dim", "8.0"]),
    "length": ("{}", {"length": 0}, ["length", "0"]),
    "sections: sum": ('{"mrope_section": [2, 2, 2]}', {}, ["mrope_section", "4 pairs"]),
    "sections: count": ('{"mrope_section": [1, 1, 1, 1]}', {}, ["mrope_section", "(4,)"]),
    "sections: text": ('{"mrope_section": "2"}', {}, ["mrope_section", "'2'"]),
    "sections: flag": ('{"mrope_section": [2, 1, 1], "mrope_interleaved": 1}', {}, ["mrope_interleaved", "1"]),
    "sections: other order": ('{"mrope_section": [2, 1, 1]}', {"order": "time_last"}, ["order", "'time_last'"]),
    "sections: order": (
        '{"mrope_section": [2, 1, 1], "mrope_interleaved": false}',
        {"order": "cyclic"},
        ["order", "'chunks'", "'cyclic'"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name):
    text, beside, words = REFUSED[name]
    assert_error_names(lambda: read(text, **beside), words)
