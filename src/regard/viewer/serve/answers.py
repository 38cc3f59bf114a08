"""Requests of the page and their answers, over HTTP, in notebooks and in files."""

import re
import threading
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from regard.engines import choose
from regard.examplemodel import ExampleModel, Trace
from regard.interpret.ablation import Losses
from regard.interpret.examplemodel.model import Replacement
from regard.interpret.heads import HeadStatistics, notable
from regard.runtime.forks import renewed
from regard.version import __version__
from regard.viewer.data import ablation, dots, finding, matrices, profiles, pyramid, sentences, stages
from regard.viewer.data.questions import MOST_TOKENS, Answer, Query, Question, Refused, integer, span, whole, within
from regard.viewer.data.scores import KINDS, estimated_scores, kinds_of, layer_scores
from regard.viewer.data.tour import candidates, tour
from regard.viewer.scene.labels import brief, encodable
from regard.viewer.scene.scenes import Head, Scene, SceneLayer
from regard.viewer.scene.sources import Settings, example
from regard.viewer.serve.export import module_of, page, stored
from regard.viewer.serve.store import Grower, Store, Unfinished, Worker

Array = np.ndarray[Any, np.dtype[Any]]

LIMIT = 512 * 2**20
"""Bytes of maps, tiles and profiles that are cached."""

RUNS = 8
"""Typed scenes that are kept."""

AT_ONCE = 2**29
"""Maximum query-key pairs of an lse pass that a request waits for.

Half a second of work. Larger passes run in the background.
"""

MOST_SENT = 2 * 2**20
"""Bytes of queries and keys of a head that a page may ask for."""

MOST_VALUES = 2**20
LARGEST_THUMB = 256
LOOKED_AT = 3
"""Keys listed for one token in each head."""

COLUMNS: tuple[dict[str, Any], ...] = (
    *({"name": kind.name, "label": kind.name, "help": kind.meaning, "low": 0.0, "high": 1.0} for kind in KINDS),
    {"name": "entropy", "label": "entropy", "help": "of a query's weights, in nats", "low": 0.0, "high": None},
    {
        "name": "normalized entropy", "label": "normalized entropy",
        "help": "entropy over the logarithm of how many keys the query sees: 0 one key, 1 all alike",
        "low": 0.0, "high": 1.0,
    },
)  # fmt: skip


