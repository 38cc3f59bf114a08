"""One query and one key, step by step: from their product to the weighted sum."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.engines import engines
from regard.reference import specification
from regard.viewer.data.numbers import all_finite, finite
from regard.viewer.scene.scenes import SceneLayer, rules_of

MOST = 256
"""Maximum numbers shown of a stage."""


@dataclass(frozen=True)
class WeightStage:
    """A quantity: its name, formula in TeX, explanation, and value or values."""

    name: str
    formula: str
    text: str
    value: float | None = None
    values: NDArray[np.float64] | None = None
    labels: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return the stage as JSON, with a value or with values and their labels."""
        plain = {"name": self.name, "formula": self.formula, "text": self.text}
        if self.values is None:
            return plain | {"value": None if self.value is None else finite(self.value)}
        labels = [str(n) for n in range(len(self.values))]
        return plain | {"values": all_finite(self.values.tolist()), "labels": labels}


def stages(layer: SceneLayer, head: int, i: int, j: int, b: int = 0) -> tuple[WeightStage, ...]:
    """Return the stages of query i and key j in one head, in O(n) work.

    The specification computes them in float64, from one row of scores. Raises `Unknown` for a head with weights alone.
    """
    return tuple(_stages(*layer.computed(head), i, j, b))


def _stages(layer: SceneLayer, head: int, i: int, j: int, b: int) -> Iterator[WeightStage]:
    p = part_of(layer.problem, b, head, rows=slice(i, i + 1))
    with np.errstate(all="ignore"):
        engines()["spec"].require("forward", p)
        f = specification.terms(p)
    at: Any = (0, 0, 0, j)
    q, k, v = f.q[0, 0, 0], f.k[0, 0, j], f.v[0, 0, j]
    lse, weight = float(f.lse[0, 0, 0]), float(f.P[at])
    yield WeightStage("query", rf"q_{{{i}}}", f"the query of row {i}: {p.d} features", values=q[:MOST])
    yield WeightStage("key", rf"k_{{{j}}}", f"the key of row {j}: {p.d} features", values=k[:MOST])
    yield WeightStage(
        "products", rf"q_{{{i},a}}\,k_{{{j},a}}", "feature by feature, what the two share", values=(q * k)[:MOST]
    )
    yield WeightStage(
        "dot product", rf"q_{{{i}}}\cdot k_{{{j}}}=\sum_a q_{{{i},a}}\,k_{{{j},a}}", "their sum", float(q @ k)
    )
    score, symbol = float(f.T[at]), rf"s_{{{i},{j}}}"
    usual = bool(np.isclose(p.scale, p.d**-0.5, rtol=1e-6))
    factor = rf"\frac{{1}}{{\sqrt{{{p.d}}}}}" if usual else f"{p.scale:.6g}"
    yield WeightStage("scale", rf"{symbol}={factor}\;q_{{{i}}}\cdot k_{{{j}}}", f"times {p.scale:.6g}", score)
    if p.score_node is not None:
        with np.errstate(all="ignore"):
            score = float(
                specification.evaluate_one(p.score_node, specification.indices_of(p, np.float64, f.T), f.T.shape)[at]
            )
        yield WeightStage("rules", rf"{symbol}\leftarrow f({symbol},{i},{j})", f"the score rule {p.score}", score)
    if p.bias is not None:
        added = float(specification.dense(p, p.bias)[at])
        score += added
        yield WeightStage("bias", rf"{symbol}\leftarrow {symbol}+b_{{{i},{j}}}", f"plus a bias of {added:.6g}", score)
    visible = bool(f.visible[at])
    if rules_of(p) or not visible:
        words = "is seen" if visible else "is hidden: its score becomes minus infinity, its weight 0"
        rule = f" by the mask {p.mask}" if p.mask is not None and not visible else ""
        formula = rf"{symbol}" if visible else rf"{symbol}\leftarrow-\infty"
        yield WeightStage("mask", formula, f"key {j} {words}{rule}", score if visible else None)
    seen = int(f.visible.sum())
    extra = r"+e^{\mathrm{sink}}" if p.sink is not None else ""
    words = f"over the {seen} keys that row {i} sees" + (", and the sink" if p.sink is not None else "")
    text = f"row {i} sees no key: minus infinity" if lse == -np.inf else words
    yield WeightStage(
        "log-sum-exp", rf"\mathrm{{lse}}_{{{i}}}=\log\left(\sum_j e^{{s_{{{i},j}}}}{extra}\right)", text, lse
    )
    if p.sink is not None:
        share = float(f.p_sink[0, 0, 0])
        formula = rf"p_{{{i},\mathrm{{sink}}}}=e^{{\mathrm{{sink}}-\mathrm{{lse}}_{{{i}}}}}"
        yield WeightStage("sink", formula, f"row {i} leaves {share:.2%} of its attention to the learned sink", share)
    formula = rf"p_{{{i},{j}}}=e^{{{symbol}-\mathrm{{lse}}_{{{i}}}}}"
    yield WeightStage("softmax weight", formula, f"row {i} looks at row {j} with {weight:.2%} of its attention", weight)
    summed = rf"o_{{{i}}}=\sum_j p_{{{i},j}}\,v_j"
    if not layer.has_values:
        yield WeightStage("weighted sum", summed, f"not shown: {layer.no_values}")
        return
    yield WeightStage("value", rf"v_{{{j}}}", f"the value of row {j}: {p.d_v} features", values=v[:MOST])
    yield WeightStage(
        "times value", rf"p_{{{i},{j}}}\,v_{{{j}}}", "what this key adds to the output", values=(weight * v)[:MOST]
    )
    out = f.O[0, 0, 0]
    yield WeightStage(
        "weighted sum",
        summed,
        f"over all keys: the output of row {i}",
        values=out[:MOST],
    )
