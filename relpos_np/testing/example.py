"""A seeded call of attention for every scheme, with the reference's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np.api import attention, attention_vjp, logits
from relpos_np.errors import RelposError, RelposValueError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.plain import Plain
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.sample import Sample
from relpos_np.testing._sizes import SIZES, Size
from relpos_np.testing.arguments import rebuilt
from relpos_np.testing.compare import EPS, SMALLEST, ratio, tolerance
from relpos_np.types import Array, Backend


@dataclass(frozen=True, eq=False)
class Example:
    """Arguments of one call of attention, and what is right for it.

    Attributes
    ----------
    name : str
        Key in `relpos_np.SCHEMES`.
    variant : str or None
        One of the scheme's variants.
    q, k, v : ndarray, shapes (B, H, L_q, D), (B, H_kv, L_k, D) and (B, H_kv, L_k, D_v)
        Queries, keys and values. For an absolute scheme all three are its encoded inputs, as one head.
    position : scheme or None
        To be passed as ``position=``; None for an absolute scheme.
    kwargs : mapping
        Other arguments of `relpos_np.attention`, such as ``causal``.
    x : ndarray, shape (B, L, D), or None
        Inputs of an absolute scheme.
    encoding : callable or None
        The absolute scheme: q is ``encoding(x)``, rounded to the dtype of x.
    edge : str
        What is special about it: a name from `cases`, or "own" for what `example` makes.
    family : str or None
        The family of `cases` that it was made for.
    """

    name: str
    variant: str | None
    q: Array
    k: Array
    v: Array
    position: Scheme | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    x: Array | None = None
    encoding: Callable[[Array], Array] | None = None
    edge: str = "own"
    family: str | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What an implementation must support to run it: options of the call, and shapes that are not ordinary.

        Names of options that are set, with "float_mask" for a mask of floats, and "head_mask" for one of bool that
        differs by head; "cross" where L_q is not L_k,
        "grouped_heads" where H is not H_kv, and "value_dim" where D_v is not D.
        """
        found = {name for name, value in self.kwargs.items() if value is not None and value is not False}
        if "mask" in found and np.asarray(self.kwargs["mask"]).dtype != np.bool_:
            found = found - {"mask"} | {"float_mask"}
        elif "mask" in found and np.ndim(self.kwargs["mask"]) > 2 and np.shape(self.kwargs["mask"])[-3] > 1:
            found |= {"head_mask"}
        (_, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = self.q.shape, self.v.shape
        if self.kwargs.get("offset") == k_len - q_len:
            found = found - {"offset"}  # as it is without being said
        shapes = {"cross": q_len != k_len, "grouped_heads": heads != kv_heads, "value_dim": dim != v_dim}
        return frozenset(found | {name for name, there in shapes.items() if there})

    @property
    def where(self) -> str:
        """What people want to read of it in a failed test: scheme, variant, dtype, edge and sizes."""
        (_, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = self.q.shape, self.v.shape
        named = f"{self.name} {self.variant}" if self.variant else self.name
        sizes = f"L_q={q_len}, L_k={k_len}, H={heads}, H_kv={kv_heads}, D={dim}, D_v={v_dim}"
        return f"{named}, {self.q.dtype}, {self.edge}: {sizes}"

    @property
    def long(self) -> bool:
        """Whether a plain loop over all pairs would take long: True from a thousand queries or keys on."""
        return bool(max(self.q.shape[-2], self.k.shape[-2]) >= 1000)

    def run(self, backend: Backend | None = None) -> tuple[Array, Array]:
        """Output and log-sum-exp of one backend.

        Parameters
        ----------
        backend : str, optional
            See `relpos_np.set_backend`.

        Returns
        -------
        out, lse : ndarray
            As `relpos_np.attention` returns them.
        """
        found: tuple[Array, Array] = attention(
            self.q, self.k, self.v, position=self.position, backend=backend, return_lse=True, **self.kwargs
        )
        return found

    @cached_property
    def _expected(self) -> tuple[Array, Array]:
        """Output and log-sum-exp in float64."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        found: tuple[Array, Array] = attention(
            q, k, v, position=self.position, backend="numpy", return_lse=True, **self.kwargs
        )
        return found

    @property
    def expected(self) -> Array:
        """The reference's output for the same numbers in float64: what every backend must return, but for rounding.

        Its shape is (B, H, L_q, D_v).
        """
        return self._expected[0]

    @property
    def expected_lse(self) -> Array:
        """The log-sum-exp of `relpos_np.attention`, by the reference, for the same numbers in float64: (B, H, L_q)."""
        return self._expected[1]

    def expected_gradient(self, grad_out: Any, grad_lse: Any = None) -> AttentionGradient:
        r"""The reference's gradients for the same numbers in float64.

        Parameters
        ----------
        grad_out : array_like, shape (B, H, L_q, D_v)
            Gradient of a loss with respect to the output.
        grad_lse : array_like, shape (B, H, L_q), optional
            Its gradient with respect to the log-sum-exp.

        Returns
        -------
        AttentionGradient
            Of q, k, v and of every trained array of the scheme, ``position["table"]`` for instance; all in float64.

        Raises
        ------
        RelposError
            As `relpos_np.attention_vjp`.
        """
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        return attention_vjp(
            q,
            k,
            v,
            grad_out=np.asarray(grad_out, np.float64),
            grad_lse=None if grad_lse is None else np.asarray(grad_lse, np.float64),
            position=rebuilt(self.position, np.float64),
            backend="numpy",
            **self.kwargs,
        )

    @cached_property
    @np.errstate(all="ignore")  # excluded keys may hold anything, and weights may become 0
    def _sizes(self) -> tuple[float, int, Array]:
        """The largest sum of a score's parts, its products, and what each output is a sum of: sum_j p_ij |v_j|.

        Vectors on values are counted in.
        """
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        scoring = {name: value for name, value in self.kwargs.items() if name != "sinks"}
        s = logits(q, k, position=self.position, backend="numpy", **scoring)
        lse = self.expected_lse
        weights = np.exp(s - np.where(np.isfinite(lse), lse, 0.0)[..., None])
        # What is excluded has weight 0, whatever it holds.
        values = np.nan_to_num(np.abs(self.v.astype(np.float64)), posinf=0.0)
        problem, _, _ = check.problem(q, k, self.v.astype(np.float64), **scoring)
        site, position = problem.site, self.position or Plain()
        k = repeat_heads(k, s.shape[-3])
        q_content, k_content = position.transform(q, k, site)
        parts = [q_content @ np.swapaxes(k_content, -1, -2) * site.scale, position.scores(q, k, site)]
        if problem.mask is not None and problem.mask.dtype != np.bool_:
            parts.append(problem.mask)
        total = sum(np.abs(part) for part in parts if part is not None)
        bound = float(np.where(np.isfinite(s), total, 0.0).max(initial=0.0))
        terms = position.lower(problem.q, problem.k, site)
        turn = None if terms.turn is None else terms.turn.sizes()
        if turn is not None:
            values = np.maximum(turn.of_values(values), turn.to_values(values))
        magnitude = weights @ repeat_heads(values, s.shape[-3])
        vectors = [x.weights for x in terms.queries] + [x.weights for x in terms.keys]
        products = (q if terms.query is None else terms.query).shape[-1] + sum(w.shape[-1] for w in vectors)
        if terms.biases and position.reads_operand_values:
            # A bias of every pair that is made of products of queries.
            products += q.shape[-1]
        for term in terms.values:
            magnitude += np.abs(term.weights).max(initial=0.0) * weights.sum(axis=-1, keepdims=True)
        if turn is not None:
            magnitude = np.maximum(turn.of_output(magnitude), turn.to_output(magnitude))
        return bound, products, magnitude

    @property
    def logit_bound(self) -> float:
        """The largest score that is not infinite, its parts counted without their signs.

        It is the largest sum of the absolute values of the content product, of what the scheme adds and of the mask:
        rounding is relative to these, even where they cancel. For `tolerance`.
        """
        return self._sizes[0]

    @property
    def products(self) -> int:
        """How many products are added to make a score: for `tolerance`, as `depth`.

        That is head_dim, and the lengths of the scheme's own products with vectors or queries.
        """
        return self._sizes[1]

    def tolerated(self, dtype: Any = None) -> tuple[Array, float]:
        """The errors that an output and a log-sum-exp may have: `tolerance` of this example's scores and values.

        Parameters
        ----------
        dtype : dtype, optional
            Precision that is asked for; default that of `q`.

        Returns
        -------
        out : ndarray, shape (B, H, L_q, D_v)
            For each element of the output.
        lse : float
            For each log-sum-exp.
        """
        dtype = self.q.dtype if dtype is None else dtype
        bound, depth, magnitude = self._sizes
        # lse is of the size of a logit plus ln L_k, and half precision keeps it in float32.
        kept = "float32" if EPS[np.dtype(dtype).name] > EPS["float32"] else dtype
        slack = tolerance(kept, logit_bound=bound + float(np.log(max(self.k.shape[-2], 1))), depth=depth)
        return tolerance(dtype, logit_bound=bound, depth=depth, magnitude=magnitude), slack

    def error(self, out: Array, lse: Array | None = None, *, dtype: Any = None) -> float:
        """The largest error of an answer, in units of what is tolerated.

        Parameters
        ----------
        out : ndarray, shape (B, H, L_q, D_v)
            An output to be judged.
        lse : ndarray, shape (B, H, L_q), optional
            A log-sum-exp to be judged.
        dtype : dtype, optional
            Precision that is asked of the answer; default that of `q`.

        Returns
        -------
        float
            At most 1 if each element is within `tolerance`; infinity for a wrong shape, a NaN, or a
            query without keys whose output is not exactly 0.
        """
        allowed, slack = self.tolerated(dtype)
        worst = ratio(out, self.expected, allowed)
        return worst if lse is None else max(worst, ratio(lse, self.expected_lse, slack))

    def backend_error(self, backend: Backend) -> float:
        """Run the example on one backend, and judge the answer.

        Parameters
        ----------
        backend : str
            See `relpos_np.set_backend`; absolute encodings have only one.

        Returns
        -------
        float
            The largest error in units of what is tolerated. For an absolute encoding that unit is one rounding of a
            number as large as input and encoding together, or that of the smallest numbers there are: both summands
            are rounded, and their sum.
        """
        if self.encoding is None or self.x is None:
            return self.error(*self.run(backend))
        exact = self.x.astype(np.float64)
        wanted = self.encoding(exact)
        name = self.x.dtype.name
        unit = EPS[name] * (np.abs(exact) + np.abs(wanted - exact)) + SMALLEST[name]
        return ratio(self.encoding(self.x), wanted, unit)


def real_example() -> dict[str, Array]:
    """Real attention: four heads of one layer of all-mpnet-base-v2 on two texts.

    Returns
    -------
    dict of ndarray
        ``q``, ``k``, ``v`` and ``expected`` (2, 4, 69, 64) float32; ``table`` (32, 4) float32 for
        `relpos_np.T5`; ``mask`` (2, 69) bool, True for a word piece; ``tokens`` (2, 69), the
        word pieces. The scale is 1/8. ``expected`` comes from transformers in float64.
    """
    file = resources.files("relpos_np").joinpath("data/mpnet_layer5.npz")
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def example(
    name: str, *, dtype: Any = "float32", seed: int = 0, variant: str | None = None, size: str = "small"
) -> Example:
    """A seeded example of a scheme.

    Parameters
    ----------
    name : str
        Key in `relpos_np.SCHEMES`.
    dtype : dtype
        Of all arrays; the same numbers are drawn for each and rounded to it.
    seed : int
        Of the numbers.
    variant : str, optional
        One of the scheme's variants; default the first.
    size : {"tiny", "small", "blocks"}
        "tiny" has about 11 queries and 17 keys, "small" 37 and 53, "blocks" a few hundred, which is more than the
        kernels take at a time. None is a multiple of a vector or a block.

    Returns
    -------
    Example
        ``rp.attention(e.q, e.k, e.v, position=e.position, **e.kwargs)`` is valid for each.

    Raises
    ------
    RelposValueError
        If there is no such scheme, variant or size.
    """
    check.choice("size", size, tuple(SIZES))
    return build(name, SIZES[size], dtype=dtype, seed=seed, variant=variant)


def accepted(one: Example) -> Example | None:
    """The example, if its scheme accepts the call."""
    try:
        problem, _, _ = check.problem(one.q, one.k, one.v, **one.kwargs)
        if one.position is not None:
            one.position.check(problem.site)
    except RelposError:
        return None
    return one


def build(
    name: str,
    size: Size,
    *,
    dtype: Any,
    seed: int,
    variant: str | None,
    heads: tuple[int, int] | None = None,
    batch: tuple[int, ...] = (2,),
    choices: tuple[int, ...] = (),
    asked: list[int] | None = None,
    numbers: Callable[[int], Any] = np.random.default_rng,
) -> Example:
    """An example of about these lengths, with other heads, batch axes and choices if they are given; see `example`.

    `asked` is extended by the number of answers to each choice; `numbers` makes a generator of a seed. A RelposError
    says that there is no such scheme or variant, or none with such lengths.
    """
    check.choice("name", name, tuple(SCHEMES))
    variants = SCHEMES[name].variants
    if variant is not None and variant not in variants:
        raise RelposValueError(f"variant: {name} has {', '.join(map(repr, variants)) or 'none'}; found {variant!r}")
    rng = numbers(check.integer("seed", seed, 0))

    @np.errstate(under="ignore")  # half precision has no room for small numbers
    def draw(*shape: int) -> Array:
        return np.asarray(rng.standard_normal(shape)).astype(dtype)

    sample = Sample(draw, **asdict(size), variant=variant, heads=heads, batch=batch, choices=choices)
    found = Example(name=name, variant=variant or next(iter(variants), None), **SCHEMES[name].build(sample))
    if asked is not None:
        asked += sample.asked
    return found
