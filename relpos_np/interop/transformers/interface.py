"""One more of transformers' attention implementations: this library."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from relpos_np.errors import RelposValueError
from relpos_np.interop.bias import DenseBias
from relpos_np.interop.torch import attention, trained
from relpos_np.interop.transformers import asked
from relpos_np.interop.transformers.asked import NAME
from relpos_np.interop.transformers.layers import check_used
from relpos_np.interop.transformers.masks import Mask, mask_of
from relpos_np.interop.transformers.switch import Positions, delegate, delegate_mask


def is_packed(mask: Any) -> bool:
    """Whether a mask is that of tokens which are packed."""
    return isinstance(mask, Mask) and mask.segments is not None


def attend(q: Any, k: Any, v: Any, mask: Any, bias: Any, *, scale: float | None, dropout: float, **options: Any) -> Any:
    """Heads and vectors side by side, (B, L_q, H, D_v): what models go on with."""
    position = None if bias is None else trained(DenseBias, bias)
    offset, causal = None, False
    if isinstance(bias, Positions):
        position, offset = bias.scheme, bias.offset
    if is_packed(mask):
        mask, options = None, {**options, "segments": mask.segments}
    if isinstance(mask, Mask):
        if not mask.rule or (mask.offset is not None and offset not in (None, mask.offset)):
            mask = mask.write()
        elif mask.offset is None:
            mask = None
        else:
            mask, causal, offset = None, True, mask.offset
    if "softcap" in options and bias is not None:
        raise RelposValueError(
            "softcap: together with position_bias: which of them comes first is unknown; use "
            'model.set_attn_implementation("eager")'
        )
    if "segments" in options and offset is not None:
        if offset or q.shape[2] != k.shape[2]:
            raise RelposValueError(
                f"cu_seq_lens_q: packed sequences of {q.shape[2]} queries that begin at position {offset} of "
                f"{k.shape[2]} keys; what a cache holds of which sequence is unknown"
            )
        offset = None
    out = attention(
        q, k, v, position=position, mask=mask, causal=causal, scale=scale, offset=offset, dropout=dropout, **options
    )
    return out.transpose(1, 2).contiguous()


def forward(
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
    asked.check_module(module, query, key, scaling, kwargs)
    options = asked.options(module, kwargs)
    window = kwargs.get("sliding_window")
    if window is not None and is_packed(attention_mask):
        # There is no mask to say it; as flash attention has it, with the query itself.
        options["window"] = int(window) - 1
    if attention_mask is None and query.shape[2] > 1:
        _check_full(module, is_causal)
    rate = float(dropout) if module.training else 0.0
    return attend(query, key, value, attention_mask, position_bias, scale=scaling, dropout=rate, **options), None


def _check_full(module: Any, is_causal: bool | None) -> None:
    """Refuse a module without a mask that does not say that every query sees every key."""
    found = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if found is None:
        raise RelposValueError(
            f"is_causal: {type(module).__name__} gives no mask, no argument is_causal and has no such attribute, so "
            'whether it is causal is unknown; use model.set_attn_implementation("eager")'
        )
    if found:
        raise RelposValueError(
            f"is_causal: {type(module).__name__} is causal and gives no mask: its own eager attention would see every "
            "key, others only earlier ones; hand over a mask"
        )


def register(model: Any = None) -> str:
    """Make ``"relpos_np"`` one of transformers' attention implementations.

    Afterwards ``model.set_attn_implementation("relpos_np")``, or ``attn_implementation="relpos_np"`` where a model is
    made, sends all attention that goes through transformers' interface to this library. What a model asks of its
    attention and is not known here is an error that names it. transformers accepts the name for models whose attention
    does not go through its interface too, and then nothing happens: hand over the model to be told, or ask `used`.

    Parameters
    ----------
    model : transformers.PreTrainedModel, optional
        A model to set the implementation of.

    Returns
    -------
    str
        The name, "relpos_np".

    Raises
    ------
    RelposError
        If none of the model's attention goes through transformers' interface; the model is left as it was.
    """
    AttentionInterface.register(NAME, delegate(forward))
    AttentionMaskInterface.register(NAME, delegate_mask(mask_of))
    if model is not None:
        check_used(model)
        model.set_attn_implementation(NAME)
    return NAME
