"""Numbers as text, the same in the terminal, in pictures and on the page (`page/src/numbers/format.ts`).

| Function | Of | Text |
|---|---|---|
| `weight_text` | a weight in a list or a sentence | three decimals, `<0.001` where those would be zeros |
| `score_text` | a head's score of a kind | two decimals |
| `figure` | any other number: attention scores, lengths, a weight that is pointed at | three digits that count |
| `loss_text`, `change_text` | a loss, a change of it | three decimals, the change with its sign |

Minus is `−`, a power of ten is `× 10⁻⁵`, no number is `–`, and ties are rounded away from zero, as JavaScript does.
`page/tests/formats.json` has cases for both languages.
"""

import math
from decimal import ROUND_HALF_UP, Context, Decimal

POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
"""Digits of an exponent."""

LEAST = 0.0005
"""The smallest weight that three decimals show."""

SMALLEST, LARGEST = -3, 4
"""Exponents of the first digit between which a number is written without a power of ten."""


def _decimals(x: float, n: int) -> str:
    return str(Decimal(float(x)).quantize(Decimal(1).scaleb(-n), ROUND_HALF_UP)).replace("-", "−")


def figure(x: float, digits: int = 3) -> str:
    """Return a number with so many digits that count, without zeros at its end.

    >>> figure(0.0001352), figure(-1234.5), figure(4)
    ('1.35 × 10⁻⁴', '−1230', '4')
    """
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    rounded = Context(digits, ROUND_HALF_UP).plus(Decimal(float(x)))
    power = rounded.adjusted() if rounded else 0
    if SMALLEST <= power <= LARGEST:
        return f"{rounded.normalize():f}".replace("-", "−")
    mantissa = f"{rounded.scaleb(-power).normalize():f}".replace("-", "−")
    return f"{mantissa} × 10{str(power).translate(POWERS)}"


def weight_text(x: float) -> str:
    """Return a weight with three decimals.

    >>> weight_text(0.4367), weight_text(0.0000934), weight_text(0)
    ('0.437', '<0.001', '0')
    """
    if not x or not math.isfinite(x):
        return figure(x)
    if abs(x) < LEAST:
        return "<0.001" if x > 0 else ">−0.001"
    return _decimals(x, 3)


def score_text(x: float) -> str:
    """Return a head's score of a kind with two decimals.

    >>> score_text(0.125), score_text(math.nan)
    ('0.13', '–')
    """
    return _decimals(x, 2) if math.isfinite(x) else figure(x)


def loss_text(nats: float) -> str:
    """Return a loss with three decimals.

    >>> loss_text(1.23456)
    '1.235'
    """
    return _decimals(nats, 3)


def change_text(nats: float) -> str:
    """Return a change of the loss with its sign.

    >>> change_text(0.25), change_text(-0.0625)
    ('+0.250', '−0.063')
    """
    return f"{'−' if nats < 0 else '+'}{_decimals(abs(nats), 3)}"
