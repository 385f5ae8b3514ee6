"""The ledger: what packages compute otherwise than a paper or their own documentation says, as smallest cases.

``python -m tests.parity.ledger`` writes ``asv_bench/recorded/ledger.json`` from the packages that are installed, and
``python docs/field.py`` the page. An entry is a function that returns our answer and theirs, and what to know of it.
"""

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

import relpos_np as rp
from tests.parity.adaptors import RECORDED, installed, written

RECORD = RECORDED / "ledger.json"
# "error": against the paper, the documentation, or the package's own code elsewhere. "rounding": of what should be
# exact. "convention": both are used, and who changes packages must know. "claim": said to be wrong, and is not.
KINDS = ("error", "rounding", "convention", "claim")
ENTRIES: dict[str, "Entry"] = {}


@dataclass(frozen=True)
class Entry:
    """One difference.

    `found` returns ours and theirs: numbers, or lists of them.
    """

    name: str
    package: str
    kind: str
    case: str
    why: str
    link: str
    found: Callable[[], tuple[Any, Any]]

    @property
    def installed(self):
        """The version of the package, or None."""
        return installed(self.package)

    def answers(self):
        """Ours and theirs, rounded to what a page shows."""

        before = torch.get_default_dtype()
        torch.manual_seed(0)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # theirs: of what will change
                return tuple(rounded(x) for x in self.found())
        finally:
            torch.set_default_dtype(before)


def rounded(x):
    if isinstance(x, bool | int | str):
        return x
    if isinstance(x, list | tuple):
        return [rounded(one) for one in x]
    return float(f"{float(x):.4g}")


def entry(package, kind, link=""):
    """An entry of a function: the first paragraph of its docstring says the case, the second what to know of it."""

    def kept(function):
        name = function.__name__
        case, why = (" ".join(text.split()) for text in function.__doc__.split("\n\n"))
        ENTRIES[name] = Entry(name, package, kind, case, why, link, function)
        return function

    return kept


# ---------------------------------------------------------------------------------------------- images


@entry("timm", "error", "https://github.com/huggingface/pytorch-image-models/issues/2438")
def swin_shifts_before_it_pads():
    """A map of 9 rows in windows of 4 that are shifted by 2 (`SwinTransformerBlock`): does row 8 change when row 0
    does? Rows 0 and 8 lie at opposite edges.

    It shifts the map, then pads it to 12 rows; its mask is made for one that was padded first, so that the first rows,
    which the shift brought to the end, attend the last ones. `pad_order="shift_then_pad"` computes the same.
    """

    from relpos_np.layers import SwinAttention
    from tests.parity.modules import without_torchvision

    with without_torchvision():
        from timm.models.swin_transformer import SwinTransformerBlock
    torch.set_default_dtype(torch.float64)
    block = SwinTransformerBlock(8, (9, 8), 2, window_size=4, shift_size=2).eval()
    ours = SwinAttention.from_state_dict(
        block.state_dict(), (4, 4), shift_size=(2, 2), pad_order="pad_then_shift", small_maps="axis"
    )
    x = torch.randn(1, 9, 8, 8)
    changed = x.clone()
    changed[:, 0] += torch.randn(8)
    theirs = (block._attn(changed) - block._attn(x))[:, 8].abs().max() > 1e-9
    own = np.abs(ours(changed.numpy(), backend="numpy") - ours(x.numpy(), backend="numpy"))[:, 8].max() > 1e-9
    return ("changes" if own else "stays"), ("changes" if theirs else "stays")


@entry("transformers", "error")
def beit_takes_height_for_width():
    """`BeitRelativePositionBias` of a grid of 1 by 3 patches with one head, and a table that holds the numbers of its
    own rows: the bias of the first patch with patches 0, 1, 2.

    `forward` takes the height of the grid for its width where it gives the table two dimensions, and so resizes the
    table of the turned grid: on all grids that are no squares, also on the one that the table was trained for.
    """
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    module = BeitRelativePositionBias(BeitConfig(image_size=(2, 6), patch_size=2, num_attention_heads=1, hidden_size=4))
    table = np.arange(len(module.relative_position_bias_table), dtype=np.float64)[:, None]
    module.relative_position_bias_table.data = torch.from_numpy(table)
    zeros = np.zeros((1, 4, 1))
    ours = rp.logits(zeros, zeros, position=rp.BEiT(table, (1, 3)), backend="numpy")
    return list(ours[0, 1, 1:]), list(module((1, 3))[0, 0, 1, 1:].tolist())