class Answers:
    """Answers to requests about some scenes. Thread-safe.

    patience: seconds that a request waits for long work before it gets the progress; None waits for the end. limit:
    bytes of cached results.

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
        model: ExampleModel | None = None,
        patience: float | None = 0.5,
        limit: int = LIMIT,
    ):
        self.store = Store(limit)
        self._model = model
        self._scenes: OrderedDict[str, Scene] = OrderedDict()
        self._heads: dict[tuple[str, int, int, int], Head] = {}
        self._lock = renewed(self, "_lock", threading.Lock)
        self._workers = {name: Worker(patience) for name in ("maps", "scores")}
        self._grower = Grower(patience)
        self._runs = 0
        for scene in scenes:
            self._scenes[self._new_name(scene)] = scene
        self._given = frozenset(self._scenes)

    def close(self) -> None:
        """End the work in the background."""
        closing: list[Worker | Grower] = [*self._workers.values(), self._grower]
        for worker in closing:
            worker.close()

    def rest(self) -> None:
        """Drop cached results and stop growing levels, while no one looks."""
        self._grower.close()
        self.store.clear()

    @property
    def scenes(self) -> Mapping[str, Scene]:
        """The current scenes by id."""
        return dict(self._scenes)

    def get(self, path: str, query: Query | None = None) -> Answer:
        """Answer GET `path` (after `api/`) with these parameters."""
        return self._answer("GET", path, query or {}, None)

    def post(self, path: str, body: Any) -> Answer:
        """Answer POST `path` with a JSON body."""
        return self._answer("POST", path, {}, body)

    def _answer(self, method: str, path: str, query: Query, body: Any) -> Answer:
        for verb, pattern, answer in ROUTES:
            found = pattern.fullmatch(path)
            if found and verb == method:
                try:
                    named = dict(found.groupdict())
                    return self._posted(answer, named, body) if verb == "POST" else self._fitting(answer, named, query)
                except Unfinished as work:
                    return Answer(202, {"progress": round(work.done, 3)})
                except Refused as refused:
                    return Answer(refused.status, {"error": str(refused)})
        return Answer(404, {"error": f"there is no {brief(path)}"})

    def _posted(self, answer: Callable[..., Answer], named: dict[str, Any], body: Any) -> Answer:
        """Return the answer of a route with a JSON body."""
        return answer(self, self._scene(named["scene"]), body)

    def _fitting(self, answer: Callable[..., Answer], named: dict[str, Any], query: Query) -> Answer:
        """Return the answer of a route about a scene, or a head in a batch element."""
        if "scene" not in named:
            return answer(self)
        scene = self._scene(named.pop("scene"))
        named = {name: whole(number, NAMES.get(name, name)) for name, number in named.items()}
        at = Question(scene, integer(query, "b", 0, 0, scene[1].batch - 1, "batch element"), query)
        if "layer" in named:
            at = replace(at, layer=within(named.pop("layer"), len(scene[1].layers), "layer"))
            if "head" in named:
                at = replace(at, head=within(named.pop("head"), at.of.heads, "head"))
        return answer(self, at, **named)

    def _scene(self, name: str) -> tuple[str, Scene]:
        scene = self._scenes.get(name)
        if scene is None:
            gone = (
                "it was given up for later ones; run it again"
                if re.fullmatch(r"example(-\d+)?", name)
                else "see scenes"
            )
            raise Refused(404, f"there is no scene {brief(name)}: {gone}")
        return name, scene

    def _new_name(self, scene: Scene) -> str:
        base, number = scene.kind, 1
        if scene.settings is not None:
            self._runs += 1
            number = self._runs
        name = base if number == 1 else f"{base}-{number}"
        while name in self._scenes:
            number += 1
            name = f"{base}-{number}"
        return name

    # Cached results

    def head(self, name: str, layer: int, head: int, b: int = 0) -> Head:
        """Return the cached head of a scene."""
        with self._lock:
            key = (name, layer, head, b)
            if key not in self._heads:
                self._heads[key] = self._scene(name)[1].layers[layer].head(head, b)
            return self._heads[key]

    def _ready(self, at: Question, rows: range) -> Head:
        """Return a head; a long pass for the lse of these queries runs in the background.

        Raises `Unfinished` while it runs.
        """
        head = self.head(*at.key)
        if len(rows) * head.n_k > AT_ONCE and not head.knows(rows):
            key = (*at.key, "lse", rows.start, rows.stop)
            self._workers["maps"].result(key, lambda progress: head.lse_of(rows, progress))
        return head

    def _cached(self, worker: str, key: tuple[Any, ...], make: Callable[[Any], Any], size: Callable[[Any], int]) -> Any:
        """Return the cached result, or compute `make(progress)` in the background."""
        found = self.store.get(key)
        if found is None:
            found = self._workers[worker].result(key, make)
            self.store.put(key, found, size(found))
        return found

    def coarse(self, at: Question, wait: bool = True) -> pyramid.Coarse:
        """Return the cached levels of a head so far; each request lets them grow."""
        head, key = self.head(*at.key), (*at.key, "coarse")
        with self._lock:
            known: pyramid.Coarse | None = self.store.get(key)
            if known is None:
                known = pyramid.Coarse(head)
                self.store.put(key, known, known.nbytes + 4096)
        self._grower.ask(known, wait)
        return known

    def scores(self, at: Question, layer: int) -> tuple[HeadStatistics, ...]:
        """Return the scores of a layer's heads."""
        make = partial(layer_scores, at.scene, layer, at.b)
        made: tuple[HeadStatistics, ...] = self._cached(
            "scores", (at.name, layer, at.b, "scores"), make, lambda x: 1024 * len(x)
        )
        return made

    # Answers

    def _scenes_answer(self) -> Answer:
        with self._lock:
            scenes = dict(self._scenes)
        listed = [self._described(name, scene) for name, scene in scenes.items()]
        # Asks only for an engine that serves a scene: the states of all engines would load their dependencies.
        engine = next((choose(scene.layers[0].problem, None).NAME for scene in scenes.values()), "")
        return Answer(200, {"title": "regard", "version": __version__, "engine": engine, "scenes": listed})

    def _described(self, name: str, scene: Scene) -> dict[str, Any]:
        """Return the scene's entry in the page's list.

        `given` marks scenes that were not typed; they are never dropped.
        """
        return scene.described(name) | {"given": name in self._given}

    def _run(self, scene: tuple[str, Scene], body: Any) -> Answer:
        """Run the example model with new settings, and return the scene.

        body: the settings, and perhaps ids of scenes. `replaces` is an earlier stage of the typed text, and is dropped.
        `keeps` is compared with the new scene, and stays.
        """
        if scene[1].settings is None:
            raise Refused(422, "the text of this scene cannot be changed: it is no run of the example model")
        if not isinstance(body, dict):
            raise Refused(422, "settings must be a JSON object with text, temperature, scaled and causal")
        others = {name: body[name] for name in ("replaces", "keeps") if name in body}
        if not all(isinstance(other, str) for other in others.values()):
            raise Refused(422, "replaces and keeps must be the ids of scenes")
        replaced, kept = others.get("replaces"), others.get("keeps")
        try:
            settings = Settings.of({**scene[1].settings, **{k: x for k, x in body.items() if k not in others}})
            for name, known in self.scenes.items():
                if known.settings == settings.plain():
                    self._forget([replaced] if replaced != name else [])
                    return Answer(200, {"scene": self._described(name, known)})
            made = example(settings, self._example_model())
        except (TypeError, ValueError) as error:
            raise Refused(422, str(error)) from None
        with self._lock:
            name = self._new_name(made)
            self._scenes[name] = made
        self._forget([replaced])
        typed = [key for key in self.scenes if key not in self._given and key not in (kept, name)]
        self._forget(typed[: max(0, len(typed) + 1 + (kept not in (None, *self._given)) - RUNS)])
        return Answer(200, {"scene": self._described(name, made)})

    def _forget(self, names: Iterable[str | None]) -> None:
        """Drop typed scenes, and everything cached for them."""
        with self._lock:
            for name in names:
                if name is None or name not in self._scenes or name in self._given:
                    continue
                del self._scenes[name]
                self.store.forget(name)
                self._heads = {key: head for key, head in self._heads.items() if key[0] != name}

    def _page(self, at: Question) -> Answer:
        """Return the scene as one HTML file, for the page to save."""
        html = self._cached("scores", (at.name, "page"), partial(_exported, at.scene), len)
        return Answer(200, {"html": html})

    def _example_model(self) -> ExampleModel:
        if self._model is None:
            self._model = ExampleModel.load()
        return self._model

    def _tokens(self, at: Question) -> Answer:
        axis = at.query.get("axis", "key")
        if axis not in ("query", "key"):
            raise Refused(422, f"axis must be query or key, got {brief(axis)}")
        tokens = at.scene.query_tokens if axis == "query" else at.scene.key_tokens
        start = integer(at.query, "start", 0, 0, len(tokens))
        stop = min(integer(at.query, "stop", start + MOST_TOKENS, start), start + MOST_TOKENS, len(tokens))
        return Answer(200, {"start": start, "total": len(tokens), "tokens": [encodable(x) for x in tokens[start:stop]]})

    def _head_scores(self, at: Question) -> Answer:
        rows: list[dict[str, Any]] = []
        count = len(at.scene.layers)
        for layer in range(count):
            try:
                found = self.scores(at, layer)
            except Unfinished as work:
                raise Unfinished((layer + work.done) / count) from None
            for x in found:
                scores = x.scores | {"entropy": x.entropy, "normalized entropy": x.normalized_entropy}
                rows.append({
                    "layer": layer, "head": x.head, "kv_head": x.kv_head, "kind": notable(x.scores),
                    "kinds": [
                        {"kind": y.kind.name, "name": y.called, "score": y.score, "tentative": y.tentative}
                        for y in kinds_of(x)
                    ],
                    "scores": {name: finite(score) for name, score in scores.items()},
                })  # fmt: skip
        highest = max((row["scores"]["entropy"] or 0.0 for row in rows), default=0.0)
        columns = [{**column, "high": column["high"] or highest or 1.0} for column in COLUMNS]
        return Answer(200, {"columns": columns, "rows": rows})

    def _words(self) -> Answer:
        return Answer(200, sentences.words())

    def _every_head(self, at: Question) -> tuple[list[tuple[HeadStatistics, ...]], int]:
        """Return estimated scores of all heads, and the number of queries sampled."""
        rows = finding.sample_rows(at.scene)
        count = len(at.scene.layers)
        made = self._cached(
            "scores", (at.name, at.b, "estimated"),
            lambda progress: [estimated_scores(at.scene, layer, rows, at.b) for layer in range(count)],
            lambda x: 1024 * sum(map(len, x)),
        )  # fmt: skip
        return made, rows

    def _finding(self, at: Question) -> Answer:
        heads, rows = self._every_head(at)
        picked = finding.pick(candidates([head for layer in heads for head in layer]))
        of = at.scene.layers[picked.layer]
        name = f"L{of.number} H{of.numbers[picked.head]}"
        why = finding.why(picked, name, cross=of.cross, tokens=bool(at.scene.key_tokens))
        how = "" if rows >= of.problem.n_q else sentences.estimated(rows, of.problem.n_q)
        return Answer(200, {"layer": picked.layer, "head": picked.head, "why": why, "how": how})

    def _tour(self, at: Question) -> Answer:
        steps = tour(at.scene, at.name, self._every_head(at)[0], at.b)
        return Answer(200, {
            "steps": [
                {"title": x.title, "text": x.text, "state": dict(x.state), "settings": x.settings and dict(x.settings)}
                for x in steps
            ]
        })  # fmt: skip

    def _token(self, at: Question, i: int) -> Answer:
        """Return the keys with the largest weights of one query, in every head."""
        rows: list[dict[str, Any]] = []
        for layer, of in enumerate(at.scene.layers):
            within(i, of.problem.n_q, "query")
            for head in range(of.heads):
                row = np.nan_to_num(self.head(at.name, layer, head, at.b).weights_of(np.array([i]))[0])
                few = np.argsort(-row, kind="stable")[:LOOKED_AT].tolist()
                rows.append({
                    "layer": layer, "head": head, "keys": [j for j in few if row[j] > 0],
                    "weights": [float(row[j]) for j in few if row[j] > 0],
                })  # fmt: skip
        return Answer(200, {"rows": rows})

    def _dots(self, at: Question) -> Answer:
        p = at.of.problem
        rows, cols = span(at.query, "rows", p.n_q), span(at.query, "cols", p.n_k)
        if len(rows) * len(cols) > MOST_VALUES:
            raise Refused(422, f"at most {MOST_VALUES} values at once, got {len(rows)} × {len(cols)}")
        return Answer(200, dots.dots(self.head(*at.key), rows, cols))

    def _variance(self, at: Question) -> Answer:
        found = dots.variance(self.head(*at.key))
        return Answer(200, found | {"variance": [finite(x) for x in found["variance"]]})

    def _thumbs(self, at: Question) -> Answer:
        size = integer(at.query, "size", 64, 1, LARGEST_THUMB)
        kind = at.kind
        made = self._cached(
            "maps",
            (at.name, at.layer, at.b, "thumbs", size, kind, self._known(at)),
            lambda progress: self._thumbnails(at, size, progress),
            lambda x: x[0].nbytes,
        )
        return Answer(200, made[0], exact=made[1])

    def _known(self, at: Question) -> int:
        """Return the number of a layer's heads with complete cached levels."""
        keys = (replace(at, head=head).key for head in range(at.of.heads))
        return sum(known is not None and known.whole for known in (self.store.get((*key, "coarse")) for key in keys))

    def _thumbnails(self, at: Question, size: int, progress: Callable[[float], object]) -> tuple[Array, bool]:
        maps, exact = [], True
        for number in range(at.of.heads):
            progress(number / at.of.heads)
            key = replace(at, head=number).key
            one, whole = pyramid.thumbnail(self.head(*key), size, at.kind, self.store.get((*key, "coarse")))
            maps.append(one)
            exact = exact and whole
        return np.stack(maps), exact

    def _map(self, at: Question) -> Answer:
        levels = pyramid.Levels(at.of.problem.n_q, at.of.problem.n_k)
        known = self.coarse(at)
        fine: list[float | None] = [None] * (levels.finest - levels.kept - 1)
        mass = [*known.highest, *fine, known.top]
        return Answer(200, {
            "n_q": levels.n_q, "n_k": levels.n_k, "tile": pyramid.TILE, "levels": levels.finest + 1,
            "max_level": levels.finest, "maximum": {"mass": mass, "max": [known.top] * (levels.finest + 1)},
            "done": round(known.done, 3),
        }, exact=known.whole)  # fmt: skip

    def _tile(self, at: Question, level: int, x: int, y: int) -> Answer:
        kind = at.kind
        key = (*at.key, "tile", level, x, y, kind)
        tile = self.store.get(key)
        if tile is not None:
            return Answer(200, tile)
        p = at.of.problem
        levels = pyramid.Levels(p.n_q, p.n_k)
        try:
            rows, cols = levels.pixels(level, x, y)
        except IndexError as error:
            raise Refused(404, str(error)) from None
        queries = levels.covered(level, rows, p.n_q)
        known = None
        if level <= levels.kept:
            known = self.coarse(at, wait=False)
            known.prefer(queries)
        head = self.head(*at.key) if known else self._ready(at, queries)
        tile = pyramid.tile(head, known, level, rows, cols, kind)
        exact = known is None or not np.isposinf(tile).any()
        if exact:
            self.store.put(key, tile, tile.nbytes)
        return Answer(200, tile, exact)

    def _values(self, at: Question) -> Answer:
        p = at.of.problem
        rows, cols = span(at.query, "rows", p.n_q), span(at.query, "cols", p.n_k)
        if len(rows) * len(cols) > MOST_VALUES:
            raise Refused(422, f"at most {MOST_VALUES} values at once, got {len(rows)} × {len(cols)}")
        return Answer(200, self._ready(at, rows).seen(rows, cols))

    def _row(self, at: Question, i: int) -> Answer:
        row = range(i, within(i, at.of.problem.n_q, "query") + 1)
        return Answer(200, self._ready(at, row).seen(row, range(at.of.problem.n_k))[0])

    def _column(self, at: Question, j: int) -> Answer:
        rows, col = range(at.of.problem.n_q), range(j, within(j, at.of.problem.n_k, "key") + 1)
        return Answer(200, self._ready(at, rows).seen(rows, col)[:, 0])

    def _stored(self, at: Question) -> Answer:
        """Answer the arrays of a head and the module of its rules.

        A page computes the head's weights from them.
        Null where a page cannot, or where that is much to send.
        """
        p = at.of.problem
        if 4 * (p.d * (p.n_q + p.n_k) + p.n_q) > MOST_SENT:
            return Answer(200, {"head": None, "code": None})
        head = self._ready(at, range(p.n_q))
        key = (*at.key, "stored")
        return Answer(200, self._workers["maps"].result(key, lambda progress: _computable(at.of, head)))

    def _profiles(self, at: Question) -> Answer:
        head = self.head(*at.key)
        made = self._cached(
            "maps", (*at.key, "profiles"), lambda progress: profiles.profiles(head, progress),
            lambda x: sum(profile.values.nbytes for profile in x.values()),
        )  # fmt: skip
        return Answer(200, {
            name: {
                "start": profile.start, "step": profile.step, "label": profiles.LABELS[name],
                "values": [finite(x) for x in profile.values.tolist()],
                **{
                    kind: x.tolist() for kind, x in (("edges", profile.edges), ("pairs", profile.pairs))
                    if x is not None
                },
            }
            for name, profile in made.items()
        })  # fmt: skip

    def _step(self, at: Question, i: int, j: int) -> Answer:
        p = at.of.problem
        within(i, p.n_q, "query")
        within(j, p.n_k, "key")
        found = []
        for stage in stages.stages(at.of, at.head, i, j, at.b):
            plain = {name: getattr(stage, name) for name in ("name", "formula", "text")}
            if stage.values is None:
                found.append(plain | {"value": None if stage.value is None else finite(stage.value)})
            else:
                labels = [str(n) for n in range(len(stage.values))]
                found.append(plain | {"values": [finite(x) for x in stage.values.tolist()], "labels": labels})
        return Answer(200, {"stages": found})

    def _matrices(self, at: Question) -> Answer:
        try:
            found = matrices.matrices(at.of, at.head, at.b)
        except ValueError as error:
            raise Refused(422, str(error)) from None
        return Answer(200, {"matrices": [
            {name: getattr(x, name) for name in ("name", "symbol", "tensor", "formula", "rotary")}
            | {"values": [[finite(float(f"{y:.6g}")) for y in row] for row in x.values.tolist()]}
            for x in found
        ]})  # fmt: skip

    def _scores(self, at: Question, i: int) -> Answer:
        return Answer(200, matrices.row_scores(at.of, at.head, within(i, at.of.problem.n_q, "query"), at.b))

    def _ablations(self, at: Question) -> Answer:
        how = self._replacement(at)
        made: Losses = self._cached(
            "scores", (at.name, "ablations", how),
            lambda progress: ablation.every_head(self._example_model(), at.scene, how, progress),
            lambda x: 64 * len(x.without),
        )  # fmt: skip
        rows = [{"layer": layer, "head": head, "loss": loss} for (layer, head), loss in made.without.items()]
        return Answer(200, {"loss": made.whole, "rows": rows})

    def _ablation(self, at: Question) -> Answer:
        how = self._replacement(at)
        before, after = self._without(at, {}), self._without(at, {(at.layer, at.head): how})
        i = integer(at.query, "i", len(before.ids) - 1, 0, len(before.ids) - 1, "token")
        return Answer(200, {
            "i": i, "odds": [vars(odd) for odd in ablation.odds(before, after, i)],
            "losses": {name: trace.losses().tolist() for name, trace in (("before", before), ("after", after))},
        })  # fmt: skip

    def _replacement(self, at: Question) -> Replacement:
        """Return what replaces an ablated head: "zero" or "mean".

        Raises `Refused` for scenes of other models than the example model.
        """
        if at.scene.settings is None or at.scene.ids is None:
            raise Refused(422, "heads can be switched off in models that run here, as regard's example model does")
        how = at.query.get("how", "zero")
        if how not in ("zero", "mean"):
            raise Refused(422, f"how must be zero or mean, got {how}")
        return how  # type: ignore[return-value]

    def _without(self, at: Question, heads: Mapping[tuple[int, int], Replacement]) -> Trace:
        """Return the model's run on a scene's text without some heads."""
        made: Trace = self._cached(
            "scores", (at.name, "without", *heads.items()),
            lambda progress: ablation.run(self._example_model(), at.scene, heads),
            lambda trace: trace.logits.nbytes
            + sum(x.nbytes for x in (*trace.q, *trace.k, *trace.v, *trace.x, *trace.out)),
        )  # fmt: skip
        return made

    def _norms(self, at: Question) -> Answer:
        known = at.of.has_values
        return Answer(200, ablation.value_norms(self.head(*at.key)) if known else np.zeros(0, np.float32))


