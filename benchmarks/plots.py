"""Plots of a report: speed, time, memory, shares of limits, costs of options."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from benchmarks.measure import SUBJECT, Report, Result

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers, for print without colour.
STYLES = {
    SUBJECT: ("#0072b2", "o"),
    "ONNX Runtime": ("#d55e00", "s"),
    "OpenVINO": ("#009e73", "^"),
    "PyTorch": ("#cc79a7", "D"),
    "FlexAttention": ("#8a5a00", "P"),
    "NumPy": ("#6b6b6b", "v"),
    "tiled": ("#56b4e9", "<"),
    "JAX": ("#e69f00", "X"),
    "cuDNN": ("#d55e00", "s"),
    "Flash": ("#009e73", "^"),
}
INK, SOFT, GRID, MISSED = "#1f2328", "#5a6270", "#e4e7eb", "#d55e00"

Points = Sequence[tuple[float, float]]
Plot = tuple[str, Figure]


def plots(report: Report) -> dict[str, Plot]:
    """Return captions and figures by name, if the report has rows for them."""
    made: dict[str, Callable[[Report], Plot | None]] = {
        "speed": speed,
        "forward": forward,
        "options": options,
        "derivatives": derivatives,
        "growth": growth,
        "memory": memory,
    }
    return {name: plot for name, make in made.items() if (plot := make(report)) is not None}


def save(figure: Figure, path: Path) -> None:
    """Write a figure as "svg" or "png", as the path's ending says.

    The bytes are the same each time.
    """
    # Without a date, and with names of parts that are not random.
    with rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def speed(report: Report) -> Plot | None:
    """Plot GFLOP/s against n, plain and causal."""
    kinds = {kind: found for kind in ("plain", "causal") if (found := of_kind(report, kind))}
    if not kinds:
        return None
    figure, panels = canvas(len(kinds), width=5.2, height=4.4)
    for axes, (kind, results) in zip(panels, kinds.items(), strict=True):
        peak = statistics.median(y for x in results for y in x.values("limit"))
        axes.axhline(peak, color=INK, linewidth=1, linestyle=(0, (5, 3)))
        put(axes, f"measured peak, {peak:.0f} GFLOP/s", (0.01, peak), (0, 4), ("axes fraction", "data"))
        axes.set_ylim(0, peak * 1.1)
        lines(axes, {name: points(results, name, lambda x, v: v) for name in STYLES})
        over_n(axes, results)
        axes.set_title(kind, loc="left", fontsize=10, color=INK)
        axes.set_ylabel("GFLOP/s")
    headline(figure, f"Speed against n: 8 heads, d = 64, float32, {threads(report)}")
    return "speed against n, with the measured peak drawn in", figure


def forward(report: Report) -> Plot | None:
    """Plot a share of the limit for each row, with every peer and the goal."""
    groups = {"forward": "", "backward": "backward, ", "decode": ""}
    results = [x for x in report.results if x.group in groups and SUBJECT in x.samples]
    if not results:
        return None
    figure, (axes,) = canvas(1, width=9, height=1.6 + 0.27 * len(results))
    for y, x in enumerate(results):
        axes.axhline(y, color=GRID, linewidth=0.8, zorder=0)
        for name in reversed([SUBJECT, *x.peers]):
            colour, marker = STYLES[name]
            place = x.figure(name) or 0.0
            size = 8 if name == SUBJECT else 5.5
            axes.plot([place], [y], color=colour, marker=marker, markersize=size, linestyle="none", markeredgewidth=0,
                      label=name)  # fmt: skip
        if x.goal is not None:
            axes.plot([x.goal] * 2, [y - 0.38, y + 0.38], color=INK, linewidth=2, label="goal")
    names = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [name for name in (*STYLES, "goal") if name in names]
    axes.legend([names[x] for x in order], order, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(order),
                frameon=False, fontsize=8, columnspacing=1.2, handletextpad=0.3)  # fmt: skip
    axes.set_yticks(range(len(results)), [groups[x.group] + x.name for x in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("share of the measured limit: the peak of the dtype, for decode the read bandwidth")
    headline(figure, f"Forward, backward and decode, {threads(report)}")
    return "share of the measured limit, for every peer", figure


def options(report: Report) -> Plot | None:
    """Plot time over the plain call as bars, with the goals."""
    return costs(report, "options", "that of the plain call of the same size",
                 "Cost of an option: 8 heads, n = 2048, d = 64, float32",
                 "options against the plain call, with their goals")  # fmt: skip


def derivatives(report: Report) -> Plot | None:
    """Plot time over the reference's as bars, with the goals."""
    return costs(report, "derivatives", "that of forward (JVP), of PyTorch's backward, or of backward",
                 "Cost of derivatives: 8 heads, n = 2048, d = 64", "derivatives, with their goals")  # fmt: skip


