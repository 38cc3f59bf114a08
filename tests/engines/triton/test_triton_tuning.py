"""How kernels of the triton engine are cut: defaults, tuning with a clock that tests set, choices on disk, tf32."""

import json
import operator
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from cases import case
from interpreter import language_patched_once
from regard.runtime import diskcache

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from regard.core import tensors as arrays  # noqa: E402
from regard.engines.triton.kernels import forward, tiles  # noqa: E402
from regard.engines.triton.launch import forward_launch, tuning  # noqa: E402
from regard.engines.triton.launch.arguments import Work  # noqa: E402
from regard.engines.triton.launch.launching import Launch  # noqa: E402
from regard.engines.triton.launch.tuning import TileConfig, TuningSpec, chosen  # noqa: E402
from regard.ops.normalization import problem_from  # noqa: E402

KERNELS = ("forward", "query", "key_value", "tangent", "rows", "bias", "table", "part")
H100 = tuning.DeviceTarget(90, "a device")


class Timed:
    """A kernel that takes as long as `times` says, or more memory than there is (None); and which cuts have run."""

    def __init__(self, times: Any) -> None:
        self.times, self.now, self.timed, self.ran = times, 0.0, [], []

    def make(self, config: TileConfig) -> Launch:
        def run(*args: Any) -> None:
            if self.times(config) is None:
                raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
            self.ran.append(config)

        return Launch(Kernel(run, config), (1,), (), {})

    def milliseconds(self, launch: Launch) -> float:
        launch.run()
        config = launch.kernel.config
        self.timed.append(config)
        self.now += 1.5  # seconds, most of them compiling
        return float(self.times(config))


class Kernel:
    def __init__(self, run: Any, config: TileConfig) -> None:
        self.run, self.config = run, config

    def __getitem__(self, grid: Any) -> Any:
        return self.run


def work(n: int = 2048, dtype: Any = np.float16, d: int = 64, **options: Any) -> Work:
    x = np.broadcast_to(np.zeros((), dtype), (1, 2, n, d))
    return Work(problem_from(x, x, x, **options))


