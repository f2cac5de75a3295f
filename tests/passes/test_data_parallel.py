"""data_parallel: what stands between a stored parameter and its first use, and what stays.

Steps of whole models beside serial ones are in tests/training/test_data_parallel_steps.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes.base import Context
from autoshard.passes.data_parallel import DataParallel
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.graph_meta import CHANGE, PENDING_INPUTS
from autoshard.runtime.parameters import ACCUMULATE, FLUSH, ParameterPolicy, unshard
from autoshard.verification.program_check import verify_program
from traced import programs

OUTER, INNER = (Axis(name, 2, 0, f"offline:{name}") for name in ("dp_replicate", "dp_shard"))
TP = Axis("tp", 1, 0, "")
STORED = {"dp_replicate": "I", "dp_shard": "S(0)"}


def product(trained: bool = True, used: bool = True) -> fx.GraphModule:
    """x @ w, of which w is stored."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = torch.empty(3, 4, device="meta")
    w.meta["val"] = torch.empty(4, 6, device="meta", requires_grad=trained)
    graph.output((graph.call_function(torch.mm, (x, w)) if used else x,))
    return fx.GraphModule({}, graph)


def changes(gm: fx.GraphModule) -> list[str]:
    return [n.meta["custom"][CHANGE] for n in gm.graph.nodes if n.target is unshard]


def test_the_outer_axis_comes_first_and_the_shard_is_stored() -> None:
    gm = product()
    report = DataParallel((OUTER, INNER), {1: STORED}).run(gm, Context(TP))
    gm.graph.lint()
    assert report.hits == 1 and changes(gm) == ["w: I -> R", "w: S(0) -> R"]
    assert [n.args[2] for n in gm.graph.nodes if n.target is unshard] == [OUTER, INNER]
    w = list(gm.graph.nodes)[1]
    assert tuple(w.meta["val"].shape) == (2, 6) and w.meta["val"].requires_grad


def test_what_needs_no_change_gets_none() -> None:
    frozen, unread = product(trained=False), product(used=False)
    DataParallel((OUTER,), {1: {"dp_replicate": "I"}}).run(frozen, Context(TP))
    report = DataParallel((INNER,), {1: STORED}).run(unread, Context(TP))
    assert changes(frozen) == changes(unread) == [] and report.hits == 0
    assert tuple(list(unread.graph.nodes)[1].meta["val"].shape) == (2, 6)


@pytest.mark.parametrize("regather", [True, False])
def test_a_gather_belongs_to_no_region(regather: bool) -> None:
    gm = product()
    DataParallel((INNER,), {1: STORED}, regather=regather).run(gm, Context(TP))
    (node,) = [n for n in gm.graph.nodes if n.target is unshard]
    again, kept = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert node.meta["recompute"] is (again if regather else kept)
    assert node.meta["ac_graph_id"] > 1 << 20


@pytest.mark.parametrize(
    ("microbatch", "found"),
    [(ACCUMULATE, ["w: S(0) -> R"]), (FLUSH, ["w: I -> R", "w: S(0) -> R"])],
)
def test_a_deferred_gradient_has_an_input_of_its_own(microbatch: str, found: list[str]) -> None:
    """Accumulating, the axes outside of the innermost deferred one are left out."""
    gm = product()
    use = ParameterPolicy(deferred=("dp_shard",))
    each = DataParallel((OUTER, INNER), {1: STORED}, use=use, microbatch=microbatch)
    each.run(gm, Context(TP))
    gm.graph.lint()
    assert changes(gm) == found
    (pending,) = gm.meta[PENDING_INPUTS]
    assert (pending.parameter, pending.shape) == (1, (4, 6))
    assert [n.name for n in gm.graph.find_nodes(op="placeholder")] == ["x", "w", "pending_w"]


def test_values_and_gradients_are_those_of_the_serial_graph() -> None:
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 5)
    (program,), values = programs(model, (x,), [{"mesh": {"dp_replicate": 2, "dp_shard": 2}}])
    others = [[torch.randn(4, 5) if v is x else v for v in values] for _ in range(3)]
    assert verify_program(program, values, others=others).worst[1] < 1e-6
