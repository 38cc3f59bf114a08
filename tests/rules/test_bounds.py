"""Bounds are sound for every expression, exact where that is promised, and look at few tiles."""

import gc
from collections import Counter
from itertools import pairwise
from weakref import ref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from random_rules import nodes
from regard.rules import (
    EVERYTHING,
    MIXED,
    NOTHING,
    At,
    Interval,
    Ranges,
    Table,
    alibi,
    blocks,
    bounds,
    causal,
    classify,
    dilated,
    documents,
    evaluate,
    extremes,
    global_tokens,
    interval,
    key_tiles,
    mask,
    padding,
    prefix,
    score,
    strided,
    visible_tiles,
    where,
    window,
)
from regard.rules.expression import OPS, order
from regard.rules.extremes import BLOCK, Extremes, look_up
from regard.rules.intervals import INTERVALS, intervals
from support import traced_memory

EXAMPLES = settings().max_examples // 2
SCORES = np.array([-np.inf, np.inf, np.nan, 0.0, -0.0, 1.5, -2.0, 1e-40, 3e38, -3e38, 0.3, 7.0])


@st.composite
def tiles(draw):
    def bound(most):
        least = draw(st.integers(-3, most))
        return least, least + draw(st.integers(0, 4))

    return bound(2), bound(2), bound(250), bound(250)


def place(tile, dtype, scores=None):
    b, h, i, j = (np.arange(lo, hi + 1) for lo, hi in tile)
    shape = (len(b), len(h), len(i), len(j))
    s = None if scores is None else np.resize(scores, shape).astype(dtype)
    return At(b[:, None, None, None], h[:, None, None], i[:, None], j, s=s, dtype=dtype, keys=200)


def contains(found, values):
    values = np.asarray(values)
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
        inside = (found.lo <= values) & (values <= found.hi)
        return np.all(inside | (np.isnan(values) & found.nan))
    return np.all((found.lo <= values) & (values <= found.hi))


def test_every_operation_has_an_interval():
    assert INTERVALS.keys() == OPS.keys()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(deadline=None, max_examples=EXAMPLES)
@given(node=nodes("bool", "int", "float", score=True), tile=tiles())
def test_every_value_lies_in_its_interval(dtype, node, tile):
    with np.errstate(over="ignore"):
        at = place(tile, dtype, SCORES)
    parts = order([node])
    found = intervals(parts, Ranges(*tile, keys=200, dtype=dtype))
    for part, where_, values in zip(parts, found, evaluate(parts, at), strict=True):
        assert contains(where_, values), part


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_called_nothing_or_everything_are_so(dtype):
    seen = Counter()

    @settings(deadline=None, max_examples=EXAMPLES)
    @given(nodes("bool"), tiles())
    def check(node, tile):
        (kind,) = classify(node, None, Ranges(*tile, dtype=dtype)).reshape(-1)
        (visible,) = evaluate([node], place(tile, dtype))
        seen[int(kind)] += 1
        assert kind != NOTHING or not visible.any()
        assert kind != EVERYTHING or visible.all()

    check()
    assert min(seen[kind] for kind in (NOTHING, MIXED, EVERYTHING)) >= 10


