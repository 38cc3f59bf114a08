"""Numbers in sentences, which the build checks against the blocks of their page.

After a number, a comment has the expression that gives it:

    takes 17 GiB<!--= naive[-1] / 2**30 -->     equal, rounded to the digits that the sentence has
    off by 3e-8<!--~= error -->                 close, by `outputs.close`: errors of rounding, other processors
    waits for memory<!--? ratio < balance -->   true; no number is read

Numbers may have a sign, separators of thousands, decimals, an exponent and a percent sign, or be a word from zero to
twenty. Expressions are evaluated after the last block with the names of all blocks, and `report` of this module. A name
that several blocks bind is refused: the sentence would depend on which of them comes last.
"""

import ast
import re
import symtable
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.measure import Report
from extensions.outputs import close

Values = dict[str, float | str]
"""Values of expressions, or their errors as text."""

CLAIM = re.compile(r"<!--(?P<kind>=|~=|\?) (?P<code>.+?) -->")
WORDS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen|twenty"
)
NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-−])?(?P<digits>\d+(?:,\d{3})*)(?P<decimals>\.\d+)?(?P<power>e-?\d+)?\b(?P<percent>\s?%)?"
    rf"|\b(?P<word>{WORDS})\b",
    re.ASCII | re.IGNORECASE,
)
END = re.compile(r"\n\s*\n|(?<=[.?!:])\s+|\n(?=[|#>*-]|\d+\. )")
"""Where a sentence ends: also at a line that begins a heading, a quotation, a row or a list's item."""


@dataclass(frozen=True)
class Claim:
    """An expression in a sentence, with the number before it, a match of `NUMBER`; None for a condition."""

    sentence: str
    code: str
    number: re.Match[str] | None
    nearly: bool = False

    def failure(self, value: Any) -> str:
        """Return why the sentence is false, empty if it is true; a value that is text is the expression's error."""
        if isinstance(value, str):
            right = False
        elif self.number is None:
            right = bool(value)
        else:
            right = agree(self.number, value, self.nearly)
        says = self.number[0] if self.number else "this"
        return "" if right else f"“{self.sentence}” says {says}, but {self.code} gives {value}"


def agree(number: re.Match[str], value: float, nearly: bool = False) -> bool:
    """Return True if a value, rounded to the digits of a number, is that number, or close to it.

    >>> [agree(NUMBER.search(x), 0.1667) for x in ("0.17", "16.7 %", "17%", "0.1", "one")]
    [True, True, True, False, False]
    """
    shown = typed(number)
    decimals = len((number["decimals"] or "")[1:])
    rounded = f"{value * (100 if number['percent'] else 1):.{decimals}{'e' if number['power'] else 'f'}}"
    return close(shown, rounded) if nearly else float(shown) == float(rounded)


def typed(number: re.Match[str]) -> str:
    """Return a number without its separators, unit and words, as Python reads it."""
    whole = str(WORDS.split("|").index(number["word"].lower())) if number["word"] else number["digits"].replace(",", "")
    return f"{'-' if number['sign'] else ''}{whole}{number['decimals'] or ''}{number['power'] or ''}"


def claims(text: str) -> list[Claim]:
    """Return the claims of a page's prose. Raises ValueError where no number precedes a comment.

    >>> [x.sentence for x in claims("Yes. Of two<!--= n --> heads\\nit needs one<!--= m -->. No.")]
    ['Of two heads it needs one.', 'Of two heads it needs one.']
    """
    stated, comments = [], CLAIM.finditer(text)
    for part in END.split(CLAIM.sub("\0", text)):
        sentence = " ".join(part.replace("\0", "").split())
        for before, comment in zip(part.split("\0")[:-1], comments, strict=False):
            numbers = [*NUMBER.finditer(before)]
            if comment["kind"] != "?" and not numbers:
                raise ValueError(f"“{sentence}” has no number before {comment[0]}")
            number = numbers[-1] if comment["kind"] != "?" else None
            stated.append(Claim(sentence, comment["code"], number, comment["kind"] == "~="))
    return stated


def ambiguous(blocks: list[str]) -> set[str]:
    """Return the names that several blocks bind, except by import.

    >>> ambiguous(["import x\\na = [b for b in x]", "import x\\na = 1\\ndef f(): b = 2", "f = 3"]) == {"a", "f"}
    True
    """
    tables = [symtable.symtable(block, "block", "exec") for block in blocks]
    bound = Counter(x.get_name() for table in tables for x in table.get_symbols() if x.is_assigned())
    return {name for name, count in bound.items() if count > 1}


def used(code: str) -> set[str]:
    """Return the names that an expression takes from blocks.

    >>> sorted(used("[f(x) for x in y]"))
    ['f', 'y']
    """
    names = [x for x in ast.walk(ast.parse(code, mode="eval")) if isinstance(x, ast.Name)]
    return {x.id for x in names} - {x.id for x in names if isinstance(x.ctx, ast.Store)}


@cache
def read(machine: str) -> Report:
    path = Path(__file__).parents[1] / "benchmarks" / machine / "report.json"
    return Report.from_json(path.read_text("utf-8"))


def report(machine: str, row: str, name: str = "regard") -> float:
    """Return the median figure of a row of a committed report, for one of those that it compares.

    Where groups have rows of one name, `row` begins with the group: "forward: float32, plain, d = 64, n = 2048".
    """
    (figure,) = [x.figure(name) for x in read(machine).results if row in (x.name, f"{x.group}: {x.name}")]
    assert figure is not None
    return figure


def evaluated(codes: list[str], blocks: list[str], names: dict[str, Any]) -> Values:
    """Return the value of each expression among the names that blocks left, or its error as text."""
    several, values = ambiguous(blocks), Values()
    for code in codes:
        try:
            if again := sorted(used(code) & several):
                raise NameError(f"several blocks bind {', '.join(again)}")
            values[code] = float(eval(code, {"report": report} | names))
        except Exception as error:
            values[code] = f"{type(error).__name__}: {error}"
    return values


def failures(stated: list[Claim], values: Values) -> list[str]:
    """Return a sentence for each claim that values contradict or lack."""
    return [why for x in stated if (why := x.failure(values.get(x.code, "no value")))]
