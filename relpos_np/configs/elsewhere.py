"""Files beside a model that are no configuration of it, and what to open instead of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What a folder may have in place of a config.json.
_NAMES = ("config.json", "model_index.json", "adapter_config.json", "bert_config.json", "params.json")
# Parts of a pipeline that have attention.
_MODELS = ("transformer", "unet", "prior", "decoder", "text_encoder", "image_encoder")


# Why types of models are not read.
_OTHERS = {
    "has no attention": "bit convnext convnextv2 efficientnet hifigan mobilenet_v1 mobilenet_v2 regnet resnet univnet",
    "has recurrences in place of attention": "falcon_mamba mamba mamba2 rwkv xlstm",
    "adds sines and cosines to the inputs of q and k in every layer, which is no scheme of its attention": (
        "conditional_detr deformable_detr detr table-transformer"
    ),
    "adds numbers made of its values to the scores, and leaves keys out by them: pass them as mask": "doge",
    "attends keys that convolutions make fewer, without positions": "glpn pvt segformer",
    "attends blocks of keys that differ by head or by chance": "big_bird bigbird_pegasus phi3small reformer",
    "attends a window around each token, and beside it tokens that a call names: pass both as mask": "led longformer",
    "attends blocks of keys, and beside them one vector for each block, or tokens of its own": "longt5 pegasus_x",
    "halves its queries, and then its keys, from block to block, with rows for distances of two steps": "funnel",
    "is a name of several models: open the config.json of its text model (MiniCPM, Llama or Qwen2)": "minicpmv",
}
_WHY = {name: why for why, names in _OTHERS.items() for name in names.split()}


def reason(model_type: str) -> str:
    """Why a type is not read; "" where nothing is known of it."""
    return _WHY.get(model_type, _WHY.get(model_type.partition("For")[0].lower(), ""))


def alike(config: Mapping[str, Any], known: Sequence[str]) -> str:
    """The type of which a file has the architecture, by its name; "" where there is none."""
    listed = config.get("architectures")
    names = [str(name).partition("For")[0].lower() for name in listed] if isinstance(listed, list | tuple) else []
    plain = {name.removesuffix("_text").replace("_", "").replace("-", ""): name for name in known}
    return next((plain[name] for name in names if name in plain), "")


def within(folder: Path) -> Path:
    """The file of a folder that says what is in it."""
    there = (folder / name for name in _NAMES if (folder / name).is_file())
    return next(there, folder / _NAMES[0])


def advice(config: Mapping[str, Any]) -> str:
    """What to open instead of a file; "" where nothing is known."""
    if "peft_type" in config or "base_model_name_or_path" in config:
        base = config.get("base_model_name_or_path") or "its base model"
        return f"this is an adapter, which leaves positions and masks as they are: open the config.json of {base}"
    parts = [name for name, value in config.items() if name.startswith(_MODELS) and isinstance(value, list | tuple)]
    if str(config.get("_class_name")).endswith("Pipeline"):
        named = ", ".join(f"{name}/config.json" for name in parts) or "the config.json of one of its folders"
        return f"this is a pipeline of several models: open {named}"
    if "model_type" in config or "_class_name" in config:
        return ""
    if "weight_map" in config:
        return "this is a list of files with weights: open the config.json beside it"
    if "tokenizer_class" in config and "hidden_size" not in config:
        return "this is the configuration of a tokenizer: open the config.json beside it"
    if {"dim", "n_heads"} <= config.keys():
        return "this is a params.json of an original release: open the config.json of the model in transformers' format"
    if {"hidden_size", "num_attention_heads"} <= config.keys():
        return (
            "there is no model_type, as in bert_config.json of early releases: open the config.json of the same model, "
            'or add the type, such as "model_type": "bert"'
        )
    return "open the config.json of a model"
