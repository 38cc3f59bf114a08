"""All types of transformers on the inputs of their own testers, "regard" against "eager"; run by hand.

    python tests/foreign/models.py FOLDER                    # of transformers' repository, with its tests
    python tests/foreign/models.py FOLDER --only git,t5 --seconds 900

Each test class of a type has a small configuration and inputs. Its first model and the first one that generates are
compared in float64: outputs and gradients with the tester's inputs, outputs with padding on the left and on the right,
and logits of greedy generation. Rows of padding are left out. The wheel of transformers has no tests. A type that those
tests lack is built from SIZES, and gets token ids alone. It prints a line for each type that is not equal, and counts.
"""

import argparse
import copy
import importlib
import signal
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

import regard.torch
from regard.torch.dropins import transformers as integration

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}  # of the norm; some models compute parts in float32
LONGEST = 40  # seconds for a test class
WORST = "differs", "refused", "not here", "as sdpa", "own attention", "equal"
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4,
    "index_head_dim": 16, "index_n_heads": 2, "linear_head_dim": 8, "linear_num_heads": 4, "layer_group_size": 2,
    "image_size": 16, "patch_size": 4, "depth": 2, "num_heads": 4,
}  # fmt: skip
SIZES_OF: dict[str, dict[str, Any]] = {
    "dory": {"use_cache": False},
    "dots3_note_text": {"per_layer_config": {}},
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2},
    "hy_v4_vl_text": {"qk_rope_head_dim": 64, "index_head_dim": 80},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen4_exp_text": {"indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 16},
}  # fmt: skip
MOST = 10**8  # parameters of a model that is built from SIZES
calls = 0


def counted(*args: Any, **options: Any) -> Any:
    global calls
    calls += 1
    return integration.attention(*args, **options)


class LateError(BaseException):
    """A test class takes too long."""


class NotHereError(Exception):
    """The tester or eager itself does not run."""


def testers(folder: Path, only: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield each type with one of its test cases, which is set up; or with the error of its file."""
    sys.path.insert(0, str(folder))
    for path in sorted((folder / "tests" / "models").glob("*/test_modeling_*.py")):
        name = path.parent.name
        if only and name not in only:
            continue
        try:
            module = importlib.import_module(f"tests.models.{name}.{path.stem}")
        except Exception as error:
            yield name, error
            continue
        for case in vars(module).values():
            if not isinstance(case, type) or not issubclass(case, unittest.TestCase):
                continue
            if case.__module__ == module.__name__ and hasattr(case, "_prepare_for_class"):
                yield name, case


def small(kind: Any) -> Any:
    """Return a configuration of a class with small SIZES, in its parts too."""
    sizes = SIZES | SIZES_OF.get(kind.model_type, {})
    known = {name: sizes.get(name, sizes.get(kind.attribute_map.get(name))) for name in signature(kind).parameters}
    parts = {name: small(part).to_dict() for name, part in kind.sub_configs.items() if hasattr(part, "model_type")}
    return kind(**{name: x for name, x in known.items() if x is not None}, **parts)


def without_tester(folder: Path, only: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield each type without a folder of tests: a test case of its first model that takes token ids, or an error."""
    common, generation = (
        importlib.import_module(f"tests.{x}") for x in ("test_modeling_common", "generation.test_utils")
    )
    types: dict[str, list[str]] = {}
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        types.setdefault(configuration_auto.model_type_to_module_name(kind), []).append(kind)
    for name, kinds in types.items():
        if (folder / "tests" / "models" / name).is_dir() or (only and name not in only):
            continue
        found: Any = NotHereError("no model takes token ids")
        for kind in kinds:
            for task in "FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_MULTIMODAL_LM_", "":
                model = getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES").get(kind)
                if model is None or isinstance(found, type):
                    continue
                try:
                    found = of_ids(
                        getattr(transformers, model), small(configuration_auto.CONFIG_MAPPING[kind]), common, generation
                    )
                except Exception as error:
                    found = error
        yield name, found


def of_ids(kind: Any, config: Any, common: Any, generation: Any) -> type:
    """Return a test case of a model that takes token ids. Raises an error if the model is large, or does not run."""
    with torch.device("meta"):
        size = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise NotHereError(f"{kind.__name__} has {size / 1e6:.0f} million parameters")
    ids = common.ids_tensor([2, 11], SIZES["vocab_size"] - 3) + 3
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    built(kind, config)(**inputs)
    generates = (kind,) if kind.can_generate() else ()
    tester = SimpleNamespace(prepare_config_and_inputs_for_common=lambda: (copy.deepcopy(config), dict(inputs)))
    bases = common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase
    parts = {"model_tester": tester, "all_model_classes": (kind,), "all_generative_model_classes": generates}
    return type(f"{kind.__name__}Test", bases, parts)


def tensors(found: Any) -> list[torch.Tensor]:
    """Return the floating tensors of an output, in order, without caches and weights."""
    if isinstance(found, torch.Tensor):
        return [found] if found.is_floating_point() else []
    if isinstance(found, dict):
        found = [x for name, x in found.items() if "attentions" not in name]
    return [x for part in found for x in tensors(part)] if isinstance(found, list | tuple) else []


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a copy of a model's inputs in another floating dtype."""
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in copy.deepcopy(inputs).items()
    }


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest error of any tensor, over its norm or a hundredth of the largest."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return float("inf")
    least = max((x.norm() for x in expected), default=torch.zeros(())) / 1000
    return max(
        [float((a - b).norm() / max(b.norm(), least, 1e-30)) for a, b in zip(found, expected, strict=True)] + [0.0]
    )