def _computable(layer: SceneLayer, head: Head) -> dict[str, Any]:
    """Return the arrays of a head and its module in base64, or None for each."""
    code = module_of(layer)
    known = stored(layer, head, np.float32) if layer.plain or code is not None else None
    return {"head": known, "code": None if code is None else b64encode(code).decode("ascii")}


def _exported(scene: Scene, progress: Callable[[float], object]) -> str:
    """Return a scene as one HTML file.

    Raises `Refused` for a scene that is too large.
    """
    answers = Answers([scene], patience=None)
    try:
        return page(answers, next(iter(answers.scenes)))
    except ValueError as error:
        raise Refused(422, str(error)) from None
    finally:
        answers.close()


NAMES = {"i": "query", "j": "key"}
"""Names in errors for the numbers of a path, where they differ."""

_HEAD = r"(?P<scene>[a-z0-9-]+)/{}/(?P<layer>[0-9]+)/(?P<head>[0-9]+)"
ROUTES: tuple[tuple[str, re.Pattern[str], Callable[..., Answer]], ...] = tuple(
    (verb, re.compile(pattern), answer)
    for verb, pattern, answer in (
        ("GET", "scenes", Answers._scenes_answer),
        ("POST", r"(?P<scene>[a-z0-9-]+)/run", Answers._run),
        ("GET", r"(?P<scene>[a-z0-9-]+)/tokens", Answers._tokens),
        ("GET", "words", Answers._words),
        ("GET", r"(?P<scene>[a-z0-9-]+)/page", Answers._page),
        ("GET", r"(?P<scene>[a-z0-9-]+)/heads", Answers._head_scores),
        ("GET", r"(?P<scene>[a-z0-9-]+)/finding", Answers._finding),
        ("GET", r"(?P<scene>[a-z0-9-]+)/tour", Answers._tour),
        ("GET", r"(?P<scene>[a-z0-9-]+)/token/(?P<i>[0-9]+)", Answers._token),
        ("GET", r"(?P<scene>[a-z0-9-]+)/thumbs/(?P<layer>[0-9]+)", Answers._thumbs),
        ("GET", r"(?P<scene>[a-z0-9-]+)/ablations", Answers._ablations),
        ("GET", _HEAD.format("ablation"), Answers._ablation),
        ("GET", _HEAD.format("norms"), Answers._norms),
        ("GET", _HEAD.format("matrices"), Answers._matrices),
        ("GET", _HEAD.format("scores") + r"/(?P<i>[0-9]+)", Answers._scores),
        ("GET", _HEAD.format("stored"), Answers._stored),
        ("GET", _HEAD.format("map"), Answers._map),
        ("GET", _HEAD.format("tile") + r"/(?P<level>[0-9]+)/(?P<x>[0-9]+)/(?P<y>[0-9]+)", Answers._tile),
        ("GET", _HEAD.format("values"), Answers._values),
        ("GET", _HEAD.format("row") + r"/(?P<i>[0-9]+)", Answers._row),
        ("GET", _HEAD.format("column") + r"/(?P<j>[0-9]+)", Answers._column),
        ("GET", _HEAD.format("dots"), Answers._dots),
        ("GET", _HEAD.format("variance"), Answers._variance),
        ("GET", _HEAD.format("profiles"), Answers._profiles),
        ("GET", _HEAD.format("step") + r"/(?P<i>[0-9]+)/(?P<j>[0-9]+)", Answers._step),
    )
)


def finite(x: float) -> float | None:
    """Return the number, or None for infinities and NaN, which JSON lacks."""
    return x if np.isfinite(x) else None
