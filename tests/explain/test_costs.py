"""What a collective costs and which line causes it; the plan beside alternatives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

import autoshard
from autoshard.compiling import Collective
from autoshard.explain import text_costs as explain_costs
from autoshard.explain.alternatives import alternatives
from autoshard.explain.costs import Cost, cause, seconds, sent
from autoshard.explain.facts import Facts
from autoshard.passes.lib.bucketing import GATHER_TOGETHER
from autoshard.planning.cost import model as cost
from autoshard.program import Program
from models_hf import llama


class Wide(nn.Module):
    """Its second matrix product is the one whose sum over ranks is large."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
        self.up = nn.Linear(16, 2048)
        self.down = nn.Linear(2048, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(x)
        z = self.up(y).relu()
        return self.down(z)  # the dearest line


def trace(model: nn.Module, **options: object) -> Program:
    torch.compiler.reset()
    return autoshard.trace(model, (torch.ones(64, 64),), **options)  # type: ignore[arg-type]


def llama_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = llama(num_hidden_layers=2)()
    ids = torch.zeros(4, 32, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def meshes() -> list[Program]:
    model, batch = llama_and_batch()
    made = []
    for mesh in ({"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        torch.compiler.reset()
        made.append(autoshard.trace(model, kwargs=batch, mesh=mesh))
    return made


def test_the_dearest_collective_has_the_line_that_causes_it() -> None:
    made = trace(Wide(), mesh={"tp": 4}, planner={"sequence_parallel": False})
    first = Facts(made).costs[0]
    assert (first.op, first.phase, first.modules) == ("all_reduce", "forward", ("down",))
    assert first.code == "return self.down(z)  # the dearest line"
    said = explain_costs.dearest(Facts(made), 100)
    assert f"{Path(__file__).name}:" in said and first.code in said
    assert said.splitlines()[0].startswith("Dearest: all_reduce in forward on tp, 1 of ")
    # the same collective is the first of the table, with the same line
    table = made.explain().split("\n\n")[4].splitlines()
    assert "all_reduce" in table[2] and "down (test_costs.py:" in table[3]
    assert first.code in table[4]


def test_weights_gathered_together_are_one_cost(meshes: list[Program]) -> None:
    """A large weight, or one that is looked up, has a result of its own in one collective."""
    made = meshes[2]
    together = [c for c in made.collectives() if c.node.target is GATHER_TOGETHER]
    assert together and {c.node for c in together} <= Facts(made).windows.keys()
    assert sum(c.count for c in Facts(made).costs) == len(made.collectives())


def test_a_gather_is_blamed_on_the_operator_that_reads_it() -> None:
    def one(change: str, reader_line: str = "m.py:2") -> tuple[str, str]:
        node = fx.Graph().placeholder("x")
        return cause(
            Collective(
                op="all_gather",
                axis="tp",
                bytes=8,
                phase="forward",
                module="norm",
                change=change,
                stack="m.py:1",
                node=node,
                reader="q",
                reader_line=reader_line,
            )
        )

    assert one("mul: S(1) -> R") == ("q", "m.py:2")
    assert one("linear: P -> S(1)") == ("norm", "m.py:1")
    assert one("mul: S(1) -> R", reader_line="") == ("norm", "m.py:1")
    assert one("bucket of 3: I -> R") == ("norm", "m.py:2")


def test_costs_are_all_collectives_sorted(meshes: list[Program]) -> None:
    for made in meshes:
        found, every = Facts(made).costs, made.collectives()
        assert sum(one.count for one in found) == len(every)
        assert sum(one.bytes * one.count for one in found) == sum(c.bytes for c in every)
        assert [one.seconds for one in found] == sorted((o.seconds for o in found), reverse=True)
        assert sum(one.seconds for one in found) == pytest.approx(
            sum(seconds(made, c) for c in every)
        )


def test_each_axis_is_priced_by_its_own_size_and_link(meshes: list[Program]) -> None:
    made = meshes[1]
    by_axis: dict[str, Cost] = {}
    for one in Facts(made).costs:
        if one.count == 1:
            by_axis.setdefault(one.axis, one)
    assert set(by_axis) == {"dp_shard", "tp"}
    for name, one in by_axis.items():
        wanted = cost.collective_seconds(one.op, one.bytes, 2, made.machine.real_links[name])
        assert one.seconds == pytest.approx(wanted)


def test_this_plan_is_priced_like_its_collectives(meshes: list[Program]) -> None:
    """Planned traffic is what AOTAutograd's graphs send: to the byte on tp; on the data axes
    but for what the partitioner keeps instead of gathering again."""
    for made, tolerance in zip(meshes, (1e-9, 0.05, 0.05)):
        first = alternatives(made)[0]
        exact = sum(sent(made, one) for one in made.collectives())
        assert first.sent == pytest.approx(exact, rel=tolerance)
        memory = made.memory(inner="aot_eager")
        held = memory.parameters + memory.gradients + memory.optimizer
        assert first.stored == pytest.approx(held, rel=0.01)


def test_a_plan_takes_the_seconds_that_autoshard_plan_says(meshes: list[Program]) -> None:
    model, batch = llama_and_batch()
    torch.compiler.reset()
    mesh, machine = {"dp_shard": 2, "tp": 2}, meshes[1].machine
    (row,) = autoshard.search_meshes(model, (), batch, world=4, mesh=mesh, hardware=machine).rows
    first = alternatives(meshes[1])[0]
    assert first.seconds == row.timing.step and first.memory == row.memory
    assert first.timing.traffic == row.timing.traffic


def test_alternatives_by_name(meshes: list[Program]) -> None:
    names = [[one.name for one in alternatives(made)] for made in meshes]
    tp = ["this plan", "Megatron TP", "Megatron TP+SP"]
    data = ["FSDP (ZeRO-3)", "DDP"]
    assert names == [tp + data, tp + data, ["this plan", *data]]
    for made in meshes:
        found = {one.name: one for one in alternatives(made)}
        fsdp, ddp = found["FSDP (ZeRO-3)"], found["DDP"]
        assert fsdp.stored * made.mesh.size == pytest.approx(ddp.stored, rel=0.05)
        assert ddp.sent < fsdp.sent and ddp.batches == made.axis.size


def test_alternatives_on_cp_are_of_ranks_of_tp() -> None:
    model, batch = llama_and_batch()
    made = autoshard.trace(model, (), batch, mesh={"cp": 2})
    found = {one.name: one.mesh for one in alternatives(made)}
    assert found["this plan"] == {"cp": 2} and found["Megatron TP"] == {"tp": 2}


def test_sequence_parallelism_saves_less() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
    with torch.device("meta"):
        model = llama(**sizes, num_attention_heads=16, num_key_value_heads=16)()
        ids = torch.zeros(2, 1024, dtype=torch.long)
    made = autoshard.trace(model, kwargs={"input_ids": ids, "labels": ids}, mesh={"tp": 2})
    saved = {one.name: one.profile.activations.saved for one in alternatives(made)}
    assert saved["Megatron TP+SP"] < saved["Megatron TP"]


class Split(nn.Module):
    """Attention whose queries, keys and values are elements of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x[None]).unflatten(-1, (12, 16)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        z: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


def test_values_that_come_out_of_tuples_are_priced() -> None:
    made = trace(Split(), mesh={"tp": 2})
    first = alternatives(made)[0]
    # two linears and the attention, forward and backward: at least their share of the work
    flops = 3 * 2 * 64 * 64 * (192 + 64) / 2
    assert first.timing.compute > flops / made.machine.device.peak(torch.float32)
    assert "scaled_dot_product_attention" in made.explain()


def test_one_rank_has_no_alternatives() -> None:
    made = trace(Wide(), mesh={"tp": 1})
    assert alternatives(made) == [] and Facts(made).costs == []
    assert explain_costs.dearest(Facts(made), 100) == explain_costs.beside(Facts(made), 100) == ""


def test_a_graph_without_gradients() -> None:
    made = trace(Wide().requires_grad_(False), mesh={"tp": 4}, planner={"sequence_parallel": False})
    assert made.joint.backward is None
    assert {one.phase for one in Facts(made).costs} == {"forward"}
    rows = explain_costs.by_module(Facts(made), 100).splitlines()[2:-1]
    assert sum(int(row.split()[1]) for row in rows) == 4 and rows[-1].startswith("down ")
    assert "Partial -> Replicate" in made.explain()
    first = alternatives(made)[0]
    assert first.sent == pytest.approx(sum(sent(made, one) for one in made.collectives()))


def test_modules_of_repeated_layers_are_one_row(meshes: list[Program]) -> None:
    lines = explain_costs.by_module(Facts(meshes[0]), 200).splitlines()
    (down,) = [line for line in lines if "down_proj" in line]
    assert down.split()[:3] == ["model.layers.0-1.mlp.down_proj", "2", "linear"]
    assert down.endswith("S(2), S(1) -> P")
