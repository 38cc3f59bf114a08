"""Outputs and numbers of pages that need a missing package, as the last full build wrote them to `outputs.json`.

With PyTorch, JAX and transformers installed, each such page runs, and a warning tells where its outputs differ from the
stored ones. `python -m sphinx -t store -d docs/_trees docs docs/_build` writes them instead.
"""

import json
import logging
import math
import re
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "jax", "transformers")
STORE = Path(__file__).parents[1] / "outputs.json"
VOLATILE = "volatile"
"""The tag of a block that prints times or bytes: its numbers are not compared."""

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
ROUNDING = 1e-5
"""Smaller numbers are errors of rounding, which processors and libraries make in ways of their own."""

log = logging.getLogger("sphinx.outputs")  # Sphinx shows what loggers below its own say


def missing(blocks: list[str]) -> list[str]:
    """Return the packages that blocks name and that are not installed."""
    return [name for name in named(blocks) if find_spec(name) is None]


def named(blocks: list[str]) -> list[str]:
    """Return the packages of `PACKAGES` that blocks name.

    >>> named(["import regard.jax", "x = 1  # no torches"])
    ['jax']
    """
    code = "\n".join(blocks)
    return [name for name in PACKAGES if re.search(rf"\b{name}\b", code)]


def digest(blocks: list[str]) -> str:
    return sha256("\0".join(blocks).encode()).hexdigest()


def read() -> dict[str, Any]:
    """Return the store: by the digest of a page's blocks its name, its outputs, and the values of its claims."""
    return json.loads(STORE.read_text("utf-8")) if STORE.exists() else {}


def stored(blocks: list[str]) -> list[list[Any]] | None:
    """Return the outputs of a page's blocks, None if the store has none of them."""
    entry = read().get(digest(blocks))
    return None if entry is None else entry["outputs"]


def values(blocks: list[str]) -> dict[str, Any]:
    """Return the stored values of a page's expressions, which `claims.py` checks."""
    return dict(read().get(digest(blocks), {}).get("values", {}))


def agree(one: str, other: str, volatile: bool = False) -> bool:
    """Return True if two texts are the same but for spaces, and for numbers that are close to two digits.

    >>> agree("error 3.1e-08, 12 rows", "error 2.9e-08, 12 rows"), agree("12 rows", "13 rows")
    (True, False)
    >>> agree("[[ 877.8482   -1. ]", "[[877.84827  -1. ]"), agree("[1 2]", "[12]")
    (True, False)
    """
    texts = ["".join(NUMBER.sub("\0", text).split()) for text in (one, other)]
    if texts[0] != texts[1]:
        return False
    return volatile or all(close(a, b) for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))


def close(one: str, other: str) -> bool:
    """Return True if two numbers are equal, or as near as fractions of two processors: 1 % or their last digit.

    >>> close("0.0014", "0.0013"), close("7.2e-7", "6e-7"), close("504", "505")
    (True, True, False)
    """
    a, b = (float(x.replace(",", "")) for x in (one, other))
    if "." not in one + other:
        return a == b or max(abs(a), abs(b)) < ROUNDING
    digits = one.partition(".")[2]
    last = 0.0 if "e" in digits.lower() else 1.001 * 10 ** -len(digits)
    return math.isclose(a, b, rel_tol=1e-2, abs_tol=max(ROUNDING, last))


def as_text(outputs: list[Any]) -> str:
    """Return the outputs of a block as text; what is written to stderr, warnings of packages, is left out."""
    parts = []
    for output in outputs:
        if output["output_type"] == "stream":
            parts.append(output["text"] if output["name"] == "stdout" else "")
        else:
            parts.append("\n".join(f"{kind}: {text}" for kind, text in sorted(output["data"].items())))
    return "\n".join(parts)


def differences(
    blocks: list[str], outputs: list[list[Any]], volatile: list[bool], numbers: dict[str, Any] | None = None
) -> list[str]:
    """Return a sentence for each block whose outputs are not the stored ones, and for expressions without a value."""
    before = stored(blocks)
    if before is None:
        return ["its blocks are not in docs/outputs.json"]
    pairs = zip(before, outputs, volatile, strict=True)
    new = sorted((numbers or {}).keys() - values(blocks).keys())
    return [f"docs/outputs.json has no value of {code}" for code in new] + [
        f"block {number} gives\n{as_text(new)}\nand docs/outputs.json has\n{as_text(old)}"
        for number, (old, new, changes) in enumerate(pairs, 1)
        if not agree(as_text(old), as_text(new), changes)
    ]


class Outputs:
    """The outputs of the pages of one build.

    Pages may be read in several processes, so each writes a file of its own.
    """

    def __init__(self, app: Any) -> None:
        self.source, self.folder = Path(app.srcdir), Path(app.doctreedir, "outputs")
        self.writes = "store" in app.tags
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.json"):
            old.unlink()

    def check(
        self,
        path: Path,
        blocks: list[str],
        outputs: list[list[Any]],
        volatile: list[bool],
        numbers: dict[str, Any],
    ) -> None:
        """Compare the outputs of a page that needs a package, or save them, and its numbers, for the store."""
        page = path.relative_to(self.source).with_suffix("").as_posix()
        if self.writes:
            parts = {"page": page, "outputs": outputs} | ({"values": numbers} if numbers else {})
            entry = {digest(blocks): parts} if named(blocks) else {}
            (self.folder / f"{page.replace('/', '-')}.json").write_text(json.dumps([page, entry]), "utf-8")
        elif named(blocks):
            for difference in differences(blocks, outputs, volatile, numbers):
                log.warning("%s; `sphinx -t store` writes what it gives", difference, extra={"location": page})

    def collect(self, app: Any, env: Any) -> None:
        """Put the pages that were read into the store, or warn of entries of pages that are gone."""
        before = read()
        if not self.writes:
            for page in sorted({entry["page"] for entry in before.values()} - env.found_docs):
                log.warning("docs/outputs.json has outputs of %s, which is no page", page)
            return
        parts = [json.loads(path.read_text("utf-8")) for path in self.folder.glob("*.json")]
        others = env.found_docs - {page for page, _ in parts}
        store = {key: entry for key, entry in before.items() if entry["page"] in others}
        for page, entry in parts:
            store |= entry if page in env.found_docs else {}
        STORE.write_text(json.dumps(store, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
