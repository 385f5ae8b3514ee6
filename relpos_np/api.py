"""The public functions: check, lower, dispatch."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import memory_bounds, on_device
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lifted, each_lowered
from relpos_np._calls.prepared import PreparedAttention
from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import Options, PreparedOptions, ScoreOptions, completed, takes
from relpos_np._contract.terms import fit
from relpos_np._dense import forward
from relpos_np._dense.backward import backward
from relpos_np._runtime import memory, precision, results
from relpos_np.formulas import relshift
from relpos_np.schemes.base import Position
from relpos_np.types import Array

_ATTENTION, _LOGITS, _ATTENTION_VJP, _REL_SHIFT, _PREPARE = map(
    memory.Named, ("attention", "logits", "attention_vjp", "rel_shift", "prepare")
)


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    position: Position = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    **options: Unpack[Options],
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    position: Position = ...,
    return_lse: Literal[True],
    out: Array | None = ...,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...


@takes(Options)
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    position: Position = None,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]:
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
        Keys of the same dtype; query head h uses key head h // (H / H_kv). Leading axes broadcast.
    v : ndarray, shape (..., H_kv, L_k, D_v)
        Values; D_v may differ from D.
    position : scheme or tuple of schemes, optional
        What positions contribute, for instance `T5`; contributions of several schemes add up.
    mask : ndarray of bool or float, optional
        Broadcast to (..., H, L_q, L_k). True means "may attend"; a float mask is added to the scores,
        and only its -inf excludes (a whole row of a large negative number averages all values).
    key_lengths : int or ndarray of int, optional
        Per batch item, how many keys exist; what later ones hold has no influence.
    causal : bool
        Attend d <= 0 only.
    window : int or tuple, optional
        Attend -left <= d <= right, from w = left = right or (left, right); None is unbounded.
    scale : float, optional
        The factor on q . k; default 1/sqrt(D), whatever the scheme.
    offset : int, optional
        Position of the first query among the keys; default L_k - L_q: queries are the last positions.
    dropout : float
        Rate at which probabilities are dropped; needs `rng`. Holds a mask of L_q L_k.
    rng : numpy.random.Generator, optional
        Source of the dropout mask; the same state gives the same mask on every backend.
    precision : {"highest", "high", "medium"}, optional
        See `set_precision`; without it, bfloat16 is multiplied as such where the processor can.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        See `set_backend`.
    return_lse : bool
        Also return the natural log-sum-exp of the scores.
    out : ndarray, optional
        Where to write the output: its exact shape and dtype, overlapping no input.

    Returns
    -------
    out : ndarray, shape (..., H, L_q, D_v)
        In the dtype of q. A query that may attend no key gets 0.
    lse : ndarray, shape (..., H, L_q)
        Only with `return_lse`; -inf for a query without keys. float32 where q is of half precision.

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
    position schemes stay on the host; a mask and `key_lengths` may be on either side.
    """
    given = completed(attention, options)
    chosen = given["backend"]
    if type(q) is not np.ndarray and check.on_device(q):
        there: Array = on_device.attention({"q": q, "k": k, "v": v}, chosen, position, return_lse, out, given)
        return there
    admit = memory_bounds.admission("attention", position, chosen, out=out is not None, return_lse=return_lse)
    with _ATTENTION, np.errstate(all="ignore"):
        problem, dtype, flat = check.call(q, k, v, given, admit)
        schemes = checked_schemes(position, problem)
        name = _backend.current(chosen)
        shape = problem.out_shape
        target = None
        if out is not None:
            check.output(out, shape[1:] if flat else shape, dtype, (q, k, v, given["mask"]))
            target = out[None] if flat else out
        if name not in _backend.WITH_KERNELS:
            memory.countable("attention", (*shape[:-1], problem.site.k_len))
            problem.pack()
        if name == "numpy":
            result, lse = forward.attention(problem, schemes)
        else:
            lowered = each_lowered(schemes, problem, turning=name == "numba") if admit is None else admit.lowered
            result, found = _backend.evaluate(name, problem, all_terms(lowered), target, return_lse, dtype)
            lse = found if found is not None else result
        if flat:
            result, lse = result[0], lse[0]
        if out is not None:
            if result.base is not out and result is not out:
                out[...] = result
            result = out
        elif result.dtype != dtype:
            result = result.astype(dtype)
    return (result, lse) if return_lse else result


