"""global_token_mean: every token counts alike, on every data-parallel rank; and what stays."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.passes.base import Context
from autoshard.passes.data_parallel import DataParallel
from autoshard.passes.global_token_mean import GlobalTokenMean
from autoshard.passes.localize import Localize
from autoshard.passes.pipeline import rank_program
from autoshard.planning.decisions import on_rank
from autoshard.planning.plan import GraphPlan
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis, data_axes, gathering_axes
from autoshard.runtime.collectives.lockstep import run_mesh
from autoshard.runtime.parameters.layout import local_part
from autoshard.verification.comparison import furthest
from side_by_side import difference
from traced import builder

T = torch.Tensor
IGNORED = -100


class Scores(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction, self.head = reduction, nn.Linear(8, 5)

    def forward(self, x: T) -> T:
        return F.cross_entropy(self.head(x), torch.arange(4), reduction=self.reduction)


def program(reduction: str, loss_tokens: str) -> Program:
    torch.compiler.reset()
    mesh = {"dp_replicate": 2, "tp": 2}
    return autoshard.trace(
        Scores(reduction), (torch.ones(4, 8),), mesh=mesh, gradients={"loss_tokens": loss_tokens}
    )


def test_a_mean_costs_one_number() -> None:
    counts = [
        [c for c in program("mean", name).collectives() if c.phase == "forward"]
        for name in ("global", "local")
    ]
    assert len(counts[0]) == len(counts[1]) + 1
    (more,) = [c for c in counts[0] if "tokens of all ranks" in c.change]
    assert (more.op, more.axis, more.bytes) == ("all_reduce", "dp_replicate", 4)


def test_a_sum_stays_and_the_caller_is_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = program("sum", "global")
    assert any("no mean loss" in str(w.message) for w in caught)
    axis = Axis("dp_replicate", 2, 0, "offline:dp")
    report = GlobalTokenMean((axis,)).run(made.graph_module, Context(made.axis))
    assert (report.hits, [skip.reason for skip in report.skips]) == (0, ["it is not a mean"])


def uneven_tokens(loss_tokens: str, inner: str, few: int = 3) -> dict[str, float]:
    """One step of two data-parallel ranks with `few` and 9 tokens, against all in one batch."""
    import torch.distributed as dist

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids: T, target: T, items: T | None = None) -> T:
            scores = self.head(torch.tanh(self.embed(ids)))
            if items is None:
                return F.cross_entropy(scores, target)
            return F.cross_entropy(scores, target, reduction="sum") / items

    torch.manual_seed(0)
    model = Small()
    ids, target = torch.randint(16, (2, 10)), torch.randint(16, (2, 10))
    target[0, few:] = IGNORED
    target[1, 9:] = IGNORED
    want = model(ids.flatten(), target.flatten())
    want.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else int(__import__("os").environ["RANK"])
    options: dict[str, Any] = {"mesh": {"dp_replicate": 2}, "inner": inner}
    arguments = [ids[rank], target[rank]]
    if loss_tokens == "by hand":
        # what a user writes without the option: a rank's share of all tokens
        arguments.append(torch.tensor((few + 9) / 2))
    else:
        options["gradients"] = {"loss_tokens": loss_tokens}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    loss = compiled(*arguments)
    loss.backward()
    errors = [difference(p.grad, wanted[name], 1.0) for name, p in model.named_parameters()]
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return {"gradient": furthest(errors), "loss": abs(float(mean) / 2 - float(want))}


@pytest.mark.parametrize("loss_tokens", ["global", "by hand", "local"])
def test_uneven_tokens_of_data_parallel_ranks(gloo2: Any, loss_tokens: str) -> None:
    for found in gloo2(uneven_tokens, loss_tokens, "aot_eager"):
        right = furthest([found["gradient"], found["loss"]]) < 1e-6
        assert right == (loss_tokens != "local"), found


def test_a_rank_without_tokens_adds_nothing(gloo2: Any) -> None:
    for found in gloo2(uneven_tokens, "global", "aot_eager", few=0):
        assert furthest(found.values()) < 1e-6, found


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x: T, target: T) -> T:
        return F.cross_entropy(self.head(torch.tanh(self.up(x))), target)


TOKENS = "S(0), S(0) -> P by loss_over_tokens"


@pytest.mark.parametrize("on_tp", [TOKENS, "S(1), I -> I by loss_over_tokens_and_classes"])
@pytest.mark.parametrize("data", ["dp_shard", "dp_replicate"])
def test_tokens_that_cp_and_tp_split_again(data: str, on_tp: str) -> None:
    """Uneven batches, of each of which cp splits the tokens, and tp tokens or classes; in threads,
    against the serial model on both batches at once."""
    model, mesh = Classes(), {data: 2, "cp": 2, "tp": 2}
    x, target = torch.randn(2, 16, 16), torch.randint(32, (2, 16))
    target[0, 3:] = IGNORED
    build = builder(model, (x[0], target[0]))
    plan = build(mesh, gradients={"loss_tokens": "global"}).plan
    assert plan.outer is not None
    split = GraphPlan({"cross_entropy_loss": TOKENS})
    plan.outer.graphs = dict.fromkeys(plan.outer.graphs, split)
    plan = build(mesh, gradients={"loss_tokens": "global"}, plan=replace(plan, graphs={})).plan
    plan.graphs = {key: GraphPlan({"cross_entropy_loss": on_tp}) for key in plan.graphs}
    program = build(mesh, gradients={"loss_tokens": "global"}, plan=plan)
    nodes = program.serial.graph.find_nodes(op="placeholder")
    spread = {i: program.data[node] for i, node in enumerate(nodes) if node in program.data}
    want = model(x.flatten(0, 1), target.flatten())
    want.backward()

    def graph(axes: tuple[Axis, ...]) -> Any:
        gathers = DataParallel(gathering_axes(axes), spread)
        passes = (Localize(program.decisions), gathers, GlobalTokenMean(data_axes(axes)))
        found = rank_program(program.serial, passes, axes[-1])[0]
        on_rank(found, axes[1])
        return found

    def rank(axes: tuple[Axis, ...], run: Any) -> tuple[float, float]:
        """The loss, and the worst difference of a gradient from its part of the whole."""
        values, pairs = [x[axes[0].rank], target[axes[0].rank]], []
        for node, name in program.parameters.items():
            states = {**program.data[node], "tp": program.decisions.stored[node]}
            whole = model.get_parameter(name)
            assert whole.grad is not None
            part = local_part(whole.detach(), states, axes).clone().requires_grad_()
            values.insert(nodes.index(node), part)
            pairs.append((part, local_part(whole.grad, states, axes)))
        (loss,) = run(*values)
        loss.backward()
        return float(loss.detach()), furthest(difference(p.grad, g, 1.0) for p, g in pairs)

    found = run_mesh(mesh, rank, prepare=graph)
    assert furthest(worst for _, worst in found) < 1e-6
    assert sum(loss for loss, _ in found) / 8 == pytest.approx(float(want.detach()), rel=1e-6)
