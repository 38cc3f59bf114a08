"""Report of a run: tables for the terminal and for Markdown, and files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import SUBJECT, Report, Result
from benchmarks.row_types import Row

ABSENT = "–"
LIMIT = "limit"

TITLES = {
    "limits": "Limits of this machine",
    "forward": "Forward: share of the peak",
    "backward": "Backward: share of the peak",
    "derivatives": "Derivatives: 8 heads, n = 2048, d = 64, float32 unless it says otherwise",
    "decode": "Decode, one query: share of the read bandwidth",
    "threads": "Threads",
    "options": "An option against the plain call: 8 heads, n = 2048, d = 64, float32",
    "small": "Small calls from PyTorch tensors against PyTorch: 8 heads, d = 64, float32",
    "models": "Models of random weights: speed over that with PyTorch's SDPA",
    "shapes": "The drop-in in the shapes of models: speed over that of PyTorch's function",
    "reach": "Functions of other packages: speed over that of the package, float32",
    "cold": "Cold: each in a process of its own",
    "memory": "Memory beyond inputs and outputs",
    "memory over n": "Memory over n: MiB beyond inputs and outputs, 2 heads, d = 64, float32",
    "window over n": "A window of 256 against the plain call of the same n: 8 heads, d = 64, float32",
    "growth": "Over n: share of the peak, 8 heads, d = 64, float32",
}

METHOD = """\
Everything compared runs in turns, pinned to the same cores, with as many threads as cores. A figure is the median over
the rounds of a ratio within one round, with its quartiles. On one core times are processor time of the process. Limits
are measured by small kernels: multiply-adds in registers (the peak), and reading far more than the caches hold. Calls
on several threads have five times as many rounds, beside what the peak gains by those threads in the same round. Every
result was compared with tiles in float64 before any time was taken; a wrong one is refused.
Models have random weights, the same for all: Llama 100 million, BERT, ViT and Whisper (small) four of their layers.
Eager and SDPA are those of transformers, `regard` is attn_implementation="regard", in the U-Net the drop-in. Training
is forward and backward; generation begins at a cache. Results of models are compared with eager in float64, and may be
off by twice what eager in the same dtype is. Shapes are calls of PyTorch's function and of the drop-in, forward, or
forward and backward where it says training.
FLOPs: 2 · b · h · n_q · n_k · (d + d_v), causal half of it; backward 2.5 times as many. Backward and double backward
are given what forward computed; JVP computes the outputs too. PyTorch has its fused path for plain backward alone."""


@dataclass(frozen=True)
class ReportTable:
    title: str
    header: list[str]
    rows: list[list[str]]


def shown(result: Result, x: float | None) -> str:
    """Format a figure in the unit of its row."""
    if x is None:
        return ABSENT
    if result.reference == LIMIT:
        return f"{x:.1%}"
    if result.unit == "s":
        return f"{x * 1e3:.0f} ms"
    if result.reference is None:
        return f"{x:.1f} {result.unit}"
    return f"{x:.3f}" if x < 0.5 else f"{x:.2f}"


def verdict(result: Result) -> str:
    return {None: "", True: "yes", False: "no"}[result.met]


def middle(result: Result, name: str = SUBJECT) -> list[str]:
    """Format the median and the quartiles."""
    if name not in result.samples:
        return [ABSENT, ""]
    low, high = result.spread(name)
    return [shown(result, result.figure(name)), f"{shown(result, low)} to {shown(result, high)}"]


def goal(result: Result) -> str:
    if result.goal is None:
        return ""
    return f"{'≥' if result.higher_is_better else '≤'} {shown(result, result.goal)}"


def tables(report: Report, wide: bool = True) -> Iterator[ReportTable]:
    """Make a table for each group of rows, and one of failures.

    wide: with a column for every peer.
    """
    for group in dict.fromkeys(x.group for x in report.results):
        results = report.group(group)
        if group in ("forward", "backward", "decode", "growth"):
            yield _side_by_side(TITLES[group], results, wide)
        elif group == "memory over n":
            yield _memory(TITLES[group], results)
        else:
            yield _plain(TITLES[group], results)
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in report.results:
        for name, why in x.failures.items():
            reasons.setdefault((name, why), []).append(f"{x.group}: {x.name}")
    if reasons:
        rows = [
            [name, why, where[0] if len(where) == 1 else f"{len(where)} rows, such as {where[0]}"]
            for (name, why), where in reasons.items()
        ]
        yield ReportTable("Not measured", ["who", "why", "where"], rows)


def _plain(title: str, results: list[Result]) -> ReportTable:
    visible = any("visible" in x.facts for x in results)
    goals = any(x.goal is not None for x in results)
    units = len({x.unit for x in results}) > 1 and goals
    peers = any(x.peers for x in results)
    shares = any("attention" in x.facts for x in results)
    header = ["", *(["visible"] if visible else []), "median", "quartiles", *(["unit"] if units else [])]
    rows = [
        [
            x.name,
            *([f"{x.facts['visible']:.1%}" if "visible" in x.facts else ""] if visible else []),
            *middle(x),
            *([x.unit] if units else []),
            *([goal(x), verdict(x)] if goals else []),
            *([", ".join(f"{name} {shown(x, x.figure(name))}" for name in x.peers)] if peers else []),
            *([", ".join(f"{name} {y:.0%}" for name, y in x.facts.get("attention", {}).items())] if shares else []),
        ]
        for x in results
    ]
    header += ["goal", "met"] * goals + ["peers"] * peers + ["share of attention"] * shares
    return ReportTable(title, header, rows)


def _side_by_side(title: str, results: list[Result], wide: bool) -> ReportTable:
    names = list(dict.fromkeys(name for x in results for name in [*x.samples, *x.failures]))
    peers = [name for name in names if name not in (SUBJECT, LIMIT)]
    goals = any(x.goal is not None for x in results)
    header = ["", SUBJECT, *(["quartiles"] if wide else []), *(["goal", "met"] if goals else []), "fastest peer"]
    rows = [
        [x.name, *(middle(x) if wide else middle(x)[:1])]
        + ([goal(x), verdict(x)] if goals else [])
        + [f"{x.peers[0]} {shown(x, x.figure(x.peers[0]))}" if x.peers else ABSENT]
        + ([shown(x, x.figure(name)) for name in peers] if wide else [])
        for x in results
    ]
    return ReportTable(title, header + (peers if wide else []), rows)


def _memory(title: str, results: list[Result]) -> ReportTable:
    names = list(dict.fromkeys(name for x in results for name in [*x.samples, *x.failures] if name != x.reference))
    rows = [
        [f"{x.facts['n_q']:,}", *(f"{x.samples[m][0] / 2**20:,.1f}" if m in x.samples else ABSENT for m in names)]
        for x in results
    ]
    return ReportTable(title, ["n", *("regard, every option" if name == SUBJECT else name for name in names)], rows)


def crossings(report: Report) -> list[str]:
    """Return the n above which `regard` is faster than naive NumPy."""
    found = []
    for kind in ("plain", "causal"):
        ahead = {
            x.facts["n_q"]: (x.figure() or 0.0) > (x.figure("NumPy") or 0.0)
            for x in report.group("growth")
            if x.name.startswith(kind) and "NumPy" in x.samples
        }
        behind = [n for n, yes in ahead.items() if not yes]
        later = [n for n in ahead if n > max(behind, default=0)]
        if later:
            found.append(f"{kind}: faster than naive NumPy from n = {min(later)} on, up to n = {max(later)}")
        elif ahead:
            found.append(f"{kind}: slower than naive NumPy at n = {max(ahead)}")
    return found


# Terminal


def show(report: Report, console: Any) -> None:
    from rich.table import Table as Drawn
    from rich.text import Text

    for name, value in report.machine.items():
        console.print(Text.assemble((f"{name:13s}", "bold"), value))
    for table in tables(report, wide=False):
        drawn = Drawn(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for n, name in enumerate(table.header):
            drawn.add_column(Text(name), justify="left" if n == 0 or name in ("why", "where") else "right")
        for row in table.rows:
            drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        console.print()
        console.print(drawn)
    for line in crossings(report):
        console.print(Text(line))


STYLES = {"yes": "green", "no": "red"}


def show_rows(rows: list[Row], console: Any) -> None:
    """Print the rows to measure."""
    from rich.text import Text

    for row in rows:
        console.print(Text.assemble((f"{row.group}: ", "dim"), row.name))


# Files


def write(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md and the first plot, as PNG.

    Raises OSError if they cannot be written.
    """
    from benchmarks.plots import plots, save

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.json"]
    written[0].write_text(report.to_json(), "utf-8")
    pictures = []
    for name, (caption, figure) in list(plots(report).items())[:1]:
        pictures.append((f"{name}.png", caption))
        written.append(folder / f"{name}.png")
        save(figure, written[-1])
    path = folder / "report.md"
    path.write_text(markdown(report, pictures), "utf-8")
    return [*written, path]


def draw(report: Report, folder: Path) -> list[Path]:
    """Write all plots of a report, each as SVG and PNG.

    Raises OSError if they cannot be written.
    """
    from benchmarks.plots import plots, save

    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: figure for name, (_, figure) in plots(report).items()}
    written = {folder / f"{name}.{ending}": name for name in figures for ending in ("svg", "png")}
    for path, name in written.items():
        save(figures[name], path)
    return list(written)


def markdown(report: Report, pictures: list[tuple[str, str]]) -> str:
    """Return the report as a page.

    pictures: names of files and their captions.
    """
    lines = ["# Benchmarks", "", METHOD, ""]
    lines += [f"- {name}: {value}" for name, value in report.machine.items()]
    options = ", ".join(f"{name} {value}" for name, value in report.method.items())
    lines += [f"- `python -m benchmarks`: {options}", ""]
    for name, caption in pictures:
        lines += [f"![{caption}]({name})", ""]
    if pictures:
        lines += ["All plots: `python -m benchmarks --plot-from report.json`.", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", _line(table.header), _line(["---"] * len(table.header))]
        lines += [_line(row) for row in table.rows]
        lines.append("")
    return "\n".join(lines + [f"- {x}" for x in crossings(report)]).rstrip() + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
