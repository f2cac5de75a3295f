"""One small model of each family that people serve, made of its configuration class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 257
"""A prime, as vocabularies in use have odd sizes (50257, 32001, 49155)."""

_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1} | {
    "eos_token_id": 2
}
_SIZES = _TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
_GROUPED = _SIZES | {"num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8} | {
    f"qk_{kind}_head_dim": 8 for kind in ("rope", "nope")
}
_WIDTHS = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (
    ("layers", 2), ("attention_heads", 8), ("ffn_dim", 128))}  # fmt: skip
_PATCHES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 8, "image_size": 16, "patch_size": 4
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models.

    model: its class in transformers, whose configuration class takes `options`. inputs: by name,
    the shape and the number of different values of each input of a call, 0 of those being numbers
    of any size; "b" and "s" are the sizes that vary. cached: whether it decodes token by token.
    layers: how many, where it is not 2.
    """

    model: str
    options: Mapping[str, Any]
    inputs: Mapping[str, tuple[tuple[Any, ...], int]] = field(
        default_factory=lambda: {"input_ids": (("b", "s"), VOCABULARY)}
    )
    cached: bool = True

    def make(self, **changes: Any) -> nn.Module:
        """The model in eval mode, with weights large enough that every operator matters."""
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        options = {**self.options, **changes}
        for name, value in options.items():
            if name.endswith("_config") and "CLIP" in self.model:
                options[name] = dict(value)
        model: nn.Module = kind(kind.config_class(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.eval()

    def call(self, batch: int, sequence: int, seed: int = 1) -> dict[str, torch.Tensor]:
        """The inputs of a call."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {"b": batch, "s": sequence}
        made = {}
        for name, (shape, values) in self.inputs.items():
            numbers = [sizes.get(size, size) for size in shape]
            made[name] = (
                torch.randint(values, numbers, generator=generator)
                if values
                else torch.randn(numbers, generator=generator)
            )
        return made

    @property
    def varies(self) -> tuple[str, ...]:
        """The sizes that vary, as exporters name them."""
        free = {size for shape, _ in self.inputs.values() for size in shape}
        return tuple(name for name in ("batch", "sequence") if name[0] in free)

    def varying(self, cached: bool) -> tuple[str, ...]:
        """`varies`; with a cache also the tokens of a decoder that has a fixed number in `call`."""
        return ("batch", "sequence") if cached and self.paired else self.varies

    @property
    def paired(self) -> bool:
        """Whether it is an encoder-decoder, which decodes `decoder_input_ids`."""
        return "decoder_input_ids" in self.inputs


_TEXT = (("b", "s"), VOCABULARY)
_PAIR = {"input_ids": _TEXT, "decoder_input_ids": _TEXT}
_IMAGE = (("b", 3, 16, 16), 0)

FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM", _GROUPED),
    "Mistral": Family("MistralForCausalLM", _GROUPED | {"sliding_window": 8}),
    "Qwen2": Family("Qwen2ForCausalLM", _GROUPED),
    "Qwen3": Family("Qwen3ForCausalLM", _GROUPED | {"head_dim": 16}),
    "Qwen3-MoE": Family(
        "Qwen3MoeForCausalLM", _GROUPED | _EXPERTS | {"head_dim": 16, "num_experts": 4}
    ),
    "Mixtral": Family(
        "MixtralForCausalLM", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "Gemma": Family("GemmaForCausalLM", _GROUPED | {"head_dim": 16}),
    "Gemma 2": Family("Gemma2ForCausalLM", _GROUPED | {"head_dim": 16, "sliding_window": 8}),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        _GROUPED
        | {"head_dim": 16, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        _GROUPED
        | {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3ForCausalLM",
        _SIZES
        | _EXPERTS
        | _LATENT
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel", _TOKENS | {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 8}
    ),
    "GPT-J": Family(
        "GPTJForCausalLM",
        _TOKENS | {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 4},
    ),
    "GPT-NeoX": Family(
        "GPTNeoXForCausalLM", _SIZES | {"rotary_pct": 0.5, "intermediate_size": 256}
    ),
    "OPT": Family(
        "OPTForCausalLM",
        {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    ),
    "MPT": Family(
        "MptForCausalLM",
        _TOKENS
        | {"d_model": 64, "n_heads": 8, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128},
    ),
    "Bloom": Family("BloomForCausalLM", _TOKENS | {"hidden_size": 64, "n_layer": 2, "n_head": 8}),
    "Falcon": Family(
        "FalconForCausalLM",
        _SIZES | {"new_decoder_architecture": False, "intermediate_size": 256},
    ),
    "Phi": Family("PhiForCausalLM", _SIZES),
    "Phi-3": Family("Phi3ForCausalLM", _GROUPED),
    "Cohere": Family("CohereForCausalLM", _GROUPED),
    "Granite": Family("GraniteForCausalLM", _GROUPED | {"logits_scaling": 2.0}),
    "StarCoder2": Family("Starcoder2ForCausalLM", _GROUPED),
    "StableLM": Family("StableLmForCausalLM", _GROUPED),
    "Cohere 2": Family(
        "Cohere2ForCausalLM",
        _GROUPED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Nemotron": Family("NemotronForCausalLM", _GROUPED),
    "GLM": Family("GlmForCausalLM", _GROUPED | {"head_dim": 8}),
    "OLMo 2": Family("Olmo2ForCausalLM", _GROUPED),
    "Helium": Family("HeliumForCausalLM", _GROUPED | {"head_dim": 8}),
    "Mamba": Family(
        "MambaForCausalLM",
        _TOKENS | {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        _TOKENS
        | {"d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8}
        | {"decoder_start_token_id": 0},
        _PAIR,
    ),
    "Pegasus": Family(
        "PegasusForConditionalGeneration",
        _TOKENS | _WIDTHS | {"d_model": 64, "max_position_embeddings": 128},
        _PAIR,
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        _TOKENS | _WIDTHS | {"d_model": 64, "max_position_embeddings": 128},
        _PAIR,
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        _TOKENS
        | _WIDTHS
        | {"d_model": 64, "num_mel_bins": 8, "max_source_positions": 16}
        | {"max_target_positions": 64, "decoder_start_token_id": 1},
        {"input_features": (("b", 8, 32), 0), "decoder_input_ids": (("b", 6), VOCABULARY)},
    ),
    "BERT": Family("BertForMaskedLM", _SIZES, {"input_ids": _TEXT}, False),
    "ViT": Family("ViTForImageClassification", _PATCHES, {"pixel_values": _IMAGE}, False),
    "CLIP": Family(
        "CLIPModel",
        {
            "text_config": _SIZES | {"projection_dim": 32},
            "vision_config": _PATCHES | {"projection_dim": 32},
            "projection_dim": 32,
        },
        {"input_ids": (("b", 9), VOCABULARY), "pixel_values": _IMAGE},
        False,
    ),
    "DINOv2": Family(
        "Dinov2ForImageClassification",
        {name: size for name, size in _PATCHES.items() if name != "intermediate_size"}
        | {"mlp_ratio": 2},
        {"pixel_values": _IMAGE},
        False,
    ),
    "Swin": Family(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "window_size": 4}
        | {"depths": [1, 1], "num_heads": [2, 4]},
        {"pixel_values": (("b", 3, 32, 32), 0)},
        False,
    ),
    "Segformer": Family(
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [32, 64]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 32},
        {"pixel_values": (("b", 3, 32, 32), 0)},
        False,
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForCTC",
        _SIZES
        | {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16}
        | {"num_conv_pos_embedding_groups": 4},
        {"input_values": (("b", 400), 0)},
        False,
    ),
    "ResNet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2]},
        {"pixel_values": (("b", 3, 32, 32), 0)},
        False,
    ),
}
