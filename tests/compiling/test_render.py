"""The text of graphs is stable: no addresses, no counters of the process, no torch spelling."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoshard.compiling.rendering import input_name, render, type_text
from autoshard.passes.base import Context, module_path, user_line
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import redistribute
from capturing import Recorder
from golden_text import golden

TP = Axis("tp", 2, 0, "group-17")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps.add_(1)
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).split([8, 4, 4], -1)
        q, k, v = (t.view(b, s, h, 4).transpose(1, 2) for t, h in ((q, 2), (k, 1), (v, 1)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with torch.no_grad():
            top = x.topk(2, -1).values
        return y.transpose(1, 2).reshape(b, s, 8) + x, top.to(torch.bfloat16)


def captured(x: torch.Tensor, **options: Any) -> fx.GraphModule:
    torch._dynamo.reset()
    recorder = Recorder()
    torch.compile(nn.Sequential(Block()), backend=recorder, **options)(x)
    return recorder.graph


def test_captured_graph() -> None:
    golden("captured", render(captured(torch.randn(3, 5, 8))))


def test_modules_at_the_right() -> None:
    gm = captured(torch.randn(3, 5, 8))
    golden("modules", render(gm, modules=True))
    linear = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    assert module_path(linear) == "0.qkv"
    assert user_line(linear).split("/")[-1].startswith("test_render.py:")


def test_modules_of_a_decorated_forward() -> None:
    def decorated(forward: Any) -> Any:
        return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4)

        @decorated
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    recorder = Recorder()
    torch.compile(Model(), backend=recorder)(torch.randn(3, 8))
    nodes = [node for node in recorder.graph.graph.nodes if node.op == "call_function"]
    assert "args" in str(nodes[0].meta["nn_module_stack"]) and module_path(nodes[0]) == "up"


def test_prepared_graph() -> None:
    gm = captured(torch.randn(3, 5, 8))
    for one in (Canonicalize(), ExpandGroupedHeads()):
        one.run(gm, Context(TP))
    golden("prepared", render(gm))


def test_symbolic_sizes() -> None:
    text = render(captured(torch.randn(3, 5, 8), dynamic=True))
    lines = [line for line in text.splitlines() if "linear" in line]
    assert len(lines) == 1
    assert re.fullmatch(r"%\d+: f32\[s\d+,s\d+,16\] = linear\(.*\)", lines[0])


def test_rendering_twice_gives_the_same_text() -> None:
    texts = [render(captured(torch.randn(3, 5, 8))) for _ in range(2)]
    assert texts[0] == texts[1]


def graph_of(*calls: tuple[Any, tuple[Any, ...], torch.Tensor]) -> fx.GraphModule:
    """x, then each call with the node before it as first argument."""
    graph = fx.Graph()
    node = graph.placeholder("l_x_")
    node.meta["val"] = torch.empty(8, 6)
    for target, args, val in calls:
        node = graph.call_function(target, (node, *args))
        node.meta["val"] = val
    graph.output((node, None, 3))
    return fx.GraphModule(nn.Module(), graph)


def test_changes_and_collectives() -> None:
    c10d = torch.ops._c10d_functional
    wait = (c10d.wait_tensor.default, ())
    full, part = torch.empty(8, 6), torch.empty(4, 6)
    gm = graph_of(
        (redistribute, ("P", "S(0)", TP, None), part),
        (redistribute, ("S(0)", "I", TP, 7), full),
        (c10d.all_reduce.default, ("sum", "group-17"), full),
        (*wait, full),
        (c10d.reduce_scatter_tensor.default, ("sum", 2, "group-17"), part),
        (*wait, part),
        (c10d.all_to_all_single.default, ([2, 2], [2, 2], "group-17"), part),
        (*wait, part),
        (c10d.all_gather_into_tensor.default, (2, "other"), full),
        (*wait, full),
        (torch.ops.aten.sum.dim_IntList, ([0],), torch.empty(6, dtype=torch.int32)),
    )
    golden("collectives", render(gm, axes=[TP]))


@pytest.mark.parametrize(
    "target,name",
    [
        (
            "l_self_modules_model_modules_layers_modules_0_parameters_weight_",
            "model.layers.0.weight",
        ),
        ("l_self_buffers_inv_freq_", "inv_freq"),
        ("l_self_parameters_w_", "w"),
        ("l_kwargs_input_ids_", "input_ids"),
        ("l_x_", "x"),
        ("s77", "s77"),
    ],
)
def test_input_names(target: str, name: str) -> None:
    assert input_name(target) == name


def test_types() -> None:
    pair = (torch.empty(2, dtype=torch.bool), [torch.empty((), dtype=torch.float8_e4m3fn)])
    assert type_text(pair) == "(bool[2], (float8_e4m3fn[]))"
