"""Sources of scenes: the example model, plain arrays and captures."""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core import rowsums
from regard.examplemodel import ExampleModel, Trace
from regard.interpret.capture import captured as captured_model
from regard.interpret.capture import layers
from regard.interpret.capture.pictures import opened
from regard.interpret.examplemodel.model import VOCABULARY
from regard.loaders import loaders
from regard.ops.attention import attention
from regard.ops.normalization import problem_from
from regard.runtime.forks import cached_property
from regard.runtime.progress import Stage
from regard.viewer.scene.labels import byte_label, byte_tokens, first_words
from regard.viewer.scene.running import Expected, Heads, Predicts, Replacement
from regard.viewer.scene.scenes import Array, Kind, Projections, Scene, SceneLayer

SENTENCE = "Dr. Zavrel met Otokar Brix. Nobody knew why Otokar Br"
"""The default text: a rare name recurs, and breaks off."""

PRINTED = [10, *range(32, 127)]
"""Bytes that can continue a text: those that are a character each."""

PREFIX = 3
"""Bytes that must agree for one place to count as a copy of another.

In text, single letters recur by chance.
"""

ABOUT_TRANSLATION = (
    "Made by hand, to be read number by number: French words look for their meaning (head 0), or for the word that "
    "goes with them (head 1), in an English sentence"
)
ABOUT_SENTENCE = (
    "Made by hand, to be read number by number: each word looks for the word that goes with it (head 0), or for words "
    "of its kind (head 1), among those before it and itself"
)
ABOUT_MODEL = "regard's example model, a byte-level decoder; ⊢ marks the beginning of the text"


@dataclass(frozen=True)
class Settings:
    """A run of the example model: its text, and options of every attention layer."""

    text: str = SENTENCE
    temperature: float = 1.0
    scaled: bool = True
    causal: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """Return settings from JSON.

        Raises TypeError or ValueError for an unknown one, and for one of another type.
        """
        kinds: dict[str, tuple[type, ...]] = {
            "text": (str,), "temperature": (int, float), "scaled": (bool,), "causal": (bool,),
        }  # fmt: skip
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"{name} is not a setting; those are {', '.join(kinds)}")
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
                raise TypeError(f"{name} must be a {kinds[name][-1].__name__}, got {reprlib.repr(value)}")
        return cls(**{**given, **({"temperature": float(given["temperature"])} if "temperature" in given else {})})

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return {
            "text": self.text, "temperature": self.temperature, "scaled": self.scaled, "causal": self.causal,
        }  # fmt: skip


class ExampleRunner:
    """The example model as a runner of scenes, loaded when first needed."""

    predicts: Predicts = "next"

    def __init__(self, model: ExampleModel | None = None):
        self._model = model

    @cached_property
    def model(self) -> ExampleModel:
        """The example model."""
        return ExampleModel.load() if self._model is None else self._model

    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of a run from JSON."""
        return Settings.of(given).plain()

    def scenes(
        self, settings: Mapping[str, Any], progress: Callable[[Stage], object] = lambda stage: None
    ) -> tuple[Scene, ...]:
        """Run the model, and return its scene.

        Raises ValueError before the model runs if the text is empty, too long, or not Unicode.
        """
        text = settings["text"]
        if (half := re.search("[\ud800-\udfff]", text)) is not None:
            raise ValueError(f"text must be Unicode: character {half.start()} is half of a surrogate pair")
        ids = self.model.encode(text)
        progress(Stage(f"running the model on {len(ids)} tokens"))
        trace = self.model.run(ids, **_options(settings))
        layers = tuple(
            SceneLayer(
                name=f"layers.{number}",
                problem=problem_from(q, k, v, causal=trace.causal, scale=trace.scale),
                lse=lse[None],
                number=number,
                projections=_projections(self.model, trace, number),
            )
            for number, (q, k, v, lse) in enumerate(zip(trace.q, trace.k, trace.v, trace.lse, strict=True))
        )
        tokens = byte_tokens(text)
        scene = Scene(
            name=first_words(text),
            kind="example",
            layers=layers,
            query_tokens=tokens,
            key_tokens=tokens,
            ids=ids[None],
            prefix=PREFIX,
            note=ABOUT_MODEL,
            runner=self,
            predicts=self.predicts,
            settings=settings,
            following=_expected(trace).likeliest(len(ids) - 1),
        )
        return (scene,)

    def expected(self, scene: Scene, without: Heads = {}) -> Expected:  # noqa: B006  never written
        """Return what the model expects of the scene's text, without some heads."""
        ids, options = _arguments(scene)
        return _expected(self.model.run(ids, ablate=without, **options))

    def losses(self, scene: Scene, how: Replacement, wanted: Callable[[], bool] = lambda: True) -> "ExampleLosses":
        """Return the losses of the scene's text without each of its heads, none computed yet."""
        return ExampleLosses(self.model, scene, how)

    def continued(self, scene: Scene, drawn: bool) -> Mapping[str, Any]:
        """Return the settings of a run on the scene's text and one more byte, of those that can be printed."""
        assert scene.settings is not None
        expected = self.expected(scene)
        shares = expected.shares(len(expected.logits) - 1) * np.isin(np.arange(VOCABULARY), PRINTED)
        byte = np.random.default_rng().choice(VOCABULARY, p=shares / shares.sum()) if drawn else shares.argmax()
        return {**scene.settings, "text": scene.settings["text"] + chr(byte)}


