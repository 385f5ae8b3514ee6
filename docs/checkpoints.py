"""Published models and the calls for their positions: docs/checkpoints.md shows them, tests/test_docs.py runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import relpos_np as rp
from relpos_np.configs import LayerAttention, SchemePlan, layers_of, model_types, parts_of
from relpos_np.configs.families import FAMILIES

RECORD = Path(__file__).parents[1] / "asv_bench" / "recorded" / "published.json"
PAST, NONE = "i − j", "–"
AHEAD = "j − i"
ROOT = "1/√D"


@dataclass(frozen=True)
class Checkpoint:
    """One row of the table.

    Attributes
    ----------
    models : str
        Which ones.
    scheme : str
        Key in `relpos_np.SCHEMES`.
    call : str
        What to pass as ``position=``; for an absolute scheme what to do with the inputs `x`.
    arrays : mapping
        Shapes of the arrays that the call names: numbers, or "H" and "D".
    sign : str
        How the model's own code counts a relative position.
    scale : str
        The factor on q · k.
    options : str
        Further arguments of `relpos_np.attention`.
    remark : str
        What to mind.
    tokens : int
        Number of queries that the test calls it with.
    keys : int
        Number of keys, if another one.
    heads, dim : int
        H and D in the test.
    """

    models: str
    scheme: str
    call: str
    arrays: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    sign: str = NONE
    scale: str = ROOT
    options: str = ""
    remark: str = ""
    tokens: int = 10
    keys: int = 0
    heads: int = 4
    dim: int = 8


XL = {"u": ("H", "D"), "v": ("H", "D")}

TEXT = (
    Checkpoint(
        "Falcon-RW",
        "alibi",
        'rp.ALiBi(rp.reference.alibi_slopes(H) / np.sqrt(D), form="key")',
        sign="j",
        options="causal=True",
        remark="Adds the bias before it divides by √D. Later Falcons are rotary.",
    ),
    Checkpoint(
        "Transformer-XL",
        "transformer_xl",
        "rp.TransformerXL(u, v, rows)",
        {**XL, "rows": (13, "H", "D")},
        PAST,
        options="causal=True",
        remark="`r_w_bias`, `r_r_bias`, and `r_net` of the sinusoids; one row per key, distances L_k − 1 … 0.",
        keys=13,
    ),
    Checkpoint(
        "Llama 1 and 2 (Meta's own files)",
        "rotary",
        'rp.Rotary(layout="interleaved")',
        options="causal=True",
        remark="Channels 2p and 2p + 1. Conversion to transformers permutes the rows of W_q and W_k: mixing the two up gives fluent nonsense.",
    ),
    Checkpoint(
        "RetNet, LeX Transformer (torchscale)",
        "xpos",
        "rp.XPos()",
        options="causal=True",
        remark="Interleaved, scale_base 512.",
    ),
    Checkpoint(
        "LayoutLMv2",
        "layout",
        "rp.LayoutBias(table.T, x_table.T, y_table.T, boxes)",
        {"table": ("H", 32), "x_table": ("H", 64), "y_table": ("H", 64), "boxes": ()},
        AHEAD,
        remark="Checkpoints store the tables transposed; y is the bottom edge.",
    ),
    Checkpoint(
        "UDOP: encoder",
        "layout",
        'rp.LayoutBias(table, x_table, y_table, boxes / 1000, variant="udop")',
        {"table": (32, "H"), "x_table": (32, "H"), "y_table": (32, "H"), "boxes": ()},
        AHEAD,
        "1",
        "scale=1.0",
        "Boxes as fractions of the page; the decoder is T5's.",
    ),
    Checkpoint("GPT-NeoX with KERPLE", "kerple", "rp.KERPLE(a, b)", {"a": ("H",), "b": ("H",)}, options="causal=True"),
    Checkpoint(
        "FIRE",
        "fire",
        "rp.FIRE(w1, b1, w2, b2, c, threshold)",
        {"w1": (32,), "b1": (32,), "w2": ("H", 32), "b2": ("H",), "c": (), "threshold": ()},
        PAST,
        options="causal=True",
    ),
    Checkpoint("Sandwich", "sandwich", "rp.Sandwich()", options="causal=True"),
    Checkpoint(
        "ALBERT with TISA",
        "tisa",
        "rp.TISA(amplitudes, sharpness, offsets)",
        {"amplitudes": (5, "H"), "sharpness": (5, "H"), "offsets": (5, "H")},
        AHEAD,
        remark='The index of the published code is off by one: `variant="published"`.',
    ),
    Checkpoint(
        "CoPE",
        "cope",
        "rp.CoPE(table)",
        {"table": (16, "D")},
        options="causal=True",
        remark="Positions are counted by gates.",
    ),
    Checkpoint(
        "Inkling",
        "inkling",
        "rp.Inkling(relative_states, proj)",
        {"relative_states": ("H", 10, 16), "proj": (16, 1024)},
        PAST,
        "1/D",
        "causal=True, scale=1/D",
        "`r_proj` of the hidden state, cut into heads, and `rel_logits_proj.proj`. Layers without a window multiply the former with their "
        "factor on queries too.",
    ),
    Checkpoint(
        "FoX (Forgetting Transformer)",
        "fox",
        "rp.FoX(gates)",
        {"gates": ("H", 10)},
        options="causal=True",
        remark="What the projection for gates makes of the hidden state, for each key and head.",
    ),
    Checkpoint(
        "DAPE around ALiBi, KERPLE or FIRE",
        "dape",
        "rp.DAPE(rp.ALiBi(), w1, b1, w2, b2)",
        {"w1": (32, 8), "b1": (32,), "w2": ("H", 32), "b2": ("H",)},
        PAST,
        options="causal=True",
        remark="`mlp2.0` and `mlp2.2`. The other biases are `rp.KERPLE(...)` and `rp.FIRE(...)` in the place of `rp.ALiBi()`.",
    ),
    Checkpoint(
        "PaTH",
        "path",
        "rp.PaTH(w / np.linalg.norm(w, axis=-1, keepdims=True), beta)",
        {"w": ("H", 10, "D"), "beta": ("H", 10)},
        options="causal=True",
        remark="What the short convolution makes of `w_proj`, and 2 sigmoid of the projection for β. PaTH-FoX: "
        "`(rp.PaTH(w, beta), rp.FoX(gates))`.",
    ),
    Checkpoint(
        "Selective attention",
        "selective",
        "rp.Selective()",
        options="causal=True",
        remark="The first head votes. Turn queries and keys before the call where the model is rotary.",
    ),
    Checkpoint(
        "CABLE",
        "fox",
        'rp.FoX(gates, variant="cable")',
        {"gates": ("H", 10)},
        NONE,
        "1",
        "scale=1.0, causal=True",
        "`h_attn` of the hidden state. The published code divides by the root of 1.",
    ),
)
SPEECH = (
    Checkpoint(
        "Conformer: ESPnet (`rel_selfattn`), NeMo",
        "transformer_xl",
        'rp.TransformerXL(u, v, rows, variant="conformer")',
        {**XL, "rows": (19, "H", "D")},
        PAST,
        remark="`pos_bias_u`, `pos_bias_v`, `linear_pos` of the sinusoids; 2L − 1 rows. NeMo's offline Conformer is this; check "
        "streaming settings apart.",
    ),
    Checkpoint(
        "Conformer: ESPnet's first (`legacy_rel_selfattn`)",
        "transformer_xl",
        'rp.TransformerXL(u, v, rows, variant="espnet_legacy")',
        {**XL, "rows": (10, "H", "D")},
        PAST,
        remark="L rows, both directions: the entries beyond the diagonal count. Rows count down from the longest length ever seen.",
    ),
    Checkpoint(
        "Conformer: WeNet",
        "transformer_xl",
        'rp.TransformerXL(u, v, rows, variant="wenet")',
        {**XL, "rows": (10, "H", "D")},
        "j",
        remark="No shift: row j is a key's position, not a distance.",
    ),
    Checkpoint(
        "Music Transformer",
        "shaw",
        'rp.Shaw(key_table=table, left=len(table) - 1, outside="zero")',
        {"table": (64, "D")},
        AHEAD,
        options="causal=True",
        remark="One-sided; its skewing is rel_shift.",
    ),
)
VISION = (
    Checkpoint(
        "Donut: encoder",
        "window",
        "rp.WindowBias(table, (7, 7))",
        {"table": (169, "H")},
        PAST,
        remark="Per layer; shifted windows take a mask, see [layers](layers-windows.md).",
        tokens=49,
    ),
    Checkpoint("Video Swin", "window", "rp.WindowBias(table, (2, 7, 7))", {"table": (507, "H")}, PAST, tokens=98),
    Checkpoint(
        "RSTT",
        "window",
        "rp.WindowBias.rstt(table, 7, 4, (4, 4))",
        {"table": (637, "H")},
        PAST,
        remark="7 query frames, 4 key frames.",
        tokens=112,
        keys=64,
    ),
    Checkpoint(
        "Swin2SR",
        "swin_v2",
        "rp.SwinV2(hidden_weight, hidden_bias, output_weight, logit_scale, (8, 8))",
        {"hidden_weight": (512, 2), "hidden_bias": (512,), "output_weight": ("H", 512), "logit_scale": ("H", 1, 1)},
        PAST,
        "learned, cosine",
        remark="Leave `scale` at its default; `pretrained_grid=` after a change of the window.",
        tokens=64,
    ),
    Checkpoint(
        "data2vec-vision",
        "beit",
        "rp.BEiT(table, (14, 14))",
        {"table": (732, "H")},
        PAST,
        remark="Three rows more for the class token.",
        tokens=197,
    ),
    Checkpoint(
        "ViTDet",
        "decomposed",
        "rp.DecomposedBias(rel_pos_h, rel_pos_w, (14, 14))",
        {"rel_pos_h": (27, "D"), "rel_pos_w": (27, "D")},
        PAST,
        remark="The query in the added products is not scaled.",
        tokens=196,
    ),
    Checkpoint(
        "MViTv2",
        "decomposed",
        'rp.DecomposedBias(rel_pos_h, rel_pos_w, (8, 8), (4, 4), variant="mvit")',
        {"rel_pos_h": (15, "D"), "rel_pos_w": (15, "D")},
        PAST,
        remark="Keys are pooled; `class_token=True` where there is one.",
        tokens=64,
        keys=16,
    ),
    Checkpoint(
        "NAT, DiNAT",
        "neighborhood",
        "rp.NeighborhoodBias(rpb, (14, 14), 7)",
        {"rpb": ("H", 13, 13)},
        AHEAD,
        remark="DiNAT: a fourth argument, the dilation.",
        tokens=196,
    ),
    Checkpoint(
        "DeiT with iRPE (product, contextual, keys)",
        "irpe",
        "rp.IRPE((14, 14), key_table, class_tokens=1)",
        {"key_table": (1, 50, "D")},
        PAST,
        remark="`rpe_k` stores (H or 1, D, buckets): transpose it. Distances are measured from the query.",
        tokens=197,
    ),
)
OTHERS = (
    Checkpoint(
        "Graphormer",
        "graph",
        "rp.GraphLabels.graphormer(distances, table, virtual)",
        {"distances": (), "table": (9, "H"), "virtual": ("H",)},
        remark="Labels are shortest paths; edges along them go to `mask=`.",
    ),
)
TABLES: Mapping[str, tuple[Checkpoint, ...]] = {
    "Text": TEXT,
    "Speech and music": SPEECH,
    "Images and video": VISION,
    "Graphs": OTHERS,
}


def tables() -> str:
    """Lay the rows out as Markdown.

    Returns
    -------
    str
        A heading and a table for each kind.
    """
    parts = []
    for kind, rows in TABLES.items():
        parts.append(
            f"## {kind}\n\n| models | scheme | sign | scale | call | to mind |\n| --- | --- | --- | --- | --- | --- |"
        )
        for row in rows:
            info = rp.SCHEMES[row.scheme]
            call = f"`{row.call}`" + (f", `{row.options}`" if row.options else "")
            scale = NONE if info.kind == "absolute" else row.scale
            cells = (row.models, f"[{info.cls.__name__}]({info.docs})", row.sign, scale, call, row.remark)
            parts.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def families() -> str:
    """Lay out what `from_config` says of every model type, with the defaults of its configuration class.

    Returns
    -------
    str
        A heading and a table for each kind.
    """
    rows: dict[str, list[str]] = {}
    for name in model_types():
        config = {"model_type": name, **AS_PUBLISHED.get(name, {})}
        for part in parts_of(config):
            kinds: dict[tuple[str, ...], None] = {}
            for layer in layers_of(config, part=part):
                kinds[_cells(layer)] = None
            cells = [" / ".join(dict.fromkeys(column)) for column in zip(*kinds, strict=True)]
            title = ", ".join(filter(None, (f"`{name}`", part, ONLY.get(name))))
            rows.setdefault(FAMILIES[name].kind, []).append(f"| {title} | {' | '.join(cells)} |")
    head = "| model | positions | scale | attends | more |\n| --- | --- | --- | --- | --- |"
    return "\n\n".join(f"### {kind}\n\n{head}\n" + "\n".join(found) for kind, found in rows.items())


def published() -> str:
    """Say what became of the recorded files.

    Returns
    -------
    str
        A sentence.
    """
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    return (
        f"Of {found['files']} configuration files of {found['types']} types that lie in public repositories, it reads "
        f"{found['read']}, refuses {found['refused']} by the names of their keys or types, and does not know the types of "
        f"{found['unknown']}; `asv_bench/recorded/published.json` names them."
    )


_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_YARN |= {"original_max_position_embeddings": 4096}
# What published files say where the defaults of the class are another model, or none.
AS_PUBLISHED = {
    "CogVideoXTransformer3DModel": {"use_rotary_positional_embeddings": True},
    "beit": {"use_relative_position_bias": True},
    "deepseek_v3": {"rope_scaling": _YARN | {"factor": 40}},
    "deepseek_v32": {"rope_scaling": _YARN | {"factor": 40}},
    "kimi_k2": {"rope_theta": 50000.0, "rope_scaling": _YARN | {"factor": 32}},
    "nemotron-nas": {"num_hidden_layers": 1, "block_configs": [{"attention": {"n_heads_in_group": 8}}]},
    "deepseek_v4": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["attention"] * 32},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "deberta": {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False},
    "deberta-v2": {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
    | {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "esm": {"position_embedding_type": "rotary"},
    "glm4_moe": {"head_dim": 128},
    "qwen3_omni_moe_text": {"num_attention_heads": 32},
    "qwen2_5_vl_vision": {"hidden_size": 1280},
}
# Of which layers a row is, where others are refused.
ONLY = dict.fromkeys((name for name in model_types() if FAMILIES[name].count is not None), "layers with a softmax")
ONLY["deepseek_v4"] = "layers with a window"


def _cells(layer: LayerAttention) -> tuple[str, ...]:
    """Positions, scale, reach, and the rest of a layer, without numbers in names of weights."""
    positions = " + ".join(map(_scheme, layer.schemes)) or ("none" if layer.added is None else "")
    if layer.added is not None:
        positions = " + ".join(filter(None, (positions, f"inputs + {_scheme(layer.added)}")))
    scale = "learned, cosine" if layer.scale != layer.scale else f"{layer.scale:.6g}"
    lines = dict(line[2:].split(None, 1) for line in layer.describe().splitlines() if line.startswith("  attends"))
    more = [plan.remark for plan in layer.schemes if plan.remark]
    more += [f"soft cap {layer.softcap:g}"] if layer.softcap is not None else []
    more += [f"sinks: `{_stem(layer.sinks)}`"] if layer.sinks else []
    more += [f"the query times `{layer.query_scale.words()}`"] if layer.query_scale is not None else []
    more += [f"a call needs `{name}`" for name in (*layer.inputs, *layer.needs)]
    more += [f"a call may give `{name}`" for name in layer.optional]
    more += map(str, (*layer.before, *layer.after))
    return positions, ROOT if layer.scale == layer.head_dim**-0.5 else scale, lines["attends"], "; ".join(more)


def _scheme(plan: SchemePlan) -> str:
    """A scheme with its numbers, and its weights in brackets, without its other arrays."""
    info = next(info for info in rp.SCHEMES.values() if info.cls.__name__ == plan.scheme)
    shown = [
        f"{name}={x:g}" if isinstance(x, float) else f"{name}={x!r}" for name, x in plan.options.items() if _short(x)
    ]
    shown += [f"{name}=[{_stem(path)}]" for name, path in plan.weights.items()]
    return f"[{plan.scheme}]({info.docs})" + (f" `{', '.join(shown)}`" if shown else "")


def _stem(path: str | tuple[str, ...]) -> str:
    """The end of a weight's name."""
    words = (path if isinstance(path, str) else path[0]).removesuffix(".weight").split(".")
    return ".".join(words[-2:] if words[-1] == "bias" else words[-1:])


def _short(value: object) -> bool:
    return isinstance(value, str | int | float | tuple)