@takes(PreparedOptions)
def prepare(
    q: Array, k: Array, v: Array, *, position: Position = None, **options: Unpack[PreparedOptions]
) -> PreparedAttention:
    """Check a call of `attention` once, to make it again and again with other operands of the same form.

    Parameters
    ----------
    q, k, v : ndarray
        Examples of the operands, see `attention`: shapes, dtype and strides count, and what they hold does not.
    position, mask, causal, window, scale, offset, precision, backend
        See `attention`. The mask and the arrays of schemes are used as they are now: prepare again after changing them.

    Returns
    -------
    PreparedAttention
        Call it as ``ready(q, k, v, key_lengths=None, return_lse=False, out=None)``: the same bits as `attention`, in
        less time where the operands are few. Several threads may call it at once.

    Raises
    ------
    RelposError
        As `attention`; also, in a call, if an operand has another shape or dtype.

    Notes
    -----
    What is saved are checks, the lowering of schemes and the planning of work, 10 to 20 µs of a call, and more where a
    bias is gathered from a table. Operands with other strides, and schemes that compute with queries or keys, such as
    `Rotary` or `Shaw`, take the way of `attention`. A backend or precision that is chosen now holds for later calls.

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


@takes(ScoreOptions)
def logits(q: Array, k: Array, *, position: Position = None, **options: Unpack[ScoreOptions]) -> Array:
    """Scores before the softmax as a dense array, to look at.

    Parameters
    ----------
    q, k, position, mask, key_lengths, causal, window, scale, offset
        See `attention`.
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
    """
    given = completed(logits, options)
    chosen = given["backend"]
    admit = memory_bounds.admission("logits", position, chosen)
    with _LOGITS, np.errstate(all="ignore"):
        problem, _, flat = check.call(q, k, None, given, admit)
        schemes = checked_schemes(position, problem)
        problem.pack()
        if _backend.current(chosen) == "terms":
            from relpos_np._dense import from_terms

            lowered = each_lowered(schemes, problem) if admit is None else admit.lowered
            s = from_terms.scores(problem, all_terms(lowered))
        else:
            s = forward.scores(problem, schemes)
    return s[0] if flat else s


@takes(Options)
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    grad_out: Array,
    grad_lse: Array | None = None,
    position: Position = None,
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
    position, mask, key_lengths, causal, window, scale, offset
        See `attention`.
    dropout : float
        See `attention`.
    rng : numpy.random.Generator, optional
        In the state it had before the forward pass, so that it drops the same probabilities.
    precision : {"highest", "high", "medium"}, optional
        Gradients are computed with "highest", whatever is chosen.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        See `set_backend`. "numpy" takes the scores from the schemes' formulas, "terms" from the terms they are
        lowered to, and both hold matrices of L_q L_k; "numba" and "cuda" recompute them tile by tile and hold none,
        unless a scheme itself has a number per pair.

    Returns
    -------
    AttentionGradient
        With q, k, v and position.

    Raises
    ------
    RelposError
        As `attention`; also if grad_out or grad_lse does not have the shape of the result.

    Notes
    -----
    A mask receives no gradient. Where a key is excluded its gradients are 0, whatever it holds. The numbers are
    those of float64 arithmetic for float64, else of float32. Where scores are not differentiable (norms clamped at a
    smallest value, ties of a maximum) the gradient is that of the branch which was taken.

    Where q, k, v, grad_out and grad_lse are arrays on a CUDA device, the gradients of q, k and v are so too; those
    in `position` are arrays of NumPy.
    """
    given = completed(attention_vjp, options)
    chosen = given["backend"]
    if type(q) is not np.ndarray and check.on_device(q):
        named = {"q": q, "k": k, "v": v, "grad_out": grad_out} | ({} if grad_lse is None else {"grad_lse": grad_lse})
        far: AttentionGradient = on_device.attention_vjp(named, chosen, position, given)
        return far
    admit = memory_bounds.admission("attention_vjp", position, chosen)
    with _ATTENTION_VJP, np.errstate(all="ignore"):
        problem, _, flat = check.call(q, k, v, given, admit)
        schemes = checked_schemes(position, problem)
        name = _backend.current(chosen)
        if name not in _backend.WITH_KERNELS:
            memory.countable("attention_vjp", (*problem.out_shape[:-1], problem.site.k_len))
        gradients = check.output_gradients({"grad_out": grad_out, "grad_lse": grad_lse}, problem, flat)
        grad_out, grad_lse = gradients["grad_out"], gradients.get("grad_lse")
        if flat:
            grad_out, grad_lse = grad_out[None], None if grad_lse is None else grad_lse[None]
        if name not in _backend.WITH_KERNELS:
            problem.pack()
            grad_out = np.ascontiguousarray(grad_out)
        lowered = each_lowered(schemes, problem) if admit is None else admit.lowered
        terms = all_terms(lowered)
        if name in _backend.WITH_KERNELS:
            grads, grad_v = _backend.kernels(name).backward(problem, terms, grad_out, grad_lse)
        else:
            if name == "numpy":
                s = forward.scores(problem, schemes)
            else:
                from relpos_np._dense import from_terms

                s = from_terms.scores(problem, terms)
            grads, grad_v = backward(problem, terms, s, grad_out, grad_lse)
        operands = problem.q, problem.k
        grad_q, grad_k, arrays = each_lifted(operands, problem, position, schemes, lowered, grads)
        # Operands may have been broadcast over batch axes, or had no axis of heads.
        grad_q, grad_k, grad_v = (
            fit(x[0] if flat else x, operand.shape).astype(operand.dtype, copy=False)
            for x, operand in ((grad_q, q), (grad_k, k), (grad_v, v))
        )
    return AttentionGradient(grad_q, grad_k, grad_v, arrays)


