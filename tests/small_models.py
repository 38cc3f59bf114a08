"""Small models of transformers with random weights, of each kind whose attention is special."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")

VOCABULARY, WINDOW = 61, 5
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A kind of model: its class, its configuration, and what eager computes its softmax in."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    kind: str = "decoder"

    def build(self) -> Any:
        if not hasattr(transformers, self.model):
            pytest.skip(f"transformers {transformers.__version__} has no {self.model}")
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model = getattr(transformers, self.model)(config).to(self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():  # initial biases, position tables and sinks are zero: all count alike
                parameter += 0.1 * torch.randn_like(parameter)
        return model.eval()

    def inputs(self) -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(3, VOCABULARY, (2, 11))
        padded = torch.ones_like(ids)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=self.dtype)}
        if self.kind == "frames":
            given = torch.ones(2, 64, dtype=torch.long)
            given[0, 40:] = 0
            return {"input_features": torch.randn(2, 64, 16, dtype=self.dtype), "attention_mask": given}
        if self.kind == "series":
            past, future = 19, 7
            return {
                "past_values": torch.rand(2, past, dtype=self.dtype),
                "past_time_features": torch.rand(2, past, 2, dtype=self.dtype),
                "past_observed_mask": torch.rand(2, past) > 0.5,
                "static_categorical_features": torch.tensor([[3], [5]]),
                "static_real_features": torch.rand(2, 1, dtype=self.dtype),
                "future_values": torch.rand(2, future, dtype=self.dtype),
                "future_time_features": torch.rand(2, future, 2, dtype=self.dtype),
            }
        if self.kind == "speech":
            return {"input_features": torch.randn(2, 8, 40, dtype=self.dtype), "decoder_input_ids": ids}
        if self.kind == "decoder":
            padded[0, :4] = 0
            return {"input_ids": ids, "attention_mask": padded}
        padded[0, 7:] = 0
        given = {"input_ids": ids, "attention_mask": padded}
        if self.kind == "text and image":
            return given | {"pixel_values": torch.randn(2, 3, 16, 16, dtype=self.dtype)}
        return given | {"decoder_input_ids": ids.flip(0)[:, :6]} if self.kind == "encoder-decoder" else given


HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MODELS = {
    "gpt2": Model(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": None, "pad_token_id": 0, "scale_attn_by_inverse_layer_idx": True},
        torch.float64,
    ),
    "llama": Model("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", DECODER | HYBRID | {"use_sliding_window": True}),
    "mistral": Model("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": WINDOW}),
    "gemma2": Model(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        DECODER | HYBRID | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": Model("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | HYBRID | {"query_pre_attn_scalar": 8}),
    "gpt_oss": Model(
        "GptOssForCausalLM", "GptOssConfig", DECODER | HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "bert": Model(
        "BertForMaskedLM",
        "BertConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0},
        torch.float64,
        "encoder",
    ),
    "t5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "pad_token_id": 0,
         "eos_token_id": None, "decoder_start_token_id": 0},
        torch.float64,
        "encoder-decoder",
    ),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
         "max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None},
        torch.float64,
        "speech",
    ),
    "vit": Model(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "image_size": 16, "patch_size": 4, "num_labels": 7},
        kind="image",
    ),
}  # fmt: skip

SPARSE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 3,
    "attention_dropout": 0.0,
}  # fmt: skip
OTHERS = {
    "deepseek_v32": Model("DeepseekV32ForCausalLM", "DeepseekV32Config", SPARSE),
    "glm_moe_dsa": Model("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", SPARSE),
    "doge": Model("DogeForCausalLM", "DogeConfig", DECODER | {"keep_window_size": 4}),
    "inkling2": Model(
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        DECODER | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
                   "sliding_window_size": 5, "rel_extent": 8, "d_rel": 4, "n_routed_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "t5gemma2": Model(
        "T5Gemma2ForConditionalGeneration",
        "T5Gemma2Config",
        {"encoder": {"text_config": DECODER | HYBRID | {"query_pre_attn_scalar": 8},
                     "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                       "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
                     "boi_token_index": 57, "eoi_token_index": 58, "image_token_index": 59},
         "decoder": DECODER | HYBRID | {"query_pre_attn_scalar": 8}, "image_token_index": 59,
         "eoi_token_index": 58},
        kind="encoder-decoder",
    ),
    "lasr": Model("LasrEncoder", "LasrEncoderConfig", SPEECH, kind="frames"),
    "parakeet": Model("ParakeetEncoder", "ParakeetEncoderConfig", SPEECH, kind="frames"),
}  # fmt: skip
"""Those that read the elements of their masks, or give attention more than masks and biases."""
ADDING = {
    "git": Model(
        "GitForCausalLM",
        "GitConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None,
         "pad_token_id": 0, "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                                              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}},
    ),
    "deepseek_v4": Model(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {key: x for key, x in SPARSE.items() if key != "kv_lora_rank"}
        | {"num_key_value_heads": 1, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": WINDOW,
           "layer_types": ["compressed_sparse_attention"] * 2,
           "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}},
    ),
    "informer": Model(
        "InformerModel",
        "InformerConfig",
        {"prediction_length": 7, "context_length": 14, "lags_sequence": [1, 2, 3, 4, 5], "num_time_features": 2,
         "num_static_categorical_features": 1, "num_static_real_features": 1, "cardinality": [19],
         "embedding_dimension": [5], "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
         "sampling_factor": 5, "distil": False},
        torch.float64,
        "series",
    ),
    "bigbird_pegasus": Model(
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
         "max_position_embeddings": 64, "attention_type": "original_full", "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None},
        torch.float64,
        "encoder-decoder",
    ),
    "bridgetower": Model(
        "BridgeTowerForMaskedLM",
        "BridgeTowerConfig",
        {"text_config": {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0},
         "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8},
         "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        torch.float64,
        "text and image",
    ),
}  # fmt: skip
"""Those that compute scores + mask beside the attention interface."""