class ExampleLosses:
    """The mean loss of a text of the example model without each head in turn, one at a time."""

    def __init__(self, model: ExampleModel, scene: Scene, how: Replacement):
        ids, options = _arguments(scene)
        self._model, self._ids, self._options = model, ids, options
        self._runs = model.ablations(ids, how, **options)
        self.loss: float | None = None
        self.rows: list[tuple[int, int, float]] = []
        self.error: Exception | None = None
        self.total = model.config.layers * model.config.heads

    @property
    def whole(self) -> bool:
        """True if the loss without every head is known."""
        return len(self.rows) == self.total

    def grow(self) -> None:
        """Compute the loss with all heads, then without the next."""
        if self.loss is None:
            self.loss = float(self._model.run(self._ids, **self._options).losses().mean())
            return
        layer, head, trace = next(self._runs)
        self.rows.append((layer, head, float(trace.losses().mean())))


def example(
    settings: Settings, model: ExampleModel | None = None, progress: Callable[[Stage], object] = lambda stage: None
) -> Scene:
    """Return the scene of a text, as read by the model that ships with regard.

    Raises ValueError before the model runs if the text is empty, too long, or not Unicode.

    >>> scene = example(Settings("to be"))
    >>> len(scene.layers), scene.layers[0].heads, scene.key_tokens[:3]
    (3, 4, ('⊢', 't', 'o'))
    """
    (scene,) = ExampleRunner(model).scenes(settings.plain(), progress)
    return scene


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `ExampleModel.run`."""
    return {"temperature": settings["temperature"], "scale": settings["scaled"], "causal": settings["causal"]}


def _arguments(scene: Scene) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the ids and options of `ExampleModel.run` for a scene."""
    assert scene.ids is not None
    assert scene.settings is not None
    return scene.ids[0], _options(scene.settings)


def _expected(trace: Trace) -> Expected:
    return Expected(trace.logits, np.append(trace.ids[1:], -1), byte_label)


def _projections(model: ExampleModel, trace: Trace, layer: int) -> Projections:
    of = model.projections(trace, layer)
    names = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o", "b_q": "q_bias", "b_k": "k_bias"}
    arrays = {name: of[theirs] for name, theirs in names.items()}
    return Projections(of["x"][None], out=trace.out[layer][None], rotary=model.config.rotary, **arrays)


def sentence() -> Scene:
    """Return a small causal self-attention made by hand: five words look at those before them.

    Each word has one of four features: article, noun, verb, conjunction. Head 0 looks for the word that goes with it, a
    noun for its article, a verb for its noun, a conjunction for its verb. Head 1 looks for the same feature.

    >>> scene = sentence()
    >>> scene.layers[0].head(0).seen(range(4, 5), range(5)).round(2)
    array([[0.04, 0.83, 0.04, 0.04, 0.04]], dtype=float32)
    """
    same = np.eye(4, dtype=np.float32)
    words = ("the ", "cat ", "sat ", "and ", "slept")
    return Scene(
        name="Self-attention: the cat sat and slept",
        kind="hand",
        layers=(_by_hand("self-attention", same[[0, 1, 2, 3, 2]], same[[0, 0, 1, 2]], same),),
        query_tokens=words,
        key_tokens=words,
        note=ABOUT_SENTENCE,
    )


