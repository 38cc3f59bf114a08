"""Scenes by id: those that a page was started with, and texts that were typed since."""

import re
import threading
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from regard.runtime.forks import renewed
from regard.viewer.data.questions import Refused
from regard.viewer.scene.labels import brief
from regard.viewer.scene.running import Runner
from regard.viewer.scene.scenes import Scene
from regard.viewer.serve.store import Worker

KEPT = 128 * 2**20
"""Bytes of typed scenes that are kept: some 300 of 50 tokens, or eight of 2,000."""


class Run(NamedTuple):
    """A request to run a scene's model.

    part: the scene's place among those of a run. replaces: the id of an earlier stage of the typed text, which is
    dropped, or any name for all stages of one. keeps: the id of a scene which stays.
    """

    runner: Runner
    settings: Mapping[str, Any]
    part: int
    replaces: str | None
    keeps: str | None

    @classmethod
    def of(cls, scene: Scene, body: Any) -> "Run":
        """Return the run that a JSON body asks for, with the settings of `scene` unless it names others.

        `continue` in the body adds a token to the scene's text: "likeliest" or "drawn".

        Raises `Refused` for a scene without a model that runs here, and for a body of another form.
        """
        if scene.runner is None or scene.settings is None:
            raise Refused(422, "the text of this scene cannot be changed: no model runs here")
        if not isinstance(body, dict):
            raise Refused(422, f"settings must be a JSON object with {', '.join(scene.settings)}")
        others = {name: body[name] for name in ("replaces", "keeps", "continue") if name in body}
        more = others.pop("continue", None)
        if more not in (None, "likeliest", "drawn"):
            raise Refused(422, f"continue must be likeliest or drawn, got {brief(str(more))}")
        if not all(isinstance(other, str) for other in others.values()):
            raise Refused(422, "replaces and keeps must be the ids of scenes")
        changed = {name: x for name, x in body.items() if name not in others and name != "continue"}
        try:
            base = scene.settings if more is None else scene.runner.continued(scene, more == "drawn")
            settings = scene.runner.settings({**base, **changed})
        except (TypeError, ValueError) as error:
            raise Refused(422, str(error)) from None
        return cls(scene.runner, settings, scene.part, others.get("replaces"), others.get("keeps"))

    @property
    def key(self) -> Hashable:
        """Equal for equal runs of the same stage."""
        return id(self.runner), tuple(sorted(self.settings.items())), self.part, self.replaces

    def made(self, scene: Scene) -> bool:
        """Return True if a scene is one of this run."""
        return scene.runner is self.runner and scene.settings == self.settings


class Registry:
    """Scenes by id. Thread-safe.

    kept: bytes of typed scenes; the oldest are dropped. Scenes that were given are never dropped. start: the fragment
    of the view that a page without one opens with.
    """

    def __init__(self, scenes: Iterable[Scene], kept: int = KEPT, start: str = ""):
        self._kept, self.start = kept, start
        self._scenes: dict[str, Scene] = {}
        self._lock = renewed(self, "_lock", threading.Lock)
        self._worker = Worker(patience=None)
        self._typed = 0
        self._waiting = 0
        self._latest: dict[str | None, Run] = {}  # by the stage to replace, while runs wait
        self._leaving: dict[str, Scene] = {}  # dropped by the last run: a page may still ask about them
        self._stages: dict[str, Run] = {}  # the last run of each stage that replaced one
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
        scene = self._scenes.get(name) or self._leaving.get(name)
        if scene is None:
            typed = re.fullmatch(r"(example|model)(-\d+)?", name)
            gone = "it was given up for later ones; run it again" if typed else "see scenes"
            raise Refused(404, f"there is no scene {brief(name)}: {gone}")
        return scene

    def described(self, name: str, scene: Scene) -> dict[str, Any]:
        """Return the scene's entry in the page's list; `given` marks scenes that were not typed."""
        return scene.described(name) | {"given": name in self.given}

    @property
    def running(self) -> bool:
        """True while a text waits for its run: other work of the model then waits."""
        return self._waiting > 0

    def run(self, run: Run) -> tuple[str, Scene, list[str]]:
        """Return the scene of a run with its id, and the ids of scenes that no page asks about any more.

        Runs go one at a time, the latest first. Equal runs are one. A run is refused once a later one replaces the same
        scene, before the model runs if it still waits.

        Raises `Refused` also for a text that the model cannot read.
        """
        with self._lock:
            self._waiting += 1
            self._latest[run.replaces] = run
        try:
            name, scene = self._find(run) or self._worker.result(run.key, lambda progress: self._made(run))
        except (TypeError, ValueError) as error:
            raise Refused(422, str(error)) from None
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._latest.clear()
        return name, scene, self._trim(run)

    def _made(self, run: Run) -> tuple[str, Scene]:
        """Run the model, unless an equal run before this one did."""
        if (earlier := self._find(run)) is not None:
            return earlier
        self._refuse_replaced(run)
        scenes = run.runner.scenes(run.settings, lambda stage: self._refuse_replaced(run))
        self._refuse_replaced(run)  # it would stay in the list beside the later text
        with self._lock:
            for scene in scenes:
                self._scenes[self._new_name(scene)] = scene
        registered = self._find(run)
        assert registered is not None
        return registered

    def _refuse_replaced(self, run: Run) -> None:
        if run.replaces and self._latest.get(run.replaces) != run:
            raise Refused(409, "a later text took the place of this one")

    def _find(self, run: Run) -> tuple[str, Scene] | None:
        of = [(name, scene) for name, scene in self.scenes.items() if run.made(scene)]
        return next((named for named in of if named[1].part == run.part), of[0] if of else None)

    def _trim(self, run: Run) -> list[str]:
        """Drop the scenes of the stage that a run replaces, and the oldest typed ones beyond the limit.

        Return the ids of those that the run before dropped.
        """
        dropped = list(self._leaving)
        with self._lock:
            stage = self._stages.get(run.replaces or "")
            replaced = {
                name
                for name, scene in self._scenes.items()
                if name == run.replaces or (stage is not None and stage.made(scene))
            }
            if run.replaces:
                self._stages[run.replaces] = run
            typed = {name: scene.nbytes for name, scene in self._scenes.items() if name not in self.given}
            nbytes = sum(typed.values())
            self._leaving = {}
            leaving = [name for name in typed if name != run.keeps and not run.made(self._scenes[name])]
            for name in sorted(leaving, key=lambda name: name not in replaced):
                if name in replaced or nbytes > self._kept:
                    nbytes -= typed[name]
                    self._leaving[name] = self._scenes.pop(name)
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
