"""Requests of the page and their answers, over HTTP, in notebooks and in files."""

from collections.abc import Iterable, Mapping
from typing import Any

from regard.examplemodel import ExampleModel
from regard.viewer.data.questions import Answer, Query, Question, Refused
from regard.viewer.scene.labels import brief
from regard.viewer.scene.scenes import Array, Head, Scene, Unknown
from regard.viewer.serve import export, views
from regard.viewer.serve.codecs import split_query
from regard.viewer.serve.contents import LARGEST, Contents
from regard.viewer.serve.registry import KEPT, Registry
from regard.viewer.serve.results import LIMIT, Results
from regard.viewer.serve.routes import Route, answer, find
from regard.viewer.serve.store import Unfinished
from regard.viewer.serve.wordrows import WordRows


class Answers:
    """Answers to requests about some scenes. Thread-safe.

    patience: seconds that a request waits for long work before it gets the progress; None waits for the end. limit:
    bytes of cached results. kept: bytes of typed scenes. start: the fragment of the view to open with.

    >>> from regard.viewer.scene.sources import example, Settings
    >>> answers = Answers([example(Settings("to be"))])
    >>> answers.get("example/row/0/1/3").content.round(3)
    array([0.539, 0.141, 0.119, 0.2  ,   nan,   nan], dtype=float32)
    >>> answers.get("example/row/0/1/30").content
    {'error': 'query 30 does not exist: there are 6'}
    """

    def __init__(
        self,
        scenes: Iterable[Scene],
        *,
        patience: float | None = 0.5,
        limit: int = LIMIT,
        kept: int = KEPT,
        start: str = "",
    ):
        self.registry = Registry(scenes, kept, start)
        self.results = Results(self.registry, patience, limit)

    def close(self) -> None:
        """End the work in the background."""
        self.results.close()

    def rest(self) -> None:
        """Drop cached results and stop growing levels, while no one looks."""
        self.results.rest()

    @property
    def scenes(self) -> Mapping[str, Scene]:
        """The current scenes by id."""
        return self.registry.scenes

    def get(self, path: str, query: Query | None = None) -> Answer:
        """Answer GET `path` (after `api/`) with these parameters."""
        return self.ask("GET", path, query or {})

    def post(self, path: str, body: Any) -> Answer:
        """Answer POST `path` with a JSON body."""
        return self.ask("POST", path, {}, body)

    def ask(self, method: str, path: str, query: Query, body: Any = None) -> Answer:
        """Answer a path by the route that has its form."""
        route = find(ROUTES, method, path)
        return missing(path) if route is None else self.along(*route, query, body)

    def along(self, route: Route, named: Mapping[str, str], query: Query, body: Any = None) -> Answer:
        """Answer along a route, with the texts of the names in its path."""
        try:
            return answer(route, self.results, named, query, body)
        except Unfinished as work:
            return Answer(202, {"progress": round(work.done, 3)})
        except Refused as refused:
            return Answer(refused.status, {"error": str(refused)})
        except Unknown as unknown:
            return Answer(422, {"error": str(unknown)})

    def head(self, name: str, layer: int, head: int, b: int = 0) -> Head:
        """Return the cached head of a scene."""
        return self.results.head(Question((name, self.registry[name]), b, {}, layer, head))

    def page(self, name: str, limit: int = LARGEST, model: ExampleModel | None = None) -> str:
        """Return the scene with this id as one HTML file: its first batch element.

        model: the one that made the scene; the file holds it, and reads texts that are typed.

        Of a scene with pictures that is larger than `limit` bytes, the file holds the rows of words. Raises ValueError,
        before any work, if these are more too.
        """
        contents = Contents.of(name, self.registry[name], limit, editable=model is not None)
        scenes = self.get("scenes").content
        assert isinstance(scenes, dict)
        answers = {path: self.get(*split_query(path)) for path in contents.paths}
        heads = {at: self.head(name, *at) for at in contents.computed}
        rows = None if contents.rows is None else self._rows(name, contents.rows)
        return export.page(contents, scenes, answers, heads, model, rows)

    def _rows(self, name: str, rows: WordRows) -> dict[str, Any]:
        """Return the rows of words that a file holds."""
        scene = self.registry[name]

        def weights(layer: int, queries: range) -> Array:
            at = Question((name, scene), 0, {}, layer)
            return self.results.weights(at, queries, range(at.of.problem.n_k))

        return rows.stored(weights)


def missing(path: str) -> Answer:
    """Answer a path that no route has."""
    return Answer(404, {"error": f"there is no {brief(path)}"})


def _page(results: Results, at: Question) -> Answer:
    """Answer the scene as one HTML file, for the page to save."""

    def html(progress: Any) -> str:
        alone = Answers([at.scene], patience=None)
        try:
            return alone.page(next(iter(alone.scenes)))
        except ValueError as error:
            raise Refused(422, str(error)) from None
        finally:
            alone.close()

    return Answer(200, {"html": results.cached("scores", (at.name, "page"), html, len)})


ROUTES = (
    Route("GET", "scenes", views.all_scenes),
    Route("GET", "words", views.words),
    Route("POST", "{scene}/run", views.run),
    Route("GET", "{scene}/page", _page),
    Route("GET", "{scene}/tokens", views.tokens),
    Route("GET", "{scene}/heads", views.heads),
    Route("GET", "{scene}/finding", views.first_finding),
    Route("GET", "{scene}/tour", views.steps_of_tour),
    Route("GET", "{scene}/token/{i}", views.token),
    Route("GET", "{scene}/earlier/{layer}/{head}/{i}/{j}", views.earlier),
    Route("GET", "{scene}/claims/{layer}", views.claims),
    Route("GET", "{scene}/thumbs/{layer}", views.thumbs),
    Route("GET", "{scene}/ablations", views.ablations),
    Route("GET", "{scene}/ablation/{layer}/{head}", views.one_ablation),
    Route("GET", "{scene}/expected", views.expected),
    Route("GET", "{scene}/picture/{picture}", views.picture),
    Route("GET", "{scene}/heat", views.heat),
    Route("GET", "{scene}/rollout", views.rollout),
    Route("GET", "{scene}/norms/{layer}/{head}", views.norms),
    Route("GET", "{scene}/sinks/{layer}/{head}", views.sinks),
    Route("GET", "{scene}/matrices/{layer}/{head}", views.all_matrices),
    Route("GET", "{scene}/scores/{layer}/{head}/{i}", views.row_scores),
    Route("GET", "{scene}/stored/{layer}/{head}", views.stored),
    Route("GET", "{scene}/map/{layer}/{head}", views.whole_map),
    Route("GET", "{scene}/tile/{layer}/{head}/{level}/{x}/{y}", views.tile),
    Route("GET", "{scene}/values/{layer}/{head}", views.values),
    Route("GET", "{scene}/row/{layer}/{head}/{i}", views.row),
    Route("GET", "{scene}/column/{layer}/{head}/{j}", views.column),
    Route("GET", "{scene}/dots/{layer}/{head}", views.products),
    Route("GET", "{scene}/variance/{layer}/{head}", views.variance),
    Route("GET", "{scene}/profiles/{layer}/{head}", views.all_profiles),
    Route("GET", "{scene}/step/{layer}/{head}/{i}/{j}", views.step),
)
"""Every path that the page asks for."""
