"""PyTorch's own samples of scaled_dot_product_attention and of its modules of attention, against the drop-in.

Each sample is given to PyTorch's function and to ours. Outputs without dropout are compared in norm, those of PyTorch
in float64 being the exact ones: ‖error‖ ≤ 2 ‖error of PyTorch's‖ + 8·eps·‖ |P| |V| ‖. Derivatives in float64 are
checked by finite differences (`gradcheck`), and vmap against one example after the other.
"""

import collections
import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.testing._internal.optests import aot_autograd_check, make_fx_check

import regard.torch
from regard.torch import scaled_dot_product_attention as ours

THEIRS = F.scaled_dot_product_attention
(OP,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MODULES = {
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "Transformer",
}
# What is known to fail, by check and a part of the message, with its reason.
KNOWN: dict[tuple[str, str], str] = {}

Case = tuple[str, Callable[[], None]]


def samples(dtype: torch.dtype, trained: bool = False) -> Iterator[tuple[str, SampleInput]]:
    """All of them, as PyTorch makes them and with strides that are not contiguous; some come twice."""
    seen = set()
    for n, sample in enumerate(OP.sample_inputs("cpu", dtype, requires_grad=trained)):
        given = [sample.input, *sample.args, sample.kwargs.get("attn_mask")]
        options = {name: x for name, x in sample.kwargs.items() if name != "attn_mask"}
        what = f"{[None if x is None else tuple(x.shape) for x in given]} {options}"
        if what not in seen:
            seen.add(what)
            yield f"{n} {what}", sample
            yield f"{n} {what} not contiguous", sample.noncontiguous()


def call(function: Callable[..., Any], sample: SampleInput, *tensors: torch.Tensor) -> Any:
    """The function of a sample, its tensors replaced by others; dropout repeats itself."""
    torch.manual_seed(0)
    q, k, v = tensors[:3] or (sample.input, *sample.args)
    options = dict(sample.kwargs)
    if len(tensors) > 3:
        options["attn_mask"] = tensors[3]
    return function(q, k, v, **options)


def operands(sample: SampleInput) -> tuple[torch.Tensor, ...]:
    """The tensors that may have a gradient."""
    mask = sample.kwargs.get("attn_mask")
    more = () if mask is None or not mask.is_floating_point() else (mask,)
    return sample.input, *sample.args, *more


def outputs(dtype: torch.dtype) -> Iterator[Case]:
    for name, sample in samples(dtype):
        yield name, lambda sample=sample: compare(sample, dtype)


def compare(sample: SampleInput, dtype: torch.dtype) -> None:
    out = call(ours, sample)
    assert torch.equal(out, call(ours, sample)), "the same call gave other bits"
    expected = call(THEIRS, sample)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    if sample.kwargs.get("dropout_p"):
        assert out.isfinite().all()
        return
    given = [x.double() for x in operands(sample)]
    exact = call(THEIRS, sample, *given)
    given[2] = given[2].abs()
    size = call(THEIRS, sample, *given).norm()
    bound = 2 * (expected - exact).norm() + 8 * torch.finfo(dtype).eps * size
    error = (out - exact).norm()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def gradients(**options: Any) -> Callable[[], Iterator[Case]]:
    """First derivatives; PyTorch's older vmap, which tangents are batched with, refuses random numbers."""

    def cases() -> Iterator[Case]:
        for name, sample in samples(torch.float64, trained=True):
            random = {"check_batched_forward_grad": False} if sample.kwargs.get("dropout_p") else {}

            def check(sample: SampleInput = sample, options: dict[str, Any] = options | random) -> None:
                torch.autograd.gradcheck(lambda *x: call(ours, sample, *x), operands(sample), fast_mode=True, **options)

            yield name, check

    return cases


def second(**options: Any) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for name, sample in samples(torch.float64, trained=True):

            def check(sample: SampleInput = sample) -> None:
                function = torch.autograd.gradgradcheck
                function(lambda *x: call(ours, sample, *x), operands(sample), fast_mode=True, **options)

            yield name, check

    return cases


def mapped(transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], Iterator[Case]]:
    """vmap of a transform of the function, over every choice of operands that are batched, first or last."""

    def cases() -> Iterator[Case]:
        for name, sample in samples(torch.float64):
            given = operands(sample)
            if sample.kwargs.get("dropout_p") or "contiguous" in name:
                continue
            function = transform(functools.partial(call, ours, sample))
            for dims in itertools.product((None, 0, -1), repeat=len(given)):
                if {-1, 0} >= set(dims) or sum(x is not None for x in dims) == 1:
                    yield f"{name} in_dims {dims}", functools.partial(one_by_one, function, given, dims)

    return cases


def one_by_one(function: Callable[..., Any], given: tuple[torch.Tensor, ...], dims: tuple[int | None, ...]) -> None:
    batched = [x if d is None else torch.stack([x, x.flip(-1), 2 * x], d) for x, d in zip(given, dims, strict=True)]
    found = torch.vmap(function, dims, randomness="same")(*batched)
    rows = [
        function(*(x if d is None else x.select(d, n) for x, d in zip(batched, dims, strict=True))) for n in range(3)
    ]
    torch.utils._pytree.tree_map(lambda x, *parts: torch.testing.assert_close(x, torch.stack(parts)), found, *rows)


