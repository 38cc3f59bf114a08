"""Every argument of every public function against values of the wrong type: each works, or is refused by name.

No other class of exception, and no wrong type taken in silence. What is wrong about arrays (shapes, dtypes, other
libraries) and the whole texts of errors are in `test_messages.py`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import regard
from regard import examplemodel, insight, positions
from regard.ops import linear

pytestmark = pytest.mark.engine("tiled")

X = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)  # 2 heads, 4 positions, 6 features
M = np.ones((4, 6), np.float32)
PER_QUERY = np.zeros((2, 4), np.float32)
IDS = np.array([1, 2, 1, 2])
WEIGHTS = np.full((2, 4, 4), 0.25)


class Odd:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise ValueError("no text")


class Hostile(NamedTuple):
    """A value and the kinds of argument that may take it; any argument may refuse it."""

    value: Any
    fits: str = ""


HOSTILE: dict[str, Hostile] = {
    "None": Hostile(None, "none"),
    "text": Hostile("abc"),
    "empty text": Hostile(""),
    "digits": Hostile("2"),
    "bytes": Hostile(b"2"),
    "True": Hostile(True, "bool"),
    "numpy's True": Hostile(np.True_, "bool"),
    "True without axes": Hostile(np.array(True), "flags"),
    "zero": Hostile(0, "int number integers"),
    "negative": Hostile(-1, "int number integers"),
    "numpy's int": Hostile(np.int8(2), "int number integers"),
    "int without axes": Hostile(np.array(2), "int number integers index"),
    "2**62": Hostile(2**62, "int number integers"),
    "2**70": Hostile(2**70, "int number"),
    "-2**70": Hostile(-(2**70), "int number"),
    "10**5000": Hostile(10**5000, "int"),
    "half": Hostile(2.5, "number floats"),
    "numpy's half": Hostile(np.float16(2.5), "number floats"),
    "half without axes": Hostile(np.array(2.5), "number floats"),
    "NaN": Hostile(math.nan, "nan"),
    "infinity": Hostile(math.inf, "nan"),
    "-infinity": Hostile(-math.inf, "nan"),
    "NaN of NumPy": Hostile(np.float32(np.nan), "nan"),
    "complex": Hostile(2j),
    "complex of NumPy": Hostile(np.complex64(2)),
    "decimal": Hostile(Decimal("2.5"), "number"),
    "fraction": Hostile(Fraction(5, 2), "number"),
    "text without axes": Hostile(np.array("2")),
    "time": Hostile(np.timedelta64(2, "s")),
    "object array": Hostile(np.array([2, None], object)),
    "list": Hostile([2], "integers list"),
    "list of floats": Hostile([0.5], "floats list"),
    "list of text": Hostile(["a"], "list"),
    "ragged list": Hostile([[1], [1, 2]]),
    "empty list": Hostile([], "list"),
    "empty tuple": Hostile((), "list"),
    "tuple": Hostile((1, 2), "integers list"),
    "set": Hostile({1}),
    "dict": Hostile({"a": 1}),
    "slice": Hostile(slice(None), "slice"),
    "slice of text": Hostile(slice("a", "b")),
    "type": Hostile(int, "function"),
    "function": Hostile(lambda: None, "function"),
    "array": Hostile(np.ones(2), "floats"),
    "array of ints": Hostile(np.ones(2, int), "integers flags"),
    "array of booleans": Hostile(np.ones(2, bool), "flags"),
    "array of text": Hostile(np.array(["a", "b"])),
    "masked array": Hostile(np.ma.masked_array([1, 2])),
    "object": Hostile(object()),
    "object without a repr": Hostile(Odd()),
    "mask": Hostile(regard.causal(), "mask"),
    "score": Hostile(regard.softcap(2.0), "score"),
}


class Case(NamedTuple):
    """A call that works, and what each argument may be: kinds of `HOSTILE`, none for names and sizes."""

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]
    named: Mapping[str, str] = MappingProxyType({})  # as messages name it, where that is not the argument's name


OPTIONS = {
    "mask": "none flags mask function", "causal": "bool", "score": "none score function list", "bias": "none floats",
    "scale": "none number", "metric": "none", "sink": "none floats", "offset": "none int integers index",
    "origin": "none", "layout": "", "dropout": "number", "seed": "none int",
}  # fmt: skip
QKV = {"query": X, "key": X, "value": X}
ARRAYS = dict.fromkeys(QKV, "")
BARE = {name: kind for name, kind in OPTIONS.items() if name not in ("dropout", "seed")}
TABLE = "bool int number nan integers floats flags index"
TILED = {"engine": "tiled"}

TANGENTS = ("dquery", "dkey", "dvalue", "dbias", "dsink", "dmetric", "dtables", "tangents")
CASES: dict[str, Case] = {
    "attention": Case(
        regard.attention,
        QKV | TILED,
        ARRAYS | OPTIONS | {"return_weights": "bool", "observe": "list", "engine": "none"},
    ),
    "weights": Case(
        regard.weights,
        {"query": X, "key": X} | TILED,
        {"query": "", "key": "", "lse": "none", "rows": "slice", "cols": "slice", "engine": "none"} | BARE,
    ),
    "attention_vjp": Case(
        regard.attention_vjp,
        QKV | {"dout": X} | TILED,
        ARRAYS | OPTIONS | {"dout": "none", "dlse": "none", "dentropy": "none", "outputs": "none", "engine": "none"},
    ),
    "attention_jvp": Case(
        regard.attention_jvp,
        QKV | TILED,
        ARRAYS
        | OPTIONS
        | dict.fromkeys((*TANGENTS, "outputs", "engine"), "none"),
    ),
    "attention_vjp_jvp": Case(
        regard.attention_vjp_jvp,
        QKV | {"dout": X, "tangents": regard.Differential(query=X)} | TILED,
        ARRAYS
        | OPTIONS
        | dict.fromkeys(("dout", "dlse", "dentropy", "tangents", "cotangent_tangents", "outputs", "engine"), "none"),
    ),
    "attention_vjp_jvp one by one": Case(
        regard.attention_vjp_jvp, QKV | {"dout": X} | TILED, dict.fromkeys(TANGENTS, "none")
    ),
    "steps": Case(regard.steps, QKV, ARRAYS | OPTIONS | {"dout": "none"}),
    "plan": Case(regard.plan, QKV | TILED, ARRAYS | OPTIONS | {"engine": "none", "ranks": "none int"}),
    "plan of shapes": Case(
        regard.plan, dict.fromkeys(QKV, (2, 4, 6)) | TILED, {"dtype": "", "query": "", "key": "", "value": ""}
    ),
    "plan of sizes": Case(
        regard.plan,
        {"n": 4, "d": 6, "heads": 2} | TILED,
        {"n": "int", "d": "int"}
        | dict.fromkeys(("n_keys", "d_value", "heads", "kv_heads", "batch"), "none int")
        | dict.fromkeys(QKV, "none"),
    ),
    "merge": Case(lambda part, sink=None: regard.merge(part, sink=sink), {"part": (X, PER_QUERY)},
                  {"part": "", "sink": "none floats"}),
    "multihead_attention": Case(
        regard.multihead_attention,
        dict.fromkeys(QKV, M) | {"num_heads": 2} | TILED,
        ARRAYS
        | {name: kind for name, kind in OPTIONS.items() if name != "layout"}
        | {"num_heads": "int", "num_kv_heads": "none int"}
        | {"return_weights": "bool", "observe": "list", "engine": "none"}
        | dict.fromkeys([f"{kind}_{name}" for kind in "wb" for name in "qkvo"], "none"),
    ),
    "linear_attention": Case(
        regard.linear_attention,
        QKV,
        ARRAYS | {"feature_map": "", "causal": "bool", "mask": "none flags", "chunk": "int", "layout": ""},
    ),
    "RandomFeatures": Case(linear.RandomFeatures, {}, {"num_features": "int", "seed": "int"}),
    "set_num_threads": Case(regard.set_num_threads, {"n": 1}, {"n": "int"}),
    "window": Case(regard.window, {"left": 1}, {"left": "none int", "right": "none int"}),
    "prefix": Case(regard.prefix, {"length": 1}, {"length": "int integers"}),
    "padding": Case(regard.padding, {"lengths": 3}, {"lengths": "int integers", "side": ""}),
    "documents": Case(regard.documents, {"ids": IDS}, {"ids": "integers", "key_ids": "none integers"}),
    "strided": Case(regard.strided, {"step": 1}, {"step": "int"}),
    "dilated": Case(regard.dilated, {"left": 1, "step": 2}, {"left": "int", "step": "int"}),
    "blocks": Case(regard.blocks, {"table": np.eye(2, dtype=bool), "size": 2}, {"table": "", "size": "int"}),
    "neighborhood": Case(
        regard.neighborhood,
        {"shape": 8, "kernel_size": 3},
        dict.fromkeys(("shape", "kernel_size", "stride", "dilation"), "int list") | {"causal": "bool"},
    ),
    "global_tokens": Case(regard.global_tokens, {"n": 1}, {"n": "int"}),
    "mask": Case(
        regard.mask, {"function": lambda b, h, i, j: i == j}, {"function": "mask flags"}, {"function": "mask"}
    ),
    "score": Case(regard.score, {"function": lambda s, b, h, i, j: s}, {"function": "score"}, {"function": "score"}),
    "show": Case(regard.Mask.show, {"self": regard.causal(), "n": 3}, {"n": "int", "n_k": "none int"}),
    "softcap": Case(regard.softcap, {"cap": 1.0}, {"cap": "number floats"}),
    "temperature": Case(regard.temperature, {"t": 1.0}, {"t": "number floats"}),
    "alibi": Case(regard.alibi, {"slopes": 1.0}, {"slopes": "number floats"}),
    "relative": Case(
        regard.relative,
        {"table": np.zeros(9), "buckets": "t5"},
        {"table": "floats", "buckets": "none", "bidirectional": "bool", "max_distance": "int"},
    ),
    "table": Case(
        regard.table,
        {"array": X},
        {"array": TABLE, "name": "none", "bounds": "none"},
        {"array": "table", "name": "table"},
    ),
    "Table": Case(regard.Table, {"array": X}, {"array": TABLE, "bounds": "none"}, {"array": "table"}),
    "top": Case(regard.top, {"k": 1}, {"k": "int"}),
    "mass": Case(regard.mass, {"mask": regard.causal()}, {"mask": "mask flags"}),
    "pooled": Case(regard.pooled, {"rows": 1, "cols": 1}, {"rows": "int", "cols": "int", "kind": ""}),
    "weights_of": Case(regard.weights_of, {"rows": [0]}, {"rows": "integers list"}),
    "renyi": Case(regard.renyi, {"alpha": 2.0}, {"alpha": "int number nan"}),
    "hopfield": Case(
        regard.hopfield,
        {"state": M, "patterns": M},
        {"state": "", "patterns": "", "beta": "none number", "steps": "int"},
    ),
    "sinusoidal": Case(
        positions.sinusoidal,
        {"n": 3, "d": 4},
        {"n": "int", "d": "int", "base": "number", "offset": "number", "dtype": ""},
    ),
    "rope": Case(
        positions.rope,
        {"x": X},
        {"x": "", "positions": "none integers floats", "base": "number", "pairing": "", "dim": "none int",
         "scaling": "none", "layout": ""},
    ),
    "rope_frequencies": Case(
        positions.rope_frequencies, {"d": 4}, {"d": "int", "base": "number", "scaling": "none"}
    ),
    "alibi_slopes": Case(positions.alibi_slopes, {"num_heads": 2}, {"num_heads": "int"}),
    "t5_buckets": Case(
        positions.t5_buckets,
        {"offset": IDS},
        {"offset": "int integers index list", "num_buckets": "int", "max_distance": "int", "bidirectional": "bool"},
    ),
    "LinearScaling": Case(positions.LinearScaling, {"factor": 2.0}, {"factor": "number"}),
    "NTKScaling": Case(positions.NTKScaling, {"factor": 2.0}, {"factor": "number"}),
    "YaRNScaling": Case(
        positions.YaRNScaling,
        {"factor": 2.0, "original_length": 8},
        {"factor": "number", "original_length": "int number", "beta_fast": "number", "beta_slow": "number",
         "attention_factor": "none number", "truncate": "bool"},
    ),
    "Llama3Scaling": Case(
        positions.Llama3Scaling,
        {"factor": 2.0, "original_length": 8},
        {"factor": "number", "original_length": "int number", "low_freq_factor": "number",
         "high_freq_factor": "number"},
    ),
    "head_statistics": Case(
        insight.head_statistics,
        {"weights": WEIGHTS, "ids": IDS},
        {"layer": "int", "prefix": "int", "causal": "bool", "rows": "int"},
    ),
    "measure_heads": Case(
        insight.measure_heads, {"query": X, "key": X, "ids": IDS} | TILED, {"layer": "int", "prefix": "int"}
    ),
    "induction": Case(insight.induction, {"weights": WEIGHTS, "ids": IDS}, {"prefix": "int"}),
    "sink_rate": Case(insight.sink_rate, {"weights": WEIGHTS}, {"epsilon": "number"}),
    "normalized_entropy": Case(insight.normalized_entropy, {"weights": WEIGHTS}, {"causal": "bool"}),
    "cluster_heads": Case(insight.cluster_heads, {"distance": np.ones((2, 2)), "number": 1}, {"number": "int"}),
    "repeated_tokens": Case(
        insight.repeated_tokens,
        {"vocabulary": 5},
        {"vocabulary": "int", "length": "int", "times": "int", "count": "int", "seed": "int"},
    ),
    "repeated_bytes": Case(
        examplemodel.repeated_bytes, {"period": 5}, {"period": "int", "copies": "int", "count": "int", "seed": "int"}
    ),
}  # fmt: skip

ELSEWHERE = {
    "Capture": "made by regard.capture and read from files; tests/interpret/test_captured.py",
    "Differential": "holds what it is given; its arrays are checked by the call",
    "Mask": "made by functions",
    "Outputs": "holds what it is given; its arrays are checked by the call",
    "Profile": "a result",
    "RegardWarning": "a category of warnings",
    "Retrieval": "a result",
    "Score": "made by functions",
    "Seen": "a result",
    "Top": "a result",
    "__version__": "no function",
    "available_engines": "takes nothing",
    "capture": "takes a model; tests/torch/test_capture.py",
    "causal": "takes nothing",
    "export_wasm": "writes files; tests/engines/cpu/test_wasm.py",
    "look": "takes arrays or a capture; tests/viewer",
    "where": "is called in rules; tests/rules/test_expression.py",
}
SINGLE = [(name, argument) for name, case in CASES.items() for argument in case.kinds]


@pytest.fixture(autouse=True)
def _same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)


@pytest.mark.parametrize(("name", "argument"), SINGLE, ids=[f"{name}-{argument}" for name, argument in SINGLE])
@pytest.mark.filterwarnings("error")
def test_a_wrong_value_works_or_is_refused_by_name(name: str, argument: str) -> None:
    case = CASES[name]
    kinds = set(case.kinds[argument].split())
    wrong = []
    for what, (value, fits) in HOSTILE.items():
        try:
            case.call(**case.good | {argument: value})
        except (TypeError, ValueError) as error:
            if case.named.get(argument, argument) not in str(error):
                wrong.append(f"{what}: {type(error).__name__} without the name: {error}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            if not kinds & set(fits.split()):
                wrong.append(f"{what}: is taken")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CASES)
def test_every_argument_is_here(name: str) -> None:
    case = CASES[name]
    case.call(**case.good)
    takes = inspect.signature(case.call).parameters.values()
    named = {x.name for x in takes if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL) and x.name != "self"}
    tested = set().union(*(other.kinds for other in CASES.values() if other.call is case.call))
    assert named - {"weights", "ids", "distance"} <= tested or case.call is insight.measure_heads, named - tested


def test_every_public_function_is_here() -> None:
    modules = {"examplemodel", "insight", "positions"}
    assert set(regard.__all__) - modules == (set(CASES) & set(regard.__all__)) | set(ELSEWHERE)
