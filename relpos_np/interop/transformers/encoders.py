"""Whole encoders without padding: their layers get the tokens of a batch alone, in one row, and attend by segments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers.modeling_outputs import BaseModelOutput

import relpos_np as rp
from relpos_np.errors import RelposValueError
from relpos_np.interop.torch import trained
from relpos_np.interop.transformers import packing, switch
from relpos_np.interop.transformers.interface import attend
from relpos_np.interop.transformers.layers import check_model
from relpos_np.interop.transformers.masks import Mask
from relpos_np.interop.transformers.packing import Packing
from relpos_np.interop.transformers.patches import install, no_probabilities
from relpos_np.interop.transformers.switch import Positions


def _arguments(self: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of a model's own forward method by name; what is no encoder's work is refused."""
    given = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
    del given["self"]
    given |= given.pop("kwargs", {})
    for name in ("encoder_hidden_states", "cache", "past_key_values"):
        if given.get(name) is not None:
            raise RelposValueError(f"{name}: {type(self).__name__} without padding encodes tokens and nothing else")
    return given


def _packing(given: dict[str, Any]) -> Packing:
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise RelposValueError("input_ids: expected input_ids or inputs_embeds, found neither")
    return Packing.of(given.get("attention_mask"), tokens)


def _model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward method of a model around layers: its embeddings and heads see the padded batch."""
    own = _packing(_arguments(self, args, kwargs))
    with own.in_model():
        # States of layers that hooks have collected.
        return own.unpack_all(type(self).forward(self, *args, **kwargs))


def _layers(self: Any, hidden_states: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The forward method of a model's layers."""
    own = packing.of_model()
    if own is None:
        return type(self).forward(self, hidden_states, attention_mask, *args, **kwargs)
    return own.unpack_all(type(self).forward(self, own.pack(hidden_states), _mask(own), *args, **kwargs))


def _mask(own: Packing) -> Mask:
    length = len(own.index)
    return Mask((1, 1, length, length), device=own.index.device, segments=own.bounds)


