"""Checks of single arguments.

An error names the argument, the value given and what was expected.
"""

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from regard.arguments.packages import require

FLOATS = ("float16", "bfloat16", "float32", "float64")
BOOLS = (bool, np.bool_)


ELSEWHERE = {
    "is_causal": "causal=",
    "attn_mask": "mask= (True = attend), or bias= of regard.attention for floats",
    "attention_mask": "mask= (True = attend), or bias= of regard.attention for floats",
    "src_mask": "mask= (True = attend)",
    "tgt_mask": "mask= (True = attend)",
    "memory_mask": "context_mask= (True = attend)",
    "key_padding_mask": "mask=regard.padding(lengths)",
    "src_key_padding_mask": "key_padding_mask= (True = attend)",
    "tgt_key_padding_mask": "key_padding_mask= (True = attend)",
    "memory_key_padding_mask": "context_padding_mask= (True = attend)",
    "query_seq_lengths": "mask=regard.padding(lengths)",
    "key_value_seq_lengths": "mask=regard.padding(lengths)",
    "block_mask": "mask=",
    "mask_mod": "mask=",
    "score_mod": "score=",
    "softcap": "score=regard.softcap(cap)",
    "alibi_slopes": "score=regard.alibi(slopes)",
    "window_size": "mask=regard.window(left, right)",
    "local_window_size": "mask=regard.window(left, right)",
    "sliding_window": "mask=regard.window(size - 1)",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "dropout_p": "dropout=",
    "dropout_rate": "dropout=",
    "dropout_rng": "seed=",
    "sinks": "sink=",
    "s_aux": "sink=",
    "add_zero_attn": "sink=",
    "need_weights": "return_weights=",
    "return_lse": 'observe=["lse"]',
    "return_residual": 'observe=["lse"]',
    "implementation": "engine=",
    "enable_gqa": "not needed: query may have a multiple of the heads of key",
    "layout": "not needed: heads have no axis of their own",
    "batch_first": "not needed: the batch comes first",
    "embed_dim": "d_model=",
    "nhead": "num_heads=",
    "dim_feedforward": "d_ff=",
    "layer_norm_eps": "norm_eps=",
    "n_k": "n_keys=",
    "d_v": "d_value=",
    "heads_kv": "kv_heads=",
    "kdim": "key_dim=",
    "vdim": "value_dim=",
}
"""Options of other libraries, and their names here."""


def unknown(
    function: Callable[..., Any], given: Iterable[str], known: Collection[str], made: Collection[str] = ()
) -> TypeError:
    """Return the error for a call with options that a function does not have.

    known, made: as in `hint`.
    """
    name = min(set(given).difference(known))
    where = function.__qualname__.removesuffix(".__init__")
    return TypeError(f"{where}() got an unexpected keyword argument {name!r}{hint(name, known, made)}")


def hint(name: str, known: Collection[str], made: Collection[str] = ()) -> str:
    """Return the end of the error for an unknown argument.

    The text suggests the argument's name here, or one with a similar spelling. made: for a method, the options of the
    constructor.

    >>> hint("casual", ["causal", "mask"]), hint("is_causal", ["causal"]), hint("x", ["causal"])
    ("; did you mean 'causal'?", '; here it is causal=', '')
    >>> hint("is_causal", ["mask"], made=["causal"]), hint("is_causal", ["mask"])
    ('; here it is causal= of the constructor', '; that would be causal=, which is not taken here')
    """
    if name in ELSEWHERE:
        here = ELSEWHERE[name]
        option, is_option, _ = here.partition("=")
        if not is_option or option in known:
            return f"; here it is {here}"
        return (
            f"; here it is {here} of the constructor"
            if option in made
            else (f"; that would be {here}, which is not taken here")
        )
    import difflib  # only an error needs it

    if close := difflib.get_close_matches(name, known, 1):
        return f"; did you mean {close[0]!r}?"
    return f"; {name}= is an option of the constructor" if name in made else ""


