"""A user's own PyTorch model as a runner of scenes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from regard.loaders import loaders
from regard.ops.normalization import problem_from
from regard.viewer.scene.running import Expected, HeadLosses, Heads, Predicts, Progress, Replacement, Settings
from regard.viewer.scene.scenes import Scene, SceneLayer
from regard.viewer.scene.sources import captured

SENTENCE = "The cat sat on the mat because it was tired."
"""The text that a model reads first unless one is given."""

NOTHING_EXPECTED = (
    "this model predicts no tokens: it was loaded without its head for words, as AutoModelForCausalLM and "
    "AutoModelForMaskedLM load one"
)

TOO_LONG = "this text is too long to mask each of its tokens"


class TextRunner:
    """A PyTorch model with its tokenizer that reads typed texts."""

    def __init__(self, network: Any, tokenizer: Any):
        self.model = loaders["torch.running"]().TextModel(network, tokenizer)
        self.predicts: Predicts = self.model.predicts

    def settings(self, given: Settings) -> Settings:
        """Return the settings of a run: its text alone."""
        for name in given:
            if name != "text":
                raise ValueError(f"{name} is not a setting of this model; the only one is text")
        if not isinstance(given.get("text"), str):
            raise TypeError(f"text must be a str, got {given.get('text')!r:.60}")
        return {"text": given["text"]}

    def scenes(self, settings: Settings, progress: Progress = lambda stage: None) -> tuple[Scene, ...]:
        """Run the model on a text, and return its scenes."""
        run = self.model.read(settings["text"], progress)
        scenes = [self._scene(scene, run, settings) for scene in captured(run.capture, kind="model")]
        return tuple(replace(scene, part=part) for part, scene in enumerate(scenes))

    def _scene(self, scene: Scene, run: Any, settings: Settings) -> Scene:
        """Add values to the layers of a captured scene, and what comes next to the scene."""
        of = {layer.name: layer for layer in run.capture.layers}
        layers = tuple(_with_values(layer, run.values.get(layer.name), of[layer.name]) for layer in scene.layers)
        following: tuple[tuple[str, float], ...] = ()
        if self.predicts == "next" and not self.model.answers:
            expected = self._expected(run, run.logits)
            following = expected.likeliest(expected.last)
        predicts: Predicts = self.predicts if run.batch is not None and self._answers(scene, run) else ""
        return replace(
            scene, layers=layers, runner=self, run=run, settings=settings, predicts=predicts, following=following
        )

    def _answers(self, scene: Scene, run: Any) -> bool:
        """Return True if a scene's queries are the tokens that the model predicts from: not those of an encoder."""
        decoded = run.batch.given.get("decoder_input_ids")
        if decoded is None or scene.layers[0].cross:
            return True
        return scene.ids is not None and np.array_equal(decoded.cpu().numpy(), scene.ids)

    def expected(self, scene: Scene, without: Heads = {}) -> Expected:  # noqa: B006  never written
        """Return what the model expects of the scene's text, without heads of one layer."""
        run = self._run(scene)
        if not without:
            return self._expected(run, self.model.logits(run))
        ((layer, how),) = {(layer, how) for (layer, _), how in without.items()}
        of = scene.layers[layer]
        heads = [of.numbers[head] for _, head in without]
        return self._expected(run, self.model.without(run, of.name, heads, how))

    def losses(self, scene: Scene, how: Replacement, wanted: Callable[[], bool] = lambda: True) -> HeadLosses:
        """Return the losses of the scene's text without each of its heads, none computed yet."""
        run = self._run(scene)
        names = [layer.name for layer in scene.layers]
        losses: HeadLosses = loaders["torch.running"]().LossesWithout(self.model, run, names, how, wanted)
        return losses

    def continued(self, scene: Scene, drawn: bool) -> Settings:
        """Return the settings of a run on the scene's text and one more token."""
        run = self._run(scene)
        if self.predicts != "next" or self.model.answers:
            raise ValueError("only a decoder continues a text: this model reads the text as a whole")
        assert scene.settings is not None
        return {"text": scene.settings["text"] + self.model.continuation(run, drawn)}

    def _run(self, scene: Scene) -> Any:
        if scene.run.batch is None:
            raise ValueError(NOTHING_EXPECTED if not self.predicts else TOO_LONG)
        return scene.run

    def _expected(self, run: Any, logits: np.ndarray[Any, Any]) -> Expected:
        return Expected(logits, run.batch.targets.numpy(), self.model.label, int(run.batch.positions[0]))


def _with_values(layer: SceneLayer, values: Any, of: Any) -> SceneLayer:
    """Return a layer with its values, if they are known."""
    if values is None:
        return layer
    operands: Mapping[str, Any] = of.all_heads
    return replace(layer, problem=problem_from(value=values, **operands), no_values="")