@entry("transformers", "error")
def swin_v2_adds_its_mask_twice():
    """`Swinv2SelfAttention` with a window of 1 by 2 and the temperature at its limit; a query that is opposite to its
    own key and along the other one, which lies in another region and has -100 in the mask: the weight of the other.

    It adds the mask twice. At the limit cosine scores are -100 and 100, so that -100 once leaves the other key ahead,
    as in the authors' code, and twice makes both equal. Where scores are small the weight is 0 either way.
    """
    from transformers import Swinv2Config
    from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

    torch.set_default_dtype(torch.float64)
    module = Swinv2SelfAttention(Swinv2Config(qkv_bias=False), 2, 1, (1, 2), [0, 0]).eval()
    for layer, sign in ((module.query, -1.0), (module.key, 1.0), (module.value, 1.0)):
        layer.weight.data = sign * torch.eye(2)
    module.logit_scale.data.fill_(9.0)
    for weight in module.continuous_position_bias_mlp.parameters():
        weight.data.zero_()
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    regions = torch.tensor([[[0.0, -100.0], [-100.0, 0.0]]])
    out = module(x, regions)[0][0, 0, 0]
    k = x.numpy()[:, None]
    # A bias of 16 sigmoid(0) for all pairs, which the softmax does not see.
    first, last = np.zeros((512, 2)), np.zeros((1, 512))
    position = rp.SwinV2(first, np.zeros(512), last, np.full((1, 1, 1), 9.0), (1, 2), variant="transformers")
    ours = rp.attention(-k, k, k, position=position, mask=regions.numpy()[:, None], backend="numpy")
    # A mean of its own key's value, 1, and the other's, -1.
    return (1 - ours[0, 0, 0, 0]) / 2, (1 - float(out)) / 2


@entry("attn-gym", "error")
def natten_clamps_rows_to_the_width():
    """`generate_natten(canvas_w=6, canvas_h=9, kernel_w=3, kernel_h=3)`: how many keys the query in row 4, column 5
    attends.

    It finds row and column of a place right, but calls the row x and clamps it to the width, the column to the height.
    On a canvas that is no square, windows at the ends of its sides are cut or lie elsewhere.
    """
    from attn_gym.masks import generate_natten

    at = torch.arange(54)
    query = 4 * 6 + 5
    theirs = int(generate_natten(6, 9, 3, 3)(0, 0, torch.tensor(query), at).sum())
    zeros = np.zeros((1, 54, 1))
    position = rp.NeighborhoodBias(None, (9, 6), (3, 3))
    ours = int(np.isfinite(rp.logits(zeros, zeros, position=position, backend="numpy"))[0, query].sum())
    return ours, theirs


# ---------------------------------------------------------------------------------------------- ALiBi


@entry("attn-gym", "error")
def alibi_slopes_of_three_heads():
    """`generate_alibi_bias(3)`: what the three heads take off a score at distance 1.

    The paper's formula for powers of two is used for any number of heads. The authors' code, BLOOM and MPT take the
    slopes of the power of two below, then every other one of twice as many.
    """
    from attn_gym.mods import generate_alibi_bias

    mod = generate_alibi_bias(3)
    one, zero = torch.tensor(1), torch.tensor(0)
    theirs = [-mod(torch.tensor(0.0), zero, torch.tensor(h), one, zero).item() for h in range(3)]
    return list(rp.reference.alibi_slopes(3)), theirs


@entry("transformers", "error")
def mpt_ignores_alibi_bias_max():
    """`MptModel` with `attn_config={'alibi_bias_max': 2}` and two heads: the slope of the first head.

    The number is read from the configuration, and `build_mpt_alibi_tensor` called without it: it computes with its
    default 8 whatever a checkpoint says.
    """
    from transformers import MptConfig, MptModel

    config = MptConfig(d_model=4, n_heads=2, n_layers=1, vocab_size=7, max_seq_len=8, attn_config={"alibi_bias_max": 2})
    model, seen = MptModel(config).eval(), []
    attention = model.blocks[0].attn
    attention.register_forward_pre_hook(lambda _, given, named: seen.append(named["position_bias"]), with_kwargs=True)
    model(torch.arange(3)[None])
    bias = seen[0].reshape(2, -1)
    return rp.reference.alibi_slopes(2, bias_max=2.0)[0], (bias[0, -1] - bias[0, -2]).item()