def with_vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*x: torch.Tensor) -> Any:
        out, pull = torch.func.vjp(function, *x)
        return out, pull(out)

    return both


def with_jvp(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: torch.func.jvp(function, x, tuple(t.flip(-2) for t in x))


def with_linear(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*x: torch.Tensor) -> Any:
        out, push = torch.func.linearize(function, *x)
        return out, push(*(t.flip(-2) for t in x))

    return both


def linearized() -> Iterator[Case]:
    """Without dropout: a linear map draws random numbers anew each time it is applied, of PyTorch's function too."""
    for name, sample in samples(torch.float64):
        if sample.kwargs.get("dropout_p"):
            continue

        def check(sample: SampleInput = sample) -> None:
            x = operands(sample)
            found, expected = (f(lambda *x: call(ours, sample, *x))(*x) for f in (with_linear, with_jvp))
            torch.testing.assert_close(found, expected)

        yield name, check


def traced() -> Iterator[Case]:
    """`make_fx` of real, fake and symbolic tensors, and what AOTAutograd makes of forward and backward."""
    for name, sample in samples(torch.float32, trained=True):
        if sample.kwargs.get("dropout_p"):
            continue
        x = operands(sample)
        for mode in ("real", "fake", "symbolic"):
            yield (
                f"{name} make_fx {mode}",
                lambda sample=sample, x=x, mode=mode: make_fx_check(lambda *x: call(ours, sample, *x), x, {}, mode),
            )
        yield (
            f"{name} aot_autograd",
            lambda sample=sample, x=x: aot_autograd_check(lambda *x: call(ours, sample, *x), x, {}, dynamic=False),
        )


def errors() -> Iterator[Case]:
    """Error inputs, of which PyTorch 2.13 has none for this function."""
    for n, wrong in enumerate(OP.error_inputs("cpu")) if OP.error_inputs_func else ():

        def check(wrong: Any = wrong) -> None:
            try:
                call(ours, wrong.sample_input)
            except wrong.error_type:
                return
            raise AssertionError(f"no {wrong.error_type.__name__}")

        yield str(n), check


def modules() -> Iterator[Case]:
    """PyTorch's modules of attention with their inputs, in training and in evaluation, with `sdpa()` and without."""
    for info in module_db:
        if info.module_cls.__name__ not in MODULES:
            continue
        for training in (True, False):
            for n, given in enumerate(
                info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
            ):

                def check(info: Any = info, given: Any = given, training: bool = training) -> None:
                    compare_module(info.module_cls, given, training)

                yield f"{info.name} {n} {'training' if training else 'evaluation'} {given.desc}", check


def compare_module(kind: Any, given: Any, training: bool) -> None:
    if given.forward_input is None:
        return
    torch.manual_seed(0)
    made = kind(*given.constructor_input.args, **given.constructor_input.kwargs).double().train(training)
    for part in made.modules():  # PyTorch's dropout drops other weights than ours
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0

    def results() -> tuple[Any, Any]:
        found = made(*given.forward_input.args, **given.forward_input.kwargs)
        flat = [x for x in torch.utils._pytree.tree_leaves(found) if x is not None]
        trained = [x for x in made.parameters() if x.requires_grad]
        return flat, torch.autograd.grad(sum(x.sum() for x in flat), trained, allow_unused=True)

    expected = results()
    with regard.torch.sdpa():
        found = results()
    torch.testing.assert_close(found, expected)


CHECKS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"outputs {str(dtype).removeprefix('torch.')}": lambda dtype=dtype: outputs(dtype) for dtype in FLOATS},
    "gradients": gradients(check_batched_grad=True),
    "forward mode": gradients(check_backward_ad=False, check_forward_ad=True, check_batched_forward_grad=True),
    "second derivatives": second(),
    "forward over backward": second(check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False),
    "vmap": mapped(lambda f: f),
    "vmap of vjp": mapped(with_vjp),
    "vmap of jvp": mapped(with_jvp),
    "linearize": linearized,
    "traced": traced,
    "error inputs": errors,
    "modules": modules,
}


def run(only: str = "") -> int:
    """The table; the number of checks that failed and are not `KNOWN`."""
    warnings.simplefilter("ignore")
    print(f"PyTorch {torch.__version__}\n{'check':24}{'passed':>8}{'known':>8}{'failed':>8}", flush=True)
    unexpected = 0
    for title, cases in CHECKS.items():
        if only not in title:
            continue
        count: collections.Counter[str] = collections.Counter()
        failures = []
        for name, check in cases():
            try:
                check()
                count["passed"] += 1
            except Exception as error:
                known = any(title == kind and part in str(error) for kind, part in KNOWN)
                count["known" if known else "failed"] += 1
                if not known:
                    failures.append((name, traceback.format_exception_only(error)[-1].strip().partition("\n")[0]))
        print(f"{title:24}{count['passed']:8}{count['known']:8}{count['failed']:8}", flush=True)
        for reason, names in itertools.groupby(sorted(failures, key=lambda x: x[1]), lambda x: x[1]):
            where = [name for name, _ in names]
            print(f"    {len(where)} × {reason[:300]}\n        first: {where[0]}", flush=True)
        unexpected += count["failed"]
    return unexpected
