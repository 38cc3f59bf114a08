"""Each mask against its definition as a loop, its text and drawing, its composition, and its arguments."""

import copy

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.core.statistics import mass
from regard.rules import (
    At,
    Mask,
    Requirement,
    as_mask,
    blocks,
    causal,
    dilated,
    documents,
    evaluate,
    global_tokens,
    mask,
    padding,
    prefix,
    strided,
    window,
)

N, KEYS = 7, 9
FLAGS = np.random.default_rng(2).random((2, 3, 4, 5)) < 0.5
IDS = np.array([[4, 4, 4, -1, -1, 8, 8, 8, 4], [1, 2, 1, 2, 3, 3, 3, 3, 3]])
KEY_IDS = np.array([[8, 4, 4, -1, 9], [3, 3, 2, 1, 1]])


def matrix(rule, n=N, keys=KEYS, offset=KEYS - N, batch=2, heads=3):
    """The mask as booleans (b, h, i, j)."""
    b, h, i, j = np.arange(batch), np.arange(heads), np.arange(n) + offset, np.arange(keys)
    at = At(b[:, None, None, None], h[:, None, None], i[:, None], j, keys=keys, dense=lambda x: x)
    return np.broadcast_to(evaluate([as_mask(rule).node], at)[0], (batch, heads, n, keys))


def loop(definition, n=N, keys=KEYS, offset=KEYS - N, batch=2, heads=3):
    return np.array(
        [
            [[[bool(definition(b, h, i + offset, j)) for j in range(keys)] for i in range(n)] for h in range(heads)]
            for b in range(batch)
        ]
    )


