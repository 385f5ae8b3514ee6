"""PyTorch: eager, scaled_dot_product_attention and flex_attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from relpos_np._commands.peers import Prepared, UnavailableError
from relpos_np._commands.peers.shapes import TABLES, Case


def rel_shift(x: Any, k_len: Any) -> Any:
    """A column of zeros in front, read with the axes' lengths exchanged, without its first row."""
    *lead, rows, columns = x.shape
    padded = torch.cat([x.new_zeros(*lead, rows, 1), x], dim=-1).view(*lead, columns + 1, rows)
    return padded[..., 1:, :].view(*lead, rows, columns)[..., :k_len]


def tensor(x: Any) -> Any:
    """An array as a tensor over the same memory; bfloat16, which NumPy lacks, from its bits."""
    if x.dtype == np.uint16 or x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: Any) -> Any:
    """A tensor as an array."""
    return x.float().numpy()


class Operands:
    """A case as tensors, with the parts of scores that come from positions.

    In half precision as models have it: softmax in float32, all that is stored between operators in half precision,
    positions' part computed in float32 and rounded.
    """

    def __init__(self, case: Any) -> None:
        self.shape = case.shape
        self.q, self.k, self.v = (tensor(x) for x in (case.q, case.k, case.v))
        self.arrays = {name: torch.from_numpy(x) for name, x in case.arrays.items()}
        # Tables of vectors meet queries and probabilities; tables of numbers are added to scores.
        if case.shape.kind in ("transformer_xl", "shaw"):
            self.arrays = {name: x.to(self.q.dtype) for name, x in self.arrays.items()}
        self.scale = 1 / math.sqrt(case.shape.head_dim)
        self.pairs = torch.from_numpy(case.per_pair)
        self.hidden: Any = None if case.padding is None else torch.from_numpy(case.padding)
        if case.shape.kind == "transformer_xl":
            self.rows = self.arrays["rows"].permute(1, 2, 0).contiguous()

    def bias(self) -> Any:
        """What tables and slopes add to the scores, in the operands' dtype; None if there is nothing."""
        if self.shape.kind == "plain":
            return None
        if self.shape.kind == "t5":
            gathered = functional.embedding(self.pairs, self.arrays["table"]).permute(2, 0, 1).unsqueeze(0)
            return (gathered if self.hidden is None else gathered + self.hidden).to(self.q.dtype)
        if self.shape.kind in TABLES:
            gathered = self.arrays["table"][self.pairs.view(-1)].view(*self.pairs.shape, -1)
            return gathered.permute(2, 0, 1).contiguous().unsqueeze(0).to(self.q.dtype)
        return (-self.arrays["slopes"][:, None, None] * self.pairs).to(self.q.dtype)

    def position(self) -> Any:
        """Transformer-XL's part from positions, unscaled."""
        return rel_shift((self.q + self.arrays["position_bias"][:, None]) @ self.rows, self.shape.k_len)

    def eager(self) -> Any:
        """Products, softmax, products."""
        kind = self.shape.kind
        if kind == "transformer_xl":
            content = (self.q + self.arrays["content_bias"][:, None]) @ self.k.transpose(-1, -2)
            s = ((content + self.position()) * self.scale).masked_fill(self.pairs, -math.inf)
            return torch.softmax(s, dim=-1) @ self.v
        s = self.q @ self.k.transpose(-1, -2)
        if kind == "shaw":
            # (L_q, L_k, D): a vector for each pair, as the formula has it
            on_keys, on_values = (self.arrays[name][self.pairs] for name in ("key_table", "value_table"))
            s = s + torch.einsum("bhid,ijd->bhij", self.q, on_keys)
            p = torch.softmax(s * self.scale, dim=-1)
            return p @ self.v + torch.einsum("bhij,ijd->bhid", p, on_values)
        s = s * self.scale
        if kind != "plain":
            s = s + self.bias()
        p = torch.softmax(s, dim=-1, dtype=torch.float32)
        return p.to(self.v.dtype) @ self.v

    def sdpa(self) -> Any:
        """The fused operator, with the bias built for it."""
        if self.shape.kind == "transformer_xl":
            mask = (self.position() * self.scale).masked_fill(self.pairs, -math.inf)
            query = self.q + self.arrays["content_bias"][:, None]
            return functional.scaled_dot_product_attention(query, self.k, self.v, attn_mask=mask)
        return functional.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=self.bias())


