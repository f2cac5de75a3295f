"""What two and four processes really issue in a step: counts, and the order under Inductor."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from autoshard.runtime.agreement import backwards, regions
from autoshard.verification.comparison import furthest
from gloo_pool import GlooPool
from side_by_side import difference

#: Operators of the process group, as the profiler names them -> as the ledger does.
NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "reduce_scatter",  # on gloo: see passes/reduce_scatter_by_all_to_all.py
}
PRODUCTS = ("aten::mm", "aten::addmm")
WAIT = "_c10d_functional::wait_tensor"
WIDTH = 32
BUCKET = 3 * WIDTH * WIDTH * 4


class Stack(nn.Module):
    """Norm, linear and a residual, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.linears = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4)])
        self.downs = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear, down in zip(self.norms, self.linears, self.downs):
            x = x + down(torch.relu(linear(norm(x))))
        return x.square().mean()


def one_step(mesh: dict[str, int], inner: str, zero: int = 3) -> dict[str, Any]:
    """The names of a step's operators in the order of their start, and the graphs' count."""
    from autoshard import programs

    torch.manual_seed(0)
    model = Stack()
    serial = Stack()
    serial.load_state_dict(model.state_dict())
    options = {"mesh": mesh, "inner": inner, "zero": zero, "planner": {"bucket_bytes": BUCKET}}
    compiled = torch.compile(model, backend="autoshard", options=options)
    x = torch.randn(8, WIDTH)
    compiled(x).backward()
    model.zero_grad()
    with (
        # what the ranks compare is of the step, and of no graph
        patch.object(backwards, "ask", lambda *_: True),
        patch.object(regions, "ask", lambda *_: True),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
    ):
        compiled(x).backward()
    serial(x).backward()
    pairs: Any = zip(model.parameters(), serial.parameters())
    errors = [difference(p.grad, q.grad, 1.0) for p, q in pairs]
    events = sorted(recorded.events() or (), key=lambda event: event.time_range.start)
    names = [e.name for e in events if e.name in (*NAMES, *PRODUCTS, WAIT)]
    # one wait a result of a merged gather, one after another
    names = [a for a, b in zip(names, [*names[1:], ""]) if not a == b == WAIT]
    locals_ = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
    storages = Counter(x.untyped_storage().data_ptr() for x in locals_)
    (program,) = programs(model)
    return {
        "names": names,
        "ledger": dict(Counter(c.op for c in program.collectives())),
        "error": furthest(errors),
        "storages": sorted(storages.values()),
    }


def counted(names: list[str]) -> dict[str, int]:
    return dict(Counter(NAMES[name] for name in names if name in NAMES))


def overlapped(names: list[str]) -> float:
    """The share of the matrix products that start while a collective is under way."""
    under_way, products, during = 0, 0, 0
    for name in names:
        under_way += (name in NAMES) - (name == WAIT)
        products += name in PRODUCTS
        during += name in PRODUCTS and under_way > 0
    return during / products


@pytest.mark.parametrize("zero", [0, 3], ids=["ddp", "zero-3"])
def test_two_processes_issue_what_the_ledger_says(gloo2: GlooPool, zero: int) -> None:
    mesh = {"dp_shard": 2} if zero else {"dp_replicate": 2}
    check(gloo2(one_step, mesh, "aot_eager", zero or 3), 0.5 if zero else 0.3)


def test_a_hybrid_mesh_issues_what_the_ledger_says(gloo4: GlooPool) -> None:
    check(gloo4(one_step, {"dp_replicate": 2, "dp_shard": 2}, "aot_eager"), 0.5)


def check(found: list[dict[str, Any]], overlap: float) -> None:
    """The counts of the graphs; the serial gradients; the same order on all ranks; overlap."""
    for one in found:
        assert counted(one["names"]) == one["ledger"]
        assert one["error"] < 1e-6
        assert overlapped(one["names"]) >= overlap, one["names"]
    starts = [[name for name in one["names"] if name in NAMES] for one in found]
    assert all(order == starts[0] for order in starts)


@pytest.mark.slow
def test_inductor_keeps_the_order(gloo2: GlooPool) -> None:
    """The order of the graph, and not the one that Inductor's memory pass would choose.

    Without the dependencies of autoshard/compiling/inductor_order.py every collective is waited
    for at once.
    """
    for one in gloo2(one_step, {"dp_shard": 2}, "inductor"):
        assert one["error"] < 1e-6
        assert overlapped(one["names"]) >= 0.5, one["names"]
        print(overlapped(one["names"]), one["storages"])
