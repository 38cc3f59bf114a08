"""PyTorch's functions and methods of traced values, by name.

PyTorch is not imported. It asks a traced value for the result of a function (`__torch_function__`).
"""

import math
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
    for argument in (*args, dtype):
        kind = argument if isinstance(argument, type) else getattr(argument, "dtype", argument)
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


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + (math.sqrt(0.5) * x).erf())


def _sigmoid(x: Any) -> Any:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # its derivative does not overflow in this form


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    return np.where(beta * x > threshold, x, np.log1p(np.exp(beta * x)) / beta)


def _logsigmoid(x: Any) -> Any:
    return -_softplus(-x, threshold=40)  # from there on exp(-x) is nothing beside x, in float64 too


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return np.where(x > 0, scale * x, scale * alpha * np.expm1(input_scale * x))


def _hardtanh(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    # By comparisons, as PyTorch: at either end the derivative is 0.
    return np.where(x <= min_val, min_val, np.where(x >= max_val, max_val, x))


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    tests = test_elements.reshape(-1) if getattr(test_elements, "ndim", 0) else test_elements
    inside = (elements.unsqueeze(-1) == tests).any(-1)
    return ~inside if invert else inside


def _new(value: int) -> Callable[..., Any]:
    def constant(x: Any, size: Any = (), *, dtype: Any = None, **others: Any) -> Any:
        if tuple(size):
            raise TypeError(f"a rule computes one number for each pair: size must be (), got {size}")
        return x.constant(value, dtype)

    return constant


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
    "elu": _elu,
    "eq": np.equal,
    "erf": lambda x: x.erf(),
    "expit": _sigmoid,
    "floordiv": np.floor_divide,
    "full_like": lambda x, value: value,
    "ge": np.greater_equal,
    "gelu": _gelu,
    "gt": np.greater,
    "hardtanh": _hardtanh,
    "invert": np.invert,
    "isin": _isin,
    "le": np.less_equal,
    "leaky_relu": lambda x, negative_slope=0.01: np.where(x > 0, x, negative_slope * x),
    "log_sigmoid": _logsigmoid,
    "logsigmoid": _logsigmoid,
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
    "relu": lambda x: np.where(x <= 0, 0, x),  # its derivative at 0 is 0, as PyTorch's
    "round": np.rint,
    "rshift": np.right_shift,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "softplus": _softplus,
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
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "to": _to,
    "where": lambda x, condition, other: np.where(condition, x, other),
}
"""Methods of tensors by name."""


def _reduction(fold: Callable[[Any, Any], Any], kind: type | None = None) -> Callable[..., Any]:
    def reduction(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return (x if kind is None else x.astype(kind)).reduce(fold, dim, keepdim)

    return reduction


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    axes = range(len(x.shape)) if dim is None else np.atleast_1d(dim)
    return x.reduce(np.add, dim, keepdim) / math.prod(x.shape[axis] for axis in axes)


def _dot(a: Any, b: Any) -> Any:
    if len(a.shape) != 1 or len(b.shape) != 1:
        raise TypeError(f"a rule multiplies rows of one axis, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return np.multiply(a, b).sum()


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "all": _reduction(np.bitwise_and, bool),
    "amax": _reduction(np.maximum),
    "amin": _reduction(np.minimum),
    "any": _reduction(np.bitwise_or, bool),
    "dot": _dot,
    "inner": _dot,
    "matmul": _dot,
    "mean": _mean,
    "prod": _reduction(np.multiply),
    "sum": _reduction(np.add),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
}
"""Functions and methods of rows of tables, which reduce them, by name."""


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply one of PyTorch's functions to arguments with a traced value.

    Raises TypeError for a function that rules do not have.
    """
    name = getattr(function, "__name__", str(function))
    name = name.strip("_").removeprefix("special_")
    plain = FUNCTIONS.get(name) or REDUCTIONS.get(name)
    if plain is None:
        available = ", ".join(sorted({*FUNCTIONS, *REDUCTIONS}))
        raise TypeError(f"torch.{name} is not available in a rule; available: {available}")
    named = [kwargs.pop(key) for key in ("condition", "input", "self", "other", "exponent") if key in kwargs]
    kwargs.pop("inplace", None)
    return plain(*args, *named, **kwargs)
