"""Capture of transformers' models that are on this machine.

Nothing is fetched. If a model or a text is not available, it raises ValueError with one line for users.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.interpret.capture.captured import Capture, capture
from regard.interpret.inputs import NoTokenizerError
from regard.interpret.maps import repeated_tokens
from regard.runtime.progress import Stage
from regard.torch.capture import pictured
from regard.torch.capture.encoding import check_length, encoded, longest
from regard.torch.capture.forward import attend, attention_seen
from regard.torch.capture.recorder import pieces

try:
    import transformers
except ImportError:
    raise ValueError("a model needs transformers: pip install 'regard[transformers]'") from None


def read(
    model: str,
    text: str | None = None,
    *,
    memory: int | None = None,
    path: Path | None = None,
    dtype: str = "auto",
    progress: Callable[[Stage], object] = lambda stage: None,
) -> Capture:
    """Capture a model's attention to a text, or to repeated random tokens.

    Without a text, 25 random tokens, or as many as fit, are repeated four times: induction heads are measured on that
    (Olsson et al. 2022).

    model: a folder as `save_pretrained` writes it, or the name of a model in the local cache. memory, path: as in
    `regard.capture`. dtype: in which it runs, that of its files if "auto". An encoder reads the text, and its decoder
    what the model answers.
    """
    with _quiet():
        config = _loaded(transformers.AutoConfig, model, "configuration")
        _require_text(config, model)
        tokenizer = None if text is None else _loaded(transformers.AutoTokenizer, model, "tokenizer")
        ids, labels = _repeated(config) if tokenizer is None else encoded(tokenizer, text or "")
        check_length(ids, config, model)
        progress(Stage("loading the model"))
        answers = bool(getattr(config, "is_encoder_decoder", False))
        kind = transformers.AutoModelForSeq2SeqLM if answers else transformers.AutoModel
        network = _loaded(kind, model, "model", dtype=dtype).eval()
        progress(Stage(f"running the model on {ids.shape[-1]:,} tokens"))
        with attention_seen(network, model), capture(network, memory=memory, path=path) as seen:
            attend(network, {"input_ids": torch.from_numpy(ids)}, progress)
    for name, tokens in seen.tokens.items():
        assert tokens.ids is not None
        shown = labels if np.array_equal(tokens.ids, ids) else _pieces(tokenizer, tokens.ids[0].tolist())
        seen.tokens[name] = replace(tokens, labels=(tuple(shown),))
    return seen


def read_picture(
    model: str,
    image: Any,
    text: str | None = None,
    *,
    memory: int | None = None,
    dtype: str = "auto",
    progress: Callable[[Stage], object] = lambda stage: None,
) -> Capture:
    """Capture a model's attention to a picture of Pillow, and to a text if it reads both.

    model, memory, dtype: as in `read`.
    """
    with _quiet():
        config = _loaded(transformers.AutoConfig, model, "configuration")
        processor = _loaded(transformers.AutoProcessor, model, "processor")
        progress(Stage("loading the model"))
        name = next(iter(config.architectures or ()), "")
        kind = getattr(transformers, name, transformers.AutoModel)
        network = _loaded(kind, model, "model", dtype=dtype).eval()
        return pictured.read(network, processor, image, text, memory=memory, progress=progress)


def load(model: str, dtype: str, progress: Callable[[Stage], object]) -> tuple[Any, Any]:
    """Load a model with its head for words, if it has one, and its tokenizer.

    model, dtype: as in `read`.
    """
    with _quiet():
        config = _loaded(transformers.AutoConfig, model, "configuration")
        _require_text(config, model)
        tokenizer = _loaded(transformers.AutoTokenizer, model, "tokenizer")
        progress(Stage("loading the model"))
        name = next(iter(config.architectures or ()), "")
        answers = bool(getattr(config, "is_encoder_decoder", False))
        kind = transformers.AutoModelForSeq2SeqLM if answers else transformers.AutoModel
        if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
            kind = getattr(transformers, name, kind)
        return _loaded(kind, model, "model", dtype=dtype).eval(), tokenizer


def _loaded(kind: Any, model: str, what: str, **options: Any) -> Any:
    """Load a part of a model from a folder or from the local cache."""
    try:
        return kind.from_pretrained(model, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not Path(model).exists() and what == "configuration":
            raise ValueError(
                f"no such model: {model} is neither a folder nor in the local cache of transformers; nothing is fetched"
            ) from None
        reason = str(error).strip().partition("\n")[0].strip()
        why = "" if isinstance(error, TypeError) or reason.endswith(":") else f": {reason}"  # a list follows
        missing = NoTokenizerError if what == "tokenizer" else ValueError
        raise missing(f"{model} has no {what} that transformers can load{why}") from None


def _require_text(config: Any, model: str) -> None:
    """Raise ValueError for a model of pictures or sounds, by what its class reads first."""
    name = next(iter(config.architectures or ()), "")
    reads = getattr(getattr(transformers, name, None), "main_input_name", "input_ids")
    if reads != "input_ids":
        how = "Run it in Python inside of `with regard.capture(model) as seen:`, then `regard.look(seen)`"
        if reads == "pixel_values":
            how = "Give it a picture: regard look --model ... --image cat.png"
        raise ValueError(f"{model} reads no text: {name} takes {reads}. {how}")


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    return [str(n) for n in ids] if tokenizer is None else pieces(tokenizer, ids)


def _repeated(config: Any) -> tuple[np.ndarray[Any, Any], list[str]]:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not size:
        raise ValueError("this model reads no tokens, so there is no text to look at it with")
    most = longest(config)
    ids = repeated_tokens(size, length=25 if most is None else max(1, min(25, (most - 1) // 4)))
    first = getattr(config.get_text_config(), "bos_token_id", None)
    if isinstance(first, int) and first < size:
        ids = np.concatenate([[[first]], ids], axis=-1)
    return ids, [str(n) for n in ids[0].tolist()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' reports on weights that attention maps do not need."""
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.utils.logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        transformers.utils.logging.enable_progress_bar()
