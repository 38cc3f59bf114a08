"""The classes of `xformers.ops.fmha.attn_bias`, where xFormers is not installed.

They hold what the package's do, under the same names. `dropins.xformers` says what they mean.
"""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import torch

from regard.runtime.forks import cached_property


@dataclass(frozen=True)
class SequenceRows:
    """The rows of several sequences.

    seqstart_py: the first row of each, and the number of all rows. seqlen_py: the rows that each uses from there on.
    """

    seqstart_py: list[int]
    seqlen_py: list[int]

    @classmethod
    def one_after_the_other(cls, lengths: Iterable[int]) -> Self:
        lengths = list(lengths)
        return cls([0, *accumulate(lengths)], lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlen_py)

    @property
    def min_seqlen(self) -> int:
        return min(self.seqlen_py)

    @cached_property
    def seqstart(self) -> torch.Tensor:
        return torch.tensor(self.seqstart_py, dtype=torch.int32)

    @cached_property
    def seqlen(self) -> torch.Tensor:
        return torch.tensor(self.seqlen_py, dtype=torch.int32)

    def intervals(self) -> Iterator[tuple[int, int]]:
        for first, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield first, first + length

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Cut rows (1, total, ...) into batches (b, n, ...) of sequences of one length."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(f"expected shape (1, {self.seqstart_py[-1]}, ...), got {tuple(x.shape)}")
        sizes = [1] * len(self.seqlen_py) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[n] for n in (0, *accumulate(sizes))]
        parts = x.split([b - a for a, b in pairwise(ends)], dim=1)
        return [part.reshape(size, -1, *x.shape[2:]) for size, part in zip(sizes, parts, strict=True)]


class AttentionBias:
    """The base of all."""

    def to(self, device: Any) -> Self:
        """Return the bias itself, which holds no tensors of a device."""
        return self


class LowerTriangularMask(AttentionBias):
    """Query i sees the keys j ≤ i."""

    def __init__(self, device: Any = None) -> None:
        pass

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The same, with a bias (batch, h, n_q, n_k)."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def to(self, device: Any) -> Self:
        return type(self)(self._bias.to(device))


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, with the last query aligned with the last key."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


def _positive(window_size: int) -> None:
    if window_size <= 0:
        raise ValueError(f"Expected `window_size > 0`, but window_size={window_size}")


def _not_negative(name: str, x: Any) -> None:
    for side in ("window_left", "window_right"):
        if getattr(x, side) < 0:
            raise ValueError(f"Invalid window value passed to `{name}`: expected `{side} >= 0`, got {getattr(x, side)}")


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The same, of the last window_size keys up to the query's own."""

    _window_size: int

    def __post_init__(self) -> None:
        _positive(self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """window_left keys before the query's own to window_right after it, aligned at the ends."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _not_negative(type(self).__name__, self)


# Sequences one after the other


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Each query sees the keys of its own sequence."""

    q_seqinfo: SequenceRows
    k_seqinfo: SequenceRows
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:  # fmt: skip
        q = SequenceRows.one_after_the_other(q_seqlen)
        k = q if kv_seqlen is None else SequenceRows.one_after_the_other(kv_seqlen)
        _as_many(q_seqlen, k.seqlen_py)
        return cls(q, k)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        bias = cls.from_seqlens(_lengths(tensors))
        bias._batch_sizes = [len(x) for x in tensors]
        return bias, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Self, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        bias = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k))
        bias._batch_sizes = [len(x) for x in tensors_q]
        return bias, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    split_queries = split

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """The same, each causal, with first queries aligned with first keys."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The same, each causal, with last queries aligned with last keys."""

    def __post_init__(self) -> None:
        for n, (q, k) in enumerate(zip(self.q_seqinfo.seqlen_py, self.k_seqinfo.seqlen_py, strict=True)):
            if k < q:
                raise ValueError(f"Block #{n} has num_keys={k} and num_queries={q}. Expected `num_keys >= num_queries`")


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """The same, of window_size keys, with first queries aligned with first keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _positive(self._window_size)
        for q, k in zip(self.q_seqinfo.seqlen_py, self.k_seqinfo.seqlen_py, strict=True):
            if q - self._window_size >= k:
                raise RuntimeError(
                    f"No keys are attended in q_seqlen {q} k_seqlen {k} with sliding window {self._window_size}"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same, of window_size keys, with last queries aligned with last keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self._window_size)


# Keys in a cache


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Each query sees the keys of its own sequence, which have room for kv_padding keys each."""

    q_seqinfo: SequenceRows
    k_seqinfo: SequenceRows

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Any = None,
    ) -> Self:  # fmt: skip
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, each causal, with last queries aligned with last keys."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, of window_left keys before the query's own to window_right after it."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Self:  # fmt: skip
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, each causal, of window_size keys."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:  # fmt: skip
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    """Each query sees the keys of its own sequence, which begin anywhere."""

    q_seqinfo: SequenceRows
    k_seqinfo: SequenceRows

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Any = None
    ) -> Self:  # fmt: skip
        return cls(*_gappy(q_seqlen, kv_seqstarts, kv_seqlen))


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, each causal, with last queries aligned with last keys."""


@dataclass
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The same, of window_left keys before the query's own to window_right after it."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local_gappy(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], window_left: int,
        window_right: int, device: Any = None,
    ) -> Self:  # fmt: skip
        return cls(*_gappy(q_seqlen, kv_seqstarts, kv_seqlen), window_left, window_right)


def _padded(q: Sequence[int], room: int, k: Sequence[int]) -> tuple[SequenceRows, SequenceRows]:
    _as_many(q, k)
    if max(k, default=0) > room:
        raise AssertionError(f"kv_seqlen must be at most kv_padding, {room}, got {list(k)}")
    return SequenceRows.one_after_the_other(q), SequenceRows([n * room for n in range(len(k) + 1)], list(k))


def _gappy(q: Sequence[int], starts: Sequence[int], k: Sequence[int]) -> tuple[SequenceRows, SequenceRows]:
    _as_many(q, k)
    if len(starts) != len(k) + 1:
        raise ValueError(f"kv_seqstarts must have one entry more than kv_seqlen, got {len(starts)} and {len(k)}")
    return SequenceRows.one_after_the_other(q), SequenceRows(list(starts), list(k))


def _as_many(q: Sequence[int], k: Sequence[int]) -> None:
    if len(q) != len(k):
        raise AssertionError(f"q_seqlen and kv_seqlen must have as many sequences, got {len(q)} and {len(k)}")


def _lengths(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(len(x))]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], 1)


CLASSES: dict[str, Any] = {
    x.__name__: x
    for x in (
        AttentionBias,
        LowerTriangularMask,
        LowerTriangularMaskWithTensorBias,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        LocalAttentionFromBottomRightMask,
        BlockDiagonalMask,
        BlockDiagonalCausalMask,
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalCausalLocalAttentionMask,
        BlockDiagonalCausalLocalAttentionFromBottomRightMask,
        BlockDiagonalPaddedKeysMask,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalLocalAttentionPaddedKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask,
    )
}
OF_OPS = {name: CLASSES[name] for name in ("AttentionBias", "LowerTriangularMask")}
