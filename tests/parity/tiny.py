"""A tiny model, with random weights, of any model type of transformers: made from its configuration's names alone."""

import inspect
import re
import sys

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LENGTH = 40
VOCABULARY = 99
# Tokens with a meaning get ids below it, and inputs are drawn from above.
FIRST_TOKEN = 32
LARGEST = 40_000_000

# What a number of a configuration becomes, by its name; the first pattern that fits. None: as it is.
WIDTHS = (
    (r"mamba_d_head|mamba_head_dim|ssm_head_dim", 32),
    (r"mamba_d_ssm|mamba_intermediate", 128),
    (r"lora_rank|rotary_dim", 16),
    (r"(q?k?_?rope|index|linear.*|.*)_?head_dim$|^head_dim$|head_size|d_kv|kv_channels|attention_head_size", 16),
    (r"(key_value|kv)_heads|num_kv_heads|multi_query_groups", 2),
    (r"heads$|^n_head$|_head$|num_attention_head|num_attn_heads", 4),
    (r"intermediate|ffn|d_ff|mlp_dim|n_inner|feed_?forward|ff_dim|filter", 48),
    (
        r"hidden_?size|d_model|n_embd|emb\w*_dim|hidden_dim|width|^dim$|_dim$|embedding_size|_channels$|lru_width|projection",
        64,
    ),
)
COUNTS = (
    (r"vocab_size|n_vocab|num_embeddings", VOCABULARY),
    (r"experts_per_tok|^top_?k$|moe_top_?k|moe_k$|num_selected_experts|expert_top_?k|experts_top_?k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"shared_layers|first_k_dense", 0),
    (r"(num|n)\w*experts|moe_num_experts", 4),
    (r"index_topk|index_top_k|topk_blocks|sparse_top", 8),
    (r"sliding_window$|window_size|local_window|attention_chunk_size|local_attention$|block_size$|attention_window", 8),
    (r"image_size|crop_size|img_size|input_size", 32),
    (r"patch_size", 8),
    (r"num_frames", 4),
    (r"max_position|n_positions|n_ctx|max_seq|max_sequence|max_length|context_length|max_source|max_target", 128),
    (r"num_mel_bins|n_mels|feature_size|num_mel", 16),
    (
        r"(hidden|encoder|decoder|num|n|attention|backbone|block\w*)_?layers?$|depth$|num_blocks|n_layer|num_hidden_layers",
        2,
    ),
)
# What is None by default, and some models cannot do without.
FILLED = {
    "vocab_size": VOCABULARY,
    "prediction_length": 8,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "sliding_window": 8,
}
FILLING = "tiny, nothing left out"
RECIPES = {
    "tiny": (*COUNTS, *WIDTHS),
    "tiny, as many heads of keys": (*COUNTS, *((p, 4 if "kv" in p else n) for p, n in WIDTHS)),
    FILLING: (*COUNTS, *((p, 4 if "kv" in p else n) for p, n in WIDTHS)),
    "tiny, its own head_dim": (*COUNTS, (r"^head_dim$", None), *WIDTHS),
    "tiny, other window": (*((p, 16 if "window" in p else n) for p, n in COUNTS), *WIDTHS),
    "tiny, as many layers": (*COUNTS[:-1], *WIDTHS),
}


class NotBuilt(Exception):
    """No recipe made a model that runs."""


def shrunk(config, rules, filling=False):
    """Arguments of a configuration's class that make a small one."""
    fill = FILLED if filling else {name: FILLED[name] for name in ("vocab_size", "prediction_length")}
    small = {name: x for name, x in fill.items() if getattr(config, name, 0) is None}
    values = {name: x for name, x in config.to_dict().items() if not name.startswith("_")}
    subs = set(getattr(type(config), "sub_configs", {})) | {
        name for name, x in vars(config).items() if isinstance(x, transformers.PreTrainedConfig)
    }
    chosen, layers = layers_of(values, rules)
    token = 3
    for name, value in values.items():
        if name in subs:
            sub = getattr(config, name, None)
            if isinstance(sub, transformers.PreTrainedConfig):
                # Its values are not the defaults of its class.
                own = {key: x for key, x in sub.to_dict().items() if key not in SAVED}
                small[name] = type(sub)(**{**own, **shrunk(sub, rules, filling)})
            continue
        if isinstance(value, bool) or value is None:
            continue
        if re.search(r"token_(id|index|idx)$|_id$|_token_ids?$", name) and rules:
            if isinstance(value, int) and value >= FIRST_TOKEN:
                small[name], token = token, token + 1
            continue
        if name == "mrope_section" and rules:
            small[name] = sections(value, 8)
        elif isinstance(value, dict) and ("mrope_section" in value or (filling and name == "rope_parameters")):
            share = value.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            small[name] = {**value, "mrope_section": sections(value.get("mrope_section", [2, 1, 1]), int(8 * share))}
        elif isinstance(value, list) and re.search("heads$", name) and rules:
            small[name] = [4] * len(value)
        elif isinstance(value, list) and chosen and len(value) == layers and layers > 2:
            small[name] = [value[i] for i in chosen]
        elif isinstance(value, int):
            target = next((n for pattern, n in rules if re.search(pattern, name)), None)
            if target is not None and target < value:
                small[name] = len(chosen) if chosen and name in LAYERS else target
    return small


SAVED = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def layers_of(values, rules):
    """Which layers are kept: one of each kind, and two at least; and how many there were."""
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    if not any("num_hidden_layers" in pattern for pattern, _ in rules) or layers < 2:
        return None, layers
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    if len(kinds) != layers:
        return None, layers
    chosen = sorted({kinds.index(kind) for kind in kinds})
    return (chosen if len(chosen) > 1 else [*chosen, chosen[0] + 1]), layers


def sections(value, pairs):
    """Pairs of channels of each axis."""
    parts = [max(1, x * pairs // sum(value)) for x in value]
    parts[0] += pairs - sum(parts)
    return parts


def class_of(config):
    """The class of models without a head; else any that has this configuration."""
    for name in (
        "MODEL_MAPPING",
        *(x for x in dir(modeling_auto) if x.endswith("_MAPPING") and x.startswith("MODEL_")),
    ):
        mapping = getattr(modeling_auto, name)
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    __import__(name)
    for cls in vars(sys.modules[name]).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, transformers.PreTrainedModel)
            and getattr(cls, "config_class", None) is type(config)
            and cls.forward is not torch.nn.Module.forward
            and not cls.__name__.endswith("PreTrainedModel")
        ):
            return cls
    raise NotBuilt("no class of models")


def randomise(model):
    """Scores of about 1, and no table, bias or sink left at 0."""
    for name, x in model.named_parameters():
        if not x.is_floating_point() or not x.numel():
            continue
        if x.ndim >= 2:
            fan_in = x.shape[1:].numel()
            embedding = "embed" in name and x.shape[0] > x.shape[-1] // 2 and x.ndim == 2
            torch.nn.init.normal_(x, std=1.0 if embedding else fan_in**-0.5)
        elif re.search(r"sink", name):
            torch.nn.init.normal_(x)
        elif not re.search(r"A_log|dt_|decay", name):
            x.add_(0.1 * torch.randn_like(x))


def build(config_class, recipe):
    """A model in evaluation mode with its own attention."""
    config = config_class(**shrunk(config_class(), RECIPES[recipe], recipe == FILLING))
    cls = class_of(config)
    with torch.device("meta"):
        try:
            size = sum(x.numel() for x in cls._from_config(config, attn_implementation="eager").parameters())
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError):
            size = getattr(config, "hidden_size", 0) ** 2
    if size > LARGEST:
        raise NotBuilt(f"{size / 1e6:.0f} million parameters")
    for part in (config, *vars(config).values()):
        if isinstance(part, transformers.PreTrainedConfig) and hasattr(part, "use_cache"):
            part.use_cache = False
    model = cls._from_config(config, attn_implementation="eager").float().eval()
    randomise(model)
    return model


