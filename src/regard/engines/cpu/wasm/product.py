"""The product of two matrices as WebAssembly, for pages that run a model."""

from llvmlite import binding as llvm

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import webassembly
from regard.engines.cpu.wasm.linking import linked

FIELDS = ("a", "b", "c", "n", "k", "m")
ROWS, VECTORS = 4, 2  # a micro-tile: 8 sums, 2 vectors of B and one of A in 15 registers


def product() -> bytes:
    """Return a module that computes C (n, m) = A (n, k) B (k, m).

    A, B and C are row-major float32. The argument of `product` is the address of the fields, 64-bit integers. n is a
    multiple of 4, m of 8.
    """
    target = webassembly()
    text = written("product", FIELDS, target, _write)
    code = cache.stored_object(text, "product", target, lambda: str(llvm.parse_assembly(text)))
    return linked(code, ["product"])


def _write(k: Kernel) -> None:
    a, b, c = (k.pointer(name, F32) for name in "abc")
    n, inner, m, W = k.integer("n"), k.integer("k"), k.integer("m"), k.target.lanes(F32.size)
    zero = k.constant(F32, 0.0).spread(W)
    with k.loop(m, step=VECTORS * W) as j, k.loop(n, step=ROWS) as i:
        sums = [[k.variable(zero) for _ in range(VECTORS)] for _ in range(ROWS)]
        with k.loop(inner) as p:
            columns = [(b + p * m + j).load(v * W, W) for v in range(VECTORS)]
            for r, row in enumerate(sums):
                x = a[(i + r) * inner + p].spread(W)
                for total, column in zip(row, columns, strict=True):
                    total.value = k.fma(x, column, total.value)
        for r, row in enumerate(sums):
            for v, total in enumerate(row):
                (c + (i + r) * m + j)[v * W] = total.value
