"""Figures of chapters: SVG that fits light and dark, and says what it shows."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from regard.viewer.show import figure
from regard.viewer.show.figure import Figure, PixelAxis, arcs, bars, flow, lines, maps, matrices, tokens_map

rng = np.random.default_rng(0)
SENTENCE = ["A", "cat", "sat", "on", "this", "mat", "because", "it", "was", "tired", "."]
CAUSAL = np.tril(rng.random((11, 11))) / 6
FIGURES = {
    "lines": lines(
        "A < B.", {"a & b": ([1, 10, 100], [1, 2, 3]), "dots": ([1, 2], [0.5, 1])}, "x", "y", log="x", dots=["dots"]
    ),
    "bars": bars("A < B.", {"a & b": 1.0, "c": 2.0}, "kB"),
    "maps": maps("A < B.", {"a & b": rng.random((8, 8)), "c": np.eye(8)}),
    "flow": flow("A < B.", [("a & b", "(n, D)"), ("c", "(n,)")]),
    "matrices": matrices("A < B.", {"a & b": [[1.0, -2.5]], "c": [[0.0]]}, ["×"]),
    "arcs": arcs("A < B.", SENTENCE, CAUSAL, row=7),
    "tokens map": tokens_map("A < B.", SENTENCE, CAUSAL),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_described_and_have_the_colours_of_their_page(name: str) -> None:
    text = FIGURES[name]._repr_svg_()
    root = ElementTree.fromstring(text)
    assert root.findtext("{*}title") == "A < B."
    assert root.get("role") == "img"
    style = root.findtext("{*}style")
    assert style is not None
    assert "prefers-color-scheme:dark" in style
    assert not re.search(r"#[0-9a-f]{3,6}|white|black", text.replace(style, ""))
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", style))
    assert len(text) < 20_000


NAMES = {f"a name of curve {n}": ([0, 1], [0, 1]) for n in range(5)}


@pytest.mark.parametrize(
    "drawn", [lines("Five.", NAMES, "x", "y"), FIGURES["arcs"], FIGURES["tokens map"]], ids=["lines", "arcs", "map"]
)
def test_text_of_figures_stays_inside(drawn: Figure) -> None:
    root = ElementTree.fromstring(drawn._repr_svg_())
    assert root.findall("{*}text")
    for text in root.findall("{*}text"):
        width = (
            0.56
            * figure.SIZE
            * len(text.text or "")
            * {"start": 1, "middle": 0.5, "end": 0}[text.get("text-anchor", "")]
        )
        assert float(text.get("x", "")) + (0 if text.get("transform") else width) <= figure.WIDTH


def test_shades_follow_the_values() -> None:
    text = maps("One.", {"one": [[0.0, 0.5], [1.0, 0.0]]})._repr_svg_()
    cells = re.findall(r'd="(M[^"]*)" stroke="[^"]*" stroke-opacity="([^"]*)"', text)
    assert cells == [("M1 0h1", "0.5"), ("M0 1h1", "1")]


def test_shades_compare_maps_or_each_has_its_own() -> None:
    two = {"weak": np.full((2, 2), 0.5), "strong": np.ones((2, 2))}
    opacities = [
        re.findall(r'stroke-opacity="([^"]*)"', maps("Two.", two, each=each)._repr_svg_()) for each in (False, True)
    ]
    assert opacities == [["0.5", "1"], ["1", "1"]]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1.3, 2.7), (0, 40), (3, 3.01), (0, 7e5)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    axis = PixelAxis(low, high, 0, 100, log=False)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= x <= high + 1e-9 for x in ticks)
    assert (np.diff(axis.at(ticks)) > 0).all()


@pytest.mark.parametrize(("low", "high"), [(1024, 32768), (0.02, 0.9), (1, 1024), (3e-7, 4e-4), (1, 20)])
def test_ticks_of_logarithms_are_enough_to_read_values_off(low: float, high: float) -> None:
    ticks = PixelAxis(low, high, 0, 100, log=True).ticks()
    assert 3 <= len(ticks) <= 7
    assert low <= min(ticks) < max(ticks) <= high


def test_a_figure_is_saved(tmp_path: object) -> None:
    path = f"{tmp_path}/figure.svg"
    Figure("Nothing.", 10, []).save(path)
    assert ElementTree.parse(path).getroot().get("height") == "10"


def test_arcs_are_as_thick_as_weights() -> None:
    text = arcs("Three.", ["a", " b", "c"], [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.74, 0.01]], row=2)._repr_svg_()
    assert re.findall(r'stroke-opacity="([\d.]+)" stroke-width="([\d.]+)"', text) == [
        ("0.45", "4.50"), ("1", "2.25"), ("1", "6.66"),
    ]  # fmt: skip
    assert re.findall(r">(\d+)</text>", text) == ["25", "74"]


def test_a_map_of_tokens_has_a_number_for_each_weight() -> None:
    text = tokens_map("Two.", ["a", " b"], [[1, 0], [0.75, 0.25]])._repr_svg_()
    assert re.findall(r">([^<]+)</text>", text) == ["a", "a", "b", "b", "100", "75", "25"]
