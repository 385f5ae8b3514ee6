"""`from_config`: a configuration, a part of the model and the number of a layer to what its attention is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError

if TYPE_CHECKING:
    from relpos_np.configs.families import Family
    from relpos_np.configs.keys import Keys
    from relpos_np.configs.layer import LayerAttention

# Beyond any model: a damaged file shall not make a list of all its layers.
_MOST = 1 << 14
# Files that register model types.
_FILES = (
    "decoder_types",
    "hybrids",
    "shared_keys",
    "early_rotary",
    "deepseek_v4",
    "alibi",
    "t5_like",
    "absolute",
    "relative_vectors",
    "speech",
    "heard",
    "windows",
    "grids",
    "diffusion",
    "inkling",
)


def _families() -> Mapping[str, Family]:
    """The register, filled on first use: most programs never read a configuration."""
    from importlib import import_module

    from relpos_np.configs.families import FAMILIES

    for name in _FILES:
        import_module(f"relpos_np.configs.{name}")
    return FAMILIES


def model_types() -> tuple[str, ...]:
    """All model types whose configurations are understood.

    Returns
    -------
    tuple of str
        In alphabetical order.
    """
    return tuple(sorted(_families()))


# What the parts of a composite model are, where neither a stored part nor the model's class says it.
_PARTS = {
    "gemma3": {"vision_config": "siglip_vision_model"},
    "deepseek_vl_v2": {"language_config": "deepseek_v2"},
    "kimi_k25": {"text_config": "deepseek_v3"},
    "llava": {"text_config": "llama"},
    "mistral3": {"text_config": "mistral", "vision_config": "pixtral"},
    "paligemma": {"text_config": "gemma", "vision_config": "siglip_vision_model"},
}

# Early files have the keys of the text beside those of the vision model.
_FLAT = ("llava", "qwen2_5_vl", "qwen2_vl")


# Names of parts that are models, whether or not they say of which type.
_MODELS = ("audio", "decoder", "encoder", "language", "llm", "speech", "text", "vision")


class _Stack(NamedTuple):
    """One stack of layers: who reads it, its configuration, its name in the family, and the model it is a part of."""

    family: Family
    config: Mapping[str, Any]
    part: str
    within: str

    def _keys(self) -> Keys:
        from relpos_np.configs.keys import Keys

        return Keys(self.config, self.family, self.within)

    def layers(self) -> int:
        """How many layers there are."""
        count = self.family.count
        return self.read(0).layers if count is None else count(self._keys())

    def read(self, layer: int) -> LayerAttention:
        """A layer, of which every key that may change attention is understood."""
        keys = self._keys()
        found = self.family.read(keys, layer, self.part)
        keys.close(found)
        return found


# Of a model: its stacks, and the types of its parts that are not understood, all by name.
_Parts = tuple[dict[str, _Stack], dict[str, str]]


def _parts(config: Mapping[str, Any], prefix: str = "", within: str = "") -> _Parts:
    """Every stack of layers of a model by its name."""
    from relpos_np.configs.families import classes
    from relpos_np.configs.keys import named as name_of

    families, model_type = _families(), name_of(config)
    if model_type in families:
        family = families[model_type]
        names = {part: ".".join(filter(None, (prefix, part))) for part in family.parts}
        return {names[part]: _Stack(family, config, part, within) for part in family.parts}, {}
    named = {**classes().get(model_type, {}).get("parts", {}), **_PARTS.get(model_type, {})}
    inner = {key: value for key, value in config.items() if key.endswith("_config") or key in named}
    inner = {key: value for key, value in inner.items() if isinstance(value, Mapping)}
    if model_type in _FLAT and "text_config" not in inner:
        inner["text_config"] = {key: value for key, value in config.items() if key not in inner}
    found: dict[str, _Stack] = {}
    unread: dict[str, str] = {}
    for key, value in inner.items():
        stored = value.get("model_type")
        kind = stored if stored and stored != model_type else named.get(key)
        name = ".".join(filter(None, (prefix, key.removesuffix("_config"))))
        if kind is not None:
            stacks, others = _parts({**value, "model_type": kind}, name, model_type)
            found |= stacks
            unread |= others if stacks else {name: str(kind)}
        elif key.removesuffix("_config") in _MODELS:
            unread[name] = "no model_type"
    return found, unread


def _known(config: Any, ignore: Iterable[str] = ()) -> tuple[_Parts, tuple[str, ...]]:
    """The parts of a model, and the keys that were left out of its configuration."""
    from relpos_np.configs.elsewhere import advice, alike, reason
    from relpos_np.configs.keys import loaded, named, without

    stored = loaded(config)
    left = _left_out(stored, ignore)
    found, unread = _parts(without(stored, frozenset(left)) if left else stored)
    if not found:
        from difflib import get_close_matches

        key = "_class_name" if "model_type" not in stored and "_class_name" in stored else "model_type"
        if why := reason(named(stored)):
            raise RelposValueError(f"{key}: {stored[key]!r} {why}")
        near = get_close_matches(named(stored), model_types(), 3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        if same := alike(stored, model_types()):
            hint = f': its architecture is called that of {same}; if it is one, write "model_type": "{same}"'
        if answer := advice(stored):
            hint = f": {answer}"
        raise RelposValueError(f"{key}: {stored.get(key)!r} is not understood{hint}")
    return (found, unread), left


def _left_out(stored: Mapping[str, Any], ignore: Iterable[str]) -> tuple[str, ...]:
    """The names of `ignore`, each of which the configuration must have."""
    left = tuple(ignore)
    if isinstance(ignore, str) or not all(isinstance(name, str) for name in left):
        raise RelposTypeError(f"ignore: expected names of keys, found {ignore!r}")
    for name in left:
        if name in ("model_type", "_class_name") or not _has(stored, name):
            raise RelposValueError(f"ignore: {name!r} is no key of this configuration that can be left out")
    return left


def _has(config: Mapping[str, Any], name: str) -> bool:
    return name in config or any(_has(value, name) for value in config.values() if isinstance(value, Mapping))


def parts_of(config: Any) -> tuple[str, ...]:
    """The stacks of layers that a configuration describes.

    Parameters
    ----------
    config : mapping, str, path-like or object
        See `from_config`.

    Returns
    -------
    tuple of str
        Values of `part`; ("",) where there is one stack. Notes of the layers name the parts that are not understood.

    Raises
    ------
    RelposError
        If the model type is not understood.
    """
    return tuple(_known(config)[0][0])


def layers_of(config: Any, *, part: str = "", ignore: Iterable[str] = ()) -> tuple[LayerAttention, ...]:
    """What the attention of every layer of a stack is.

    Parameters
    ----------
    config, part, ignore
        See `from_config`.

    Returns
    -------
    tuple of LayerAttention
        From the first layer on; of a hybrid, the layers with softmax, whose notes name the others.

    Raises
    ------
    RelposError
        As `from_config`.
    """
    from relpos_np.configs.keys import OtherLayerError, loaded

    stored, ignore = loaded(config), tuple(ignore)
    read: list[LayerAttention] = []
    others: dict[str, list[int]] = {}
    first: OtherLayerError | None = None
    number, layers = 0, 1
    while number < layers:
        try:
            read.append(from_config(stored, layer=number, part=part, ignore=ignore))
            layers = read[-1].layers
        except OtherLayerError as error:
            first, layers = first or error, error.layers
            others.setdefault(error.kind, []).append(number)
        number += 1
    if first is not None and not read:
        raise first
    notes = tuple(f"{kind} is not understood: layers {ranges(numbers)}" for kind, numbers in others.items())
    return tuple(replace(layer, notes=(*layer.notes, *notes)) for layer in read)


def ranges(numbers: list[int]) -> str:
    """Numbers that follow one another as first-last."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == z else f"{a}-{z}" for a, z in zip(starts, ends, strict=True))


