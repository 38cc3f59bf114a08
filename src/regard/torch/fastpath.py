"""Cached calls on tensors, by the signatures of `regard.ops.callcache`.

Decoding steps have one entry for any number of keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from regard.core.options import RULES
from regard.core.problem import Problem
from regard.core.tensors import NUMPY, array, tensor
from regard.engines import PreparedCall, choose
from regard.ops import callcache
from regard.ops.callcache import Entry, Signature, signature
from regard.rules import as_mask
from regard.rules.masks import Rule
from regard.runtime import memory
from regard.runtime.threads import num_threads, on_team
from regard.torch.arrays import PLAIN
from regard.torch.calls import DEFAULTS, SHORT, ArrayCall, TensorCall
from regard.torch.modes import profiled, transformed, watched
from regard.torch.team import TEAM

OPTIONS = {"causal", "scale", "offset", "mask", "score", "bias", "layout"}
DENSE = ("bias", "mask")
STEP_OPTIONS = {"causal", "scale"}
DERIVED = ("mask", "score", "rules", "extents", "device")  # what a problem shares besides `shared_fields`
STRIDED = torch.strided
data_ptr = torch.Tensor.data_ptr
DTYPE = 7  # of what `tensor_operands` returns


class CachedTensorCall:
    """A call of one signature on tensors, which computes out and lse; in 16 bits also low.

    run: the engine's prepared call. ready: the call that it was made of. step: it takes any number of keys. dense: its
    bias or mask is a tensor. Other calls have derivatives: fields is what their problems share, all but query, key and
    value.
    """

    def __init__(self, run: PreparedCall, ready: ArrayCall, step: bool, dense: bool, dtype: torch.dtype) -> None:
        p = ready.problem
        self.run = run if num_threads() == 1 else on_team(TEAM)(run)
        self.layout, self.engines = ready.layout, {"forward": ready.engine}
        self.step, self.out, self.rows, self.dtype = step, ready.layout.out_shape(p), p.shape(p.n_q), dtype
        self.grouped = p.group != 1  # query heads share heads of the key
        self.real = torch.float64 if dtype is torch.float64 else torch.float32
        self.large = prod(self.out) * dtype.itemsize >= memory.LARGE
        self.lse = torch.empty(self.rows, dtype=self.real, device="cpu")  # never returned
        self.lse_address = self.lse.data_ptr()
        self.fields: dict[str, Any] | None = None
        if not (step or dense):
            self.fields = p.shared_fields | {name: getattr(p, name) for name in DERIVED}
        self.low = dtype in SHORT and self.fields is not None
        self.run_low: Any = None

    def new(self, q: torch.Tensor) -> torch.Tensor:
        """Return memory for the output on the device of q.

        The default device may be another.
        """
        return tensor(memory.empty(self.out, NUMPY[self.dtype])) if self.large else q.new_empty(self.out)

    def output(self, *given: torch.Tensor) -> torch.Tensor:
        """Return the output alone, of query, key, value and the bias or mask of the cached call."""
        out = self.new(given[0])
        self.write(out, self.lse_address, given)
        return out

    def __call__(self, call: TensorCall, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return out and lse, and low in 16 bits."""
        out, lse = self.new(given[0]), given[0].new_empty(self.rows, dtype=self.real)
        if not self.low:
            self.write(out, lse.data_ptr(), given)
            return out, lse
        if self.run_low is None:
            self.run_low = self.prepared(call, "forward", given)
        low = self.new(given[0])
        self.run_low([out.data_ptr(), lse.data_ptr(), *map(data_ptr, given), low.data_ptr()])
        return out, lse, low

    def on(self, call: TensorCall, arrays: Sequence[Any], function: str) -> ArrayCall:
        """Return the call of an engine's `function` on other arrays."""
        assert self.fields is not None
        q, k, v = map(self.layout.to_bhnd, arrays)
        p = Problem.from_fields(self.fields, query=q, key=k, value=v)
        if function not in self.engines:
            self.engines[function] = choose(p, None, function)
        return ArrayCall(call, p, self.layout, self.engines[function])

    def prepared(self, call: TensorCall, function: str, given: Sequence[torch.Tensor]) -> PreparedCall | None:
        """Return an engine's prepared function, which stores or reads low in 16 bits."""
        ready = self.on(call, [array(x) for x in given], function)
        run = ready.engine.prepare(ready.problem, function, ["low"] * self.low)
        return run if run is None or num_threads() == 1 else on_team(TEAM)(run)

    def gradients(self, call: TensorCall, inputs: Any, outputs: Any, ct: Any) -> tuple[torch.Tensor, ...] | None:
        """Return the gradients for the cotangent of out by a prepared call, None if these tensors have none.

        Prepared calls are those of this thread, which may be another than that of forward.
        """
        (out, lse, _, low), (dout, dlse, _) = outputs, ct
        saved = (out, lse, low) if self.low else (out, lse)
        if self.fields is None or dout is None or dlse is not None or not all(x.is_contiguous() for x in saved):
            return None
        key = self, *[x.stride() for x in inputs]
        entry = callcache.find(key)
        if entry is None:
            entry = Entry(call=self.prepared(call, "backward", inputs), tried=True)
            callcache.store(key, entry)
        if entry.call is None:
            return None
        dout = dout.resolve_neg().contiguous()
        g = [new_gradient(x, self.layout.positions_first) for x in inputs]
        done = entry.call([*map(data_ptr, (out, lse, dout, *inputs, *g)), *map(data_ptr, saved[2:])])
        return tuple(g) if done else None

    def write(self, out: torch.Tensor, lse_address: int, given: tuple[torch.Tensor, ...]) -> None:
        addresses = [out.data_ptr(), lse_address, *map(data_ptr, given)]
        if self.step:
            _, k, v = given
            self.run(addresses, k.shape[-2], k.stride(), v.stride())
        else:
            self.run(addresses)


