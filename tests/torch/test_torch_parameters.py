"""Rules that are made once of a module's parameter, where frameworks replace parameters.

`CASES` is the table of what holds. Each case does to a module whose rule was made in its constructor what it does to
one that makes its rule in each call, and both must give the same numbers.
"""

import copy
import io
import pickle
import re
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import regard
import regard.torch
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")


class Anew(nn.Module):
    """Makes the rule in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.cap = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("ids", torch.arange(6) // 3)

    def rules(self) -> dict[str, Any]:
        return {"score": [regard.alibi(self.slopes), regard.softcap(self.cap)], "mask": regard.documents(self.ids)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, **self.rules())


class Once(Anew):
    """Makes the rule in the constructor, of references."""

    def __init__(self) -> None:
        super().__init__()
        table = regard.table
        self.score = [regard.alibi(table(self, "slopes")), regard.softcap(table(self, "cap"))]
        self.mask = regard.documents(table(self, "ids"))

    def rules(self) -> dict[str, Any]:
        return {"score": self.score, "mask": self.mask}


class Held(Anew):
    """Makes the rule in the constructor, of the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.score = regard.alibi(self.slopes)

    def rules(self) -> dict[str, Any]:
        return {"score": self.score}


Make = Callable[[], nn.Module]
X = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))


