"""The contents of a saved page: which answers it holds, and which heads it computes.

Answers of a server are held, except rows, columns and tiles: the page computes these from queries, keys and lse, by a
module of WebAssembly for the rules of the layer. Layers with arrays of all pairs have the tiles of the exact level
instead. Of a scene with pictures that is too large, it holds the rows of words (`wordrows`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.runtime.forks import cached_property
from regard.viewer.data import pyramid
from regard.viewer.data.questions import MOST_TOKENS
from regard.viewer.scene.scenes import Head, Scene, SceneLayer
from regard.viewer.serve import packed
from regard.viewer.serve.kernels import module_of, stored
from regard.viewer.serve.wordrows import LIMIT, WordRows

LARGEST = 64 * 2**20
"""Bytes of numbers, before they become text, that a file may hold."""

SMALL = 2**20
"""Bytes of numbers up to which a file holds float32."""

KINDS = ("mass", "max")

ON_PAGE = 2048
"""Queries and keys of a tile that a page computes from queries and keys: some 0.2 s of work."""

FEW = 2**20
"""Pairs of a head up to which a page that holds a model makes its thumbnails."""

FORESEEN = 512
"""Tokens of a text up to which a page holds what a model of one's own expects at each."""

THUMB = 64
"""Pixels on a side of a thumbnail. Of no more pairs than it has pixels, the page makes it from the weights."""


