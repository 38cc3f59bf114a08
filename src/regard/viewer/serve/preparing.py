"""Answers that are prepared while the page is open: it is told how far they are."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from regard.runtime.forks import renewed
from regard.runtime.progress import Stage
from regard.viewer.data.questions import Answer, Query
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.routes import Route

Prepare = Callable[[Callable[[Stage], object]], Answers]

GRACE = 2.0
"""Seconds after an error in which a page that is open may ask for it."""


class Preparing:
    """Answers that a thread prepares, and until then answers of how far it is.

    prepare: called with what it reports its stages to. `error` is what it raised.
    """

    def __init__(self, prepare: Prepare):
        self.error: Exception | None = None
        self._prepare = prepare
        self._answers: Answers | None = None
        self._stage = Stage("starting")
        self._watched = False
        self._told = renewed(self, "_told", threading.Event)

    def start(self, failed: Callable[[], object]) -> None:
        """Prepare in the background; call `failed` after an error, once a page that is open was told."""
        # A daemon: a model that runs must not delay the end of the program.
        threading.Thread(target=self._run, args=(failed,), name="regard-viewer-preparing", daemon=True).start()

    @property
    def ready(self) -> bool:
        """True once the answers are there."""
        return self._answers is not None

    def along(self, route: Route, named: Mapping[str, str], query: Query, body: Any = None) -> Answer:
        """Answer along a route as `Answers` does; until then 202 with the stage, or the error."""
        self._watched = True
        if self._answers is not None:
            return self._answers.along(route, named, query, body)
        if self.error is not None:
            self._told.set()
            return Answer(500, {"error": str(self.error)})
        stage = self._stage
        return Answer(202, {
            "stage": str(stage), "done": stage.done, "total": stage.total, "left": stage.left,
            "progress": stage.done / stage.total if stage.total else 0.0,
        })  # fmt: skip

    def close(self) -> None:
        """End the work in the background."""
        if self._answers is not None:
            self._answers.close()

    def _report(self, stage: Stage) -> None:
        self._stage = stage

    def _run(self, failed: Callable[[], object]) -> None:
        try:
            self._answers = self._prepare(self._report)
        except Exception as error:
            self.error = error
            if self._watched:
                self._told.wait(GRACE)
            failed()