@entry("transformers", "rounding")
def falcon_rounds_its_bias_to_bfloat16():
    """`build_alibi_tensor` of Falcon for 12 heads, in float32: the last head's bias of key 31.

    Slopes and products are rounded to bfloat16 on the way, whatever dtype is asked for: biases of float32 are wrong by
    up to 2^-7 of themselves.
    """
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 32, dtype=torch.long), 12, torch.float32)
    return 31 * rp.reference.alibi_slopes(12)[11], theirs.reshape(12, -1)[11, 31].item()


# ---------------------------------------------------------------------------------------------- T5 and others


@entry("transformers", "rounding")
def t5_rounds_a_border():
    """`T5Attention._relative_position_bucket` of distance 42 with 38 buckets up to distance 196.

    The formula's floor is of a whole number there: 9 + 10 log(42/9) / log(196/9) = 14. In float32 the quotient of two
    logarithms is below it. With T5's own 32 buckets and 128 no distance is such a border. `rounding="float32"` repeats
    it.
    """
    from transformers.models.t5.modeling_t5 import T5Attention

    # In the middle of many, as a model computes it.
    theirs = T5Attention._relative_position_bucket(-torch.arange(64), num_buckets=38, max_distance=196)[42]
    return int(rp.reference.t5_bucket(np.array([-42]), num_buckets=38, max_distance=196)[0]), int(theirs)


@entry("torchscale", "error")
def xpos_has_two_middles():
    """`XPOS(2)` of two queries and four keys of ones, both from position 0 on: the factor on the score of query 0 and
    key 0, to the power of 512.

    Powers of xPos count from the middle of the sequence, so that those of query and key cancel but for their distance.
    The module takes the middle of each operand that it is given: where lengths differ, and `offset` does not make up
    for it, every score has a factor that is the distance of the two middles.
    """
    from torchscale.component.xpos_relative_position import XPOS

    module = XPOS(2)
    q, k = module(torch.ones(1, 2, 2)), module(torch.ones(1, 4, 2), downscale=True)
    theirs = float((q[0, 0] @ k[0, 0]) / 2)
    ones = np.ones((1, 4, 2))
    ours = rp.logits(ones[:, :2], ones, position=rp.XPos(), offset=0, scale=1.0, backend="numpy")[0, 0, 0] / 2
    return ours**512, theirs**512


@entry("espnet", "error", "https://github.com/espnet/espnet/pull/2816")
def legacy_rows_count_down_from_the_table():
    """`LegacyRelPositionalEncoding(2, 0.0, max_len=20)` of three frames: the distances that its rows are sines of.

    Rows are the first of a table that counts down from max_len - 1, whatever the input's length: 19, 18, 17 for
    distances 2, 1, 0. A model that was trained so has learned it; to read "distance 0" into the last row is wrong. The
    class that is not legacy has the distances.
    """
    from espnet.nets.pytorch_backend.transformer.embedding import LegacyRelPositionalEncoding

    _, rows = LegacyRelPositionalEncoding(2, 0.0, max_len=20)(torch.zeros(1, 3, 2))
    table = rp.Sinusoidal(2).encode(np.arange(20))
    return [2, 1, 0], [int(np.abs(table - row).max(-1).argmin()) for row in rows[0].numpy()]


# ---------------------------------------------------------------------------------------------- windows


@entry("transformers", "error", "https://github.com/huggingface/transformers/issues/46305")
def moonshine_looks_ahead_one_frame_less():
    """`sliding_window_mask_function((16, 4))` of Moonshine Streaming: how many later frames query 10 attends.

    The paper (arXiv:2602.12241) calls a w_right of 4 a lookahead of 4 frames, 80 ms; the mask takes distances below it.
    How the weights were trained is not known.
    """
    from transformers.models.moonshine_streaming import modeling_moonshine_streaming

    seen = modeling_moonshine_streaming.sliding_window_mask_function((16, 4))
    zeros = np.zeros((1, 32, 1))
    scores = rp.logits(zeros, zeros, window=(15, 4), backend="numpy")[0, 10]
    return int(np.isfinite(scores[11:]).sum()), sum(bool(seen(0, 0, 10, j)) for j in range(11, 32))


