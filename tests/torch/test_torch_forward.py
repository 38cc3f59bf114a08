"""`regard.attention` on tensors: the bits of NumPy, every dtype, without copies; what belongs to PyTorch alone."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import regard
import regard.torch
from cases import CASES, Case, case
from on_tensors import ARRAYS, array, call, tensor
from regard.engines.cpu.schedule import launches, stages, work
from regard.runtime import memory
from regard.torch.operators.registration import execute
from support import SAME_BITS, on_cpu

pytestmark = pytest.mark.engine("tiled")

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
STATISTICS = ["lse", "entropy", "max", "argmax", "received", regard.top(3)]
Q, K, V = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_the_bits_of_numpy(case: Case, dtype: Any) -> None:
    """In every dtype, a twelfth of the cases on compiled kernels: tensors are the same for all engines."""
    q, k, v, options = case.inputs(dtype)
    engine = "tiled" if (CASES.index(case) + DTYPES.index(dtype)) % 12 else "cpu"
    expected, seen = regard.attention(q, k, v, **options, observe=STATISTICS, engine=engine)
    function, tensors, _, _ = call(case, dtype, observe=STATISTICS, engine=engine)
    for grad in (False, True):
        out, found = function(*(x.requires_grad_(grad) for x in tensors))
        assert out.requires_grad == grad
        assert array(out).tobytes() == expected.tobytes()
        for name in ("lse", "entropy", "max", "argmax", "received"):
            assert array(found[name]).tobytes() == seen[name].tobytes()
        top, wanted = found[regard.top(3)], seen[regard.top(3)]
        assert array(top.values).tobytes() == wanted.values.tobytes()
        assert array(top.indices).tobytes() == wanted.indices.tobytes()


@pytest.mark.parametrize("name", on_cpu(["plain", "everything", "positions first"], "plain"))
def test_weights_have_the_bits_of_numpy(name: str) -> None:
    q, k, v, options = case(name).inputs(np.float32)
    expected = regard.attention(q, k, v, **options, return_weights=True)[1]
    function, tensors, _, _ = call(case(name), np.float32, return_weights=True)
    assert array(function(*tensors)[1]).tobytes() == expected.tobytes()
    keep = {name: tensor(x) if name in ARRAYS else x for name, x in options.items() if name not in ("dropout", "seed")}
    tile = regard.weights(tensor(q), tensor(k), **keep, rows=slice(2, 9, 3), cols=slice(-4, None))
    np.testing.assert_array_equal(array(tile), expected[..., 2:9:3, -4:])


def test_nothing_is_copied_on_the_way_in() -> None:
    """A view in, at any strides; and a result that does not keep what was given."""
    big = torch.zeros(3, 9, 4, 2, 16).permute(1, 3, 2, 0, 4)[..., ::2]
    assert not big.is_contiguous()
    from regard.core.tensors import array as view

    for x in (big, big.bfloat16(), big.half(), big.double()):
        assert view(x).__array_interface__["data"][0] == x.data_ptr()
        assert view(x).strides == tuple(s * x.element_size() for s in x.stride())
    assert torch.equal(regard.attention(big, big, big), regard.attention(big.clone(), big.clone(), big.clone()))


def test_matrices() -> None:
    q = Q[0, 0]
    out, weights, seen = regard.attention(q, q, q, return_weights=True, observe=["lse", regard.top(2)])
    assert out.shape == (9, 8)
    assert weights.shape == (9, 9)
    assert seen.lse.shape == (9,)
    assert seen[regard.top(2)].values.shape == (9, 2)
    assert torch.equal(out, regard.attention(Q, Q, Q)[0, 0])


def test_a_lazy_negative_is_read_as_it_is() -> None:
    x = torch.complex(Q, -Q).conj().imag
    assert x.is_neg()
    assert torch.equal(regard.attention(x, K, V), regard.attention(Q, K, V))


def test_manual_seed_repeats_dropout() -> None:
    def dropped() -> torch.Tensor:
        return regard.attention(Q, K, V, dropout=0.5)

    torch.manual_seed(3)
    first, second = dropped(), dropped()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, dropped())
    assert torch.equal(second, dropped())
    assert torch.equal(regard.attention(Q, K, V, dropout=0.5, seed=1), regard.attention(Q, K, V, dropout=0.5, seed=1))


def test_backward_drops_what_forward_dropped() -> None:
    v = V.double().requires_grad_()
    out = regard.attention(Q.double(), K.double(), v, dropout=0.5)
    (g,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((g * v).sum(), out.sum())  # the output is linear in value


def test_autocast() -> None:
    expected = regard.attention(Q.bfloat16(), K.half().bfloat16(), V.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(regard.attention(Q, K.half(), V), expected)
        assert regard.attention(Q.double(), K.double(), V.double()).dtype is torch.float64
    q = Q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        regard.attention(q, K, V).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype is torch.float32


def test_inference_mode() -> None:
    expected = regard.attention(Q, K, V, causal=True)
    with torch.inference_mode():
        out = regard.attention(Q.clone().requires_grad_(), K, V, causal=True)
    assert out.is_inference()
    assert torch.equal(out, expected)


def test_what_is_changed_between_forward_and_backward_is_an_error() -> None:
    q, k = Q.clone().requires_grad_(), K.clone()
    out = regard.attention(q, k, V)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_table_of_a_parameter_follows_it() -> None:
    slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    score = regard.alibi(slopes)
    first = regard.attention(Q, K, V, score=score)
    with torch.no_grad():
        slopes.mul_(2)
    changed = regard.attention(Q, K, V, score=score)
    assert not torch.equal(first, changed)
    assert torch.equal(changed, regard.attention(Q, K, V, score=regard.alibi(slopes.detach().numpy())))
    slopes.data = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert torch.equal(first, regard.attention(Q, K, V, score=score))
    assert repr(score) == "alibi(array of shape (4,))"


def test_rules_of_integer_tensors() -> None:
    ids, lengths, keep = torch.tensor([0] * 4 + [1] * 5), torch.tensor([3, 9]), torch.rand(2, 1, 1, 9) < 0.7
    mask = (regard.documents(ids) | regard.padding(lengths) & ~regard.prefix(torch.tensor(1))) & keep
    expected = regard.documents(ids.numpy()) | regard.padding(lengths.numpy()) & ~regard.prefix(1)
    expected = expected & keep.numpy()
    out = regard.attention(Q, K, V, mask=mask)
    np.testing.assert_array_equal(out.numpy(), regard.attention(Q.numpy(), K.numpy(), V.numpy(), mask=expected))
    assert str(mask).startswith("(documents(array of shape (9,)) | padding(array of shape (2,))")
    assert torch.equal(regard.attention(Q, K, V, mask=keep.int()), regard.attention(Q, K, V, mask=regard.mask(keep)))


def test_steps_plan_and_merge_on_tensors() -> None:
    slopes = torch.nn.Parameter(torch.ones(4))
    assert str(regard.plan(Q, K, V, score=regard.alibi(slopes))) == str(
        regard.plan(Q.numpy(), K.numpy(), V.numpy(), score=regard.alibi(np.ones(4, np.float32)))
    )
    assert str(regard.steps(Q[0], K[0], V[0])) == str(regard.steps(Q[0].numpy(), K[0].numpy(), V[0].numpy()))


@pytest.mark.engine("cpu")
def test_threads_share_nothing_but_the_rules() -> None:
    slopes = torch.nn.Parameter(torch.rand(4))
    score, expected, found = regard.alibi(slopes), [], {}
    inputs = [torch.randn(2, 4, 9, 8) for _ in range(8)]
    expected = [regard.attention(x, x, x, score=score) for x in inputs]

    def work(n: int) -> None:
        for _ in range(20):
            found[n] = regard.attention(inputs[n], inputs[n], inputs[n], score=score)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], expected[n]) for n in range(8))


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


class WithMeta(torch.Tensor):
    """A subclass as MONAI's MetaTensor: results have its class, and its data."""

    meta: Any = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        for x in result if isinstance(result, tuple) else [result]:
            if isinstance(x, cls):
                x.meta = next((y.meta for y in (*args, *(kwargs or {}).values()) if isinstance(y, cls)), None)
        return result


