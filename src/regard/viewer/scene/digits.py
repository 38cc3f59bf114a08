"""The example vision transformer as a source of scenes."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.interpret.capture.grids import PatchGrid
from regard.interpret.examplemodel.vit import ExampleViT, PictureTrace, held_out
from regard.ops.normalization import problem_from
from regard.runtime.forks import cached_property
from regard.runtime.progress import Stage
from regard.viewer.scene.running import Expected, HeadLosses, Heads, Predicts, Replacement
from regard.viewer.scene.scenes import Opening, Scene, SceneLayer

Pixels = NDArray[np.uint8]

NAME = "A picture: which digit?"
FIRST = 4
"""The stored picture that is shown first."""

ABOUT = (
    "regard's example vision transformer: which handwritten digit is on a photograph? [CLS] is the class token, "
    "from which the digit is read"
)
OPENED = (
    "The class token reads the digit. In {name} it puts {share} of its weight on one patch. Click a patch to see where "
    "it looks, choose another picture, or draw a digit of your own."
)
NO_TOKENS = "this model predicts no tokens: it tells the digit of a picture"


class DigitRunner:
    """The example vision transformer as a runner of scenes, loaded when first needed."""

    predicts: Predicts = ""

    def __init__(self, model: ExampleViT | None = None):
        self._model = model

    @cached_property
    def model(self) -> ExampleViT:
        """The model."""
        return ExampleViT.load() if self._model is None else self._model

    @cached_property
    def stored(self) -> Pixels:
        """The pictures (count, side, side) that came with the model."""
        return np.rint(255 * held_out()[0]).astype(np.uint8)

    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of a run from JSON: `picture`, a stored picture's number or bytes in base64.

        Raises TypeError or ValueError for anything else.
        """
        if unknown := [name for name in given if name != "picture"]:
            raise ValueError(f"{unknown[0]} is not a setting; there is picture alone")
        if not isinstance(given.get("picture"), str):
            raise TypeError(f"picture must be a str, got {type(given.get('picture')).__name__}")
        self.pixels(given["picture"])
        return dict(given)

    def pixels(self, picture: str) -> Pixels:
        """Return the pixels (side, side) of a setting."""
        side = self.model.config.side
        if picture.isdecimal() and len(picture) <= 3:
            if int(picture) >= len(self.stored):
                raise ValueError(f"picture {picture} does not exist: {len(self.stored)} are stored")
            return np.asarray(self.stored[int(picture)])
        try:
            pixels = np.frombuffer(b64decode(picture, validate=True), np.uint8)
        except ValueError:
            pixels = np.zeros(0, np.uint8)
        if len(pixels) != side**2:
            raise ValueError(f"picture must be {side**2} bytes in base64, or the number of a stored picture")
        return pixels.reshape(side, side)

    def scenes(
        self, settings: Mapping[str, Any], progress: Callable[[Stage], object] = lambda stage: None
    ) -> tuple[Scene, ...]:
        """Run the model on a picture, and return its scene."""
        picture = settings["picture"]
        pixels, config = self.pixels(picture), self.model.config
        progress(Stage("running the model on a picture"))
        trace = self.model.run(pixels.astype(np.float32) / 255)
        grid = PatchGrid.after(config.cells, config.cells, 1, picture=np.repeat(pixels[..., None], 3, -1))
        tokens = ("[CLS] ", *(f"r{r + 1}c{c + 1} " for r in range(config.cells) for c in range(config.cells)))
        odds = trace.odds()
        likeliest = np.argsort(-odds, kind="stable").tolist()
        name = f"Which digit? (picture {picture})" if picture.isdecimal() else "Which digit? (a drawn picture)"
        scene = Scene(
            name=NAME if picture == str(FIRST) else name,
            kind="picture",
            layers=tuple(_layer(trace, number) for number in range(trace.layers)),
            query_tokens=tokens,
            key_tokens=tokens,
            ids=np.arange(len(tokens))[None],
            note=ABOUT,
            runner=self,
            predicts=self.predicts,
            settings=settings,
            opening=_opening(trace),
            grids=(grid,),
            odds=tuple((str(digit), float(odds[digit])) for digit in likeliest),
        )
        return (scene,)

    def expected(self, scene: Scene, without: Heads = {}) -> Expected:  # noqa: B006  never written
        """Raise ValueError: the model predicts no tokens."""
        raise ValueError(NO_TOKENS)

    def losses(self, scene: Scene, how: Replacement, wanted: Callable[[], bool] = lambda: True) -> HeadLosses:
        """Raise ValueError: the model predicts no tokens."""
        raise ValueError(NO_TOKENS)

    def continued(self, scene: Scene, drawn: bool) -> Mapping[str, Any]:
        """Raise ValueError: the model predicts no tokens."""
        raise ValueError(NO_TOKENS)


def digit() -> Scene:
    """Return the scene of a stored picture, as the example vision transformer reads it.

    >>> scene = digit()
    >>> scene.query_tokens[:3], scene.odds[0][0]
    (('[CLS] ', 'r1c1 ', 'r1c2 '), '2')
    """
    (scene,) = DigitRunner().scenes({"picture": str(FIRST)})
    return scene


def stored_pictures() -> bytes:
    """Return the pixels of all stored pictures, one after the other."""
    return DigitRunner().stored.tobytes()


def encoded(pixels: Pixels) -> str:
    """Return pixels as the setting `picture`."""
    return b64encode(pixels.tobytes()).decode("ascii")


def _layer(trace: PictureTrace, number: int) -> SceneLayer:
    q, k, v = trace.q[number], trace.k[number], trace.v[number]
    problem = problem_from(q, k, v, causal=trace.causal, scale=trace.scale)
    return SceneLayer(f"layers.{number}", problem, lse=trace.lse[number][None], number=number)


def _opening(trace: PictureTrace) -> Opening:
    """Return the head whose class token puts most weight on one patch."""
    rows = np.stack([trace.weights(layer, rows=slice(0, 1))[:, 0, 1:] for layer in range(trace.layers)])
    layer, head, patch = (int(x) for x in np.unravel_index(rows.argmax(), rows.shape))
    text = OPENED.format(name=f"L{layer} H{head}", share=f"{rows[layer, head, patch]:.2f}")
    return Opening(layer, head, 0, 1 + patch, text)
