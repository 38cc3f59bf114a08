"""The grids of a model's pictures and sounds, as transformers' configurations and processors say.

| In the configuration | Given to the module | Models |
|---|---|---|
| `patch_size` | `pixel_values` | ViT and its kin, CLIP, SigLIP, SAM |
| `patch_size` | `pixel_values`, sizes in pixels (`image_sizes`) | Pixtral |
| `patch_size` | sizes in patches (`spatial_shapes`) | SigLIP 2 NaFlex |
| `patch_size`, `spatial_merge_size` | sizes in patches, tokens in blocks (`grid_thw`) | Qwen-VL's pictures and videos |
| `image_token_id`, `video_token_id` | ids of a text | vision-language models |
| `image_grid_pinpoints` | sizes in pixels before tiles (`image_sizes`) | LLaVA-NeXT, LLaVA-OneVision (`tiles`) |
| `max_source_positions`, `time_stride` or `conv_stride` | `input_features`, `input_values` | Whisper, AST, wav2vec |

The grid of any other model is given by the caller.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.interpret.capture import pictures
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer
from regard.torch.capture.texts import nth
from regard.torch.capture.tiles import PictureTiles, tiles_read
from regard.torch.tensors.arrays import values

Array = np.ndarray[Any, np.dtype[Any]]

SOUNDS = ("input_values", "input_features")
"""Arguments of transformers' models that are sounds."""

SAY = ("patch_size", "max_source_positions", "conv_stride")
"""Fields of a configuration that give the size of patches or the number of frames."""

BEFORE_OTHERS = ("llama4_vision_model", "yolos")
"""Models, by `model_type`, whose patches are followed by other tokens, so that no length says where they begin."""

GIVE = "Capture it with regard.capture(model, grid=(rows, columns)), whose product is the number of its patches"
"""The remedy for a model whose configuration is not enough."""

MOST_PREFIX = 16
"""Class and register tokens before the patches, at most: where a sequence has more, its patches are not known."""

HOPS = {"whisper": 0.01, "audio-spectrogram-transformer": 0.01}
"""Seconds of a frame of the spectrogram that a model reads, by `model_type`."""

IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Names in configurations for the id of a token that stands for a part of a picture."""

VIDEO_TOKENS = ("video_token_id", "video_token_index")
"""The same for a part of a frame of a video."""

LARGEST_SCALE = 8
"""A side of the patches that a projector makes one token of, at most."""


@dataclass(eq=False)
class Source:
    """Pictures or sounds that a module read.

    sizes: (rows, columns) of each. draw: makes the pixels of each. together: their tokens are one sequence; else each
    is a batch element. block: the side of the blocks in which tokens follow each other. length: of a sequence, and
    start: its tokens before the patches; of batch elements they follow from the first attention that reads as many.
    seconds: the length of a sound. flipped: the lowest frequency is the first row. pixels: of each picture (3, y, x),
    where they were given as pixels. names: of each, where there are others beside them; video: they are frames.
    """

    sizes: list[tuple[int, int]]
    draw: Callable[[], list[Any]]
    together: bool = False
    block: int = 1
    length: int | None = None
    start: int = 0
    sound: bool = False
    seconds: float | None = None
    flipped: bool = False
    pixels: Sequence[torch.Tensor] = ()
    names: Sequence[str] = ()
    video: bool = False
    drawn: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.together:
            self.length = sum(rows * columns for rows, columns in self.sizes)

    def attended(self, n: int) -> None:
        """Note an attention over n tokens."""
        before = n - max((rows * columns for rows, columns in self.sizes), default=0)
        if self.length is None and 0 <= before <= MOST_PREFIX:
            self.length, self.start = n, before

    def grids(self, tokens: Sequence[tuple[int, Array]], sizes: Sequence[tuple[int, int]]) -> tuple[PatchGrid, ...]:
        """Return a grid for each picture. tokens: its batch element and its tokens in row-major order."""
        self.drawn = self.drawn or self.draw()
        shown = self.drawn if len(self.drawn) == len(sizes) else [None] * len(sizes)
        named = self.names or [""] * len(sizes)
        grids = []
        for (batch, of), (rows, columns), picture, name in zip(tokens, sizes, shown, named, strict=True):
            order = of.reshape(rows, columns)[::-1].reshape(-1) if self.flipped else of
            kind = "sound" if self.sound else "picture"
            grids.append(PatchGrid(rows, columns, order, kind, picture, self.seconds, batch, name))  # type: ignore[arg-type]
        return tuple(grids)

    def own(self) -> tuple[PatchGrid, ...]:
        """Return the grids among its own tokens."""
        start, tokens = self.start, []
        for n, (rows, columns) in enumerate(self.sizes):
            tokens.append((0 if self.together else n, start + _blocks(rows, columns, self.block)))
            start += rows * columns * self.together
        return self.grids(tokens, self.sizes)

    def among(self, places: Sequence[tuple[int, Array]]) -> tuple[PatchGrid, ...]:
        """Return the grids of the tokens that stand for its pictures in texts; none if their number tells nothing.

        places: the positions of such tokens in each text.
        """
        total = sum(len(at) for _, at in places)
        scale = next((s for s in range(1, LARGEST_SCALE + 1) if self._merged(s) == total), None)
        if scale is None:
            return ()
        sizes = [(rows // scale, columns // scale) for rows, columns in self.sizes]
        tokens = split(places, [rows * columns for rows, columns in sizes])
        return () if tokens is None else self.grids(tokens, sizes)

    def _merged(self, scale: int) -> int | None:
        """Return the number of tokens if squares of patches are merged; None if they do not fit."""
        if any(rows % scale or columns % scale for rows, columns in self.sizes):
            return None
        return sum(rows * columns // scale**2 for rows, columns in self.sizes)


class GridRecorder:
    """Recorder of the pictures and sounds that modules read, for the grids of layers.

    processor: of transformers, which tells how pixels were normalized and how long a frame is; or None. grid: of
    pictures, where the caller gives it.
    """

    def __init__(self, model: nn.Module, processor: Any = None, grid: PatchGrid | tuple[int, int] | None = None):
        self.config = getattr(model, "config", None)
        self.image = getattr(processor, "image_processor", processor)
        self.frames = getattr(processor, "feature_extractor", processor)
        self.grid = grid
        self.sources: dict[str, Source] = {}  # by module, the last one last
        self.of_layer: dict[str, Source | None] = {}
        self._pixels: torch.Tensor | None = None  # the last batch of pictures (b, channels, y, x)
        self._tiles: list[PictureTiles] = []
        self._times: Counter[str] = Counter()  # in this forward of the model
        self._video: Any = None  # the sizes of frames that a module was given

    def begin(self) -> None:
        """Note that the model begins another forward."""
        self._times.clear()

    def entering(self, name: str, module: nn.Module, given: dict[str, Any]) -> None:
        """Note the pictures, sounds and sizes that a module is given."""
        self._video = given.get("video_grid_thw", self._video)
        if (source := self._of_pixels(module, given) or self._of_sound(module, given)) is not None:
            self._take(self._nth(name), source)
        if isinstance(sizes := given.get("grid_thw"), torch.Tensor) and hasattr(module, "spatial_merge_size"):
            self._take(self._nth(name), self._of_blocks(module, given, sizes))
        if isinstance(sizes := given.get("spatial_shapes"), torch.Tensor):
            self._take(self._nth(name), self._of_rows(given, sizes))
        sizes = given.get("image_sizes")
        if sizes is not None and (tiles := tiles_read(module, sizes)):
            self._tiles = tiles

    def attended(self, layer: str, n_k: int, text: bool) -> None:
        """Note an attention call of a layer. text: its keys are a text."""
        source = None if text else next(reversed(self.sources.values()), None)
        if source is not None:
            source.attended(n_k)
        self.of_layer[layer] = source

    def grids(self, layer: Layer, ids: Array | None, decoders: Iterable[str]) -> tuple[PatchGrid, ...]:
        """Return the grids among the keys of a layer.

        ids (b, n): of its keys, if they are a text. decoders: modules that hold a cross-attention, whose own tokens are
        no patches.
        """
        if isinstance(self.grid, PatchGrid):
            return (self.grid,) if int(self.grid.tokens.max(initial=-1)) < layer.n_k else ()
        if ids is not None:
            return self._in_text(ids) if self.grid is None else ()
        source = self.of_layer.get(layer.name) if self.grid is None else self._of_caller(self.grid, layer.n_k)
        if source is None or source.length != layer.n_k:
            return ()
        if not (layer.cross or layer.rows) and (layer.n_q != layer.n_k or layer.name.rpartition(".")[0] in decoders):
            return ()
        own = source.own()
        if len(own) == 1:
            return (replace(own[0], batch=None),)
        return own if source.together or len(own) == layer.batch else ()

    def pictures(self) -> list[Any]:
        """Return the pixels of the pictures that were read last."""
        source = next(reversed(self.sources.values()), None)
        if source is None:
            return [] if self._pixels is None else self._draw(self._pixels)
        source.drawn = source.drawn or source.draw()
        return source.drawn

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise ValueError if no layer has the grid that the caller gave."""
        if self.grid is None or not layers or any(layer.grids for layer in layers):
            return
        rows, columns = (self.grid.rows, self.grid.columns) if isinstance(self.grid, PatchGrid) else self.grid
        counts = ", ".join(str(n) for n in sorted({layer.n_k for layer in layers}))
        raise ValueError(
            f"grid of {rows} × {columns} = {rows * columns} patches fits no layer: layers have {counts} keys that are "
            f"no text, and at most {MOST_PREFIX} tokens may be before the patches"
        )

    def why_not(self) -> str:
        """Return why no layer has a grid, in words."""
        source = next(reversed(self.sources.values()), None)
        if source is None:
            return f"its configuration does not say where its patches are. {GIVE}"
        sizes = ", ".join(f"{rows} × {columns}" for rows, columns in source.sizes[:4])
        return (
            f"none of its attention calls reads the {sizes} patches of its picture in one sequence, as where windows "
            f"are shifted or only some patches are read. {GIVE}"
        )

    def words(self, ids: Array) -> Array:
        """Return the positions of the tokens (b, n) that are no part of a picture in every text."""
        return np.flatnonzero(~np.isin(ids, [self._token(IMAGE_TOKENS), self._token(VIDEO_TOKENS)]).all(axis=0))

    def _token(self, names: Sequence[str]) -> int:
        """Return the id of the tokens of pictures or of videos, −1 if the model has none."""
        return next((x for name in names if isinstance(x := getattr(self.config, name, None), int)), -1)

    def _in_text(self, ids: Array) -> tuple[PatchGrid, ...]:
        pictures, videos = (
            [(batch, np.flatnonzero(row == self._token(names))) for batch, row in enumerate(ids)]
            for names in (IMAGE_TOKENS, VIDEO_TOKENS)
        )
        in_tiles = bool(self._tiles) and any(len(at) for _, at in pictures)
        return (self._in_tiles(pictures) if in_tiles else self._among(pictures, False)) + self._among(videos, True)

    def _among(self, places: Sequence[tuple[int, Array]], video: bool) -> tuple[PatchGrid, ...]:
        """Return the grids of the tokens of pictures, or of videos, in texts."""
        if not any(len(at) for _, at in places):
            return ()
        sources = (x for x in reversed(self.sources.values()) if x.video is video)
        return next((grids for of in sources if (grids := of.among(places))), ())

    def _in_tiles(self, places: Sequence[tuple[int, Array]]) -> tuple[PatchGrid, ...]:
        """Return the grids of pictures that were read whole and in tiles; none if tokens do not fit."""
        tiles, total = self._tiles, sum(x.count for x in self._tiles)
        of = next((x for x in reversed(self.sources.values()) if len(x.sizes) in (total, len(tiles))), None)
        if of is None or not of.pixels or of.sizes[0] != (tiles[0].side, tiles[0].side):
            return ()
        if len(of.sizes) == len(tiles):  # several pictures in a text, which are read without tiles
            tiles = [PictureTiles(x.side) for x in tiles]
        tokens = split(places, [x.length for x in tiles])
        if tokens is None:
            return ()
        read = np.split(values(torch.stack([*of.pixels]).float()), np.cumsum([x.count for x in tiles])[:-1])
        grids: list[PatchGrid] = []
        for number, ((batch, at), x, pixels) in enumerate(zip(tokens, tiles, read, strict=True), 1):
            of_picture = x.grids(at, [self._coloured(one) for one in x.shown(pixels)], batch)
            grids += (
                replace(one, name=f"picture {number}, {one.name}" if len(tiles) > 1 else one.name) for one in of_picture
            )
        return tuple(grids)

    def _nth(self, name: str) -> str:
        """Return the name of another call of a module in this forward."""
        self._times[name] += 1
        return nth(name, self._times[name])

    def _take(self, name: str, source: Source) -> None:
        self.sources.pop(name, None)
        self.sources[name] = source

    def _of_pixels(self, module: Any, given: dict[str, Any]) -> Source | None:
        """Return the pictures that a module is given, in patches of the size that its configuration says."""
        pixels: Any = given.get("pixel_values")
        if not _floats(pixels) or pixels.ndim != 4:
            return None
        self._pixels = pixels = pixels.detach()
        config = getattr(module, "config", None)
        patch = getattr(config, "patch_size", None)
        patch = [patch, patch] if isinstance(patch, int) else patch
        if not isinstance(patch, list | tuple) or len(patch) != 2:
            return None
        if getattr(config, "model_type", "") in BEFORE_OTHERS:
            return None
        height, width = patch
        sizes: Any = given.get("image_sizes")
        padded = sizes is not None  # to one size, as in Pixtral: patches of all pictures are one sequence
        every = sizes if padded else [pixels.shape[2:]] * len(pixels)
        shapes = [(int(y) // height, int(x) // width) for y, x in every]
        read = [x[:, : rows * height, : columns * width] for x, (rows, columns) in zip(pixels, shapes, strict=False)]
        return Source(shapes, lambda: self._draw(read), together=padded, pixels=read)

    def _of_sound(self, module: Any, given: dict[str, Any]) -> Source | None:
        """Return the sounds that a module is given, in the frames that its configuration says."""
        config: Any = getattr(module, "config", None)
        read: Any = next((given[name].detach() for name in SOUNDS if _floats(given.get(name))), None)
        if read is None:
            return None
        rows, columns = 1, int(read.shape[-1])
        if read.ndim == 2 and hasattr(config, "conv_stride"):  # samples (b, n)
            read = read[:, None]
            for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
                columns = (columns - kernel) // stride + 1
        elif read.ndim == 3 and hasattr(config, "time_stride"):  # (b, frames, frequencies), in patches of both
            read, strides = read.mT, (config.frequency_stride, config.time_stride)
            rows, columns = (
                (size - config.patch_size) // stride + 1 for size, stride in zip(read.shape[1:], strides, strict=True)
            )
        elif read.ndim == 3 and hasattr(config, "max_source_positions"):  # (b, frequencies, frames)
            columns = config.max_source_positions
        else:
            return None
        return Source(
            [(rows, columns)] * len(read), lambda: self._draw(read, sound=True), sound=True,
            seconds=self._seconds(read), flipped=rows > 1,
        )  # fmt: skip

    def _of_caller(self, grid: tuple[int, int], n: int) -> Source:
        """Return the pictures that the caller gave the grid of, their patches the last of n keys."""
        shown = self.pictures()
        source = Source([grid] * max(1, len(shown)), lambda: shown)
        source.attended(n)
        return source

    def _draw(self, read: Iterable[torch.Tensor], sound: bool = False) -> list[Any]:
        """Return the pixels of pictures (channels, y, x), or of spectrograms (y, x) or samples (1, n)."""
        every = (values(one.float()) for one in read)
        if not sound:
            return [self._coloured(x) for x in every]
        return [pictures.waveform(x[0]) if len(x) == 1 else pictures.spectrogram(x) for x in every]

    def _coloured(self, x: Array) -> Any:
        mean, std = (getattr(self.image, name, None) for name in ("image_mean", "image_std"))
        return pictures.coloured(x, mean, std) if isinstance(mean, list | tuple) else pictures.coloured(x)

    def _seconds(self, read: torch.Tensor) -> float | None:
        """Return the length of a sound, where the length of its frames is known."""
        rate, hop = (getattr(self.frames, name, None) for name in ("sampling_rate", "hop_length"))
        if read.shape[1] == 1:  # samples
            return read.shape[-1] / rate if rate else None
        each = hop / rate if hop and rate else HOPS.get(getattr(self.config, "model_type", ""))
        return None if each is None else read.shape[-1] * each

    def _of_blocks(self, module: Any, given: dict[str, Any], sizes: torch.Tensor) -> Source:
        """Return the pictures of a model that merges blocks of patches, as Qwen-VL does; of a video, its frames."""
        merge, read = int(module.spatial_merge_size), next(x for x in given.values() if _floats(x)).detach()
        shapes = values(sizes).tolist()
        frames = [(int(h), int(w)) for t, h, w in shapes for _ in range(int(t))]
        video = isinstance(self._video, torch.Tensor) and sizes.data_ptr() == self._video.data_ptr()
        names = frame_names([int(t) for t, _, _ in shapes]) if video else ()
        patch = int(getattr(module, "patch_size", None) or module.config.patch_size)

        def draw() -> list[Any]:
            pictures, start = [], 0
            for rows, columns in frames:
                x = values(read[start : start + rows * columns].float())
                start += rows * columns
                blocks = x.reshape(rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
                of_one = blocks[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)  # the first of two moments in time
                pictures.append(self._coloured(of_one.reshape(3, rows * patch, columns * patch)))
            return pictures

        return Source(frames, draw, together=True, block=merge, names=names, video=video)

    def _of_rows(self, given: dict[str, Any], sizes: torch.Tensor) -> Source:
        """Return the pictures of a model that is given patches in rows, padded at the end, such as SigLIP 2 NaFlex."""
        read = next((x.detach() for x in given.values() if _floats(x) and x.ndim == 3), None)
        shapes = [(int(h), int(w)) for h, w in values(sizes).tolist()]

        def draw() -> list[Any]:
            pictures: list[Any] = []
            for (rows, columns), x in zip(shapes, values(read.float()) if read is not None else (), strict=True):
                patch = round((x.shape[-1] / 3) ** 0.5)
                x_of = x[: rows * columns].reshape(rows, columns, patch, patch, 3)
                pictures.append(self._coloured(x_of.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)))
            return pictures

        return Source(shapes, draw, length=None if read is None else int(read.shape[1]))


def require_patches(model: nn.Module, name: str) -> None:
    """Raise ValueError for a model none of whose configurations has one of `SAY`."""
    configs = (getattr(module, "config", None) for module in model.modules())
    if not any(hasattr(config, say) for config in configs for say in SAY):
        raise ValueError(
            f"a picture goes with a grid of patches, and no configuration of {name} has patch_size. {GIVE}"
        )


def given_queries(queries: Any) -> Array | str | None:
    """Check the argument `queries` of a capture, and return the rows in ascending order, each once."""
    if queries is None or (isinstance(queries, str) and queries == "text"):
        return queries
    try:
        rows = np.unique(np.asarray(queries))
    except (TypeError, ValueError):
        rows = np.zeros(0)
    if isinstance(queries, str) or rows.dtype.kind not in "iu" or not rows.size or rows[0] < 0:
        raise TypeError(f"queries must be rows of a sequence, from 0 on, or 'text', got {queries!r:.60}")
    return rows.astype(np.int64)


def split(places: Sequence[tuple[int, Array]], lengths: Sequence[int]) -> list[tuple[int, Array]] | None:
    """Return the batch element and the tokens of each of some pictures that follow each other in texts.

    places: the positions of all such tokens in each text. lengths: tokens of each picture. None if they do not fit.
    """
    if sum(lengths) != sum(len(at) for _, at in places):
        return None
    ends = np.cumsum(lengths)[:-1]
    batches = np.split(np.concatenate([np.full(len(at), batch) for batch, at in places]), ends)
    tokens = np.split(np.concatenate([at for _, at in places]), ends)
    if any(len(set(of.tolist())) != 1 for of in batches):
        return None
    return [(int(of[0]), at) for of, at in zip(batches, tokens, strict=True)]


def frame_names(counts: Sequence[int]) -> list[str]:
    """Return names of the frames of videos, by the number of frames of each.

    >>> frame_names([2]), frame_names([1, 1])
    (['frame 1', 'frame 2'], ['video 1, frame 1', 'video 2, frame 1'])
    """
    of = (f"video {number}, " if len(counts) > 1 else "" for number in range(1, len(counts) + 1))
    return [f"{video}frame {n}" for video, count in zip(of, counts, strict=True) for n in range(1, count + 1)]


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _blocks(rows: int, columns: int, side: int) -> Array:
    """Return the place of each patch, in row-major order, where square blocks of patches follow each other.

    >>> _blocks(2, 4, 2)
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """
    order = np.arange(rows * columns).reshape(rows // side, columns // side, side, side)
    return order.transpose(0, 2, 1, 3).reshape(-1)
