"""Models of PyTorch that read typed texts: captures, logits, and runs without some heads."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard.interpret.capture.captured import Capture
from regard.runtime.forks import renewed
from regard.runtime.progress import Stage
from regard.torch.capture.encoding import check_length, encoded
from regard.torch.capture.forward import (
    ANSWER,
    attention_seen,
    layers_of,
    layers_reported,
    on_tokens_alone,
    without_logits,
)
from regard.torch.capture.recorder import capture, pieces
from regard.torch.capture.switched import on_regard, redirected
from regard.torch.public.attention import attention as attention_of_tensors
from regard.torch.tensors import modes

Array = np.ndarray[Any, np.dtype[Any]]
Replacement = Literal["zero", "mean"]
Progress = Callable[[Stage], object]

LOGITS = 128 * 2**20
"""Bytes of logits of one forward, at most. Of longer texts only the last tokens have any."""

TOKENS = 4096
"""Tokens of the sequences that run side by side, each without another head."""

MASKED = 7
"""One token of so many is masked in each sequence, as in BERT's training."""

DRAWN = 20
"""Tokens of which the first with a text of its own continues a text."""

UNCOUNTED = -100
"""The target of a position without a loss."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences whose logits tell what a model expects of one text.

    given: the model's arguments, of r sequences. positions (m,), rows (m,): the logits of position i are those of
    sequence rows[i]. targets (m,): the token that is expected there, `UNCOUNTED` where none follows.
    """

    given: Mapping[str, torch.Tensor]
    positions: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor

    @property
    def sequences(self) -> int:
        """The number r of sequences."""
        return int(next(iter(self.given.values())).shape[0])


@dataclass(eq=False)
class TextRun:
    """Run of a model on a text.

    values: by layer, (b, h_kv, n_k, d_v). batch: None if the model predicts no tokens of this text. logits (m,
    vocabulary): None until they are computed.
    """

    capture: Capture
    values: Mapping[str, Array]
    batch: Batch | None
    logits: Array | None = None

    @property
    def nbytes(self) -> int:
        """The memory of its logits."""
        return 0 if self.logits is None else int(self.logits.nbytes)


