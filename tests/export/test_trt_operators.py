"""Every converter beside torch: one network of many outputs, interpreted layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.export import ExportError
from autoshard.export.spec import EngineSpec
from autoshard.export.to_tensorrt.engine import networks
from network_runs import interpret

pytest.importorskip("tensorrt_rtx")

Tensor = torch.Tensor


def written_into(x: Tensor) -> Tensor:
    made = x.new_empty(x.shape)
    made[..., :3].copy_(x[..., 5:])
    made[..., 3:] = x[..., :5]
    made[:, -2:] = 1.0
    return made


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp above": lambda x: x.clamp(max=0.3),
    "clamp below": lambda x: x.clamp(min=0.3),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "cube": lambda x: x**3,
    "root": lambda x: x.abs() ** 0.5,
    "power of a number": lambda x: 2**x,
    "1 - x": lambda x: 1 - x,
    "scaled sum": lambda x: torch.add(x, x, alpha=3),
    "scaled difference": lambda x: torch.sub(x, x * x, alpha=2),
    "quotient": lambda x: 1 / (x.abs() + 1),
    "floor division": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "whole numbers divided": lambda x: (x * 10).long() // 3,
    "whole numbers, true quotient": lambda x: (x * 10).long() / 3,
    "<=": lambda x: x <= 0,
    ">=": lambda x: x >= 0.1,
    "!=": lambda x: x != 0,
    "== of whole numbers": lambda x: (x * 2).long() == 1,
    "and": lambda x: (x > 0) & (x < 1),
    "or": lambda x: (x > 0) | (x < -1),
    "not": lambda x: ~(x > 0),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "scatter of values": lambda x: x.scatter(-1, x.topk(x.shape[-1]).indices, x),
    "where of numbers": lambda x: torch.where(x > 0, 1.0, -1.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "sum of two": lambda x: x.sum((1, 2), keepdim=True),
    "mean": lambda x: x.mean(1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin((1, 2)),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x > -1).all(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmax, dim kept": lambda x: x.argmax(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum of truth": lambda x: (x > 0).cumsum(-1),
    "softmax": lambda x: x.softmax(1),
    "topk": lambda x: x.topk(3).values,
    "where the topk are": lambda x: x.topk(3, dim=1).indices,
    "smallest": lambda x: x.topk(2, largest=False).values,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "layer_norm of two": lambda x: F.layer_norm(x, (6, 8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "every second": lambda x: x[:, 1:5:2],
    "last ones": lambda x: x[:, -3:],
    "without the last": lambda x: x[:, :-1],
    "without the first row": lambda x: x[1:],
    "without the last row": lambda x: x[:-1],
    "one": lambda x: x[:, 2],
    "last row": lambda x: x[-1],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat of types": lambda x: torch.cat([x, (x * 2).long()], 0),
    "stack": lambda x: torch.stack([x, x], 1),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([2, 4], 1)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "reshape": lambda x: x.reshape(-1, 8),
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(x.shape[0], 2, 3, 8),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 4, -1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat of a new dim": lambda x: x[:, :1].repeat(x.shape[0], 1, 2, 1),
    "max": lambda x: x.max(-1).values,
    "where the max is": lambda x: x.max(1, keepdim=True).indices,
    "gather": lambda x: x.gather(1, (x > 0).long()),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, x.topk(2).indices, 1.0),
    "scatter in the middle": lambda x: x.scatter(1, x.topk(2, dim=1).indices, 0.0),
    "several indices": lambda x: x[torch.arange(x.shape[0], device=x.device), x[..., 0].argmax(1)],
    "several indices from the end": lambda x: x[:, (x[0, :3, 0] > 0).long() - 2, [0, 1, -1]],
    "written into": written_into,
    "group_norm": lambda x: F.group_norm(x, 3),
    "norm of a vector": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "pooled over what was turned": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
    "as many of the last": lambda x: x[0, 0, max(0, 8 - x.shape[0]) :] * x[:, :1, 0].T,
    "infinite": lambda x: torch.isinf(x / (x > 0)).any(-1),
    "log1p": lambda x: x.abs().log1p(),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "matmul": lambda x: x @ x.transpose(1, 2),
    "bmm": lambda x: torch.bmm(x, x.mT),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT, alpha=0.5),
    "arange": lambda x: x + torch.arange(8, device=x.device),
    "arange of a size": lambda x: torch.arange(x.shape[0], device=x.device) + x[:, 0, 0],
    "full": lambda x: x + torch.full((x.shape[0], 6, 1), 2.0, device=x.device),
    "zeros": lambda x: x.new_zeros(x.shape[0], 3) + 1,
    "to half and back": lambda x: x.half().float(),
    "to bool": lambda x: x.bool(),
    "to int": lambda x: (x * 3).int(),
    "from bool": lambda x: (x > 0).float(),
    "times a size": lambda x: x * x.shape[0],
    "neg": lambda x: -x,
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "maximum": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(x, x * x),
    "lerp": lambda x: torch.lerp(x, -x, 0.3),
    "causal attention": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True),
    "attention where": lambda x: F.scaled_dot_product_attention(
        *[x[:, None]] * 3, attn_mask=(x @ x.mT)[:, None] > -9
    ),
    "biased attention": lambda x: F.scaled_dot_product_attention(
        *[x[:, None]] * 3, attn_mask=(x @ x.mT)[:, None], scale=0.1
    ),
}


class Every(nn.Module):
    """All of OPERATORS, and lookups in what a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.register_buffer("places", torch.tensor([2, 0, -1]), persistent=False)
        self.register_buffer("factors", torch.randn(8))
        self.unregistered = torch.randn(8)

    def forward(this, x: Tensor) -> dict[str, Tensor]:
        # `this`: what a tensor is must not be told by what the model calls itself
        made = {name: operator(x * this.factors) for name, operator in OPERATORS.items()}
        return {
            **made,
            "linear": F.linear(x, this.weight, this.bias),
            "a vector's addmm": torch.addmm(this.bias, x[:, 0], this.weight),
            "matmul broadcast": x @ this.weight,
            "conv1d": F.conv1d(x, this.weight[:6, None, :3], this.bias[:6], padding=2, groups=6),
            "conv2d": F.conv2d(
                x[:, None], this.weight.view(-1)[:36].view(4, 1, 3, 3), stride=2, padding=1
            ),
            "max_pool": F.max_pool2d(x[:, None], 3, 2, 1),
            "batch_norm": F.batch_norm(
                x, this.factors[:6], this.factors[:6].abs() + 1, this.bias[:6], this.bias[:6]
            ),
            "embedding": F.embedding((x > 0).long(), this.weight),
            "index": x[:, this.places],
            "index of a dynamic dim": x.transpose(0, 1)[:, this.places[2:]],
            "unregistered": x * this.unregistered,
        }


