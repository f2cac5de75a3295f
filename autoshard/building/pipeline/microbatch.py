"""A serial graph in two: what one micro-batch computes of parameters, and what all of them share.

serial graph           whole batch -> outputs, with parameters
micro-batch's graph    rows of shared values -> outputs of these rows, with parameters
shared graphs          whole batch -> shared values: labels, positions, masks, counts of tokens
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.building.local_passes import warn_of_no_mean
from autoshard.building.pipeline.batch_split import (
    BatchSplit,
    split_batch,
    sum_over_tokens,
    without_broadcasts,
)
from autoshard.compiling import symbols
from autoshard.errors import CaptureError
from autoshard.passes import Localize, Watch, rank_program
from autoshard.planning import Decisions, Strategy, is_loss, operands, reached, tensor_bytes, value
from autoshard.runtime.collectives import Axis, P, S, State, shard_dim
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS, OWN_AXIS, REWRITTEN
from autoshard.runtime.operators import Bound, own_tokens, unbound
from autoshard.runtime.randomness import on_microbatch, on_shard, shared_seed

aten = torch.ops.aten
SEED = torch.ops.autoshard.random_seed.default

SharedKey = tuple[fx.Node, State]
"""A shared value, by its node in the serial graph, and whether a micro-batch takes rows of it."""


@dataclass(frozen=True)
class PlannedMicrobatch:
    """The graph of a micro-batch on all ranks of tp, with its plan on an axis of `n`."""

    graph: fx.GraphModule
    decisions: Decisions
    n: int


@dataclass(kw_only=True)
class MicrobatchGraph:
    """local: the graph of one micro-batch; its placeholders are `parameters`, then `shared`, and
    its outputs the results at `positions` of the serial graph, in `states`. loss: which of
    `positions` is differentiated in the call; None: whichever get gradients, when they arrive.
    kept: those beside a loss that may be read in training.

    choices: what dp_shard does with parameters, where that was chosen (`CHOICES`).

    Where `local` is the graph of a rank of cp or tp: split: the states in which parameters are
    stored on tp; shards: those of the outputs on each axis, the inner one first; plan: lines that
    the ranks compare. planned: what `local` was made of, where a budget asks what to keep."""

    serial: fx.GraphModule
    local: fx.GraphModule
    parameters: list[fx.Node]
    shared: list[SharedKey]
    positions: list[int]
    states: list[State]
    loss: int | None
    microbatches: int
    kept: frozenset[int] = frozenset()
    split: Mapping[fx.Node, State] = field(default_factory=dict)
    shards: Sequence[tuple[Axis, Sequence[State]]] = ()
    plan: Sequence[str] = ()
    choices: Mapping[fx.Node, str] = field(default_factory=dict)
    planned: PlannedMicrobatch | None = None

    @property
    def graded(self) -> frozenset[int]:
        """Those of `positions` that have a gradient."""
        results: Any = self.serial.graph.output_node().args[0]
        return frozenset(i for i in self.positions if results[i].meta.get(DIFF))

    @property
    def written(self) -> dict[int, int]:
        """The input to which a result of the serial graph is written (averages of a batch norm, an
        activation of an earlier graph), by the result's position: no output of the user's, and
        every rank has each after a call."""
        return dict(enumerate(self.serial.meta[MUTATED], self.serial.meta[N_OUTPUTS]))

    def returned(self, number: int) -> bool:
        """Whether a call that is differentiated returns an output of `local`, by its number."""
        return self.loss is None or self.positions[number] in {
            self.loss,
            *self.kept,
            *self.written,
        }

    def at_rest(self) -> dict[fx.Node, str]:
        """The parameters that a rank uses as it stores them, with the axis on which it does."""
        own = zip(self.parameters, self.local.graph.find_nodes(op="placeholder"))
        return {node: given.meta[OWN_AXIS] for node, given in own if OWN_AXIS in given.meta}


def with_sums(
    serial: fx.GraphModule, named: Mapping[fx.Node, str], ranks: Sequence[Axis] = ()
) -> None:
    """Rewrite what micro-batches could not add up to, in place: mean losses of `serial`.

    named: the model's own parameters. ranks: data-parallel axes over all of whose tokens losses are
    means. Raises CaptureError for a parameter that the model writes to.
    """
    places = serial.graph.find_nodes(op="placeholder")
    for node in [places[i] for i in serial.meta[MUTATED] if places[i] in named]:
        raise CaptureError(
            f"the model writes to {named[node]} in forward, and pp stores it on one of the stages",
            remedy="Write to it outside of the compiled model, make it a buffer, or leave pp out "
            "of the mesh.",
        )
    if not sum_over_tokens(serial, ranks) and ranks:
        warn_of_no_mean(serial)
    without_broadcasts(serial)


def cut_batch(
    serial: fx.GraphModule,
    parameters: Mapping[fx.Node, str],
    batch: Mapping[fx.Node, State],
    microbatches: int,
    watch: Watch,
) -> MicrobatchGraph:
    """The graph of one of `microbatches` parts of the batch, of a graph `with_sums`.

    Raises CaptureError for what cannot be computed a part at a time.
    """
    split = split_batch(serial, parameters, batch, microbatches)
    results: Sequence[Any] = serial.graph.output_node().args[0]  # type: ignore[assignment]
    own = [i for i, n in enumerate(results) if n in split.own and n not in parameters]
    core = _Core(serial, split, [n for n in parameters if n in split.own])
    gm, decisions = core.build([results[i] for i in own])
    axis = Axis("pp", microbatches, 0, "microbatch:")
    local, _ = rank_program(gm, [Localize(decisions)], axis, watch)
    states = [split.state(results[i]) for i in own]
    users = serial.meta[N_OUTPUTS]
    scalars = [(i, s) for i, s in zip(own, states) if i < users and is_loss(results[i])]
    loss = None
    if len(scalars) == 1:  # of several, the gradients tell how they are weighed
        ((loss, state),) = scalars
        _check_loss(results[loss], state, microbatches)
    return MicrobatchGraph(
        serial=serial,
        local=local,
        parameters=core.parameters,
        shared=core.shared,
        positions=own,
        states=states,
        loss=loss,
        microbatches=microbatches,
    )


def shared_graph(
    serial: fx.GraphModule,
    wanted: Sequence[fx.Node],
    axis: Axis | None = None,
    sharing: Sequence[Axis] = (),
) -> fx.GraphModule:
    """The graph of shared values, from all inputs of the serial graph.

    axis: of the stages, each of which then draws every seed, and takes that of the first, and
    counts the tokens of all data-parallel ranks; sharing: more axes of ranks that do.
    """
    graph = fx.Graph()
    seeds: list[fx.Node] = []
    counts: list[fx.Node] = []
    if axis is not None:
        seeds = serial.graph.find_nodes(op="call_function", target=SEED)
        calls = serial.graph.find_nodes(op="call_function", target=own_tokens)
        counts = [node for node in calls if node.args[3]]
    needed = reached([*wanted, *counts], lambda node: node.all_input_nodes)
    needed.update(dict.fromkeys(seeds))
    made: dict[fx.Node, fx.Node] = {}
    for node in serial.graph.nodes:
        if node.op == "placeholder" or (node in needed and node.op != "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
            if node in seeds:
                made[node].target = shared_seed
                made[node].kwargs = {**made[node].kwargs, "axis": axis, "others": tuple(sharing)}
    graph.output(tuple(made[node] for node in wanted))
    return fx.GraphModule(serial, graph)


def with_kept_outputs(microbatch: MicrobatchGraph, limit: int) -> MicrobatchGraph:
    """The micro-batch with those outputs beside its loss that a step may keep for whoever reads
    them, the smallest first: of the whole batch they have at most `limit` bytes on a rank."""
    outputs: Any = microbatch.local.graph.output_node().args[0]
    count, kept, total = microbatch.microbatches, set[int](), 0
    sizes = [count * tensor_bytes(value(node)) for node in outputs]
    for size, position in sorted(zip(sizes, microbatch.positions)):
        always = position == microbatch.loss or position in microbatch.written
        if not always and total + size <= limit:
            kept.add(position)
            total += size
    return replace(microbatch, kept=frozenset(kept))


def _check_loss(node: fx.Node, state: State, microbatches: int) -> None:
    if microbatches > 1 and state != P:
        raise CaptureError(
            f"the loss {node.name} is no sum or mean over the samples of the batch, and pp "
            "adds up the losses of micro-batches",
            where=source_line(node.meta.get("stack_trace")),
            remedy="Return a loss that is one, compute it outside of the compiled model, or "
            "set microbatches of pipeline to 1.",
        )


class _Core:
    """The part of a serial graph that depends on parameters, as a graph of its own."""

    def __init__(
        self, serial: fx.GraphModule, split: BatchSplit, parameters: list[fx.Node]
    ) -> None:
        self.serial, self.split, self.parameters = serial, split, parameters
        self.graph = fx.Graph()
        self.strategies: dict[fx.Node, Strategy] = {}
        self.made: dict[fx.Node, fx.Node] = {}
        self.taken: dict[SharedKey, fx.Node] = {}

    @property
    def shared(self) -> list[SharedKey]:
        return list(self.taken)

    def build(self, results: list[fx.Node]) -> tuple[fx.GraphModule, Decisions]:
        own = self.split.own
        live = reached(results, lambda node: [n for n in node.all_input_nodes if n in own])
        self.parameters = [node for node in self.parameters if node in live]
        last = self.graph.output(())
        for node in self.parameters:
            self.made[node] = self._input(node, self.split.strategies[node].output)
        for node in self.serial.graph.nodes:
            if node in live and node.op == "call_function":
                if symbols(node.meta.get("val")):
                    raise CaptureError(
                        f"a size of {node.name} is not known before the call, and pp cuts a graph "
                        "of fixed sizes",
                        where=source_line(node.meta.get("stack_trace")),
                        remedy="Compute it outside of the compiled model, or leave pp out of the "
                        "mesh.",
                    )
                with self.graph.inserting_before(last):
                    self._operator(node)
        last.args = (tuple(self.made[node] for node in results),)
        gm = fx.GraphModule(self.serial, self.graph)
        gm.meta[N_OUTPUTS] = len(results)
        outputs = [self.split.state(node) for node in results]  # no value changes its state
        return gm, Decisions(strategies=self.strategies, outputs=outputs, prices=cast(Any, None))

    def _input(self, node: fx.Node, state: Any, **meta: Any) -> fx.Node:
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            new = self.graph.placeholder(node.name)
        new.meta = {**node.meta, **meta, REWRITTEN: False}  # a call writes, no stage
        self.strategies[new] = Strategy((), state)
        return new

    def _operator(self, node: fx.Node) -> None:
        strategy = self.split.strategies.get(node)
        states = iter(strategy.inputs if strategy else ())
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        tensors = set(operands(node))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                want = next(states) if leaf in tensors and strategy else None
                leaves[i] = self._read(node, leaf, want)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if strategy is not None and unbound(strategy.impl or operator.mul)[0] is on_shard:
            strategy, rows = self._drawn(node, strategy)
            args = (*args, rows)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        self.made[node] = new
        if strategy is not None:
            self.strategies[new] = strategy

    def _drawn(self, node: fx.Node, strategy: Strategy) -> tuple[Strategy, fx.Node]:
        """What draws random numbers as the rows of the micro-batch do in the whole batch; they
        start at a row that is one more shared value, different in each."""
        assert strategy.impl is not None
        _, given = unbound(strategy.impl)
        step = given["extent"] // self.split.microbatches
        with self.serial.graph.inserting_before(node):
            starts = self.serial.graph.call_function(
                aten.arange.start_step, (0, given["extent"], step), {"device": _device(node)}
            )
        starts.meta["val"] = value(node.all_input_nodes[-1]).new_empty(self.split.microbatches)
        starts.meta["val"] = starts.meta["val"].to(torch.int64)
        impl = Bound.of(on_microbatch, **given)
        states = (*strategy.inputs, S(0))
        return strategy._replace(inputs=states, impl=impl), self._shared_once(starts, S(0))

    def _shared_once(self, node: fx.Node, state: State) -> fx.Node:
        self.taken[node, state] = self._input(node, state, **{DIFF: False})
        return self.taken[node, state]

    def _read(self, user: fx.Node, node: fx.Node, want: State | None) -> fx.Node:
        if node in self.split.own:
            return self.made[node]
        if want is None and node.op == "get_attr":  # a body of the operator
            if node not in self.made:
                self.made[node] = self.graph.node_copy(node)
            return self.made[node]
        if want is None:
            raise CaptureError(
                f"pp: {user.name} reads {node.name}, which is no tensor known before the call",
                where=source_line(user.meta.get("stack_trace")),
                remedy="Give the model batches of one shape.",
            )
        key = node, want if shard_dim(want) is not None else "I"
        return self.taken.get(key) or self._shared_once(*key)


def _device(node: fx.Node) -> torch.device:
    val = value(node)
    first: torch.Tensor = val[0] if isinstance(val, (tuple, list)) else val
    return first.device
