"""Every formula for positions in attention: a NumPy reference with fast kernels."""

from relpos_np import _moved, backend, reference
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._runtime.memory import memory_limit, set_memory_limit
from relpos_np._runtime.threadcount import get_num_threads, set_num_threads, threads
from relpos_np.api import attention, attention_vjp, logits, rel_shift
from relpos_np.backend import set_backend, use_backend
from relpos_np.errors import (
    RelposError,
    RelposImportError,
    RelposIndexError,
    RelposMemoryError,
    RelposTypeError,
    RelposValueError,
)
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.beit import BEiT
from relpos_np.schemes.cope import CoPE
from relpos_np.schemes.deberta import DeBERTa
from relpos_np.schemes.decomposed import DecomposedBias
from relpos_np.schemes.fire import FIRE
from relpos_np.schemes.graph import GraphLabels
from relpos_np.schemes.irpe import IRPE
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.layout import LayoutBias
from relpos_np.schemes.learned import LearnedAbsolute
from relpos_np.schemes.neighborhood import NeighborhoodBias
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.registry import SCHEMES, SchemeInfo
from relpos_np.schemes.rotary import Rotary, XPos
from relpos_np.schemes.sandwich import Sandwich
from relpos_np.schemes.shaw import Shaw
from relpos_np.schemes.sinusoidal import Sinusoidal
from relpos_np.schemes.swin_v2 import SwinV2
from relpos_np.schemes.t5 import T5
from relpos_np.schemes.tisa import TISA
from relpos_np.schemes.transformer_xl import TransformerXL
from relpos_np.schemes.wavlm import WavLM
from relpos_np.schemes.window import WindowBias
from relpos_np.versions import show_versions

__version__ = "0.1.0"

__all__ = [
    "FIRE",
    "IRPE",
    "KERPLE",
    "SCHEMES",
    "T5",
    "TISA",
    "ALiBi",
    "AttentionGradient",
    "BEiT",
    "CoPE",
    "DeBERTa",
    "DecomposedBias",
    "GraphLabels",
    "LayoutBias",
    "LearnedAbsolute",
    "NeighborhoodBias",
    "Plain",
    "RelposError",
    "RelposImportError",
    "RelposIndexError",
    "RelposMemoryError",
    "RelposTypeError",
    "RelposValueError",
    "Rotary",
    "Sandwich",
    "SchemeInfo",
    "Shaw",
    "Sinusoidal",
    "SwinV2",
    "TransformerXL",
    "WavLM",
    "WindowBias",
    "XPos",
    "attention",
    "attention_vjp",
    "backend",
    "get_num_threads",
    "logits",
    "memory_limit",
    "reference",
    "rel_shift",
    "set_backend",
    "set_memory_limit",
    "set_num_threads",
    "show_versions",
    "threads",
    "use_backend",
]

_moved.install(__name__)