class Trained(torch.nn.Parameter):
    pass


def with_meta(x: torch.Tensor) -> Any:
    x = x.as_subclass(WithMeta)
    x.meta = "affine"
    return x


KEEP = torch.ones(9, 9, dtype=torch.bool).tril()
TAKEN = {
    "query": lambda f: regard.attention(f(Q), K, V, causal=True),
    "key": lambda f: regard.attention(Q, f(K), V),
    "all": lambda f: regard.attention(f(Q), f(K), f(V), layout="bhnd", score=regard.softcap(3.0)),
    "mask": lambda f: regard.attention(Q, K, V, mask=f(KEEP)),
    "bias": lambda f: regard.attention(Q, K, V, bias=f(KEEP.to(Q.dtype))),
    "statistics": lambda f: regard.attention(f(Q), K, V, observe=["lse"])[0],
    "weights": lambda f: regard.weights(f(Q), K),
    "linear": lambda f: regard.linear_attention(f(Q), f(K), f(V)),
    "drop-in": lambda f: regard.torch.scaled_dot_product_attention(f(Q), K, V, attn_mask=KEEP),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_subclass_is_taken_and_comes_back(name: str) -> None:
    out, expected = TAKEN[name](with_meta), TAKEN[name](lambda x: x)
    assert (type(out), type(expected), out.meta) == (WithMeta, torch.Tensor, "affine")
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def test_a_subclass_has_gradients_and_is_captured() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return regard.attention(q, K, V, mask=with_meta(KEEP))

    q, plain = with_meta(Q).requires_grad_(), Q.clone().requires_grad_()
    model = Model()
    with regard.capture(model) as seen:
        out = model(q)
    assert (type(out), seen[0].n_q) == (WithMeta, 9)
    model(plain).sum().backward()
    out.sum().backward()
    assert torch.equal(q.grad.as_subclass(torch.Tensor), plain.grad)  # type: ignore[arg-type, union-attr]


def test_a_parameter_of_a_subclass_is_plain() -> None:
    q = Trained(Q.clone())
    out = regard.attention(q, K, V)
    out.sum().backward()
    assert type(out) is torch.Tensor
    assert q.grad is not None


NAMED = "must be a torch.Tensor where others of the call are, got numpy.ndarray; torch.from_numpy and x.numpy() convert"


@pytest.mark.parametrize(
    ("error", "message", "function"),
    [
        (TypeError, f"key {NAMED}", lambda: regard.attention(Q, K.numpy(), V)),
        (TypeError, f"query {NAMED}", lambda: regard.attention(Q.numpy(), K, V)),
        (TypeError, f"bias {NAMED}", lambda: regard.attention(Q, K, V, bias=np.zeros((9, 9)))),
        (TypeError, f"sink {NAMED}", lambda: regard.attention(Q, K, V, sink=np.zeros(4))),
        (TypeError, f"mask {NAMED}", lambda: regard.attention(Q, K, V, mask=np.ones((9, 9), bool))),
        (TypeError, f"offset {NAMED}", lambda: regard.attention(Q, K, V, offset=np.array(3))),
        (ValueError, "key must be on the device of query, meta, got cpu",
         lambda: regard.attention(Q.to("meta"), K, V)),
        (TypeError, "key must be a dense tensor, got layout torch.sparse_coo",
         lambda: regard.attention(Q, K.to_sparse(), V)),
        (TypeError, "query must be a plain torch.Tensor, got the subclass",
         lambda: regard.attention(Q.as_subclass(Dispatching), K, V)),
        (TypeError, "query is a nested tensor: give jagged ones to regard.torch.jagged_attention",
         lambda: regard.attention(torch.nested.nested_tensor([Q[0]], layout=torch.jagged), K, V)),
        (TypeError, "query must have a floating dtype (float16, bfloat16, float32, float64), got complex64",
         lambda: regard.attention(Q.cfloat(), K.cfloat(), V.cfloat())),
        (TypeError, "query must have a floating dtype (float16, bfloat16, float32, float64), got torch.float8_e5m2",
         lambda: regard.attention(Q.to(torch.float8_e5m2), K, V)),
        (TypeError, "query, key and value must share one dtype, got query float32, key float64, value float32",
         lambda: regard.attention(Q, K.double(), V)),
        (TypeError, "mask must be booleans or 0/1 integers, got float32; to add to scores, use bias=",
         lambda: regard.attention(Q, K, V, mask=torch.zeros(9, 9))),
        (ValueError, "mask must align right to (..., h, n_q, n_k) = (2, 4, 9, 9), got shape (2, 9); one row for each",
         lambda: regard.attention(Q, K, V, mask=torch.ones(2, 9, dtype=torch.bool))),
        (ValueError, "query and key must have the same number of features d, got query (9, 8), key (9, 4)",
         lambda: regard.attention(Q[0, 0], K[0, 0, :, :4], V[0, 0])),
        (TypeError, "attention() got an unexpected keyword argument 'maks'",
         lambda: regard.attention(Q, K, V, maks=None)),
        (TypeError, "a rule that reads the table of shape (4,), torch.float32 tensor serves calls on tensors",
         lambda: regard.attention(Q.numpy(), K.numpy(), V.numpy(), score=regard.alibi(torch.ones(4)))),
        (ValueError, "cap of softcap must be positive, got -1.0", lambda: regard.softcap(torch.tensor(-1.0))),
        (ValueError, "slopes of alibi must not hold NaN", lambda: regard.alibi(torch.tensor([torch.nan]))),
        (TypeError, "attention_vjp takes NumPy arrays; on tensors, differentiate regard.attention",
         lambda: regard.attention_vjp(Q, K, V, Q)),
        (TypeError, "merge: lse of part 0 must be a torch.Tensor", lambda: regard.merge((Q, Q[..., 0].numpy()))),
        (ValueError, "merge: lse of part 0 must have shape (2, 4, 9), got (2, 4, 9, 8)", lambda: regard.merge((Q, Q))),
    ],
)  # fmt: skip
def test_messages(error: type[Exception], message: str, function: Any) -> None:
    with pytest.raises(error) as caught:
        function()
    assert message in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda() -> None:
    """The whole conformance suite runs there too, on arrays of the host that are copied."""
    found = regard.attention(Q.cuda(), K.cuda(), V.cuda(), causal=True)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), regard.attention(Q, K, V, causal=True), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="key must be on the device of query, cuda:0, got cpu"):
        regard.attention(Q.cuda(), K, V)


def steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lie: str) -> Iterator[tuple[torch.Tensor, ...]]:
    """One query against more and more keys, then against fewer; as they are, or in a cache that has room. Those inside
    of tokens have a plan of their own, which is made for many keys, not for one.
    """
    h, counts = k.shape[-3], (1, 2, 127, 128, 129, 700, 2100, 3)
    if lie == "inside of tokens":
        k, v = (torch.cat([x, -x], -3).transpose(-2, -3).contiguous().transpose(-2, -3) for x in (k, v))
        counts = (700, *counts)
    for n in counts:
        heads = slice(h) if n % 2 else slice(None, None, k.shape[-3] // h)  # one after the other, or further apart
        some = k[..., heads, :n, :], v[..., heads, :n, :]
        yield q, *((x.contiguous() for x in some) if lie == "as they are" else some)


@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 8, 2, 16, 24), (1, 1, 5, 5)], ids=["grouped", "one head"])
@pytest.mark.engine("cpu")
def test_steps_of_decoding_have_the_bits_of_numpy(
    sizes: tuple[int, ...], dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "SMALL", 2**14)
    *lead, h, h_kv, d, d_v = sizes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*lead, *shape, generator=generator).to(dtype)
        for shape in ((h, 1, d), (h_kv, 2100, d), (h_kv, 2100, d_v))
    )
    regard.set_num_threads(threads)
    wishes: list[dict[str, Any]] = [{}, {"causal": True}, {"scale": 0.3}]
    for lie, options in itertools.product(("as they are", "in a cache", "inside of tokens"), wishes):
        for given in steps(q, k, v, lie):
            got = regard.attention(*given, **options)
            assert array(got).tobytes() == regard.attention(*map(array, given), **options).tobytes()
    leaf = q.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(regard.attention(leaf, k, v, causal=True).square().sum(), leaf)
    out = regard.attention(*map(array, (q, k, v)))
    assert array(found).tobytes() == regard.attention_vjp(*map(array, (q, k, v)), 2 * out).query.tobytes()


