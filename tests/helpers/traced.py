"""Programs of test models, as many as are asked for of one trace by Dynamo, which is most of the
work; and the values of their inputs, so that one process can verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

from autoshard.building import planned
from autoshard.building.batch_check import batch_facts
from autoshard.building.one_rank import build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning.cost.clusters import Cluster, Machine, cluster
from autoshard.planning.cost.machines import Link
from autoshard.planning.values import global_bytes
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives.states import I
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import SINGLE
from model_case import Case

#: What a program says of its memory then needs no code of Inductor's, which takes seconds.
QUICKLY = {"inner": "aot_eager"}


class WithLoss(nn.Module):
    """A case's model and its loss as one module, whatever the loss needs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, case.make_model()

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The scalar loss."""
        return self.case.loss(self.model, dict(batch))


def builder(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Callable[..., Program]:
    """What makes the programs of one Dynamo trace, with the options of `autoshard.trace`."""
    found: tuple[Any, ...] = intercept(model, args, kwargs, lambda *graph: graph)

    def build(
        mesh: Mapping[str, int],
        rank: int = 0,
        hardware_name: str = "cpu",
        microbatch: str = SINGLE,
        **options: Any,
    ) -> Program:
        config = Config.from_options({"mesh": dict(mesh), **QUICKLY, **options})
        offline = offline_mesh(dict(mesh), rank)
        machine, facts = cluster(hardware_name), batch_facts(found[2])
        return build_program(*found, offline, config, machine, microbatch, facts=facts)

    return build


def programs(
    model: nn.Module, args: Sequence[Any], options: Sequence[Mapping[str, Any]]
) -> tuple[list[Program], list[Any]]:
    """One Dynamo trace of `model(*args)`, a Program for each of `options`, and the whole value of
    each placeholder of their serial graphs.

    options: fields of Config, mesh among them, and "hardware": a machine's name, "cpu" if absent.
    """
    made: list[Program] = []
    values: list[Any] = []

    def plan(
        gm: fx.GraphModule, example: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Program:
        for item in inputs:  # a hint: to read a size would make it a constant
            values.append(compat.size_hint(item.fake) if item.real is None else item.real)
        for each in options:
            settings = {**QUICKLY, **each}
            machine = cluster(settings.pop("hardware", "cpu"))
            config = Config.from_options(settings)
            mesh = offline_mesh(dict(settings["mesh"]), 0)
            facts = batch_facts(inputs)
            made.append(build_program(gm, example, inputs, mesh, config, machine, facts=facts))
        return made[-1]

    intercept(model, args, None, plan)
    return made, values


@dataclass(frozen=True)
class DrawnCluster(Cluster):
    """A CPU whose axes have drawn links, so that any of them may be the dearer one."""

    drawn: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def on(self, sizes: Mapping[str, int]) -> Machine:
        """The cluster laid out as a mesh, with the drawn links."""
        laid = super().on(sizes)
        return replace(laid, links={**laid.links, **self.drawn})


def drawn_cluster(seed: int, names: Iterable[str]) -> DrawnCluster:
    """One of which the axes of these names have links of any latency and bandwidth."""
    draw = np.random.default_rng(seed)
    links = {
        name: Link(10 ** draw.uniform(-7, -4), 10 ** draw.uniform(7, 10), 1e9) for name in names
    }
    return DrawnCluster(**vars(cluster("cpu")), drawn=links)


def given_to(
    called: str, model: nn.Module, x: torch.Tensor, machine: Cluster, **options: Any
) -> tuple[Any, ...]:
    """The arguments with which a function of the planner is called for the graph of `model(x)`.

    called: as building/planned.py names it. options: fields of Config, mesh among them.
    """
    found: list[tuple[Any, ...]] = []
    function = getattr(planned, called)

    def recorded(*arguments: Any) -> Any:
        found.append(arguments)
        return function(*arguments)

    def plan(*graph: Any) -> Program:
        config = Config.from_options({**QUICKLY, **options})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planned, called, recorded)
            mesh = offline_mesh(dict(options["mesh"]), 0)
            return build_program(*graph, mesh, config, machine)

    torch.compiler.reset()
    intercept(model, (x,), None, plan)
    return found[0]


def sharded_share(program: Program) -> float:
    """The fraction of parameter bytes that the plan splits."""
    total = sum(global_bytes(node) for node in program.parameters)
    stored = program.decisions.stored
    split = sum(global_bytes(node) for node in program.parameters if stored[node] != I)
    return split / total