def first(config, *names, default=None):
    """A number that a configuration, or one inside it, has under one of several names."""
    configs = [config, *(x for x in vars(config).values() if isinstance(x, transformers.PreTrainedConfig))]
    for name in names:
        for x in configs:
            value = getattr(x, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def candidates(model):
    """Inputs that a model of this kind may take, likeliest first."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    size = first(config, "image_size", "img_size", "input_size", default=32)
    channels = first(config, "num_channels", "in_channels", "in_chans", default=3)
    mels = first(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", default=16)
    width = first(config, "hidden_size", "d_model", default=64)
    vocabulary = first(config, "vocab_size", default=VOCABULARY)
    low = min(FIRST_TOKEN, vocabulary // 2)
    ids = torch.randint(low, vocabulary, (2, LENGTH))
    frames = 2 * first(config, "max_source_positions", default=LENGTH)
    choices = {
        "input_ids": [ids],
        "pixel_values": [
            torch.randn(2, channels, size, size),
            torch.randn(2, first(config, "num_frames", default=4), channels, size, size),
            torch.randn(2, channels, 64, 64),
            torch.randn(2, 1, channels, size, size),
        ],
        "pixel_values_videos": [torch.randn(2, 4, channels, size, size)],
        "input_values": [
            torch.randn(2, 4000),
            torch.randn(2, first(config, "max_length", default=128), mels),
            torch.randn(2, 1, 4000),
            torch.randn(2, 160, mels),
        ],
        "input_features": [
            torch.randn(2, frames, mels),
            torch.randn(2, mels, frames),
            torch.randn(2, 1, 64, mels),
            torch.randn(2, mels, 400),
        ],
        "inputs_embeds": [torch.randn(2, LENGTH, width)],
        "past_values": [
            torch.randn(2, first(config, "context_length", default=64), first(config, "num_input_channels", default=1))
        ],
        "hidden_states": [
            torch.randn(32, channels * 2 * 64),
            torch.randn(32, channels * 64),
            torch.randn(2, LENGTH, width),
        ],
    }
    patches = (torch.randn(32, channels * time * side * side) for time in (1, 2) for side in (8, 14, 16))
    choices["input_ids"].append(ids[:, :16])
    choices["pixel_values"] += [torch.randn(1, 2, channels, size, size), *patches]
    fill = {
        "decoder_input_ids": torch.randint(low, vocabulary, (2, 13)),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "qformer_input_ids": ids,
        "bbox": torch.zeros(2, LENGTH, 4, dtype=torch.int64),
        "visual_feats": torch.randn(2, 5, first(config, "visual_feat_dim", default=64)),
        "visual_pos": torch.rand(2, 5, 4),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.int64),
    }
    fill["image_grid_thw"] = fill["grid_thw"]
    needed = {name for name, x in takes.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD}
    always = {name: fill[name] for name in fill if name in needed or (name == "decoder_input_ids" and name in takes)}
    always |= {name: fill[name] for name in ("bbox", "visual_feats", "visual_pos") if name in takes}
    main = [name for name in (model.main_input_name, *choices) if name in takes and name in choices]
    found = []
    for name in dict.fromkeys(main):
        others = [
            x for x in ("pixel_values", "input_features", "input_values", "input_ids") if x in takes and x != name
        ]
        sets = [{other: choices[other][0]} for other in others]
        sets = [x for x in ({}, *sets) if needed <= {name} | x.keys() | always.keys()]
        found += [{name: value, **always, **extra} for extra in sets for value in choices[name]]
    return found


def model_types():
    """All model types, with the classes of their configurations."""
    return {name: CONFIG_MAPPING[name] for name in CONFIG_MAPPING}
