"""PyTorch's functions and methods of traced values, by name.

PyTorch is not imported. It asks a traced value for the result of a function (`__torch_function__`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode not in (None, "floor", "trunc"):
        raise TypeError(f"rounding_mode of torch.div must be None, 'floor' or 'trunc' in a rule, got {rounding_mode!r}")
    if rounding_mode is None:
        return np.divide(a, b)
    if rounding_mode == "floor":
        return np.floor_divide(a, b)
    size = np.floor_divide(abs(a), abs(b))
    return np.where((a < 0) == (b < 0), size, -size)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else np.maximum(x, min)
    return x if max is None else np.minimum(x, max)


def _to(x: Any, *args: Any, dtype: Any = None, **others: Any) -> Any:
    """Cast `x` to the dtype among the arguments; other arguments have no effect."""
    for given in (*args, dtype):
        kind = given if isinstance(given, type) else getattr(given, "dtype", given)
        if kind is not None and kind_of(kind) is not None:
            return x.astype(kind)
    return x


def kind_of(dtype: Any) -> str | None:
    """Return the kind of value of a dtype of Python, NumPy or PyTorch, or None."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.").rstrip("_").rstrip("0123456789")
    if name == "bool":
        return "bool"
    return {"int": "int", "uint": "int", "float": "float", "bfloat": "float"}.get(name)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in (
            "absolute", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "cos", "cosh", "exp", "exp2",
            "expm1", "floor", "floor_divide", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less",
            "less_equal", "log", "log10", "log1p", "log2", "logical_and", "logical_not", "logical_or", "logical_xor",
            "maximum", "minimum", "multiply", "negative", "not_equal", "positive", "reciprocal", "remainder", "sign",
            "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "true_divide", "trunc", "where",
        )
    },
    "abs": np.absolute,
    "and": np.bitwise_and,
    "arctan": np.arctan,
    "atan": np.arctan,
    "bitwise_left_shift": np.left_shift,
    "bitwise_not": np.invert,
    "bitwise_right_shift": np.right_shift,
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "clamp_min": _clamp,
    "clip": _clamp,
    "div": _divide,
    "divide": _divide,
    "eq": np.equal,
    "floordiv": np.floor_divide,
    "full_like": lambda x, value: value,
    "ge": np.greater_equal,
    "gt": np.greater,
    "invert": np.invert,
    "le": np.less_equal,
    "lshift": np.left_shift,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mod": np.remainder,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "ones_like": lambda x: x.dtype(1),
    "or": np.bitwise_or,
    "pow": np.power,
    "relu": lambda x: np.maximum(x, 0),
    "round": np.rint,
    "rshift": np.right_shift,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),  # its derivative does not overflow in this form
    "sub": np.subtract,
    "truediv": np.divide,
    "xor": np.bitwise_xor,
    "zeros_like": lambda x: x.dtype(0),
}  # fmt: skip
"""PyTorch's functions by name, those of operators without underscores."""

METHODS: dict[str, Callable[..., Any]] = FUNCTIONS | {
    "bfloat16": lambda x: x.astype(float),
    "bool": lambda x: x.astype(bool),
    "double": lambda x: x.astype(float),
    "float": lambda x: x.astype(float),
    "half": lambda x: x.astype(float),
    "int": lambda x: x.astype(int),
    "long": lambda x: x.astype(int),
    "masked_fill": lambda x, mask, value: np.where(mask, value, x),
    "to": _to,
    "where": lambda x, condition, other: np.where(condition, x, other),
}
"""Methods of tensors by name."""


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply one of PyTorch's functions to arguments with a traced value.

    Raises TypeError for a function that rules do not have.
    """
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__":
        raise TypeError("a traced value cannot index a tensor; use regard.table(tensor)[index], whose indices clamp")
    plain = FUNCTIONS.get(name.strip("_"))
    if plain is None:
        raise TypeError(f"torch.{name} is not available in a rule; available: {', '.join(sorted(FUNCTIONS))}")
    named = [kwargs.pop(key) for key in ("condition", "input", "self", "other", "exponent") if key in kwargs]
    kwargs.pop("inplace", None)
    return plain(*args, *named, **kwargs)
