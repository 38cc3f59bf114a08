"""Command line: `regard look`, `steps`, `plan`, `insight` and `doctor`."""

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import numpy as np

import regard
from regard.arguments.packages import EXTRAS, MissingPackage, require
from regard.arguments.values import integer
from regard.engines import engines
from regard.interpret import inputs

if TYPE_CHECKING:
    from rich.console import Console

    from regard.interpret.ablation import Losses
    from regard.ops.stepping import Step

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

MOST_ENTRIES = 2**26
"""Maximum scores of `regard steps`: several arrays, of 256 MiB each in float32."""

SIZES = ("n", "n_keys", "d", "d_value", "heads", "kv_heads", "batch")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Refusal(Exception):
    """Raised for invalid input; its text is the one line that the user sees."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0; 2 for invalid input or a missing package; 1 for output that cannot be written, each with one line on stderr. If
    the reader of a pipe is gone (`| head`), it is 1 without a line; after Ctrl-C it is 130.
    """
    if sys.stdout is None or sys.stderr is None:  # closed by the caller
        with open(os.devnull, "w") as nothing:
            sys.stdout, sys.stderr = sys.stdout or nothing, sys.stderr or nothing
            return _run(argv)
    return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        try:
            if (sys.argv[1:] if argv is None else argv)[:1] == ["bench"]:
                raise Refusal("benchmarks run in a checkout of regard: `python -m benchmarks`")
            arguments = _parser().parse_args(argv)
            require(f"regard {arguments.command}", *arguments.needs)
            arguments.run(arguments)
        except SystemExit as stop:
            sys.stdout.flush()
            return stop.code if isinstance(stop.code, int) else 0
        sys.stdout.flush()
    except (Refusal, MissingPackage) as refusal:
        return _failed(str(refusal), 2)
    except BrokenPipeError:
        _discard(sys.stdout)
        return 1
    except OSError as error:
        _discard(sys.stdout)
        what = "the output" if error.filename is None else error.filename
        return _failed(f"cannot write {what}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _failed(message: str, status: int) -> int:
    """Print an error to stderr, if possible, and return the exit status."""
    try:
        print(f"regard: error: {message}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
    return status


def _discard(stream: TextIO) -> None:
    """Discard output that a stream cannot write.

    Otherwise the interpreter would try again at exit.
    """
    with suppress(OSError, ValueError):  # not a file of the system
        number = stream.fileno()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, number)
        os.close(nothing)


@contextmanager
def _input() -> Iterator[None]:
    """Turn the library's errors about bad input into refusals."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from error
    except MemoryError:
        raise Refusal("this does not fit into memory; take fewer queries or keys") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message} (see `{self.prog} --help`)")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse would hide an error of this


# Rows of arguments: name and metavar, type (bool for a flag), help, and what else argparse is told

MODEL: tuple[Any, ...] = (
    ("--model MODEL", str, "a model of transformers: a folder, or a name in the local cache; not fetched"),
    ("--dtype", str, "dtype in which the model runs (default: that of its files)", {"choices": DTYPES}),
    ("--capture FILE", Path, "what regard.capture saved"),
    ("--text TEXT", str, "what the model reads, - for standard input"),
    ("--file FILE", Path, "the text in a file"),
)
OPERANDS: tuple[Any, ...] = (
    (
        "files FILE", Path, "query, key and value: three .npy files, or one .npz or .safetensors with these "
        "(or q, k, v) in it", {"nargs": "*"},
    ),
    ("--n N", int, "queries"),
    ("--n-keys M", int, "keys (default: N)"),
    ("--d D", int, "features of a query and a key"),
    ("--d-value D", int, "features of a value (default: those of a key)"),
    ("--heads H", int, "query heads (default: one, without an axis of its own)"),
    ("--kv-heads K", int, "key and value heads (default: H)"),
    ("--dtype", str, "dtype of the arrays (default: float32)", {"choices": DTYPES}),
    ("--causal", bool, "let a query see only the keys up to itself"),
    ("--window W", int, "let a query see only itself and the W keys before it"),
)  # fmt: skip
LOOK: tuple[Any, ...] = (
    (
        "given TEXT", str, "the text, as --text (default: on the page, sentences that larger models have read; else, "
        "for the model that ships with regard, a sentence with a repeated name)", {"nargs": "?"},
    ),
    *MODEL,
    ("--image FILE", Path, "a picture that the model reads, with --text if both"),
    (
        "--arrays FILE", Path, "look at arrays instead: .npy files of query and key, and value if there is one, or one "
        ".npz or .safetensors with these (or q, k, v) or with weights, and perhaps lse, tokens and key_tokens",
        {"nargs": "+"},
    ),
    ("--causal", bool, "of arrays: let a query see only the keys up to itself"),
    ("--window W", int, "of arrays: let it see only itself and the W keys before it"),
    ("--port PORT", int, "serve the page here (default: any that is free)", {"default": 0}),
    ("--no-open", bool, "print the address of the page, and open no browser"),
    ("--terminal", bool, "print to the terminal instead"),
    (
        "--view VIEW", str, "the view that the page opens with: overview, heads, map, text, token, compare, profiles, "
        "scale, steps, ablation or arcs; the map where a layer, head, token or key is given",
    ),
    (
        "--layer L", int, "the layer to look at (default for --terminal and --save: that of the strongest induction "
        "head)",
    ),
    ("--head H", int, "the head to look at, likewise"),
    (
        "--sequence S", str, "of a model with an encoder and a decoder, the sequence to look at: its number, or a part "
        "of its name (default for files: a text over a picture or a sound)",
    ),
    (
        "--token T", str, "the token to follow, the query: its index (from the end if negative) or its text "
        "(default: the last)",
    ),
    ("--key T", str, "the key on the page that the token looks at, likewise"),
    (
        "--save PATH", Path, "write PATH instead: .html (the page in one file, works offline), .svg, .png (needs "
        "matplotlib) or .npz (the arrays); without ending .html, .svg and, with matplotlib, .png; may be repeated",
        {"action": "append", "default": []},
    ),
    (
        "--with-model", bool, "with --save: put regard's example model into the .html, which then reads texts that are "
        "typed, offline",
    ),
)  # fmt: skip
STEPS: tuple[Any, ...] = (
    *OPERANDS,
    ("--seed SEED", int, "seed of the normal numbers in query, key and value (default: 0)"),
    ("--scale X", float, "scale of the scores, 1 for the plain dot product (default: 1/√d)"),
    ("--json", bool, "print JSON, all values included (those not finite as strings)"),
)
PLAN: tuple[Any, ...] = (
    *OPERANDS,
    ("--batch B", int, "batch size (default: 1)"),
    ("--engine NAME", str, "name an engine instead of taking the first that can"),
    ("--ranks N", int, "also show the shares of N processes"),
)
INSIGHT: tuple[Any, ...] = (
    *MODEL,
    ("--prefix N", int, "tokens that make a copy (default: 1)", {"default": 1}),
    ("--all", bool, "list every head, however many there are"),
    (
        "--ablate HOW", str, "also run the example model without each head, with zero or its mean in its place: the "
        "losses", {"nargs": "?", "const": "zero"},
    ),
    ("--json", bool, "print JSON"),
    ("--csv", bool, "print CSV, a line for each head"),
)  # fmt: skip
DOCTOR: tuple[Any, ...] = (("--roofline", bool, "also measure the peaks and read bandwidth of a core"),)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regard", description="Exact attention with no cliffs, and a way to look at what was attended to."
    )
    parser.add_argument("--version", action="version", version=f"regard {regard.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    look = "look at attention on a page: of a small trained model, one of your own, a capture, or arrays"
    steps = "show every intermediate of attention, with indices, einsum, shape and values"
    plan = "tell which engine a call would take and why, its FLOPs, bytes, memory and tiles"
    for name, run, about, arguments, needs in (
        ("look", _look, look, LOOK, EXTRAS["look"]),
        ("steps", _steps, steps, STEPS, ()),
        ("plan", _plan, plan, PLAN, ()),
        ("insight", _insight, "tell what kinds of heads a model has", INSIGHT, ("rich", "safetensors")),
        ("doctor", _doctor, "report versions, engines, threads and the processor", DOCTOR, ()),
    ):
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        command.set_defaults(run=run, command=name, needs=needs)
        for row in (("--no-color", bool, "no colours (as NO_COLOR=1)"), *arguments):
            _add(command, *row)
    return parser


def _add(command: argparse.ArgumentParser, name: str, kind: Any, about: str, more: Any = None) -> None:
    name, _, metavar = name.partition(" ")
    options = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": metavar or None}
    command.add_argument(name, help=about, **options, **(more or {}))


# Commands


def _look(arguments: argparse.Namespace) -> None:
    from regard.viewer import command

    with _input():
        command.run(arguments, _window(arguments), _console(arguments), _progress(lines=arguments.model is not None))


def _steps(arguments: argparse.Namespace) -> None:
    from regard.ops.stepping import steps

    with _input():
        if arguments.files:
            query, key, value = _load(arguments)
            _check_entries(query.shape, key.shape)
        else:
            shapes, dtype = _shapes(arguments, n=6, d=4)
            _check_entries(*shapes[:2])
            # The stream of RandomState is frozen: a seed gives the same numbers in every version of NumPy.
            rng = np.random.RandomState(_least("--seed", arguments.seed or 0, 0, 2**32))
            query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        found = steps(query, key, value, causal=arguments.causal, mask=_window(arguments), scale=arguments.scale)
    if arguments.json:
        json.dump({"steps": [_plain(step) for step in found]}, sys.stdout, ensure_ascii=False, allow_nan=False)
        print()
        return
    if find_spec("rich") is None:
        print(found, *(f"\n{step.name} {step.tensor}\n{step.value}" for step in found), sep="\n")
        return
    from regard.viewer.show.steps import show_steps

    show_steps(found, _console(arguments))


def _plan(arguments: argparse.Namespace) -> None:
    from regard.ops.planning import plan

    with _input():
        if arguments.files:
            operands: Sequence[Any] = _load(arguments)
            options: dict[str, Any] = {}
        else:
            operands, dtype = _shapes(arguments)
            options = {"dtype": dtype}
        options |= {"engine": arguments.engine, "ranks": arguments.ranks}
        found = plan(*operands, causal=arguments.causal, mask=_window(arguments), **options)
    _print_table(found.rows())
    print()
    _print_table([("operation", "time", "memory, naive", "memory, here"), *found.complexity])


def _insight(arguments: argparse.Namespace) -> None:
    from regard.insight import by_chance
    from regard.interpret import table

    if arguments.json and arguments.csv:
        raise Refusal("give --json or --csv, not both")
    prefix = _least("--prefix", arguments.prefix, 1)
    if arguments.ablate not in (None, "zero", "mean"):
        raise Refusal(f"--ablate must be zero or mean, got {arguments.ablate}")
    if arguments.ablate is not None and (arguments.model, arguments.capture) != (None, None):
        raise Refusal("--ablate runs regard's example model: it does not go with --model or --capture")
    with _progress() as progress, _input():
        seen, losses = _captured(arguments, progress)
        progress("measuring heads")
        heads = seen.measure(prefix=prefix)
    if not heads:
        raise Refusal("the capture holds no layer")
    layers = {number: layer.name for number, layer in zip(seen.numbers, seen, strict=True)}
    if arguments.json:
        sys.stdout.write(table.as_json(heads, layers, seen.model, losses))
    elif arguments.csv:
        sys.stdout.write(table.as_csv(heads, layers, losses))
    else:
        longest = max(layer.n_q for layer in seen)
        about = f"{seen.model}: {len(heads)} heads in {len(layers)} layers, {longest:,} tokens"
        texts = [ids[0] for n in range(len(seen)) if not seen[n].cross and (ids := seen.ids(n, "key")) is not None]
        chance = max((by_chance(ids, prefix=prefix) for ids in texts[:1]), default=0.0)
        table.show(heads, layers, about, _console(arguments), every=arguments.all, note=table.caution(chance))
        if losses is not None:
            table.show_losses(heads, losses, arguments.ablate, _console(arguments))


def _captured(
    arguments: argparse.Namespace, progress: Callable[[object], object]
) -> "tuple[regard.Capture, Losses | None]":
    """Return a capture, and the losses of --ablate.

    The capture is that of a file, a model, or the example model.
    """
    if arguments.capture is not None:
        for name in ("model", "dtype", "text", "file"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} does not go with --capture, which has all of it")
        return inputs.capture(arguments.capture), None
    text = inputs.text(arguments.text, arguments.file)
    if arguments.model is not None:
        return inputs.model(arguments.model, text, progress, arguments.dtype), None
    inputs.require_model(arguments.dtype)
    from regard.examplemodel import ExampleModel, repeated_bytes

    model = ExampleModel.load()
    ids = repeated_bytes(40)[0] if text is None else model.encode(text)
    seen = regard.Capture.of_trace(model.run(ids), model.labels(ids))
    if arguments.ablate is None:
        return seen, None
    from regard.interpret.ablation import losses_without

    progress("running the model without each head")
    return seen, losses_without(model, ids, arguments.ablate)


def _doctor(arguments: argparse.Namespace) -> None:
    from regard.doctor import report, roofline

    sections = report()
    if arguments.roofline:
        if reason := engines()["cpu"].state():
            raise Refusal(f"--roofline measures limits with compiled kernels: {reason}")
        sections["limits of one core"] = roofline()
    for title, lines in sections.items():
        print(title)
        _print_table([(f"  {name}", line) for name, line in lines.items()])


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, the last of which wraps where the terminal ends."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    start = sum(widths) + 2 * len(widths)
    room = max(shutil.get_terminal_size().columns - start, 20) if sys.stdout.isatty() else sys.maxsize
    for *cells, last in rows:
        first, *others = textwrap.wrap(last, room) or [""]
        print(*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), first, sep="  ")
        for line in others:
            print(" " * start + line)


# Arguments and files


def _console(arguments: argparse.Namespace) -> "Console":
    from rich.console import Console

    return Console(no_color=arguments.no_color or None, highlight=False, markup=False, emoji=False)


@contextmanager
def _progress(lines: bool = False) -> Iterator[Callable[[object], object]]:
    """Show the current stage on stderr: on a terminal, or elsewhere as lines if asked for."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda stage: print(stage, file=sys.stderr, flush=True)) if lines else (lambda stage: None)
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(Text(str(stage)))


def _check_entries(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    entries = math.prod((*query[:-1], *key[-2:-1]))
    if entries > MOST_ENTRIES:
        raise Refusal(
            f"steps builds every score: {entries:,} of them, more than {MOST_ENTRIES:,}; take fewer queries or keys"
        )
    if max(math.prod(query), math.prod(key)) > MOST_ENTRIES:
        raise Refusal(f"steps shows every feature: query {query} and key {key} have more than {MOST_ENTRIES:,}")


def _window(arguments: argparse.Namespace) -> regard.Mask | None:
    return None if arguments.window is None else regard.window(_least("--window", arguments.window, 0))


def _least(name: str, value: int, least: int, below: int = 2**60) -> int:
    with _input():
        return integer(name, value, least=least, below=below)


def _shapes(
    arguments: argparse.Namespace, n: int | None = None, d: int | None = None
) -> tuple[list[tuple[int, ...]], np.dtype[Any]]:
    """Return the shapes of query, key and value on the command line, and their dtype."""
    from regard.ops.planning import shapes

    sizes = {"n": n, "d": d} | {name: value for name in SIZES if (value := getattr(arguments, name, None)) is not None}
    if sizes["n"] is None or sizes["d"] is None:
        raise Refusal("give --n and --d, or files with query, key and value")
    made = shapes(sizes, label=lambda name: f"--{name.replace('_', '-')}")
    dtype = arguments.dtype or "float32"
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return made, np.dtype(dtype)


def _load(arguments: argparse.Namespace) -> list[Array]:
    """Return query, key and value from the files on the command line."""
    for name in (*SIZES, "dtype", "seed"):
        if getattr(arguments, name, None) is not None:
            raise Refusal(
                f"--{name.replace('_', '-')} does not go with files: sizes and values are those of the arrays"
            )
    found = inputs.operands(arguments.files)
    return [found[name] for name in inputs.OPERANDS]


def _plain(step: "Step") -> dict[str, Any]:
    """Return a step in a form that JSON can hold."""
    return {
        "name": step.name,
        "symbol": step.symbol,
        "indices": step.indices,
        "formula": step.formula,
        "einsum": step.einsum,
        "shape": list(step.shape),
        "dtype": step.value.dtype.name,
        "value": _nested(step.value.astype(np.float64).tolist()),
    }


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(x) for x in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
