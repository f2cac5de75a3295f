"""Hugging Face architectures, tiny; transformers is imported by the factories only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model_case import (
    HEADS,
    HIDDEN,
    LAYERS,
    SEQ,
    VOCAB,
    Batch,
    Case,
    floats,
    ids,
    images,
    masked,
    seq2seq,
    tokens,
)

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4 * SEQ,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER: dict[str, Any] = {
    **DECODER,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def hf(model: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    """A factory of a Hugging Face class with a configuration of these options, and of its own."""
    return functools.partial(_build, model, config, **options)


def _build(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    settings = getattr(transformers, config)(**options)
    settings.use_cache = False
    built: nn.Module = getattr(transformers, model)(settings)
    return built


def llama(**options: Any) -> Callable[[], nn.Module]:
    """A Llama; `options` override the configuration."""
    return hf("LlamaForCausalLM", "LlamaConfig", **{**DECODER, **options})


def meta_llama(rows: int, length: int, **sizes: int) -> tuple[nn.Module, Batch]:
    """A Llama of two layers without values, and a batch of tokens that are their own labels."""
    with torch.device("meta"):
        model = hf("LlamaForCausalLM", "LlamaConfig", **{"num_hidden_layers": 2, **sizes})()
        ids = torch.zeros(rows, length, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def clip() -> nn.Module:
    """A CLIP with both towers."""
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    text = {**tower, "vocab_size": VOCAB, "max_position_embeddings": SEQ, "eos_token_id": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=HIDDEN))


def clip_batch(step: int) -> Batch:
    """Texts that end in the end-of-text token, and pictures."""
    text = ids(step)
    text[:, -1] = 2
    return {"input_ids": text, "pixel_values": floats(step, 3, 32, 32)}


def clip_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The contrastive loss of the batch."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


HUGGING_FACE = [
    Case("llama", llama(), tokens),
    Case(
        "gpt2",
        hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_positions=4 * SEQ,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tokens,
    ),
    Case("bert", hf("BertForMaskedLM", "BertConfig", **ENCODER), masked),
    Case(
        "t5",
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=4 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        seq2seq,
    ),
    Case(
        "vit",
        hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=32,
            patch_size=8,
            num_labels=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        images,
    ),
    Case(
        "mixtral",
        hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **{**DECODER, "intermediate_size": 2 * HIDDEN},
            num_key_value_heads=HEADS,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        tokens,
    ),
    Case(
        "mistral",
        hf("MistralForCausalLM", "MistralConfig", **DECODER, num_key_value_heads=HEADS),
        tokens,
    ),
    Case(
        "qwen3",
        hf(
            "Qwen3ForCausalLM",
            "Qwen3Config",
            **DECODER,
            num_key_value_heads=HEADS,
            head_dim=HIDDEN // HEADS,
        ),
        tokens,
    ),
    Case(
        "gemma3",
        hf(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **DECODER,
            num_key_value_heads=HEADS,
            head_dim=HIDDEN // HEADS,
            query_pre_attn_scalar=HIDDEN // HEADS,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        tokens,
    ),
    Case(
        "gpt_neox",
        hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER, hidden_dropout=0.0),
        tokens,
    ),
    Case(
        "opt",
        hf(
            "OPTForCausalLM",
            "OPTConfig",
            **{k: v for k, v in DECODER.items() if k != "intermediate_size"},
            ffn_dim=4 * HIDDEN,
            word_embed_proj_dim=HIDDEN,
            dropout=0.0,
        ),
        tokens,
    ),
    Case(
        "bart",
        hf(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCAB,
            d_model=HIDDEN,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=4 * HIDDEN,
            decoder_ffn_dim=4 * HIDDEN,
            max_position_embeddings=4 * SEQ,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        ),
        seq2seq,
    ),
    Case("roberta", hf("RobertaForMaskedLM", "RobertaConfig", **ENCODER), masked),
    Case("clip", clip, clip_batch, clip_loss),
    Case(
        "whisper",
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCAB,
            num_mel_bins=16,
            d_model=HIDDEN,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=4 * HIDDEN,
            decoder_ffn_dim=4 * HIDDEN,
            max_source_positions=SEQ,
            max_target_positions=SEQ,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda step: {
            "input_features": floats(step, 16, 2 * SEQ),
            "labels": ids(step, length=SEQ // 2),
        },
    ),
    Case(
        "resnet",
        hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[32, 64],
            depths=[1, 1],
            layer_type="basic",
            num_labels=8,
        ),
        images,
    ),
    Case("llama_gqa", llama(num_attention_heads=8, num_key_value_heads=2), tokens),
    Case(
        "llama_uneven",
        llama(vocab_size=259, intermediate_size=101),
        lambda step: tokens(step, 259),
    ),
    Case("llama_tied", llama(tie_word_embeddings=True), tokens),
]


def sequence_parallel_llama() -> tuple[nn.Module, tuple[()], Batch]:
    """A model and a batch of two rows that are worth splitting by sequence."""
    torch.manual_seed(0)
    ids = torch.randint(3, 256, (2, 512))
    return llama(hidden_size=256)(), (), {"input_ids": ids, "labels": ids}


DEEP = 8
"""Layers of models that are traced by five of them."""


def loss_of(model: nn.Module) -> nn.Module:
    """A Hugging Face model as a function to its loss."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()
            model.loss_type = "ForCausalLM"  # GPT-2's is None, with a warning that breaks the graph

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

    return Loss()


def _checkpointed() -> nn.Module:
    model: Any = llama(num_hidden_layers=DEEP)()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


_GPT2 = {"n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 128}
_T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
DEEP_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama": (llama(num_hidden_layers=DEEP), tokens),
    "checkpointed": (_checkpointed, tokens),
    "gpt2": (hf("GPT2LMHeadModel", "GPT2Config", n_layer=DEEP, **_GPT2), tokens),
    "t5": (hf("T5ForConditionalGeneration", "T5Config", num_layers=DEEP, **_T5), seq2seq),
    "mixtral": (
        hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **DECODER | {"num_hidden_layers": DEEP},
            num_key_value_heads=2,
            num_local_experts=4,
        ),
        tokens,
    ),
}
