"""The page in a real browser, served by the real server; every tab is watched for errors and for what it asks."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import regard
from in_browser import AXE, DIGIT, Tab, serving, structured

HOW = "apt-get install chromium, pip install -c constraints.txt '.[test]', and `npm ci` in page/"


def missing() -> str | None:
    """What these tests need and is not there."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright"
    if shutil.which("chromium") is None:
        return "chromium"
    from regard.viewer.serve import built

    try:
        built.page()
    except FileNotFoundError:
        return "the built page"
    if not AXE.exists():
        return "axe-core"
    return None


@pytest.fixture(scope="session", autouse=True)
def needed() -> None:
    what = missing()
    if what is None:
        return
    message = f"tests in a browser need {what}: {HOW}"
    if os.environ.get("REGARD_BROWSER") == "required":
        pytest.fail(message)
    pytest.skip(message)


WINDOW = regard.window(40, 3)


@pytest.fixture(scope="session")
def arrays() -> dict[str, dict[str, Any]]:
    """Calls whose weights the page must show, by scene."""
    q, k, v, words = structured(1000, 2)
    small, others, values, few = structured(300, 2, seed=1)
    long_q, long_k, _, many = structured(20_000, 1, seed=2)
    return {
        "arrays": {"query": q, "key": k, "value": v, "tokens": words, "causal": True},
        "arrays-2": {"query": small, "key": others, "value": values, "tokens": few, "mask": WINDOW},
        "arrays-3": {"query": long_q, "key": long_k, "tokens": many, "causal": True},
        "arrays-4": {"query": small, "key": others, "value": values, "causal": True},
    }


@pytest.fixture(scope="session")
def viewer(needed: None, arrays: dict[str, dict[str, Any]]) -> Iterator[Any]:
    from regard.viewer.scene import sources

    others = (sources.arrays(**call) for call in arrays.values())
    digit = sources.captured(regard.Capture.load(DIGIT))
    scenes = [*sources.for_page([sources.example(sources.Settings())]), *others, *digit]
    with serving(scenes) as viewer:
        assert list(viewer.answers.scenes) == ["example", "hand", "cross", *arrays, "capture"]
        yield viewer


@pytest.fixture(scope="session")
def browser(needed: None, chromium: Any) -> Any:
    return chromium


@pytest.fixture
def tab(browser: Any, viewer: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    options = {"viewport": {"width": 1280, "height": 720}, "color_scheme": "light", "reduced_motion": "reduce"}
    context = browser.new_context(**{**options, **getattr(request, "param", {})})
    made = Tab(context.new_page(), viewer)
    yield made
    context.close()
    made.check()
