"""The public surface: what a user may import, how it is called, and that nothing shadows or changes it."""

import ast
import dataclasses
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.core.problem import Problem
from regard.core.statistics import Top
from sources import parsed

MODULES = ["examplemodel", "insight", "positions"]
CLASSES = [
    "Capture", "Differential", "Mask", "Outputs", "Profile", "RegardWarning", "Retrieval", "Score", "Seen", "Table",
    "Top",
]  # fmt: skip
RULES = "mask=None, causal=False, score=None, bias=None, scale=None, metric=None, sink=None"
DROPOUT = "dropout=0.0, seed=None"
PLACE = "offset=None, origin=None, layout='bhnd'"
OPTIONS = f"{RULES}, {DROPOUT}, {PLACE}"
ALL = "slice(None, None, None)"
SIGNATURES = {
    "attention": f"(query, key, value, *, {RULES}, {DROPOUT}, {PLACE}, return_weights=False, observe=(), engine=None)",
    "weights": f"(query, key, *, lse=None, rows={ALL}, cols={ALL}, {RULES}, {PLACE}, engine=None)",
    "attention_vjp": f"(query, key, value, dout, *, dlse=None, dentropy=None, outputs=None, engine=None, {OPTIONS})",
    "attention_jvp": "(query, key, value, dquery=None, dkey=None, dvalue=None, *, dbias=None, dsink=None, "
    f"dmetric=None, dtables=None, tangents=None, outputs=None, engine=None, {OPTIONS})",
    "attention_vjp_jvp": "(query, key, value, dout, tangents=None, *, dlse=None, dentropy=None, dquery=None, "
    "dkey=None, dvalue=None, dbias=None, dsink=None, dmetric=None, dtables=None, cotangent_tangents=None, "
    f"outputs=None, engine=None, {OPTIONS})",
    "steps": f"(query, key, value, *, {RULES}, {DROPOUT}, {PLACE}, dout=None)",
    "plan": "(query=None, key=None, value=None, *, n=None, d=None, n_keys=None, d_value=None, heads=None, "
    f"kv_heads=None, batch=None, dtype=<class 'numpy.float32'>, {OPTIONS}, engine=None, ranks=None)",
    "multihead_attention": "(query, key, value, num_heads, *, num_kv_heads=None, w_q=None, w_k=None, w_v=None, "
    f"w_o=None, b_q=None, b_k=None, b_v=None, b_o=None, {RULES}, {DROPOUT}, offset=None, origin=None, "
    "return_weights=False, observe=(), engine=None)",
    "linear_attention": "(query, key, value, *, feature_map='elu', causal=False, mask=None, chunk=128, layout='bhnd')",
    "export_wasm": "(path, *, mask=None, causal=False, window=None, score=None, bias=False, sink=False, "
    "dropout=False, array_mask=False, statistics=(), maps=False, relaxed=False)",
    "merge": "(*parts, sink=None)",
    "available_engines": "()",
    "set_num_threads": "(n)",
    "capture": "(model, *, layers=None, heads=None, memory=None, path=None, tokenizer=None, grid=None, image=None, "
    "queries=None)",
    "look": "(what=None, key=None, value=None, *, text=None, tokenizer=None, tokens=None, key_tokens=None, lse=None, "
    "weights=None, image=None, sequence=None, save=None, with_model=False, port=0, open_browser=True, block=None, "
    "**options)",
    "top": "(k)",
    "mass": "(mask)",
    "pooled": "(rows, cols, kind='mass')",
    "weights_of": "(rows)",
    "renyi": "(alpha)",
    "hopfield": "(state, patterns, *, beta=None, steps=1)",
    "causal": "()",
    "window": "(left, right=0)",
    "prefix": "(length)",
    "padding": "(lengths, side='right')",
    "documents": "(ids, key_ids=None)",
    "strided": "(step)",
    "dilated": "(left, step)",
    "blocks": "(table, size)",
    "neighborhood": "(shape, kernel_size, stride=1, dilation=1, causal=False)",
    "global_tokens": "(n)",
    "mask": "(function)",
    "softcap": "(cap)",
    "alibi": "(slopes)",
    "relative": "(table, *, buckets=None, bidirectional=True, max_distance=128)",
    "temperature": "(t)",
    "score": "(function)",
    "table": "(array, name=None, *, bounds=None)",
    "where": "(condition, a, b)",
}
CALLABLE = sorted({*SIGNATURES, *CLASSES} - {"RegardWarning"})
PUBLIC = sorted([*SIGNATURES, *CLASSES, *MODULES, "__version__"])


def signature(function: Any) -> str:
    """The signature without its annotations."""
    given = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in given.parameters.values()]
    return str(inspect.Signature(bare))


def test_the_public_names() -> None:
    assert sorted(regard.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(regard))
    everything: dict[str, Any] = {}
    exec("from regard import *", everything)
    assert set(everything) - {"__builtins__"} == set(PUBLIC)


