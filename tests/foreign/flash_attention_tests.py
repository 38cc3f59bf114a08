"""flash-attn's own tests on regard's functions, on the CPU, from a copy of its public source.

    python tests/foreign/flash_attention_tests.py PATH/tests/test_flash_attn.py --keep 30 --longest 520

The file has some 100,000 tests. `keep` of each function are run, chosen by a hash, with sequences up to `longest`.
It needs `pip install einops`, as the file does. Changed in a temporary copy:

- the device is the CPU, and asks no GPU for its memory;
- 3 repetitions instead of 250 and 50, and a batch of 4 instead of 60, where a test looks for races;
- what undoes the scale of S_dmask is the identity, since ours holds the weights themselves.

Left out are paged caches, tests of the CUDA binding itself, and those that the file skips (softcap with dropout).
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from zlib import crc32

import pytest
import torch

import regard.torch

CHANGES = (
    (r"""(["'])cuda\1""", '"cpu"'),
    (r'torch\.cuda\.get_device_capability\("cpu"\)', "(8, 0)"),
    (r'torch\.cuda\.get_device_properties\("cpu"\)\.total_memory', "2**40"),
    (r"range\((250|50)\)", "range(3)"),
    ("batch_size = 60", "batch_size = 4"),
    ("from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM", "USE_TRITON_ROCM = False"),
    (
        r"\ndef get_dropout_fraction",
        "\ndef normalize_flash_attn_S(s, *_, **__):\n    return s\n\n\ndef get_dropout_fraction",
    ),
)
OF_CUDA = ("paged", "generator_arg")


class Sample:
    """A plugin of pytest that keeps some of the tests of each function."""

    def __init__(self, keep: int, longest: int, salt: str) -> None:
        self.keep, self.longest, self.salt = keep, longest, salt

    def applies(self, item: pytest.Function) -> bool:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        sizes = [x for name, x in given.items() if name.startswith("seqlen") and type(x) is int]
        paged = given.get("paged_kv_block_size") is not None or any(name in item.name for name in OF_CUDA)
        skipped = given.get("softcap", 0) > 0 and given.get("dropout_p", 0) > 0
        return max(sizes, default=0) <= self.longest and not paged and not skipped

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        functions: dict[str, list[pytest.Function]] = {}
        for item in filter(self.applies, items):
            functions.setdefault(item.function.__name__, []).append(item)
        items[:] = []
        for name, tests in functions.items():
            items += sorted(tests, key=lambda x: crc32((self.salt + x.nodeid).encode()))[: self.keep]
            print(f"{name}: {min(self.keep, len(tests))} of {len(tests)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="flash-attn's tests/test_flash_attn.py")
    parser.add_argument("--keep", type=int, default=30)
    parser.add_argument("--longest", type=int, default=520)
    parser.add_argument("--salt", default="", help="another text is another choice")
    given = parser.parse_args()
    text = given.path.read_text(encoding="utf-8")
    for pattern, replacement in CHANGES:
        text, changed = re.subn(pattern, replacement, text)
        if not changed:
            print(f"the file has nothing like {pattern!r}: it is of another version", file=sys.stderr)
            return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, regard.torch.stand_in("flash_attn"):
        path = Path(folder) / "test_flash_attn_on_a_cpu.py"
        path.write_text(text, encoding="utf-8")
        sample = Sample(given.keep, given.longest, given.salt)
        return pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", folder, str(path)], [sample])


if __name__ == "__main__":
    sys.exit(main())
