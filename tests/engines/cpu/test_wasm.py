"""Kernels as WebAssembly: the bits of the baseline target, and the modules and loaders that pages use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from in_node import call, forward, in_folder, native, native_maps, same
from regard.bench.cases import CASES, Case
from regard.core.parts import part_of
from regard.engines import cpu
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import targets, webassembly
from regard.engines.cpu.wasm.linking import linked
from regard.ops.attention import problem_from

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
    "rows": {"batch": 1, "heads": 2, "kvHeads": 2, "n_q": 9, "n_k": 333, "d": 16, "d_v": 16},
    "step": {"batch": 2, "heads": 6, "kvHeads": 6, "n_q": 1, "n_k": 390, "d": 33, "d_v": 7},
    "step, grouped heads": {"batch": 1, "heads": 6, "kvHeads": 2, "n_q": 1, "n_k": 390, "d": 64, "d_v": 64},
    "two rows": {"batch": 1, "heads": 6, "kvHeads": 3, "n_q": 2, "n_k": 130, "d": 64, "d_v": 64},
    "no keys": {"batch": 1, "heads": 2, "kvHeads": 2, "n_q": 5, "n_k": 0, "d": 4, "d_v": 4},
    "no queries": {"batch": 1, "heads": 2, "kvHeads": 2, "n_q": 0, "n_k": 7, "d": 4, "d_v": 4},
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


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no array": ({"q": [1, 2]}, "TypeError: q must be a Float32Array"),
    "no d": ({"d": None}, "RangeError: d must be an integer from 1 to 1024, got null"),
    "heads": ({"heads": 0}, "RangeError: heads must be an integer from 1 to 65536, got 0"),
    "kvHeads": ({"heads": 6, "kvHeads": 4}, "RangeError: heads must be a multiple of kvHeads, got 6 and 4"),
    "q": ({"d": 7}, "RangeError: q must hold a multiple of batch · heads · d = 14 numbers, got 80"),
    "v": (
        {"v": np.zeros(7)},
        "RangeError: v must hold a multiple of batch · kvHeads · keys = 10 numbers, got 7",
    ),
    "offset": ({"offset": 0.5}, "RangeError: offset must be an integer of at most 1048576, got 0.5"),
    "scale": ({"scale": 1e300}, "RangeError: scale must be finite in float32, got 1e+300"),
    "bias": (
        {"bias": np.zeros(4)},
        "TypeError: a call takes q, k, v, d, dV, heads, kvHeads, batch, scale, offset, and no bias",
    ),
    "edges": ({"rows": [0, 3, 2], "cols": [0, 5]}, "Error: this module has no maps: it was exported without maps=True"),
    "too long": (
        {"k": np.zeros(9 * 8 * 2), "v": np.zeros(9 * 8 * 2)},
        "RangeError: ids of documents covers i from 0 to 7, but this call has 8",
    ),
}


def test_what_the_loader_refuses(tmp_path: Path) -> None:
    path = regard.export_wasm(tmp_path / "documents", mask=regard.documents(np.zeros(8, int)))
    x = np.zeros((2, 5, 8))
    given: dict[str, Any] = {"q": x, "k": x, "v": x, "heads": 2, "d": 8}
    found = call(path, [{**given, **changed} for changed, _ in ERRORS.values()])
    assert [x["error"] for x in found] == [message for _, message in ERRORS.values()]
    assert "error" not in call(path, [given])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((3, 3), bool)}, "mask must be a rule of the indices, .* not an array"),
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
