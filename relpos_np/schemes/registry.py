"""The list of schemes, from which the documentation, the completeness test and the benchmarks are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from relpos_np._contract.backends import BACKENDS
from relpos_np.schemes.alibi import FORMS as ALIBI_FORMS
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.beit import BEiT
from relpos_np.schemes.cope import VARIANTS as COPE_VARIANTS
from relpos_np.schemes.cope import CoPE
from relpos_np.schemes.deberta import P2C, DeBERTa
from relpos_np.schemes.decomposed import VARIANTS as DECOMPOSED_VARIANTS
from relpos_np.schemes.decomposed import DecomposedBias
from relpos_np.schemes.fire import FIRE
from relpos_np.schemes.graph import GraphLabels
from relpos_np.schemes.irpe import IRPE
from relpos_np.schemes.irpe import METHODS as IRPE_METHODS
from relpos_np.schemes.kerple import FORMS as KERPLE_FORMS
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.layout import VARIANTS as LAYOUT_VARIANTS
from relpos_np.schemes.layout import LayoutBias
from relpos_np.schemes.learned import LearnedAbsolute
from relpos_np.schemes.neighborhood import VARIANTS as NEIGHBORHOOD_VARIANTS
from relpos_np.schemes.neighborhood import NeighborhoodBias
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.rotary import LAYOUTS as ROTARY_LAYOUTS
from relpos_np.schemes.rotary import XPOS_LAYOUTS, Rotary, XPos
from relpos_np.schemes.sandwich import VARIANTS as SANDWICH_VARIANTS
from relpos_np.schemes.sandwich import Sandwich
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.sinusoidal import LAYOUTS, Sinusoidal
from relpos_np.schemes.swin_v2 import VARIANTS as SWIN_V2_VARIANTS
from relpos_np.schemes.swin_v2 import SwinV2
from relpos_np.schemes.t5 import T5
from relpos_np.schemes.tisa import TISA
from relpos_np.schemes.tisa import VARIANTS as TISA_VARIANTS
from relpos_np.schemes.transformer_xl import VARIANTS, TransformerXL
from relpos_np.schemes.wavlm import WavLM
from relpos_np.schemes.window import WindowBias


@dataclass(frozen=True)
class SchemeInfo:
    """One line of `SCHEMES`.

    Attributes
    ----------
    name : str
        Key in `SCHEMES`.
    cls : type
        Constructor.
    kind : {"attention", "absolute"}
        Passed as ``position=``, or added to the inputs.
    paper : str
        Where the formula was published.
    variants : tuple of str
        Named divergences.
    models : tuple of str
        Where it is found, among others.
    backends : tuple of str
        Where it runs.
    docs : str
        Page of the documentation.
    """

    name: str
    cls: type
    kind: str
    paper: str
    variants: tuple[str, ...]
    models: tuple[str, ...]
    backends: tuple[str, ...]
    docs: str


def _info(
    name: str, cls: type, paper: str, variants: tuple[str, ...] = (), models: str = "", kind: str = "attention"
) -> SchemeInfo:
    backends = BACKENDS if kind == "attention" else ("numpy",)
    return SchemeInfo(
        name, cls, kind, paper, variants, tuple(models.split(", ")) if models else (), backends, f"schemes/{name}.md"
    )


_ALL = (
    _info("plain", Plain, "Vaswani et al., NeurIPS 2017"),
    _info(
        "shaw",
        Shaw,
        "Shaw et al., NAACL 2018",
        ("clip", "zero"),
        models="Shaw's Transformer, Music Transformer, VITS, SpeechT5, Wav2Vec2-BERT, SeamlessM4T v2",
    ),
    _info(
        "t5", T5, "Raffel et al., JMLR 2020", ("exact", "float32"), models="T5, mT5, umT5, MPNet, LongT5's local part"
    ),
    _info(
        "transformer_xl",
        TransformerXL,
        "Dai et al., ACL 2019",
        VARIANTS,
        models="Transformer-XL, XLNet, ESPnet and NeMo Conformers, Wav2Vec2-Conformer, SeamlessM4T",
    ),
    _info(
        "rotary",
        Rotary,
        "Su et al., 2021 (Neurocomputing 2024)",
        ROTARY_LAYOUTS,
        models="RoFormer, GPT-J, GPT-NeoX, Llama, Mistral, Qwen, Qwen2-VL, Phi-3, Gemma, EVA-02, DINOv3, Pixtral",
    ),
    _info("xpos", XPos, "Sun et al., ACL 2023", XPOS_LAYOUTS, models="LeX Transformer, RetNet"),
    _info(
        "window",
        WindowBias,
        "Liu et al., ICCV 2021; Geng et al., CVPR 2022",
        ("swin", "video", "rstt"),
        models="Swin, Video Swin, Donut, RSTT",
    ),
    _info("swin_v2", SwinV2, "Liu et al., CVPR 2022", SWIN_V2_VARIANTS, models="Swin V2, Swin2SR"),
    _info("beit", BEiT, "Bao et al., ICLR 2022", models="BEiT, data2vec vision"),
    _info(
        "decomposed",
        DecomposedBias,
        "Li et al., CVPR 2022; Kirillov et al., ICCV 2023",
        DECOMPOSED_VARIANTS,
        models="SAM, ViTDet, MViTv2",
    ),
    _info(
        "neighborhood",
        NeighborhoodBias,
        "Hassani et al., CVPR 2023; Hassani & Shi, 2022",
        NEIGHBORHOOD_VARIANTS,
        models="NAT, DiNAT",
    ),
    _info("irpe", IRPE, "Wu et al., ICCV 2021", (*IRPE_METHODS, "bias"), models="DeiT with iRPE"),
    _info("alibi", ALiBi, "Press et al., ICLR 2022", ALIBI_FORMS, models="BLOOM, MPT, Falcon-RW"),
    _info("kerple", KERPLE, "Chi et al., NeurIPS 2022", KERPLE_FORMS, models="GPT-NeoX with KERPLE"),
    _info(
        "layout",
        LayoutBias,
        "Xu et al., ACL 2021; Tang et al., CVPR 2023",
        LAYOUT_VARIANTS,
        models="LayoutLMv2, LayoutLMv3, UDOP",
    ),
    _info("deberta", DeBERTa, "He et al., ICLR 2021", P2C, models="DeBERTa, DeBERTa v2, DeBERTa v3"),
    _info(
        "graph",
        GraphLabels,
        "Shaw et al., NAACL 2018; Ying et al., NeurIPS 2021",
        ("graphormer", "shaw"),
        models="Graphormer, relation-aware self-attention, Funnel",
    ),
    _info("cope", CoPE, "Golovneva et al., 2024", COPE_VARIANTS, models="CoPE"),
    _info("wavlm", WavLM, "Chen et al., 2022", models="WavLM"),
    _info("fire", FIRE, "Li et al., ICLR 2024", models="FIRE"),
    _info("sandwich", Sandwich, "Chi et al., ACL 2023", SANDWICH_VARIANTS, models="Sandwich"),
    _info("tisa", TISA, "Wennberg and Henter, ACL 2021", TISA_VARIANTS, models="ALBERT with TISA"),
    _info(
        "sinusoidal",
        Sinusoidal,
        "Vaswani et al., NeurIPS 2017",
        LAYOUTS,
        models="Transformer, Whisper, MarianMT, ESPnet encoders",
        kind="absolute",
    ),
    _info(
        "learned",
        LearnedAbsolute,
        "Gehring et al., ICML 2017",
        models="GPT-2, BERT, RoBERTa, BART, ViT",
        kind="absolute",
    ),
)

SCHEMES: Mapping[str, SchemeInfo] = MappingProxyType({info.name: info for info in _ALL})
