"""Numbers as text: the cases that the page's tests read too."""

import json
import math
from pathlib import Path

import pytest

from regard.interpret import formats

CASES = json.loads((Path(__file__).parents[2] / "page" / "tests" / "formats.json").read_text("utf-8"))
FUNCTIONS = {
    "figure": formats.figure,
    "weight": formats.weight_text,
    "score": formats.score_text,
    "change": formats.change_text,
    "loss": formats.loss_text,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_numbers_are_written_as_on_the_page(kind: str) -> None:
    cases = [(math.nan if x is None else x, text) for x, text in CASES[kind]]
    assert [FUNCTIONS[kind](x) for x, _ in cases] == [text for _, text in cases]


def test_fewer_digits_and_infinities() -> None:
    assert [formats.figure(x, 2) for x in (0.0625, 0.25, 1234)] == ["0.063", "0.25", "1200"]
    assert [formats.figure(x) for x in (math.inf, -math.inf)] == ["∞", "−∞"]
