"""Users' tokens and texts, made fit to print."""

from collections.abc import Sequence

_SEEN = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def printable(token: str) -> str:
    r"""Return the token on one line, with every character visible.

    Blanks become marks; controls and bidi overrides become escapes.

    >>> printable(" the\n"), printable("\x1b[31m"), printable("\u202e")
    ('·the↵', '\\x1b[31m', '\\u202e')
    """
    return "".join(
        _SEEN.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode("ascii")) for c in token
    )


def readable(token: str) -> str:
    r"""Return the token as part of a text.

    Blanks and line ends stay; other controls become escapes.

    >>> readable("to be\n"), readable("\u202e")
    ('to be\n', '\\u202e')
    """
    return "".join(c if c in " \n\t" else printable(c) for c in token)


def encodable(text: str) -> str:
    r"""Return the text with lone surrogates, which UTF-8 cannot hold, as escapes.

    >>> encodable("a\ud83d")
    'a\\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def place_of(token: int | str, tokens: Sequence[str], n: int) -> int:
    """Return the index of a token among n.

    token: an index, from the end if negative, or a text (its last occurrence). Raises ValueError if it does not exist.

    >>> place_of(-1, "abab", 4), place_of("a", "abab", 4)
    (3, 2)
    """
    if isinstance(token, str):
        places = [k for k, piece in enumerate(tokens) if token in (piece, piece.strip())]
        if not places:
            raise ValueError(f"token {token!r} does not occur in the text")
        return places[-1]
    if not -n <= token < n:
        raise ValueError(f"token {token} does not exist: the text has tokens 0 to {n - 1}")
    return token % n


BRIEF = 60
"""Maximum characters that a message quotes of its input."""


def brief(text: str) -> str:
    """Return the text as a message quotes it: shortened, with surrogates escaped.

    >>> brief("arrays"), len(brief("9" * 5000))
    ('arrays', 60)
    """
    return encodable(text if len(text) <= BRIEF else text[: BRIEF - 1] + "…")


TITLE = 40
"""Maximum characters of a text's first words in a menu."""


def first_words(text: str) -> str:
    r"""Return the start of a text on one line, as a menu names it.

    >>> first_words(" to be,\n or not"), len(first_words("a " * 5000))
    ('to be, or not', 40)
    """
    start = " ".join(text.split())
    return start if len(start) <= TITLE else start[: TITLE - 1] + "…"


def byte_tokens(text: str) -> tuple[str, ...]:
    """Return labels of a text's tokens in a model over UTF-8 bytes.

    A start mark comes first. A character labels its first byte; small numbers label the bytes that continue it.

    >>> byte_tokens("né")
    ('⊢', 'n', 'é', '₂')
    """
    return ("⊢", *(piece for c in text for piece in (c, *"₂₃₄"[: len(c.encode()) - 1])))


def byte_label(byte: int) -> str:
    r"""Return the label of a single byte: its character in ASCII, else an escape.

    >>> byte_label(97), byte_label(200)
    ('a', '\\xc8')
    """
    return chr(byte) if byte < 128 else f"\\x{byte:02x}"
