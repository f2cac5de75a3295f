"""`autoshard.trace` of a mesh with pp: stages, what they send and hold, the picture, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.building.pipeline.entry import _changes
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.errors import AutoshardError, ConfigError, PlanError
from autoshard.passes import OPTIONAL
from autoshard.planning import Plan
from autoshard.runtime.compat import GraphInput
from models import CASES

HIDDEN, ROWS, BATCH = 32, 16, 8
EXPERTS, STACKS = {"pp": 2, "ep": 2}, ("gate_up_proj", "down_proj")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean(), x


class Weighed(Layers):
    """Each layer reads one more value that is made of no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights = x.sum(-1, keepdim=True).cos()
        for layer in self.layers:
            x = torch.relu(layer(x)) * weights
        return x.square().mean()


def traced(dtype: torch.dtype = torch.float32, **options: Any) -> TracedPipeline:
    mesh, made = options.pop("mesh", {"pp": 2}), options.pop("made", Layers)
    torch.compiler.reset()
    with torch.device("meta"):
        model, x = made(), torch.empty(BATCH, ROWS, HIDDEN, dtype=dtype)
    found = autoshard.trace(model, (x,), mesh=mesh, hardware="h100", **options)
    assert isinstance(found, TracedPipeline)
    return found


def test_a_traced_pipeline_says_what_stages_send_and_hold() -> None:
    found = traced()
    value = BATCH // found.microbatches * ROWS * HIDDEN * 4
    assert found.microbatches == 8 and found.sent_bytes == [value]
    weight = HIDDEN * HIDDEN * 4
    first, second = found.memory()
    assert [first.parameters, second.parameters] == [2 * weight] * 2
    assert [first.gradients, second.gradients] == [2 * weight] * 2
    assert (first.live, second.live) == (2, 1)
    # results of two activations, of which the second is sent; the first reads rows of the batch
    assert first.kept == 2 * value and first.shared == BATCH * ROWS * HIDDEN * 4
    assert second.kept == 3 * value  # what it received besides
    text = found.explain()
    assert "schedule 1f1b, 8 micro-batches on 2 stages" in text and found.picture() in text
    assert "2.0 KiB" in text and "layers.0.weight" in text


