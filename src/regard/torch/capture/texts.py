"""The texts that a model reads while it is captured, and their layers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.interpret.capture.calls import Continuation
from regard.torch.tensors.arrays import checked, values

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

NO_TEXT = ("mask", "shape", "size", "grid")
"""Parts of the names of integer arguments that are no ids."""


@dataclass
class RunningModule:
    """A module while its forward runs.

    order: the row of each patch, if it sorts them by windows.
    """

    name: str
    module: nn.Module
    given: dict[str, Any]
    order: Array | None = None


@dataclass(eq=False)
class ReadText:
    """Ids (b, n) that a model has read.

    readers: the names of the modules that were given them.
    """

    ids: Array
    readers: set[str]


class Texts:
    """The last text of each reader, by name.

    times: how often each module has read another text in this forward of the model.
    """

    def __init__(self) -> None:
        self.named: dict[str, ReadText] = {}
        self.times: Counter[str] = Counter()
        self._text: ReadText | None = None
        self._pending: tuple[str, ReadText] | None = None
        self._given: torch.Tensor | None = None  # kept, so that no other tensor gets its address
        self._readers: set[str] = set()
        self._depth, self._shape = 0, Shape()

    def read(self, module: str, given: dict[str, Any], named: bool, depth: int) -> None:
        """Read the ids that a module is given.

        named: it has an argument of their name. depth: the number of modules that it runs in.
        """
        if depth and any(_same(x, self._given) for x in given.values() if _integers(x)):
            self._readers.add(module)  # passed on from an outer module
            return
        ids: Any = given.get("input_ids")
        if ids is None and not named and not depth:
            ids = next((x for name, x in given.items() if _integers(x) and not any(y in name for y in NO_TEXT)), None)
        if not _integers(ids):
            return
        self._given, self._readers = ids, {module}
        self._depth, self._shape = depth, tuple(ids.shape)
        array = values(checked("input_ids", ids)).astype(np.int64)
        self.times[module] += 1
        text = ReadText(array.reshape(-1, array.shape[-1]), self._readers)
        self._pending = nth(module or "text", self.times[module]), text

    def of_call(
        self, running: Sequence[RunningModule], before: ReadText | None, how: Continuation | None, *, assign: bool
    ) -> ReadText | None:
        """Return the text of the queries of a call.

        The result is None if a running module is given other numbers of tokens, as those of pictures are. before: the
        text of the layer so far. assign: a text that was read since belongs to this call and to those after it.
        """
        inside = running[self._depth :]
        if not all(_fits(x.given, self._shape, x is inside[-1]) for x in inside):
            return None
        if assign and self._pending is not None:
            name, text = self._pending
            self._pending = None
            if how is not None and before in self.named.values() and len(how.places) == len(text.ids):
                assert before is not None
                before.ids = np.concatenate([before.ids[how.order, : how.rows], text.ids], axis=-1)
                before.readers |= text.readers
                self._text = before
            else:
                self._text = self.named[name] = text
        return self._text

    def other(self) -> ReadText | None:
        """Return the last text but the current one, which cross-attention reads keys from."""
        return next((x for x in reversed(self.named.values()) if x is not self._text), None)

    def name(self, text: ReadText | None, layer: str = "", layers: Sequence[str] = ()) -> str | None:
        """Return the name of a text; None if another took its place.

        The name is None also if the module of a layer is in a tower of other inputs. layers: the names of the modules
        of all layers. Those of a text are in the innermost modules that were given it.
        """
        readers = [x for x in text.readers if any(inside(y, x) for y in layers)] if text is not None else []
        innermost = [x for x in readers if not any(y != x and inside(y, x) for y in readers)]
        if innermost and not any(inside(layer, x) for x in innermost):
            return None
        return next((name for name, x in self.named.items() if x is text), None)


def nth(name: str, times: int) -> str:
    """Return the name of the nth use in a forward: "attention", "attention#2"."""
    return name if times == 1 else f"{name}#{times}"


def inside(layer: str, module: str) -> bool:
    """Return True if a module is another one, or inside of it."""
    return not module or f"{layer}.".startswith(f"{module}.")


def _fits(given: dict[str, Any], shape: Shape, innermost: bool) -> bool:
    """Return True if a module is given tokens of the shape of a text, or no tensor."""
    shapes = [tuple(x.shape) for x in given.values() if isinstance(x, torch.Tensor)]
    orders = shape, shape[::-1]
    fits = (x[: len(shape)] in orders or (innermost and x[-2:-1] == shape[-1:]) for x in shapes)
    return not shapes or any(fits)


def _same(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    """Return True if two tensors have the same memory and shape."""
    return y is not None and x.data_ptr() == y.data_ptr() and x.shape == y.shape


def _integers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dtype is not torch.bool and x.ndim in (1, 2)
