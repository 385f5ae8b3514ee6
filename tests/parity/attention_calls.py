"""What enters and what leaves the attention of a model of transformers, layer by layer, in its own eager code."""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from operator import attrgetter
from unittest.mock import patch

import numpy as np


@dataclass
class Seen:
    """One call of attention: operands before they turn, (B, H, L, D), and the output (B, L, H D_v)."""

    module: object
    q: object
    k: object
    v: object
    out: object
    inputs: dict = field(default_factory=dict)
    mask: object = None
    project: object = None


def array(x):
    return x.detach().double().numpy()


def _modules(model):
    return {sys.modules[type(x).__module__] for x in model.modules() if ".models." in type(x).__module__}


def _before(turned, still, last):
    """The operand before it turned: some channels were turned apart, the first ones or the last."""
    import torch

    if turned.shape[1:3] != still.shape[1:3] and turned.shape[1] == still.shape[2]:
        turned = turned.transpose(1, 2)
    size = turned.shape[-1]
    turned = turned.expand(*still.shape[:-1], size)
    if size == still.shape[-1]:
        return turned
    parts = (still[..., :-size], turned) if last else (turned, still[..., size:])
    return torch.cat(parts, dim=-1)


def _factor(cos, sin=None, *others):
    """By how much turning makes vectors longer: cosines and sines, or complex numbers, have a factor."""
    return (cos.abs() if cos.is_complex() else (cos**2 + sin**2) ** 0.5).max().item()


def _batch(calls):
    """Calls of one layer, one after the other, as items of a batch."""
    joined = {name: np.concatenate([getattr(call, name) for call in calls]) for name in ("q", "k", "v", "out")}
    return Seen(calls[0].module, **joined)


TURNING = (
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb_vision"),
    "apply_rotary_emb",
)


@contextmanager
def interface(model, last=False):
    """Record calls of a model whose attention goes through `eager_attention_forward`."""
    import torch

    seen, parts, pending, chosen, hidden = [], [], [], [], []
    lengths = []  # the factor that turning has beside
    single, kept = [], {}  # operands that turn one at a time, and keys that later layers take

    def choosing(indexer, args, indices):
        chosen.append(indices.numpy().astype(np.int64))

    def turning(original):
        def turn_one(x, *args, **kwargs):
            single.append(x)
            return original(x, *args, **kwargs)

        if [*signature(original).parameters][:2] == ["x", "cos"]:
            return turn_one

        def turn(q, k, *args, **kwargs):
            pending.append((q, k))
            lengths[:] = [_factor(*args)] if args else []
            return original(q, k, *args, **kwargs)

        return turn

    def attending(original):
        def attend(module, query, key, value, attention_mask, *args, **kwargs):
            out = original(module, query, key, value, attention_mask, *args, **kwargs)
            q, k = query, key
            rest = []
            if single:
                if len(single) == 2:
                    kept[module.layer_type] = single[1]
                pending.append((single[0], kept[module.layer_type]))
                single.clear()
            if "Mistral4" in type(module).__name__:  # what arrives has its temperature already
                ropes = module.config.rope_parameters
                at = torch.arange(query.shape[-2])[:, None] // ropes["original_max_position_embeddings"]
                query = query / (1 + ropes["llama_4_scaling_beta"] * torch.log1p(at))
            if hasattr(module, "query_layernorm"):  # norms with weights come after turning: so do our operands
                pending.clear()
            if pending:
                (q_before, k_before), *_ = pending
                if q_before.ndim == 3:  # (L, H, D), of frames or windows that are called one after the other
                    n = query.shape[-2]
                    rest = [(q_before[n:], k_before[n:])] if len(q_before) > n else []
                    q_before, k_before = (x[:n].transpose(0, 1)[None] for x in (q_before, k_before))
                if hasattr(module, "qk_norm"):  # after turning, which keeps lengths
                    q_before, k_before = (module.qk_norm(x * lengths[0]) for x in (q_before, k_before))
                if type(module).__name__ == "NanoChatAttention":  # the same
                    q_before, k_before = module.q_norm(q_before * lengths[0]), module.k_norm(k_before * lengths[0])
                q, k = _before(q_before, query, last), _before(k_before, key, last)
            elif getattr(module, "attn_temperature_tuning", False):  # Llama 4: what arrives has its factor already
                at = torch.arange(q.shape[-2])[:, None]
                q = q / (torch.log(torch.floor((at + 1.0) / module.floor_scale) + 1.0) * module.attn_scale + 1.0)
            if getattr(module, "rel_logits_proj", None) is not None and not module.is_sliding:  # Inkling: the same
                at = torch.arange(q.shape[-2])[:, None] + 1.0
                config = module.config
                q = q / (1 + config.log_scaling_alpha * torch.log((at / config.log_scaling_n_floor).clamp(min=1.0)))
            pending[:] = rest
            one = Seen(module, array(q), array(k), array(value), array(out[0].flatten(2)))
            if hasattr(module, "relative_position_bias"):  # Swin: what is left is the mask of the shift
                one.mask = array(attention_mask - module.relative_position_bias())
            if chosen:
                one.inputs["selected"] = chosen[-1]
            if hidden:
                one.inputs["hidden"] = hidden.pop()
            seen.append(one)
            if rest:
                parts.append(seen.pop())
            elif parts:
                seen.append(_batch([*parts, seen.pop()]))
                parts.clear()
            return out

        return attend

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".indexer"):
                stack.callback(module.register_forward_hook(choosing).remove)
            elif name.endswith(".r_proj"):
                note = lambda module, args, y: hidden.append(array(args[0]))  # noqa: E731
                stack.callback(module.register_forward_hook(note).remove)
        for module in _modules(model):
            for name, function in list(vars(module).items()):
                if name == "eager_attention_forward":
                    stack.enter_context(patch.object(module, name, attending(function)))
                elif name in TURNING:
                    stack.enter_context(patch.object(module, name, turning(function)))
        yield seen


