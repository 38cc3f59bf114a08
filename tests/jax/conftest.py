"""Four devices on one processor, and programs that compile fast: what is tested is not how fast XLA's code runs."""

import os
from collections.abc import Iterator

import pytest

FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"


@pytest.fixture(autouse=True)
def no_rank_promotion() -> Iterator[None]:
    """Refuse implicit broadcasting between ranks, which users may switch off, in every test."""
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'regard[jax]'")
    with jax.numpy_rank_promotion("raise"):
        yield