@settings(deadline=None, max_examples=EXAMPLES // 2)
@given(nodes("bool", "int", "float"), st.lists(tiles(), min_size=2, max_size=4))
def test_many_tiles_at_once(node, several):
    """Every index range varies from tile to tile, so that no axis of a table is the same for all."""
    bounds = np.array(several).transpose(1, 2, 0)
    found = interval(node, Ranges(*bounds, dtype=np.float64))
    for n, tile in enumerate(several):
        lo, hi, nan = (np.broadcast_to(end, len(several))[n] for end in found)
        assert contains(Interval(lo, hi, nan), evaluate([node], place(tile, np.float64))[0])


# Exactness


def brute(mask, rows, columns, **place):
    """What a tile of queries `rows` and keys `columns` really holds."""
    zero = np.zeros(1, np.int64)
    at = At(zero, zero, np.arange(*rows)[:, None], np.arange(*columns), **place)
    visible = np.broadcast_to(evaluate([mask.node], at)[0], (rows[1] - rows[0], columns[1] - columns[0]))
    return EVERYTHING if visible.all() else MIXED if visible.any() else NOTHING


packed = np.repeat([7, 3, 9, 1, 12], [30, 1, 64, 5, 100])
shuffled = np.random.default_rng(0).permutation(np.arange(200) // 23)

EXACT = [
    causal(),
    ~causal(),
    window(10),
    window(0, 0),
    window(37, 12),
    window(None, 5),
    window(3, None),
    prefix(17),
    prefix(np.array([45])),
    padding(np.array([101])),
    padding(np.array([33]), side="left"),
    documents(packed),
    documents(packed) & causal(),
    global_tokens(5),
    strided(1),
    strided(5),
    strided(40),
    mask(lambda b, h, i, j: 3 * i - 2 * j + 5 <= 7),
    mask(lambda b, h, i, j: i - j + i - 40 > j + b - i),
    mask(lambda b, h, i, j: -(2 * (i - j)) + i < 30 - j),
]


@pytest.mark.parametrize("shape", [(16, 16), (64, 32), (7, 48), (1, 13)])
@pytest.mark.parametrize("rule", EXACT, ids=str)
def test_the_tiles_visited_are_those_with_something_in_them(rule, shape):
    offset, n, keys = 3, 190, 200
    edges = np.append(np.arange(0, keys, shape[1]), keys)
    for first in range(0, n, shape[0]):
        rows = (first + offset, min(first + shape[0], n) + offset)
        truth = [brute(rule, rows, span, keys=keys) for span in pairwise(edges)]
        tiles, kinds = key_tiles(rule.node, None, Ranges(i=(rows[0], rows[1] - 1), keys=keys), edges)
        assert tiles.tolist() == np.flatnonzero(truth).tolist()
        if rule.text.count("&") == 0:
            assert kinds.tolist() == [kind for kind in truth if kind]


@pytest.mark.parametrize(
    "rule", [documents(shuffled), dilated(4, 3), dilated(3, 20), documents(packed) | prefix(3)], ids=str
)
def test_other_masks_visit_every_tile_with_something_in_it(rule):
    edges = np.arange(0, 201, 8)
    visited = total = 0
    for first in range(0, 200, 8):
        truth = [brute(rule, (first, first + 8), (j, j + 8)) for j in edges[:-1]]
        tiles, _ = key_tiles(rule.node, None, Ranges(i=(first, first + 7)), edges)
        assert set(np.flatnonzero(truth)) <= set(tiles.tolist())
        visited, total = visited + len(tiles), total + sum(kind != NOTHING for kind in truth)
    assert visited <= 1.25 * total


@settings(deadline=None, max_examples=EXAMPLES // 2)
@given(st.lists(st.tuples(st.sampled_from("bhij"), st.integers(-4, 4)), min_size=1, max_size=6), st.data())
def test_one_affine_comparison_is_exact(terms, data):
    constant = data.draw(st.integers(-300, 300))

    def rule(b, h, i, j):
        total = constant
        for name, c in terms:
            total = total + c * {"b": b, "h": h, "i": i, "j": j}[name]
        return data.draw(st.sampled_from([total < 0, total >= b, 2 * i <= total + j, ~(total > h - total)]))

    node, tile = mask(rule).node, data.draw(tiles())
    (visible,) = evaluate([node], place(tile, np.float64))
    truth = EVERYTHING if visible.all() else MIXED if visible.any() else NOTHING
    assert classify(node, None, Ranges(*tile)) == truth


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, i, j: i + 2**62 + 2**62 - i > 0,
        lambda b, h, i, j: i + (2**63 - 1) > i + (2**63 - 21),
        lambda b, h, i, j: (x := i | 1) * 2**61 + x * 2**61 + x * 2**61 == 0,
    ],
)
def test_sums_that_wrap_are_not_trusted(rule):
    assert not evaluate([mask(rule).node], place([(0, 0), (0, 0), (5, 9), (0, 0)], np.float64))[0].any()
    assert classify(mask(rule).node, None, Ranges(i=(5, 9))) != EVERYTHING


def test_a_sum_that_wraps_and_comes_back_is_exact():
    node = mask(lambda b, h, i, j: (i + (2**63 - 1)) - (i + (2**63 - 21)) == 20).node
    assert classify(node, None, Ranges(i=(5, 9))) == EVERYTHING
    assert evaluate([node], place([(0, 0), (0, 0), (5, 9), (0, 0)], np.float64))[0].all()


def test_long_expressions():
    tower = mask(lambda b, h, i, j: i ** (2**40) > 0).node
    assert classify(tower, None, Ranges(i=(1, 1))) == EVERYTHING

    def product(b, h, i, j):
        x = i
        for _ in range(30):
            x = x * 2**62
        return x + i != 3 * x

    (visible,) = evaluate([mask(product).node], place([(0, 0), (0, 0), (5, 9), (0, 0)], np.float64))
    assert visible.all()  # all of it wraps to 0
    assert classify(mask(product).node, None, Ranges(i=(5, 9))) != NOTHING

    def long_sum(b, h, i, j):
        total = i
        for _ in range(3000):
            total = total + j - 1
        return total >= 3000 * j

    assert classify(mask(long_sum).node, None, Ranges(i=(3000, 4000), j=(0, 99))) == EVERYTHING
    assert classify(mask(long_sum).node, None, Ranges(i=(0, 2999), j=(0, 99))) == NOTHING


INFINITY = Table(np.array([np.inf, -np.inf]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: INFINITY[0] * x,
        lambda x: x * INFINITY[1],
        lambda x: INFINITY[0] + where(x > 0, INFINITY[1], 0.0),
        lambda x: INFINITY[x.astype(int)] - INFINITY[0],
        lambda x: x / (x * x),
        lambda x: INFINITY[0] / where(x > 0, INFINITY[1], 1.0),
        np.log,
        lambda x: np.log1p(x - 1),
        np.sqrt,
        lambda x: np.sin(1 / x),
        lambda x: np.tan(1 / x),
        lambda x: np.minimum(1.0, np.log(x)),
        lambda x: where(x > 0, np.sqrt(-x), x),
        lambda x: Table(np.array([1.0, np.nan]))[x.astype(int)],
    ],
)
def test_every_way_to_nan_is_seen(function):
    def rule(b, h, i, j):
        x = function((i - j).astype(float))
        return x == x

    node, tile = mask(rule).node, ((0, 0), (0, 0), (4, 6), (4, 6))
    (visible,) = evaluate([node], place(tile, np.float64))
    assert visible.any()
    assert not visible.all()
    assert classify(node, None, Ranges(*tile)) == MIXED


def test_a_float_that_may_be_nan_may_become_the_integer_0():
    found = interval(score(lambda s, b, h, i, j: (s * 0.0 + 5.5).astype(int)).node.args[0], Ranges())
    assert (found.lo, found.hi) == (0, 5)


def test_integers_too_long_for_float32_are_rounded():
    node = score(lambda s, b, h, i, j: (i + 2**25).astype(float)).node
    narrow, wide = (interval(node, Ranges(i=(1, 1), dtype=dtype)) for dtype in (np.float32, np.float64))
    assert (narrow.lo, narrow.hi) == (2**25, 2**25)
    assert (wide.lo, wide.hi) == (2**25 + 1, 2**25 + 1)


def test_a_score_of_minus_infinity_hides_a_tile():
    far = score(lambda s, b, h, i, j: where(i - j <= 8, s, -np.inf))
    ranges = Ranges(i=(20, 23), j=(np.arange(0, 24, 4), np.arange(3, 24, 4)))
    assert classify(None, far.node, ranges).tolist() == [0, 0, 0, 2, 2, 2]
    assert classify(causal().node, far.node, ranges).tolist() == [0, 0, 0, 2, 2, 1]
    may_be_nan = score(lambda s, b, h, i, j: where(i - j <= 8, s, -np.inf) + s)
    assert classify(None, may_be_nan.node, ranges).tolist() == [2] * 6
    assert classify(None, alibi(np.array([0.5])).node, ranges).tolist() == [2] * 6
    hidden_or_nan = Table(np.array([-np.inf, np.nan]))
    assert classify(None, score(lambda s, b, h, i, j: hidden_or_nan[j % 2]).node, ranges).tolist() == [2] * 6
    assert classify(None, score(lambda s, b, h, i, j: hidden_or_nan[0]).node, ranges).tolist() == [2] * 6


def test_a_rule_that_reads_the_number_of_keys_asks_for_it():
    with pytest.raises(ValueError, match="keys"):
        interval(padding(3, side="left").node, Ranges())


# Work and memory


def classified(monkeypatch, rule, ranges, edges):
    """The tiles that `key_tiles` finds, and how many intervals of keys it looked at."""
    looked = []
    monkeypatch.setattr(
        bounds, "classify", lambda mask, score, r: looked.append(np.size(r.j[0])) or classify(mask, score, r)
    )
    found, _ = key_tiles(rule.node, None, ranges, edges)
    return found, sum(looked)


@pytest.mark.parametrize(
    ("rule", "visible"),
    [(window(256), 5), (causal(), 8193), (prefix(64), 1), (documents(np.arange(2**20) // 256), 4)],
    ids=str,
)
def test_key_tiles_looks_at_what_is_visible_and_little_else(monkeypatch, rule, visible):
    n, size, i = 2**20, 64, 2**19
    found, looked = classified(monkeypatch, rule, Ranges(i=(i, i + 63)), np.arange(0, n + 1, size))
    assert len(found) == visible
    assert looked <= 2 * bounds.BRANCH * np.ceil(np.log(n / size) / np.log(bounds.BRANCH))


def test_key_tiles_agrees_with_looking_at_each_tile():
    rule = documents(packed) & window(40, 3) | prefix(2)
    edges = np.unique(np.random.default_rng(1).integers(1, 200, 60))
    edges = np.concatenate([[0], edges, [200]])
    for i in range(0, 200, 9):
        every = classify(rule.node, None, Ranges(i=(i, i + 8), j=(edges[:-1], edges[1:] - 1)))
        found, kinds = key_tiles(rule.node, None, Ranges(i=(i, i + 8)), edges)
        assert found.tolist() == np.flatnonzero(every).tolist()
        assert kinds.tolist() == every[every != NOTHING].tolist()


@pytest.mark.parametrize("operation", [lambda i, j: i - j, lambda i, j: i * j, lambda i, j: -i])
def test_what_is_remembered_of_an_expression_goes_with_it(operation):
    def look():
        node = mask(lambda b, h, i, j: operation(i, j) + 12345 > j).node
        classify(node, None, Ranges())
        return ref(node), ref(node.args[1])

    gone = look()
    gc.collect()
    assert [node() for node in gone] == [None, None]


@pytest.mark.parametrize(
    "rule", [causal(), documents(packed) & window(40, 3), blocks(np.eye(25, 40, 3, bool), 8)], ids=str
)
def test_many_tiles_of_queries_are_as_each_alone(rule):
    low = np.array([0, 16, 90, 120, 190])
    high = low + np.array([15, 40, 9, 0, 9])
    edges = np.append(np.arange(0, 200, 9), 200)
    row, tile, kinds = visible_tiles(rule.node, None, Ranges(i=(low, high)), edges)
    for n in range(len(low)):
        found, kinds_alone = key_tiles(rule.node, None, Ranges(i=(low[n], high[n])), edges)
        assert tile[row == n].tolist() == found.tolist()
        assert kinds[row == n].tolist() == kinds_alone.tolist()


def same_as_each_alone(rule, scores, seed):
    """Compare query tiles of random batch elements, heads and queries with `key_tiles` of each."""
    random = np.random.default_rng(seed)
    b, h = random.integers(0, 3, (2, 12))
    low = random.integers(-3, 220, 12)
    i = low, low + random.integers(0, 70, 12)
    places = (b, b), (h, h + random.integers(0, 2, 12)), i
    edges = np.append(np.arange(0, 200, 7), 200)
    row, tile, kinds = visible_tiles(rule, scores, Ranges(*places, keys=200), edges)
    for n in range(12):
        one = Ranges(*((int(first[n]), int(last[n])) for first, last in places), keys=200)
        found, kinds_alone = key_tiles(rule, scores, one, edges)
        assert tile[row == n].tolist() == found.tolist()
        assert kinds[row == n].tolist() == kinds_alone.tolist()


@settings(deadline=None, max_examples=EXAMPLES // 2)
@given(nodes("bool"), nodes("float", score=True), st.integers(0, 2**32 - 1))
def test_query_tiles_of_a_batch_are_as_each_alone(rule, scores, seed):
    same_as_each_alone(rule, scores, seed)


@pytest.mark.parametrize(
    "rule",
    [
        documents(np.sort(np.random.default_rng(2).integers(0, 5, (3, 300)), axis=1)),
        padding(np.array([200, 0, 77])),
        blocks(np.random.default_rng(3).random((3, 4, 38, 38)) < 0.3, 8),
        mask(lambda b, h, i, j: i - j < 40 * b + 20 * h),
        mask(lambda b, h, i, j: j >= 60 * h),
    ],
    ids=str,
)
def test_query_tiles_of_rules_that_read_batch_and_head(rule):
    for seed in range(5):
        same_as_each_alone(rule.node, None, seed)


def test_no_keys():
    found, kinds = key_tiles(causal().node, None, Ranges(i=(0, 3)), np.array([0]))
    assert found.shape == kinds.shape == (0,)


def test_memory_grows_with_the_table_alone():
    n = 2**19
    rule = documents(np.arange(n) // 1000)
    edges = np.arange(0, n + 1, 64)
    with traced_memory() as held:
        for i in range(0, n, n // 8):
            key_tiles(rule.node, None, Ranges(i=(i, i + 63)), edges)
        kept, peak = held()
    table = n * 8
    assert kept <= table / 2
    assert peak <= table


def test_a_summary_goes_with_its_table():
    def look_up():
        table = Table(np.arange(5))
        rule = mask(lambda b, h, i, j: table[j] > 2)
        assert classify(rule.node, None, Ranges(j=(3, 4))) == EVERYTHING
        return ref(table)

    gone = look_up()
    gc.collect()
    assert gone() is None


@settings(deadline=None, max_examples=EXAMPLES // 4)
@given(st.integers(1, 1500), st.integers(1, 3), st.booleans(), st.integers(0, 2**32 - 1))
def test_extremes_of_spans(m, r, joined, seed):
    random = np.random.default_rng(seed)
    rows = random.normal(size=(r, m))
    rows[random.random(rows.shape) < 0.02] = np.nan
    first = random.integers(0, m, 40)
    last = np.minimum(first + random.integers(0, random.choice([4, BLOCK, m]) + 1, 40), m - 1)
    row = np.zeros(40, int) if joined else random.integers(0, r, 40)
    lo, hi = Extremes(rows, joined).between(row, first, last)
    for number, a, z, least, most in zip(row, first, last, lo, hi, strict=True):
        seen = rows[slice(None) if joined else number, a : z + 1]
        seen = seen[~np.isnan(seen)]
        expected = (seen.min(), seen.max()) if seen.size else (np.nan, np.nan)
        np.testing.assert_equal((least, most), expected)


@pytest.mark.parametrize("rows", [0, 1, extremes.ROWS])
def test_boxes_of_a_table(rows, monkeypatch):
    """However many rows a box has, and more boxes than are read at once."""
    monkeypatch.setattr(extremes, "ROWS", rows)
    monkeypatch.setattr(extremes, "ENTRIES", 2**12)
    random = np.random.default_rng(7)
    numbers = random.normal(size=(3, 300, 4)).astype(np.float32)
    numbers[random.random(numbers.shape) < 0.001] = np.nan
    for most in (1, 2, 3):
        first = [random.integers(0, n, 500) for n in numbers.shape]
        boxes = [
            (x, np.minimum(x + random.integers(0, m, 500), n - 1))
            for x, m, n in zip(first, (1, 150, most), numbers.shape, strict=True)
        ]
        lo, hi = look_up(Table(numbers), boxes)
        for k in range(500):
            seen = numbers[tuple(slice(a[k], z[k] + 1) for a, z in boxes)]
            seen = seen[~np.isnan(seen)]
            np.testing.assert_equal((lo[k], hi[k]), (seen.min(), seen.max()) if seen.size else (np.nan, np.nan))


def test_summaries_of_a_table_take_no_more_than_itself():
    table = Table(np.arange(2**20).reshape(4, 2**9, 2**9))
    for n in range(2**11):
        extremes.extremes(table, 2, ((0, n // 2**9), (n % 2**9, 2**9 - 1), (0, 2**9 - 1)))
    kept = extremes._summaries[table].values()
    assert len(kept) >= 2
    assert table.array.nbytes / 2 <= sum(x.nbytes for x in kept) <= table.array.nbytes


def test_a_table_is_read_at_the_heads_of_the_tile_alone():
    table = Table(np.array([[0] * 300, [1] * 300]))
    rule = mask(lambda b, h, i, j: table[h, j] > 0)
    spans = np.array([0, 290]), np.array([200, 299])
    assert classify(rule.node, None, Ranges(h=(0, 0), j=spans)).tolist() == [NOTHING, NOTHING]
    assert classify(rule.node, None, Ranges(h=(1, 1), j=spans)).tolist() == [EVERYTHING, EVERYTHING]
    assert classify(rule.node, None, Ranges(h=(0, 1), j=spans)).tolist() == [MIXED, MIXED]


def test_a_table_is_read_at_the_keys_of_each_tile_whichever_axis_they_are():
    late = Table(np.arange(300)[:, None] >= [250, 150])
    rule = mask(lambda b, h, i, j: late[j, h])
    spans = np.array([0, 100, 200]), np.array([99, 199, 299])
    assert classify(rule.node, None, Ranges(h=(1, 1), j=spans)).tolist() == [NOTHING, MIXED, EVERYTHING]


def test_every_block_of_a_block_mask_is_known_for_many_tiles_at_once():
    flags = np.random.default_rng(4).random((2, 50, 70)) < 0.3
    first_i, first_j = 16 * np.arange(50)[:, None], 16 * np.arange(70)
    for h in range(2):
        ranges = Ranges(h=(h, h), i=(first_i, first_i + 15), j=(first_j, first_j + 15))
        assert (classify(blocks(flags, 16).node, None, ranges) == np.where(flags[h], EVERYTHING, NOTHING)).all()
        twice = Ranges(h=(h, h), i=(first_i[::2], first_i[::2] + 31), j=(first_j, first_j + 15))
        pairs = flags[h, ::2].astype(int) + flags[h, 1::2]
        assert (classify(blocks(flags, 16).node, None, twice) == pairs).all()
