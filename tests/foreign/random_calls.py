"""Random calls of `conformance/test_properties.py` on the engine that REGARD_FUZZ_ENGINE names; called by `run.py`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from conformance.test_properties import STRUCTURES, calls, check

ENGINE = os.environ.get("REGARD_FUZZ_ENGINE", "tiled")
made = 0


@pytest.fixture(autouse=True, scope="module")
def figure(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\ncalls made: {made}")


@settings(database=None)
@given(calls(None if ENGINE == "tiled" else STRUCTURES))
def test_any_call(call: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    global made
    made += 1
    check(ENGINE, *call)
