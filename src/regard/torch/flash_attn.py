"""FlashAttention 2's functions on regard's kernels: on any device, in any dtype, of any head size.

They have the names, arguments and conventions of `flash_attn`. `regard.torch.stand_in("flash_attn")` provides them
under that name.

| Module | Contents |
|---|---|
| `dropins.flash_attn` | attention of batches and of packed sequences |
| `dropins.flash_cache` | attention over a cache; rotary embedding |
| `dropins.flash_padding` | batches without their padding |
| `dropins.flash_options` | arguments: checks, and the rules that they mean |
"""

from regard.torch.dropins.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from regard.torch.dropins.flash_cache import apply_rotary_emb, flash_attn_with_kvcache
from regard.torch.dropins.flash_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

__all__ = [
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]
