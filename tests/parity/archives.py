"""Archives of other packages' attention: operands, an output and trained arrays, and no word about them.

Each function here imports its package and returns what somebody would save: `identify` takes these as they are. Tables
keep the axes and the names of the package.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.parity import adaptors
from tests.parity.adaptors import flat, gives, in_heads
from tests.parity.modules import timm

torch = pytest.importorskip("torch")

# Tokens that fill no grid of more than one row beside their own.
LENGTH = 19


@dataclass(frozen=True)
class Archive:
    """The package, what made the arrays, the schemes that explain them, and numbers that nobody stated."""

    package: str
    made: Callable[..., dict[str, Any]]
    schemes: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def arrays(self):
        """The arguments of `identify`."""
        torch.manual_seed(20261128)
        found = self.made()
        given = {name: array(x) for name, x in found.pop("given", {}).items()}
        return {name: array(x) for name, x in found.items()} | {"given": given}


ARCHIVES: dict[str, Archive] = {}


def archive(package, *schemes, settings=None, **call):
    """An archive of a function, whose name is its own."""

    def kept(function):
        ARCHIVES[function.__name__] = Archive(package, function, schemes, settings or {}, call)
        return function

    return kept


def array(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


def operands(length=LENGTH, kv_heads=4):
    return torch.randn(1, 4, length, 16), *torch.randn(2, 1, kv_heads, length, 16)


def saved(q, k, v, out, **given):
    return {"q": q, "k": k, "v": v, "out": out, "given": given}


def attended(q, k, v, *, bias=0.0, causal=True, scale=None):
    """Attention of torch with what a package adds to scores."""
    mask = torch.zeros(q.shape[2], k.shape[2]) + bias
    if causal:
        mask = mask.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -math.inf)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def alone(package, path, parent=""):
    """One file of a package that wants a GPU, or another package, to be imported as a whole."""
    found = Path(importlib.util.find_spec(package).submodule_search_locations[0], path)
    spec = importlib.util.spec_from_file_location(f"{parent or package}.{found.stem}", found)
    module = importlib.util.module_from_spec(spec)
    siblings = {} if not parent else {name: mock.MagicMock(__path__=[]) for name in (parent, f"{parent}.common")}
    with mock.patch.dict(sys.modules, siblings):
        spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- biases


@archive("transformers", "t5", scale=1.0)
def t5():
    q, k, v = operands()
    table = torch.randn(32, 4)
    return saved(q, k, v, adaptors.transformers_t5()(q, k, v, table), **{"relative_attention_bias.weight": table})


@archive("transformers", "alibi", causal=True)
def mpt():
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    q, k, v = operands()
    return saved(q, k, v, attended(q, k, v, bias=build_mpt_alibi_tensor(4, LENGTH)[None]))


@archive("timm", "window")
def swin():
    q, k, v = operands(16)
    table = torch.randn(49, 4)
    return saved(q, k, v, adaptors.timm_window()(q, k, v, table, (4, 4)), relative_position_bias_table=table)


@archive("transformers", "beit")
def beit():
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    q, k, v = operands(17)
    config = BeitConfig(num_attention_heads=4, hidden_size=64, image_size=4, patch_size=1)
    module = BeitRelativePositionBias(config)
    module.relative_position_bias_table = torch.nn.Parameter(torch.randn(52, 4))
    out = attended(q, k, v, bias=module((4, 4)).reshape(1, 4, 17, 17), causal=False)
    return saved(q, k, v, out, relative_position_bias_table=module.relative_position_bias_table)


@archive("segment-anything-py", "decomposed")
def segment_anything():
    attention = alone("segment_anything", "modeling/image_encoder.py", "segment_anything.modeling").Attention
    q, k, v = operands(16)
    module = attention(64, 4, use_rel_pos=True, input_size=(4, 4))
    module.qkv, module.proj = gives(torch.cat([flat(x) for x in (q, k, v)], -1)), torch.nn.Identity()
    module.rel_pos_h, module.rel_pos_w = (torch.nn.Parameter(torch.randn(7, 16)) for _ in range(2))
    out = in_heads(module(torch.zeros(1, 4, 4, 64)).flatten(1, 2), 4)
    return saved(q, k, v, out, rel_pos_h=module.rel_pos_h, rel_pos_w=module.rel_pos_w)


@archive("timm", "swin_v2")
def swin_v2():
    module = timm("models.swin_transformer_v2").WindowAttention(64, (4, 4), 4).eval()
    module.qkv, module.proj = torch.nn.Linear(64, 192, bias=False), torch.nn.Identity()
    torch.nn.init.normal_(module.logit_scale, 1.0)
    x = torch.randn(1, 16, 64)
    q, k, v = (in_heads(part, 4) for part in module.qkv(x).chunk(3, -1))
    module.qkv.bias = module.q_bias = None
    out = in_heads(module(x), 4)
    return saved(q, k, v, out, logit_scale=module.logit_scale, **dict(module.cpb_mlp.named_parameters()))


# ---------------------------------------------------------------------------------------------- vectors of pairs


@archive("espnet", "transformer_xl")
def conformer():
    q, k, v = operands()
    content, position, rows = torch.randn(4, 16), torch.randn(4, 16), torch.randn(2 * LENGTH - 1, 4, 16)
    out = adaptors.espnet("RelPositionMultiHeadedAttention")()(q, k, v, content, position, rows)
    return saved(q, k, v, out, pos_bias_u=content, pos_bias_v=position, linear_pos=rows)


@archive("conformer", "shaw")
def shaw():
    """Distances i - j, clipped at 8."""
    from conformer.conformer import Attention

    q, k, v = operands()
    module = Attention(64, 4, 16, max_pos_emb=8)
    module.to_q, module.to_kv = gives(flat(q)), gives(torch.cat([flat(k), flat(v)], -1))
    module.to_out = torch.nn.Identity()
    out = in_heads(module(torch.zeros(1, LENGTH, 64)), 4)
    return saved(q, k, v, out, **{"rel_pos_emb.weight": module.rel_pos_emb.weight})


@archive("transformers", "deberta")
def deberta():
    from transformers import DebertaConfig, DebertaModel

    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8}
    config = DebertaConfig(
        **sizes, relative_attention=True, max_relative_positions=8, pos_att_type=["c2p", "p2c"], vocab_size=9
    )
    model = DebertaModel(config).eval()
    module = model.encoder.layer[0].attention.self
    for one in module.parameters():
        torch.nn.init.normal_(one, std=0.3)
    x, embedding = torch.randn(1, LENGTH, 48), torch.randn(16, 48)
    q, k, v = in_heads(module.in_proj(x), 4).chunk(3, -1)
    q, v = (one + in_heads(bias[None, None], 4) for one, bias in ((q, module.q_bias), (v, module.v_bias)))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    out = module(x, mask, relative_pos=model.encoder.get_rel_pos(x), rel_embeddings=embedding)[0]
    keys, queries = (in_heads(one(embedding)[None], 4) for one in (module.pos_proj, module.pos_q_proj))
    return saved(q, k, v, in_heads(out, 4), pos_key=keys, pos_query=queries)


# ---------------------------------------------------------------------------------------------- rotary


@archive("transformers", "rotary", causal=True)
def llama():
    """Halves of the channels, and a base of 500,000."""
    from transformers.models.llama import modeling_llama as module

    q, k, v = operands(kv_heads=2)
    parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    config = module.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=parameters)
    turn = module.LlamaRotaryEmbedding(config)(k, torch.arange(LENGTH)[None])
    turned = module.apply_rotary_pos_emb(q, k, *turn)
    return saved(q, k, v, attended(turned[0], *(x.repeat_interleave(2, 1) for x in (turned[1], v))))


@archive("rotary-embedding-torch", "rotary", causal=True)
def rotary_embedding_torch():
    """Neighbouring channels."""
    from rotary_embedding_torch import RotaryEmbedding

    q, k, v = operands()
    return saved(q, k, v, attended(*RotaryEmbedding(16).rotate_queries_with_cached_keys(q, k), v))


@archive("transformers", "rotary", settings={"dim": 4}, causal=True)
def partial_rotary():
    """4 of 16 channels, as in GPT-NeoX."""
    from transformers.models.gpt_neox import modeling_gpt_neox as module

    q, k, v = operands()
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    config = module.GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    turn = module.GPTNeoXRotaryEmbedding(config)(k, torch.arange(LENGTH)[None])
    return saved(q, k, v, attended(*module.apply_rotary_pos_emb(q, k, *turn), v))


@archive("torchscale", "xpos")
def xpos():
    q, k, v = operands()
    return saved(q, k, v, adaptors.torchscale_xpos()(q, k, v))


# ---------------------------------------------------------------------------------------------- what content decides


@archive("fla-core", "fox", causal=True)
def forgetting():
    module = alone("fla", "ops/forgetting_attn/naive.py")
    q, k, v = operands()
    gates = torch.nn.functional.logsigmoid(torch.randn(1, LENGTH, 4) + 2)
    out = module.naive_forgetting_attn(*(x.transpose(1, 2) for x in (q, k, v)), gates)
    return saved(q, k, v, out.transpose(1, 2), log_gates=gates.transpose(1, 2))


@archive("x-transformers", "cope", causal=True)
def cope():
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import CoPE

    q, k, v = operands()
    positions = CoPE(16, 4, 8)
    torch.nn.init.normal_(positions.pos_emb)
    return saved(q, k, v, Attend(causal=True, cope=positions)(q, k, v)[0], pos_emb=positions.pos_emb)


@archive("transformers", "wavlm")
def wavlm():
    from transformers.models.wavlm.modeling_wavlm import WavLMAttention

    module = WavLMAttention(64, 4, num_buckets=32, max_distance=80).eval()
    q, k, v = operands()
    gate = 2 * torch.rand(1, 4, LENGTH)
    bias = module.compute_bias(LENGTH, LENGTH)[None] * gate[..., None]
    out = attended(q, k, v, bias=bias, causal=False)
    return saved(q, k, v, out, rel_attn_embed=module.rel_attn_embed.weight, gate=gate)


# ---------------------------------------------------------------------------------------------- numbers left out


@archive("local-attention", "plain", window=(4, 0))
def local_attention():
    from local_attention import LocalAttention

    q, k, v = operands()
    module = LocalAttention(4, causal=True, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False)
    return saved(q, k, v, module(q, k, v))


@archive("speechbrain", "rotary", scale_is="1/sqrt(H D)")
def scale_of_all_heads():
    """Their rotary positions, and the root of the channels of all heads."""
    from tests.parity.ledger import speechbrain

    q, k, v = operands()
    module = speechbrain().RoPEMHA(64, 4).eval()
    module.in_proj_weight = torch.nn.Parameter(torch.eye(64).repeat(3, 1))
    module.out_proj = torch.nn.Identity()
    return saved(q, k, v, in_heads(module(flat(q), flat(k), flat(v))[0], 4))


@archive("x-transformers", "plain", scale=0.3, causal=True)
def scale_of_its_own():
    from x_transformers.attend import Attend

    q, k, v = operands()
    return saved(q, k, v, Attend(causal=True, scale=0.3)(q, k, v)[0])


@archive("transformers", "plain", causal=True)
def gpt_oss_sinks():
    from transformers.models.gpt_oss import modeling_gpt_oss as module

    q, k, v = operands(kv_heads=2)
    own = SimpleNamespace(num_key_value_groups=2, training=False, sinks=torch.randn(4))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(hidden, -math.inf)
    out = module.eager_attention_forward(own, q, k, v, mask, scaling=0.25)[0].transpose(1, 2)
    return saved(q, k, v, out, sinks=own.sinks)


@archive("timm", "learned")
def vit():
    """A table (1, R, D), as checkpoints have it, added to the inputs."""
    transformer = timm("models.vision_transformer").VisionTransformer
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 0, "num_heads": 2}
    module = transformer(**sizes, class_token=False, global_pool="avg").eval()
    x = torch.randn(1, 16, 16)
    return {"x": x, "out": module._pos_embed(x), "given": {"pos_embed": module.pos_embed}}
