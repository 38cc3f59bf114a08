"""What tests of kernels share."""

import pytest
from test_targets import HERE


@pytest.fixture(params=HERE)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that this machine runs."""
    monkeypatch.setenv("REGARD_CPU", request.param)
    return str(request.param)
