"""Measure attention against this machine's limits and other libraries.

Runs at the root of a checkout: `python -m benchmarks --quick`.
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report, rows
from benchmarks.measure import Report, Setting, cores
from benchmarks.row_types import Row
from benchmarks.run import QUICK, run
from regard.arguments.packages import MissingPackage, require
from regard.arguments.values import integer
from regard.engines import engines


class Refusal(Exception):
    """Raised for invalid input; its text is the one line that the user sees."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return their exit status.

    0; 2 for invalid input or a missing package, with one line on stderr; 130 after Ctrl-C before any row is done.
    """
    try:
        arguments = parser().parse_args(argv)
        console = Console(no_color=arguments.no_color or None, highlight=False, markup=False, emoji=False)
        if arguments.plot_from is not None:
            plot(arguments.plot_from, arguments.out, console)
        else:
            measure(arguments, console)
    except (Refusal, MissingPackage) as refusal:
        print(f"benchmarks: error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--quick", action="store_true", help="the rows that matter most, in a few minutes")
    command.add_argument("--roofline", action="store_true", help="the limits alone: peaks and read bandwidth")
    command.add_argument("--only", metavar="PATTERN", help="rows whose `group: name` this regular expression finds")
    command.add_argument("--list", action="store_true", help="print the rows instead of measuring them")
    command.add_argument("--threads", type=int, default=1, metavar="N", help="cores and threads (default: 1)")
    command.add_argument("--rounds", type=int, metavar="N", help="at most so many rounds (default: 9, 3 if quick)")
    command.add_argument("--engine", metavar="NAME", help="name an engine instead of taking the first that can")
    command.add_argument("--out", type=Path, metavar="DIR", help="also write report.json, report.md and a plot there")
    command.add_argument(
        "--plot-from", type=Path, metavar="JSON", help="draw all plots of a report.json beside it, or in --out"
    )
    command.add_argument("--no-color", action="store_true", help="no colours (as NO_COLOR=1)")
    return command


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Measure the chosen rows, print their tables, and write the files of --out."""
    chosen, setting = prepared(arguments)
    if arguments.list:
        report.show_rows(chosen, console)
        return
    with bar(len(chosen)) as progress, termination_interrupts():
        measured = run(chosen, setting, progress)
    report.show(measured, console)
    if arguments.out is not None:
        with writing(arguments.out):
            saved(report.write(measured, arguments.out), console)


def prepared(arguments: argparse.Namespace) -> tuple[list[Row], Setting]:
    """Check all arguments, and return the chosen rows and the settings of the run."""
    if reason := engines()["cpu"].state():
        raise Refusal(f"limits are measured with compiled kernels: {reason}")
    available = cores()
    threads = least("--threads", arguments.threads, 1)
    rounds = None if arguments.rounds is None else least("--rounds", arguments.rounds, 1)
    if threads > len(available):
        raise Refusal(f"--threads must be at most {len(available)}, the cores this process may use, got {threads}")
    if arguments.engine is not None and arguments.engine not in engines():
        raise Refusal(f"--engine must be one of {', '.join(engines())}, got {arguments.engine}")
    try:
        chosen = rows.chosen("^limits" if arguments.roofline else arguments.only, arguments.quick)
    except re.error as error:
        raise Refusal(f"--only must be a regular expression, got {arguments.only}: {error}") from None
    if not chosen:
        raise Refusal(f"--only {arguments.only} finds no row; see `python -m benchmarks --list`")
    if arguments.out is not None:
        if arguments.out.exists() and not arguments.out.is_dir():
            raise Refusal(f"cannot write to {arguments.out}: it is not a directory")
        require("python -m benchmarks --out", "matplotlib")
    setting = replace(Setting(available, threads, engine=arguments.engine), **(QUICK if arguments.quick else {}))
    return chosen, setting if rounds is None else replace(setting, rounds=rounds)


def plot(path: Path, out: Path | None, console: Console) -> None:
    """Draw the plots of a written report."""
    require("python -m benchmarks --plot-from", "matplotlib")
    try:
        written = Report.from_json(path.read_text("utf-8"))
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"--plot-from must be a report.json of these benchmarks, got {path}") from None
    folder = out or path.parent
    with writing(folder):
        saved(report.draw(written, folder), console)


def saved(paths: Sequence[Path], console: Console) -> None:
    for path in paths:
        console.print(f"saved {path}", style="bold", soft_wrap=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the system's errors about a folder into refusals."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"cannot write to {folder}: {error.strerror}") from error


def least(name: str, value: int, least: int) -> int:
    try:
        return integer(name, value, least=least, below=2**60)
    except ValueError as error:
        raise Refusal(str(error)) from None


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Make a termination request (`kill`, `timeout`) act as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def bar(total: int) -> Iterator[Callable[[str, int], object]]:
    """Show the number of finished rows on stderr, on a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda stage, done: progress.update(task, description=escape(stage), completed=done)


if __name__ == "__main__":
    sys.exit(main())
