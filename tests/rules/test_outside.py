"""Tables with bounds="raise": refused exactly where a lookup that matters leaves its table, before any work."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import regard
from regard.engines import cpu, tiled
from regard.ops.normalization import problem_from

H, D = 2, 4
WIDE = np.random.default_rng(0).random((H, 64))


def raising(*shape: int, dtype: Any = np.float64) -> Any:
    return regard.table(np.ones(shape, dtype), bounds="raise")


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (cpu, tiled):
        monkeypatch.setattr(engine, "forward", lambda *args: pytest.fail("work was done before the check"))


def accepted(n_q: int, n_k: int, lead: tuple[int, ...] = (), **options: Any) -> bool:
    """Whether a call of zeros is accepted; anything but the error in question is none of its business."""
    q, k = np.zeros((*lead, H, n_q, D)), np.zeros((*lead, H, n_k, D))
    try:
        problem_from(q, k, k, **options)
    except ValueError as error:
        if "with bounds='raise': axis" not in str(error):
            raise
        return False
    return True


Place = tuple[int, int, int, int]
# A score rule over a table of so many entries; the entries that it reads, and where.
READS: dict[str, tuple[Callable[..., Any], Callable[[Place, int], Iterator[int]]]] = {
    "i - j": (lambda t, s, b, h, i, j: s + t[i - j], lambda at, n: iter([at[2] - at[3]])),
    "j - i + n // 2": (lambda t, s, b, h, i, j: s + t[j - i + 5], lambda at, n: iter([at[3] - at[2] + 5])),
    "|i - j|": (lambda t, s, b, h, i, j: s + t[abs(i - j)], lambda at, n: iter([abs(at[2] - at[3])])),
    "clipped": (
        lambda t, s, b, h, i, j: s + t[np.clip(i - j, 0, 3)],
        lambda at, n: iter([min(max(at[2] - at[3], 0), 3)]),
    ),
    "modulo": (lambda t, s, b, h, i, j: s + t[(i * 7 + j) % 9], lambda at, n: iter([(at[2] * 7 + at[3]) % 9])),
    "product": (lambda t, s, b, h, i, j: s + t[(i * j) // 4], lambda at, n: iter([at[2] * at[3] // 4])),
    "b and h": (lambda t, s, b, h, i, j: s + t[3 * b + h], lambda at, n: iter([3 * at[0] + at[1]])),
    "where": (
        lambda t, s, b, h, i, j: regard.where(i >= j, s + t[i - j], s),
        lambda at, n: iter([at[2] - at[3]] if at[2] >= at[3] else []),
    ),
    "where not": (
        lambda t, s, b, h, i, j: regard.where(i < j, s, regard.where(i - j < 6, t[i - j], s)),
        lambda at, n: iter([at[2] - at[3]] if 0 <= at[2] - at[3] < 6 else []),
    ),
    "read twice": (
        lambda t, s, b, h, i, j: s + regard.where(i > j, t[i - j - 1], t[i - j]),
        lambda at, n: iter([at[2] - at[3] - (at[2] > at[3])]),
    ),
}  # fmt: skip
MASKS: dict[str, tuple[Any, Callable[[Place], bool]]] = {
    "none": (None, lambda at: True),
    "causal": (regard.causal(), lambda at: at[3] <= at[2]),
    "window": (regard.window(2, 1), lambda at: -1 <= at[2] - at[3] <= 2),
    "prefix by batch": (regard.prefix([3, 5]), lambda at: at[3] < (3, 5)[at[0]]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", READS)
def test_refused_where_a_lookup_leaves_its_table(name: str, mask: str) -> None:
    rule, entries = READS[name]
    hidden, visible = MASKS[mask]
    outcomes = set()
    for (n_q, n_k), length, offsets in itertools.product(
        ((1, 1), (7, 7), (3, 20), (22, 4)), (1, 7, 12, 25), (None, [2, 9])
    ):
        table = raising(length)
        options: dict[str, Any] = {} if offsets is None else {"offset": np.array(offsets)}
        first = [n_k - n_q] * 2 if offsets is None else [offsets] * 2 if isinstance(offsets, int) else offsets
        places = (
            (b, h, i, j)
            for b, h, r, j in itertools.product(range(2), range(H), range(n_q), range(n_k))
            for i in [r + first[b]]
        )
        expected = all(0 <= x < length for at in places if visible(at) for x in entries(at, n_q))
        found = accepted(
            n_q, n_k, (2,), mask=hidden, score=lambda s, b, h, i, j, t=table: rule(t, s, b, h, i, j), **options
        )
        assert found == expected, (n_q, n_k, length, offsets)
        outcomes.add(found)
    assert False in outcomes


@pytest.mark.parametrize("shape", [(30, 30), (H, 30, 30), (3, 1, 30, 30)])
def test_a_dense_mask_hides_lookups(shape: tuple[int, ...]) -> None:
    flags = np.zeros(shape, bool)
    flags[...] = np.tril(np.ones((30, 30), bool))
    table = raising(30)

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[i - j]

    assert accepted(30, 30, (3,), mask=flags, score=rule)
    flags[..., 4, 5] = True
    assert not accepted(30, 30, (3,), mask=flags, score=rule)
    assert accepted(30, 30, (3,), mask=flags, score=rule, offset=1) is False


def test_masks_read_as_python_does() -> None:
    seen = raising(8, dtype=bool)
    guarded = regard.mask(lambda b, h, i, j: (i >= j) & seen[i - j])
    assert accepted(8, 8, mask=guarded)
    assert accepted(8, 8, mask=regard.mask(lambda b, h, i, j: (i < j) | seen[i - j]))
    assert accepted(8, 8, mask=regard.mask(lambda b, h, i, j: seen[i - j]), causal=True)
    assert accepted(8, 8, mask=regard.causal() & (lambda b, h, i, j: seen[i - j]))
    assert not accepted(8, 8, mask=regard.mask(lambda b, h, i, j: seen[i - j] & (i >= j)))
    assert not accepted(8, 8, mask=regard.mask(lambda b, h, i, j: seen[i - j]) & regard.causal())
    assert not accepted(9, 9, mask=guarded)


def test_a_shard_reads_at_its_own_places() -> None:
    table = raising(2, 20)

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[b, j]

    assert accepted(4, 10, (2,), score=rule)
    assert accepted(4, 10, (1,), score=rule, origin=(1, 0, 10))
    assert not accepted(4, 10, (1,), score=rule, origin=(1, 0, 11))
    assert not accepted(4, 10, (1,), score=rule, origin=(2, 0, 0))


def test_large_calls_are_checked_where_bounds_can_tell() -> None:
    shape, table = (H, 2**40, D), raising(64)
    for rule in (
        lambda s, b, h, i, j: s + table[np.clip(i - j, 0, 63)],
        lambda s, b, h, i, j: regard.where((i - j >= 0) & (i - j < 64), s + table[i % 64], s),
    ):
        problem(shape, rule)
    with pytest.raises(ValueError, match=r"axis 0 is read at 64, outside of 0 to 63, for b = 0, h = 0, i = 64, j = 0"):
        problem((H, 65, D), lambda s, b, h, i, j: s + table[i])


def problem(shape: tuple[int, ...], rule: Any) -> Any:
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0,) * len(shape), writeable=False)
    return problem_from(x, x, x, score=rule)


def test_what_cannot_be_known_is_said() -> None:
    table = raising(8)
    q = np.zeros((H, 8, D))
    with pytest.raises(TypeError) as raised:
        regard.attention(q, q, q, score=lambda s, b, h, i, j: s + table[s.astype(int)])
    assert str(raised.value) == (
        "score(<lambda>), which looks up a table of shape (8,), float64 with bounds='raise': its index depends on "
        "values that are not known before the call; give bounds='clamp', or keep the index inside with np.clip"
    )
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        regard.attention(q, q, q, score=lambda s, b, h, i, j: s + table[i - j])
    assert str(refused.value) == (
        "score(<lambda>), which looks up a table of shape (8,), float64 with bounds='raise': axis 0 is read at -1, "
        "outside of 0 to 7, for b = 0, h = 0, i = 0, j = 1"
    )
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1, 2**22, 4), (0, 0, 0), writeable=False)
    wide = raising(2**22)
    with pytest.raises(ValueError, match=r"this call is too large to find out whether its index leaves the table"):
        regard.attention(x, x, x, causal=True, score=lambda s, b, h, i, j: s + wide[i - j])


Q5, K9 = np.zeros((H, 5, D)), np.zeros((H, 9, D))
BY_QUERY: dict[str, Callable[..., dict[str, Any]]] = {
    "score": lambda t: {"score": lambda s, b, h, i, j: s + t(5)[i]},
    "mask": lambda t: {"mask": lambda b, h, i, j: t(5)[i] > 0},
    "row": lambda t: {"score": lambda s, b, h, i, j: s + t(5, 3)[i].sum()},
    "second axis": lambda t: {"score": lambda s, b, h, i, j: s + t(H, 5)[h, i]},
    "statistic": lambda t: {"observe": [regard.mass(lambda b, h, i, j: t(5)[i] > 0)]},
    "by query and key": lambda t: {"score": lambda s, b, h, i, j: s + t(5, 9)[i, j]},
    "hidden rows": lambda t: {"score": lambda s, b, h, i, j: s + t(5)[i], "causal": True},
}


@pytest.mark.parametrize("name", BY_QUERY)
def test_a_table_with_an_entry_for_each_query(name: str) -> None:
    def table(bounds: Any) -> Callable[..., Any]:
        return lambda *shape: regard.table(np.ones(shape), bounds=bounds)

    options = BY_QUERY[name]
    for q, k in ((Q5, K9), (Q5, K9[:, :3])):
        with pytest.raises(ValueError, match=r"but it has an entry for each of the 5 rows: give offset=0, .*'clamp'\)"):
            problem_from(q, k, k, **options(table(None)))
        for cured in ({**options(table(None)), "offset": 0}, options(table("clamp"))):
            problem_from(q, k, k, **cured)
    problem_from(Q5, Q5, Q5, **options(table(None)))
    problem_from(Q5, K9[:, :0], K9[:, :0], **options(table(None)))


@pytest.mark.parametrize(
    "rule",
    [
        lambda t, s, b, h, i, j: s + t(9)[i],  # an entry for each key
        lambda t, s, b, h, i, j: s + t(5)[j],
        lambda t, s, b, h, i, j: s + t(5)[i - j],
        lambda t, s, b, h, i, j: s + t(5)[i - 4],
        lambda t, s, b, h, i, j: s + t(1)[i],
        lambda t, s, b, h, i, j: s + t(H, 5)[h, np.clip(i, 0, 4)],
    ],
)
def test_other_tables_clamp(rule: Any) -> None:
    score = regard.score(lambda *x: rule(lambda *shape: regard.table(np.ones(shape)), *x))
    problem_from(Q5, K9, K9, score=score)
    problem_from(Q5[:, :1], K9, K9, score=score)  # a step of decode
    problem_from(Q5[:, :4], K9, K9, score=score, origin=(0, 0, 1000))


def test_the_text_for_a_table_with_an_entry_for_each_query() -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        problem_from(Q5, K9, K9, score=lambda s, b, h, i, j: s + regard.table(np.ones(5))[i])
    assert str(refused.value) == (
        "score(<lambda>) reads axis 0 of a table of shape (5,), float64 at i, which is row + n_k - n_q = row + 4, but "
        "it has an entry for each of the 5 rows: give offset=0, by which i is the row, or table(..., bounds='clamp') "
        "to read its nearest entry"
    )


LONGER: dict[str, dict[str, Any]] = {
    "padding": {"mask": regard.padding([4, 6, 5, 5])},
    "prefix": {"mask": regard.causal() & regard.prefix([4, 6, 5, 5])},
    "documents": {"mask": regard.documents(np.zeros((4, 5), int))},
    "blocks by batch": {"mask": ~regard.blocks(np.ones((4, 1, 1, 1), bool), 5)},
    "blocks by head": {"mask": regard.blocks(np.ones((3, 1, 1), bool), 5)},
    "alibi by head": {"score": regard.alibi(np.ones(3))},
    "alibi by batch": {"score": regard.alibi(np.ones((4, 2)))},
    "softcap": {"score": [regard.temperature(2.0), regard.softcap(np.ones(3))]},
    "temperature": {"score": regard.temperature(np.ones(3))},
    "relative": {"score": regard.relative(np.ones((3, 9)))},
    "statistic": {"observe": [regard.mass(regard.padding([4, 6, 5, 5]))]},
    "table by head": {"score": lambda s, b, h, i, j: s + regard.table(WIDE[:, :3].T)[h, i - j]},
    "table by batch": {"mask": lambda b, h, i, j: regard.table(np.ones((4, 2)))[b].sum() > 0},
}


@pytest.mark.parametrize("name", LONGER)
def test_a_table_that_is_longer_than_a_whole_call(name: str) -> None:
    """Leading dimensions (3,) and (3, 1) are 3 batch elements; 4 or 3 heads belong to a larger call."""
    options, q, k = LONGER[name], np.zeros((3, H, 5, D)), np.zeros((1, H, 5, D))
    for query, key in ((q, q), (q[:, None], k), (k, q)):
        with pytest.raises(ValueError, match=r"but this call ends at .*, and no origin= places it in a larger one"):
            problem_from(query, key, key, **options)
        problem_from(query, key, key, **options, origin=(0, 0, 0))


def test_tables_that_no_call_is_shorter_than() -> None:
    q = np.zeros((3, H, 5, D))
    problem_from(q, q, q, mask=regard.padding([4]) & regard.documents(np.zeros((1, 5), int)), score=regard.alibi([1.0]))
    clamped = regard.table(np.ones((9, 9)), bounds="clamp")
    problem_from(q[:0], q[:0], q[:0], mask=regard.padding([4, 6]))
    problem_from(q, q, q, score=lambda s, b, h, i, j: s + clamped[b, h] + regard.table(np.ones(9))[b * H + h])


def test_the_option() -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        regard.table([1.0], bounds="wrap")  # type: ignore[arg-type]
    assert str(raised.value) == "bounds of table must be 'clamp', 'raise' or None, got 'wrap'"
    table = raising(3)
    assert pickle.loads(pickle.dumps(table)).bounds == "raise"
    assert regard.table([1.0]).bounds == regard.Table([1.0]).bounds is None
    assert accepted(8, 8, score=lambda s, b, h, i, j: s + regard.table(WIDE)[h, i - j])
