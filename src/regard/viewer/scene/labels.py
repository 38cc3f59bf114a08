"""Tokens and texts of users, made fit to print."""

_SEEN = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def printable(token: str) -> str:
    r"""Return the token on one line, with every character to be seen.

    Blanks become marks, controls and bidi overrides escapes.

    >>> printable(" the\n"), printable("\x1b[31m"), printable("\u202e")
    ('·the↵', '\\x1b[31m', '\\u202e')
    """
    return "".join(
        _SEEN.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode("ascii")) for c in token
    )


def readable(token: str) -> str:
    r"""Return the token as part of a text.

    Blanks and line ends stay what they are, other controls become escapes.

    >>> readable("to be\n"), readable("\u202e")
    ('to be\n', '\\u202e')
    """
    return "".join(c if c in " \n\t" else printable(c) for c in token)


def encodable(text: str) -> str:
    r"""Return the text with what UTF-8 cannot hold (lone surrogates) written as escapes.

    >>> encodable("a\ud83d")
    'a\\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def byte_tokens(text: str) -> tuple[str, ...]:
    """How to read the tokens of a model over UTF-8 bytes: a start mark, then a character on its first byte and the
    number of the byte, small, on those that continue it.

    >>> byte_tokens("né")
    ('⊢', 'n', 'é', '₂')
    """
    return ("⊢", *(piece for c in text for piece in (c, *"₂₃₄"[: len(c.encode()) - 1])))


def byte_label(byte: int) -> str:
    r"""A byte alone as a token: the character if it is ASCII, else its number.

    >>> byte_label(97), byte_label(200)
    ('a', '\\xc8')
    """
    return chr(byte) if byte < 128 else f"\\x{byte:02x}"
