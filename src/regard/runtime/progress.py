"""Progress of long work, as the terminal and the page tell it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage of long work, and how far it is.

    name: of the stage, or of each of its steps if those are counted. done, total: the number of steps. left: seconds to
    the end of the stage, None where that is not known.

    >>> print(Stage("loading the model"), Stage("layer", 1, 30), Stage("layer", 7, 30, 11.6), sep="; ")
    loading the model; layer 1 of 30; layer 7 of 30, 12 s left
    """

    name: str
    done: int = 0
    total: int = 0
    left: float | None = None

    def __str__(self) -> str:
        counted = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.name}{counted}{'' if self.left is None else f', {max(1, round(self.left))} s left'}"
