"""Rows of functions that have the names of other packages' functions, beside those packages."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

import regard
from benchmarks.measure import EAGER, SUBJECT, Result, Setting
from benchmarks.model_rows import on_threads
from benchmarks.row_types import Named, Prepared, Row, compared

Adapters = Mapping[str, Callable[[], Prepared]]


@dataclass(frozen=True)
class ReachRow:
    """Speed of a function over that of the package that it stands for.

    make: returns the exact results, and what prepares the calls.
    """

    name: str
    package: str
    make: Callable[[], tuple[Named, Adapters]]
    goal: float | None = None
    group: str = "reach"
    quick: bool = False

    def measure(self, s: Setting) -> Result:
        result = Result(self.group, self.name, f"× the speed of {self.package}", True, self.goal, self.package)
        return on_threads(result, s.threads, s, self.fill)

    def fill(self, result: Result, s: Setting) -> None:
        s.tick("float64")
        exact, adapters = self.make()
        compared(result, {}, adapters, (), exact, np.dtype(np.float32), 1.0, s)


def triangle(n: int, backward: bool) -> tuple[Named, Adapters]:
    """Triangle attention of 4 heads with a trained bias, as on a CPU in Boltz and OpenFold-3, in float32."""
    import torch

    from regard.torch import triangle_attention

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in [(1, n, 4, n, 32)] * 3 + [(1, 1, 4, n, n)]]
    dout = torch.randn(1, n, 4, n, 32)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ((q * 32**-0.5) @ k.mT + bias).softmax(-1) @ v

    def prepared(function: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32) -> Prepared:
        x = [t.to(dtype).requires_grad_(backward) for t in inputs]

        def call() -> list[torch.Tensor]:
            out = function(*x)
            return [out, *(torch.autograd.grad(out, x, dout.to(dtype)) if backward else ())]

        names = ("out", "dq", "dk", "dv", "dbias")
        return call, lambda results: {name: t.detach().numpy() for name, t in zip(names, results, strict=False)}

    call, read = prepared(eager, torch.float64)
    return read(call()), {EAGER: partial(prepared, eager), SUBJECT: partial(prepared, triangle_attention)}


def neighborhood(n: int, kernel: int) -> tuple[Named, Adapters]:
    """Neighborhood attention of 4 heads on a grid of n × n, forward."""
    import torch

    from regard.torch.natten import na2d

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, n, n, 4, 32)
    heads = [x.flatten(1, 2).double().numpy() for x in (q, k, v)]
    mask = regard.neighborhood((n, n), kernel)
    exact = regard.attention(*heads, mask=mask, layout="bnhd", engine="tiled")

    def prepared(function: Callable[..., torch.Tensor]) -> Prepared:
        return partial(function, q, k, v, kernel), lambda out: out.flatten(1, 2).numpy()

    def natten() -> Prepared:
        return prepared(import_module("natten.functional").na2d)

    return {"out": exact}, {"NATTEN": natten, SUBJECT: partial(prepared, na2d)}


def alibi(n: int) -> tuple[Named, Adapters]:
    """FlexAttention with a causal mask and ALiBi's score, 8 heads, d = 64, forward."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as original

    from regard.torch import flex_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, n, 64)
    slopes = 2.0 ** -torch.arange(1, 9)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
    wide = [x.double().numpy() for x in (q, k, v)]
    rule = regard.alibi(slopes.double().numpy())
    exact = regard.attention(*wide, causal=True, score=rule, engine="tiled")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def prepared(function: Callable[..., Any]) -> Prepared:
        return partial(function, q, k, v, score, causal), lambda out: out.numpy()

    def compiled() -> Prepared:
        return prepared(torch.compile(original))

    return {"out": exact}, {"FlexAttention": compiled, SUBJECT: partial(prepared, flex_attention)}


def rows() -> Iterator[Row]:
    """Yield the rows; a package that is not installed is named as the reason for none of its times."""
    for what, goal in ("forward", 8.0), ("forward and backward", 5.0):
        make = partial(triangle, 256, what != "forward")
        yield ReachRow(f"triangle attention, N = 256, {what}", EAGER, make, goal, quick=what == "forward")
    yield ReachRow("neighborhood attention, 56 × 56, kernel 7, forward", "NATTEN", partial(neighborhood, 56, 7), 100.0)
    yield ReachRow("FlexAttention, causal with ALiBi, n = 2,048, forward", "FlexAttention", partial(alibi, 2_048), 1.0)
