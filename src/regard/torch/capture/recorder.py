"""`regard.capture` for PyTorch: records attention calls by module.

While a module of the model runs, calls of attention in its thread go through `regard.attention` (`runs`, `switched`).
A call belongs to the innermost module. Calls whose queries and keys are views of one tensor, one behind the other, are
pieces of a layer. Any other is a layer, or goes on with the last call of one.
"""

import fnmatch
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, Self
from weakref import ref

import numpy as np
import torch
from torch import nn

from regard.core.layout import Layout
from regard.interpret.capture.calls import CallSequence, CapturedCall, Continuation
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import given_grid
from regard.interpret.capture.joining import ArrayStore, JoinedCalls, UnjoinableCalls
from regard.interpret.capture.layers import Layer, Tokens
from regard.interpret.capture.pictures import pixels
from regard.runtime.memory import unpooled
from regard.torch.capture.grids import GridRecorder, given_queries, require_patches
from regard.torch.capture.runs import Runs
from regard.torch.capture.switched import on_regard
from regard.torch.capture.texts import ReadText, RunningModule, Texts, nth
from regard.torch.dropins import transformers as interface
from regard.torch.public.attention import attention, in_numpy
from regard.torch.tensors import process_group
from regard.torch.tensors.arrays import autocast
from regard.warning import RegardWarning

Array = np.ndarray[Any, np.dtype[Any]]

MARKS = {"Ġ": " ", "▁": " ", "Ċ": "\n"}
"""Marks of tokenizers for a space and for a newline."""

OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")
"""Names in transformers of the states that a cross-attention reads keys from."""


