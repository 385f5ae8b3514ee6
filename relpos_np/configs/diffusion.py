"""Networks of image and video diffusion, as diffusers stores their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relpos_np._contract import check
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import equal_heads
from relpos_np.configs.families import register
from relpos_np.configs.grids import on_grid
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan
from relpos_np.configs.steps import Norm
from relpos_np.errors import RelposValueError
from relpos_np.formulas.rotary_axes import axial_frequencies

_NORM = Norm(("norm_q", "norm_k"))
_TEXT = {"before": "; the text comes first and ", "after": "; the text comes last and ", "": ""}


def _rotary(shares: Sequence[int], base: float, text: str = "", **options: Any) -> SchemePlan:
    """A share of the channels for frames, rows and columns each; the text comes before or after, if it is there."""
    numbers = ", ".join(map(str, shares))
    words = f"grid: frames (1 for an image), rows and columns of patches; {numbers} channels, base {base:g}"
    turning = "does not turn"
    if options.get("coordinates") == "middle":
        words += ", rows and columns from the middle on"
        turning = "goes on from the end, with one number for all three"
    if text:
        words += _TEXT[text] + turning
    omega = axial_frequencies(shares, base=base)
    return on_grid(omega, words, layout="interleaved", others=text, **options)


def _numbers(keys: Keys) -> dict[str, Any]:
    """Sizes as diffusers names them."""
    heads, dim = keys.integer("num_attention_heads"), keys.integer("attention_head_dim")
    return equal_heads(keys.integer("num_layers"), heads, dim) | {"causal": False}


@dataclass(frozen=True)
class Joint:
    """Text and patches in one call, of which the patches turn.

    Attributes
    ----------
    shares : str
        Key of the numbers of channels for frames, rows and columns.
    text : {"before", "after"}
        Where its tokens stand.
    theta : str
        Key of the base, where it is one.
    middle : bool
        Whether rows and columns count from the middle of the image.
    only : tuple, optional
        A key, and its only value that is understood.
    """

    shares: str = "axes_dims_rope"
    text: str = "before"
    theta: str = ""
    middle: bool = False
    only: tuple[str, Any] | None = None

    def read(self, keys: Keys, layer: int, part: str) -> LayerAttention:
        """The layer of a configuration; layers of one stream follow those of two."""
        found = _numbers(keys)
        found["layers"] += keys.integer("num_single_layers", 0, least=0)
        keys.ignore("num_refiner_layers")
        if self.only is not None:
            keys.only(*self.only)
        shares = keys.numbers(self.shares, 2)
        if len(shares) != 3 or sum(shares) != found["head_dim"] or any(n % 2 for n in shares):
            raise RelposValueError(
                f"{self.shares}: expected three even numbers with sum {found['head_dim']}, found {shares}"
            )
        base = check.positive(self.theta, keys.get(self.theta)) if self.theta else 1e4
        plan = _rotary(shares, base, self.text, coordinates="middle" if self.middle else "index")
        return LayerAttention(keys.model_type, part, layer, schemes=(plan,), before=(_NORM,), **found)


def _wan(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Two thirds of the channels for rows and columns, rounded down to pairs, the others for frames."""
    found, dim = _numbers(keys), keys.integer("attention_head_dim", least=6)
    keys.only("qk_norm", "rms_norm_across_heads")
    keys.ignore("cross_attn_norm", "pos_embed_seq_len", "rope_max_seq_len")
    found["before"] = (Norm(("norm_q", "norm_k"), each=False, eps=check.positive("eps", keys.get("eps"))),)
    image = keys.get("added_kv_proj_dim") is not None
    if part == "cross":
        notes = ("a second call, with the image's keys and values, is added to that with the text's",)
        return LayerAttention(keys.model_type, part, layer, notes=notes if image else (), **found)
    if dim % 2:
        raise RelposValueError(f"attention_head_dim: expected an even number, found {dim}")
    side = dim // 6 * 2
    found["schemes"] = (_rotary((dim - 2 * side, side, side), 1e4),)
    return LayerAttention(keys.model_type, part, layer, **found)


