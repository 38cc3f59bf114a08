"""The answers of the page's routes, each from the results about a scene."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.engines import choose
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.heads import HeadStatistics
from regard.version import __version__
from regard.viewer.data import (
    ablation,
    dots,
    finding,
    heats,
    matrices,
    paths,
    profiles,
    pyramid,
    scores,
    sentences,
    stages,
)
from regard.viewer.data.questions import MOST_TOKENS, Answer, Question, Refused, integer, span, within
from regard.viewer.data.tour import candidates, tour
from regard.viewer.scene.labels import brief, encodable
from regard.viewer.scene.running import Expected, Replacement, Runner
from regard.viewer.scene.scenes import Array, Head, Unknown
from regard.viewer.serve import kernels
from regard.viewer.serve.registry import Run
from regard.viewer.serve.results import Results
from regard.viewer.serve.store import Unfinished
from regard.viewer.show.drawing import png

MOST_SENT = 2 * 2**20
"""Bytes of queries and keys of a head that a page may ask for."""

MOST_VALUES = 2**20
LARGEST_THUMB = 256
LOOKED_AT = 7
"""Keys told of one token in each head: three, when lists leave aside the first, itself and its neighbours."""


def all_scenes(results: Results) -> Answer:
    """Answer the current scenes, and which program serves them."""
    registry = results.registry
    scenes = registry.scenes
    listed = [registry.described(name, scene) for name, scene in scenes.items()]
    # Asks only for an engine that serves a scene: the states of all engines would load their dependencies.
    engine = next((choose(scene.layers[0].problem, None).NAME for scene in scenes.values()), "")
    about = {"title": "regard", "version": __version__, "engine": engine, "scenes": listed}
    return Answer(200, about | ({"start": registry.start} if registry.start else {}))


def run(results: Results, at: Question, body: Any) -> Answer:
    """Run the model of a scene with the settings of a body, and answer the scene."""
    name, scene, dropped = results.registry.run(Run.of(at.scene, body))
    for gone in dropped:
        results.forget(gone)
    return Answer(200, {"scene": results.registry.described(name, scene)})


def tokens(results: Results, at: Question) -> Answer:
    """Answer a part of the tokens along an axis."""
    axis = at.query.get("axis", "key")
    if axis not in ("query", "key"):
        raise Refused(422, f"axis must be query or key, got {brief(axis)}")
    of = at.scene.query_tokens if axis == "query" else at.scene.key_tokens
    start = integer(at.query, "start", 0, 0, len(of))
    stop = min(integer(at.query, "stop", start + MOST_TOKENS, start), start + MOST_TOKENS, len(of))
    return Answer(200, {"start": start, "total": len(of), "tokens": [encodable(x) for x in of[start:stop]]})


def words(results: Results) -> Answer:
    """Answer the texts of the page."""
    return Answer(200, sentences.words())


def heads(results: Results, at: Question) -> Answer:
    """Answer a table of scores of all heads."""
    measured: list[HeadStatistics] = []
    count = len(at.scene.layers)
    for layer in range(count):
        try:
            measured += results.scores(at, layer)
        except Unfinished as work:
            raise Unfinished((layer + work.done) / count) from None
    return Answer(200, scores.table(measured))


def _every_head(results: Results, at: Question) -> tuple[list[tuple[scores.Estimate, ...]], int]:
    """Return estimated scores and outlines of all heads, and the number of queries sampled."""
    rows, count = finding.sample_rows(at.scene), len(at.scene.layers)

    def compute(progress: Callable[[float], object]) -> list[tuple[scores.Estimate, ...]]:
        estimated = []
        for layer in range(count):
            progress(layer / count)
            estimated.append(scores.estimates(at.scene, layer, rows, at.b))
        return estimated

    return results.cached("scores", (at.name, at.b, "estimated"), compute, lambda x: 2048 * sum(map(len, x))), rows


def _picked(estimated: Sequence[Sequence[scores.Estimate]]) -> tuple[finding.Pick, list[HeadStatistics]]:
    """Return what the page opens on, and the scores of all heads."""
    every = [one for layer in estimated for one in layer]
    outlines = {(one.scores.layer, one.scores.head): one.outline for one in every}
    heads = [one.scores for one in every]
    return finding.pick(candidates(heads), outlines), heads


def first_finding(results: Results, at: Question) -> Answer:
    """Answer the head and the query to show first, and on how many queries that is based.

    A scene with an opening names the key too, and why.
    """
    if (chosen := at.scene.opening) is not None:
        place = {name: getattr(chosen, name) for name in ("layer", "head", "i", "j")}
        return Answer(200, {**place, "why": chosen.text, "how": ""})
    estimated, rows = _every_head(results, at)
    picked, _ = _picked(estimated)
    n_q = at.scene.layers[picked.layer].problem.n_q
    how = "" if rows >= n_q else sentences.estimated(rows, n_q)
    return Answer(200, {"layer": picked.layer, "head": picked.head, "i": _told(at, picked.query), "how": how})


def _told(at: Question, query: int) -> int:
    """Return the query to show first: beside pictures a word, or the class token, rather than a patch."""
    n_q, words = at.scene.layers[0].problem.n_q, at.scene.words(at.b)
    if not words or query % n_q in words:
        return query
    return words[-1 if at.scene.query_tokens else 0]


def claims(results: Results, at: Question) -> Answer:
    """Answer what is said of each head's map in a layer."""
    estimated, _ = _every_head(results, at)
    return Answer(200, {"heads": [sentences.of_head(at.scene, one.outline, at.layer) for one in estimated[at.layer]]})


