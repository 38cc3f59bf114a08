"""Runs of a model in any thread, by hooks on its modules."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from regard.runtime.forks import renewed
from regard.torch.capture.switched import redirected
from regard.torch.capture.texts import RunningModule, inside
from regard.torch.tensors.modes import in_backward


class ThreadRun(threading.local):
    """The run of a model in one thread.

    modules: those that run, the innermost last. outer: how many of them run in the thread that this one works for.
    recorded: its calls of attention are. last: the last of them. open: holds what the run changes in the thread.
    """

    def __init__(self) -> None:
        self.modules: list[RunningModule] = []
        self.outer = 0
        self.recorded = False
        self.last: Any = None
        self.open = ExitStack()


class Runs:
    """Runs of a model, of which one at a time is recorded.

    attention: called in place of `regard.attention` while a module runs, in its thread alone. begin: called when a
    recorded run begins. enter: called with the modules of a recorded run, the innermost new, and the names of its
    arguments. lock: held during both. count, overlapping: runs that were recorded, and those that began meanwhile.
    unfinished: runs that had not ended when hooks were to be removed.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Callable[..., Any],
        begin: Callable[[], None],
        enter: Callable[[list[RunningModule], tuple[str, ...]], None],
    ):
        self.model, self.attention, self.begin, self.enter = model, attention, begin, enter
        self.lock = renewed(self, "lock", threading.RLock)
        self.here = ThreadRun()
        self.count = self.overlapping = self.unfinished = 0
        self._recorded: list[RunningModule] | None = None
        self._open, self._ended = 0, False
        self._handles: list[Any] = []

    @property
    def recording(self) -> bool:
        """True if a call of attention in this thread is to be recorded."""
        return self.here.recorded and not self._ended and not in_backward()  # gradient checkpoints compute again

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Follow runs inside of a `with`; one that has not ended then ends without being recorded."""
        for name, module in self.model.named_modules():
            names = tuple(inspect.signature(module.forward).parameters)
            self._handles.append(module.register_forward_pre_hook(self._entering(name, names), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            if self.here.modules:
                self._end()  # after KeyboardInterrupt, for which PyTorch calls no hook
            with self.lock:
                self._ended, self.unfinished = True, self._open
                self._unhook()

    def _unhook(self) -> None:
        if self._ended and not self._open:
            for handle in self._handles:
                handle.remove()

    def _entering(self, name: str, names: tuple[str, ...]) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            here = self.here
            if not here.modules:
                if self._ended:
                    return
                self._start(name)
            here.modules.append(RunningModule(name, module, dict(zip(names, args, strict=False)) | kwargs))
            with self.lock:
                if self.recording:
                    self.enter(here.modules, names)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        here = self.here
        if len(here.modules) > here.outer and here.modules[-1].module is module:
            here.modules.pop()
            if len(here.modules) == here.outer:
                self._end()

    def _start(self, name: str) -> None:
        """Start the run of a module in this thread."""
        here = self.here
        here.open.enter_context(redirected(self.attention))
        with self.lock:
            self._open += 1
            if in_backward():
                return
            if self._recorded is None:
                self._recorded, here.recorded = here.modules, True
                self.count += 1
                self.begin()
            elif any(inside(name, x.name) and name != x.name for x in self._recorded[-1:]):
                here.modules += self._recorded  # a module that computes its parts in threads
                here.outer, here.recorded = len(here.modules), True
            else:
                self.overlapping += 1

    def _end(self) -> None:
        """End the run in this thread."""
        here = self.here
        with self.lock:
            if self._recorded is here.modules:
                self._recorded = None
            self._open -= 1
            self._unhook()
        here.modules.clear()
        here.outer, here.recorded, here.last = 0, False, None
        here.open.close()