@entry("transformers", "error")
def gemma4_hears_one_frame_less():
    """Gemma 4's audio encoder with its own configuration, 12 frames back and none ahead: how many keys the mask leaves
    to a query in the middle.

    The horizons are 12 and 0: blocks are cut for 12 frames before the query, positions are encoded for distances 12 to
    0, and the mask of Gemma 3n, which has the same numbers, leaves 13 keys. Here the horizon is given to
    `sliding_window_mask_function`, whose sides count the query's own frame: distance 12 is encoded and never seen.
    """
    from transformers import Gemma4AudioConfig
    from transformers.models.gemma4.modeling_gemma4 import sliding_window_mask_function

    config = Gemma4AudioConfig()
    back, ahead = config.attention_context_left - 1, config.attention_context_right
    seen = sliding_window_mask_function((back, ahead))
    zeros = np.zeros((1, 64, 1))
    scores = rp.logits(zeros, zeros, window=(back, ahead), backend="numpy")[0, 40]
    return int(np.isfinite(scores).sum()), sum(bool(seen(0, 0, 40, j)) for j in range(64))


@entry("transformers", "convention")
def a_window_is_one_wider_without_causality():
    """`sliding_window=2` in a causal and in a bidirectional mask: how many earlier keys a query in the middle attends
    in each.

    Causal windows count the query's own key, bidirectional ones do not: the same number means distances below 2, and up
    to 2. Here `window` is the largest distance that is attended, on every side.
    """
    from transformers import masking_utils

    def earlier(seen):
        return sum(bool(seen(0, 0, torch.tensor(4), torch.tensor(j))) for j in range(4))

    zeros = np.zeros((1, 9, 1))
    scores = [rp.logits(zeros, zeros, window=2, causal=causal, backend="numpy")[0, 4, :4] for causal in (True, False)]
    causal = masking_utils.sliding_window_causal_mask_function(2)
    both = masking_utils.sliding_window_bidirectional_mask_function(2)
    return [int(np.isfinite(s).sum()) for s in scores], [earlier(causal), earlier(both)]


# ---------------------------------------------------------------------------------------------- speech, cached keys


def speechbrain():
    """Its module of attention, which imports torchaudio and uses nothing of it."""
    stubs = {} if importlib.util.find_spec("torchaudio") else {"torchaudio": mock.MagicMock()}
    sys.modules.update(stubs)
    try:
        return importlib.import_module("speechbrain.nnet.attention")
    finally:
        for name in stubs:
            del sys.modules[name]


@entry("speechbrain", "error")
def future_distances_have_sines_of_past_ones():
    """`RelPosEncXL(2)` of two frames: the first channel, a sine, for distances 1, 0 and -1.

    Sines are odd, and those of the future are copied from the past; cosines are not, so that only every second channel
    tells what comes from what came. Transformer-XL, ESPnet and Conformers of transformers have -sin(1) there.
    """
    theirs = speechbrain().RelPosEncXL(2).make_pe(2)[0, :, 0]
    ours = rp.reference.sinusoidal(np.array([1.0, 0.0, -1.0]), 2)[:, 0]
    return ours.tolist(), theirs.tolist()


@entry("speechbrain", "convention")
def a_scale_of_all_heads():
    """`RoPEMHA(64, 4)`: by which factor products of queries and keys of 16 channels are scaled.

    `RelPosMHAXL` and `RoPEMHA` divide by the root of `embed_dim`, the channels of all heads, where others divide by
    that of one head's: weights need `scale=(heads * head_dim) ** -0.5` here.
    """
    one = np.eye(1, 16)[None]
    return rp.logits(one, one, backend="numpy").item(), speechbrain().RoPEMHA(64, 4).scale


