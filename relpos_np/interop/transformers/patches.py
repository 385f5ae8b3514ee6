"""Models whose positions, or whole attention, transformers' interface does not reach: their methods replaced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import transformers
from torch.nn.functional import dropout

import relpos_np as rp
from relpos_np.errors import RelposImportError, RelposValueError
from relpos_np.interop.torch import trained
from relpos_np.interop.transformers import switch
from relpos_np.interop.transformers.asked import NAME
from relpos_np.interop.transformers.interface import attend, register
from relpos_np.interop.transformers.layers import check_model
from relpos_np.interop.transformers.switch import Positions, Switch


def _t5_bias(self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Positions:
    """T5Attention.compute_bias: the table itself, and where the queries begin."""
    scheme = trained(
        rp.T5,
        self.relative_attention_bias.weight,
        max_distance=self.relative_attention_max_distance,
        bidirectional=not self.is_decoder,
        rounding="float32",
    )
    return Positions(scheme, int(past_seen_tokens))


def _mpnet_bias(self: Any, x: Any, position_ids: Any = None, num_buckets: int = 32) -> Positions:
    """MPNetEncoder.compute_position_bias: the table itself."""
    if position_ids is not None:
        raise RelposValueError("position_ids: a patched MPNet counts positions from 0")
    return Positions(trained(rp.T5, self.relative_attention_bias.weight[:num_buckets], rounding="float32"))


def no_probabilities(output_attentions: bool) -> None:
    """Refuse to return what is never held."""
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
    no_probabilities(output_attentions)
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
    rate = self.dropout.p if self.training else 0.0
    out = attend(q, k, v, attention_mask, position_bias, scale=None, dropout=rate)
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
    no_probabilities(output_attentions)
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    # One number per key: with padding, positions begin at a sequence's first token.
    bias = alibi.view(q.shape[0], self.num_heads, 1, -1)
    rate = self.attention_dropout.p if self.training else 0.0
    out = attend(q, k, v, attention_mask, bias, scale=self.inv_norm_factor, dropout=rate)
    out = self.dense(out.flatten(2))
    out = dropout(out, p=self.hidden_dropout, training=self.training)
    return residual + out, None


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
                f"version of relpos_np can replace one that takes {', '.join(expected)}, as in transformers 5.24"
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


def _installed(model: Any) -> Switch:
    """A model's switch, with all that can be replaced in the model in place."""
    check_model(model)
    if not _jobs(model):
        names = ", ".join(sorted({patch.cls for patch in _PATCHES}))
        raise RelposValueError(
            f"model: {type(model).__name__} has none of {names}; if its attention goes through transformers' "
            f"interface, call register() and model.set_attn_implementation({NAME!r})"
        )
    return install(model)


def _jobs(model: Any) -> list[tuple[Any, _Patch, Any]]:
    """Modules of a model, with what can be replaced in each."""
    classes = [(patch, cls) for patch in _PATCHES if (cls := patch.found()) is not None]
    jobs = [(module, patch, cls) for module in model.modules() for patch, cls in classes if type(module) is cls]
    return [job for job in jobs if job[1].replacement is not _t5_bias or job[0].has_relative_attention_bias]


def install(model: Any, more: Iterable[tuple[Any, str, Callable[..., Any]]] = ()) -> Switch:
    """Put replacements in place: those of attention and positions, and more, as module, method and replacement."""
    jobs = _jobs(model)
    for _, patch, cls in jobs:
        patch.check(cls)
    register()
    own = [(module, patch.method, patch.replacement) for module, patch, _ in jobs]
    return switch.installed(model, [*own, *more])


@contextmanager
def patched(model: Any) -> Iterator[Any]:
    """Run a model on this library, tables of positions included, inside a ``with`` block.

    For models whose attention does not go through transformers' interface (BLOOM, MPNet), and for those that write
    out a bias for every pair of positions first (T5, mT5, umT5, Switch Transformers, Pop2Piano): their tables are read
    as they are, and nothing of L_q L_k is held. Only this one model is changed, and what it was is restored at the end
    of the block, also after an error.

    The block counts for the thread that enters it. Other threads may run the same model: outside of a block of their
    own they get its own attention, whole forward passes at a time.

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
    with switch.in_use(model, _installed(model)):
        yield model


def patch(model: Any) -> Any:
    """Run a model on this library as `patched` does, in all threads and until `unpatch`.

    Forward passes of the model, and of the models that it contains, run on this library if they begin after this call.
    Those under way end as they began.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        See `patched`.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    RelposError
        As `patched`; also if it is patched already.
    """
    own = _installed(model)
    try:
        switch.make_permanent(model, own)
    except RelposValueError:
        switch.release(model, own)
        raise
    return model


def unpatch(model: Any) -> Any:
    """Take back `patch`: forward passes that begin after this call are the model's own.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that `patch` was called with.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    RelposValueError
        If it is not patched.
    """
    switch.end_permanent(model)
    return model
