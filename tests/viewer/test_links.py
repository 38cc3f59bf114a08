"""Links to a view of the page, from the command line's options."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve.links import VIEWS, fragment

APP = Path(__file__).parents[2] / "page" / "src" / "app.ts"


@pytest.mark.skipif(not APP.exists(), reason="the page's sources are not here")
def test_views_are_those_of_the_page() -> None:
    (listed,) = re.findall(r"const VIEWS:.*?= \{(.*?)\n\};", APP.read_text("utf-8"), re.DOTALL)
    assert tuple(re.findall(r"^  (\w+):", listed, re.MULTILINE)) == VIEWS


def test_a_link_names_places_by_the_numbers_of_the_model() -> None:
    scene = example(Settings("to be"))
    assert fragment(scene) == ""
    assert fragment(scene, "arcs") == "#view=arcs"
    assert fragment(scene, layer=2, head=1) == "#layer=2&head=1&view=map"
    assert fragment(scene, "text", token="o", key=-1) == "#i=2&j=5&view=text"
    far = replace(scene, layers=tuple(replace(x, number=10 + n) for n, x in enumerate(scene.layers)))
    assert fragment(far, layer=12) == "#layer=2&view=map"


def test_keys_are_of_the_text_of_keys() -> None:
    q, k = np.zeros((1, 2, 4)), np.zeros((1, 3, 4))
    scene = arrays(q, k, tokens=["a", "b"], key_tokens=["c", "d", "c"])
    assert fragment(scene, "steps", token="a", key="c") == "#i=0&j=2&view=steps"
    with pytest.raises(ValueError, match="token 2 does not exist: the text has tokens 0 to 1"):
        fragment(scene, token=2)
    with pytest.raises(ValueError, match="token 'b' does not occur in the text"):
        fragment(scene, key="b")
