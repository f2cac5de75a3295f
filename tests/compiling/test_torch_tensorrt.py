"""torch-tensorrt's converters beside ours, and behind inner="tensorrt", without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import engine_cases as cases
import torch_tensorrt_cpu as other
from autoshard import backend
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.to_tensorrt.build import Network, Recorded, checked_network
from autoshard.export.to_tensorrt.engine import NetworkInterpreter
from autoshard.runtime.collectives import lockstep
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.mesh import init_mesh
from network_runs import interpret

trt = pytest.importorskip("tensorrt_rtx")
if reason := other.unavailable():
    pytest.skip(reason, allow_module_level=True)

MESH = {"tp": 2}


def kinds(network: Network) -> Counter[str]:
    """How many layers of each kind a network has, attention as one."""
    definition = network.definition
    found = [definition.get_layer(i).type.name for i in range(definition.num_layers)]
    return Counter(found) + Counter(["ATTENTION"] * len(definition.attentions))


def ports(network: Network) -> list[tuple[str, tuple[int, ...]]]:
    """Type and sizes of each output."""
    definition = network.definition
    found = [definition.get_output(i) for i in range(definition.num_outputs)]
    return [(str(tensor.dtype), tuple(tensor.shape)) for tensor in found]


def called(network: Network, axis: Axis) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A network as a function of its inputs in order."""
    run = NetworkInterpreter(network, axis)
    names = [tensor.name for tensor in run.inputs]
    return lambda *args: tuple(run(dict(zip(names, args, strict=True))).values())


def said(one: Recorded) -> tuple[Any, ...]:
    """The arguments of a collective, its group as plain numbers."""
    operation, reduction, root, groups, ranks = one.arguments
    return operation, reduction, root, [int(rank) for rank in groups], ranks


def test_without_its_runtime_it_has_no_converter_of_a_collective() -> None:
    missing = other.install()
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert f"tensorrt.fused_nccl_{name}.default" in missing


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mixtral", "gpt2")]


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_it_makes_the_network_we_make(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # it takes all processes of the job as the group of every collective
    monkeypatch.setenv("WORLD_SIZE", "2")
    graphs = [cases.rank(name, 2, rank) for rank in range(2)]
    given = [{**graph.constants, **weights} for graph, weights in graphs]
    theirs = [other.of_rank_graph(graph, held) for (graph, _), held in zip(graphs, given)]
    ours = [checked_network(trt, *one) for one in graphs]
    for one, two in zip(ours, theirs):
        assert ports(one) == ports(two)
        for kind in ("MATRIX_MULTIPLY", "ATTENTION", "DIST_COLLECTIVE", "TOPK", "SOFTMAX"):
            assert kinds(one)[kind] == kinds(two)[kind], kind
        mine = [recorded.arguments for recorded in one.definition.collectives]
        assert len(mine) > 4 and {groups for *_, groups, _ in mine} == {None}
        # we name no group, which is all ranks; it names them all
        everybody = [(*rest, [0, 1], ranks) for *rest, _, ranks in mine]
        assert [said(recorded) for recorded in two.definition.collectives] == everybody

    def work(axis: Axis) -> list[torch.Tensor]:
        call, held = called(theirs[axis.rank], axis), given[axis.rank]
        weights = [held[target] for target in targets(graphs[axis.rank][0])[1:]]
        return [call(feed["input_ids"], *weights)[0] for feed in feeds]

    feeds = cases.feeds(None)
    wanted = cases.expected(name, None)
    answers = lockstep.run_ranks(2, work, timeout=300)
    for mine, its in zip(interpret(ours, feeds), answers):
        assert cases.error(its, [out["logits"] for out in mine]) < 1e-6
        assert cases.error(its, wanted) < 1e-5


def targets(graph: RankGraph) -> Sequence[str]:
    return [str(node.target) for node in graph.module.graph.find_nodes(op="placeholder")]


def served() -> dict[str, Any]:
    """A Llama given to torch-tensorrt by torch.compile, with a hole in what may be looked at."""
    axis = init_mesh(MESH, "cpu").axis("tp")
    recorded: list[Any] = []

    def run(network: Network) -> Callable[..., tuple[torch.Tensor, ...]]:
        recorded.append([said(one) for one in network.definition.collectives])
        recorded.append(kinds(network))
        return called(network, axis)

    model, ids = cases.make("llama", num_hidden_layers=1), torch.arange(16).view(2, 8)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([2]), 0)
    options = {"mesh": MESH, "inner": "tensorrt", "outputs": "replicate"}
    with torch.no_grad(), other.compiling_to(run), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "check_serving", lambda sizes, device: None)  # wants a GPU
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        compiled = torch.compile(model, backend="autoshard", options=options)
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
    collectives, layers = recorded
    error = cases.error([found], [wanted])
    return {"error": error, "collectives": collectives, "layers": layers}


@pytest.mark.slow
def test_what_torch_compile_hands_it_becomes_one_network(gloo2: Any) -> None:
    for rank in gloo2(served):
        assert rank["error"] < 1e-5
        for one in rank["collectives"]:
            kind = "SUM" if "REDUCE" in one[0] else "NONE"
            assert one == (one[0], kind, -1, [0, 1], 2)
        assert rank["layers"]["DIST_COLLECTIVE"] == len(rank["collectives"]) >= 3
        assert rank["layers"]["ATTENTION"] == 1 and rank["layers"]["MATRIX_MULTIPLY"] == 8
