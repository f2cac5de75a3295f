"""Stages: the graph of one micro-batch, cut in the order of its operators.

What a stage reads of an earlier one is sent along the chain, from neighbour to neighbour; shared
values are computed where they are read, and a parameter that two stages read is lent by the first.

A pipeline's part of a plan file says where a graph is cut and what is stored where; a graph that is
cut adds that to it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import fx

from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.building.pipeline.stage_graphs import PipelineStage, of_shared_values, stage_graphs
from autoshard.building.planned import load_plan
from autoshard.config import Config, option
from autoshard.errors import ConfigError, PlanError
from autoshard.passes import SILENT, Watch
from autoshard.planning import (
    PipelinePlan,
    Plan,
    cheap_places,
    crossing,
    fingerprint,
    is_view,
    part_trade,
    places,
    planned_value,
    tensor_bytes,
    value,
)
from autoshard.planning.cost import Machine, work_of
from autoshard.planning.solver import Chain, StageCut, cut_stages
from autoshard.runtime.collectives import WHOLE
from autoshard.runtime.graph_meta import DIFF, GIVEN, OWN_AXIS, REDUCED_DTYPE, STORED_DTYPE
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import ParameterPolicy
from autoshard.runtime.pipeline import ScheduleShape

MOST_UNITS = 800
"""Operators beyond which the search leaves out the cuts that send most."""

BACKWARD = 2.0
"""Time of a backward, in forwards: each product has two of its size."""


@dataclass(kw_only=True)
class StagePlan:
    """stages: in order; ranks take them in turn. homes: the rank that stores each parameter of the
    micro-batch's graph. cut: the search's answer. stage_seconds: of a micro-batch, each.
    firsts: the first operator of each stage but the first."""

    stages: list[PipelineStage]
    homes: list[int]
    cut: StageCut
    stage_seconds: list[float]
    sent_bytes: list[int]
    firsts: list[str]


def plan_stages(
    microbatch: MicrobatchGraph,
    kept: Sequence[Sequence[int]],
    machine: Machine,
    stored: Mapping[fx.Node, int],
    budget: int | None,
    shards: Mapping[str, int] = MappingProxyType({}),
    cuts: Sequence[str] | None = None,
    watch: Watch = SILENT,
) -> StagePlan:
    """The cheapest cut, and the graph of each stage.

    kept: by rank, the most micro-batches of which each of its stages keeps the activations. stored:
    the home of parameters that are stored already. shards: by axis, ranks among which parameters
    are split between calls. cuts: the first operator of each stage but the first, where a plan says
    so. Raises PlanError where no cut fits the budget, or that of the plan is none.
    """
    shared, nodes = of_shared_values(microbatch), microbatch.local.graph.nodes
    operators = [n for n in nodes if n.op == "call_function" and n not in shared]
    sent = crossing(operators, set(operators))
    ranks, live = len(kept), [each for chunk in zip(*kept) for each in chunk]
    stages = len(live)
    free = places(operators, sent)
    if cuts is None:
        sizes = {i: sum(tensor_bytes(value(node)) for node in sent[i]) for i in free}
        ends = [0, *cheap_places(sizes, MOST_UNITS), len(operators)]
    else:
        ends = _asked(operators, free, cuts, stages)
    ends += [len(operators)] * (stages + 1 - len(ends))  # the last of few operators have none
    known = [stored.get(node) for node in microbatch.parameters]
    allowed = [h if h is None else frozenset(range(h, stages, ranks)) for h in known]
    chain = _chain(microbatch, operators, sent, ends, machine, allowed, shards)
    chains = [chain, replace(chain, homes={})] if chain.homes else [chain]
    if chain.again:  # where the estimate does not fit, the count of the stages has the last word
        chains.append(replace(chains[-1], kept=[0.0] * len(chain.kept)))
    for chain in chains:  # without homes, another stage borrows what it reads
        found = cut_stages(chain, ranks, microbatch.microbatches, budget, live)
        if found is not None:
            break
    else:
        bare = replace(chain, kept=[0.0] * len(chain.kept))
        least = cut_stages(bare, ranks, microbatch.microbatches, None, live)
        assert least is not None
        held = [sum(least.memory[rank::ranks]) for rank in range(ranks)]
        most = max(range(ranks), key=held.__getitem__)
        raise PlanError(
            f"no cut into {stages} stages of {microbatch.microbatches} micro-batches fits "
            f"a memory budget of {budget:,} bytes: of the quickest, parameters, their "
            f"gradients and the optimizer's states alone are {math.ceil(held[most]):,} bytes "
            f"on rank {most} of pp",
            remedy="Give pp more ranks, or the budget more bytes.",
        )
    starts = [0, *found.cuts, len(ends) - 1]
    runs = [operators[ends[a] : ends[b]] for a, b in zip(starts, starts[1:])]
    made = stage_graphs(microbatch, runs, [sent[ends[at]] for at in starts], watch)
    homes = [
        next(s for s, st in enumerate(made) if i in st.parameters) % ranks if home is None else home
        for i, home in enumerate(known)
    ]
    return StagePlan(
        stages=made,
        homes=homes,
        cut=found,
        stage_seconds=[sum(chain.seconds[a:b]) for a, b in zip(starts, starts[1:])],
        sent_bytes=[sum(tensor_bytes(value(n)) for n in stage.sent) for stage in made[:-1]],
        firsts=[run[0].name for run in runs[1:] if run],
    )


def _asked(
    operators: Sequence[fx.Node], free: Sequence[int], cuts: Sequence[str], stages: int
) -> list[int]:
    """The positions of the cuts of a plan, with both ends."""
    place = {operators[i].name: i for i in free}
    for name in cuts:
        if name not in place:
            raise PlanError(
                f"the plan begins a stage at {name!r}, before which the graph cannot be cut, or "
                "which it does not have. Correct the name, or delete the entry of the graph."
            )
    found, begun = [place[name] for name in cuts], min(stages - 1, len(free))
    if len(found) != begun or found != sorted(set(found)):
        raise PlanError(
            f"the plan begins stages at {', '.join(cuts)}: not {begun} operators in the order "
            "of the graph. Correct the list, or delete the entry of the graph."
        )
    return [0, *found, len(operators)]


def _chain(
    microbatch: MicrobatchGraph,
    operators: Sequence[fx.Node],
    live: Sequence[Sequence[fx.Node]],
    ends: Sequence[int],
    machine: Machine,
    known: Sequence[frozenset[int] | None],
    shards: Mapping[str, int],
) -> Chain:
    one, trade = microbatch.planned, None
    if one is not None:  # what stages may give up for time, where a budget asks
        trade = part_trade(one.graph, one.decisions, one.n, one.decisions.machine)
    unit = {node: u for u, (a, b) in enumerate(zip(ends, ends[1:])) for node in operators[a:b]}
    seconds, kept = [0.0] * (len(ends) - 1), [0.0] * (len(ends) - 1)
    for node in operators:
        forward = machine.sheet.seconds(work_of(node))
        graded = bool(node.meta.get(DIFF))
        seconds[unit[node]] += forward * (1 + BACKWARD * graded)
        if trade is not None:
            kept[unit[node]] += trade.kept.get(planned_value(node), 0)
        elif graded and not is_view(node):
            kept[unit[node]] += tensor_bytes(value(node))
    sent = [0.0]
    for cut in ends[1:-1]:  # a gradient comes back
        sizes = [(tensor_bytes(value(n)), 1 + bool(n.meta.get(DIFF))) for n in live[cut]]
        messages, nbytes = sum(ways for _, ways in sizes), sum(size * ways for size, ways in sizes)
        sent.append(machine.links["pp"].seconds(nbytes, messages))
    placeholders = microbatch.local.graph.find_nodes(op="placeholder")
    stored: list[tuple[float, Sequence[int]]] = []
    homes: dict[int, frozenset[int]] = {}
    others = {name: n for name, n in shards.items() if name != "dp_shard"}
    choices = [microbatch.choices.get(node, "") for node in microbatch.parameters]
    for node, home, choice in zip(placeholders, known, choices):
        readers = sorted(unit[user] for user in node.users if user in unit)
        stored.append((held_bytes(node, shards if choice != WHOLE else others), readers))
        if home is not None and readers:
            homes[readers[0]] = homes.get(readers[0], home) & home
    return Chain(
        seconds=seconds,
        sent=[*sent, 0.0],
        kept=kept,
        stored=stored,
        update=2 / machine.device.memory_bandwidth,  # read and written
        homes=homes,
        again=[
            (part, beside, more / (1 + BACKWARD))
            for part, beside, more in (trade.steps if trade is not None else ())
        ],
    )


def held_bytes(
    parameter: fx.Node, ranks: Mapping[str, int], states: int = 2, home: bool = True
) -> float:
    """Bytes of a parameter that its stage holds: what is stored, with `states` as large of the
    optimizer; the whole in the dtype of compute, where that is another tensor; and the whole
    gradient from the start of a call to its backward. home: whether the stage stores it, or
    borrows it."""
    val = value(parameter)  # of what a rank has on an axis of its own
    shards = math.prod(n for name, n in ranks.items() if name != parameter.meta.get(OWN_AXIS))
    stored, summed = (val.numel() * t(parameter).itemsize for t in (stored_dtype, sum_dtype))
    if GIVEN in parameter.meta:  # of which no optimizer has a state
        return stored + summed
    held = stored * (1.0 + states * val.requires_grad) / shards if home else 0.0
    if shards > 1 or stored_dtype(parameter) != val.dtype or not home:
        held += tensor_bytes(val)
    return held + summed * val.requires_grad


def stored_dtype(parameter: fx.Node) -> torch.dtype:
    """The dtype in which a parameter is stored, whatever it is computed in."""
    found: torch.dtype = parameter.meta.get(STORED_DTYPE, value(parameter).dtype)
    return found


def sum_dtype(parameter: fx.Node) -> torch.dtype:
    """The dtype in which the gradients of micro-batches add up."""
    policy = ParameterPolicy(reduce=parameter.meta.get(REDUCED_DTYPE))
    return policy.pending_dtype(stored_dtype(parameter))


def followed(config: Config, mesh: Mesh, ranks: int) -> tuple[Config, Plan | None]:
    """The options with the schedule of the plan to follow, and that plan.

    Raises PlanError for a plan of another mesh, and ConfigError for options that contradict it or
    each other.
    """
    plan = load_plan(config.plan, mesh.planned, mesh.outer, ranks)
    asked = plan.pipeline if plan is not None else None
    if asked is not None:
        for name in ("schedule", "microbatches", "virtual_stages"):
            own, its = getattr(config, name), getattr(asked, name)
            if own not in (None, its):
                raise ConfigError(
                    f"{option(name)}={own!r}, and the plan has {its!r}",
                    remedy=f"Leave {name} out, or make a plan with it.",
                )
        stages = asked.virtual_stages if asked.schedule == "interleaved" else None
        config = replace(config, schedule=asked.schedule, virtual_stages=stages)
    schedule, _ = config.order
    if config.virtual_stages is not None and schedule != "interleaved":
        raise ConfigError(
            f"{option('virtual_stages')}={config.virtual_stages} and "
            f"schedule={schedule!r}, with which a rank has one stage",
            remedy="Give schedule='interleaved', or leave virtual_stages out.",
        )
    return config, plan


def with_stages(
    plan: Plan,
    stages: StagePlan,
    microbatch: MicrobatchGraph,
    parameters: Mapping[fx.Node, str],
    schedule: str,
    shape: ScheduleShape,
) -> Plan:
    before = plan.pipeline or PipelinePlan(shape.ranks, schedule, shape.microbatches, shape.chunks)
    pairs = zip(microbatch.parameters, stages.homes)
    homes = {parameters[node]: home for node, home in pairs if node in parameters}
    graphs = {**before.graphs, fingerprint(microbatch.local): stages.firsts}
    return replace(plan, pipeline=replace(before, homes={**before.homes, **homes}, graphs=graphs))
