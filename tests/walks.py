"""The way of a tensor: the modules of the package that a call enters, in order, once its signature is known.

python tests/walks.py            their number for each call, and how often one follows another
python tests/walks.py gradients  and their names
"""

import sys
from collections.abc import Callable
from itertools import count, groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import regard

SOURCE = f"{Path(regard.__file__).parent}/"


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the modules whose functions a call enters, by their paths, each after another one."""
    entered: list[str] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(SOURCE):
            entered.append(path.removeprefix(SOURCE))

    call()
    call()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path for path, _ in groupby(entered)]


def calls() -> dict[str, Callable[[], Any]]:
    """Return small calls on tensors."""
    q, k, v = torch.randn(3, 2, 8, 16, 64, generator=torch.manual_seed(0))
    window, sink = regard.window(4), torch.zeros(8)
    padding, lengths = regard.padding(torch.tensor([9, 16])), count(1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    return {
        "plain": lambda: regard.attention(q, k, v),
        "causal": lambda: regard.attention(q, k, v, causal=True),
        "bias": lambda: regard.attention(q, k, v, bias=q[0, 0, :, :1]),
        "options": lambda: regard.attention(q, k, v, mask=window, sink=sink, dropout=0.1, seed=3),
        "padding": lambda: regard.attention(q, k, v, mask=padding),
        "padding, made anew": lambda: regard.attention(q, k, v, mask=regard.padding([next(lengths), 16])),
        "gradients": lambda: torch.autograd.grad(regard.attention(*leaves).sum(), leaves),
        "gradients, options": lambda: torch.autograd.grad(
            regard.attention(*leaves, mask=window, sink=sink, bias=q[0, 0, :, :1], dropout=0.1, seed=3).sum(), leaves
        ),
        "vmap": lambda: torch.func.vmap(regard.attention)(q, k, v),
        "jvp": lambda: torch.func.jvp(lambda q: regard.attention(q, k, v), (q,), (q,)),
    }


if __name__ == "__main__":
    for name, call in calls().items():
        found = walk(call)
        print(f"{name}: {len(dict.fromkeys(found))} modules, entered {len(found)} times")
        if name in sys.argv:
            print(*dict.fromkeys(found), sep="\n")
