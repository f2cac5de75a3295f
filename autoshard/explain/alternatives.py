"""What the plan of a program costs beside plans with a name: Megatron's TP and TP+SP, FSDP, DDP.

"Megatron TP" is the cheapest plan that splits no activation along the sequence, "Megatron TP+SP"
the cheapest one where every saved activation that can be split is; neither gathers a weight. Where
the model has mixtures of experts, the cheapest plan for each way to split them stands beside. All
are planned on the captured graph and priced from the plan, by the model of `autoshard plan`
(docs/planning.md): the same plan on the same machine takes the same seconds there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.compiling import Built
from autoshard.planning import (
    WAYS,
    Decisions,
    GraphPlan,
    Plan,
    Prices,
    Request,
    fingerprint,
    is_mixture,
    plan_graph,
    strategy_text,
    way_of,
)
from autoshard.planning.chunked_loss import chunking_of
from autoshard.planning.estimate import (
    Footprint,
    Layout,
    Profile,
    Timing,
    Training,
    footprint,
    profile,
    timing,
)

# How much dearer than by default a saved activation is, so that what can be split along the
# sequence is. Dearer still, and the gathered copies that sequence parallelism saves for the
# backward pass would cost more than what it splits.
_DEAR = 5.0


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One plan of the same model and batch on as many ranks, priced as a row of `autoshard plan`.

    mesh: sizes by axis. batches: example batches that the ranks consume a step.
    """

    name: str
    mesh: Mapping[str, int]
    profile: Profile
    memory: Footprint
    timing: Timing
    batches: int

    @property
    def sent(self) -> float:
        """Bytes a rank sends a step."""
        return sum(traffic.nbytes for traffic in self.timing.traffic.values())

    @property
    def communication(self) -> float:
        """Seconds of all collectives of a step, were nothing overlapped."""
        return sum(traffic.seconds for traffic in self.timing.traffic.values())

    @property
    def stored(self) -> int:
        """Bytes a rank of parameters, gradients and Adam's moments."""
        return self.memory.parameters + self.memory.gradients + self.memory.optimizer

    @property
    def seconds(self) -> float:
        """Seconds of a step for one example batch, with what overlaps."""
        return self.timing.step / self.batches


def alternatives(built: Built) -> list[Alternative]:
    """The plan of `built` first, then those with a name; empty for a world of one rank."""
    sizes = {name: size for name, size in built.mesh.sizes.items() if size > 1}
    if not sizes:
        return []
    n, world, machine = built.axis.size, built.mesh.size, built.machine
    outer = 1 if built.outer is None else built.outer.axis.size
    found = [_priced("this plan", built, built.decisions, sizes, 1)]
    dear = Prices(None, _DEAR * 2.0 / machine.device.memory_bandwidth, gathers_weights=False)
    if n > 1:
        alone = built.outer is None  # of two planned axes, cp stays as it is
        tp = {"tp" if name == built.axis.name and alone else name: n for name, n in sizes.items()}
        for name, sequence, prices in (
            ("Megatron TP", False, Prices(gathers_weights=False)),
            ("Megatron TP+SP", True, dear),
        ):
            decisions = plan_graph(built.serial, n, machine, _request(built, sequence, prices))
            found.append(_priced(name, built, decisions, tp, 1))
        found += [_priced(way, built, made, tp, 1) for way, made in _mixtures(built)]
    serial = (
        built
        if built.outer is None
        else replace(built, serial=built.whole, parameters=built.outer.parameters, outer=None)
    )
    whole = plan_graph(serial.serial, 1, machine, _request(serial, True, Prices(), whole=True))
    for name, axis in (("FSDP (ZeRO-3)", "dp_shard"), ("DDP", "dp_replicate")):
        if sizes != {axis: world} or (axis == "dp_shard" and built.config.zero != 3):
            found.append(_priced(name, serial, whole, {axis: world}, n * outer))
    return found


def _mixtures(built: Built) -> Iterator[tuple[str, Decisions]]:
    """The cheapest plans in which all mixtures of experts are split in one way, for each way."""
    offered = {
        node: {
            way_of(one): strategy_text(one._replace(on_ep=""))
            for one in built.decisions.offered[node]
        }
        for node in built.serial.graph.nodes
        if is_mixture(node)
    }
    chosen = {way_of(built.decisions.strategies[node]) for node in offered}
    key, n = fingerprint(built.serial), built.axis.size
    for way in WAYS if offered else ():
        if chosen != {way} and all(way in texts for texts in offered.values()):
            nodes = {node.name: texts[way] for node, texts in offered.items()}
            plan = Plan(built.axis.name, n, graphs={key: GraphPlan(nodes)})
            request = replace(_request(built, True, Prices()), plan=plan)
            yield way, plan_graph(built.serial, n, built.machine, request)


def _request(built: Built, sequence: bool, prices: Prices, whole: bool = False) -> Request:
    """whole: of data parallelism alone."""
    sizes = {} if whole else built.mesh.sizes
    chunked = any(one.chunked for one in built.decisions.losses.values())
    return Request(
        parameters=built.parameters,
        sequence_parallel=sequence,
        lazy_outputs=built.config.outputs != "replicate",
        prices=prices,
        layout=Layout.of(sizes, 3, built.config.bucket_bytes),
        outer=built.outer,
        ep_exchange=built.config.ep_exchange,
        fusing=built.decisions.prices.fusing,
        chunking=chunking_of(built.config.chunk_loss, True)[1] if chunked else None,
    )


def _priced(
    name: str, built: Built, decisions: Decisions, sizes: Mapping[str, int], batches: int
) -> Alternative:
    machine = built.machine.on(sizes)
    training = Training(states=built.config.optimizer_states)
    n, bucket_bytes = decisions.prices.n, built.config.bucket_bytes
    one = profile(built.serial, decisions, built.parameters, n, machine, bucket_bytes)
    layout = Layout.of(sizes, built.config.zero if name == "this plan" else 3, bucket_bytes)
    return Alternative(
        name=name,
        mesh=dict(sizes),
        profile=one,
        memory=footprint(one, layout, training),
        timing=timing(one, layout, training, machine),
        batches=batches,
    )
