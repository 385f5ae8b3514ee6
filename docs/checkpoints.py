"""Published models and the calls for their positions: docs/checkpoints.md shows them, tests/test_docs.py runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import relpos_np as rp

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


T5_TABLE = {"table": (32, "H")}
XL = {"u": ("H", "D"), "v": ("H", "D")}

TEXT = (
    Checkpoint(
        "T5, Flan-T5, mT5, Switch Transformers, Pop2Piano: encoder",
        "t5",
        "rp.T5(table)",
        T5_TABLE,
        AHEAD,
        "1",
        "scale=1.0",
        "`relative_attention_bias.weight` of block 0, shared by all layers; umT5 has one per layer. Buckets in float32 agree with the exact ones.",
    ),
    Checkpoint(
        "the same: decoder",
        "t5",
        "rp.T5(table, bidirectional=False)",
        T5_TABLE,
        AHEAD,
        "1",
        "scale=1.0, causal=True",
        "Cross-attention has no bias: call it without `position`, with `scale=1.0`.",
    ),
    Checkpoint(
        "MPNet",
        "t5",
        "rp.T5(table)",
        T5_TABLE,
        AHEAD,
        remark="32 buckets up to 128 whatever its configuration says; learned absolute positions in its inputs besides.",
    ),
    Checkpoint(
        "BLOOM",
        "alibi",
        'rp.ALiBi(form="key")',
        sign="j",
        options="causal=True",
        remark="The bias is m·j, which differs from m·(j − i) by a constant per query: same outputs, another log-sum-exp.",
    ),
    Checkpoint("MPT", "alibi", 'rp.ALiBi(form="key")', sign="j", options="causal=True", remark="As BLOOM."),
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
        "XLNet",
        "transformer_xl",
        'rp.TransformerXL(u, v, rows, variant="xlnet")',
        {**XL, "rows": (20, "H", "D")},
        PAST,
        remark='L_q + L_k rows from distance L_k down; with `attn_type="uni"` the variant `xlnet_uni`, L_k + 1 rows. `clamp_len`: '
        "`row_distances(..., clamp=)`.",
    ),
    Checkpoint(
        "DeBERTa v1",
        "deberta",
        "rp.DeBERTa(pos_key, pos_query)",
        {"pos_key": ("H", 1024, "D"), "pos_query": ("H", 1024, "D")},
        PAST,
        "1/√(3D)",
        "scale=position.scale",
        "The relative embedding after `pos_proj` and `pos_q_proj`, with their bias.",
    ),
    Checkpoint(
        "DeBERTa v2, v3",
        "deberta",
        "rp.DeBERTa(pos_key, pos_query, max_position=512)",
        {"pos_key": ("H", 512, "D"), "pos_query": ("H", 512, "D")},
        PAST,
        "1/√(3D)",
        "scale=position.scale",
        "Logarithmic buckets. With `share_att_key` (v3) the projections are those of keys and queries.",
    ),
    Checkpoint(
        "Llama 1 and 2, Mistral 7B v0.1, Gemma 1 (transformers)",
        "rotary",
        "rp.Rotary()",
        options="causal=True",
        remark="Channels p and p + D/2.",
    ),
    Checkpoint(
        "Llama 1 and 2 (Meta's own files)",
        "rotary",
        'rp.Rotary(layout="interleaved")',
        options="causal=True",
        remark="Channels 2p and 2p + 1. Conversion to transformers permutes the rows of W_q and W_k: mixing the two up gives fluent nonsense.",
    ),
    Checkpoint(
        "Llama 3", "rotary", "rp.Rotary(base=500_000.0)", options="causal=True", remark="Half, in transformers."
    ),
    Checkpoint(
        "Llama 3.1",
        "rotary",
        "rp.Rotary(frequencies=rp.reference.llama3_frequencies(D, factor=8.0, trained_length=8192, base=500_000.0))",
        options="causal=True",
        remark="`rope_type: llama3`, low 1, high 4; the small models of 3.2 have factor 32.",
        dim=128,
    ),
    Checkpoint(
        "Qwen2, Mistral 7B v0.3", "rotary", "rp.Rotary(base=1_000_000.0)", options="causal=True", remark="Half."
    ),
    Checkpoint(
        "Qwen2.5 with YaRN",
        "rotary",
        "rp.Rotary(frequencies=frequencies, magnitude=magnitude)",
        {"frequencies": (64,), "magnitude": ()},
        options="causal=True",
        remark="`frequencies, magnitude = rp.reference.yarn_frequencies(D, factor=4.0, trained_length=32768, base=1e6)`",
        dim=128,
    ),
    Checkpoint(
        "GPT-NeoX, Pythia",
        "rotary",
        "rp.Rotary(D // 4)",
        options="causal=True",
        remark="A quarter of each head turns, half layout (`rotary_pct`).",
    ),
    Checkpoint(
        "GPT-J",
        "rotary",
        'rp.Rotary(64, layout="interleaved")',
        options="causal=True",
        remark="64 of 256 channels.",
        dim=256,
    ),
    Checkpoint(
        "Phi-1.5, Phi-2",
        "rotary",
        "rp.Rotary(32)",
        options="causal=True",
        remark="32 of 64 or 80 channels, half (`partial_rotary_factor`). Phi-3 with long context: `longrope_frequencies`.",
        dim=80,
    ),
    Checkpoint(
        "RoFormer, Cohere, GLM, ERNIE 4.5, PaLM's paper",
        "rotary",
        'rp.Rotary(layout="interleaved")',
        remark="RoFormer attends both ways; GLM turns half of the channels, `rp.Rotary(D // 2, ...)`. PaLM's weights were not published.",
    ),
    Checkpoint(
        "ModernBERT",
        "rotary",
        "rp.Rotary(base=160_000.0)",
        remark="Global layers; local ones have base 10,000 and a window (`window=64`). Both ways.",
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
        "LayoutLMv3",
        "layout",
        'rp.LayoutBias(table.T, x_table.T, y_table.T, boxes, variant="layoutlmv3")',
        {"table": ("H", 32), "x_table": ("H", 64), "y_table": ("H", 64), "boxes": ()},
        AHEAD,
        remark="The bias is divided by √D too.",
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
    Checkpoint(
        "BERT, GPT-2",
        "learned",
        "rp.LearnedAbsolute(table)(x)",
        {"table": (512, "D")},
        remark="GPT-2 has 1024 rows.",
    ),
    Checkpoint(
        "RoBERTa, BART, OPT",
        "learned",
        "rp.LearnedAbsolute(table[2:])(x)",
        {"table": (514, "D")},
        remark="Two rows in front belong to no position.",
    ),
    Checkpoint(
        "MarianMT",
        "sinusoidal",
        'rp.Sinusoidal(D, layout="concatenated")(x)',
        remark="All sines first, the paper's frequencies.",
    ),
    Checkpoint(
        "M2M-100, NLLB",
        "sinusoidal",
        'x + rp.Sinusoidal(D, layout="tensor2tensor").encode(np.arange(2, L + 2))',
        remark="Positions count from 2; frequencies are tensor2tensor's. x is the embedding times √d_model.",
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
)
SPEECH = (
    Checkpoint(
        "Conformer: ESPnet (`rel_selfattn`), NeMo, Wav2Vec2-Conformer (`relative`), SeamlessM4T v1",
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
        "Wav2Vec2-Conformer (`rotary`)",
        "rotary",
        "rp.Rotary()",
        remark="Only after `rp.reference.rotate_inputs`: it turns the inputs of W_q and W_k, not queries and keys. Then call attention "
        "without `position`.",
    ),
    Checkpoint(
        "Wav2Vec2-BERT, SeamlessM4T v2 (`relative_key`)",
        "shaw",
        "rp.Shaw(key_table=table, left=64)",
        {"table": (73, "D")},
        AHEAD,
        remark="64 positions to the left, 8 to the right, keys only.",
    ),
    Checkpoint(
        "SpeechT5: encoder",
        "shaw",
        "rp.Shaw(key_table=table[::-1], left=159)",
        {"table": (320, "D")},
        PAST,
        remark="`pe_k` counts the other way and has an even number of rows, hence the reversal.",
    ),
    Checkpoint(
        "VITS: text encoder",
        "shaw",
        'rp.Shaw(emb_rel_k[0], emb_rel_v[0], outside="zero")',
        {"emb_rel_k": (1, 9, "D"), "emb_rel_v": (1, 9, "D")},
        AHEAD,
        remark="Window 4, nothing beyond it.",
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
    Checkpoint(
        "WavLM",
        "wavlm",
        "rp.WavLM(table, gate)",
        {"table": (320, "H"), "gate": ("H", 10)},
        AHEAD,
        remark="`gate = rp.reference.wavlm_gate(hidden, weight, bias, const)`, per layer; the table is the first layer's.",
    ),
    Checkpoint(
        "Whisper: encoder",
        "sinusoidal",
        'rp.Sinusoidal(D, layout="tensor2tensor")(x)',
        remark="The decoder's are learned (448 rows).",
    ),
)
VISION = (
    Checkpoint(
        "Swin, Donut",
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
        "Swin V2, Swin2SR",
        "swin_v2",
        "rp.SwinV2(hidden_weight, hidden_bias, output_weight, logit_scale, (8, 8))",
        {"hidden_weight": (512, 2), "hidden_bias": (512,), "output_weight": ("H", 512), "logit_scale": ("H", 1, 1)},
        PAST,
        "learned, cosine",
        remark="Leave `scale` at its default; `pretrained_window=` after a change of the window.",
        tokens=64,
    ),
    Checkpoint(
        "BEiT, data2vec-vision",
        "beit",
        "rp.BEiT(table, (14, 14))",
        {"table": (732, "H")},
        PAST,
        remark="Three rows more for the class token.",
        tokens=197,
    ),
    Checkpoint(
        "SAM, ViTDet",
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
    Checkpoint(
        "Qwen2-VL: text",
        "rotary",
        "rp.Rotary(frequencies=rp.reference.axis_frequencies(rp.reference.rotary_frequencies(D, base=1e6), "
        "rp.reference.section_axes((16, 24, 24))), positions=positions)",
        {"positions": (3, 10)},
        options="causal=True",
        remark="Positions have a time, a row and a column: shape (3, L).",
        dim=128,
    ),
    Checkpoint(
        "ViT, DeiT, CLIP",
        "learned",
        "rp.LearnedAbsolute(table)(x)",
        {"table": (197, "D")},
        remark="Row 0 is the class token's. Other sizes: `rp.reference.resize_table`.",
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