@dataclass(frozen=True, eq=False)
class SavedLayer:
    """A layer in a file, with the module that computes its weights, or None."""

    layer: SceneLayer
    module: bytes | None

    @property
    def computed(self) -> bool:
        """True if the page computes weights of this layer from queries and keys."""
        return self.layer.plain or self.module is not None

    @property
    def all_levels(self) -> pyramid.Levels:
        """All levels of its maps."""
        return pyramid.Levels(self.layer.problem.n_q, self.layer.problem.n_k)

    @property
    def levels(self) -> tuple[range, tuple[str, ...]]:
        """The levels whose tiles are embedded, and their kinds; the page computes others."""
        levels = self.all_levels
        if not self.computed:
            return range(levels.finest, levels.finest + 1), KINDS[:1]  # in the exact level both kinds are the same
        return range(sum(levels.cell(level) * pyramid.TILE > ON_PAGE for level in range(levels.kept + 1))), KINDS

    @property
    def tiles(self) -> list[str]:
        """Paths of the tiles that are embedded."""
        levels, (embedded, kinds) = self.all_levels, self.levels
        paths = []
        for level in embedded:
            height, width = (-(-size // pyramid.TILE) for size in levels.size(level))
            paths += [f"{level}/{x}/{y}?kind={kind}" for y in range(height) for x in range(width) for kind in kinds]
        return paths

    def size(self, itemsize: int) -> int:
        """Bytes of its numbers in the file, about."""
        p = self.layer.problem
        levels, (embedded, kinds) = self.all_levels, self.levels
        cells = len(kinds) * sum(int(np.prod(levels.size(level))) for level in embedded)
        queries = self.layer.heads * p.n_q * (itemsize * p.d + 4)
        keys = p.kv_heads * p.n_k * itemsize * (p.d + p.d_v * self.layer.has_values)
        return self.layer.heads * 2 * cells + (queries + keys) * self.computed


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of the file of a scene.

    name: the id of the scene. layers: with their modules; none where the file holds `rows` of words instead of heads.
    compact: queries, keys and values are 16-bit codes, where these are precise. editable: the file holds the model that
    made the scene.
    """

    name: str
    scene: Scene
    layers: tuple[SavedLayer, ...]
    compact: bool
    editable: bool
    rows: WordRows | None = None

    @classmethod
    def of(cls, name: str, scene: Scene, limit: int = LARGEST, editable: bool = False) -> "Contents":
        """Return what a file of at most `limit` bytes of numbers holds.

        Raises ValueError, before any work, if that is not enough.
        """
        layers = tuple(SavedLayer(layer, module_of(layer)) for layer in scene.layers)
        size = sum(x.size(4) for x in layers)
        if compact := size > min(SMALL, limit):
            size = sum(x.size(2) for x in layers)
        if size > limit and (rows := WordRows.of(scene, min(limit, LIMIT))) is not None:
            return cls(name, scene, (), compact, False, rows)
        if size > limit:
            p = scene.layers[0].problem
            heads = sum(layer.heads for layer in scene.layers)
            less = "Capture fewer words by queries=, or fewer heads" if scene.grids else "Take a shorter text"
            raise ValueError(
                f"one file should hold at most {limit / 2**20:.0f} MiB of numbers; {heads} heads over {p.n_q} queries "
                f"and {p.n_k} keys are {size / 2**20:.0f}. {less}, or save .npz"
            )
        return cls(name, scene, layers, compact, editable)

    @cached_property
    def modules(self) -> tuple[bytes, ...]:
        """The modules of its layers, each once."""
        return tuple(dict.fromkeys(x.module for x in self.layers if x.module is not None))

    @property
    def paths(self) -> list[str]:
        """The paths of the answers that the file holds, in the order in which they are to be computed."""
        name = self.name
        paths = ["words"]
        if self.rows is None:
            paths += [f"{name}/heads", f"{name}/finding", f"{name}/tour"]
        n_q = len(self.scene.query_tokens)
        if self.scene.kind == "model" and self.scene.predicts and n_q <= FORESEEN:
            paths += [f"{name}/expected?i={i}" for i in range(n_q)]
        for axis, tokens in (("query", self.scene.query_tokens), ("key", self.scene.key_tokens)):
            for start in range(0, max(len(tokens), 1), MOST_TOKENS):
                paths.append(f"{name}/tokens?axis={axis}&start={start}&stop={start + MOST_TOKENS}")
        pictures = enumerate(grid.picture is not None for grid in self.scene.grids_of())
        paths += [f"{name}/picture/{number}" for number, pictured in pictures if pictured]
        for number, saved in enumerate(self.layers):
            tiles, p = saved.tiles, saved.layer.problem
            paths.append(f"{name}/claims/{number}")
            for head in range(saved.layer.heads):
                parts = ["map", "profiles"]
                parts += ["variance"] if not saved.layer.lacks or head in saved.layer.single_heads else []
                parts += ["sinks"] if p.sink is not None else []
                paths += [f"{name}/{what}/{number}/{head}" for what in parts]
                paths += [f"{name}/tile/{number}/{head}/{tile}" for tile in tiles]
            # Last, when the coarse levels are known, so that no thumbnail is an estimate.
            if p.n_q * p.n_k > (FEW if self.editable else THUMB**2):
                paths += [f"{name}/thumbs/{number}?size={THUMB}&kind={kind}" for kind in KINDS]
        return paths

    @property
    def computed(self) -> list[tuple[int, int]]:
        """The heads, by layer and number, whose weights the page computes."""
        return [(n, head) for n, x in enumerate(self.layers) if x.computed for head in range(x.layer.heads)]

    def exact(self, heads: Mapping[tuple[int, int], Head]) -> dict[str, Any]:
        """Return the heads at `computed` as JSON, with the numbers of their modules.

        Query heads that share keys and values name the first of them as `keys_of`.
        """
        return {
            f"{self.name}/{number}/{at}": head
            for number, saved in enumerate(self.layers)
            if saved.computed
            for at, head in enumerate(self._of_layer(number, [heads[number, at] for at in range(saved.layer.heads)]))
        } | {
            f"{self.name}/{number}/{at}": stored(of, of.head(0), "f32")
            for number, saved in enumerate(self.layers)
            for at, of in saved.layer.single_heads.items()
        }

    def _of_layer(self, number: int, heads: Sequence[Head]) -> Iterator[dict[str, Any]]:
        saved = self.layers[number]
        kernel = {} if saved.module is None else {"module": self.modules.index(saved.module)}
        dtype = "u16" if self.compact and packed.precise(heads, saved.layer.problem.group) else "f32"
        for at, head in enumerate(heads):
            first = at - at % saved.layer.problem.group
            shared = {} if at == first else {"keys_of": f"{self.name}/{number}/{first}"}
            yield stored(saved.layer, head, dtype, ("q",) if shared else None) | kernel | shared
