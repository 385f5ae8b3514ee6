"""Options of the call against code that has them: caps, sinks, temperatures, rules, packing, selection, masks.

Output, log-sum-exp and the gradients of all that has one, in float64, on every backend; in Numba's simulator on "cuda".
"""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.reference import query_temperature
from tests.parity.option_peers import (
    BATCH,
    DIM,
    HEADS,
    IN_SIMULATOR,
    agrees,
    causal,
    eager,
    flex,
    gpt_oss,
    masked,
    masking,
    operands,
    t5,
    t5_bias,
    torch,
    transformers,
    turned,
)

functional = torch.nn.functional

# What the simulator runs: each kind of option once.
QUICK = "test_sinks_of_heads or test_caps_around_a_trained_bias or test_rules_of_flex_attention or test_an_offset_for"

# ---------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("q_len", [20, 7])
def test_sinks_of_heads(rng, q_len):
    """gpt-oss, with a float mask, whose gradient is autograd's too."""
    arrays = operands(rng, q_len, 20)
    arrays |= {"sinks": 2 * rng.standard_normal(HEADS), "mask": rng.standard_normal((1, HEADS, q_len, 20))}

    def other(q, k, v, sinks, mask):
        return gpt_oss(q, k, v, sinks, mask + causal(q_len, 20, 20 - q_len))

    agrees(other, arrays, causal=True)


# ---------------------------------------------------------------------------------------------- caps


def test_caps_around_a_trained_bias(rng):
    """The other order, in which a score function of flex_attention has it; sinks weigh its capped sum."""
    arrays = operands(rng, 7, 20) | {"table": rng.standard_normal((8, HEADS)), "sinks": rng.standard_normal(HEADS)}

    def other(q, k, v, table, sinks):
        bias = t5_bias(table, 7, 20)[0]

        def capped(s, b, h, i, j):
            return 1.5 * torch.tanh((s + bias[h, i, j]) / 1.5)

        out, lse = flex(q, k, v, capped, lambda b, h, i, j: j <= i + 13)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None], torch.logaddexp(lse, sinks[:, None])

    agrees(other, arrays, t5, softcap=1.5, causal=True)


# ---------------------------------------------------------------------------------------------- temperatures


@pytest.mark.parametrize("shape", [(20,), (HEADS, 20), (BATCH, 1, 20)])
def test_temperature_that_is_trained(rng, shape):
    """Scalable softmax, s ln(n + 1), with a trained s: queries are multiplied before PyTorch's attention gets them."""
    arrays = operands(rng)
    arrays["query_scale"] = 0.4 * rng.random(shape) * query_temperature(20, variant="ssmax")

    def other(q, k, v, query_scale):
        return flex(q * query_scale[..., None], k, v, mask_mod=lambda b, h, i, j: j <= i)

    agrees(other, arrays, causal=True)


