"""Capture of whole models and of torch's own modules, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from capturing import check, region_tags

# Models


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


def test_llama() -> None:
    model = llama(num_key_value_heads=2, attn_implementation="sdpa")
    ids = torch.randint(0, 32, (2, 7))
    for dynamic in (False, True):
        recorder = check(model, kwargs={"input_ids": ids, "labels": ids}, dynamic=dynamic)
        targets = recorder.targets()
        assert targets.count("aten.linear.default") == 15
        assert targets.count("aten.scaled_dot_product_attention.default") == 2
        assert targets.count("aten.cross_entropy_loss.default") == 1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_llama_with_checkpointing_and_autocast() -> None:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 32, (2, 7))
    recorder = check(
        model.train(),
        kwargs={"input_ids": ids, "labels": ids},
        around=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    regions = {tag[2] for tag in region_tags(recorder)}
    assert len(regions) == 3  # two layers, and None outside


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 32, (2, 7))
    recorder = check(model, kwargs={"input_ids": ids, "labels": ids})
    assert recorder.targets().count("aten.addmm.default") == 8
    assert recorder.targets().count("aten.dropout.default") == 5


# Modules of torch


def test_lstm_stays_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    with torch._dynamo.config.patch(allow_rnn=True):
        recorder = check(Model(), [torch.randn(2, 5, 8)])
    assert "aten.lstm.input" in recorder.targets()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer_layer(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    check(layer, [x], tolerance=2e-6)
    around = torch.enable_grad if training else torch.no_grad
    recorder = check(layer, [x], around=around, backward=training, tolerance=2e-6)
    fast = "aten._transformer_encoder_layer_fwd.default" in recorder.targets()
    assert fast == (not training)


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(weights: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(x, x, x, need_weights=weights)

    check(Model(), [torch.randn(2, 5, 8)], tolerance=2e-6)


def test_embedding_padding_row_gets_no_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 8, padding_idx=2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids).sin()

    check(Model(), [torch.tensor([[1, 2, 5, 2]])])
