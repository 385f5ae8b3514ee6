"""Attention of other packages behind one signature, so that `conform` can run it: calls of theirs, and no formulas.

Each function here imports its package, and returns ``f(q, k, v, ...)`` whose further parameters have the names of this
library. What a package does with a call is left as it is: where its causal mask starts at another key, or a query
without keys gets an average, that is what the board is to show.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import relpos_np as rp

RECORDED = Path(__file__).parents[2] / "asv_bench" / "recorded"


def installed(package):
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def written(path, **found):
    """A record, with its date and this library's version before what was found."""
    head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "relpos_np": rp.__version__}
    path.write_text(json.dumps({**head, **found}, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Adaptor:
    """What is called, the distribution that holds it, and what it is to compute."""

    name: str
    package: str
    made: Callable[[], Callable[..., Any]]
    scheme: str
    variant: str | None = None
    framework: str = "torch"
    dtypes: tuple[str, ...] = ("float32",)
    layout: str = "bhld"
    always: dict[str, Any] = field(default_factory=dict)
    # Those that it is right at; None for all.
    lengths: tuple[int, ...] | None = None


def gives(x):
    """A module of torch in the place of a projection: it gives what is to enter attention."""
    import torch

    class Gives(torch.nn.Module):
        def forward(self, *_, **__):
            return x

    return Gives()


def flat(x):
    """(B, H, L, D) as projections give it."""
    return x.transpose(1, 2).flatten(2)


def in_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# ---------------------------------------------------------------------------------------------- PyTorch


def torch_sdpa():
    from torch.nn.functional import scaled_dot_product_attention as theirs

    def attend(q, k, v, mask=None, causal=False, scale=None):
        return theirs(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)

    return attend


def torch_flex():
    from torch.nn.attention import flex_attention as flex

    def attend(q, k, v, slopes, causal=False, window=None, key_lengths=None):
        last = k.shape[2] - q.shape[2]

        def biased(score, b, h, i, j):
            return score - slopes[h] * (j - i - last).abs()

        def seen(b, h, i, j):
            found = (j >= 0) & (i >= 0)
            if causal:
                found = found & (j <= i + last)
            if window is not None:
                found = found & (j >= i + last - window[0]) & (j <= i + last + window[1])
            return found if key_lengths is None else found & (j < key_lengths[b])

        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        blocks = flex.create_block_mask(seen, *shape, device="cpu")
        return flex.flex_attention(q, k, v, score_mod=biased, block_mask=blocks, enable_gqa=True)

    return attend


# ---------------------------------------------------------------------------------------------- transformers


def added(q, k, causal, window, key_lengths):
    """The mask that transformers makes for the rules of its own models; what is excluded gets the smallest number."""
    import torch
    from transformers import masking_utils as masking

    q_len, k_len = q.shape[2], k.shape[2]
    rule = masking.causal_mask_function if causal else masking.bidirectional_mask_function
    if window is not None:
        if not causal or window[1]:
            raise NotImplementedError("windows that are causal")
        rule = masking.sliding_window_causal_mask_function(window[0] + 1)
    kept = None if key_lengths is None else torch.arange(k_len) < key_lengths[:, None]
    return masking.eager_mask(
        len(q), q_len, k_len, q_offset=k_len - q_len, mask_function=rule, attention_mask=kept, dtype=q.dtype
    )


def transformers_llama():
    from transformers.models.llama import modeling_llama as llama

    def attend(q, k, v, causal=False, window=None, key_lengths=None):
        import torch

        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
        config = llama.LlamaConfig(
            hidden_size=heads * dim, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim
        )
        rotary = llama.LlamaRotaryEmbedding(config)
        at = torch.arange(k.shape[2])[None]
        cos, sin = rotary(k, at)
        k = llama.apply_rotary_pos_emb(k, k, cos, sin)[0]
        last = slice(k.shape[2] - q.shape[2], None)
        q = llama.apply_rotary_pos_emb(q, q, cos[:, last], sin[:, last])[0]
        module = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False)
        mask = added(q, k, causal, window, key_lengths)
        return llama.eager_attention_forward(module, q, k, v, mask, scaling=dim**-0.5)[0].transpose(1, 2)

    return attend


def transformers_t5():
    from transformers.models.t5 import modeling_t5 as t5

    def attend(q, k, v, table, max_distance=128, bidirectional=True, causal=False, key_lengths=None):
        import torch

        heads, dim = q.shape[1], q.shape[3]
        if k.shape[1] != heads or v.shape[3] != dim:
            raise NotImplementedError("as many heads of keys as of queries, of one size")
        config = t5.T5Config(
            d_model=heads * dim,
            d_kv=dim,
            num_heads=heads,
            relative_attention_num_buckets=len(table),
            relative_attention_max_distance=max_distance,
            is_decoder=not bidirectional,
        )
        config._attn_implementation = "eager"
        module = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
        module.relative_attention_bias.weight = torch.nn.Parameter(table)
        module.q, module.k, module.v = (gives(flat(x)) for x in (q, k, v))
        module.o = torch.nn.Identity()
        past = k.shape[2] - q.shape[2]
        bias = module.compute_bias(q.shape[2], k.shape[2], past_seen_tokens=past)
        bias = bias + added(q, k, causal, None, key_lengths)
        states = torch.zeros(len(k), k.shape[2], heads * dim, dtype=k.dtype)
        out = module(states[:, past:], position_bias=bias, key_value_states=states)[0]
        return in_heads(out, heads)

    return attend


# ---------------------------------------------------------------------------------------------- x-transformers


def x_transformers(positions):
    """`Attend` with one of their biases, or their rotary positions."""

    def made():
        from x_transformers import x_transformers as theirs
        from x_transformers.attend import Attend

        def finished(q, k, v, bias, causal, mask, key_lengths):
            import torch

            if key_lengths is not None:
                mask = torch.arange(k.shape[2]) < key_lengths[:, None]
            return Attend(causal=causal)(q, k, v, mask=mask, attn_bias=bias)[0]

        def t5(q, k, v, table, max_distance=128, bidirectional=True, causal=False, mask=None, key_lengths=None):
            import torch

            module = theirs.RelativePositionBias(1.0, not bidirectional, len(table), max_distance, q.shape[1])
            module.relative_attention_bias.weight = torch.nn.Parameter(table)
            return finished(q, k, v, module(q.shape[2], k.shape[2]), causal, mask, key_lengths)

        def alibi(q, k, v, slopes, causal=False, mask=None, key_lengths=None):
            module = theirs.AlibiPositionalBias(q.shape[1], slopes=slopes.tolist())
            return finished(q, k, v, module(q.shape[2], k.shape[2]).to(q.dtype), causal, mask, key_lengths)

        def rotary(q, k, v, causal=False, mask=None, key_lengths=None):
            angles = theirs.RotaryEmbedding(q.shape[3]).forward_from_seq_len(k.shape[2])[0]
            q, k = (theirs.apply_rotary_pos_emb(x, angles) for x in (q, k))
            return finished(q, k, v, None, causal, mask, key_lengths)

        return {"t5": t5, "alibi": alibi, "rotary": rotary}[positions]

    return made


# ---------------------------------------------------------------------------------------------- timm


def timm_window():
    from tests.parity.modules import without_torchvision

    with without_torchvision():
        from timm.models.swin_transformer import WindowAttention

    def attend(q, k, v, table, grid):
        import torch

        heads, dim = q.shape[1], q.shape[3]
        if q.shape != k.shape or v.shape != k.shape:
            raise NotImplementedError("queries, keys and values of one shape")
        module = WindowAttention(heads * dim, heads, window_size=tuple(grid)).to(q.dtype)
        module.relative_position_bias_table = torch.nn.Parameter(table)
        module.qkv, module.proj = gives(torch.cat([flat(x) for x in (q, k, v)], -1)), torch.nn.Identity()
        return in_heads(module(torch.zeros(len(q), q.shape[2], heads * dim)), heads)

    return attend


# ---------------------------------------------------------------------------------------------- ESPnet


def espnet(name):
    def made():
        from espnet.nets.pytorch_backend.transformer import attention

        def attend(q, k, v, content_bias, position_bias, rows, causal=False, key_lengths=None):
            import torch

            heads, dim = q.shape[1], q.shape[3]
            module = getattr(attention, name)(heads, heads * dim, 0.0).eval()
            module.linear_q, module.linear_k, module.linear_v = (gives(flat(x)) for x in (q, k, v))
            module.linear_pos, module.linear_out = gives(rows.flatten(1)[None]), torch.nn.Identity()
            module.pos_bias_u, module.pos_bias_v = (torch.nn.Parameter(x) for x in (content_bias, position_bias))
            mask = None
            if causal:
                seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
                mask = seen[None].expand(len(q), -1, -1)
            if key_lengths is not None:
                mask = (torch.arange(k.shape[2]) < key_lengths[:, None])[:, None]
            at = torch.zeros(1, len(rows), heads * dim)
            return in_heads(module(flat(q), flat(k), flat(v), at, mask), heads)

        return attend

    return made


# ---------------------------------------------------------------------------------------------- torchscale


def torchscale_t5():
    from torch.nn.functional import scaled_dot_product_attention
    from torchscale.component.relative_position_bias import RelativePositionBias

    def attend(q, k, v, table, max_distance=128, bidirectional=True):
        import torch

        module = RelativePositionBias(bidirectional, len(table), max_distance, q.shape[1])
        module.relative_attention_bias.weight = torch.nn.Parameter(table)
        q_len, k_len = q.shape[2], k.shape[2]
        bias = module(len(q), q_len, k_len, step=k_len - q_len).unflatten(0, (len(q), -1))
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    return attend


def torchscale_xpos():
    from torch.nn.functional import scaled_dot_product_attention
    from torchscale.component.xpos_relative_position import XPOS

    def attend(q, k, v, scale_base=512.0):
        def turned(x, **more):
            return XPOS(x.shape[3], scale_base)(x.flatten(0, 1), **more).unflatten(0, x.shape[:2])

        q, k = turned(q, offset=k.shape[2] - q.shape[2]), turned(k, downscale=True)
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


# ---------------------------------------------------------------------------------------------- ONNX


def onnx_model(q, v, mask, causal, scale, layout):
    """One node of Attention of opset 23, or two of RotaryEmbedding before it."""
    from onnx import TensorProto, helper

    kind = helper.np_dtype_to_tensor_dtype(q.dtype)
    kinds = {"q": kind, "k": kind, "v": kind}
    nodes, turned = [], ["q", "k"]
    if layout is not None:
        kinds |= {"cos": kind, "sin": kind, "q_at": TensorProto.INT64, "k_at": TensorProto.INT64}
        turned = ["turned_q", "turned_k"]
        nodes = [
            helper.make_node(
                "RotaryEmbedding",
                [name, "cos", "sin", f"{name}_at"],
                [f"turned_{name}"],
                interleaved=int(layout == "interleaved"),
            )
            for name in ("q", "k")
        ]
    if mask is not None:
        kinds["mask"] = helper.np_dtype_to_tensor_dtype(mask.dtype)
    scaled = {} if scale is None else {"scale": float(scale)}
    given = [*turned, "v", *(["mask"] if mask is not None else [])]
    nodes.append(helper.make_node("Attention", given, ["out"], is_causal=int(causal), **scaled))
    inputs = [helper.make_tensor_value_info(name, one, None) for name, one in kinds.items()]
    outputs = [helper.make_tensor_value_info("out", kind, None)]
    graph = helper.make_graph(nodes, "attention", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def onnx_attention(runs, *, layout=None):
    """What runs a model: `reference` or `runtime`. Rotary tables are the caller's in ONNX: those of the paper."""

    def made():
        import onnx  # noqa: F401

        if runs == "runtime":
            import onnxruntime

            def run(model, given):
                options = onnxruntime.SessionOptions()
                options.log_severity_level = 4
                providers = ["CPUExecutionProvider"]
                session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
                return session.run(None, given)[0]
        else:
            from onnx.reference import ReferenceEvaluator

            def run(model, given):
                return ReferenceEvaluator(model).run(None, given)[0]

        def plain(q, k, v, mask=None, causal=False, scale=None):
            model = onnx_model(q, v, mask, causal, scale, None)
            return run(model, {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask}))

        def rotary(q, k, v):
            dim, k_len = q.shape[3], k.shape[2]
            angles = np.arange(k_len)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
            at = np.broadcast_to(np.arange(k_len), (len(q), k_len)).astype(np.int64)
            given = {"q": q, "k": k, "v": v, "k_at": at, "q_at": at[:, k_len - q.shape[2] :]}
            given |= {"cos": np.cos(angles).astype(q.dtype), "sin": np.sin(angles).astype(q.dtype)}
            return run(onnx_model(q, v, None, False, None, layout), given)

        return plain if layout is None else rotary

    return made


# ---------------------------------------------------------------------------------------------- OpenVINO


def openvino_sdpa():
    import openvino
    from openvino import opset13 as ops

    core = openvino.Core()
    exactly = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}

    def attend(q, k, v, mask=None, causal=False):
        given = [q, k, v] + ([] if mask is None else [mask])
        inputs = [ops.parameter(list(x.shape), dtype=x.dtype) for x in given]
        # Without a mask it wants the number 0 in the place of one.
        masked = inputs[3] if mask is not None else ops.constant(np.zeros((), q.dtype))
        node = ops.scaled_dot_product_attention(*inputs[:3], masked, causal=causal)
        compiled = core.compile_model(openvino.Model([node], inputs), "CPU", exactly)
        return np.array(compiled(given)[0])

    return attend


