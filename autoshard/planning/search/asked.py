"""What is asked of the planner: the request, the axes beside the planned one, the problem that it
asks for, and the plan file that what was chosen joins.

The charge of one weight on dp_shard: whole on each rank, gathered once, or gathered twice.

The choice is each weight's own, and depends on nothing but the weight, its state on the planned
axis, and the price of a byte: so the planner charges a stored state the least of the three, and the
plan of all stays exact, over every choice, with no variable more. The collectives are priced by
`DataAxes`.

On ep, and on a cp beside tp or pp, weights are stored by rows besides, and gathered as often as on
dp_shard; a stack of experts that stays on ep has its choice of dp_shard for the part of a rank of
ep. Beside pp a weight is gathered before the first micro-batch and kept to the last one, so that
whole and once are all there is; where no dp_shard is, once and twice.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoshard.planning.chunked_loss import Chunking
from autoshard.planning.cost import Fusing, Machine, default_bucket_bytes
from autoshard.planning.decisions import Decisions, Origin, Outer
from autoshard.planning.estimate import (
    DataAxes,
    Layout,
    Sent,
    Training,
    Weight,
    data_collectives,
    experts_of,
)
from autoshard.planning.expert_axis import ExpertAxis
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import (
    ADDED_PRODUCTS,
    LOOKUPS,
    PRODUCTS,
    is_view,
    packet,
    target_name,
)
from autoshard.planning.plan import Plan, without_ep
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Builder
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import differentiable, global_bytes, is_loss, shardable
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE, I, State, shard_dim
from autoshard.runtime.errors import PlanError
from autoshard.runtime.graph_meta import MUTATED, N_OUTPUTS

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class BatchAxis:
    """dp_shard beside a planned axis.

    axes: dp_shard among the data-parallel ones. bandwidth: of memory, that the optimizer's pass
    takes. given: choices that are made already. training: what trains them, and in how many runs of
    the graph a step is made. experts: of each stack that may stay on ep.
    """

    axes: DataAxes
    bandwidth: float
    given: Mapping[fx.Node, str] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    experts: Mapping[fx.Node, int] = field(default_factory=dict)

    def charges(
        self, node: fx.Node, state: State, price: float, travels: bool = False
    ) -> dict[str, float]:
        """Seconds of a run of the graph that each choice for a parameter, in a state on the planned
        axis, is charged, those first that take least memory. price: of a byte that a rank holds.
        travels: whether a stack of experts that may stay on ep is gathered there."""
        axes, training, found = self.axes, self.training, {}
        experts = 0 if travels else self.experts.get(node, 0)
        one = axes.weight(node, state, _is_read_in_backward(node), experts)
        for choice in self._possible(node, one):
            weight = replace(one, choice=choice)
            own = weight.holds(weight.stored_part(axes.layout), training)
            held = sum(own) + self._beside(weight)
            sent = sum(
                axes.took(each) * self._runs(each)
                for each in data_collectives([weight], axes.layout, training)
            )
            passes = own.updated / self.bandwidth / training.microbatches
            found[choice] = held * price + axes.second * sent + passes
        return found

    def _possible(self, node: fx.Node, weight: Weight) -> tuple[str, ...]:
        if node in self.given:
            return (self.given[node],)
        if not weight.shape or not weight.gathered(self.axes.layout):
            return (WHOLE,)
        split = (ONCE,) if self.axes.layout.staged else (TWICE, ONCE)
        return (*split, WHOLE) if self.axes.layout.shard > self.axes.layout.inner else split

    def _beside(self, weight: Weight) -> int:
        """Bytes of a weight that a rank holds from its forward to its backward beside what it
        stores: the gathered one. Beside pp it is there whoever reads it, and its whole gradient."""
        gathered = weight.gathered(self.axes.layout)
        if not self.axes.layout.staged:
            kept = weight.again and not weight.gathered_twice(self.axes.layout)
            return gathered * weight.itemsize if kept else 0
        summed = max(weight.kept, weight.reduced or 0) if weight.trained else 0
        return gathered * (weight.itemsize + summed)

    def _runs(self, sent: Sent) -> float:
        """How often a collective runs for one run of the graph."""
        waits = self.axes.layout.deferred and sent.op != "all_gather"
        return 1 / self.training.microbatches if waits or self.axes.layout.staged else 1.0


def _is_read_in_backward(node: fx.Node) -> bool:
    """Whether a derivative may read a parameter: none reads what is only looked up in, or added."""
    return any(_reads(user, node) for user in node.users)


def _reads(user: fx.Node, source: fx.Node) -> bool:
    operator = packet(user)
    if user.op == "output" or operator in (aten.add, aten.sub):
        return False
    if operator in LOOKUPS:
        return user.args[0] is not source
    if is_view(user) or operator is aten._to_copy:
        return _is_read_in_backward(user)
    if is_mixture(user) and source in user.args[3]:  # type: ignore[operator]
        return value(source).dim() > 2  # biases are added
    if operator in PRODUCTS:
        added = operator in ADDED_PRODUCTS
        two = operands(user)[1:3] if added else operands(user)[:2]
        return source in two and any(differentiable(one) for one in two if one is not source)
    return True


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


def data_axes(n: int, machine: Machine, request: Request, second: float) -> DataAxes:
    """The axes beside the planned one of `n` ranks. second: as in `DataAxes`."""
    layout, parameters = request.layout, request.parameters
    ranks = {**layout.ranks, "cp": layout.outer, request.axis: n}
    members = [(value(node).element_size(), layout.shard) for node in parameters]
    limit = default_bucket_bytes(sum(map(global_bytes, parameters)) // n, members)
    return DataAxes(
        n=n,
        layout=layout,
        ranks=ranks,
        links=machine.links,
        second=second,
        bucket=max(1, layout.bucket_bytes or limit),
    )


def expert_axis(
    gm: fx.GraphModule, n: int, machine: Machine, request: Request, second: float
) -> ExpertAxis | None:
    """The axis ep of a request; None where its mesh has none."""
    layout = request.layout
    if layout.experts == 1:
        return None
    plan = request.plan.graphs.get(fingerprint(gm)) if request.plan else None
    lines = plan.nodes.items() if plan is not None else ()
    return ExpertAxis(
        axes=data_axes(n, machine, request, second),
        parameters=request.parameters.keys(),
        # stacks are gathered once a step there, for all micro-batches, which no price knows
        exchange="rows" if layout.staged and request.ep_exchange == "auto" else request.ep_exchange,
        named=frozenset(name for name, text in lines if without_ep(text) != text),
    )


def chooses_on_ep(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> bool:
    """Whether a mixture of experts has a choice on ep."""
    axis = expert_axis(gm, n, machine, request, 1.0)
    return axis is not None and any(len(axis.ways(node)) > 1 for node in gm.graph.nodes)


def batch_axis(n: int, machine: Machine, request: Request, second: float) -> BatchAxis | None:
    """The batch axis of a request; None where its mesh has none, or `zero` decides."""
    if not request.layout.chooses:
        return None
    parameters, plan = list(request.parameters), request.plan
    named = plan.weights if plan is not None else {}
    given = {node: named[name] for node, name in request.parameters.items() if name in named}
    given.update(request.chosen)
    return BatchAxis(
        axes=data_axes(n, machine, request, second),
        bandwidth=machine.device.memory_bandwidth,
        given=given,
        training=request.training,
        experts=experts_of(parameters[0].graph) if parameters else {},
    )


def builder_of(
    gm: fx.GraphModule,
    n: int,
    machine: Machine,
    request: Request,
    prices: Prices,
    contiguous: bool = False,
    origin: Origin | None = None,
) -> Builder:
    """The builder of the problem that a request asks for. origin: in place of `request.outer`'s."""
    stored: dict[fx.Node, State | None] = {}
    wanted = request.plan.parameters if request.plan else {}
    for node, name in request.parameters.items():
        stored[node] = request.stored.get(node) or _checked(node, name, wanted.get(name))
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    domains = _output_domains(gm, results, n, request)
    on_ep = expert_axis(gm, n, machine, request, prices.batch_second)
    axis = AxisPrices(
        n,
        machine,
        stored.keys(),
        request.sequence_parallel,
        prices,
        request.axis,
        fusing=request.fusing,
        batch=batch_axis(n, machine, request, prices.batch_second),
    )
    return Builder(
        gm,
        axis,
        stored=stored,
        arriving=request.arriving,
        output_domains=domains,
        # beside a loss, other outputs are probably not read
        outputs_read=request.outputs_read and not any(map(is_loss, results[: gm.meta[N_OUTPUTS]])),
        even=request.even,
        contiguous=contiguous,
        beside=request.beside,
        on_ep=on_ep,
        origin=origin or (request.outer.origin(gm) if request.outer else None),
    )


