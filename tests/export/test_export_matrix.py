"""The table of families and targets says what was checked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import export_matrix
import older_transformers
from autoshard.export import EngineSpec, ExportError, trtllm
from autoshard.export.rank_graph import plan_inference, read_weights
from autoshard.export.rank_graph.operators import attention
from autoshard.export.serial_graph import WeightSource
from families import FAMILIES
from side_by_side import difference_by_norm


def doubled_scale(ranks: export_matrix.Ranks) -> None:
    for graph, _ in ranks:
        for node in graph.module.graph.find_nodes(op="call_function", target=attention):
            node.kwargs = {**node.kwargs, "scale": 2 * node.kwargs["scale"]}


def test_a_cell_is_checked() -> None:
    pytest.importorskip("tensorrt_rtx")
    assert export_matrix.row("BERT", targets=["engine"]) == {
        "engine": "equal",
        "engine + cache": "–",
    }
    wrong = export_matrix.row("BERT", targets=["engine"], plant=doubled_scale)
    assert wrong["engine"].startswith("WRONG: differs by")


def test_the_page_has_every_family_and_every_reason_once() -> None:
    refused = dict.fromkeys(export_matrix.COLUMNS, "no such | layer")
    page = export_matrix.page({"Llama": {"ONNX": "equal"}, "Mamba": refused})
    assert "| Llama | not run | not run | equal | not run |" in page
    assert page.count("no such") == 1 and page.count("[1](#reasons)") == len(refused)
    of_class = {"T5": {"ONNX": "T5Model has an encoder."}, "BART": {"ONNX": "Bart has an encoder."}}
    assert export_matrix.page(of_class).count("The model has an encoder.") == 1


def test_an_exception_is_a_defect_in_one_line() -> None:
    def work() -> str:
        return str(torch.zeros(2) @ torch.zeros(3))

    said = export_matrix.said(work)
    assert said.startswith("DEFECT: RuntimeError at test_export_matrix.py:") and "\n" not in said
    assert len(FAMILIES) == 42


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-NeoX", "ViT"])
def test_an_older_transformers_reads_what_is_converted(name: str) -> None:
    """These are stored otherwise in memory than in files."""
    try:
        older_transformers.install()
    except subprocess.CalledProcessError:
        pytest.skip(f"transformers {older_transformers.VERSION} cannot be installed here")
    family = FAMILIES[name]
    assert older_transformers.read_by_older(family.make(), family.call(2, 9)) == "equal"


def test_a_learned_bias_of_distances_is_continued() -> None:
    """T5, its table's columns on two ranks, behind an encoder: cached tokens are the model's."""
    pytest.importorskip("tensorrt_rtx")
    family = FAMILIES["T5"]
    model = family.make(num_layers=1, num_decoder_layers=2)
    ranks = export_matrix.ranks_of(family, model, 2, export_matrix.LENGTH)
    said = export_matrix.compare(family, model, ranks, export_matrix.run_networks)
    assert said == "equal"


@pytest.mark.parametrize("called", [False, True])
def test_a_model_that_asks_for_hidden_states_is_traced(called: bool) -> None:
    """Segformer's encoder hands all of its stages on, once each, whether it ran before or not."""
    family = FAMILIES["Segformer"]
    model = family.make()
    if called:
        model(**family.call(1, 1))
    ranks = export_matrix.ranks_of(family, model, 1, None)
    assert len(ranks[0][0].outputs) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, of caches in transformers
def test_a_state_space_model_is_refused_in_one_line(tmp_path: Path) -> None:
    """Of one length of sequence it is exported; of any length, or with a cache, it is not."""
    family = FAMILIES["Mamba"]
    model = family.make(num_hidden_layers=1)
    for length in (None, export_matrix.LENGTH):
        with pytest.raises(ExportError, match=r"scans its sequence in steps .*mamba.py:\d+\)"):
            export_matrix.ranks_of(family, model, 2, length)
    with pytest.raises(ExportError, match=r"a state-space model scans .*mamba.py:\d+\)"):
        trtllm(model, tmp_path / "out", mesh={"tp": 2})
    call = family.call(2, 8)
    spec = EngineSpec(mesh={"tp": 2}, dynamic={"batch": (1, 2, 4)})
    plan, source = plan_inference(model, spec), WeightSource(model)
    graphs = [plan.rank_graph(rank) for rank in range(2)]
    ranks = [(graph, read_weights(source, graph, graph.rank)) for graph in graphs]
    wanted = model(**call, use_cache=False).logits
    for found in export_matrix.run_networks(ranks, [call]):
        assert difference_by_norm(found[0]["logits"], wanted) < export_matrix.TOLERANCE
