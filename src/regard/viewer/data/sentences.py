"""Sentences of the page, the terminal and pictures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from regard.interpret.formats import score_text, weight_text
from regard.interpret.heads import CLEAR, NOTABLE
from regard.viewer.data.outlines import Claim, Outline
from regard.viewer.data.scores import KINDS
from regard.viewer.scene.labels import printable
from regard.viewer.scene.scenes import Scene

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
    "picture": "Where a token looks on the picture, or along the sound; or what looks at the patches that you choose.",
}
"""A line for each view. {more} is one of `MORE`, {sum} one of `SUMS`."""

NO_PROOF = (
    "A large product is no proof of a cause: the residual stream, the MLPs between, and what the output projections "
    "and the next queries and keys make of a value are left out."
)
"""The limits of a product of weights along a path through two heads."""

UNWRITTEN = {
    "two_texts": "Keys are of another text here: no head of these layers wrote there.",
    "first": "No layer is earlier than this one: it reads the tokens themselves.",
    "cached": "This key was cached: the weights that wrote there are not known.",
}
"""Reasons why no earlier head is known to have written at a key."""


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


def unscored(*, cross: bool) -> str:
    """Return why heads have no score of a kind."""
    return "queries and keys are two texts" if cross else "nothing repeats"


def quoted(token: str, most: int = 24) -> str:
    """Return a token in quotation marks, on one line, shortened in the middle.

    >>> quoted(" the"), quoted("x" * 50, 9)
    ('“·the”', '“xxxx…xxxx”')
    """
    text = printable(token)
    return f"“{text}”" if len(text) <= most else f"“{text[: most // 2]}…{text[-(most // 2) :]}”"


CLAIMS = {
    "sink": "{a} {shade} column is a first-token sink: {key} takes {share} of the weight.",
    "learned": "The learned sink takes {share} of the weight.",
    "column": "{a} {shade} column is {key}, which takes {share} of the weight of {others}: {from}.",
    "previous": "{a} line below the diagonal is the previous token, with {share} of the weight.",
    "current": "The diagonal is the current token itself, with {share} of the weight.",
    "next": "{a} line above the diagonal is the next token, with {share} of the weight.",
    "back": "{a} line below the diagonal is {key} tokens back, with {share} of the weight.",
    "induction": "The short line is induction: of a repeated token's weight, {share} goes to what followed it before.",
    "duplicate": "The marks off the diagonal are copies: of a repeated token's weight, {share} goes to where it stood "
    "before.",
    "even": "There is no column and no line: the weights are almost even (normalized entropy {share}, of at most 1).",
    "heaviest": "{its} go to {from}.",
    "hidden": "No query sees a key.",
    "nan": "The weights of {share} of the queries are NaN: a query, a key or a rule is.",
}
"""Sentences about a shape in a head's map, by `outlines.Claim`.

{a} is one of `ARTICLES`, {shade} one of `SHADES`, {its} one of `HEAVIEST`.
"""

SHORT = {
    "column": "{share} → {token}",
    "heaviest": "{share} → {token}",
    "next": "next {share}",
    "learned": "sink {share}",
}
"""The same in a few letters, for heads of no notable kind."""

SHADES = ("dark", "bright")
"""The words that may stand for {shade}: on a scale from light to dark, and from dark to light."""

ARTICLES = ("The", "Another")
"""The words that may stand for {a}: of the first column or line, and of another."""

OTHERS = ("later tokens", "other tokens", "the queries")
"""The words that may stand for {others}: with a causal mask, without one, and in cross-attention."""

HEAVIEST = ("Its heaviest weights", "Its heaviest other weights")
"""The words that may stand for {its}: with no other claim before it, and with one."""

ALIKE = {"sink": "column", "column": "column", "previous": "below", "back": "below"}
"""The claims that look alike: the second of them is "another"."""

Told = Mapping[str, Any]
"""A claim in words: its `name`, and `parts`, which fill in its pattern."""


def of_head(scene: Scene, outline: Outline, layer: int) -> list[Told]:
    """Return what is said of a head's map, in words."""
    of = scene.layers[layer]
    others = OTHERS[2 if of.cross else 0 if of.causal else 1]
    named = scene.query_tokens and scene.key_tokens
    return told(outline.claims, scene.query_tokens if named else (), scene.key_tokens if named else (), others)