@entry("rotary-embedding-torch", "rounding")
def positions_are_counted_in_the_dtype_of_operands():
    """`rotate_queries_or_keys` of 258 keys (1, 0, 0, 0) in bfloat16: the first channel of the last one, which stands at
    position 257.

    Positions are made with the dtype of the operands, and bfloat16 has no 257: it turns by 256. Of the first 2,048
    positions 641 are told apart.
    """
    from rotary_embedding_torch import RotaryEmbedding

    keys = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.bfloat16).expand(1, 258, 4)
    theirs = RotaryEmbedding(4).rotate_queries_or_keys(keys)[0, -1, 0].float()
    x = keys.float().numpy()
    ours = rp.logits(x[:, :1], x, position=rp.Rotary(layout="interleaved"), scale=1.0, offset=0)[0, 0, -1]
    return torch.tensor(ours).bfloat16().float().item(), theirs.item()


@entry("rotary-embedding-torch", "error")
def cached_keys_have_another_middle():
    """`rotate_queries_with_cached_keys` with `use_xpos=True` of one query and 2,048 keys, all (1, 0, 0, 0): the score
    of the query with the last key, at whose place it stands.

    Exponents of xPos count from the middle of what is turned, which for a query alone is another one than for its keys.
    At distance 0 the factors should cancel; with 2,048 keys they leave 0.08.
    """
    from rotary_embedding_torch import RotaryEmbedding

    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 2048, 4)
    q, k = RotaryEmbedding(4, use_xpos=True).rotate_queries_with_cached_keys(x[:, :1], x)
    ours = rp.logits(x[:, :1].numpy(), x.numpy(), position=rp.XPos(), scale=1.0, backend="numpy")[0, 0, -1]
    return ours.item(), (q[0, 0] @ k[0, -1]).item()


