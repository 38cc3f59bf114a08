"""Tables of heads with their kinds, for the terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard.interpret.formats import change_text, loss_text, score_text
from regard.interpret.heads import CLEAR, KINDS, NOTABLE, HeadStatistics, all_notable, notable

if TYPE_CHECKING:
    from rich.console import Console

    from regard.interpret.ablation import Losses

MOST = 64
"""Maximum number of heads that are all listed by default.

Of more, only the strongest of each kind are.
"""

STRONGEST = 3
LEGEND = f"a kind is named from a score of {NOTABLE} on; ? is tentative, below {CLEAR}"
SCORES = ("previous", "duplicate", "induction", "sink", "current", "entropy", "normalized_entropy", "back")


def rows(
    heads: Sequence[HeadStatistics], layers: Mapping[int, str], losses: Losses | None = None
) -> list[dict[str, Any]]:
    """Return a row for each head: numbers, layer name, kind and scores (None: NaN).

    layer, head and kv_head are the model's numbers. layers: the names of layers, by their numbers. `distance` is the n
    of "n tokens back". `loss_without` is the loss without the head, if it was measured.
    """
    lines = []
    for head in heads:
        values = asdict(head)
        scores = {name: None if math.isnan(values[name]) else values[name] for name in SCORES}
        about = {"layer": head.layer, "name": layers[head.layer], "head": head.head, "kv_head": head.kv_head}
        kind = notable(head.scores)
        row = about | {"kind": kind and head.called(kind)} | scores | {"distance": head.distance}
        lines.append(row if losses is None else row | {"loss_without": losses.without[head.layer, head.head]})
    return lines


def named(head: HeadStatistics) -> str:
    """Return every notable kind of a head, the strongest first.

    A question mark follows a tentative kind.
    """
    kinds = all_notable(head.scores)
    return ", ".join(head.called(kind) + "?" * (head.scores[kind] < CLEAR) for kind in kinds)


def as_json(
    heads: Sequence[HeadStatistics], layers: Mapping[int, str], model: str, losses: Losses | None = None
) -> str:
    about = {"model": model} if losses is None else {"model": model, "loss": losses.whole}
    return json.dumps(about | {"heads": rows(heads, layers, losses)}, ensure_ascii=False, indent=1) + "\n"


def as_csv(heads: Sequence[HeadStatistics], layers: Mapping[int, str], losses: Losses | None = None) -> str:
    """Write one line for each head, empty where a score has no meaning."""
    lines, written = rows(heads, layers, losses), io.StringIO()
    table = csv.DictWriter(written, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return written.getvalue()


CAUTION = "this text repeats so much that a head which attends evenly scores {score} for induction; read another"


def caution(chance: float) -> str:
    """Return a warning where a text repeats too much for induction scores, else "".

    chance: as of `by_chance`.
    """
    return "" if chance < NOTABLE else CAUTION.format(score=score_text(chance))


def show(
    heads: Sequence[HeadStatistics],
    layers: Mapping[int, str],
    about: str,
    console: Console,
    every: bool = False,
    note: str = "",
) -> None:
    """Print the number of heads of each kind, the strongest of each, and all scores.

    For more than `MOST` heads, all scores are printed only with `every`.
    """
    from rich.table import Table
    from rich.text import Text

    console.print(Text.assemble(("regard insight", "bold"), "  ", (about, "dim")), soft_wrap=True)
    console.print()
    kinds = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("kind", "heads", "strongest"):
        kinds.add_column(title)
    names = [all_notable(head.scores) for head in heads]
    for kind in KINDS:
        scored = [head for head in heads if not math.isnan(head.scores[kind])]
        best = sorted(scored, key=lambda head: -head.scores[kind])[:STRONGEST]
        listed = "  ".join(
            f"L{head.layer} H{head.head} {score_text(head.scores[kind])}"
            + f" (n = {head.distance})" * (kind == "n tokens back")
            for head in best
        )
        kinds.add_row(
            kind,
            f"{sum(kind in name for name in names)} of {len(heads)}",
            Text(listed or "nothing repeats, or no tokens"),
        )
    console.print(kinds)
    if note:
        console.print(Text(f"\n{note}", style="dim"), soft_wrap=True)
    if not every and len(heads) > MOST:
        console.print(Text(f"\n--all lists all {len(heads)} heads", style="dim"))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("head")
    table.add_column("kinds")
    for title in ("prev", "dup", "ind", "sink", "self", "entropy", "norm.", "back"):
        table.add_column(title, justify="right")
    before = None
    for head in heads:
        if head.layer != before:
            table.add_row(Text(layers[head.layer], style="dim"))
            before = head.layer
        keys = "" if head.kv_head in (None, head.head) else f" (keys of {head.kv_head})"
        values = (getattr(head, score) for score in SCORES)
        cells = (score_text(value) for value in values)
        table.add_row(f"L{head.layer} H{head.head}{keys}", named(head), *cells)
    console.print()
    console.print(table)
    console.print(Text(f"\n{LEGEND}", style="dim"), soft_wrap=True)


def show_losses(heads: Sequence[HeadStatistics], losses: Losses, how: str, console: Console) -> None:
    """Print the heads by the loss without them, as the page ranks them."""
    from rich.table import Table

    place = {"zero": "zeros", "mean": "its mean over the text"}[how]
    whole = loss_text(losses.whole)
    console.print(f"\nLoss with all heads: {whole} nats a byte; without a head, {place} in its place:\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("head")
    table.add_column("kinds")
    for title in ("loss", "change"):
        table.add_column(title, justify="right")
    kinds = {(head.layer, head.head): named(head) for head in heads}
    for at, loss in sorted(losses.without.items(), key=lambda item: -item[1]):
        change = change_text(loss - losses.whole)
        table.add_row(f"L{at[0]} H{at[1]}", kinds[at], loss_text(loss), change)
    console.print(table)