@pytest.mark.engine("cpu")
def test_steps_of_decoding_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = regard.torch.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True, positions="rope").eval()
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    cache = regard.torch.nn.modules.KVCache()
    plans: list[Any] = []
    chunks = stages.LaunchStages.chunks

    def counted(self: Any, *sizes: int) -> Any:
        plans.append(self)
        return chunks(self, *sizes)

    with torch.no_grad():
        expected = module(x)
        found = [module(x[:, :20], cache=cache)]
        monkeypatch.setattr(stages.LaunchStages, "chunks", counted)
        found += [module(x[:, n : n + 1], cache=cache) for n in range(20, 40)]
    assert len(plans) == 1
    torch.testing.assert_close(torch.cat(found, 1), expected)


KEPT: dict[str, dict[str, Any]] = {
    "layout": {"layout": "bnhd"},
    "a rule": {"mask": regard.window(5), "scale": 0.3},
    "rules in the other layout": {"mask": ~regard.window(2), "score": regard.softcap(2.0), "layout": "bnhd"},
    "an offset": {"causal": True, "offset": 3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", KEPT.values(), ids=list(KEPT))
@pytest.mark.engine("cpu")
def test_calls_that_are_kept_have_the_bits_of_numpy(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 6, 6, 16, generator=generator).to(dtype) for _ in range(5)]
    calls: list[Any] = []
    monkeypatch.setattr("regard.torch.public.attention.execute", lambda *x, real=execute: calls.append(x) or real(*x))
    leaf = given[3].detach().clone().requires_grad_()
    for n in range(3):
        q, k, v = given[n : n + 3]
        got = regard.attention(q, k, v, **options)
        expected = regard.attention(*map(array, (q, k, v)), **options)
        assert array(got).tobytes() == expected.tobytes()
        assert tuple(x * dtype.itemsize for x in got.stride()) == expected.strides
        (found,) = torch.autograd.grad(regard.attention(leaf, k, v, **options).sum(), leaf)
        ones = np.ones(got.shape, expected.dtype)
        gradient = regard.attention_vjp(*map(array, (leaf.detach(), k, v)), ones, **options).query
        assert array(found).tobytes() == gradient.tobytes()
    assert len(calls) <= 1  # before a rule was known


@pytest.mark.engine("cpu")
def test_rules_with_arrays_are_not_kept() -> None:
    q, table = torch.randn(2, 8, 16), torch.rand(8)
    mask = torch.ones(8, 8, dtype=torch.bool)
    for options in (
        {"mask": mask},
        {"score": regard.alibi(table[:2])},
    ):
        outputs = [regard.attention(q, q, q, **options) for _ in range(3)]
        mask[:, 3] = False
        table.mul_(2)
        assert not torch.equal(outputs[-1], regard.attention(q, q, q, **options))
        mask[:] = True


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many threads both PyTorch and `regard` have."""
    before = torch.get_num_threads()
    monkeypatch.setattr("regard.runtime.threads._chosen", request.param)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.engine("cpu")
def test_a_signals_handler_makes_the_call_that_it_interrupts(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the addresses of the outer call are set, before a kernel has read them."""
    monkeypatch.setattr(work, "SMALL", 2**10)
    generator = torch.Generator().manual_seed(0)
    outer, inner = ([torch.randn(4, m, 16, generator=generator) for m in (n, 80, 80)] for _ in range(2))
    expected = [regard.attention(*map(array, x)) for x in (outer, inner)]
    regard.attention(*outer)
    regard.attention(*outer)  # which is kept by now as it is
    run = launches.RepeatedStage.__call__
    found: list[Any] = []

    def interrupted(self: Any, team: Any) -> None:
        if not found:
            found.append(None)
            found[0] = regard.attention(*inner)
        run(self, team)

    monkeypatch.setattr(launches.RepeatedStage, "__call__", interrupted)
    assert array(regard.attention(*outer)).tobytes() == expected[0].tobytes()
    assert array(found[0]).tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.engine("cpu")
def test_a_call_with_large_results_is_run_again(
    threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    q, k, v = torch.randn(3, 8, 1030, 64, generator=torch.Generator().manual_seed(0)).to(dtype).unbind(0)
    expected = regard.attention(*map(array, (q, k, v)), causal=True)
    assert expected.nbytes >= memory.LARGE
    outputs = [regard.attention(q, k, v, causal=True)]
    monkeypatch.setattr(work, "schedule_for", None)  # a cached call needs none
    outputs += [regard.attention(*x, causal=True) for x in ((q, k, v), (q.clone(), k, v.clone()))]
    for out in outputs:
        assert out.dtype is dtype
        assert array(out).tobytes() == expected.tobytes()
