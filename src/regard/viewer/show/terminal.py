"""The heads of a model in a terminal: 80 columns and no colour are enough."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.interpret.formats import score_text, weight_text
from regard.viewer.data import sentences
from regard.viewer.data.scores import FEATURED
from regard.viewer.data.summary import SINK_COLUMNS, Choice, LookData, block_starts
from regard.viewer.show.blocks import Screen
from regard.viewer.show.colour import tone


def show(data: LookData, choice: Choice, console: Console) -> None:
    """Print all heads, the strongest ones, the chosen map, and its token's weights.

    Markup in the text is printed as it is.
    """
    screen = Screen.of(console)
    name = data.name(choice.layer, choice.head)
    token = f", {screen.quoted(data.labels[choice.token])}," if data.named else ""
    more = "brighter" if screen.colour else "denser"
    console.print(_heading(data, choice, screen))
    _section(console, "Heads", f"{sentences.view('heads', more)} {sentences.TENTATIVE}.")
    console.print(Padding(_overview(data, choice, screen), (0, 0, 0, 2)))
    _section(console, "Strongest heads by kind", "mean weight over the text, from 0 to 1")
    console.print(Padding(_strongest(data, screen), (0, 0, 1, 2)))
    line = sentences.view("map", more, sink=data.has_sink(choice.layer, choice.head))
    _section(console, f"Map of {name}", f"{line} {screen.legend()}")
    console.print(Padding(_map(data, choice, screen), (0, 0, 1, 2)))
    _section(console, f"What token {choice.token}{token} attends to in {name}", "")
    console.print(Padding(_attended(data, choice, screen), (0, 0, 1, 2)))
    console.print(Text(sentences.CAVEAT, style="dim"))


def _section(console: Console, title: str, note: str) -> None:
    console.print(Text.assemble((title, "bold"), "  ", (note, "dim")))


def _heading(data: LookData, choice: Choice, screen: Screen) -> RenderableType:
    lines = [
        Text.assemble(("regard look", "bold"), "  ", (data.model, "dim")),
        Text(data.about, style="dim"),
        *(Text(screen.plain(said)) for said in data.says(choice, "bright" if screen.colour else "dense")),
    ]
    if "⊢" in data.tokens:
        lines.append(Text(sentences.BEGINNING, style="dim"))
    return Padding(Group(*lines), (0, 0, 1, 0))


def _overview(data: LookData, choice: Choice, screen: Screen) -> RenderableType:
    """Return a grid of thumbnails, a row for each layer, wrapped to the width."""
    room = screen.width - 6
    side = max(9, min(16, room // data.heads - 2))
    most = max(1, (room + 2) // (side + 2))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for layer in range(data.layers):
        count = data.heads_of(layer)
        beside = -(-count // -(-count // most))  # lines of even length: nine heads as 5 + 4
        for first in range(0, count, beside):
            heads = range(first, min(first + beside, count))
            cells = [_thumbnail(data, Choice(layer, head, 0), side, choice, screen) for head in heads]
            grid.add_row(Text("" if first else f"L{data.number(layer)}", style="bold"), *cells)
    return grid


def _thumbnail(data: LookData, at: Choice, side: int, choice: Choice, screen: Screen) -> RenderableType:
    rows = side if screen.rows_per_line == 2 else side // 2
    chosen = (at.layer, at.head) == (choice.layer, choice.head)
    caption = Text(f"H{data.number(at.layer, at.head)}", style="bold reverse" if chosen else "bold")
    for score in data.kinds_of(at.layer, at.head):
        short = f"{score.called.split()[0]} back" if score.kind.name == "n tokens back" else score.kind.short
        caption = Text.assemble(
            caption,
            "\n" if side < 12 or caption.cell_len > 3 else " ",
            (f"{short}{'?' * score.tentative} {score_text(score.score)}", "dim"),
        )
    claimed = sentences.short(data.claims.get((at.layer, at.head), ()))
    if claimed and not data.kinds_of(at.layer, at.head):
        caption = Text.assemble(caption, "\n", (screen.fit(claimed, side), "dim"))
    levels = tone(data.small(at.layer, at.head, rows, side))
    return Group(*screen.dense(levels), caption, Text())


def _strongest(data: LookData, screen: Screen) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for kind in FEATURED:
        heads = data.strongest(kind.name)
        if not heads:
            reason = sentences.unscored(cross=data.cross)
            table.add_row(Text(kind.name, style="bold"), "", "", Text(reason, style="dim"))
        for rank, (layer, head, score) in enumerate(heads):
            title = (Text(kind.name, style="bold"), Text(kind.meaning, style="dim"), Text())[min(rank, 2)]
            table.add_row(title, data.name(layer, head), score_text(score), _bar(score, screen))
        if kind is not FEATURED[-1]:
            table.add_row()
    return table


def _bar(fraction: float, screen: Screen) -> Text:
    return Text(screen.bar(fraction, 20), style="cyan")


def _map(data: LookData, choice: Choice, screen: Screen) -> RenderableType:
    """Return a map with one cell per weight, or max-pooled if that is too wide."""
    at = choice.layer, choice.head
    labels, columns = data.labels, ("sink", "") * data.has_sink(*at) + data.key_labels
    longest = min(max(len(label) for label in (*labels, *columns)), 12)
    room, each = screen.width - 4, min(longest, 7)
    gutter = 2 * each + 1 if screen.rows_per_line == 2 else longest
    if 2 * max(data.n, len(columns)) <= min(room - longest - 2, 56):
        body = screen.cells(tone(data.beside(*at, data.weights(*at))), 2)
        return _framed(body, labels, columns, choice.token, longest, 2, screen)
    if max(data.n, len(columns)) > room - gutter - 2:
        return _zoomed_out(data, choice, room - 8, screen)
    body = screen.dense(tone(data.beside(*at, data.weights(*at))))
    cut, upright = ([screen.fit(label, each) for label in x] for x in (labels, columns))
    if screen.rows_per_line == 1:
        return _framed(body, labels, upright, choice.token, gutter, 1, screen)
    pairs = [" ".join(cut[k : k + 2]) for k in range(0, data.n, 2)]
    return _framed(body, pairs, upright, choice.token // 2, gutter, 1, screen)


def _framed(
    body: Sequence[Text],
    rows: Sequence[str],
    columns: Sequence[str],
    marked: int,
    gutter: int,
    cell: int,
    screen: Screen,
) -> RenderableType:
    """Return a map with labels of columns above and of rows to the left.

    marked: the row to highlight.
    """
    lines = [
        Text(" " * (gutter + 2) + "".join(c.ljust(cell) for c in line), style="dim", no_wrap=True)
        for line in screen.upright(columns, 8)
    ]
    for k, line in enumerate(body):
        label = Text(screen.right(rows[k], gutter), style="bold" if k == marked else "dim")
        lines.append(Text.assemble(label, (screen.pointer if k == marked else "  ", "bold"), line, no_wrap=True))
    return Group(*lines)


def _zoomed_out(data: LookData, choice: Choice, room: int, screen: Screen) -> RenderableType:
    before = SINK_COLUMNS * data.has_sink(choice.layer, choice.head)
    columns = min(data.n_k, room - before)
    rows = min(data.n, room * screen.rows_per_line // 2)
    starts = block_starts(data.n, rows)[:: screen.rows_per_line].tolist()
    marked = max(k for k, start in enumerate(starts) if start <= choice.token)
    ticks = "".join(f"{start:<8}" for start in block_starts(data.n_k, columns)[::8])[:columns]
    labels = [str(start) if k % 4 == 0 or k == marked else "" for k, start in enumerate(starts)]
    body = screen.dense(tone(data.small(choice.layer, choice.head, rows, before + columns)))
    first = "first the learned sink; " * bool(before)
    note = f"{first}each cell the largest of about {data.n / rows:.1f} by {data.n_k / columns:.1f} weights"
    head = Text(" " * (8 + before) + ticks, style="dim", no_wrap=True)
    return Group(head, _framed(body, labels, [], marked, 6, 1, screen), Text(note, style="dim"))


def _attended(data: LookData, choice: Choice, screen: Screen) -> RenderableType:
    attended = data.attended(choice)
    if not attended:
        return Text("nothing: this token may see no token", style="dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    for index, weight in attended:
        if index is None:
            table.add_row("", Text("sink"), weight_text(weight), _bar(weight, screen))
            continue
        if not data.named:
            table.add_row(str(index), "", weight_text(weight), _bar(weight, screen))
            continue
        before = "".join(data.key_labels[max(0, index - 12) : index])
        after = "".join(data.key_labels[index + 1 : index + 13])
        label = screen.fit(data.key_labels[index], 12)
        context = Text(screen.right(before[-12:], 12), style="dim", no_wrap=True)
        context.append(label, style="not dim bold underline").append(after[:12])
        table.add_row(str(index), Text(label), weight_text(weight), _bar(weight, screen), context)
    return table
