"""Captures of models, and `regard.capture`.

A `Capture` serves all views of attention. It comes from a model inside of `regard.capture`, a file,
plain arrays, or the example model.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from regard.arguments.packages import require
from regard.arguments.values import type_name
from regard.core import rowsums
from regard.interpret.capture.layers import Layer, Tokens
from regard.interpret.capture.pictures import pixels
from regard.interpret.heads import HeadStatistics
from regard.interpret.streamed import measure_heads
from regard.loaders import loaders

if TYPE_CHECKING:
    from regard.interpret.examplemodel.model import Trace

Array = np.ndarray[Any, np.dtype[Any]]


class Capture(Sequence[Layer]):
    """Layers of a model as they attended to a text, made by `regard.capture`.

    layers: in the order of their first call. tokens: the sequences that the model read, by name.
    model: its name. dropped: the reason for each missing layer, by name: the memory limit, or calls
    that do not form a sequence.

    >>> x = np.random.default_rng(0).standard_normal((2, 5, 4))
    >>> seen = Capture.of_arrays(x, x, tokens=["to", "be", "or", "not", "to"], causal=True)
    >>> seen[0].weights(1).shape, seen.labels(0)[:2]
    ((5, 5), ('to', 'be'))
    >>> seen
    Capture of arrays: 1 layer, 720 bytes
      0  Layer 'attention': 2 heads, 5 queries, 5 keys, d = 4, causal
    """

    def __init__(
        self,
        layers: Iterable[Layer] = (),
        tokens: Mapping[str, Tokens] | None = None,
        model: str = "arrays",
        dropped: Mapping[str, str] | None = None,
    ):
        self.layers = list(layers)
        self.tokens = dict(tokens or {})
        self.model = model
        self.dropped = dict(dropped or {})

    # Constructors

    @classmethod
    def of_arrays(
        cls,
        query: Array,
        key: Array,
        *,
        lse: Array | None = None,
        tokens: Sequence[str] | None = None,
        key_tokens: Sequence[str] | None = None,
        name: str = "attention",
        model: str = "arrays",
        **options: Any,
    ) -> Self:
        """Make a capture of one layer of plain arrays (see `Layer.of`).

        `tokens` are those of the queries, and of the keys unless `key_tokens` is given. `options`
        are those of `regard.attention`.
        """
        sequences, named = {}, {}
        for kind, labels, size in (("query", tokens, query.shape[-2]), ("key", key_tokens, key.shape[-2])):
            if labels is None:
                continue
            if len(labels) != size:
                argument = "tokens" if kind == "query" else "key_tokens"
                raise ValueError(f"{argument} must be one for each {kind}, {size}, got {len(labels)}")
            sequences[kind] = Tokens(labels=(tuple(labels),) * (query.shape[0] if query.ndim > 3 else 1))
            named[f"{kind}_tokens"] = kind
        if tokens is not None and key_tokens is None and key.shape[-2] == query.shape[-2]:
            named["key_tokens"] = "query"
        return cls([Layer.of(name, query, key, lse=lse, **named, **options)], sequences, model)

    @classmethod
    def of_trace(cls, trace: Trace, labels: Sequence[str] | None = None) -> Self:
        """Make a capture of a run of the example model, `regard.examplemodel`.

        >>> from regard.examplemodel import ExampleModel
        >>> model = ExampleModel.load()
        >>> ids = model.encode("to be")
        >>> Capture.of_trace(model.run(ids), model.labels(ids)).labels(2)
        ('⟨bos⟩', 't', 'o', '␣', 'b', 'e')
        """
        ids = trace.ids.reshape(-1, trace.ids.shape[-1])
        options = {"causal": trace.causal, "scale": trace.scale, "query_tokens": "text", "key_tokens": "text"}
        layers = [
            Layer.of(f"layers.{n}", q, k, lse=lse, number=n, **options)
            for n, (q, k, lse) in enumerate(zip(trace.q, trace.k, trace.lse, strict=True))
        ]
        shown = None if labels is None else (tuple(labels),) * len(ids)
        return cls(layers, {"text": Tokens(ids, shown)}, "regard's example model, a byte-level decoder")

    # Files

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, completely or not at all; raise OSError on failure."""
        require("a capture's file", "ml_dtypes")
        from regard.interpret.capture import files

        files.write(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a capture that `save` wrote.

        Arrays stay in the file until they are read. Raises OSError if the file cannot be read.
        Raises ValueError if it is not a capture, if it is damaged, or if the weights of sampled
        rows do not sum to 1.
        """
        require("a capture's file", "ml_dtypes", "safetensors")
        from regard.interpret.capture import files

        loaded = cls(**files.read(Path(path)))
        try:
            loaded._check(pairs=rowsums.ON_LOADING)
        except ValueError as error:
            raise ValueError(f"{path} is no sound capture: {error}") from None
        return loaded

    def showing(self, image: Any) -> Self:
        """Return this capture with a picture below the single grid of its layers.

        image: a path, a picture of Pillow, or pixels (height, width, 3) of uint8, cropped as the
        model saw it. Raises ValueError for a capture without a grid, or of several pictures.
        """
        if not any(layer.grids for layer in self.layers):
            raise ValueError("image goes with a grid of patches, and no layer has one; give grid=(rows, columns)")
        if any(len(layer.grids) > 1 for layer in self.layers):
            raise ValueError("image is for a single picture, and this model read several")
        shown = pixels(image)
        layers = [replace(x, grids=tuple(replace(grid, picture=shown) for grid in x.grids)) for x in self.layers]
        return type(self)(layers, self.tokens, self.model, self.dropped)

    # Layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, which: Any) -> Any:
        """Return a layer by number or by name, or the layers of a slice."""
        if isinstance(which, str):
            for layer in self.layers:
                if layer.name == which:
                    return layer
            raise KeyError(f"no layer {which!r}; layers: {[layer.name for layer in self.layers]}")
        return self.layers[which]

    @property
    def numbers(self) -> list[int]:
        """The model's number of each layer."""
        return [n if layer.number is None else layer.number for n, layer in enumerate(self.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the queries, keys and lse of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def labels(self, layer: int | str, axis: str = "query", batch: int = 0) -> tuple[str, ...] | None:
        """Return the labels of the queries or keys of a layer; None where unknown."""
        tokens, rows = self._read(layer, axis)
        if tokens is None or tokens.labels is None:
            return None
        return tuple(tokens.labels[batch][row] for row in rows) if rows else tokens.labels[batch]

    def ids(self, layer: int | str, axis: str = "query") -> Array | None:
        """Return the token ids of the queries or keys of a layer, (b, n), if known."""
        tokens, rows = self._read(layer, axis)
        if tokens is None or tokens.ids is None:
            return None
        return tokens.ids[:, list(rows)] if rows else tokens.ids

    def _read(self, layer: int | str, axis: str) -> tuple[Tokens | None, tuple[int, ...]]:
        """Return the sequence of the queries or keys of a layer, and the rows of it that were kept, () for all."""
        of = self[layer]
        return self.tokens.get(getattr(of, f"{axis}_tokens") or ""), of.rows if axis == "query" else ()

    def measure(self, *, prefix: int = 1) -> tuple[HeadStatistics, ...]:
        """Compute the statistics of every head in O(n) memory.

        Statistics are defined by `regard.insight.measure_heads`. `layer`, `head` and `kv_head` are
        the model's numbers (`numbers`, `Layer.numbers`). NaN: scores of copies without token ids,
        and those of positions in cross-attention and where some queries alone were kept.
        """
        statistics = []
        for n, (of_model, layer) in enumerate(zip(self.numbers, self.layers, strict=True)):
            apart = layer.cross or bool(layer.rows)  # the place of a query in its arrays is not that among the keys
            ids = None if apart else self.ids(n, "key")
            for head in measure_heads(**layer.all_heads, ids=ids, layer=of_model, prefix=prefix):
                number = layer.numbers[head.head]
                nothing: dict[str, Any] = {"previous": math.nan, "current": math.nan} if apart else {}
                statistics.append(replace(head, head=number, kv_head=layer.kv_head(number), **nothing))
        return tuple(statistics)

    def check(self, rows: int = 3, most: float = 8.0) -> None:
        """Check on sampled rows that weights sum to 1 (see `Layer.deviation`).

        Raises ValueError otherwise: rules, keys and lse of a layer do not belong together. Raises
        it too where the lse of any row is NaN or +∞, for then its weights are NaN.
        """
        for layer in self.layers:
            unsound = np.argwhere(~(layer.lse < np.inf))
            if len(unsound):
                _, head, row = unsound[0].tolist()
                raise ValueError(
                    f"the weights of layer {layer.name!r} do not sum to 1: those of row {row} of head "
                    f"{layer.numbers[head]} are nan, since its query or a key that it sees has nan or inf"
                )
        self._check(rows, most)

    def _check(self, rows: int = 3, most: float = rowsums.MOST, pairs: int | None = None) -> None:
        for layer in self.layers:
            worst = layer.farthest(rows, pairs)
            if worst is not None and not worst.roundings <= most:
                raise ValueError(
                    f"the weights of layer {layer.name!r} do not sum to 1: those of row {worst.row} of head "
                    f"{layer.numbers[worst.head % layer.heads]} sum to {worst.total}; its queries, keys, rules and "
                    "lse do not belong together"
                )

    def __repr__(self) -> str:
        count = f"{len(self)} layer{'' if len(self) == 1 else 's'}"
        lines = [f"Capture of {self.model}: {count}, {_size(self.nbytes)}"]
        lines += [f"  {n}  {layer!r}" for n, layer in enumerate(self.layers)]
        lines += [f"  not kept: {name}, {size}" for name, size in self.dropped.items()]
        return "\n".join(lines)


def capture(
    model: Any,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    memory: int | None = None,
    path: str | Path | None = None,
    tokenizer: Any = None,
    grid: Any = None,
    image: Any = None,
    queries: Any = None,
) -> AbstractContextManager[Capture]:
    """Record a model's attention inside of a `with`, as a `Capture`.

    The `Capture` is filled at the end of the `with`.

        with regard.capture(model, tokenizer=tokenizer) as seen:
            model.generate(**tokenizer("to be or not", return_tensors="pt"))
        seen[0].weights(head=3)
        seen.measure()
        seen.save("seen.safetensors")

    It stores the queries, keys, lse and rules of each layer. Weights follow from them, exactly, at
    any length. The model is one of transformers, which takes `attn_implementation="regard"` for the
    time being, or any `torch.nn.Module` that calls `F.scaled_dot_product_attention` or
    `regard.attention`. Calls that continue the last ones, as in generation with a cache, form one
    sequence. Any other call replaces the earlier ones. A module that is called several times in a
    forward has a layer for each: "attention", "attention#2". The documentation has a table of what
    holds; where a layer does not show what the model did, one warning says so.

    Args:
        model: the module to record.
        layers: the layers to record: numbers in the order of their first call, or names of modules,
            with * for anything ("decoder.*"). All by default.
        heads: the query heads to record, by number. All by default. They keep the model's numbers:
            with ``heads=[3]``, ``seen[0].weights(3)`` is the one that is there.
        memory: maximum bytes of queries, keys, lse and biases. A layer beyond that is left out,
            with a reason in `seen.dropped` and a warning.
        path: a file to write, as `seen.save` does. The arrays of `seen` are then mapped from it.
            Until it is complete, they are in a folder next to it.
        tokenizer: for labels, a tokenizer of transformers, or a function from a list of ids to
            strings. A processor of transformers also tells how pixels were normalized, and how long
            a sound is.
        grid: the (rows, columns) of a picture's patches, for a model without a configuration of
            transformers that has `patch_size`, such as DETR or a model of timm: (14, 14) for
            224 × 224 pixels in patches of 16 × 16. The patches are the last rows · columns of the
            keys that are no text, row by row. `Layer.grids` has them.
        image: what to show of a single picture in place of the model's input, as the model saw it:
            a path, a picture of Pillow, or pixels (height, width, 3) of uint8. It covers the grid.
        queries: the queries to keep in each layer, with all keys, as rows of its sequence; or
            "text": those that are no tokens of a picture, of layers that read a text. Their rows
            are `Layer.rows`. All by default: 16,384 picture tokens then take 1.5 times the memory
            of the run alone. A text is to be read in one forward, not generated.

    The model is recorded in any thread, one run at a time; runs that begin while another is
    recorded are counted in a warning. Nested captures record what runs under their own modules.

    Raises RuntimeError if no attention was seen. Raises ValueError if weights of sampled rows do
    not sum to 1, or if those of any row are NaN (`Capture.check`).

    >>> import torch, regard.torch
    >>> model = regard.torch.Transformer(2, 32, 4, causal=True)
    >>> with regard.capture(model) as seen:
    ...     out = model(torch.randn(1, 10, 32))
    >>> [layer.name for layer in seen], seen[1].weights(0).shape
    (['blocks.0.attention', 'blocks.1.attention'], (10, 10))
    >>> with regard.capture(model, grid=(3, 3)) as seen:  # a class token, and 3 × 3 patches
    ...     out = model(torch.randn(1, 10, 32))
    >>> seen[0].grids[0].tokens.reshape(3, 3)
    array([[1, 2, 3],
           [4, 5, 6],
           [7, 8, 9]])
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type_name(model)}")
    if path is not None:  # which is read again at the end
        require("a capture's file", "ml_dtypes", "safetensors")
    recorder = loaders["torch.capture"]()
    seen: AbstractContextManager[Capture] = recorder.capture(
        model, layers=layers, heads=heads, memory=memory, path=path, tokenizer=tokenizer, grid=grid, image=image,
        queries=queries,
    )  # fmt: skip
    return seen


def _size(n: int) -> str:
    """Format a number of bytes.

    >>> _size(640), _size(3_500_000)
    ('640 bytes', '3.3 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"
