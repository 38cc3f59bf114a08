"""Runs of models that read a picture, by their processors of transformers."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from regard.interpret.capture.captured import Capture
from regard.runtime.progress import Stage
from regard.torch.capture.forward import FEW, attention_seen, layers_reported, without_logits
from regard.torch.capture.grids import require_patches
from regard.torch.capture.recorder import capture

QUESTION = "Describe this picture."
"""The text that goes with a picture unless one is given."""

TOLD = 2**26
"""Bytes of queries and keys from which on they are told before a run."""

Progress = Callable[[Stage], object]


def read(
    network: nn.Module,
    processor: Any,
    image: Any,
    text: str | None = None,
    *,
    memory: int | None = None,
    progress: Progress = lambda stage: None,
) -> Capture:
    """Capture a model's attention to a picture, and to a text if it reads both.

    image: of Pillow. text: by default `QUESTION`, for a processor with a tokenizer. Raises ValueError where the
    processor or the model refuses them, and where no attention call reads the patches of the picture; before any work
    if no configuration of the model has `patch_size`.
    """
    named = type(network).__name__
    if not hasattr(processor, "image_processor") and not hasattr(processor, "image_mean"):
        raise TypeError(
            f"a picture needs a processor of transformers that reads pictures, got {type(processor).__name__}"
        )
    require_patches(network, named)
    try:
        inputs = inputs_of(processor, image, text)
    except (TypeError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{type(processor).__name__} does not take this picture and text: {error}") from error
    network = without_logits(network)
    taken = inspect.signature(network.forward).parameters
    arguments = {name: _cast(x, network) for name, x in inputs.items() if name in taken}
    progress(Stage(f"running the model on a picture{_size(network, arguments)}"))
    with (
        attention_seen(network, named), layers_reported(network, progress), torch.no_grad(),
        capture(network, memory=memory, tokenizer=processor, gridded=True) as seen,
    ):  # fmt: skip
        try:
            network(**arguments, **{name: x for name, x in FEW.items() if name in taken})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{named} does not run on a picture{' and a text' if text else ''}: {error}") from error
    return seen


def inputs_of(processor: Any, image: Any, text: str | None) -> Mapping[str, Any]:
    """Return the model's arguments for a picture and a text, by the processor's chat template if it has one."""
    if getattr(processor, "tokenizer", None) is None:
        if text is not None:
            raise ValueError("it reads no text")
        inputs: Mapping[str, Any] = processor(images=image, return_tensors="pt")
        return inputs
    text = QUESTION if text is None else text
    token = getattr(processor, "image_token", None)
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": text}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    elif isinstance(token, str) and token not in text:
        text = f"{token}\n{text}"
    both: Mapping[str, Any] = processor(text=[text], images=[image], return_tensors="pt")
    return both


def _cast(x: Any, network: nn.Module) -> Any:
    """Return an argument on the model's device, floats in its dtype."""
    if not isinstance(x, torch.Tensor):
        return x
    parameter = next(network.parameters())
    return x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)


def _size(network: Any, given: Mapping[str, Any]) -> str:
    """Return what the queries and keys of a text with its picture take, for `Stage`; "" for little."""
    ids, config = given.get("input_ids"), getattr(network, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: None)()
    heads = getattr(text, "num_attention_heads", None)
    if ids is None or not heads:
        return ""
    d = getattr(text, "head_dim", None) or text.hidden_size // heads
    rows = heads + (getattr(text, "num_key_value_heads", None) or heads)
    each = rows * d * next(network.parameters()).element_size() + 4 * heads
    size = each * ids.numel() * text.num_hidden_layers
    return "" if size < TOLD else f" and {ids.shape[-1]:,} tokens, whose queries and keys are {size / 2**30:.1f} GiB"
