"""Cached calls on tensors, by the signatures of `regard.ops.callcache`.

Decoding steps have one entry for any number of keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from regard.core.options import ARRAYS, RULES
from regard.core.problem import Problem
from regard.core.tensors import NUMPY, array, tensor
from regard.engines import PreparedCall, choose
from regard.ops import callcache
from regard.ops.callcache import VARYING, Entry, Signature, signature, signature_beside
from regard.ops.normalization import causally
from regard.rules import Table, as_mask, tables_of
from regard.runtime import memory
from regard.runtime.threads import num_threads, on_team
from regard.torch.call.bound import ArrayCall, constants_of
from regard.torch.call.record import DEFAULTS, SHORT, TensorCall
from regard.torch.tensors.arrays import PLAIN
from regard.torch.tensors.modes import profiled, transformed, watched
from regard.torch.tensors.team import TEAM

OPTIONS = {"causal", "scale", "offset", "mask", "score", "bias", "sink", "dropout", "seed", "layout"}
OPERANDS = ("query", "key", "value")
STEP_OPTIONS = {"causal", "scale"}
OF_SINK = ("denominators", "outside")
OF_RULES = ("mask", "score", "rules")
DERIVED = ("mask", "score", "rules", "extents", "device")  # what a problem shares besides `shared_fields`
STRIDED = torch.strided
data_ptr = torch.Tensor.data_ptr
DTYPE = 7  # of what `tensor_operands` returns


class CachedTensorCall:
    """A call of one signature on tensors, which computes out and lse; in 16 bits also low.

    run: the engine's prepared call. ready: the call that it was made of. step: it takes any number of keys. more: the
    names of VARYING that it has. If it has derivatives, fields is what their problems share: all but the tensors, and
    rules that read tables, whose values change.
    """

    def __init__(self, run: PreparedCall, ready: ArrayCall, step: bool, more: Sequence[str], dtype: torch.dtype):
        p = ready.problem
        self.run = run if num_threads() == 1 else on_team(TEAM)(run)
        self.layout, self.engines, self.names = ready.layout, {"forward": ready.engine}, (*OPERANDS, *more)
        self.more = more
        self.step, self.out, self.rows, self.dtype = step, ready.layout.out_shape(p), p.shape(p.n_q), dtype
        self.grouped = p.group != 1  # query heads share heads of the key
        self.seeded, self.sink, self.reads_tables = bool(p.dropout), "sink" in more, bool(ready.call.tables)
        self.real = torch.float64 if dtype is torch.float64 else torch.float32
        self.large = prod(self.out) * dtype.itemsize >= memory.LARGE
        self.lse = torch.empty(self.rows, dtype=self.real, device="cpu")  # never returned
        self.lse_address = self.lse.data_ptr()
        self.fields: dict[str, Any] | None = None
        if not (step or "mask" in more):
            self.fields = p.shared_fields | {name: getattr(p, name) for name in DERIVED}
            for name in (*more, *OF_SINK * self.sink, *OF_RULES * self.reads_tables):  # arrays of one call
                del self.fields[name]
        self.low = dtype in SHORT and self.fields is not None
        self.run_low: Any = None
        self.trained: TensorCall | None = None

    def new(self, q: torch.Tensor) -> torch.Tensor:
        """Return memory for the output on the device of q.

        The default device may be another.
        """
        return tensor(memory.empty(self.out, NUMPY[self.dtype])) if self.large else q.new_empty(self.out)

    def result(self, call: TensorCall, tensors: Any, seed: Any, apply: Callable[..., Any]) -> torch.Tensor | None:
        """Return the output of query, key, value and the other tensors, with the derivatives that they need.

        None where a call with derivatives is not cached. seed: read with dropout. apply: applies a call to its inputs.
        """
        if undifferentiated(*tensors):
            return self.output(tensors, seed if self.seeded else 0, call.tables)
        if self.fields is None and not (self.step and tensors[0].dtype not in SHORT):
            return None
        results: tuple[torch.Tensor, ...] = apply(*self.applied_to(call, tensors, seed))
        return results[0]

    def output(self, tensors: tuple[torch.Tensor, ...], seed: Any, tables: tuple[Table, ...]) -> torch.Tensor:
        """Return the output alone."""
        out = self.new(tensors[0])
        if self.sink:
            tensors = *tensors[:-1], self.sums(tensors[-1])
        self.write([out.data_ptr(), self.lse_address, *map(data_ptr, tensors)], tensors, int(seed), tables)
        return out

    def __call__(self, call: TensorCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return out and lse, and low in 16 bits."""
        out, lse = self.new(inputs[0]), inputs[0].new_empty(self.rows, dtype=self.real)
        tensors, seed = (inputs, 0) if len(inputs) == len(OPERANDS) else self.arranged(call, inputs)
        addresses = [out.data_ptr(), lse.data_ptr(), *map(data_ptr, tensors)]
        if not self.low:
            self.write(addresses, tensors, seed, call.tables)
            return out, lse
        if self.run_low is None:
            self.run_low = self.prepared(call, "forward", inputs)
        low = self.new(inputs[0])
        addresses.insert(5, low.data_ptr())
        self.run_low(addresses, seed=seed, tables=call.tables)
        return out, lse, low

    def arranged(self, call: TensorCall, inputs: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], int]:
        """Return the inputs of a call in the order of a prepared call, and the seed."""
        named = dict(zip(call.inputs, inputs, strict=True))
        if self.sink:
            named["sink"] = self.sums(named["sink"])
        return tuple([named[name] for name in self.names]), int(named["seed"]) if self.seeded else 0

    def write(
        self, addresses: list[int], tensors: tuple[torch.Tensor, ...], seed: int, tables: tuple[Table, ...]
    ) -> None:
        if self.step:
            _, k, v = tensors
            self.run(addresses, k.shape[-2], k.stride(), v.stride())
        else:
            self.run(addresses, seed=seed, tables=tables)

    def sums(self, sink: torch.Tensor) -> torch.Tensor:
        """Return the sink as engines read it, in the dtype of sums."""
        return sink if sink.dtype is self.real and sink.is_contiguous() else sink.detach().to(self.real).contiguous()

    def applied_to(self, call: TensorCall, tensors: Any, seed: Any) -> tuple[Any, ...]:
        """Return the call with the derivatives that these tensors need, and its inputs."""
        if not (self.more or self.seeded):
            return call, *tensors
        named = dict(zip(self.names, tensors, strict=True))
        if self.seeded:
            named["seed"] = torch.as_tensor(seed, device="cpu")
        if "bias" in named and named["bias"].requires_grad:
            if self.trained is None or self.trained.options is not call.options:
                floats = *OPERANDS, *(name for name in ARRAYS if name in named)
                self.trained = replace(call, floats=floats, others=tuple(x for x in call.others if x != "bias"))
            call = self.trained
        return call, *map(named.__getitem__, call.inputs)

    def on(self, call: TensorCall, arrays: Sequence[Any], function: str) -> ArrayCall:
        """Return the call of an engine's `function` on other arrays."""
        assert self.fields is not None
        named: dict[Any, Any] = dict(zip(call.inputs, arrays, strict=True))
        own: dict[str, Any] = {name: self.layout.to_bhnd(named[name]) for name in OPERANDS}
        own |= {name: named[name] for name in ARRAYS if name in named}
        if self.seeded:
            own["seed"] = int(named["seed"])
        if self.reads_tables:
            own |= rules_of(call)
        own["constants"] = constants_of(call, call.options["score"], {})
        p = Problem.from_fields(self.fields, **own)
        if function not in self.engines:
            self.engines[function] = choose(p, None, function)
        return ArrayCall(call, p, self.layout, self.engines[function])

    def prepared(self, call: TensorCall, function: str, inputs: Sequence[torch.Tensor]) -> PreparedCall | None:
        """Return an engine's prepared function, which stores or reads low in 16 bits."""
        ready = self.on(call, [array(x) for x in inputs], function)
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
        key = self, call.floats, *[x.stride() for x in inputs]
        entry = callcache.find(key)
        if entry is None:
            entry = Entry(call=self.prepared(call, "backward", inputs), tried=True)
            callcache.store(key, entry)
        if entry.call is None:
            return None
        dout, seed = dout.resolve_neg().contiguous(), 0
        more: tuple[torch.Tensor, ...] = saved[2:]
        g = [new_gradient(x, self.layout.positions_first) for x in inputs[:3]]
        if len(inputs) > len(OPERANDS):
            tensors, seed = self.arranged(call, inputs)
            more += tensors[3:]
            if self.sink:
                g.append(torch.empty_like(more[-1]))
                more = *more, g[-1]
        if not entry.call(
            [*map(data_ptr, (out, lse, dout, *inputs[:3], *g[:3], *more))], seed=seed, tables=call.tables
        ):
            return None
        if self.sink:
            g[-1] = g[-1].to(inputs[call.inputs.index("sink")].dtype)
        return tuple(g)


