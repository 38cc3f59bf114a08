"""Kernels as WebAssembly: the bits of the baseline target, and the modules and loaders that pages use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
import wasm_cases
from cases import CASES, Case
from in_node import START, Image, call, forward, in_folder, native, native_maps, same
from regard.core.parts import part_of
from regard.engines import cpu
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32
from regard.engines.cpu.schedule.arguments import pack_fields
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import targets, webassembly
from regard.engines.cpu.wasm.linking import linked
from regard.engines.cpu.wasm.product import FIELDS, product
from regard.ops.normalization import problem_from
from regard.reference import specification

Array = np.ndarray[Any, np.dtype[Any]]
OBSERVED = "lse", "entropy", "max", "argmax", regard.top(5)


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    if not targets()["baseline"].runs:
        pytest.skip("the baseline target is one of x86-64")
    monkeypatch.setenv("REGARD_CPU", "baseline")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_the_bits_of_the_baseline(case: Case, baseline: None, tmp_path: Path) -> None:
    q, k, v, options = case.inputs(np.float32)
    p = problem_from(q, k, v, **options, observe=["lse", "entropy", "max"])
    same(forward(p, in_folder(tmp_path)), native(p))


@pytest.mark.parametrize("case", [x for x in CASES if x.name not in wasm_cases.REFUSED], ids=str)
def test_exports_give_the_bits_of_the_baseline(case: Case, baseline: None, tmp_path: Path) -> None:
    """Outputs, statistics, sums over queries, and maps of a head, by the module and its loader."""
    p = wasm_cases.problem_of(case)
    path = regard.export_wasm(tmp_path / "case", **wasm_cases.export_options(p))
    wasm_cases.check(p, call(path, wasm_cases.calls_of(p)))


@pytest.mark.parametrize("n_q", [1, 70])
@pytest.mark.parametrize(("masks", "offsets"), [((1, 6), (320, 320)), ((1, 1), (100, 320)), ((2, 1), (320, 320))])
def test_exports_find_the_tiles_of_array_masks(
    n_q: int, masks: tuple[int, int], offsets: tuple[int, int], baseline: None, tmp_path: Path
) -> None:
    """Masks that differ by head, by offset, or by batch element: the first list of tiles lacks some of the next."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, h, n, 8), np.float32) for h, n in ((6, n_q), (2, 390), (2, 390)))
    mask = rng.random((*masks, n_q, 390)) < 0.3
    mask[0, 0, :, 128:256] &= masks == (1, 1)
    p = problem_from(
        q, k, v, mask=regard.causal() & mask, bias=rng.standard_normal((6, 1, 390), np.float32),
        offset=np.array(offsets), observe=["lse", *wasm_cases.STATISTICS],
    )  # fmt: skip
    path = regard.export_wasm(tmp_path / "masks", **wasm_cases.export_options(p))
    wasm_cases.check(p, call(path, wasm_cases.calls_of(p)))


