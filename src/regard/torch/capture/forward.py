"""Forward passes of models for their attention alone."""

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.runtime.progress import Stage

ANSWER = 32
"""Tokens that an encoder-decoder model generates, for its decoder to read."""

FEW = {"use_cache": False, "logits_to_keep": 1}
"""Arguments of transformers' models that leave out a cache, and the logits of all tokens but one."""

Progress = Callable[[Stage], object]


def attend(network: nn.Module, given: Mapping[str, Any], progress: Progress = lambda stage: None) -> None:
    """Run a model on the arguments `given`, without a cache and without logits of all tokens.

    An encoder-decoder model of transformers generates `ANSWER` tokens, which its decoder reads. progress: is told each
    layer, with the time left.
    """
    generates = getattr(network, "can_generate", lambda: False)()
    with torch.no_grad(), layers_reported(network, progress), on_tokens_alone(network):
        if generates and getattr(getattr(network, "config", None), "is_encoder_decoder", False):
            network.generate(**given, max_new_tokens=ANSWER, do_sample=False, num_beams=1)
            return
        network = without_logits(network)
        taken = inspect.signature(network.forward).parameters
        network(**given, **{name: x for name, x in FEW.items() if name in taken})


@contextmanager
def attention_seen(network: nn.Module, name: str) -> Iterator[None]:
    """Raise ValueError where a capture sees no attention. name: of the model, for users."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("no attention was seen"):
            raise
        raise ValueError(
            f"the attention of {name} cannot be looked at: {type(network).__name__} computes it itself, without "
            "transformers' attention interface, or has none"
        ) from None


@contextmanager
def on_tokens_alone(network: nn.Module) -> Iterator[None]:
    """Raise ValueError where a model fails, as one does that reads pictures too."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(network).__name__} does not run on tokens alone ({error}). Run it inside of "
            "`with regard.capture(model) as seen:`, then `regard.look(seen)`"
        ) from error


def without_logits(network: nn.Module) -> nn.Module:
    """Return the model, or what is below its head if that computes logits of all tokens."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    if not isinstance(network, kind) or "logits_to_keep" in inspect.signature(network.forward).parameters:
        return network
    below: nn.Module = network.base_model
    return below


@contextmanager
def layers_reported(network: nn.Module, progress: Progress) -> Iterator[None]:
    """Report "layer 7 of 30, 12 s left" where a layer of the network ends for the first time."""
    layers = layers_of(network)
    ends: dict[nn.Module, float] = {}

    def ended(module: nn.Module, *_: Any) -> None:
        if module not in ends:
            ends[module] = time.monotonic()
            progress(Stage("layer", len(ends), len(layers), _left([*ends.values()], len(layers))))

    handles = [layer.register_forward_hook(ended) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(network: nn.Module) -> list[nn.Module]:
    """Return the layers of a network: the modules of its lists that are in no other list.

    >>> layers = [nn.ModuleList([nn.Linear(2, 2) for _ in range(4)]) for _ in range(3)]
    >>> len(layers_of(nn.ModuleDict({"embedding": nn.Linear(2, 2), "layers": nn.ModuleList(layers)})))
    3
    """
    lists = {name: x for name, x in network.named_modules() if isinstance(x, nn.ModuleList)}
    outer = [x for name, x in lists.items() if not any(name.startswith(f"{other}.") for other in lists if other)]
    return [layer for x in outer for layer in x]


def _left(ends: list[float], count: int) -> float | None:
    """Return the seconds left by the mean time of the layers after the first, which may compile kernels.

    >>> _left([10.0, 11.0, 12.0], 30), _left([10.0], 30), _left([1.0, 2.0], 2)
    (27.0, None, None)
    """
    done = len(ends)
    if not 1 < done < count:
        return None
    return (ends[-1] - ends[0]) / (done - 1) * (count - done)
