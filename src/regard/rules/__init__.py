"""Rules: masks and scores as small programs over indices, read in four ways.

| Module | Contents |
|---|---|
| `masks`, `grids`, `scores`, `buckets` | the rules that users call: `causal`, `alibi`, ...; T5's buckets |
| `tracing` | the arguments of a rule while it is traced: indices, score, tables |
| `tensors` | PyTorch's functions in rules, by name |
| `expression` | expressions as graphs of nodes; values: `evaluate` |
| `program` | code: expressions as instructions; rules as text |
| `forms` | what rules share whose tables have other values |
| `intervals`, `extremes` | interval arithmetic over index ranges; least and greatest entries of tables |
| `bounds` | bounds: `classify`, `key_tiles`, `visible_tiles` |
| `derivative` | derivatives: `partials`, `tangent`, and `scatter`, which sums gradients of tables |
| `outside` | indices outside of a table with ``bounds="raise"`` |

Read `masks`, `tracing` and `expression` first.
"""

from regard.arguments.values import type_name
from regard.rules.bounds import EVERYTHING, MIXED, NOTHING, classify, key_tiles, visible_tiles
from regard.rules.derivative import partials, reading, scatter, tangent
from regard.rules.expression import OPS, At, Kind, Node, Reading, evaluate, once, order, reads, rebuild
from regard.rules.forms import Form, form_of, tables_of
from regard.rules.grids import neighborhood
from regard.rules.intervals import Interval, Ranges, interval, intervals
from regard.rules.masks import (
    Mask,
    Requirement,
    Rule,
    as_mask,
    blocks,
    causal,
    dilated,
    documents,
    global_tokens,
    mask,
    padding,
    prefix,
    strided,
    window,
)
from regard.rules.program import Instruction, Program, RuleText, rule_from_text, rule_text
from regard.rules.scores import Score, alibi, as_score, compose, relative, score, softcap, temperature
from regard.rules.tracing import Table, Traced, table, where

__all__ = [
    "EVERYTHING",
    "MIXED",
    "NOTHING",
    "OPS",
    "At",
    "Form",
    "Instruction",
    "Interval",
    "Kind",
    "Mask",
    "Node",
    "Program",
    "Ranges",
    "Reading",
    "Requirement",
    "Rule",
    "RuleText",
    "Score",
    "Table",
    "Traced",
    "alibi",
    "as_mask",
    "as_score",
    "blocks",
    "causal",
    "classify",
    "compose",
    "dilated",
    "documents",
    "evaluate",
    "form_of",
    "global_tokens",
    "interval",
    "intervals",
    "key_tiles",
    "mask",
    "neighborhood",
    "once",
    "order",
    "padding",
    "partials",
    "prefix",
    "reading",
    "reads",
    "rebuild",
    "relative",
    "rule_from_text",
    "rule_text",
    "scatter",
    "score",
    "softcap",
    "strided",
    "table",
    "tables_of",
    "tangent",
    "temperature",
    "type_name",
    "visible_tiles",
    "where",
    "window",
]
