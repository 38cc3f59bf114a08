"""Types of the public calls, the same for NumPy, PyTorch and JAX."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from regard.rules import Mask, Score


class ArrayLike(Protocol):
    """An array of NumPy, PyTorch or JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __matmul__(self, other: Any, /) -> Any: ...


Array = TypeVar("Array", bound=ArrayLike)
"""The arrays of one call: results are of the same library as the arguments."""

LayoutName = Literal["bhnd", "bnhd"]
MaskLike = Mask | ArrayLike | Callable[..., Any] | None
ScoreLike = Score | Callable[..., Any] | Sequence[Score | Callable[..., Any]] | None


class WeightOptions(TypedDict, total=False):
    """The options of `regard.attention` that determine the weights."""

    mask: MaskLike
    causal: bool
    score: ScoreLike
    bias: ArrayLike | None
    scale: float | None
    metric: ArrayLike | None
    sink: ArrayLike | None
    offset: int | ArrayLike | None
    origin: tuple[int, int, int] | None


class TileOptions(WeightOptions, total=False):
    """The options of `regard.weights`."""

    layout: LayoutName


class Options(TileOptions, total=False):
    """The options of `regard.attention` that its derivatives take too."""

    dropout: float
    seed: int | ArrayLike | None


class HeadsOptions(WeightOptions, total=False):
    """The options of `regard.multihead_attention`: projections and attention's."""

    num_kv_heads: int | None
    w_q: ArrayLike | None
    w_k: ArrayLike | None
    w_v: ArrayLike | None
    w_o: ArrayLike | None
    b_q: ArrayLike | None
    b_k: ArrayLike | None
    b_v: ArrayLike | None
    b_o: ArrayLike | None
    dropout: float
    seed: int | ArrayLike | None
    engine: str | None