def translation() -> Scene:
    """Return a small cross-attention made by hand: French words look at English ones.

    Each word has one of four features: article, colour, animal, sleep. Head 0 looks for the same feature, head 1 for
    that of the word that goes with it.

    >>> scene = translation()
    >>> scene.layers[0].head(0).seen(range(1, 2), range(5)).round(2)
    array([[0.04, 0.04, 0.83, 0.04, 0.04]], dtype=float32)
    """
    same = np.eye(4, dtype=np.float32)
    source = same[[0, 1, 2, 3, 3]] * np.array([1, 1, 1, 0.8, 1], np.float32)[:, None]
    return Scene(
        name="Cross-attention: le chat blanc dort",
        kind="cross",
        layers=(_by_hand("cross-attention", same[[0, 2, 1, 3]], same, same[[2, 2, 3, 2]], source),),
        query_tokens=("le ", "chat ", "blanc ", "dort"),
        key_tokens=("the ", "white ", "cat ", "is ", "sleeping"),
        note=ABOUT_TRANSLATION,
    )


def _by_hand(name: str, x: Array, first: Array, second: Array, source: Array | None = None) -> SceneLayer:
    """Return a layer of two heads over four features, causal without a source.

    x, source: features of the words. first, second: what the heads look for, a row for each feature.
    """
    same = np.eye(4, dtype=np.float32)
    keys = x if source is None else source
    w_q, w_k, w_v = (np.hstack(heads) for heads in ((3 * first, 3 * second), (2 * same, 2 * same), (same, same)))
    q, k, v = (np.swapaxes(y.reshape(len(y), 2, 4), 0, 1) for y in (x @ w_q, keys @ w_k, keys @ w_v))
    w_o = np.vstack((same, same / 2))
    out = attention(q, k, v, causal=source is None, engine="tiled")[None]
    projections = Projections(x[None], w_q, w_k, w_v, w_o, out, source=None if source is None else source[None])
    problem = problem_from(q, k, v, causal=source is None)
    return SceneLayer(name, problem, cross=source is not None, projections=projections)


def for_page(scenes: Sequence[Scene]) -> tuple[Scene, ...]:
    """Add what was made by hand to scenes of regard's own model.

    Only a page shows several scenes.
    """
    own = bool(scenes) and scenes[0].kind == "example"
    return (*scenes, sentence(), translation()) if own else tuple(scenes)


def arrays(
    query: Array,
    key: Array,
    value: Array | None = None,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    lse: Array | None = None,
    name: str = "arrays",
    **options: Any,
) -> Scene:
    """Return a scene of plain arrays, shaped as `regard.attention` takes them.

    tokens: one piece of text for each query, and for each key unless `key_tokens` is given. lse: (..., h, n_q),
    computed when needed if not given. options: those of `regard.attention`.

    Raises what `regard.attention` raises. Raises ValueError for the wrong number of tokens, and for the lse of another
    call.
    """
    for option in ("observe", "return_weights", "engine", "dropout", "seed"):
        if option in options:
            raise TypeError(f"look shows weights before dropout, on any engine: it has no option {option}")
    p = problem_from(query, key, key if value is None else value, **options)
    if not p.pairs:
        raise ValueError(f"look needs at least one query, key and head, got query {query.shape} and key {key.shape}")
    if lse is not None:
        lse = np.ascontiguousarray(rowsums.taken(p, lse), p.compute).reshape(p.batch, p.heads, p.n_q)
    same = tokens if key_tokens is None and p.n_q == p.n_k else key_tokens
    for argument, pieces, size in (("tokens", tokens, p.n_q), ("key_tokens", key_tokens, p.n_k)):
        if pieces is not None and len(pieces) != size:
            raise ValueError(f"{argument} must be one for each row, {size}, got {len(pieces)}")
    names = tuple(map(str, same or ()))
    numbers = np.unique(names, return_inverse=True)[1].astype(np.int64) if names else None
    layer = SceneLayer(
        name="attention",
        problem=p,
        lse=lse,
        no_values="no values were given" if value is None else "",
        cross=p.mask is None and (p.n_q != p.n_k or (tokens is not None and tuple(map(str, tokens)) != names)),
    )
    return Scene(
        name=name,
        kind="arrays",
        layers=(layer,),
        query_tokens=tuple(map(str, tokens or ())),
        key_tokens=names,
        ids=None if numbers is None else np.broadcast_to(numbers, (p.batch, p.n_k)),
    )