# ---------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(("size", "left"), [(1, 0), (6, 2), (5, None), (30, 1)])
def test_chunks_of_streaming_transducers(rng, size, left):
    """ESPnet's: all of the own chunk and some before it, or all before it for its 0."""
    utils = pytest.importorskip("espnet2.asr_transducer.utils")
    hidden = utils.make_chunk_mask(20, size, 0 if left is None else left)
    if left == 0:  # theirs has no name for none
        hidden = hidden | ~torch.block_diag(*[torch.ones(size, size, dtype=torch.bool)] * (20 // size))
    added = torch.zeros(20, 20, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    agrees(lambda q, k, v: eager("llama", q, k, v, added), operands(rng), rule=rp.Chunked(size, left=left))


@pytest.mark.parametrize(("q_len", "k_len"), [(20, 20), (7, 20), (1, 19)])
def test_chunks_of_splash_attention(q_len, k_len):
    """JAX's masks for its kernels on TPUs; a query's place among the keys is counted as transformers does."""
    masks = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
    expected = np.asarray(masks.ChunkedCausalMask((k_len, k_len), 6)[:, :])[k_len - q_len :]
    theirs = masked(masking.chunked_causal_mask_function(6, torch.zeros(1, dtype=int)), q_len, k_len, k_len - q_len, 1)
    np.testing.assert_array_equal((theirs == 0)[0, 0].numpy(), expected)
    q, k = np.zeros((1, q_len, 1)), np.zeros((1, k_len, 1))
    for backend in ("numpy", "terms"):
        found = rp.logits(q, k, causal=True, rule=rp.Chunked(6), backend=backend)[0]
        np.testing.assert_array_equal(found == 0, expected)


def test_prefixes_of_paligemma(rng):
    """An image and a prompt that all may attend, of another length in each item, with Gemma's attention."""
    lengths = np.array([5, 13])
    block = torch.where(torch.arange(20) < torch.tensor(lengths)[:, None], 0, -1)
    config = transformers.GemmaConfig(attn_implementation="eager")
    mask = masking.create_causal_mask(
        config, torch.zeros(BATCH, 20, 1, dtype=torch.float64), None, None, block_sequence_ids=block
    )
    agrees(lambda q, k, v: eager("gemma", q, k, v, mask), operands(rng), rule=rp.Prefix(lengths))


LENGTHS = torch.tensor([0, 11])
RULES = {
    "prefix": (rp.Prefix(LENGTHS.numpy()), lambda b, h, i, j: (j <= i) | (j < LENGTHS[b]), {}),
    "dilated": (rp.Dilated(3), lambda b, h, i, j: ((i - j) % 3 == 0) & (i - j <= 9) & (j <= i), {"window": (9, 0)}),
    "chunked": (rp.Chunked(4, left=1, right=1), lambda b, h, i, j: abs(i // 4 - j // 4) <= 1, {}),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_flex_attention(rng, name):
    """Functions of indices, as its users write them, for queries at the end; with a cap, a sink and T5's bias."""
    rule, function, more = RULES[name]
    arrays = operands(rng, 7, 20) | {"sinks": rng.standard_normal(HEADS), "table": rng.standard_normal((8, HEADS))}

    def other(q, k, v, sinks, table):
        bias = t5_bias(table, 7, 20)[0]
        out, lse = flex(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + bias[h, i, j],
            mask_mod=lambda b, h, i, j: function(b, h, i + 13, j),
        )
        return out * torch.sigmoid(lse - sinks[:, None])[..., None], torch.logaddexp(lse, sinks[:, None])

    agrees(other, arrays, t5, rule=rule, softcap=2.0, cap_order="content", **more)


# ---------------------------------------------------------------------------------------------- several calls in one

PARTS = (5, 1, 9, 5)
BOUNDS = np.cumsum([0, *PARTS])
PLACES = torch.cat([torch.arange(n) for n in PARTS])[None]
OWNERS = torch.repeat_interleave(torch.arange(len(PARTS)), torch.tensor(PARTS))


def test_segments_of_flex_attention(rng):
    """Documents; fewer queries than keys, each of them at its document's end, under T5's bias and a cap."""
    counts = (2, 1, 3, 2)
    q_owners = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    own = torch.cat([torch.arange(n - c, n) for n, c in zip(PARTS, counts, strict=True)])
    places = PLACES[0]
    arrays = operands(rng, sum(counts), 20) | {"table": rng.standard_normal((8, HEADS))}
    starts = torch.tensor(BOUNDS[:-1])[q_owners]

    def other(q, k, v, table):
        bias = t5_bias(table, 20)[0][:, own + starts]
        return flex(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: 2 * torch.tanh((s + bias[h, i, j]) / 2),
            mask_mod=lambda b, h, i, j: (q_owners[i] == OWNERS[j]) & (places[j] <= own[i]),
        )

    bounds = (np.cumsum([0, *counts]), BOUNDS)
    agrees(other, arrays, t5, segments=bounds, causal=True, softcap=2.0)


def test_an_offset_for_each_item(rng):
    """Items whose caches are of other lengths: positions begin where each one's keys end."""
    offsets = np.array([13, 4])
    q_at, k_at = torch.arange(7) + torch.tensor(offsets)[:, None], torch.arange(20)[None]
    far = torch.tensor(offsets)

    def other(q, k, v):
        return flex(*turned(q, k, q_at, k_at), v, mask_mod=lambda b, h, i, j: j <= i + far[b])

    lengths = offsets + 7
    agrees(other, operands(rng, 7, 20), lambda _: rp.Rotary(DIM), offset=offsets, causal=True)
    agrees(other, operands(rng, 7, 20), lambda _: rp.Rotary(DIM), offset=offsets, causal=True, key_lengths=lengths)


# ---------------------------------------------------------------------------------------------- chosen keys


def test_keys_of_each_head(rng):
    """As a mask of PyTorch's own attention, which has no log-sum-exp to give; -1 is no key."""
    arrays = operands(rng, 7, 20)
    selected = rng.integers(-1, 20, (BATCH, HEADS, 7, 4))
    selected[..., 0] = 3
    allowed = torch.zeros(BATCH, HEADS, 7, 21, dtype=torch.bool)
    allowed = allowed.scatter(-1, torch.tensor(selected) % 21, True)[..., :20]

    def other(q, k, v):
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return out, flex(q, k, v, mask_mod=lambda b, h, i, j: allowed[b, h, i, j])[1]

    agrees(other, arrays, selected=selected)


# ---------------------------------------------------------------------------------------------- gradients of masks


@pytest.mark.parametrize("shape", [(BATCH, HEADS, 7, 20), (HEADS, 7, 1), (1, 20), (BATCH, 1, 1, 20)])
def test_gradient_of_a_mask(rng, shape):
    """Of PyTorch's own attention, as it is composed of differentiable operators, for a pair bias of any shape."""
    arrays = operands(rng, 7, 20) | {"mask": rng.standard_normal(shape), "table": rng.standard_normal((8, HEADS))}

    def other(q, k, v, mask, table):
        added = mask + t5_bias(table, 7, 20)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True)
        return out, eager("llama", q, k, v, added)[1]

    agrees(other, arrays, t5)


# ---------------------------------------------------------------------------------------------- CUDA


@pytest.mark.skipif(IN_SIMULATOR, reason="this is the simulator")
def test_in_the_simulator():
    """Some of these comparisons with the CUDA backend, in a process of its own."""
    from tests.test_cuda import simulate

    simulate("parity/test_call_options.py", "-m", "parity", "-k", QUICK)
