"""Models and their shapes in `regard bench`: each kind of row in a small size, results checked, shares of attention."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks import measure, model_rows, report, shapes
from benchmarks.measure import SUBJECT, Report, Setting
from benchmarks.model_rows import AfterProductRow, DropInRow, ModelStepRow

TINY = Setting(measure.cores()[:1], rounds=3, seconds=1e-9)

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch and transformers, about themselves, as `run` does


def faster(found: measure.Result, than: str) -> list[float]:
    return [theirs / ours for theirs, ours in zip(found.samples[than], found.samples[SUBJECT], strict=True)]


# Models

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the module, and of its inputs
    "Llama": (LLAMA, {"batch": 1, "n": 12, "vocabulary": 61}),
    "BERT": (ENCODER | {"vocab_size": 61}, {"batch": 3, "n": 12, "vocabulary": 61}),
    "ViT": (ENCODER | {"image_size": 16, "patch_size": 4}, {"pixel_values": (2, 3, 16, 16)}),
    "Whisper": (
        {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8,
         "max_source_positions": 20},
        {"input_features": (1, 8, 40)},
    ),
    "T5": (
        {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        {"batch": 2, "n": 12, "n_out": 5, "vocabulary": 61},
    ),
    "U-Net": ({"width": 16, "text": 12, "d": 8}, {"latents": (1, 4, 8, 8), "time": (1, 1), "text": (1, 5, 12)}),
}  # fmt: skip


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench.models` with small models."""
    pytest.importorskip("transformers")
    from benchmarks import models

    def small(name: str, model: Any) -> Any:
        sizes, inputs = SIZES[name.split(",")[0]]
        step = partial(models.generation, steps=3) if model.step is models.generation else model.step
        given = partial(model.given.func, **inputs)
        return replace(model, make=partial(model.make, **sizes), given=given, step=step)

    monkeypatch.setattr(models, "MODELS", {name: small(name, model) for name, model in models.MODELS.items()})
    return models


def test_every_name_has_a_model(models: Any) -> None:
    assert set(model_rows.MODELS) == set(models.MODELS)
    assert {row.group for row in model_rows.rows()} == {"models", "shapes", "threads"}


def test_llama_has_100_million_parameters() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks import models

    with torch.device("meta"):
        assert sum(x.numel() for x in models.LLAMA().parameters()) == pytest.approx(100e6, rel=0.01)


