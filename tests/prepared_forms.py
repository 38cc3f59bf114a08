"""Rules of one form with values that hide other tiles, and the bits of calls with them.

python tests/prepared_forms.py VALUES  the digests of all forms with the first or the second values, as JSON
"""

import json
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch

import regard
from regard.core.tensors import array

BATCH, HEADS, ROWS, D = 2, 3, 16, 8
KEYS = 16, 128, 300  # the last has several tiles
INF = float("inf")


def ids(n: int, *ends: int) -> np.ndarray[Any, Any]:
    """The documents of positions, which end there."""
    return np.searchsorted(np.array(ends), np.arange(n), side="right")


FORMS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, Any]]] = {
    "padding": (lambda n, x: {"mask": regard.padding([min(m, n) for m in x])}, ([5, 11], [300, 0])),
    "padding on the left": (
        lambda n, x: {"mask": regard.padding([min(m, n) for m in x], side="left")}, ([150, 3], [1, 300]),
    ),
    "padding of a tensor": (lambda n, x: {"mask": regard.padding(torch.tensor(x))}, ([2, 16], [16, 1])),
    "padding, causal": (lambda n, x: {"mask": regard.padding(x), "causal": True}, ([7, 16], [16, 2])),
    "padding of a window": (lambda n, x: {"mask": regard.window(6) & regard.padding(x)}, ([9, 16], [3, 12])),
    "documents": (lambda n, x: {"mask": regard.documents(ids(n, *x))}, ((4, 9), (140,))),
    "wide integers": (lambda n, x: {"mask": regard.padding(x)}, ([5, 2**40], [2**40, 7])),
    "prefix": (lambda n, x: {"mask": regard.prefix(x) | regard.window(2)}, ([1, 14], [12, 0])),
    "flags": (lambda n, x: {"mask": regard.mask(flags(n, x))}, (3, 5)),
    "slopes": (lambda n, x: {"score": regard.alibi(x)}, ([0.5, 0.25, 0.1], [0.0, 4.0, 1.0])),
    "a score that hides": (lambda n, x: {"score": row(n, x)}, ([0.0, -INF, 1.0], [-INF, 2.0, 0.0])),
    "a score that may hide": (lambda n, x: {"score": row(n, x, -1)}, ([0.0, 2.0, 1.0], [INF, 2.0, 0.0])),
    "both": (
        lambda n, x: {"mask": regard.padding(x), "score": regard.alibi([s / 8 for s in (*x, 3)])}, ([6, 16], [16, 4]),
    ),
    "nested": (lambda n, x: {"mask": nested(n, x)}, ([0, 1], [1, 0])),
}  # fmt: skip
"""Options from a number of keys and values, and two values."""


def flags(n: int, step: int) -> Callable[..., Any]:
    table = regard.table(np.arange(BATCH * n).reshape(BATCH, n) % step > 0)
    return lambda b, h, i, j: table[b, j]


def row(n: int, values: Sequence[float], sign: int = 1) -> regard.Score:
    table = regard.table(np.array(values))
    return regard.score(lambda s, b, h, i, j: s + sign * table[h])


def nested(n: int, x: Sequence[int]) -> regard.Mask:
    order, lengths = regard.table(np.array(x)), regard.table(np.array([5, 15]))
    return regard.mask(lambda b, h, i, j: j < lengths[order[b]])


def results(form: str, values: int, n: int) -> list[np.ndarray[Any, Any]]:
    """The output without gradients, and with them the output and gradients."""
    make, given = FORMS[form]
    generator = torch.manual_seed(0)
    q, dout = torch.randn(2, BATCH, HEADS, ROWS, D, generator=generator)
    k, v = torch.randn(2, BATCH, HEADS, n, D, generator=generator)
    out = regard.attention(q, k, v, **make(n, given[values]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    trained = regard.attention(*leaves, **make(n, given[values]))
    g = torch.autograd.grad(trained, leaves, dout)
    return [array(x.detach()) for x in (out, trained, *g)]


def digests(form: str, values: int) -> list[str]:
    return [sha256(x.tobytes()).hexdigest() for n in KEYS for x in results(form, values, n)]


if __name__ == "__main__":
    regard.set_num_threads(1)
    print(json.dumps({form: digests(form, int(sys.argv[1])) for form in FORMS}))
