"""A sequence spread over the processes of a device mesh, with the bits of one process.

Each process runs the program of its rank (`regard.parallel`); an exchange is one all-to-all of bytes in host memory, by
gloo. Before each call all ranks compare a digest of what they were asked. Derivatives are in `ranks.py`.
"""

from __future__ import annotations  # so that `help` shows the names of types

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from regard.core import checks
from regard.core.statistics import ENTROPY, LSE
from regard.core.tensors import tensor
from regard.ops.normalization import problem_from
from regard.parallel.choosing import DEALS, DealChoice, choose_deal
from regard.parallel.dealing import Deal
from regard.parallel.programs import Exchange, Program, Transfer
from regard.torch.call.record import seen_of
from regard.torch.processes.ranks import Call, rank_call, transferred
from regard.torch.processes.replaced import held
from regard.torch.public.attention import TensorArguments, applied, watched, watching
from regard.torch.tensors.modes import batched, without_transforms
from regard.torch.tensors.process_group import entered
from regard.warning import warn_once

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
OBSERVED = (LSE, ENTROPY)
WHOLE = "regard.attention inside of context_parallel"
UNREACHED = (
    "no attention was computed inside of context_parallel: what computes it in another way than regard.attention, "
    "F.scaled_dot_product_attention and flex_attention sees the positions of one process alone"
)


@contextmanager
def context_parallel(
    mesh: Any, *, causal: bool = False, mask: Any = None, deal: str | None = None, exact: bool = True
) -> Iterator[ContextParallel]:
    """Spread the sequence of `regard.attention` over a device mesh inside of a `with`.

    Every process of the mesh computes its share of the rows, with the bits of one process: out,
    lse, entropy, and their derivatives up to the second in both modes. Queries and keys have the
    same length. Masks, scores, dropout and a bias see the positions of the whole. A bias or a mask
    given as an array is that of the whole call, and so are gradients of bias, sink and tables, on
    every rank; those of tables are within the bound of the error, not to the bit. Only the tiles of
    keys and values travel that the rules let a rank see. All ranks have to make the same calls, and
    to call backward alike, inside of the `with`.

    `F.scaled_dot_product_attention` and `flex_attention` of PyTorch are regard's inside, for the
    whole process. What would attend to the rows of one rank alone raises.

    Args:
        mesh: a one-dimensional `DeviceMesh`, such as mesh["cp"], or a process group.
        causal, mask: the rule of most calls, by which rows are dealt: contiguous shards where
            ranks then compute equally much, else stripes of tiles round robin. Each call still
            names its own rule.
        deal: "contiguous" or "stripes" instead of that choice.
        exact: False to add gradients of key, value, bias and sink without waiting for the order of
            one process: they are within the bound of the error, and the same on each run.

    Raises:
        TypeError, ValueError: for a mesh of several dimensions, for an unknown deal, and for an
            exact that is no bool. A call
            that ranks disagree on raises on all of them, naming what differs.

    >>> import regard, torch
    >>> def train(mesh, x, weight):
    ...     with regard.torch.context_parallel(mesh["cp"], causal=True) as cp:
    ...         q = cp.shard(x) @ weight  # (batch, heads, n, d), n any length
    ...         return cp.unshard(regard.attention(q, q, q, causal=True))
    """
    if deal is not None and deal not in DEALS:
        raise ValueError(f"deal must be one of {', '.join(map(repr, DEALS))}, got {checks.shown(deal)}")
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be a bool, got {checks.shown(exact)}")
    if isinstance(mesh, dist.ProcessGroup):
        group = mesh
    elif hasattr(mesh, "get_group") and mesh.ndim == 1:
        group = mesh.get_group()
    else:
        raise TypeError(f'mesh must be a DeviceMesh of one dimension, such as mesh["cp"], got {checks.shown(mesh)}')
    if dist.get_backend(group) == "nccl":
        raise ValueError(
            'mesh must be of a backend that sends host memory, such as "gloo" or "cpu:gloo,cuda:nccl", got nccl'
        )
    if watching():
        raise ValueError("context_parallel cannot be inside of another one, or of regard.capture")
    cp = ContextParallel(group, {"causal": causal, "mask": mask}, deal, exact=exact)
    with watched(cp.attention), entered(cp), held():
        yield cp
    if cp.length is not None and not cp.calls:
        warn_once(UNREACHED)


