"""Configurations as dictionaries: which of their keys a reader took, and which of the others may be ignored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._files import untrusted
from relpos_np.errors import RelposTypeError, RelposValueError

_REQUIRED = object()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A key whose name contains one of these may change attention: it is understood, known not to matter, or refused.
TOUCHES = _names("""
    alibi attn attention band bias block bucket capping causal chunk clip conv_pos cross_ dilat global head
    index kv local mask mscale multiplier nope norm_q norm_k pos_ position qk query relative rel_ rope rotary
    scal sink slid softcap sparse stride temperature window
""")

# Keys of any model that touch no arithmetic between the projections, in groups, each with its reason.
NEUTRAL: Mapping[str, frozenset[str]] = {
    "dropout acts in training only": _names("""
        attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop positional_dropout
    """),
    "biases of projections, which are in what is passed as q, k and v, and of other layers": _names("""
        attention_bias attention_out_bias qkv_bias use_qkv_bias use_bias bias mlp_bias conv_bias enable_bias
        lm_head_bias norm_bias proj_bias query_bias key_bias value_bias decoder_bias classifier_bias no_bias
    """),
    "which implementation computes it, and what else is returned": _names("""
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation
        attn_impl reorder_and_upcast_attn deterministic_flash_attn output_attentions
    """),
    "spans that are masked in training": _names("""
        mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
        mask_feature_min_masks use_mask_token
    """),
    "factors outside attention": _names("""
        embedding_multiplier logits_scaling logit_scale residual_multiplier scale_embedding
        scale_decoder_outputs final_logit_softcapping routed_scaling_factor layer_scale_init_value
        layerscale_value
    """),
    "heads for tasks, and losses": _names("""
        semantic_loss_ignore_index sparse_pred_ignore_index sparse_prediction use_auxiliary_head
        vision_use_head use_guided_attention_loss guided_attention_loss_num_heads guided_attention_loss_sigma
        guided_attention_loss_scale contrastive_logits_temperature
    """),
    "layers between those of attention": _names("""
        num_local_experts router_bias resblock_dilation_sizes resblock_kernel_sizes noise_scale
        noise_scale_duration pool_scales encoder_sparse_step decoder_sparse_step moe_layer_start_index
        moe_layer_end_index encoder_stride conv_stride conv_pos_kernel_size adapter_attn_dim adapter_stride
        num_conv_pos_embeddings num_conv_pos_embedding_groups conv_pos_batch_norm tdnn_dilation
        chunk_size_feed_forward
    """),
    "lengths that tables are made for; rules of rotary positions that need one take it": _names("""
        max_position_embeddings n_positions max_source_positions max_target_positions max_speech_positions
        max_text_positions t2u_max_position_embeddings max_2d_position_embeddings
    """),
    "generation": _names("temperature"),
}
# Bytes of a file; configurations that name 20,000 classes have two million.
_LONGEST = 32 << 20
_NEUTRAL = frozenset().union(*NEUTRAL.values())


def loaded(config: Any) -> dict[str, Any]:
    """A configuration as a dictionary: from one, from a config.json or the folder of one, or from an object."""
    if isinstance(config, Mapping):
        found = dict(config)
    elif isinstance(config, str | os.PathLike):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            found = untrusted.parsed(untrusted.whole(path, _LONGEST), infinities=True)
        except (OSError, RelposValueError) as error:
            raise RelposValueError(f"config: {path} cannot be read: {error}") from None
    elif callable(to_dict := getattr(config, "to_dict", None)):
        found = dict(to_dict())
    else:
        raise RelposTypeError(
            f"config: expected a mapping, a path or an object with to_dict, found {type(config).__name__}"
        )
    for name, value in found.items():
        if not isinstance(name, str):
            raise RelposTypeError(f"config: expected names as keys, found {name!r}")
        if isinstance(value, np.ndarray):
            raise RelposTypeError(f"{name}: expected what JSON can hold, found an array")
    return found


def named(config: Mapping[str, Any]) -> str:
    """What a configuration says it is: `model_type`, or `_class_name` as diffusers stores it."""
    return str(config.get("model_type", config.get("_class_name")))


class Keys:
    """The keys of one model's configuration, with the defaults of its own class, and a note of those that were taken.

    Parameters
    ----------
    config : mapping
        As it is stored.
    defaults : mapping
        What the model's class has for keys that are missing.
    aliases : mapping
        Other names of keys, as stored, by the name that is asked for.
    within : str
        Type of the model that this one is a part of; "" for none.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str], within: str = ""
    ) -> None:
        self.config = config
        self.defaults = defaults
        self.aliases = aliases
        self.within = within
        self.model_type = named(config)
        self._taken: set[str] = {"model_type"}

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value: as stored, else that of the model's class, else `default`; without one the key is required."""
        other = self.aliases.get(name, name)
        self._taken |= {name, other}
        for key in (other, name):
            if key in self.config:
                return self.config[key]
        if name in self.defaults:
            return self.defaults[name]
        if default is _REQUIRED:
            raise RelposValueError(f"{other}: the configuration of {self.model_type} has none, and it has no default")
        return default

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """A whole number."""
        return check.integer(name, self.get(name, default), least)

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A number."""
        return check.real(name, self.get(name, default))

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or False; None is False."""
        value = self.get(name, default)
        return False if value is None else check.flag(name, value)

    def only(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """A value that must be one of those whose meaning is known."""
        value = self.get(name, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            words = " or ".join(map(repr, allowed))
            raise RelposValueError(f"{name}: {value!r} is not understood in {self.model_type}, expected {words}")
        return value

    def ignore(self, *names: str) -> None:
        """Take keys that have no effect on attention in this model."""
        self._taken |= {*names, *(self.aliases.get(name, name) for name in names)}

    def close(self) -> None:
        """Refuse keys that may change attention and were not taken."""
        for name, value in self.config.items():
            touching = any(part in name.lower() for part in TOUCHES)
            if name in self._taken or name in _NEUTRAL or not touching or name.endswith("_token_id"):
                continue
            raise RelposValueError(
                f"{name}: {value!r} in a configuration of {self.model_type} may change attention, and is not understood"
            )