def captured(seen: captured_model.Capture, kind: Kind = "capture") -> tuple[Scene, ...]:
    """Return a capture as scenes, each of the layers that read the same sequences.

    An encoder and a decoder have a scene each, in which its layers are counted. A scene is named by the first words of
    what its queries read, or by the model without a text, and by its stack. A text over a picture or a sound comes
    first. Raises ValueError for a capture without layers.
    """
    if not seen.layers:
        raise ValueError("the capture holds no layer; run the model inside of `with regard.capture(model) as seen:`")
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in enumerate(seen.layers):
        same = (layer.query_tokens, layer.key_tokens, layer.cross, layer.batch, layer.n_q, layer.n_k, layer.rows)
        kinds.setdefault(same, []).append(number)
    parts = _parts([seen.layers[numbers[0]] for numbers in kinds.values()])
    scenes = []
    for numbers, part in zip(kinds.values(), parts, strict=True):
        names = [seen.layers[n].name for n in numbers]
        counted = _counted(names) if part else [seen.numbers[n] for n in numbers]
        ids = seen.ids(numbers[0], "key")
        labels = seen.labels(numbers[0], "query") or ()
        scenes.append(
            Scene(
                name=f"{first_words(_read(seen.layers[numbers[0]], labels)) or seen.model}{part}",
                kind=kind,
                layers=tuple(_captured_layer(seen.layers[n], x) for n, x in zip(numbers, counted, strict=True)),
                query_tokens=labels,
                key_tokens=seen.labels(numbers[0], "key") or (),
                ids=None if ids is None else np.asarray(ids, np.int64),
                note=_note(seen, seen.layers[numbers[0]]),
                grids=seen.layers[numbers[0]].grids,
            )
        )
    return tuple(sorted(scenes, key=lambda scene: not scene.pictured_text))


def _read(layer: layers.Layer, labels: Sequence[str]) -> str:
    """Return the text that a layer's queries read, without the tokens of pictures in it."""
    same = not layer.cross and layer.n_q == layer.n_k
    patches = {int(token) for grid in layer.grids for token in grid.tokens} if same else set()
    return "".join(label for i, label in enumerate(labels) if i not in patches)


def _note(seen: captured_model.Capture, layer: layers.Layer) -> str:
    """Return what is said of a capture, and what of it was not kept."""
    dropped = f"not kept: {', '.join(seen.dropped)}" if seen.dropped else ""
    rows = f"queries of {len(layer.rows)} tokens were kept, and keys of all" if layer.rows else ""
    return "; ".join(filter(None, (seen.model, dropped, rows)))


def pictured(model: Any, processor: Any, image: Any, text: str | None) -> tuple[Scene, ...]:
    """Return the scenes of a PyTorch model that reads a picture, and a text if it reads both.

    image: as in `regard.look`. processor: of transformers.
    """
    return captured(loaders["torch.pictured"]().read(model, processor, opened(image), text))


LISTS = ("layers", "layer", "blocks", "block", "h")
"""Names of lists of layers that say nothing of their stack."""


def _stack(name: str) -> tuple[str, int | None]:
    """Return the stack of a layer and its number there, by the name of its module.

    >>> _stack("model.decoder.layers.2.self_attn"), _stack("encoder.1"), _stack("h.0.attn"), _stack("attention")
    (('decoder', 2), ('encoder', 1), ('', 0), ('', None))
    """
    parts = name.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return "", None
    stack = parts[: at - 1 if at and parts[at - 1] in LISTS else at]
    return ".".join(stack).removeprefix("model."), int(parts[at])


def _parts(firsts: Sequence[layers.Layer]) -> list[str]:
    """Return ", stack" for each scene by its first layer; that layer's name where stacks are not enough."""
    if len(firsts) == 1:
        return [""]
    stacks = [_stack(layer.name)[0] for layer in firsts]
    parts = [f"{stack}{', cross-attention' * layer.cross}" for stack, layer in zip(stacks, firsts, strict=True)]
    named = all(stacks) and len(set(parts)) == len(parts)
    return [f", {part if named else layer.name}" for part, layer in zip(parts, firsts, strict=True)]


def _counted(names: Sequence[str]) -> list[int]:
    """Return the number of each layer within its stack, by its name if that tells."""
    numbers = [number for _, number in map(_stack, names) if number is not None]
    return numbers if len(set(numbers)) == len(names) else list(range(len(names)))


def _captured_layer(layer: layers.Layer, number: int) -> SceneLayer:
    operands = layer.all_heads
    return SceneLayer(
        name=layer.name,
        problem=problem_from(value=operands["key"], **operands),
        lse=layer.lse,
        no_values="a capture keeps queries and keys, not values",
        cross=layer.cross or bool(layer.rows),  # rows are not those of its keys
        number=number,
        numbers=layer.numbers,
        kv_numbers=tuple(map(layer.kv_head, layer.numbers)),
    )
