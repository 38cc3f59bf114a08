"""Models to measure: random weights, and steps of inference and training.

Each runs with every implementation of attention.
"""

import copy
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import regard.torch
from benchmarks.measure import EAGER, SDPA, SUBJECT, Array
from benchmarks.unet import FUNCTIONS, UNet

IMPLEMENTATIONS = {EAGER: "eager", SDPA: "sdpa", SUBJECT: "regard"}
"""Their `attn_implementation` in transformers."""

Given = dict[str, Tensor]
Named = dict[str, Array]
Prepared = tuple[
    Callable[[], Any], Callable[[Any], dict[str, Tensor]]
]  # the call to time, and a function from its result to tensors


@dataclass(frozen=True, eq=False)
class Model:
    """A module with random weights, its inputs by name, and the step to measure."""

    make: Callable[[], Any]
    given: Callable[[], Given]
    step: Callable[[Any, Given], Prepared]


# Modules


def of_transformers(architecture: str, **sizes: Any) -> Any:
    import transformers

    kind = getattr(transformers, architecture)
    return kind(kind.config_class(**sizes))


def whisper_encoder(**sizes: Any) -> Any:
    from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperEncoder

    return WhisperEncoder(WhisperConfig(**sizes))


LLAMA = partial(
    of_transformers, "LlamaForCausalLM", vocab_size=32_000, hidden_size=768, intermediate_size=2_048,
    num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip


# Inputs


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens(batch: int, n: int, vocabulary: int) -> Given:
    return {"input_ids": torch.randint(vocabulary, (batch, n), generator=random())}


def padded(batch: int, n: int, vocabulary: int) -> Given:
    """Return sequences of n / 2 to n tokens, padded to n."""
    lengths = torch.linspace(n // 2, n, batch).long()
    return tokens(batch, n, vocabulary) | {"attention_mask": (torch.arange(n) < lengths[:, None]).long()}


def text_to_text(batch: int, n: int, n_out: int, vocabulary: int) -> Given:
    return tokens(batch, n, vocabulary) | {"labels": torch.randint(vocabulary, (batch, n_out), generator=random())}


def floats(**shapes: tuple[int, ...]) -> Given:
    generator = random()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# Steps


def forward(model: Any, given: Given) -> Prepared:
    """Prepare the output of an encoder."""

    def call() -> Any:
        with torch.inference_mode():
            return model(**given)[0]

    return call, lambda out: {"out": out}


def prefill(model: Any, given: Given) -> Prepared:
    """Prepare the logits of the last token, and a cache.

    The keys of the last layer depend on every token.
    """

    def call() -> Any:
        with torch.inference_mode():
            return model(**given, use_cache=True, logits_to_keep=1)

    return call, lambda out: {"logits": out.logits, "keys": out[cache_name(model)].layers[-1].keys}


def cache_name(model: Any) -> str:
    """Return the name of the cache in arguments and outputs of a model."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def generation(model: Any, given: Given, steps: int = 32) -> Prepared:
    """Prepare the logits of the last tokens, one after the other from a cache.

    The tokens are given, not sampled.
    """
    ids = given["input_ids"]
    first, name = ids.shape[1] - steps, cache_name(model)
    with torch.inference_mode():
        cache = model(ids[:, :first], use_cache=True, logits_to_keep=1)[name]

    def call() -> Any:
        with torch.inference_mode():
            columns = ids[:, first:].split(1, dim=1)
            logits = [model(x, use_cache=True, **{name: cache}).logits for x in columns]
            cache.crop(-steps)
        return logits

    return call, lambda logits: {"logits": torch.cat(logits)}


def training(model: Any, given: Given, **watched: str) -> Prepared:
    """Prepare the loss and the gradients of all parameters.

    watched: names that select the parameters to compare.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    inputs = {"labels": given["input_ids"]} | given

    def call() -> Any:
        return torch.autograd.grad(model(**inputs).loss, parameters)

    def read(gradients: Any) -> dict[str, Tensor]:
        found = dict(zip(names, gradients, strict=True))
        return {
            label: torch.cat([x.flatten() for name, x in found.items() if part in name])
            for label, part in watched.items()
        }

    return call, read


def llama(n: int, step: Callable[..., Prepared]) -> Model:
    return Model(LLAMA, partial(tokens, 1, n, 32_000), step)


TRAINING = partial(training, dq="q_proj", dk="k_proj", dv="v_proj")
MODELS = {
    "Llama, prefill of 256": llama(256, prefill),
    "Llama, prefill of 1,024": llama(1_024, prefill),
    "Llama, prefill of 2,048": llama(2_048, prefill),
    "Llama, training of 256": llama(256, TRAINING),
    "Llama, training of 512": llama(512, TRAINING),
    "Llama, training of 1,024": llama(1_024, TRAINING),
    "Llama, generation of 32 after 1,024": llama(1_024 + 32, generation),
    "BERT, 4 padded to 256": Model(
        partial(of_transformers, "BertModel", num_hidden_layers=4), partial(padded, 4, 256, 30_522), forward
    ),
    "ViT, 4 images": Model(
        partial(of_transformers, "ViTModel", num_hidden_layers=4),
        partial(floats, pixel_values=(4, 3, 224, 224)),
        forward,
    ),
    "Whisper, encoder": Model(
        partial(whisper_encoder, d_model=768, encoder_layers=4, encoder_attention_heads=12, encoder_ffn_dim=3_072),
        partial(floats, input_features=(1, 80, 3_000)),
        forward,
    ),
    "T5, training of 512 to 128": Model(
        partial(
            of_transformers, "T5ForConditionalGeneration", num_layers=4, num_heads=6, d_ff=1_024,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
        ),
        partial(text_to_text, 1, 512, 128, 32_128),
        partial(training, dbias="relative_attention_bias", dq="Attention.q", dk="Attention.k", dv="Attention.v"),
    ),
    "U-Net, latents of 64 × 64": Model(
        UNet, partial(floats, latents=(1, 4, 64, 64), time=(1, 1), text=(1, 77, 256)), forward
    ),
}  # fmt: skip
"""Models by the names of their rows, without dropout.

Llama has 100M parameters, BERT, ViT and Whisper (small) four of twelve layers, T5 (1.1, small) four of eight.
"""


# Calls to compare


@lru_cache(maxsize=1)  # the rows of a model follow each other
def module(model: Model) -> Any:
    """Make the module in float32, with weights that bfloat16 can represent.

    Every dtype then computes the same function.
    """
    torch.manual_seed(0)
    made = model.make().eval()
    for x in made.parameters():
        x.data = x.data.bfloat16().float()
    return made


def prepared(model: Model, who: str, dtype: str) -> tuple[Callable[[], Any], Callable[[Any], Named]]:
    """Prepare a step of a model in a dtype with an implementation of attention.

    Returns the call, and a function from its result to named arrays.
    """
    if who == SUBJECT:
        regard.torch.register_transformers()
    whole, wanted = module(model), getattr(torch, dtype)
    # Parameters that already have the dtype are shared with other implementations. Buffers stay in float32.
    kept = {id(x): x if x.dtype == wanted else torch.nn.Parameter(x.detach().to(wanted)) for x in whole.parameters()}
    whole = copy.deepcopy(whole, kept)
    whole.set_attn_implementation(IMPLEMENTATIONS[who])
    given = {name: x.bfloat16().to(wanted) if x.is_floating_point() else x for name, x in model.given().items()}
    call, read = model.step(whole, given)
    return call, lambda result: {name: x.detach().double().numpy() for name, x in read(result).items()}


@lru_cache(maxsize=1)
def exact(model: Model) -> Named:
    """Compute the step in float64 and eager.

    Parts that the model itself computes in float32 stay.
    """
    call, read = prepared(model, EAGER, "float64")
    return read(call())


# The share of attention


def share(who: str, call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the share of one call's time in attention, backward included.

    who: the implementation of attention.
    """
    from_transformers = sys.modules.get("transformers.modeling_utils")
    tables = [FUNCTIONS, *([from_transformers.ALL_ATTENTION_FUNCTIONS] if from_transformers else [])]
    name, inside = IMPLEMENTATIONS[who], Inside(clock)
    with ExitStack() as stack:
        for functions in tables:
            stack.enter_context(replaced(functions, name, partial(inside, functions.get(name))))
        start = clock()
        call()
        return inside.seconds / (clock() - start)


@contextmanager
def replaced(functions: MutableMapping[str, Any], name: str, function: Any) -> Iterator[None]:
    before = functions.get(name)
    functions[name] = function
    try:
        yield
    finally:
        del functions[name]
        if functions.get(name) is not before:
            functions[name] = before


class Inside:
    """Attention that counts the seconds spent in it, forward and backward."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.seconds = clock, 0.0

    def enter(self) -> None:
        self.seconds -= self.clock()

    def leave(self) -> None:
        self.seconds += self.clock()

    def __call__(self, function: Any, *given: Any, **options: Any) -> Any:
        if function is None:  # transformers has an eager function for each model
            function = sys.modules[type(given[0]).__module__].eager_attention_forward
        first = next(n for n, x in enumerate(given) if isinstance(x, Tensor))
        operands = Mark.apply(self.leave, *given[first : first + 3])
        self.enter()
        found = function(*given[:first], *operands, *given[first + 3 :], **options)
        self.leave()
        out, *others = found if isinstance(found, tuple) else (found,)
        (out,) = Mark.apply(self.enter, out)
        return (out, *others) if isinstance(found, tuple) else out


class Mark(torch.autograd.Function):
    """The identity on tensors, which calls a function when backward reaches it."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.function()
        return (None, *gradients)
