"""Gradients of known calls come from prepared calls, with the bits of the engine's backward."""

import gc
import json
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import prepared_forms
import regard
from prepared_forms import FORMS, KEYS, digests, results
from regard.core.tensors import array
from regard.engines import cpu
from regard.engines.cpu.schedule.prepared_backward import PreparedBackward
from regard.ops import callcache

SIZES = {  # heads of query and key, rows, keys, features of key and value
    "whole vectors": (4, 4, 16, 16, 64, 64),
    "padded vectors": (4, 2, 5, 9, 24, 40),
    "several tiles": (3, 1, 130, 70, 7, 5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "rules": {"mask": regard.window(4), "score": regard.softcap(3.0)},
    "positions first": {"layout": "bnhd"},
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that backward of the engine gets as a whole."""
    seen: list[Any] = []

    def backward(p: Any, *rest: Any, run: Any = cpu.backward) -> Any:
        seen.append(p)
        return run(p, *rest)

    monkeypatch.setattr(cpu, "backward", backward)
    return seen


def leaves(seed: int, sizes: tuple[int, ...], dtype: torch.dtype, swap: bool = False) -> list[torch.Tensor]:
    """Query, key, value, and a cotangent of the output."""
    h, h_kv, n_q, n_k, d, d_v = sizes
    shapes = (2, h, n_q, d), (2, h_kv, n_k, d), (2, h_kv, n_k, d_v), (2, h, n_q, d_v)
    generator = torch.manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors = [x.transpose(1, 2).contiguous() for x in tensors] if swap else tensors
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def gradients(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(regard.attention(q, k, v, **options), (q, k, v), dout))


def expected(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[bytes]:
    """The bytes of the gradients of the engine itself."""
    g = regard.attention_vjp(*(array(x.detach()) for x in (q, k, v, dout)), engine="cpu", **options)
    return [x.tobytes() for x in (g.query, g.key, g.value) if x is not None]


def same(found: list[torch.Tensor], bits: list[bytes]) -> None:
    assert [array(x).tobytes() for x in found] == bits


def known(options: dict[str, Any]) -> None:
    """Let rules be those of an earlier call: only of such are calls prepared."""
    x = np.zeros((4, 2, 2), np.float32)
    regard.attention(x, x, x, **{name: rule for name, rule in options.items() if name in ("mask", "score", "causal")})


CASES = [
    *(("padded vectors", "plain", dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    *(
        (sizes, "plain", dtype)
        for sizes in ("whole vectors", "several tiles")
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(("padded vectors", options, torch.float32) for options in OPTIONS if options != "plain"),
    ("padded vectors", "positions first", torch.bfloat16),
]


@pytest.mark.parametrize(("sizes", "options", "dtype"), CASES, ids=str)
def test_gradients_of_a_known_call(sizes: str, options: str, dtype: torch.dtype, whole: list[Any]) -> None:
    known(OPTIONS[options])
    for seed in range(3):  # memory of the one before is dirty
        inputs = leaves(seed, SIZES[sizes], dtype, swap=options == "positions first")
        found = gradients(*inputs, **OPTIONS[options])
        assert not whole
        same(found, expected(*inputs, **OPTIONS[options]))
        assert [x.shape for x in found] == [x.shape for x in inputs[:3]]
        whole.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_lse_that_is_too_large(dtype: torch.dtype, whole: list[Any]) -> None:
    """Weights next to it are divided by their sum, which is not prepared."""
    inputs = leaves(0, SIZES["whole vectors"], dtype)
    gradients(*inputs)
    large = [*(torch.full_like(x, 1e18).requires_grad_() for x in inputs[:2]), *inputs[2:]]
    same(gradients(*large), expected(*large))
    assert len(whole) == 2
    hidden = leaves(1, (2, 2, 9, 4, 64, 64), dtype)  # rows that see nothing have an lse of −∞
    for _ in range(2):
        same(gradients(*hidden, causal=True), expected(*hidden, causal=True))
    assert len(whole) == 4  # those of `expected`, and of large numbers


def test_backward_in_another_thread(whole: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared call has memory of its own, so each thread has its own."""
    inputs = leaves(0, SIZES["whole vectors"], torch.float32)
    bits = expected(*inputs)
    whole.clear()
    runs: set[int] = set()
    call = PreparedBackward.__call__

    def seen(self: Any, addresses: Any, **seed: int) -> bool:
        runs.add(id(self))
        return call(self, addresses, **seed)

    monkeypatch.setattr(PreparedBackward, "__call__", seen)
    same(gradients(*inputs), bits)
    out = regard.attention(*inputs[:3])
    with ThreadPoolExecutor(1) as other:
        same(list(other.submit(torch.autograd.grad, out, inputs[:3], inputs[3]).result()), bits)
    assert len(runs) == 2
    assert not whole


@pytest.mark.parametrize("width", [24, 40])  # of query and key; of value and output
def test_saved_tensors_that_come_back_with_other_strides(width: int) -> None:
    inputs = leaves(0, SIZES["padded vectors"], torch.float32)
    bits = expected(*inputs)
    gradients(*inputs)

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous().mT if x.shape[-1] == width else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, stored):
        same(gradients(*inputs), bits)


@pytest.mark.parametrize("make", [torch.Tensor.expand_as, lambda x, _: x[..., ::2], lambda x, _: torch._neg_view(x)])
def test_a_cotangent_of_any_layout(make: Any, whole: list[Any]) -> None:
    inputs = leaves(0, SIZES["whole vectors"], torch.float32)
    wide = torch.randn(2, 4, 16, 128, generator=torch.manual_seed(1))
    dout = make(torch.ones(()) if make is torch.Tensor.expand_as else wide, inputs[3])[..., :64]
    bits = expected(*inputs[:3], dout.resolve_neg())
    whole.clear()
    same(gradients(*inputs[:3], dout), bits)
    assert not whole


def test_a_signal_during_backward() -> None:
    """What a handler differentiates goes the long way, and changes nothing outside."""
    inputs, others = (leaves(seed, SIZES["whole vectors"], torch.float32) for seed in (0, 1))
    bits, other_bits = expected(*inputs), expected(*others)
    gradients(*inputs)
    (call,) = (x.call for x in callcache.entries().values() if type(x.call) is PreparedBackward)
    inside: list[Any] = []

    def handler(_: Any) -> None:
        with torch.enable_grad():
            inside.append(gradients(*others))

    call.stages.insert(0, handler)
    same(gradients(*inputs), bits)
    same(inside[0], other_bits)


@pytest.mark.parametrize("sizes", ["broadcast", "no keys", "large"])
def test_calls_that_are_not_prepared(sizes: str, whole: list[Any]) -> None:
    shapes = {
        "broadcast": ((2, 2, 5, 8), (2, 5, 8)),
        "no keys": ((2, 2, 5, 8), (2, 2, 0, 8)),
        "large": ((2, 64, 40, 64),) * 2,
    }[sizes]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (shapes[0], shapes[1], shapes[1]))
    dout = torch.randn(shapes[0])
    for _ in range(2):
        same(gradients(q, k, v, dout), expected(q, k, v, dout))
    assert len(whole) == 4


