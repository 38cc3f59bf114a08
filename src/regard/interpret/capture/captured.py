"""What attention was made of: the queries, keys, lse and rules of a model's layers, from which any weight follows.

One `Capture` serves everything that looks at attention, wherever it comes from: a model that ran inside of
`regard.capture`, a file, plain arrays, the example model.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

import regard
from regard.core import rowsums
from regard.core.statistics import Seen, Statistic
from regard.engines import choose
from regard.ops.attention import problem_from
from regard.rules import Mask, Score, Traced, as_mask, as_score, reads, type_name
from regard.rules.expression import make, rebuild, substitute
from regard.runtime.forks import cached_property

if TYPE_CHECKING:
    from regard.examplemodel import Trace
    from regard.insight import HeadStatistics

Array = np.ndarray[Any, np.dtype[Any]]

OPTIONS = ("mask", "causal", "score", "bias", "scale", "sink", "offset", "origin")
RULES: dict[str, Any] = {"mask": (Mask, as_mask), "score": (Score, as_score)}


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of attention that was seen, or many that make one sequence; arrays may be mapped from a file.

    query (b, h, n_q, d), key (b, h_kv, n_k, d), lse (b, h, n_q), float32 (float64 for float64). `options` are those of
    `regard.attention` that have a say: mask, causal, score, bias, scale, sink, offset, origin. `cross`: the keys are
    those of another sequence. `query_tokens`, `key_tokens`: the names of the sequences in `Capture.tokens` that its
    queries and keys are the tokens of. `numbers`: which of the model's heads those of `query` are, and `group`, how
    many of those share a key-value head; where not all were kept, `kv_numbers` says which key-value heads were.
    `number`: which of the model's layers it is, in the order of their first calls, those that were not kept counted;
    None: its place in the capture.

    `attention` takes the parts of a layer that `arguments` gives as they are, so every statistic is at hand:

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 4, 300, 8))
    >>> layer = Layer.of("first", q, k[:, :2], causal=True)
    >>> layer
    Layer 'first': 4 heads over 2, 300 queries, 300 keys, d = 8, causal
    >>> layer.weights(3, rows=slice(10, 12)).sum(-1).round(6)
    array([1., 1.])
    >>> layer.observe(["entropy"], head=3).entropy.shape
    (300,)
    """

    name: str
    query: Array
    key: Array
    lse: Array
    options: Mapping[str, Any] = field(default_factory=dict)
    cross: bool = False
    query_tokens: str | None = None
    key_tokens: str | None = None
    numbers: tuple[int, ...] = ()
    kv_numbers: tuple[int, ...] = ()
    group: int = 1
    number: int | None = None

    @classmethod
    def of(cls, name: str, query: Array, key: Array, *, lse: Array | None = None, **options: Any) -> Self:
        """A layer from arrays (n, d), (h, n, d) or (b, h, n, d); without `lse` (..., h, n_q) one pass makes it.

        `options` are those of `regard.attention` and fields of the layer. Raises TypeError and ValueError as
        `regard.attention` does, and ValueError for an lse of another call.
        """
        known = ("cross", "query_tokens", "key_tokens", "number")
        fields = {field: options.pop(field) for field in known if field in options}
        for option in options:
            if option not in OPTIONS:
                raise TypeError(f"{option} is not an option that a layer keeps; those are {', '.join(OPTIONS)}")
        given = {option: x for option, x in options.items() if x is not None and x is not False}
        for option, (_, rule) in RULES.items():
            if option in given:
                given[option] = rule(given[option])
        if max(query.ndim, key.ndim) > 4:
            raise ValueError(f"query and key of a layer have at most (b, h, n, d), got {query.shape} and {key.shape}")
        p = problem_from(query, key, key, **given)
        q, k = (np.broadcast_to(x, (*p.lead, *x.shape[-3:])) for x in (p.query, p.key))
        if lse is None:
            lse = regard.attention(q, k, k[..., :0], observe=["lse"], **given)[1].lse
        if p.batch == 0 or 0 in q.shape:
            raise ValueError(f"a layer has at least one query, head and feature, got query {query.shape}")
        lse = rowsums.taken(p, lse)
        q, k = (x.reshape(p.batch, *x.shape[-3:]) for x in (q, k))
        h = q.shape[1]
        return cls(
            name, q, k, lse.reshape(q.shape[:3]), given, **fields,
            numbers=tuple(range(h)), kv_numbers=tuple(range(k.shape[1])), group=h // k.shape[1],
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return int(self.query.shape[0])

    @property
    def heads(self) -> int:
        """Query heads that were kept; `numbers` says which of the model's they are."""
        return int(self.query.shape[1])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[1])

    @property
    def n_q(self) -> int:
        return int(self.query.shape[2])

    @property
    def n_k(self) -> int:
        return int(self.key.shape[2])

    @property
    def d(self) -> int:
        return int(self.query.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of query, key and lse."""
        return self.query.nbytes + self.key.nbytes + self.lse.nbytes

    @cached_property
    def together(self) -> dict[str, Any]:
        """What `regard.attention` takes for all heads but the value: query, key and the options.

        Where not all heads of the model were kept, each has its keys, and rules that read h are given its number.
        """
        if self.numbers == tuple(range(self.heads)) and self.heads == self.group * self.kv_heads:
            return {"query": self.query, "key": self.key, **self.options}
        numbers, options = regard.table(np.array(self.numbers)), dict(self.options)
        h = Traced(make("h", "int"))
        for name, (kind, _) in RULES.items():
            if name in options and "h" in reads(options[name].node):
                rule = options[name]
                requires = tuple(need for need in rule.requires if need.axis != "h")
                options[name] = kind(substitute(rule.node, {h.node: numbers[h].node}), rule.text, requires)
        key = self.key[:, [self.kv_numbers.index(self.kv_head(head)) for head in range(self.heads)]]
        return {"query": self.query, "key": key, **options}

    def kv_head(self, head: int) -> int:
        """The model's number of the key-value head that a head reads."""
        return self.numbers[head] // self.group

    def arguments(self, head: int, batch: int = 0) -> dict[str, Any]:
        """What `regard.weights` takes for one head: query (n_q, d), key (n_k, d), lse (n_q,) and the options.

        Views, nothing is copied; rules see the head's number and the batch index that they saw in the model.
        """
        head, batch = _index("head", head, self.heads), _index("batch", batch, self.batch)
        options = dict(self.options)
        b, _, j = options.get("origin", (0, 0, 0))

        def part(x: Array) -> Array:
            """Of an array that aligns right to (b, h, n_q, n_k), what belongs to this head."""
            x = x.reshape((1,) * (4 - x.ndim) + x.shape)
            found: Array = x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
            return found

        if "bias" in options:
            options["bias"] = part(options["bias"])
        if "mask" in options and options["mask"].dense:
            payloads = {id(x): part(x) for x in options["mask"].dense}
            rule = options["mask"]
            options["mask"] = Mask(rebuild(rule.node, payloads), rule.text, rule.requires)
        if "sink" in options and options["sink"].ndim:
            options["sink"] = options["sink"][head : head + 1]
        if isinstance(options.get("offset"), np.ndarray):
            options["offset"] = int(np.broadcast_to(options["offset"], (self.batch,))[batch])
        return {
            "query": self.query[batch, head],
            "key": self.key[batch, self.kv_numbers.index(self.kv_head(head))],
            "lse": self.lse[batch, head],
            **options,
            "origin": (b + batch, self.numbers[head], j),
        }

    def weights(self, head: int, rows: slice = slice(None), cols: slice = slice(None), batch: int = 0) -> Array:
        """A tile of the weights of one head, exactly, in the dtype of lse: (rows, cols)."""
        given = self.arguments(head, batch)
        lse = given.pop("lse")
        p = problem_from(value=given["key"], **given)
        tile = choose(p, None).weights(p, lse[None], range(self.n_q)[rows], range(self.n_k)[cols])
        return np.asarray(tile[0])

    def observe(self, observe: Sequence[str | Statistic], *, head: int | None = None, batch: int = 0) -> Seen:
        """Statistics in O(n) memory, as `observe=` of `regard.attention` has them: of one head without the leading
        axes, else of all heads and batch elements (b, h, ...).
        """
        if head is None:
            given = self.together
            return cast(Seen, regard.attention(value=given["key"][..., :0], observe=observe, **given)[1])
        given = self.arguments(head, batch)
        given.pop("lse")
        return cast(Seen, regard.attention(value=given["key"][:, :0], observe=observe, **given)[1])

    def deviation(self, rows: int = 3) -> float:
        """How far the weights of sampled rows are from summing to what they must, in units of rounding.

        With every key, Σ_j exp(S[i, j] − lse[i]) is 1 less the sink's weight, and 0 for a row that sees nothing. The
        unit is what rounding lse and scores costs (`regard.core.rowsums`); more than some 8 of it means that the rules,
        the keys or lse do not belong together.
        """
        found = self.farthest(rows)
        return 0.0 if found is None else found.roundings

    def farthest(self, rows: int = 3, pairs: int | None = None) -> rowsums.RowSum | None:
        """The sampled row whose weights are farthest from summing to 1, see `regard.core.rowsums.deviation`."""
        given = self.together
        p = problem_from(value=given["key"], **given)
        return rowsums.deviation(p, self.lse, range(self.n_q), rows, pairs)

    def __repr__(self) -> str:
        over = f" over {self.kv_heads}" if self.kv_heads != self.heads else ""
        rules = [repr(self.options[name]) for name in ("mask", "score") if name in self.options]
        rules += [name for name in ("bias", "sink", "causal") if name in self.options]
        words = [
            f"{self.heads} head{'' if self.heads == 1 else 's'}{over}", f"{self.n_q} queries", f"{self.n_k} keys",
            f"d = {self.d}", *(["cross"] if self.cross else []), *rules,
        ]  # fmt: skip
        return f"Layer {self.name!r}: {', '.join(words)}"


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence that a model read: ids (b, n), where they are known, and what to show for each, by batch element."""

    ids: Array | None = None
    labels: tuple[tuple[str, ...], ...] | None = None

    @property
    def n(self) -> int:
        if self.ids is not None:
            return int(self.ids.shape[-1])
        return len(self.labels[0]) if self.labels else 0


class Capture(Sequence[Layer]):
    """The layers of a model as they attended to a text, made by `regard.capture`.

    layers: in the order of their first call. tokens: the sequences that the model read, by name.
    model: its name. dropped: the names of layers that were not kept, and why: want of memory, or
    calls that make no sequence.

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

    # Where captures come from

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

        `tokens` are those of the queries, and of the keys unless `key_tokens` are given. `options`
        are those of `regard.attention`.
        """
        sequences, named = {}, {}
        for kind, given, size in (("query", tokens, query.shape[-2]), ("key", key_tokens, key.shape[-2])):
            if given is None:
                continue
            if len(given) != size:
                argument = "tokens" if kind == "query" else "key_tokens"
                raise ValueError(f"{argument} must be one for each {kind}, {size}, got {len(given)}")
            sequences[kind] = Tokens(labels=(tuple(given),) * (query.shape[0] if query.ndim > 3 else 1))
            named[f"{kind}_tokens"] = kind
        if tokens is not None and key_tokens is None and key.shape[-2] == query.shape[-2]:
            named["key_tokens"] = "query"
        return cls([Layer.of(name, query, key, lse=lse, **named, **options)], sequences, model)

    @classmethod
    def of_trace(cls, trace: Trace, labels: Sequence[str] | None = None) -> Self:
        """A run of the example model, `regard.examplemodel`.

        >>> from regard.examplemodel import ExampleModel
        >>> model = ExampleModel.load()
        >>> ids = model.encode("to be")
        >>> Capture.of_trace(model.run(ids), model.labels(ids)).labels(2)
        ('⟨bos⟩', 't', 'o', '␣', 'b', 'e')
        """
        ids = trace.ids.reshape(-1, trace.ids.shape[-1])
        given = {"causal": trace.causal, "scale": trace.scale, "query_tokens": "text", "key_tokens": "text"}
        layers = [
            Layer.of(f"layers.{n}", q, k, lse=lse, number=n, **given)
            for n, (q, k, lse) in enumerate(zip(trace.q, trace.k, trace.lse, strict=True))
        ]
        shown = None if labels is None else (tuple(labels),) * len(ids)
        return cls(layers, {"text": Tokens(ids, shown)}, "regard's example decoder over bytes")

    # Files

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file, whole or not at all, or raise OSError."""
        from regard.interpret.capture import files

        files.write(Path(path), self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A capture that `save` wrote; its arrays stay in the file until they are read.

        Raises OSError if the file cannot be read, ValueError if it is not a capture, if it is
        damaged, or if the weights of sampled rows do not sum to 1."""
        from regard.interpret.capture import files

        found = cls(**files.read(Path(path)))
        try:
            found._check(pairs=rowsums.ON_LOADING)
        except ValueError as error:
            raise ValueError(f"{path} is no sound capture: {error}") from None
        return found

    # What there is to see

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, which: Any) -> Any:
        """A layer by number or by name, or the layers of a slice."""
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
        """What to show for each query or key of a layer; None where nothing is known of them."""
        known = self.tokens.get(getattr(self[layer], f"{axis}_tokens") or "")
        return None if known is None or known.labels is None else known.labels[batch]

    def ids(self, layer: int | str, axis: str = "query") -> Array | None:
        """The token ids of the queries or keys of a layer, (b, n), where they are known."""
        known = self.tokens.get(getattr(self[layer], f"{axis}_tokens") or "")
        return None if known is None else known.ids

    def measure(self, *, prefix: int = 1) -> tuple[HeadStatistics, ...]:
        """The statistics of every head (`regard.insight.measure_heads`), in O(n) memory.

        `layer`, `head` and `kv_head` are the model's numbers (`numbers`, `Layer.numbers`). NaN is
        what has no meaning: scores of copies without token ids, and those of positions in
        cross-attention."""
        from regard.insight import measure_heads

        found = []
        for n, (of_model, layer) in enumerate(zip(self.numbers, self.layers, strict=True)):
            ids = self.ids(n, "key") if not layer.cross else None
            for head in measure_heads(**layer.together, ids=ids, layer=of_model, prefix=prefix):
                number = layer.numbers[head.head]
                nothing: dict[str, Any] = {"previous": math.nan, "current": math.nan} if layer.cross else {}
                found.append(replace(head, head=number, kv_head=layer.kv_head(head.head), **nothing))
        return tuple(found)

    def check(self, rows: int = 3, most: float = 8.0) -> None:
        """Check on sampled rows that weights sum to 1 (see `Layer.deviation`).

        Raises ValueError for a layer in which they do not: its rules, keys and lse do not belong
        together.
        """
        self._check(rows, most)

    def _check(self, rows: int = 3, most: float = rowsums.MOST, pairs: int | None = None) -> None:
        for layer in self.layers:
            found = layer.farthest(rows, pairs)
            if found is not None and not found.roundings <= most:
                raise ValueError(
                    f"the weights of layer {layer.name!r} do not sum to 1: those of row {found.row} of head "
                    f"{layer.numbers[found.head % layer.heads]} sum to {found.total}; its queries, keys, rules and "
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
) -> AbstractContextManager[Capture]:
    """Record what a model attends to inside of a `with`, as a `Capture` that its end fills.

        with regard.capture(model, tokenizer=tokenizer) as seen:
            model.generate(**tokenizer("to be or not", return_tensors="pt"))
        seen[0].weights(head=3)
        seen.measure()
        seen.save("seen.safetensors")

    Of each layer its queries, keys and lse are kept and the rules that it follows, not the weights:
    they follow from those, exactly, at any length. The model is one of transformers, which takes
    `attn_implementation="regard"` for the time being, or any `torch.nn.Module` that calls
    `F.scaled_dot_product_attention` or `regard.attention`. Calls that go on where the last ones
    ended, as in generation with a cache, make one sequence; any other call takes the place of what
    was there. (Beam search gives its caches other contents on the way, so that only its last steps
    are kept.)

    Args:
        model: the module to be looked at.
        layers: which to keep: numbers in the order of their first call, or names of modules, with *
            for anything ("decoder.*"); all unless given.
        heads: which query heads to keep, by number; all unless given.
        memory: the most bytes of queries, keys, lse and biases that are kept. A layer that would
            take more is left out, and `seen.dropped` says so, as does a warning.
        path: a file to keep everything in, as `seen.save` writes it, from which the arrays of
            `seen` are then mapped; until it is whole, they are in a folder beside it.
        tokenizer: for labels, a tokenizer of transformers, or a function from a list of ids to
            strings.

    Raises RuntimeError if the model ran and no attention was seen, ValueError if weights of sampled
    rows do not sum to 1 (`Capture.check`).

    >>> import torch, regard.torch
    >>> model = regard.torch.Transformer(2, 32, 4, causal=True)
    >>> with regard.capture(model) as seen:
    ...     out = model(torch.randn(1, 10, 32))
    >>> [layer.name for layer in seen], seen[1].weights(0).shape
    (['blocks.0.attention', 'blocks.1.attention'], (10, 10))
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type_name(model)}")
    from regard.torch import capturing

    return capturing.capture(model, layers=layers, heads=heads, memory=memory, path=path, tokenizer=tokenizer)


def _index(name: str, x: int, size: int) -> int:
    if not -size <= x < size:
        raise IndexError(f"{name} {x} does not exist: there are {size}")
    return x % size


def _size(n: int) -> str:
    """Bytes, as they are read.

    >>> _size(640), _size(3_500_000)
    ('640 bytes', '3.3 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"
