"""No element outside the arrays is read or written: they end, or begin, at a page that may not be touched."""

import ctypes
import mmap
import subprocess
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.engines.cpu.target.instructions import chosen, targets

pytestmark = pytest.mark.skipif(not hasattr(mmap, "PROT_NONE") and sys.platform == "win32", reason="needs mprotect")

PAGE = mmap.PAGESIZE
SIZES = [
    (1, 1, 1, 1),
    (3, 7, 5, 3),
    (50, 129, 17, 9),
    (49, 300, 64, 64),
    (48, 16, 16, 16),
    (5, 9, 33, 40),
    (1, 270, 64, 96),
    (4, 272, 40, 50),
]


def between_guards(x: Any, at_end: bool) -> Any:
    """A copy of x that ends right before, or begins right after, a page without access."""
    pages = -(-max(x.nbytes, 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (base, base + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
    start = PAGE + (pages * PAGE - x.nbytes if at_end else 0)
    made = np.frombuffer(memory, np.uint8, x.nbytes, start).view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "inside"), [*((x, False) for x in SIZES), *((x, True) for x in SIZES if x[0] < 8)], ids=str
)
def test_nothing_outside_is_touched(sizes: Any, inside: bool, dtype: Any, at_end: bool) -> None:
    n_q, n_k, d, d_v = sizes
    rng = np.random.default_rng(0)

    def array(*shape: int, kind: Any = dtype) -> Any:
        x = rng.standard_normal(shape).astype(kind)
        return between_guards(x.swapaxes(0, 1), at_end).swapaxes(0, 1) if inside else between_guards(x, at_end)

    q, k, v = array(2, n_q, d), array(2, n_k, d), array(2, n_k, d_v)
    mask = between_guards(rng.random((n_q, n_k)) < 0.7, at_end)
    expected = regard.attention(q, k, v, engine="tiled")
    got = regard.attention(q, k, v, engine="cpu")
    assert np.allclose(got.astype(float), expected.astype(float), rtol=0, atol=0.05)
    regard.attention(
        q, k, v, engine="cpu", mask=mask, bias=array(2, n_q, n_k, kind=np.float32), causal=True,
        sink=array(2, 1, kind=np.float64)[:, 0], observe=["entropy"],
    )  # fmt: skip


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("sizes", [(1, 270, 64, 96), (4, 272, 128, 160), (1, 50, 7, 200)], ids=str)
def test_reading_in_order_changes_nothing(
    sizes: Any, inside: bool, dtype: Any, at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding on processors whose memory comes faster that way, and on others."""
    n_q, n_k, d, d_v = sizes
    rng = np.random.default_rng(0)
    q, k, v = (
        between_guards(rng.standard_normal((n, 2, x) if inside else (2, n, x)).astype(dtype), at_end)
        for n, x in ((n_q, d), (n_k, d), (n_k, d_v))
    )
    if inside:
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    outs = []
    for name, in_order in (("asking", False), ("reading", True)):
        own = replace(chosen().prefetch, in_order=in_order)
        monkeypatch.setitem(targets(), name, replace(chosen(), name=name, prefetch=own))
        monkeypatch.setenv("REGARD_CPU", name)
        outs.append(regard.attention(q, k, v, engine="cpu"))
        monkeypatch.delenv("REGARD_CPU")
    assert np.array_equal(*outs)
    assert np.allclose(outs[0].astype(float), regard.attention(q, k, v, engine="tiled").astype(float), atol=0.05)


def test_one_element_too_far_is_seen() -> None:
    script = (
        "from test_guard_pages import *\n"
        "x = between_guards(np.ones(5, np.float32), True)\n"
        "ctypes.c_float.from_address(x.ctypes.data + {} * 4).value\n"
    )
    import pathlib

    folder = str(pathlib.Path(__file__).parent)
    ends = [subprocess.run([sys.executable, "-c", script.format(n)], cwd=folder).returncode for n in (4, 5)]
    assert ends[0] == 0
    assert ends[1] != 0
