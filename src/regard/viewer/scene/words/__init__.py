"""Attention of two trained models on a few sentences, as the page shows it without a model.

`words.npz` has the weights of every head, and queries, keys and values of those that are spoken of. CARD.md says of
which models; `examples/capture_words.py` makes both.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.interpret.formats import weight_text
from regard.runtime.progress import Stage
from regard.viewer.scene.labels import place_of
from regard.viewer.scene.scenes import Array, Opening, Scene
from regard.viewer.scene.sources import Settings, example, for_page
from regard.viewer.scene.weights import Operands, weights

FOLDER = Path(__file__).parent
STORED = FOLDER / "words.npz"
ABOUT = "about"
"""The array of the file that holds tokens and next tokens: JSON as bytes."""


class Look(NamedTuple):
    """A weight that is spoken of: a head by its numbers, and two tokens (their last occurrence) of a text."""

    text: str
    layer: int
    head: int
    query: str
    key: str


class Sentence(NamedTuple):
    """A sentence, the name that menus give it, its model, and what is said of it.

    says: with the weights of `looks` as {0}, {1}, ...; the page opens on the first.
    """

    name: str
    text: str
    model: str
    looks: tuple[Look, ...]
    says: str


SMOLLM2, MINILM = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
DECODERS = (SMOLLM2,)

HEADS = {SMOLLM2: ((13, 8), (16, 0), (17, 5), (23, 7), (24, 4), (25, 2)), MINILM: ((3, 1),)}
"""Heads, by layer and number, whose queries, keys and values are stored."""

TEXTS = {
    "cat": Sentence(
        "The cat sat on the mat",
        "The cat sat on the mat because it was tired.",
        SMOLLM2,
        (Look("cat", 13, 8, "it", "cat"), Look("cat", 13, 8, "sat", "cat"), Look("cat", 13, 8, "tired", "cat")),
        "In L13 H8 “it” looks at “cat” ({0}), and so do “sat” ({1}) and “tired” ({2}). Click another word to see where "
        "it looks. Does this head know what “it” means? Choose “Mary thanked Peter” above before you say yes.",
    ),
    "gift": Sentence(
        "John gave a drink to …",
        "When Mary and John went to the store, John gave a drink to",
        SMOLLM2,
        (Look("gift", 24, 4, "to", "Mary"), Look("gift", 25, 2, "to", "John")),
        "Who gets the drink? From the last “to”, L24 H4 looks at “Mary” ({0}), whom the model expects next. But L25 H2 "
        "looks at “John” ({1}): where heads look does not tell which of them counts.",
    ),
    "copy": Sentence(
        "A name comes again",
        "Otokar Brix lived in Prague. Every morning Otokar",
        SMOLLM2,
        (Look("copy", 17, 5, "ar", "B"), Look("copy", 16, 0, "ar", "tok")),
        "The first name comes again. From its last piece, “ar”, L17 H5 looks at “B” ({0}), which came next the first "
        "time, and the model expects it again: induction. L16 H0, one layer before, looks at the token before ({1}).",
    ),
    "code": Sentence(
        "width * …, in code",
        "def area(width, height): return width *",
        SMOLLM2,
        (Look("code", 23, 7, "*", "height"),),
        "From “*”, L23 H7 looks at “height” ({0}), the argument that was not used yet, and the model expects it next.",
    ),
    "she": Sentence(
        "Mary thanked Peter",
        "Mary thanked Peter because she was happy.",
        SMOLLM2,
        (Look("she", 13, 8, "she", "Peter"), Look("cat", 13, 8, "it", "cat")),
        "L13 H8 gave “cat” {1} of the weight of “it”, as if it knew what a pronoun means. Here “she” is Mary, and it "
        "looks at “Peter” ({0}). It is no coreference head: one sentence that fits proves nothing.",
    ),
    "tired": Sentence(
        "… it was too tired (encoder)",
        "The animal didn't cross the street because it was too tired.",
        MINILM,
        (Look("tired", 3, 1, "it", "animal"), Look("wide", 3, 1, "it", "animal")),
        "MiniLM is an encoder: “it” also sees how the sentence ends. In L3 H1 it looks at “animal” ({0}). Choose “… it "
        "was too wide”: the last word alone is another, and there the weight is {1}.",
    ),
    "wide": Sentence(
        "… it was too wide (encoder)",
        "The animal didn't cross the street because it was too wide.",
        MINILM,
        (
            Look("wide", 3, 1, "it", "animal"), Look("tired", 3, 1, "it", "animal"),
            Look("wide", 3, 1, "it", "street"), Look("tired", 3, 1, "it", "street"),
        ),
        "With “wide”, L3 H1 gives “animal” {0} of the weight of “it”, with “tired” {1}; “street” {2} instead of {3}. "
        "In a decoder the two cannot differ at “it”: all before is the same, and what comes after is hidden.",
    ),
}  # fmt: skip
"""The sentences by the names of their arrays, the first first."""


def opening() -> tuple[Scene, ...]:
    """Return the scenes of all sentences.

    >>> cat = opening()[0]
    >>> cat.query_tokens[cat.opening.i], cat.key_tokens[cat.opening.j]
    (' it', ' cat')
    """
    stored = read()
    return tuple(_scene(name, text, stored) for name, text in TEXTS.items())


def page(progress: Callable[[Stage], object] = lambda stage: None) -> tuple[Scene, ...]:
    """Return the scenes of a page without a text: the sentences, the example model, and what was made by hand."""
    progress(Stage("reading the sentences"))
    return (*opening(), *for_page([example(Settings(), progress=progress)]))


@cache
def read() -> Mapping[str, Any]:
    """Return the stored arrays by name, with what is in `ABOUT`.

    Weights (layers, heads, cells) are the lower triangles of maps, row by row; those of encoders whole maps.
    """
    with np.load(STORED) as file:
        arrays = dict(file)
    about: dict[str, Any] = json.loads(arrays.pop(ABOUT).tobytes())
    return {**arrays, **about}


def maps(cells: Array, n: int) -> NDArray[np.float32]:
    """Return stored weights as maps (layers, heads, n, n).

    >>> maps(np.array([[[1.0, 0.25, 0.75]]]), 2)[0, 0].tolist()
    [[1.0, 0.0], [0.25, 0.75]]
    """
    weights = np.zeros((*cells.shape[:2], n, n), np.float32)
    rows, cols = np.indices((n, n)) if cells.shape[-1] == n * n else np.tril_indices(n)
    weights[..., rows.ravel(), cols.ravel()] = cells
    return weights


def _weight(stored: Mapping[str, Any], look: Look) -> float:
    tokens = stored["tokens"][look.text]
    n = len(tokens)
    row, column = (place_of(token, tokens, n) for token in (look.query, look.key))
    return float(maps(stored[f"{look.text}.weights"], n)[look.layer, look.head, row, column])


def _scene(name: str, text: Sentence, stored: Mapping[str, Any]) -> Scene:
    tokens = stored["tokens"][name]
    operands = {at: Operands(*stored[f"{name}.{at[0]}.{at[1]}"]) for at in HEADS[text.model]}
    scene = weights(
        maps(stored[f"{name}.weights"], len(tokens)), tokens=tokens, operands=operands, name=text.name, kind="words"
    )
    look = text.looks[0]
    said = text.says.format(*(weight_text(_weight(stored, look)) for look in text.looks))
    i, j = (place_of(token, tokens, len(tokens)) for token in (look.query, look.key))
    return replace(
        scene,
        note=f"{text.model}, as it read this text once: weights are stored, and no model runs",
        following=tuple((token, share) for token, share in stored["following"].get(name, ())),
        opening=Opening(look.layer, look.head, i, j, said),
    )
