"""Rules made of tensors: what they keep of them, and PyTorch's functions inside of rules."""

import pytest
import torch

import regard
import regard.torch


@pytest.fixture
def operands() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_mask_stays_what_it_was_when_its_tensor_changes(operands: tuple[torch.Tensor, ...]) -> None:
    for dtype in (torch.bool, torch.int64):
        flags = torch.ones(8, 8).tril().to(dtype)
        rules = regard.mask(flags), regard.causal() | flags, flags & regard.window(3)
        seen = regard.mass(flags)
        before = [regard.attention(*operands, mask=rule) for rule in rules]
        _, mass = regard.attention(*operands, observe=[seen])
        flags.fill_(1)
        flags[:, 1:] = 0
        for rule, out in zip(rules, before, strict=True):
            assert torch.equal(regard.attention(*operands, mask=rule), out)
        assert torch.equal(regard.attention(*operands, observe=[seen])[1][seen], mass[seen])
        # A call reads the tensor that it is given: every query sees the first key alone.
        out = regard.attention(*operands, mask=flags)
        assert torch.equal(out, operands[2][:, :1].expand_as(out))


def test_a_mask_of_a_module_stays_what_it_was() -> None:
    flags = torch.ones(8, 8, dtype=torch.bool).tril()
    module, x = regard.torch.MultiHeadAttention(8, 2, mask=flags), torch.randn(1, 8, 8)
    before = module(x)
    flags.fill_(True)
    assert torch.equal(module(x), before)


def test_a_mask_in_a_graph_stays_what_it_was(operands: tuple[torch.Tensor, ...]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        rule = regard.mask(flags)
        flags.fill_(True)
        return regard.attention(q, k, v, mask=rule)

    flags = torch.ones(8, 8, dtype=torch.bool).tril()
    expected = regard.attention(*operands, mask=flags)
    assert torch.equal(call(*operands, flags.clone()), expected)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands, flags.clone()), expected)


def test_arrays_of_other_libraries_are_named(operands: tuple[torch.Tensor, ...]) -> None:
    cupy = type("ndarray", (), {"__module__": "cupy", "ndim": 3})()
    text = "must be a torch.Tensor where others of the call are, got cupy.ndarray; arrays of CuPy are not served: "
    for name, call in (
        ("key", lambda: regard.attention(operands[0], cupy, operands[2])),
        ("bias", lambda: regard.attention(*operands, bias=cupy)),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == f"{name} {text}convert them with cupy.asnumpy"