def _whole(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward method of a model that embeds tokens, runs its layers and does nothing else."""
    row = _arguments(self, args, kwargs)
    own = _packing(row)
    row["attention_mask"] = None
    for name in ("input_ids", "inputs_embeds"):
        if row.get(name) is not None:
            row[name] = own.pack(row[name])
    if "position_ids" in inspect.signature(type(self).forward).parameters:
        at = row.get("position_ids")
        row["position_ids"] = own.positions() if at is None else own.pack(at.expand(own.shape))
    with own.in_model():
        return own.unpack_all(type(self).forward(self, **row))


def _deberta_layers(
    self: Any,
    hidden_states: Any,
    attention_mask: Any,
    output_hidden_states: bool = True,
    output_attentions: bool = False,
    query_states: Any = None,
    relative_pos: Any = None,
    return_dict: bool = True,
) -> Any:
    """DebertaV2Encoder.forward without the positions of every pair."""
    own = packing.of_model()
    if own is None or query_states is not None or relative_pos is not None:
        raise RelposValueError("relative_pos, query_states: a DeBERTa without padding has those of its own tokens")
    no_probabilities(output_attentions)
    rows, states, mask = self.get_rel_embedding(), [own.pack(hidden_states)], _mask(own)
    for layer in self.layer:
        states.append(layer(states[-1], mask, rel_embeddings=rows, output_attentions=False)[0])
    found = own.unpack_all((states[-1], tuple(states)))
    return BaseModelOutput(*found) if return_dict else found


def _deberta_attention(
    self: Any,
    hidden_states: Any,
    attention_mask: Any,
    output_attentions: bool = False,
    query_states: Any = None,
    relative_pos: Any = None,
    rel_embeddings: Any = None,
) -> tuple[Any, None]:
    """DisentangledSelfAttention.forward: the tables of positions as they are."""
    no_probabilities(output_attentions)
    shape = (*hidden_states.shape[:-1], self.num_attention_heads, -1)
    q, k, v = (
        linear(hidden_states).view(shape).transpose(1, 2)
        for linear in (self.query_proj, self.key_proj, self.value_proj)
    )
    tables, options = {}, {}
    if self.relative_attention:
        rows = self.pos_dropout(rel_embeddings)[: 2 * self.pos_ebd_size]
        shared = self.share_att_key
        for kind, name, of in (("c2p", "pos_key", "key_proj"), ("p2c", "pos_query", "query_proj")):
            if kind in self.pos_att_type:
                linear = getattr(self, of if shared else f"pos_{of}")
                tables[name] = linear(rows).unflatten(-1, shape[2:]).transpose(0, 1)
        if self.position_buckets > 0:
            options["max_position"] = self.max_relative_positions
    count = 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))
    position = Positions(trained(rp.DeBERTa, **tables, **options)) if tables else None
    rate = self.dropout.p if self.training else 0.0
    out = attend(q, k, v, attention_mask, position, scale=(q.shape[-1] * count) ** -0.5, dropout=rate)
    return out.flatten(2), None


@dataclass(frozen=True)
class _Encoder:
    """A class of transformers whose tokens meet in attention alone, in `layers` or, without a name, in itself."""

    model: str
    cls: str
    layers: str = ""
    forward: Callable[..., Any] = _layers

    def of(self, module: Any) -> bool:
        """Whether a module is of the class."""
        there = sys.modules.get(f"transformers.models.{self.model}.modeling_{self.model}")
        return type(module) is getattr(there, self.cls, None) and not getattr(module.config, "is_decoder", False)

    def jobs(self, module: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Methods of the module that are replaced."""
        if not self.layers:
            return [(module, "forward", _whole)]
        stack = getattr(module, self.layers)
        if getattr(stack, "conv", None) is not None:
            raise RelposValueError(
                f"model: {type(module).__name__} has {type(stack).__name__}.conv, a convolution over neighbouring "
                "tokens, and cannot run without padding"
            )
        found: list[tuple[Any, str, Callable[..., Any]]] = [
            (module, "forward", _model),
            (stack, "forward", self.forward),
        ]
        if self.forward is _deberta_layers:
            found += [(layer.attention.self, "forward", _deberta_attention) for layer in stack.layer]
        return found


_ENCODERS = (
    *(_Encoder(model, cls) for model, cls in (("t5", "T5Stack"), ("mt5", "MT5Stack"), ("umt5", "UMT5Stack"))),
    _Encoder("modernbert", "ModernBertModel"),
    *(
        _Encoder(model, cls, "encoder")
        for model, cls in (
            ("bert", "BertModel"),
            ("roberta", "RobertaModel"),
            ("xlm_roberta", "XLMRobertaModel"),
            ("electra", "ElectraModel"),
            ("albert", "AlbertModel"),
            ("mpnet", "MPNetModel"),
        )
    ),
    _Encoder("distilbert", "DistilBertModel", "transformer"),
    _Encoder("deberta_v2", "DebertaV2Model", "encoder", _deberta_layers),
)


@contextmanager
def unpadded(model: Any) -> Iterator[Any]:
    """Run the encoders in a model without padding, on this library, inside a ``with`` block.

    The layers of each encoder get the tokens that `attention_mask` leaves, one sequence after the other in one row, so
    that no product is made of padding; each sequence is attended alone. Embeddings before them and heads, poolers and
    decoders behind them see the padded batch as ever, with zeros where padding is. Results at tokens are those of the
    padded model but for rounding, and gradients flow.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that is, or contains, an encoder of T5, mT5, umT5, BERT, RoBERTa, XLM-R, ELECTRA, ALBERT, MPNet,
        DistilBERT, ModernBERT or DeBERTa-v2 and v3. It is called as ever; `attention_mask` has shape (B, L), with the
        tokens of a sequence side by side.

    Yields
    ------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    RelposError
        If there is no such encoder in the model, or its tokens meet elsewhere than in attention.
    """
    check_model(model)
    jobs = [
        job for module in model.modules() for encoder in _ENCODERS if encoder.of(module) for job in encoder.jobs(module)
    ]
    if not jobs:
        names = ", ".join(encoder.cls for encoder in _ENCODERS)
        raise RelposValueError(
            f"model: {type(model).__name__} has no encoder whose tokens are known to meet in attention alone: none of "
            f"{names}"
        )
    with switch.in_use(model, install(model, jobs)):
        yield model
