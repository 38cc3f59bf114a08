"""The directive `figures`: every compared figure of the committed reports, for `figures.js` to draw and to list."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from benchmarks.measure import Report, Result
from benchmarks.report import LIMIT, TITLES

NAMES = {"zen-5": "Zen 5", "zen-4": "Zen 4", "granite-rapids": "Granite Rapids", "zen-3": "Zen 3"}
"""The machines, in the order in which they are offered."""


def row(result: Result) -> list[Any]:
    """Return the name of a row and the median of each library."""
    names = [name for name in result.samples if name not in (LIMIT, result.reference)]
    return [result.name, {name: float(f"{result.figure(name):.3g}") for name in names}]


def machine(report: Report) -> dict[str, Any]:
    """Return the groups of a report in which something is compared: their rows, and what a figure is."""
    found = {}
    for group, title in TITLES.items():
        results = [x for x in report.group(group) if x.reference is not None and "regard" in x.samples]
        for unit in dict.fromkeys(x.unit for x in results):
            rows = [row(x) for x in results if x.unit == unit]
            better = "more" if next(x for x in results if x.unit == unit).higher_is_better else "less"
            found[f"{title.partition(':')[0]} ({unit})"] = {"better": better, "rows": rows}
    return found


class FiguresDirective(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        data = {}
        for folder, name in NAMES.items():
            path = Path(self.env.srcdir, "benchmarks", folder, "report.json")
            self.env.note_dependency(str(path))
            data[name] = machine(Report.from_json(path.read_text("utf-8")))
        told = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        html = f'<div class="figures"><script type="application/json">{told}</script></div>'
        script = '<script defer src="_static/figures.js"></script>'
        return [nodes.raw("", html + script, format="html")]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("figures", FiguresDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
