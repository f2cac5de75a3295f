"""Products of flattened tokens on cp: what is sent around them, and their values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.planning.cost.model import ring_bytes
from autoshard.verification.program_check import verify_program
from traced import builder, programs

aten = torch.ops.aten
B = 2


class Projection(nn.Module):
    """GPT-2's: a product of the tokens of all sequences."""

    def __init__(self, features: int, made: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, made) * 0.1)
        self.bias = nn.Parameter(torch.randn(made)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        if self.bias is None:
            return torch.mm(flat, self.weight).view(*x.shape[:-1], -1)
        return torch.addmm(self.bias, flat, self.weight).view(*x.shape[:-1], -1)


class Layer(nn.Module):
    """Attention between two of them."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, features = heads, heads * width
        self.first = Projection(features, 3 * features, True)
        self.last = Projection(features, features, False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x).split(x.shape[-1], 2)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(y.transpose(1, 2).reshape(x.shape)).square().mean()


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}])
def test_a_layer_is_the_serial_one(mesh: dict[str, int]) -> None:
    x = torch.randn(B, 64, 32)
    made, values = programs(Layer(4, 8), (x,), [{"mesh": mesh}])
    found = verify_program(made[0], values)
    assert found.worst_by_norm[1] < 1e-5
    assert not made[0].serial.graph.find_nodes(op="call_function", target=aten.addmm.default)


def test_tokens_flattened_with_the_batch_inside_are_those_of_samples() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(B, 16, 32)
    made, values = programs(layer, (x,), [{"mesh": {"cp": 2}}])
    assert verify_program(made[0], values).worst_by_norm[1] < 1e-5
    products = made[0].serial.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert len(products) == 4 and all(one.meta["val"].dim() == 3 for one in products)


def test_a_layer_sends_what_attention_by_rows_does() -> None:
    heads, width, length, n = 16, 64, 16384, 2
    with torch.device("meta"):
        model = Layer(heads, width).to(torch.bfloat16)
        x = torch.empty(B, length, heads * width, dtype=torch.bfloat16)
    program = builder(model, (x,))({"cp": n}, hardware_name="h100")
    moved = [one for one in program.collectives() if "S(0)" not in one.change]
    moved = [one for one in moved if one.op != "all_reduce"]
    formula = 2 * 2 * B * length * heads * width * (n - 1) // n  # docs/context_parallel.md
    for phase in ("forward", "backward"):
        sent = [ring_bytes(one.op, one.bytes, n) for one in moved if one.phase == phase]
        assert sum(sent) == formula, (phase, moved)
