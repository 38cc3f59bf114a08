"""Sentences of the page, the terminal and pictures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.interpret.heads import CLEAR, NOTABLE
from regard.viewer.data.scores import KINDS, NamedKind
from regard.viewer.scene.labels import printable

CAVEAT = "Attention shows where a head reads from. It does not by itself explain why a model answers as it does."

BEGINNING = "⊢ marks the beginning of the text: it is the token that the model reads first."

MORE = ("darker", "brighter")
"""The words that may stand for {more}: on a scale from light to dark, and from dark to light."""

SUMS = ("a row sums to 1", "a row and the learned sink sum to 1")
"""The words that may stand for {sum}: of a layer without a learned sink, and with one."""

VIEWS = {
    "overview": "A finding to begin with. Left: every head. Middle: the chosen head. Right: where one token looks.",
    "heads": "Each picture is a head. A row is a token that looks (query), a column what it looks at (key); {more} is "
    "more.",
    "map": "One head. A row is a token that looks (query), a column what it looks at (key); {more} is more, and {sum}.",
    "text": "The text as the chosen token sees it: the {more} a token, the more the chosen one looks at it.",
    "token": "One token in every head: a row is a layer, a column a head, a cell names what it looks at most.",
    "compare": "Two heads and their difference: blue where the first looks more, orange where the second does.",
    "profiles": "One head along the text: how far back it looks, how evenly, and which tokens receive most.",
    "scale": "The same scores with and without 1/√d. Without it few keys take all the weight: the softmax saturates.",
    "steps": "From query, key and value to the output: every matrix of a head, one row of it, and one pair of tokens.",
    "ablation": "Where a head looks does not say that it matters: switch it off, and see what the model then expects.",
    "arcs": "An arc leads from a token that looks to one it looks at; thicker is more.",
}
"""A line for each view. {more} is one of `MORE`, {sum} one of `SUMS`."""


class Term(NamedTuple):
    """A term of the field, its meaning, and plain words for it."""

    name: str
    meaning: str
    plain: str


GLOSSARY = (
    Term("head", "One of several attentions that a layer does side by side.", "one way of looking"),
    Term("query", "The vector of a token that looks; a row of a map.", "what do I look for?"),
    Term("key", "The vector of a token that is looked at; a column of a map.", "what do I contain?"),
    Term("value", "The vector that a token hands over, times its weight.", "what do I provide?"),
    Term("score", "The dot product of a query and a key, times 1/√d.", "how well the two fit"),
    Term("weight", "The softmax of a query's scores: from 0 to 1, and 1 in sum over its keys.", "a share of the look"),
    Term("causal mask", "Hides the keys after a query, so that a text is read from left to right.", "no looking ahead"),
    Term("max pooling", "A pixel of a zoomed-out map is the largest weight it covers.", "no strong weight is lost"),
    Term(
        "mass pooling", "A pixel of a zoomed-out map is the sum over its keys, averaged over its queries.",
        "how much lies here",
    ),
    Term("entropy", "−Σ p log p of a query's weights, in nats: 0 if one key has all.", "how widely it looks"),
    Term(
        "normalized entropy", "Entropy over the logarithm of how many keys the query sees: 0 one key, 1 all alike.",
        "how evenly it looks",
    ),
    Term("attention received", "The sum of a key's weights over all queries.", "how much it is looked at"),
    Term("attention sink", "A token, mostly the first, that receives weight with no better place.", "a resting place"),
    Term("log-sum-exp", "log Σ exp(score) over a query's keys: the logarithm of the softmax's denominator.", "lse"),
    Term("temperature", "Divides the scores: above 1 weights are more even, below 1 less.", "how decided it is"),
    Term(
        "1/√d", "The scale of scores. The variance of q · k grows with the number d of features; 1/√d takes that back.",
        "keeps scores moderate",
    ),
    Term(
        "saturation", "One weight is nearly 1, all others 0: then the softmax has almost no gradient.",
        "nothing left to learn from",
    ),
    Term(
        "tentative", f"A kind with a score from {NOTABLE} to {CLEAR}, marked with a question mark.", "perhaps",
    ),
)  # fmt: skip

TENTATIVE = f"? is tentative: a score from {NOTABLE} to {CLEAR}"


def view(name: str, more: str = MORE[0], *, sink: bool = False) -> str:
    """Return the line above a view.

    more: "darker" or "brighter", as the view's scale shows more weight. sink: a learned sink has a part of each row.

    >>> view("map").endswith("darker is more, and a row sums to 1.")
    True
    """
    return VIEWS[name].replace("{more}", more).replace("{sum}", SUMS[sink])


def quoted(token: str, most: int = 24) -> str:
    """Return a token in quotation marks, on one line, shortened in the middle.

    >>> quoted(" the"), quoted("x" * 50, 9)
    ('“·the”', '“xxxx…xxxx”')
    """
    text = printable(token)
    return f"“{text}”" if len(text) <= most else f"“{text[: most // 2]}…{text[-(most // 2) :]}”"


def kinds(found: Sequence[NamedKind]) -> str:
    """Return the notable kinds of a head with their scores, as text.

    >>> kinds([])
    'no notable kind'
    """
    said = [f"{x.called}{'?' * x.tentative} {x.score:.2f}" for x in found]
    return ", ".join(said) or "no notable kind"


FINDINGS = {
    "induction": "{name} is an induction head: of a repeated token's weight, {score} goes to what followed it before.",
    "perhaps": "{name} is perhaps an induction head: of a repeated token's weight, {score} goes to what followed it "
    "before.",
    "concentrated": "{why}, so here is the head with the most concentrated weights: {name}, normalized entropy {score} "
    "(0 is one key).",
    "nothing": "Nothing repeats in this text, which induction needs",
    "none": "No head shows induction (the highest score is {score})",
}
"""Reasons to show a head first, which a page with the model fills in itself."""


def induction_found(name: str, score: float) -> str:
    """Return why this head is shown first, for the strongest induction head."""
    return FINDINGS["induction" if score >= CLEAR else "perhaps"].format(name=name, score=f"{score:.2f}")


def concentrated(name: str, entropy: float, why: str) -> str:
    """Return why this head is shown first, for the most concentrated head."""
    return FINDINGS["concentrated"].format(why=why, name=name, score=f"{entropy:.2f}")


def no_induction(highest: float, *, cross: bool, tokens: bool) -> str:
    """Return why no induction head is shown.

    highest: the largest score of induction, NaN if it has no meaning.
    """
    if cross:
        return "Queries and keys are of different sequences"
    if not tokens:
        return "These arrays come without tokens"
    if highest != highest:
        return FINDINGS["nothing"]
    return FINDINGS["none"].format(score=f"{highest:.2f}")


PATTERNS = {
    "last": "The last token, {query}, looks most at {key} (weight {weight}){repeats}.",
    "other": "Token {query} looks most at {key} (weight {weight}){repeats}.",
    "repeats": ", which followed an earlier {after}",
    "expects": "The model expects next: {tokens}.",
    "unseen": "Token {query} sees no key.",
}
"""Sentences about any row, also filled in by the page."""


def looks(query: str, key: str, weight: float, *, last: bool, after: str = "") -> str:
    """Return where a query looks most, as a sentence.

    after: the run of tokens that ends at the query and also before the key, if any.
    """
    return PATTERNS["last" if last else "other"].format(
        query=query, key=key, weight=f"{weight:.2f}",
        repeats=PATTERNS["repeats"].format(after=quoted(after)) if after else "",
    )  # fmt: skip


def expects(following: Sequence[tuple[str, float]]) -> str:
    """Return what the model expects next: tokens and their probabilities.

    >>> expects([("i", 0.983), ("a", 0.01)])
    'The model expects next: “i” 98.3%, “a” 1.0%.'
    """
    return PATTERNS["expects"].format(tokens=", ".join(f"{quoted(token)} {share:.1%}" for token, share in following))


def estimated(rows: int, n_q: int) -> str:
    """Return on how many queries a finding about a long text is based."""
    return f"Found from {rows} of {n_q:,} queries: “Heads” measures all."


def unseen(query: str) -> str:
    """Return that a query sees no key."""
    return PATTERNS["unseen"].format(query=query)


def words() -> dict[str, Any]:
    """Return all texts of the page, as JSON."""
    return {
        "views": VIEWS,
        "more": list(MORE),
        "sums": list(SUMS),
        "patterns": PATTERNS,
        "findings": FINDINGS,
        "glossary": [term._asdict() for term in GLOSSARY],
        "kinds": [{"name": kind.name, "meaning": kind.meaning, "definition": kind.definition} for kind in KINDS],
        "tentative": TENTATIVE,
        "beginning": BEGINNING,
        "caveat": CAVEAT,
    }