def shown(x: object) -> str:
    """Return the repr of a value for a message.

    For values without one, such as ints of more than 4,300 digits, it is their type.
    """
    try:
        return repr(x)
    except Exception:
        return f"{'an int too large to print' if isinstance(x, int) else type(x).__name__}"


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text, with a binary unit.

    >>> size_text(640), size_text(2**41)
    ('640 B', '2 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} PiB"


LIBRARIES = {
    "cupy": ("CuPy", "cupy.asnumpy"),
    "dask": ("Dask", ".compute()"),
    "flax": ("Flax", "variable[...]"),
    "mlx": ("MLX", "numpy.array"),
    "paddle": ("Paddle", ".numpy()"),
    "pandas": ("pandas", ".to_numpy()"),
    "polars": ("Polars", ".to_numpy()"),
    "scipy": ("SciPy", ".toarray()"),
    "sparse": ("sparse", ".todense()"),
    "tensorflow": ("TensorFlow", ".numpy()"),
    "tinygrad": ("tinygrad", ".numpy()"),
    "xarray": ("xarray", ".to_numpy()"),
}
"""Libraries of unsupported arrays, by package, and how to convert them to supported ones."""


def type_name(value: object) -> str:
    """Return the name of a value's type for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def array_type(value: object, otherwise: str = "") -> str:
    """Return the type of an unsupported array for messages.

    For a known library, it includes the function that converts it.
    """
    library = LIBRARIES.get(type(value).__module__.partition(".")[0])
    if library is None:
        return f"{type_name(value)}{otherwise}"
    return f"{type_name(value)}; arrays of {library[0]} are not served: convert them with {library[1]}"


def boolean(name: str, x: object) -> bool:
    """Return `x` as a bool.

    Raises TypeError for anything else: 0, 1, strings and arrays are no booleans.
    """
    if not isinstance(x, BOOLS):
        raise TypeError(f"{name} must be a bool, got {shown(x)}")
    return bool(x)


def integer(
    name: str, x: object, expected: str = "an int", *, least: int | None = None, below: int | None = None
) -> int:
    """Return `x` as an int in [least, below).

    Raises TypeError or ValueError for anything else.
    """
    wrong = f"{name} must be {expected}, got {shown(x)}"
    if isinstance(x, BOOLS) or str(getattr(x, "dtype", "")).removeprefix("torch.") == "bool":
        raise TypeError(wrong)
    try:
        value = operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(wrong) from None
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
    if below is not None and value >= below:
        limit = f"2**{below.bit_length() - 1}" if below > 2**16 and below & (below - 1) == 0 else below
        raise ValueError(f"{name} must be below {limit}, got {shown(value)}")
    return value


def number(name: str, x: object, expected: str = "a number", *, positive: bool = False) -> float:
    """Return `x` as a finite float.

    Raises TypeError or ValueError for anything else.
    """
    value = real(name, x, expected)
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, got {value}")
    return value


def real(name: str, x: object, expected: str = "a number") -> float:
    """Return `x` as a float, which may be NaN or infinite.

    Raises TypeError for booleans, text and complex numbers.
    """
    if not _real(x):
        raise TypeError(f"{name} must be {expected}, got {shown(x)}")
    try:
        return float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {expected}, got {shown(x)}") from None
    except OverflowError:
        return math.inf


def _real(x: object) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):  # a union of types is not traced by Dynamo
        return x.ndim == 0 and (x.dtype.kind in "iuf" or x.dtype.name == "bfloat16")
    return not (isinstance(x, bool | str | bytes | bytearray) or "bool" in str(getattr(x, "dtype", "")))


def function(name: str, x: object, takes: Sequence[str]) -> Any:
    """Return `x` if it can be called with these arguments.

    Raises TypeError for anything else. Errors of the function itself are its own.
    """
    expected = f"{name} must be a function of ({', '.join(takes)})"
    if isinstance(x, type) or not callable(x):
        raise TypeError(f"{expected}, got {shown(x)}")
    accepts(x, takes, expected)
    return x


def accepts(function: Any, names: Sequence[str], expected: str) -> None:
    """Raise TypeError, with what was expected, unless a function takes these arguments."""
    try:
        inspect.signature(function).bind(*names)
    except ValueError:  # some built-in functions have no signature
        pass
    except TypeError as error:
        raise TypeError(f"{expected}: {error}") from None


def floating(name: str, x: object) -> np.dtype[Any]:
    """Return the floating dtype that a name, a type or a dtype denotes.

    Raises TypeError for anything else.
    """
    if isinstance(x, str) and x == "bfloat16":
        require("bfloat16", "ml_dtypes")
        import ml_dtypes

        x = ml_dtypes.bfloat16
    if isinstance(x, str | type | np.dtype):
        try:
            dtype = np.dtype(x)
        except (TypeError, ValueError):
            pass
        else:
            if dtype.type.__name__ in FLOATS and dtype.isnative:
                return dtype
    raise TypeError(f"{name} must be a floating dtype ({', '.join(FLOATS)}), got {shown(x)}")


def choice(name: str, x: object, options: Sequence[str | None]) -> Any:
    """Return `x` if it is one of the options.

    Raises ValueError, which lists them, for anything else.
    """
    if not (x is None or isinstance(x, str)) or x not in options:
        *others, last = map(repr, options)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} must be {listed}, got {shown(x)}")
    return x
