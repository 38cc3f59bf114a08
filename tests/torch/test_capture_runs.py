"""Captures see what ran: in other threads, under nested captures, in models inside of modules, and with NaN."""

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
import regard.torch
from captures import eager
from regard.torch.public.attention import watching
from regard.torch.tensors.modes import function_modes
from regard.warning import RegardWarning

pytestmark = pytest.mark.engine("tiled")

try:
    import transformers  # noqa: F401

    from small_models import MODELS
except ImportError:
    MODELS = {}

needs_transformers = pytest.mark.skipif(not MODELS, reason="needs transformers: pip install 'regard[transformers]'")


class Attending(nn.Module):
    """A projection, and attention of it by PyTorch's function."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(8, 8), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        h = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(h, h, h)[:, 0]


def text(n: int) -> torch.Tensor:
    return torch.randn(1, n, 8)


def in_thread(function: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@contextmanager
def silently() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegardWarning)
        yield


@contextmanager
def warned(message: str) -> Iterator[None]:
    with pytest.warns(RegardWarning, match=message):
        yield


# Threads


def by_executor(model: nn.Module, x: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, x).result()


@pytest.mark.parametrize("run", [in_thread, by_executor, lambda m, x: asyncio.run(asyncio.to_thread(m, x))])
def test_calls_in_another_thread_are_recorded(run: Callable[[nn.Module, torch.Tensor], None]) -> None:
    model, other = nn.Sequential(Attending(), Attending()), Attending()
    with silently(), regard.capture(model) as seen:
        run(model, text(5))
        run(other, text(7))
        run(model, text(9))
    assert [(layer.name, layer.n_q) for layer in seen] == [("0", 9), ("1", 9)]


def test_regards_modules_in_another_thread() -> None:
    model = regard.torch.Transformer(2, 32, 4, causal=True).eval()
    with torch.no_grad(), regard.capture(model) as seen:
        in_thread(model, torch.randn(1, 9, 32))
    assert [layer.n_q for layer in seen] == [9, 9]


def test_a_sequence_that_goes_on_in_other_threads() -> None:
    attention, cache, x = (
        regard.torch.MultiHeadAttention(16, 2, causal=True).eval(),
        regard.torch.KVCache(),
        torch.randn(6, 16),
    )

    @torch.no_grad()
    def step(part: torch.Tensor) -> None:
        attention(part, cache=cache)

    with regard.capture(attention) as seen:
        for a, b in ((0, 4), (4, 5), (5, 6)):
            in_thread(step, x[a:b])
    assert (seen[0].n_q, seen[0].n_k) == (6, 6)


def test_another_models_calls_are_not_recorded() -> None:
    """They are those of PyTorch's function, in the same thread and in others, while the model runs."""
    other = Attending()
    model = Attending(before=lambda: in_thread(other, text(7)))
    original = []
    with regard.capture(model) as seen:
        other.before = lambda: original.append((watching(), function_modes()))
        model(text(5))
        other(text(6))
        regard.attention(text(4), text(4), text(4))
    assert [layer.n_q for layer in seen] == [5]
    assert original == [(False, [])] * 2


def test_of_runs_that_overlap_the_first_is_recorded() -> None:
    inside, ended = threading.Event(), threading.Event()

    def wait() -> None:
        if not inside.is_set():
            inside.set()
            assert ended.wait(60)

    model = nn.Sequential(Attending(), Attending(wait), Attending())
    with warned("1 runs of the model .* while another was recorded"), regard.capture(model) as seen:
        first = threading.Thread(target=model, args=(text(5),))
        first.start()
        assert inside.wait(60)
        model(text(9))
        ended.set()
        first.join()
    assert [(layer.name, layer.n_q) for layer in seen] == [("0", 5), ("1", 5), ("2", 5)]


def test_after_an_overlap_the_next_run_is_recorded() -> None:
    barrier = threading.Barrier(2, timeout=60)
    model = Attending(barrier.wait)
    with warned("1 runs of the model"), regard.capture(model) as seen:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(model, [text(5), text(6)]))
        model.before = lambda: None
        model(text(9))
    assert [layer.n_q for layer in seen] == [9]


