"""Attention of this library in models of transformers: as one of its attention implementations, or patched in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import relpos_np as rp
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.interop.bias import DenseBias
from relpos_np.interop.torch import attention, trained

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise RelposImportError(
        f"relpos_np.interop.transformers cannot import transformers 5.23 or later ({error}); install it with "
        "`pip install 'transformers>=5.23'`"
    ) from error

__all__ = ["NAME", "patched", "register"]

NAME = "relpos_np"

# What a model may ask of its attention, and this one cannot do.
_UNKNOWN = ("softcap", "s_aux", "cache")


@dataclass(frozen=True)
class _Positions:
    """What a patched model hands from layer to layer in place of a bias per pair."""

    scheme: Any
    offset: int | None = None


def _attend(q: Any, k: Any, v: Any, mask: Any, bias: Any, *, causal: bool, scale: float | None, dropout: float) -> Any:
    """Heads and vectors side by side, (B, L_q, H, D_v): what models go on with."""
    offset = 0 if causal else None
    if isinstance(bias, _Positions):
        position, offset = bias.scheme, bias.offset
    else:
        position = None if bias is None else trained(DenseBias, bias)
    # Without a mask, a model's queries are its first positions: so it fills the cache of a given length.
    out = attention(q, k, v, position=position, mask=mask, causal=causal, scale=scale, offset=offset, dropout=dropout)
    return out.transpose(1, 2).contiguous()


def _forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """What transformers calls in place of its own attention."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise RelposValueError(
                f"{name}: {type(module).__name__} asks for it, and attention implementation {NAME!r} does not have it; "
                'use model.set_attn_implementation("eager")'
            )
    if kwargs.get("output_attentions"):
        raise RelposValueError(
            f"output_attentions: attention implementation {NAME!r} never holds the probabilities; use "
            'model.set_attn_implementation("eager")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    out = _attend(
        query, key, value, attention_mask, position_bias, causal=causal, scale=scaling, dropout=float(dropout)
    )
    return out, None


def register() -> str:
    """Make ``"relpos_np"`` one of transformers' attention implementations.

    Afterwards ``model.set_attn_implementation("relpos_np")``, or ``attn_implementation="relpos_np"`` where a model is
    made, sends all attention that goes through transformers' interface to this library. Masks are those of
    its "sdpa": none where causality says it all, else one bool per pair.

    Returns
    -------
    str
        The name, "relpos_np".
    """
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _t5_bias(
    self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
) -> _Positions:
    """T5Attention.compute_bias: the table itself, and where the queries begin."""
    scheme = trained(
        rp.T5,
        self.relative_attention_bias.weight,
        max_distance=self.relative_attention_max_distance,
        bidirectional=not self.is_decoder,
        rounding="float32",
    )
    return _Positions(scheme, int(past_seen_tokens))


def _mpnet_bias(self: Any, x: Any, position_ids: Any = None, num_buckets: int = 32) -> _Positions:
    """MPNetEncoder.compute_position_bias: the table itself."""
    if position_ids is not None:
        raise RelposValueError("position_ids: a patched MPNet counts positions from 0")
    return _Positions(trained(rp.T5, self.relative_attention_bias.weight[:num_buckets], rounding="float32"))


def _no_probabilities(output_attentions: bool) -> None:
    if output_attentions:
        raise RelposValueError("output_attentions: a patched model never holds the probabilities")


def _mpnet_attention(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_bias: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Any]:
    """MPNetSelfAttention.forward."""
    _no_probabilities(output_attentions)
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
    dropout = self.dropout.p if self.training else 0.0
    out = _attend(q, k, v, attention_mask, position_bias, causal=False, scale=None, dropout=dropout)
    return (self.o(out.flatten(2)),)


def _bloom_attention(
    self: Any,
    hidden_states: Any,
    residual: Any,
    alibi: Any,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Any, None]:
    """BloomAttention.forward."""
    _no_probabilities(output_attentions)
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    # One number per key: with padding, positions begin at a sequence's first token.
    bias = alibi.view(q.shape[0], self.num_heads, 1, -1)
    causal = attention_mask is None and q.shape[2] > 1
    dropout = self.attention_dropout.p if self.training else 0.0
    out = _attend(q, k, v, attention_mask, bias, causal=causal, scale=self.inv_norm_factor, dropout=dropout)
    out = self.dense(out.flatten(2))
    out = _dropout(out, self.hidden_dropout, self.training)
    return residual + out, None