@pytest.mark.parametrize("name", model_rows.MODELS)
def test_models_compute_the_same_on_every_attention(name: str, models: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        found = ModelStepRow(name, dtype, 1).measure(TINY)
        assert found.failures == {}
        assert set(found.samples) == {"eager", "SDPA", SUBJECT}
        assert found.figures() == pytest.approx(faster(found, "SDPA"))
        assert all(0 < share < 1 for share in found.facts["attention"].values())


def test_a_models_wrong_attention_has_no_time(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.torch.dropins import transformers as integration

    right = integration.attention

    def wrong(*given: Any, **options: Any) -> Any:
        out, weights = right(*given, **options)
        return out * 1.01, weights

    monkeypatch.setattr(integration, "attention", wrong)
    for name, result in (("Llama, training of 512", "dq"), ("BERT, 4 padded to 256", "out")):
        found = ModelStepRow(name, "float32", 1).measure(TINY)
        assert found.samples == {}
        assert found.met is False
        assert found.failures[SUBJECT].startswith(f"wrong {result}: relative error")


def test_a_wrong_drop_in_has_no_time(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import regard.torch

    right = regard.torch.scaled_dot_product_attention
    wrong: Callable[..., Any] = lambda *given, **options: right(*given, **options) * 1.01  # noqa: E731
    monkeypatch.setattr(regard.torch, "scaled_dot_product_attention", wrong)
    for row in (
        ModelStepRow("U-Net, latents of 64 × 64", "float32", 1),
        DropInRow(small(shapes.SHAPES[0]), "float32", 1),
    ):
        found = row.measure(TINY)
        assert SUBJECT not in found.samples
        assert found.failures[SUBJECT].startswith("wrong out: relative error")


def test_the_share_of_attention_is_the_time_inside_forward_and_backward(models: Any) -> None:
    """Of a clock that moves on in attention alone, by one in each forward and backward."""
    import torch

    ticks = 0

    class Ticking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            nonlocal ticks
            ticks += 1
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            nonlocal ticks
            ticks += 10
            return gradient

    q = torch.ones(1, 2, 3, 4, requires_grad=True)
    table = models.FUNCTIONS

    def call() -> None:
        nonlocal ticks
        out = table["regard"](q * 1, q * 2, q * 3)
        ticks += 4  # elsewhere
        out.sum().backward()
        ticks += 5

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table, "regard", lambda q, k, v: Ticking.apply(q + k + v))
        before = table["regard"]
        assert models.share(SUBJECT, call, lambda: ticks) == 11 / 20
        assert table["regard"] is before


def test_without_transformers_models_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = ModelStepRow("ViT, 4 images", "float32", 1).measure(TINY)
    assert (found.samples, found.failures) == ({}, {SUBJECT: "not installed: transformers"})
    table = list(report.tables(Report({}, {}, [found])))[-1]
    assert table.rows == [[SUBJECT, "not installed: transformers", f"models: {found.name}"]]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert ModelStepRow("ViT, 4 images", "float32", 1).measure(TINY).failures == {SUBJECT: "not installed: torch"}


# Shapes


def small(shape: shapes.Shape) -> shapes.Shape:
    c = shape.case
    n_k = 24 if c.n_k == c.n_q else 40
    sizes: Any = {"lead": (3,), "h": 4, "h_kv": c.h_kv and 2, "n_q": min(c.n_q, 24), "n_k": n_k, "d": 8, "d_v": 8}
    return replace(shape, case=replace(c, **sizes))


KINDS = {(s.option, s.trains, s.case.h_kv is None, s.case.n_q == 1): s for s in shapes.SHAPES}


@pytest.mark.parametrize("shape", KINDS.values(), ids=lambda s: s.name)
def test_the_drop_in_computes_what_pytorch_does(shape: shapes.Shape) -> None:
    pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16"):
        found = DropInRow(small(shape), dtype, 1).measure(TINY)
        assert found.failures == {}
        assert set(found.samples) == {SUBJECT, "PyTorch"}
        assert found.figures() == pytest.approx(faster(found, "PyTorch"))


def test_there_are_32_shapes_and_inputs_lie_as_models_have_them() -> None:
    assert len(shapes.SHAPES) == len({s.name for s in shapes.SHAPES}) == 32
    for s in shapes.SHAPES:
        q = small(s).case.inputs("float32")[0]
        assert (q.strides[-2] > q.strides[-3]) == (s.case.n_q > 1)
        assert s.trains == ("training" in s.name)


# Threads


def test_each_row_sets_the_threads_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from regard.runtime.threads import num_threads

    seen = []
    monkeypatch.setattr(
        DropInRow, "fill", lambda self, found, s: seen.append((torch.get_num_threads(), num_threads(), s.threads))
    )
    before = torch.get_num_threads(), num_threads()
    cores = replace(TINY, cores=measure.cores()[:1] * 2)
    for threads in (1, 2):
        DropInRow(shapes.SHAPES[0], "float32", threads).measure(cores)
    assert seen == [(1, 1, 1), (2, 2, 2)]
    assert (torch.get_num_threads(), num_threads()) == before
    assert DropInRow(shapes.SHAPES[0], "float32", 2).measure(TINY).failures == {SUBJECT: "needs 2 cores, may use 1"}
    named = DropInRow(shapes.SHAPES[0], "float32", 1).measure(replace(TINY, engine="tiled"))
    assert named.failures == {SUBJECT: "what models call takes no engine"}


@pytest.mark.parametrize("product", ["", "PyTorch", "NumPy"])
def test_the_gain_of_two_threads_after_a_product(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's time is not in the samples, and a wrong result has none."""
    torch = pytest.importorskip("torch")
    if len(measure.cores()) < 2:
        pytest.skip("needs two cores")
    real, hours = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + 3600 * len(hours))
    row = AfterProductRow(shapes.shape("tiny", 1, 2, 24, 8), "float32", product)
    two = replace(TINY, cores=measure.cores()[:2])
    g, exact = shapes.expected(row.shape)
    monkeypatch.setattr(torch, "mm", lambda a, b: hours.append(1.0))
    monkeypatch.setattr(np, "matmul", lambda a, b: hours.append(1.0))
    found = row.measure(two)
    assert not found.failures
    assert found.samples.keys() == {"one thread", SUBJECT}
    assert max(max(x) for x in found.samples.values()) < 3600
    assert (len(hours) > 1) == bool(product)

    monkeypatch.setattr(shapes, "expected", lambda shape: (g, {"out": exact["out"] * 1.1}))
    assert "wrong out" in row.measure(two).failures[SUBJECT]


def test_two_threads_should_be_as_far_ahead_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, found: Any, s: Any) -> None:
        found.work = {"SDPA": 1.0, SUBJECT: 1.0}
        found.samples = {"SDPA": [1.2, 1.3, 1.4], SUBJECT: [1.0, 1.0, 1.0]}

    monkeypatch.setattr(ModelStepRow, "fill", fill)
    pytest.importorskip("torch")
    row = ModelStepRow("ViT, 4 images", "float32", 2)
    two = replace(TINY, cores=measure.cores()[:1] * 2)
    one = replace(row, threads=1).measure(two)
    assert (one.goal, row.measure(two).goal) == (1.0, 1.0)
    found = row.measure(replace(two, done=[one]))
    assert found.goal == pytest.approx(1.25)
    assert found.met is True
    slow = replace(one, samples={"SDPA": [0.5] * 3, SUBJECT: [1.0] * 3})
    assert row.measure(replace(two, done=[slow])).goal == 1.0
    other = replace(one, name=replace(row, dtype="bfloat16", threads=1).name)
    assert row.measure(replace(two, done=[other])).goal == 1.0


def test_tables_show_the_share_of_attention() -> None:
    found = measure.Result("models", "any", "×", True, 1.0, "SDPA", {"SDPA": [2.0], "eager": [3.0], SUBJECT: [1.0]})
    found.work, found.facts = dict.fromkeys(found.samples, 1.0), {"attention": {"SDPA": 0.25, SUBJECT: 0.125}}
    (table,) = report.tables(Report({}, {}, [found]))
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["median"], row["goal"], row["met"]) == ("2.00", "≥ 1.00", "yes")
    assert (row["peers"], row["share of attention"]) == ("eager 0.67", "SDPA 25%, regard 12%")


def test_clocks() -> None:
    assert (measure.clock(1), measure.clock(2)) == (time.process_time, time.perf_counter)


def test_a_model_may_be_off_by_twice_what_eager_is() -> None:
    x, dtype = np.ones(4), np.dtype(np.float32)
    measure.check({"out": x * 1.0019}, {"out": x}, dtype, {"out": 1e-3})
    with pytest.raises(measure.Wrong, match=r"wrong out: relative error 2\.1e-03, at most 2\.0e-03"):
        measure.check({"out": x * 1.0021}, {"out": x}, dtype, {"out": 1e-3})
    with pytest.raises(measure.Wrong, match=r"wrong out: relative error .* at most nan"):
        measure.check({"out": x}, {"out": x}, dtype, {"out": float("nan")})