def test_a_run_that_has_not_ended_is_said_and_leaves_nothing_behind() -> None:
    inside, left = threading.Event(), threading.Event()
    after: list[Any] = []

    def wait() -> None:
        inside.set()
        assert left.wait(60)

    def run() -> None:
        model(text(5))
        after.append((watching(), function_modes()))

    model = nn.Sequential(Attending(), Attending(wait))
    thread = threading.Thread(target=run)
    with warned("still running in another thread"), regard.capture(model) as seen:
        thread.start()
        assert inside.wait(60)
    left.set()
    thread.join()
    assert [layer.name for layer in seen] == ["0"]
    assert after == [(False, [])]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_that_computes_its_parts_in_threads(copied: bool) -> None:
    """Threads of `asyncio.to_thread` begin with a copy of the context, in which calls are redirected already."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Attending(), Attending()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = contextvars.copy_context() if copied else contextvars.Context()
            with ThreadPoolExecutor(2) as pool:
                return sum(pool.map(lambda part: context.copy().run(part, x), self.parts), torch.zeros(()))

    model = Branches()
    with silently(), regard.capture(model) as seen:
        model(text(5))
    assert sorted(layer.name for layer in seen) == ["parts.0", "parts.1"]


def test_a_run_that_was_interrupted_leaves_nothing_behind() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(Attending(), Attending(interrupt))
    with pytest.raises(KeyboardInterrupt), regard.capture(model):
        model(text(5))
    assert not watching()
    assert function_modes() == []


def test_gradient_checkpoints_in_another_thread() -> None:
    part = Attending()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed()
    with silently(), regard.capture(model) as seen:
        in_thread(lambda: model(text(5)).sum().backward())
    assert [layer.n_q for layer in seen] == [5]
    assert part.linear.weight.grad is not None


# Nested captures


def test_nested_captures_record_what_runs_under_their_own_modules() -> None:
    a, b = Attending(), Attending()
    with regard.capture(a) as of_a:
        a(text(9))
        with regard.capture(b) as of_b:
            a(text(4))
            b(text(7))
        b(text(3))
    assert ([x.n_q for x in of_a], [x.n_q for x in of_b]) == ([4], [7])


def test_a_call_is_recorded_by_each_capture_around_it() -> None:
    """PyTorch's module calls attention once more for weights, which nested captures must not multiply."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), Attending())
    attention: Any = model[0].self_attn
    with regard.capture(model) as whole, regard.capture(attention) as part, regard.capture(model) as again:
        model(text(5))
        attention(*[text(6)] * 3, need_weights=True)
        assert not watching()
    assert [(x.name, x.n_q) for x in whole] == [("0.self_attn", 6), ("1", 5)]
    assert [(x.name, x.n_q) for x in again] == [("0.self_attn", 6), ("1", 5)]
    assert [x.n_q for x in part] == [6]
    np.testing.assert_array_equal(whole[1].lse, again[1].lse)


# Models of transformers


@needs_transformers
def test_a_model_inside_of_a_module_is_switched() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODELS["llama"].build()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(input_ids=ids)

    model, ids = Wrapped(), torch.arange(6)[None]
    before = model.inner.config._attn_implementation
    with torch.no_grad(), regard.capture(model) as seen:
        model(ids)
    assert model.inner.config._attn_implementation == before
    assert not any("[" in repr(layer.options["mask"]) for layer in seen), [layer.options for layer in seen]
    expected = eager(model.inner, input_ids=ids)
    for layer, weights in zip(seen, expected, strict=True):
        np.testing.assert_allclose(layer.weights(1), weights[0, 1].numpy(), atol=1e-5)


@needs_transformers
def test_captures_that_end_in_another_order_give_the_model_back() -> None:
    model = MODELS["llama"].build()
    before = model.config._attn_implementation
    first, second = ExitStack(), ExitStack()
    with torch.no_grad():
        of_first = first.enter_context(regard.capture(model))
        of_second = second.enter_context(regard.capture(model))
        model(input_ids=torch.arange(6)[None])
        first.close()
        model(input_ids=torch.arange(8)[None])
        assert model.config._attn_implementation == "regard"
        second.close()
    assert model.config._attn_implementation == before
    assert ({x.n_q for x in of_first}, {x.n_q for x in of_second}) == ({6}, {8})


# What was not seen, and NaN


def test_a_model_that_did_not_run() -> None:
    model, copied = Attending(), Attending()
    with (
        pytest.raises(RuntimeError, match="no attention was seen in Attending: no forward of it ran"),
        regard.capture(model),
    ):
        copied(text(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_any_row_of_a_layer_raises(value: float) -> None:
    model, x = regard.torch.Transformer(2, 32, 4, causal=True).eval(), torch.randn(2, 300, 32)
    x[1, 137] = value
    message = r"the weights of layer 'blocks.0.*' do not sum to 1: those of row 137 of head 0 are nan"
    with torch.no_grad(), pytest.raises(ValueError, match=message), regard.capture(model) as seen:
        model(x)
    assert len(seen) == 2