def without_padding(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return states of tokens with 0 in rows of padding; a class token may follow."""
    batch, n = hidden.shape
    if x.ndim < 2 or x.shape[0] != batch or x.shape[1] not in (n, n + 1):
        return x
    rows = hidden.view(batch, n, *[1] * (x.ndim - 2))
    return torch.cat([x[:, :n].masked_fill(rows, 0.0), x[:, n:]], 1)


def run(model: Any, inputs: dict[str, Any], gradients: bool = False) -> list[torch.Tensor]:
    """Return outputs at real tokens, and gradients of parameters."""
    torch.manual_seed(0)
    model.zero_grad()
    with torch.set_grad_enabled(gradients):
        outputs = tensors(model(**cast(inputs, next(model.parameters()).dtype)))
    for real in (inputs.get("attention_mask"), inputs.get("decoder_attention_mask")):
        if isinstance(real, torch.Tensor) and real.ndim == 2:
            outputs = [without_padding(x, real == 0) for x in outputs]
    trained = [x for x in outputs if x.requires_grad]
    if trained:
        parts = [(x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() / (1 + x.detach().norm()) for x in trained]
        torch.stack(parts).sum().backward()
    return [x.detach() for x in outputs] + [x.grad for x in model.parameters() if x.grad is not None]


def computed(model: Any, implementation: str, of: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return what a model computes with an implementation of PyTorch's operations."""
    try:
        model.set_attn_implementation(implementation)
        found = of()
    except Exception as problem:
        raise NotHereError(f"{type(problem).__name__}: {problem}") from problem
    if not found or not all(x.isfinite().all() for x in found):
        raise NotHereError(f"{implementation} gives no numbers")
    return found


def agrees(model: Any, of: Callable[[], list[torch.Tensor]]) -> tuple[str, str]:
    """Return how a computation on regard agrees with eager, and its error.

    In float64; in float32 where a model has no float64, or where eager's minimum overflows its float32 softmax.
    """
    dtype = torch.float64
    try:
        expected = computed(model.to(dtype), "eager", of)
    except NotHereError:
        dtype = torch.float32
        expected = computed(model.to(dtype), "eager", of)
    model.set_attn_implementation("regard")
    try:
        found = of()
    except Exception:
        computed(model, "eager", of)  # it may run once only
        raise
    distance = error(found, expected)
    if distance <= TOLERANCES[dtype]:
        return "equal", f"{distance:.1e}"
    try:
        beside = error(found, computed(model, "sdpa", of))
    except NotHereError:
        beside = float("inf")
    again = error(computed(model, "eager", of), expected)
    if again > TOLERANCES[dtype]:
        raise NotHereError(f"eager differs from itself by {again:.1e}")
    return "as sdpa" if beside <= TOLERANCES[dtype] else "differs", f"{distance:.1e} from eager, {beside:.1e} from sdpa"


def built(kind: Any, config: Any) -> Any:
    """Return a model whose parameters all count: initial biases, tables and sinks are often 0."""
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.is_floating_point():
                x += 0.05 * torch.randn_like(x)
    return model


def checks(case: Any, kind: Any) -> Iterator[tuple[str, Callable[[], tuple[str, str]]]]:
    """Yield names of comparisons of a model, and what makes them."""
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    inputs = case._prepare_for_class(inputs, kind)
    model = built(kind, config)
    yield "outputs and gradients", lambda: agrees(model, lambda: run(model, inputs, gradients=True))
    ids = inputs.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] > 3 and model.base_model_prefix != "xlm":
        for side, hidden in (("left", slice(0, 2)), ("right", slice(-2, None))):
            mask = torch.ones_like(ids)
            mask[0, hidden] = 0
            padded = inputs | {"attention_mask": mask}
            if not any(x.is_floating_point() for x in inputs.values() if isinstance(x, torch.Tensor)):
                padded["input_ids"] = ids * mask  # so that no row of padding is pooled; not the tokens of a picture
            yield f"{side} padding", lambda padded=padded: agrees(model, lambda: run(model, padded))
    if kind in case.all_generative_model_classes:

        def generated() -> list[torch.Tensor]:
            torch.manual_seed(0)
            found = case._greedy_generate(
                model=model,
                inputs_dict=cast(given, next(model.parameters()).dtype),
                output_logits=True,
                return_dict_in_generate=True,
            )
            return [x.clamp(-1e4, 1e4) for x in found.logits]

        config, given = case.prepare_config_and_inputs_for_generate()
        if isinstance(mask := given.get("attention_mask"), torch.Tensor) and mask.ndim == 2:
            mask[~mask.bool().any(1)] = 1  # a row of padding alone, as some testers draw
        model = built(kind, config)
        yield "generate", lambda: agrees(model, generated)


