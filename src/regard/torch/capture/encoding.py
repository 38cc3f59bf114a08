"""Texts as the tokens of a model of transformers."""

from typing import Any

import numpy as np

from regard.torch.capture.recorder import pieces


def encoded(tokenizer: Any, text: str) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return token ids (1, n), and for each its piece of the text, or its name."""
    if not text:
        raise ValueError("text is empty: give at least one character")
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoding = tokenizer(text, **({"return_offsets_mapping": True} if fast else {}))
    ids = list(encoding["input_ids"])
    if not ids:
        raise ValueError("the tokenizer finds no token in this text")
    if fast:
        labels, end = [], 0
        for (a, b), name in zip(encoding["offset_mapping"], pieces(tokenizer, ids), strict=True):
            labels.append(text[end:b] if b > a else name)  # with the space before it, if no token covers that
            end = max(end, b)
    else:
        labels = pieces(tokenizer, ids)
    return np.array([ids], np.int64), labels


def longest(config: Any) -> int | None:
    """Return the maximum number of tokens that a model reads, None if it has none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "n_positions", "max_source_positions")
    sizes = [getattr(text, name, None) for name in names]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def check_length(ids: np.ndarray[Any, Any], config: Any, model: str = "the model") -> None:
    """Raise ValueError for more tokens (1, n) than a model reads."""
    most = longest(config)
    if most is not None and ids.shape[-1] > most:
        raise ValueError(f"text is too long: {ids.shape[-1]:,} tokens, and {model} reads at most {most:,}")