def _dropout(x: Any, rate: float, training: bool) -> Any:
    """Dropout of the hidden states, which is PyTorch's."""
    from torch.nn.functional import dropout

    return dropout(x, p=rate, training=training)


@dataclass(frozen=True)
class _Patch:
    """A method of one of transformers' classes, and what takes its place."""

    model: str
    cls: str
    method: str
    replacement: Callable[..., Any]

    def found(self) -> Any:
        """The class, if its module is loaded; otherwise there is no model of it."""
        module = sys.modules.get(f"transformers.models.{self.model}.modeling_{self.model}")
        return None if module is None else getattr(module, self.cls, None)

    def check(self, cls: Any) -> None:
        """Refuse a method whose arguments are not those of the method that was replaced when this was written."""
        found = tuple(inspect.signature(getattr(cls, self.method)).parameters)
        expected = tuple(inspect.signature(self.replacement).parameters)
        if found != expected:
            raise RelposImportError(
                f"transformers {transformers.__version__}: {self.cls}.{self.method} takes {', '.join(found)}; this "
                f"version of relpos_np can replace one that takes {', '.join(expected)}, as in transformers 5.23"
            )


_T5_LIKE = {
    "t5": "T5Attention",
    "mt5": "MT5Attention",
    "umt5": "UMT5Attention",
    "switch_transformers": "SwitchTransformersAttention",
    "pop2piano": "Pop2PianoAttention",
}
_PATCHES = (
    *(_Patch(model, cls, "compute_bias", _t5_bias) for model, cls in _T5_LIKE.items()),
    _Patch("mpnet", "MPNetEncoder", "compute_position_bias", _mpnet_bias),
    _Patch("mpnet", "MPNetSelfAttention", "forward", _mpnet_attention),
    _Patch("bloom", "BloomAttention", "forward", _bloom_attention),
)


@contextmanager
def patched(model: Any) -> Iterator[Any]:
    """Run a model on this library, tables of positions included, inside a ``with`` block.

    For models whose attention does not go through transformers' interface (BLOOM, MPNet), and for those that write
    out a bias for every pair of positions first (T5, mT5, umT5, Switch Transformers, Pop2Piano): their tables are read
    as they are, and nothing of L_q L_k is held. Only this one model is changed, and what it was is restored at the end
    of the block, also after an error.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model of those named, or one that contains some.

    Yields
    ------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    RelposError
        If there is nothing to replace in the model, or this version of transformers has other methods than those
        that can be replaced.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise RelposTypeError(f"model: expected a model of transformers, found {type(model).__name__}")
    classes = [(patch, cls) for patch in _PATCHES if (cls := patch.found()) is not None]
    jobs = [(module, patch, cls) for module in model.modules() for patch, cls in classes if type(module) is cls]
    jobs = [job for job in jobs if job[1].replacement is not _t5_bias or job[0].has_relative_attention_bias]
    if not jobs:
        names = ", ".join(sorted({patch.cls for patch in _PATCHES}))
        raise RelposValueError(
            f"model: {type(model).__name__} has none of {names}; if its attention goes through transformers' "
            f"interface, call register() and model.set_attn_implementation({NAME!r})"
        )
    for _, patch, cls in jobs:
        patch.check(cls)
    register()
    configs = {id(x.config): x.config for x in model.modules() if isinstance(x, transformers.PreTrainedModel)}
    with ExitStack() as undo:
        for module, patch, _ in jobs:
            if patch.method in vars(module):
                raise RelposValueError(f"model: {patch.cls}.{patch.method} of this model was replaced already")
            setattr(module, patch.method, partial(patch.replacement, module))
            undo.callback(delattr, module, patch.method)
        for config in configs.values():
            # Masks are made by this name even for models that do not go through the interface.
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
            config._attn_implementation_internal = NAME
        yield model
