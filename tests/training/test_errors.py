"""Every error of the backend, and that all ranks end with one."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.errors import (
    AutoshardError,
    ConfigError,
    PlanError,
    PlanMismatchError,
    message,
    source_line,
)
from models_plain import MLP, Regression, vectors

TRACE = """
  File "train.py", line 12, in main
    loss = model(x)
  File "model.py", line 41, in forward
    q = q.view(b, n, self.heads, -1)
"""


def test_message() -> None:
    what = "6 heads are not divisible by tp=4"
    assert message(what) == f"{what}."
    assert (
        message(what, where="model.py:41", remedy="Use tp=2.") == f"{what} (model.py:41). Use tp=2."
    )


def test_source_line_is_the_innermost() -> None:
    assert source_line(TRACE) == "model.py:41"
    assert source_line("") is None
    assert source_line(None) is None


def raised(options: dict[str, Any], inner: int = 256) -> tuple[str, str]:
    """(class, text) of what the first call raises, as a user would catch it."""
    from autoshard.runtime import compat

    torch.manual_seed(0)
    model = Regression(MLP(inner=inner))
    compiled = torch.compile(
        model, backend="autoshard", options={"inner": "eager", "mesh": {"tp": 2}, **options}
    )
    try:
        compiled(**vectors(0))
    except Exception as error:
        cause = compat.backend_error(error) or error
        return type(cause).__name__, str(cause)
    return "", "nothing was raised"


def on_rank(rank: int, options: dict[str, Any], inner: int = 256) -> tuple[str, str]:
    """`raised`, with the options and the width on one rank only."""
    mine = int(os.environ["RANK"]) == rank
    return raised(options if mine else {}, inner if mine else 256)


def all_raise(results: list[tuple[str, str]], kind: type[Exception], *texts: str) -> None:
    assert len(results) == 2
    for name, text in results:
        assert name == kind.__name__, (name, text)
        for expected in texts:
            assert expected in text, (expected, text)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"meshh": 2}, ["unknown autoshard option 'meshh'", "Did you mean 'mesh'?"]),
        ({"inner": "fast"}, ["inner='fast' is not allowed", "'eager' or 'tensorrt'"]),
        ({"mesh": {"tp": 4}}, ["the mesh tp 4 needs 4 processes, and there are 2", "torchrun"]),
        ({"mesh": {"tp": 3}}, ["the mesh tp 3 needs 3 processes, and there are 2"]),
        ({"mesh": {"tp": 1}}, ["the mesh tp 1 needs 1 processes, and there are 2"]),
        ({"mesh": {"model": 2}}, ["mesh={'model': 2} is not allowed", "dp_shard, ep, cp, tp"]),
        ({"rng": "native"}, ["rng='native' is not allowed"]),
    ],
)
def test_options(gloo2: Any, options: dict[str, Any], texts: list[str]) -> None:
    all_raise(gloo2(raised, options), ConfigError, *texts)


def device_mesh(names: tuple[str, ...]) -> tuple[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    return raised({"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=names)})


def test_a_device_mesh_is_taken_by_its_names(gloo2: Any) -> None:
    assert gloo2(device_mesh, ("tp",)) == [("", "nothing was raised")] * 2
    all_raise(gloo2(device_mesh, ("model",)), ConfigError, "is not allowed", "tp")


def test_ranks_with_different_models(gloo2: Any) -> None:
    results = gloo2(on_rank, 1, {}, inner=200)
    all_raise(results, PlanMismatchError, "axis tp disagree on the plan", "(256, 64)", "(200, 64)")
    assert results[0][1] == results[1][1], "the ranks tell two stories"


def saved(tmp_path: Path, edit: Callable[[Any], Any]) -> str:
    """A plan of the model, edited, in a file."""
    model = Regression(MLP())
    plan = autoshard.trace(model, (), vectors(0), mesh={"tp": 2}).plan
    path = tmp_path / "plan.json"
    edit(plan).save(path)
    return str(path)


def test_a_saved_plan_is_obeyed(gloo2: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, lambda plan: plan)
    assert gloo2(raised, {"plan": path}) == [("", "nothing was raised")] * 2


def test_ranks_with_different_plans(gloo2: Any, tmp_path: Path) -> None:
    def whole(plan: Any) -> Any:
        parameters = {**plan.parameters, "body.up.weight": "I"}
        return dataclasses.replace(plan, parameters=parameters, graphs={})

    results = gloo2(on_rank, 1, {"plan": saved(tmp_path, whole)})
    all_raise(results, PlanMismatchError, "parameter body.up.weight: S(0)", "rank 1: ", ": I")


def test_one_rank_fails(gloo2: Any, tmp_path: Path) -> None:
    """The others do not wait for it: they raise, with what it raised."""
    missing = str(tmp_path / "none.json")
    started = time.monotonic()
    results = gloo2(on_rank, 0, {"plan": missing})
    assert results[0][0] == "PlanError" and "none.json" in results[0][1]
    assert results[1][0] == "PlanMismatchError", results
    assert "rank 0: PlanError" in results[1][1] and "none.json" in results[1][1]
    assert time.monotonic() - started < 100, "a rank was waited for"


@pytest.mark.parametrize(
    ("edit", "texts"),
    [
        (lambda plan: dataclasses.replace(plan, size=4), ["tp=4", "this mesh has tp=2"]),
        (
            lambda plan: dataclasses.replace(
                plan, parameters={**plan.parameters, "body.up.weight": "S(5)"}, graphs={}
            ),
            ["'body.up.weight' as S(5)", "its shape is (256, 64)", "S(0) to S(1)"],
        ),
        (
            lambda plan: dataclasses.replace(
                plan, parameters={**plan.parameters, "body.up.weight": "P"}
            ),
            ["body.up.weight is 'P'", '"I" (Replicate: whole on every rank)'],
        ),
        (lambda plan: with_node(plan, "S(7) -> S(7)"), ["'S(7) -> S(7)'", "Possible: ["]),
    ],
)
def test_wrong_plans(
    gloo2: Any, tmp_path: Path, edit: Callable[[Any], Any], texts: list[str]
) -> None:
    all_raise(gloo2(raised, {"plan": saved(tmp_path, edit)}), PlanError, *texts)


def with_node(plan: Any, text: str) -> Any:
    """The plan with the first strategy of its graph replaced."""
    (graph,) = plan.graphs.values()
    graph.nodes[next(iter(graph.nodes))] = text
    return plan


def test_what_is_no_plan(gloo2: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    all_raise(gloo2(raised, {"plan": str(path)}), PlanError, "plan.json is not JSON")
    path.write_text('{"version": 2, "axis": "tp"}')
    all_raise(gloo2(raised, {"plan": str(path)}), PlanError, "plan.json has no 'size'")
    path.write_text('{"version": 99}')
    all_raise(gloo2(raised, {"plan": str(path)}), PlanError, "has version 99")


def test_a_budget_that_nothing_fits(gloo2: Any) -> None:
    all_raise(
        gloo2(raised, {"memory": {"budget": 1000}}), PlanError, "memory budget of 1,000", "Raise"
    )


def test_every_error_is_ours() -> None:
    for kind in (ConfigError, PlanError, PlanMismatchError):
        assert issubclass(kind, AutoshardError)
