"""Rules and calls as text, by which a traced graph knows them: JSON, which is saved with the graph and read elsewhere.

Arrays that a rule was made of are part of its text. Those of more than KEPT bytes stay in the process; the text has
a digest of what they hold.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.observing import Statistic
from regard.rules import Mask, Rule, Score, Table, rule_from_text, rule_text
from regard.rules.expression import rebuild
from regard.rules.masks import Requirement
from regard.torch.calls import DEFAULTS, Call
from regard.torch.rules import Flags, TensorTable

KEPT = 2**16
KINDS: dict[str, Any] = {"Mask": Mask, "Score": Score}
_large: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}


class Named(NamedTuple):
    """A rule by its text: its tensors are `slots` here."""

    rule: Any
    slots: tuple[Any, ...]

    @property
    def fresh(self) -> "Named":
        """The same rule with slots of its own, so that it can stand beside itself."""
        slots = {id(x): x.empty for x in self.slots}
        return Named(replace(self.rule, node=rebuild(self.rule.node, slots)), tuple(slots.values()))


def text_of(rule: Rule, slots: Sequence[Any]) -> str:
    """A rule as text, `slots` being what stands for tensors in it."""
    expression, tables, dense = rule_text(rule.node)
    place = {id(x): n for n, x in enumerate(slots)}

    def read(x: Any) -> Any:
        return {"slot": place[id(x)]} if id(x) in place else written(x.array if isinstance(x, Table) else x)

    return json.dumps({
        "kind": type(rule).__name__,
        "expression": expression,
        "prints": rule.text,
        "requires": [asdict(x) for x in rule.requires],
        "binds": getattr(rule, "binds", None),
        "tables": [read(x) for x in tables],
        "dense": [read(x) for x in dense],
        "slots": [
            ["flags", x.ndim] if isinstance(x, Flags) else ["table", x.shape, str(x.torch_dtype)] for x in slots
        ],
    })  # fmt: skip


def written(x: Any) -> dict[str, Any]:
    found = {"dtype": x.dtype.name, "shape": x.shape}
    data = np.ascontiguousarray(x).tobytes()
    if len(data) <= KEPT:
        return found | {"data": base64.b64encode(data).decode()}
    digest = hashlib.sha256(data).hexdigest()
    _large[digest] = x
    return found | {"digest": digest}


def array_of(given: dict[str, Any]) -> Any:
    """What `written` wrote."""
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
def named(text: str) -> Named:
    """The rule that `text_of` wrote."""
    given = json.loads(text)
    slots: list[Any] = [
        Flags(None, (1,) * form[0])
        if kind == "flags"
        else TensorTable("table", None, tuple(form[0]), getattr(torch, form[1].removeprefix("torch.")))
        for kind, *form in given["slots"]
    ]
    tables, dense = (
        [slots[x["slot"]] if "slot" in x else kind(array_of(x)) for x in given[name]]
        for name, kind in (("tables", Table), ("dense", np.asarray))
    )
    node = rule_from_text(given["expression"], tables, dense)
    more = {} if given["binds"] is None else {"binds": given["binds"]}
    requires = tuple(Requirement(**x) for x in given["requires"])
    return Named(KINDS[given["kind"]](node, given["prints"], requires, **more), tuple(slots))


def call_text(**parts: Any) -> str:
    return json.dumps(parts)


@lru_cache(maxsize=1024)
def call_of(text: str) -> Call:
    """The call that `call_text` wrote.

    mask, score: rules as text. floats: which tensors of the score have a derivative. tensors: which other inputs are
    given; constants: which of them have none, though they could. The rest is as in `Call`.
    """
    try:
        given = json.loads(text)
    except ValueError:
        raise RuntimeError(f"this graph is of another version of regard, trace it again: {text[:20]!r}...") from None
    masks, scores = (Named(None, ()) if given[x] is None else named(given[x]).fresh for x in ("mask", "score"))
    pairs = list(zip(scores.slots, given["floats"], strict=True))
    floats, others = (tuple(x for x, f in pairs if f == kind) for kind in (True, False))
    fixed = [x for x in given["tensors"] if x in ("offset", "seed", *given["constants"])]
    free = [x for x in given["tensors"] if x not in fixed]
    whole = DEFAULTS | {name: frozen(x) for name, x in given["options"].items()}
    observe = tuple(Statistic(name, frozen(of)) for name, of in given["observe"])
    return Call(
        whole | {"mask": masks.rule, "score": scores.rule, "observe": observe},
        ("query", "key", *(() if given["weights"] else ("value",)), *free, *floats),
        (*others, *masks.slots, *fixed), given["engine"], weights=given["weights"],
    )  # fmt: skip


def frozen(x: Any) -> Any:
    return tuple(map(frozen, x)) if isinstance(x, list) else x
