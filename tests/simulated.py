"""Runs this package as on another system, as far as Linux can pretend: `python simulated.py windows directory`.

What the system lacks is taken away before the package is imported; what others need to start is loaded before that.
For Windows kernels are compiled for its calling convention, and called by it. What stays is that of Linux: the file
system, signals, the loader, paths with `/`.
"""

import asyncio.unix_events  # noqa: F401
import builtins
import ctypes
import importlib
import io
import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from threadpoolctl import ThreadpoolController

LOADED = (
    "ml_dtypes", "numpy.testing", "subprocess", "tempfile", "webbrowser", "uvicorn", "starlette.applications",
    "starlette.concurrency", "rich.console", "rich.live", "rich.progress", "rich.table", "safetensors.numpy",
)  # fmt: skip
LINUX_ALONE = {
    os: ("sched_getaffinity", "sched_setaffinity"),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MAP_POPULATE"),
}
POSIX_ALONE = {
    os: ("fork", "forkpty", "register_at_fork", "sysconf", "sysconf_names", "geteuid", "getuid", "getgid",
         "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"),
    mmap: tuple(name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))),
}  # fmt: skip
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
HIDDEN = ("jax", "torch", "matplotlib")  # which would start as on the system that is pretended


def take_away(names: dict[Any, tuple[str, ...]]) -> None:
    for module, missing in names.items():
        for name in missing:
            if hasattr(module, name):
                delattr(module, name)


def without_proc() -> None:
    """No /proc and no /sys."""
    real = io.open

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        if str(file).startswith(("/proc/", "/sys/")) and sys.platform != "linux":
            raise FileNotFoundError(file)
        return real(file, *args, **options)

    io.open = builtins.open = opened  # type: ignore[assignment]


def blas_as_it_is() -> None:
    """threadpoolctl, which asks the system for the libraries of this process, asks Linux."""
    real = ThreadpoolController._load_libraries

    def load(self: ThreadpoolController) -> None:
        pretended, sys.platform = sys.platform, "linux"
        real(self)
        sys.platform = pretended

    ThreadpoolController._load_libraries = load


def macos() -> None:
    sys.platform = "darwin"
    take_away(LINUX_ALONE)


def windows() -> None:
    sys.platform = "win32"
    take_away(LINUX_ALONE)
    take_away(POSIX_ALONE)
    os.supports_dir_fd = set()
    sys.modules.update(dict.fromkeys(MODULES))
    platform.machine, platform.system = lambda: "AMD64", lambda: "Windows"
    llvm.get_process_triple = lambda: "x86_64-pc-windows-msvc"
    real = ctypes.CDLL.__init__

    def loaded(self: Any, name: Any, *args: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        real(self, name, *args, **options)

    ctypes.CDLL.__init__ = loaded  # type: ignore[method-assign]


def called_as_on_windows() -> None:
    """Kernels that are compiled for Windows are called by its convention."""
    from regard.engines.cpu.target import cache

    def load(name: str, label: str, code: bytes, from_disk: bool) -> cache.Compiled:
        call = "define void @here(ptr %x) {{ call win64cc void @{0}(ptr %x) ret void }} declare win64cc void @{0}(ptr)"
        builder = llvm.JITLibraryBuilder().add_object_img(code).add_ir(call.format(name)).export_symbol("here")
        library = builder.link(cache._linker(), f"{label}-{next(cache._names)}")
        function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library["here"])
        function.library, function.address = library, library["here"]
        return cache.Compiled(name, function, library, from_disk)

    cache._load = load


def calls() -> None:
    """Attention and its derivatives on both engines, one result larger than a huge page."""
    import regard

    regard.set_num_threads(2)
    rng = np.random.default_rng(0)
    for n, n_k in ((1, 300), (130, 300), (10_000, 64)):
        q, (k, v) = rng.standard_normal((2, n, 64), np.float32), rng.standard_normal((2, 2, n_k, 64), np.float32)
        for options in ({}, {"mask": regard.window(100, 100), "score": regard.softcap(3.0)}):
            expected = regard.attention(q, k, v, engine="tiled", **options)
            found, seen = regard.attention(q, k, v, engine="cpu", observe=["entropy"], **options)
            np.testing.assert_allclose(found, expected, atol=2e-5)
            assert seen.entropy.shape == (2, n)
    ours, theirs = (regard.attention_vjp(q, k, v, q, causal=True, engine=engine) for engine in ("cpu", "tiled"))
    np.testing.assert_allclose(ours.key, theirs.key, atol=2e-4)


def commands(folder: Path) -> None:
    from regard.cli import main
    from regard.viewer.serve.server import bound

    for words in (["doctor"], ["steps"], ["look", "abab", "--terminal"], ["insight"]):
        assert main(words) == 0, words
    assert main(["look", "abab", "--save", str(folder / "saved")]) == 0
    assert (folder / "saved.html").stat().st_size > 10**5
    with bound() as home:
        assert home.getsockname()[0] == "127.0.0.1"


def objects(folder: Path) -> None:
    """Compiled kernels lie where the system keeps such things, and are read from there."""
    import regard
    from regard.engines.cpu.target import cache
    from regard.runtime.diskcache import directory

    expected = {"win32": folder / "regard", "darwin": folder / "Library" / "Caches" / "regard"}[sys.platform]
    assert directory() == expected
    assert len(list(expected.glob("*.o"))) > 3
    cache.forget()
    x = np.ones((2, 130, 64), np.float32)
    regard.attention(x, x, x, engine="cpu", observe=["entropy"])
    assert cache._loaded
    assert all(kernel.from_disk for kernel in cache._loaded.values())


if __name__ == "__main__":
    system, folder = sys.argv[1], Path(sys.argv[2])
    for name in LOADED:
        importlib.import_module(name)
    sys.modules.update(dict.fromkeys(HIDDEN))
    without_proc()
    blas_as_it_is()
    {"macos": macos, "windows": windows}[system]()
    os.environ |= {"LOCALAPPDATA": str(folder), "HOME": str(folder)}
    os.environ.pop("REGARD_CACHE", None)
    os.environ.pop("OMP_NUM_THREADS", None)
    if system == "windows":
        called_as_on_windows()
    calls()
    objects(folder)
    commands(folder)
    print("done")