@pytest.fixture
def on_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if a device were there, nothing were known, and nobody had asked for tuning."""
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(tuning, "target", lambda device: H100)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cuts"))
    monkeypatch.delenv("REGARD_TUNE", raising=False)
    return monkeypatch


def tuned(monkeypatch: pytest.MonkeyPatch, times: Any, **more: Any) -> Timed:
    """A process with a clock of its own that tunes `forward`, and then runs it."""
    timed = Timed(times)
    monkeypatch.setenv("REGARD_TUNE", "1")
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "clock", lambda: timed.now)
    monkeypatch.setattr(tuning, "milliseconds", timed.milliseconds)
    chosen("forward", work(**more), timed.make).run()
    return timed


def files() -> list[Path]:
    folder = diskcache.directory()
    assert folder is not None
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 64, 100, 256])
def test_cuts_are_few_and_no_sum_changes_its_order(kernel: str, dtype: Any, d: int) -> None:
    spec = TuningSpec.of(kernel, work(dtype=dtype, d=d))
    assert spec.configs[0] == spec.default
    assert len(set(spec.configs)) == len(spec.configs) <= 8
    assert len(spec.configs) == 1 or kernel in tuning.FREE
    fixed = {"forward": "N", "query": "N", "tangent": "N", "key_value": "M"}
    assert {getattr(config, fixed.get(kernel, "M")) for config in spec.configs} == {
        getattr(spec.default, fixed.get(kernel, "M"))
    }
    for config in spec.configs:
        assert all(size >= 16 and size & (size - 1) == 0 for size in config[:2])
        assert config.warps in (4, 8)
        assert 1 <= config.stages <= 5
        less, count = config, 0
        while (found := spec.less(less)) is not None:
            assert found.M * found.N * found.stages < less.M * less.N * less.stages
            less, count = found, count + 1
        assert less == (16, 16, config.warps, 1)
        assert count < 16


def test_nothing_is_timed_unless_asked_for(on_device: pytest.MonkeyPatch) -> None:
    on_device.setattr(tuning, "milliseconds", lambda launch: pytest.fail("timed"))
    timed = Timed(lambda config: 1.0)
    for n in (16, 2048):
        chosen("forward", work(n), timed.make).run()
    assert timed.ran == [TileConfig(128, 64, 4, 3)] * 2
    assert files() == []


def test_the_fastest_is_chosen_and_remembered(on_device: pytest.MonkeyPatch) -> None:
    times = {TileConfig(64, 64, 4, 3): 0.5, TileConfig(128, 64, 8, 3): 0.75}
    timed = tuned(on_device, lambda config: times.get(config, 1.0))
    assert timed.timed == TuningSpec.of("forward", work()).configs
    assert timed.ran[-1] == TileConfig(64, 64, 4, 3)
    (file,) = files()
    assert file.name.startswith("forward-")
    assert file.suffix == ".cut"
    # Another process, which does not tune, a call of any size; and one that tunes again.
    on_device.delenv("REGARD_TUNE")
    on_device.setattr(tuning, "_chosen", {})
    later = Timed(lambda config: 1.0)
    chosen("forward", work(16), later.make).run()
    assert later.ran == [TileConfig(64, 64, 4, 3)]
    again = tuned(on_device, lambda config: 1.0)
    assert again.timed == []
    assert again.ran == [TileConfig(64, 64, 4, 3)]


def test_kinds_are_tuned_apart(on_device: pytest.MonkeyPatch) -> None:
    """But one choice holds for all sizes."""
    calls: list[dict[str, Any]] = [
        {},
        {"d": 128},
        {"dtype": np.float32},
        {"mask": regard.window(9)},
        {"dropout": 0.5, "seed": 1},
    ]
    for options in calls:
        assert tuned(on_device, lambda config: 1.0, **options).timed
    assert len(files()) == len(calls)
    for options in ({"n": 4096}, {"d": 50}, {"mask": regard.causal()}):
        assert not tuned(on_device, lambda config: 1.0, **options).timed
    on_device.setattr(tuning, "target", lambda device: tuning.DeviceTarget(100, "another"))
    assert tuned(on_device, lambda config: 1.0).timed


def test_the_time_is_bounded(on_device: pytest.MonkeyPatch) -> None:
    on_device.setattr(tuning, "SECONDS", 4.0)
    timed = tuned(on_device, lambda config: 1.0)
    assert len(timed.timed) == 3  # of 1.5 s each
    assert timed.ran[-1] == TuningSpec.of("forward", work()).default


def test_short_calls_and_captured_ones_are_not_timed(on_device: pytest.MonkeyPatch) -> None:
    assert tuned(on_device, lambda config: 1.0, n=1023).timed == []
    on_device.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuned(on_device, lambda config: 1.0).timed == []
    assert files() == []


def test_cuts_that_take_too_much_memory(on_device: pytest.MonkeyPatch) -> None:
    """Are no candidates; and where the default is one, the next smaller one runs, from the second call on at once."""
    timed = tuned(on_device, lambda config: 1.0 if config.stages == 2 else None)
    assert {config.stages for config in timed.timed} == {2}
    assert timed.ran[-1].stages == 2
    on_device.delenv("REGARD_TUNE")
    on_device.setattr(tuning, "_chosen", {})
    tried: list[TileConfig] = []

    def times(config: TileConfig) -> float | None:
        tried.append(config)
        return None if config.stages > 1 or config.M > 32 else 1.0

    small = Timed(times)
    for _ in range(2):
        chosen("query", work(), small.make).run()
    first = [*(TileConfig(64, 64, 4, stages) for stages in (3, 2, 1)), TileConfig(32, 64, 4, 1)]
    assert tried == [*first, first[-1]]
    with pytest.raises(triton.runtime.errors.OutOfResources):
        chosen("query", work(dtype=np.float64), Timed(lambda config: None).make).run()


DAMAGE = {"empty": lambda x: b"", "cut short": lambda x: x[:40], "a bit": lambda x: x[:-1] + b"}"}


@pytest.mark.parametrize("damage", [*DAMAGE, "unknown"])
def test_a_corrupt_choice_is_made_again(on_device: pytest.MonkeyPatch, damage: str) -> None:
    best = TileConfig(64, 64, 4, 3)
    tuned(on_device, lambda config: 0.5 if config == best else 1.0)
    (file,) = files()
    if damage == "unknown":
        diskcache.write(file, json.dumps([1, 2, 3, 4]).encode())
    else:
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    again = tuned(on_device, lambda config: 0.5 if config == best else 1.0)
    assert again.timed
    assert again.ran[-1] == best
    assert not tuned(on_device, lambda config: 1.0).timed


def test_of_several_writers_the_first_decides(on_device: pytest.MonkeyPatch) -> None:
    spec = TuningSpec.of("forward", work())
    begin, made = threading.Barrier(4), []

    def process(config: TileConfig) -> None:
        begin.wait()
        made.append(tuning.store(spec, config))

    threads = [threading.Thread(target=process, args=[config]) for config in spec.configs[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert set(made) == {tuning.stored(spec)}
    assert [file.suffix for file in files()] == [".cut"]


def test_without_a_cache_the_choice_holds_for_the_process(on_device: pytest.MonkeyPatch) -> None:
    on_device.setenv("REGARD_CACHE", "off")
    best = TileConfig(64, 64, 4, 3)
    timed = tuned(on_device, lambda config: 0.5 if config == best else 1.0)
    count = len(timed.timed)
    chosen("forward", work(), timed.make).run()
    assert timed.ran[-1] == best
    assert len(timed.timed) == count


@pytest.mark.skipif(not tiles.INTERPRETED.value, reason="a GPU is there")
def test_tiles_come_in_the_same_order_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tiles are full, which M decides, the keys that a row sees are summed from the first to the last."""
    language_patched_once(monkeypatch)
    q, k, v, options = case("window over tiles", n_q=128, n_k=320, h=1).inputs(np.float32)
    p = problem_from(q, k, v, **options)
    add, visited = forward.add, []

    def noted(a: Any, of: Any, tile: Any, MASKED: Any, *rest: Any) -> Any:
        visited.append((int(of.rows.r.handle.data[0]), operator.index(tile), bool(MASKED)))
        return add(a, of, tile, MASKED, *rest)

    monkeypatch.setitem(forward.forward.fn.__globals__, "add", noted)
    found, full = [], []
    for M in (16, 64):
        visited.clear()
        monkeypatch.setattr(tuning, "ON_INTERPRETER", TileConfig(M, 16, 4, 2))
        found.append(forward_launch.forward(p)[0])
        blocks = {first: [(tile, masked) for row, tile, masked in visited if row == first] for first, *_ in visited}
        assert len(blocks) == 128 // M
        assert all(seen == sorted(seen) for seen in blocks.values())
        full.append(sum(not masked for _, _, masked in visited))
    assert full[0] > 0 == full[1]
    np.testing.assert_allclose(found[0].out, found[1].out, rtol=0, atol=1e-6)  # type: ignore[arg-type]