def rel_shift(
    x: Array, *, variant: str = "transformer_xl", backend: str | None = None, out: Array | None = None
) -> Array:
    r"""Move row i of products with distances so that column j holds the one of query i and key j.

    With M = L_k - L_q and columns by descending distance, the general form is

    .. math::

        y_{ij} = x_{i,\, L_q - 1 - i + j}, \qquad \text{distance } i + M - j .

    Parameters
    ----------
    x : ndarray, shape (..., L_q, columns)
        Any float, integer or complex dtype.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet"}
        - "conformer": the general form; columns = L_q + L_k - 1, distances L_k-1 ... -(L_q-1).
        - "xlnet": columns = L_q + L_k, distances from L_k down: :math:`y_{ij} = x_{i,\, L_q - i + j}`.
        - "transformer_xl": columns = L_k, distances L_k-1 ... 0. The general form for j <= i + M, then
          0 at j = i + M + 1, then :math:`x_{i+1,\, j-i-M-2}`, which belongs to the next query and
          is normally hidden by a causal mask.
        - "espnet_legacy": the same arithmetic, used without a causal mask.
        - "wenet": no shift; columns are key positions.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        In NumPy the general form is a read-only view without a copy; Numba copies in parallel; CUDA copies to
        the device and back, unless x is an array on the device: then the result is one too.
    out : ndarray, optional
        Where to write the result: its exact shape and dtype, not overlapping x. Allocating a large array takes
        longer than filling it.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        Shifted products, in the dtype of x.

    Raises
    ------
    RelposValueError
        If the number of columns cannot belong to the variant, or `out` does not fit.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019,
    appendix B.
    """
    if type(x) is not np.ndarray and check.on_device(x):
        there: Array = on_device.rel_shift({"x": x}, backend, variant, out)
        return there
    x = check.array("x", x)
    shape, dtype = relshift.checked(x, variant), x.dtype.newbyteorder("=")
    if out is not None:
        check.output(out, shape, dtype, (x,))
    name = _backend.current(backend)
    kernels = name in _backend.WITH_KERNELS and variant != "wenet"
    if memory.limit() is not None:
        memory_bounds.shifted(x, shape, variant, kernels, out)
    with _REL_SHIFT:
        return _shifted(x, shape, dtype, variant, name if kernels else None, out)


def _shifted(
    x: Array, shape: tuple[int, ...], dtype: np.dtype[Any], variant: str, name: str | None, out: Array | None
) -> Array:
    """The shift on a backend with kernels, or in NumPy if `name` is None."""
    if name is None:
        shifted = relshift.rel_shift(x, variant)
        if out is None:
            return shifted
        out[...] = shifted
        return out
    target, used = (out, True) if out is not None and out.flags.c_contiguous else results.empty(shape, dtype)
    _backend.kernels(name).rel_shift(x, target, variant, used=used)
    if out is None or out is target:
        return target
    out[...] = target
    return out
