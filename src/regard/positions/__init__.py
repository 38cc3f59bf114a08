"""Positions of tokens as numbers for embeddings, queries and keys, and scores.

=================  ==========================  =====================================================================
function           used on                     source
=================  ==========================  =====================================================================
sinusoidal         embeddings                  Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
rope               queries and keys            Su et al. 2021, https://arxiv.org/abs/2104.09864
alibi_slopes       scores: `regard.alibi`      Press et al. 2022, https://arxiv.org/abs/2108.12409
t5_buckets         scores: `regard.relative`   Raffel et al. 2020, https://arxiv.org/abs/1910.10683
=================  ==========================  =====================================================================

`sinusoids`, `rotary` and `distances` hold the functions; T5's buckets are in `regard.rules.buckets`.
"""

from regard.arguments.signatures import listed
from regard.positions.distances import alibi_slopes
from regard.positions.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YaRNScaling,
    rope,
    rope_frequencies,
)
from regard.positions.sinusoids import sinusoidal
from regard.rules.buckets import t5_buckets

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Scaling",
    "YaRNScaling",
    "alibi_slopes",
    "rope",
    "rope_frequencies",
    "sinusoidal",
    "t5_buckets",
]

listed(*(globals()[name] for name in __all__ if name != "Scaling"))
