"""Products of AMX tiles of bfloat16: one by one, and forward by them against forward by vectors, bit by bit."""

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import doctor
from regard.core.problem import Outputs
from regard.engines.cpu.language.amx import amx_tiles
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32, I32
from regard.engines.cpu.target import cache, permission
from regard.engines.cpu.target import instructions as target
from regard.engines.cpu.target.instructions import targets
from regard.ops.normalization import problem_from
from support import assert_gradients

AMX = targets()["amx"]
here = pytest.mark.skipif(not AMX.runs, reason="no AMX")
BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CPU", "amx")


def as_documented(x: Array, y: Array, total: Array) -> Array:
    """TDPBF16PS as Intel's manual has it: a chain for even numbers, one for odd, both, then the total."""
    smallest = np.finfo(np.float32).tiny

    def flushed(z: Array) -> Array:
        return np.where(np.abs(z) < smallest, np.float32(0), z.astype(np.float32))

    x, y = (flushed(z) for z in (x, y))
    chains = [np.zeros(total.shape, np.float32) for _ in range(2)]
    for n in range(x.shape[1]):
        # A product has 16 bits, and with the chain 64: rounded once.
        exact = np.longdouble(x[:, n, None].astype(np.float64) * y[n]) + chains[n % 2]
        chains[n % 2] = flushed(exact.astype(np.float32))
    both = flushed(chains[0] + chains[1])
    return flushed(total + both)


@here
@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs 64 bits to judge")
@pytest.mark.parametrize("spread", [1, 8, 60])
def test_a_product_is_summed_as_documented(spread: int) -> None:
    rng = np.random.default_rng(spread)

    def numbers(rows: int, columns: int) -> Array:
        powers = np.exp2(rng.integers(-spread, spread, (rows, columns)).astype(np.float64))
        found: Array = (rng.standard_normal((rows, columns)) * powers).astype(BF16)
        return found

    k = Kernel("product", AMX, ("x", "y", "total", "result"))
    x, y, total, result = (k.pointer(name, kind) for name, kind in zip(k.fields, (I32, I32, F32, F32), strict=True))
    with amx_tiles(k) as (a, b, c, *_):
        a.load(x, 64)
        b.load(y, 64)
        c.load(total, 64)
        c.add_product(a, b)
        c.store(result, 64)
    text = k.text()
    compiled = cache.kernel(text, "product", AMX, lambda: text)
    differ = 0
    for _ in range(20):
        left, right, start = numbers(16, 32), numbers(32, 16), rng.standard_normal((16, 16)).astype(np.float32)
        pairs = np.ascontiguousarray(right.reshape(16, 2, 16).swapaxes(1, 2))
        got = np.full((16, 16), np.nan, np.float32)
        fields = np.array([z.ctypes.data for z in (left, pairs, start, got)], np.uint64)
        compiled(fields.ctypes.data)
        np.testing.assert_array_equal(got, as_documented(left, right, start))
        differ += int(np.count_nonzero(got != start + left.astype(np.float32) @ right.astype(np.float32)))
    assert differ  # another order shows


N, D, D_V = 420, 170, 50
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, N, d)).astype(BF16) for d in (D, D, D_V))
SCALE = 4.0  # so large that lse shows the last bits of scores
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "scale": SCALE},
    "score": {"score": regard.softcap(90.0), "causal": True, "scale": -SCALE},
}

# Weighted alike, the first 300 cancel but for what rounding leaves, so that bfloat16 shows the order of sums.
CANCELLING = (RNG.standard_normal((2, N, D_V)) * 2.0 ** RNG.integers(-9, 9, (2, N, 1))).astype(BF16)
CANCELLING[:, 150:300] = -CANCELLING[:, RNG.permutation(150)]


