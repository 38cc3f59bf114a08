"""Rules: masks and scores as small programs over indices, and their four readings.

Values (`evaluate`), code (`Program`), bounds (`classify`, `key_tiles`) and derivatives (`partials`, `tangent`).
"""

from regard.arguments.values import type_name
from regard.rules.bounds import EVERYTHING, MIXED, NOTHING, classify, key_tiles, tile_pairs
from regard.rules.derivative import partials, reading, scatter, tangent
from regard.rules.expression import OPS, At, Kind, Node, Reading, evaluate, once, order, reads, rebuild
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
from regard.rules.program import Instruction, Program, rule_from_text, rule_text
from regard.rules.scores import Score, alibi, as_score, compose, relative, score, softcap, temperature
from regard.rules.tracing import Table, Traced, table, where

__all__ = [
    "EVERYTHING",
    "MIXED",
    "NOTHING",
    "OPS",
    "At",
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
    "global_tokens",
    "interval",
    "intervals",
    "key_tiles",
    "mask",
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
    "tangent",
    "temperature",
    "tile_pairs",
    "type_name",
    "where",
    "window",
]
