"""The loss of the example model without each of its heads.

`regard insight --ablate` and the page show it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from regard.interpret.examplemodel.model import ExampleModel, Replacement


@dataclass(frozen=True)
class Losses:
    """Mean loss in nats per byte after the first, with all heads and without each.

    without: by (layer, head).
    """

    whole: float
    without: Mapping[tuple[int, int], float]


def losses_without(
    model: ExampleModel,
    ids: ArrayLike,
    how: Replacement,
    progress: Callable[[float], object] = lambda done: None,
    **options: Any,
) -> Losses:
    """Compute the loss of `ids` (n,) without each head in turn.

    how, options: those of `ExampleModel.run`. progress: called with the share of the heads that is done.
    """
    losses, heads = dict[tuple[int, int], float](), model.config.layers * model.config.heads
    for layer, head, trace in model.ablations(ids, how, **options):
        losses[layer, head] = float(trace.losses().mean())
        progress(len(losses) / heads)
    return Losses(float(model.run(ids, **options).losses().mean()), losses)