def run(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, seen = regard.attention(q, k, v, **options, observe=["lse"], engine="cpu")
    return out.view(np.uint16), seen.lse.view(np.uint32)


def assert_same(x: tuple[Array, Array], y: tuple[Array, Array], rows: slice = slice(None)) -> None:
    for a, b in zip(x, y, strict=True):
        np.testing.assert_array_equal(a, b[:, rows])


@here
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("name", OPTIONS)
def test_any_rows_alone(name: str) -> None:
    """Blocks of 1, 2 and 3 times 16 lanes, and lanes that are keys: those use no AMX, and sum as it does."""
    whole = run(Q, K, V, **OPTIONS[name])
    for rows in (slice(N - 1, N), slice(300, 308), slice(129, 141), slice(31, 61), slice(100, N)):
        assert_same(run(Q[:, rows], K, V, **OPTIONS[name], offset=rows.start), whole, rows)


@here
@pytest.mark.usefixtures("amx")
def test_any_strides() -> None:
    q, k, v = (np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (Q, K, V))
    whole = run(Q, K, V, **OPTIONS["causal"])
    for rows in (slice(None), slice(300, 308)):
        assert_same(run(q[:, rows], k, v, **OPTIONS["causal"], offset=rows.start or 0), whole, rows)


@here
@pytest.mark.usefixtures("amx")
def test_sums_that_cancel() -> None:
    """Decode, prefill, and both computed again without hidden values."""
    q, v, some = np.zeros_like(Q), CANCELLING.copy(), slice(0, 5)
    v[:, 300:] = np.nan
    many, few = (run(q[:, rows], K, CANCELLING, mask=regard.padding(300)) for rows in (slice(None), some))
    assert many[0].any()
    assert_same(few, many, some)
    assert_same(run(q, K, v, mask=regard.padding(300)), many)
    assert_same(run(q[:, some], K, v, mask=regard.padding(300)), few)


@here
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("first", [37, 96])
def test_keys_that_begin_anywhere(first: int) -> None:
    """AMX steps are counted from the absolute j = 0: rows before the first key are not there."""
    expected = run(Q, K, V, mask=lambda b, h, i, j: j >= first, scale=SCALE)
    for rows in (slice(None), slice(200, 203)):
        part = run(Q[:, rows], K[:, first:], V[:, first:], origin=(0, 0, first), scale=SCALE)
        assert_same(part, expected, rows)


@here
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("nothing", [np.nan, np.inf])
def test_what_is_hidden_changes_no_bit(nothing: float) -> None:
    """A product with what is hidden is NaN, so that the key split is computed again, by vectors."""
    k, v, whole = K.copy(), V.copy(), run(Q, K, V, causal=True)
    k[:, 330:], v[:, 330:] = np.nan, nothing
    for rows in (slice(325, 330), slice(280, 330)):
        assert_same(run(Q[:, rows], k, v, causal=True, offset=rows.start), whole, rows)


@here
@pytest.mark.usefixtures("amx")
def test_numbers_below_the_smallest_normal_one_count_as_zero() -> None:
    """AMX takes them so, whatever the mode of the thread; decode, by vectors, must as well."""
    q, k = ((x.astype(np.float64) * 2.0**power).astype(BF16) for x, power in ((Q, 125), (K, -130)))
    whole = run(q, k, V, scale=1.0)
    np.testing.assert_allclose(whole[1].view(np.float32), np.log(N), rtol=1e-6)
    assert_same(run(q[:, 5:8], k, V, scale=1.0), whole, slice(5, 8))


@here
@pytest.mark.usefixtures("amx")
def test_sums_over_queries() -> None:
    found = [
        regard.attention(Q, K, V, causal=True, observe=["received", "visible", "profile"], engine=engine)[1]
        for engine in ("cpu", "tiled")
    ]
    np.testing.assert_array_equal(found[0].visible, found[1].visible)
    np.testing.assert_allclose(found[0].received, found[1].received, rtol=2e-5)
    np.testing.assert_allclose(found[0].received.sum(-1), N, rtol=1e-5)
    profiles = (found[n].profile.values for n in range(2))
    np.testing.assert_allclose(*profiles, rtol=2e-5, atol=1e-7)


# Backward: blocks of 32 and 64 lanes

DO = RNG.standard_normal((2, N, D_V)).astype(BF16)
DOT = [RNG.standard_normal(x.shape).astype(BF16) for x in (Q, K, V, DO)]


def gradients(*inputs: Array, rows: slice = slice(None), **options: Any) -> dict[str, Array]:
    """Of some rows: the gradients and their tangents, as bits."""
    q, k, v, dout = inputs
    q, dout, dq, d_dout = (x[:, rows] for x in (q, dout, DOT[0], DOT[3]))
    options |= {"offset": rows.start or 0, "engine": "cpu"}
    found = regard.attention_vjp(q, k, v, dout, **options)
    dk, dv = (x[:, N - k.shape[1] :] for x in DOT[1:3])
    along, moving = regard.Differential(dq, dk, dv), regard.Outputs(d_dout, None, None)
    tangents, _ = regard.attention_vjp_jvp(q, k, v, dout, along, cotangent_tangents=moving, **options)
    both = {"": found, "tangent of ": tangents}
    return {
        label + name: getattr(g, name).view(np.uint16)
        for label, g in both.items()
        for name in ("query", "key", "value")
    }


@here
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"origin": (0, 0, 37)}, {"origin": (0, 0, 96)}], ids=str)
def test_gradients_agree_with_the_specification(options: dict[str, Any], far: bool) -> None:
    """Also where blocks of keys begin before the first key and end behind the last; far: exp(0 − lse) is infinite."""
    q, k, v, dout = (x[:, :150] for x in (Q, K, V, DO))
    if far:
        q, k, options = np.abs(q), -np.abs(k), {**options, "scale": 2.0}
    p = problem_from(q, k, v, **options)
    assert_gradients(p, Outputs(dout, None, None), regard.attention_vjp(q, k, v, dout, **options, engine="cpu"))


