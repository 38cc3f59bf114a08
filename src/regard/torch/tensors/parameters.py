"""Parameters in rules: the modules that hold them, and whether they still do.

A rule lives longer than a call. Meanwhile a framework may put another tensor in the place of a module's parameter:
`torch.func.functional_call`, ``load_state_dict(assign=True)``, parametrizations, FSDP2, offloading hooks. A rule that
refers to the place (`regard.table(module, name)`) reads the new one; a rule made of the tensor itself cannot.
"""

import gc
import sys
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch

from regard.torch.tensors.modes import constant, transformed

INSTEAD = "Make the rule with regard.table(module, name), which reads the parameter that the module has at each call"
HOLDERS = ("_parameters", "_buffers")  # dictionaries of a module


class Place(NamedTuple):
    """A name of a module, which is not kept alive: a module holds its rules."""

    module: ref[torch.nn.Module]
    name: str

    @property
    def owner(self) -> torch.nn.Module:
        """The module; raises ReferenceError if it was deleted."""
        module = self.module()
        if module is None:
            raise ReferenceError(f"a rule reads {self.name!r} of a module that was deleted")
        return module

    @property
    def tensor(self) -> Any:
        """The attribute with this name."""
        return getattr(self.owner, self.name)

    def holds(self, x: torch.Tensor) -> bool:
        """Return True if the parameter or buffer here is `x`, or was until its module was deleted."""
        module = self.module()
        return module is None or any(getattr(module, holder).get(self.name) is x for holder in HOLDERS)

    def copied(self, copies: dict[int, Any]) -> "Place | None":
        """Return the place in the copy of the module, None if it is not copied.

        copies: those of `copy.deepcopy`, by the ids of their originals.
        """
        copy = copies.get(id(self.module()))
        return None if copy is None else Place(ref(copy), self.name)

    @property
    def text(self) -> str:
        """The class of the module and the name."""
        return f"{type(self.module()).__name__}.{self.name}"


def place_of(x: torch.Tensor) -> Place | None:
    """Return the place of a parameter or buffer in a module that a calling function has as a local variable.

    For a parameter modules inside of that module count. None where no module holds it, as for most other tensors, which
    should not pay for a walk over a whole model.
    """
    deep = type(x) is torch.nn.Parameter
    seen: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        modules = [value for value in frame.f_locals.values() if issubclass(type(value), torch.nn.Module)]
        while modules:
            module = modules.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            inside = module.__dict__
            for holder in HOLDERS:
                for name, value in inside.get(holder, {}).items():
                    if value is x:
                        return Place(ref(module), name)
            if deep:
                modules += [child for child in inside.get("_modules", {}).values() if child is not None]
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

    place: of a parameter or buffer. A parameter without a known place counts as replaced in a transform if no module
    holds it.
    """
    if place is not None:
        return place.holds(x)
    return type(x) is not torch.nn.Parameter or not (x.requires_grad and transformed()) or held_anywhere(x)


@constant
def stale(place: str) -> NoReturn:
    """Raise NotImplementedError for a rule whose parameter was replaced."""
    raise NotImplementedError(
        f"a rule was made of {place}, which was replaced since: the rule would read its old values, and its "
        f"derivative would be zero. {INSTEAD}"
    )