def costs(report: Report, group: str, base: str, title: str, caption: str) -> Plot | None:
    results = [x for x in report.group(group) if SUBJECT in x.samples]
    if not results:
        return None
    figure, (axes,) = canvas(1, width=8, height=1.2 + 0.3 * len(results))
    most = 1.15 * max((x.goal for x in results if x.goal is not None), default=2.0)
    for y, x in enumerate(results):
        figure_of, (low, high) = x.figure() or 0.0, x.spread()
        missed = x.met is False  # None means no goal
        colour, hatch = (MISSED, "////") if missed else (STYLES[SUBJECT][0], None)
        axes.barh(y, min(figure_of, most), height=0.62, color=colour, hatch=hatch, edgecolor="white")
        if high < most:
            axes.plot([low, high], [y, y], color=INK, linewidth=1)
        if x.goal is not None:
            axes.plot([x.goal] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=2.2)
        put(axes, f"{figure_of:.2f}", (1, y), (6, 0), ("axes fraction", "data"), va="center")
    axes.axvline(1, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    axes.set_yticks(range(len(results)), [label(x) for x in results], fontsize=8)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0, most)
    axes.set_xlabel(f"time over {base}; goal: black bar; missed: hatched")
    headline(figure, title)
    return caption, figure


def label(x: Result) -> str:
    """Return a row's name, for a mask with the share of visible pairs."""
    return x.name + (f" ({x.facts['visible']:.0%} visible)" if "visible" in x.facts else "")


def growth(report: Report) -> Plot | None:
    """Plot milliseconds against n."""
    drawn = {
        "NumPy, plain": ("plain", "NumPy", "#6b6b6b", "v"),
        "PyTorch, plain": ("plain", "PyTorch", "#cc79a7", "D"),
        "regard, plain": ("plain", SUBJECT, "#0072b2", "o"),
        "regard, causal": ("causal", SUBJECT, "#009e73", "^"),
        "regard, window of 256": ("window", SUBJECT, "#d55e00", "s"),
    }
    results = report.group("growth")
    if not results:
        return None
    figure, (axes,) = canvas(1, width=7, height=4.6)
    axes.set_yscale("log")
    found = {
        name: points(of_kind(report, kind), who, lambda x, v: v, lambda x, name: [t * 1e3 for t in x.samples[name]])
        for name, (kind, who, _, _) in drawn.items()
    }
    lines(axes, found, {name: (colour, marker) for name, (_, _, colour, marker) in drawn.items()})
    over_n(axes, results)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set_ylabel("milliseconds of one call")
    headline(figure, f"Time against n: 8 heads, d = 64, float32, {threads(report)}")
    return "time against n: a window's cost is linear", figure


def memory(report: Report) -> Plot | None:
    """Plot MiB against n, marked where a call ran out of memory."""
    results = report.group("memory over n")
    if not results:
        return None
    drawn = {
        "NumPy, causal": ("NumPy, causal", "#6b6b6b", "v"),
        "PyTorch, window": ("PyTorch, window as a dense mask", "#cc79a7", "D"),
        "PyTorch, causal": ("PyTorch, causal", "#e69f00", "X"),
        "regard, causal": ("regard, causal", "#56b4e9", "<"),
        SUBJECT: ("regard, every option at once", "#0072b2", "o"),
    }
    figure, (axes,) = canvas(1, width=7, height=4.6)
    axes.set_yscale("log")
    found = {
        text: points(results, name, lambda x, v: max(v / 2**20, 0.1), lambda x, name: x.samples[name])
        for name, (text, _, _) in drawn.items()
    }
    lines(axes, found, {text: (colour, marker) for text, colour, marker in drawn.values()})
    sizes = [(x.facts["n_q"], x.samples["q, k and v"][0] / 2**20) for x in results]
    axes.plot(*zip(*sizes, strict=True), color=INK, linewidth=1, linestyle=(0, (5, 3)))
    put(axes, "size of q, k and v", sizes[-1], (-6, 3), ha="right")
    for name, (text, colour, _) in drawn.items():
        if any(name in x.failures for x in results) and found[text]:
            put(axes, "then out of memory", found[text][-1], (9, 0), va="center", color=colour)
    over_n(axes, results)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set_ylabel("MiB at the peak, beyond inputs and outputs")
    headline(figure, "Memory against n: 2 heads, d = 64, float32")
    return "memory against n", figure


