"""Rules and calls as JSON text, the form in which a traced graph stores them.

The text is saved with the graph and read in any process. It contains the arrays of a rule, or a digest of those above
MOST_INLINE bytes, which stay in the process. In a traced graph they stay for good, else as long as the rule.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from regard.core.options import RULES
from regard.core.statistics import statistic
from regard.core.tensors import NUMPY, tensor
from regard.rules import Requirement, Rule, RuleText, Table, type_name
from regard.rules.expression import order, rebuild
from regard.rules.masks import foreign
from regard.torch.call.record import DEFAULTS, TensorCall
from regard.torch.tensors.modes import guard_scalar, tracing
from regard.torch.tensors.tables import TensorMask, TensorTable

MOST_INLINE = 2**16  # bytes of an array in the text of a call; a larger one is named by its digest
TYPES = {same: kind for kind, same in NUMPY.items()}
_large: WeakValueDictionary[str, np.ndarray[Any, np.dtype[Any]]] = WeakValueDictionary()
_lasting: dict[
    str, np.ndarray[Any, np.dtype[Any]]
] = {}  # of graphs, which may outlive the rules that they were traced with
_in_graphs: WeakKeyDictionary[Rule, tuple[str, tuple[Any, ...]]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[TensorCall, str] = WeakKeyDictionary()
_calls: WeakValueDictionary[str, TensorCall] = WeakValueDictionary()


class NamedRule(NamedTuple):
    """A rule read from its text; `slots` stand for its tensors."""

    rule: Any
    slots: tuple[Any, ...]

    @property
    def fresh(self) -> "NamedRule":
        """The same rule with slots of its own, so that it can be combined with itself."""
        slots = {id(x): x.empty for x in self.slots}
        return NamedRule(replace(self.rule, node=rebuild(self.rule.node, slots)), tuple(slots.values()))


def text_of(rule: Rule, slots: Sequence[Any], lasting: bool = True) -> str:
    """Write a rule as text, with `slots` for its tensors.

    lasting: large arrays stay in the process for good.
    """
    text, tables, dense = RuleText.of(rule)
    place = {id(x): n for n, x in enumerate(slots)}

    def read(x: Any) -> Any:
        if id(x) in place:
            return {"slot": place[id(x)]}
        return written(x.array, lasting) | {"bounds": x.bounds} if isinstance(x, Table) else written(x, lasting)

    return json.dumps(asdict(text) | {
        "tables": [read(x) for x in tables],
        "dense": [read(x) for x in dense],
        "slots": [
            ["flags", x.ndim] if isinstance(x, TensorMask) else ["table", x.shape, str(x.torch_dtype), x.bounds]
            for x in slots
        ],
    })  # fmt: skip


def rule_in_graph(rule: Rule) -> tuple[str, tuple[Any, ...]]:
    """Return a rule as text, with all arrays that it reads as inputs; without text if a graph cannot serve it so."""
    text, reads = _in_graphs.get(rule) or _in_graphs.setdefault(rule, _without_arrays(rule))
    return text, tuple([x if isinstance(x, torch.Tensor) else x.tensor for x in reads])


def _without_arrays(rule: Rule) -> tuple[str, tuple[Any, ...]]:
    reads = {id(x.payload): x.payload for x in order([rule.node]) if x.op in ("gather", "dense")}
    arrays = [x for x in reads.values() if not getattr(x, "from_tensor", False)]
    raises = any(getattr(x, "bounds", None) == "raise" for x in reads.values())
    # On a device, arrays are constants of the graph: as inputs they would have to be there.
    if raises or not TYPES.keys() >= {x.dtype for x in arrays} or (arrays and torch.cuda.is_available()):
        return "", ()
    slots = {n: _slot(x) for n, x in reads.items()}
    inputs = [
        x if getattr(x, "from_tensor", False) else tensor(np.array(getattr(x, "array", x))) for x in reads.values()
    ]
    return text_of(replace(rule, node=rebuild(rule.node, slots)), tuple(slots.values())), tuple(inputs)


def _slot(x: Any) -> Any:
    if getattr(x, "from_tensor", False):
        return x.empty
    if isinstance(x, np.ndarray):
        return TensorMask(None, (1,) * x.ndim)
    return TensorTable("table", None, x.shape, TYPES[x.dtype], x.bounds)


def written(x: Any, lasting: bool) -> dict[str, Any]:
    form = {"dtype": x.dtype.name, "shape": x.shape}
    data = np.ascontiguousarray(x).tobytes()
    if len(data) <= MOST_INLINE:
        return form | {"data": base64.b64encode(data).decode()}
    digest = hashlib.sha256(data).hexdigest()
    _large[digest] = x
    if lasting:
        _lasting[digest] = x
    return form | {"digest": digest}


def array_of(given: dict[str, Any]) -> Any:
    """Read an array that `written` wrote."""
    if "data" in given:
        data = np.frombuffer(base64.b64decode(given["data"]), given["dtype"])
        return data.reshape(given["shape"])
    if given["digest"] not in _large:
        raise RuntimeError(
            f"a rule of this graph reads an array of shape {tuple(given['shape'])} that is too large to be saved with "
            "it: trace the graph in this process, or give the rule a tensor, which is an input of the graph"
        )
    return _large[given["digest"]]


@lru_cache(maxsize=1024)
def named(text: str) -> NamedRule:
    """Read a rule that `text_of` wrote."""
    fields = json.loads(text)
    slots: list[Any] = [
        TensorMask(None, (1,) * form[0])
        if kind == "flags"
        else TensorTable("table", None, tuple(form[0]), getattr(torch, form[1].removeprefix("torch.")), form[2])
        for kind, *form in fields["slots"]
    ]
    tables, dense = (
        [slots[x["slot"]] if "slot" in x else array(x) for x in fields[name]]
        for name, array in (("tables", lambda x: Table(array_of(x), bounds=x["bounds"])), ("dense", array_of))
    )
    requires = tuple(Requirement(**x) for x in fields["requires"])
    text_of_rule = RuleText(fields["kind"], fields["expression"], fields["prints"], requires, fields["binds"])
    return NamedRule(text_of_rule.rule(tables, dense), tuple(slots))


def call_text(**parts: Any) -> str:
    return json.dumps(parts, default=plain_number)


def plain_number(x: Any) -> Any:
    """Return a number of NumPy, or of a traced shape, as a Python number.

    An observed rule becomes its text.
    """
    if isinstance(x, Rule):
        return {"rule": text_of(x, ())}
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return guard_scalar(x)
    raise TypeError(f"an option of a call in a traced graph must be a number or a string, got {type_name(x)}")


def text_of_call(call: TensorCall) -> str:
    """Write a call as text, from which `call_of` returns it or an equal one."""
    described = _texts.get(call)
    if described is None and call.ranks is not None:  # of this process alone
        described = _texts[call] = f"call {id(call)} of one rank of several"
        _calls[described] = call
    if described is None:
        slots: dict[int, int] = {}
        lasting = tracing()

        def rule(x: Rule | None) -> tuple[str | None, list[int]]:
            if x is None:
                return None, []
            reads = foreign(x.node)
            empty = {id(y): y.empty for y in reads}
            text = text_of(replace(x, node=rebuild(x.node, empty)), tuple(empty.values()), lasting)
            return text, [slots.setdefault(id(y), len(slots)) for y in reads]

        score, score_slots = rule(call.options["score"])
        mask, mask_slots = rule(call.options["mask"])
        described = _texts[call] = call_text(
            mask=mask, score=score, slots=[score_slots, mask_slots], engine=call.engine, weights=call.weights,
            low=call.low, floats=[x if isinstance(x, str) else slots[id(x)] for x in call.floats],
            others=[x if isinstance(x, str) else slots[id(x)] for x in call.others],
            observe=[[s.name, s.of] for s in call.observe], folded=call.folded, steps=call.steps,
            options={name: x for name, x in call.options.items() if name not in (*RULES, "observe")},
        )  # fmt: skip
        _calls[described] = call
    return described


def call_of(text: str) -> TensorCall:
    """Return the call that a text was made of, or an equal one if that is gone."""
    return _calls.get(text) or _read(text)


@lru_cache(maxsize=1024)
def _read(text: str) -> TensorCall:
    """Read a call that `call_text` wrote.

    mask, score: rules as text. slots: the numbers of the tensors that score and mask read. floats, others: the inputs
    in order, by name or by the number of a slot. The rest is as in `TensorCall`.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = {}
    if "low" not in fields:
        raise RuntimeError(f"this graph is of another version of regard, trace it again: {text[:20]!r}...")
    slots: dict[int, Any] = {}
    rules = {}
    for name, numbers in zip(("score", "mask"), fields["slots"], strict=True):
        rule, own = NamedRule(None, ()) if fields[name] is None else named(fields[name]).fresh
        shared = {id(x): slots.setdefault(n, x) for n, x in zip(numbers, own, strict=True)}
        if any(id(x) != at for at, x in shared.items()):  # a table that both rules read
            rule = replace(rule, node=rebuild(rule.node, shared))
        rules[name] = rule
    floats, others = (
        tuple(x if isinstance(x, str) else slots[x] for x in fields[name]) for name in ("floats", "others")
    )
    options = {name: frozen(x) for name, x in fields["options"].items()}
    observe = tuple(statistic(name, observed(of)) for name, of in fields["observe"])
    whole = DEFAULTS | options | rules | {"observe": observe}
    call = TensorCall(whole, floats, others, fields["engine"], fields["folded"], fields["weights"], low=fields["low"])
    call = replace(call, steps=frozen(fields.get("steps", [])))
    _texts[call] = text
    return call


def observed(of: Any) -> Any:
    """Read the argument of a statistic."""
    return named(of["rule"]).rule if isinstance(of, dict) else frozen(of)


def frozen(x: Any) -> Any:
    return tuple(map(frozen, x)) if isinstance(x, list) else x