# ---------------------------------------------------------------------------------------------- JAX


def jax_attention():
    import jax

    def attend(q, k, v, mask=None, causal=False, window=None, key_lengths=None, scale=None):
        kept = {"mask": mask}
        if mask is not None and mask.dtype != bool:
            kept = {"bias": mask.reshape((1,) * (4 - mask.ndim) + mask.shape)}
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            **kept,
            scale=scale,
            is_causal=causal,
            local_window_size=window,
            key_value_seq_lengths=key_lengths,
        )

    return attend


ADAPTORS = (
    Adaptor("scaled_dot_product_attention", "torch", torch_sdpa, "plain", dtypes=("float32", "float16", "bfloat16")),
    Adaptor("flex_attention, not compiled, with a score_mod", "torch", torch_flex, "alibi", "symmetric"),
    Adaptor(
        "rotary positions and eager attention of Llama",
        "transformers",
        transformers_llama,
        "rotary",
        "half",
        dtypes=("float32", "bfloat16"),
    ),
    Adaptor("T5Attention", "transformers", transformers_t5, "t5", "exact", always={"scale": 1.0}),
    Adaptor("Attend with RelativePositionBias", "x-transformers", x_transformers("t5"), "t5", "exact"),
    Adaptor("Attend with AlibiPositionalBias", "x-transformers", x_transformers("alibi"), "alibi", "symmetric"),
    Adaptor("Attend with RotaryEmbedding", "x-transformers", x_transformers("rotary"), "rotary", "interleaved"),
    Adaptor("WindowAttention of Swin", "timm", timm_window, "window", "swin"),
    Adaptor(
        "RelPositionMultiHeadedAttention",
        "espnet",
        espnet("RelPositionMultiHeadedAttention"),
        "transformer_xl",
        "conformer",
    ),
    Adaptor(
        "LegacyRelPositionMultiHeadedAttention",
        "espnet",
        espnet("LegacyRelPositionMultiHeadedAttention"),
        "transformer_xl",
        "espnet_legacy",
    ),
    Adaptor("RelativePositionBias", "torchscale", torchscale_t5, "t5", "exact"),
    # Its angles and factors are of float32: from some hundred tokens on errors are several times those of other parts.
    Adaptor("XPOS", "torchscale", torchscale_xpos, "xpos", "interleaved", lengths=(2, 5, 9, 16, 33, 65)),
    Adaptor("Attention of opset 23", "onnxruntime", onnx_attention("runtime"), "plain", framework="numpy"),
    Adaptor(
        "RotaryEmbedding and Attention of opset 23",
        "onnxruntime",
        onnx_attention("runtime", layout="half"),
        "rotary",
        "half",
        "numpy",
    ),
    Adaptor("Attention, by ReferenceEvaluator", "onnx", onnx_attention("reference"), "plain", framework="numpy"),
    Adaptor(
        "RotaryEmbedding, interleaved, by ReferenceEvaluator",
        "onnx",
        onnx_attention("reference", layout="interleaved"),
        "rotary",
        "interleaved",
        "numpy",
    ),
    Adaptor("ScaledDotProductAttention", "openvino", openvino_sdpa, "plain", framework="numpy"),
    Adaptor("dot_product_attention", "jax", jax_attention, "plain", framework="jax", layout="blhd"),
)
