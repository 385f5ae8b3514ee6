"""The masks that models get: those of eager attention, without a number per pair where a rule says it all."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import eager_mask, sdpa_mask

from relpos_np.errors import RelposValueError
from relpos_np.interop.transformers.packing import of_model

# Models that append numbers to their mask, and so must have one of numbers.
_OF_NUMBERS = frozenset({"deepseek_v4"})
_LONGER = (torch.ops.aten.cat, torch.ops.aten.constant_pad_nd)
_SUMS = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.rsub)


class Mask(torch.Tensor):
    """A bool mask of shape (B, 1, L_q, L_k): written out, or query i sees key j where j <= i + offset, or every key.

    To a model it is the mask that its own eager attention would get, and a rule is written out if somebody computes
    with it: slices and combinations are ordinary tensors. From then on `rule` is gone, since what was written to them
    cannot be known. Only a sum with scores is refused, which is how attention apart from the interface would use it.
    """

    offset: int | None
    written: torch.Tensor | None
    segments: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        offset: int | None = None,
        device: Any = None,
        written: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> Self:
        """A mask of a shape; nothing of that size is allocated. `segments`: tokens are packed, and see their own."""
        mask: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.offset, mask.written, mask.segments = offset, written, segments
        return mask

    # Operations go below autograd, and from there to __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation on the mask written out, but a sum with scores, or what appends something else than masks."""
        if func.overloadpacket in _SUMS and any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args):
            raise RelposValueError(
                "mask: attention of this model adds its mask to the scores, so it does not go through transformers' "
                'interface, and attention implementation "relpos_np" does nothing there; use "eager", or '
                "relpos_np.interop.transformers.patched(model) if it is MPNet or BLOOM"
            )
        # Masks of this class have one meaning, as those of a decoder's own and the encoder's keys.
        if func.overloadpacket in _LONGER and not (
            isinstance(args[0], list) and all(isinstance(x, cls) for x in args[0])
        ):
            raise RelposValueError(
                "mask: this model appends to its mask, and whether True or 0.0 is a key that may be seen is unknown; "
                'use model.set_attn_implementation("eager")'
            )
        args, kwargs = tree_map(lambda x: x.write() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def rule(self) -> bool:
        """Whether a rule says it all."""
        return self.written is None

    def write(self) -> torch.Tensor:
        """The mask as an ordinary tensor: the same one every time, so that what is written to it stays."""
        if self.segments is not None:
            raise RelposValueError(
                "mask: layers whose tokens are packed run in a block of relpos_np.interop.transformers.unpadded alone, "
                "on the way back too, and none of them may compute with their mask"
            )
        if self.written is None:
            batch, heads, queries, keys = self.shape
            if self.offset is None:
                self.written = torch.ones(self.shape, dtype=torch.bool, device=self.device)
            else:
                i = torch.arange(queries, device=self.device)[:, None] + self.offset
                seen = torch.arange(keys, device=self.device) <= i
                self.written = seen.expand(batch, heads, queries, keys).clone()
        return self.written

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Mask({tuple(self.shape)}, offset={self.offset}, written={not self.rule})"


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What transformers calls in place of its own function that makes masks.

    Where "sdpa" gets None and has to guess from a module's ``is_causal`` what was meant, which is wrong for decoders
    that do not set it, attention gets the rule.
    """
    packing = of_model()
    if packing is not None:
        return Mask((batch_size, 1, q_length, kv_length), device=device, segments=packing.bounds)
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    given = {"device": device, "config": config, **kwargs}
    if getattr(config, "model_type", None) in _OF_NUMBERS:
        numbers: torch.Tensor = eager_mask(*sizes, allow_is_causal_skip=False, **given)
        return numbers
    # A compiler or tracer would see a tensor without memory; and which of two rules None means is not said.
    plain = torch.compiler.is_compiling() or torch.jit.is_tracing()
    either = not plain and not (allow_is_causal_skip and allow_is_bidirectional_skip)
    skips = {
        "allow_is_causal_skip": allow_is_causal_skip and either,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip and either,
    }
    mask = sdpa_mask(*sizes, **skips, **given)
    if plain:
        return mask
    if mask is not None:
        return Mask(mask.shape, device=mask.device, written=mask)
    offset = int(q_offset - kv_offset) if allow_is_causal_skip else None
    return Mask((batch_size, 1, q_length, kv_length), offset, device)
