"""Roles are read from use: a decoder whose names mislead, and decoders the format cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.export import ExportError
from autoshard.export.decoder.reading import read_decoder
from autoshard.export.decoder.structure import Linear
from autoshard.export.serial_graph import model_graph
from autoshard.export.to_trtllm.families import family_of

HEADS, KV, DIM, WIDTH, HIDDEN, VOCAB = 4, 2, 8, 24, 20, 31


class Block(nn.Module):
    """One fused qkv, interleaved by group as [k, q, q, v]; `up` is the gate; written-out RMS."""

    def __init__(self, causal: bool = True, scale: float | None = None, normed: bool = False):
        super().__init__()
        self.causal, self.scale, self.normed = causal, scale, normed
        self.down = nn.Parameter(torch.randn(HIDDEN, KV * (HEADS // KV + 2) * DIM))  # (in, out)
        self.q_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)  # the output projection
        self.up = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.scale_of_mlp = nn.Parameter(torch.randn(HIDDEN))
        self.of_queries = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        fused = (_rms(x) * self.bias) @ self.down
        fused = fused.view(batch, length, KV, HEADS // KV + 2, DIM)
        k, q, v = fused.split([1, HEADS // KV, 1], dim=3)
        if self.normed:
            q = _rms(q) * self.of_queries
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(
            _turn(q, cos, sin),
            _turn(k, cos, sin),
            v,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=True,
        )
        x = x + self.q_proj(y.transpose(1, 2).flatten(2))
        y = _rms(x) * self.scale_of_mlp
        return x + self.last(self.gate(y) * F.silu(self.up(y)))


class Misnamed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lm_head = nn.Embedding(VOCAB, HIDDEN)  # the token embedding
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.embed = nn.Linear(HIDDEN, VOCAB, bias=False)  # the head
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        angle = torch.arange(64).unsqueeze(1) * 500.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lm_head(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.embed(_rms(x) * self.weight)  # type: ignore[no-any-return]


def _rms(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-4)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def test_roles_of_a_decoder_whose_names_mislead() -> None:
    decoder = read_decoder(model_graph(Misnamed()))
    assert (decoder.vocab, decoder.hidden, decoder.tied) == (VOCAB, HIDDEN, False)
    assert (decoder.embedding, decoder.head.weight) == ("lm_head.weight", "embed.weight")
    assert (decoder.norm.weight, decoder.norm.kind, decoder.norm.eps) == ("weight", "rms", 1e-4)
    for i, layer in enumerate(decoder.layers):
        attention, mlp = layer.attention, layer.mlp
        assert (attention.heads, attention.kv_heads, attention.head_dim) == (HEADS, KV, DIM)
        assert layer.attention_norm.weight == f"blocks.{i}.bias"
        assert layer.mlp_norm.weight == f"blocks.{i}.scale_of_mlp"
        assert attention.dense.weight == f"blocks.{i}.q_proj.weight"
        assert mlp.gate is not None and mlp.gate.weight == f"blocks.{i}.up.weight"
        assert (mlp.up.weight, mlp.activation) == (f"blocks.{i}.gate.weight", "silu")
        assert mlp.down.weight == f"blocks.{i}.last.weight"
        assert attention.rotary is not None
        torch.testing.assert_close(
            attention.rotary.angles, 500.0 ** (-torch.arange(0, DIM, 2) / DIM), check_dtype=False
        )
        group = torch.arange(KV * 4 * DIM).view(KV, 4, DIM)  # k, q, q, v of each group
        wanted = {"query": group[:, 1:3], "key": group[:, 0], "value": group[:, 3]}
        for name, rows in wanted.items():
            found: Linear = getattr(attention, name)
            assert found.rows is not None and found.transposed
            assert torch.equal(found.rows, rows.flatten()), name
            assert found.weight == f"blocks.{i}.down"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"causal": False}, "not causal"),
        ({"scale": 0.5}, r"scale of scores other than 1/sqrt\(head_dim\) is True"),
        ({"normed": True}, "norms of queries and keys is of one of them, not False"),
    ],
)
def test_what_the_format_cannot_hold(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ExportError, match=match) as caught:
        family_of(read_decoder(model_graph(Misnamed(**options))))
    assert "test_export_reading.py:" in str(caught.value)  # the user's line


def test_a_model_that_is_no_decoder() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.relu(self.embed(ids % 5) * self.scale)

    with pytest.raises(ExportError, match="uses parameter scale"):
        read_decoder(model_graph(Plain()))