class TextModel:
    """A PyTorch model with its tokenizer. Its runs go one at a time.

    predicts: "next" tokens, "masked" ones, or "" for a model without logits of tokens.
    """

    def __init__(self, network: nn.Module, tokenizer: Any):
        self.network, self.tokenizer = network, tokenizer
        self.lock = renewed(self, "lock", threading.RLock)
        self.answers = bool(getattr(getattr(network, "config", None), "is_encoder_decoder", False))
        generates = getattr(network, "can_generate", lambda: False)()
        masked = (
            type(network).__name__.endswith("ForMaskedLM") and getattr(tokenizer, "mask_token_id", None) is not None
        )
        self.predicts: Literal["next", "masked", ""] = "next" if generates else "masked" if masked else ""

    def read(self, text: str, progress: Progress = lambda stage: None) -> TextRun:
        """Run the model on a text.

        progress: is told each layer, and ends the run if it raises.

        Raises ValueError for a text that is empty or too long, and where no attention is seen.
        """
        ids, labels = encoded(self.tokenizer, text)
        check_length(ids, getattr(self.network, "config", None))
        values: dict[str, Array] = {}
        with self.lock, self.evaluating():
            batch_inputs = {"input_ids": torch.from_numpy(ids).to(self._device())}
            if self.answers:
                batch_inputs["decoder_input_ids"] = self._answer(batch_inputs)
            shown = {batch_inputs["input_ids"].shape: labels}
            with (
                attention_seen(self.network, "this model"),
                capture(self.network, tokenizer=lambda row: self._labels(row, shown), values=values) as seen,
                layers_reported(self.network, progress),
                on_tokens_alone(self.network),
            ):
                if self.predicts != "next":
                    without_logits(self.network)(**batch_inputs)
                    return TextRun(seen, values, self._masked(batch_inputs["input_ids"]))
                logits = self.forward(batch_inputs, self._kept(batch_inputs))
            batch = next_tokens(batch_inputs, logits.shape[1])
            return TextRun(seen, values, batch, _selected(logits, batch).cpu().numpy())

    def logits(self, run: TextRun) -> Array:
        """Return the logits (m, vocabulary) of a run, computed when first needed."""
        assert run.batch is not None
        if run.logits is None:
            with self.lock, self.evaluating():
                run.logits = _selected(self.forward(run.batch.given), run.batch).cpu().numpy()
        return run.logits

    def without(
        self, run: TextRun, layer: str, heads: Sequence[int], how: Replacement, progress: Progress = lambda stage: None
    ) -> Array:
        """Return the logits (m, vocabulary) of a text with some heads of a layer replaced."""
        assert run.batch is not None
        with (
            self.lock,
            self.evaluating(),
            layers_reported(self.network, progress),
            heads_replaced(self.network, layer, [tuple(heads)] * run.batch.sequences, how),
        ):
            logits = self.forward(run.batch.given, self.kept(run.batch))
        return _selected(logits, run.batch).cpu().numpy()

    def label(self, token: int) -> str:
        """Return the piece of text of a token."""
        return pieces(self.tokenizer, [token])[0]

    def continuation(self, run: TextRun, drawn: bool) -> str:
        """Return the text of one more token: the likeliest, or one drawn by its probability.

        Only tokens with a text of their own are drawn. Raises ValueError if the likeliest one ends the text.
        """
        assert run.batch is not None
        shares = torch.from_numpy(self.logits(run)[-1]).double().softmax(-1)
        if drawn:
            order = torch.multinomial(shares, min(DRAWN, int((shares > 0).sum())))
        else:
            order = shares.argsort(descending=True)[:DRAWN]
            if int(order[0]) in self.tokenizer.all_special_ids:
                raise ValueError(f"the model expects the end of the text here, {self.label(int(order[0]))}")
        ids = run.batch.given["input_ids"][0].tolist()
        before = self.tokenizer.decode(ids)
        for token in order.tolist():
            after = self.tokenizer.decode([*ids, token])
            more = after.removeprefix(before)
            if token not in self.tokenizer.all_special_ids and after != more != "" and "\ufffd" not in more:
                return str(more)
        raise ValueError("no likely token has a text of its own here")

    def _labels(self, row: list[int], shown: Mapping[Any, list[str]]) -> list[str]:
        return shown.get((1, len(row))) or pieces(self.tokenizer, row)

    def _device(self) -> torch.device:
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run without derivatives, and without dropout of training."""
        training = [module for module in self.network.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def _answer(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tokens that an encoder-decoder model answers, but the last."""
        network: Any = self.network
        answer: torch.Tensor = network.generate(**given, max_new_tokens=ANSWER, do_sample=False, num_beams=1)
        return answer[:, : max(1, answer.shape[1] - 1)]

    def _kept(self, given: Mapping[str, torch.Tensor]) -> int:
        """Return how many of the last tokens get logits."""
        n = given["decoder_input_ids" if self.answers else "input_ids"].shape[1]
        return min(n, max(1, LOGITS // (4 * self.vocabulary)))

    def kept(self, batch: Batch) -> int:
        """Return how many of the last tokens of a batch have logits, 0 for all."""
        return len(batch.positions) if self.predicts == "next" else 0

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        config: Any = getattr(self.network, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return int(getattr(text, "vocab_size", None) or 1)

    def forward(self, given: Mapping[str, torch.Tensor], kept: int = 0) -> torch.Tensor:
        """Return the logits (b, m, vocabulary) of the last `kept` tokens, of all if 0."""
        few = {"use_cache": False, "logits_to_keep": kept}
        taken = inspect.signature(self.network.forward).parameters
        logits: torch.Tensor = self.network(**given, **{name: x for name, x in few.items() if name in taken}).logits
        return logits[:, -kept:]

    def _masked(self, ids: torch.Tensor) -> Batch | None:
        """Return masked sequences of a text, None if the model fills no masks, or the text is too long for that."""
        few = 4 * self.vocabulary * ids.shape[1] * min(MASKED, ids.shape[1]) <= 4 * LOGITS
        return masked(ids, self.tokenizer) if self.predicts == "masked" and few else None


def next_tokens(given: Mapping[str, torch.Tensor], m: int) -> Batch:
    """Return the sequence whose last m logits tell the next tokens."""
    ids = given.get("decoder_input_ids", given["input_ids"])[0]
    positions = torch.arange(len(ids) - m, len(ids))
    targets = torch.cat([ids[len(ids) - m + 1 :].cpu(), torch.tensor([UNCOUNTED])])
    return Batch(given, positions, torch.zeros_like(positions), targets)


class LossesWithout:
    """The mean loss of a text without each head, computed some heads at a time.

    layers: the names of some layers. loss: with all heads, None before the first step. rows: (layer, head, loss), by
    the places of a layer in `layers` and of a head in it. wanted: tells before each layer of the model whether the step
    goes on; a step that does not is made again.

    Raises ValueError for a text of one token.
    """

    def __init__(
        self,
        model: TextModel,
        run: TextRun,
        layers: Sequence[str],
        how: Replacement,
        wanted: Callable[[], bool] = lambda: True,
    ):
        assert run.batch is not None
        if bool((run.batch.targets == UNCOUNTED).all()):
            raise ValueError("a loss needs at least 2 tokens")
        self.model, self.run, self.how, self.wanted = model, run, how, wanted
        of = {layer.name: layer for layer in run.capture.layers}
        self.layers = [of[name] for name in layers]
        self.loss: float | None = None
        self.rows: list[tuple[int, int, float]] = []
        self.error: Exception | None = None
        self.total = sum(len(layer.numbers) for layer in self.layers)
        self._ends: dict[nn.Module, Any] = {}

    @property
    def whole(self) -> bool:
        """True if the loss without every head is known."""
        return len(self.rows) == self.total

    def grow(self) -> None:
        """Compute the loss with all heads, then without the next few."""
        with self.model.lock, self.model.evaluating(), layers_reported(self.model.network, self._check):
            try:
                self._step()
            except _Unwanted:
                return
        if self.whole:
            self._ends.clear()

    def _check(self, stage: Stage) -> None:
        if not self.wanted():
            raise _Unwanted

    def _step(self) -> None:
        batch = self.run.batch
        assert batch is not None
        if self.loss is None:
            with recorded(self.model.network) as ends:
                logits = self.model.forward(batch.given, self.model.kept(batch))
            self._ends, self.loss = ends, _losses(logits, batch)[0]
            return
        number, first = self._next()
        layer = self.layers[number]
        r, n = next(iter(batch.given.values())).shape
        most = min(TOKENS // (r * n), LOGITS // (4 * r * len(batch.positions) * self.model.vocabulary))
        heads = range(first, min(first + max(1, most), len(layer.numbers)))
        repeated = {name: x.repeat(len(heads), 1) for name, x in batch.given.items()}
        replaced = [(layer.numbers[head],) for head in heads for _ in range(r)]
        with (
            skipped(self.model.network, layer.name, self._ends, len(heads)),
            heads_replaced(self.model.network, layer.name, replaced, self.how),
        ):
            logits = self.model.forward(repeated, self.model.kept(batch))
        self.rows += [(number, head, loss) for head, loss in zip(heads, _losses(logits, batch), strict=True)]

    def _next(self) -> tuple[int, int]:
        """Return the layer and the head to go on with."""
        done = len(self.rows)
        for number, layer in enumerate(self.layers):
            if done < len(layer.numbers):
                return number, done
            done -= len(layer.numbers)
        raise StopIteration


class _Unwanted(Exception):
    """Raised in a forward that is not wanted any more."""


def masked(ids: torch.Tensor, tokenizer: Any) -> Batch:
    """Return sequences (r, n) in which one of r tokens of `ids` (1, n) is masked, each token once.

    Tokens that are no text, as [CLS], are not masked.
    """
    n = ids.shape[1]
    r = min(MASKED, n)
    positions = torch.arange(n)
    special = torch.isin(ids[0].cpu(), torch.tensor(tokenizer.all_special_ids))
    rows = ids.repeat(r, 1)
    hidden = (positions[None] % r == torch.arange(r)[:, None]) & ~special
    rows[hidden.to(ids.device)] = tokenizer.mask_token_id
    return Batch({"input_ids": rows}, positions, positions % r, ids[0].cpu().masked_fill(special, UNCOUNTED))


@contextmanager
def heads_replaced(
    network: nn.Module, layer: str, heads: Sequence[tuple[int, ...]], how: Replacement
) -> Iterator[None]:
    """Replace the outputs of heads of one layer inside of a `with`, other ones in each sequence.

    layer: the name of its module, with "#2" for its second call in a forward. heads: those of each sequence. how: by
    zeros, or by the mean of the head's own outputs over all positions.
    """
    name, _, times = layer.partition("#")
    inside = ModuleCall(network.get_submodule(name if name in dict(network.named_modules()) else ""), int(times or 1))

    def attention(*args: Any, **options: Any) -> Any:
        attended = attention_of_tensors(*args, **options)
        if not inside.now:
            return attended
        out, *others = attended if isinstance(attended, tuple) else (attended,)
        out = replaced(out, heads, how, -2 if options.get("layout") == "bnhd" else -3)
        return (out, *others) if others else out

    def own(function: Any, *args: Any, **options: Any) -> Any:
        named = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"the model runs {named} for its attention, whose heads cannot be switched off")

    with ExitStack() as stack:
        stack.enter_context(inside.hooked())
        stack.enter_context(on_regard(network, own, lambda index, bounds: None))
        stack.enter_context(redirected(attention))
        yield


class ModuleCall:
    """Tells whether a module runs for the nth time in a forward."""

    def __init__(self, module: nn.Module, nth: int):
        self.module, self.nth, self.count, self.depth = module, nth, 0, 0

    @property
    def now(self) -> bool:
        """True while it does."""
        return self.depth > 0 and self.count == self.nth

    @contextmanager
    def hooked(self) -> Iterator[None]:
        def enter(*_: Any) -> None:
            self.count, self.depth = self.count + 1, self.depth + 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        handles = [
            self.module.register_forward_pre_hook(enter),
            self.module.register_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def replaced(out: torch.Tensor, heads: Sequence[tuple[int, ...]], how: Replacement, axis: int) -> torch.Tensor:
    """Return outputs with those of some heads replaced, other ones in each sequence.

    out: (b, h, n, d_v) for axis −3, (b, n, h, d_v) for −2. heads: those of each of the b sequences.
    """
    out = out.clone()
    for b, numbers in enumerate(heads):
        of = out[b].movedim(axis, 0)  # (h, n, d_v)
        for number in numbers:
            of[number] = of[number].mean(0, keepdim=True) if how == "mean" else 0
    return out


@contextmanager
def recorded(network: nn.Module) -> Iterator[dict[nn.Module, Any]]:
    """Record what each layer returns inside of a `with`, in the order in which they run.

    Empty if a layer runs twice.
    """
    ends: dict[nn.Module, Any] = {}
    twice: set[nn.Module] = set()

    def ended(module: nn.Module, _: Any, made: Any) -> None:
        twice.update({module} & ends.keys())
        ends[module] = made

    handles = [layer.register_forward_hook(ended) for layer in layers_of(network)]
    try:
        yield ends
    finally:
        for handle in handles:
            handle.remove()
        if twice:
            ends.clear()


@contextmanager
def skipped(network: nn.Module, layer: str, ends: Mapping[nn.Module, Any], times: int) -> Iterator[None]:
    """Skip the layers that run before the one of an attention, inside of a `with`.

    Skipped layers return what they returned in `ends`, for `times` as many sequences.
    """
    of = [module for name, module in network.named_modules() if f"{layer}.".startswith(f"{name}.")]
    before = list(ends)
    before = before[: next((n for n, module in enumerate(before) if module in of), 0)]
    for module in before:
        outputs = modes.map_tensors(torch.Tensor, lambda x: _repeated(x, times), ends[module])
        module.forward = lambda *args, _made=outputs, **options: _made
    try:
        yield
    finally:
        for module in before:
            del module.forward


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat(times, *[1] * (x.ndim - 1)) if x.ndim else x


def _selected(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the logits (m, vocabulary) of a batch, from those of its sequences."""
    return logits[batch.rows, batch.positions - batch.positions[0]].float()


def _losses(logits: torch.Tensor, batch: Batch) -> list[float]:
    """Return the mean loss of each repetition of a batch, in nats: one at a time is selected and cast."""
    targets, each = batch.targets.to(logits.device), logits.split(batch.sequences)
    return [float(F.cross_entropy(_selected(one, batch), targets, ignore_index=UNCOUNTED)) for one in each]
