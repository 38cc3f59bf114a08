"""Functions that are replaced inside of `regard.capture`.

Every call of attention goes through `regard.attention`. transformers' models use their attention interface, calls of
`F.scaled_dot_product_attention` a function mode. A user's own function of the interface stays and runs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regard.torch.adapter import watching
from regard.torch.dropins import functional
from regard.torch.dropins import transformers as interface
from regard.torch.modes import quiet

WINDOWS = "get_vision_window_index"
"""transformers' function for the order in which a model of pictures sorts its patches by windows."""


@contextmanager
def on_regard(
    model: nn.Module, own_function: Callable[..., Any], sorted_by: Callable[[Any, Any], None]
) -> Iterator[None]:
    """Set attn_implementation="regard" on a model of transformers inside of a `with`.

    own_function: is called with a user's own function of the interface, and its arguments, in its place. sorted_by: is
    called with the order of patches by windows, and the bounds of windows.
    """
    if not hasattr(model, "set_attn_implementation"):
        yield
        return
    interface.register_transformers()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "set_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    with ExitStack() as stack:
        for config, implementation in before:
            stack.callback(setattr, config, "_attn_implementation_internal", implementation)
        model.set_attn_implementation(interface.NAME)
        own = {name for name in {name for _, name in before} if _replace_own(name, own_function, stack)}
        for config, implementation in before:
            if implementation in own:
                config._attn_implementation_internal = implementation
        for name in {type(module).__module__ for module in model.modules()}:
            _replace_windows(sys.modules.get(name), sorted_by, stack)
        yield


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
        found = original(*args, **options)
        if watching():
            sorted_by(*found)
        return found

    stack.callback(setattr, module, WINDOWS, original)
    setattr(module, WINDOWS, sort)


class SdpaMode(torch.overrides.TorchFunctionMode):
    """Function mode that replaces `F.scaled_dot_product_attention` by regard's.

    It works however the function was imported.
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