def rules_of(call: TensorCall) -> dict[str, Any]:
    """Return the rules of a call's problem."""
    mask, score = call.options["mask"], call.options["score"]
    return {"mask": causally(mask) if call.options["causal"] else mask, "score": score}


def new_gradient(x: torch.Tensor, positions_first: bool) -> torch.Tensor:
    """Return memory for the gradient of an operand, (..., h, n, d) without gaps."""
    if not positions_first:
        return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)  # the first takes half of the time
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


def with_tensor(operands: tuple[Any, ...] | None, name: str, x: torch.Tensor) -> tuple[Any, ...] | None:
    """Add the dtype, shape and strides of a dense mask, a bias or a sink to `tensor_operands`.

    None if it cannot be cached: a mask must be boolean, a bias of the operands' dtype, and a sink a number for each
    head.
    """
    if operands is None or type(x) not in PLAIN or x.is_nested or not x.is_cpu or x.layout is not STRIDED or x.is_neg():
        return None
    dtype = x.dtype
    if name == "sink":
        fits = dtype in NUMPY and dtype.is_floating_point and x.ndim == 1
    else:
        fits = dtype is (torch.bool if name == "mask" else operands[DTYPE])
    return (*operands, name, dtype, x.shape, x.stride()) if fits else None


def tensors_of(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the options of VARYING that are tensors."""
    return {name: x for name in VARYING if isinstance(x := options.get(name), torch.Tensor)}


def signature_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Signature | None:
    """Return the signature of a call on tensors, None if it cannot be cached.

    options: those of `regard.attention`.
    """
    if not options:
        return signature(tensor_operands(q, k, v, True), options)
    if not options.keys() <= OPTIONS:
        return None
    tensors, operands = tensors_of(options), tensor_operands(q, k, v, options.keys() <= STEP_OPTIONS)
    for name, x in tensors.items():
        operands = with_tensor(operands, name, x)
    return signature_beside(tensors, operands, options)


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
    if entry is None or call is None or not call.cached.reads_tables:
        return call
    rules = {name: options.get(name) for name in RULES}
    if any(call.options[name] is not rule for name, rule in rules.items()):  # of the same forms
        entry.call = call = replace(call, options=call.options | rules)
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
    tensors, dropout = tensors_of(options), bool(options.get("dropout"))
    seed = {"seed": torch.zeros((), dtype=torch.int64, device="cpu")} if dropout else {}
    floats, others = [*OPERANDS, *["sink"] * ("sink" in tensors)], [*["bias"] * ("bias" in tensors), *seed]
    named: dict[Any, torch.Tensor] = {"query": q, "key": k, "value": v} | tensors | seed
    step = is_step(q, k, v, options)
    call_options = DEFAULTS | options | dict.fromkeys(tensors) | {"observe": (), "seed": None}
    call = TensorCall(
        call_options, tuple(floats), tuple(others), low=q.dtype in SHORT and not (step or "mask" in tensors)
    )
    reading = call
    if "mask" in tensors:  # it belongs to the caller
        mask = as_mask(tensors["mask"])
        payload = mask.node.payload
        named[payload] = named.pop("mask")
        reading = replace(call, options=call.options | {"mask": mask}, others=(*others, payload))
    ready = ArrayCall.of(reading, [array(named[x]) for x in reading.inputs], "forward")
    if step:  # its query is the last position and sees all others
        ready = replace(ready, problem=replace(ready.problem, mask=None))
    run = ready.engine.prepare(ready.problem, "forward", ["keys"] * step)
    if run is None or call.tables != tables_of(ready.problem.mask_node, ready.problem.score_node):
        return None
    return replace(call, cached=CachedTensorCall(run, ready, step, tuple(tensors), q.dtype))


def is_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> bool:
    """Return whether this is a decode step: one query that sees every key."""
    simple = q.ndim == k.ndim == v.ndim > 2 and q.shape[-2] == 1 <= k.shape[-2] == v.shape[-2]
    return simple and options.keys() <= STEP_OPTIONS
