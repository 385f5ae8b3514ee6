"""Text models whose relative positions have vectors: DeBERTa, Transformer-XL and XLNet."""

from __future__ import annotations

from collections.abc import Mapping

from relpos_np._contract import check
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Given, SchemePlan
from relpos_np.configs.speech import projected_rows
from relpos_np.errors import RelposValueError
from relpos_np.formulas.layer_norm import layer_norm
from relpos_np.schemes.deberta import DeBERTa
from relpos_np.schemes.transformer_xl import TransformerXL
from relpos_np.types import Array, Shift


def _tables(given: Given) -> DeBERTa:
    """The embedding of relative positions, normalised if the model does, after a layer's projections."""
    arrays, options = given.arrays, given.options
    rows = arrays["rel_embeddings"][: options["rows"]]
    if "norm_weight" in arrays:
        rows = layer_norm(rows, arrays["norm_weight"], arrays["norm_bias"], options["layer_norm_eps"])

    def table(name: str) -> Array | None:
        if f"{name}_weight" not in arrays:
            return None
        projected: Array = rows @ arrays[f"{name}_weight"].T + arrays.get(f"{name}_bias", rows.dtype.type(0))
        return projected.reshape(len(rows), -1, given.head_dim).transpose(1, 0, 2)

    return DeBERTa(table("pos_key"), table("pos_query"), max_position=options["max_position"])


