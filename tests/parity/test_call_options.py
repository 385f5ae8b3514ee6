"""Options of the call against code that has them: caps, sinks, temperatures, rules, packing, selection, masks.

Output, log-sum-exp and the gradients of all that has one, in float64, on every backend; in Numba's simulator on "cuda".
"""

from unittest.mock import patch

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.reference import query_temperature
from tests.parity.adaptors import flat
from tests.parity.option_peers import (
    BACKENDS,
    BATCH,
    DIM,
    HEADS,
    IN_SIMULATOR,
    KV_HEADS,
    PLAIN,
    agrees,
    answer,
    causal,
    config_of,
    eager,
    fed,
    flex,
    gpt_oss,
    in_double,
    masked,
    masking,
    operands,
    peer,
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


def test_sinks_of_rows_and_relative_logits(rng):
    """Inkling 2: a sink for each query, of which its input decides."""
    arrays = operands(rng)
    arrays |= {
        "sinks": rng.standard_normal((BATCH, HEADS, 20)),
        "relative_states": rng.standard_normal((BATCH, HEADS, 20, 3)),
        "proj": rng.standard_normal((3, 6)),
    }

    def other(q, k, v, sinks, relative_states, proj):
        module, at = peer("inkling").InklingRelativeLogits(3, 6), torch.arange(20)
        bias = torch.func.functional_call(module, {"proj": proj}, (relative_states.transpose(1, 2), at, at))
        return eager("inkling2", q, k, v, causal(20), position_bias=bias, sinks=sinks[..., None])

    agrees(other, arrays, lambda x: rp.Inkling(x["relative_states"], x["proj"]), causal=True)


def test_sinks_beside_a_trained_bias(rng):
    """T5's, as a mask of gpt-oss."""
    arrays = operands(rng) | {"sinks": rng.standard_normal(HEADS), "table": rng.standard_normal((8, HEADS))}
    agrees(lambda q, k, v, sinks, table: gpt_oss(q, k, v, sinks, t5_bias(table, 20)), arrays, t5)


def test_sinks_beside_alibi(rng):
    """BLOOM's, which grows with the key alone: only the sink makes a difference of that."""
    arrays = operands(rng) | {"sinks": rng.standard_normal(HEADS)}

    def other(q, k, v, sinks):
        alibi = peer("bloom").build_alibi_tensor(torch.ones(BATCH, 20), HEADS, torch.float64)
        return gpt_oss(q, k, v, sinks, alibi.unflatten(0, (BATCH, HEADS)) + causal(20))

    agrees(other, arrays, lambda _: rp.ALiBi(form="key"), causal=True)


def test_sinks_beside_a_rotation(rng):
    arrays = operands(rng, 7, 20) | {"sinks": rng.standard_normal(HEADS)}

    def other(q, k, v, sinks):
        at = torch.arange(20)[None]
        return gpt_oss(*turned(q, k, at[:, 13:], at), v, sinks, causal(7, 20, 13))

    agrees(other, arrays, lambda _: rp.Rotary(DIM), causal=True)


# ---------------------------------------------------------------------------------------------- caps


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_caps(rng, name, softcap):
    """Before the mask, a sliding one."""
    window = masked(masking.sliding_window_causal_mask_function(6), 20)
    agrees(
        lambda q, k, v: eager(name, q, k, v, window, softcap=softcap),
        operands(rng),
        causal=True,
        window=(5, 0),
        softcap=softcap,
    )


def test_caps_of_turned_operands(rng):
    at = torch.arange(20)[None]
    agrees(
        lambda q, k, v: eager("gemma2", *turned(q, k, at, at), v, softcap=1.5),
        operands(rng),
        lambda _: rp.Rotary(DIM),
        softcap=1.5,
        cap_order="content",
    )


def test_caps_of_products_under_a_trained_bias(rng):
    """What Gemma 2's code adds after its cap."""
    agrees(
        lambda q, k, v, table: eager("gemma2", q, k, v, t5_bias(table, 7, 20), softcap=1.5),
        operands(rng, 7, 20) | {"table": rng.standard_normal((8, HEADS))},
        t5,
        softcap=1.5,
        cap_order="content",
    )


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


def test_caps_under_a_trained_mask(rng):
    """Gemma 2 adds a mask after its cap: here one per head, trained."""
    agrees(
        lambda q, k, v, mask: eager("gemma2", q, k, v, mask, softcap=1.5),
        operands(rng) | {"mask": rng.standard_normal((HEADS, 1, 20))},
        softcap=1.5,
    )


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_caps_of_the_standard(rng, kind):
    """ONNX's evaluator in float64, cap, mask and causality in one node."""
    onnx, evaluator = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference").ReferenceEvaluator
    arrays = operands(rng)
    allowed = rng.random((20, 20)) < 0.7
    np.fill_diagonal(allowed, True)
    mask = allowed if kind == "bool" else np.where(allowed, rng.standard_normal((20, 20)), -np.inf)
    node = onnx.helper.make_node("Attention", ["q", "k", "v", "m"], ["y"], is_causal=1, softcap=1.5)
    types = dict.fromkeys("qkvy", onnx.TensorProto.DOUBLE)
    types["m"] = onnx.TensorProto.BOOL if kind == "bool" else onnx.TensorProto.DOUBLE
    infos = {name: onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()}
    graph = onnx.helper.make_graph([node], "attention", [infos[name] for name in "qkvm"], [infos["y"]])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
    (expected,) = evaluator(model).run(None, arrays | {"m": mask})
    for backend in BACKENDS:
        found = rp.attention(**arrays, mask=mask, causal=True, softcap=1.5, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- temperatures


HIDDEN, PLACE = torch.zeros(BATCH, 20, HEADS * DIM, dtype=torch.float64), torch.arange(20)[None]


def llama4(layer):
    """Attention of Llama 4: layer 0 turns and is chunked, layer 1 has a temperature."""
    module = peer("llama4")
    options = {"attn_temperature_tuning": True, "attn_scale": 0.3, "floor_scale": 4, "attention_chunk_size": 6}
    config = config_of("Llama4TextConfig", no_rope_layers=[1, 0], use_qk_norm=False, rope_parameters=PLAIN, **options)

    def other(q, k, v):
        with in_double() as scores:
            attention = module.Llama4TextAttention(config, layer)
            fed(attention, q_proj=flat(q), k_proj=flat(k), v_proj=flat(v))
            at = PLACE.expand(BATCH, -1)
            angles = module.Llama4TextRotaryEmbedding(config)(HIDDEN, at)
            make = masking.create_causal_mask if layer else masking.create_chunked_causal_mask
            return answer(attention(HIDDEN, angles, make(config, HIDDEN, None, None, position_ids=at))[0], scores)

    return other


def test_temperature_of_llama4(rng):
    scale = query_temperature(20, variant="llama4", length=4, strength=0.3)
    agrees(llama4(1), operands(rng), causal=True, query_scale=scale)


def test_temperature_of_ministral3_beside_its_rotation(rng):
    module = peer("ministral3")
    ropes = PLAIN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 5}
    config = config_of("Ministral3Config", rope_parameters=ropes)

    def other(q, k, v):
        with in_double() as scores:
            attention = fed(module.Ministral3Attention(config, 0), q_proj=flat(q), k_proj=flat(k), v_proj=flat(v))
            angles = module.Ministral3RotaryEmbedding(config)(HIDDEN, PLACE)
            return answer(attention(HIDDEN, angles, causal(20), PLACE)[0], scores)

    scale = query_temperature(20, variant="ministral3", length=5, strength=0.3)
    agrees(other, operands(rng), lambda _: rp.Rotary(DIM), causal=True, query_scale=scale)


def test_temperature_of_inkling_beside_its_bias(rng):
    """A factor on queries and on what they add, which ours are given with it; the scale is 1 / D."""
    tau = query_temperature(20, variant="inkling", length=4, strength=0.3)
    options = {"log_scaling_n_floor": 4, "log_scaling_alpha": 0.3, "d_rel": 3, "rel_extent": 6}
    config = config_of("InklingTextConfig", num_hidden_layers=1, layer_types=["hybrid"], **options)
    arrays = operands(rng)
    arrays |= {"relative_states": rng.standard_normal((BATCH, HEADS, 20, 3)), "proj": rng.standard_normal((3, 6))}

    def other(q, k, v, relative_states, proj):
        cold = relative_states / torch.tensor(tau)[:, None]
        given = {"q_norm": q.transpose(1, 2), "k_norm": k.transpose(1, 2), "v_sconv": flat(v), "r_proj": flat(cold)}
        with in_double() as scores:
            attention = fed(peer("inkling").InklingAttention(config, 0), k_sconv=flat(k), **given)
            table = {"rel_logits_proj.proj": proj}
            return answer(torch.func.functional_call(attention, table, (HIDDEN, causal(20)))[0], scores)

    agrees(
        other,
        arrays,
        lambda x: rp.Inkling(x["relative_states"], x["proj"]),
        causal=True,
        query_scale=tau,
        scale=1 / DIM,
    )


@pytest.mark.parametrize("shape", [(20,), (HEADS, 20), (BATCH, 1, 20)])
def test_temperature_that_is_trained(rng, shape):
    """Scalable softmax, s ln(n + 1), with a trained s: queries are multiplied before PyTorch's attention gets them."""
    arrays = operands(rng)
    arrays["query_scale"] = 0.4 * rng.random(shape) * query_temperature(20, variant="ssmax")

    def other(q, k, v, query_scale):
        return flex(q * query_scale[..., None], k, v, mask_mod=lambda b, h, i, j: j <= i)

    agrees(other, arrays, causal=True)


# ---------------------------------------------------------------------------------------------- rules


def test_chunks_of_llama4(rng):
    """Its local layers, beside their rotation."""
    agrees(llama4(0), operands(rng), lambda _: rp.Rotary(DIM, layout="interleaved"), causal=True, rule=rp.Chunked(6))


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


@pytest.mark.parametrize("window", [None, 3])
def test_segments_as_transformers_packs_them(rng, window):
    """Their masks find sequences where position_ids begin anew; rotations and sinks of gpt-oss."""
    config = transformers.GptOssConfig(attn_implementation="eager", sliding_window=window)
    make = masking.create_causal_mask if window is None else masking.create_sliding_window_causal_mask
    mask = make(config, torch.zeros(1, 20, 1, dtype=torch.float64), None, None, position_ids=PLACES)
    agrees(
        lambda q, k, v, sinks: gpt_oss(*turned(q, k, PLACES, PLACES), v, sinks, mask),
        operands(rng, batch=1) | {"sinks": rng.standard_normal(HEADS)},
        lambda _: rp.Rotary(DIM),
        segments=BOUNDS,
        causal=True,
        window=None if window is None else (window - 1, 0),
    )


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


def test_keys_that_deepseek_selects(rng):
    """The indexer of DeepSeek V3.2 names keys, and its attention masks the others; later ones it names too."""
    module = peer("deepseek_v32")
    sizes = {"hidden_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    sizes |= {"num_key_value_heads": HEADS, "v_head_dim": DIM, "num_hidden_layers": 1, "rope_parameters": PLAIN}
    config = config_of("DeepseekV32Config", index_topk=5, index_head_dim=8, index_n_heads=2, **sizes)
    original, chosen = module.eager_attention_forward, []
    with in_double():
        attention = module.DeepseekV32Attention(config, 0).eval()
        attention.o_proj = torch.nn.Identity()
        attention.indexer.register_forward_hook(lambda _, __, found: chosen.append(found))
        hidden, at = torch.randn(BATCH, 20, 16), torch.arange(20)[None]
        angles = module.DeepseekV32RotaryEmbedding(config)(hidden, at)
        attention(hidden, angles, causal(20), position_ids=at)

    def other(q, k, v):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))

        def attend(owner, own_q, own_k, own_v, *args, **kwargs):
            assert own_q.shape == q.shape
            return original(owner, q, k, v, *args, **{**kwargs, "scaling": DIM**-0.5})

        with in_double() as scores, patch.object(module, "eager_attention_forward", attend):
            out = attention(hidden, angles, causal(20), position_ids=at)[0]
        return answer(out, scores)

    selected = chosen[0].numpy()
    assert selected.shape == (BATCH, 20, 5)
    assert (selected > np.arange(20)[:, None]).any()
    agrees(other, operands(rng), selected=selected, causal=True)


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
