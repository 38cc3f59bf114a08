"""Run the NEON kernels on an emulated 64-bit Arm processor, on a Debian machine of another kind.

    python tests/emulated_neon.py build/arm                  # 135 MB; every case in float32, gradients in 16 bits
    python tests/emulated_neon.py build/arm -k test_forward  # other options of pytest

It needs `apt-get` (as root, for QEMU and for Arm's Python) and `pip`. Arm's packages are unpacked below the folder
and not installed; QEMU finds its libraries there.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEBIAN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11", "libc6", "libexpat1",
    "zlib1g", "libstdc++6", "libgcc-s1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libsqlite3-0",
    "libuuid1", "libcrypt1", "libncursesw6", "libtinfo6", "libreadline8", "libdb5.3", "libgomp1",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
WHEELS = ("numpy", "llvmlite", "ml_dtypes", "threadpoolctl", "safetensors", "rich", "pytest", "hypothesis")
DEFAULT = (
    "tests/conformance/test_conformance.py", "tests/conformance/test_saturated.py",
    "-k", "TestCpu and float32 and (test_forward or test_gradients) or test_saturated and cpu",
)  # fmt: skip


def run(*command: str, cwd: Path | None = None, **environment: str) -> int:
    print("+", *command, flush=True)
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, check=False).returncode


def prepare(folder: Path) -> None:
    """Unpack Arm's Python and the packages that tests need below `folder`."""
    debs, root, wheels, site = (folder / name for name in ("debs", "root", "wheels", "site"))
    for x in (debs, root, wheels, site):
        x.mkdir(parents=True, exist_ok=True)
    steps = [
        ("dpkg", "--add-architecture", "arm64"),
        ("apt-get", "update", "-qq"),
        ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "qemu-user-static"),
    ]
    for step in steps:
        if run(*step):
            sys.exit(f"emulated_neon: {' '.join(step)} failed")
    if run("apt-get", "download", "-qq", *(f"{name}:arm64" for name in DEBIAN), cwd=debs):
        sys.exit("emulated_neon: Debian's packages for Arm could not be downloaded")
    for deb in sorted(debs.glob("*.deb")):
        run("dpkg-deb", "-x", str(deb), str(root))
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    abis = ["--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    python = ["--python-version", "3.11", "--implementation", "cp", "--only-binary=:all:"]
    if run(sys.executable, "-m", "pip", "download", "-q", *platforms, *python, *abis, "-d", str(wheels), *WHEELS):
        sys.exit("emulated_neon: the wheels for Arm could not be downloaded")
    for wheel in sorted(wheels.glob("*.whl")):
        run(sys.executable, "-m", "zipfile", "-e", str(wheel), str(site))


def main(folder: str, *options: str) -> int:
    home = Path(folder).resolve()
    if not (home / "site" / "pytest").is_dir():
        prepare(home)
    python = "qemu-aarch64-static", str(home / "root/usr/bin/python3.11")
    return run(
        *python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *(options or DEFAULT), cwd=HERE.parent,
        QEMU_LD_PREFIX=str(home / "root"), PYTHONHOME=str(home / "root/usr"),
        PYTHONPATH=os.pathsep.join((str(HERE.parent / "src"), str(home / "site"))),
        REGARD_CACHE=str(home / "objects"), PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
