"""What is said of a head's map is what is in it: maps made by hand, and random ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import regard
from regard.interpret.formats import score_text, weight_text
from regard.viewer.data import sentences
from regard.viewer.data.finding import row_sentence
from regard.viewer.data.outlines import Claim, MapRows, Outline, outline, words_in
from regard.viewer.data.scores import estimates
from regard.viewer.data.summary import look_data
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import arrays

N = 24
WORDS = [f" word{k}" for k in range(N)]
IDS = np.arange(N)
REPEATED = np.r_[np.arange(12), np.arange(12)]
SEEN = np.tri(N, dtype=bool)


def even(seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray(seen / seen.sum(1, keepdims=True))


def line(by: int, seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """All weight i − by, where that is seen, else on the first key."""
    keys = np.arange(N) - by
    keys = np.where((keys >= 0) & (keys < N), keys, 0)
    return np.asarray(np.eye(N)[keys])


def column(key: int, seen: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.where(seen[:, [key]], np.eye(N)[[key]], np.eye(N)[[0]])


def claims(
    weights: NDArray[np.float64], seen: NDArray[np.bool_] = SEEN, ids: NDArray[np.int64] = IDS, learned: bool = False
) -> tuple[Claim, ...]:
    return outline(MapRows(weights, seen, np.arange(N), np.arange(N), ids, 1, learned)).claims


def names(*args: object, **options: object) -> list[str]:
    return [claim.name for claim in claims(*args, **options)]  # type: ignore[arg-type]


INDUCTION = np.where((np.arange(N) > 12)[:, None], 0.3 * column(0, SEEN) + 0.7 * line(11, SEEN), column(0, SEEN))
FAR = column(0, SEEN)
FAR[20] = np.eye(N)[7]


@pytest.mark.parametrize(
    ("weights", "seen", "ids", "expected"),
    [
        (column(0, SEEN), SEEN, IDS, ["sink"]),
        (line(1, SEEN), SEEN, IDS, ["previous"]),
        (line(1, SEEN | True), SEEN | True, IDS, ["previous"]),
        (line(0, SEEN), SEEN, IDS, ["current"]),
        (line(-1, SEEN | True), SEEN | True, IDS, ["next"]),
        (line(3, SEEN), SEEN, IDS, ["back"]),
        (even(SEEN), SEEN, IDS, ["even"]),
        (even(SEEN | True), SEEN | True, IDS, ["even"]),
        (column(5, SEEN), SEEN, IDS, ["column"]),
        (column(5, SEEN | True), SEEN | True, IDS, ["column"]),
        (INDUCTION, SEEN, REPEATED, ["sink", "induction"]),
        (line(12, SEEN), SEEN, REPEATED, ["sink", "duplicate"]),
        (FAR, SEEN, IDS, ["sink", "heaviest"]),
        (0.5 * line(1, SEEN) + 0.5 * line(0, SEEN), SEEN, IDS, ["previous", "current"]),
        (0 * even(SEEN), SEEN & False, IDS, ["hidden"]),
    ],
    ids=lambda x: " and ".join(x) if isinstance(x, list) else "",
)
def test_a_map_made_by_hand_is_called_what_it_is(
    weights: NDArray[np.float64], seen: NDArray[np.bool_], ids: NDArray[np.int64], expected: list[str]
) -> None:
    assert names(weights, seen, ids) == expected


def test_the_order_is_that_of_the_weight_that_is_covered() -> None:
    light, heavy = 0.3, 0.7
    assert names(light * column(0, SEEN) + heavy * line(1, SEEN)) == ["previous", "sink"]
    assert names(heavy * column(0, SEEN) + light * line(1, SEEN)) == ["sink", "previous"]


def test_one_line_has_one_name() -> None:
    """With a period of 4 what followed the copy is also 3 tokens back: the line is named once."""
    said = names(line(3, SEEN), ids=np.arange(N) % 4)
    assert len([name for name in said if name in ("back", "induction")]) == 1


def test_the_heaviest_weight_is_named_with_its_tokens() -> None:
    said = sentences.says(sentences.told(claims(FAR), WORDS, WORDS, "later tokens"))
    assert said == (
        "The dark column is a first-token sink: “·word0” takes 0.96 of the weight. Its heaviest other weights go to "
        "“·word7” (1.000 from “·word20”)."
    )


def test_a_token_that_occurs_twice_has_its_number() -> None:
    tokens = [*WORDS[:20], WORDS[7], *WORDS[21:]]
    said = sentences.says(sentences.told(claims(FAR), tokens, tokens, ""))
    assert said.endswith("go to 7 “·word7” (1.000 from 20 “·word7”).")


def test_a_learned_sink_comes_first_where_it_takes_most() -> None:
    assert names(0.2 * line(1, SEEN), learned=True) == ["learned"]
    assert names(0.6 * line(1, SEEN), learned=True) == ["previous", "learned"]
    assert claims(0.6 * line(1, SEEN), learned=True)[1].share == pytest.approx(0.4)


@pytest.mark.parametrize("n_q", [3, 8])
def test_queries_that_are_the_last_of_the_keys_have_their_own_diagonals(n_q: int) -> None:
    rows = slice(N - n_q, None)
    seen = MapRows(line(1, SEEN)[rows], SEEN[rows], np.arange(n_q), np.arange(N)[rows], IDS)
    assert [claim.name for claim in outline(seen).claims] == ["previous"]


def test_cross_attention_has_columns_and_no_diagonals() -> None:
    weights = np.eye(N)[:9]
    found = outline(MapRows(weights, weights >= 0, np.arange(9), None))
    assert [claim.name for claim in found.claims] == ["heaviest"]
    first = np.tile(np.eye(N)[:1], (9, 1))
    (claim,) = outline(MapRows(first, first >= 0, np.arange(9), None)).claims
    assert (claim.name, claim.key, claim.share) == ("column", 0, 1.0)


def scene_of(weights: NDArray[np.float64]) -> Scene:
    """A scene of one head with these causal weights: its scores are their logarithms, by queries of one-hot keys."""
    with np.errstate(divide="ignore"):
        scores = np.maximum(np.log(weights), -60)
    return arrays(scores[None], np.eye(N)[None], causal=True, scale=1.0, tokens=WORDS)


def test_a_scene_says_what_its_weights_are_and_opens_far() -> None:
    ((_, found),) = estimates(scene_of(FAR), 0, N)
    assert [claim.name for claim in found.claims] == ["sink", "heaviest"]
    assert found.far[0][:2] == (20, 7)
    assert found.far[0].weight == pytest.approx(1)
    assert found.heavy == (7,)


def test_marks_letters_and_special_tokens_are_no_words() -> None:
    tokens = ["<s>", "[CLS]", "<|end|>", ".", " a", "“", "##ing", " don", "ß", "日", "12", ""]
    assert words_in(tokens).nonzero()[0].tolist() == [6, 7, 9]


@st.composite
def random_maps(draw: st.DrawFn) -> MapRows:
    """Mixtures of lines, columns and noise, causal or not, of all or few queries, with a learned sink or none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    seen = SEEN if draw(st.booleans()) else SEEN | True
    parts = [line(int(rng.integers(0, 4)), seen), column(int(rng.integers(0, 12)), seen), even(seen)]
    parts.append(np.where(seen, rng.gamma(0.05, size=(N, N)) + 1e-9, 0))
    parts = [np.where(seen, x, 0) / np.maximum(np.where(seen, x, 0).sum(1, keepdims=True), 1e-9) for x in parts]
    shares = rng.dirichlet(np.full(len(parts) + 1, 0.5))
    learned = draw(st.booleans())
    weights = sum(share * x for share, x in zip(shares, parts, strict=False)) / (1 if learned else 1 - shares[-1])
    first = draw(st.sampled_from([0, 0, N - 6]))
    ids = draw(st.sampled_from([IDS, REPEATED, IDS % 3]))
    return MapRows(weights[first:], seen[first:], np.arange(N - first), np.arange(first, N), ids, 1, learned)


