"""What the planner is asked of one graph on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autoshard.planning.chunked_loss import Chunking
from autoshard.planning.cost import Fusing
from autoshard.planning.estimate import Layout, Training
from autoshard.planning.outer import Outer
from autoshard.planning.plan import Plan
from autoshard.planning.prices import Prices
from autoshard.runtime.collectives import State


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the planner is asked.

    axis: name of the axis, tp or cp. parameters: name of each parameter placeholder.
    stored: the state in which a parameter is stored already; one without an entry is free.
    arriving: the state of an input that comes back from an earlier call as a shard.
    contiguous_outputs: whether a sharded output is contiguous (a DTensor).
    outputs_read: whether a sharded output costs its gather; beside a loss it never does.
    budget_is_known: whether it is an error that nothing fits it; else the default plan is taken.
    prices: what a stored byte costs where there is no memory_budget. layout: the data-parallel
    axes, among which a rank's bytes are split further. chosen: what dp_shard does with parameters
    that have a choice already. training: what trains the parameters, and in how many runs of the
    graph a step is made. even: whether only dims are split that the axis divides, and no shape
    depends on values (of a graph that is exported, or is planned on another axis afterwards).
    beside: ranks of that axis. fusing: which collectives are one operator with the products beside
    them; None: none. outer: of the graph of a rank of another axis, the plan of that. ep_exchange:
    as in Config. chunking: what is asked of losses; chunking_to_fit: where the default plan does
    not fit the budget.
    """

    parameters: Mapping[fx.Node, str]
    axis: str = "tp"
    stored: Mapping[fx.Node, State] = field(default_factory=dict)
    arriving: Mapping[fx.Node, State] = field(default_factory=dict)
    sequence_parallel: bool = True
    lazy_outputs: bool = True
    contiguous_outputs: bool = False
    outputs_read: bool = True
    memory_budget: int | None = None
    budget_is_known: bool = True
    host_memory: int | None = None
    training: Training = field(default_factory=Training)
    plan: Plan | None = None
    prices: Prices = field(default_factory=Prices)
    layout: Layout = field(default_factory=Layout)
    chosen: Mapping[fx.Node, str] = field(default_factory=dict)
    even: bool = False
    beside: int = 1
    outer: Outer | None = None
    fusing: Fusing | None = None
    ep_exchange: str = "auto"
    chunking: Chunking | None = None
    chunking_to_fit: Chunking | None = None