@entry("onnxruntime", "error")
def unidirectional_means_three_things():
    """`com.microsoft.MultiHeadAttention(unidirectional=1)` of 4 queries and 9 keys with equal scores: how many keys
    each query attends.

    The first three attend as if the mask began at the first key, and the last one attends all keys, as if it ended at
    the last.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    names = ("query", "key", "value")
    described = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*names, "out")]
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=1, unidirectional=1)
    graph = helper.make_graph([node], "causal", described[:3], described[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run
    q, k, v = np.zeros((1, 4, 9), np.float32), np.zeros((1, 9, 9), np.float32), np.eye(9, dtype=np.float32)[None]
    theirs = run(None, dict(zip(names, (q, k, v), strict=True)))[0]
    ours = rp.attention(q, k, v, causal=True, backend="numpy")
    return tuple((x[0] > 0).sum(-1).tolist() for x in (ours, theirs))


# ---------------------------------------------------------------------------------------------- conventions


@entry("onnx", "convention", "https://github.com/onnx/onnx/issues/7865")
def a_cap_comes_before_the_bias():
    """Attention of operator set 23 with a cap of 1 and a bias of 3 on the first of two keys, which otherwise have score
    0: the weight of the second key.

    The cap is applied to products of queries and keys, and what is added is not capped. Here a cap takes in what
    positions add, as in the published models that have both; `cap_order="content"` is ONNX's order. Before the change
    that the link names, ONNX too capped what it had added, its mask of -inf included, which then was -1 and let
    excluded keys through.
    """
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    shapes = {"q": (1, 1, 1, 1), "k": (1, 1, 2, 1), "v": (1, 1, 2, 1), "bias": (1, 1, 1, 2), "out": (1, 1, 1, 1)}
    described = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    node = helper.make_node("Attention", ["q", "k", "v", "bias"], ["out"], softcap=1.0)
    graph = helper.make_graph([node], "capped", described[:4], described[4:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    operands = {name: np.zeros(shapes[name], np.float32) for name in ("q", "k", "v", "bias")}
    operands["v"][0, 0, 1] = 1.0
    operands["bias"][..., 0] = 3.0
    theirs = ReferenceEvaluator(model).run(None, operands)[0]
    q, k, v = (operands[name] for name in "qkv")
    # The bucket of distance 0 has 3, all others none.
    bias = rp.T5(np.array([[3.0], *[[0.0]] * 7], np.float32), max_distance=8)
    ours = rp.attention(q, k, v, position=bias, offset=0, softcap=1.0, backend="numpy")
    return ours.item(), theirs.item()


@entry("torch", "convention")
def causal_masks_start_at_the_first_key():
    """`scaled_dot_product_attention(is_causal=True)` of one query and three keys with values 1, 2, 3 and equal scores.

    Its causal mask starts at the first key, as its documentation says: query i attends keys 0 to i. Here, in
    FlashAttention from 2.1 on, and wherever tokens are decoded, the last query attends all keys.
    """
    q, v = torch.zeros(1, 1, 1, 1), torch.tensor([1.0, 2.0, 3.0])[:, None].expand(1, 1, 3, 1)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, 0 * v, v, is_causal=True)
    x = v.numpy()
    ours = rp.attention(q.numpy(), 0 * x, x, causal=True, backend="numpy")
    return ours.item(), theirs.item()


@entry("torch", "convention")
def excluded_values_reach_the_output():
    """`scaled_dot_product_attention` of two keys, the second of which a mask excludes, and whose value is NaN; that of
    the first is 1.

    A probability of 0 is multiplied with every value, and 0 times NaN is NaN: padding that nobody has written can reach
    results. Here what is excluded is not read.
    """
    q, v = torch.zeros(1, 1, 1, 1), torch.tensor([1.0, float("nan")])[:, None].expand(1, 1, 2, 1)
    mask = torch.tensor([[True, False]])
    theirs = torch.nn.functional.scaled_dot_product_attention(q, torch.zeros_like(v), v, attn_mask=mask)
    ours = rp.attention(q.numpy(), np.zeros((1, 1, 2, 1), np.float32), v.numpy(), mask=mask.numpy(), backend="numpy")
    return str(ours.item()), str(theirs.item())


@entry("x-transformers", "convention")
def grouped_heads_alternate():
    """`Attend` of four query heads and two key heads, whose values are 0 and 1: the output of each query head.

    Query head h shares key head h mod 2. In Llama, torch, JAX, ONNX and here groups are neighbours, h // 2: weights of
    grouped heads need another order.
    """
    from x_transformers.attend import Attend

    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 1, 2)
    v = torch.tensor([0.0, 1.0])[None, :, None, None].expand(1, 2, 1, 2)
    theirs = Attend()(q, k, v)[0][0, :, 0, 0]
    ours = rp.attention(q.numpy(), k.numpy(), v.numpy(), backend="numpy")[0, :, 0, 0]
    return ours.tolist(), theirs.tolist()


# ---------------------------------------------------------------------------------------------- said to be wrong


@entry("torch", "claim", "https://github.com/pytorch/torchtitan/pull/2211")
def a_sink_is_a_sigmoid():
    """`sigmoid(lse - sink)` times the output without a sink, as torchtitan computes gpt-oss: a key with score 0 and
    value 1, and a sink of 1.

    The report takes it for wrong and renormalizes by log-sum-exps. But exp(lse) / (exp(lse) + exp(sink)) is sigmoid(lse
    - sink): what it replaces is exact. Its own correction is clamped to exp(-20), and so a sink that is further above
    all scores is not.
    """
    lse, value, sink = torch.zeros((), dtype=torch.float64), 1.0, 1.0
    theirs = torch.sigmoid(lse - sink) * value
    zeros = np.zeros((1, 1, 1))
    ours = rp.attention(zeros, zeros, zeros + value, sinks=np.array([sink]), backend="numpy")
    return ours.item(), theirs.item()


# ---------------------------------------------------------------------------------------------- the record


def record(names=()):
    """Write what the installed packages answer, and keep what was recorded of the others."""
    before = json.loads(RECORD.read_text(encoding="utf-8"))["entries"] if RECORD.exists() else {}
    found = {}
    for name, one in ENTRIES.items():
        text = {"package": one.package, "kind": one.kind, "case": one.case, "why": one.why, "link": one.link}
        if one.installed and (not names or name in names):
            ours, theirs = one.answers()
            print(f"{name}: {one.package} {one.installed}, ours {ours}, theirs {theirs}", flush=True)
            found[name] = {**text, "version": one.installed, "ours": ours, "theirs": theirs}
        elif name in before:
            found[name] = before[name] | text
    written(RECORD, entries=found)


if __name__ == "__main__":
    record(sys.argv[1:])