def cells_of(claim: Claim, rows: MapRows) -> NDArray[np.bool_]:
    """The cells that a claim is about, by its name alone."""
    here, keys = rows.distances, np.arange(N)
    assert rows.ids is not None
    assert rows.positions is not None
    copies = (rows.ids[rows.positions][:, None] == rows.ids) & (here > 0)
    after = np.zeros_like(copies)
    after[:, 1:] = copies[:, :-1]
    lines = {"previous": 1, "current": 0, "next": -1, "back": claim.key}
    if claim.name in lines:
        return np.asarray((here == lines[claim.name]) & rows.visible)
    of = {"induction": after, "duplicate": copies}.get(claim.name, (keys == claim.key) & (here != 0))
    return np.asarray(of & rows.visible)


SHAPES = ("sink", "column", "previous", "current", "next", "back", "induction", "duplicate")


@settings(max_examples=80, deadline=None)
@given(random_maps())
def test_claims_are_true_and_do_not_contradict_each_other(rows: MapRows) -> None:
    found = outline(rows, np.ones(N, bool)).claims
    assert found
    if "even" in [claim.name for claim in found]:
        assert [claim.name for claim in found] == ["even"]
    covered = np.zeros(rows.weights.shape, bool)
    mass = []
    for claim in found:
        if claim.name in SHAPES:
            cells = cells_of(claim, rows)
            has = cells.any(1) & rows.counted
            assert claim.share == pytest.approx((rows.weights * cells).sum(1)[has].mean())
            assert claim.share > 1.4 * (cells.sum(1) / rows.visible.sum(1))[has].mean()
            mass.append((rows.weights * cells)[rows.counted].sum() / rows.counted.sum())
            covered |= cells
        if claim.name == "learned":
            mass.append(claim.share)
            assert claim.share == pytest.approx(1 - rows.weights.sum(1).mean())
    assert mass == sorted(mass, key=lambda share: -round(share, 2))
    heaviest = [pair for claim in found for pair in claim.pairs if claim.name == "heaviest"]
    for pair in heaviest:  # outside of what was said before, and right
        row = int(np.flatnonzero(rows.queries == pair.query)[0])
        assert not covered[row, pair.key]
        assert pair.weight == rows.weights[row, pair.key]


