"""Random calls of `conformance/test_properties.py` on the engine that REGARD_FUZZ_ENGINE names; called by `run.py`."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from conformance.test_properties import STRUCTURES, calls, check
from interpreter import language_patched_once
from regard.engines import triton

ENGINE = os.environ.get("REGARD_FUZZ_ENGINE", "tiled")
made = 0


@pytest.fixture(autouse=True, scope="module")
def interpreter_patched_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if ENGINE == "triton" and triton.interpreted():
            language_patched_once(monkeypatch)
        yield


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
