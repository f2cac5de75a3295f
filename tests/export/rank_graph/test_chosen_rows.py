"""Which rows of a mixture an engine computes: how many, and that they say what the model says."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import fx

import engine_cases as cases
from autoshard.export.rank_graph import chosen_rows
from autoshard.export.rank_graph.chosen_rows import blocks_of, mixtures
from autoshard.export.rank_graph.graph import RankGraph
from autoshard.export.rank_graph.plan import plan_inference
from autoshard.export.rank_graph.weights import read_weights
from autoshard.export.serial_graph import WeightSource
from autoshard.export.spec import EngineSpec
from autoshard.export.to_tensorrt.build import build, check_capabilities, checked_network
from autoshard.planning.cost.clusters import cluster
from network_runs import interpret
from onnx_evaluator import evaluate

aten = torch.ops.aten
H100 = cluster("h100").sheet
EXPERTS, CHOSEN, INNER = 16, 2, 48
LENGTH = 64


def model(name: str = "mixtral", **options: Any) -> torch.nn.Module:
    import transformers

    sizes = {**cases.SIZES, "num_hidden_layers": 1, "num_experts_per_tok": CHOSEN}
    settings: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": EXPERTS},
        "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "head_dim": 16},
        "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 16, "sliding_window": 16},
    }
    kind = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings[name], **options})
    made: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.eval()


def graph_of(model: torch.nn.Module, tp: int, rank: int, length: int | None) -> RankGraph:
    spec = EngineSpec(mesh={"tp": tp}, dtype="float32", dynamic=cases.DYNAMIC, max_length=length)
    return plan_inference(model, spec).rank_graph(rank)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if looking up were free: small models are cheapest as they are."""
    monkeypatch.setattr(chosen_rows, "_PLACING_SECONDS", -1.0)


class Counting(fx.Interpreter):
    """Counts the rows that go through the products of experts' matrices."""

    def __init__(self, graph: RankGraph) -> None:
        super().__init__(graph.module)
        self.rows: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.target is aten.matmul.default and found.dim() == 3:
            self.rows.append(math.prod(found.shape[:2]))
        return found


def run(graph: RankGraph, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> Counting:
    """One call without a cache."""
    held = {**graph.constants, **weights, "input_ids": ids}
    inputs = [held[str(n.target)] for n in graph.module.graph.find_nodes(op="placeholder")]
    counting = Counting(graph)
    with torch.no_grad():
        counting.outputs = counting.run(*inputs)
    return counting


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mixtral", (1, 1)),
        ("qwen3_moe", (2, 8)),
        ("gpt_oss", (3, 11)),
        pytest.param("mixtral", (3, 11), marks=pytest.mark.slow),
        pytest.param("gpt_oss", (1, 1), marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_choices_and_say_the_same(name: str, shape: tuple[int, int]) -> None:
    """One token: a row for each choice. Many: less than two for each, and one for each expert."""
    made = model(name)
    graph = graph_of(made, 1, 0, None)
    ids = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    found = run(graph, read_weights(WeightSource(made), graph, 0), ids)
    with torch.no_grad():
        wanted = made(ids).logits
    assert cases.error(found.outputs[:1], [wanted]) < 1e-5
    tokens = math.prod(shape)
    rows = math.prod(blocks_of(tokens, CHOSEN, EXPERTS))
    assert found.rows and set(found.rows) == {rows}
    bound = CHOSEN + 1 if tokens == 1 else min(2 * CHOSEN * tokens + EXPERTS, EXPERTS * tokens)
    assert rows < bound


@pytest.mark.slow
@pytest.mark.usefixtures("chosen")
def test_a_network_and_an_onnx_model_say_the_same_of_a_prompt_and_token_by_token() -> None:
    """On two ranks, of eight experts each, with a cache."""
    onnx_model = pytest.importorskip("autoshard.export.to_onnx")
    pytest.importorskip("onnxscript")
    made, feeds = model("qwen3_moe"), cases.feeds(LENGTH)
    graphs = [graph_of(made, 2, rank, LENGTH) for rank in range(2)]
    held = [read_weights(WeightSource(made), graph, r) for r, graph in enumerate(graphs)]
    assert all(
        list(graph.module.graph.find_nodes(op="call_function", target=aten.scatter.src))
        for graph in graphs
    )
    with torch.no_grad():
        parts = [feed["input_ids"] for feed in feeds]
        whole = made(torch.cat(parts, 1)).logits
    wanted = [part[:, -1:] for part in whole.split([one.shape[1] for one in parts], 1)]
    programs = [onnx_model.onnx_program(g, w).model_proto for g, w in zip(graphs, held)]
    for outputs in evaluate(programs, feeds):
        assert cases.error([out["logits"] for out in outputs], wanted) < 1e-5
    trt = pytest.importorskip("tensorrt_rtx")
    networks = [checked_network(trt, g, w) for g, w in zip(graphs, held)]
    for outputs in interpret(networks, feeds):
        assert cases.error([out["logits"] for out in outputs], wanted) < 1e-5
    file = io.BytesIO()
    levels = check_capabilities(trt, ["8.9"], graphs[0])
    build(networks[0], file, levels)
    assert file.getvalue()


class Sizes:
    """What is asked of a mixture's size, of Qwen3-30B-A3B's in bfloat16."""

    experts, chosen, parameters, widths = 128, 8, 3 * 768 * 2048, 2048 + 1536 + 768 + 2048

    class out:
        meta = {"val": torch.empty(0, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("tokens", "fewer"), [(1, True), (4, True), (16, False), (256, False), (8192, True)]
)
def test_the_cheaper_form(tokens: int, fewer: bool) -> None:
    """Few tokens read few matrices; with many, arithmetic counts. In between every matrix is read
    anyway, and looking it up costs more."""
    chosen, every = (chosen_rows.seconds(Sizes(), tokens, form, H100) for form in (True, False))  # type: ignore[arg-type]
    assert (chosen < every) is fewer


def test_small_models_run_every_expert_on_every_token() -> None:
    graph = graph_of(model(), 1, 0, None).module.graph
    assert len(list(mixtures(graph))) == 1
