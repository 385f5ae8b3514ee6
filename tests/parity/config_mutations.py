"""Every key of every configuration, changed: a model of transformers and `rp.from_config` read the same dictionary.

`python -m tests.parity.config_mutations` in the environment for parity prints each difference that `from_config` passes
over: the model's attention changes, and the layer neither changes with it nor is refused. Without names of types it
takes all, an hour on one thread, and writes `asv_bench/recorded/mutations.json`.
"""

import contextlib
import json
import sys
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers

import relpos_np as rp
from relpos_np.configs.neutral import NEUTRAL
from tests.parity import test_from_config as layers
from tests.parity.config_models import MODELS

# What no class is asked for: words of loading, and of what is returned.
SKIPPED = {"model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "auto_map"}
SKIPPED |= {"attn_implementation", "_attn_implementation", "use_cache", "torchscript", "return_dict", "_name_or_path"}
# Another way to compute the same, which the recorder of calls does not see or sees padded; layers behind an encoder.
SKIPPED |= {"reorder_and_upcast_attn", "pad_head_dim_to_multiple_of", "add_adapter"}
# Keys of other classes, and of files, that a class may read without having them.
FOREIGN = {
    "partial_rotary_factor": 0.5,
    "rope_theta": 77.0,
    "head_dim": 24,
    "num_key_value_heads": 1,
    "sliding_window": 5,
    "use_sliding_window": True,
    "attn_logit_softcapping": 1.5,
    "is_causal": False,
    "is_decoder": True,
    "layer_types": ["sliding_attention"] * 8,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0},
    "original_max_position_embeddings": 8,
    "attention_chunk_size": 5,
    "attention_multiplier": 0.3,
    "query_pre_attn_scalar": 3.0,
    "use_bidirectional_attention": True,
    "position_embedding_type": "relative_key",
    "scale_attn_weights": False,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "rotary_dim": 4,
}


def changed(name, value):
    """Other values of a key that its class may take."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [FOREIGN[name]] if name in FOREIGN else [1, True, 2.0]
    if isinstance(value, int):
        return [n for n in (2 * value, value // 2, value + 1, 1) if n != value][:3]
    if isinstance(value, float):
        return [value * 1.5 + 0.25, 0.5]
    if isinstance(value, list) and value:
        return [value[::-1], value[1:] + value[:1], [value[0]] * len(value), [value[-1]] * len(value)]
    if isinstance(value, dict) and not name.endswith("_config"):
        return [{**value, key: other} for key, x in value.items() for other in changed(key, x)[:2]]
    return []


def cases(model):
    """Names and values: of the class, of its other names, and of other classes."""
    settings = layers.settings_of(model)
    # A call gives the grid, and the models here that of their own image or window.
    skipped = SKIPPED | ({"image_size", "patch_size", "window_size"} if "grid" in dict(model.given) else set())
    own = {name: x for name, x in settings.to_dict().items() if name not in skipped and not name.endswith("_config")}
    for name, value in own.items():
        for other in changed(name, value):
            yield name, json.loads(json.dumps(other))
    for alias, name in type(settings).attribute_map.items():
        for other in changed(name, own.get(name))[:2]:
            yield alias, other
    neutral = {name: 3 for names in NEUTRAL.values() for name in names}
    for name, value in (neutral | FOREIGN).items():
        if name not in own and name not in SKIPPED:
            yield name, value


def told(config, model):
    """What is read: all layers of all parts, or None where a part is refused."""
    try:
        return [
            rp.from_config(config, layer=n, part=part)
            for part in model.parts
            for n in range(rp.from_config(config, layer=0, part=part).layers)
        ]
    except rp.RelposError as error:
        if str(error).startswith("layer_types: layer"):
            try:
                return [rp.from_config(config, layer=n, part=p) for p, n in layers.in_order(config, model.parts)]
            except rp.RelposError:
                return None
        return None


def shapes(found):
    """Layers without what is only said of them."""
    return [str({**layer.as_dict(), "notes": 0}) for layer in found]


# Keys of other classes that some class refuses to be given.
CRASHES = set()


class Refused(Exception):
    """The model cannot be built or run."""


def off(model, config):
    """What differs between the model of a configuration and its layers as they are read; None for nothing."""
    changed_model = type(model)(**{**vars(model), "config": {k: v for k, v in config.items() if k != "model_type"}})
    try:
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
            net, settings = layers.build(changed_model)
            seen = layers.run(net, settings, changed_model)
    except Exception as error:  # noqa: BLE001
        raise Refused(repr(error)[:200]) from None
    if not all(np.isfinite(call.out).all() for call in seen):
        raise Refused("numbers that are not finite")
    return layers.errors(changed_model, net, seen, config)


def differences(model):
    """Each key whose change the model's attention follows, and its layers do not."""
    base = json.loads(json.dumps({**model.config, "model_type": model.model_type}))
    plain = shapes(told(base, model))
    rounds = []
    for name, value in cases(model):
        read = told({**base, name: value}, model)
        if read is None:
            continue
        if shapes(read) != plain:
            yield from wrong(model, base, {name: value}, "read")
            continue
        free = next((one for one in rounds if name not in one), None)
        if free is None:
            rounds.append(free := {})
        free[name] = value
    for passed in rounds:
        yield from wrong(model, base, passed, "passed")


def wrong(model, base, several, how):
    """Of several changes that are read as they are, those that make another model."""
    several = {name: x for name, x in several.items() if name not in CRASHES}
    if not several:
        return
    try:
        difference = off(model, base | several)
    except Refused:
        if len(several) == 1 and how == "passed" and next(iter(several)) not in model.config:
            CRASHES.update(several)
        if len(several) == 1:
            return
    except Exception as error:  # noqa: BLE001
        difference = repr(error)[:200]
    else:
        if difference is None:
            return
    if len(several) == 1:
        yield *several.items(), how, difference
        return
    names = list(several)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        yield from wrong(model, base, {name: several[name] for name in part}, how)


RECORD = Path(__file__).parents[2] / "asv_bench" / "recorded" / "mutations.json"
# Files of types that have no class of their own, and a composite model.
MUTATED = [model for model in MODELS if not model.published and model.model_type != "paligemma"]


def record(changes, found):
    """What is written: how many changes each type was given, and what was passed over."""
    rows = ",\n".join(f"{json.dumps(name)}: {count}" for name, count in sorted(changes.items()))
    head = f'{{"transformers": "{transformers.__version__}", "date": "{datetime.now(UTC).date()}", "differences": '
    return head + json.dumps(found) + f', "changes": {{\n{rows}\n}}}}\n'


def main(names):
    """Print what differs."""
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    changes, found = Counter(), []
    for model in MUTATED:
        if names and model.model_type not in names:
            continue
        changes[model.model_type] += sum(1 for _ in cases(model))
        for change, how, error in differences(model):
            found.append(" ".join(map(str, (layers.name_of(model), how, *change, "->", error))))
            print(found[-1], flush=True)
        print(layers.name_of(model), "done", flush=True)
    if not names:
        RECORD.write_text(record(changes, found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
