"""Functions that are replaced inside of `regard.capture`.

Calls of attention go through `regard.attention`. transformers' models use their attention interface, calls of
`F.scaled_dot_product_attention` a function mode of the thread. A user's own function of the interface stays and runs.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regard.runtime.forks import renewed
from regard.torch.dropins import functional
from regard.torch.dropins import transformers as interface
from regard.torch.public.attention import watched, watching
from regard.torch.tensors.modes import function_modes, quiet

WINDOWS = "get_vision_window_index"
"""transformers' function for the order in which a model of pictures sorts its patches by windows."""


_switched: dict[int, "SwitchedConfig"] = {}
_lock = renewed(sys.modules[__name__], "_lock", threading.Lock)


@dataclass
class SwitchedConfig:
    """A configuration of transformers with attn_implementation="regard", and what it had before.

    holders: the number of `on_regard` that are inside. One thread may leave while another is.
    """

    config: Any
    before: Any
    holders: int = 0


@contextmanager
def redirected(attention: Callable[..., Any]) -> Iterator[None]:
    """Call `attention` in place of `regard.attention` and PyTorch's function, in this thread, inside of a `with`."""
    with watched(attention):
        if any(type(mode) is SdpaMode for mode in function_modes()):
            yield
        else:
            with SdpaMode():
                yield


@contextmanager
def on_regard(
    model: nn.Module, own_function: Callable[..., Any], sorted_by: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Set attn_implementation="regard" on a model of transformers, and on those in a module, inside of a `with`.

    own_function: is called with a user's own function of the interface, and its arguments, in its place. sorted_by: is
    called with the order of patches by windows, and the bounds of windows.
    """
    models = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not models:
        yield
        return
    interface.register_transformers()
    with ExitStack() as stack:
        configs = [_held(config, stack) for config in {id(m.config): m.config for m in models}.values()]
        inner = {module for of in models for module in of.modules() if module is not of}
        for outermost in [of for of in models if of not in inner]:
            outermost.set_attn_implementation(interface.NAME)
        own = {name for name in {x.before for x in configs} if _replace_own(name, own_function, stack)}
        for x in configs:
            if x.before in own:
                x.config._attn_implementation_internal = x.before
        for name in {type(module).__module__ for module in model.modules()}:
            _replace_windows(sys.modules.get(name), sorted_by, stack)
        yield


def _held(config: Any, stack: ExitStack) -> SwitchedConfig:
    """Note what a configuration has, and give it back when the last that was noted leaves."""
    with _lock:
        switched = _switched.setdefault(id(config), SwitchedConfig(config, config._attn_implementation))
        switched.holders += 1
    stack.callback(_release, switched)
    return switched


def _release(switched: SwitchedConfig) -> None:
    with _lock:
        switched.holders -= 1
        if not switched.holders:
            switched.config._attn_implementation_internal = switched.before
            del _switched[id(switched.config)]


def _replace_own(name: str | None, own_function: Callable[..., Any], stack: ExitStack) -> bool:
    """Replace a user's own function of the interface.

    Return False if it is transformers' or regard's.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    function = functions.get(name)
    root = getattr(getattr(function, "func", function), "__module__", "").partition(".")[0]
    if function is None or root in ("transformers", "regard"):
        return False

    @wraps(function)
    def own(*args: Any, **options: Any) -> Any:
        return own_function(function, *args, **options) if watching() else function(*args, **options)

    if name in functions._local_mapping:
        stack.callback(functions.__setitem__, name, function)
    else:
        stack.callback(functions.__delitem__, name)
    functions[name] = own
    return True


def _replace_windows(module: Any, sorted_by: Callable[[Any, Any], None], stack: ExitStack) -> None:
    """Replace a model's function that sorts patches by windows."""
    original = getattr(module, WINDOWS, None)
    if original is None:
        return

    @wraps(original)
    def sort(*args: Any, **options: Any) -> Any:
        windows = original(*args, **options)
        if watching():
            sorted_by(*windows)
        return windows

    stack.callback(setattr, module, WINDOWS, original)
    setattr(module, WINDOWS, sort)


class SdpaMode(torch.overrides.TorchFunctionMode):
    """Function mode that replaces `F.scaled_dot_product_attention` by regard's.

    The mode works however the function was imported.
    """

    original = staticmethod(F.scaled_dot_product_attention)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is self.original:
            return functional.scaled_dot_product_attention(*args, **kwargs)
        if function is F.multi_head_attention_forward:  # a function mode does not see the calls inside
            with functional.sdpa():
                if not kwargs.get("need_weights", True):
                    return function(*args, **kwargs)
                with torch.no_grad():  # PyTorch computes weights without the function: this call is only recorded
                    function(*args, **kwargs | {"need_weights": False})
        return function(*args, **kwargs)


quiet.add(SdpaMode)
