"""Results larger than memory are refused before any work; memory and processors within a control group's limits."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import doctor
from regard.core import checks
from regard.engines import engines
from regard.runtime import system, threads

GIB = 2**30
X: Any = (1, 4, 64)


def array(*shape: int, dtype: Any = np.float32) -> Any:
    """An array of any size that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory of 8 GiB, read anew by every test, and engines that must not run."""
    monkeypatch.setattr(system, "memory", lambda: (8 * GIB, "this machine"))
    yield
    system.quota.cache_clear()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*_: Any) -> Any:
        raise AssertionError("an engine runs")

    for engine in engines().values():
        for name in ("forward", "weights", "maps", "backward", "jvp", "backward_jvp", "jvp_jvp"):
            monkeypatch.setattr(engine, name, runs)


def call(query: Any, key: Any, value: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: regard.attention(array(*query), array(*key), array(*(value or key)), **options)


N = (1, 2**20, 64)
TOO_LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "queries": (call((1, 2**30, 64), X), "260 GiB (out 256 GiB, lse 4 GiB)"),
    "heads": (call((2**28, 1, 64), X), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "features of value": (call((1, 2**20, 4), (1, 4, 4), (1, 4, 2**20)), "4 TiB (out 4 TiB, lse 4 MiB)"),
    "batch of query": (call((2**26, *X), X), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "batch of key": (call(X, (2**26, *X)), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "batch of value": (call(X, X, (2**26, *X)), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "batches that broadcast": (call((2**13, 1, *X), (1, 2**13, *X)), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "positions first": (call((2**26, 4, 1, 64), (4, 1, 64), layout="bnhd"), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "rules": (call((2**26, *X), X, mask=regard.documents(np.zeros(4, int))), "65 GiB (out 64 GiB, lse 1 GiB)"),
    "weights": (call(N, N, return_weights=True), "4 TiB (weights 4 TiB, out 256 MiB, lse 4 MiB)"),
    "top": (call(N, N, observe=[regard.top(2**20)]), "12 TiB (top of observe 12 TiB, out 256 MiB, lse 4 MiB)"),
    "pooled": (
        call(N, N, observe=[regard.pooled(2**40, 2**19)]),
        "2 TiB (pooled of observe 2 TiB, out 256 MiB, lse 4 MiB)",
    ),
    "weights of rows": (
        call(X, (1, 2**32, 64), observe=[regard.weights_of([0, 1])]),
        "32 GiB (weights_of of observe 32 GiB, out 1 KiB, lse 16 B)",
    ),
    "received": (
        call((4, 1, 64), (2, 2**30, 64), observe=["received", "group_received"]),
        "24 GiB (received 16 GiB, group_received 8 GiB, out 1 KiB, ...)",
    ),
    "profile": (call(X, (1, 2**30, 64), observe=["profile"]), "12 GiB (profile 12 GiB, out 1 KiB, lse 16 B)"),
    "several": (
        call((1, 2**28 + 2**20, 4), (1, 4, 4), observe=["entropy", "visible", "lse"]),
        "8.031 GiB (out 4.016 GiB, visible 2.008 GiB, lse 1.004 GiB, ...)",
    ),
    "part of the weights": (
        lambda: regard.weights(array(*N), array(*N), rows=slice(0, 2**20, 4)),
        "1 TiB (weights 1 TiB, lse 4 MiB)",
    ),
    "gradients": (
        lambda: regard.attention_vjp(array(*X), array(1, 2**30, 64), array(1, 2**30, 64), array(*X)),
        "512 GiB (gradient of key 256 GiB, gradient of value 256 GiB, out 1 KiB, ...)",
    ),
    "tangents": (
        lambda: regard.attention_jvp(array(1, 2**28, 64), array(*X), array(*X)),
        "132 GiB (out 128 GiB, lse 2 GiB, entropy 2 GiB)",
    ),
    "second derivatives": (
        lambda: regard.attention_vjp_jvp(array(1, 2**28, 64), array(*X), array(*X), None, regard.Differential()),
        "196 GiB (out 128 GiB, gradient of query 64 GiB, lse 2 GiB, ...)",
    ),
    "offsets": (
        call((2**31, 1, 1, 1), (1, 1, 1), offset=array(2**31, dtype=np.int64)[:1]),
        "16 GiB (the offset of every batch element 16 GiB)",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("name", TOO_LARGE)
def test_results_beyond_memory(name: str) -> None:
    run, takes = TOO_LARGE[name]
    with pytest.raises(MemoryError) as caught:
        run()
    assert str(caught.value) == f"the results of this call take {takes}, more than the 8 GiB of memory of this machine"


@pytest.mark.usefixtures("idle")
def test_what_fits_runs() -> None:
    with pytest.raises(AssertionError, match="an engine runs"):  # 8 GiB
        call((1, 2**28, 4), (1, 4, 4), observe=["entropy", "visible", "lse"])()


def test_more_elements_than_an_array_holds() -> None:
    n = 2**22
    q, k, v = (n, 1, 1, *X), (1, n, 1, *X), (1, 1, n, *X)
    text = f"the leading dimensions broadcast to more than an array can hold, got query {q}, key {k}, value {v}"
    with pytest.raises(MemoryError) as caught:
        call(q, k, v)()
    assert str(caught.value) == text


def test_small_results_ask_for_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory", lambda: (0, "nothing"))
    x = np.ones(X, np.float32)
    assert np.array_equal(regard.attention(x, x, x, observe=["entropy"])[0], x)
    with pytest.raises(MemoryError, match="more than the 0 B of memory of nothing"):
        checks.room({"out": checks.LARGE + 1})
    monkeypatch.setattr(system, "memory", lambda: None)  # not known
    checks.room({"out": 2**60})


@pytest.mark.usefixtures("idle")
def test_tensors() -> None:
    torch = pytest.importorskip("torch")

    def tensor(*shape: int) -> Any:
        return torch.zeros(1).expand(shape)

    def refused(takes: str, run: Callable[[], Any]) -> None:
        with pytest.raises(MemoryError) as caught:
            run()
        assert f"take {takes}" in str(caught.value)

    n, x = tensor(*N), tensor(*X)
    refused("4 TiB (weights 4 TiB", lambda: regard.attention(n, n, n, return_weights=True))
    refused("12 TiB (top of observe 12 TiB", lambda: regard.attention(n, n, n, observe=[regard.top(2**20)]))
    refused("65 GiB (out 64 GiB", lambda: regard.attention(tensor(2**26, *X), x, x))
    refused("65 GiB (out 64 GiB", lambda: regard.attention(tensor(2**26, *X).requires_grad_(), x, x))
    refused("65 GiB (out 64 GiB", lambda: regard.attention(tensor(2**28, 64), x[0], x[0]))


@pytest.mark.usefixtures("idle")
def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((1, 2**17, 1))

    def run(x: Any) -> Any:
        return regard.attention(x, x, x, return_weights=True)[1]

    with pytest.raises(MemoryError, match=r"take 64 GiB \(weights 64 GiB, "):
        run(x)
    assert jax.eval_shape(run, x).shape == (1, 2**17, 2**17)  # needs no memory


# Control groups


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make this process a member of groups with these files."""
    monkeypatch.undo()
    monkeypatch.setattr(system, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(system, "GROUPS", tmp_path / "fs")

    def make(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        system.memory.cache_clear()
        system.quota.cache_clear()

    return make


V1 = "12:pids:/\n5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"
MEMORY = [
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "629145600"}, 629145600),
    ("0::/a/b\n", {"a/b/memory.max": "1000", "a/memory.max": "2000", "memory.max": "1500"}, 1000),
    ("0::/outside/of/it\n", {"memory.max": "4000"}, 4000),  # a container sees its own group as the root
    (V1, {"memory/docker/abc/memory.limit_in_bytes": "3000"}, 3000),
    (V1, {"memory/docker/abc/memory.limit_in_bytes": "9223372036854771712"}, None),
    ("0::/\n", {"memory.max": "max"}, None),
    ("", {"memory.max": "1"}, None),
]