def from_config(config: Any, *, layer: int, part: str = "", ignore: Iterable[str] = ()) -> LayerAttention:
    """What the attention of a published model's layer is, from the model's configuration.

    Parameters
    ----------
    config : mapping, str, path-like or object
        A configuration as transformers or diffusers store it: a dictionary, the path of a config.json or of its
        folder, or an object with `to_dict`. Neither package is needed. Or the path of a GGUF file, of which the
        metadata are read, with the package gguf: pairs turn as its own projections have them.
    layer : int
        Which layer, from 0.
    part : str
        Which stack of a model that has several, such as "encoder", "decoder", "cross" or "text": see `parts_of`.
    ignore : iterable of str
        Keys to read the configuration without, wherever they are in it: those that are refused, and that you know not
        to matter. `describe` and `as_dict` of the layer name them.

    Returns
    -------
    LayerAttention
        Schemes, scale, masks, and the weights that the schemes want. ``bind`` makes a call of it, ``describe`` says
        it in words.

    Raises
    ------
    RelposError
        If the model type or a value is not understood, or keys that may change attention are not known, all of which
        are named at once: nothing is ignored silently but keys that are known not to matter.

    Examples
    --------
    >>> import relpos_np as rp
    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5}
    >>> layer = rp.from_config(config, layer=0)
    >>> layer.heads, layer.head_dim, layer.causal, layer.schemes[0].words()
    (4, 16, True, 'Rotary(base=500000)')
    """
    (found, unread), left = _known(config, ignore)
    if not isinstance(part, str):
        raise RelposTypeError(f"part: expected a string, found {part!r}")
    if part not in found:
        if part == "" and len(found) == 1:
            part = next(iter(found))
        elif part in unread:
            raise RelposValueError(f"part: {part!r} is not understood ({unread[part]})")
        else:
            raise RelposValueError(f"part: expected one of {', '.join(map(repr, found))}, found {part!r}")
    number = check.integer("layer", layer, 0)
    # Counted first, so that a reader may index its lists.
    layers = found[part].layers()
    if layers > _MOST:
        raise RelposValueError(f"layers: expected at most {_MOST}, found {layers}")
    if number >= layers:
        raise RelposValueError(f"layer: expected 0 ... {layers - 1}, found {number}")
    read = found[part].read(number)
    notes = [f"the model's part {name} ({kind}) is not understood" for name, kind in unread.items()]
    if "auto_map" in found[part].config:
        notes.append("auto_map: the model comes with code of its own; this is what the class of this type computes")
    return replace(read, notes=(*read.notes, *notes), ignored=left)
