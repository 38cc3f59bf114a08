"""Scenes by id: those that a page was started with, and texts that were typed since."""

import re
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from regard.examplemodel import ExampleModel
from regard.runtime.forks import cached_property, renewed
from regard.viewer.data.questions import Refused
from regard.viewer.scene.labels import brief
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import Settings, example
from regard.viewer.serve.store import Worker

KEPT = 128 * 2**20
"""Bytes of typed scenes that are kept: some 300 of 50 tokens, or eight of 2,000."""


class Run(NamedTuple):
    """A request to run the example model.

    replaces: the id of an earlier stage of the typed text, which is dropped. keeps: that of a scene which stays.
    """

    settings: Settings
    replaces: str | None
    keeps: str | None

    @classmethod
    def of(cls, scene: Scene, body: Any) -> "Run":
        """Return the run that a JSON body asks for, with the settings of `scene` unless it names others.

        Raises `Refused` for a scene of another model, and for a body of another form.
        """
        if scene.settings is None:
            raise Refused(422, "the text of this scene cannot be changed: it is no run of the example model")
        if not isinstance(body, dict):
            raise Refused(422, "settings must be a JSON object with text, temperature, scaled and causal")
        others = {name: body[name] for name in ("replaces", "keeps") if name in body}
        if not all(isinstance(other, str) for other in others.values()):
            raise Refused(422, "replaces and keeps must be the ids of scenes")
        changed = {name: x for name, x in body.items() if name not in others}
        try:
            settings = Settings.of({**scene.settings, **changed})
        except (TypeError, ValueError) as error:
            raise Refused(422, str(error)) from None
        return cls(settings, others.get("replaces"), others.get("keeps"))


class Registry:
    """Scenes by id. Thread-safe.

    kept: bytes of typed scenes; the oldest are dropped. Scenes that were given are never dropped. start: the fragment
    of the view that a page without one opens with.
    """

    def __init__(self, scenes: Iterable[Scene], model: ExampleModel | None = None, kept: int = KEPT, start: str = ""):
        self._model, self._kept, self.start = model, kept, start
        self._scenes: dict[str, Scene] = {}
        self._lock = renewed(self, "_lock", threading.Lock)
        self._worker = Worker(patience=None)
        self._typed = 0
        self._waiting = 0
        self._latest: dict[str | None, Run] = {}  # by the scene to replace, while runs wait
        for scene in scenes:
            self._scenes[self._new_name(scene)] = scene
        self.given = frozenset(self._scenes)

    def close(self) -> None:
        """Start no further run."""
        self._worker.close()

    @property
    def scenes(self) -> Mapping[str, Scene]:
        """The current scenes by id."""
        with self._lock:
            return dict(self._scenes)

    def __getitem__(self, name: str) -> Scene:
        """Return a scene.

        Raises `Refused` if there is none with this id.
        """
        scene = self._scenes.get(name)
        if scene is None:
            typed = re.fullmatch(r"example(-\d+)?", name)
            gone = "it was given up for later ones; run it again" if typed else "see scenes"
            raise Refused(404, f"there is no scene {brief(name)}: {gone}")
        return scene

    def described(self, name: str, scene: Scene) -> dict[str, Any]:
        """Return the scene's entry in the page's list; `given` marks scenes that were not typed."""
        return scene.described(name) | {"given": name in self.given}

    @cached_property
    def model(self) -> ExampleModel:
        """The example model."""
        return ExampleModel.load() if self._model is None else self._model

    def run(self, run: Run) -> tuple[str, Scene, list[str]]:
        """Return the scene of a run with its id, and the ids of scenes that were dropped for it.

        Runs go one at a time, the latest first. Equal runs are one. A run is refused once a later one replaces the same
        scene, before the model runs if it still waits.

        Raises `Refused` also for a text that the model cannot read.
        """
        with self._lock:
            self._waiting += 1
            self._latest[run.replaces] = run
        try:
            name, scene = self._find(run.settings) or self._worker.result(run, lambda progress: self._made(run))
        except (TypeError, ValueError) as error:
            raise Refused(422, str(error)) from None
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._latest.clear()
        return name, scene, self._trim({name, run.keeps}, run.replaces)

    def _made(self, run: Run) -> tuple[str, Scene]:
        """Run the model, unless an equal run before this one did."""
        if (known := self._find(run.settings)) is not None:
            return known
        self._refuse_replaced(run)
        scene = example(run.settings, self.model)
        self._refuse_replaced(run)  # it would stay in the list beside the later text
        with self._lock:
            name = self._new_name(scene)
            self._scenes[name] = scene
        return name, scene

    def _refuse_replaced(self, run: Run) -> None:
        if run.replaces and self._latest[run.replaces] != run:
            raise Refused(409, "a later text took the place of this one")

    def _find(self, settings: Settings) -> tuple[str, Scene] | None:
        plain = settings.plain()
        return next(((name, scene) for name, scene in self.scenes.items() if scene.settings == plain), None)

    def _trim(self, staying: Collection[str | None], replaced: str | None) -> list[str]:
        """Drop the replaced scene, and the oldest typed ones beyond the limit."""
        dropped = []
        with self._lock:
            typed = {name: scene.nbytes for name, scene in self._scenes.items() if name not in self.given}
            nbytes = sum(typed.values())
            leaving = [name for name in typed if name not in staying]
            for name in sorted(leaving, key=lambda name: name != replaced):
                if name == replaced or nbytes > self._kept:
                    dropped.append(name)
                    nbytes -= typed[name]
                    del self._scenes[name]
        return dropped

    def _new_name(self, scene: Scene) -> str:
        base, number = scene.kind, 1
        if scene.settings is not None:
            self._typed += 1
            number = self._typed
        name = base if number == 1 else f"{base}-{number}"
        while name in self._scenes:
            number += 1
            name = f"{base}-{number}"
        return name
