"""Paths through two heads: in the example model, whose circuit of induction is known, and by the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.examplemodel import ExampleModel, repeated_bytes
from regard.insight import head_statistics, strongest
from regard.interpret.paths import earlier_heads


@pytest.mark.parametrize("period", [12, 24, 40])
def test_the_previous_token_head_feeds_induction(period: int) -> None:
    trace = ExampleModel.load().run(repeated_bytes(period, count=1, seed=3)[0])
    every = [x for n in range(trace.layers) for x in head_statistics(trace.weights(n), trace.ids, layer=n)]
    induction, previous = strongest(every, "induction"), strongest(every, "previous token")
    i = len(trace.ids) - 2
    row = trace.weights(induction.layer)[induction.head, i]
    j = int(row[1:].argmax()) + 1  # not the sink
    assert trace.ids[j - 1] == trace.ids[i]  # it reads what followed the earlier copy
    layers = [(trace.weights(n)[:, j], np.linalg.norm(trace.v[n], axis=-1)) for n in range(induction.layer)]
    first, *_ = earlier_heads(float(row[j]), j, layers)
    assert (first.layer, first.head, first.key) == (previous.layer, previous.head, j - 1)
    assert first.product == pytest.approx(row[j] * layers[first.layer][0][first.head, j - 1] * first.norm)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_products_are_the_largest_along_each_path(layers: int, heads: int, n: int, values: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    j, weight = int(rng.integers(n)), float(rng.random())
    P, norms = rng.dirichlet(np.ones(n), (layers, heads)), rng.random((layers, heads, n)) + 0.1
    ranked = earlier_heads(weight, j, [(P[x], norms[x] if values else None) for x in range(layers)])
    keys = [r for r in range(n) if r != j and (values or r)]
    products = P * norms if values else P
    assert len(ranked) == (layers * heads if keys else 0)
    for x in ranked:
        paths = products[x.layer, x.head]
        assert x.product == pytest.approx(weight * max(paths[keys]))
        assert x.key in keys
        assert x.weight == P[x.layer, x.head, x.key]
    assert [x.product for x in ranked] == sorted((x.product for x in ranked), reverse=True)


def test_one_layer_without_values_leaves_all_products_without() -> None:
    P = np.array([[0.7, 0.3, 0.0]])
    one, other = earlier_heads(1.0, 2, [(P, np.array([[9.0, 9.0, 9.0]])), (P, None)])
    assert (one.product, one.key, one.norm) == (other.product, other.key, other.norm) == (0.3, 1, None)
