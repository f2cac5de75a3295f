"""A mesh that nobody gave: chosen from the batches, agreed by all ranks, explained, kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.mesh_search import first_call as choice
from autoshard.planning.cost import cluster, cluster_of
from gloo_pool import GlooPool

WIDTH = 64


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(batches: list[int], **options: Any) -> dict[str, Any]:
    """One step without a mesh, on batch `batches[rank]`: what was chosen; gradients as serial."""
    torch.compiler.reset()
    choice._chosen().clear()
    if not dist.is_initialized():
        autoshard.shard(nn.Linear(1, 1), (torch.ones(1, 1),), mesh={"dp_shard": 2})
    rank = dist.get_rank()
    model = make()
    compiled = torch.compile(model, backend="autoshard", options={"inner": "eager", **options})
    compiled(batch_of(batches[rank])).square().mean().backward()
    serial = make()
    each = [serial(batch_of(number)).square().mean() for number in batches]
    (sum(each) / len(each)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), serial.parameters()):
        assert isinstance(mine, DTensor) and isinstance(mine.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    again = make()  # a second model of the process gets the same mesh, without a search
    torch.compile(again, backend="autoshard", options={"inner": "eager"})(batch_of(0)).sum()
    assert next(again.parameters()).device_mesh == next(model.parameters()).device_mesh
    (program,) = autoshard.programs(model)
    mesh = program.mesh.device_mesh
    return {
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape)),
        "line": program.chosen,
        "explained": program.chosen in program.explain().splitlines(),
    }


@pytest.mark.parametrize("batches", [[0, 1], [0, 0]])
def test_batches_decide_and_ranks_agree(gloo2: GlooPool, batches: list[int]) -> None:
    first, second = gloo2(train, batches)
    assert first == second
    assert first["explained"] and "alternatives: " in first["line"]
    if batches == [0, 1]:
        assert "tp" not in first["mesh"] and "2 different batches" in first["line"]
    else:
        assert "the same batch" in first["line"] and "tp=2" in first["line"]


def planned_dtypes() -> list[list[str]]:
    """The dtypes of the parameters in the graph for which a mesh is chosen, and when it runs."""
    torch.compiler.reset()
    choice._chosen().clear()
    seen: list[str] = []
    original = choice.search_captured

    def recorded(captured: Any, *rest: Any, **more: Any) -> Any:
        found = [n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"]
        seen.extend(sorted({str(v.dtype) for v in found if v.is_floating_point()}))
        return original(captured, *rest, **more)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = {"inner": "eager", "precision": {"param": "bfloat16"}}
    choice.search_captured = recorded
    try:
        out = torch.compile(model, backend="autoshard", options=options)(torch.arange(8))
    finally:
        choice.search_captured = original
    out.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(isinstance(g, DTensor) and g.dtype == torch.float32 for g in grads)
    return [seen, [str(out.dtype)]]


def test_a_mesh_is_chosen_for_the_dtypes_it_computes_in(gloo2: GlooPool) -> None:
    first, second = gloo2(planned_dtypes)
    assert first == [["torch.bfloat16"], ["torch.bfloat16"]]
    assert second == [[], ["torch.bfloat16"]]  # rank 0 searches


def fail_without_memory() -> str:
    torch.compiler.reset()
    choice._chosen().clear()
    options = {"inner": "eager", "memory": {"budget": 1000}}
    with pytest.raises(Exception, match="no mesh of 2 ranks fits") as raised:
        torch.compile(make(), backend="autoshard", options=options)(batch_of(0))
    return str(raised.value)


def test_all_ranks_hear_that_nothing_fits(gloo2: GlooPool) -> None:
    first, second = gloo2(fail_without_memory)
    for said in (first, second):
        assert "Use more ranks" in said and "of 1e-06 GB" in said


def follow(path: str) -> list[Any]:
    torch.compiler.reset()
    choice._chosen().clear()
    model = make()
    torch.compile(model, backend="autoshard", options={"inner": "eager", "plan": path})(batch_of(0))
    (program,) = autoshard.programs(model)
    return [[axis.name, axis.size] for axis in program.mesh.axes] + [program.stored()]


def test_a_plan_file_brings_its_mesh(gloo2: GlooPool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with torch.device("meta"):
        found = autoshard.search_meshes(make(), (torch.zeros(8, WIDTH),), world=2, mesh={"tp": 2})
    found.rows[0].plan.save(path)
    assert json.loads(path.read_text())["mesh"] == {"tp": 2}
    assert autoshard.Plan.load(path).mesh == {"tp": 2}
    for axis, stored in gloo2(follow, str(path)):
        assert axis == ["tp", 2] and stored == found.rows[0].plan.parameters
        assert "S(0)" in stored.values()


def test_digests_tell_batches_apart() -> None:
    one = torch.zeros(4, dtype=torch.bfloat16)
    assert choice.digest([one]) == choice.digest([one.clone()])
    for other in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.bfloat16), one + 1):
        assert choice.digest([one]) != choice.digest([other])
    assert "unknown" in choice.digest([torch.empty(4, device="meta")])
    assert choice._shares(2, ["a", "a", "b", "b"]) and not choice._shares(4, ["a", "a", "b", "b"])
    assert not choice._shares(2, ["a", "b", "b", "a"])


def test_the_device_is_found() -> None:
    here = cluster_of("cpu")
    assert here.name == "cpu" and 1e8 < here.usable_bytes < 1e14
    assert here.inside == cluster("cpu").inside