@settings(max_examples=60, deadline=None)
@given(random_maps())
def test_the_sentences_name_what_is_there(rows: MapRows) -> None:
    found: Outline = outline(rows)
    said = sentences.says(sentences.told(found.claims, WORDS[-len(rows.queries) :], WORDS, "later tokens"))
    assert "{" not in said
    assert said.count("The dark column") <= 1
    assert said.count("The line below") <= 1
    for claim in found.claims:
        share = (weight_text if claim.name == "heaviest" else score_text)(claim.share)
        assert share in said or claim.name == "hidden"
    row = rows.weights[-1]
    text = row_sentence(row, N - 1, N, WORDS, WORDS).text
    assert f"looks most at {int(row.argmax())} " in text
    assert ("Leaving aside" in text) <= (int(row.argmax()) in (0, N - 2, N - 1))


@pytest.mark.parametrize("mask", [None, regard.window(5)])
def test_nan_is_not_masked(mask: regard.Mask | None) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 4))
    k[0, 3] = np.nan
    first, other = estimates(arrays(q, k, v, causal=True, mask=mask), 0, 8)
    assert first.outline.claims == (Claim("nan", 5 / 8),)
    assert "nan" not in [claim.name for claim in other.outline.claims]
    k[:] = np.nan
    scene = arrays(q, k, v, causal=True, mask=mask)
    assert all(x.outline.claims == (Claim("nan", 1.0),) for x in estimates(scene, 0, 8))
    data = look_data(scene)
    said = data.says(data.choose())
    assert said == ("L0 H0: The weights of 1.00 of the queries are NaN: a query, a key or a rule is.",)


def test_a_weight_that_underflows_is_visible() -> None:
    q, k, v = np.zeros((3, 1, 8, 4))
    bias = np.where(np.eye(8), 0, -1e6)[None]
    bias[0, 0] = 0
    (one,) = estimates(arrays(q, k, v, bias=bias, mask=regard.window(7, 7)), 0, 8)
    assert one.outline.claims[0].name == "current"


def test_distances_of_maps_with_nan_are_nan() -> None:
    maps = np.stack([np.eye(3), np.full((3, 3), np.nan)])
    assert np.isnan(regard.insight.head_distance(maps)[0, 1])