@here
@pytest.mark.usefixtures("amx")
def test_gradients_of_any_rows_alone() -> None:
    whole = gradients(Q, K, V, DO, causal=True)
    for rows in (slice(N - 1, N), slice(300, 332), slice(129, 170), slice(31, 361)):
        part = gradients(Q, K, V, DO, rows=rows, causal=True)
        for name in ("query", "tangent of query"):
            np.testing.assert_array_equal(part[name], whole[name][:, rows])


@here
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("first", [37, 96])
def test_gradients_by_keys_that_begin_anywhere(first: int) -> None:
    whole = gradients(Q, K, V, DO, mask=lambda b, h, i, j: j >= first)
    part = gradients(Q, K[:, first:], V[:, first:], DO, origin=(0, 0, first))
    for name in ("query", "tangent of query"):
        np.testing.assert_array_equal(part[name], whole[name])


@here
@pytest.mark.usefixtures("amx")
def test_what_is_hidden_changes_no_bit_of_gradients() -> None:
    """Where something is not finite, vectors sum as AMX does."""
    inputs, hidden, blind = [x.copy() for x in (Q, K, V, DO)], slice(333, 340), slice(100, 103)
    seen = np.ones((N, N), bool)
    seen[:, hidden], seen[blind] = False, False
    expected = gradients(*inputs, mask=seen, causal=True)
    for x, rows, value in zip(inputs, (blind, hidden, hidden, blind), (np.nan, np.inf, np.nan, -np.inf), strict=True):
        x[:, rows] = value
    got = gradients(*inputs, mask=seen, causal=True)
    for name, x in expected.items():
        assert x.any()
        np.testing.assert_array_equal(got[name], x)


@here
def test_threads_that_were_there_before_and_children() -> None:
    """The system's permission is the process's: it holds for threads that run already, and after fork."""
    code = """
import os, sys, threading
import ml_dtypes, numpy as np
import regard
from regard.engines.cpu.target import permission
q = np.random.default_rng(0).standard_normal((1, 40, 32)).astype(ml_dtypes.bfloat16)
asked, found = threading.Event(), []
def late():
    asked.wait()
    found.append(regard.attention(q, q, q, engine="cpu").tobytes())
thread = threading.Thread(target=late)
thread.start()
assert permission.refused.cache_info().currsize == 0
here = regard.attention(q, q, q, engine="cpu").tobytes()
assert permission.refused.cache_info().currsize == 1
asked.set()
thread.join()
child = os.fork()
if child == 0:
    os._exit(regard.attention(q, q, q, engine="cpu").tobytes() != here)
assert os.waitpid(child, 0)[1] == 0
assert found == [here]
"""
    environment = {**os.environ, "REGARD_CPU": "amx"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("refusal", "fastest"), [(None, "amx"), ("Operation not permitted", "avx512")])
def test_where_the_system_refuses(refusal: str | None, fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if AMX.triple != target.native_triple():
        pytest.skip("targets of another processor")
    monkeypatch.delenv("REGARD_CPU", raising=False)
    monkeypatch.setattr(target, "host_cpu", lambda: "sapphirerapids")
    monkeypatch.setattr(target, "host_features", lambda: dict.fromkeys(AMX.needs, True))
    monkeypatch.setattr(permission, "refused", lambda: refusal)
    monkeypatch.setattr(doctor, "_cpuinfo", lambda: {"flags": "avx2 amx_bf16 amx_tile"})
    target._chosen.cache_clear()
    try:
        assert target.chosen().name == fastest
        if refusal:
            with pytest.raises(ValueError, match="REGARD_CPU=amx: this processor cannot run it"):
                target._chosen("amx")
    finally:
        target._chosen.cache_clear()
    said = doctor.report()["processor"]["AMX"]
    assert said == ("allowed" if refusal is None else f"refused by the system: {refusal}")