def test_a_prepared_call_holds_no_tensors() -> None:
    inputs = leaves(0, SIZES["padded vectors"], torch.bfloat16)
    gradients(*inputs)
    alive = [weakref.ref(x) for x in inputs]
    del inputs
    gc.collect()
    assert [x() for x in alive] == [None] * 4


def test_second_derivatives_of_a_known_call() -> None:
    q, k, v, dout = leaves(0, (1, 1, 3, 4, 4, 4), torch.float64)
    for _ in range(2):
        assert torch.autograd.gradgradcheck(regard.attention, (q, k, v), dout.requires_grad_())


def test_the_store_has_one_call_for_each_layout() -> None:
    inputs = leaves(0, SIZES["whole vectors"], torch.float32)
    for _ in range(3):
        gradients(*inputs)
    calls = [x.call for x in callcache.entries().values() if x.call is not None]
    assert [type(x).__name__ for x in calls] == ["TensorCall", "PreparedBackward"]


# Options

SINK = torch.randn(4, generator=torch.manual_seed(1))
BIAS = torch.randn(4, 5, 9, generator=torch.manual_seed(1))
WITH_OPTIONS: dict[str, list[dict[str, Any]]] = {  # of calls one after the other
    "sink": [{"sink": SINK}, {"sink": SINK + 1}, {"sink": SINK - 1}],
    "sink in 16 bits, strided": [{"sink": SINK.repeat_interleave(2).bfloat16()[::2] + n} for n in range(3)],
    "seeds": [{"dropout": 0.3, "seed": seed} for seed in (5, 0, 2**62, 0)],
    "bias": [{"bias": BIAS}, {"bias": -BIAS}, {"bias": BIAS.exp()}],
    "bias that broadcasts": [{"bias": BIAS[:1, :1]}, {"bias": BIAS[1:2, 1:2]}],
    "bias that hides": [{"bias": BIAS.masked_fill(BIAS > n, -torch.inf)} for n in (1, 0, -1)],
    "all": [{"bias": BIAS, "sink": SINK * n, "dropout": 0.5, "seed": n, "causal": True} for n in range(3)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", WITH_OPTIONS)
def test_options_of_a_known_call(
    options: str, dtype: torch.dtype, whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays and seeds are those of the call."""
    forward: list[Any] = []
    monkeypatch.setattr(cpu, "forward", lambda *x, run=cpu.forward: forward.append(x) or run(*x))
    for n, given in enumerate(WITH_OPTIONS[options]):
        inputs = leaves(n, SIZES["padded vectors"], dtype)
        given = given | ({"bias": given["bias"].to(dtype)} if "bias" in given else {})
        sink = {"sink": given["sink"].requires_grad_()} if "sink" in given else {}
        out = regard.attention(*inputs[:3], **given)
        with torch.no_grad():
            alone = regard.attention(*inputs[:3], **given)
        found = torch.autograd.grad(out, [*inputs[:3], *sink.values()], inputs[3])
        assert not whole or not n
        assert not forward
        arrays = {name: array(x.detach()) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        bits = regard.attention(*(array(x.detach()) for x in inputs[:3]), engine="cpu", **arrays).tobytes()
        assert [array(x.detach()).tobytes() for x in (out, alone)] == [bits] * 2
        g = regard.attention_vjp(*(array(x.detach()) for x in inputs), engine="cpu", **arrays)
        expected = [g.query, g.key, g.value, *[g.sink] * len(sink)]
        same(list(found), [np.ascontiguousarray(x).tobytes() for x in expected])
        whole.clear()
        forward.clear()


def test_a_bias_with_a_gradient_is_trained_whenever_it_has_one() -> None:
    """The store has one call for a bias with a gradient and one without."""
    inputs = leaves(0, SIZES["padded vectors"], torch.float64)
    bias = BIAS.double()
    expected = regard.attention_vjp(*(array(x.detach()) for x in inputs), bias=bias.numpy(), engine="cpu")
    for needed in (False, True, True, False, True):
        own = bias.clone().requires_grad_(needed)
        out = regard.attention(*inputs[:3], bias=own)
        found = torch.autograd.grad(out, [*inputs[:3], *[own] * needed], inputs[3])
        for x, y in zip(found, (expected.query, expected.key, expected.value, expected.bias), strict=False):
            torch.testing.assert_close(x.numpy(), y)
        assert len(found) == 3 + needed


def test_inputs_of_a_known_call_stay_as_they_are() -> None:
    """Those of the call that it was made of, and of each other one."""
    every = [
        [*leaves(seed, SIZES["padded vectors"], torch.float32), torch.randn(4).requires_grad_()] for seed in range(3)
    ]
    before = [[x.detach().clone() for x in inputs] for inputs in every]
    outputs = [regard.attention(q, k, v, sink=sink, bias=q.detach()[..., :1]) for q, k, v, _, sink in every]
    for (q, k, v, dout, sink), out in zip(every[::-1], outputs[::-1], strict=True):
        torch.autograd.grad(out, (q, k, v, sink), dout)
    for inputs, copies in zip(every, before, strict=True):
        assert all(map(torch.equal, inputs, copies))


def test_seeds_that_are_drawn() -> None:
    """A known call draws as many numbers of PyTorch's generator as an unknown one."""
    inputs = leaves(0, SIZES["padded vectors"], torch.float32)
    torch.manual_seed(3)
    first = [regard.attention(*inputs[:3], dropout=0.4, engine="cpu") for _ in range(3)]
    torch.manual_seed(3)
    assert all(map(torch.equal, (regard.attention(*inputs[:3], dropout=0.4) for _ in range(3)), first))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1"])
def test_a_wrong_seed_of_a_known_call(seed: Any) -> None:
    inputs = leaves(0, SIZES["padded vectors"], torch.float32)[:3]
    for dropout in (0.0, 0.4):
        regard.attention(*inputs, dropout=dropout, seed=0)
        with pytest.raises((TypeError, ValueError), match="seed must be"):
            regard.attention(*inputs, dropout=dropout, seed=seed)


@pytest.mark.parametrize("shape", [(), (3,), (1, 4)])
def test_a_sink_of_another_shape(shape: tuple[int, ...]) -> None:
    inputs = leaves(0, SIZES["padded vectors"], torch.float32)[:3]
    regard.attention(*inputs, sink=SINK)
    for _ in range(2):
        if shape == ():
            expected = regard.attention(*inputs, sink=torch.full((4,), 0.5))
            assert torch.equal(regard.attention(*inputs, sink=torch.tensor(0.5)), expected)
        else:
            with pytest.raises(ValueError, match="sink must be one number for each head"):
                regard.attention(*inputs, sink=torch.zeros(shape))


def test_second_derivatives_of_a_known_call_with_options() -> None:
    q, k, v, _ = leaves(0, (2, 1, 3, 4, 4, 4), torch.float64)
    sink, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2,), (2, 3, 4)))

    def function(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return regard.attention(q, k, v, sink=sink, bias=bias.detach(), dropout=0.2, seed=7)

    for _ in range(2):
        assert torch.autograd.gradgradcheck(function, (q, k, v, sink))


def test_what_is_not_prepared_has_the_options_of_the_call() -> None:
    """Second derivatives, and the gradient of a bias, are of problems that share what the first one had."""

    def derivatives(n: int, engine: str | None) -> list[torch.Tensor]:
        q, k, v, dout = leaves(0, SIZES["padded vectors"], torch.float64)
        sink, bias = (x.double() * n for x in (SINK, BIAS))
        every = [q, k, v, sink.requires_grad_(), bias.requires_grad_()]
        options = {"sink": sink, "bias": bias, "dropout": 0.3, "seed": n}
        out = regard.attention(q, k, v, engine=engine, **options)
        first = torch.autograd.grad(out, every, dout, create_graph=True)
        second = torch.autograd.grad([x.square().sum() for x in first], every)
        return [*first, *second]

    for n in (1, 2, 3):
        for x, y in zip(derivatives(n, None), derivatives(n, "cpu"), strict=True):
            assert torch.equal(x, y)


@pytest.fixture(scope="module")
def of_fresh_processes() -> list[dict[str, list[str]]]:
    """The digests of each form with the first and the second values, each in a process of its own."""
    script = prepared_forms.__file__
    runs = [subprocess.Popen([sys.executable, script, n], stdout=subprocess.PIPE, text=True) for n in "01"]
    return [json.loads(run.communicate()[0]) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_rules_of_one_form(form: str, order: tuple[int, ...], of_fresh_processes: list[dict[str, list[str]]]) -> None:
    """A prepared call with other values has the bits of a process that knows these values alone."""
    with ThreadPoolExecutor(1) as thread:  # whose store is empty
        for values in order:
            for _ in range(2):
                assert thread.submit(digests, form, values).result() == of_fresh_processes[values][form]


@pytest.mark.parametrize("form", [x for x in FORMS if x != "a score that may hide"])
def test_calls_with_other_values_are_prepared(form: str, whole: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that values make another form, and calls of several tiles."""
    seen: list[Any] = []

    def forward(p: Any, *rest: Any, run: Any = cpu.forward) -> Any:
        seen.append(p)
        return run(p, *rest)

    monkeypatch.setattr(cpu, "forward", forward)
    for n in KEYS:
        for _ in range(2):
            results(form, 0, n)
        del seen[:], whole[:]
        results(form, 1, n)
        prepared = n <= 128 and form != "nested"
        assert prepared == (not seen)
        assert not (prepared and whole)