def _deberta(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Content to position and position to content, scaled by the number of terms."""
    found = sizes(keys)
    second = keys.model_type == "deberta-v2"
    longest = keys.integer("max_position_embeddings")
    kinds = keys.get("pos_att_type", None) or []
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple) or list(kinds) not in ([], ["c2p"], ["p2c"], ["c2p", "p2c"], ["p2c", "c2p"]):
        raise RelposValueError(f"pos_att_type: expected c2p and p2c, found {kinds!r}")
    keys.only("talking_head", False, None)
    relative = keys.flag("relative_attention")
    farthest = keys.integer("max_relative_positions", least=-1)
    farthest = longest if farthest < 1 else farthest
    buckets = keys.integer("position_buckets", -1, least=-1) if second else -1
    if buckets > 0 and (buckets < 4 or farthest <= buckets // 2 + 1):
        raise RelposValueError(
            f"max_relative_positions: {farthest} leaves no buckets where position_buckets is {buckets}"
        )
    shared = keys.flag("share_att_key", False)
    norm = str(keys.get("norm_rel_ebd", "none")).lower()
    eps = keys.real("layer_norm_eps")
    if not set(norm.split("|")) <= {"none", "layer_norm"}:
        raise RelposValueError(f"norm_rel_ebd: {norm!r} is not understood")
    if not second and (shared or norm != "none"):
        raise RelposValueError("share_att_key, norm_rel_ebd: of deberta-v2, found in a configuration of deberta")
    own = keys.get("attention_head_size", None)
    own = found["head_dim"] if own is None else check.integer("attention_head_size", own, 1)
    keys.ignore("position_buckets")
    # v1 counts the kinds that are named, whether or not positions are used; so does v2.
    found |= {"head_dim": own, "value_dim": own, "scale": (own * (1 + len(kinds))) ** -0.5}
    if keys.flag("position_biased_input"):
        found["added"] = learned("embeddings.position_embeddings.weight")
    if relative and kinds:
        weights = {"rel_embeddings": "encoder.rel_embeddings.weight"}
        if "layer_norm" in norm:
            weights |= {"norm_weight": "encoder.LayerNorm.weight", "norm_bias": "encoder.LayerNorm.bias"}
        names = {"c2p": ("pos_key", "pos_proj"), "p2c": ("pos_query", "pos_q_proj")}
        if second:
            names = {"c2p": ("pos_key", "pos_key_proj"), "p2c": ("pos_query", "pos_query_proj")}
        if shared:
            names = {"c2p": ("pos_key", "key_proj"), "p2c": ("pos_query", "query_proj")}
        for kind in kinds:
            argument, stored = names[kind]
            path = f"encoder.layer.{layer}.attention.self.{stored}"
            weights[f"{argument}_weight"] = f"{path}.weight"
            if stored != "pos_proj":
                weights[f"{argument}_bias"] = f"{path}.bias"
        options = {
            "max_position": farthest if buckets > 0 else None,
            "rows": 2 * (buckets if buckets > 0 else farthest),
            "layer_norm_eps": eps,
        }
        remark = "pos_key and pos_query: the embedding of relative positions, projected"
        found["schemes"] = (SchemePlan("DeBERTa", options, weights, remark=remark, make=_tables),)
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


def _rows(given: Given) -> TransformerXL:
    options, arrays = given.options, given.arrays
    # XLNet's is (channels of the model, H, D), that of Transformer-XL a linear layer's.
    weight = arrays["r"] if arrays["r"].ndim == 2 else arrays["r"].reshape(len(arrays["r"]), -1).T
    rows = projected_rows(given, weight, options["variant"], "concatenated", options["clamp"])
    return TransformerXL(arrays["u"], arrays["v"], rows, variant=options["variant"])


def _shifted(weights: Mapping[str, str], variant: Shift, clamp: int) -> SchemePlan:
    """Transformer-XL's terms, with rows that a layer projects."""
    return SchemePlan(
        "TransformerXL",
        {"variant": variant, "clamp": clamp if clamp > 0 else None},
        weights,
        remark="rows: sinusoids of the distances, projected with r",
        make=_rows,
        varies=True,
    )


def _transfo_xl(keys: Keys, layer: int, part: str) -> LayerAttention:
    """The model that the scheme is of: states of the segments before are keys, too."""
    found = sizes(keys)
    keys.only("attn_type", 0)
    # Biases that all layers share are stored with each of them.
    keys.ignore("untie_r", "mem_len", "ext_len", "tgt_len")
    # Of embeddings, of the softmax over words, and a dropout.
    keys.ignore("adaptive", "cutoffs", "d_embed", "div_val", "proj_share_all_but_first", "sample_softmax", "dropatt")
    # Every query attends as many keys as the memory has.
    window = (keys.integer("mem_len") - 1, None) if keys.flag("same_length") else None
    own = f"layers.{layer}.dec_attn"
    weights = {"u": f"{own}.r_w_bias", "v": f"{own}.r_r_bias", "r": f"{own}.r_net.weight"}
    plan = _shifted(weights, "transformer_xl", keys.integer("clamp_len", least=-1))
    return LayerAttention(keys.model_type, part, layer, causal=True, window=window, schemes=(plan,), **found)


def _xlnet(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Transformer-XL's terms with rows for both directions; segments add another term, which is not here."""
    found = sizes(keys)
    both = keys.only("attn_type", "bi", "uni") == "bi"
    keys.only("bi_data", False)
    keys.only("same_length", False, None)
    clamp = keys.integer("clamp_len", least=-1)
    keys.ignore("untie_r", "mem_len", "d_head")
    own = f"layer.{layer}.rel_attn"
    weights = {"u": f"{own}.r_w_bias", "v": f"{own}.r_r_bias", "r": f"{own}.r"}
    plan = _shifted(weights, "xlnet" if both else "xlnet_uni", clamp)
    note = "token_type_ids add a term by segments: without them"
    return LayerAttention(keys.model_type, part, layer, causal=not both, schemes=(plan,), notes=(note,), **found)


register(_deberta, "deberta deberta-v2", kind="Text")
# As the class had it, which transformers has no more.
_TRANSFO_XL = {"d_model": 1024, "n_head": 16, "d_head": 64, "n_layer": 18, "untie_r": True, "attn_type": 0}
register(
    _transfo_xl,
    "transfo-xl",
    kind="Text",
    defaults=_TRANSFO_XL | {"mem_len": 1600, "clamp_len": 1000, "same_length": True},
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "head_dim": "d_head",
        "num_hidden_layers": "n_layer",
    },
)
register(_xlnet, "xlnet", kind="Text")