def steps_of_tour(results: Results, at: Question) -> Answer:
    """Answer the steps of the guided tour."""
    picked, heads = _picked(_every_head(results, at)[0])
    steps = tour(at.scene, at.name, heads, picked, at.b)
    return Answer(200, {
        "steps": [
            {"title": x.title, "text": x.text, "state": dict(x.state), "settings": x.settings and dict(x.settings)}
            for x in steps
        ]
    })  # fmt: skip


def token(results: Results, at: Question, i: int) -> Answer:
    """Answer the keys with the largest weights of one query, and that on the learned sink, in every head."""
    rows: list[dict[str, Any]] = []
    for layer, of in enumerate(at.scene.layers):
        within(i, of.problem.n_q, "query")
        for head in range(of.heads):
            row = np.nan_to_num(results.head(replace(at, layer=layer, head=head)).weights_of(np.array([i]))[0])
            few = [j for j in np.argsort(-row, kind="stable")[:LOOKED_AT].tolist() if row[j] > 0]
            sink = {} if of.problem.sink is None else {"sink": max(0.0, 1 - float(row.sum()))}
            rows.append({"layer": layer, "head": head, "keys": few, "weights": [float(row[j]) for j in few], **sink})
    return Answer(200, {"rows": rows})


def earlier(results: Results, at: Question, i: int, j: int) -> Answer:
    """Answer the earlier heads that wrote what query i of a head reads at key j."""
    within(i, at.of.problem.n_q, "query")
    within(j, at.of.problem.n_k, "key")

    def head_of(layer: int, head: int) -> Head:
        return results.head(replace(at, layer=layer, head=head))

    return Answer(200, paths.described(at.scene.layers, head_of, (at.layer, at.head, i, j), at.b))


def thumbs(results: Results, at: Question) -> Answer:
    """Answer the maps of a layer's heads in a few pixels."""
    maps, exact = results.thumbnails(at, integer(at.query, "size", 64, 1, LARGEST_THUMB))
    return Answer(200, maps, exact)


def whole_map(results: Results, at: Question) -> Answer:
    """Answer the levels of a head's map."""
    coarse = results.coarse(at)
    return Answer(200, coarse.described(), exact=coarse.whole)


def tile(results: Results, at: Question, level: int, x: int, y: int) -> Answer:
    """Answer a tile of a head's map, infinite where it is still computed."""
    key = (*at.key, "tile", level, x, y, at.kind)
    if (cached := results.store.get(key)) is not None:
        return Answer(200, cached)
    p = at.of.problem
    levels = pyramid.Levels(p.n_q, p.n_k)
    try:
        rows, cols = levels.pixels(level, x, y)
    except IndexError as error:
        raise Refused(404, str(error)) from None
    queries = levels.covered(level, rows, p.n_q)
    coarse = None
    if level <= levels.kept:
        coarse = results.coarse(at, wait=False)
        coarse.prefer(queries)
    head = results.head(at) if coarse else results.ready(at, queries)
    pixels = pyramid.tile(head, coarse, level, rows, cols, at.kind)
    exact = coarse is None or not np.isposinf(pixels).any()
    if exact:
        results.store.put(key, pixels, pixels.nbytes)
    return Answer(200, pixels, exact)


