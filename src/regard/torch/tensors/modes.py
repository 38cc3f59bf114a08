"""Active modes, traces and transforms of PyTorch, by its private names.

PyTorch has no public names for these questions. All private names that this package uses are here, each with what goes
wrong without it. They are looked up on import: a version of PyTorch that lacks one fails there, and no call is wrong.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import traceback
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

F = TypeVar("F", bound=Callable[..., Any])

# Number of active dispatch modes: FakeTensorMode, the tracer of make_fx, counters, loggers. Without it they see the
# memory that a call on plain tensors allocates, and not the call: make_fx records uninitialised tensors.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_dispatch_mode_at = torch._C._get_dispatch_stack_at

# The same for function modes, which see calls of Python functions. Without it they see the getters of shapes alone.
any_function_mode = torch._C._is_torch_function_mode_enabled
_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at

# True while torch.profiler records this thread. Without it a call without a derivative, which runs no operation of
# PyTorch, has no name and no time in a profile.
profiled = torch.autograd._profiler_enabled

# The state of torch.jit.trace. Without it a trace holds the results of its example as constants.
jit_state = torch._C._get_tracing_state

# The mode of make_fx, and its place in the stack of torch.export before autograd. Without them values that change from
# run to run, such as those of a mask, would be read while a graph is traced, and become constants of it.
_mode_of = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_mode_before_autograd = torch._ops._get_dispatch_mode_pre_dispatch
_modes_before_autograd = torch._ops._len_torch_dispatch_stack_pre_dispatch

# Has Dynamo compile neither the frames of a code object nor those that they call. Without it a call between two graphs
# would be compiled frame by frame: torch.compiler.disable does the same, but imports Dynamo, SymPy and Inductor.
_set_strategy = torch._C._dynamo.eval_frame.set_code_exec_strategy
_SKIP = torch._C._dynamo.eval_frame._FrameAction.SKIP
_UNCOMPILED = torch._C._dynamo.eval_frame._FrameExecStrategy(_SKIP, _SKIP)

# True while a transform of torch.func is active. Without it calls would read the memory of a wrapper.
transforms_active = torch._C._are_functorch_transforms_active
_is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor

# True of a tensor that vmap made. Without it several processes would not tell it from one with a derivative.
_is_batched = torch._C._functorch.is_batchedtensor

# Inside, an autograd function may be applied to the tensors of one level of a transform, as the kernel of an operation
# is. Without it PyTorch fails an assertion.
at_one_level = torch._functorch.utils.enable_single_level_autograd_function

# Inside, forward mode is on, which PyTorch turns off in the forward of an autograd function. Without it the transforms
# outside of the innermost one lose their tangents.
with_forward_mode = forward_ad._set_fwd_grad_enabled

# The tensor in a wrapper of a transform that has ended, as the function that torch.func.vjp returns is called with.
# Without it the derivatives of such a call are zeros.
alive = torch._C._functorch.unwrap_if_dead

# Inside, no transform is active: the values of a constant are read while one is.
without_transforms = torch._C._DisableFuncTorch

# Inside, autograd is skipped, but not what comes after it: the forward of an autograd function calls the operation of
# which the function is the derivative. Without it that operation would differentiate itself without end.
below_autograd = torch._C._AutoDispatchBelowAutograd

# The trace that runs now. Without its symbols a function would compare an index with one, which Dynamo takes for False.
_tracing_context = torch._guards.TracingContext.try_get

# Tensors of FakeTensorMode, and those of the functionalization of AOTAutograd. Without them they would be refused.
_FAKE = (FakeTensor, FunctionalTensor)

# Tensors that torch.func.functionalize wraps. Their type does not tell them from plain ones.
_is_functional = torch._is_functional_tensor

# The vmap before torch.func, with which PyTorch still batches gradients. Its tensors are of plain type too.
_included = torch._C._dispatch_tls_is_dispatch_key_included
_VMAP_MODE = torch._C._parse_dispatch_key("VmapMode")
legacy_vmap_enter = torch._C._vmapmode_increment_nesting
legacy_vmap_leave = torch._C._vmapmode_decrement_nesting
legacy_vmap_wrap = torch._add_batch_dim
legacy_vmap_unwrap = torch._remove_batch_dim

# True where arguments with __torch_function__ are asked. Without it a call inside of one would recurse without end.
functions_overridden = torch._C._is_torch_function_enabled

# The __torch_function__ and __torch_dispatch__ of classes that define none. Without them a mask that is a rule
# would be asked for each getter, and subclasses that change no operation could not be told from those that do.
no_torch_function = torch._C._disabled_torch_function_impl
no_torch_dispatch = torch._C._disabled_torch_dispatch_impl

# The backward that runs, or -1. Without it a forward that gradient checkpoints compute again would be recorded twice.
_backward = torch._C._current_graph_task_id

# The type of jagged nested tensors. Without it they could not be told from those of the other layout.
Jagged = NestedTensor

# A tensor without storage, the operation of Tensor.to, and a map over the tensors among arguments. Without them a mask
# that is a rule would be an array of n × n.
tensor_without_storage = torch.Tensor._make_wrapper_subclass
to_copy = torch.ops.aten._to_copy
map_tensors = tree_map_only

# Ends a library. Without it PyTorch's own kernels would come back only when the library is collected.
destroyed = torch.library.Library._destroy

# The types of modules that TorchScript has seen. Without them a module could not be compiled again after an error.
script_types = torch.jit._recursive.concrete_type_store

# A file linked with the OpenMP runtime of PyTorch's threads. Without it they spin while threads of ours work.
library: str = torch._C.__file__

# The memory budget of torch.autograd.graph.region_activation_memory_budget in the metadata of a node. Without it and
# the one of the configuration, dropout in a graph that saves nothing would have a wrong gradient.
_REGION_BUDGET = "_region_activation_memory_budget"

# Function modes that need not see calls: torch.set_default_device sets the device of new tensors, which a call sets
# itself. More may be added.
quiet: set[type] = {DeviceContext}


class SingleLevelFunction(torch.autograd.function._SingleLevelFunction):
    """Base of autograd functions whose `apply` serves one level of transforms.

    `apply` of torch.autograd.Function hands the call to the transforms, in some versions before a subclass can decide.
    Then the kernel of an operation, which applies its function, would call itself.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)  # else its backward raises


