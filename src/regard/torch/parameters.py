"""Parameters in rules: the modules that hold them, and whether they still do.

A rule lives longer than a call. Meanwhile a framework may put another tensor in the place of a module's parameter:
`torch.func.functional_call`, ``load_state_dict(assign=True)``, parametrizations, FSDP2, offloading hooks. A rule that
refers to the place (`regard.table(module, name)`) reads the new one; a rule made of the tensor itself cannot.
"""

import gc
import sys
import warnings
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch

from regard.torch.modes import constant, transformed
from regard.warning import RegardWarning, level_of_caller

INSTEAD = "Make the rule with regard.table(module, name), which reads the parameter that the module has at each call"
_warned: set[str] = set()


class Place(NamedTuple):
    """A name of a module, which is not kept alive: a module holds its rules."""

    module: ref[torch.nn.Module]
    name: str

    @property
    def owner(self) -> torch.nn.Module:
        """The module; raises ReferenceError if it was deleted."""
        found = self.module()
        if found is None:
            raise ReferenceError(f"a rule reads {self.name!r} of a module that was deleted")
        return found

    @property
    def tensor(self) -> Any:
        """The attribute with this name."""
        return getattr(self.owner, self.name)

    def holds(self, x: torch.Tensor) -> bool:
        """Return True if the parameter here is `x`, or was until its module was deleted."""
        module = self.module()
        return module is None or module._parameters.get(self.name) is x

    def copied(self, copies: dict[int, Any]) -> "Place":
        """Return the place in the copy of the module, in the module itself if it is not copied.

        copies: those of `copy.deepcopy`, by the ids of their originals.
        """
        module = self.module()
        return self if module is None else Place(ref(copies.get(id(module), module)), self.name)

    @property
    def text(self) -> str:
        """The class of the module and the name."""
        return f"{type(self.module()).__name__}.{self.name}"


def place_of(x: torch.Tensor) -> Place | None:
    """Return the place of a parameter in a module that a calling function has as a local variable.

    None for other tensors, and where no such module holds it.
    """
    if type(x) is not torch.nn.Parameter:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if issubclass(type(value), torch.nn.Module):
                for name, parameter in value.__dict__.get("_parameters", {}).items():
                    if parameter is x:
                        return Place(ref(value), name)
        frame = frame.f_back
    return None


def held_anywhere(x: torch.Tensor) -> bool:
    """Return True if any module holds a parameter now.

    All objects are searched, which takes some 50 ms.
    """
    dictionaries = {id(d) for d in gc.get_referrers(x) if type(d) is dict}
    modules = (m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module))
    return any(id(m.__dict__.get("_parameters")) in dictionaries for m in modules)


def held(x: torch.Tensor, place: Place | None) -> bool:
    """Return True if the tensor of a rule still is what its module has.

    place: of a parameter. A parameter without a known place counts as replaced in a transform if no module holds it.
    """
    if place is not None:
        return place.holds(x)
    return type(x) is not torch.nn.Parameter or not (x.requires_grad and transformed()) or held_anywhere(x)


@constant
def replaced(place: str, needed: bool, empty: bool) -> None:
    """Warn once that a rule keeps a parameter that its module has no more.

    needed: a transform asks for its derivative, which would be zero. empty: it has no values. Both raise.
    """
    what = f"a rule was made of the parameter {place}, which was replaced since"
    if needed:
        raise NotImplementedError(f"{what}: in this transform its derivative would be zero. {INSTEAD}")
    if empty:
        raise ValueError(f"{what}, and had no values. {INSTEAD}")
    if place not in _warned:
        _warned.add(place)
        warnings.warn(f"{what}, and keeps to it. {INSTEAD}", RegardWarning, stacklevel=level_of_caller())
