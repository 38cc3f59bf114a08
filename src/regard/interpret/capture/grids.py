"""Grids: the patches of a picture, or the frames of a sound, among the tokens of a sequence."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """Patches of a picture in rows and columns, or frames of a sound in one row.

    tokens (rows · columns,): the token of patch r · columns + c; −1 for a patch without a token. picture (height,
    width, 3), uint8: what the model read, so that patch (r, c) covers the same share of it. seconds: the length of a
    sound. batch: the batch element that has this grid; None for each of them. name: one of several: a frame of a video,
    or the whole of a picture and its tiles.

    >>> grid = PatchGrid.after(2, 3, prefix=1)  # [CLS], then 2 × 3 patches
    >>> grid.laid(np.arange(7) / 10)
    array([[0.1, 0.2, 0.3],
           [0.4, 0.5, 0.6]])
    """

    rows: int
    columns: int
    tokens: NDArray[np.int64]
    kind: Literal["picture", "sound"] = "picture"
    picture: NDArray[np.uint8] | None = None
    seconds: float | None = None
    batch: int | None = None
    name: str = ""

    @classmethod
    def after(cls, rows: int, columns: int, prefix: int = 0, **fields: Any) -> Self:
        """Make a grid of patches in row-major order, behind `prefix` tokens that are no patches."""
        return cls(rows, columns, prefix + np.arange(rows * columns), **fields)

    def laid(self, weights: Array) -> Array:
        """Lay weights (..., n) on the grid: (..., rows, columns), NaN for a patch without a token.

        Weights are a row or a column of a head, one for each token of the sequence.
        """
        kind = np.promote_types(weights.dtype, np.float16)
        on_grid = np.where(self.tokens < 0, kind.type(np.nan), weights[..., np.maximum(self.tokens, 0)])
        return on_grid.reshape(*weights.shape[:-1], self.rows, self.columns)

    def of_batch(self, batch: int) -> bool:
        """Return True if a batch element has this grid."""
        return self.batch in (None, batch)


def given_grid(grid: Any) -> PatchGrid | tuple[int, int] | None:
    """Check the argument `grid` of a capture: (rows, columns), a PatchGrid, or None."""
    if grid is None or isinstance(grid, PatchGrid):
        return grid
    whole = isinstance(grid, tuple | list) and len(grid) == 2 and all(isinstance(x, int | np.integer) for x in grid)
    if not whole or min(grid) < 1:
        raise TypeError(f"grid must be (rows, columns) of patches or a PatchGrid, got {grid!r}")
    rows, columns = grid
    return int(rows), int(columns)