@dataclass(eq=False)
class ContextParallel:
    """The ranks of a `context_parallel`, and the share of this one.

    rule: options of the call by which rows are dealt. exact: False to add gradients of keys without the order of one
    process. received: bytes that this rank was sent by others.
    """

    group: Any
    rule: dict[str, Any]
    named: str | None
    length: int | None = None
    exact: bool = True
    received: int = 0
    calls: int = 0
    choices: dict[int, DealChoice] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)
    sending: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def deal(self) -> Deal:
        """The rows of each rank, for the length of the last `shard`."""
        return self.choice().deal

    def choice(self, n: int | None = None) -> DealChoice:
        """Return the deal of a length, by default that of the last `shard`, and its reason."""
        n = self.length if n is None else n
        if n is None:
            raise ValueError("the length of the sequence is not known yet: call cp.shard on one of its tensors first")
        if n not in self.choices:
            one = np.broadcast_to(np.empty((), np.float32), (1, n, 64))
            self.choices[n] = choose_deal(problem_from(one, one, one, **self.rule), self.ranks, self.named)
        return self.choices[n]

    def shard(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Return this rank's rows of a tensor that every rank has whole, such as token ids or position ids.

        The gradient is in this rank's rows alone.
        """
        self.length = x.shape[dim]
        at = torch.from_numpy(self.deal.positions(self.rank)).to(x.device)
        return x.index_select(dim, at)

    def unshard(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Return the whole tensor on every rank, from the rows of each.

        The gradient of a rank's rows is the sum of those that all ranks have for them, in the order of ranks.
        """
        rows_last = self.agreed(partial(self.rows_last, x, dim), lambda y: {"unshard": y.shape[:-1], "dtype": y.dtype})
        whole: torch.Tensor = Unshard.apply(self, rows_last).movedim(-1, dim)
        return whole

    def rows_last(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Check this rank's part of a whole, and return it with its rows as the last dimension."""
        expected = self.deal.size(self.rank)
        if x.shape[dim] != expected:
            raise ValueError(f"x must have this rank's {expected} rows along dim {dim}, got shape {tuple(x.shape)}")
        return x.movedim(dim, -1)

    def attention(
        self, query: Any, key: Any, value: Any, *, return_weights: bool, observe: Any, engine: Any, **options: Any
    ) -> Any:
        """Compute `regard.attention` of this rank's rows."""
        prepare = partial(self.call, query, key, value, return_weights, observe, engine, options)
        call = self.agreed(prepare, lambda x: x.header)
        self.calls += 1
        computed = applied(call.call, *call.inputs)
        results: list[Any] = [computed[0]]
        if call.observe:
            results.append(seen_of(call.observe, computed))
        return results[0] if len(results) == 1 else tuple(results)

    def call(self, query: Any, key: Any, value: Any, weights: bool, observe: Any, engine: Any, options: Any) -> Call:
        """Check this rank's part of a call."""
        asked = checks.observe(observe)
        if weights or any(s not in OBSERVED for s in asked):
            raise ValueError(f'{WHOLE} observes "lse" and "entropy" alone')
        if any(batched(x) for x in (query, key, value) if isinstance(x, torch.Tensor)):
            raise ValueError(f"{WHOLE} cannot be in vmap: give the batch as leading dimensions")
        arguments = TensorArguments.of(query, key, value, options, observe)
        device = arguments.floats["query"].device
        if device.type != "cpu":  # parts are computed and sent in host memory
            raise ValueError(f"{WHOLE} computes on CPUs, got a query on the device {device}: give .cpu()")
        axis = -3 if arguments.options["layout"] == "bnhd" else -2
        floats, rows = arguments.floats, self.deal.size(self.rank)
        for name in ("query", "key", "value"):
            if floats[name].ndim < 3 or floats[name].shape[axis] != rows:
                shape = f"(..., {rows}, heads, d)" if axis == -3 else f"(..., heads, {rows}, d)"
                raise ValueError(f"{name} must be {shape}, this rank's rows, got {tuple(floats[name].shape)}")
        operands = {name: floats[name] for name in ("query", "key", "value")}
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in operands.values()))
        wide = {name: x.expand(*lead, *x.shape[-3:]) for name, x in operands.items() if x.shape[:-3] != lead}
        return rank_call(self, replace(arguments, floats=floats | wide).ready(), engine)

    def agreed(self, prepare: Callable[[], T], header: Callable[[T], Mapping[str, Any]]) -> T:
        """Return what this rank prepares; raise on all ranks unless all have one header."""
        try:
            prepared = prepare()
        except Exception as error:
            self.compare({"error": f"{type(error).__name__}: {error}"}, error)
            raise
        self.compare(header(prepared))
        return prepared

    def compare(self, header: Mapping[str, Any], error: Exception | None = None) -> None:
        """Raise ValueError if the headers of ranks differ.

        error: what this rank raises by itself; the others learn of it.
        """
        text = repr(sorted(header.items()))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        headers: list[Any] = [None] * self.ranks
        with without_transforms():
            own = torch.tensor([digest], dtype=torch.int64)
            every = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(every, own, group=self.group)
            if error is None and len({int(x) for x in every}) == 1:
                return
            dist.all_gather_object(headers, dict(header), group=self.group)
        if error is not None:
            return
        raise ValueError(f"ranks of context_parallel disagree: {difference(headers)}")

    def run(self, program: Program) -> Any:
        """Run this rank's program; return its result."""
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                self.sent()
                return end.value
            with without_transforms():
                answer = self.exchanged(asked) if isinstance(asked, Exchange) else self.transferred(asked)

    def transferred(self, x: Transfer) -> Callable[[], dict[int, list[Array]]]:
        """Begin to send arrays to other ranks; return what waits for theirs."""
        arrays, receiving, sending = transferred(x, self.group)

        def arrive() -> dict[int, list[Array]]:
            for each in receiving:
                each.wait()
            self.sent()  # what went out before
            self.sending = sending
            self.received += sum(a.nbytes for own in arrays.values() for a in own)
            return arrays

        return arrive

    def sent(self) -> None:
        """Wait until other ranks have what was sent to them."""
        for each in self.sending:
            each.wait()
        self.sending = []

    def exchanged(self, x: Exchange) -> Callable[[], dict[str, Array]]:
        """Begin to send each rank the rows that it wants; return what waits for those for this one."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        mine = {rank: chosen(x, self.rank, rank)[0] for rank in range(self.ranks)}
        theirs = {rank: chosen(x, rank, self.rank)[1] for rank in range(self.ranks)}
        width = sum(map(row_bytes, x.local.values()))
        sizes, counts = (
            [0 if rank == self.rank else len(rows[rank]) * width for rank in rows] for rows in (theirs, mine)
        )
        outgoing, incoming = (np.empty(sum(each), np.uint8) for each in (counts, sizes))
        for view, local, rows in views(outgoing, x.local, {rank: mine[rank] for rank in others}):
            np.take(local, rows, -2, view, "clip")
        work = dist.all_to_all_single(
            tensor(incoming), tensor(outgoing), sizes, counts, group=self.group, async_op=True
        )
        results = {name: np.zeros((*a.shape[:-2], len(x.rows), a.shape[-1]), a.dtype) for name, a in x.local.items()}
        for name, result in results.items():
            result[..., theirs[self.rank], :] = x.local[name][..., mine[self.rank], :]

        def arrive() -> dict[str, Array]:
            work.wait()
            self.received += sum(sizes)
            for view, result, rows in views(incoming, results, {rank: theirs[rank] for rank in others}):
                result[..., rows, :] = view
            return results

        return arrive


class Unshard(torch.autograd.Function):
    """(cp, x (..., rows)) → (..., n) on every rank."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, x: torch.Tensor) -> torch.Tensor:
        ctx.cp = cp
        sizes = [cp.deal.size(rank) for rank in range(cp.ranks)]
        most = max(sizes)  # gloo gathers equal shapes alone
        padded = [x.new_empty((*x.shape[:-1], most)) for _ in sizes]
        own = x.new_zeros((*x.shape[:-1], most))
        own[..., : x.shape[-1]] = x
        dist.all_gather(padded, own, group=cp.group)
        parts = [a[..., :size] for a, size in zip(padded, sizes, strict=True)]
        order = np.argsort(np.concatenate([cp.deal.positions(rank) for rank in range(cp.ranks)]))
        ctx.at = torch.from_numpy(cp.deal.positions(cp.rank)).to(x.device)
        return torch.cat(parts, -1)[..., torch.from_numpy(order).to(x.device)]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        every = [torch.empty_like(g, memory_format=torch.contiguous_format) for _ in range(ctx.cp.ranks)]
        dist.all_gather(every, g.contiguous(), group=ctx.cp.group)
        return None, sum(x[..., ctx.at] for x in every)