def test_a_stage_sends_its_part_of_each_sequence_and_experts_stay() -> None:
    whole, parts = traced(), traced(mesh={"pp": 2, "cp": 2}, made=Weighed)
    assert parts.sent_bytes == [sent // 2 for sent in whole.sent_bytes]
    assert all(stage.parameters for stage in parts.program.plan.stages)  # no stage cuts inputs
    case = CASES["mixtral"]
    found: Any = autoshard.trace(case.make_model(), kwargs=case.make_batch(0), mesh=EXPERTS)
    names = {found.program.parameters[node] for node in found.program.microbatch.at_rest()}
    assert names == {f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in STACKS}
    assert found.program.exchanges() == "1f1b, 4 micro-batches, mixtures of the stages [1, 1]"


def test_precision_halves_what_is_sent_and_adds_a_copy_of_what_is_stored() -> None:
    found = traced(torch.bfloat16, precision={"param": "bfloat16", "reduce": "float32"})
    assert found.sent_bytes == [BATCH // found.microbatches * ROWS * HIDDEN * 2]
    weight = HIDDEN * HIDDEN
    for held in found.memory():
        assert (held.parameters, held.gradients) == (2 * weight * (4 + 2), 2 * weight * 4)


def test_every_schedule_is_explained_and_what_is_not_supported_is_refused() -> None:
    four = traced(pipeline={"schedule": "interleaved"})
    assert len(four.stages) == 4 and "F0a" in four.explain()
    assert "I0 W0" in traced(pipeline={"schedule": "zb1"}).explain()
    with pytest.raises(ConfigError, match="virtual_stages"):
        traced(pipeline={"virtual_stages": 2})
    with pytest.raises(ConfigError, match=r"'host'.*beside pp.*Leave host out"):
        traced(memory={"host": 10**9})


def test_the_page_of_a_pipeline_has_every_action(tmp_path: Path) -> None:
    found, page = traced(pipeline={"schedule": "zb1"}), tmp_path / "page.html"
    found.explain_html(page)
    text = page.read_text()
    assert text.count("<rect") == 2 * 3 * found.microbatches and "layers.0.weight" in text


def test_a_budget_is_for_all_stages_of_a_rank() -> None:
    options: dict[str, Any] = {"pipeline": {"schedule": "interleaved", "microbatches": 4}}
    for budget in (10**6, 10**5):
        a, b, c, d = traced(memory={"budget": budget}, **options).program.plan.cut.memory
        assert max(a + c, b + d) <= budget
    with pytest.raises(PlanError, match="no cut into 4 stages"):
        traced(memory={"budget": 20_000}, **options)


def test_a_saved_plan_cuts_the_same_stages(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = traced(pipeline={"schedule": "zb1", "microbatches": 4})
    body = json.loads(found.plan.text())
    # a worse cut than the search would find
    ((key, cuts),) = body["pipeline"]["graphs"].items()
    names = [n.name for g in found.stages for n in g.graph.nodes if n.op == "call_function"]
    worse = names[names.index(cuts[0]) + 2]
    body["pipeline"]["graphs"][key] = [worse]
    file.write_text(json.dumps(body))
    again = traced(plan=file)
    assert (again.program.schedule, again.microbatches) == ("zb1", 4)
    assert again.program.plan.firsts == [worse] and worse not in cuts
    assert again.plan.text() == Plan.load(file).text()
    assert traced(plan=file, mesh={"pp": 2, "dp_shard": 2}).program.plan.firsts == [worse]
    for options, error in (
        (
            {"pipeline": {"microbatches": 2}},
            r"options\['pipeline'\]\['microbatches'\]=2, and the plan has 4",
        ),
        (
            {"pipeline": {"schedule": "1f1b"}},
            r"options\['pipeline'\]\['schedule'\]='1f1b', and the plan has 'zb1'",
        ),
        ({"mesh": {"pp": 4}}, "the plan is for pp=2 and tp=1, this mesh has pp=4 and tp=1"),
        ({"mesh": {"tp": 1}}, "the plan is for pp=2 and tp=1, this mesh has tp=1"),
    ):
        with pytest.raises((ConfigError, PlanError), match=error):
            traced(plan=file, **options)
    body["pipeline"]["graphs"][key] = ["nowhere"]
    file.write_text(json.dumps(body))
    with pytest.raises(PlanError, match="begins a stage at 'nowhere'"):
        traced(plan=file)
    del body["pipeline"]["graphs"][key]  # of another graph nothing is known but its homes
    file.write_text(json.dumps(body))
    assert traced(plan=file).program.plan.firsts == cuts


def test_one_dim_whose_size_changes_is_a_changing_input() -> None:
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder"))
        return gm.forward

    x = torch.ones(BATCH, ROWS)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(torch.sin, backend=backend)(x)
    fakes = [one for one in seen if isinstance(one, torch.Tensor)]
    for fake, changes in ((fakes[0], True), (torch.ones(BATCH, ROWS), False)):
        given = {"source": "L['x']", "name": "L.x", "key": "x", "of_model": False}
        assert _changes(GraphInput(**given, real=x, fake=fake)) == changes


def test_passes_are_shown_and_left_out_as_without_pp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def shown(folder: Path) -> set[str]:
        monkeypatch.setenv("AUTOSHARD_DUMP", str(folder))
        traced(mesh={"pp": 2, "tp": 2})
        return {path.name.split("-")[2].partition(".")[0] for path in folder.glob("*.after.txt")}

    every = shown(tmp_path / "every")
    assert {"recover_masks", "localize", "number_draws"} <= every
    monkeypatch.setenv("AUTOSHARD_DISABLE", "all")
    assert shown(tmp_path / "some") == every.difference(OPTIONAL)
    monkeypatch.setenv("AUTOSHARD_STOP_AFTER", "invariant_random")
    with pytest.raises(AutoshardError, match="stopped before localize"):
        shown(tmp_path / "none")
