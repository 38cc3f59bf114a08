"""The file format of captures: named arrays, and the rest as JSON metadata.

Rules are lists of instructions.
"""

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import OPTIONS, RULES, Layer, Tokens
from regard.rules import OPS, Requirement, Rule, RuleText, Table
from regard.runtime import arrayfile

Array = np.ndarray[Any, np.dtype[Any]]

GRIDS, FORMAT, BEFORE = "regard.capture/3", "regard.capture/2", "regard.capture/1"
"""The format, with grids or chosen queries and without; `BEFORE` has no checksum either, and can still be read."""


def write(path: Path, seen: Any) -> None:
    """Write the file, completely or not at all; raise OSError on failure."""
    written = _Written()
    content = {
        "model": seen.model,
        "dropped": seen.dropped,
        "layers": [written.layer(layer) for layer in seen],
        "tokens": {
            name: [None if x.ids is None else written.array(f"{name}.ids", x.ids), x.labels]
            for name, x in seen.tokens.items()
        },
    }
    version = GRIDS if any(layer.keys() & {"grids", "rows"} for layer in content["layers"]) else FORMAT
    arrayfile.write(path, written.arrays, {"format": version, "capture": json.dumps(content)})


def read(path: Path) -> dict[str, Any]:
    """Read the arguments of a `Capture`.

    Raises OSError if the file cannot be read, ValueError if it holds no capture.
    """
    arrays, metadata = arrayfile.read(path)
    if metadata.get("format") not in (GRIDS, FORMAT, BEFORE):
        raise ValueError(f"{path} is a safetensors file, but not a capture of regard ({FORMAT})")
    if metadata["format"] != BEFORE and arrayfile.CHECKSUM not in metadata:
        raise ValueError(f"{path} is damaged: it has no checksum")
    try:
        content, reader = json.loads(metadata["capture"]), _Read(arrays)
        tokens = {
            name: Tokens(None if ids is None else arrays[ids], labels and tuple(map(tuple, labels)))
            for name, (ids, labels) in content["tokens"].items()
        }
        layers = [reader.layer(layer) for layer in content["layers"]]
        return {"layers": layers, "tokens": tokens, "model": content["model"], "dropped": content["dropped"]}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


class _Written:
    """Writer of arrays by name and rules as text; shared ones are written once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array | arrayfile.Parts] = {}
        self._named: dict[int, tuple[str, Any]] = {}
        self._rules: dict[int, tuple[Any, Rule]] = {}

    def array(self, name: str, x: Array | arrayfile.Parts) -> str:
        if id(x) not in self._named:
            self._named[id(x)] = name, x
            self.arrays[name] = x
        return self._named[id(x)][0]

    def rule(self, rule: Rule) -> Any:
        if id(rule) not in self._rules:
            text, tables, dense = RuleText.of(rule)
            content = {
                "text": text.prints,
                "expression": text.expression,
                "requires": [astuple(need) for need in text.requires],
                "tables": [self.array(f"table.{len(self.arrays)}", table.array) for table in tables],
                "dense": [self.array(f"dense.{len(self.arrays)}", x) for x in dense],
            }
            self._rules[id(rule)] = content, rule
        return self._rules[id(rule)][0]

    def option(self, name: str, x: Any) -> Any:
        if isinstance(x, Rule):
            return self.rule(x)
        if isinstance(x, np.ndarray):
            return {"array": self.array(f"{name}.{len(self.arrays)}", x)}
        return x

    def layer(self, layer: Layer) -> dict[str, Any]:
        count = len(self.arrays)
        arrays = {x: self.array(f"{x}.{count}", getattr(layer, x)) for x in ("query", "key", "lse")}
        others = ("name", "cross", "query_tokens", "key_tokens", "numbers", "kv_numbers", "group", "number")
        options = {name: self.option(name, x) for name, x in layer.options.items()}
        new: dict[str, Any] = {"grids": [self.grid(x) for x in layer.grids], "rows": layer.rows}
        new = {name: x for name, x in new.items() if x}
        return arrays | {x: getattr(layer, x) for x in others} | {"options": options} | new

    def grid(self, grid: PatchGrid) -> dict[str, Any]:
        """Return a grid with the names of its arrays."""
        count = len(self.arrays)
        arrays = {
            x: self.array(f"{x}.{count}", array)
            for x in ("tokens", "picture")
            if (array := getattr(grid, x)) is not None
        }
        return {x: getattr(grid, x) for x in ("rows", "columns", "kind", "seconds", "batch", "name")} | arrays


class _Read:
    """Reader that restores shared rules as one object."""

    def __init__(self, arrays: Mapping[str, Array]):
        self.arrays = arrays
        self._rules: dict[str, Any] = {}
        self._tables: dict[str, Table] = {}

    def table(self, name: str) -> Table:
        if name not in self._tables:
            self._tables[name] = Table(self.arrays[name])
        return self._tables[name]

    def rule(self, kind: Any, content: Mapping[str, Any]) -> Any:
        text = json.dumps(content)
        if text not in self._rules:
            unknown = {op for op, *_ in json.loads(content["expression"])[0]} - OPS.keys()
            if unknown:
                raise ValueError(f"unknown operation {min(unknown)!r} in a rule")
            tables = [self.table(name) for name in content["tables"]]
            dense = [self.arrays[name] for name in content["dense"]]
            requires = tuple(Requirement(*need) for need in content["requires"])
            rule = RuleText(kind.__name__, content["expression"], content["text"], requires)
            self._rules[text] = rule.rule(tables, dense)
        return self._rules[text]

    def option(self, name: str, x: Any) -> Any:
        if name in RULES:
            return self.rule(RULES[name][0], x)
        if isinstance(x, dict):
            return self.arrays[x["array"]]
        return tuple(x) if isinstance(x, list) else x

    def grid(self, content: dict[str, Any]) -> PatchGrid:
        arrays: dict[str, Any] = {x: self.arrays[content[x]] for x in ("tokens", "picture") if x in content}
        grid = PatchGrid(**(content | arrays))
        if grid.tokens.shape != (grid.rows * grid.columns,):
            raise ValueError("the tokens of a grid are not one for each of its patches")
        return grid

    def layer(self, content: dict[str, Any]) -> Layer:
        fields: dict[str, Any] = {x: self.arrays[content.pop(x)] for x in ("query", "key", "lse")}
        options = {name: self.option(name, x) for name, x in content.pop("options").items()}
        if options.keys() - set(OPTIONS):
            raise ValueError(f"unknown option {min(options.keys() - set(OPTIONS))!r} of a layer")
        fields |= {x: tuple(content.pop(x)) for x in ("numbers", "kv_numbers")}
        fields["grids"] = tuple(map(self.grid, content.pop("grids", ())))
        fields["rows"] = tuple(content.pop("rows", ()))
        layer = Layer(**fields, **content, options=options)
        b, h, n_q, d = layer.query.shape
        fits = layer.lse.shape == (b, h, n_q) and layer.key.shape[::3] == (b, d)
        if not fits or len(layer.numbers) != h or len(layer.rows) not in (0, n_q):
            raise ValueError(f"the arrays of layer {layer.name!r} do not fit each other")
        return layer