def may_be_sharded(gm: fx.GraphModule, i: int, result: object, request: Request) -> bool:
    """Whether output i may leave the graph as a shard."""
    if not request.lazy_outputs or i >= gm.meta[N_OUTPUTS] or not isinstance(result, fx.Node):
        return False
    return isinstance(value(result), torch.Tensor) and value(result).is_floating_point()


def _output_domains(
    gm: fx.GraphModule, results: list[object], n: int, request: Request
) -> list[list[State]]:
    """The states in which each output may leave: the user's free where they are lazy, what is
    written back to an input as it arrived."""
    domains = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = [request.arriving.get(placeholders[i], I) for i in gm.meta.get(MUTATED, ())]
    for i, result in enumerate(results):
        if may_be_sharded(gm, i, result, request):
            assert isinstance(result, fx.Node)
            domains.append([I, *shardable(value(result), n)])
        else:
            domains.append([I if i < gm.meta[N_OUTPUTS] else written[i - gm.meta[N_OUTPUTS]]])
    return domains


def _checked(node: fx.Node, name: str, state: State | None) -> State | None:
    shape = tuple(value(node).shape)
    dim = shard_dim(state) if state else None
    if dim is not None and dim >= len(shape):
        raise PlanError(
            f"the plan stores parameter {name!r} as {state}, but its shape is {shape}: "
            f"use I (Replicate) or S(0) to S({len(shape) - 1})"
        )
    return state


def _shape(node: fx.Node) -> tuple[str, ...]:
    val = value(node)
    return tuple(str(e) for e in val.shape) if isinstance(val, torch.Tensor) else ()


def fingerprint(gm: fx.GraphModule, of: Callable[[fx.Node], object] = _shape) -> str:
    """Names and operators of a graph, and what is asked of each node, as a rule its shape: equal on
    every rank that captured the same one."""
    text = hashlib.sha256()
    for node in gm.graph.nodes:
        text.update(f"{node.op} {node.name} {target_name(node)} {of(node)}\n".encode())
    return text.hexdigest()[:16]


def with_graph(
    plan: Plan | None, decisions: Decisions, request: Request, gm: fx.GraphModule, n: int
) -> Plan:
    """`plan` with this graph's decisions added."""
    base = plan or Plan(request.axis, n)
    parameters = dict(base.parameters)
    parameters.update({name: decisions.stored[node] for node, name in request.parameters.items()})
    graphs = {**base.graphs, fingerprint(gm): decisions.graph_plan()}
    chosen = {request.parameters[node]: choice for node, choice in decisions.weights.items()}
    weights = {**base.weights, **chosen}
    return replace(base, parameters=parameters, graphs=graphs, weights=weights)
