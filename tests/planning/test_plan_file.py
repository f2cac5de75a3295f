"""Plans as files: saved, read by a person, edited, and obeyed."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard import Plan
from autoshard.program import Program
from autoshard.runtime.errors import OutputError, PlanError
from autoshard.runtime.files import write_whole
from autoshard.verification.program_check import verify_program
from models_plain import MLP
from traced import programs

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def trace(**options: Any) -> Program:
    torch.compiler.reset()
    torch.manual_seed(0)
    return autoshard.trace(MLP(), (X,), mesh={"tp": 2}, **options)


def collectives(program: Program) -> Counter[tuple[str, str, int]]:
    return Counter((c.phase, c.op, c.bytes) for c in program.collectives())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    trace().plan.save(path)
    return path


def edit(path: Path, change: Any) -> None:
    """Apply `change(body)` to the file."""
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def graph_of(body: dict[str, Any]) -> dict[str, Any]:
    (graph,) = body["graphs"].values()
    return graph


def test_a_saved_plan_loads_as_itself(saved: Path) -> None:
    plan = Plan.load(saved)
    assert plan.text() == saved.read_text()
    assert plan.digest() == trace().plan.digest()


def test_the_file_reads_as_one_decision_a_line(saved: Path) -> None:
    lines = [line.strip().rstrip(",") for line in saved.read_text().splitlines()]
    assert '"up.weight": "S(0)"' in lines
    assert '"down.weight": "S(1)"' in lines
    assert any(line.startswith('"linear": "R, S(0)') for line in lines)
    assert max(map(len, lines)) < 100


def test_a_loaded_plan_gives_the_same_program(saved: Path) -> None:
    fresh, loaded = trace(), trace(plan=str(saved))
    assert loaded.plan.text() == fresh.plan.text()
    assert collectives(loaded) == collectives(fresh)
    assert str(loaded.graph_module.graph) == str(fresh.graph_module.graph)


def test_an_edited_parameter_is_obeyed_and_still_right(saved: Path) -> None:
    """Another placement of one weight: the operators around it are planned again."""

    def rows(body: dict[str, Any]) -> None:
        body["parameters"]["down.weight"] = "S(0)"
        body["parameters"]["down.bias"] = "S(0)"
        body["graphs"] = {}

    edit(saved, rows)
    (program,), values = programs(MLP(), (X,), [{"mesh": {"tp": 2}, "plan": saved}])
    assert program.stored()["down.weight"] == "S(0)"
    assert program.plan.parameters["down.weight"] == "S(0)"
    assert verify_program(program, values).worst[1] < 1e-5


def test_an_edited_parameter_that_its_operators_do_not_take_is_moved(saved: Path) -> None:
    """The lines of the operators still stand: the stored shard is brought to what they read."""
    edit(saved, lambda body: body["parameters"].update({"down.weight": "S(0)"}))
    (program,), values = programs(MLP(), (X,), [{"mesh": {"tp": 2}, "plan": saved}])
    assert program.stored()["down.weight"] == "S(0)"
    assert sum(collectives(program).values()) > sum(collectives(trace()).values())
    assert verify_program(program, values).worst[1] < 1e-5


def test_deleted_lines_are_planned_again(saved: Path) -> None:
    def forget(body: dict[str, Any]) -> None:
        del body["parameters"]["up.bias"]
        del graph_of(body)["nodes"]["gelu"]
        graph_of(body)["copies"].clear()

    edit(saved, forget)
    again, fresh = trace(plan=saved).plan, trace().plan
    assert (again.parameters, again.graphs) == (fresh.parameters, fresh.graphs)


def test_an_edited_operator_is_obeyed(saved: Path) -> None:
    def whole(body: dict[str, Any]) -> None:
        body["parameters"] = {}
        graph_of(body)["nodes"] = {"linear": "I, I, I -> I"}
        graph_of(body)["copies"] = {}

    edit(saved, whole)
    program = trace(plan=saved)
    (key,) = program.plan.graphs
    assert program.plan.graphs[key].nodes["linear"] == "I, I, I -> I"


def test_a_plan_of_another_model_is_no_constraint(saved: Path) -> None:
    """Its graphs have other fingerprints, its parameters other names."""
    other = autoshard.trace(
        torch.nn.Sequential(torch.nn.Linear(64, 32)), (X,), mesh={"tp": 2}, plan=saved
    )
    assert {"0.weight", "up.weight"} <= set(other.plan.parameters)
    assert len(other.plan.graphs) == 2


def error(saved: Path, change: Any, kind: type[Exception] = PlanError) -> str:
    edit(saved, change)
    with pytest.raises(kind) as caught:
        trace(plan=saved)
    return str(caught.value)


def test_an_impossible_strategy_is_an_error_that_lists_the_possible(saved: Path) -> None:
    text = error(saved, lambda body: graph_of(body)["nodes"].update(linear="S(0), P -> R"))
    assert "'linear' as 'S(0), P -> R'" in text
    assert "I, I, I -> I" in text and "Correct the line, or delete it" in text


def test_an_unknown_node_is_an_error(saved: Path) -> None:
    text = error(saved, lambda body: graph_of(body)["nodes"].update(nowhere="I -> I"))
    assert "'nowhere'" in text and "no such node" in text


def test_an_impossible_copy_is_an_error(saved: Path) -> None:
    text = error(saved, lambda body: graph_of(body)["copies"].update(linear="S(7)"))
    assert "copy of 'linear' in 'S(7)'; possible" in text


def test_a_dim_the_parameter_lacks_is_an_error(saved: Path) -> None:
    text = error(saved, lambda body: body["parameters"].update({"down.weight": "S(2)"}))
    assert "'down.weight' as S(2)" in text
    assert "(64, 256)" in text and "S(0) to S(1)" in text


def test_a_state_no_parameter_can_be_stored_in_is_an_error(saved: Path) -> None:
    for state in ("P", "R", "S", "sharded"):
        text = error(
            saved, lambda body, s=state: body["parameters"].update({"up.bias": s}), ValueError
        )
        assert "parameters.up.bias" in text and repr(state) in text and '"S(d)"' in text


def test_another_axis_size_is_an_error(saved: Path) -> None:
    text = error(saved, lambda body: body.update(size=4), ValueError)
    assert "tp=4" in text and "tp=2" in text


def test_another_version_is_an_error(saved: Path) -> None:
    text = error(saved, lambda body: body.update(version=0), ValueError)
    assert str(saved) in text and "version 0" in text and "Save it again" in text


def test_a_file_that_is_not_json_is_an_error(saved: Path) -> None:
    saved.write_text("up.weight: S(0)")
    with pytest.raises(ValueError, match="is not JSON"):
        Plan.load(saved)


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.json' cannot be read: .* No such file"):
        trace(plan=tmp_path / "absent.json")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    Plan("tp", 2).save(target)
    old, written = target.read_text(), Path.write_text

    def full(self: Path, data: str, **given: str) -> int:
        written(self, data[: len(data) // 2], **given)  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"the plan .*plan\.json.*No space left.*is as it was"):
        Plan("tp", 4).save(target)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "new.html", "text", "page")
    assert target.read_text() == old and list(tmp_path.iterdir()) == [target]


def test_a_link_stays_one_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "new", "page")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        write_whole(tmp_path / "none" / "page", "text", "page")
