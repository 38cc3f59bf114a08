"""Scenes as files: HTML pages, pictures and arrays."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from regard.examplemodel import ExampleModel
from regard.runtime.forks import cached_property
from regard.viewer.data.summary import Choice, LookData, look_data
from regard.viewer.scene.scenes import Array, Scene, SceneLayer
from regard.viewer.serve.answers import Answers
from regard.viewer.show import drawing
from regard.viewer.show.picture import picture

Progress = Callable[[str], object]
NO_MODEL = "a page holds regard's example model alone: with_model goes with a text of that model"
ENDINGS = (".html", ".png", ".svg", ".npz")


def targets(path: Path) -> list[Path]:
    """Return the files to write for a path.

    A path without an ending stands for a page, an SVG picture and, with matplotlib, a PNG picture.

    Raises ValueError for a path that cannot be written.
    """
    if path.suffix not in ("", *ENDINGS):
        raise ValueError(
            f"cannot save {path}: the ending must be {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {path.suffix}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"cannot save {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise ValueError(f"cannot save {path}: it is a directory")
    if path.suffix == ".png" and not drawing.has_png():
        raise ValueError(f"cannot save {path}: {drawing.NEEDS}, or save .svg")
    endings = (".html", ".svg", ".png") if drawing.has_png() else (".html", ".svg")
    return [path] if path.suffix else [path.with_suffix(ending) for ending in endings]


class Still:
    """A scene with the head and token to show, for terminals and files.

    layer, head, token: as of `LookData.choose`.
    """

    def __init__(
        self,
        scene: Scene,
        layer: int | None = None,
        head: int | None = None,
        token: int | str | None = None,
        progress: Progress = lambda stage: None,
    ):
        self.scene, self.asked, self.progress = scene, (layer, head, token), progress

    @cached_property
    def data(self) -> LookData:
        """The summary of the scene."""
        return look_data(self.scene, self.progress)

    @cached_property
    def choice(self) -> Choice:
        """The head and the token. Raises ValueError if one does not exist."""
        return self.data.choose(*self.asked)

    def save(self, path: Path, with_model: bool = False) -> None:
        """Write one file of the kind that its ending names.

        with_model: embed the example model in a page.

        Raises ValueError for a scene that is too large for a page, and for `with_model` with a scene of another model.
        Raises OSError if the file cannot be written.
        """
        if with_model and self.scene.kind != "example":
            raise ValueError(NO_MODEL)
        self.progress(f"writing {path}")
        if path.suffix == ".html":
            answers = Answers([self.scene], patience=None)
            model = ExampleModel.load() if with_model else None
            path.write_bytes(answers.page(next(iter(answers.scenes)), model=model).encode())
        elif path.suffix == ".npz":
            path.write_bytes(archive(self.scene))
        else:
            path.write_bytes(picture(self.data, self.choice, "svg" if path.suffix == ".svg" else "png"))


def archive(scene: Scene) -> bytes:
    """Return a scene as an .npz file, without its rules.

    The file holds query, key, value, lse and a learned sink of every layer, as "3.query" for layer 3 of several; of
    layers that have weights alone, the weights. It also holds the tokens, and the numbers of heads if not all were
    captured.
    """
    arrays: dict[str, Any] = {}
    for layer in scene.layers:
        prefix = f"{layer.number}." if len(scene.layers) > 1 else ""
        arrays |= {f"{prefix}{name}": x for name, x in _arrays(layer).items()}
        if layer.numbers != tuple(range(layer.heads)):
            arrays[f"{prefix}heads"] = np.array(layer.numbers)
    for name, tokens in (("tokens", scene.query_tokens), ("key_tokens", scene.key_tokens)):
        if tokens and not (name == "key_tokens" and tokens == scene.query_tokens):
            arrays[name] = np.array(tokens)
    content = BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _arrays(layer: SceneLayer) -> dict[str, Array]:
    """Return what an archive holds of a layer."""
    p = layer.problem
    every = [[layer.head(h, b) for h in range(layer.heads)] for b in range(p.batch)]
    if layer.lacks:
        weights = [[head.weights(range(p.n_q), range(p.n_k)) for head in heads] for heads in every]
        return {"weights": np.array(weights, np.float32).reshape(p.shape(p.n_q, p.n_k))}
    lse = np.array([[head.lse for head in heads] for heads in every]) if layer.lse is None else layer.lse
    arrays = {"query": p.query, "key": p.key, "lse": lse.reshape(p.shape(p.n_q))}
    if p.sink is not None:
        arrays["sink"] = p.sink
    return arrays | ({"value": p.value} if layer.has_values else {})


def single(scenes: Sequence[Scene], sequence: int | str | None = None) -> Scene:
    """Return the one scene for terminals and files, by number or part of its name.

    sequence: required if there are several scenes, unless one alone is of a text over a picture or a sound.

    Raises ValueError if it is missing, unknown or ambiguous.
    """
    listed = "; ".join(f"{number} {scene.name}" for number, scene in enumerate(scenes))
    if sequence is None:
        pictured = [scene for scene in scenes if scene.pictured_text]
        if len(scenes) > 1 and len(pictured) == 1:
            return pictured[0]
        if len(scenes) > 1:
            raise ValueError(f"only the page shows several sequences; choose one by sequence= or --sequence: {listed}")
        return scenes[0]
    matching = [
        scene
        for n, scene in enumerate(scenes)
        if (n == sequence if isinstance(sequence, int) else sequence in scene.name)
    ]
    if len(matching) != 1:
        how = "is in the names of several" if matching else "does not exist"
        raise ValueError(f"sequence {sequence!r} {how}: here are {listed}")
    return matching[0]
