"""Attention itself: one operator where it says all of a call, nodes otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np.interop.onnx.masks import Masks
from relpos_np.interop.onnx.operand import Traced
from relpos_np.interop.onnx.places import Places
from relpos_np.interop.onnx.scores import Added


@dataclass(eq=False)
class Call:
    """Everything that the nodes of attention are made of.

    Attributes
    ----------
    places : Places
        The graph, and where queries and keys stand.
    problem : Problem
        The call that was lowered.
    terms : Terms
        What it was lowered to, from operands that are traced.
    query, key, value : Traced
        Operands, whose heads are still grouped.
    added : list of str
        What is added to the scores.
    masks : Masks
        Which pairs are attended.
    sinks : str or None
        One more score in each row, broadcast to (B, H, L_q, 1).
    """

    places: Places
    problem: Problem
    terms: Terms
    query: Traced
    key: Traced
    value: Traced
    added: list[str]
    masks: Masks
    sinks: str | None

    def outputs(self, *, with_lse: bool) -> tuple[str, str | None]:
        """Add the nodes.

        Parameters
        ----------
        with_lse : bool
            Whether the log-sum-exp is wanted.

        Returns
        -------
        tuple of str
            Output (B, H, L_q, D_v), before it turns back, and log-sum-exp (B, H, L_q).
        """
        return self._nodes() if with_lse or not self._has_operator() else (self._operator(), None)

    def _has_operator(self) -> bool:
        """Whether the operator says it.

        Its scale and cap are float32, and a runtime may refuse a scale that is not positive. Releases of ONNX disagree
        on whether the cap comes before the mask, so that only calls without one leave it to the operator.
        """
        masked = bool(self.added or self.masks.allowed or self.masks.added or self.masks.causal)
        return (
            self.problem.site.dtype == np.float32
            and self.problem.site.scale > 0
            and not self.terms.values
            and self.sinks is None
            and not (self.problem.softcap and masked)
        )

    def _joined(self, operator: str, names: list[str], name: str) -> str | None:
        """All of them by an operator of two, or None where there are none."""
        return reduce(lambda x, y: self.places.graph.add(operator, x, y, name=name), names) if names else None

    def _wide(self, x: str) -> str:
        """A mask with all of its axes, which the operator asks for."""
        return self.places.graph.add("Expand", x, self.places.pairs, name="mask")

    def _operator(self) -> str:
        graph, problem = self.places.graph, self.problem
        bias = self._joined("Add", [*self.added, *filter(None, [self.masks.added])], "bias")
        allowed = self._joined("And", self.masks.allowed, "allowed")
        if bias is not None and allowed is not None:
            bias = graph.add("Where", allowed, bias, self._number(-np.inf), name="bias")
        mask = bias if bias is not None else allowed
        settings: dict[str, Any] = {"scale": problem.site.scale, "is_causal": int(self.masks.causal)}
        if problem.softcap:
            settings["softcap"] = problem.softcap
        key, value = (self._with_heads(x, max(self.key.shape[1], self.value.shape[1])) for x in (self.key, self.value))
        inputs = [self.query.name, key, value, *([] if mask is None else [self._wide(mask)])]
        return graph.add("Attention", *inputs, name="attended", **settings)

    def _with_heads(self, x: Traced, heads: int) -> str:
        return self.places.graph.repeated(x.name, heads // x.shape[1], heads)

    def _number(self, value: float) -> str:
        return self.places.graph.constant(np.array(value, self.problem.site.dtype), "number")

    def _capped(self, s: str) -> str:
        graph, c = self.places.graph, self._number(self.problem.softcap)
        return graph.add("Mul", graph.add("Tanh", graph.add("Div", s, c)), c, name="capped")

    def _scores(self) -> str:
        graph, problem, site = self.places.graph, self.problem, self.problem.site
        key = self._with_heads(self.key, site.heads)
        s = graph.add("MatMul", self.query.name, graph.transposed(key, 0, 1, 3, 2), name="products")
        s = graph.add("Mul", s, self._number(site.scale), name="scaled")
        if problem.cap_content:
            s = self._capped(s)
        for name in self.added:
            s = graph.add("Add", s, name, name="scores")
        if problem.softcap and not problem.cap_content:
            s = self._capped(s)
        if self.masks.added is not None:
            s = graph.add("Add", s, self.masks.added, name="scores")
        if self.masks.causal:
            causal = graph.add("LessOrEqual", self.places.distance, graph.constant(np.int64(0), "number"))
            self.masks.allowed.append(causal)
        allowed = self._joined("And", self.masks.allowed, "allowed")
        if allowed is not None:
            s = graph.add("Where", allowed, s, self._number(-np.inf), name="scores")
        return s

    def _nodes(self) -> tuple[str, str]:
        """Softmax and sums; a query without keys gets 0."""
        graph, site, last = self.places.graph, self.problem.site, self.places.graph.integers(-1)
        s = self._scores()
        top = graph.add("ReduceMax", s, last, name="largest")
        if self.sinks is not None:
            top = graph.add("Max", top, self.sinks, name="largest")
        none = graph.add("Equal", top, self._number(-np.inf))
        top = graph.add("Where", none, self._number(0), top, name="largest")
        weights = graph.add("Exp", graph.add("Sub", s, top), name="weights")
        total = graph.add("ReduceSum", weights, last, name="total")
        if self.sinks is not None:
            total = graph.add("Add", total, graph.add("Exp", graph.add("Sub", self.sinks, top)), name="total")
        lse = graph.add("Squeeze", graph.add("Add", graph.add("Log", total), top), last, name="log_sum_exp")
        empty = graph.add("Equal", total, self._number(0))
        divisor = graph.add("Where", empty, self._number(1), total)
        p = graph.add("Div", weights, divisor, name="probabilities")
        out = graph.add("MatMul", p, self._with_heads(self.value, site.heads), name="attended")
        added = Added(self.places, self.problem)
        for term in self.terms.values:
            out = graph.add("Add", out, added.value(term, p), name="attended")
        return out, lse