def other(m: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state with other values."""
    return {name: x + 1 for name, x in m.state_dict().items()}


def trained(m: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor]:
    """Return the output and the gradients of all parameters."""
    out = m(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(m.parameters()))]


def functional_call(make: Make) -> list[torch.Tensor]:
    m = make()
    return [torch.func.functional_call(m, other(m), (X,))]


def functional_gradient(make: Make) -> list[torch.Tensor]:
    m = make()
    given = {name: x.detach() + 1 for name, x in m.named_parameters()}
    return list(torch.func.grad(lambda p: torch.func.functional_call(m, p, (X,)).square().sum())(given).values())


def functional_hessian(make: Make) -> list[torch.Tensor]:
    m = make()
    at = m.slopes.detach() + 1
    return [torch.func.hessian(lambda s: torch.func.functional_call(m, {"slopes": s}, (X,)).square().sum())(at)]


def assigned(make: Make) -> list[torch.Tensor]:
    m = make()
    m.load_state_dict(other(m), assign=True)
    return trained(m)


def on_meta(make: Make) -> list[torch.Tensor]:
    with torch.device("meta"):
        m = make()
    m.load_state_dict(make().state_dict(), assign=True)
    return trained(m)


def emptied(make: Make) -> list[torch.Tensor]:
    with torch.device("meta"):
        m = make()
    m.to_empty(device="cpu").load_state_dict(make().state_dict())
    return trained(m)


def parametrized(make: Make) -> list[torch.Tensor]:
    m = make()
    torch.nn.utils.parametrize.register_parametrization(m, "slopes", nn.Softplus())
    return trained(m)


def stacked(make: Make) -> list[torch.Tensor]:
    many = [make() for _ in range(3)]
    for n, m in enumerate(many):
        m.slopes.data += n
    parameters, _ = torch.func.stack_module_state(many)
    return [torch.func.vmap(lambda p: torch.func.functional_call(many[0], p, (X,)))(parameters)]


def swapped(make: Make) -> list[torch.Tensor]:
    m = make()
    torch.utils.swap_tensors(m.slopes, nn.Parameter(m.slopes.detach() + 1))
    return trained(m)


def deep_copy(make: Make) -> list[torch.Tensor]:
    m = make()
    again = copy.deepcopy(m)
    m.slopes.data.fill_(7)
    return trained(again)


def pickled(make: Make) -> list[torch.Tensor]:
    m = pickle.loads(pickle.dumps(make()))
    m.slopes.data += 1
    return trained(m)


def saved(make: Make) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(make(), file)
    file.seek(0)
    m = torch.load(file, weights_only=False)
    m.slopes.data += 1
    return trained(m)


def doubled(make: Make) -> list[torch.Tensor]:
    return trained(make().double(), X.double())


def offloaded(make: Make) -> list[torch.Tensor]:
    """Keep parameters away between calls, as the hooks of accelerate do."""
    m = make()
    away = {name: x.detach().clone() for name, x in m.named_parameters()}

    def bring(module: nn.Module, args: Any) -> None:
        for name, x in away.items():
            module._parameters[name] = nn.Parameter(x)

    def send(module: nn.Module, args: Any, out: Any) -> None:
        for name, x in away.items():
            module._parameters[name] = nn.Parameter(x.to("meta"))

    m.register_forward_pre_hook(bring)
    m.register_forward_hook(send)
    return [m(X), m(X)]


def averaged(make: Make) -> list[torch.Tensor]:
    m = make()
    mean = torch.optim.swa_utils.AveragedModel(m)
    m.slopes.data += 1
    mean.update_parameters(m)
    m.slopes.data += 1
    mean.update_parameters(m)
    return [mean(X)]


def checkpointed(make: Make) -> list[torch.Tensor]:
    m = make()
    out = torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False)
    return [out, *torch.autograd.grad(out.square().sum(), list(m.parameters()))]


def forward_in_reverse(make: Make) -> list[torch.Tensor]:
    m = make()
    _, tangent = torch.func.jvp(m, (X,), (X,))
    return list(torch.autograd.grad(tangent.square().sum(), list(m.parameters())))


def compiled(make: Make) -> list[torch.Tensor]:
    m = make()
    run = torch.compile(m, fullgraph=True, backend="aot_eager")
    before = [run(X), *torch.autograd.grad(run(X).square().sum(), list(m.parameters()))]
    m.load_state_dict(other(m), assign=True)
    return [*before, run(X), *torch.autograd.grad(run(X).square().sum(), list(m.parameters()))]


def exported(make: Make, strict: bool = False) -> list[torch.Tensor]:
    program = torch.export.export(make(), (X,), strict=strict).module()
    program.load_state_dict(other(program))
    return trained(program)


def exported_strictly(make: Make) -> list[torch.Tensor]:
    return exported(make, strict=True)


CASES: dict[str, Callable[[Make], list[torch.Tensor]]] = {
    "functional_call": functional_call,
    "torch.func.grad of functional_call": functional_gradient,
    "torch.func.hessian of functional_call": functional_hessian,
    "load_state_dict(assign=True)": assigned,
    "made on meta, then assigned": on_meta,
    "made on meta, then to_empty": emptied,
    "parametrize": parametrized,
    "stack_module_state and vmap": stacked,
    "swap_tensors": swapped,
    "deepcopy": deep_copy,
    "pickle": pickled,
    "torch.save and load": saved,
    ".double()": doubled,
    "offloading hooks": offloaded,
    "AveragedModel": averaged,
    "checkpoint": checkpointed,
    "jvp inside of backward": forward_in_reverse,
    "compile, then assign": compiled,
    "export": exported,
    "export(strict=True)": exported_strictly,
}


@pytest.mark.parametrize("case", on_cpu(CASES, "functional_call"))
def test_a_rule_follows_its_parameter(case: str) -> None:
    found, expected = CASES[case](Once), CASES[case](Anew)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class HeldBuffer(Anew):
    """Makes the rule in the constructor, of a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        slopes = self.slopes.detach().clone()
        del self.slopes
        self.register_buffer("slopes", slopes)
        self.score = regard.alibi(self.slopes)

    rules = Held.rules


class HeldOfChild(Anew):
    """Makes the rule in the constructor, of the parameter of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Module()
        self.child.slopes = nn.Parameter(torch.rand(4))
        self.score = regard.alibi(self.child.slopes)

    rules = Held.rules


class Late(Anew):
    """Makes the rule before its parameter is one of the module's."""

    def __init__(self) -> None:
        slopes = nn.Parameter(torch.rand(4))
        score = regard.alibi(slopes)
        super().__init__()
        self.slopes, self.score = slopes, score

    rules = Held.rules


def shard(m: nn.Module) -> None:
    """Shard over one process."""
    del m.cap  # which has no axis to shard
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            fully_shard(m, mesh=init_device_mesh("cpu", (1,)))
            m(X)
        finally:
            dist.destroy_process_group()


def convert(m: nn.Module) -> None:
    """Change the dtype by other parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        m.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REPLACEMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(other(m), assign=True),
    "to_empty": lambda m: m.to("meta").to_empty(device="cpu").load_state_dict(Anew().state_dict(), strict=False),
    ".to(dtype) by replacement": convert,
    "parametrize": lambda m: torch.nn.utils.parametrize.register_parametrization(
        getattr(m, "child", m), "slopes", nn.Softplus()
    ),
    "fully_shard": shard,
}


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("make", [Held, HeldBuffer, HeldOfChild, Late])
def test_a_replaced_parameter_raises(make: Make, replace: str) -> None:
    m = make()
    m(X)
    if make is HeldBuffer and replace == "fully_shard":  # which shards parameters alone
        return

    def call() -> torch.Tensor:
        REPLACEMENTS[replace](m)
        return m(X)  # type: ignore[no-any-return]

    with pytest.raises(NotImplementedError, match=r"made of \w+\.slopes, which was replaced since: the rule would"):
        call()


@pytest.mark.parametrize("case", ["torch.func.grad of functional_call", "stack_module_state and vmap"])
def test_a_parameter_that_a_transform_replaced_raises(case: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=re.escape(
            "a rule was made of Held.slopes, which was replaced since: the rule would read its old values, and its "
            "derivative would be zero. Make the rule with regard.table(module, name), which reads the parameter that "
            "the module has at each call"
        ),
    ):
        CASES[case](Held)


def test_a_compiled_rule_whose_parameter_was_replaced() -> None:
    m = Held()
    run = torch.compile(m, fullgraph=True, backend="aot_eager")
    run(X)
    m.load_state_dict(other(m), assign=True)
    with pytest.raises(Exception, match=r"a rule was made of Held\.slopes, which was replaced since"):
        run(X)


def test_a_parameter_whose_module_was_not_known() -> None:
    with pytest.raises(NotImplementedError, match="the parameter of a module, which was replaced since: the rule"):
        functional_gradient(Late)
    m = Late()
    _, tangent = torch.func.jvp(m, (X,), (X,))  # in place, so a constant of the transform
    assert torch.autograd.grad(tangent.square().sum(), m.slopes)[0].abs().max() > 0


def test_a_parameter_without_values() -> None:
    with pytest.raises(NotImplementedError, match=r"Held\.slopes, which was replaced since"):
        on_meta(Held)


def test_a_copy_of_a_rule_of_a_parameter() -> None:
    m = Held()
    rule = copy.deepcopy(m.score)
    m.slopes.data += 1
    torch.testing.assert_close(regard.attention(X, X, X, score=rule), Held()(X))


def test_a_module_that_was_deleted() -> None:
    m = Once()
    score = m.score[0]
    del m
    with pytest.raises(ReferenceError, match="a rule reads 'slopes' of a module that was deleted"):
        regard.attention(X, X, X, score=score)


def test_a_rule_does_not_keep_its_module_alive() -> None:
    m = Once()
    m(X)
    gone = weakref.ref(m)
    del m
    assert gone() is None


def test_a_changed_shape() -> None:
    m = Once()
    m.slopes = nn.Parameter(torch.rand(2))
    message = r"Once\.slopes is torch\.float32 of shape \(2,\), but was torch\.float32 of shape \(4,\) when a table"
    with pytest.raises(ValueError, match=message):
        m(X)


def test_a_copy_of_the_rule_alone() -> None:
    m = Once()
    rule = copy.deepcopy(m.score[0])
    m.slopes.data += 1
    torch.testing.assert_close(
        regard.attention(X, X, X, score=rule), regard.attention(X, X, X, score=regard.alibi(m.slopes))
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(2, 2), "slopes"), TypeError,
         "table(torch.nn.modules.linear.Linear, 'slopes'): 'slopes' must name a tensor, got NoneType"),
        ((torch.zeros(3), "slopes"), TypeError,
         "table takes the name of an attribute of a torch.nn.Module alone, got torch.Tensor"),
        ((nn.Linear(2, 2), 3), TypeError, "name of table must be a string, got int"),
        ((nn.Linear(2, 2), "weight", "clamp"), TypeError, "positional arguments"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        regard.table(*arguments)


def test_pretrained_models_are_made_on_meta(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc]
        model_type = "regard-once"

    class Model(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = Config
        all_tied_weights_keys: dict[str, str] = {}  # noqa: RUF012

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.slopes = nn.Parameter(torch.rand(4))
            self.rule = regard.alibi(regard.table(self, "slopes"))
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return regard.attention(x, x, x, score=self.rule)

    model = Model(Config())
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(Model.from_pretrained(tmp_path)(X), model(X))