def new_gradient(x: torch.Tensor, positions_first: bool) -> torch.Tensor:
    """Return memory for the gradient of an operand, (..., h, n, d) without gaps."""
    if not positions_first:
        return x.new_empty(x.shape)
    return torch.empty_like(x.transpose(-2, -3), memory_format=torch.contiguous_format).transpose(-2, -3)


def tensor_operands(q: Any, k: Any, v: Any, steps: bool) -> tuple[Any, ...] | None:
    """Return dtype, shapes and strides of strided CPU tensors, for a signature.

    None for other tensors, and while a mode or transform is active. steps: for one query that sees all keys, leave out
    n_k and the strides of batch elements and heads.
    """
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or q.is_nested or k.is_nested or v.is_nested:
        return None
    dtype = q.dtype
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.layout is k.layout is v.layout is STRIDED):
        return None
    if k.dtype is not dtype or v.dtype is not dtype:
        return None
    if q.is_neg() or k.is_neg() or v.is_neg() or watched() or profiled() or transformed():
        return None
    if torch.is_autocast_enabled("cpu"):
        return None
    rows, keys, values, k_strides, v_strides = q.shape, k.shape, v.shape, k.stride(), v.stride()
    step = steps and len(rows) == len(keys) == len(values) > 2 and rows[-2] == 1 <= keys[-2] == values[-2]
    if step:
        k_sizes, v_sizes = tuple(keys), tuple(values)  # slices of tuples take a quarter of the time
        keys, values = k_sizes[:-2] + k_sizes[-1:], v_sizes[:-2] + v_sizes[-1:]
        k_strides, v_strides = k_strides[-2:], v_strides[-2:]
    return step, rows, q.stride(), keys, k_strides, values, v_strides, dtype


def with_dense(operands: tuple[Any, ...] | None, name: str, x: torch.Tensor) -> tuple[Any, ...] | None:
    """Add the shape and strides of a dense mask or bias to `tensor_operands`.

    None if it cannot be cached: a mask must be boolean, a bias of the operands' dtype.
    """
    if operands is None or type(x) not in PLAIN or x.is_nested or not x.is_cpu or x.layout is not STRIDED:
        return None
    dtype = x.dtype
    if (dtype is not torch.bool if name == "mask" else dtype is not operands[DTYPE]) or x.is_neg():
        return None
    return *operands, name, x.shape, x.stride()


def dense_of(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the bias and the mask that are tensors, in a repeatable call's order."""
    return {name: x for name in DENSE if isinstance(x := options.get(name), torch.Tensor)}


def signature_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Signature | None:
    """Return the signature of a call on tensors, None if it cannot be cached.

    options: those of `regard.attention`.
    """
    if not options:
        return signature(tensor_operands(q, k, v, True), options)
    if not options.keys() <= OPTIONS:
        return None
    dense, operands = dense_of(options), tensor_operands(q, k, v, options.keys() <= STEP_OPTIONS)
    for name, x in dense.items():
        operands = with_dense(operands, name, x)
    others = {name: x for name, x in options.items() if name not in dense} if dense else options
    for name in RULES:
        rule = others.get(name)
        if rule is not None and not (isinstance(rule, Rule) and callcache.met(rule)):
            return None
    return signature(operands, others)


def cached(q: Any, k: Any, v: Any, options: dict[str, Any]) -> TensorCall | None:
    """Return the cached call of the signature of these arguments, None if there is none.

    A new signature gets its call here.
    """
    signed = signature_of(q, k, v, options)
    entry = callcache.find(signed)
    if entry is None and signed is not None:
        entry = Entry(call=_made(q, k, v, options), tried=True)
        callcache.store(signed, entry)
    call: TensorCall | None = None if entry is None else entry.call
    return call


def undifferentiated(*inputs: torch.Tensor) -> bool:
    """Return whether no derivative of a call on these tensors can be needed, where no transform is active."""
    if torch.is_grad_enabled():
        for x in inputs:
            if x.requires_grad:
                return False
    return True


def _made(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> TensorCall | None:
    """Make a call that can be repeated, if the engine has one for these tensors."""
    if not all(x.dtype in NUMPY and x.ndim > 2 for x in (q, k, v)):
        return None
    dense = dense_of(options)
    mask = {name: as_mask(x) for name, x in dense.items() if name == "mask"}
    others = tuple(mask[name].node.payload if name in mask else name for name in dense)
    step = is_step(q, k, v, options)
    given = DEFAULTS | options | dict.fromkeys(dense) | {"observe": ()}
    call = TensorCall(given, ("query", "key", "value"), low=q.dtype in SHORT and not (step or dense))
    reading = replace(call, options=call.options | mask, others=others)  # what others hold belongs to the caller
    ready = ArrayCall.of(reading, [array(x) for x in (q, k, v, *dense.values())], "forward")
    if step:  # its query is the last position and sees all others
        ready = replace(ready, problem=replace(ready.problem, mask=None))
    run = ready.engine.prepare(ready.problem, "forward", ["keys"] * step)
    if run is None:
        return None
    return replace(call, cached=CachedTensorCall(run, ready, step, bool(dense), q.dtype))


def is_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether this is a decode step: one query that sees every key."""
    simple = q.ndim == k.ndim == v.ndim > 2 and q.shape[-2] == 1 <= k.shape[-2] == v.shape[-2]
    return simple and options.keys() <= STEP_OPTIONS
