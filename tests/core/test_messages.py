"""The text of errors is a contract: it names the argument, what was given and what was expected, before any work."""

import inspect
import math
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import positions
from regard.core.statistics import NAMES
from regard.engines import cpu, tiled
from regard.ops.planning import plan
from regard.ops.stepping import steps
from regard.reference import engine as specification


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


Q, K, V = ones(2, 4, 6, 8), ones(2, 2, 5, 8), ones(2, 2, 5, 3)  # batch 2, 4 heads in groups of 2, 6 queries, 5 keys
MATRIX = ones(6, 8)
DOUT, PER_QUERY = ones(2, 4, 6, 3), ones(2, 4, 6)
NOWHERE = regard.Differential()
SLOPES = regard.table(ones(4, dtype=np.float64))

FLOATING = "must have a floating dtype (float16, bfloat16, float32, float64), got"
MASK = "mask must be a mask, a function of (b, h, i, j), or an array of booleans or 0/1 integers, got"
SCORE = "must be a score rule, a function of (s, b, h, i, j), or a sequence of those, got"
CUPY = "arrays of CuPy are not served: convert them with cupy.asnumpy"
SIDE = "side of padding must be 'right' or 'left', got"
MAPS = "feature_map must be 'elu', 'relu', 'softmax', 'favor', RandomFeatures(...) or a function"
KNOWN = (
    f"known are {', '.join(map(repr, NAMES))} and "
    "regard.top(k), mass(rule), pooled(rows, cols), weights_of(rows), renyi(alpha)"
)
TRUTH = "a mask has no truth value; combine masks with & | ~ instead of and, or, not"
BRANCHING = (
    "a rule is traced once for all indices, so a traced value has no truth value: use & | ~ for and, or, not; "
    "regard.where(condition, a, b) for if; np.maximum and np.minimum for max and min; "
    "(a <= x) & (x < b) for a <= x < b"
)
NOT_ITS = "does not belong to this query, key and options"
GIVE = '. Give the lse of the same call, as observe=["lse"] returns it, or leave it out'
A_BOOLEAN = "a mask must return a boolean one, e.g. i - j > 0"
A_FLOAT = "a score must return a float one, e.g. s - 0.5 * abs(i - j)"


class Subclass(np.ndarray):
    """Arrays that mean more than their numbers: np.ma.MaskedArray, np.matrix, arrays with units."""


def of(module: str, name: str = "ndarray") -> Any:
    """An array of a library that is not installed here, as far as its type says."""
    return type(name, (), {"__module__": module, "shape": (6, 8), "ndim": 2, "dtype": np.dtype(np.float32)})()


class Tensor:
    """An array of some other library."""

    ndim = 2
    shape = (6, 8)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return MATRIX