def told(claims: Sequence[Claim], queries: Sequence[str], keys: Sequence[str], others: str) -> list[Told]:
    """Return claims in words.

    queries, keys: their tokens, empty if there are none. others: the queries that see a key.
    """
    said: list[Told] = []
    for place, claim in enumerate(claims):
        alike = any(ALIKE.get(claim.name) == ALIKE.get(before.name, "") for before in claims[:place])
        words = {"others": others, "its": HEAVIEST[place > 0], "a": ARTICLES[alike]}
        said.append({"name": claim.name, "parts": _parts(claim, queries, keys) | words})
    return said


def _parts(claim: Claim, queries: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    by_key = {pair.key: [other for other in claim.pairs if other.key == pair.key] for pair in claim.pairs}
    listed = {
        key: ", ".join(f"{weight_text(pair.weight)} from {only_name(queries, pair.query)}" for pair in pairs)
        for key, pairs in by_key.items()
    }
    named = claim.name in ("sink", "column", "heaviest")
    every = " and ".join(f"{only_name(keys, key)} ({text})" for key, text in listed.items())
    return {
        "share": score_text(claim.share),
        "key": only_name(keys, claim.key) if named else str(claim.key),
        "token": printable(keys[claim.key]) if named and keys else str(claim.key),
        "from": listed.get(claim.key, "") if claim.name == "column" else every,
    }


def only_name(tokens: Sequence[str], index: int) -> str:
    """Return a token in quotation marks, with its index where the token occurs twice or there is no text.

    >>> only_name(["a", "b", "a"], 1), only_name(["a", "b", "a"], 2), only_name([], 3)
    ('“b”', '2 “a”', 'token 3')
    """
    if not tokens:
        return f"token {index:,}"
    token = quoted(tokens[index])
    return token if tokens.count(tokens[index]) == 1 else f"{index:,} {token}"


def says(claims: Sequence[Told], shade: str = SHADES[0]) -> str:
    """Return claims as sentences.

    >>> says([{"name": "sink", "parts": {"a": "The", "key": "“⊢”", "share": "0.93"}}])
    'The dark column is a first-token sink: “⊢” takes 0.93 of the weight.'
    """
    return " ".join(CLAIMS[claim["name"]].format_map({**claim["parts"], "shade": shade}) for claim in claims)


def short(claims: Sequence[Told]) -> str:
    """Return the first claim in a few letters, empty if it is that of a notable kind."""
    first = claims[0] if claims else None
    return SHORT[first["name"]].format_map(first["parts"]) if first and first["name"] in SHORT else ""


PATTERNS = {
    "last": "The last token, {query}, looks most at {key} (weight {weight}){repeats}.",
    "other": "Token {query} looks most at {key} (weight {weight}){repeats}.",
    "aside": "Leaving aside the first token, itself and its neighbours, it looks most at {key} (weight {weight})"
    "{repeats}.",
    "resting": "The learned sink takes {share} of its weight.",
    "repeats": ", which followed an earlier {after}",
    "expects": "The model expects next: {tokens}.",
    "unseen": "Token {query} sees no key.",
}
"""Sentences about any row, also filled in by the page."""


def looks(pattern: str, query: str, key: str, weight: float, after: str = "") -> str:
    """Return where a query looks, as a sentence.

    pattern: a key of `PATTERNS`. after: the run of tokens that ends at the query and also before the key, if any.
    """
    repeats = PATTERNS["repeats"].format(after=quoted(after)) if after else ""
    return PATTERNS[pattern].format(query=query, key=key, weight=weight_text(weight), repeats=repeats)


def resting(share: float) -> str:
    """Return the share of a query's weight that a learned sink takes."""
    return PATTERNS["resting"].format(share=weight_text(share))


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
        "claims": CLAIMS,
        "short": SHORT,
        "shades": list(SHADES),
        "articles": list(ARTICLES),
        "heaviest": list(HEAVIEST),
        "others": list(OTHERS),
        "glossary": [term._asdict() for term in GLOSSARY],
        "kinds": [{"name": kind.name, "meaning": kind.meaning, "definition": kind.definition} for kind in KINDS],
        "tentative": TENTATIVE,
        "beginning": BEGINNING,
        "caveat": CAVEAT,
        "no_proof": NO_PROOF,
        "unwritten": UNWRITTEN,
    }
