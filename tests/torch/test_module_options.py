"""Options of the modules: listed by signatures and types, and answered by name when they are called otherwise."""

import inspect
from typing import get_type_hints

import pytest
import torch

import regard
from regard.torch import FeedForward, MultiHeadAttention, Transformer, TransformerBlock
from regard.torch.nn.modules import BlockOptions, HeadOptions

pytestmark = pytest.mark.engine("tiled")

X = torch.ones(2, 5, 8)
SIZES = {MultiHeadAttention: (8, 2), TransformerBlock: (8, 2), Transformer: (1, 8, 2), FeedForward: (8, 16)}
MODULES = (MultiHeadAttention, TransformerBlock, Transformer)


def options(module):
    return {name: x for name, x in inspect.signature(module).parameters.items() if x.kind is x.KEYWORD_ONLY}


def test_signatures_list_every_option():
    attention, block, stack = map(options, MODULES)
    own = {"activation", "norm", "norm_eps", "norm_first", "attention_bias", "cross_attention", "context_dim"}
    assert block.keys() == attention.keys() | own
    assert stack.keys() == block.keys() | {"final_norm"}
    assert all(x.kind is not x.VAR_KEYWORD for module in MODULES for x in inspect.signature(module).parameters.values())


def test_types_list_every_option_with_its_type():
    assert HeadOptions.__annotations__.keys() == options(MultiHeadAttention).keys() - {
        "bias", "dropout", "device", "dtype"
    }  # fmt: skip
    assert BlockOptions.__annotations__.keys() == options(TransformerBlock).keys()
    block = get_type_hints(TransformerBlock.__init__.__wrapped__)
    for name, kind in get_type_hints(BlockOptions).items():
        assert name not in block or block[name] == kind, name
    attention = get_type_hints(MultiHeadAttention.__init__.__wrapped__)
    for name, kind in get_type_hints(HeadOptions).items():
        assert attention[name] == kind, name


@pytest.mark.parametrize("module", SIZES)
def test_a_misspelled_option_is_answered(module):
    wrong, meant = ("drop_out", "dropout") if module is FeedForward else ("casual", "causal")
    with pytest.raises(TypeError) as raised:
        module(*SIZES[module], **{wrong: True})
    said = f"{module.__name__}() got an unexpected keyword argument {wrong!r}; did you mean {meant!r}?"
    assert str(raised.value) == said


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("is_causal", "here it is causal="),
        ("dropout_p", "here it is dropout="),
        ("enable_gqa", "here it is not needed: query may have a multiple of the heads of key"),
        ("sliding_window", "here it is mask=regard.window(size - 1)"),
        ("embed_dim", "that would be d_model=, which is not taken here"),
    ],
)
def test_options_of_pytorch_are_answered(module, option, answer):
    if option == "embed_dim":
        answer = "here it is d_model="
    with pytest.raises(TypeError) as raised:
        module(*SIZES[module], **{option: None})
    assert str(raised.value) == f"{module.__name__}() got an unexpected keyword argument {option!r}; {answer}"


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("is_causal", "here it is causal= of the constructor"),
        ("attn_mask", "here it is mask= (True = attend), or bias= of regard.attention for floats"),
        ("dropout_p", "here it is dropout= of the constructor"),
        ("maks", "did you mean 'mask'?"),
    ],
)
def test_options_of_calls_are_answered(module, option, answer):
    made = module(*SIZES[module])
    with pytest.raises(TypeError) as raised:
        made(X, **{option: None})
    said = f"{module.__name__}.forward() got an unexpected keyword argument {option!r}; {answer}"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "copy",
    [
        lambda: MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(8, 2), casual=True),
        lambda: TransformerBlock.from_torch(torch.nn.TransformerEncoderLayer(8, 2), casual=True),
        lambda: Transformer.from_torch(
            torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 1, enable_nested_tensor=False),
            casual=True,
        ),
    ],
)
def test_copies_answer_too(copy):
    with pytest.raises(TypeError, match=r"from_torch\(\) got .* 'casual'; did you mean 'causal'\?"):
        copy()


def test_modules_with_all_these_still_compute():
    stack = Transformer(1, 8, 2, causal=True, mask=regard.window(2), positions="rope", norm="rms", norm_first=True)
    assert stack(X).shape == X.shape
    assert stack.norm is not None
