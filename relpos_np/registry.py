"""The list of schemes, from which the documentation, the completeness test and the benchmarks are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from relpos_np.backend import BACKENDS
from relpos_np.relshift import VARIANTS
from relpos_np.schemes.alibi import FORMS as ALIBI_FORMS
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.kerple import FORMS as KERPLE_FORMS
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.learned import LearnedAbsolute
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.rotary import LAYOUTS as ROTARY_LAYOUTS
from relpos_np.schemes.rotary import Rotary
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.sinusoidal import LAYOUTS, Sinusoidal
from relpos_np.schemes.t5 import T5
from relpos_np.schemes.transformer_xl import TransformerXL
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
    backends: tuple[str, ...]
    docs: str


def _info(name: str, cls: type, paper: str, variants: tuple[str, ...] = (), kind: str = "attention") -> SchemeInfo:
    return SchemeInfo(
        name, cls, kind, paper, variants, BACKENDS if kind == "attention" else ("numpy",), f"schemes/{name}.md"
    )


_ALL = (
    _info("plain", Plain, "Vaswani et al., NeurIPS 2017"),
    _info("shaw", Shaw, "Shaw et al., NAACL 2018", ("clip", "zero")),
    _info("t5", T5, "Raffel et al., JMLR 2020", ("exact", "float32")),
    _info("transformer_xl", TransformerXL, "Dai et al., ACL 2019", VARIANTS),
    _info("rotary", Rotary, "Su et al., 2021 (Neurocomputing 2024)", ROTARY_LAYOUTS),
    _info("window", WindowBias, "Liu et al., ICCV 2021; Geng et al., CVPR 2022", ("swin", "video", "rstt")),
    _info("alibi", ALiBi, "Press et al., ICLR 2022", ALIBI_FORMS),
    _info("kerple", KERPLE, "Chi et al., NeurIPS 2022", KERPLE_FORMS),
    _info("sinusoidal", Sinusoidal, "Vaswani et al., NeurIPS 2017", LAYOUTS, kind="absolute"),
    _info("learned", LearnedAbsolute, "Gehring et al., ICML 2017", kind="absolute"),
)

SCHEMES: Mapping[str, SchemeInfo] = MappingProxyType({info.name: info for info in _ALL})