def constant(function: F) -> F:
    """Mark a function that Dynamo calls with constants while it traces, and that returns one."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allowed_in_graphs(function: F) -> F:
    """Decorate a function as `torch.compiler.allow_in_graph` does, without an import of Dynamo.

    Dynamo allows the function when it traces a call, whenever it was imported.
    """

    @constant
    def allow() -> None:
        torch.compiler.allow_in_graph(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            allow()
        return function(*args, **kwargs)

    return cast(F, call)


def outside_of_graphs(reason: str) -> Callable[[F], F]:
    """Return a decorator as `torch.compiler.disable` does, without an import of Dynamo.

    A graph breaks at a call of the function, for a reason that Dynamo reports. Nothing in that call is compiled.
    """

    def decorate(function: F) -> F:
        def outside(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        _set_strategy(outside.__code__, _UNCOMPILED)  # not the function's code, which other functions may share
        outside._torchdynamo_disable = True  # type: ignore[attr-defined]
        outside._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return cast(F, wraps(function)(outside))

    return decorate


def guard_scalar(x: Any) -> Any:
    """Return a number of a graph as a constant; another number traces the graph again."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # with SymPy, which Dynamo has imported

    return guard_scalar(x)


def has_static_value(x: Any) -> Any:
    """Return True if a number of a graph is a constant."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(x)


def has_symbols() -> bool:
    """Return True while a graph is traced in which a size or a number is a symbol.

    The one that Dynamo has for the value of a tensor without axes, in case it is asked, does not count.
    """
    context = _tracing_context()
    environment = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if environment is None:
        return False
    sources = (environment.var_to_sources.get(symbol, ()) for symbol in environment.var_to_range)
    return any({type(x).__name__ for x in each} != {"CallMethodItemSource"} for each in sources)


def in_backward() -> bool:
    """Return True while a backward runs in this thread."""
    return bool(_backward() != -1)


def watched() -> bool:
    """Return True if an active mode or trace must see a call as one operation."""
    if _dispatch_modes() or jit_state() is not None:
        return True
    return any_function_mode() and any(type(mode) not in quiet for mode in function_modes())


def tracing() -> bool:
    """Return True while a graph is traced, which will run on other values."""
    if jit_state() is not None or _mode_of(_PROXY) is not None:
        return True
    return bool(_modes_before_autograd()) and _mode_before_autograd(_PROXY) is not None


def transformed() -> bool:
    """Return True if a transform is active.

    A transform may need a derivative of tensors that require no grad.
    """
    return bool(forward_ad._current_level >= 0 or transforms_active())  # without the first: zero tangents


def fake(x: torch.Tensor) -> bool:
    """Return True if `x` has a shape and a dtype but no values."""
    return isinstance(x, _FAKE) or x.is_meta or _is_functional(x)


def wrapped(x: torch.Tensor) -> bool:
    """Return True if `x` is a wrapper of a transform."""
    return bool(_is_transform_wrapper(x))


def batched(x: torch.Tensor) -> bool:
    """Return True if `x` is an example of a batch, inside of vmap."""
    return bool(_is_batched(x))


def symbolic(*tensors: torch.Tensor) -> bool:
    """Return True if a size of these tensors is a symbol of a traced graph."""
    return any(not isinstance(n, int) for x in tensors for n in sizes(x))


def sizes(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape; while torch.jit.trace makes tensors of sizes, as numbers.

    The warning of a trace is silenced, since the sizes are only checked.
    """
    if jit_state() is None:
        return tuple(x.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return tuple(map(int, x.shape))


def example(x: torch.Tensor) -> tuple[int, ...]:
    """Return the shape with the sizes of the traced example for symbols."""
    return tuple(n if isinstance(n, int) else n.node.hint for n in sizes(x))


@contextmanager
def drawn_once() -> Iterator[None]:
    """Mark random operations traced inside: backward has the numbers of forward.

    The marks are those of selective checkpointing, for partitioners heed no tag of an operation. A result is saved,
    unless nothing is. Then backward draws it again, with the state of the generator that forward had.
    """
    region = traceback.current_meta.get("custom", {}).get(_REGION_BUDGET, config.activation_memory_budget)
    again = region == 0 and torch.is_grad_enabled()  # an inference graph takes no such mark
    with traceback.preserve_node_meta():
        traceback.current_meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        yield


def in_legacy_vmap() -> bool:
    """Return True inside of the vmap before `torch.func`.

    `torch.autograd.grad(..., is_grads_batched=True)` still uses it.
    """
    return _included(_VMAP_MODE)


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes."""
    return [_dispatch_mode_at(n) for n in range(_dispatch_modes())]


def function_modes() -> list[Any]:
    """Return the active function modes of this thread."""
    return [_function_mode_at(n) for n in range(_function_modes())]
