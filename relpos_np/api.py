"""The public functions: check, lower, dispatch."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import bounded, on_device, quantized, repeated
from relpos_np._calls.call import Call
from relpos_np._calls.dense_bias import with_mask_gradient
from relpos_np._calls.packed import PackedCall, is_packed
from relpos_np._calls.prepared import PreparedAttention
from relpos_np._calls.shifting import rel_shift
from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import SCORES, Options, completed, takes
from relpos_np._contract.quantized import Quantized, stored
from relpos_np._runtime import memory, precision
from relpos_np.schemes.base import Position
from relpos_np.types import Array

__all__ = ["attention", "attention_vjp", "logits", "prepare", "rel_shift"]

_ATTENTION, _LOGITS, _ATTENTION_VJP, _PREPARE = map(memory.Named, ("attention", "logits", "attention_vjp", "prepare"))


@overload
def attention(
    q: Array,
    k: Array | Quantized,
    v: Array | Quantized,
    *,
    position: Position = ...,
    return_lse: Literal[False] = ...,
    return_bound: Literal[False] = ...,
    out: Array | None = ...,
    **options: Unpack[Options],
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array | Quantized,
    v: Array | Quantized,
    *,
    position: Position = ...,
    return_lse: bool = ...,
    return_bound: bool = ...,
    out: Array | None = ...,
    **options: Unpack[Options],
) -> Any: ...


@takes()
def attention(
    q: Array,
    k: Array | Quantized,
    v: Array | Quantized,
    *,
    position: Position = None,
    return_lse: bool = False,
    return_bound: bool = False,
    out: Array | None = None,
    **options: Unpack[Options],
) -> Array | tuple[Array, ...]:
    r"""Attention with positions.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + \text{what the position scheme adds}, \qquad
        o_i = \sum_j \frac{e^{s_{ij}}}{\sum_l e^{s_{il}}}\, v_j

    over the keys j that query i may attend. Query i stands at position i + offset among the keys; its
    relative position to key j is d = j - (i + offset).

    Parameters
    ----------
    q : ndarray, shape (..., H, L_q, D)
        Queries: float16, bfloat16, float32 or float64. Two-dimensional q, k and v are one head.
    k : ndarray, shape (..., H_kv, L_k, D)
        Keys of the same dtype; query head h uses key head h // (H / H_kv). Leading axes broadcast. Keys and values may
        also be stored in eight bits: see `Quantized`.
    v : ndarray, shape (..., H_kv, L_k, D_v)
        Values; D_v may differ from D.
    position : scheme or tuple of schemes, optional
        What positions contribute, for instance `T5`; contributions of several schemes add up.
    mask : ndarray of bool or float, optional
        Broadcast to (..., H, L_q, L_k). True means "may attend"; a float mask is added to the scores,
        and only its -inf excludes (a whole row of a large negative number averages all values). Two axes are
        (L_q, L_k), and are refused where they could be (B, L_k) as well, with as many batch items as queries.
    key_lengths : int or ndarray of int, optional
        How many keys exist: in each batch item, or in all of them; what later ones hold has no influence. With
        `segments` in each of these.
    causal : bool
        Attend d <= 0 only.
    window : int or tuple, optional
        Attend -left <= d <= right, from w = left = right or (left, right); None is unbounded.
    rule : Chunked, Prefix or Dilated, optional
        Keys that may be attended by where they stand, beside the other masks and without an array of pairs.
    selected : ndarray of int, shape (..., L_q, K) or (..., H, L_q, K), optional
        The keys that each query may attend, in any order; -1 for none. Held as a mask of bool.
    scale : float, optional
        The factor on q . k; default 1/sqrt(D), whatever the scheme.
    offset : int or ndarray of int or "end", optional
        Position of the first query among the keys; default L_k - L_q: queries are the last positions. An array has one
        for each batch item, which is then computed as a call of its own. "end": queries are the last of the keys that
        exist, as in a cache of a fixed size. With `key_lengths` and fewer queries than keys, where positions matter,
        there is no default.
    query_scale : ndarray, shape (L_q,) or broadcast to (..., H, L_q), optional
        Factors on queries, before anything else is done with them: see `reference.query_temperature`.
    softcap : float, optional
        c of :math:`c \tanh(s / c)`, which bounds scores before anything is masked.
    cap_order : {"scores", "content"}
        Whether the cap is for products and what positions add, or for the products :math:`\sigma\, q \cdot k` alone
        (positions that turn queries and keys, and Transformer-XL's u, are within it either way; PaTH, which is part of
        the product otherwise, takes "scores" only). A float mask is added after it.
    segments : ndarray of int, or a pair of them, optional
        Cumulative lengths [0, n_1, n_1 + n_2, ..., L] of sequences that are packed one after the other, of queries and
        of keys. Each is attended alone, its positions beginning at 0: as by separate calls, bit for bit.
    sinks : ndarray, shape (H,) or broadcast to (..., H, L_q), optional
        One more score z in each row, that has no value: the sum below becomes :math:`\sum_l e^{s_{il}} + e^{z}`.
    dropout : float
        Rate at which probabilities are dropped; needs `rng`. Holds a mask of L_q L_k.
    rng : numpy.random.Generator, optional
        Source of the dropout mask; the same state gives the same mask on every backend. A call that is refused may
        have drawn from it.
    precision : {"highest", "high", "medium"}, optional
        See `set_precision`; without it, bfloat16 is multiplied as such where the processor can.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        See `set_backend`.
    return_lse : bool
        Also return the natural log-sum-exp of the scores.
    return_bound : bool
        Also return, after the results, for each element of each a number that its rounding error cannot exceed,
        whatever computed it: :doc:`proved </bounds>`, not estimated. Takes the time of a float64 call in NumPy or more.
    out : ndarray, optional
        Where to write the output: its exact shape and dtype, overlapping no input.

    Returns
    -------
    out : ndarray, shape (..., H, L_q, D_v)
        In the dtype of q. A query that may attend no key gets 0.
    lse : ndarray, shape (..., H, L_q)
        Only with `return_lse`; -inf for a query without keys, or its sink. float32 where q is of half precision.
    bound : ndarray of float64, shape (..., H, L_q, D_v)
        Only with `return_bound`: the exact output is within it of `out`. Infinity where that is not finite, or where
        nothing can be said; 0 for a query that may attend no key.
    lse_bound : ndarray of float64, shape (..., H, L_q)
        Only with both: the same of `lse`.

    Raises
    ------
    RelposError
        Before any work, naming the argument, what was found and what was expected; also a ValueError or
        a TypeError.

    Notes
    -----
    Arithmetic is in float64 for float64, else in float32, but for products that `precision` allows to round. NaN or
    infinity in a key or value reaches only the queries that may attend it, and a key that none may attend changes no
    bit of any result. The CPU kernels do not even read keys and values outside the range that `key_lengths`, `causal`
    and `window` leave, unless they must be copied first: because rows are not contiguous, or because a scheme computes
    with keys. A query whose scores overflow float32 gets NaN: pass float64.

    With ``backend="cuda"`` all of q, k, v and `out` may be arrays on a CUDA device, read through DLPack or the
    CUDA array interface without a copy; results are then on the device, and can be read the same way. The arrays of
    position schemes stay on the host; those of options may be on either side.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 4, 10, 16))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.ALiBi(), causal=True).shape
    (2, 4, 10, 16)
    >>> both = (rp.ALiBi(), rp.Rotary(16))  # schemes add up
    >>> out, lse = rp.attention(q, k, v, position=both, return_lse=True)
    >>> lse.shape
    (2, 4, 10)
    """
    return_lse = check.flag("return_lse", return_lse)
    form = None if return_bound is not False else repeated.form(q, k, v, position, options)
    ready = None if form is None else repeated.known(form)
    if ready is not None:
        keys, values, scales = stored(k, v)
        with _ATTENTION:
            lengths, sinks = ready.lengths(options.get("key_lengths")), options.get("sinks")
            known, read = (q, keys, values), (q, keys, values, *scales, position, *options.values())
            return ready.run(known, lengths, out, read, return_lse=return_lse, scales=scales, sinks=sinks)
    given = completed(attention, options)
    if return_bound is not False:
        bounded.refuse(return_bound, q, given)
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        with _ATTENTION, np.errstate(all="ignore"):
            returned = {"return_lse": return_lse, "return_bound": bool(return_bound)}
            of_codes: Array = quantized.attention(attention, (q, k, v), position, given, out, form, **returned)
            return of_codes
    if type(q) is not np.ndarray and check.on_device(q):
        compute, operands = attention if is_packed(given) else None, {"q": q, "k": k, "v": v}
        there: Array = on_device.attention(operands, given["backend"], position, return_lse, out, given, compute)
        return there
    with _ATTENTION, np.errstate(all="ignore"):
        if is_packed(given):
            packed = PackedCall(q, k, v, position, given)
            of_parts: Array = packed.on_host(attention, out, return_lse, return_bound, form)
            return of_parts
        # With sinks, and where the caller's array is not in C order, kernels fill another one.
        filled = isinstance(out, np.ndarray) and out.flags.c_contiguous and given["sinks"] is None
        asked: dict[str, Any] = {"out": filled, "return_lse": return_lse, "return_bound": bool(return_bound)}
        call = Call("attention", (q, k, v), position, given, **asked)
        call.check_output(out)
        bounds = bounded.Bounded((q, k, v), position, given, call.problem.site.dtype) if return_bound else None
        result, lse = call.attend(out, return_lse)
        if form is not None:
            repeated.keep(form, call.schemes, call.kept)
        found = (result, lse) if return_lse and lse is not None else (result,)
        if bounds is not None:
            return (*found, *bounds.of(result, lse if return_lse else None))
    return found if return_lse else result


@takes(but=("key_lengths", "query_scale", "segments", "sinks", "dropout", "rng"))
def prepare(
    q: Array, k: Array, v: Array, *, position: Position = None, **options: Unpack[Options]
) -> PreparedAttention:
    """Check a call of `attention` once, to make it again and again with other operands of the same form.

    Parameters
    ----------
    q, k, v : ndarray
        Examples of the operands, see `attention`: shapes, dtype and strides count, and what they hold does not.
    position, mask, causal, window, rule, selected, scale, offset, softcap, cap_order, precision, backend
        See `attention`; `offset` is one integer or "end". The mask and the arrays of schemes are used as they are now:
        prepare again after changing them.

    Returns
    -------
    PreparedAttention
        Call it as ``ready(q, k, v, key_lengths=None, offset=None, return_lse=False, out=None)``: the same bits as
        `attention`, in less time where the operands are few. Lengths and offsets, of all items or of each, may differ
        in every call. Several threads may call it at once.

    Raises
    ------
    RelposError
        As `attention`; also, in a call, if an operand has another shape or dtype.

    Notes
    -----
    What is saved are checks, the lowering of schemes and the planning of work, 10 to 100 µs of a call. Small calls of
    `attention` save nearly as much by themselves from the third of one form on, if their schemes hold no large arrays.
    Operands with other strides, and schemes that make numbers of pairs from queries and keys, such as `CoPE`, take the
    way of `attention`. A backend or precision that is
    chosen now holds for later calls.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.ones((8, 16, 64), np.float32)
    >>> ready = rp.prepare(q, q, q, position=rp.ALiBi(), causal=True)
    >>> bool((ready(q, q, q) == rp.attention(q, q, q, position=rp.ALiBi(), causal=True)).all())
    True
    """
    given = completed(prepare, options)
    with _PREPARE, np.errstate(all="ignore"):
        chosen = {
            name: given[name]  # type: ignore[literal-required]
            for name in prepare.options  # type: ignore[attr-defined]
        }
        chosen |= {"backend": _backend.current(given["backend"]), "precision": precision.chosen(given["precision"])}
        return PreparedAttention(attention, (q, k, v), position, chosen)


@takes(only=(*SCORES, "backend"))
def logits(q: Array, k: Array, *, position: Position = None, **options: Unpack[Options]) -> Array:
    """Scores before the softmax as a dense array, to look at.

    Parameters
    ----------
    q, k, position, mask, key_lengths, causal, window, rule, selected, scale, offset, query_scale, softcap, cap_order
        See `attention`; `offset` is one integer.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        "numpy" (also for "numba" and "cuda", whose kernels never hold the scores) evaluates the schemes'
        formulas, "terms" the terms they are lowered to.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        Scores; -inf where a key is excluded. float32 where q is of half precision.

    Raises
    ------
    RelposError
        See `attention`.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = k = np.zeros((1, 4, 8))  # one head; with no content, what is left is what positions add
    >>> rp.logits(q, k, position=rp.ALiBi(slopes=np.array([0.5])), causal=True)[0]
    array([[ 0. , -inf, -inf, -inf],
           [-0.5,  0. , -inf, -inf],
           [-1. , -0.5,  0. , -inf],
           [-1.5, -1. , -0.5,  0. ]])
    """
    given = completed(logits, options)
    with _LOGITS, np.errstate(all="ignore"):
        return Call("logits", (q, k, None), position, given).scores()


@takes()
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    grad_out: Array,
    grad_lse: Array | None = None,
    position: Position = None,
    mask_gradient: bool = False,
    **options: Unpack[Options],
) -> AttentionGradient:
    r"""Gradients of attention: the vector-Jacobian product for the operands and for the arrays of schemes.

    For a loss :math:`\mathcal{L}` whose gradient :math:`\partial \mathcal{L} / \partial o` is `grad_out`, the
    gradients of :math:`\mathcal{L}` with respect to q, k, v and to every trained array of the schemes: tables, bias
    vectors, position rows, slopes.

    Parameters
    ----------
    q, k, v
        See `attention`.
    grad_out : ndarray, shape (..., H, L_q, D_v)
        Gradient of the output.
    grad_lse : ndarray, shape (..., H, L_q), optional
        Gradient of the log-sum-exp, for a loss that depends on it.
    position
        See `attention`.
    mask_gradient : bool
        Also return the gradient of a float mask. Refused beside a softcap on the scores of a position
        (`cap_order="scores"`) and beside `ScoreMod`, which are for what positions add but not for the mask, and with
        segments or offsets of items.
    mask, key_lengths, causal, window, rule, selected, scale, offset, query_scale, softcap, cap_order
        See `attention`.
    segments, sinks
        See `attention`.
    dropout : float
        See `attention`.
    rng : numpy.random.Generator, optional
        In the state it had before the forward pass, so that it drops the same probabilities.
    precision : {"highest", "high", "medium"}, optional
        See `set_precision`; without it, bfloat16 is multiplied as such where the processor can.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        See `set_backend`. "numpy" takes the scores from the schemes' formulas, "terms" from the terms they are
        lowered to, and both hold matrices of L_q L_k; "numba" and "cuda" recompute them tile by tile and hold none,
        unless a scheme itself has a number per pair.

    Returns
    -------
    AttentionGradient
        With q, k, v and position; with sinks, query_scale and mask where the call has them.

    Raises
    ------
    RelposError
        As `attention`; also if grad_out or grad_lse does not have the shape of the result, or if there is no gradient
        of the mask.

    Notes
    -----
    Where a key is excluded its gradients are 0, whatever it holds. The numbers are those of float64 arithmetic for
    float64, else of float32, with products of bfloat16 where `precision` allows them. Where scores are not
    differentiable (norms clamped at a smallest value, ties of a maximum) the gradient is that of the branch which was
    taken.

    Where q, k, v, grad_out and grad_lse are arrays on a CUDA device, the gradients of q, k and v are so too, and those
    of options where the option was; those in `position` are arrays of NumPy.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 10, 16))
    >>> t5 = rp.T5(rng.standard_normal((32, 4)))
    >>> grads = rp.attention_vjp(q, k, v, position=t5, grad_out=np.ones_like(q))
    >>> grads.q.shape, grads.position["table"].shape
    ((4, 10, 16), (32, 4))
    """
    given = completed(attention_vjp, options)
    chosen, packed, there = given["backend"], is_packed(given), type(q) is not np.ndarray and check.on_device(q)
    if packed and not there:
        with _ATTENTION_VJP:
            return PackedCall(q, k, v, position, given).attention_vjp(attention_vjp, grad_out, grad_lse, mask_gradient)
    if check.flag("mask_gradient", mask_gradient) and not packed:
        return with_mask_gradient(attention_vjp, (q, k, v), grad_out, grad_lse, position, given)
    if there:
        named = {"q": q, "k": k, "v": v, "grad_out": grad_out} | ({} if grad_lse is None else {"grad_lse": grad_lse})
        compute = attention_vjp if packed else None
        far: AttentionGradient = on_device.attention_vjp(named, chosen, position, given, mask_gradient, compute)
        return far
    with _ATTENTION_VJP, np.errstate(all="ignore"):
        call = Call("attention_vjp", (q, k, v), position, given, is_backward=True)
        return call.differentiate(grad_out, grad_lse)
