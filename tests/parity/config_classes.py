"""Record of the configuration classes of transformers: `python -m tests.parity.config_classes` writes it.

`relpos_np/configs/classes.json` has, for each model type that is understood and each model of several parts, what its
class has for keys that are missing, its other names of keys, the names of its other keys, and the types of its parts.
"""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import diffusers
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import relpos_np.configs
from relpos_np.configs.neutral import harmless_name
from relpos_np.configs.read import _families

HERE = Path(relpos_np.configs.__file__).parent
RECORD = HERE / "classes.json"
BASE = {*transformers.PreTrainedConfig().to_dict(), "model_type", "transformers_version"}


def vocabulary():
    """Every string of the readers that may be a key."""
    found = set()
    for path in HERE.glob("*.py"):
        if path.stem in ("neutral", "elsewhere", "gguf", "layer", "plans", "bound"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # "?KEY text" says what KEY asks for.
                found.update(re.findall(r"^\w+$|(?<=^\?)\w+", node.value))
            if isinstance(node, ast.JoinedStr):  # f"{side}_layers"
                tail = node.values[-1]
                if isinstance(tail, ast.Constant):
                    found.add(tail.value)
    return found


# Keys of sizes that some classes neither have nor read.
SIZES = "head_dim num_key_value_heads"


def plain(value):
    """Whether JSON can say it, and it is no configuration."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def declared(cls):
    """What a class has for keys that are missing, before it makes anything of them."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found | rope_of(cls)


def rope_of(cls):
    """Rotary parameters that a class has where a file has none, unless they are the usual ones."""

    def made(**given):
        return getattr(cls(**given), "rope_parameters", None)

    own = made()
    if not isinstance(own, dict) or all(
        one.get("rope_type") == "default" for one in (own.values() if "rope_type" not in own else [own])
    ):
        return {}
    # A base that is given beside them goes into them, unless they have their own.
    if own.get("rope_theta") != made(rope_theta=77.0).get("rope_theta"):
        own = {name: x for name, x in own.items() if name != "rope_theta"}
    return {"rope_parameters": own}


def reads(code):
    """What the modules of a file take from configurations, but for those that make frequencies."""
    modules = re.split(r"(?m)^(?=class |def |@)", code)
    text = " ".join(one for one in modules if not re.match(r"class \w*Rotary", one))
    return {*re.findall(r"config\.(\w+)", text), *re.findall(r"config, \"(\w+)\"", text)}


def of_class(name, words):
    """What is recorded of one type."""
    cls = CONFIG_MAPPING[name]
    own = {key: x for key, x in declared(cls).items() if key not in BASE and not key.startswith("_")}
    words = words | {key for alias, key in cls.attribute_map.items() if alias in words}
    tails = tuple(word for word in words if word.startswith("_"))
    read = {key: x for key, x in own.items() if (key in words or key.endswith(tails)) and plain(x)}
    read = {key: x for key, x in read.items() if not key.endswith("_config") or key == "attn_config"}
    aliases = {alias: key for alias, key in cls.attribute_map.items() if alias in words or key in words}
    if read.get("rope_parameters", 0) is None:
        del read["rope_parameters"]
    code = Path(inspect.getfile(cls).replace("configuration_", "modeling_"))
    code = code.read_text(encoding="utf-8") if code.exists() else " ".join(f"config.{key}" for key in SIZES.split())
    known = {*own, *cls.attribute_map, *reads(code)}
    unread = [key for key in SIZES.split() if key not in known]
    # A model within this one is refused elsewhere, whatever its name says.
    others = sorted(key for key in own.keys() - read.keys() if key.endswith("_config") or not harmless_name(key))
    return {"defaults": read, "aliases": aliases, "others": others, "unread": unread}


def parts(cls):
    """Types of the parts of a model, where the class says them."""
    every = {**cls.sub_configs, **(getattr(cls, "sub_configs_defaults", None) or {})}
    return {key: kind for key, sub in every.items() if (kind := getattr(sub, "model_type", ""))}


def of_diffusers(name, words):
    """The same of a model of diffusers, whose class has what its constructor takes."""
    taken = inspect.signature(getattr(diffusers, name).__init__).parameters
    own = {key: x.default for key, x in taken.items() if x.default is not x.empty}
    return {
        "defaults": {key: x for key, x in own.items() if key in words},
        "others": sorted(key for key in own if key not in words and not harmless_name(key)),
    }


def record():
    """The whole record."""
    words, found = vocabulary(), {}
    for name, family in _families().items():
        if family.package == "diffusers":
            found[name] = of_diffusers(name, words)
    for name in sorted(CONFIG_MAPPING):
        row = {"parts": known} if (known := parts(CONFIG_MAPPING[name])) else {}
        if name in _families():
            row = of_class(name, words)
        if row:
            found[name] = {key: x for key, x in row.items() if x}
    return {"transformers": transformers.__version__, "types": found}


def text(found):
    """One line for each type."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found["types"].items())
    return f'{{"transformers": {json.dumps(found["transformers"])}, "types": {{\n{rows}\n}}}}\n'


if __name__ == "__main__":
    RECORD.write_text(text(record()), encoding="utf-8")
