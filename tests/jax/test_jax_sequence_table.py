"""The table of what stays sharded along the sequence, in docs/howto/many-processes.md: every row, in both ways.

`python tests/jax/test_jax_sequence_table.py` prints it.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
import regard.jax
from regard.warning import warn_once

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "many-processes.md"
HEAD = "| | `jit` of sharded arrays | `shard_map` | one device's bits |"
N, D, H, MAPPED = 2304, 8, 4, 2  # three steps of keys, and three of rows, that begin within shards
SEQUENCES = ("query", "key", "value")
Arrays = dict[str, Any]
Call = Callable[[Arrays], Any]


def attend(function: Any, x: Arrays, observe: Any = ("lse", "entropy"), **options: Any) -> Any:
    """Outputs of a causal call, by name; slopes are the table of its score."""
    more = {name: a for name, a in x.items() if name not in (*SEQUENCES, "slopes")}
    if "slopes" in x:
        more["score"] = regard.alibi(x["slopes"])
    out, seen = function(*(x[name] for name in SEQUENCES), causal=True, observe=[*observe], **more, **options)
    return {"out": out} | dict(zip(observe, seen.values(), strict=True))


def some(x: Arrays, names: tuple[str, ...]) -> tuple[Arrays, Arrays]:
    """The arrays of these names, and the others."""
    return {name: x[name] for name in names}, {name: a for name, a in x.items() if name not in names}


def random_like(x: Any, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(x)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in leaves])


def gradients(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    own, others = some(x, names)
    outputs, back = jax.vjp(lambda own: call(own | others), own)
    return back(random_like(outputs, 1))[0]


def tangents(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    own, others = some(x, names)
    return jax.jvp(lambda own: call(own | others), (own,), (random_like(own, 2),))[1]


def double_backward(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    return gradients(lambda x: gradients(call, x, names), x, names)


def forward_over_reverse(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    return tangents(lambda x: gradients(call, x, names), x, names)


def forward_over_forward(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    return tangents(lambda x: tangents(call, x, names), x, names)


def outputs(call: Call, x: Arrays, names: tuple[str, ...]) -> Any:
    return call(x)


@dataclass(frozen=True)
class Row:
    """A row: what is computed of which inputs, those besides query, key and value by shape.

    mapped: the inputs that `vmap` maps. observe, options: of the call.
    """

    name: str
    function: Any = outputs
    names: tuple[str, ...] = SEQUENCES
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    mapped: tuple[str, ...] = ()
    observe: tuple[str, ...] = ("lse", "entropy")
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> Arrays:
        rng = np.random.default_rng(0)
        shapes = {"query": (H, N, D), "key": (2, N, D), "value": (2, N, D)} | self.shapes
        lead = {name: (MAPPED,) if name in self.mapped else () for name in shapes}
        return {n: jnp.asarray(rng.standard_normal((*lead[n], *x)), np.float32) for n, x in shapes.items()}

    def specs(self, x: Arrays) -> dict[str, P]:
        return {n: P(*(None,) * (a.ndim - 2), "s") if n in SEQUENCES else P() for n, a in x.items()}

    def results(self, call: Call, x: Arrays) -> Any:
        axes = {name: 0 if name in self.mapped else None for name in x}
        return self.function(jax.vmap(call, (axes,)) if self.mapped else call, x, self.names)

    def one(self, x: Arrays) -> Any:
        """The results of arrays of a device, or of sharded ones under `jit`."""
        return self.results(lambda x: attend(regard.attention, x, self.observe, **self.options), x)

    def inside(self, x: Arrays, mesh: Mesh) -> Any:
        """The same of a call in `shard_map`."""
        specs = {n: P(None, "s") if n in SEQUENCES else P() for n in x}
        outs = {"out": P(None, "s")} | dict.fromkeys(self.observe, P(None, "s"))

        def call(x: Arrays) -> Any:
            function = regard.jax.context_parallel_attention
            return attend(function, x, self.observe, axis_name="s", **self.options)

        return self.results(jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=outs), x)


Shapes = dict[str, tuple[int, ...]]
BIASES: Shapes = {
    "rows and keys": (H, N, N),
    "rows and keys, for all heads": (N, N),
    "rows": (H, N, 1),
    "keys": (H, 1, N),
    "keys, for all heads": (N,),
    "neither": (H, 1, 1),
}
SINK: Shapes = {"sink": (H,)}
SLOPES: Shapes = {"slopes": (H,)}
DROPOUT = {"dropout": 0.1, "seed": 3}
EVERYTHING: Shapes = {"bias": (H, 1, N), "sink": (H,), "slopes": (H,)}
ROWS = (
    Row("out, lse, entropy"),
    Row("other statistics", observe=("received",)),
    Row("gradients of query, key, value", gradients),
    *(Row(f"gradient of a bias with {name}", gradients, ("bias",), {"bias": x}) for name, x in BIASES.items()),
    Row("gradient of a sink", gradients, ("sink",), SINK),
    Row("gradients of tables", gradients, ("slopes",), SLOPES),
    Row("forward mode: query, key, value", tangents),
    Row("forward mode: bias, sink, tables", tangents, ("bias", "sink", "slopes"), EVERYTHING),
    Row("double backward: query, key, value", double_backward, options=DROPOUT),
    Row("double backward: bias, sink", double_backward, ("query", "bias", "sink"), {"bias": (H, 1, N)} | SINK),
    Row("forward over reverse", forward_over_reverse),
    Row("forward over forward, third derivatives", forward_over_forward),
    Row("`vmap`", mapped=SEQUENCES),
    Row("`vmap`, gradients", gradients, mapped=SEQUENCES),
    Row("`vmap` of some inputs, gradients", gradients, (*SEQUENCES, "bias"), {"bias": (1, N)}, ("bias",)),
    Row("`vmap` with dropout, or of tables and sinks", gradients, (*SEQUENCES, "sink"), SINK, ("query", "sink")),
)  # fmt: skip
WAYS = ("jit", "shard_map")


def mesh_of(devices: int = 2) -> Mesh:
    if len(jax.devices()) < devices:
        pytest.skip(f"jax was started with fewer than {devices} devices")
    return Mesh(np.array(jax.devices()[:devices]), ("s",), axis_types=(AxisType.Auto,))


def states(row: Row) -> list[tuple[str, bool]]:
    x = row.inputs()
    expected = row.one(x)
    return [state(row, way, x, expected) for way in WAYS]


def state(row: Row, way: str, x: Arrays, expected: Any) -> tuple[str, bool]:
    """Whether a row stays sharded, and whether it has one device's bits; asserts that it is right.

    Arrays as large as the keys of a device count: sums of rows are smaller.
    """
    mesh = mesh_of()
    spread = {name: jax.device_put(x[name], NamedSharding(mesh, spec)) for name, spec in row.specs(x).items()}
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program = jax.jit(row.one if way == "jit" else lambda x: row.inside(x, mesh)).lower(spread).compile()
        except (ValueError, TypeError, NotImplementedError):
            return "an error", True
    results, warned = program(spread), any("is gathered on every device" in str(x.message) for x in caught)
    gathers = warned or gathered(program) >= x["key"].size
    same = True
    for got, own in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, own, rtol=2e-3, atol=1e-3 * float(jnp.abs(own).max()))
        same &= bool((got == own).all())
        assert gathers or not of_rows(got) or got.addressable_shards[0].data.size == got.size // mesh.size
    if gathers and not warned:
        return "gathered by XLA", False  # whose bits follow its optimizations
    return "gathered" if gathers else "sharded", same


def gathered(program: Any) -> int:
    """The size of the largest array that a program gathers."""
    shapes = re.findall(r"\w+\[([0-9,]*)\]\S* all-gather\(", program.as_text())
    return max((int(np.prod([int(n) for n in x.split(",")])) for x in shapes if x), default=0)


def of_rows(x: Any) -> bool:
    """Whether an array is a result for each query or key, and no gradient of a bias."""
    return x.shape[-2:] in ((N, D), (H, N))


def line(row: Row, *states: tuple[str, bool]) -> str:
    bits = "yes" if all(same for _, same in states) else "within the bound"
    return f"| {row.name} | {' | '.join(text for text, _ in states)} | {bits} |"


def documented() -> Iterator[str]:
    """The lines of the table in the documentation."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    next(x for x in lines if x == HEAD)
    next(lines)
    for x in lines:
        if not x.startswith("|"):
            return
        yield x


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row(row: Row) -> None:
    (text,) = (x for x in documented() if x.startswith(f"| {row.name} |"))
    assert text == line(row, *states(row))


def test_the_table_is_whole() -> None:
    names = [text.strip("| ").split(" | ")[0] for text in documented()]
    assert names == [row.name for row in ROWS]


if __name__ == "__main__":
    print(HEAD, "|---|---|---|---|", sep="\n")
    for each in ROWS:
        print(line(each, *states(each)), flush=True)