def chosen(x: Exchange, owner: int, to: int) -> tuple[Array, Array]:
    """Return the rows that one rank sends another: among the owner's own, and among those of the step."""
    wanted = x.rows_for(to)
    pieces = x.deal.pieces(owner, x.rows)
    own = np.concatenate([np.arange(0), *(np.arange(a.start, a.stop) for a, _ in pieces)]).astype(np.int64)
    into = np.concatenate([np.arange(0), *(np.arange(b.start, b.stop) for _, b in pieces)]).astype(np.int64)
    return own[wanted[into]], into[wanted[into]]


def views(
    buffer: Array, arrays: Mapping[str, Array], rows: Mapping[int, Array]
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield each rank's rows of each array in a buffer of bytes, with the array and the rows."""
    at = 0
    for some in rows.values():
        for a in arrays.values():
            shape = (*a.shape[:-2], len(some), a.shape[-1])
            size = int(np.prod(shape)) * a.itemsize
            yield buffer[at : at + size].view(a.dtype).reshape(shape), a, some
            at += size


def row_bytes(x: Array) -> int:
    """Return the bytes of one position of an array, over all batch elements and heads."""
    return int(np.prod(x.shape[:-2])) * x.shape[-1] * x.itemsize


def difference(headers: list[dict[str, Any]]) -> str:
    """Return what differs between ranks, in words."""
    for rank, header in enumerate(headers):
        if "error" in header:
            return f"rank {rank} raised {header['error']}"
    first = headers[0]
    for rank, header in enumerate(headers):
        for name in sorted({*first, *header}):
            if first.get(name) != header.get(name):
                return f"{name} is {first.get(name)} on rank 0, and {header.get(name)} on rank {rank}"
    return "their headers"
