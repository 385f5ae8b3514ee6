"""Models with T5's buckets: T5 and its successors, MPNet, and LayoutLMv3."""

from __future__ import annotations

from relpos_np._contract import check
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.errors import RelposValueError
from relpos_np.schemes.layout import LayoutBias


def even_buckets(keys: Keys, name: str) -> int:
    """A number of buckets, of which half are for either side."""
    number = keys.integer(name, least=4)
    if number % 2:
        raise RelposValueError(f"{name}: expected an even number, found {number}")
    return number


def _t5(keys: Keys, layer: int, part: str) -> LayerAttention:
    """One table for all layers of a stack, umT5 one per layer; not scaled; none in cross-attention."""
    keys.only("add_cross_attention", False, None)
    keys.ignore(
        *("is_decoder", "num_layers", "relative_attention_num_buckets"),
        *("num_sparse_encoder_layers", "num_sparse_decoder_layers"),
    )
    if keys.model_type == "umt5":
        keys.ignore("scalable_attention")  # its authors' word for a table of each layer, which the type has
    buckets = even_buckets(keys, "relative_attention_num_buckets")
    last = keys.integer("relative_attention_max_distance")
    heads, dim = keys.integer("num_heads"), keys.integer("d_kv")
    layers, decoding = keys.integer("num_layers"), keys.get("num_decoder_layers", None)
    if part != "encoder":
        # The class copies its own key before it takes the other name.
        own = keys.config.get("num_layers", keys.family.defaults["num_layers"]) if decoding is None else decoding
        layers = check.integer("num_decoder_layers", own, 1)
    plans: tuple[SchemePlan, ...] = ()
    if part != "cross":
        block = layer if keys.model_type == "umt5" else 0
        options = {"max_distance": last, "bidirectional": part == "encoder", "rounding": "float32"}
        table = f"{part}.block.{block}.layer.0.SelfAttention.relative_attention_bias.weight"
        plans = (SchemePlan("T5", options, {"table": table}, remark=f"{buckets} buckets"),)
    found = equal_heads(layers, heads, dim) | {"scale": 1.0, "causal": part == "decoder"}
    return LayerAttention(keys.model_type, part, layer, schemes=plans, **found)


def _mpnet(keys: Keys, layer: int, part: str) -> LayerAttention:
    """One table for all layers, of 32 buckets up to 128 whatever the configuration says."""
    found = sizes(keys)
    keys.only("relative_attention_num_buckets", 32)
    plan = SchemePlan("T5", {"rounding": "float32"}, {"table": "encoder.relative_attention_bias.weight"})
    added = learned("embeddings.position_embeddings.weight", 2, "positions count tokens that are no padding")
    return LayerAttention(keys.model_type, part, layer, causal=False, schemes=(plan,), added=added, **found)


def _boxed(given: Given) -> LayoutBias:
    """Tables are stored with the heads first; boxes and places in the text are those of a call."""
    table, x_table, y_table = (given.arrays[name].T for name in ("table", "x_table", "y_table"))
    return LayoutBias(
        table,
        x_table,
        y_table,
        given.inputs["boxes"],
        positions=given.inputs.get("positions"),
        rounding="float32",
        **given.options,
    )


def _layoutlmv3(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Buckets of distances in the text and on the page, of which all layers have the same tables."""
    found = sizes(keys)
    for name in ("rel_pos_bins", "rel_2d_pos_bins"):
        even_buckets(keys, name)  # the tables have so many rows
    options = {
        "variant": "layoutlmv3",
        "max_distance": keys.integer("max_rel_pos"),
        "max_box_distance": keys.integer("max_rel_2d_pos"),
    }
    both = keys.flag("has_relative_attention_bias")
    keys.only("has_spatial_attention_bias", both)
    keys.ignore("fast_qkv")
    weights = {
        name: f"encoder.rel_pos_{axis}bias.weight"
        for name, axis in (("table", ""), ("x_table", "x_"), ("y_table", "y_"))
    }
    plan = SchemePlan(
        "LayoutBias",
        options,
        weights,
        inputs=("boxes",),
        optional=("positions",),
        remark="boxes of all tokens; positions start again at the first patch of the page's image",
        make=_boxed,
        varies=True,
    )
    table = "embeddings.position_embeddings.weight"
    added = learned(table, 2, "positions count tokens that are no padding, and tables of the page's coordinates")
    return LayerAttention(
        keys.model_type, part, layer, causal=False, schemes=(plan,) if both else (), added=added, **found
    )


register(_t5, "t5 mt5 umt5 switch_transformers", kind="Text", parts=("encoder", "decoder", "cross"))
register(_t5, "pop2piano", kind="Speech and music", parts=("encoder", "decoder", "cross"))
register(_mpnet, "mpnet", kind="Text")
register(_layoutlmv3, "layoutlmv3", kind="Text")
