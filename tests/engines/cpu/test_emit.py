"""The kernel language: operators, loops, branches, conversions, elementary functions in ulp."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import BF16, F16, F32, F64, I32, I64, Type, type_of
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, targets
from regard.reference import specification

HERE = [t for t in targets().values() if t.runs and not t.amx]  # those have a test of their own
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(params=HERE, ids=lambda t: t.name)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param  # type: ignore[no-any-return]


def compiled(k: Kernel) -> cache.Compiled:
    text = k.text()
    return cache.kernel(text, k.name, k.target, lambda: text)


def mapped(f: Callable[..., Value], x: Array, result: Any, target: Target, lanes: int | None = None) -> Array:
    """f of every element, by vectors or one by one (lanes = 0)."""
    lanes = target.lanes(8) if lanes is None else lanes
    k = Kernel("mapped", target, ("x", "y", "n"))
    source, made = k.pointer("x", type_of(x.dtype)), k.pointer("y", type_of(result))
    with k.loop(k.integer("n"), step=max(lanes, 1)) as i:
        made[i] = f(k, source.load(i, lanes))
    y = np.empty(x.shape, result)
    assert not x.size % max(lanes, 1)
    fields = np.array([x.ctypes.data, y.ctypes.data, x.size], np.int64)
    compiled(k)(fields.ctypes.data)
    return y


def ulps(got: Array, exact: Array) -> float:
    """The largest error in ulp; infinite if NaN or infinity are elsewhere."""
    top = np.finfo(got.dtype).max
    with np.errstate(all="ignore"):
        rounded = np.where(np.abs(exact) > top, np.sign(exact) * np.inf, exact)
        error = np.abs(got - rounded) / np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, 1)).astype(got.dtype))
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return float(np.max(np.where(same, 0, np.where(np.isnan(error), np.inf, error))))


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-40]
FUNCTIONS = {
    "exp2": (mathematics.exp2, np.exp2, -160, 130, 2),
    "exp": (mathematics.exp, np.exp, -105, 90, 2),
    "log": (mathematics.log, np.log, 0, 100, 2),
    "tanh": (mathematics.tanh, np.tanh, -3, 3, 3),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: Any, target: Target) -> None:
    f, exact, low, high, limit = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(low, high, 4088), SPECIAL]).astype(dtype)
    if name == "log":
        x[:2000] = np.exp2(rng.uniform(-148 if dtype is np.float32 else -1070, 126, 2000)).astype(dtype)
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.longdouble))
    for lanes in (0, target.lanes(np.dtype(dtype).itemsize)):
        assert ulps(mapped(f, x, dtype, target, lanes), expected) < limit


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh(dtype: Any, target: Target) -> None:
    """Within 3 ulp everywhere, x itself where x is small, ±1 where x is large, and never beyond."""
    x = np.concatenate([np.linspace(0, 24, 2**18), np.linspace(0, 3, 2**18), np.geomspace(1e-300, 1, 2**14)]).astype(
        dtype
    )
    small, large = [np.finfo(dtype).smallest_subnormal, np.finfo(dtype).tiny, 1e-39], [20, 1e30, np.inf]
    x[-16:] = [*small, *large, np.nan, 1e-5, *[-0.0] * 8]
    got = mapped(mathematics.tanh, x, dtype, target, target.lanes(np.dtype(dtype).itemsize))
    assert ulps(got, np.tanh(x.astype(np.longdouble))) < 3
    np.testing.assert_array_equal(got[-16:-13], x[-16:-13])
    np.testing.assert_array_equal(got[x >= 20], np.ones((x >= 20).sum(), dtype))
    assert np.signbit(got[-8:]).all()
    assert np.nanmax(got) == 1
    opposite = mapped(mathematics.tanh, -x, dtype, target, target.lanes(np.dtype(dtype).itemsize))
    np.testing.assert_array_equal(opposite, -got)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights(dtype: Any, target: Target) -> None:
    """Exactly 1 at 0 and 0 at −∞, within 2.5 ulp between, one by one as in vectors, whatever the neighbours."""
    lanes, least = target.lanes(np.dtype(dtype).itemsize), np.finfo(dtype).minexp
    special = np.array([0, -0.0, np.nan, -np.nan, -np.inf, -1e30, 8 * least, -1], dtype)
    far, near, tiny = np.linspace(least + 1, 0.5, 2**18), np.linspace(-2, 0.5, 2**18), -np.geomspace(1e-30, 1, 2**10)
    dense = np.concatenate([far, near, tiny])
    x = np.concatenate([dense.astype(dtype), np.repeat(special, 2)])
    got = mapped(mathematics.weight2, x, dtype, target, lanes)
    np.testing.assert_array_equal(got[-16::2], np.array([1, 1, np.nan, np.nan, 0, 0, 0, 0.5], dtype))
    assert ulps(got[: dense.size], np.exp2(x[: dense.size].astype(np.longdouble))) < 2.5
    few = np.random.default_rng(0).permutation(x.size)[:256]
    few[:16] = np.arange(x.size - 16, x.size)
    np.testing.assert_array_equal(mapped(mathematics.weight2, x[few], dtype, target, 0), got[few])
    np.testing.assert_array_equal(mapped(mathematics.weight2, x[few], dtype, target, lanes), got[few])


@pytest.mark.parametrize("short", [np.float16, ml_dtypes.bfloat16])
def test_16_bits(short: Any, target: Target) -> None:
    if short is np.float16 and target.name == "baseline":
        pytest.skip("has no conversion of float16")
    type = F16 if short is np.float16 else BF16
    every = np.arange(2**16, dtype=np.uint16).view(short)
    wide = mapped(lambda k, x: x.to(F32), every, np.float32, target)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    words = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = words.astype(short).astype(np.float32)
    got = mapped(lambda k, x: x.to(type), words, short, target).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_floats_to_integers_saturate(target: Target) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1.9, 2.5, -(2.0**63), 3.0], np.float64)
    got = mapped(lambda k, x: x.to(I64), x, np.int64, target)
    assert got.tolist() == [0, 2**63 - 1, -(2**63), 2**63 - 1, -1, 2, -(2**63), 3]


def test_random_bits_are_those_of_the_specification(target: Target) -> None:
    j = np.concatenate([np.arange(56), [2**31, 2**32 - 1, 2**32, 2**40 + 3, 5, 6, 7, 8]]).astype(np.int64)
    seed, b, h, i = 2**63 + 5, 3, 1, 2**33 + 1

    def bits(k: Kernel, x: Value) -> Value:
        words = (k.constant(I64, n if n < 2**63 else n - 2**64) for n in (seed, b, h, i))
        return mathematics.random_bits(k, mathematics.row_key(k, *words), x)

    got = mapped(bits, j, np.int32, target).view(np.uint32)
    np.testing.assert_array_equal(got, specification.random_bits(seed, b, h, i, j))


def test_loops_branches_and_variables(target: Target) -> None:
    """The sum of the even numbers below n, and the first power of 3 beyond it."""
    k = Kernel("sums", target, ("n", "y"))
    n, y = k.integer("n"), k.pointer("y", I64)
    total, power = k.variable(k.constant(I64, 0)), k.variable(k.constant(I64, 1))
    with k.loop(n) as i, k.choice(i % 2 == 0) as (even, odd):
        with even:
            total.value = total.value + i
        with odd, k.when(i == 3):
            total.value = total.value + 1000
    with k.loop_while(lambda: power.value <= n):
        power.value = power.value * 3
    y[0], y[1] = total.value, power.value
    result = np.empty(2, np.int64)
    fields = np.array([10, result.ctypes.data], np.int64)
    compiled(k)(fields.ctypes.data)
    assert result.tolist() == [1020, 27]


def test_numbers_of_loops_times_what_was_known_before(target: Target) -> None:
    """Sums and products of the numbers of nested loops, as numbers and as places in memory."""
    k = Kernel("counts", target, ("n", "width", "y", "found"))
    n, width, y = k.integer("n"), k.integer("width"), k.pointer("y", I64)
    count = k.variable(k.constant(I64, 0))

    def remember(place: Value, number: Value | int) -> None:
        y[place] = y[place] + number
        found = k.pointer("found", I64) + 2 * count.value
        found[0], found[1] = k.whole(number), place
        count.value = count.value + 1

    with k.loop(n, start=1, step=2) as i:
        inner = k.integer("width") - 1  # was not there before the outer loop
        with k.loop(n + 1, start=i - 1, step=3) as j:
            remember((i * 2 + 1) * width + j * 3 - 2, i * 3 - j)
            remember(j * inner + i + 5, (j + 2) * inner)
            (y + i * width + 1).bytes((j * 2 + 1) * 8)[3] = j - i * width
            y.bytes((j + n * 40) * 8)[i] = (1 + j) * 7
            y[(j + 2) * i + (j + 1) * (i * 2 - 1) + 600] = i * j
        with k.loop(0) as never:
            y[never - 10**6] = never
    room, size, w = np.zeros(1000, np.int64), 9, 11
    made, found = room.copy(), np.zeros((100, 2), np.int64)
    fields = np.array([size, w, made.ctypes.data, found.ctypes.data], np.int64)
    compiled(k)(fields.ctypes.data)
    expected = []
    for i in range(1, size, 2):
        for j in range(i - 1, size + 1, 3):
            places = [((i * 2 + 1) * w + j * 3 - 2, i * 3 - j), (j * (w - 1) + i + 5, (j + 2) * (w - 1))]
            for place, number in places:
                room[place] += number
                expected.append((number, place))
            room[i * w + 1 + (j * 2 + 1) + 3] = j - i * w
            room[j + size * 40 + i] = (1 + j) * 7
            room[(j + 2) * i + (j + 1) * (i * 2 - 1) + 600] = i * j
    assert found[: len(expected)].tolist() == [list(x) for x in expected]
    np.testing.assert_array_equal(made, room)


def test_tails_and_gathers(target: Target) -> None:
    k = Kernel("parts", target, ("x", "y"))
    x, y, lanes = k.pointer("x", F32), k.pointer("y", F32), target.lanes(4)
    y[0] = x.load_first(3, lanes)
    y[lanes] = x.gather(k.lane_numbers(I32, lanes).to(I64) * 2)
    source, made = np.arange(1, 2 * lanes + 1, dtype=np.float32), np.empty(2 * lanes, np.float32)
    fields = np.array([source.ctypes.data, made.ctypes.data], np.int64)
    compiled(k)(fields.ctypes.data)
    assert made[:lanes].tolist() == [1, 2, 3, *[0] * (lanes - 3)]
    assert made[lanes:].tolist() == source[::2].tolist()


def test_mistakes_are_errors() -> None:
    whole = Kernel("whole", targets()["avx512"], ("x",))
    with pytest.raises(TypeError, match=r"takes a whole vector, not 8 lanes of f32"):
        mathematics.weight2(whole, whole.constant(F32, 1).spread(8))
    k = Kernel("wrong", HERE[0], ("x",))
    x: Value = k.integer("x")
    y: Value = k.constant(F64, 1.0)
    with pytest.raises(TypeError, match="i64 meets f64: convert one of them"):
        x + y
    with pytest.raises(TypeError, match=r"use k\.when, k\.where"):
        bool(x < 3)
    with pytest.raises(TypeError, match="4 lanes meet 8"):
        y.spread(4) + y.spread(8)
    variable = k.variable(x)
    with pytest.raises(TypeError, match="a variable of i64 is set to f64"):
        variable.value = y


def test_pieces_are_woven(target: Target) -> None:
    """They do what they do one after the other; what is written alternates, in a loop that carries something too."""
    x = np.arange(12.0)
    k = Kernel("pipelined", target, ("x",))
    at = k.pointer("x", F64)
    with k.loop(4, start=2, step=2) as n:

        def double() -> None:
            for m in range(2):
                at[n + m] = at[n + m] * 2.0

        def negate() -> None:
            for m in range(4):
                at[n + m + 4] = -at[n + m + 4]

        k.interleave(double, negate)
        body = [i.opname for i in k.b.block.instructions]
    assert "".join({"fmul": "2", "fneg": "-"}.get(name, "") for name in body) == "-2--2-"
    fields = np.array([x.ctypes.data], np.int64)
    compiled(k)(fields.ctypes.data)
    np.testing.assert_array_equal(x, [0, 1, 4, 6, 4, 5, -6, -7, -8, -9, 10, 11])

    other = Kernel("branching", target, ("x",))

    def branch() -> None:
        with other.when(other.integer("x") > 0):
            pass

    with pytest.raises(ValueError, match="branches"):
        other.interleave(branch)


def test_kinds_of_types() -> None:
    kinds: dict[Any, Type] = {np.float16: F16, ml_dtypes.bfloat16: BF16, np.float32: F32, np.int64: I64}
    assert all(type_of(dtype) is type for dtype, type in kinds.items())


@pytest.mark.skipif(not HERE[0].control, reason="this processor flushes nothing")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_below_the_smallest_normal_number(dtype: Any, target: Target) -> None:
    """0 where a kernel asks for that, which it leaves as it was when it ends."""
    x, y = np.full(16, np.finfo(dtype).tiny, dtype), np.empty(16, dtype)
    for flush in (True, False):
        k = Kernel("halved", target, ("x", "y"))
        if flush:
            k.flush()
        lanes = target.lanes(x.itemsize)
        for i in range(0, 16, lanes):
            (k.pointer("y", type_of(y.dtype)) + i)[0] = k.pointer("x", type_of(x.dtype)).load(i, lanes) * 0.5
        fields = np.array([x.ctypes.data, y.ctypes.data], np.int64)
        compiled(k)(fields.ctypes.data)
        np.testing.assert_array_equal(y, np.zeros(16) if flush else x / 2)
        assert (x / 2 != 0).all()