def judge(case_class: Any) -> tuple[str, str]:
    """Return a result of `WORST` and its reason for a test class."""
    global calls
    try:
        importlib.import_module("tests.test_modeling_common").global_rng.seed(0)
        case = case_class(next(x for x in dir(case_class) if x.startswith("test_")))
        case.setUp()
        case.model_tester.prepare_config_and_inputs_for_common()
        kinds = list(case.all_model_classes)
        kinds = dict.fromkeys([*kinds[:1], *[x for x in kinds if x in case.all_generative_model_classes][:1]])
    except Exception as reason:
        return "not here", f"{type(reason).__name__}: {reason}"
    results, missing, calls = [], [], 0
    for kind in kinds:
        try:
            for name, check in checks(case, kind):
                try:
                    result, found = check()
                except NotHereError as reason:
                    missing.append(f"{kind.__name__}, {name}: {reason}")
                except Exception as reason:
                    results.append(("refused", f"{kind.__name__}, {name}: {type(reason).__name__}: {reason}"))
                else:
                    results.append((result, f"{kind.__name__}, {name}: {found}"))
        except Exception as reason:
            missing.append(f"{kind.__name__}: {type(reason).__name__}: {reason}")
    if not results:
        return "not here", "; ".join(missing)
    result = min(results, key=lambda x: WORST.index(x[0]))[0]
    if result == "equal":
        return ("equal" if calls else "own attention"), "; ".join(missing)
    return result, "; ".join(why for x, why in results if x == result)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of folders in tests/models, separated by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no type after so long")
    options = parser.parse_args()
    regard.torch.register_transformers()
    transformers.AttentionInterface.register("regard", counted)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    def late(*_: Any) -> None:
        raise LateError(f"takes more than {LONGEST} s")

    signal.signal(signal.SIGALRM, late)
    began, results = time.monotonic(), {}
    only = set(filter(None, options.only.split(",")))
    for name, case in chain(testers(options.folder, only), without_tester(options.folder, only)):
        if time.monotonic() - began > options.seconds:
            results.setdefault(name, "not begun")
            continue
        signal.alarm(LONGEST)
        try:
            result, why = ("not here", repr(case)) if isinstance(case, Exception) else judge(case)
        except LateError as reason:
            result, why = "not here", str(reason)
        finally:
            signal.alarm(0)
        results[name] = min(results.get(name, "equal"), result, key=WORST.index)
        if why:
            print(f"{name:24} {result:14} {getattr(case, '__name__', '')}: {' '.join(why.split())[:400]}", flush=True)
    print(*(f"{count:4} {result}" for result, count in Counter(results.values()).most_common()), sep="\n")
    print("equal:", ", ".join(x for x, result in results.items() if result == "equal"))


if __name__ == "__main__":
    main()
