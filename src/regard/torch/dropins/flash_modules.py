"""flash-attn's modules, for `stand_in("flash_attn")`."""

from __future__ import annotations  # so that `help` shows the names of types

from types import MappingProxyType
from typing import Any

from regard.torch.dropins import flash_attn, flash_cache, flash_padding
from regard.torch.dropins.packages import Package

TWO = "regard.torch.stand_in('flash_attn') provides FlashAttention 2: import flash_attn_func and others from flash_attn"
FUNCTIONS: dict[str, Any] = {
    x.__name__: x
    for x in (
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_kvpacked_func,
        flash_attn.flash_attn_qkvpacked_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_varlen_kvpacked_func,
        flash_attn.flash_attn_varlen_qkvpacked_func,
        flash_cache.flash_attn_with_kvcache,
    )
}
PADDING: dict[str, Any] = {
    x.__name__: x
    for x in (
        flash_padding.index_first_axis,
        flash_padding.index_first_axis_residual,
        flash_padding.index_put_first_axis,
        flash_padding.pad_input,
        flash_padding.unpad_input,
        flash_padding.unpad_input_for_concatenated_sequences,
    )
}
PACKAGE = Package(
    name="flash_attn",
    distribution="flash-attn",
    version="2.8.4",
    modules=MappingProxyType(
        {
            "flash_attn": FUNCTIONS,
            "flash_attn.flash_attn_interface": FUNCTIONS,
            "flash_attn.bert_padding": PADDING,
            "flash_attn.layers": {},
            "flash_attn.layers.rotary": {"apply_rotary_emb": flash_cache.apply_rotary_emb},
        }
    ),
    refused=MappingProxyType(
        {
            "flash_attn_interface": f"flash_attn_interface is FlashAttention 3, which needs a GPU; {TWO}",
            "flash_attn_3": f"flash_attn_3 is FlashAttention 3, which needs a GPU; {TWO}",
            "flash_attn.cute": f"flash_attn.cute is FlashAttention 4, which needs a GPU; {TWO}",
        }
    ),
)
