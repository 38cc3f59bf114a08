"""A known call on tensors passes few modules: look-up, prepared call, kernel; with gradients those of backward too."""

from typing import Any

import pytest
import torch

from regard.torch.call import bound
from regard.torch.operators import fakes
from regard.torch.public import attention as public
from walks import calls, walk

MOST = {
    "plain": (9, 12),
    "causal": (9, 12),
    "bias": (9, 13),
    "options": (11, 17),
    "padding": (11, 16),
    "padding, made anew": (20, 87),
    "gradients": (14, 38),
    "gradients, options": (18, 46),
}
"""The modules that a call may enter, and how often one may follow another."""


@pytest.mark.parametrize("name", MOST)
def test_a_known_call_enters_few_modules(name: str) -> None:
    found = walk(calls()[name])
    modules = list(dict.fromkeys(found))
    assert modules[0] == "arguments/frameworks.py"
    assert (len(modules), len(found)) <= MOST[name], modules
    assert len(found) <= MOST[name][1], found


def test_a_call_with_gradients_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    for module in (public, bound, fakes):
        real = module.problem_from
        monkeypatch.setattr(module, "problem_from", lambda *x, real=real, **y: checked.append(x) or real(*x, **y))
    call = calls()["gradients"]
    first = call()
    assert len(checked) == 1
    assert all(map(torch.equal, call(), first))
    assert len(checked) == 1
