"""`regard.capture` for PyTorch: records attention calls by module.

Meanwhile every call of attention goes through `regard.attention`. transformers' models use their attention interface,
calls of `F.scaled_dot_product_attention` a function mode. Hooks on the modules tell which of them a call belongs to.
"""

import fnmatch
import inspect
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.interpret.capture.captured import Capture
from regard.interpret.capture.joining import ArrayStore, CallSequence, CapturedCall, JoinedCalls, UnjoinableCalls
from regard.interpret.capture.layers import Layer, Tokens
from regard.torch import adapter
from regard.torch.arrays import autocast, checked, values
from regard.torch.dropins import functional
from regard.torch.dropins.transformers import NAME, register_transformers
from regard.torch.graph.modes import quiet
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
) -> Iterator[Capture]:
    """Record a model; see `regard.capture`."""
    labels = _labels(tokenizer)
    seen = Capture(model=_name(model))
    with ExitStack() as stack:
        folder = None
        if path is not None:
            folder = Path(tempfile.mkdtemp(prefix=".regard-", dir=Path(path).absolute().parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        recorder = Recorder(model, layers, heads, memory, folder)
        with ExitStack() as switched:
            switched.enter_context(_on_regard(model))
            switched.enter_context(recorder.hooked())
            switched.enter_context(adapter.watched(recorder.attention))
            switched.enter_context(_SdpaMode())
            yield seen
        seen.layers, seen.tokens = recorder.finished(labels)
        seen.dropped = recorder.dropped
        if path is not None:
            seen.save(path)
            saved = Capture.load(path)
            seen.layers, seen.tokens = saved.layers, saved.tokens
    if recorder.runs and not recorder.calls:
        raise RuntimeError(
            f"no attention was seen in {seen.model}: it calls neither regard.attention nor "
            "F.scaled_dot_product_attention, or does so in a compiled graph"
        )
    seen.check()
    if seen.dropped:
        warnings.warn(f"layers that were not kept: {seen.dropped}", RegardWarning, stacklevel=3)


def _name(model: nn.Module) -> str:
    given = getattr(getattr(model, "config", None), "name_or_path", "")
    return f"{type(model).__name__} {given}".strip()


@contextmanager
def _on_regard(model: nn.Module) -> Iterator[None]:
    """Set attn_implementation="regard" on a model of transformers inside of a `with`."""
    if not hasattr(model, "set_attn_implementation"):
        yield
        return
    register_transformers()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "set_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


class _SdpaMode(torch.overrides.TorchFunctionMode):
    """Function mode that replaces `F.scaled_dot_product_attention` by regard's.

    It works however the function was imported.
    """

    original = staticmethod(F.scaled_dot_product_attention)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is self.original:
            return functional.scaled_dot_product_attention(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # a function mode does not see the calls inside
            with functional.sdpa():
                if not kwargs.get("need_weights", True):
                    return function(*args, **kwargs)
                with torch.no_grad():  # PyTorch computes weights without the function: this call is only recorded
                    function(*args, **kwargs | {"need_weights": False})
        return function(*args, **kwargs)


quiet.add(_SdpaMode)


@dataclass
class _RunningModule:
    """A module while its forward runs."""

    name: str
    module: nn.Module
    given: dict[str, Any]
    calls: int = 0


class Recorder:
    """Recorder of attention calls while a model runs, layer by layer."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int | str] | None,
        heads: Sequence[int] | None,
        memory: int | None,
        folder: Path | None,
    ):
        self.model, self.layers, self.heads, self.memory = model, layers, heads, memory
        self.store = ArrayStore(folder)
        self.calls = self.runs = 0
        self.seen: dict[str, CallSequence] = {}  # by name, in the order of first calls
        self.belongs: dict[str, tuple[str | None, str | None]] = {}
        self.dropped: dict[str, str] = {}
        self.texts: dict[str, list[Array]] = {}  # ids (b, n) of each call
        self.text: str | None = None
        self._pending: tuple[str, Array] | None = None
        self._given: tuple[int, Any] | None = None
        self._continues = False
        self._running: list[_RunningModule] = []
        self._thread = threading.get_ident()

    # Hooks: the running module, and its text

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            names = tuple(inspect.signature(module.forward).parameters)
            handles.append(module.register_forward_pre_hook(self._entering(name, names), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str, names: tuple[str, ...]) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                return
            given = dict(zip(names, args, strict=False)) | kwargs
            if not self._running:
                self.runs += 1
                self.store.forget()
            self._read(name, given, "input_ids" in names)
            self._running.append(_RunningModule(name, module, given))

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._running and self._running[-1].module is module:
            self._running.pop()

    def _read(self, name: str, given: dict[str, Any], named: bool) -> None:
        ids: Any = given.get("input_ids")
        if ids is None and not named and not self._running:
            ids = next((x for x in given.values() if _integers(x)), None)
        if not _integers(ids):
            return
        key = ids.data_ptr(), tuple(ids.shape)
        if self._running and self._given == key:
            return  # passed on from an outer module
        self._given = key
        array = values(checked("input_ids", ids)).astype(np.int64)
        self._pending = name or "text", array.reshape(-1, array.shape[-1])

    def _assign_text(self, continues: bool) -> None:
        """Assign the last text that was read to the layers that are called now."""
        self._continues = continues
        if self._pending is None:
            return
        self.text, ids = self._pending
        self._pending = None
        before = self.texts.get(self.text, []) if continues else []
        self.texts[self.text] = [*before, ids] if not before or len(before[0]) == len(ids) else [ids]

    # Attention calls

    def attention(self, query: Any, key: Any, value: Any, *, observe: Any = (), **options: Any) -> Any:
        """Compute and record `regard.attention` on tensors."""
        if threading.get_ident() != self._thread or not self._running:
            return adapter.attention(query, key, value, observe=observe, **options)
        asked = tuple(observe)
        with_lse = asked if "lse" in asked else (*asked, "lse")
        found = adapter.attention(query, key, value, observe=with_lse, **options)
        *results, seen = found
        self._record(query, key, seen.lse, {name: x for name, x in options.items() if x is not None})
        if asked:
            results.append(seen)
        return results[0] if len(results) == 1 else tuple(results)

    def _record(self, query: Any, key: Any, lse: Any, options: dict[str, Any]) -> None:
        module = self._running[-1]
        name = (module.name or "attention") + (f".{module.calls}" if module.calls else "")
        module.calls += 1
        self.calls += 1
        if torch.is_autocast_enabled("cpu"):
            query, key = autocast(query), autocast(key)
        given = adapter.in_numpy({"query": query, "key": key, "lse": lse} | options)
        arrays = {x: given.pop(x) for x in ("query", "key", "lse")}
        call = CapturedCall.of(**arrays, options=given, cross=_crosses(module, query))
        earlier = self.seen.get(name)
        if call.cross:
            continues = self._continues
        else:
            continues = earlier is not None and earlier.precedes(call)
            self._assign_text(continues)
        others = [text for text in self.texts if text != self.text]
        self.belongs[name] = self.text, (others[-1] if others else None) if call.cross else self.text
        self.seen[name] = self._joined(name, call, earlier if continues else None)

    def _joined(self, name: str, call: CapturedCall, earlier: CallSequence | None) -> CallSequence:
        """Return a layer after a call: joined with the earlier ones if it continues them."""
        if name in self.dropped or not self._wanted(name):
            return CallSequence(call)
        try:
            if not isinstance(earlier, JoinedCalls) or not earlier.add(call):
                earlier = JoinedCalls(call, self.store, self.heads)
        except UnjoinableCalls as error:
            self.dropped[name] = str(error)
            return CallSequence(call)
        others = sum(seen.nbytes for other, seen in self.seen.items() if other != name)
        if self.memory is not None and others + earlier.nbytes > self.memory:
            self.dropped[name] = f"{earlier.nbytes:,} bytes more would be over memory={self.memory:,}"
            return CallSequence(call)
        return earlier

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

        Raises ValueError if a chosen layer does not exist.
        """
        self._check_chosen()
        tokens = {}
        for name, parts in self.texts.items():
            ids = np.concatenate(parts, axis=-1)
            shown = None if labels is None else tuple(tuple(labels(row)) for row in ids.tolist())
            tokens[name] = Tokens(ids, shown)
        sizes = {name: x.n for name, x in tokens.items()}
        layers = [
            seen.layer(name, sizes, self.belongs[name], number)
            for number, (name, seen) in enumerate(self.seen.items())
            if isinstance(seen, JoinedCalls)
        ]
        return layers, tokens


def _is(chosen: int | str, number: int, name: str) -> bool:
    """Return True if a layer was chosen by its number, name or pattern."""
    return fnmatch.fnmatchcase(name, chosen) if isinstance(chosen, str) else chosen == number


def _listed(names: Iterable[str], most: int = 8) -> str:
    """List layers by number and name; of many, only the first and the last."""
    all_of = [f"{number} {name}" for number, name in enumerate(names)]
    return ", ".join(all_of if len(all_of) <= most else [*all_of[: most - 1], "...", all_of[-1]])


def _integers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dtype is not torch.bool and x.ndim in (1, 2)


def _crosses(running: _RunningModule, query: torch.Tensor) -> bool:
    """Return True if the keys of a call belong to another sequence."""
    given = running.given
    if any(given.get(name) is not None for name in OTHER_SEQUENCE):
        return True
    if getattr(running.module, "is_cross_attention", False):
        return True
    own, other = given.get("query"), given.get("key")
    if isinstance(own, torch.Tensor) and own.ndim <= 3:
        return other is not None and other is not own
    return False


def _labels(tokenizer: Any) -> Callable[[list[int]], list[str]] | None:
    """Return a function from ids to labels, made from a tokenizer if needed."""
    if tokenizer is None:
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
