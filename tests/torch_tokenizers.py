"""Tokenizers of transformers for small models."""

from typing import Any

from small_models import VOCABULARY, transformers

MASK = VOCABULARY - 1


def words() -> Any:
    """The words w1 to w59, with id 60 for a masked one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    known = {"[PAD]": 0, "[MASK]": MASK} | {f"w{n}": n for n in range(1, MASK)}
    made = Tokenizer(models.WordLevel(known, "[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", pad_token="[PAD]")
