"""A Python that lacks what pip installs with regard, as one in a browser does: NumPy is enough for the engine tiled."""

import subprocess
import sys
from pathlib import Path

import pytest

from regard.arguments.packages import PACKAGES, needed_for

WITHOUT = f"""
import sys
for name in {[*PACKAGES, "threadpoolctl"]}:
    sys.modules[name] = None  # so that importing it fails
import numpy as np, regard
sys.platform, before = "emscripten", sys.platform
import regard.runtime.threads
sys.platform = before
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1024, 8))
def missing(call):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error.name, error)
"""


def without(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_is_enough(tmp_path: Path) -> None:
    found = without(f"""
for name in regard.__all__:
    getattr(regard, name)
out, weights = regard.attention(q, k, v, causal=True, score=regard.softcap(20.0), return_weights=True)
part, seen = regard.attention(q, k, v, observe=["entropy", "lse", "received"])
print(out.shape, weights.shape, seen.received.shape, regard.attention_vjp(q, k, v, v).query.shape)
print(regard.plan(q, k, v).engine, regard.steps(q[0, :3], k[0, :3], v[0, :3])["S"].value.shape)
regard.look(q[:, :16], k[:, :16], v[:, :16], save={str(tmp_path)!r} + "/map.svg")
print(open({str(tmp_path)!r} + "/map.svg").read(4), regard.runtime.threads.num_threads())
print(*(engine.reason for engine in regard.available_engines() if engine.name == "cpu"))
""")
    assert found.splitlines() == [
        "(2, 1024, 8) (2, 1024, 1024) (2, 1024) (2, 1024, 8)",
        "tiled (3, 3)",
        "<svg 1",
        "llvmlite is missing: pip install llvmlite",
    ]


def test_errors_name_the_package() -> None:
    found = without("""
from pathlib import Path
from regard.cli import main
from regard.interpret.inputs import operands
missing(lambda: regard.plan(n=8, d=8, dtype="bfloat16"))
missing(lambda: regard.examplemodel.ExampleModel.load())
missing(lambda: regard.look(q, k, v, block=False))
missing(lambda: regard.export_wasm("recent"))
missing(lambda: regard.Capture.load("heads.safetensors"))
missing(lambda: operands([Path("heads.safetensors")]))
missing(lambda: main(["doctor"]))
""")
    assert found.splitlines() == [
        "ml_dtypes bfloat16 needs ml_dtypes, which is missing: pip install ml_dtypes",
        "safetensors the example model needs safetensors, which is missing: pip install safetensors",
        "uvicorn a page that is served needs uvicorn, which is missing: pip install uvicorn",
        "llvmlite export_wasm needs llvmlite, which is missing: pip install llvmlite",
        "ml_dtypes a capture's file needs ml_dtypes, which is missing: pip install ml_dtypes",
        "safetensors heads.safetensors needs safetensors, which is missing: pip install safetensors",
        "rich the command line needs rich, which is missing: pip install rich",
    ]


def test_other_modules_that_are_missing_keep_their_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'$"), needed_for("this"):
        import no_such_module  # noqa: F401