@contextmanager
def hooks(model, cls, split, out):
    """Record calls of modules of a class: `split(module, outputs)` makes q, k and v of what its submodules gave.

    `out` is the submodule that projects the output, whose input is what attention gave.
    """
    seen, removed = [], []
    for module in model.modules():
        if type(module).__name__ not in ((cls,) if isinstance(cls, str) else cls):
            continue
        given = {}

        # The first call of a forward pass counts: DeBERTa projects positions with the same submodules afterwards.
        def note(child, args, y, name="", given=given):
            given.setdefault(name, y)

        def note_mask(child, args, kwargs, given=given):
            given["mask"] = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)

        def projected(child, args, given=given, module=module):
            q, k, v = split(module, given)
            one = Seen(module, array(q), array(k), array(v), array(args[0].reshape(len(q), q.shape[-2], -1)))
            if "Swinv2" in type(module).__name__ and given["mask"] is not None:
                one.mask = 2 * array(given["mask"])[:, None]  # added twice
                one.mask = np.tile(one.mask, (len(q) // len(one.mask), 1, 1, 1))
            seen.append(one)
            given.clear()

        for name, child in module.named_modules():
            if name:
                removed.append(child.register_forward_hook(lambda m, x, y, name=name, note=note: note(m, x, y, name)))
            if name == "self":
                removed.append(child.register_forward_pre_hook(note_mask, with_kwargs=True))
        removed.append(module.get_submodule(out).register_forward_pre_hook(projected))
    try:
        yield seen
    finally:
        for handle in removed:
            handle.remove()


@contextmanager
def wavlm(model):
    """Record WavLM, which hands its weights to a function of PyTorch, projection of the output included."""
    seen, removed = [], []
    for module in model.modules():
        if type(module).__name__ != "WavLMAttention":
            continue

        def called(module, args, kwargs, result):
            hidden = args[0] if args else kwargs["hidden_states"]
            q, k, v = (
                heads(linear(hidden), module.num_heads) for linear in (module.q_proj, module.k_proj, module.v_proj)
            )
            weight, bias = array(module.out_proj.weight), array(module.out_proj.bias)
            one = Seen(module, array(q), array(k), array(v), array(result[0]), {"hidden": array(hidden)})
            one.project = lambda x: x @ weight.T + bias
            seen.append(one)

        removed.append(module.register_forward_hook(called, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in removed:
            handle.remove()


@contextmanager
def diffllama(model):
    """Record DiffLlama, whose layers attend twice with the same queries and keys: two items of a batch."""
    seen = []
    with interface(model) as calls:
        yield seen
    for first, second in zip(calls[::2], calls[1::2], strict=True):
        second.q, second.k = first.q, first.k
        seen.append(_batch([first, second]))


@contextmanager
def jetmoe(model):
    """Record JetMoE, which repeats its keys as a whole: heads of queries that share one are far apart."""
    import torch
    from transformers.models.jetmoe import modeling_jetmoe as code

    seen, turned = [], []
    turn, attend = code.apply_rotary_pos_emb, code.eager_attention_forward

    def turning(q, k, *args, **options):
        turned.append((q, k))
        return turn(q, k, *args, **options)

    def attending(module, query, key, value, *args, **options):
        out = attend(module, query, key, value, *args, **options)
        q, k = turned.pop()
        order = torch.arange(q.shape[1]).view(module.top_k, -1).T.flatten()
        out_of_heads = out[0][:, :, order].flatten(2)
        seen.append(Seen(module, *map(array, (q[:, order], k, value[:, : k.shape[1]], out_of_heads))))
        return out

    with (
        patch.object(code, "apply_rotary_pos_emb", turning),
        patch.object(code, "eager_attention_forward", attending),
    ):
        yield seen


@contextmanager
def xlnet(model):
    """Record XLNet, which has the length as first axis, and weights that are no modules."""
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention as Attention

    seen, original = [], Attention.rel_attn_core

    def core(self, q, k, v, *args, **kwargs):
        out = original(self, q, k, v, *args, **kwargs)
        q, k, v = (array(x.permute(1, 2, 0, 3)) for x in (q, k, v))
        seen.append(Seen(self, q, k, v, array(out.transpose(0, 1).flatten(2))))
        return out

    with patch.object(Attention, "rel_attn_core", core):
        yield seen


def heads(x, count):
    """(B, L, H D) as (B, H, L, D)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _apart(q, k, v, count="num_heads"):
    """Three projections."""

    def split(module, given):
        n = attrgetter(count)(module)
        return tuple(heads(given[name], n) for name in (q, k, v))

    return split


def _codegen(module, given):
    """Groups of heads, of which each has queries, values and keys."""
    q, v, k = given["qkv_proj"].unflatten(-1, (4, 3, -1)).unbind(-2)
    return tuple(heads(x.flatten(2), module.num_attention_heads) for x in (q, k, v))


def _bloom(module, given):
    return tuple(
        x.transpose(1, 2) for x in given["query_key_value"].unflatten(-1, (module.num_heads, 3, -1)).unbind(-2)
    )


def _neox(module, given):
    """Each head has queries, keys and values side by side."""
    qkv = given["query_key_value"].unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)
    return qkv.chunk(3, dim=-1)


def _side_by_side(module, given):
    """All queries, all keys and all values."""
    count = module.n_head if hasattr(module, "n_head") else module.num_heads
    return [heads(x, count) for x in given["c_attn"].chunk(3, dim=-1)]


def _ibert(module, given):
    """Projections come with the scale that they are rounded with."""
    inner = module.self
    return [heads(given[f"self.{x}"][0], inner.num_attention_heads) for x in ("query", "key", "value")]


def _falcon(module, given):
    x = given["query_key_value"].unflatten(-1, (-1, module.head_dim))
    if module.new_decoder_architecture:
        x = x.unflatten(-2, (module.num_kv_heads, -1))
        q, k, v = x[..., :-2, :].flatten(2, 3), x[..., -2, :], x[..., -1, :]
    elif module.multi_query:
        q, k, v = x[..., :-2, :], x[..., [-2], :], x[..., [-1], :]
    else:
        return _bloom(module, given)
    return tuple(y.transpose(1, 2) for y in (q, k, v))


def _mpt(module, given):
    qkv = given["Wqkv"]
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(heads(x, module.n_heads) for x in qkv.chunk(3, dim=-1))


def _stacked(module, given):
    """SAM: (B, rows, columns, 3 H D)."""
    x = given["qkv"].flatten(1, 2).unflatten(-1, (3, module.num_attention_heads, -1))
    return tuple(y.transpose(1, 2) for y in x.unbind(2))


def _deepseek_v4(module, given):
    """One head of keys, which are the values too."""
    keys = given["kv_norm"][:, None]
    return given["q_b_norm"], keys, keys


def _deberta(module, given):
    """Heads of queries, keys and values, and biases of two of them."""
    inner = module.self
    q, k, v = heads(given["self.in_proj"], inner.num_attention_heads).chunk(3, dim=-1)
    bias = [x.view(1, inner.num_attention_heads, 1, -1) for x in (inner.q_bias, inner.v_bias)]
    return q + bias[0], k, v + bias[1]


def _inner(q, k, v):
    """Projections of the submodule `self`."""
    return lambda module, given: tuple(heads(given[f"self.{x}"], module.self.num_attention_heads) for x in (q, k, v))


# Class of the module, what makes q, k and v of what its submodules gave, and the submodule that reads the output.
HOOKS = {
    "gptj": ("GPTJAttention", _apart("q_proj", "k_proj", "v_proj", "num_attention_heads"), "out_proj"),
    "codegen": ("CodeGenAttention", _codegen, "out_proj"),
    "falcon": ("FalconAttention", _falcon, "dense"),
    "bloom": ("BloomAttention", _bloom, "dense"),
    "gpt_neox_japanese": ("GPTNeoXJapaneseAttention", _neox, "dense"),
    "openai": ("Attention", _side_by_side, "c_proj"),
    "imagegpt": ("ImageGPTAttention", _side_by_side, "c_proj"),
    "ibert": ("IBertAttention", _ibert, "output.dense"),
    "mpt": ("MptAttention", _mpt, "out_proj"),
    "ctrl": ("MultiHeadAttention", _apart("Wq", "Wk", "Wv"), "dense"),
    "xlm": ("MultiHeadAttention", _apart("q_lin", "k_lin", "v_lin", "n_heads"), "out_lin"),
    "gpt_neo": ("GPTNeoSelfAttention", _apart("q_proj", "k_proj", "v_proj"), "out_proj"),
    "bart": (
        ("XGLMAttention", "SpeechT5Attention", "VitsAttention", "MvpAttention", "TrOCRAttention"),
        _apart("q_proj", "k_proj", "v_proj"),
        "out_proj",
    ),
    "bert": (
        ("RoFormerAttention", "MegatronBertAttention", "RemBertAttention", "LayoutLMv3Attention"),
        _inner("query", "key", "value"),
        "output.dense",
    ),
    "deepseek_v4": ("DeepseekV4Attention", _deepseek_v4, "o_a_proj"),
    "swinv2": ("Swinv2Attention", _inner("query", "key", "value"), "output.dense"),
    "deberta": ("DebertaAttention", _deberta, "output.dense"),
    "deberta_v2": ("DebertaV2Attention", _inner("query_proj", "key_proj", "value_proj"), "output.dense"),
    "conformer": (
        (
            *("Wav2Vec2ConformerSelfAttention", "Wav2Vec2BertSelfAttention"),
            *("SeamlessM4TConformerSelfAttention", "SeamlessM4Tv2ConformerSelfAttention"),
        ),
        _apart("linear_q", "linear_k", "linear_v"),
        "linear_out",
    ),
    "parakeet": (
        "ParakeetEncoderAttention",
        _apart("q_proj", "k_proj", "v_proj", "config.num_attention_heads"),
        "o_proj",
    ),
    "sam": ("SamVisionAttention", _stacked, "proj"),
    "mpnet": ("MPNetSelfAttention", _apart("q", "k", "v", "num_attention_heads"), "o"),
}