def _block(at: Question) -> tuple[range, range]:
    """Return the queries and keys of a request for their values."""
    p = at.of.problem
    rows, cols = span(at.query, "rows", p.n_q), span(at.query, "cols", p.n_k)
    if len(rows) * len(cols) > MOST_VALUES:
        raise Refused(422, f"at most {MOST_VALUES} values at once, got {len(rows)} × {len(cols)}")
    return rows, cols


def values(results: Results, at: Question) -> Answer:
    """Answer weights of some queries on some keys."""
    rows, cols = _block(at)
    return Answer(200, results.ready(at, rows).seen(rows, cols))


def row(results: Results, at: Question, i: int) -> Answer:
    """Answer the weights of a query."""
    rows = range(i, within(i, at.of.problem.n_q, "query") + 1)
    return Answer(200, results.ready(at, rows).seen(rows, range(at.of.problem.n_k))[0])


def column(results: Results, at: Question, j: int) -> Answer:
    """Answer the weights on a key."""
    rows, cols = range(at.of.problem.n_q), range(j, within(j, at.of.problem.n_k, "key") + 1)
    return Answer(200, results.ready(at, rows).seen(rows, cols)[:, 0])


def picture(results: Results, at: Question, picture: int) -> Answer:
    """Answer the picture of a grid as a PNG file."""
    grids = at.scene.grids_of(at.b)
    pixels = grids[within(picture, len(grids), "picture")].picture
    if pixels is None:
        raise Refused(404, f"picture {picture} is not known: the grid has none")

    def compute(progress: Callable[[float], object]) -> bytes:
        return png(np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)]))

    return Answer(200, results.cached("maps", (at.name, at.b, "picture", picture), compute, len))


def _grid(at: Question) -> PatchGrid:
    """Return the grid that a request names."""
    grids = at.scene.grids_of(at.b)
    if not grids:
        raise Refused(422, "no token of this scene is known as a patch of a picture")
    return grids[integer(at.query, "grid", 0, 0, len(grids) - 1)]


def heat(results: Results, at: Question) -> Answer:
    """Answer the weights of a token on the patches of a grid, or of the patches on it, in every head.

    Weights are JSON, or with numbers=f32 float32 in the order of layers, heads and patches.
    """
    grid, side, form = _grid(at), at.query.get("side", "row"), at.query.get("numbers", "json")
    if side not in ("row", "column"):
        raise Refused(422, f"side must be row or column, got {brief(side)}")
    if form not in ("json", "f32"):
        raise Refused(422, f"numbers must be json or f32, got {brief(form)}")
    p = at.of.problem
    if side == "column" and at.of.cross:
        raise Refused(422, "the patches are keys alone: none of them is a query, so side must be row")
    token = integer(at.query, "token", 0, 0, (p.n_q if side == "row" else p.n_k) - 1)
    if form == "json" and sum(of.heads for of in at.scene.layers) * len(grid.tokens) > MOST_VALUES:
        raise Refused(422, f"more than {MOST_VALUES} weights are sent with numbers=f32 alone")
    rows, cols = range(p.n_q), range(p.n_k)
    rows, cols = (range(token, token + 1), cols) if side == "row" else (rows, range(token, token + 1))
    layers = [
        heats.laid(grid, results.weights(replace(at, layer=layer), rows, cols)) for layer in range(len(at.scene.layers))
    ]
    if form == "f32":
        return Answer(200, np.concatenate([layer.ravel() for layer in layers]))
    return Answer(200, {"layers": [heats.plain(layer) for layer in layers]})


def rollout(results: Results, at: Question) -> Answer:
    """Answer the shares of the patches of a grid in a token of the last layer, by attention rollout."""
    grid = _grid(at)
    if reason := heats.unrolled(at.scene):
        raise Refused(422, reason)
    token = integer(at.query, "token", 0, 0, at.of.problem.n_q - 1)

    def weights(layer: int, rows: range) -> Array:
        return results.weights(replace(at, layer=layer), rows, range(at.of.problem.n_k))

    def compute(progress: Callable[[float], object]) -> Array:
        return heats.rollout(at.scene, token, weights, progress)

    shares = results.cached("scores", (at.name, at.b, "rollout", token), compute, lambda x: x.nbytes)
    return Answer(200, {"weights": heats.plain(heats.laid(grid, shares))})


def sinks(results: Results, at: Question) -> Answer:
    """Answer the weight of each query on the learned sink, none without a sink."""
    return Answer(200, results.ready(at, range(at.of.problem.n_q)).sinks())


def products(results: Results, at: Question) -> Answer:
    """Answer q · k of some queries and keys."""
    rows, cols = _block(at)
    return Answer(200, dots.dots(_scored(at), rows, cols))