@contextmanager
def capture(
    model: nn.Module,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    memory: int | None = None,
    path: str | Path | None = None,
    tokenizer: Any = None,
    grid: Any = None,
    image: Any = None,
    queries: Any = None,
    gridded: bool = False,
    values: dict[str, Array] | None = None,
) -> Iterator[Capture]:
    """Record a model; see `regard.capture`.

    gridded: raise ValueError if no layer has a grid. values: is filled with the values (b, h_kv, n_k, d_v) of each
    layer that one call made.
    """
    labels, grid = _labels(tokenizer), given_grid(grid)
    shown = None if image is None else pixels(image)
    seen = Capture(model=_name(model))
    if grid is None and shown is not None:
        require_patches(model, seen.model)
    process_group.refuse("a recorder of attention", "record one process")
    with ExitStack() as stack:
        folder = None
        if path is not None:
            folder = Path(tempfile.mkdtemp(prefix=".regard-", dir=Path(path).absolute().parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        recorder = Recorder(model, layers, heads, memory, folder, values, given_queries(queries))
        recorder.read = GridRecorder(model, tokenizer, grid)
        with ExitStack() as switched:
            switched.enter_context(on_regard(model, recorder.own_attention, recorder.sorted_by))
            switched.enter_context(recorder.runs.hooked())
            switched.enter_context(unpooled())
            yield seen
        seen.layers, seen.tokens = recorder.finished(labels)
        seen.dropped = recorder.dropped
        if (shown is not None or gridded) and recorder.calls and not any(layer.grids for layer in seen.layers):
            raise ValueError(
                f"a picture goes with a grid of patches, and {seen.model} has none: {recorder.read.why_not()}"
            )
        if shown is not None:
            seen.layers = seen.showing(shown).layers
        if path is not None:
            seen.save(path)
            saved = Capture.load(path)
            seen.layers, seen.tokens = saved.layers, saved.tokens
    if not recorder.calls:
        reason = (
            "it calls neither regard.attention nor F.scaled_dot_product_attention, or does so in a compiled graph"
            if recorder.runs.count
            else "no forward of it ran"
        )
        raise RuntimeError(f"no attention was seen in {seen.model}: {reason}")
    seen.check()
    for message in recorder.warnings():
        warnings.warn(message, RegardWarning, stacklevel=3)


def _name(model: nn.Module) -> str:
    """Return the model's class, and its name on a hub or the last part of its folder's path.

    Captures and pages are passed on, so they hold no path of the machine that made them.
    """
    written = str(getattr(getattr(model, "config", None), "name_or_path", ""))
    path = PureWindowsPath(written)  # of both kinds of slashes
    local = path.root or path.drive or written.startswith((".", "~")) or len(path.parts) > 2 or Path(written).is_dir()
    return f"{type(model).__name__} {path.name if local else written}".strip()


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in memory, which it does not keep alive.

    storage: dead once the memory may belong to another tensor.
    """

    storage: ref[torch.UntypedStorage]
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Self:
        return cls(ref(x.untyped_storage()), x.dtype, x.shape, x.stride(), x.storage_offset())

    def holds(self, x: torch.Tensor) -> bool:
        """Return True if `x` is the tensor, or one with the same numbers."""
        return self._shares(x) and self.shape == x.shape and self.offset == x.storage_offset()

    def precedes(self, x: torch.Tensor, axis: int) -> bool:
        """Return True if `x` is a view of the same tensor, behind this one along an axis."""
        if not self._shares(x):
            return False
        shape = list(self.shape)
        shape[axis] = x.shape[axis]
        end = self.offset + self.shape[axis] * self.stride[axis]
        return shape == list(x.shape) and end == x.storage_offset()

    def _shares(self, x: torch.Tensor) -> bool:
        same = self.dtype == x.dtype and self.stride == x.stride()
        return same and self.storage() is x.untyped_storage()


@dataclass(frozen=True)
class _LastCall:
    """The last call, whose tensors another may go on with."""

    layer: str
    query: _Place
    key: _Place
    rows: int


class Recorder:
    """Recorder of attention calls while a model runs, layer by layer."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int | str] | None,
        heads: Sequence[int] | None,
        memory: int | None,
        folder: Path | None,
        values: dict[str, Array] | None = None,
        queries: Array | str | None = None,
    ):
        self.values, self.queries = values, queries
        self.model, self.layers, self.heads, self.memory = model, layers, heads, memory
        self.store = ArrayStore(folder)
        self.calls = 0
        self.runs = Runs(model, self.attention, self._begin, self._enter)
        self.seen: dict[str, CallSequence] = {}  # by name, in the order of first calls
        self.kept: dict[str, JoinedCalls] = {}
        self.lengths: dict[str, Callable[[], Any] | None] = {}
        self.belongs: dict[str, tuple[ReadText | None, ReadText | None]] = {}
        self.dropped: dict[str, str] = {}
        self.begun_later: set[str] = set()
        self.unlike: set[str] = set()
        self.texts = Texts()
        self.read = GridRecorder(model)
        self._how: Continuation | None = None
        self._times: Counter[str] = Counter()  # in this forward of the model

    # Runs and their texts

    def _begin(self) -> None:
        self.store.forget()
        self.read.begin()
        self._times.clear()
        self.texts.times.clear()

    def _enter(self, modules: list[RunningModule], names: tuple[str, ...]) -> None:
        new = modules[-1]
        self.texts.read(new.name, new.given, "input_ids" in names, len(modules) - 1)
        self.read.entering(new.name, new.module, new.given)

    # Attention calls

    def attention(self, query: Any, key: Any, value: Any, *, observe: Any = (), **options: Any) -> Any:
        """Compute and record `regard.attention` on tensors."""
        if not self.runs.here.modules:
            return attention(query, key, value, observe=observe, **options)
        asked = tuple(observe)
        with_lse = asked if "lse" in asked else (*asked, "lse")
        observed = attention(query, key, value, observe=with_lse, **options)
        *results, seen = observed
        with self.runs.lock:
            if self.runs.recording:
                self._record(query, key, value, seen.lse, {name: x for name, x in options.items() if x is not None})
        if asked:
            results.append(seen)
        return results[0] if len(results) == 1 else tuple(results)

    def own_attention(
        self, function: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **given: Any
    ) -> Any:
        """Call a user's own function of transformers' attention interface.

        Arguments are recorded if the function calls no attention that is recorded.
        """
        before = self.runs.here.last
        result = function(module, query, key, value, attention_mask, **given)
        if self.runs.here.last is not before or not self.runs.recording:
            return result
        names = (interface.attention.__kwdefaults__ or {}).keys() - {"dropout", "output_attentions", "cache"}
        with torch.no_grad():
            options = {name: x for name, x in given.items() if name in names}
            ours, _ = interface.attention(module, query, key, value, attention_mask, **options)
            sees = ours.ne(0).any(-1)  # what a query that sees nothing gives differs from function to function
            ours, theirs = ours[sees], result[0].reshape(ours.shape)[sees]
            near = torch.finfo(ours.dtype).eps ** 0.5 * ours.abs().max()
            if not (theirs - ours).abs().max() <= near:
                self.unlike.add(getattr(function, "__name__", type(function).__name__))
        return result

    def sorted_by(self, index: torch.Tensor, bounds: torch.Tensor) -> None:
        """Note that the running module sorts its patches by windows.

        index: of the patches, or of groups of as many patches; bounds: of the windows, in patches.
        """
        if self.runs.recording:
            group = int(bounds[-1]) // len(index)
            rows = index.cpu().numpy()[:, None] * group + np.arange(group)
            self.runs.here.modules[-1].order = np.argsort(rows.reshape(-1))

    def _record(self, query: Any, key: Any, value: Any, lse: Any, options: dict[str, Any]) -> None:
        self.calls += 1
        here = self.runs.here
        module, last = here.modules[-1].name or "attention", here.last
        axis = -3 if options.get("layout") == "bnhd" else -2
        n_q = query.shape[axis]
        own_keys = last is not None and last.key.precedes(key, axis)
        piece = last is not None and self._is_piece(last, query, key, axis)
        q, k = (autocast(x) if torch.is_autocast_enabled("cpu") else x for x in (query, key))
        arrays_of_call = in_numpy({"query": q, "key": k, "lse": lse} | options)
        arrays = {x: arrays_of_call.pop(x) for x in ("query", "key", "lse")}
        call = CapturedCall.of(**arrays, options=arrays_of_call, cross=_crosses(here.modules[-1], query))
        if last is not None and piece and self._add_piece(last.layer, call, own_keys):
            here.last = _LastCall(last.layer, _Place.of(query), _Place.of(key), last.rows + n_q)
            return
        name, how = self._continued(module, call)
        here.last = _LastCall(name, _Place.of(query), _Place.of(key), n_q)
        self.lengths[name] = _cached_length(here.modules[-1])
        if not call.cross:
            self._how = how
        before, _ = self.belongs.get(name, (None, None))
        text = self.texts.of_call(here.modules, before, how, assign=not call.cross)
        self.belongs[name] = text, self.texts.other() if call.cross else text
        if how is None:
            self.read.attended(name, call.key.shape[2], text=self.belongs[name][1] is not None)
        self._add(name, call, how)
        if self.values is not None and self.kept.get(name) is not None:
            if how is None:
                self.values[name] = _values(value, call, options.get("layout", "bhnd"))
            else:
                self.values.pop(name, None)

    def _continued(self, module: str, call: CapturedCall) -> tuple[str, Continuation | None]:
        """Return the layer of a call, and how it goes on with the earlier ones."""
        self._times[module] += 1
        times = self._times[module]
        name = nth(module, times)
        earlier = self.seen.get(name)
        how = None if earlier is None else earlier.continuation(call, self._how)
        if how is None and not call.cross:
            for n in range(1, times):  # a generation inside of this forward
                other = self.seen[nth(module, n)].continuation(call)
                if other is not None:
                    self._times.clear()
                    self._times[module] = n
                    return nth(module, n), other
        if how is None and earlier is not None:
            grows = call.end - earlier.end == call.n_q  # in cross-attention: keys of its own as well
            later = grows if call.cross else np.min(call.first) > np.max(earlier.first)
            if later or (name in self.begun_later and call.n_q == earlier.last):
                self.begun_later.add(name)
            else:
                self.begun_later.discard(name)
        return name, how

    def _add(self, name: str, call: CapturedCall, how: Continuation | None) -> None:
        """Add a call to its layer: joined with the earlier ones if it goes on with them."""
        if how is None:
            self.seen[name] = CallSequence(call)
        else:
            self.seen[name].add(call, how)
        if name in self.dropped or not self._wanted(name):
            return
        chosen = self._chosen(name, call)
        if chosen is not None and not len(chosen):
            return
        try:
            if how is not None and name in self.kept:
                self.kept[name].add(call, how)
            else:
                self.kept[name] = JoinedCalls(call, self.store, self.heads, chosen)
                self.kept[name].order = next((x.order for x in self.runs.here.modules if x.order is not None), None)
        except UnjoinableCalls as error:
            self._drop(name, str(error))
        self._check_memory(name)

    def _chosen(self, name: str, call: CapturedCall) -> Array | None:
        """Return the rows of a call whose queries are kept, None for all."""
        if self.queries is None:
            return None
        if isinstance(self.queries, str):
            text, _ = self.belongs[name]
            some = np.zeros(0, np.int64) if text is None else self.read.words(text.ids)
        else:
            some = self.queries
        return some[some < call.n_q]

    def _add_piece(self, name: str, call: CapturedCall, own_keys: bool) -> bool:
        """Add a piece to its layer; return False if it is none, by its options."""
        if name in self.kept and self.kept[name].chosen is not None:
            self._drop(name, "some of its queries were chosen, and it attends to a sequence in pieces")
        if name in self.kept and not self.kept[name].add_piece(call, own_keys):
            return False
        self.seen[name].open = False
        self._check_memory(name)
        return True

    def _check_memory(self, name: str) -> None:
        if self.memory is None or name not in self.kept:
            return
        size = self.kept[name].nbytes
        if sum(x.nbytes for x in self.kept.values()) > self.memory:
            self._drop(name, f"{size:,} bytes more would be over memory={self.memory:,}")

    def _drop(self, name: str, reason: str) -> None:
        self.dropped[name] = reason
        del self.kept[name]

    def _is_piece(self, last: _LastCall, query: torch.Tensor, key: torch.Tensor, axis: int) -> bool:
        """Return True if a call is the next piece of the last one.

        Queries and keys of a next piece are views that follow those of the last call, or its keys are the same.
        Together the calls have no more rows than the sequence that the module was given: else they are other batch
        elements or heads.
        """
        modules = self.runs.here.modules
        if (modules[-1].name or "attention") != _module(last.layer):
            return False
        if not last.query.precedes(query, axis) or not (last.key.precedes(key, axis) or last.key.holds(key)):
            return False
        for running in reversed(modules):
            tensors = [x for x in running.given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
            if not any(x.data_ptr() == query.data_ptr() and x.numel() == query.numel() for x in tensors):
                lengths = [x.shape[-2] for x in tensors if x.ndim > 1]
                if lengths:
                    return last.rows + query.shape[axis] <= max(lengths)
        return False

    def _wanted(self, name: str) -> bool:
        number = [*self.seen, name].index(name)
        return self.layers is None or any(_is(x, number, name) for x in self.layers)

    def _check_chosen(self) -> None:
        for x in (self.layers or ()) if self.calls else ():
            if not any(_is(x, number, name) for number, name in enumerate(self.seen)):
                named = type(self.model).__name__
                raise ValueError(f"layers: {x!r} is no layer of {named}; it has {_listed(self.seen)}")

    def finished(self, labels: Callable[[list[int]], list[str]] | None) -> tuple[list[Layer], dict[str, Tokens]]:
        """Return the layers, and the texts that the model read.

        Raises ValueError if a chosen layer does not exist, and for a grid of the caller that no layer fits.
        """
        self._check_chosen()
        self._cut_rejected()
        tokens = {}
        for name, text in self.texts.named.items():
            shown = None if labels is None else tuple(tuple(labels(row)) for row in text.ids.tolist())
            tokens[name] = Tokens(text.ids, shown)
        sizes = {name: x.n for name, x in tokens.items()}
        modules = [_module(name) for name in self.seen]
        layers = []
        for number, name in enumerate(self.seen):
            if name in self.kept:
                query, key = self.belongs[name]
                of_query = self.texts.name(query, modules[number], modules)
                texts = of_query, of_query if key is query else self.texts.name(key)
                layers.append(self.kept[name].layer(name, sizes, texts, number))
        decoders = {name.rpartition(".")[0] for name, call in self.seen.items() if call.kind[0]}
        texts_of = {name: x.ids for name, x in tokens.items()}
        layers = [replace(x, grids=self.read.grids(x, texts_of.get(x.key_tokens or ""), decoders)) for x in layers]
        self.read.check(layers)
        return layers, tokens

    def _cut_rejected(self) -> None:
        """Cut off the tokens that were not accepted of the last call.

        Caches of transformers have dropped them since.
        """
        for name, length in self.lengths.items():
            seen, text = self.seen[name], self.belongs[name][0]
            rows = 0 if length is None or not seen.open else int(length()) - seen.first
            if not seen.rows - seen.last < rows < seen.rows:
                continue
            if text is not None and text.ids.shape[1] == seen.rows:
                text.ids = text.ids[:, :rows]
            if name in self.kept:
                try:
                    if self.kept[name].chosen is not None:
                        raise UnjoinableCalls("some of its queries were chosen, which is for one forward")
                    self.kept[name].cut(rows)
                except UnjoinableCalls as error:
                    self._drop(name, str(error))

    def warnings(self) -> Iterator[str]:
        """Return what the layers do not show."""
        if self.dropped:
            yield f"layers that were not kept: {self.dropped}"
        if late := [name for name in self.begun_later if name in self.kept]:
            yield (
                f"the first queries of {', '.join(late)} are missing: a call began after them, and the keys before it "
                "are not those of the earlier calls"
            )
        if self.unlike:
            yield (
                f"the model runs {', '.join(sorted(self.unlike))} for its attention, whose output is not "
                "softmax(scale · q kᵀ + mask) v: the captured weights are of that, and not the model's"
            )
        if self.runs.overlapping:
            yield (
                f"{self.runs.overlapping} runs of the model in other threads began while another was recorded, and are "
                "not shown"
            )
        if self.runs.unfinished:
            yield "the model was still running in another thread: the rest of its calls are not shown"


def _is(chosen: int | str, number: int, name: str) -> bool:
    """Return True if a layer was chosen by its number, name, module or a pattern."""
    if not isinstance(chosen, str):
        return chosen == number
    return fnmatch.fnmatchcase(name, chosen) or fnmatch.fnmatchcase(_module(name), chosen)


def _module(layer: str) -> str:
    """Return the name of the module of a layer."""
    return layer.partition("#")[0]


def _listed(names: Iterable[str], most: int = 8) -> str:
    """List layers by number and name; of many, only the first and the last."""
    all_of = [f"{number} {name}" for number, name in enumerate(names)]
    return ", ".join(all_of if len(all_of) <= most else [*all_of[: most - 1], "...", all_of[-1]])


def _cached_length(running: RunningModule) -> Callable[[], Any] | None:
    """Return a function for the length of a cache of transformers, if one is given."""
    cache = next((x for x in running.given.values() if hasattr(x, "get_seq_length")), None)
    return None if cache is None else partial(cache.get_seq_length, getattr(running.module, "layer_idx", None) or 0)


def _values(value: torch.Tensor, call: CapturedCall, layout: str) -> Array:
    """Copy values as (b, h_kv, n_k, d_v) of the keys of a call."""
    array = in_numpy({"value": value.detach()})["value"]
    v = Layout.of(array, layout).to_bhnd(array)
    b, h_kv, n_k = call.key.shape[:3]
    whole = np.broadcast_to(v, (*v.shape[:-3], h_kv, *v.shape[-2:])).reshape(-1, h_kv, *v.shape[-2:])
    return np.array(whole[:b, :, :n_k])


def _crosses(running: RunningModule, query: torch.Tensor) -> bool:
    """Return True if the keys of a call belong to another sequence."""
    arguments = running.given
    if any(arguments.get(name) is not None for name in OTHER_SEQUENCE):
        return True
    if getattr(running.module, "is_cross_attention", False):
        return True
    own, other = arguments.get("query"), arguments.get("key")
    if isinstance(own, torch.Tensor) and own.ndim <= 3:
        return other is not None and other is not own
    return False


def _labels(tokenizer: Any) -> Callable[[list[int]], list[str]] | None:
    """Return a function from ids to labels, made from a tokenizer if needed."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor of transformers
    if tokenizer is None or hasattr(tokenizer, "image_mean") or hasattr(tokenizer, "sampling_rate"):
        return None
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        if not callable(tokenizer):
            raise TypeError(
                "tokenizer must be a tokenizer of transformers or a function from a list of ids to strings, "
                f"got {type(tokenizer).__name__}"
            )
        return tokenizer

    return partial(pieces, tokenizer)


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Decode ids one by one, with spaces and newlines for a tokenizer's marks."""
    return ["".join(MARKS.get(c, c) for c in str(token)) for token in tokenizer.convert_ids_to_tokens(ids)]