# tf32


def precision(monkeypatch: pytest.MonkeyPatch, x: Any, **options: Any) -> str:
    """Of the products of a call on tensors of a device."""
    monkeypatch.setattr(arrays, "HostMemory", arrays.DeviceMemory)
    p = problem_from(*[arrays.array(x)] * 3, **options)
    made: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch))
    forward_launch.forward(p)
    return str(made[0].forms["F"].PRECISION)


@pytest.fixture
def switch() -> Any:
    """PyTorch's own, put back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


def test_float32_is_never_tf32_unless_pytorch_was_asked_for_it(switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 4, 8)
    assert torch.get_float32_matmul_precision() == "highest"
    assert precision(monkeypatch, x) == "ieee"
    for value, expected in (("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")):
        switch.fp32_precision = value
        assert precision(monkeypatch, x) == expected
        assert precision(monkeypatch, x.double()) == precision(monkeypatch, x.half()) == "ieee"
    switch.fp32_precision = "tf32"
    q = np.zeros((1, 4, 8), np.float32)
    assert Work(problem_from(q, q, q)).precision == "ieee", "an array of NumPy knows no switch of PyTorch"


def test_every_way_of_asking_for_tf32(switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 4, 8)
    try:
        torch.set_float32_matmul_precision("high")
        assert precision(monkeypatch, x) == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert precision(monkeypatch, x) == "ieee"
        switch.allow_tf32 = True
        assert precision(monkeypatch, x) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


COMPILED = """
import numpy as np
from regard.core.problem import Outputs
from regard.ops.normalization import problem_from
from regard.engines.triton.launch import forward_launch, tuning
from regard.engines.triton.launch.arguments import Work
q = np.zeros((1, 64, 32), np.float32)
p = problem_from(q, q, q)
outputs, found = Outputs(p.new_output(), None, None), {"lse": np.zeros((1, 64), np.float32)}
for precision in ("ieee", "tf32"):
    Work.precision = precision
    made = forward_launch.launch(Work(p), outputs, found, tuning.TileConfig(64, 32, 4, 1)).compile(90)
    print(made.asm["ptx"].count(".tf32"))
"""


def test_kernels_multiply_in_tf32_only_where_they_are_told() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    without, with_it = map(int, done.stdout.split())
    assert without == 0 < with_it