def _scored(at: Question) -> Head:
    """Return a head with its queries and keys."""
    layer, head = at.of.computed(at.head)
    return layer.head(head, at.b)


def variance(results: Results, at: Question) -> Answer:
    """Answer how the variance of q · k grows with the number of features."""
    return Answer(200, dots.variance(_scored(at)))


def stored(results: Results, at: Question) -> Answer:
    """Answer the arrays of a head and the module of its rules, from which a page computes the head's weights.

    Null where a page cannot, or where that is much to send.
    """
    p = at.of.problem
    if 4 * (p.d * (p.n_q + p.n_k) + p.n_q) > MOST_SENT:
        return Answer(200, {"head": None, "code": None})
    head = results.ready(at, range(p.n_q))
    key = (*at.key, "stored")
    return Answer(200, results.workers["maps"].result(key, lambda progress: kernels.sent(at.of, head)))


def all_profiles(results: Results, at: Question) -> Answer:
    """Answer the profiles of a head along its sequence."""
    head = results.head(at)
    computed = results.cached(
        "maps", (*at.key, "profiles"), lambda progress: profiles.profiles(head, progress),
        lambda x: sum(profile.values.nbytes for profile in x.values()),
    )  # fmt: skip
    shown = {name: x for name, x in computed.items() if name != "lse" or not at.of.lacks}
    return Answer(200, {name: profile.described(profiles.LABELS[name]) for name, profile in shown.items()})


def step(results: Results, at: Question, i: int, j: int) -> Answer:
    """Answer the stages from a query and a key to the output."""
    p = at.of.problem
    within(i, p.n_q, "query")
    within(j, p.n_k, "key")
    return Answer(200, {"stages": [stage.described() for stage in stages.stages(at.of, at.head, i, j, at.b)]})


def all_matrices(results: Results, at: Question) -> Answer:
    """Answer every matrix of a small head."""
    try:
        steps = matrices.matrices(at.of, at.head, at.b)
    except Unknown:
        raise
    except ValueError as error:
        raise Refused(422, str(error)) from None
    return Answer(200, {"matrices": [matrix.described() for matrix in steps]})


def row_scores(results: Results, at: Question, i: int) -> Answer:
    """Answer the scores of a query before and after masking, and its weights."""
    return Answer(200, matrices.row_scores(at.of, at.head, within(i, at.of.problem.n_q, "query"), at.b))


def ablations(results: Results, at: Question) -> Answer:
    """Answer the losses of a text without each head, those that are known; each request lets more follow."""
    losses = results.losses(at, _replacement(at))
    if losses.loss is None:
        raise Unfinished(0)
    return Answer(200, ablation.described_losses(losses), exact=losses.whole)


def one_ablation(results: Results, at: Question) -> Answer:
    """Answer the odds of tokens with and without a head."""
    how = _replacement(at)
    before, after = results.expected(at), results.expected(at, {(at.layer, at.head): how})
    return Answer(200, ablation.described_runs(before, after, _position(at, before), at.scene.predicts))


def expected(results: Results, at: Question) -> Answer:
    """Answer the tokens that the model expects at a position."""
    _runner(at)
    expectation = results.expected(at)
    i = integer(at.query, "i", expectation.last, 0, expectation.last, "token")
    return Answer(200, ablation.described_expected(expectation, i))


def _position(at: Question, known: Expected) -> int:
    """Return the position asked for, by default the last."""
    if not at.scene.predicts:  # an encoder's queries: the decoder's last token is meant
        return known.last
    return integer(at.query, "i", known.last, known.first, known.last, "token")


def _runner(at: Question) -> Runner:
    """Return the model of a scene. Raises `Refused` if none runs here."""
    if at.scene.runner is None:
        raise Refused(422, "this needs a model that runs here: regard's example model, or one of your own by --model")
    return at.scene.runner


def _replacement(at: Question) -> Replacement:
    """Return what replaces an ablated head: "zero" or "mean".

    Raises `Refused` for scenes without a model that runs here.
    """
    _runner(at)
    how = at.query.get("how", "zero")
    if how not in ("zero", "mean"):
        raise Refused(422, f"how must be zero or mean, got {brief(how)}")
    return how  # type: ignore[return-value]


def norms(results: Results, at: Question) -> Answer:
    """Answer the norms of a head's values, none if they are not known."""
    values = at.of.values_of(at.head, at.b)
    return Answer(200, np.zeros(0, np.float32) if values is None else ablation.value_norms(values))