@pytest.mark.parametrize(("membership", "files", "limit"), MEMORY)
def test_memory_of_a_group(group: Any, membership: str, files: dict[str, str], limit: int | None) -> None:
    group(membership, files)
    if limit is not None:
        assert system.memory() == (limit, "its control group")
    elif hasattr(os, "sysconf"):
        assert system.memory() == (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine")


def test_a_call_in_a_group(group: Any) -> None:
    group("0::/\n", {"memory.max": str(600 * 2**20)})
    with pytest.raises(MemoryError) as caught:
        call((1, 2**22, 64), X)()
    assert str(caught.value) == (
        "the results of this call take 1.016 GiB (out 1 GiB, lse 16 MiB), "
        "more than the 600 MiB of memory of its control group"
    )


QUOTAS = [
    ("0::/a\n", {"a/cpu.max": "50000 100000"}, 1),
    ("0::/a\n", {"a/cpu.max": "150000 100000"}, 2),
    ("0::/a\n", {"a/cpu.max": "max 100000", "cpu.max": "300000 100000"}, 3),
    ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"}, None),
    (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "110000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2),
    ("0::/\n", {"cpu.max": "nonsense"}, None),
]


@pytest.mark.parametrize(("membership", "files", "limit"), QUOTAS)
def test_quota_of_a_group(
    group: Any, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], limit: int | None
) -> None:
    group(membership, files)
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert system.quota() == limit
    assert threads.num_threads() == (limit or 8)
    expected = "none" if limit is None else f"{limit} processors, set by its control group"
    assert doctor.report()["threads"]["CPU quota"] == expected
    (system.GROUPS / next(iter(files))).write_text("1 1")
    assert system.quota() == limit  # read once
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads.num_threads() == 5
    regard.set_num_threads(7)
    assert threads.num_threads() == 7