def spec(**options: Any) -> EngineSpec:
    return EngineSpec(mesh={"tp": 1}, example=((torch.zeros(2, 6, 8),), {}), **options)


def test_every_operator_is_what_torch_says_it_is() -> None:
    model = Every().eval()
    made = networks(model, spec(dynamic={"batch": (1, 2, 4)}))
    for rows in (2, 3):
        x = torch.randn(rows, 6, 8)
        with torch.no_grad():
            wanted = model(x)
        found = list(interpret(made, [{"x": x}])[0][0].values())
        for (name, want), have in zip(wanted.items(), found, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape, name
            torch.testing.assert_close(have, want, msg=lambda said, name=name: f"{name}: {said}")


class Held(nn.Module):
    """A tensor of the state dict, one beside it, one that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stored", torch.randn(8))
        self.register_buffer("beside", torch.randn(8), persistent=False)
        self.plain = torch.randn(8)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.stored).float() * self.beside * self.plain


def test_what_the_state_dict_has_takes_the_type_of_the_engine() -> None:
    model = Held()
    made = networks(model, spec(dtype="float16"))
    x = torch.randn(2, 6, 8).half()
    found = interpret(made, [{"x": x}])[0][0]["logits"]
    torch.testing.assert_close(
        found, (x * model.stored.half()).float() * model.beside * model.plain
    )
    assert found.dtype == torch.float32


def test_a_tensor_made_on_another_device_is_an_error_that_says_so() -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(8, device="meta")

    with pytest.raises(ExportError, match=r"(?s)device=x.device.*test_trt_operators.py"):
        networks(Elsewhere(), spec())
