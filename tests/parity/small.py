"""Small models of transformers with random weights, and what is fed to them."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 50, "pad_token_id": 0}
T5 = {"vocab_size": 50, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_layers": 2}
SIZES = {
    "Bert": TEXT,
    "Bloom": {"vocab_size": 50, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "CLIPText": TEXT,
    "GPT2": {"vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "GPTNeoX": TEXT,
    "Gemma2": {**TEXT, "num_key_value_heads": 2, "head_dim": 16},
    "Llama": {**TEXT, "num_key_value_heads": 2},
    "MPNet": TEXT,
    "MT5": T5,
    "Mistral": {**TEXT, "num_key_value_heads": 2, "sliding_window": 11},
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "T5": T5,
    "T5Encoder": T5,
    "UMT5": T5,
    "ViT": {**SMALL, "image_size": 32, "patch_size": 8, "num_channels": 3},
}
IDS = torch.arange(1, 41)[None]


def config_of(name, **more):
    return getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**SIZES[name] | more)


def with_biases(model):
    """Tables are initialised to 0 in places, where a mistake would not be seen."""
    with torch.no_grad():
        for key, x in model.named_parameters():
            if "relative" in key:
                torch.nn.init.normal_(x)
    return model


def small(name, own="eager", **more):
    """A model in evaluation mode, with its own attention."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")._from_config(config_of(name, **more), attn_implementation=own)
    return with_biases(model.eval())


def generating(cls):
    """A model that generates tokens, and the options of 12 of them that nothing ends."""
    ends = {"eos_token_id": None, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = cls._from_config(
        cls.config_class(**SIZES[cls.__name__.partition("For")[0]] | ends), attn_implementation="eager"
    )
    return with_biases(model.eval()), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