def _cogvideox(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A quarter of the channels for frames; the text comes first. The smallest model adds sinusoids instead."""
    found, dim = _numbers(keys), keys.integer("attention_head_dim", least=16)
    keys.ignore("spatial_interpolation_scale", "temporal_interpolation_scale", "max_text_seq_length", "patch_bias")
    found["before"] = (Norm(("norm_q", "norm_k"), kind="layer"),)
    patch = keys.integer("patch_size")
    shape = (keys.integer("sample_height") // patch, keys.integer("sample_width") // patch)
    if keys.flag("use_learned_positional_embeddings"):
        found["added"] = learned("patch_embed.pos_embedding", remark="of text and patches")
    if not keys.flag("use_rotary_positional_embeddings"):
        found["notes"] = ("sines and cosines of frames, rows and columns are added to the inputs",)
        return LayerAttention(keys.model_type, part, layer, **found)
    if dim % 16:
        raise RelposValueError(f"attention_head_dim: expected a multiple of 16, found {dim}")
    # Of the first version, other sizes are scaled to this one and cropped.
    known = shape if keys.get("patch_size_t") is None else ()
    found["schemes"] = (_rotary((dim // 4, dim // 8 * 3, dim // 8 * 3), 1e4, "before", known=known),)
    return LayerAttention(keys.model_type, part, layer, **found)


def _sd3(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Stable Diffusion 3: sines and cosines are added to the patches; text and patches attend each other."""
    found = _numbers(keys)
    keys.ignore("sample_size", "patch_size", "pos_embed_max_size")
    if keys.only("qk_norm", None, "rms_norm") is not None:
        found["before"] = (_NORM,)
    if layer in keys.numbers("dual_attention_layers"):
        found["notes"] = ("a second attention, of the patches alone (attn2), is another call of this kind",)
    remark = "sines and cosines of rows and columns, as stored, of which patches have those around the middle"
    added = learned("pos_embed.pos_embed", remark=remark)
    return LayerAttention(keys.model_type, part, layer, added=added, **found)


def _per_block(keys: Keys, name: str, count: int) -> list[int]:
    """A number for each block, where one may stand for all."""
    value = keys.get(name)
    listed = keys.numbers(name, 1) if isinstance(value, list | tuple) else [check.integer(name, value, 1)] * count
    if len(listed) != count:
        raise RelposValueError(f"{name}: expected one for each of {count} blocks, found {value!r}")
    return listed


def _transformers(keys: Keys) -> list[tuple[int, int]]:
    """Channels and heads of every transformer of a U-Net, in the order in which they run."""
    count = len(keys.numbers("block_out_channels"))
    # A number of heads, in spite of the name.
    names = ("block_out_channels", "attention_head_dim", "layers_per_block", "transformer_layers_per_block")
    blocks = list(zip(*(_per_block(keys, name, count) for name in names), strict=True))
    found = []
    for name, kind, more, order in (
        ("down_block_types", "DownBlock2D", 0, blocks),
        ("up_block_types", "UpBlock2D", 1, blocks[::-1]),
    ):
        kinds = keys.listed(name) or []
        attending = f"CrossAttn{kind}"
        if len(kinds) != count or not {*map(str, kinds)} <= {attending, kind}:
            raise RelposValueError(f"{name}: expected {count} of {kind} and {attending}, found {kinds!r}")
        sizes = [
            (width, heads)
            for own, (width, heads, layers, depth) in zip(kinds, order, strict=True)
            for _ in range((layers + more) * depth * (own == attending))
        ]
        found.append(sizes)
    width, heads, _, depth = blocks[-1]
    middle = keys.only("mid_block_type", "UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None)
    return [*found[0], *[(width, heads)] * (depth * (middle == "UNetMidBlock2DCrossAttn")), *found[1]]


def _unet(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Transformers between convolutions, which alone tell places apart."""
    for name, *usual in (
        ("num_attention_heads", None),
        ("only_cross_attention", False),
        ("mid_block_only_cross_attention", None, False),
        ("dual_cross_attention", False),
        ("reverse_transformer_layers_per_block", None),
        ("attention_type", "default"),
        ("cross_attention_norm", None),
    ):
        keys.only(name, *usual)
    keys.ignore("sample_size")
    every = _transformers(keys)
    if not every:
        raise RelposValueError("down_block_types: no block of this network has attention")
    width, heads = every[layer]
    if width % heads:
        raise RelposValueError(f"attention_head_dim: {width} channels are no multiple of {heads} heads")
    found = equal_heads(len(every), heads, width // heads)
    notes = ("no positions: convolutions between the layers tell places apart",)
    return LayerAttention(keys.model_type, part, layer, causal=False, notes=notes, **found)


_TYPES = {
    "HunyuanVideoTransformer3DModel": Joint("rope_axes_dim", "after", "rope_theta", only=("qk_norm", "rms_norm")),
    "FluxTransformer2DModel ChromaTransformer2DModel": Joint(),
    "QwenImageTransformer2DModel": Joint(middle=True, only=("use_layer3d_rope", False)),
}
_KIND, _BOTH = "Images and video", ("", "cross")
register(_wan, "WanTransformer3DModel", kind=_KIND, parts=_BOTH, package="diffusers")
register(_cogvideox, "CogVideoXTransformer3DModel", kind=_KIND, package="diffusers")
for _names, _traits in _TYPES.items():
    register(_traits.read, _names, kind=_KIND, package="diffusers")
register(_sd3, "SD3Transformer2DModel", kind=_KIND, package="diffusers")
register(_unet, "UNet2DConditionModel", kind=_KIND, parts=_BOTH, package="diffusers")