def flex(case: Case, operands: Operands) -> Prepared:
    """A compiled function of no arguments."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, a = operands.shape, operands.arrays
    if s.kind == "shaw":
        raise UnavailableError("flex_attention has nothing to add to values")
    # What the compiled function is given beside q, k and v, and what it adds to a score of it.
    note, given, hide = "", None, None
    last = s.q_len - 1
    q, k, v = map(tensor, case.operands)
    adders: dict[str, Callable[..., Any]] = {
        "alibi": lambda given, b, h, i, j: -given[h] * (s.k_len - 1 - j),
        "t5": lambda given, b, h, i, j: given[h, j - i + last],
        # Keys after the query's position are hidden: there any column will do.
        "transformer_xl": lambda given, b, h, i, j: given[b, h, i, torch.clamp(last - i + j, max=s.k_len - 1)],
    }
    if s.kind == "transformer_xl":
        note = "products with distances eager, before the compiled part, inside the call"
        memory = s.k_len - s.q_len
        hide = create_block_mask(
            lambda b, h, i, j: j <= i + memory, None, None, s.q_len, s.k_len, device=operands.q.device
        )
    elif s.kind == "alibi":
        given = a["slopes"]
    elif s.kind == "t5":
        note = "a value per distance, expanded before the call"
        # Row 0 holds distances 0 ... L_k - 1, the last row those down to 1 - L_q.
        distances = torch.cat([operands.pairs[:, 0].flip(0)[:-1], operands.pairs[0]])
        given = a["table"][distances].T.contiguous()
        if case.lengths is not None:
            note += "; packed, with a mask of blocks that was built before the call"
            text = torch.repeat_interleave(torch.arange(s.batch), torch.from_numpy(case.lengths))
            hide = create_block_mask(
                lambda b, h, i, j: text[i] == text[j], None, None, len(text), len(text), device=q.device
            )
            adders["t5"] = lambda given, b, h, i, j: given[h, torch.clamp(j - i, -last, last) + last]
    elif s.kind in TABLES:
        note = "bias of a window built before the call"
        given = operands.bias()[0]

    add: Callable[..., Any] = adders.get(s.kind, lambda given, b, h, i, j: given[h, i, j])

    def run(q: Any, k: Any, v: Any, given: Any) -> Any:
        if s.kind == "plain":
            return flex_attention(q, k, v)
        return flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: x + add(given, b, h, i, j), block_mask=hide)

    def inputs() -> Any:
        if s.kind != "transformer_xl":
            return q, k, v, given
        products = (operands.q + a["position_bias"][:, None]) @ operands.rows * operands.scale
        return operands.q + a["content_bias"][:, None], operands.k, operands.v, products

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    try:
        compiled(*inputs())
    except Exception as error:  # a missing compiler is reported as any of several types
        raise UnavailableError(f"not compiled: {type(error).__name__}: {str(error)[:200]}") from error
    return Prepared(lambda: compiled(*inputs()), to_numpy, note)


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a task."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operands = Operands(case)
    if name == "torch flex":
        return flex(case, operands)
    call = operands.eager if name == "torch eager" else operands.sdpa
    if "sdpa" in name and case.shape.kind == "shaw":
        raise UnavailableError("scaled_dot_product_attention has nothing to add to values")
    if name == "torch sdpa":
        if case.shape.kind == "transformer_xl":
            raise UnavailableError("the bias depends on the queries")
        mask = operands.bias()
        mask = None if mask is None else mask.contiguous()

        def call() -> Any:
            return functional.scaled_dot_product_attention(operands.q, operands.k, operands.v, attn_mask=mask)

    return Prepared(call, to_numpy)
