from regard import examplemodel, insight, positions
from regard.core.problem import Differential, Outputs
from regard.core.statistics import Profile, Seen, Top, mass, pooled, renyi, top, weights_of
from regard.engines import available_engines
from regard.interpret.capture.captured import Capture, capture
from regard.ops.attention import attention, attention_jvp, attention_vjp, attention_vjp_jvp, weights
from regard.ops.exporting import export_wasm
from regard.ops.linear import linear_attention
from regard.ops.merging import merge
from regard.ops.multihead import multihead_attention
from regard.ops.planning import plan
from regard.ops.retrieval import Retrieval, hopfield
from regard.ops.stepping import steps
from regard.rules import (
    Mask,
    Score,
    Table,
    alibi,
    blocks,
    causal,
    dilated,
    documents,
    global_tokens,
    mask,
    neighborhood,
    padding,
    prefix,
    relative,
    score,
    softcap,
    strided,
    table,
    temperature,
    where,
    window,
)
from regard.runtime.threads import set_num_threads
from regard.viewer import look
from regard.warning import RegardWarning

__version__: str

__all__ = [
    "Capture",
    "Differential",
    "Mask",
    "Outputs",
    "Profile",
    "RegardWarning",
    "Retrieval",
    "Score",
    "Seen",
    "Table",
    "Top",
    "__version__",
    "alibi",
    "attention",
    "attention_jvp",
    "attention_vjp",
    "attention_vjp_jvp",
    "available_engines",
    "blocks",
    "capture",
    "causal",
    "dilated",
    "documents",
    "examplemodel",
    "export_wasm",
    "global_tokens",
    "hopfield",
    "insight",
    "linear_attention",
    "look",
    "mask",
    "mass",
    "merge",
    "multihead_attention",
    "neighborhood",
    "padding",
    "plan",
    "pooled",
    "positions",
    "prefix",
    "relative",
    "renyi",
    "score",
    "set_num_threads",
    "softcap",
    "steps",
    "strided",
    "table",
    "temperature",
    "top",
    "weights",
    "weights_of",
    "where",
    "window",
]