CASES = [
    (causal(), lambda b, h, i, j: j <= i, "causal()"),
    (window(2), lambda b, h, i, j: i - 2 <= j <= i, "window(2)"),
    (window(1, 3), lambda b, h, i, j: i - 1 <= j <= i + 3, "window(1, 3)"),
    (window(None, 1), lambda b, h, i, j: j <= i + 1, "window(None, 1)"),
    (window(2, None), lambda b, h, i, j: i - 2 <= j, "window(2, None)"),
    (window(None, None), lambda b, h, i, j: True, "window(None, None)"),
    (window(0, 0), lambda b, h, i, j: i == j, "window(0)"),
    (prefix(4), lambda b, h, i, j: j < 4, "prefix(4)"),
    (prefix([4, 1]), lambda b, h, i, j: j < (4, 1)[b], "prefix(array of shape (2,))"),
    (padding(6), lambda b, h, i, j: j < 6, "padding(6)"),
    (padding(np.array([0, 9])), lambda b, h, i, j: j < (0, 9)[b], "padding(array of shape (2,))"),
    (
        padding(np.array([[2], [9]], np.uint8), side="left"),
        lambda b, h, i, j: j >= KEYS - (2, 9)[b],
        "padding(array of shape (2, 1), side='left')",
    ),
    (documents(IDS[0]), lambda b, h, i, j: IDS[0, i] == IDS[0, j], "documents(array of shape (9,))"),
    (documents(IDS), lambda b, h, i, j: IDS[b, i] == IDS[b, j], "documents(array of shape (2, 9))"),
    (strided(3), lambda b, h, i, j: (i - j) % 3 == 0, "strided(3)"),
    (dilated(2, 3), lambda b, h, i, j: i - j in (0, 3, 6), "dilated(2, 3)"),
    (dilated(0, 1), lambda b, h, i, j: i == j, "dilated(0, 1)"),
    (global_tokens(2), lambda b, h, i, j: i < 2 or j < 2, "global_tokens(2)"),
    (
        blocks(FLAGS[0, 0], 2),
        lambda b, h, i, j: FLAGS[0, 0, min(i // 2, 3), j // 2],
        "blocks(array of shape (4, 5), 2)",
    ),
    (
        blocks(FLAGS[0].astype(int), 3),
        lambda b, h, i, j: FLAGS[0, h, i // 3, j // 3],
        "blocks(array of shape (3, 4, 5), 3)",
    ),
    (blocks(FLAGS, 4), lambda b, h, i, j: FLAGS[b, h, i // 4, j // 4], "blocks(array of shape (2, 3, 4, 5), 4)"),
    (mask(lambda b, h, i, j: i + h > j + b), lambda b, h, i, j: i + h > j + b, "mask(<lambda>)"),
    (~causal(), lambda b, h, i, j: j > i, "~causal()"),
    (
        causal() & window(3) | prefix(2),
        lambda b, h, i, j: i - 3 <= j <= i or j < 2,
        "causal() & window(3) | prefix(2)",
    ),
    (
        causal() & (window(3) | prefix(2)),
        lambda b, h, i, j: j <= i and (i - 3 <= j <= i or j < 2),
        "causal() & (window(3) | prefix(2))",
    ),
    (~(causal() & prefix(4)), lambda b, h, i, j: not (j <= i and j < 4), "~(causal() & prefix(4))"),
    (~~strided(2) & ~prefix(1), lambda b, h, i, j: (i - j) % 2 == 0 and j > 0, "~~strided(2) & ~prefix(1)"),
]


@pytest.mark.parametrize(("rule", "definition", "text"), CASES, ids=[text for _, _, text in CASES])
def test_masks_are_what_they_say(rule, definition, text):
    np.testing.assert_array_equal(matrix(rule), loop(definition))
    assert str(rule) == repr(rule) == text


def test_documents_of_queries_and_keys():
    found = matrix(documents(IDS, KEY_IDS), n=9, keys=5, offset=0)
    np.testing.assert_array_equal(found, loop(lambda b, h, i, j: IDS[b, i] == KEY_IDS[b, j], 9, 5, 0))


def test_documents_are_numbered_in_order_of_appearance():
    (table,) = {part.payload for part in documents([9, 9, 2, 2, 2, 9, 0]).node.args}
    assert table.array.tolist() == [[0, 0, 1, 1, 1, 0, 2]]


def test_arrays_are_masks():
    flags = FLAGS[0, :, :, :][:, :3, :4]
    ones = flags.astype(np.uint8)
    for combined in (flags & causal(), causal() & flags, causal() & ones, as_mask(ones) & causal()):
        assert isinstance(combined, Mask)
        np.testing.assert_array_equal(
            matrix(combined, 3, 4, 1), loop(lambda b, h, i, j: flags[h, i - 1, j] and j <= i, 3, 4, 1)
        )
    assert str(flags | causal()) == "array of shape (3, 3, 4) | causal()"
    assert as_mask(flags).dense[0] is flags  # a call reads it and forgets it
    assert causal().dense == ()


@pytest.mark.parametrize(
    "made",
    [mask, lambda flags: flags & causal(), lambda flags: causal() | flags, lambda flags: mass(flags).of],
    ids=["mask", "array & mask", "mask | array", "mass"],
)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[::-1, ::2], lambda x: x.view(np.uint8)])
def test_a_mask_stays_what_it_was_when_its_array_changes(made, view):
    flags = np.random.default_rng(0).random((4, 8)) < 0.5
    rule = made(view(flags))
    shape = view(flags).shape
    before = matrix(rule, *shape, 1).copy()
    np.logical_not(flags, out=flags)
    np.testing.assert_array_equal(matrix(rule, *shape, 1), before)
    assert not rule.dense[0].flags.writeable
    assert not np.array_equal(matrix(made(view(flags)), *shape, 1), before)


@pytest.mark.parametrize("engine", ["cpu", "tiled", "spec"])
@pytest.mark.parametrize("causally", [False, True])
def test_a_call_reads_its_mask_array_each_time(engine, causally):
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((2, 2, 8, 4))
    flags = np.ones((8, 8), bool)
    frozen = regard.mask(flags)

    def out(mask):
        return regard.attention(q, q, v, mask=mask, causal=causally, engine=engine)

    whole, of_rule = out(flags), out(frozen)
    flags[:, 1:] = False
    np.testing.assert_array_equal(out(flags), np.broadcast_to(v[:, :1], v.shape))
    np.testing.assert_array_equal(out(frozen), of_rule)
    np.testing.assert_array_equal(whole, of_rule)


def test_functions_are_masks():
    rule = causal() & (lambda b, h, i, j: i - j < 3)
    np.testing.assert_array_equal(matrix(rule), loop(lambda b, h, i, j: 0 <= i - j < 3))

    @mask
    def near(b, h, i, j):
        return abs(i - j) < 2

    assert str(near) == "mask(near)"


def test_masks_have_no_truth_value():
    for branch in (lambda: causal() and window(1), lambda: causal() or window(1), lambda: not causal()):
        with pytest.raises(TypeError, match=r"no truth value; combine masks with & \| ~ instead of and, or, not"):
            branch()


def test_masks_are_frozen_values():
    rule = causal()
    with pytest.raises(AttributeError):
        rule.text = "other"
    assert rule == rule
    assert rule != causal()
    assert len({rule, causal()}) == 2
    np.testing.assert_array_equal(matrix(copy.deepcopy(documents(IDS))), matrix(documents(IDS)))


def test_drawing():
    assert causal().show(3) == "█ · ·\n█ █ ·\n█ █ █"
    assert repr(causal().show(2)) == "█ ·\n█ █"
    assert causal().show(2, 4) == "█ █ █ ·\n█ █ █ █"
    assert window(None, None).show(1, 3) == "█ █ █"
    assert as_mask(np.array([[[True, False]], [[False, False]]])).show(1, 2) == "█ ·"
    assert padding(2, side="left").show(1, 3) == "· █ █"
    assert causal().show(0) == ""
    with pytest.raises(ValueError, match=r"an array of shape \(2, 2\), which does not cover 3 by 3"):
        as_mask(np.ones((2, 2), bool)).show(3)
    with pytest.raises(
        ValueError, match="ids of documents covers query index 0 to 8, but this call reaches query index 9"
    ):
        documents(IDS).show(10)


def test_requirements():
    assert documents(IDS, KEY_IDS).requires == (
        Requirement("documents", "ids", "b", 2),
        Requirement("documents", "ids", "i", 9),
        Requirement("documents", "key_ids", "j", 5),
    )
    assert padding([1, 2, 3]).requires == (Requirement("padding", "lengths", "b", 3),)
    assert blocks(FLAGS[0], 2).requires == (
        Requirement("blocks", "table", "h", 3),
        Requirement("blocks", "table", "i", 8),
        Requirement("blocks", "table", "j", 10),
    )
    assert (causal() & ~prefix([1, 2])).requires == (Requirement("prefix", "length", "b", 2),)
    need = Requirement("documents", "ids", "j", 5)
    need.check(0, 5)
    need.check(7, 7)
    for low, high, reached in ((0, 6, 5), (-1, 3, -1)):
        with pytest.raises(ValueError, match=f"covers key index 0 to 4, but this call reaches key index {reached}"):
            need.check(low, high)
    Requirement("padding", "lengths", "b", 1).check(0, 6)
    with pytest.raises(ValueError, match="head 0 to 1, but this call reaches head 2"):
        Requirement("blocks", "table", "h", 2).check(0, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: window(-1), ValueError, "left of window must be at least 0, got -1"),
        (lambda: window(1, -2), ValueError, "right of window must be at least 0, got -2"),
        (lambda: window(1.5), TypeError, "left of window must be an integer, got 1.5"),
        (lambda: window(True), TypeError, "left of window must be an integer, got True"),
        (lambda: window(2**63), ValueError, "left of window must be below"),
        (lambda: prefix(-1), ValueError, "length of prefix must be at least 0, got -1"),
        (lambda: prefix(float("nan")), TypeError, "length of prefix must be an integer, got nan"),
        (lambda: padding([3, -1]), ValueError, "lengths of padding must be at least 0, got -1"),
        (lambda: padding([3.0, 1.0]), TypeError, "lengths of padding must be integers, got float64"),
        (lambda: padding(3, side="up"), ValueError, "side of padding must be 'right' or 'left', got 'up'"),
        (lambda: documents([1.0, 2.0]), TypeError, "ids of documents must be integers, got float64"),
        (lambda: documents([1], [0.5]), TypeError, "key_ids of documents must be integers, got float64"),
        (
            lambda: documents(3),
            ValueError,
            r"ids of documents must be \(n,\) or \(..., n\) and not empty, got shape \(\)",
        ),
        (
            lambda: documents(IDS, KEY_IDS[:1]),
            ValueError,
            "ids and key_ids of documents differ in leading size: 2 and 1",
        ),
        (lambda: strided(0), ValueError, "step of strided must be at least 1, got 0"),
        (lambda: dilated(-1, 2), ValueError, "left of dilated must be at least 0, got -1"),
        (lambda: dilated(1, 0), ValueError, "step of dilated must be at least 1, got 0"),
        (lambda: blocks(np.ones(3, bool), 2), ValueError, "table of blocks must have 2, 3 or 4 dimensions, got shape"),
        (lambda: blocks(np.full((2, 2), 3), 2), ValueError, "table of blocks must be booleans or 0/1 integers, got 3"),
        (
            lambda: blocks(np.ones((2, 2)), 2),
            TypeError,
            "table of blocks must be booleans or 0/1 integers, got float64",
        ),
        (lambda: blocks(np.ones((2, 2), bool), 0), ValueError, "size of blocks must be at least 1, got 0"),
        (lambda: global_tokens(-1), ValueError, "n of global_tokens must be at least 0, got -1"),
        (
            lambda: as_mask(np.ones((2, 2))),
            TypeError,
            "mask must be booleans or 0/1 integers, got float64; to add to scores, use bias=",
        ),
        (lambda: as_mask(np.ones((2, 2), ml_dtypes.bfloat16)), TypeError, "got bfloat16; to add to scores, use bias="),
        (lambda: as_mask(np.array([[0, 2]])), ValueError, "mask must be booleans or 0/1 integers, got 2"),
        (lambda: as_mask(np.array([None])), TypeError, "mask must be booleans or 0/1 integers, got object"),
        (
            lambda: as_mask("causal"),
            TypeError,
            r"mask must be a mask, a function of \(b, h, i, j\), or an array .* got str",
        ),
        (lambda: causal() & 1, TypeError, "got int"),
        (lambda: causal() & np.ones((2, 2)), TypeError, "use bias="),
        (lambda: mask(lambda b, h, i, j: i - j), TypeError, "returned an int expression"),
        (lambda: causal().show(-1), ValueError, "n of show must be at least 0, got -1"),
        (lambda: mask(3), TypeError, r"a mask rule must be a function of \(b, h, i, j\), got int"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