def test_other_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'atention'"):
        regard.atention  # noqa: B018


def test_the_stub_is_made_of_the_table() -> None:
    """A name has a line: `from room import name as name`."""
    homes = {"regard": MODULES} | {home: sorted(names.split()) for home, names in sorted(regard._HOMES.items())}
    made = "".join(f"from {home} import {x} as {x}\n" for home, names in homes.items() for x in names)
    assert Path(regard.__file__).with_suffix(".pyi").read_text(encoding="utf-8") == made


@pytest.mark.parametrize("name", CALLABLE)
def test_everything_public_is_explained_by_an_example(name: str) -> None:
    explanation = inspect.getdoc(getattr(regard, name))
    assert explanation is not None
    assert ">>> " in explanation


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signatures(name: str) -> None:
    assert signature(getattr(regard, name)) == SIGNATURES[name]


def test_every_function_has_its_signature_tested() -> None:
    assert {name for name in CALLABLE if inspect.isfunction(getattr(regard, name))} == set(SIGNATURES)


def test_submodules_replace_nothing() -> None:
    """In every package: importing a module sets its name in the package, and may take a function's place there."""
    submodules = {module.name for module in pkgutil.iter_modules(regard.__path__)}
    assert submodules & set(PUBLIC) == set(MODULES)
    assert replaced("regard", "") == []


def replaced(package: str, path: str) -> list[str]:
    """What is no module once a package of `package` is imported, and is one when all modules are."""
    check = """if True:
        import importlib, importlib.util, json, pkgutil, sys, types
        sys.path.insert(0, sys.argv[2])
        root = importlib.import_module(sys.argv[1])
        missing = [f"regard.{name}" for name in ("torch", "jax") if importlib.util.find_spec(name) is None]
        found = pkgutil.walk_packages(root.__path__, sys.argv[1] + ".", lambda name: None)
        modules = [m for m in found if not m.name.startswith(tuple(missing))]
        packages = [root, *(importlib.import_module(m.name) for m in modules if m.ispkg)]
        is_module = lambda package, name: isinstance(getattr(package, name), types.ModuleType)
        names = [(p, n) for p in packages for n in {*vars(p), *getattr(p, "__all__", ())} if n[0] != "_"]
        before = [(p, n) for p, n in names if not is_module(p, n)]
        for m in modules:
            importlib.import_module(m.name)
        print(json.dumps([f"{p.__name__}.{n}" for p, n in before if is_module(p, n)]))
    """
    command = [sys.executable, "-c", check, package, path]
    found: list[str] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def test_a_module_in_the_place_of_a_function_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "house" / "room"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").touch()
    (inner / "__init__.py").write_text("def look(): pass\ndef show(): pass\n")
    (inner / "look.py").touch()
    assert replaced("house", str(tmp_path)) == ["house.room.look"]


def test_every_warning_has_the_category_of_the_package() -> None:
    assert issubclass(regard.RegardWarning, UserWarning)
    for path in sorted(Path(regard.__file__).parent.rglob("*.py")):
        for node in parsed(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                given = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "category")]
                assert [ast.unparse(category) for category in given] == ["RegardWarning"], f"{path}:{node.lineno}"


def test_what_is_returned_is_frozen() -> None:
    x = np.eye(3)
    _, seen = regard.attention(x, x, x, observe=["lse", regard.top(1)])
    with pytest.raises(AttributeError, match="frozen"):
        seen.lse = x
    with pytest.raises(TypeError, match="item assignment"):
        seen["lse"] = x
    g = regard.attention_vjp(x, x, x, x)
    primal, _ = regard.attention_jvp(x, x, x, x)
    for frozen, field in ((g, "query"), (seen[regard.top(1)], "values"), (regard.top(1), "of")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, x)
    with pytest.raises(AttributeError):
        primal.out = x


def test_rules_are_frozen() -> None:
    for rule in (regard.causal() & regard.window(3), regard.softcap(2.0)):
        for field in ("node", "text", "requires", "anything"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(rule, field, None)
    table = regard.table(np.ones(3))
    with pytest.raises(AttributeError, match="frozen"):
        table.array = np.zeros(3)
    with pytest.raises(ValueError, match="read-only"):
        table.array[0] = 2.0


def test_a_rule_stays_what_it_was_when_its_arrays_change() -> None:
    ids, slopes = np.array([0, 0, 1]), np.array([1.0])
    x = np.eye(3)[None]
    wishes = {"mask": regard.documents(ids), "score": regard.alibi(slopes)}
    before = regard.attention(x, x, x, **wishes)
    ids[:], slopes[:] = 0, 7.0
    np.testing.assert_array_equal(regard.attention(x, x, x, **wishes), before)


def test_frozen_classes_say_so() -> None:
    for cls in (regard.Differential, regard.Mask, regard.Score, Problem, Top):
        assert cls.__dataclass_params__.frozen
