"""Models of the tests with dropout everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from model_case import HEADS, HIDDEN, LAYERS, SEQ, VOCAB, Case
from models import CASES
from models_hf import DECODER, hf

ENCODER = {**DECODER, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def gpt2() -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    sizes = {"vocab_size": VOCAB, "n_positions": 4 * SEQ, "n_embd": HIDDEN}
    layers = {"n_layer": LAYERS, "n_head": HEADS, "bos_token_id": 1, "eos_token_id": 2}
    return hf("GPT2LMHeadModel", "GPT2Config", **sizes, **layers, **rates)()


def t5() -> nn.Module:
    return hf(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=4 * HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )()


def vit() -> nn.Module:
    sizes = {k: v for k, v in ENCODER.items() if k != "vocab_size"}
    return hf(
        "ViTForImageClassification", "ViTConfig", **sizes, image_size=32, patch_size=8, num_labels=8
    )()


BUILD: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "bert": hf("BertForMaskedLM", "BertConfig", **ENCODER),
    "t5": t5,
    "vit": vit,
}


def dropped(name: str) -> Case:
    """The case of that name with dropout 0.1 everywhere."""
    return dataclasses.replace(CASES[name], build=BUILD[name])