def test_cases_that_pages_cannot_call_are_there() -> None:
    assert wasm_cases.REFUSED.keys() <= {case.name for case in CASES}


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"mask": regard.window(40, 3)},
    "gap": {"mask": regard.prefix(70) | regard.mask(lambda b, h, i, j: j >= 300)},
    "rule of heads": {"mask": lambda b, h, i, j: ((i - j) % 3 == h % 3) | (j * 2 < i) & ~(j == 4)},
    "rule of batch elements": {"mask": regard.padding(np.array([150, 390])), "causal": True},
    "documents": {"mask": regard.documents(np.arange(1000) // 150)},
    "nothing": {"mask": lambda b, h, i, j: j < 0},
    "score": {"score": [regard.softcap(2.0), lambda s, b, h, i, j: s - 0.1 * abs(i - j) / (h + 1)], "causal": True},
    "score that hides": {"score": lambda s, b, h, i, j: regard.where(i >= j, s, -np.inf)},
    "tables": {"score": regard.alibi(np.linspace(0.1, 1.0, 6)), "mask": regard.blocks(np.eye(9, dtype=bool), 50)},
    "large integers": {"mask": lambda b, h, i, j: (i - j) * 1000003 * 1000003 % 7 < 4},
}
SIZES: dict[str, dict[str, int]] = {
    "prompt": {"batch": 2, "heads": 6, "kvHeads": 2, "n_q": 390, "n_k": 390, "d": 20, "d_v": 12},
    "rows": {"batch": 1, "heads": 6, "kvHeads": 6, "n_q": 9, "n_k": 333, "d": 16, "d_v": 16},
    "step": {"batch": 2, "heads": 6, "kvHeads": 6, "n_q": 1, "n_k": 390, "d": 33, "d_v": 7},
    "step, grouped heads": {"batch": 1, "heads": 6, "kvHeads": 2, "n_q": 1, "n_k": 390, "d": 64, "d_v": 64},
    "two rows": {"batch": 1, "heads": 6, "kvHeads": 3, "n_q": 2, "n_k": 130, "d": 64, "d_v": 64},
    "no keys": {"batch": 1, "heads": 6, "kvHeads": 6, "n_q": 5, "n_k": 0, "d": 4, "d_v": 4},
    "no queries": {"batch": 1, "heads": 6, "kvHeads": 6, "n_q": 0, "n_k": 7, "d": 4, "d_v": 4},
}


def arrays(sizes: dict[str, int], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = sizes
    shapes = {
        "q": (x["batch"], x["heads"], x["n_q"], x["d"]),
        "k": (x["batch"], x["kvHeads"], x["n_k"], x["d"]),
        "v": (x["batch"], x["kvHeads"], x["n_k"], x["d_v"]),
    }
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {name: x[name] for name in ("batch", "heads", "kvHeads", "d")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("statistics", [(), OBSERVED], ids=["out", "statistics"])
def test_modules_give_the_bits_of_the_baseline(
    rule: str, statistics: tuple[Any, ...], baseline: None, tmp_path: Path
) -> None:
    path = regard.export_wasm(tmp_path / "attention", **RULES[rule], statistics=statistics)
    sizes = [x for x in SIZES.values() if x["batch"] == 2 or rule != "rule of batch elements"]
    covered = rule not in ("documents", "tables")  # their tables have no entry of a query before the first key
    calls = [arrays(x) for x in sizes if x["n_k"] or covered]
    calls += [{**calls[0], "offset": 7, "scale": 0.3}]
    for given, got in zip(calls, call(path, calls), strict=True):
        assert "error" not in got, got["error"]
        more = {name: given[name] for name in ("offset", "scale") if name in given}
        observe = ["lse", *(s for s in statistics if s != "lse")]
        out, seen = regard.attention(*(given[x] for x in "qkv"), **RULES[rule], **more, observe=observe, engine="cpu")
        expected = {"out": out, "lse": seen.lse}
        if statistics:
            best = seen[regard.top(5)]
            expected |= {"entropy": seen.entropy, "max": seen.max, "argmax": seen.argmax.astype(np.int32)}
            expected |= {"values": best.values, "indices": best.indices.astype(np.int32)}
        same(got, expected)


@pytest.mark.parametrize("rule", ["plain", "causal", "gap", "rule of heads", "nothing", "score that hides", "tables"])
def test_maps_have_the_bits_of_the_baseline(rule: str, baseline: None, tmp_path: Path) -> None:
    path = regard.export_wasm(tmp_path / "maps", **RULES[rule], maps=True)
    given = arrays({"batch": 1, "heads": 6, "kvHeads": 6, "n_q": 390, "n_k": 390, "d": 20, "d_v": 4})
    bins = {
        "whole": (np.array([0, 390]), np.array([0, 390])),
        "uneven": (np.array([0, 7, 128, 129, 300, 390]), np.array([3, 130, 131, 256, 390])),
        "single": (np.arange(100, 141), np.arange(60, 190)),
    }
    calls, expected = [], []
    for rows, cols in bins.values():
        for h in (0, 4):
            whole = problem_from(*(given[x] for x in "qkv"), **RULES[rule])
            p = part_of(whole, 0, h)
            lse = cpu.forward(p)[0].lse
            one = {"q": given["q"][0, h], "k": given["k"][0, h], "lse": lse, "d": 20, "h": h}
            calls.append({**one, "rows": rows, "cols": cols})
            assert lse is not None
            expected.append(native_maps(p, lse, rows, cols))
    for got, wanted in zip(call(path, calls), expected, strict=True):
        assert "error" not in got, got["error"]
        same(got, wanted)


@pytest.mark.parametrize("rule", ["plain", "rule of heads", "score that hides"])
def test_sums_have_the_bits_of_the_baseline(rule: str, baseline: None, tmp_path: Path) -> None:
    observe: list[Any] = ["visible", "received", "profile"]
    path = regard.export_wasm(tmp_path / "sums", **RULES[rule], statistics=observe)
    few = {"batch": 1, "heads": 2, "kvHeads": 1, "n_q": 900, "n_k": 260, "d": 20, "d_v": 4}  # parts of rows
    calls = [arrays(SIZES["prompt"]), arrays(few), {**arrays(few), "offset": -5}]
    for given, got in zip(calls, call(path, calls), strict=True):
        assert "error" not in got, got["error"]
        more = {"offset": given["offset"]} if "offset" in given else {}
        _, seen = regard.attention(*(given[x] for x in "qkv"), **RULES[rule], **more, observe=observe, engine="cpu")
        same(got, {"received": seen.received, "profile": seen.profile.values, "visible": seen.visible.astype(np.int32)})


def test_relaxed_modules_agree(tmp_path: Path) -> None:
    path = regard.export_wasm(tmp_path / "relaxed.wasm", causal=True, relaxed=True)
    given = arrays(SIZES["prompt"])
    (got,) = call(path, [given])
    expected = regard.attention(*(given[x] for x in "qkv"), causal=True)
    np.testing.assert_allclose(got["out"], expected.reshape(-1), atol=1e-5)


x = np.zeros((2, 5, 8))
PLAIN = "q, k, d, scale, offset, v, dV, heads, kvHeads, batch"


@pytest.mark.parametrize(
    "name", ["plain", "causal", "curved score", "score that hides", "alibi", "bias", "mask and rule"]
)
def test_scores_are_those_of_the_specification(name: str, tmp_path: Path) -> None:
    p = wasm_cases.problem_of(next(x for x in CASES if x.name == name))
    path = regard.export_wasm(tmp_path / "scores", **wasm_cases.export_options(p))
    b, h, (i, k) = p.batch - 1, p.heads - 1, ((3, 20), (2, 19))
    given = wasm_cases.head_call(p, b, h, np.zeros(0))
    given.pop("lse")
    (got,) = call(path, [{**given, "rows": [i[0], i[1]], "cols": [k[0], k[1]]}])
    assert "error" not in got, got["error"]
    with np.errstate(all="ignore"):
        one = part_of(p, b, h)
        found = specification.terms(one)
        scores = found.T
        if one.score_node is not None:
            indices = specification.indices_of(one, np.float64, scores)
            scores = specification.evaluate_one(one.score_node, indices, scores.shape)
        if one.bias is not None:
            scores = scores + specification.dense(one, one.bias)
    for name, x in (("masked", found.S), ("unmasked", scores)):
        wanted = np.broadcast_to(x[0, 0], (p.n_q, p.n_k))[slice(*i), slice(*k)]
        np.testing.assert_allclose(got[name], wanted.reshape(-1), rtol=1e-5, atol=1e-6, err_msg=name)


ERRORS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "documents": {
        "no array": ({"q": [1, 2]}, "TypeError: q must be a Float32Array, got Array"),
        "no d": ({"d": None}, "RangeError: d must be an integer from 1 to 1024, got null"),
        "heads": ({"heads": 0}, "RangeError: heads must be an integer from 1 to 65536, got 0"),
        "text": ({"heads": "2"}, 'RangeError: heads must be an integer from 1 to 65536, got "2"'),
        "kvHeads": ({"heads": 6, "kvHeads": 4}, "RangeError: heads must be a multiple of kvHeads, got 6 and 4"),
        "q": ({"d": 7}, "RangeError: q must hold a multiple of batch · heads · d = 14 numbers, got 80"),
        "v": (
            {"v": np.zeros(7)},
            "RangeError: v must hold a multiple of batch · kvHeads · keys = 10 numbers, got 7",
        ),
        "offset": ({"offset": 0.5}, "RangeError: offset must be an integer of at most 1048576, got 0.5"),
        "offsets": (
            {"offset": np.array([1, 2])},
            "RangeError: offset must be one integer, or one for each of 1 batch elements, got 2",
        ),
        "scale": ({"scale": 1e300}, "RangeError: scale must be finite in float32, got 1e+300"),
        "bias": (
            {"bias": {"data": np.zeros(5), "shape": [5]}},
            "TypeError: this module takes no bias: it was exported without bias=True",
        ),
        "mask": ({"mask": 1}, "TypeError: this module takes no mask: it was exported without array_mask=True"),
        "seed": ({"seed": 1}, "TypeError: this module takes no seed: it was exported without dropout=True"),
        "unknown": ({"stride": 4}, f"TypeError: a call takes {PLAIN}, and no stride"),
        "edges": (
            {"rows": [0, 3, 2], "cols": [0, 5]},
            "Error: this module has no maps: it was exported without maps=True",
        ),
        "too long": (
            {"k": np.zeros(9 * 8 * 2), "v": np.zeros(9 * 8 * 2)},
            "RangeError: ids of documents covers i from 0 to 7, but this call has 8",
        ),
    },
    "operands": {
        "no bias": (
            {"bias": None},
            "TypeError: bias must be { data: Float32Array, shape: number[] }, got null",
        ),
        "no shape": (
            {"bias": np.zeros(5)},
            "TypeError: bias must be { data: Float32Array, shape: number[] }, got Float32Array",
        ),
        "shape": (
            {"bias": {"data": np.zeros(8), "shape": [4, 2]}},
            "RangeError: shape of bias must broadcast to (1, 2, 5, 5), got (4, 2)",
        ),
        "axes": (
            {"bias": {"data": np.zeros(1), "shape": [1, 1, 1, 1, 1]}},
            "RangeError: shape of bias must broadcast to (1, 2, 5, 5), got (1, 1, 1, 1, 1)",
        ),
        "length": (
            {"bias": {"data": np.zeros(4), "shape": [5]}},
            "RangeError: bias must hold 5 numbers, as its shape says, got 4",
        ),
        "kind of mask": (
            {"mask": {"data": np.zeros(5), "shape": [5]}},
            "TypeError: mask must be { data: Uint8Array, shape: number[] }, got Object",
        ),
        "mask": (
            {"mask": {"data": np.full(5, 2, np.uint8), "shape": [5]}},
            "RangeError: mask must hold 0 and 1",
        ),
        "sink": ({"sink": np.zeros(3)}, "RangeError: sink must hold one number, or one for each of 2 heads, got 3"),
        "dropout": ({"dropout": 1}, "RangeError: dropout must be a number in [0, 1), got 1"),
        "no seed": (
            {"dropout": 0.5},
            "RangeError: dropout 0.5 needs a seed: the same seed drops the same weights everywhere",
        ),
        "seed": (
            {"seed": -1},
            "RangeError: seed must be an integer in [0, 2^64), a BigInt from 2^53 on, got -1",
        ),
        "large seed": (
            {"seed": 2**64},
            f"RangeError: seed must be an integer in [0, 2^64), a BigInt from 2^53 on, got {2**64}",
        ),
        "sink of maps": (
            {"rows": [0, 5], "cols": [0, 5], "lse": np.zeros(5)},
            "TypeError: a call takes q, k, d, scale, offset, b, h, lse, rows, cols, bias, mask, and no v",
        ),
    },
}
OPERANDS = {"bias": True, "sink": True, "dropout": True, "array_mask": True, "maps": True}


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_loader_refuses(name: str, tmp_path: Path) -> None:
    pairs = {"bias": {"data": np.zeros(5), "shape": [5]}, "mask": {"data": np.ones(1, np.uint8), "shape": []}}
    options, more = {
        "documents": ({"mask": regard.documents(np.zeros(8, int))}, {}),
        "operands": (OPERANDS, {**pairs, "sink": np.zeros(1)}),
    }[name]
    path = regard.export_wasm(tmp_path / name, **options)
    given: dict[str, Any] = {"q": x, "k": x, "v": x, "heads": 2, "d": 8, **more}
    found = call(path, [{**given, **changed} for changed, _ in ERRORS[name].values()])
    assert [x["error"] for x in found] == [message for _, message in ERRORS[name].values()]
    assert "error" not in call(path, [given])[0]


@pytest.mark.parametrize("name", ["mask", "score"])
def test_a_table_with_an_entry_for_each_query_is_refused_as_in_python(name: str, tmp_path: Path) -> None:
    rule: Any = {
        "mask": lambda b, h, i, j: j <= regard.table(np.arange(5))[i],
        "score": lambda s, b, h, i, j: s + regard.table(np.ones((2, 5)))[h, i],
    }[name]
    q, k = np.zeros((2, 5, 8), np.float32), np.zeros((2, 9, 8), np.float32)
    with pytest.raises(ValueError, match="it has an entry for each of the 5 rows: give offset=0") as refused:
        problem_from(q, k, k, **{name: rule})
    path = regard.export_wasm(tmp_path / "by_query", **{name: rule}, maps=True)
    given: dict[str, Any] = {"q": q, "k": k, "v": k, "heads": 2, "d": 8}
    head = {"q": q[0], "k": k[0], "lse": np.zeros(5), "d": 8, "rows": [0, 5], "cols": [0, 9]}
    found = call(path, [given, head, {**given, "offset": 0}, {**head, "offset": 0}, {**given, "k": q, "v": q}])
    assert [x.get("error") for x in found] == [f"RangeError: {refused.value}"] * 2 + [None] * 3


def test_a_table_longer_than_a_whole_call_is_refused(tmp_path: Path) -> None:
    slopes = regard.table(np.ones(4))
    path = regard.export_wasm(
        tmp_path / "longer", mask=regard.padding([5, 3]), score=lambda s, b, h, i, j: s * slopes[h], maps=True
    )
    q = np.zeros((2, 4, 5, 8), np.float32)
    whole: dict[str, Any] = {"q": q, "k": q, "v": q, "batch": 2, "heads": 4, "d": 8}
    one, half = {**whole, "batch": 1}, {**whole, "heads": 2}
    head = {"q": q[0, 0], "k": q[0, 0], "lse": np.zeros(5), "d": 8, "rows": [0, 5], "cols": [0, 5]}
    assert [x.get("error") for x in call(path, [whole, one, half, head])] == [
        None,
        "RangeError: lengths of padding covers b from 0 to 1, but this call ends at 0",
        "RangeError: axis 0 of a table of shape (4,), float64 of score(<lambda>) covers h from 0 to 3, but this call "
        "ends at 1",
        None,
    ]


def test_what_the_loader_refuses_of_a_head(tmp_path: Path) -> None:
    path = regard.export_wasm(tmp_path / "head", maps=True)
    given = {"q": x[0], "k": x[0], "lse": np.zeros(5), "d": 8, "rows": [0, 5], "cols": [0, 5]}
    wrong: dict[str, dict[str, Any]] = {
        "TypeError: lse must be a Float32Array, got Array": {"lse": [1, 2]},
        "RangeError: lse must have a number for each of 5 queries, got 4": {"lse": np.zeros(4)},
        "RangeError: rows must be two or more rising integers from 0 to 5": {"rows": [0, 6]},
        "RangeError: h must be an integer from 0 to 65535, got -1": {"h": -1},
        "TypeError: this module takes no bias: it was exported without bias=True": {"bias": 1},
    }
    found = call(path, [{**given, **changed} for changed in wrong.values()])
    assert [x["error"] for x in found] == list(wrong)
    given.pop("lse")
    (found_scores,) = call(path, [{**given, "rows": [0, 2, 5]}])
    assert found_scores["error"] == "RangeError: rows must be two rising integers from 0 to 5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask": np.ones((3, 3), bool)},
            "mask must be a rule .*; export with array_mask=True to give arrays to calls",
        ),
        ({"score": lambda s, b, h, i, j: s + np.sin(i)}, "WebAssembly has no C library, which sinf would come from"),
        ({"mask": lambda b, h, i, j: regard.table([1, 2], bounds="raise")[j] > 1}, 'tables .* with bounds="clamp"'),
        ({"statistics": ["normalized_entropy"]}, "statistics may be 'lse', 'entropy', .* got 'normalized_entropy'"),
        ({"statistics": [regard.top(33)]}, r"k of at most 32, got regard.top\(33\)"),
    ],
)
def test_what_is_not_exported(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        regard.export_wasm(tmp_path / "attention", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        (5, {}, TypeError, "^path must be a str or os.PathLike, got int$"),
        ("", {}, ValueError, "^path must name a file, got ''$"),
        ("nowhere/x", {}, FileNotFoundError, "^path must be in a folder that exists, got 'nowhere/x'$"),
        ("x", {"window": 2.5}, TypeError, "^left of window must be an integer"),
        ("x", {"relaxed": 1}, TypeError, "^relaxed must be a bool"),
        (
            "x",
            {"bias": np.zeros(3)},
            TypeError,
            "^bias must be a bool, got .*ndarray: what it names is given",
        ),
        ("x", {"sink": 0.5}, TypeError, "^sink must be a bool"),
        ("x", {"dropout": 0.1}, TypeError, "^dropout must be a bool"),
        ("x", {"array_mask": 1}, TypeError, "^array_mask must be a bool"),
        ("x", {"statistics": "lse"}, TypeError, "^statistics must be a sequence of statistics, got 'lse'"),
        ("x", {"statistics": ["loss"]}, ValueError, "^statistics: unknown statistic 'loss'"),
    ],
)
def test_errors_name_the_argument(
    path: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        regard.export_wasm(path, **options)
    assert not list(tmp_path.iterdir())


def test_files_have_the_name_of_the_module(tmp_path: Path) -> None:
    assert regard.export_wasm(str(tmp_path / "v1.2")) == tmp_path / "v1.2.wasm"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["v1.2.d.ts", "v1.2.js", "v1.2.wasm"]
    assert 'from "./v1.2.js"' in (tmp_path / "v1.2.js").read_text("utf-8")


def test_multiply_add_is_one_instruction_only_where_it_may_be() -> None:
    """`f32x4.relaxed_madd` is 0xfd with the number 0x105."""
    for relaxed in (False, True):
        k = Kernel("forward", webassembly(relaxed), ("x",))
        x = k.pointer("x", F32)
        x[0] = k.fma(x.load(0, 4), x.load(4, 4), x.load(8, 4))
        code = linked(cache.compile_object(k.text(), webassembly(relaxed), "test"), ["forward"])
        assert (b"\xfd\x85\x02" in code) == relaxed


@pytest.mark.parametrize(("n", "k", "m"), [(8, 5, 16), (4, 1, 8), (0, 3, 8), (12, 0, 8)])
def test_the_product_of_matrices_is_that_of_numpy(n: int, k: int, m: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((n, k)).astype(np.float32), rng.standard_normal((k, m)).astype(np.float32)
    image = Image()
    places = {name: image.put(x.tobytes()) for name, x in (("a", a), ("b", b), ("c", np.full((n, m), np.nan, "f4")))}
    fields = image.put(pack_fields(FIELDS, places | {"n": n, "k": k, "m": m}).tobytes())
    end = places["c"] + 4 * n * m
    job = {"kernel": "product", "start": START, "launches": [fields], "taken": image.put(bytes(8))}
    after = in_folder(tmp_path)(product(), bytes(image.bytes), {**job, "from": places["c"], "to": end})
    np.testing.assert_allclose(np.frombuffer(after, np.float32).reshape(n, m), a @ b, rtol=1e-5, atol=1e-6)