def matrix(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.asmatrix(x)


def with_if(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i if h == 0 else j < i


def with_and(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i and h > 0


def with_not(b: Any, h: Any, i: Any, j: Any) -> Any:
    return not j > i


def chained(b: Any, h: Any, i: Any, j: Any) -> Any:
    return 0 <= i - j < 4


def with_max(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return max(s, 0.0)


def with_math(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return math.tanh(s)


def indexing(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + [0.5, 0.25][h]


def adding_an_array(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + np.ones((6, 5))


def distance(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i - j


def half(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i / 2


def no_return(b: Any, h: Any, i: Any, j: Any) -> Any:
    j <= i  # noqa: B015


def an_array(b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.ones((6, 5), bool)


def later(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return j > i


def three(b: Any, h: Any, i: Any) -> Any:
    return i > 0


def call(q: Any = Q, k: Any = K, v: Any = V, /, **wishes: Any) -> Callable[[], Any]:
    return lambda: regard.attention(q, k, v, **wishes)


def weights(q: Any = Q, k: Any = K, /, **wishes: Any) -> Callable[[], Any]:
    return lambda: regard.weights(q, k, **wishes)


def vjp(dout: Any = DOUT, /, **wishes: Any) -> Callable[[], Any]:
    return lambda: regard.attention_vjp(Q, K, V, dout, **wishes)


def vjp_jvp(tangents: Any = NOWHERE, /, **wishes: Any) -> Callable[[], Any]:
    return lambda: regard.attention_vjp_jvp(Q, K, V, DOUT, tangents, **wishes)


def jvp(**wishes: Any) -> Callable[[], Any]:
    return lambda: regard.attention_jvp(Q, K, V, **wishes)


def linear(**wishes: Any) -> Callable[[], Any]:
    return lambda: regard.linear_attention(Q, K, V, **wishes)


def merge(*parts: Any, **wishes: Any) -> Callable[[], Any]:
    return lambda: regard.merge(*parts, **wishes)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # shapes
    (
        call(Q, K[..., :4]),
        ValueError,
        "query and key must have the same number of features d, got query (2, 4, 6, 8), key (2, 2, 5, 4)",
    ),
    (
        call(Q, K, V[:, :, :3]),
        ValueError,
        "key and value must have the same number of keys n_k, got key (2, 2, 5, 8), value (2, 2, 3, 3)",
    ),
    (
        call(Q, K, V[:, :1]),
        ValueError,
        "key and value must have the same number of heads h_kv, got key (2, 2, 5, 8), value (2, 1, 5, 3)",
    ),
    (
        call(Q[:, :3]),
        ValueError,
        "the heads of query must be a multiple of those of key, got 3 and 2 in query (2, 3, 6, 8), key (2, 2, 5, 8)",
    ),
    (
        call(Q, K[:, :0], V[:, :0]),
        ValueError,
        "the heads of query must be a multiple of those of key, got 4 and 0 in query (2, 4, 6, 8), key (2, 0, 5, 8)",
    ),
    (
        call(layout="bnhd"),
        ValueError,
        "the heads of query must be a multiple of those of key, got 6 and 5 in query (2, 4, 6, 8), key (2, 2, 5, 8)",
    ),
    (
        call(Q, ones(3, 2, 5, 8), ones(3, 2, 5, 8)),
        ValueError,
        "the leading dimensions must broadcast, got query (2, 4, 6, 8), key (3, 2, 5, 8)",
    ),
    (
        call(Q, K, ones(3, 2, 5, 8)),
        ValueError,
        "the leading dimensions must broadcast, got query (2, 4, 6, 8), key (2, 2, 5, 8), value (3, 2, 5, 8)",
    ),
    (
        call(Q, MATRIX, ones(6, 8)),
        ValueError,
        "query, key and value must all be matrices (n, d) or all have heads (..., h, n, d), "
        "got query (2, 4, 6, 8), key (6, 8), value (6, 8)",
    ),
    (
        call(Q[0, 0, 0]),
        ValueError,
        "query, key and value must all be matrices (n, d) or all have heads (..., h, n, d), "
        "got query (8,), key (2, 2, 5, 8), value (2, 2, 5, 3)",
    ),
    (
        call(MATRIX, MATRIX[:, :5], MATRIX),
        ValueError,
        "query and key must have the same number of features d, got query (6, 8), key (6, 5)",
    ),
    # arrays and their dtypes
    (call([[1.0]]), TypeError, "query must be a NumPy array, got list"),
    (call(Q, None), TypeError, "key must be a NumPy array, got NoneType"),
    (call(np.float32(1)), TypeError, "query must be a NumPy array, got numpy.float32"),
    (call(np.ma.masked_array(Q)), TypeError, "query must be a NumPy array, got numpy.ma.MaskedArray"),
    (call(matrix(MATRIX), MATRIX, MATRIX), TypeError, "query must be a NumPy array, got numpy.matrix"),
    (call(Q, K.view(Subclass)), TypeError, f"key must be a NumPy array, got {__name__}.Subclass"),
    (call(Q, K, Tensor()), TypeError, f"value must be a NumPy array, got {__name__}.Tensor"),
    (call(Q.astype(int)), TypeError, f"query {FLOATING} int64"),
    (call(Q, K > 0), TypeError, f"key {FLOATING} bool"),
    (call(Q, K, V.astype(object)), TypeError, f"value {FLOATING} object"),
    (call(Q.astype(complex)), TypeError, f"query {FLOATING} complex128"),
    (call(Q.astype(ml_dtypes.float8_e4m3fn)), TypeError, f"query {FLOATING} float8_e4m3fn"),
    (call(Q.astype(">f4")), TypeError, f"query {FLOATING} >f4, not in the byte order of this machine"),
    (
        call(Q, K.astype(np.float64)),
        TypeError,
        "query, key and value must share one dtype, got query float32, key float64, value float32",
    ),
    (
        call(Q.astype(np.float16), K.astype(np.float16), V.astype(ml_dtypes.bfloat16)),
        TypeError,
        "query, key and value must share one dtype, got query float16, key float16, value bfloat16",
    ),
    # libraries that are not served
    (call(of("cupy")), TypeError, "query must be a NumPy array, got cupy.ndarray; " + CUPY),
    (call(Q, of("cupy._core.core")), TypeError, "key must be a NumPy array, got cupy._core.core.ndarray; " + CUPY),
    (
        call(Q, K, of("mlx.core", "array")),
        TypeError,
        "value must be a NumPy array, got mlx.core.array; arrays of MLX are not served: convert them with numpy.array",
    ),
    (
        call(of("tensorflow.python.framework.ops", "EagerTensor")),
        TypeError,
        "query must be a NumPy array, got tensorflow.python.framework.ops.EagerTensor; "
        "arrays of TensorFlow are not served: convert them with .numpy()",
    ),
    (call(mask=of("cupy")), TypeError, f"{MASK} cupy.ndarray; {CUPY}"),
    (call(score=of("cupy")), TypeError, f"score {SCORE} cupy.ndarray; {CUPY}"),
    (call(bias=of("cupy")), TypeError, f"bias must be a NumPy array, got cupy.ndarray; {CUPY}"),
    (lambda: regard.table(of("cupy")), TypeError, f"table must be a NumPy array, got cupy.ndarray; {CUPY}"),
    (
        lambda: regard.alibi(of("pandas", "Series")),
        TypeError,
        "slopes of alibi must be a NumPy array, got pandas.Series; "
        "arrays of pandas are not served: convert them with .to_numpy()",
    ),
    (
        lambda: regard.linear_attention(of("cupy"), K, V),
        TypeError,
        f"query must be a NumPy array, got cupy.ndarray; {CUPY}",
    ),
    # masks
    (
        call(mask=ones(6, 5)),
        TypeError,
        "mask must be booleans or 0/1 integers, got float32; to add to scores, use bias=",
    ),
    (
        call(mask=ones(6, 5, dtype=ml_dtypes.bfloat16)),
        TypeError,
        "mask must be booleans or 0/1 integers, got bfloat16; to add to scores, use bias=",
    ),
    (
        lambda: regard.causal() & ones(6, 5),
        TypeError,
        "mask must be booleans or 0/1 integers, got float32; to add to scores, use bias=",
    ),
    (call(mask=np.array([0, 1, 2, 0, 1])), ValueError, "mask must be booleans or 0/1 integers, got 2"),
    (call(mask=np.full((6, 5), -1)), ValueError, "mask must be booleans or 0/1 integers, got -1"),
    (call(mask=np.full((6, 5), 255, np.uint8)), ValueError, "mask must be booleans or 0/1 integers, got 255"),
    (lambda: regard.causal() & np.full((6, 5), 3), ValueError, "mask must be booleans or 0/1 integers, got 3"),
    (call(mask=ones(6, 5, dtype=object)), TypeError, "mask must be booleans or 0/1 integers, got object"),
    (call(mask=ones(6, 5, dtype=complex)), TypeError, "mask must be booleans or 0/1 integers, got complex128"),
    (call(mask="causal"), TypeError, f"{MASK} str; give causal=True"),
    (call(mask="sliding"), TypeError, f"{MASK} str"),
    (call(mask=[[True]]), TypeError, f"{MASK} list"),
    (call(mask=True), TypeError, f"{MASK} bool"),
    (call(mask=Tensor()), TypeError, f"{MASK} {__name__}.Tensor"),
    (call(mask=np.ma.masked_array(ones(6, 5, dtype=bool))), TypeError, f"{MASK} numpy.ma.MaskedArray"),
    (lambda: regard.causal() & 1, TypeError, f"{MASK} int"),
    (
        call(mask=regard.softcap(2.0)),
        TypeError,
        "mask must be a mask, got the score softcap(2.0); give score=softcap(2.0)",
    ),
    (
        call(mask=ones(6, 4, dtype=bool)),
        ValueError,
        "mask must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (6, 4)",
    ),
    (
        call(mask=ones(1, 2, 4, 6, 5, dtype=bool)),
        ValueError,
        "mask must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (1, 2, 4, 6, 5)",
    ),
    (
        call(mask=ones(2, 5, dtype=bool)),
        ValueError,
        "mask must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (2, 5); "
        "one row for each batch element? Then give mask[:, None, None, :]",
    ),
    (
        call(mask=regard.causal() & ones(2, 5, dtype=bool)),
        ValueError,
        "mask must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (2, 5); "
        "one row for each batch element? Then give mask[:, None, None, :]",
    ),
    (
        call(mask=ones(2, 6, 5, dtype=int)),
        ValueError,
        "mask must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (2, 6, 5); "
        "one matrix for each batch element? Then give mask[:, None, :, :]",
    ),
    (call(causal=1), TypeError, "causal must be a bool, got 1"),
    (call(causal=regard.causal()), TypeError, "causal must be a bool, got causal()"),
    (lambda: regard.causal() and regard.window(3), TypeError, TRUTH),
    (lambda: regard.causal() or regard.window(3), TypeError, TRUTH),
    (lambda: not regard.causal(), TypeError, TRUTH),
    (lambda: 1 if regard.causal() else 0, TypeError, TRUTH),
    # rules
    (call(mask=with_if), TypeError, BRANCHING),
    (call(mask=with_and), TypeError, BRANCHING),
    (call(mask=with_not), TypeError, BRANCHING),
    (call(mask=chained), TypeError, BRANCHING),
    (call(score=with_max), TypeError, BRANCHING),
    (
        call(score=with_math),
        TypeError,
        "a traced value is not a number: use .astype(int) or .astype(float), np.rint, and NumPy's functions, "
        "not math's",
    ),
    (
        call(score=indexing),
        TypeError,
        "a traced value cannot index a list or an array; use regard.table(array)[index]",
    ),
    (
        call(score=adding_an_array),
        TypeError,
        "arrays and lists cannot be used in a rule directly; use regard.table(array)[index]",
    ),
    (call(mask=distance), TypeError, f"mask rule 'distance' returned an int expression; {A_BOOLEAN}"),
    (call(mask=half), TypeError, f"mask rule 'half' returned a float expression; {A_BOOLEAN}"),
    (call(mask=no_return), TypeError, f"mask rule 'no_return' returned a NoneType; {A_BOOLEAN}"),
    (call(mask=an_array), TypeError, f"mask rule 'an_array' returned a ndarray; {A_BOOLEAN}"),
    (call(score=later), TypeError, f"score rule 'later' returned a bool expression; {A_FLOAT}"),
    (call(mask=three), TypeError, "mask rule 'three' must take (b, h, i, j): too many positional arguments"),
    (call(mask=later), TypeError, "mask rule 'later' must take (b, h, i, j): missing a required argument: 'j'"),
    (call(score=distance), TypeError, "score rule 'distance' must take (s, b, h, i, j): too many positional arguments"),
    (call(score=3.0), TypeError, f"score {SCORE} float"),
    (call(score="softcap"), TypeError, f"score {SCORE} str"),
    (call(score=ones(6, 5)), TypeError, f"score {SCORE} numpy.ndarray"),
    (call(score=[regard.softcap(2.0), 3.0]), TypeError, f"score[1] {SCORE} float"),
    (call(score=regard.causal()), TypeError, "score must be a score, got the mask causal(); give mask=causal()"),
    (
        call(score=[regard.softcap(2.0), regard.window(3)]),
        TypeError,
        "score must be a score, got the mask window(3); give mask=window(3)",
    ),
    (
        call(mask=regard.documents(np.zeros(5, int)), offset=0),
        ValueError,
        "ids of documents covers query index 0 to 4, but this call reaches query index 5",
    ),
    (
        call(mask=regard.documents(np.zeros(9, int))),
        ValueError,
        "ids of documents covers query index 0 to 8, but this call reaches query index -1",
    ),
    (
        call(mask=regard.documents(np.zeros(9, int), np.zeros(4, int)), offset=0),
        ValueError,
        "key_ids of documents covers key index 0 to 3, but this call reaches key index 4",
    ),
    (
        call(mask=regard.padding(np.array([1, 2])), origin=(1, 0, 0)),
        ValueError,
        "lengths of padding covers batch index 0 to 1, but this call reaches batch index 2",
    ),
    (
        call(score=regard.alibi(ones(3))),
        ValueError,
        "slopes of alibi covers head 0 to 2, but this call reaches head 3",
    ),
    (
        call(mask=regard.padding(np.array([1, 2, 3]))),
        ValueError,
        "lengths of padding covers batch index 0 to 2, but this call ends at batch index 1, and no origin= places it "
        "in a larger one",
    ),
    (
        call(score=lambda s, b, h, i, j: s * regard.table(ones(9))[h]),
        ValueError,
        "axis 0 of a table of shape (9,), float32 of score(<lambda>) covers head 0 to 8, but this call ends at head 3, "
        "and no origin= places it in a larger one",
    ),
    (lambda: regard.window(2.5), TypeError, "left of window must be an integer, got 2.5"),
    (lambda: regard.documents(ones(5)), TypeError, "ids of documents must be integers, got float32"),
    (lambda: regard.alibi(Tensor()), TypeError, f"slopes of alibi must be a NumPy array, got {__name__}.Tensor"),
    (
        lambda: regard.padding([[1], [1, 2]]),
        ValueError,
        "lengths of padding must be an array, got lists of different lengths",
    ),
    (
        lambda: regard.documents([[1], [1, 2]]),
        ValueError,
        "ids of documents must be an array, got lists of different lengths",
    ),
    (lambda: regard.table([[1], [1, 2]]), ValueError, "table must be an array, got lists of different lengths"),
    (lambda: regard.softcap([]), ValueError, "cap of softcap must not be empty, got shape (0,)"),
    (lambda: regard.softcap("2"), TypeError, "cap of softcap must be a number or an array of floats, got '2'"),
    (lambda: regard.alibi(True), TypeError, "slopes of alibi must be a number or an array of floats, got True"),
    (lambda: regard.padding(3, side=np.zeros(2)), ValueError, f"{SIDE} array([0., 0.])"),  # type: ignore[arg-type]
    (lambda: regard.padding(3, side=[]), ValueError, f"{SIDE} []"),  # type: ignore[arg-type]
    (
        lambda: regard.padding(np.array([2**63], np.uint64)),
        ValueError,
        "lengths of padding must fit into 64-bit signed integers, got 9223372036854775808",
    ),
    (
        lambda: regard.dilated(2**40, 2**40),
        ValueError,
        "left · step of dilated must be below 2**62, got 1208925819614629174706176",
    ),
    (lambda: regard.window(2**62), ValueError, "left of window must be below 2**62, got 4611686018427387904"),
    (
        lambda: regard.window(-(10**5000)),
        ValueError,
        "left of window must be at least 0, got an int too large to print",
    ),
    (
        lambda: regard.relative(np.zeros(32), buckets=np.zeros(2)),  # type: ignore[arg-type]
        ValueError,
        "buckets of relative must be None or 't5', got array([0., 0.])",
    ),
    (
        lambda: regard.relative(np.zeros(32), buckets="t5", bidirectional="abc"),  # type: ignore[arg-type]
        TypeError,
        "bidirectional of relative must be a bool, got 'abc'",
    ),
    (
        lambda: regard.relative(np.zeros(32), buckets="t5", max_distance=2**70),
        ValueError,
        "max_distance of relative must be below 2**24, got 1180591620717411303424",
    ),
    (
        lambda: regard.relative(np.zeros(3), buckets="t5"),
        ValueError,
        "table of relative must have at least 4 buckets, got 3",
    ),
    (call(mask=int), TypeError, "a mask rule must be a function of (b, h, i, j), got the class int"),
    (
        lambda: regard.table(np.ma.masked_array([1.0, 2.0])),
        TypeError,
        "table must be a NumPy array, got numpy.ma.MaskedArray",
    ),
    # bias, sink, scale
    (
        call(bias=ones(6, 4)),
        ValueError,
        "bias must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (6, 4)",
    ),
    (
        call(bias=ones(2, 5)),
        ValueError,
        "bias must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (2, 5); "
        "one row for each batch element? Then give bias[:, None, None, :]",
    ),
    (
        call(bias=ones(6, 5, dtype=bool)),
        TypeError,
        "bias must have a floating dtype, got bool; give a boolean array as mask=",
    ),
    (call(bias=ones(6, 5, dtype=int)), TypeError, f"bias {FLOATING} int64"),
    (call(bias=1.0), TypeError, "bias must be a NumPy array, got float"),
    (call(bias=Tensor()), TypeError, f"bias must be a NumPy array, got {__name__}.Tensor"),
    (
        call(metric=ones(8)),
        ValueError,
        "metric must have shape (d, d) = (8, 8) or (h, d, d) = (4, 8, 8), got shape (8,)",
    ),
    (
        call(metric=ones(2, 8, 8)),
        ValueError,
        "metric must have shape (d, d) = (8, 8) or (h, d, d) = (4, 8, 8), got shape (2, 8, 8)",
    ),
    (call(metric=ones(8, 8, dtype=int)), TypeError, f"metric {FLOATING} int64"),
    (call(metric="identity"), TypeError, "metric must be a NumPy array, got str"),
    (call(sink=ones(3)), ValueError, "sink must be one number for each head, shape (4,), got shape (3,)"),
    (call(sink=ones(2, 4)), ValueError, "sink must be one number for each head, shape (4,), got shape (2, 4)"),
    (call(sink=ones(4, dtype=int)), TypeError, f"sink {FLOATING} int64"),
    (call(sink=0.5), TypeError, "sink must be a NumPy array, got float"),
    (call(scale=np.nan), ValueError, "scale must be finite, got nan"),
    (call(scale=-np.inf), ValueError, "scale must be finite, got -inf"),
    (call(scale=10**400), ValueError, "scale must be finite, got inf"),
    (call(scale="0.5"), TypeError, "scale must be a number, got '0.5'"),
    (call(scale=True), TypeError, "scale must be a number, got True"),
    (call(scale=np.ones(1)), TypeError, "scale must be a number, got array([1.])"),
    (call(scale=np.array(True)), TypeError, "scale must be a number, got array(True)"),
    (call(scale=np.array("1.5")), TypeError, "scale must be a number, got array('1.5', dtype='<U3')"),
    (call(scale=np.complex64(1)), TypeError, "scale must be a number, got np.complex64(1+0j)"),
    # dropout
    (call(dropout=1.0, seed=0), ValueError, "dropout must be in [0, 1), got 1.0"),
    (call(dropout=-0.1, seed=0), ValueError, "dropout must be in [0, 1), got -0.1"),
    (call(dropout=np.nan, seed=0), ValueError, "dropout must be finite, got nan"),
    (call(dropout=True, seed=0), TypeError, "dropout must be a number, got True"),
    (call(dropout=None), TypeError, "dropout must be a number, got None"),
    (
        call(dropout=0.1),
        ValueError,
        "dropout=0.1 needs seed=, an int: the same seed drops the same weights everywhere",
    ),
    (call(dropout=0.1, seed=-1), ValueError, "seed must be in [0, 2**64), got -1"),
    (call(dropout=0.1, seed=2**64), ValueError, "seed must be in [0, 2**64), got 18446744073709551616"),
    (call(dropout=0.1, seed=1.0), TypeError, "seed must be an int, got 1.0"),
    (call(seed=True), TypeError, "seed must be an int, got True"),
    # positions and layout
    (call(offset=1.5), TypeError, "offset must be an int or an integer array, got 1.5"),
    (call(offset=True), TypeError, "offset must be an int or an integer array, got True"),
    (call(offset=[0, 1]), TypeError, "offset must be an int or an integer array, got [0, 1]"),
    (call(offset=ones(2)), TypeError, "offset must be an int or an integer array, got float32"),
    (
        call(offset=np.zeros(3, int)),
        ValueError,
        "offset must broadcast to the leading dimensions (2,), got shape (3,)",
    ),
    (call(offset=2**63), ValueError, "offset must be within ±2**62, got 9223372036854775808"),
    (call(offset=np.array([0, -(2**63)])), ValueError, "offset must be within ±2**62, got -9223372036854775808"),
    (call(origin=(0, 0)), TypeError, "origin must be a tuple (b, h, j) of integers, got (0, 0)"),
    (call(origin=[0, 0, 0]), TypeError, "origin must be a tuple (b, h, j) of integers, got [0, 0, 0]"),
    (call(origin=5), TypeError, "origin must be a tuple (b, h, j) of integers, got 5"),
    (call(origin=(0, 0.5, 0)), TypeError, "h of origin must be an int, got 0.5"),
    (call(origin=(0, 0, -1)), ValueError, "origin must be between 0 and 2**62, got (0, 0, -1)"),
    (call(layout="nhbd"), ValueError, "layout must be 'bhnd' or 'bnhd', got 'nhbd'"),
    (
        call(layout="bshd"),
        ValueError,
        "layout must be 'bhnd' or 'bnhd', got 'bshd'; what others call 'bshd' is 'bnhd'",
    ),
    (
        call(layout="BHSD"),
        ValueError,
        "layout must be 'bhnd' or 'bnhd', got 'BHSD'; what others call 'BHSD' is 'bhnd'",
    ),
    (call(layout=None), ValueError, "layout must be 'bhnd' or 'bnhd', got None"),
    (call(layout=np.zeros(2)), ValueError, "layout must be 'bhnd' or 'bnhd', got array([0., 0.])"),
    # what is returned
    (call(observe=["lse", "entropi"]), ValueError, f"observe: unknown statistic 'entropi'; {KNOWN}"),
    (call(observe=["top"]), ValueError, f"observe: unknown statistic 'top'; {KNOWN}"),
    (call(observe=[ones(2)]), ValueError, f"observe: unknown statistic array([1., 1.], dtype=float32); {KNOWN}"),
    (
        call(observe="entropy"),
        TypeError,
        "observe must be a sequence of statistics, got 'entropy'; give observe=['entropy']",
    ),
    (
        call(observe=regard.top(3)),
        TypeError,
        "observe must be a sequence of statistics, got regard.top(3); give observe=[regard.top(3)]",
    ),
    (call(observe={"lse"}), TypeError, "observe must be a sequence of statistics, got set"),
    (call(observe=None), TypeError, "observe must be a sequence of statistics, got NoneType"),
    (call(return_weights=regard.causal()), TypeError, "return_weights must be a bool, got causal()"),
    (lambda: regard.top(0), ValueError, "k of top must be at least 1, got 0"),
    (lambda: regard.top(2.0), TypeError, "k of top must be an int, got 2.0"),  # type: ignore[arg-type]
    (lambda: regard.top(True), TypeError, "k of top must be an int, got True"),
    (lambda: regard.pooled(0, 4), ValueError, "rows of pooled must be at least 1, got 0"),
    (lambda: regard.pooled(4, "4"), TypeError, "cols of pooled must be an int, got '4'"),  # type: ignore[arg-type]
    (
        lambda: regard.pooled(4, 4, "mean"),  # type: ignore[arg-type]
        ValueError,
        "kind of pooled must be 'mass' or 'max', got 'mean'",
    ),
    (
        lambda: regard.weights_of(3),  # type: ignore[arg-type]
        TypeError,
        "rows of weights_of must be a sequence of ints, got 3",
    ),
    (
        lambda: regard.weights_of(np.array(3)),  # type: ignore[arg-type]
        TypeError,
        "rows of weights_of must be a sequence of ints, got array(3)",
    ),
    (lambda: regard.weights_of("01"), TypeError, "rows of weights_of must be a sequence of ints, got '01'"),  # type: ignore[arg-type]
    (
        lambda: regard.pooled(4, 4, np.zeros(2)),  # type: ignore[arg-type]
        ValueError,
        "kind of pooled must be 'mass' or 'max', got array([0., 0.])",
    ),
    (lambda: regard.renyi(-0.5), ValueError, "alpha of renyi must be at least 0, got -0.5"),
    (lambda: regard.renyi(math.nan), ValueError, "alpha of renyi must be at least 0, got nan"),
    (lambda: regard.renyi("2"), TypeError, "alpha of renyi must be a number, got '2'"),  # type: ignore[arg-type]
    (
        lambda: regard.hopfield(MATRIX, ones(6, 8, dtype=np.float64)),
        TypeError,
        "state and patterns must share one dtype, got state float32, patterns float64",
    ),
    (
        lambda: regard.hopfield(MATRIX[0], MATRIX),
        ValueError,
        "state and patterns must be (..., n, d), got state (8,), patterns (6, 8)",
    ),
    (
        lambda: regard.hopfield(MATRIX, MATRIX[:, :3]),
        ValueError,
        "state and patterns must have the same number of features d, got state (6, 8), patterns (6, 3)",
    ),
    (
        lambda: regard.hopfield(MATRIX, MATRIX[:0]),
        ValueError,
        "patterns must hold at least one, got state (6, 8), patterns (0, 8)",
    ),
    (
        lambda: regard.hopfield(ones(2, 6, 8), ones(3, 6, 8)),
        ValueError,
        "the leading dimensions must broadcast, got state (2, 6, 8), patterns (3, 6, 8)",
    ),
    (lambda: regard.hopfield(MATRIX, MATRIX, beta=0), ValueError, "beta must be positive and finite, got 0.0"),
    (lambda: regard.hopfield(MATRIX, MATRIX, steps=-1), ValueError, "steps must be at least 0, got -1"),
    (lambda: regard.weights_of([0.5]), TypeError, "rows of weights_of must be an int, got 0.5"),  # type: ignore[list-item]
    (
        lambda: regard.mass(ones(2)),
        TypeError,
        "mask of mass must be booleans or 0/1 integers, got float32; to add to scores, use bias=",
    ),
    (call(observe=[regard.weights_of([0, 9])]), ValueError, "rows of weights_of must be from 0 to 5, got 9"),
    (call(observe=[regard.weights_of([-1])]), ValueError, "rows of weights_of must be from 0 to 5, got -1"),
    (
        call(observe=[regard.mass(np.ones((2, 3), bool))]),
        ValueError,
        "mask of mass must align right to (..., h, n_q, n_k) = (2, 4, 6, 5), got shape (2, 3)",
    ),
    (
        call(observe=[regard.mass(regard.documents(np.zeros(3, int)))]),
        ValueError,
        "ids of documents covers query index 0 to 2, but this call reaches query index -1",
    ),
    (call(scale=1e300), ValueError, "scale must be finite in float32, got 1e+300"),
    # engines
    (
        call(engine="triton"),
        ValueError,
        "there is no engine 'triton': engine='device' computes on any device of PyTorch",
    ),
    (call(engine="cuda"), ValueError, "engine must be one of 'cpu', 'tiled', 'device', 'spec', got 'cuda'"),
    (
        call(engine=["tiled"]),
        ValueError,
        "engine must be one of 'cpu', 'tiled', 'device', 'spec', got ['tiled']",
    ),
    (lambda: regard.set_num_threads(0), ValueError, "set_num_threads: n must be at least 1, got 0"),
    (
        lambda: regard.set_num_threads(2**70),
        ValueError,
        "set_num_threads: n must be below 2**31, got 1180591620717411303424",
    ),
    (lambda: regard.set_num_threads(1.5), TypeError, "set_num_threads: n must be an int, got 1.5"),
    # weights
    (weights(lse=PER_QUERY[..., :2]), ValueError, "lse must have shape (2, 4, 6), got (2, 4, 2)"),
    (weights(lse=PER_QUERY.astype(int)), TypeError, f"lse {FLOATING} int64"),
    (
        weights(lse=0 * PER_QUERY),
        ValueError,
        f"lse {NOT_ITS}: with it, the weights of row 0 of head 0 of batch element 0 sum to 84.59 instead of 1{GIVE}",
    ),
    (
        weights(ones(6, 8), ones(5, 8), lse=ones(6), sink=ones(1)),
        ValueError,
        f"lse {NOT_ITS}: with it, the weights of row 0 of head 0 sum to 32.12 with the sink instead of 1{GIVE}",
    ),
    (
        weights(lse=PER_QUERY, mask=lambda b, h, i, j: j < 0),
        ValueError,
        f"lse {NOT_ITS}: row 0 of head 0 of batch element 0 sees no key, so that its lse is -inf, and 1 was given"
        f"{GIVE}",
    ),
    (
        vjp(outputs=regard.Outputs(DOUT, PER_QUERY, None)),
        ValueError,
        f"outputs.lse {NOT_ITS}: with it, the weights of row 0 of head 0 of batch element 0 sum to 31.12 instead of "
        f"1{GIVE}",
    ),
    (weights(rows=3), TypeError, "rows must be a slice, got 3"),
    (weights(cols=[0, 1]), TypeError, "cols must be a slice, got [0, 1]"),
    (
        weights(cols=slice(0, 4, 0)),
        ValueError,
        "cols must be a slice of integers with a step other than 0, got slice(0, 4, 0)",
    ),
    (
        weights(rows=slice(0.5, 2)),
        ValueError,
        "rows must be a slice of integers with a step other than 0, got slice(0.5, 2, None)",
    ),
    (weights(Q, K.astype(np.float64)), TypeError, "query and key must share one dtype, got query float32, key float64"),
    (
        weights(Q, ones(3, 2, 5, 8)),
        ValueError,
        "the leading dimensions must broadcast, got query (2, 4, 6, 8), key (3, 2, 5, 8)",
    ),
    # derivatives
    (vjp(DOUT[..., :2]), ValueError, "dout must have shape (2, 4, 6, 3), got (2, 4, 6, 2)"),
    (vjp(DOUT.astype(np.float64)), TypeError, "dout must have dtype float32, got float64"),
    (vjp([1.0]), TypeError, "dout must be a NumPy array, got list"),
    (vjp(dlse=PER_QUERY[:, :2]), ValueError, "dlse must have shape (2, 4, 6), got (2, 2, 6)"),
    (vjp(dentropy=PER_QUERY[0]), ValueError, "dentropy must have shape (2, 4, 6), got (4, 6)"),
    (vjp(observe=["lse"]), TypeError, "attention_vjp() got an unexpected keyword argument 'observe'"),
    (vjp(return_weights=True), TypeError, "attention_vjp() got an unexpected keyword argument 'return_weights'"),
    (
        jvp(attn_mask=None),
        TypeError,
        "attention_jvp() got an unexpected keyword argument 'attn_mask'; here it is mask= (True = attend), "
        "or bias= of regard.attention for floats",
    ),
    (
        vjp(casual=True),
        TypeError,
        "attention_vjp() got an unexpected keyword argument 'casual'; did you mean 'causal'?",
    ),
    (
        call(is_causal=True),
        TypeError,
        "attention() got an unexpected keyword argument 'is_causal'; here it is causal=",
    ),
    (
        call(dropout_p=0.1),
        TypeError,
        "attention() got an unexpected keyword argument 'dropout_p'; here it is dropout=",
    ),
    (
        call(casual=True),
        TypeError,
        "attention() got an unexpected keyword argument 'casual'; did you mean 'causal'?",
    ),
    (call(x=1), TypeError, "attention() got an unexpected keyword argument 'x'"),
    (
        jvp(dquery=Q, tangents=regard.Differential(query=Q)),
        TypeError,
        "tangents holds the tangents of all inputs: give it or dquery, not both",
    ),
    (jvp(dquery=Q[:, :2]), ValueError, "dquery must have shape (2, 4, 6, 8), got (2, 2, 6, 8)"),
    (jvp(dkey=K.astype(np.float64)), TypeError, "dkey must have dtype float32, got float64"),
    (jvp(dvalue=K), ValueError, "dvalue must have shape (2, 2, 5, 3), got (2, 2, 5, 8)"),
    (jvp(dbias=ones(6, 5)), ValueError, "dbias is given, but this call has no bias"),
    (jvp(bias=ones(6, 5), dbias=ones(5)), ValueError, "dbias must have shape (6, 5), got (5,)"),
    (jvp(dsink=ones(4)), ValueError, "dsink is given, but this call has no sink"),
    (jvp(dmetric=ones(8, 8)), ValueError, "dmetric is given, but this call has no metric"),
    (jvp(metric=ones(8, 8), dmetric=ones(8)), ValueError, "dmetric must have shape (8, 8), got (8,)"),
    (jvp(sink=ones(4), dsink=ones(1)), ValueError, "dsink must have shape (4,), got (1,)"),
    (
        jvp(dtables={SLOPES: ones(4)}),
        ValueError,
        "dtables: table of shape (4,), float64 is not a float table of this call's score",
    ),
    (
        jvp(score=regard.alibi(SLOPES), dtables={SLOPES: ones(3)}),
        ValueError,
        "dtables[table of shape (4,), float64] must have shape (4,), got (3,)",
    ),
    (
        jvp(score=regard.alibi(SLOPES), dtables=[ones(4)]),
        TypeError,
        "dtables must map tables to their tangents, got list",
    ),
    (
        vjp(outputs=(DOUT, PER_QUERY, None)),
        TypeError,
        'outputs must be a regard.Outputs, or the (out, seen) of attention(..., observe=["lse"]), got tuple',
    ),
    (vjp(outputs=regard.Outputs(None, PER_QUERY, None)), ValueError, "outputs.out is None, but a derivative needs it"),
    (jvp(outputs=regard.Outputs(DOUT, None, None)), ValueError, "outputs.lse is None, but a derivative needs it"),
    (
        vjp(dentropy=PER_QUERY, outputs=regard.Outputs(DOUT, PER_QUERY, None)),
        ValueError,
        "outputs.entropy is None, but dentropy needs it",
    ),
    (
        vjp(outputs=regard.Outputs(DOUT[0], PER_QUERY, None)),
        ValueError,
        "outputs.out must have shape (2, 4, 6, 3), got (4, 6, 3)",
    ),
    (
        vjp(outputs=regard.Outputs(DOUT, PER_QUERY.astype(np.float64), None)),
        TypeError,
        "outputs.lse must have dtype float32, got float64",
    ),
    (
        jvp(outputs=regard.Outputs(DOUT, PER_QUERY, PER_QUERY[..., :2])),
        ValueError,
        "outputs.entropy must have shape (2, 4, 6), got (2, 4, 2)",
    ),
    (vjp_jvp({"query": Q}), TypeError, "tangents must be a regard.Differential, got dict"),
    (
        vjp_jvp(regard.Differential(query=K)),
        ValueError,
        "tangents.query must have shape (2, 4, 6, 8), got (2, 2, 5, 8)",
    ),
    (
        vjp_jvp(regard.Differential(value=V.astype(np.float64))),
        TypeError,
        "tangents.value must have dtype float32, got float64",
    ),
    (
        vjp_jvp(regard.Differential(bias=ones(6, 5))),
        ValueError,
        "tangents.bias is given, but this call has no bias",
    ),
    (
        vjp_jvp(regard.Differential(tables={SLOPES: ones(4)})),
        ValueError,
        "tangents.tables: table of shape (4,), float64 is not a float table of this call's score",
    ),
    (
        vjp_jvp(regard.Differential(tables=[ones(4)])),  # type: ignore[arg-type]
        TypeError,
        "tangents.tables must map tables to their tangents, got list",
    ),
    (
        vjp_jvp(cotangent_tangents=(DOUT, None, None)),
        TypeError,
        "cotangent_tangents must be a regard.Outputs, got tuple",
    ),
    (
        vjp_jvp(cotangent_tangents=regard.Outputs(DOUT.astype(np.float64), None, None)),
        TypeError,
        "cotangent_tangents.out must have dtype float32, got float64",
    ),
    (
        vjp_jvp(cotangent_tangents=regard.Outputs(None, PER_QUERY[0], None)),
        ValueError,
        "cotangent_tangents.lse must have shape (2, 4, 6), got (4, 6)",
    ),
    (
        vjp_jvp(cotangent_tangents=regard.Outputs(DOUT, None, None, DOUT)),
        ValueError,
        "cotangent_tangents.low must be None: only outputs= have what rounding took",
    ),
    (
        vjp(outputs=regard.Outputs(DOUT, PER_QUERY, None, DOUT[0])),
        ValueError,
        "outputs.low must have shape (2, 4, 6, 3), got (4, 6, 3)",
    ),
    (
        vjp_jvp(
            outputs=regard.Outputs(DOUT, PER_QUERY, None), cotangent_tangents=regard.Outputs(None, None, PER_QUERY)
        ),
        ValueError,
        "outputs.entropy is None, but cotangent_tangents.entropy needs it",
    ),
    (vjp_jvp(dlse=PER_QUERY[0]), ValueError, "dlse must have shape (2, 4, 6), got (4, 6)"),
    (vjp_jvp(observe=["lse"]), TypeError, "attention_vjp_jvp() got an unexpected keyword argument 'observe'"),
    # linear attention
    (linear(causal="no"), TypeError, "causal must be a bool, got 'no'"),
    (linear(causal=1), TypeError, "causal must be a bool, got 1"),
    (linear(chunk=0), ValueError, "chunk must be at least 1, got 0"),
    (linear(feature_map=np.zeros(2)), ValueError, f"{MAPS}, got array([0., 0.])"),
    (linear(feature_map="gelu"), ValueError, f"{MAPS}, got 'gelu'"),
    (
        linear(feature_map=lambda: None),
        TypeError,
        "feature_map must be a function of (x): too many positional arguments",
    ),
    (linear(feature_map=lambda x: None), TypeError, "feature_map must return numbers, got object"),
    # heads
    (
        lambda: regard.multihead_attention(MATRIX, MATRIX, MATRIX),  # type: ignore[call-arg]
        TypeError,
        "multihead_attention() missing 1 required positional argument: 'num_heads'",
    ),
    (
        lambda: regard.multihead_attention(MATRIX, MATRIX, MATRIX, None),  # type: ignore[arg-type]
        TypeError,
        "num_heads must be an int, got None",
    ),
    # positions
    (lambda: positions.rope(Q, base="a"), TypeError, "base must be a number, got 'a'"),  # type: ignore[arg-type]
    (lambda: positions.rope(Q, base=None), TypeError, "base must be a number, got None"),  # type: ignore[arg-type]
    (
        lambda: positions.rope(Q, base=np.array([2.0, 3.0])),  # type: ignore[arg-type]
        TypeError,
        "base must be a number, got array([2., 3.])",
    ),
    (lambda: positions.rope(Q, base=10**400), ValueError, "base must be greater than 1 and finite, got inf"),
    (
        lambda: positions.rope(Q, pairing=np.zeros(2)),  # type: ignore[arg-type]
        ValueError,
        "pairing must be 'half' or 'interleaved', got array([0., 0.])",
    ),
    (
        lambda: positions.rope(Q, scaling="linear"),  # type: ignore[arg-type]
        TypeError,
        "scaling must be a function of (dim, base), got 'linear'",
    ),
    (
        lambda: positions.rope(Q, scaling=lambda dim, base: np.ones(3)),  # type: ignore[arg-type,return-value]
        ValueError,
        "scaling must return (frequencies of shape (4,), factor), got array([1., 1., 1.])",
    ),
    (
        lambda: positions.rope(Q, positions=[[1], [1, 2]]),
        ValueError,
        "positions must be an array, got lists of different lengths",
    ),
    (lambda: positions.sinusoidal(3, 4, offset=np.nan), ValueError, "offset must be finite, got nan"),
    (
        lambda: positions.sinusoidal(3, 4, offset=-(2**70)),
        ValueError,
        "offset must be at most 2**53 in size, got -1.1805916207174113e+21",
    ),
    (lambda: positions.sinusoidal(3, 4, offset="a"), TypeError, "offset must be a number, got 'a'"),  # type: ignore[arg-type]
    (
        lambda: positions.sinusoidal(2**60, 4),
        ValueError,
        "n times d must be below 2**60, got 1152921504606846976 and 4",
    ),
    (
        lambda: positions.sinusoidal(3, 4, dtype=int),
        TypeError,
        "dtype must be a floating dtype (float16, bfloat16, float32, float64), got <class 'int'>",
    ),
    (
        lambda: positions.t5_buckets([1], bidirectional="abc"),  # type: ignore[arg-type]
        TypeError,
        "bidirectional must be a bool, got 'abc'",
    ),
    (
        lambda: positions.t5_buckets([1], max_distance=2**70),
        ValueError,
        "max_distance must be below 2**62, got 1180591620717411303424",
    ),
    (
        lambda: positions.t5_buckets([1], 2**70),
        ValueError,
        "num_buckets must be below 2**31, got 1180591620717411303424",
    ),
    (
        lambda: positions.YaRNScaling("2", 8),  # type: ignore[arg-type]
        TypeError,
        "YaRNScaling: factor must be a number, got '2'",
    ),
    # plan
    (
        lambda: plan((10**20, 8), (10**20, 8), (10**20, 8)),
        ValueError,
        "query must have fewer than 2**60 entries, got shape (100000000000000000000, 8)",
    ),
    (
        lambda: plan((True, 8), (6, 8), (6, 8)),
        TypeError,
        "query must be an array or a shape of non-negative integers, got (True, 8)",
    ),
    (
        lambda: plan((6, 8), (6, 8), (6, 8), dtype="foo"),
        TypeError,
        "dtype must be a floating dtype (float16, bfloat16, float32, float64), got 'foo'",
    ),
    # merge
    (merge(), ValueError, "merge needs at least one part (out, lse), got none"),
    (merge(DOUT, PER_QUERY), TypeError, "merge: part 0 must be a tuple (out, lse), got numpy.ndarray"),
    (merge((DOUT, PER_QUERY, Q)), TypeError, "merge: part 0 must be a tuple (out, lse), got a tuple of 3"),
    (
        merge((DOUT, PER_QUERY), (DOUT[:, :2], PER_QUERY[:, :2])),
        ValueError,
        "merge: out of part 1 must have shape (2, 4, 6, 3), got (2, 2, 6, 3)",
    ),
    (merge((DOUT, PER_QUERY[..., :2])), ValueError, "merge: lse of part 0 must have shape (2, 4, 6), got (2, 4, 2)"),
    (
        merge((DOUT, PER_QUERY), (DOUT.astype(np.float64), PER_QUERY)),
        TypeError,
        "merge: out of part 1 must have dtype float32, got float64",
    ),
    (
        merge((DOUT, PER_QUERY), (DOUT, PER_QUERY.astype(np.float64))),
        TypeError,
        "merge: lse of part 1 must have dtype float32, got float64",
    ),
    (merge((DOUT, PER_QUERY.astype(int))), TypeError, f"merge: lse of part 0 {FLOATING} int64"),
    (merge((ones(), ones())), ValueError, "merge: out of part 0 must be (..., n_q, d_v), got shape ()"),
    (
        merge((DOUT, PER_QUERY), sink=ones(3)),
        ValueError,
        "sink must be one number for each head, shape (4,), got shape (3,)",
    ),
]


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any) -> None:
        pytest.fail("work was done before the error")

    for engine in (cpu, tiled, specification):
        for function in ("forward", "weights", "backward", "jvp", "backward_jvp", "jvp_jvp"):
            monkeypatch.setattr(engine, function, work)


@pytest.mark.parametrize(("bad", "error", "text"), BAD, ids=[text[:60] for _, _, text in BAD])
def test_the_whole_text(bad: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        bad()
    assert type(raised.value) is error
    assert str(raised.value) == text


def test_work_would_be_seen() -> None:
    for good in (call(), weights(), vjp(), jvp(), vjp_jvp()):
        with pytest.raises(pytest.fail.Exception, match="work was done"):
            good()


@pytest.mark.parametrize(
    "function",
    [
        regard.attention,
        lambda q, k, v, **wishes: regard.weights(q, k, **wishes),
        lambda q, k, v, **wishes: regard.attention_vjp(q, k, v, DOUT, **wishes),
        regard.attention_jvp,
        lambda q, k, v, **wishes: regard.attention_vjp_jvp(q, k, v, DOUT, NOWHERE, **wishes),
        steps,
        plan,
    ],
    ids=["attention", "weights", "attention_vjp", "attention_jvp", "attention_vjp_jvp", "steps", "plan"],
)
def test_every_function_checks_its_call_alike(function: Callable[..., Any]) -> None:
    for wish in (
        {"mask": ones(6, 5)}, {"score": later}, {"bias": ones(2, 5)}, {"sink": ones(3)}, {"scale": np.nan},
        {"offset": 1.5}, {"origin": (0, 0)}, {"layout": "bhn"}, {"causal": None},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as usual:
            regard.attention(Q, K, V, **wish)
        with pytest.raises(usual.type) as raised:
            function(Q, K, V, **wish)
        assert str(raised.value) == str(usual.value)


@pytest.mark.parametrize(
    ("wish", "note"),
    [
        ({"mask": with_and}, "while tracing mask rule 'with_and'"),
        ({"score": [regard.softcap(1.0), with_max]}, "while tracing score rule 'with_max'"),
    ],
)
def test_an_error_inside_a_rule_names_the_rule(wish: dict[str, Any], note: str) -> None:
    with pytest.raises(TypeError) as raised:
        call(**wish)()
    assert raised.value.__notes__ == [note]


@pytest.mark.parametrize("function", ["supports", "state"])
def test_engines_that_refuse_say_why(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def refuse(engine: ModuleType) -> None:
        monkeypatch.setattr(engine, function, lambda *args: f"needs an even number of heads ({engine.NAME})")

    refuse(tiled)
    for make in (call, weights, vjp, jvp, vjp_jvp):
        with pytest.raises(ValueError, match="refuses") as raised:
            make(engine="tiled")()
        assert str(raised.value) == "engine 'tiled' refuses this call: needs an even number of heads (tiled)"
    refuse(specification)
    refuse(cpu)
    with pytest.raises(ValueError, match="no engine") as raised:
        call()()
    spec = "runs only when named" if function == "supports" else "needs an even number of heads (spec)"
    assert (
        str(raised.value) == "no engine supports this call: cpu: needs an even number of heads (cpu); "
        "tiled: needs an even number of heads (tiled); device: runs only when named; "
        f"spec: {spec}"
    )


FAMILY: dict[str, Callable[..., Any]] = {
    "attention": partial(regard.attention, Q, K, V),
    "attention_vjp": partial(regard.attention_vjp, Q, K, V, Q),
    "attention_jvp": partial(regard.attention_jvp, Q, K, V, Q),
    "attention_vjp_jvp": partial(regard.attention_vjp_jvp, Q, K, V, Q, regard.Differential(query=Q)),
    "weights": partial(regard.weights, Q, K),
    "steps": partial(regard.steps, Q, K, V),
    "plan": partial(regard.plan, Q, K, V),
    "multihead_attention": partial(regard.multihead_attention, Q, Q, Q, 2),
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("is_causal", "causal="),
        ("attn_mask", "mask= (True = attend), or bias= of regard.attention for floats"),
        ("enable_gqa", "not needed: query may have a multiple of the heads of key"),
        ("dropout_p", "dropout="),
        ("local_window_size", "mask=regard.window(left, right)"),
        ("key_value_seq_lengths", "mask=regard.padding(lengths)"),
        ("need_weights", "return_weights="),
    ],
)
def test_names_of_other_libraries_are_answered(name: str, option: str, here: str) -> None:
    taken = inspect.signature(getattr(regard, name)).parameters
    answer = f"here it is {here}"
    if here.partition("=")[1] and here.partition("=")[0] not in taken:
        answer = f"that would be {here}, which is not taken here"
    with pytest.raises(TypeError) as raised:
        FAMILY[name](**{option: None})
    assert str(raised.value) == f"{name}() got an unexpected keyword argument {option!r}; {answer}"