# Parts


def canvas(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of panels side by side, in inches, without a frame."""
    figure = Figure(figsize=(width * count, height), facecolor="white", layout="constrained")
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.tick_params(color=SOFT, labelcolor=INK, labelsize=8)
        axes.xaxis.label.set(color=INK, fontsize=9)
        axes.yaxis.label.set(color=INK, fontsize=9)
    return figure, panels


def headline(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)


def put(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], coords: Any = "data",
        **style: Any) -> None:  # fmt: skip
    """Write a text some points away from a point."""
    options: dict[str, Any] = {"fontsize": 8, "color": INK, "annotation_clip": False} | style
    axes.annotate(text, at, xycoords=coords, xytext=offset, textcoords="offset points", **options)


def threads(report: Report) -> str:
    count = report.method["threads"]
    return "one core" if count == 1 else f"{count} cores"


def of_kind(report: Report, kind: str) -> list[Result]:
    """Return the rows of a sweep, by n."""
    found = report.group("window over n" if kind == "window" else "growth")
    return sorted((x for x in found if x.name.startswith(kind)), key=lambda x: x.facts["n_q"])


def points(
    results: Iterable[Result],
    name: str,
    turn: Callable[[Result, float], float],
    values: Callable[[Result, str], list[float]] = Result.values,
) -> Points:
    """Return (n, the median after `turn`) for rows with a measurement of `name`."""
    return [(x.facts["n_q"], turn(x, statistics.median(values(x, name)))) for x in results if x.samples.get(name)]


def lines(axes: Axes, found: Mapping[str, Points], styles: Mapping[str, tuple[str, str]] = STYLES) -> None:
    """Draw a line for each, with its name at the end.

    Overlapping names move apart.
    """
    found = {name: line for name, line in found.items() if line}
    for name, line in found.items():
        colour, marker = styles[name]
        ours = name.startswith(SUBJECT)
        x, y = zip(*line, strict=True)
        axes.plot(x, y, color=colour, marker=marker, markersize=6 if ours else 4.5, linewidth=2.4 if ours else 1.3,
                  markeredgewidth=0, zorder=3 if ours else 2)  # fmt: skip
    axes.autoscale_view()
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends = sorted((float(to_fraction.transform(line[-1])[1]), name) for name, line in found.items())
    heights = apart(
        [height for height, _ in ends], gap=0.18 / (axes.figure.get_figure(root=True).get_figheight() - 1.2)
    )
    for height, (_, name) in zip(heights, ends, strict=True):
        weight = "bold" if name.startswith(SUBJECT) else "normal"
        put(axes, name, (1, height), (8, 0), "axes fraction", va="center", color=styles[name][0], fontweight=weight)


def apart(heights: list[float], gap: float) -> list[float]:
    """Move ascending heights as little as makes neighbours differ by `gap`.

    Of two close heights, both move.
    """
    made = list(heights)
    for _ in range(100):
        for n in range(1, len(made)):
            short = (gap - (made[n] - made[n - 1])) / 2
            if short > 0:
                made[n - 1], made[n] = made[n - 1] - short, made[n] + short
    return made


def over_n(axes: Axes, results: Iterable[Result]) -> None:
    """Format the axis of n, with a tick for each measured size."""
    sizes = sorted({x.facts["n_q"] for x in results})
    axes.set_xscale("log", base=2)
    shown = sizes if len(sizes) <= 10 else sizes[::2]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_xlabel("n, queries and keys")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
