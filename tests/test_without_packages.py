"""A Python that lacks packages: those of extras, which only some calls need, or, as in a browser, all but NumPy."""

import subprocess
import sys
from pathlib import Path

from regard.arguments.packages import BASE, EXTRAS

OPTIONAL = tuple(package for packages in EXTRAS.values() for package in packages)

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({}))  # so that importing them fails
import numpy as np, regard
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1024, 8))
def missing(call):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error.name, error)
"""

BROWSER = """
sys.platform, before = "emscripten", sys.platform
import regard.runtime.threads
"""

INTEL_MAC = """
import platform
sys.platform, platform.machine = "darwin", lambda: "x86_64"
"""


def without(packages: tuple[str, ...], code: str) -> tuple[str, str]:
    """What the code prints to stdout and stderr where these packages are missing."""
    command = [sys.executable, "-c", WITHOUT.format(packages) + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_numpy_is_enough_in_a_browser(tmp_path: Path) -> None:
    found, said = without(
        BASE + OPTIONAL,
        f"""{BROWSER}
for name in regard.__all__:
    getattr(regard, name)
out, weights = regard.attention(q, k, v, causal=True, score=regard.softcap(20.0), return_weights=True)
part, seen = regard.attention(q, k, v, observe=["entropy", "lse", "received"])
print(out.shape, weights.shape, seen.received.shape, regard.attention_vjp(q, k, v, v).query.shape)
print(regard.plan(q, k, v).engine, regard.steps(q[0, :3], k[0, :3], v[0, :3])["S"].value.shape)
print(len(regard.insight.measure_heads(q, k)))
sys.platform = before
regard.look(q[:, :16], k[:, :16], v[:, :16], save={str(tmp_path)!r} + "/map.svg")
print(open({str(tmp_path)!r} + "/map.svg").read(4), regard.runtime.threads.num_threads())
print(*(engine.reason for engine in regard.available_engines() if engine.name == "cpu"))
""",
    )
    assert found.splitlines() == [
        "(2, 1024, 8) (2, 1024, 1024) (2, 1024) (2, 1024, 8)",
        "tiled (3, 3)",
        "2",
        "<svg 1",
        "llvmlite is missing: pip install llvmlite",
    ]
    assert "RegardWarning" not in said


def test_errors_name_the_package_and_its_extra() -> None:
    found, _ = without(
        BASE + OPTIONAL,
        """
from pathlib import Path
from regard.interpret.inputs import operands
missing(lambda: regard.plan(n=8, d=8, dtype="bfloat16"))
missing(lambda: regard.examplemodel.ExampleModel.load())
missing(lambda: regard.look(q, k, v, block=False))
missing(lambda: regard.export_wasm("recent"))
missing(lambda: regard.Capture().save("heads.safetensors"))
missing(lambda: regard.Capture.load("heads.safetensors"))
missing(lambda: operands([Path("heads.safetensors")]))
""",
    )
    assert found.splitlines() == [
        "ml_dtypes bfloat16 needs ml_dtypes, which is missing: pip install ml_dtypes",
        "safetensors the example model needs safetensors, which is missing: pip install 'regard[look]'",
        "starlette a page that is served needs starlette, which is missing: pip install 'regard[look]'",
        "llvmlite export_wasm needs llvmlite, which is missing: pip install llvmlite",
        "ml_dtypes a capture's file needs ml_dtypes, which is missing: pip install ml_dtypes",
        "ml_dtypes a capture's file needs ml_dtypes, which is missing: pip install ml_dtypes",
        "safetensors heads.safetensors needs safetensors, which is missing: pip install 'regard[look]'",
    ]


def plain_rows(table: str) -> list[str]:
    """Return the rows of a table with single spaces between its columns."""
    return [" ".join(line.split()) for line in table.splitlines()]


def test_commands_without_extras_print_plain_text_or_name_the_extra() -> None:
    found, said = without(
        OPTIONAL,
        """
from regard.cli import main
for words in ("doctor", "plan --n 1000 --d 64 --causal", "steps --n 3 --d 2", "look --terminal", "insight"):
    print("status", main(words.split()), "\\n")
""",
    )
    doctor, plan, steps, *refused = found.split("\nstatus ")
    assert "cpu ready (compiled for this processor, O(n) memory)" in plain_rows(doctor)
    for package in OPTIONAL:
        assert f"{package} " in doctor
    assert "engine    cpu: the first that supports this call\n" in plan
    assert "total      O(n·m·(d + d_v))  O(n·m)         O(n·d_v)" in plan
    assert "softmax P[i,j]\n[[0." in steps
    assert (steps[0], [x[0] for x in refused]) == ("0", ["0", "2", "2"])
    assert said.splitlines() == [
        f"regard: error: regard {name} needs rich, which is missing: pip install 'regard[look]'"
        for name in ("look", "insight")
    ]


def test_without_a_compiler_tiled_serves_and_one_warning_says_so() -> None:
    found, said = without(
        ("llvmlite",),
        """
for n in (1, 300):
    print(regard.attention(q[:, :n], k, v).shape, regard.attention_vjp(q[:, :n], k, v, v[:, :n]).query.shape)
    regard.attention(q[:, :n], k, v, engine="tiled")
print(regard.plan(q, k, v).engines["cpu"])
""",
    )
    assert found == "(2, 1, 8) (2, 1, 8)\n(2, 300, 8) (2, 300, 8)\nllvmlite is missing: pip install llvmlite\n"
    assert said.count("RegardWarning: ") == 1
    assert (
        "the engine 'cpu' cannot run here: llvmlite is missing: pip install llvmlite; 'tiled' runs all calls, many "
        "times slower (engine='tiled' silences this warning, which is given once)" in said
    )


def test_on_an_intel_mac_doctor_says_that_tiled_serves() -> None:
    found, _ = without(
        ("llvmlite", "threadpoolctl"),  # threadpoolctl asks the system, which is Linux
        f"""{INTEL_MAC}
import regard.doctor
from regard.cli import main
version = regard.doctor.version
regard.doctor.version = lambda name: version("no such package" if name == "llvmlite" else name)
main(["doctor"])
missing(lambda: regard.export_wasm("recent"))
""",
    )
    reason = "it has no wheel for Intel Macs from 0.46 on"
    for line in (
        f"llvmlite missing: {reason}",
        f"cpu not available: llvmlite is missing: {reason} (compiled for this processor, O(n) memory)",
        "tiled ready (tiles on NumPy, O(n) memory, any platform), runs all calls in place of cpu",
        f"llvmlite export_wasm needs llvmlite, which is missing: {reason}",
    ):
        assert line in plain_rows(found)
