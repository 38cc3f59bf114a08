"""Grids: the patches of a picture, or the frames of a sound, among the tokens of a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from regard.interpret.capture.layers import Layer

Array = np.ndarray[Any, np.dtype[Any]]

MOST_PREFIX = 16
"""Class and register tokens before the patches, at most: where a sequence has more, its patches are not known."""


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


def with_grid(
    layers: Sequence["Layer"], grid: PatchGrid | tuple[int, int], pictures: Sequence[Array] = ()
) -> list["Layer"]:
    """Return the layers, with a grid that the caller knows on those that it fits.

    (rows, columns) fits the keys that are no text, if up to `MOST_PREFIX` tokens are before the patches. pictures: of
    the batch elements, for the grids that are made. Raises ValueError if no layer fits.
    """
    placed = [_placed(layer, grid, pictures) for layer in layers]
    if layers and not any(layer.grids for layer in placed):
        rows, columns = (grid.rows, grid.columns) if isinstance(grid, PatchGrid) else grid
        counts = ", ".join(str(n) for n in sorted({layer.n_k for layer in layers}))
        raise ValueError(
            f"grid of {rows} × {columns} = {rows * columns} patches fits no layer: layers have {counts} keys that are "
            f"no text, and at most {MOST_PREFIX} tokens may be before the patches"
        )
    return placed


def _placed(layer: "Layer", grid: PatchGrid | tuple[int, int], pictures: Sequence[Array]) -> "Layer":
    """Return a layer with the grid if it fits its keys, else without any."""
    if isinstance(grid, PatchGrid):
        return replace(layer, grids=(grid,) if int(grid.tokens.max(initial=-1)) < layer.n_k else ())
    rows, columns = grid
    prefix = layer.n_k - rows * columns
    if layer.key_tokens is not None or not 0 <= prefix <= MOST_PREFIX or not _over_keys(layer):
        return replace(layer, grids=())
    if len(pictures) != layer.batch:
        return replace(layer, grids=(PatchGrid.after(rows, columns, prefix),))
    made = (PatchGrid.after(rows, columns, prefix, picture=x, batch=b) for b, x in enumerate(pictures))
    return replace(layer, grids=tuple(made))


def _over_keys(layer: "Layer") -> bool:
    """Return True if a layer's queries are all of its keys, or another sequence's, or some were chosen."""
    return layer.cross or bool(layer.rows) or layer.n_q == layer.n_k
